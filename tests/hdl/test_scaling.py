"""Block scaling: edge scales worked by hand, and what the input registers keep."""

from amaranth.hdl import Module
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.scale import ScaleByte
from hdl.scaling import ALIGNED_GROWTH, MAX_SHIFT, BlockScaler, input_registers
from tests.hdl.simulate import evaluate, signed

LARGEST, ONE, SMALLEST, ZERO, NAN = 0x7E, 0x38, 0x01, 0x00, 0x7F
WIDTH = 15


class Registers(wiring.Component):
    code: In(4)
    scales: In(data.ArrayLayout(ScaleByte, 2))
    code_q: Out(4)
    scales_q: Out(14)

    def elaborate(self, platform):
        m = Module()
        stage = input_registers(m, self, ["code", "scales"])
        m.d.comb += [self.code_q.eq(stage["code"]), self.scales_q.eq(stage["scales"])]
        return m


def aligned(rows):
    rows = [dict(zip(("o", "w_scale", "a_scale", "half"), row, strict=True)) for row in rows]
    found = evaluate(BlockScaler(WIDTH), rows, ["aligned"], clocked=True, latency=2)
    return [signed(value, WIDTH + ALIGNED_GROWTH) for (value,) in found]


def test_edge_scales_give_the_values_worked_by_hand():
    cases = {
        # significands 14 and 14, exponents 15 and 15
        (LARGEST, LARGEST): 196 << 28,
        # subnormal: significand 1, exponent 1 as of the smallest normal number
        (SMALLEST, SMALLEST): 1,
        (LARGEST, SMALLEST): 14 << 14,
        (SMALLEST, LARGEST): 14 << 14,
        (0x08, SMALLEST): 8,  # the smallest normal number
        (0x07, SMALLEST): 7,
        # 1.0 is 8 · 2⁻³: exponents 7 and 7
        (ONE, ONE): 64 << 12,
        (ZERO, LARGEST): 0,
        (LARGEST, ZERO): 0,
        # NaN reads as its bits say
        (NAN, NAN): 225 << 28,
        (NAN, ONE): 120 << 20,
    }
    values = [69, -69, 1, -1, 9408, -9408, 0]
    found = aligned([(o & 0x7FFF, *scales, 0) for o in values for scales in cases])
    assert found == [o * factor for o in values for factor in cases.values()]


def test_half_units_double_the_result():
    assert aligned([(69, ONE, ONE, 1), (69, ONE, ONE, 0), (-8191 & 0x7FFF, LARGEST, LARGEST, 1)]) == [
        69 * 64 << 13,
        69 * 64 << 12,
        -8191 * 196 << 29,
    ]


def test_the_largest_distance_of_an_exponent_is_28():
    assert (MAX_SHIFT, ALIGNED_GROWTH) == (28, 36)


def test_a_result_comes_every_cycle_two_cycles_after_its_operands():
    rows = [{"o": o, "w_scale": SMALLEST, "a_scale": SMALLEST, "half": 0} for o in (5, 6, 7, 8)]
    found = evaluate(BlockScaler(WIDTH), rows, ["aligned"], clocked=True, latency=1)
    assert found[1:] == [(5,), (6,), (7,)]


def test_registers_keep_codes_and_the_magnitudes_of_scales_for_one_cycle():
    rows = [{"code": 9, "scales": 0xFF81}, {"code": 6, "scales": 0x387E}]
    found = evaluate(Registers(), rows, ["code_q", "scales_q"], clocked=True, latency=1)
    assert found == [(9, 0x7F << 7 | 0x01), (6, 0x38 << 7 | 0x7E)]
