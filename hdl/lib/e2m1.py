"""E2M1 codes as the datapaths see them."""

from amaranth.hdl import Cat, Value
from amaranth.lib import data

from model.formats import E2M1

__all__ = ["E2M1Code"]


class E2M1Code(data.Struct):
    """One E2M1 code, ``{sign, exponent, mantissa}``; both zero codes have magnitude 0."""

    mantissa: E2M1.mantissa_bits
    exponent: E2M1.exponent_bits
    sign: 1

    def doubled_magnitude(self) -> Value:
        """4 bits unsigned: twice the magnitude, one of 0 1 2 3 4 6 8 12."""
        m, e0, e1 = self.mantissa[0], self.exponent[0], self.exponent[1]
        return Cat(~e1 & m, (~e1 & e0) | (e1 & ~e0 & m), (e1 & ~e0) | (e1 & e0 & m), e1 & e0)

    def binade(self) -> tuple[Value, Value, Value]:
        """Three one-hot bits: the magnitude is below 2, in [2, 4), or at least 4."""
        e0, e1 = self.exponent[0], self.exponent[1]
        return ~e1, e1 & ~e0, e1 & e0
