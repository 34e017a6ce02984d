"""AutoFP2 digit pairs: NVFP4 weights as two digits, and the 5-bit packed pair (paper, sections 6.2 and D.7; docs/formats.md)."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["NVFP4_PAIRS", "PAIR_DIGITS", "nvfp4_digits", "pack", "unpack"]

_ESCAPE = 1 << 4

# Table 8 of the paper: digits (Q0, Q1) of every E2M1 magnitude, 2|W| = 5 Q0 + 2 Q1.
_MAGNITUDE_DIGITS = np.array([(0, 0), (1, -2), (0, 1), (1, -1), (0, 2), (2, -2), (2, -1), (2, 1)], dtype=np.int8)


def nvfp4_digits(codes: ArrayLike) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Split E2M1 weights into digits, ``2·W = 5·Q0 + 2·Q1`` (equation 6).

    Parameters
    ----------
    codes : array_like of int
        E2M1 codes, any shape.

    Returns
    -------
    q0, q1 : ndarray of int8
        Digits in {-2, …, 2}, same shape.

    Raises
    ------
    ValueError
        A code is outside 0 … 15.

    Examples
    --------
    >>> nvfp4_digits([1, 15])
    (array([ 1, -2], dtype=int8), array([-2, -1], dtype=int8))
    """
    given = np.asarray(codes)
    if given.size and (given.min() < 0 or given.max() > 15):
        raise ValueError(f"codes must be from 0 to 15, not {given[(given < 0) | (given > 15)].flat[0]}")
    digits = _MAGNITUDE_DIGITS[given & 7] * np.where(given & 8, -1, 1).astype(np.int8)[..., None]
    return digits[..., 0], digits[..., 1]


def pack(q0: ArrayLike, q1: ArrayLike) -> NDArray[np.uint8]:
    """Pack digit pairs into 5 bits ``{E, F1, F0}``.

    Parameters
    ----------
    q0, q1 : array_like of int
        Digits in {-2, …, 2} of one shape. In AutoFP2 mode q0 belongs to the even row, q1 to the odd row.

    Returns
    -------
    ndarray of uint8
        Packed pairs, same shape. A pair of zeros is ``1 11 00``.

    Raises
    ------
    ValueError
        A digit is outside -2 … 2.

    Examples
    --------
    >>> [f"{int(p):05b}" for p in pack([1, 0, -1, 0], [-2, 0, 0, 2])]
    ['01100', '11100', '11010', '10101']
    """
    first, second = np.asarray(q0).astype(np.int64), np.asarray(q1).astype(np.int64)
    for name, digits in (("q0", first), ("q1", second)):
        if digits.size and np.abs(digits).max() > 2:
            raise ValueError(f"{name} must hold digits from -2 to 2, not {digits[np.abs(digits) > 2].flat[0]}")
    code0 = np.where(first == 0, 0, (first < 0) * 2 + (np.abs(first) == 2))
    code1 = np.where(second == 0, 0, (second < 0) * 2 + (np.abs(second) == 2))
    escaped = _ESCAPE | (second == 0) << 3 | (first == 0) << 2 | np.where(first == 0, code1, code0)
    return np.where((first == 0) | (second == 0), escaped, code1 << 2 | code0).astype(np.uint8)


def _digit_table() -> NDArray[np.int8]:
    code = np.array([1, 2, -1, -2], dtype=np.int8)
    table = np.zeros((32, 2), dtype=np.int8)
    for pair in range(32):
        f1, f0 = pair >> 2 & 3, pair & 3
        if pair & _ESCAPE:
            # F1 = 00 never occurs; hardware then reads both digits from F0, and so does this table.
            table[pair] = (0 if f1 & 1 else code[f0], 0 if f1 & 2 else code[f0])
        else:
            table[pair] = (code[f0], code[f1])
    return table


PAIR_DIGITS = _digit_table()
"""Digits (Q0, Q1) of every 5-bit pattern, int8, shape (32, 2)."""

NVFP4_PAIRS = np.unique(pack(*nvfp4_digits(np.arange(16))))
"""The packed pairs that stand for an NVFP4 weight, 15 of them, ascending."""


def unpack(pairs: ArrayLike) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """Return digits ``(q0, q1)`` of packed pairs, same shape; F0 is ignored where both digits are zero.

    Raises
    ------
    ValueError
        A value is outside 0 … 31.
    """
    given = np.asarray(pairs)
    if given.size and (given.min() < 0 or given.max() > 31):
        raise ValueError(f"pairs must be from 0 to 31, not {given[(given < 0) | (given > 31)].flat[0]}")
    digits = PAIR_DIGITS[given]
    return digits[..., 0], digits[..., 1]
