"""Sums of squares and the root of their ratio: against fractions and float64."""

import math
from fractions import Fraction

import numpy as np
import pytest

from model.activity import LARGEST, SUM_BITS, SquareSum, activity, beat_squares
from model.signals import layer_activity


def number(bits):
    return float(np.array(bits, np.uint32).view(np.float32))


def exact(total):
    return Fraction(total.significand) * Fraction(2) ** total.exponent


def random_beats(rng, beats, lanes, spread):
    values = rng.standard_normal((beats, lanes)) * 2.0 ** rng.integers(-spread, spread + 1, (beats, 1))
    return values.astype(np.float32)


@pytest.mark.parametrize(("lanes", "spread"), [(1, 3), (4, 30), (16, 0), (16, 60)])
def test_sum_is_a_little_below_the_exact_one(lanes, spread, seed):
    values = random_beats(np.random.default_rng(seed), 300, lanes, spread)
    total = SquareSum()
    total.add(values.view(np.uint32))
    true = sum(Fraction(float(v)) ** 2 for v in values.reshape(-1))
    error = float((true - exact(total)) / true)
    assert 0 <= error < 2.0**-12
    assert total.significand >> SUM_BITS - 1 == 1
    assert number(total.bits) == np.float32(float(exact(total)))


def test_numbers_that_are_not_finite_count_as_the_largest():
    strange = np.array([[0x7F800000, 0xFFC00000]], np.uint32)
    sums, exponents = beat_squares(strange)
    assert (sums[0], exponents[0]) == (2 * 0xFFFF**2, 254)
    total = SquareSum()
    total.add(strange)
    assert total.bits == LARGEST


def test_zeros_and_tiny_numbers():
    total = SquareSum()
    total.add(np.array([[0, 0x80000000]], np.uint32))
    assert (total.significand, total.bits) == (0, 0)
    total.add(np.array([[1 << 8, 0]], np.uint32))
    assert exact(total) == Fraction(2) ** (2 * (8 - 149))
    assert total.bits == 0


def nearest(square):
    """Binary32 nearest to the root of a fraction, by comparing squares."""
    low, high = 0x00800000, LARGEST
    value = lambda bits: Fraction(number(bits))  # noqa: E731
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) ** 2 <= square else (low, middle)
    half = ((value(low) + value(high)) / 2) ** 2
    return high if square > half or (square == half and high % 2 == 0) else low


def test_root_of_ratio_is_rounded_once(seed):
    rng = np.random.default_rng(seed)
    for n in range(400):
        a, b = (
            SquareSum(int(rng.integers(2**31, 2**32)) >> 20 << 20 if n % 3 else int(rng.integers(2**31, 2**32)), int(e))
            for e in rng.integers(-60, 60, 2)
        )
        assert activity(a, b) == nearest(exact(a) / exact(b))


@pytest.mark.parametrize(
    ("a", "b", "bits"),
    [
        ((1 << 31, 0), (1 << 31, 0), 0x3F800000),
        ((1 << 31, 2), (1 << 31, 0), 0x40000000),
        ((9 << 28, 0), (1 << 31, 1), 0x3F400000),
        ((0, 0), (0, 0), 0),
        ((0, 0), (1 << 31, 0), 0),
        ((1 << 31, 0), (0, 0), LARGEST),
        ((1 << 31, 256), (1 << 31, 0), LARGEST),
        ((1 << 31, 254), (1 << 31, 0), 0x7F000000),
        ((1 << 31, 0), (1 << 31, 252), 0x00800000),
        ((1 << 31, 0), (1 << 31, 254), 0),
        # The largest below 1: its root would round to 1.
        ((2**32 - 1, -1), (1 << 31, 0), 0x3F800000),
    ],
)
def test_roots_worked_by_hand(a, b, bits):
    assert activity(SquareSum(*a), SquareSum(*b)) == bits
    assert (
        not bits
        or bits == LARGEST
        or math.isclose(number(bits) ** 2, exact(SquareSum(*a)) / exact(SquareSum(*b)), rel_tol=1e-6)
    )


def test_activity_of_a_layer_is_that_of_the_signal_library(seed):
    rng = np.random.default_rng(seed)
    before = rng.standard_normal((8, 64)).astype(np.float32)
    after = before + (0.1 * rng.standard_normal((8, 64))).astype(np.float32)
    sums = SquareSum(), SquareSum()
    for total, values in zip(sums, (after - before, before), strict=True):
        total.add(values.astype(np.float32).reshape(-1, 16).view(np.uint32))
    assert number(activity(*sums)) == pytest.approx(layer_activity(before, after), rel=2e-4)
