"""The one table of small floating-point formats; every width elsewhere derives from it (docs/formats.md)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["E2M1", "E2M3", "E4M3", "MiniFloat", "is_nan_scale", "scale_exponent", "scale_significand"]


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

    @cached_property
    def _by_prefix(self) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        # The upper 16 bits of a positive float32 fix the code but for one boundary inside their interval.
        prefix = np.arange(1 << 15, dtype=np.uint32) << 16
        bounds = self._boundaries
        low = np.searchsorted(bounds, prefix, side="right")
        padded = np.append(bounds, np.uint32(0xFFFFFFFF))
        return low.astype(np.uint8), padded[low]

    @cached_property
    def _boundaries(self) -> NDArray[np.uint32]:
        # Float32 bit pattern of the smallest magnitude that rounds to each code from 1 on: the midpoint, or its successor where the tie goes
        # down to the even code.
        middle = (self.magnitudes[:-1].astype(np.float64) + self.magnitudes[1:]) / 2
        exact = middle.astype(np.float32).view(np.uint32)
        return exact + (np.arange(len(exact)) % 2 == 0).astype(np.uint32)

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
        values = np.ascontiguousarray(x, dtype=np.float32)
        bits = values.view(np.uint32)
        magnitude = bits & np.uint32(0x7FFFFFFF)
        if magnitude.size and int(magnitude.max()) >= 0x7F800000:
            index = tuple(int(i) for i in np.unravel_index(int(np.argmax(magnitude >= 0x7F800000)), values.shape))
            raise ValueError(f"x must be finite, not {values[index]} at index {index}")
        table, bound = self._by_prefix
        prefix = magnitude >> np.uint32(16)
        codes = table[prefix] + (magnitude >= bound[prefix])
        return codes | ((bits >> np.uint32(31 - self.width + 1)).astype(np.uint8) & np.uint8(self.sign_mask))

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
        given = given.astype(np.int64)
        bad = (given < 0) | (given >= 2 * self.sign_mask) | ((given & (self.sign_mask - 1)) > self.max_code)
        if bad.any():
            index = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), given.shape))
            raise ValueError(f"codes must be finite {self.name} codes, not {int(given[index]):#04x} at index {index}")
        return self._values[given]

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
