"""Offsets, selection and records of AutoFP6."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.autofp6 import (
    Refined,
    dequantize,
    offset_step,
    offsets,
    refine,
    refinement_records,
    select_activations,
    select_weights,
    subgroup_errors,
    subgroup_gains,
)
from model.block_scaled import dequantize as base_values
from model.block_scaled import quantize
from model.formats import E2M1
from model.vmac import VmacConfig


@pytest.mark.parametrize(
    ("values", "q", "d", "refined"),
    [
        ([1.13, 2.24, -0.87, 1.37], [1, 2, -1, 1.5], [1, 1, 1, -1], [1.125, 2.125, -0.875, 1.375]),
        ([2.76, -0.62, 4.24, -2.02], [3, -0.5, 4, -2], [-2, -1, 1, 0], [2.75, -0.625, 4.125, -2]),
    ],
    ids=["SG1", "SG2"],
)
def test_worked_example_of_the_paper(values, q, d, refined):
    values = np.array(values, np.float32)
    codes = E2M1.encode(values)
    assert E2M1.decode(codes).tolist() == q
    chosen = offsets(values, codes)
    assert chosen.tolist() == d
    assert (E2M1.decode(codes) + chosen * offset_step(codes)).tolist() == refined


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("step", ["fixed", "exponent"])
def test_offset_is_the_nearest_for_every_code_and_a_fine_grid(bits, step):
    grid = np.arange(-8 * 64, 8 * 64 + 1).astype(np.float32) / 64
    for code in range(16):
        codes = np.full(grid.shape, code, np.uint8)
        q, unit = float(E2M1.decode(code)), float(offset_step(codes[:1], bits, step)[0])
        choices = sorted(range(-(2 ** (bits - 1)), 2 ** (bits - 1)), key=lambda d: (abs(d), -d))
        expected = [min(choices, key=lambda d, x=x: abs(float(x) - (q + d * unit))) for x in grid]
        assert offsets(grid, codes, bits, step).tolist() == expected


def test_steps_by_binade():
    codes = np.arange(8, dtype=np.uint8)
    assert offset_step(codes).tolist() == [1 / 8] * 8
    assert offset_step(codes, 4).tolist() == [1 / 32] * 8
    assert offset_step(codes, 2, "exponent").tolist() == [1 / 8] * 4 + [1 / 4] * 2 + [1 / 2] * 2


def test_refining_never_adds_error_and_leaves_the_rest_alone(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(32, 90)).astype(np.float32)
    base = quantize(x)
    mask = rng.random(24) < 0.4
    values, before = dequantize(refine(x, base, mask)), base_values(base)
    spread = np.repeat(mask, 4)[:90]
    assert (values[:, ~spread] == before[:, ~spread]).all()
    assert (np.abs(values - x) <= np.abs(before - x) * (1 + 1e-5)).all()
    assert (values != before).any()


def test_gains_are_what_refining_removes(seed):
    x = np.random.default_rng(seed).normal(size=(8, 64)).astype(np.float32)
    base = quantize(x)
    left = ((dequantize(refine(x, base)).astype(float) - x) ** 2).reshape(8, 16, 4).sum(axis=2)
    assert np.allclose(subgroup_errors(x, base) - subgroup_gains(x, base), left, rtol=1e-4, atol=1e-9)


def test_weight_selection_keeps_the_budget_and_the_slot_limit(seed):
    gains = np.random.default_rng(seed).random((16, 256))
    for density in (0, 0.1, 0.2, 0.5):
        mask = select_weights(gains, density)
        assert mask.sum() == round(density * 256)
        assert mask.reshape(-1, 4).sum(axis=1).max(initial=0) <= 2
    best = select_weights(gains, 1 / 256)
    assert best.argmax() == gains.sum(axis=0).argmax()


def test_weight_selection_prefers_the_lowest_index_on_ties(seed):
    assert np.flatnonzero(select_weights(np.ones((3, 256)), 0.25)).tolist() == [i for i in range(128) if i % 4 < 2]
    gains = np.random.default_rng(seed).integers(0, 3, 256)
    by_gain = sorted(range(256), key=lambda i: (-gains[i], i))
    allowed = [i for i in by_gain if sum(j // 4 == i // 4 for j in by_gain[: by_gain.index(i)]) < 2]
    for density in (0.1, 0.2, 0.4):
        mask = select_weights(gains[None].astype(float), density)
        assert np.flatnonzero(mask).tolist() == sorted(allowed[: round(density * 256)])


def test_activation_selection_is_disjoint_limited_and_by_error(seed):
    rng = np.random.default_rng(seed)
    errors = rng.random((50, 128))
    weight = select_weights(rng.random((4, 128)), 0.2)
    mask = select_activations(errors, weight, 0.3)
    assert not (mask & weight).any()
    assert ((mask + weight).reshape(50, 32, 4).sum(axis=2) <= 2).all()
    assert (errors[mask] > 0.3).all()
    for row, group in np.ndindex(50, 32):
        part = slice(4 * group, 4 * group + 4)
        candidates = [i for i in range(4) if not weight[part][i] and errors[row, part][i] > 0.3]
        room = 2 - weight[part].sum()
        expected = sorted(candidates, key=lambda i: (-errors[row, part][i], i))[:room]
        assert sorted(expected) == np.flatnonzero(mask[row, part]).tolist()


def test_activation_selection_prefers_the_lowest_index_on_ties():
    mask = select_activations(np.ones((1, 4)), np.zeros(4, bool), 0.5)
    assert mask.tolist() == [[True, True, False, False]]


def test_activation_whose_error_is_the_threshold_is_not_refined():
    errors = np.array([[0.5, np.nextafter(0.5, 1), np.nextafter(0.5, 0), 0.25, 0, 0, 0, 0]])
    assert np.flatnonzero(select_activations(errors, np.zeros(8, bool), 0.5)).tolist() == [1]
    assert np.flatnonzero(select_activations(errors, np.zeros(8, bool), 0.0)).tolist() == [0, 1]


def test_groups_of_scale_zero_have_no_offsets():
    x = np.ones((1, 48), np.float32)
    x[0, 16:32] = 1e-9
    x[0, 32:] = 0
    base = quantize(x)
    assert base.scales[0, 1:].tolist() == [0, 0, 0]
    refined = refine(x, base)
    assert not refined.offsets[:, 16:].any()
    assert not dequantize(refined)[:, 16:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("k", [64, 50])
def test_first_value_that_is_not_finite_is_named(value, k):
    x = np.ones((3, k), np.float32)
    x[:, 48:] = 0
    base = quantize(x)
    x[1, 49] = x[2, 5] = value
    with pytest.raises(ValueError, match=rf"^x must be finite, not {value} at index \(1, 49\)$"):
        refine(x, base)
    with pytest.raises(ValueError, match=rf"^x must be finite, not {value} at index \(49,\)$"):
        refine(x[1], quantize(np.ones(k, np.float32)), np.zeros(16, bool))


def slot_words(words, slots):
    """Decode slot words into {subgroup: (is_activation, offsets)} and the slot of each."""
    found, places = {}, {}
    for slot, word in enumerate(int(word) for word in words):
        if word >> 8 & 1:
            d = [((word >> 2 * i & 3) ^ 2) - 2 for i in range(4)]
            found[word >> 9 & 3] = (word >> 11 & 1, d)
            places[word >> 9 & 3] = slot
    return found, places


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 15), st.integers(0, 15), st.integers(1, 4), st.randoms(use_true_random=False))
def test_records_keep_priority_and_slot_order(weight_bits, activation_bits, slots, random):
    config = VmacConfig(slots_per_block=slots)
    weight = np.array([[weight_bits >> g & 1 for g in range(4)] + [0] * 4], bool)
    activation = np.array([[activation_bits >> g & 1 for g in range(4)] + [0] * 4], bool)
    dw = np.array([[random.randint(-2, 1) for _ in range(32)]], np.int8)
    da = np.array([[random.randint(-2, 1) for _ in range(32)]], np.int8)
    records = refinement_records(config, weight, dw, activation, da)
    wanted = [(0, g) for g in range(4) if weight_bits >> g & 1]
    wanted += [(1, g) for g in range(4) if activation_bits >> g & 1 and not weight_bits >> g & 1]
    kept = sorted(wanted[:slots], key=lambda pair: pair[1])
    found, places = slot_words(records.words[0, :slots], slots)
    assert {g: found[g] for g in found} == {
        g: (side, (da if side else dw)[0, 4 * g : 4 * g + 4].tolist()) for side, g in kept
    }
    assert all(places[g] <= g <= 4 - slots + places[g] for g in places)
    assert sorted(places, key=places.get) == sorted(places)
    assert bool(records.overlap[0]) == bool(weight_bits & activation_bits)
    assert bool(records.dropped[0]) == (len(wanted) > slots)
    assert not records.words[0, slots:].any()


def test_single_record_goes_into_slot_0_or_into_slot_1_for_subgroup_3():
    zero, d = np.zeros((1, 8), bool), np.ones((1, 32), np.int8)
    for subgroup in range(4):
        mask = zero.copy()
        mask[0, subgroup] = True
        words = refinement_records(VmacConfig(), mask, d, zero, d).words[0]
        assert np.flatnonzero(words).tolist() == [1 if subgroup == 3 else 0]


def test_case_offset_minus_one_is_three_in_two_bits():
    zero = np.zeros((1, 8), bool)
    mask = zero.copy()
    mask[0, 0] = True
    words = refinement_records(
        VmacConfig(), mask, np.full((1, 32), -1, np.int8), zero, np.zeros((1, 32), np.int8)
    ).words
    assert int(words[0, 0]) & 0xFF == 0b11111111


def test_bad_input_is_named():
    x = np.ones((2, 32), np.float32)
    base = quantize(x)
    with pytest.raises(ValueError, match=r"^bits must be from 2 to 6, not 1$"):
        offsets(x, base.codes, 1)
    with pytest.raises(ValueError, match=r"^step must be one of fixed, exponent, not 'half'$"):
        offsets(x, base.codes, 2, "half")
    with pytest.raises(ValueError, match=r"^x must have shape \(2, 32\), not \(2, 31\)$"):
        refine(x[:, 1:], base)
    with pytest.raises(ValueError, match=r"^density must be from 0 to 0\.5 with 2 slots, not 0\.6$"):
        select_weights(np.ones((1, 8)), 0.6)
    for slots in (-3, 0, 5, 9):
        with pytest.raises(ValueError, match=rf"^slots must be from 1 to 4, not {slots}$"):
            select_weights(np.ones((1, 8)), 0, slots)
        with pytest.raises(ValueError, match=rf"^slots must be from 1 to 4, not {slots}$"):
            select_activations(np.ones((1, 8)), np.zeros(8, bool), 0.5, slots)
    with pytest.raises(ValueError, match=r"^step must be one of fixed, exponent, not 'foo'$"):
        Refined(base, np.zeros(8, bool), np.zeros((2, 32), np.int8), step="foo")
    with pytest.raises(ValueError, match=r"^bits must be from 2 to 6, not 0$"):
        Refined(base, np.zeros(8, bool), np.zeros((2, 32), np.int8), bits=0)
    with pytest.raises(ValueError, match=r"^offsets must be 0 outside the mask$"):
        Refined(base, np.zeros(8, bool), np.ones((2, 32), np.int8))
    with pytest.raises(ValueError, match=r"^config must have refinement, not 'none'$"):
        refinement_records(VmacConfig(refinement="none"), *[np.zeros((1, 8), bool), np.zeros((1, 32), np.int8)] * 2)
