"""Binary32 arithmetic of the output path, by bit patterns: integer to float, product and sum (docs/output.md). Shared by every accelerator family."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["QUIET_NAN", "add", "from_int", "multiply", "scaled"]

QUIET_NAN = 0x7FC00000
"""The one NaN that results have."""


def from_int(values: ArrayLike) -> NDArray[np.uint32]:
    """Round signed integers to binary32, once, to nearest even.

    Parameters
    ----------
    values : array of integers that fit int64

    Returns
    -------
    ndarray of uint32
        Bit patterns, of the same shape. 0 gives +0.

    Raises
    ------
    TypeError
        The values are no integers.

    Examples
    --------
    >>> [hex(bits) for bits in from_int([0, -1, 2**24 + 1, 2**24 + 3])]
    ['0x0', '0xbf800000', '0x4b800000', '0x4b800002']
    """
    given = np.asarray(values)
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"values must be integers, not {given.dtype}")
    # C's conversion of a 64-bit integer, which rounds once: not by way of float64.
    return given.astype(np.int64).astype(np.float32).view(np.uint32)


def multiply(a: ArrayLike, b: ArrayLike) -> NDArray[np.uint32]:
    """Multiply binary32 numbers as IEEE 754 says: to nearest even, subnormals kept, overflow to infinity.

    Parameters
    ----------
    a, b : arrays of bit patterns, uint32

    Returns
    -------
    ndarray of uint32
        Bit patterns; every NaN is `QUIET_NAN`.

    Examples
    --------
    >>> hex(multiply(0x3F800000, 0x80000001)), hex(multiply(0, 0xFF800000))
    ('0x80000001', '0x7fc00000')
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.uint32).view(np.float32) * np.asarray(b, np.uint32).view(np.float32)
    return np.where(np.isnan(product), np.uint32(QUIET_NAN), np.asarray(product).view(np.uint32))


def add(a: ArrayLike, b: ArrayLike) -> NDArray[np.uint32]:
    """Add binary32 numbers as IEEE 754 says: to nearest even, subnormals kept, overflow to infinity.

    Parameters
    ----------
    a, b : arrays of bit patterns, uint32

    Returns
    -------
    ndarray of uint32
        Bit patterns; every NaN is `QUIET_NAN`, and a sum of 0 is +0 unless both numbers are -0.

    Examples
    --------
    >>> hex(add(0x3F800000, 0xBF800001)), hex(add(0x80000000, 0x80000000))
    ('0xb4000000', '0x80000000')
    """
    with np.errstate(all="ignore"):
        total = np.asarray(a, np.uint32).view(np.float32) + np.asarray(b, np.uint32).view(np.float32)
    return np.where(np.isnan(total), np.uint32(QUIET_NAN), np.asarray(total).view(np.uint32))


def scaled(values: ArrayLike, scale: ArrayLike) -> NDArray[np.uint32]:
    """Turn accumulators into binary32: `from_int`, then one `multiply`.

    Parameters
    ----------
    values : array of integers that fit int64
    scale : bit patterns, uint32
        Of a shape that broadcasts with ``values``.

    Examples
    --------
    >>> hex(scaled(3, 0x34800000))  # 3 · 2**-22
    '0x35400000'
    """
    return multiply(from_int(values), scale)
