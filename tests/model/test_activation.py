"""Activation functions: their error over all sizes of numbers, and what happens at the ends."""

import hashlib

import numpy as np
import pytest

from model.activation import Function, apply, logarithm_table, power_table, reference, weights

LIMIT = {Function.SILU: 0.191, Function.GELU: 0.425}


def all_sizes():
    """Every 2**13th pattern, and closer together where something happens."""
    wide = np.arange(0, 2**32, 2**13, dtype=np.uint64).astype(np.uint32)
    dense = np.arange(0x38000000, 0x43800000, 641, dtype=np.uint32)
    ends = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x42FFFFFF, 0x43000000, 0x41800000, 0x417FFFFF], np.uint32)
    positive = np.concatenate([dense, ends])
    bits = np.concatenate([wide, positive, positive | 1 << 31])
    return bits[np.isfinite(bits.view(np.float32))]


@pytest.mark.parametrize("function", [Function.SILU, Function.GELU])
def test_error_is_a_fraction_of_the_value_over_all_sizes(function):
    bits = all_sizes()
    exact = reference(bits.view(np.float32).astype(np.float64), function)
    got = apply(bits, function).view(np.float32).astype(np.float64)
    error = np.abs(got - exact) / np.maximum(np.abs(exact), 2.0**-126)
    assert 0.1 < error.max() * 2**8 < LIMIT[function]
    assert (np.signbit(got) == np.signbit(bits.view(np.float32)))[got != 0].all()
    assert len(bits) > 900_000


@pytest.mark.parametrize("function", [Function.SILU, Function.GELU])
def test_reference_is_the_function_computed_in_another_way(function):
    x = np.linspace(-6, 6, 25)
    grid = np.linspace(-12, 12, 400_001)
    if function == Function.SILU:
        expected = x / (1 + np.exp(-x))
    else:
        density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
        share = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)]) * (grid[1] - grid[0])
        expected = x * np.interp(x, grid, share)
    np.testing.assert_allclose(reference(x, function), expected, atol=1e-8)


def test_simple_functions_are_exact():
    bits = all_sizes()
    np.testing.assert_array_equal(apply(bits, Function.IDENTITY), bits)
    np.testing.assert_array_equal(apply(bits, Function.RELU), np.where(bits >> 31, 0, bits))
    x = bits.view(np.float32).astype(np.float64)
    for function in (Function.IDENTITY, Function.RELU):
        np.testing.assert_array_equal(reference(x, function), np.maximum(x, 0) if function else x)


ENDS = {  # +∞ -∞ NaN -NaN +0 -0
    Function.IDENTITY: [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FC00000, 0, 0x80000000],
    Function.RELU: [0x7F800000, 0, 0x7FC00000, 0x7FC00000, 0, 0],
    Function.SILU: [0x7F800000, 0x80000000, 0x7FC00000, 0x7FC00000, 0, 0x80000000],
    Function.GELU: [0x7F800000, 0x80000000, 0x7FC00000, 0x7FC00000, 0, 0x80000000],
}


@pytest.mark.parametrize("function", Function)
def test_ends(function):
    bits = np.array([0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0, 0x80000000], np.uint32)
    assert apply(bits, function).tolist() == ENDS[function]


@pytest.mark.parametrize("function", [Function.SILU, Function.GELU])
def test_weights_are_from_0_to_1_and_rise(function):
    x = np.linspace(-20, 20, 100_001, dtype=np.float32)
    _, weight = weights(x.view(np.uint32), function)
    values = weight.view(np.float32).astype(np.float64)
    values[(weight == 0x3F800000) & (x < 0)] = 0  # there the number itself is replaced by 0
    assert values.min() >= 0
    assert values.max() == 1
    # Straight lines that are put beside each other with the error halved leave small steps down.
    assert (values[1:] >= values[:-1] * (1 - 2e-3)).all()


def test_tables_are_the_same_everywhere():
    tables = [logarithm_table(Function.SILU), logarithm_table(Function.GELU), power_table()]
    assert [len(table) for table in tables] == [40, 40, 16]
    assert hashlib.sha256(repr(tables).encode()).hexdigest()[:16] == "d42264fb372b36da"
    with pytest.raises(ValueError, match=r"^function must be SILU or GELU, not <Function.RELU: 1>$"):
        logarithm_table(Function.RELU)
