"""E4M3 group scales as the datapaths see them: a significand and a power of two."""

from amaranth.hdl import Cat, Value
from amaranth.lib import data

from model.formats import E4M3

__all__ = ["ScaleByte", "ScaleMagnitude"]


class ScaleMagnitude(data.Struct):
    """An E4M3 scale without its sign, 7 bits, worth ``significand() * 2**(exponent() - bias - mantissa_bits)``; NaN reads as its bits say."""

    mantissa: E4M3.mantissa_bits
    exponent_field: E4M3.exponent_bits

    def is_normal(self) -> Value:
        """1 bit: the exponent field is not zero, so the significand has its hidden bit."""
        return self.exponent_field.any()

    def significand(self) -> Value:
        """4 bits unsigned: the mantissa with its hidden bit."""
        return Cat(self.mantissa, self.is_normal())

    def exponent(self) -> Value:
        """4 bits unsigned: the exponent field, 1 for subnormals."""
        return Cat(self.exponent_field[0] | ~self.is_normal(), self.exponent_field[1:])


class ScaleByte(data.Struct):
    """One E4M3 scale byte as it is stored; its sign bit should be 0."""

    magnitude: ScaleMagnitude
    sign: 1

    def is_nan(self) -> Value:
        """1 bit: not a scale that software may store, that is 0x7F or any byte with its sign set."""
        return self.sign | self.magnitude.as_value().all()
