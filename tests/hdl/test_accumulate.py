# amaranth: UnusedElaboratable=no
"""The accumulator: rounding, saturation and carries worked by hand, and random sums against the model."""

import numpy as np
import pytest

from hdl.accumulate import DualAccumulator, Saturate
from model.vmac import accumulate_exact, accumulate_windowed
from tests.hdl.simulate import evaluate

WIDTH, WINDOW = 50, 24
UNIT, HALF_UNIT = 1 << WINDOW, 1 << WINDOW - 1
MAX, MIN = 0x7FFFFFFF, 0x80000000
MASK = (1 << WIDTH) - 1


def accumulate(rows, **options):
    """Add rows of (psum, even, odd); returns (total, saturated) of each."""
    rows = [{"psum": psum, "even": even & MASK, "odd": odd & MASK, **options} for psum, even, odd in rows]
    component = DualAccumulator(WIDTH, WINDOW, switchable="exact" in options)
    return evaluate(component, rows, ["total", "saturated"])


ROUNDED = [
    (0, 0),
    (HALF_UNIT - 1, 0),
    (HALF_UNIT, 1),
    (UNIT + HALF_UNIT - 1, 1),
    (UNIT + HALF_UNIT, 2),
    (-1, 0),
    (-HALF_UNIT, 0),
    (-HALF_UNIT - 1, -1),
    (-UNIT, -1),
    (-UNIT - HALF_UNIT, -1),
    (-UNIT - HALF_UNIT - 1, -2),
]


@pytest.mark.parametrize("options", [{"exact": 0}, {}], ids=["switchable", "windowed"])
def test_halves_round_up_and_do_not_touch_each_other(options):
    rows, expected = [], []
    for even, even_units in ROUNDED:
        for odd, odd_units in ROUNDED:
            rows.append((7 << 32 | 9, even, odd))
            expected.append((7 + odd_units << 32 | 9 + even_units, 0))
    assert accumulate(rows, **options) == expected
    assert len(expected) == 121


@pytest.mark.parametrize("options", [{"exact": 0}, {}], ids=["switchable", "windowed"])
def test_each_half_saturates_by_itself(options):
    cases = {
        (MAX, UNIT, 0): (MAX, 1),
        (MAX, HALF_UNIT, 0): (MAX, 1),
        (MAX, HALF_UNIT - 1, 0): (MAX, 0),
        (MAX - 1, UNIT, 0): (MAX, 0),
        (MIN, -UNIT, 0): (MIN, 1),
        (MIN, -HALF_UNIT, 0): (MIN, 0),
        (MIN + 1, -UNIT, 0): (MIN, 0),
        (MAX << 32, 0, UNIT): (MAX << 32, 1),
        (MIN << 32, 0, -UNIT): (MIN << 32, 1),
        (MIN << 32 | MAX, UNIT, -UNIT): (MIN << 32 | MAX, 1),
        (MAX << 32 | MIN, UNIT, -UNIT): (MAX - 1 << 32 | MIN + 1, 0),
        # A half that wraps from -1 to 0 hands no carry on.
        (0xFFFFFFFF, UNIT, 0): (0, 0),
        (0, -UNIT, 0): (0xFFFFFFFF, 0),
    }
    assert accumulate(list(cases), **options) == list(cases.values())


def test_an_exact_sum_carries_through_all_64_bits_and_never_saturates():
    cases = {
        (0xFFFFFFFF, 1, 0): (1 << 32, 0),
        (0xFFFFFFFF, 1, 1): ((1 << 32) + 1, 0),
        (1 << 32, -1, 0): (0xFFFFFFFF, 0),
        (0, -1, -1): (2**64 - 2, 0),
        (MAX, HALF_UNIT, 0): (MAX + HALF_UNIT, 0),
        (2**63 - 1, 1, 0): (2**63, 0),
        (2**64 - 1, 1, 1): (1, 0),
        (0, 2**49 - 1, -(2**49)): (2**64 - 1, 0),
    }
    assert accumulate(list(cases), exact=1) == list(cases.values())


@pytest.mark.parametrize("exact", [0, 1])
def test_random_sums_are_those_of_the_model(exact, seed):
    rng = np.random.default_rng(seed)
    psum = rng.integers(0, 2**64, 200, dtype=np.uint64)
    even, odd = rng.integers(-(2**49), 2**49, (2, 200)) >> rng.integers(0, 30, (2, 200))
    # Every other sum starts near a limit.
    psum[::2] = psum[::2] & np.uint64(0x800000FF_800000FF) ^ np.uint64(0x7FFFFF00_7FFFFF00)
    found = accumulate([tuple(map(int, row)) for row in zip(psum, even, odd, strict=True)], exact=exact)
    if exact:
        total, saturated = accumulate_exact(psum, np.stack([even, odd], axis=1)), np.zeros(200, dtype=bool)
    else:
        total, saturated = accumulate_windowed(psum, even, odd, WINDOW)
        assert 10 < saturated.sum() < 190
    assert found == [(int(t), int(s)) for t, s in zip(total, saturated, strict=True)]


def test_the_clamp_acts_only_when_enabled_and_on_equal_signs():
    names = ("enable", "addend_negative", "psum_negative", "total")
    cases = {
        (1, 0, 0, MIN): (MAX, 1),
        (1, 1, 1, MAX): (MIN, 1),
        (0, 0, 0, MIN): (MIN, 0),
        (0, 1, 1, MAX): (MAX, 0),
        (1, 0, 1, MIN): (MIN, 0),
        (1, 1, 0, MAX): (MAX, 0),
        (1, 0, 0, MAX): (MAX, 0),
        (1, 1, 1, MIN): (MIN, 0),
    }
    rows = [dict(zip(names, case, strict=True)) for case in cases]
    assert evaluate(Saturate(), rows, ["clamped", "saturated"]) == list(cases.values())


@pytest.mark.parametrize(("width", "window", "least"), [(50, 17, 18), (33, 0, 1), (20, 0, 1)])
def test_a_window_that_leaves_more_than_32_bits_is_refused(width, window, least):
    message = f"^window_shift must be at least {least} for {width}-bit values, not {window}$"
    with pytest.raises(ValueError, match=message):
        DualAccumulator(width, window)
