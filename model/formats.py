"""The one table of small floating-point formats; every width elsewhere derives from it (docs/formats.md)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["CHUNK", "E2M1", "E2M3", "E4M3", "MiniFloat", "is_nan_scale", "scale_exponent", "scale_significand"]

CHUNK = 1 << 15
"""Elements that array code handles at a time so that its intermediate results stay in the cache."""

# Fields of a float32: bits of the fraction, bias, and the patterns that mask the magnitude and the exponent (which is infinity).
_FRACTION, _BIAS = 23, 127
_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


@dataclass(frozen=True)
class MiniFloat:
    """A sign-magnitude floating-point format of at most 8 bits with subnormals and no infinity.

    Attributes
    ----------
    name : str
        As in the literature, for example ``E2M1``.
    exponent_bits, mantissa_bits, bias : int
        Fields of a code ``{sign, exponent, mantissa}``.
    has_nan : bool
        Whether the code with all magnitude bits set is NaN (it is a number otherwise).

    Examples
    --------
    >>> E2M1.decode([0, 1, 7, 15]).tolist()
    [0.0, 0.5, 6.0, -6.0]
    >>> E2M1.encode([0.25, 0.75, 5.0, 100.0]).tolist()
    [0, 2, 6, 7]
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_nan: bool = False

    @property
    def width(self) -> int:
        """Bits of a code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_mask(self) -> int:
        """Code bit that holds the sign."""
        return 1 << (self.width - 1)

    @property
    def max_code(self) -> int:
        """Code of the largest finite magnitude."""
        return self.sign_mask - 1 - self.has_nan

    @cached_property
    def magnitudes(self) -> NDArray[np.float32]:
        """Values of the non-negative finite codes in order, float32, shape (max_code + 1,)."""
        code = np.arange(self.max_code + 1)
        field, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        significand = mantissa + np.where(field > 0, 1 << self.mantissa_bits, 0)
        return np.ldexp(significand.astype(np.float32), np.maximum(field, 1) - self.bias - self.mantissa_bits)

    @property
    def max(self) -> float:
        """Largest finite magnitude."""
        return float(self.magnitudes[-1])

    def encode(self, x: ArrayLike) -> NDArray[np.uint8]:
        """Round to nearest, ties to the even code, saturating; the sign of a value that rounds to zero is kept.

        Parameters
        ----------
        x : array_like
            Any shape; taken as float32.

        Returns
        -------
        ndarray of uint8
            Codes, same shape.

        Raises
        ------
        ValueError
            A value is NaN or infinite; names the first such index.
        """
        values = np.asarray(x, dtype=np.float32)
        bits = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
        if not np.isfinite(values).all():
            index = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
            raise ValueError(f"x must be finite, not {values[index]} at index {index}")
        codes = np.empty(bits.shape, dtype=np.uint8)
        for start in range(0, len(bits), CHUNK):
            self.encode_bits(bits[start : start + CHUNK], codes[start : start + CHUNK])
        return codes.reshape(values.shape)

    def encode_bits(self, bits: NDArray[np.uint32], codes: NDArray[np.uint8]) -> None:
        """Round float32 bit patterns as :meth:`encode` does, without its checks: infinity saturates, and so does NaN.

        Meant for pieces of about :data:`CHUNK` elements, which stay in the cache.

        Parameters
        ----------
        bits : ndarray of uint32, shape (n,)
        codes : ndarray of uint8, shape (n,)
            Filled with the codes.
        """
        fraction = _FRACTION - self.mantissa_bits
        magnitude = bits & _MAGNITUDE
        # Minimum and maximum with an array are three times as fast as with a number.
        np.minimum(magnitude, np.full_like(bits, np.float32(self.max).view(np.uint32)), out=magnitude)
        # Adding 2**fraction times the number's power of two (that of the smallest normal number below it) leaves, in the low bits of the
        # sum, the number in units of its last place, rounded to nearest even by the addition; the sum's exponent is that of the code.
        smallest = (_BIAS + 1 - self.bias) << _FRACTION
        power = magnitude & _INFINITY
        np.maximum(power, np.full_like(bits, smallest), out=power)
        power += np.uint32(fraction << _FRACTION)
        total = np.add(magnitude.view(np.float32), power.view(np.float32), out=power.view(np.float32)).view(np.uint32)
        codes[...] = total
        codes += (total >> np.uint32(fraction)).astype(np.uint8)
        codes -= np.uint8(((smallest >> _FRACTION) + fraction) << self.mantissa_bits & 0xFF)
        signs = (bits >> np.uint32(32 - self.width)).astype(np.uint8)
        signs &= np.uint8(self.sign_mask)
        codes |= signs

    def decode(self, codes: ArrayLike) -> NDArray[np.float32]:
        """Return the float32 values of ``codes``, same shape.

        Raises
        ------
        ValueError
            A code is NaN or wider than the format; names the first such index.
        """
        given = np.asarray(codes)
        if given.size and given.dtype.kind not in "iu":
            raise TypeError(f"codes must be integers, not {given.dtype}")
        bad = np.asarray((given < 0) | (given >= 2 * self.sign_mask))
        if self.has_nan:
            bad |= (given & (self.sign_mask - 1)) > self.max_code
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"codes must be finite {self.name} codes, not {int(given[index]):#04x} at index {index}")
        if given.dtype == np.uint8 and given.size % 2 == 0 and not self.has_nan:
            pairs = np.ascontiguousarray(given).reshape(-1).view(np.uint16)
            return self._pair_values.take(pairs).view(np.float32).reshape(given.shape)
        return self._values.take(given.astype(np.intp, copy=False))

    @cached_property
    def _pair_values(self) -> NDArray[np.uint64]:
        # The values of two codes side by side, by both codes as one number: half the look-ups.
        pairs = np.arange((2 * self.sign_mask - 1) * 0x0101 + 1, dtype=np.uint16).view(np.uint8)
        return self._values[pairs & np.uint8(2 * self.sign_mask - 1)].view(np.uint64)

    @cached_property
    def _values(self) -> NDArray[np.float32]:
        positive = np.zeros(self.sign_mask, dtype=np.float32)
        positive[: len(self.magnitudes)] = self.magnitudes
        return np.concatenate([positive, -positive])


E2M1 = MiniFloat("E2M1", exponent_bits=2, mantissa_bits=1, bias=1)
"""NVFP4's element: 0 0.5 1 1.5 2 3 4 6."""

E2M3 = MiniFloat("E2M3", exponent_bits=2, mantissa_bits=3, bias=1)
"""FP6g's element: 0 to 7.5."""

E4M3 = MiniFloat("E4M3", exponent_bits=4, mantissa_bits=3, bias=7, has_nan=True)
"""Group scale, the FN variant: up to 448, 0x7F is NaN, stored with sign 0."""


def scale_significand(scale: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the 4-bit significand M of E4M3 scale bytes, hidden bit included; ``scale = M · 2**(E - 10)``."""
    byte = np.asarray(scale).astype(np.int64)
    mantissa = byte & ((1 << E4M3.mantissa_bits) - 1)
    return mantissa + np.where(_exponent_field(byte) > 0, 1 << E4M3.mantissa_bits, 0)


def scale_exponent(scale: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the exponent E of E4M3 scale bytes, that is the exponent field, 1 for subnormals."""
    return np.maximum(_exponent_field(np.asarray(scale).astype(np.int64)), 1)


def _exponent_field(byte: NDArray[np.int64]) -> NDArray[np.int64]:
    return (byte >> E4M3.mantissa_bits) & ((1 << E4M3.exponent_bits) - 1)


def is_nan_scale(scale: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return where a byte is no scale: 0x7F, or the sign bit is set."""
    return np.asarray(scale) >= E4M3.max_code + 1
