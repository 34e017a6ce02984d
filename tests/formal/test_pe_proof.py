"""Proofs: record mergers of the processing element, for every mask and offset."""

import itertools

import pytest
from amaranth.hdl import Const

import hdl.collector
from hdl.collector import RecordMerger
from hdl.lib.verilog import to_verilog
from model.vmac import VmacConfig
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
