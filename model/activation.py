"""Activation functions of the post-processing unit, bit for bit: each is a product with a binary32 weight from short tables (docs/ppu.md)."""

import math
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.fp32 import multiply

__all__ = [
    "LOG2E",
    "POINT",
    "POSITION",
    "POWER_POINT",
    "Function",
    "apply",
    "logarithm_table",
    "power_table",
    "reference",
    "weights",
]

POINT = 14
"""Fraction bits of ``|x|`` and of the exponent t."""

POSITION = 10
"""Bits that say where in a piece a number lies."""

POWER_POINT = 15
"""Fraction bits of a power of two from 1 to 2."""

LOG2E = round(math.log2(math.e) * 2**POINT)
"""log2(e), ``POINT`` fraction bits."""

# Where the pieces of the logarithm end: 16 of an eighth below 2, then 8 in each of the octaves up to 16.
_KNOTS = [k / 8 for k in range(16)] + [2**octave * (1 + k / 8) for octave in (1, 2, 3) for k in range(8)] + [16.0]
_POWER_PIECES = 16
_ONE, _HALF = 0x3F800000, 0x3F000000
_INFINITE = 255


class Function(IntEnum):
    """What is done with each number."""

    IDENTITY = 0
    RELU = 1
    SILU = 2
    GELU = 3


def _silu_rest(a: float) -> float:
    """Return what -log2 of the logistic function of -a has beyond a·log2(e)."""
    return math.log2(1 + math.exp(-a))


def _gelu_rest(a: float) -> float:
    """Return what -log2 of the normal distribution's share below -a has beyond a²/2·log2(e)."""
    return -math.log2(math.erfc(a / math.sqrt(2)) / 2) - a * a / 2 * math.log2(math.e)


def _pieces(function: Callable[[float], float], knots: list[float], point: int) -> tuple[tuple[int, int], ...]:
    """Return start and rise of a straight line on each piece, so placed that its largest errors up and down are alike."""
    table = []
    for low, high in pairwise(knots):
        start, end, middle = function(low), function(high), function((low + high) / 2)
        shift = (middle - (start + end) / 2) / 2
        first, last = round((start + shift) * 2**point), round((end + shift) * 2**point)
        table.append((first, last - first))
    return tuple(table)


@cache
def logarithm_table(function: Function) -> tuple[tuple[int, int], ...]:
    """Return start and rise of the 40 pieces of what the exponent t has beyond its main term, ``POINT`` fraction bits.

    Raises
    ------
    ValueError
        The function is neither SiLU nor GELU.
    """
    rests = {Function.SILU: _silu_rest, Function.GELU: _gelu_rest}
    if function not in rests:
        raise ValueError(f"function must be SILU or GELU, not {function!r}")
    return _pieces(rests[function], _KNOTS, POINT)


@cache
def power_table() -> tuple[tuple[int, int], ...]:
    """Return start and rise of the 16 pieces of ``2**f - 1``, f from 0 to 1, ``POWER_POINT`` fraction bits; below 1 everywhere."""
    knots = [k / _POWER_PIECES for k in range(_POWER_PIECES + 1)]
    table = [(max(start, 0), rise) for start, rise in _pieces(lambda f: 2**f - 1, knots, POWER_POINT)]
    top = (1 << POWER_POINT) - 1
    return (*table[:-1], (table[-1][0], min(table[-1][1], top - table[-1][0])))


def _line(
    table: tuple[tuple[int, int], ...], piece: NDArray[np.int64], position: NDArray[np.int64]
) -> NDArray[np.int64]:
    start, rise = np.array(table, np.int64).T
    return start[piece] + (rise[piece] * position >> POSITION)


def weights(bits: ArrayLike, function: Function) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return for each number the two factors whose binary32 product is the function's value.

    Parameters
    ----------
    bits : array of uint32
        Binary32 patterns, any shape.
    function : Function

    Returns
    -------
    x, weight : ndarray of uint32
        The number itself, or a zero where the function is (nearly) zero; a number from 0 to 1.
    """
    x = np.array(bits, np.uint32)
    weight = np.full(x.shape, _ONE, np.uint32)
    if function == Function.IDENTITY:
        return x, weight
    negative = x >> np.uint32(31) != 0
    magnitude = x & np.uint32(0x7FFFFFFF)
    number = magnitude <= _INFINITE << 23
    if function == Function.RELU:
        x[negative & number] = 0
        return x, weight

    exponent = (magnitude >> np.uint32(23)).astype(np.int64)
    significand = (magnitude & np.uint32(0x7FFFFF)).astype(np.int64) | (exponent > 0).astype(np.int64) << 23
    # |x| in fixed point, rounded half up; from 2**7 on it is far away from where anything happens.
    highest = 127 + 6
    far = exponent > highest
    a = ((significand >> 2 >> np.clip(highest - exponent, 0, 31)) + 1) >> 1
    octave = np.where(a >> (POINT + 3), 3, np.where(a >> (POINT + 2), 2, (a >> (POINT + 1)) & 1))
    above = a >> (POINT + 4) != 0
    piece = np.where(octave == 0, a >> (POINT - 3), 8 + 8 * octave + (a >> (POINT - 3 + octave) & 7))
    position = (a >> (POINT - 3 - POSITION + octave)) & ((1 << POSITION) - 1)
    rest = _line(logarithm_table(function), np.where(above, 0, piece), position)
    if function == Function.SILU:
        main, rest = a, np.where(above, 0, rest)
    else:
        far |= above
        a = a & ((1 << POINT + 4) - 1)
        main = a * a >> POINT + 1
    t = (main * LOG2E >> POINT) + rest
    power, fraction = -t >> POINT, -t & ((1 << POINT) - 1)
    mantissa = _line(power_table(), fraction >> POSITION, fraction & ((1 << POSITION) - 1))

    # Below 0 the weight is 2**-t, above it is 1 - 2**-t.
    field = power + 127
    normal = field << 23 | mantissa << 23 - POWER_POINT
    subnormal = (1 << 23 | mantissa << 23 - POWER_POINT) >> np.clip(1 - field, 0, 31)
    below = np.where(field > 0, normal, subnormal)
    share = np.minimum((1 << POWER_POINT | mantissa) >> np.clip(-1 - power, 0, 31), 1 << POWER_POINT)
    above_zero = np.where(share == 0, _ONE, _HALF + (((1 << POWER_POINT) - share) << 23 - POWER_POINT))
    weight[...] = np.where(negative, below, above_zero)
    weight[far] = _ONE
    x[far & negative & number] = 0x80000000
    return x, weight


def apply(bits: ArrayLike, function: Function) -> NDArray[np.uint32]:
    """Return the function of binary32 numbers, bit patterns.

    Identity keeps every number and makes every NaN the quiet one. ReLU gives +0 for everything below 0. SiLU and GELU (the exact one, with the
    normal distribution) differ from the true value by at most ``2**-8`` of it, or of the least normal number if that is more; -∞ gives -0.

    Parameters
    ----------
    bits : array of uint32
        Any shape.
    function : Function

    Examples
    --------
    >>> one = np.array([1, -1], np.float32).view(np.uint32)
    >>> [round(float(y), 3) for y in apply(one, Function.SILU).view(np.float32)]
    [0.731, -0.269]
    """
    return multiply(*weights(bits, function))


def reference(x: NDArray[np.float64], function: Function) -> NDArray[np.float64]:
    """Return the function in float64, accurate also where it is tiny.

    Parameters
    ----------
    x : ndarray of float64
        Finite.
    function : Function
    """
    if function == Function.IDENTITY:
        return x
    if function == Function.RELU:
        return np.maximum(x, 0)
    if function == Function.SILU:
        small = np.exp(-np.abs(x))
        return x * np.where(x < 0, small, 1) / (1 + small)
    share = np.frompyfunc(lambda value: math.erfc(-value / math.sqrt(2)) / 2, 1, 1)(x).astype(np.float64)
    return x * share
