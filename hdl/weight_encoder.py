"""Weight encoder: NVFP4 codes in, packed pairs of AutoFP2 digits out (paper, sections 6.2 and D.7; docs/formats.md)."""

from typing import NamedTuple

from amaranth.hdl import Cat, ClockDomain, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lanes import GROUP
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.scale import ScaleByte
from hdl.packed_pair import PackedPair
from model.formats import E2M1
from model.weight_encoder import WeightEncoderConfig

__all__ = ["PairScale", "WeightEncoder"]

ONE, TWO = 2, 6
"""Smallest E2M1 magnitude codes whose AutoFP2 digit is 1 and 2 under the group's own scale."""


class EncodedDigit(NamedTuple):
    """A digit before packing; each field is 1 bit, ``double`` and ``negative`` count only with ``nonzero``."""

    nonzero: Value
    double: Value
    negative: Value


def nvfp4_digits(code: E2M1Code) -> tuple[EncodedDigit, EncodedDigit]:
    """Return digits Q0 and Q1 with ``5 Q0 + 2 Q1 = 2 W`` (paper, equation 6)."""
    s, e1, e0, m = code.sign, code.exponent[1], code.exponent[0], code.mantissa[0]
    q0 = EncodedDigit(m | (e1 & e0), e1 & (e0 | m), s)
    q1 = EncodedDigit(e1 | e0 | m, ~e0 & (e1 | m), s ^ m ^ (e1 & e0))
    return q0, q1


def pack(q0: EncodedDigit, q1: EncodedDigit) -> Value:
    """Return the 5-bit packed pair ``{E, F1, F0}`` of two digits."""
    both = q0.nonzero & q1.nonzero
    code0 = Cat(q0.double, q0.negative) & q0.nonzero.replicate(2)
    code1 = Cat(q1.double, q1.negative)
    f0 = code0 | (code1 & (q1.nonzero & ~q0.nonzero).replicate(2))
    f1 = Mux(both, code1, Cat(~q0.nonzero, ~q1.nonzero))
    return Cat(f0, f1, ~both)


class PairScale(wiring.Component):
    """Common scale of two adjacent groups of a row, and which codes give which digit under it; combinational.

    The larger scale is the pair's. A code of the group with the smaller scale B counts as 1 from ``|q|·B ≥ B_pair`` and as 2 from
    ``|q|·B ≥ 3.5·B_pair`` on; in the other group these are the codes of 1 and 4. Both tests grow with the code, so they come as one bit per code.

    Members
    -------
    scales : In(2 × ScaleByte)
    pair : Out(ScaleByte)
        The byte with the larger low seven bits; its sign bit is set if either's is, so that a bad scale stays visible.
    reaches_one : Out(2 × 6)
        For each group, bit i: magnitude code 2 + i gives at least digit 1. Codes 0 and 1 never do.
    reaches_two : Out(2 × 2)
        For each group, bit i: magnitude code 6 + i gives digit 2.
    """

    scales: In(data.ArrayLayout(ScaleByte, 2))
    pair: Out(ScaleByte)
    reaches_one: Out(data.ArrayLayout(8 - ONE, 2))
    reaches_two: Out(data.ArrayLayout(8 - TWO, 2))

    def elaborate(self, platform: object) -> Module:
        """Build the comparators, once for the group with the smaller scale."""
        m = Module()
        magnitudes = [byte.as_value()[:7] for byte in self.scales]
        second_smaller, first_smaller = Signal(), Signal()
        m.d.comb += [
            second_smaller.eq(magnitudes[1] < magnitudes[0]),
            first_smaller.eq(magnitudes[0] < magnitudes[1]),
        ]
        large, small = Signal(ScaleByte), Signal(ScaleByte)
        m.d.comb += [
            large.eq(Mux(first_smaller, magnitudes[1], magnitudes[0])),
            small.eq(Mux(first_smaller, magnitudes[0], magnitudes[1])),
            self.pair.eq(Cat(large.as_value()[:7], self.scales[0].sign | self.scales[1].sign)),
        ]

        # |q|·B ≥ r·B_pair as integers: 2|q|·M·8 ≥ 2r·M_pair·8·2^d with d the distance of the exponents, over 8. No E2M1 magnitude bridges a
        # distance of 6: even 6·15 < 8·2^4, and a subnormal pair scale has distance 0.
        distance, far = Signal(range(6)), Signal()
        wide = large.exponent() - small.exponent()
        m.d.comb += [far.eq(wide >= 4), distance.eq(wide[:2])]
        need = Signal(8)
        m.d.comb += need.eq((large.significand() << 1) << distance)

        def reaches(code: int, eighths: int) -> Value:
            doubled = int(2 * E2M1.decode(code))
            return ~far & (small.significand() * (doubled * 4) >= need * (eighths // 2))

        one, two = Signal(8 - ONE), Signal(8 - TWO)
        m.d.comb += [
            one.eq(Cat(reaches(code, 8) for code in range(ONE, 8))),
            two.eq(Cat(reaches(code, 28) for code in range(TWO, 8))),
        ]
        for group, smaller in enumerate((first_smaller, second_smaller)):
            m.d.comb += [
                self.reaches_one[group].eq(one | (~smaller).replicate(len(one))),
                self.reaches_two[group].eq(two | (~smaller).replicate(len(two))),
            ]
        return m
