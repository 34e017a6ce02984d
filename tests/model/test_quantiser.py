"""Quantiser: rounding and choice of refinements against exact fractions."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from model.formats import E2M1, E4M3
from model.quantiser import ERROR_BITS, INTEGER, LARGEST, MIDPOINTS, POINT, RESIDUE, quantise, scale_bytes

SCALES = [Fraction(float(v)) for v in E4M3.magnitudes]
VALUES = [Fraction(float(v)) for v in E2M1.magnitudes]


def patterns(values):
    return np.asarray(values, np.float32).view(np.uint32)


def number(bits):
    return Fraction(float(np.array(bits, np.uint32).view(np.float32)))


def nearest_code(x, table):
    """Code of the entry nearest to x, the even one of two."""
    best = min(abs(x - entry) for entry in table)
    close = [code for code, entry in enumerate(table) if abs(x - entry) == best]
    return close[0] if len(close) == 1 else next(code for code in close if code % 2 == 0)


def group_by_fractions(bits, largest, refine, threshold, taken, slots, step):
    """One group, in exact arithmetic but for the error, which is cut as the page says."""
    x = [number(min(b & 0x7FFFFFFF, LARGEST)) * (-1 if b >> 31 else 1) for b in bits]
    scale = nearest_code(largest / 6, SCALES)
    if scale == 0:
        return [0] * 16, 0, 0, [0] * 16
    b = SCALES[scale]
    codes = [nearest_code(abs(v) / b, VALUES) | (bits[i] >> 31) << 3 for i, v in enumerate(x)]
    if not refine:
        return codes, scale, 0, [0] * 16
    unit = Fraction(2) ** (max(scale >> 3, 1) - 10)
    most = (1 << INTEGER + POINT) - 1
    errors = []
    for g in range(4):
        error = 0
        for i in range(4 * g, 4 * g + 4):
            cut = min(abs(x[i]) / unit * 2**POINT // 1, most)
            rest = abs(cut - VALUES[codes[i] & 7] * b / unit * 2**POINT)
            error += min(rest, (1 << RESIDUE + POINT) - 1) ** 2
        errors.append(error)
    limit = number(threshold) if threshold < 0x7F800000 else Fraction(2) ** 200
    passing = [g for g in range(4) if not taken >> g & 1 and errors[g] * (unit / 2**POINT) ** 2 > limit]
    passing.sort(key=lambda g: (-errors[g], g))
    kept = passing[: max(slots - bin(taken).count("1"), 0)]
    offsets = [0] * 16
    for i in range(16):
        if i // 4 in kept:
            magnitude = codes[i] & 7
            width = Fraction(1, 8) * (2 ** max((magnitude >> 1) - 1, 0) if step == "exponent" else 1)
            q = VALUES[magnitude] * (-1 if codes[i] >> 3 else 1)
            offsets[i] = min(
                (0, 1, -1, -2), key=lambda d, q=q, i=i, width=width: (abs(x[i] / b - q - d * width), abs(d), -d)
            )
    return codes, scale, sum(1 << g for g in kept), offsets


def groups_of_all_kinds(rng, count):
    """Patterns (count, 16): ordinary, of all sizes, midpoints and their neighbours, few bits, zeros, the largest, not finite."""
    parts = []
    ordinary = rng.standard_normal((count, 16)) * 2.0 ** rng.integers(-8, 9, (count, 1))
    parts.append(patterns(ordinary))
    parts.append(rng.integers(0, 2**32, (count, 16), np.uint32))
    spread = rng.standard_normal((count, 16)) * 2.0 ** rng.integers(-18, 12, (count, 16))
    parts.append(patterns(spread))
    # A scale, multiples of sixteenths of it, and their neighbours: ties of codes and of offsets.
    scale = E4M3.magnitudes[rng.integers(0, 127, (count, 1))].astype(np.float64)
    exact = patterns(scale * rng.integers(-112, 113, (count, 16)) / 16)
    exact[:, rng.integers(16)] = patterns(6 * scale)[:, 0]
    parts.append(exact)
    beside = exact + rng.integers(-1, 2, exact.shape).astype(np.uint32)
    parts.append(np.where(exact << np.uint32(1) == 0, exact, beside).astype(np.uint32))
    # Ties of the scale: six times the middle of two scales, and beside.
    middles = (E4M3.magnitudes[1:].astype(np.float64) + E4M3.magnitudes[:-1]) * 3
    ties = patterns(middles[rng.integers(0, len(middles), (count, 1))]) + rng.integers(-1, 2, (count, 1)).astype(
        np.uint32
    )
    small = patterns(ordinary / 2**12) | rng.integers(0, 2, (count, 16), np.uint32) << np.uint32(31)
    small[:, 3] = ties[:, 0]
    parts.append(small)
    rare = patterns(
        rng.choice([0.0, -0.0, 2.0**-149, -(2.0**-126), 448 * 6, 464 * 6, -480 * 6, 3e38, 0.00586, 0.0058], (count, 16))
    )
    parts.append(rare)
    strange = parts[0].copy()
    strange[:, ::5] = rng.choice(
        np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32), strange[:, ::5].shape
    )
    parts.append(strange)
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("slots", "step", "shared"),
    [(2, "fixed", False), (1, "exponent", True), (4, "fixed", True), (3, "exponent", False)],
)
def test_groups_equal_exact_fractions(slots, step, shared, seed):
    rng = np.random.default_rng(seed)
    bits = groups_of_all_kinds(rng, 10)
    taken = rng.choice(np.array([0, 0, 0, 1, 2, 8, 5, 12, 7, 15], np.uint8), len(bits))
    seen = set()
    for threshold in (0, *patterns([1e-4, 0.01, 40.0]).tolist(), 0x7F800000):
        groups = quantise(
            bits, shared=shared, refine=True, threshold=threshold, weight_masks=taken, slots=slots, step=step
        )
        largest = [max(number(min(b & 0x7FFFFFFF, LARGEST)) for b in row) for row in bits.tolist()]
        for n, row in enumerate(bits.tolist()):
            top = max(largest[n & ~1], largest[n | 1]) if shared else largest[n]
            expected = group_by_fractions(row, top, True, threshold, int(taken[n]), slots, step)
            got = groups.codes[n].tolist(), groups.scales[n], groups.masks[n], groups.offsets[n].tolist()
            assert got == expected, (n, row)
        assert (groups.masks & taken == 0).all()
        together = np.bitwise_count(groups.masks | taken)
        assert (together <= np.maximum(slots, np.bitwise_count(taken))).all()
        assert groups.errors.max() < 1 << ERROR_BITS
        seen |= set(groups.offsets.reshape(-1).tolist())
    assert seen == {-2, -1, 0, 1}
    plain = quantise(bits, shared=shared)
    assert not plain.masks.any()
    assert not plain.offsets.any()
    assert (plain.codes == groups.codes).all()


def test_middles_of_codes():
    assert MIDPOINTS == (1, 3, 5, 7, 10, 14, 20)


def test_scale_is_a_sixth_rounded_once_at_beside_and_between_all_scales():
    values = [v * 6 for v in SCALES] + [(a + b) * 3 for a, b in pairwise(SCALES)]
    bits = patterns([float(v) for v in values])
    assert [number(b) for b in bits] == values
    bits = np.unique(
        np.concatenate([bits, bits + 1, np.maximum(bits, 1) - 1, np.arange(0, 0x7F800000, 5_000_011)])
    ).astype(np.uint32)
    codes, clipped = scale_bytes(bits)
    assert codes.tolist() == [nearest_code(number(b) / 6, SCALES) for b in bits]
    assert (clipped == [number(b) / 6 > 464 for b in bits]).all()


@pytest.mark.parametrize(
    ("sixth", "byte", "clipped"),
    [(464, 0x7E, False), (464.1, 0x7E, True), (463.9, 0x7E, False), (480, 0x7E, True), (448, 0x7E, False)],
)
def test_case_scale_is_clamped_before_it_becomes_nan(sixth, byte, clipped):
    x = np.zeros((1, 16))
    x[0, 5] = 6 * sixth
    groups = quantise(patterns(x))
    assert (groups.scales[0], groups.clipped[0], groups.codes[0, 5]) == (byte, clipped, 7)


def test_case_ties_of_elements_go_to_the_even_code():
    x = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    groups = quantise(patterns([x + [-v for v in x]]))
    q = [6, 0, 1, 1, 2, 2, 4, 4]
    assert E2M1.decode(groups.codes).tolist() == [q + [-v for v in q]]


def test_case_zero_groups_and_scales_that_round_to_zero_leave_nothing():
    x = np.array([[0.0] * 8 + [-0.0] * 8, [3 * 2.0**-9] * 16, [-3.01 * 2.0**-9] * 16])
    groups = quantise(patterns(x), refine=True)
    assert groups.scales.tolist() == [0, 0, 1]
    assert groups.masks.tolist() == [0, 0, 0b0011]
    assert groups.codes.tolist() == [[0] * 16, [0] * 16, [13] * 16]


def test_sign_of_what_rounds_to_zero_is_kept():
    assert quantise(patterns([[6.0, -0.0, -0.1, 0.1] + [0.0] * 12])).codes[0, :4].tolist() == [7, 8, 8, 0]


def test_worked_example_of_the_paper():
    x = [0] * 4 + [1.13, 2.24, -0.87, 1.37, 2.76, -0.62, 4.24, -2.02] + [6, 0, 0, 0]
    groups = quantise(patterns([[v * 0.25 for v in x]]), refine=True)
    assert groups.masks[0] == 0b0110
    assert groups.offsets[0, 4:12].tolist() == [1, 1, 1, -1, -2, -1, 1, 0]


def test_bad_input_is_named():
    x = np.zeros((3, 16), np.uint32)
    with pytest.raises(ValueError, match=r"^numbers must have shape \(N, 16\), not \(3, 8\)$"):
        quantise(x[:, :8])
    with pytest.raises(ValueError, match=r"^numbers must be an even number of groups to share scales, not 3$"):
        quantise(x, shared=True)
    with pytest.raises(ValueError, match=r"^slots must be from 1 to 4, not 5$"):
        quantise(x, slots=5)
    with pytest.raises(ValueError, match=r"^point must be from 4 to 12, not 13$"):
        quantise(x, point=13)
    with pytest.raises(ValueError, match=r"^weight_masks must have shape \(3,\), not \(2,\)$"):
        quantise(x, weight_masks=np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match=r"^step must be one of fixed, exponent, not 'some'$"):
        quantise(x, step="some")
