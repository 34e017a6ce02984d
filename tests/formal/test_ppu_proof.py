"""Proofs of the post-processing unit: refinements are disjoint from the weight's, fit the slots and are the best; groups on offer stay."""

import inspect

import pytest

import hdl.quantiser
from hdl.lib.verilog import to_verilog
from hdl.quantiser import Quantiser, Selection
from model.quantiser import ERROR_BITS
from tests.formal.prove import prove
from tests.formal.test_output_proof import outcome

# For any subgroups a and b.
SELECTION = """
module proof(input enable, input [W-1:0] e0, e1, e2, e3, limit, input [3:0] taken, input [1:0] a, b);
  localparam W = {width};
  localparam SLOTS = {slots};
  wire [3:0] chosen;
  dut dut(.enable(enable), .errors__0(e0), .errors__1(e1), .errors__2(e2), .errors__3(e3), .limit(limit), .taken(taken), .chosen(chosen));
  wire [W-1:0] error_a = a[1] ? (a[0] ? e3 : e2) : (a[0] ? e1 : e0);
  wire [W-1:0] error_b = b[1] ? (b[0] ? e3 : e2) : (b[0] ? e1 : e0);
  wire [2:0] used = taken[0] + taken[1] + taken[2] + taken[3];
  wire [2:0] added = chosen[0] + chosen[1] + chosen[2] + chosen[3];
  wire may_b = enable && !taken[b] && error_b > limit;
  always @* begin
    disjoint: assert ((chosen & taken) == 0);
    slots: assert (chosen == 0 || used + added <= SLOTS);
    reason: assert (!chosen[a] || (enable && error_a > limit));
    best: assert (!chosen[a] || chosen[b] || !may_b || error_a > error_b || (error_a == error_b && a < b));
    whole: assert (chosen[b] || !may_b || used + added >= SLOTS);
  end
endmodule
"""


def selection_outcome(slots, source=Selection):
    sources = {
        "dut.v": to_verilog(source(slots), "dut"),
        "proof.sv": SELECTION.format(width=ERROR_BITS, slots=slots),
    }
    return prove("selection", sources)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_refinements_are_disjoint_fit_the_slots_and_are_the_best(slots):
    assert selection_outcome(slots).failed == ()


def changed(before, after):
    """Return the module with a piece of its source changed."""
    text = inspect.getsource(hdl.quantiser)
    assert text.count(before) == 1
    scope = {}
    exec(text.replace(before, after), scope)
    return scope


SELECTION_BUGS = {
    "the weight's subgroups": ("& ~self.taken &", "&", {"disjoint"}),
    "a slot too many": ("tree_sum(before) + used < self._slots", "tree_sum(before) + used <= self._slots", {"slots"}),
    "the weight's slots": ("tree_sum(before) + used <", "tree_sum(before) <", {"slots"}),
    "at the limit": ("error > self.limit for", "error >= self.limit for", {"reason", "whole"}),
    "ties of ranks": ("errors[i] >= errors[j]", "errors[i] > errors[j]", {"best", "slots"}),
}


@pytest.mark.parametrize("bug", SELECTION_BUGS)
def test_bugs_of_the_selection_are_caught(bug):
    before, after, caught = SELECTION_BUGS[bug]
    assert caught & set(selection_outcome(2, changed(before, after)["Selection"]).failed)


# A pair's second half follows its first one.
QUANTISER = """
  always @* if (past) begin
    once: assert (!(pair__ready && p_second));
    together: assert (!(weight_mask__ready && !pair__ready));
  end
"""


def quantiser_outcome(source=Quantiser, cycles=0):
    return outcome("quantiser", source(), ("second",), "group", QUANTISER, cycles=cycles)


def test_groups_on_offer_stay_and_pairs_are_taken_once():
    assert quantiser_outcome().failed == ()


def test_a_pair_that_is_taken_twice_is_noticed():
    bug = changed("pair.ready.eq(enable & ~second & offered)", "pair.ready.eq(enable & offered)")
    assert "once" in quantiser_outcome(bug["Quantiser"], cycles=4).failed
