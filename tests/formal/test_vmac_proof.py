"""Proofs: the vMACs connect their blocks as they should, in the right cycle, and report the right status, whatever the blocks compute."""

import pytest
from amaranth.hdl import Const

import hdl.refinement
import hdl.vmac
from hdl.lib.scale import ScaleByte
from hdl.lib.verilog import to_verilog
from hdl.vmac import ModeReduction, Vmac
from model.vmac import VmacConfig
from tests.formal.cut import Cut
from tests.formal.prove import prove

CONFIGURATIONS = {
    "slots": VmacConfig(),
    "64 lanes": VmacConfig(lanes=64, slots_per_block=4, step="exponent"),
    "in place, group scales": VmacConfig(refinement="inplace", scaling="group", window_shift=26),
    "none": VmacConfig(refinement="none"),
    "fast": VmacConfig(pipeline="fast"),
    "fast, group scales": VmacConfig(refinement="none", scaling="group", pipeline="fast"),
}


def cut_vmac(config, monkeypatch):
    """The vMAC's wires and registers alone."""
    blocks = {"digits": "DigitBlock", "reduction": "ModeReduction", "scaler": "BlockScaler", "acc": "DualAccumulator"}
    if config.refinement != "none":
        blocks["gate"] = "RecordGate"
        blocks["refinement"] = {"slots": "SlotRefinement", "inplace": "InPlaceRefinement"}[config.refinement]
    return Cut(Vmac(config), monkeypatch, {prefix: (hdl.vmac, name) for prefix, name in blocks.items()})


def width(component, name):
    member = component.signature.members[name]
    return member.shape.width if hasattr(member.shape, "width") else int(member.shape)


def wiring_proof_text(config, dut):
    """Write what each block must get; x1, x2, x3 is input x, or a cut block's output, one, two and three cycles ago.

    A fast vMAC has registers behind its trees and refinement, and all that follows but the scales is a cycle later.
    """
    fast = config.pipeline == "fast"
    behind, reduced, accumulated = ("1", "mode_nvfp42", "mode_nvfp44") if fast else ("", "mode_nvfp41", "mode_nvfp43")
    latency = 5 if fast else 4
    refined, group = config.refinement != "none", config.scaling == "group"
    blocks, n = config.blocks, config.w_scale_bytes
    ins = [name for name, member in dut.signature.members.items() if member.flow.name == "In"]
    outs = [name for name in dut.signature.members if name not in ins]
    ports = ["input clk", "input rst", *(f"input [{width(dut, name) - 1}:0] {name}" for name in ins)]
    lines = [f"module proof({', '.join(ports)});"]
    lines += [f"  wire [{width(dut, name) - 1}:0] {name};" for name in outs]
    lines += ["  dut dut(.clk(clk), .rst(rst), " + ", ".join(f".{name}({name})" for name in [*ins, *outs]) + ");"]
    delayed = ["mode_nvfp4", "a", "w", "a_scale", "w_scale", *(f"gate{j}_held" for j in range(blocks) if refined)]
    if fast:
        delayed += [f"digits{j}_{row}" for j in range(blocks) for row in ("even", "odd")]
        delayed += [f"refinement{j}_r" for j in range(blocks) if refined]
    lines += [f"  reg [{width(dut, x) - 1}:0] {x}1;" for x in delayed]
    lines += ["  reg mode_nvfp42, mode_nvfp43, mode_nvfp44;", f"  reg [{width(dut, 'acc0_total') - 1}:0] total1;"]
    valid = [f"v{n}" for n in range(1, latency + 1)]
    lines += ["  reg [2:0] age = 0;", f"  reg {' = 0, '.join(valid)} = 0, nan = 0, sat = 0, illegal = 0;"]
    # Scale bytes that the vector's mode uses: all, but in NVFP4 mode not the odd row's, in AutoFP2 mode with pair scales not the odd blocks'.
    bad = [
        (f"{port}[{8 * i + 7}] || {port}[{8 * i} +: 7] == 7'h7f", when)
        for port, count in (("w_scale", n), ("a_scale", blocks))
        for i in range(count)
        for when in [
            "!mode_nvfp4"
            if port == "w_scale" and i >= blocks
            else "mode_nvfp4"
            if port == "a_scale" and i % 2 and not group
            else "1'b1"
        ]
    ]
    any_bad = " || ".join(f"({when} && ({byte}))" for byte, when in bad)
    lines += ["  always @(posedge clk) begin", "    if (age < 5) age <= age + 1;"]
    lines += [f"    {x}1 <= {x};" for x in delayed]
    lines += [
        "    mode_nvfp42 <= mode_nvfp41; mode_nvfp43 <= mode_nvfp42; mode_nvfp44 <= mode_nvfp43; total1 <= acc0_total;"
    ]
    lines += [f"    {{{', '.join(valid)}}} <= rst ? 0 : {{valid_i, {', '.join(valid[:-1])}}};"]
    lines += [f"    nan <= !rst && (nan || (valid_i && ({any_bad})));"]
    lines += [f"    sat <= !rst && (sat || ({valid[-2]} && acc0_saturated));"]
    if refined:
        lines += ["    illegal <= !rst && (illegal || (valid_i && refine_en && !mode_nvfp4));"]
    lines += ["  end", "  always @* begin"]

    def check(condition, age=0):
        lines.append(f"    if (age >= {age}) assert ({condition});")

    check(f"valid_o == {valid[-1]}")
    check("status == {nan, sat, illegal}")
    check("!valid_o || psum_o == total1", 1)
    check("acc0_psum == psum_i")
    check(f"acc0_exact == {accumulated}", latency - 1)
    for j in range(blocks):
        check(f"digits{j}_a == a1[{64 * j} +: 64]", 1)
        check(f"digits{j}_w == w1[{80 * j} +: 80]", 1)
        if refined:
            bits = config.record_bits * config.records // blocks
            check(f"refinement{j}_a == a1[{64 * j} +: 64]", 1)
            check(f"refinement{j}_w == w1[{80 * j} +: 80]", 1)
            check(f"gate{j}_record == refine[{bits * j} +: {bits}]")
            check(f"gate{j}_enable == (refine_en && mode_nvfp4)")
            check(f"refinement{j}_held == gate{j}_held1", 1)

    # Of each scaler: dot product, whether in half units, place of its two scale bytes. In the order in which the vMAC makes them.
    scalers, even, odd = [], [], []
    for p in range(blocks // 2):
        i, j = 2 * p, 2 * p + 1
        check(f"reduction{p}_mode_nvfp4 == {reduced}", 2)
        for port, tree in (
            ("a", f"digits{i}_even"),
            ("b", f"digits{i}_odd"),
            ("c", f"digits{j}_even"),
            ("d", f"digits{j}_odd"),
        ):
            check(f"reduction{p}_{port} == {tree}{behind}", 2)
        if refined:
            check(f"reduction{p}_r0 == refinement{i}_r{behind} && reduction{p}_r1 == refinement{j}_r{behind}", 2)
        if group:
            unit = 4 if refined else 1
            even.append(len(scalers))
            scalers.append((f"({reduced} ? 0 : {unit} * $signed(digits{j}_even{behind}))", "1'b1", f"{j}", f"{j}"))
            odd.append(len(scalers))
            scalers.append(
                (f"({reduced} ? 0 : {unit} * $signed(digits{i}_odd{behind}))", "1'b1", f"{blocks + i}", f"{i}")
            )
        even.append(len(scalers))
        scalers.append((f"$signed(reduction{p}_o0)", "!mode_nvfp41", f"{i}", f"{i}"))
        odd.append(len(scalers))
        scalers.append(
            (
                f"$signed(reduction{p}_o1)",
                "1'b0",
                f"(mode_nvfp41 ? {j} : {blocks + j})" if group else f"{j}",
                f"{j}" if group else f"(mode_nvfp41 ? {j} : {i})",
            )
        )
    for s, (o, half, w_byte, a_byte) in enumerate(scalers):
        check(f"$signed(scaler{s}_o) == {o}", 2)
        check(f"scaler{s}_half == {half}", 1)
        check(f"scaler{s}_w_scale == w_scale1[8 * {w_byte} +: 7]", 1)
        check(f"scaler{s}_a_scale == a_scale1[8 * {a_byte} +: 7]", 1)
    unit = 1 if refined else 4
    sums = []
    for port, terms in (("even", even), ("odd", odd)):
        total = " + ".join(f"$signed(scaler{s}_aligned)" for s in terms)
        sums.append(f"  wire signed [63:0] sum_{port} = {unit} * ({total});")
        check(f"acc0_{port} == sum_{port}[{width(dut, 'acc0_even') - 1}:0]")
    place = lines.index("  always @* begin")
    return "\n".join([*lines[:place], *sums, *lines[place:], "  end", "endmodule"])


def wiring_outcome(config, monkeypatch):
    dut = cut_vmac(config, monkeypatch)
    text = wiring_proof_text(config, dut)
    return prove("vmac", {"dut.v": to_verilog(dut, "dut"), "proof.sv": text}, cycles=6, induction=True)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_block_gets_its_operands_in_its_cycle_and_valid_and_status_are_right(name, monkeypatch):
    assert wiring_outcome(CONFIGURATIONS[name], monkeypatch).holds


def test_refinement_that_ignores_refine_en_is_caught(monkeypatch):
    def elaborate(self, platform, original=Vmac.elaborate):
        port, self.refine_en = self.refine_en, Const(1, 1)
        m = original(self, platform)
        self.refine_en = port
        return m

    monkeypatch.setattr(Vmac, "elaborate", elaborate)
    outcome = wiring_outcome(CONFIGURATIONS["slots"], monkeypatch)
    assert not outcome.holds
    assert "_enable == (refine_en" in str(outcome.failed)


def test_scales_of_swapped_blocks_are_caught(monkeypatch):
    def input_registers(m, component, names, original=hdl.vmac.input_registers):
        stage = original(m, component, names)
        return stage | {"w_scale": [stage["w_scale"][1], stage["w_scale"][0]]}

    monkeypatch.setattr(hdl.vmac, "input_registers", input_registers)
    outcome = wiring_outcome(CONFIGURATIONS["slots"], monkeypatch)
    assert not outcome.holds
    assert "w_scale1" in str(outcome.failed)


def test_a_valid_bit_that_comes_a_cycle_late_is_caught(monkeypatch):
    monkeypatch.setattr(VmacConfig, "latency", 5)
    outcome = wiring_outcome(CONFIGURATIONS["slots"], monkeypatch)
    assert not outcome.holds
    assert "valid_o == v4" in str(outcome.failed)


def test_scales_a_cycle_late_in_the_fast_pipeline_are_caught(monkeypatch):
    def input_registers(m, component, names, original=hdl.vmac.input_registers):
        stage = original(m, component, names)
        return stage | {"a_scale": [hdl.vmac.registered(m, "late", scale) for scale in stage["a_scale"]]}

    monkeypatch.setattr(hdl.vmac, "input_registers", input_registers)
    outcome = wiring_outcome(CONFIGURATIONS["fast, group scales"], monkeypatch)
    assert not outcome.holds
    assert "a_scale1" in str(outcome.failed)


def test_a_scale_byte_with_its_sign_set_that_goes_unreported_is_caught(monkeypatch):
    monkeypatch.setattr(ScaleByte, "is_nan", lambda self: self.magnitude.as_value().all())
    outcome = wiring_outcome(CONFIGURATIONS["in place, group scales"], monkeypatch)
    assert not outcome.holds
    assert "status ==" in str(outcome.failed)


def test_a_saturation_that_is_not_reported_is_caught(monkeypatch):
    def report(self, m, saturated, original=Vmac._report):
        original(self, m, saturated & self.valid_i)

    monkeypatch.setattr(Vmac, "_report", report)
    outcome = wiring_outcome(CONFIGURATIONS["none"], monkeypatch)
    assert not outcome.holds
    assert "status ==" in str(outcome.failed)


REDUCTION = """
module proof(input mode_nvfp4, input signed [9:0] a, b, c, d, input signed [{r_top}:0] r0, r1);
  wire signed [{o_top}:0] o0, o1;
  dut dut(.mode_nvfp4(mode_nvfp4), .a(a), .b(b), .c(c), .d(d), {connections} .o0(o0), .o1(o1));
  function automatic within(input signed [31:0] value, input signed [31:0] limit);
    within = value >= -limit && value <= limit;
  endfunction
  wire trees = within(a, 384) && within(b, 384) && within(c, 384) && within(d, 384);
  // O in the units of this hardware: sixteenths with refinement, quarters without; AutoFP2's even row comes in half of that.
  wire signed [31:0] nvfp4_0 = {unit} * (5 * a + 2 * b) + r0, nvfp4_1 = {unit} * (5 * c + 2 * d) + r1;
  wire signed [31:0] even = {unit} * ({even}), odd = {unit} * 2 * ({odd});
  // One block's base sum is limited as a whole: a and b share their activations. Sums beyond O's limit do not occur.
  always @* if (trees) begin
    if (mode_nvfp4 && within(nvfp4_0, {limit})) block_0: assert (o0 == nvfp4_0);
    if (mode_nvfp4 && within(nvfp4_1, {limit})) block_1: assert (o1 == nvfp4_1);
    if (!mode_nvfp4 && r0 == 0) even_row: assert (o0 == even);
    if (!mode_nvfp4 && r1 == 0) odd_row: assert (o1 == odd);
  end
endmodule
"""


def reduction_outcome(config):
    refined, group = config.refinement != "none", config.scaling == "group"
    unit = 4 if refined else 1
    r = hdl.refinement.sum_width(config) if refined else 0
    o = config.output_bits - (0 if refined else 2)
    limit = config.output_limit * unit // 4
    text = REDUCTION.format(
        r_top=max(r, 1) - 1,
        o_top=o - 1,
        unit=unit,
        limit=limit,
        connections=".r0(r0), .r1(r1)," if refined else "",
        even="a" if group else "a + c",
        odd="d" if group else "b + d",
    )
    if not refined:
        text = text.replace(" + r0", "").replace(" + r1", "")
    return prove("reduction", {"dut.v": to_verilog(ModeReduction(r, o, group_scaling=group), "dut"), "proof.sv": text})


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_mode_reduction_combines_trees_and_refinement_into_o(name):
    assert reduction_outcome(CONFIGURATIONS[name]).holds


def test_a_in_place_of_five_a_is_caught(monkeypatch):
    monkeypatch.setattr(hdl.vmac, "gated", lambda value, enable: Const(0, 1))
    outcome = reduction_outcome(CONFIGURATIONS["slots"])
    assert not outcome.holds
    assert "block_0" in outcome.failed
