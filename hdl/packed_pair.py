"""The 5-bit packed pair of AutoFP2 digits that weights travel in (paper, section 6.2 and figure 10)."""

from typing import NamedTuple

from amaranth.hdl import Cat, Mux, Value
from amaranth.lib import data

__all__ = ["Digit", "DigitCode", "PackedPair"]


class Digit(NamedTuple):
    """A decoded digit in {-2, -1, 0, 1, 2}; each field is 1 bit.

    ``negative`` means nothing when the digit is zero.
    """

    single: Value
    double: Value
    negative: Value
    nonzero: Value

    def times(self, magnitude: Value) -> Value:
        """Return ``|digit| * magnitude``, one bit wider than ``magnitude``; a zero digit gives a constant 0, which does not toggle."""
        width = len(magnitude)
        return (magnitude & self.single.replicate(width)) | ((magnitude & self.double.replicate(width)) << 1)

    def product_sign(self, negative: Value) -> Value:
        """Return the sign of the product with a number of sign ``negative``; of a zero digit a constant 0, which does not toggle."""
        return (negative ^ self.negative) & self.nonzero


class DigitCode(data.Struct):
    """E1M0 code of a non-zero digit: +1, +2, -1, -2 are 0 to 3."""

    double: 1
    negative: 1


class PackedPair(data.Struct):
    """Two digits in 5 bits ``{E, F1, F0}``.

    Both digits non-zero: E = 0, F1 and F0 are the codes of Q1 and Q0. Otherwise E = 1, F1 = {Q1 is zero, Q0 is zero} and F0 is the code
    of the non-zero digit, ignored when there is none.
    """

    f0: DigitCode
    f1: DigitCode
    escape: 1

    def q0(self) -> Digit:
        """Decode digit Q0."""
        nonzero = ~(self.escape & self.f1.as_value()[0])
        return Digit(nonzero & ~self.f0.double, nonzero & self.f0.double, self.f0.negative, nonzero)

    def q1(self) -> Digit:
        """Decode digit Q1."""
        nonzero = ~(self.escape & self.f1.as_value()[1])
        double = Mux(self.escape, self.f0.double, self.f1.double)
        negative = Mux(self.escape, self.f0.negative, self.f1.negative)
        return Digit(nonzero & ~double, nonzero & double, negative, nonzero)

    def weight_negative(self) -> Value:
        """1 bit: the NVFP4 weight that the pair stands for is negative; means nothing for other pairs or zero."""
        return self.f0.negative

    def weight_doubled_magnitude(self) -> Value:
        """4 bits: ``|5 Q0 + 2 Q1|`` of a pair that stands for an NVFP4 weight, one of 0 1 2 3 4 6 8 12.

        Only 15 of the pairs do (table 8 of the paper); for the others the value is arbitrary, which is what makes the logic small.
        """
        e, x0, x1 = self.escape, self.f0.double, self.f1.double
        q1_zero = self.f1.as_value()[1]
        same_signs = ~(self.f0.negative ^ self.f1.negative)
        # Alone, Q1 gives 2 or 4. With Q0 = ±1 it is opposite: 1 or 3; with Q0 = ±2: 6, 8, or 12 if not opposite.
        only_q1 = e & ~q1_zero
        return Cat(
            ~e & ~x0,
            (only_q1 & ~x0) | (~e & ~(x0 ^ x1)),
            (only_q1 & x0) | (~e & x0 & (x1 | same_signs)),
            ~e & x0 & ~x1,
        )

    def weight_binade(self) -> tuple[Value, Value, Value]:
        """Three one-hot bits: the NVFP4 weight's magnitude is below 2, in [2, 4), or at least 4."""
        e, x0, x1 = self.escape, self.f0.double, self.f1.double
        middle = (e & x0 & ~self.f1.as_value()[1]) | (~e & x0 & x1)
        high = ~e & x0 & ~x1
        return ~(middle | high), middle, high
