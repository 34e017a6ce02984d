"""Proofs: scaling and accumulation are exact, saturate where they should, and never overflow within the longest reduction."""

from pathlib import Path

import numpy as np
import pytest
from amaranth.hdl import Cat, Const, Module, Mux, Signal

import hdl.accumulate
from hdl.accumulate import DualAccumulator, Saturate
from hdl.lib.scale import ScaleMagnitude
from hdl.lib.verilog import to_verilog
from hdl.scaling import ALIGNED_GROWTH, BlockScaler
from model.formats import E4M3
from model.vmac import GROUP, Vectors, VmacConfig, vmac
from sim.harness import BulkHarness
from tests.formal.prove import prove

SPEC = (Path(__file__).parent / "spec.sv").read_text()

# Two scalers with the same dot product and significands. The first has exponents of 1 and no half, so its result is the product; the second's
# must be that product, shifted. Two register stages without feedback: three cycles are everything. That products are as small as assumed
# follows from the exhaustive test of the multiplier, which also covers the lowest exponents.
SHIFTS = """
module proof(input clk, input signed [14:0] o, input half, input [6:0] w_scale, a_scale);
  function automatic [6:0] lowest(input [6:0] scale);
    lowest = {3'b000, scale[6:3] != 0, scale[2:0]};
  endfunction
  wire signed [50:0] aligned, product;
  dut dut(.clk(clk), .o(o), .half(half), .w_scale(w_scale), .a_scale(a_scale), .aligned(aligned));
  dut base(.clk(clk), .o(o), .half(1'b0), .w_scale(lowest(w_scale)), .a_scale(lowest(a_scale)), .aligned(product));
  reg [1:0] age = 0;
  reg [4:0] shift1, shift2;
  reg fits1, fits2;
  always @(posedge clk) begin
    if (age < 2) age <= age + 1;
    shift1 <= spec::exponent(w_scale) + spec::exponent(a_scale) - 2 + half;
    shift2 <= shift1;
    fits1 <= !half || (o >= -8192 && o < 8192);
    fits2 <= fits1;
  end
  wire signed [79:0] wide = product;
  wire signed [79:0] exact = wide <<< shift2;
  wire signed [79:0] result = aligned;
  always @* if (age == 2) begin
    assume (product >= -(51'sd1 << 22) && product < (51'sd1 << 22));
    if (fits2) shifted: assert (result == exact);
  end
endmodule
"""


def shift_outcome():
    return prove("scaler", {"dut.v": to_verilog(BlockScaler(15), "dut"), "spec.sv": SPEC, "proof.sv": SHIFTS}, cycles=3)


def test_the_scaler_shifts_by_both_exponents_without_overflow_for_every_dot_product_and_scale():
    assert shift_outcome().holds


def test_an_exponent_without_its_top_bit_is_caught(monkeypatch):
    monkeypatch.setattr(ScaleMagnitude, "exponent", lambda self, original=ScaleMagnitude.exponent: original(self)[:3])
    outcome = shift_outcome()
    assert not outcome.holds
    assert outcome.failed == ("shifted",)


def wrong_products():
    """Give, for a weight's significand after the other, how many products of the scaler differ from ``o · M_W · M_A``: every 15-bit o, every
    other significand, at the lowest exponents.
    """
    width = 15
    component = BlockScaler(width)
    ports = [
        {"name": name, "direction": "output" if name == "aligned" else "input", "width": bits}
        for name, bits in (
            ("o", width),
            ("half", 1),
            ("w_scale", 7),
            ("a_scale", 7),
            ("aligned", width + ALIGNED_GROWTH),
        )
    ]
    ports.insert(0, {"name": "clk", "direction": "input", "width": 1})
    harness = BulkHarness({"dut.v": to_verilog(component, "dut")}, {"top": "dut", "ports": ports})
    # Bytes 0 to 15 are the significands 0 to 15, all with exponent 1.
    dots = np.arange(1 << width)
    for w in reversed(range(16)):
        a = np.arange(16)
        o, a_scale = (grid.ravel() for grid in np.meshgrid(dots, a))
        pad = np.zeros(2, np.int64)
        o, a_scale = np.concatenate([o, pad]), np.concatenate([a_scale, pad])
        row = {"o": o, "half": np.zeros_like(o), "w_scale": np.full_like(o, w), "a_scale": a_scale}
        aligned = harness.run(row)["aligned"].astype(np.int64)
        signed = (o ^ 1 << width - 1) - (1 << width - 1)
        expected = (signed * w * a_scale) % (1 << width + ALIGNED_GROWTH)
        # A row's outputs are seen at the end of its cycle, before the clock edge that takes it.
        yield int((aligned[2:] != expected[:-2]).sum())


def test_the_scaler_multiplies_exactly_for_every_dot_product_and_every_two_significands():
    assert list(wrong_products()) == [0] * 16


def test_a_significand_without_its_hidden_bit_is_caught(monkeypatch):
    monkeypatch.setattr(ScaleMagnitude, "significand", lambda self: self.mantissa)
    assert any(wrong_products())


def test_a_subnormal_scale_shifted_by_its_exponent_field_is_caught(monkeypatch):
    monkeypatch.setattr(ScaleMagnitude, "exponent", lambda self: self.exponent_field)
    assert any(wrong_products())


ACCUMULATOR = """
module proof(input exact, input signed [{top}:0] even, odd, input [63:0] psum);
  wire [63:0] total;
  wire saturated;
  dut dut({exact_port}.even(even), .odd(odd), .psum(psum), .total(total), .saturated(saturated));
  // Wide enough for everything.
  wire signed [127:0] wide_even = even, wide_odd = odd, low = $signed(psum[31:0]), high = $signed(psum[63:32]);
  wire signed [127:0] unit = 128'sd1 <<< {shift};
  wire signed [127:0] all = wide_even + wide_odd + psum;
  // Rounded to the nearest unit, a half up.
  function automatic signed [127:0] rounded(input signed [127:0] value);
    rounded = (value + (unit >>> 1)) >>> {shift};
  endfunction
  wire signed [127:0] sum_even = low + rounded(wide_even), sum_odd = high + rounded(wide_odd);
  function automatic over(input signed [127:0] sum);
    over = sum > 128'sd2147483647 || sum < -128'sd2147483648;
  endfunction
  function automatic [31:0] clamped(input signed [127:0] sum);
    clamped = sum > 128'sd2147483647 ? 32'h7fffffff : sum < -128'sd2147483648 ? 32'h80000000 : sum[31:0];
  endfunction
  always @* if ({exact}) begin
    exact_sum: assert (total == all[63:0]);
    never_saturated: assert (!saturated);
  end else begin
    even_half: assert (total[31:0] == clamped(sum_even));
    odd_half: assert (total[63:32] == clamped(sum_odd));
    reported: assert (saturated == (over(sum_even) || over(sum_odd)));
  end
endmodule
"""


def accumulator_outcome(width, shift, *, switchable=True):
    text = ACCUMULATOR.format(
        top=width - 1,
        shift=shift,
        exact="exact" if switchable else "1'b0",
        exact_port=".exact(exact), " if switchable else "",
    )
    dut = to_verilog(DualAccumulator(width, shift, switchable=switchable), "dut")
    return prove("accumulator", {"dut.v": dut, "proof.sv": text})


@pytest.mark.parametrize(
    ("width", "shift", "switchable"),
    [
        (VmacConfig().total_bits, 24, True),
        (VmacConfig().total_bits, VmacConfig().total_bits - 32, True),
        (VmacConfig(lanes=128, refinement="inplace", step="exponent", window_shift=40).total_bits, 40, True),
        (27, 1, False),
    ],
)
def test_the_accumulator_adds_exactly_or_rounds_and_saturates_both_halves(width, shift, switchable):
    assert accumulator_outcome(width, shift, switchable=switchable).holds


def test_halves_that_wrap_in_place_of_saturating_are_caught(monkeypatch):
    class Wrapping(Saturate):
        def elaborate(self, platform):
            m = Module()
            m.d.comb += [self.saturated.eq(0), self.clamped.eq(self.total)]
            return m

    monkeypatch.setattr(hdl.accumulate, "Saturate", Wrapping)
    assert not accumulator_outcome(50, 24).holds


def test_a_carry_from_the_even_into_the_odd_half_is_caught(monkeypatch):
    def switched(self, m, windowed, round_up):
        total = (Cat(*windowed) + self.psum + Cat(round_up[0], Const(0, 31), round_up[1]))[:64]
        with m.If(self.exact):
            m.d.comb += self._sum.eq(self.psum + self.even + self.odd)
        with m.Else():
            m.d.comb += self._sum.eq(total)
        return windowed, [self._sum[:32], self._sum[32:]]

    monkeypatch.setattr(DualAccumulator, "_sum", Signal(64), raising=False)
    monkeypatch.setattr(DualAccumulator, "_switched", switched)
    outcome = accumulator_outcome(50, 24)
    assert not outcome.holds
    assert set(outcome.failed) <= {"odd_half", "reported"}


def test_a_carry_that_stops_between_the_halves_of_an_exact_sum_is_caught(monkeypatch):
    def switched(self, m, windowed, round_up, original=DualAccumulator._switched):
        addends, (low, high) = original(self, m, windowed, round_up)
        without_carry = (self.psum[32:] + self.even[32:] + self.odd[32:])[:32]
        return addends, [low, Mux(self.exact, without_carry, high)]

    monkeypatch.setattr(DualAccumulator, "_switched", switched)
    outcome = accumulator_outcome(50, 24)
    assert not outcome.holds
    assert outcome.failed == ("exact_sum",)


def test_rounding_that_is_left_out_is_caught(monkeypatch):
    def switched(self, m, windowed, round_up, original=DualAccumulator._switched):
        return original(self, m, windowed, [Const(0, 1), Const(0, 1)])

    monkeypatch.setattr(DualAccumulator, "_switched", switched)
    outcome = accumulator_outcome(50, 24)
    assert not outcome.holds


CONFIGURATIONS = [
    VmacConfig(),
    VmacConfig(refinement="none"),
    VmacConfig(step="exponent"),
    VmacConfig(refinement="inplace"),
    VmacConfig(refinement="inplace", step="exponent"),
]
LONGEST = 1 << 18


def largest_block(config):
    """Value of a block in which everything is as large as software can make it."""
    negative = np.full((1, config.lanes), 0b1111, np.uint8)
    # The pair of weight -6 is (-2, -1): F1 = 10, F0 = 11. All offsets are -2 and all weights refined: every term is positive.
    w = np.full((1, config.lanes), 0b01011, np.uint8)
    if config.refinement == "slots":
        records = [0b000100000000 | s << 9 | 0b10101010 for s in range(config.slots_per_block)] * config.blocks
    else:
        records = [0xF << 32 | 0xAAAAAAAA] * config.records
    scales = np.full((1, config.blocks), E4M3.max_code, np.uint8)
    vectors = Vectors(
        *(np.array([True]), np.array([config.refinement != "none"]), negative, w, scales, scales),
        np.array([records], np.uint64).reshape(1, -1),
        np.zeros(1, np.uint64),
    )
    result = vmac(config, vectors)
    assert int(result.o[0, 0]) == config.output_limit
    return int(result.psum[0]) // config.blocks


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: f"{c.refinement}-{c.step}")
def test_no_sum_of_max_k_elements_overflows_64_bits_and_one_block_more_can(config):
    # Every prefix of a sum is within its number of blocks times the largest block, whatever the order and the signs.
    limit = config.output_limit * 14 * 14 << 28
    assert largest_block(config) == limit
    blocks = config.max_k // GROUP
    assert blocks * limit <= 2**63 - 1 < (blocks + 1) * limit
    assert limit.bit_length() < config.aligned_bits <= config.output_bits + ALIGNED_GROWTH


@pytest.mark.parametrize("config", CONFIGURATIONS[:4], ids=lambda c: f"{c.refinement}-{c.step}")
def test_max_k_reaches_the_longest_reduction(config):
    assert config.max_k >= LONGEST


def test_the_largest_offsets_in_place_leave_a_little_less_than_the_longest_reduction():
    config = CONFIGURATIONS[4]
    assert config.max_k == LONGEST - 1280
    assert LONGEST // GROUP * largest_block(config) >= 2**63
