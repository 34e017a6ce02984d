"""Sums of squares that stream by, and how much a layer changes its input, bit for bit (docs/ppu.md)."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["KEPT", "LARGEST", "SUM_BITS", "SquareSum", "activity", "beat_squares"]

KEPT = 16
"""Bits of a significand that are squared."""

SUM_BITS = 32
"""Bits of a running sum's significand."""

LARGEST = 0x7F7FFFFF
"""The largest finite binary32 number: what too large results become."""

_FRACTION, _BIAS = 23, 127
_SIGNIFICAND = _FRACTION + 1
_RESULT = _SIGNIFICAND + 2


def beat_squares(numbers: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sum of squares of each beat: an integer and the exponent e of ``integer · 2**(2·(e - 150 + 8))``.

    All numbers of a beat are cut to units of the largest one's 16th bit, then squared and added exactly. NaN and infinity count as the largest
    finite number.

    Parameters
    ----------
    numbers : array of uint32, shape (beats, lanes)
        Binary32 patterns.
    """
    magnitude = np.minimum(np.asarray(numbers, np.uint32) & np.uint32(0x7FFFFFFF), np.uint32(LARGEST))
    field = (magnitude >> np.uint32(_FRACTION)).astype(np.int64)
    significand = (magnitude & np.uint32((1 << _FRACTION) - 1)).astype(np.int64) | (field > 0).astype(
        np.int64
    ) << _FRACTION
    exponent = np.maximum(field, 1)
    largest = exponent.max(axis=1)
    cut = significand >> _SIGNIFICAND - KEPT >> np.minimum(largest[:, None] - exponent, KEPT)
    return (cut**2).sum(axis=1), largest


@dataclass
class SquareSum:
    """A running sum ``significand · 2**exponent``, cut to 32 bits after every beat.

    Attributes
    ----------
    significand : int
        0, or with bit 31 set.
    exponent : int
    """

    significand: int = 0
    exponent: int = 0

    def add(self, numbers: ArrayLike) -> None:
        """Add the squares of beats of binary32 numbers, in order.

        Parameters
        ----------
        numbers : array of uint32, shape (beats, lanes)
        """
        sums, exponents = beat_squares(numbers)
        for total, exponent in zip(sums.tolist(), exponents.tolist(), strict=True):
            self._add(total, 2 * (exponent - _BIAS - _FRACTION + _SIGNIFICAND - KEPT))

    def _add(self, value: int, exponent: int) -> None:
        if not value:
            return
        # The beat's sum is cut to 32 bits on its own first.
        shift = value.bit_length() - SUM_BITS
        value, exponent = (value >> shift if shift > 0 else value << -shift), exponent + shift
        if not self.significand:
            self.significand, self.exponent = value, exponent
            return
        large, small = (self.significand, self.exponent), (value, exponent)
        if small[1] > large[1]:
            large, small = small, large
        total = large[0] + (small[0] >> min(large[1] - small[1], SUM_BITS))
        carry = total >> SUM_BITS
        self.significand, self.exponent = total >> carry, large[1] + carry

    @property
    def bits(self) -> int:
        """The sum as binary32, to nearest even; 0 below the normal numbers, and the largest number beyond it."""
        return _packed(self.significand, self.exponent)


def _packed(significand: int, exponent: int, sticky: bool = False) -> int:
    """Round ``significand · 2**exponent``, of any bits, to binary32."""
    if not significand:
        return 0
    drop = significand.bit_length() - _SIGNIFICAND
    kept = significand >> drop
    rest = significand - (kept << drop)
    half = 1 << drop - 1
    up = rest > half or (rest == half and (sticky or kept & 1))
    field = exponent + drop + _BIAS + _FRACTION
    bits = (field << _FRACTION) + (kept - (1 << _FRACTION)) + up
    if field < 1:
        return 0
    return min(bits, LARGEST)


def activity(change: SquareSum, before: SquareSum) -> int:
    """Return ``sqrt(change / before)`` as binary32, rounded once to nearest even.

    0 if nothing changed; the largest number if there was nothing before. Results below the normal numbers become 0.

    Examples
    --------
    >>> hex(activity(SquareSum(9 << 28, 0), SquareSum(1 << 31, 1)))  # sqrt(1.125 / 2**1 ...)
    '0x3f400000'
    """
    if not change.significand:
        return 0
    if not before.significand:
        return LARGEST
    # A quotient of 51 or 52 bits and an even exponent: its root has the 26 bits that rounding needs.
    exponent = change.exponent - before.exponent
    wide = 2 * _RESULT - 1
    odd = (exponent - wide) & 1
    quotient, rest = divmod(change.significand << wide + odd, before.significand)
    exponent = exponent - wide - odd
    root = math.isqrt(quotient)
    return _packed(root, exponent // 2, bool(rest) or root * root != quotient)
