"""Weight encoder: NVFP4 codes in, packed pairs of AutoFP2 digits out (paper, sections 6.2 and D.7; docs/formats.md)."""

from typing import ClassVar, NamedTuple

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lanes import GROUP
from hdl.lib.arith import selected
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.scale import ScaleByte, ScaleMagnitude
from hdl.lib.verilog import lint_unused
from hdl.packed_pair import PackedPair
from model.formats import E2M1
from model.weight_encoder import WeightEncoderConfig

__all__ = ["PairScale", "WeightEncoder"]

ONE, TWO = 2, 6
"""Smallest E2M1 magnitude codes whose AutoFP2 digit is 1 and 2 under the group's own scale."""


class EncodedDigit(NamedTuple):
    """A digit before packing; each field is 1 bit. ``double`` comes only with ``nonzero``; the sign of a zero digit does not matter."""

    nonzero: Value
    double: Value
    negative: Value


def nvfp4_pair(code: E2M1Code) -> Value:
    """Return the 5-bit packed pair of the digits with ``5 Q0 + 2 Q1 = 2 W`` (paper, equation 6 and table 8)."""
    s, e1, e0, m = code.sign, code.exponent[1], code.exponent[0], code.mantissa[0]
    # Q0 is never alone. Beside it, Q1 has the other sign except for W = ±6.
    nonzero = e1 | e0 | m
    both = m | (e1 & e0)
    six = e1 & e0 & m
    return Cat(e1, s & nonzero, ~(both & e0), ~nonzero | (both & (s == six)), ~both)


def pack(q0: EncodedDigit, q1: EncodedDigit) -> Value:
    """Return the 5-bit packed pair ``{E, F1, F0}`` of two digits."""
    n0, n1 = q0.nonzero, q1.nonzero
    f0 = Cat(q0.double | (q1.double & ~n0), Mux(n0, q0.negative, n1 & q1.negative))
    f1 = Cat(~n0 | q1.double, ~n1 | (n0 & q1.negative))
    return Cat(f0, f1, ~(n0 & n1))


class PairScale(wiring.Component):
    """Common scale of two adjacent groups of a row, and which codes give which digit under it; combinational.

    The larger scale is the pair's. A code of the group with the smaller scale B counts as 1 from ``|q|·B ≥ B_pair`` and as 2 from
    ``|q|·B ≥ 3.5·B_pair`` on; in the other group these are the codes of 1 and 4. Both tests grow with the code, so one code tells where
    1 starts; 2 cannot start below code 6.

    Members
    -------
    scales : In(2 × ScaleByte)
    pair : Out(ScaleByte)
        The byte with the larger low seven bits; its sign bit is set if either's is, so that a bad scale stays visible.
    last_zero : Out(2 × 3)
        For each group, the largest magnitude code whose digit is 0, 1 to 7.
    reaches_two : Out(2 × 2)
        For each group, bit i: magnitude code 6 + i gives digit 2.
    """

    scales: In(data.ArrayLayout(ScaleByte, 2))
    pair: Out(ScaleByte)
    last_zero: Out(data.ArrayLayout(3, 2))
    reaches_two: Out(data.ArrayLayout(8 - TWO, 2))

    def elaborate(self, platform: object) -> Module:
        """Build the comparators, once for the group with the smaller scale."""
        m = Module()
        first, second = (byte.magnitude for byte in self.scales)
        first_smaller = Signal()
        m.d.comb += first_smaller.eq(first.as_value() < second.as_value())
        large, small = Signal(ScaleMagnitude), Signal(ScaleMagnitude)
        m.d.comb += [
            large.eq(Mux(first_smaller, second.as_value(), first.as_value())),
            small.eq(Mux(first_smaller, first.as_value(), second.as_value())),
            self.pair.eq(Cat(large, self.scales[0].sign | self.scales[1].sign)),
        ]

        # |q|·B ≥ r·B_pair as integers: 8|q|·M ≥ 8r·M_pair·2^d with d the distance of the exponents. No magnitude bridges a distance of 4:
        # then M_pair ≥ 8 (a subnormal pair scale has distance 0), and 6·15 < 8·2^4.
        # Distances of both orders are there when it is known which one counts, and multiples before they are shifted.
        significand, seven, need, needed_seven = Signal(4), Signal(7), Signal(7), Signal(10)
        distance = Signal(4)
        m.d.comb += [
            distance.eq(Mux(first_smaller, second.exponent() - first.exponent(), first.exponent() - second.exponent())),
            significand.eq(large.significand()),
            seven.eq((significand << 3) - significand),
        ]
        for target, value in ((need, significand), (needed_seven, seven)):
            m.d.comb += target.eq(selected([Cat(Const(0, shift), value) for shift in range(4)], distance[:2]))
        far = distance[2:].any()
        single, triple = Signal(4), Signal(6)
        m.d.comb += [single.eq(small.significand()), triple.eq(single * 3)]

        def reaches(code: int, eighths: int) -> Value:
            # 4·|q|·M ≥ 4r·M_pair·2^d, with 4|q| = factor · 2^shift.
            fourfold = int(4 * E2M1.decode(code))
            factor, shift = (triple, fourfold // 3) if fourfold % 3 == 0 else (single, fourfold)
            bound = needed_seven if eighths == 28 else need
            return ~far & (
                Cat(Const(0, shift.bit_length() - 1), factor) >= Cat(Const(0, 1 if eighths == 28 else 2), bound)
            )

        one = [reaches(code, 8) for code in range(ONE, 8)]
        last_zero, two = Signal(3), Signal(8 - TWO)
        m.d.comb += [
            last_zero.eq(
                Mux(
                    one[2],
                    Mux(one[0], 1, Mux(one[1], 2, 3)),
                    Mux(one[4], Mux(one[3], 4, 5), Mux(one[5], 6, 7)),
                )
            ),
            two.eq(Cat(reaches(code, 28) for code in range(TWO, 8))),
        ]
        # Equal scales pass every test that the larger one does, so it does not matter which of them is tested.
        for group, tested in enumerate((first_smaller, ~first_smaller)):
            m.d.comb += [
                self.last_zero[group].eq(Mux(tested, last_zero, ONE - 1)),
                self.reaches_two[group].eq(two | (~tested).replicate(len(two))),
            ]
        return m


class WeightEncoder(wiring.Component):
    """Turn NVFP4 weights into the packed pairs that a vMAC takes, one vector per cycle.

    NVFP4 and AutoFP6: lane k gets the two digits of the even row's weight k, the odd row is ignored and the scales pass. AutoFP2: lane k
    gets a digit of each row, under the pair scales. Results are those of :func:`model.weight_encoder.encode`, bit for bit.

    Parameters
    ----------
    config : WeightEncoderConfig
        Lanes, scaling, and whether the outputs are registers.

    Members
    -------
    mode_nvfp4 : In(1)
    row_even, row_odd : In(lanes × E2M1)
    scale_even, scale_odd : In(lanes / 16 × ScaleByte)
    w : Out(lanes × PackedPair)
    w_scale : Out(ScaleByte each)
        As the vMAC's port of that name.

    Attributes
    ----------
    latency : int
        0, or 1 with registered outputs.
    """

    throughput: ClassVar[str] = "1 vector per cycle"
    port_meanings: ClassVar[dict[str, str]] = {
        "mode_nvfp4": "1 NVFP4 or AutoFP6, 0 AutoFP2",
        "row_even": "E2M1 weight k of the even output row at [4k+3:4k]",
        "row_odd": "E2M1 weight k of the odd output row at [4k+3:4k]; ignored with mode_nvfp4",
        "scale_even": "E4M3 scale of group j of the even row at [8j+7:8j]",
        "scale_odd": "E4M3 scale of group j of the odd row at [8j+7:8j]; ignored with mode_nvfp4",
        "w": "packed pair of lane k at [5k+4:5k]",
        "w_scale": "E4M3 scales as the vMAC's port of that name takes them",
    }

    def __init__(self, config: WeightEncoderConfig | None = None):
        self._config = config = config or WeightEncoderConfig()
        super().__init__(
            {
                "mode_nvfp4": In(1),
                "row_even": In(data.ArrayLayout(E2M1Code, config.lanes)),
                "row_odd": In(data.ArrayLayout(E2M1Code, config.lanes)),
                "scale_even": In(data.ArrayLayout(ScaleByte, config.blocks)),
                "scale_odd": In(data.ArrayLayout(ScaleByte, config.blocks)),
                "w": Out(data.ArrayLayout(PackedPair, config.lanes)),
                "w_scale": Out(data.ArrayLayout(ScaleByte, config.w_scale_bytes)),
            }
        )
        if config.scaling == "group":
            self.row_odd.as_value().attrs.update(lint_unused("the plain remap ignores mantissas"))

    @property
    def config(self) -> WeightEncoderConfig:
        """The configuration that this component was built with."""
        return self._config

    @property
    def latency(self) -> int:
        """Cycles from a vector to its pairs."""
        return int(self._config.registered)

    def elaborate(self, platform: object) -> Module:
        """Build pair scales, digits and packing."""
        m = Module()
        config = self._config
        rows = ((self.row_even, self.scale_even), (self.row_odd, self.scale_odd))
        domain = m.d.sync if config.registered else m.d.comb

        digits: list[list[EncodedDigit]] = []
        pair_scales: list[list[Value]] = []
        for name, (row, scales) in zip(("even", "odd"), rows, strict=True):
            if config.scaling == "group":
                digits.append([self._remapped(code) for code in row])
                continue
            digits.append([])
            pair_scales.append([])
            for first in range(0, config.blocks, 2):
                pair = PairScale()
                m.submodules[f"pair_{name}{first // 2}"] = pair
                m.d.comb += [pair.scales[0].eq(scales[first]), pair.scales[1].eq(scales[first + 1])]
                pair_scales[-1].append(pair.pair.as_value())
                for group in range(2):
                    for k in range(GROUP * (first + group), GROUP * (first + group + 1)):
                        digits[-1].append(self._rederived(row[k], pair.last_zero[group], pair.reaches_two[group]))

        for k in range(config.lanes):
            split = pack(digits[0][k], digits[1][k])
            domain += self.w[k].eq(Mux(self.mode_nvfp4, nvfp4_pair(self.row_even[k]), split))

        if config.scaling == "group":
            odd = [byte.as_value() & (~self.mode_nvfp4).replicate(8) for byte in self.scale_odd]
            # Not the even bytes themselves, or they would pass this block by and leave inputs that nothing uses.
            split = [*(byte.as_value() & Const(0xFF, 8) for byte in self.scale_even), *odd]
            domain += self.w_scale.eq(Cat(*split))
        else:
            split = [row[i] for i in range(config.blocks // 2) for row in pair_scales]
            domain += self.w_scale.eq(Mux(self.mode_nvfp4, self.scale_even.as_value(), Cat(*split)))
        return m

    @staticmethod
    def _remapped(code: E2M1Code) -> EncodedDigit:
        _, below_four, four_up = code.binade()
        return EncodedDigit(below_four | four_up | code.exponent[0], four_up, code.sign)

    @staticmethod
    def _rederived(code: E2M1Code, last_zero: Value, reaches_two: Value) -> EncodedDigit:
        magnitude = Cat(code.mantissa, code.exponent)
        one = magnitude > last_zero
        two = code.exponent.all() & (reaches_two[0] | (reaches_two[1] & code.mantissa[0]))
        return EncodedDigit(one, two, code.sign)
