"""Proofs: record mergers of the processing element, for every mask and offset."""

import inspect
import itertools
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from amaranth.hdl import Cat, Const, Module, Value
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

import hdl.collector
import hdl.pe
import model.pe
from hdl.collector import RecordMerger, activation_entry, weight_entry
from hdl.lib.verilog import to_verilog
from hdl.pe import OperandBuffer, Pe, command_layout
from model.pe import PeConfig
from model.vmac import VmacConfig
from tests.formal.cut import Cut
from tests.formal.prove import prove

# The rules as a program that deals records out one by one: weight records first, lower subgroups first, then places in subgroup order.
MERGER = """
module proof(input [3:0] w_mask, a_mask, input [15:0] w_offsets, a_offsets);
  localparam SLOTS = {slots};
  wire [{top}:0] record;
  wire overlap, dropped;
  dut dut(.weight({{w_offsets, w_mask}}), .activation({{a_offsets, a_mask}}), .record(record), .overlap(overlap), .dropped(dropped));
  reg [3:0] w_taken, a_taken;
  reg [7:0] offsets [0:3];
  reg lost;
  integer g, n, used;
  always @* begin
    w_taken = 0; a_taken = 0; lost = 0; used = 0; n = 0;
    for (g = 0; g < 4; g = g + 1) offsets[g] = 0;
    for (g = 0; g < 4; g = g + 1) if (w_mask[g]) begin
      if (n < 2 && used < SLOTS) begin
        w_taken[g] = 1; offsets[g] = n == 0 ? w_offsets[7:0] : w_offsets[15:8]; used = used + 1;
      end else lost = 1;
      n = n + 1;
    end
    n = 0;
    for (g = 0; g < 4; g = g + 1) if (a_mask[g]) begin
      // A record that lost to the weight's still has its offset byte.
      if (!w_mask[g]) begin
        if (n < 2 && used < SLOTS) begin
          a_taken[g] = 1; offsets[g] = n == 0 ? a_offsets[7:0] : a_offsets[15:8]; used = used + 1;
        end else lost = 1;
      end
      n = n + 1;
    end
  end
  always @* begin
    overlaps: assert (overlap == ((w_mask & a_mask) != 0));
    drops: assert (dropped == lost);
  end
{layout}
endmodule
"""

IN_PLACE = """
  always @* places: assert (record == {a_taken, w_taken, offsets[3], offsets[2], offsets[1], offsets[0]});
"""

SLOTTED = """
  // Exact words: each record in the first slot behind the one before it that may hold its subgroup, empty slots all zero.
  reg [12*SLOTS-1:0] dealt;
  integer h, slot;
  always @* begin
    dealt = 0; slot = 0;
    for (h = 0; h < 4; h = h + 1) if (w_taken[h] || a_taken[h]) begin
      if (slot < h - (4 - SLOTS)) slot = h - (4 - SLOTS);
      dealt[12*slot +: 12] = {a_taken[h], h[1:0], 1'b1, offsets[h]};
      slot = slot + 1;
    end
    places: assert (record == dealt);
  end
  // What the refinement lanes rely on, said without that program.
  genvar i, j;
  generate for (i = 0; i < SLOTS; i = i + 1) begin : each
    wire valid = record[12*i + 8];
    wire [1:0] subgroup = record[12*i + 9 +: 2];
    always @* if (valid) assert (subgroup >= i && subgroup <= 4 - SLOTS + i);
    for (j = 0; j < i; j = j + 1)
      always @* if (valid && record[12*j + 8]) assert (record[12*j + 9 +: 2] < subgroup);
  end endgenerate
"""

MERGERS = {
    **{f"{n} slots": VmacConfig(refinement="slots", slots_per_block=n) for n in (1, 2, 3, 4)},
    "in place": VmacConfig(refinement="inplace"),
}


def merger_outcome(config):
    slotted = config.refinement == "slots"
    slots = config.slots_per_block if slotted else 4
    text = MERGER.format(slots=slots, top=12 * slots - 1 if slotted else 39, layout=SLOTTED if slotted else IN_PLACE)
    return prove("merger", {"dut.v": to_verilog(RecordMerger(config), "dut"), "proof.sv": text})


@pytest.mark.parametrize("name", MERGERS)
def test_records_merge_as_the_rules_say_for_all_masks_and_offsets(name):
    assert merger_outcome(MERGERS[name]).holds


def test_a_third_record_that_takes_the_offsets_of_the_second_is_caught(monkeypatch):
    def at_most(bits, limit, original=hdl.collector._at_most):
        return original(bits, limit + 1)

    monkeypatch.setattr(hdl.collector, "_at_most", at_most)
    outcome = merger_outcome(MERGERS["4 slots"])
    assert not outcome.holds
    assert {"drops", "places"} & set(outcome.failed)


@pytest.mark.parametrize("gate", range(4))
def test_an_offset_byte_that_is_lost_is_caught(gate, monkeypatch):
    gates = itertools.count()

    def gated(value, enable, original=hdl.collector.gated):
        return original(value, Const(0, 1) if next(gates) == 4 + gate else enable)

    # The second of the calls' groups is subgroup 1, whose byte may be any of the four.
    monkeypatch.setattr(hdl.collector, "gated", gated)
    outcome = merger_outcome(MERGERS["in place"])
    assert not outcome.holds
    assert "places" in outcome.failed


def test_a_record_in_a_slot_that_cannot_hold_its_subgroup_is_caught(monkeypatch):
    monkeypatch.setattr(hdl.collector, "max", lambda lagging, least: least, raising=False)
    outcome = merger_outcome(MERGERS["2 slots"])
    assert not outcome.holds
    assert any("subgroup >= i" in failed or failed == "places" for failed in outcome.failed)


SCHEDULE = (
    *("active", "issue", "short", "nvfp4", "refine_en", "bank", "at", "last", "address", "recent"),
    *("occupied", "full", "lengths", "drain_bank", "drain_address", "out_bank", "out_last", "clear"),
)
CONTROL = (Path(__file__).parent / "pe_control.sv").read_text()


class Watched(wiring.Component):
    """A processing element without vector MAC, record mergers and memory contents, whose inner signals are outputs.

    The vector MAC's ports are ``vmac0_…``, the mergers' ``records<block>_…`` (:class:`Cut`). Of memory i, in the order accumulators 0 and
    1, weights, activations, ports are ``memory<i>_read_en``, ``…_read_addr``, ``…_write_en``, ``…_write_addr`` and ``…_write_data``, and
    the data that it reads is input ``memory<i>_data``.
    """

    def __init__(self, config, monkeypatch):
        memories, inner = [], {}

        class Empty(Memory):
            def __init__(self, **options):
                super().__init__(**options)
                memories.append(self)

            def elaborate(self, platform):
                return Module()

        def note(frame, event, _):
            if event == "return" and frame.f_code.co_name == "elaborate" and type(frame.f_locals.get("self")) is Pe:
                inner.update(frame.f_locals)

        monkeypatch.setattr(hdl.pe, "Memory", Empty)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            cuts = {"vmac": (hdl.pe, "Vmac"), "records": (hdl.pe, "RecordMerger")}
            self._cut = Cut(Pe(config), monkeypatch, cuts)
        finally:
            sys.setprofile(before)
        probes = {f"p_{name}": inner[name] for name in SCHEDULE}
        probes |= {f"p_{name}": Cat(*inner[name][1:]) for name in ("valid", "first", "ends", "to_bank", "to")}
        for name in ("weights", "activations"):
            probes |= {f"p_{name}_{port}": getattr(inner[name], port) for port in ("level", "read", "free")}
        self._data = {}
        for i, memory in enumerate(memories):
            (read,), (write,) = memory.read_ports, memory.write_ports
            probes |= {
                f"memory{i}_{k}_{x}": getattr(p, x)
                for k, p in (("read", read), ("write", write))
                for x in ("en", "addr")
            }
            probes[f"memory{i}_write_data"] = write.data
            self._data[f"memory{i}_data"] = Value.cast(read.data)
        self._probes = {name: Value.cast(value) for name, value in probes.items()}
        members = {
            name: In(member.shape) if member.flow == In else Out(member.shape)
            for name, member in self._cut.signature.members.items()
        }
        members |= {name: Out(len(value)) for name, value in self._probes.items()}
        members |= {name: In(len(value)) for name, value in self._data.items()}
        super().__init__(members)

    def elaborate(self, platform):
        m = Module()
        m.submodules.cut = self._cut
        for name, member in self._cut.signature.members.items():
            inside, outside = getattr(self._cut, name), getattr(self, name)
            m.d.comb += inside.eq(outside) if member.flow == In else outside.eq(inside)
        m.d.comb += [getattr(self, name).eq(value) for name, value in self._probes.items()]
        m.d.comb += [value.eq(getattr(self, name)) for name, value in self._data.items()]
        return m


def control_outcome(config, monkeypatch, *, cycles=None, tile=None, name="pe"):
    """Prove by induction, or look at so many cycles from power-up, without the invariants: there the statements must fail by themselves.

    With ``tile`` only at runs of such tiles, without reset and with operands always offered.
    """
    dut = to_verilog(Watched(config, monkeypatch), "dut")
    command = command_layout(config)
    refined = config.refinement != "none"
    bound = max(6, config.activation_entries)
    parameters = {
        **{f"{size.upper()}_BITS": command[size].width for size in ("m", "n", "kv")},
        "REFINED": int(refined),
        "MAX_M": config.max_m,
        "MAX_KV": config.max_kv,
        "WORDS": config.max_words,
        "A": (config.max_words - 1).bit_length(),
        "W_DEPTH": config.weight_entries,
        "W": (config.weight_entries - 1).bit_length(),
        "A_DEPTH": config.activation_entries,
        "V": (config.activation_entries - 1).bit_length(),
        "W_WIDTH": weight_entry(config.vmac).size,
        "A_WIDTH": activation_entry(config.vmac).size,
        "W_SCALES": 8 * config.vmac.w_scale_bytes,
        "RECORD": config.vmac.record_bits * config.vmac.records // config.vmac.blocks if refined else 1,
        "BOUND": bound,
        "IDLE_BITS": (bound + 1).bit_length(),
    }
    defines = [f"`define PARAMETERS {', '.join(f'parameter {key} = {value}' for key, value in parameters.items())}"]
    defines += ["`define REFINE"] * refined + ["`define INVARIANTS"] * (cycles is None)
    if tile:
        m, n, kv = tile
        defines.append(f"`define TILE c_m == {m} && c_n == {n} && c_kv == {kv}")
    text = "\n".join([*defines, CONTROL])
    return prove(name, {"dut.v": dut, "proof.sv": text}, cycles=cycles or 1, induction=cycles is None, timeout=400)


SMALL = {"weight_entries": 2, "activation_entries": 2}
CONTROLS = {
    "no refinement, 2 x 2 x 8": PeConfig(refinement="none", accumulators=8, **SMALL),
    "slots, 2 x 4 x 8": PeConfig(weight_entries=2, activation_entries=4, accumulators=8),
    "slots, 2 x 2 x 4": PeConfig(accumulators=4, **SMALL),
}

BROKEN = CONTROLS["no refinement, 2 x 2 x 8"]


@pytest.mark.parametrize("name", CONTROLS)
def test_streams_buffers_accumulators_results_and_progress_are_right_for_all_commands_and_stalls(name, monkeypatch):
    assert control_outcome(CONTROLS[name], monkeypatch).holds


def changed(component, old, new, monkeypatch):
    source = textwrap.dedent(inspect.getsource(component.elaborate))
    assert source.count(old) == 1
    scope = {}
    exec(compile(source.replace(old, new), "changed", "exec"), vars(hdl.pe), scope)
    monkeypatch.setattr(component, "elaborate", scope["elaborate"])


@dataclass(frozen=True)
class Bug:
    """``old`` becomes ``new`` in what builds ``component``, and within so many cycles one of ``statements`` fails.

    With ``tile``, M, N and KV of every command, it is looked for without reset and with operands always offered: that is found sooner.
    """

    cycles: int
    statements: tuple[str, ...]
    component: type
    old: str
    new: str
    tile: tuple[int, int, int] | None = None


NOT_WAITING = ("(~out_valid | self.result.ready)", "Const(1, 1)")
EARLY = ("with m.If(ends[deposit] & (to_bank[deposit] == i))", "with m.If(ends[fetch] & (to_bank[fetch] == i))")
IMPATIENT = ("(activations.level > Mux(last_n, 0, at.m))", "activations.level.any()")
GREEDY = ("activations.level > Mux(last_n, 0, at.m)", "activations.level > Mux(last_n, 0, at.m << 1)")
BUGS = {
    "a result that does not wait": Bug(
        10, ("stays",), Pe, "with m.If(self.result.ready):", "with m.If(Const(1, 1)):", (1, 1, 1)
    ),
    "a result that the next one overwrites": Bug(12, ("stable", "its_sum", "last_only"), Pe, *NOT_WAITING, (2, 1, 1)),
    "a full buffer that takes an entry": Bug(
        5, ("takes", "fits"), OperandBuffer, "self.level != self._depth", "Const(1, 1)"
    ),
    "a weight that is read before it is there": Bug(
        4, ("w_empty",), Pe, "(~first_m | weights.level.any())", "Const(1, 1)"
    ),
    "an activation that is read before it is there": Bug(6, ("a_empty",), Pe, *IMPATIENT),
    "activations that do not come back": Bug(6, ("a_reads",), Pe, "rewind.eq(last_m & ~last_n)", "rewind.eq(0)"),
    "an accumulator that is fetched before its sum is back": Bug(
        8, ("from_before", "written"), Pe, "short & at.kv.any()", "Const(0, 1) & at.kv.any()"
    ),
    "a bank that drains before its last sum is in it": Bug(9, ("written[i] == all",), Pe, *EARLY, (2, 2, 1)),
    "a bank that is computed into while it drains": Bug(
        6, ("in_a_free_bank",), Pe, "& ~Mux(bank, occupied[0], occupied[1])", ""
    ),
    "a sum that starts from what was there before": Bug(7, ("from_zero",), Pe, "~first[fetch + 1]))", "Const(1, 1)))"),
    "a tile with one K-vector too few": Bug(
        12, ("summed",), Pe, "last.kv.eq(command.kv - 1)", "last.kv.eq(0)", (1, 1, 2)
    ),
    "last on every result": Bug(11, ("last_only",), Pe, "out_last.eq(drain_ends)", "out_last.eq(1)", (2, 1, 1)),
    "a refused command that runs": Bug(4, ("works",), Pe, "self.command.ready & ~refused", "self.command.ready"),
    "a full buffer that is waited on for one more entry": Bug(14, ("progress",), Pe, *GREEDY, (2, 2, 1)),
    "a bank that is never given back": Bug(12, ("works",), Pe, "m.d.sync += occupied[i].eq(0)", "pass", (1, 1, 1)),
}


def broken_outcome(monkeypatch, **options):
    # A short counter: fewer commands to choose from.
    monkeypatch.setattr(model.pe, "MAX_K", 3 * 32)
    return control_outcome(BROKEN, monkeypatch, name="pe_broken", **options)


@pytest.mark.parametrize("name", BUGS)
def test_broken_control_is_caught(name, monkeypatch):
    bug = BUGS[name]
    changed(bug.component, bug.old, bug.new, monkeypatch)
    outcome = broken_outcome(monkeypatch, cycles=bug.cycles, tile=bug.tile)
    assert not outcome.holds
    assert any(statement in failed for statement in bug.statements for failed in outcome.failed), outcome.failed


def test_sizes_above_their_limits_that_are_taken_are_caught(monkeypatch):
    monkeypatch.setattr(hdl.pe, "_exceeds", lambda value, limit: Const(0, 1))
    outcome = broken_outcome(monkeypatch, cycles=4)
    assert not outcome.holds
    assert {"works", "reports"} & set(outcome.failed)


RECORD_BUGS = {
    "records of the wrong block": (3, "w_recorded", "weights.data.records[block]", "weights.data.records[0]"),
    "a dropped record that is not reported": (5, "reports", "sticky.dropped | Cat(*dropped).any()", "sticky.dropped"),
}


@pytest.mark.parametrize("name", RECORD_BUGS)
def test_records_that_go_wrong_are_caught(name, monkeypatch):
    cycles, statement, old, new = RECORD_BUGS[name]
    changed(Pe, old, new, monkeypatch)
    outcome = control_outcome(CONTROLS["slots, 2 x 2 x 4"], monkeypatch, cycles=cycles, name="pe_broken")
    assert not outcome.holds
    assert statement in outcome.failed
