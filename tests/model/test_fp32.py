"""Binary32 conversion and product against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.fp32 import QUIET_NAN, add, from_int, multiply, scaled

INTEGERS = st.integers(-(2**63), 2**63 - 1)
BITS = st.integers(0, 2**32 - 1)
INFINITY = 0x7F800000


def value(bits):
    """Exact value of a finite pattern."""
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    significand = fraction | bool(exponent) << 23
    return (-1) ** (bits >> 31) * Fraction(significand) * Fraction(2) ** (max(exponent, 1) - 150)


def nearest(exact, negative):
    """Pattern of the number nearest to a fraction, the even one of two; infinity from half a step beyond the largest on."""
    exact = abs(exact)
    low, high = 0, INFINITY
    # Patterns of positive numbers are in the order of their values; infinity takes the place of 2**128.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= exact else (low, middle)
    below, above = exact - value(low), value(high) - exact
    chosen = high if above < below or (above == below and high % 2 == 0) else low
    return chosen | negative << 31


def product(a, b):
    """Pattern of a product, by the rules."""
    sign = (a ^ b) >> 31
    magnitudes = [x & 0x7FFFFFFF for x in (a, b)]
    if max(magnitudes) > INFINITY or (INFINITY in magnitudes and 0 in magnitudes):
        return QUIET_NAN
    if INFINITY in magnitudes:
        return INFINITY | sign << 31
    return nearest(value(a) * value(b), sign)


@settings(max_examples=400, deadline=None)
@given(INTEGERS)
def test_integers_are_rounded_once_to_nearest_even(number):
    assert from_int([number])[0] == nearest(Fraction(number), number < 0)


def test_integers_at_and_beside_ties_and_powers_of_two():
    """Also those that float64 would round to a tie first."""
    numbers = {-(2**63), 2**63 - 1, 0}
    for power in range(63):
        for delta in (-1, 0, 1):
            numbers |= {2**power + delta}
        if power >= 24:
            step = 2 ** (power - 23)
            for odd in (1, 3):
                numbers |= {2**power + odd * step // 2 + delta for delta in (-1, 0, 1)}
    numbers |= {-number for number in numbers}
    numbers = sorted(number for number in numbers if -(2**63) <= number < 2**63)
    expected = [nearest(Fraction(number), number < 0) for number in numbers]
    assert from_int(numbers).tolist() == expected
    assert len(numbers) > 800
    twice = np.array(numbers).astype(np.float64).astype(np.float32).view(np.uint32)
    assert (twice != expected).any(), "no number here tells one rounding from two"


@pytest.mark.parametrize("values", [[0.5], [True], ["1"]])
def test_only_integers_are_converted(values):
    with pytest.raises(TypeError, match=rf"^values must be integers, not {np.asarray(values).dtype}$"):
        from_int(values)


@settings(max_examples=600, deadline=None)
@given(BITS, BITS)
def test_products_are_rounded_once_to_nearest_even(a, b):
    assert multiply(a, b) == product(a, b)


@settings(max_examples=600, deadline=None)
@given(st.integers(1, 126), st.integers(0, 2**23 - 1), st.integers(0, 2**23 - 1), st.integers(-30, 3))
def test_products_near_and_below_the_smallest_normal(exponent, f, g, distance):
    a = exponent << 23 | f
    b = max(127 - exponent + distance, 0) << 23 | g
    assert multiply(a, b) == product(a, b)


SPECIAL = {
    (0, 0x80000000): 0x80000000,
    (0x80000000, 0x80000000): 0,
    (INFINITY, 0x80000001): 0xFF800000,
    (INFINITY, 0): QUIET_NAN,
    (0x80000000, 0xFF800000): QUIET_NAN,
    (0xFF800001, 0x3F800000): QUIET_NAN,
    (0x7F7FFFFF, 0x3F800001): INFINITY,
    (0x7F7FFFFF, 0x3F800000): 0x7F7FFFFF,
    (0x00800000, 0x3F7FFFFF): 0x00800000,  # a tie below the smallest normal number goes up to it
    (0x00000001, 0x3F000000): 0,  # half of the smallest: a tie with zero
    (0x00000001, 0x3F000001): 1,
    (0x00000003, 0x3F000000): 2,
}


def test_products_worked_by_hand():
    for (a, b), expected in SPECIAL.items():
        assert multiply(a, b) == multiply(b, a) == expected == product(a, b), (hex(a), hex(b))


def total(a, b):
    """Pattern of a sum, by the rules."""
    magnitudes = [x & 0x7FFFFFFF for x in (a, b)]
    infinite = [x == INFINITY for x in magnitudes]
    if max(magnitudes) > INFINITY or (all(infinite) and a != b):
        return QUIET_NAN
    if any(infinite):
        return a if infinite[0] else b
    exact = value(a) + value(b)
    return nearest(exact, exact < 0 if exact else a >> 31 & b >> 31)


@settings(max_examples=600, deadline=None)
@given(BITS, BITS)
def test_sums_are_rounded_once_to_nearest_even(a, b):
    assert add(a, b) == total(a, b)


@settings(max_examples=800, deadline=None)
@given(BITS, st.integers(-28, 28), st.integers(0, 2**23 - 1), st.booleans())
def test_sums_of_numbers_of_like_size(a, distance, fraction, negative):
    b = min(max((a >> 23 & 0xFF) + distance, 0), 254) << 23 | fraction | negative << 31
    assert add(a, b) == total(a, b)


SUMS = {
    (0, 0x80000000): 0,
    (0x80000000, 0x80000000): 0x80000000,
    (0x3F800000, 0xBF800000): 0,
    (INFINITY, 0xFF800000): QUIET_NAN,
    (INFINITY, 0x7F7FFFFF): INFINITY,
    (0xFF800000, 0x3F800000): 0xFF800000,
    (0x7F7FFFFF, 0x73000000): INFINITY,  # half a step above the largest
    (0x7F7FFFFF, 0x72FFFFFF): 0x7F7FFFFF,
    (0x3F800000, 0x33800000): 0x3F800000,  # ties: the even one
    (0x3F800001, 0x33800000): 0x3F800002,
    (0x00800000, 0x80000001): 0x007FFFFF,
    (0x007FFFFF, 0x00000001): 0x00800000,
    (0x3F800000, 0xB3800001): 0x3F7FFFFF,
}


def test_sums_worked_by_hand():
    for (a, b), expected in SUMS.items():
        assert add(a, b) == add(b, a) == expected == total(a, b), (hex(a), hex(b))


def test_accumulators_are_converted_then_scaled():
    numbers = np.array([[1, -(2**63)], [2**24 + 1, 0]])
    scales = np.array([0x34800000, 0xBF800000], np.uint32)
    assert scaled(numbers, scales).tolist() == [[0x34800000, 0x5F000000], [0x40800000, 0x80000000]]
