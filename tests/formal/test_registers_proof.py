"""Proofs: a register bank keeps AXI's rules, answers every request once, and its fields do what the map says. Nothing is assumed."""

import dataclasses

import pytest
from amaranth.hdl import Fragment, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

import hdl.registers
from hdl.lib.verilog import to_verilog
from hdl.registers import Interrupt, RegisterBank
from tests.demo_registers import DEMO
from tests.formal.prove import prove

# What was taken is held until it is answered; "now" is without what was answered at the last edge. Writes happen with the rise of bvalid.
BANK = """
module proof(input clk, rst, awvalid, wvalid, bready, arvalid, rready, input [{top}:0] awaddr, araddr, input [2:0] awprot, arprot,
             input [31:0] wdata, input [3:0] wstrb{inputs});
  wire awready, wready, bvalid, arready, rvalid;
  wire [1:0] bresp, rresp;
  wire [31:0] rdata;
  wire [{top}-2:0] held_aw, held_ar;
  wire [35:0] held_w;
{wires}
  dut dut(.clk(clk), .rst(rst), .s_axi_awvalid(awvalid), .s_axi_awready(awready), .s_axi_awaddr(awaddr), .s_axi_awprot(awprot),
    .s_axi_wvalid(wvalid), .s_axi_wready(wready), .s_axi_wdata(wdata), .s_axi_wstrb(wstrb),
    .s_axi_bvalid(bvalid), .s_axi_bready(bready), .s_axi_bresp(bresp),
    .s_axi_arvalid(arvalid), .s_axi_arready(arready), .s_axi_araddr(araddr), .s_axi_arprot(arprot),
    .s_axi_rvalid(rvalid), .s_axi_rready(rready), .s_axi_rdata(rdata), .s_axi_rresp(rresp),
    .held_aw(held_aw), .held_w(held_w), .held_ar(held_ar){connections});

  reg aw_taken = 0, w_taken = 0, ar_taken = 0, b_stalled = 0, r_stalled = 0, b_due = 0, r_due = 0;
  reg [{top}:0] aw_address, ar_address;
  reg [31:0] w_data, r_word, last_rdata;
  reg [3:0] w_strobes;
  reg [1:0] last_bresp, last_rresp, r_response, owed_aw = 0, owed_w = 0, owed_ar = 0;
  wire b_new = bvalid && !b_stalled, r_new = rvalid && !r_stalled;
  wire aw_now = aw_taken && !b_new, w_now = w_taken && !b_new, ar_now = ar_taken && !r_new;
  wire takes_aw = awvalid && awready, takes_w = wvalid && wready, takes_ar = arvalid && arready;
  wire [{top}:0] at = {{aw_address[{top}:2], 2'b00}}, from = {{ar_address[{top}:2], 2'b00}};
  wire [31:0] bits = {{{{8{{w_strobes[3]}}}}, {{8{{w_strobes[2]}}}}, {{8{{w_strobes[1]}}}}, {{8{{w_strobes[0]}}}}}};
  wire [31:0] ones = w_data & bits;
  reg [31:0] word;
  reg [1:0] response;
{fields}
  always @* begin
    word = 0; response = 2;
{words}
  end

  always @(posedge clk) begin
    aw_taken <= !rst && (aw_now || takes_aw);
    w_taken <= !rst && (w_now || takes_w);
    ar_taken <= !rst && (ar_now || takes_ar);
    if (takes_aw) aw_address <= awaddr;
    if (takes_w) {{w_data, w_strobes}} <= {{wdata, wstrb}};
    if (takes_ar) ar_address <= araddr;
    b_stalled <= !rst && bvalid && !bready;
    r_stalled <= !rst && rvalid && !rready;
    b_due <= !rst && aw_now && w_now && !(bvalid && !bready);
    r_due <= !rst && ar_now && !(rvalid && !rready);
    last_bresp <= bresp; last_rdata <= rdata; last_rresp <= rresp; r_word <= word; r_response <= response;
    owed_aw <= rst ? 0 : owed_aw + takes_aw - (bvalid && bready);
    owed_w <= rst ? 0 : owed_w + takes_w - (bvalid && bready);
    owed_ar <= rst ? 0 : owed_ar + takes_ar - (rvalid && rready);
  end

  always @* begin
    b_stays: assert (!b_stalled || bvalid && bresp == last_bresp);
    r_stays: assert (!r_stalled || rvalid && rdata == last_rdata && rresp == last_rresp);
    // One answer to each request: those that are owed are held or offered, and one that can come does.
    b_once: assert (owed_aw == aw_now + bvalid && owed_w == w_now + bvalid);
    r_once: assert (owed_ar == ar_now + rvalid);
    b_comes: assert (b_new == b_due);
    r_comes: assert (r_new == r_due);
    aw_ready: assert (awready == !aw_now);
    w_ready: assert (wready == !w_now);
    ar_ready: assert (arready == !ar_now);
    b_says: assert (!b_new || bresp == ({writable} ? 0 : 2));
    r_says: assert (!r_new || rresp == r_response);
    r_reads: assert (!r_new || rdata == r_word);
    held: assert ((!aw_now || held_aw == aw_address[{top}:2]) && (!w_now || held_w == {{w_strobes, w_data}})
      && (!ar_now || held_ar == ar_address[{top}:2]));
{asserts}
  end
endmodule
"""

# The value of a field now, and of the cycle before in <name>_old.
RW = """
  reg [{top}:0] {name}_old = {reset};
  wire [{top}:0] {name}_now = {here} ? {name}_old & ~bits[{high}:{low}] | ones[{high}:{low}] : {name}_old;
  always @(posedge clk) {name}_old <= rst ? {reset} : {name}_now;"""
W1C = """
  reg [{top}:0] {name}_old = {reset};
  reg [{top}:0] {name}_raised = 0;
  wire [{top}:0] {name}_now = ({here} ? {name}_old & ~ones[{high}:{low}] : {name}_old) | {name}_raised;
  always @(posedge clk) {name}_old <= rst ? {reset} : {name}_now;
  always @(posedge clk) {name}_raised <= rst ? 0 : {name}_set;"""
W1P = """
  wire [{top}:0] {name}_now = {here} ? ones[{high}:{low}] : 0;"""
SPECIFICATIONS = {"rw": RW, "w1c": W1C, "w1p": W1P}


class Watched(wiring.Component):
    """A bank whose held requests are outputs too."""

    def __init__(self, table, monkeypatch):
        held = []

        def noting(*arguments, original=hdl.registers._request):
            held.append(original(*arguments))
            return held[-1]

        monkeypatch.setattr(hdl.registers, "_request", noting)
        self._bank = RegisterBank(table)
        self._inner = Fragment.get(self._bank, None)
        self._probes = dict(zip(("held_aw", "held_w", "held_ar"), held, strict=True))
        super().__init__(
            {**self._bank.signature.members, **{name: Out(len(value)) for name, value in self._probes.items()}}
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.bank = self._inner
        for name, member in self._bank.signature.members.items():
            inside, outside = getattr(self._bank, name), getattr(self, name)
            m.d.comb += inside.eq(outside) if member.flow == In else outside.eq(inside)
        m.d.comb += [getattr(self, name).eq(value) for name, value in self._probes.items()]
        return m


def specification(table):
    """Return the proof's text for a map."""
    ports, wires, fields, asserts, words = [], [], [], [], []
    top = table.address_width - 1
    for r in table.registers:
        parts = []
        for f in r.fields:
            name, high = f"{r.name}_{f.name}", f.position + f.width - 1
            span = f"[{f.width - 1}:0]"
            if f.access == "ro":
                ports.append((span, name))
                parts.append((f, name))
                continue
            wires.append((span, name))
            here = f"(b_new && at == {r.offset})"
            text = SPECIFICATIONS[f.access]
            fields.append(text.format(top=f.width - 1, name=name, reset=f.reset, here=here, high=high, low=f.position))
            asserts.append(f"    {name}_is: assert ({name} == {name}_now);")
            if f.access == "w1c":
                ports.append((span, f"{name}_set"))
            if f.access != "w1p":
                parts.append((f, f"{name}_now"))
        bits = [f"word[{f.position + f.width - 1}:{f.position}] = {value};" for f, value in parts]
        words.append(f"    if (from == {r.offset}) begin response = 0; {' '.join(bits)} end")
    writable = [f"at == {r.offset}" for r in table.registers if any(f.access != "ro" for f in r.fields)]
    return BANK.format(
        top=top,
        inputs="".join(f",\n    input {span} {name}" for span, name in ports),
        wires="\n".join(f"  wire {span} {name};" for span, name in wires),
        connections="".join(f",\n    .{name}({name})" for _, name in ports + wires),
        fields="".join(fields),
        words="\n".join(words),
        writable=f"({' || '.join(writable)})",
        asserts="\n".join(asserts),
    )


def outcome(monkeypatch, *, built=DEMO, cycles=None):
    """Prove by induction, or look at so many cycles from power-up."""
    sources = {"dut.v": to_verilog(Watched(built, monkeypatch), "dut"), "proof.sv": specification(DEMO)}
    return prove("registers", sources, cycles=cycles or 2, induction=cycles is None)


def test_answers_stay_until_taken_and_come_once_and_fields_do_what_the_map_says(monkeypatch):
    assert outcome(monkeypatch).holds


def shown_again(m, valid, ready, start):
    m.d.sync += valid.eq(start)


def lost(m, valid, ready, start):
    m.d.sync += valid.eq(start & ready)


def repeated(m, valid, ready, start):
    taken = Signal()
    m.d.sync += taken.eq(valid & ready)
    m.d.sync += valid.eq(start | (valid & ~(ready & taken)))


def never_busy(m, valid, ready, done, payload, original=hdl.registers._request):
    held = original(m, valid, ready, done, payload)
    m.d.sync += ready.eq(1)
    return held


FIELDS = {f"{r.name}_{f.name}_is" for r in DEMO.registers for f in r.fields if f.access != "ro"}
BUGS = {
    "answers do not wait": ("_respond", shown_again, {"b_stays", "r_stays"}),
    "answers lost": ("_respond", lost, {"b_comes", "r_comes", "b_once", "r_once"}),
    "answers twice": ("_respond", repeated, {"b_comes", "r_comes", "b_once", "r_once"}),
    "answers overwritten": ("_free", lambda valid, ready: valid | ~valid, {"r_stays", "b_stays", "b_once", "r_once"}),
    "request taken while one is held": ("_request", never_busy, {"aw_ready", "w_ready", "ar_ready"}),
    "strobes ignored": ("_bit_mask", lambda strobes: (strobes | ~strobes)[0].replicate(32), FIELDS),
    "other bytes lost": ("_written", lambda old, data, mask: data & mask, FIELDS),
    "clearing wins": ("_flagged", lambda old, cleared, raised: (old | raised) & ~cleared, {"status_events_is"}),
    "address bit ignored": ("_is", lambda value, number: value[:3] == number % 8, {"b_says", "r_says", "r_reads"}),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_bank_is_caught(bug, monkeypatch):
    name, function, labels = BUGS[bug]
    monkeypatch.setattr(hdl.registers, name, function)
    result = outcome(monkeypatch, cycles=6)
    assert not result.holds
    assert labels & set(result.failed), result.failed


def changed(register, **options):
    """Return the map with another attribute of the first writable field of a register."""
    registers = []
    for r in DEMO.registers:
        fields = tuple(
            dataclasses.replace(f, **options) if (r.name, f.name) == (register, "mode") else f for f in r.fields
        )
        registers.append(dataclasses.replace(r, fields=fields))
    return dataclasses.replace(DEMO, registers=tuple(registers))


@pytest.mark.parametrize(
    ("options", "labels"),
    [({"reset": 4}, {"control_mode_is"}), ({"position": 7}, {"control_mode_is", "r_reads"})],
    ids=["reset value", "position"],
)
def test_a_bank_of_another_map_is_caught(options, labels, monkeypatch):
    result = outcome(monkeypatch, built=changed("control", **options), cycles=6)
    assert not result.holds
    assert labels & set(result.failed), result.failed


IRQ = """
module proof(input clk, rst, input [3:0] status, mask);
  wire irq;
  dut dut(.clk(clk), .rst(rst), .status(status), .mask(mask), .irq(irq));
  reg due = 0;
  always @(posedge clk) due <= !rst && (status[0] && mask[0] || status[1] && mask[1] || status[2] && mask[2] || status[3] && mask[3]);
  always @* follows: assert (irq == due);
endmodule
"""


def test_interrupt_is_high_if_and_only_if_a_source_is_let_through():
    assert prove("interrupt", {"dut.v": to_verilog(Interrupt(4), "dut"), "proof.sv": IRQ}, induction=True).holds


def test_an_interrupt_without_its_mask_is_caught():
    dut = to_verilog(Interrupt(4), "dut")
    assert dut.count("status & mask") == 1
    wrong = prove("interrupt", {"dut.v": dut.replace("status & mask", "status | mask"), "proof.sv": IRQ}, cycles=2)
    assert wrong.failed == ("follows",)
