"""Weight preparation against brute force: allocation, least squares, offsets by trying all of them; Hessians that are out of order."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import autofp6, block_scaled
from model.calibration import RULES, Options, budget, calibrate, factor, gains, gram, loss
from model.formats import E2M1

E4M3_VALUES = np.array(
    [m / 512 for m in range(8)] + [(8 + m) / 8 * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)
E4M3_VALUES = E4M3_VALUES[E4M3_VALUES <= 448]
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def problem(rows, length, tokens, seed=0):
    """Weights, and inputs whose columns depend on one another."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, length)) @ (np.eye(length) + 0.5 * rng.normal(size=(length, length)))
    return rng.normal(size=(rows, length)).astype(np.float32), x.astype(np.float32)


def nearest(values, x):
    return values[np.abs(values - x).argmin()]


def rounded_group(w, t):
    """NVFP4 values, and refined ones, of (N, 16) by trying everything; ties do not come up."""
    plain, refined = np.zeros_like(w), np.zeros_like(w)
    for n, row in enumerate(w):
        scale = t * nearest(E4M3_VALUES, min(np.abs(row).max() / (6 * t), 448))
        for i, x in enumerate(row / scale):
            q = np.sign(x) * nearest(E2M1_VALUES, min(abs(x), 6))
            plain[n, i], refined[n, i] = scale * q, scale * (q + nearest(np.array([-2, -1, 0, 1]) / 8, x - q))
    return plain, refined


def error(w, values, importance):
    return float((importance * ((w - values) ** 2).sum(axis=0)).sum())


def with_mask(plain, refined, mask):
    return np.where(np.repeat(mask, 4), refined, plain)


def masks_of(count):
    return [np.isin(range(4), chosen) for chosen in itertools.combinations(range(4), count)]


def best_mask(w, plain, refined, importance, count):
    return min(masks_of(count), key=lambda mask: error(w, with_mask(plain, refined, mask), importance))


def allocation(w, t, importance, total, slots):
    """Lines 5 to 12 of algorithm 1 as they stand."""
    starts = range(0, w.shape[1], 16)
    table = []
    for start in starts:
        part, h = w[:, start : start + 16], importance[start : start + 16]
        plain, refined = rounded_group(part, t)
        table.append(
            [
                min(error(part, with_mask(plain, refined, mask), h) for mask in masks_of(count))
                for count in range(slots + 1)
            ]
        )
    levels = [0] * len(table)
    for _ in range(total):
        open_groups = [j for j in range(len(table)) if levels[j] < slots]
        best = max(open_groups, key=lambda j: table[j][levels[j]] - table[j][levels[j] + 1])
        levels[best] += 1
    return levels


def algorithm_1(w, x, density, slots, damping, compensate=True):
    """Algorithm 1 with least squares in place of Cholesky factors: what is left is chosen to make the output's error smallest."""
    w, x = w.astype(float), x.astype(float)
    length = w.shape[1]
    importance = (x**2).sum(axis=0)
    t = float(np.abs(w).max()) / (6 * 448)
    levels = allocation(w, t, importance, round(density * length / 4), slots)
    ridge = np.sqrt(damping * importance.mean()) * np.eye(length)
    inputs = np.concatenate([x, ridge])
    done, masks = np.zeros_like(w), []
    for group, start in enumerate(range(0, length, 16)):
        rest = w[:, start:]
        if start and compensate:
            target = inputs @ w.T - inputs[:, :start] @ done[:, :start].T
            rest = np.linalg.lstsq(inputs[:, start:], target, rcond=None)[0].T
        part, h = rest[:, :16], importance[start : start + 16]
        plain, refined = rounded_group(part, t)
        masks.append(best_mask(part, plain, refined, h, levels[group]))
        done[:, start : start + 16] = with_mask(plain, refined, masks[-1])
    return done, np.concatenate(masks)


@pytest.mark.parametrize(("length", "slots", "density"), [(64, 2, 0.2), (144, 2, 0.45), (96, 4, 0.7), (32, 1, 0.25)])
def test_algorithm_1_is_least_squares_group_by_group(length, slots, density, seed):
    w, x = problem(4, length, 3 * length, seed)
    made = calibrate(w, Options(density, slots=slots), gram(x)).weights
    values, mask = algorithm_1(w, x, density, slots, 0.1)
    np.testing.assert_array_equal(made.mask[: len(mask)], mask)
    np.testing.assert_allclose(autofp6.dequantize(made), values, rtol=1e-5)
    # Without compensation the comparison fails, and so does the product.
    alone, _ = algorithm_1(w, x, density, slots, 0.1, compensate=False)
    assert not np.allclose(alone, values, rtol=1e-5)
    assert loss(autofp6.dequantize(made) - w, gram(x)) < 0.9 * loss((alone - w).astype(np.float32), gram(x))


@pytest.mark.parametrize("rule", ["nmse", "hessian"])
def test_rounding_to_nearest_refines_what_the_greedy_allocation_gives(rule, seed):
    w, x = problem(5, 96, 200, seed)
    importance = np.ones(96) if rule == "nmse" else (x.astype(float) ** 2).sum(axis=0)
    levels = allocation(w.astype(float), float(np.abs(w).max()) / (6 * 448), importance, 8, 2)
    made = calibrate(w, Options(1 / 3, rule), gram(x)).weights
    assert made.mask.reshape(-1, 4).sum(axis=1).tolist() == levels
    wanted = autofp6.refine(w, block_scaled.quantize(w), made.mask)
    np.testing.assert_array_equal(autofp6.dequantize(made), autofp6.dequantize(wanted))


def test_selection_by_nmse_is_that_of_whole_matrices(seed):
    w, _ = problem(700, 512, 1, seed)
    base = block_scaled.quantize(w)
    wanted = autofp6.select_weights(autofp6.subgroup_gains(w, base), 0.2)
    np.testing.assert_array_equal(calibrate(w, Options(rule="nmse")).weights.mask, wanted)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 100), st.floats(0, 1), st.integers(1, 4), st.sampled_from(RULES),
    st.sampled_from(["fixed", "exponent"]), st.sampled_from([2, 4]), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_budget_is_exact_and_offsets_help(rows, length, share, slots, rule, step, bits, seed):
    w, x = problem(rows, length, 20, seed)
    options = Options(share * slots / 4, rule, slots=slots, step=step, bits=bits)
    made = calibrate(w, options, gram(x)).weights
    assert made.mask.sum() == budget(options.density, length) == round(options.density * length / 4)
    assert made.mask.reshape(-1, 4).sum(axis=1).max(initial=0) <= slots
    assert made.base.length == length
    assert made.base.tensor_scale == np.float32(np.abs(w).max() / np.float32(6 * 448))
    padding = slice(length, None)
    assert not E2M1.decode(made.base.codes[:, padding]).any()
    assert not made.offsets[:, padding].any()
    assert np.isfinite(autofp6.dequantize(made)).all()
    if rule != "gptq":
        plain = np.abs(w - block_scaled.dequantize(made.base))
        assert (np.abs(w - autofp6.dequantize(made)) <= plain).all()


# ---- Hessians ----


def hessians():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(200, 48))
    dead = x.copy()
    dead[:, 5:9] = 0
    scaled = x * np.logspace(-120, 120, 48)
    twins = np.concatenate([x[:, :24], x[:, :24]], axis=1)
    return {
        "zero": 0 * x,
        "dead": dead,
        "badly scaled": scaled,
        "twins": twins,
        "few tokens": x[:3],
        "tiny": 1e-150 * x,
    }


@pytest.mark.parametrize("damping", [0, 0.01])
@pytest.mark.parametrize("name", list(hessians()))
def test_hessian_out_of_order_is_damped_and_reported(name, damping):
    x = hessians()[name]
    hessian = x.T @ x
    made = calibrate(
        np.random.default_rng(1).normal(size=(6, 48)).astype(np.float32), Options(damping=damping), hessian
    )
    assert np.isfinite(autofp6.dequantize(made.weights)).all()
    assert made.weights.mask.sum() == round(0.2 * 12)
    assert made.condition.dead == (np.diagonal(hessian) == 0).sum()
    # A factor exists without damping only for the tiny one, which is sound.
    assert made.condition.raised == (damping == 0 and name != "tiny")
    assert (made.condition.damping > damping) == made.condition.raised


def test_factor_is_that_of_the_damped_inverse(seed):
    _, x = problem(1, 40, 100, seed)
    hessian = gram(x)
    upper, condition = factor(hessian, 0.05)
    damped = hessian + 0.05 * np.diagonal(hessian).mean() * np.eye(40)
    product = upper.T @ upper @ damped
    np.testing.assert_allclose(product / product[0, 0], np.eye(40), atol=1e-9)
    assert not np.tril(upper, -1).any()
    assert (upper.diagonal() > 0).all()
    assert condition == type(condition)(0, 0.05, False)


def test_gram_and_loss_are_those_of_the_outputs(seed):
    w, x = problem(3, 20, 50, seed)
    np.testing.assert_allclose(loss(w, gram(x)), ((x.astype(float) @ w.T.astype(float)) ** 2).sum(), rtol=1e-5)


def test_subgroups_beyond_the_length_gain_nothing():
    w, _ = problem(3, 21, 1)
    assert np.isfinite(gains(w, Options())).tolist() == [True] * 6 + [False] * 2


def bad(array, index, value):
    array = array.copy()
    array[index] = value
    return array


W, H = np.ones((2, 8), np.float32), np.eye(8)


@pytest.mark.parametrize("length", [1, 127, 128, 300])
def test_the_factor_takes_the_place_of_the_hessian(length, seed):
    rng = np.random.default_rng(seed)
    # Fewer tokens than inputs: no inverse without damping, which must be raised.
    x = rng.normal(size=(-(-length // 2), length)).astype(np.float32)
    hessian = gram(x)
    assert (hessian == hessian.T).all()
    np.testing.assert_allclose(hessian, x.T.astype(float) @ x, rtol=1e-4, atol=1e-3)
    for damping in (0.0, 0.1):
        given, place = hessian.copy(), hessian.copy()
        upper, condition = factor(given, damping)
        assert (given == hessian).all()
        again, _ = factor(place, damping, overwrite=True)
        assert np.shares_memory(place, again)
        assert (again == upper).all()
        assert condition.raised == (damping == 0 and length > 1)
        damped = hessian / hessian.diagonal().max()
        damped += condition.damping * damped.diagonal().mean() * np.eye(length)
        assert not np.tril(upper, -1).any()
        np.testing.assert_allclose(upper @ damped @ upper.T, np.eye(length), atol=1e-7)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("w must be finite, not nan at index (1, 3)", lambda: calibrate(bad(W, (1, 3), np.nan), hessian=H)),
        ("w must be a matrix with at least one element, not of shape (0, 8)", lambda: calibrate(W[:0], hessian=H)),
        ("hessian must have shape (8, 8) for rule gptq, not (7, 7)", lambda: calibrate(W, hessian=H[1:, 1:])),
        ("hessian must have shape (8, 8) for rule hessian, not None", lambda: calibrate(W, Options(rule="hessian"))),
        ("hessian must be finite, not inf at index (0, 2)", lambda: calibrate(W, hessian=bad(H, (0, 2), np.inf))),
        (
            "hessian must be finite, not nan at index (1, 1)",
            lambda: calibrate(W, Options(rule="hessian"), bad(H, (1, 1), np.nan)),
        ),
        ("hessian must have no negative diagonal, not -1.0 at 3", lambda: factor(bad(H, (3, 3), -1))),
        ("hessian must be square, not of shape (7, 8)", lambda: factor(H[1:])),
        ("x must be finite, not -inf at index (1, 0)", lambda: gram(bad(W, (1, 0), -np.inf))),
        ("density must be from 0 to 0.5 with 2 slots, not 0.6", lambda: Options(0.6)),
        ("slots must be from 1 to 4, not 5", lambda: Options(slots=5)),
        ("damping must be from 0 to 1e+06, not -1", lambda: Options(damping=-1)),
        ("damping must be from 0 to 1e+06, not nan", lambda: Options(damping=np.nan)),
        ("bits must be from 2 to 6, not 7", lambda: Options(bits=7)),
        ("rule must be one of nmse, hessian, gptq, not 'best'", lambda: Options(rule="best")),
    ],
)
def test_bad_input_is_named(message, call):
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    assert str(caught.value) == message
