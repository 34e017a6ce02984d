"""Proofs: weight encoder, digits, packed pairs and pair scales, for every code and every scale byte."""

from pathlib import Path

import pytest
from amaranth.hdl import Cat, Const, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

import hdl.packed_pair
import hdl.weight_encoder
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.scale import ScaleMagnitude
from hdl.lib.verilog import to_verilog
from hdl.packed_pair import Digit, PackedPair
from hdl.weight_encoder import PairScale, WeightEncoder
from model.weight_encoder import WeightEncoderConfig
from tests.formal.cut import Cut
from tests.formal.prove import prove

SPEC = (Path(__file__).parent / "spec.sv").read_text()

# One lane of 32, any one: k is an input.
ENCODER = """
module proof(input mode_nvfp4, input [127:0] row_even, row_odd, input [15:0] scale_even, scale_odd, input [4:0] k{ports});
  wire [159:0] w;
  wire [{scale_top}:0] w_scale;
  {wires}
  dut dut(.mode_nvfp4(mode_nvfp4), .row_even(row_even), .row_odd(row_odd), .scale_even(scale_even), .scale_odd(scale_odd),
          .w(w), .w_scale(w_scale){connections});
  wire [3:0] even = row_even[4*k +: 4], odd = row_odd[4*k +: 4];
  wire [4:0] pair = w[5*k +: 5];
  wire signed [2:0] q0 = spec::digit0(pair), q1 = spec::digit1(pair);
  wire [1:0] even_magnitude, odd_magnitude;
  {magnitudes}
  always @* begin
    canonical: assert (pair == spec::packed_pair(q0, q1));
    if (mode_nvfp4) equation_6: assert (5 * q0 + 2 * q1 == spec::doubled(even));
    else begin
      even_row: assert (q0 == (even[3] ? -$signed({{1'b0, even_magnitude}}) : {{1'b0, even_magnitude}}));
      odd_row: assert (q1 == (odd[3] ? -$signed({{1'b0, odd_magnitude}}) : {{1'b0, odd_magnitude}}));
    end
  end
  {scales}
endmodule
"""

# The pair-scale blocks are cut out: the digits follow from what they say, and they get the two scales of their row.
PAIR = {
    "scale_top": 15,
    "ports": ", input [7:0] pair0, pair1, input [5:0] zero0, zero1, input [3:0] two0, two1",
    "wires": "wire [15:0] scales0, scales1;",
    "connections": "".join(
        f", .pair{i}_scales(scales{i}), .pair{i}_pair(pair{i}), .pair{i}_last_zero(zero{i}), .pair{i}_reaches_two(two{i})"
        for i in (0, 1)
    ),
    "magnitudes": """
  function automatic [1:0] of(input [2:0] code, zero, input [1:0] two);
    of = (code > zero) + (code >= 6 && two[code - 6]);
  endfunction
  assign even_magnitude = of(even[2:0], zero0[3*k[4] +: 3], two0[2*k[4] +: 2]);
  assign odd_magnitude = of(odd[2:0], zero1[3*k[4] +: 3], two1[2*k[4] +: 2]);
  // A code that reaches 2 reaches 1, and code 7 reaches what code 6 does. The proof of the thresholds asserts both.
  genvar i;
  generate for (i = 0; i < 4; i = i + 1) begin
    always @* assume (!two0[i] || zero0[3*(i/2) +: 3] < 6 + i%2);
    always @* assume (!two1[i] || zero1[3*(i/2) +: 3] < 6 + i%2);
  end
  for (i = 0; i < 2; i = i + 1) begin
    always @* assume (!two0[2*i] || two0[2*i + 1]);
    always @* assume (!two1[2*i] || two1[2*i + 1]);
  end endgenerate""",
    "scales": """always @* begin
    scales_even: assert (scales0 == scale_even);
    scales_odd: assert (scales1 == scale_odd);
    scales_out: assert (w_scale == (mode_nvfp4 ? scale_even : {pair1, pair0}));
  end""",
}

GROUP = {
    "scale_top": 31,
    "ports": "",
    "wires": "",
    "connections": "",
    "magnitudes": """
  assign even_magnitude = spec::pair_digit(even[2:0], 7'd1, 7'd1);
  assign odd_magnitude = spec::pair_digit(odd[2:0], 7'd1, 7'd1);""",
    "scales": "always @* scales_out: assert (w_scale == {mode_nvfp4 ? 16'd0 : scale_odd, scale_even});",
}

THRESHOLDS = """
module proof(input [15:0] scales);
  wire [7:0] pair;
  wire [5:0] last_zero;
  wire [3:0] reaches_two;
  dut dut(.scales(scales), .pair(pair), .last_zero(last_zero), .reaches_two(reaches_two));
  always @* larger: assert (pair == {scales[15] | scales[7], scales[14:8] > scales[6:0] ? scales[14:8] : scales[6:0]});
  genvar code, group;
  generate for (group = 0; group < 2; group = group + 1) for (code = 0; code < 8; code = code + 1) begin : of
    wire [1:0] digit = spec::pair_digit(code, scales[8*group +: 7], scales[8*(1-group) +: 7]);
    // Codes below 6 have no bit for digit 2: they never get there.
    always @* begin
      assert ((code > last_zero[3*group +: 3]) == (digit >= 1));
      if (code < 6) assert (digit < 2);
      else begin
        assert (reaches_two[2*group + code - 6] == (digit == 2));
        assert (!reaches_two[2*group + code - 6] || last_zero[3*group +: 3] < code && reaches_two[2*group + 1]);
      end
    end
  end endgenerate
endmodule
"""

DECODERS = """
module proof(input [3:0] code, input [4:0] pair);
  wire [4:0] product0, product1;
  wire sign0, sign1, negative;
  wire [3:0] magnitude;
  wire [2:0] binade, code_binade;
  dut dut(.code(code), .pair(pair), .product0(product0), .product1(product1), .sign0(sign0), .sign1(sign1),
          .magnitude(magnitude), .negative(negative), .binade(binade), .code_binade(code_binade));
  wire signed [6:0] p0 = sign0 ? -$signed({2'b0, product0}) : {2'b0, product0};
  wire signed [6:0] p1 = sign1 ? -$signed({2'b0, product1}) : {2'b0, product1};
  wire signed [4:0] a = spec::doubled(code);
  wire signed [2:0] q0 = spec::digit0(pair), q1 = spec::digit1(pair);
  wire signed [5:0] twice_w = 5 * q0 + 2 * q1;
  // Pairs that stand for an E2M1 weight: their combination is the double of one, and eq. 6 writes that with these digits.
  wire [3:0] size = twice_w < 0 ? -twice_w : twice_w;
  wire signed [2:0] x0 = twice_w < 0 ? -q0 : q0, x1 = twice_w < 0 ? -q1 : q1;
  wire legal = {x0, x1} == {3'sd0, 3'sd0} || {x0, x1} == {3'sd1, -3'sd2} || {x0, x1} == {3'sd0, 3'sd1} || {x0, x1} == {3'sd1, -3'sd1}
            || {x0, x1} == {3'sd0, 3'sd2} || {x0, x1} == {3'sd2, -3'sd2} || {x0, x1} == {3'sd2, -3'sd1} || {x0, x1} == {3'sd2, 3'sd1};
  always @* begin
    // What an adder tree makes of a product and its sign: exclusive or, plus the sign.
    sub_lane_0: assert (p0 == a * q0);
    sub_lane_1: assert (p1 == a * q1);
    if (q0 == 0) bypass_0: assert (product0 == 0);
    if (q1 == 0) bypass_1: assert (product1 == 0);
    code_binades: assert (code_binade == (code[2:1] < 2 ? 3'b001 : code[2:1] == 2 ? 3'b010 : 3'b100));
    if (legal) begin
      weight_magnitude: assert (magnitude == size);
      if (size != 0) weight_sign: assert (negative == (twice_w < 0));
      weight_binade: assert (binade == (size < 4 ? 3'b001 : size < 8 ? 3'b010 : 3'b100));
    end
  end
endmodule
"""


class Decoders(wiring.Component):
    """What the datapath derives from a code and a pair, as ports."""

    code: In(E2M1Code)
    pair: In(PackedPair)
    product0: Out(5)
    product1: Out(5)
    sign0: Out(1)
    sign1: Out(1)
    magnitude: Out(4)
    negative: Out(1)
    binade: Out(3)
    code_binade: Out(3)

    def elaborate(self, platform):
        m = Module()
        q0, q1 = self.pair.q0(), self.pair.q1()
        m.d.comb += [
            self.product0.eq(q0.times(self.code.doubled_magnitude())),
            self.product1.eq(q1.times(self.code.doubled_magnitude())),
            self.sign0.eq(self.code.sign ^ q0.negative),
            self.sign1.eq(self.code.sign ^ q1.negative),
            self.magnitude.eq(self.pair.weight_doubled_magnitude()),
            self.negative.eq(self.pair.weight_negative()),
            self.binade.eq(Cat(*self.pair.weight_binade())),
            self.code_binade.eq(Cat(*self.code.binade())),
        ]
        return m


def encoder_proof(scaling, monkeypatch):
    encoder = WeightEncoder(WeightEncoderConfig(scaling=scaling))
    cuts = {"pair": (hdl.weight_encoder, "PairScale")} if scaling == "pair" else {}
    dut = to_verilog(Cut(encoder, monkeypatch, cuts), "dut")
    text = ENCODER.format(**(PAIR if scaling == "pair" else GROUP))
    return prove(f"encoder_{scaling}", {"dut.v": dut, "spec.sv": SPEC, "proof.sv": text})


@pytest.mark.parametrize("scaling", ["pair", "group"])
def test_every_lane_gets_the_digits_of_equation_6_or_of_both_rows_in_canonical_form(scaling, monkeypatch):
    assert encoder_proof(scaling, monkeypatch).holds


def test_a_wrong_sign_in_equation_6_is_caught(monkeypatch):
    def nvfp4_pair(code, original=hdl.weight_encoder.nvfp4_pair):
        pair = original(code)
        return Cat(pair[:3], pair[3] ^ (code.as_value()[:3] == 7), pair[4])

    monkeypatch.setattr(hdl.weight_encoder, "nvfp4_pair", nvfp4_pair)
    outcome = encoder_proof("group", monkeypatch)
    assert not outcome.holds
    assert "equation_6" in outcome.failed


def test_a_zero_flag_that_is_swapped_in_packing_is_caught(monkeypatch):
    def pack(q0, q1, original=hdl.weight_encoder.pack):
        packed = original(q0, q1)
        escape = ~(q0.nonzero & q1.nonzero)
        return Cat(packed[:2], packed[2] ^ escape & packed[3], packed[3:])

    monkeypatch.setattr(hdl.weight_encoder, "pack", pack)
    assert not encoder_proof("group", monkeypatch).holds


def test_a_digit_of_two_that_is_never_given_is_caught(monkeypatch):
    def rederived(code, last_zero, reaches_two, original=WeightEncoder._rederived):
        return original(code, last_zero, Const(0, 2))

    monkeypatch.setattr(WeightEncoder, "_rederived", staticmethod(rederived))
    outcome = encoder_proof("pair", monkeypatch)
    assert not outcome.holds
    assert set(outcome.failed) <= {"even_row", "odd_row"}


def threshold_proof():
    return prove(
        "pair_scale", {"dut.v": to_verilog(PairScale(), "dut"), "spec.sv": SPEC, "proof.sv": THRESHOLDS}, timeout=60
    )


def test_pair_scale_thresholds_are_the_definition_for_every_code_and_every_two_scale_bytes():
    assert threshold_proof().holds


def test_a_subnormal_scale_with_the_wrong_exponent_is_caught(monkeypatch):
    monkeypatch.setattr(ScaleMagnitude, "exponent", lambda self: self.exponent_field)
    assert not threshold_proof().holds


def decoder_proof():
    return prove("decoders", {"dut.v": to_verilog(Decoders(), "dut"), "spec.sv": SPEC, "proof.sv": DECODERS})


def test_sub_lane_products_and_recovered_weights_are_right_for_every_code_and_pair():
    assert decoder_proof().holds


def test_a_digit_two_that_does_not_shift_is_caught(monkeypatch):
    monkeypatch.setattr(
        Digit, "times", lambda self, magnitude: magnitude & (self.single | self.double).replicate(len(magnitude))
    )
    assert not decoder_proof().holds


def test_a_recovered_weight_without_its_sign_rule_is_caught(monkeypatch):
    def wrong(self, original=PackedPair.weight_doubled_magnitude):
        return Cat(original(self)[:2], ~self.escape & self.f0.double & self.f1.double, original(self)[3], Const(0, 0))

    monkeypatch.setattr(hdl.packed_pair.PackedPair, "weight_doubled_magnitude", wrong)
    assert not decoder_proof().holds
