"""Proof, by induction: the policy unit's precision is always one of the levels, and moves by one level at most, once per activity, at its end."""

import inspect
import re

import pytest
from amaranth.hdl import Value
from amaranth.lib.wiring import In

import hdl.policy
from hdl.lib.verilog import to_verilog
from hdl.policy import PolicyUnit
from model.policy import PolicyFormat
from tests.formal.prove import prove
from tests.formal.test_output_proof import Watched

# Few bits of the numbers, all of the control: what is beyond the mean may be anything.
FORM = PolicyFormat(integer_bits=1, fraction_bits=1, count_bits=2, level_slots=4)

STATEMENT = """
  // Settings as PolicySettings makes them, the same throughout a request.
  wire [1:0] top = settings[TOP +: 2], prefill_first = settings[TOP+2 +: 2], decode_first = settings[TOP+4 +: 2];
  always @* assume (prefill_first <= top && decode_first <= top);

  reg past = 0, live = 0, stepped, taken, cleared, ready;
  reg [1:0] before, first;
  reg [WIDTH-1:0] held;
  always @(posedge clk) begin
    past <= !rst;
    live <= !rst && !clear && (live || (step__valid && step__ready));
    stepped <= step__valid && step__ready;
    taken <= activity__valid && activity__ready;
    cleared <= clear;
    ready <= valid;
    before <= level;
    first <= step__payload[ENTROPY] ? decode_first : prefill_first;
    held <= settings;
  end
  always @* if (past && !cleared) assume (settings == held);

  wire moved = level != before;
  always @* if (past) begin
    begun: assert (p_started == live && (!p_busy || live));
    listed: assert (!live || level <= top);
    bits: assert (precision == settings[5*level +: 5]);
    step_says: assert (!stepped || (valid && level == first));
    waits: assert (!taken || !valid);
    by_one: assert (!moved || stepped || level == before + 2'd1 || before == level + 2'd1);
    at_the_end: assert (!moved || stepped || cleared || (valid && !ready));
  end
endmodule
"""


# What holds in every state that can be reached; the step from any such state to the next is where an error shows at once.
ANY_STATE = """
  initial assume (!rst && p_started == live && (!p_busy || live) && (!live || level <= top));
"""


def outcome(source=PolicyUnit, *, from_power_up=True):
    """Prove by induction, or look at one step from any state in which the invariants hold."""
    unit = Watched(source(FORM), ("started", "busy"))
    ports = {name: (m.flow, len(Value.cast(getattr(unit, name)))) for name, m in unit.signature.members.items()}
    inputs = [f"input [{width - 1}:0] {name}" for name, (flow, width) in ports.items() if flow == In]
    wires = [f"  wire [{width - 1}:0] {name};\n" for name, (flow, width) in ports.items() if flow != In]
    connections = ", ".join(f".{name}({name})" for name in ("clk", "rst", *ports))
    parameters = {
        "TOP": FORM.settings["levels"],
        "WIDTH": sum(FORM.settings.values()),
        "ENTROPY": FORM.entropy_bits,
    }
    text = f"module proof(input clk, rst, {', '.join(inputs)});\n{''.join(wires)}"
    text += "".join(f"  localparam {name} = {value};\n" for name, value in parameters.items())
    text += f"  policy dut({connections});\n{STATEMENT}"
    verilog = to_verilog(unit, "policy")
    if from_power_up:
        text = text.replace("endmodule", "  initial assume (rst);\nendmodule")
    else:
        text = text.replace("endmodule", f"{ANY_STATE}endmodule").replace("live = 0,", "live,")
        verilog, freed = re.subn(r"^(  reg (?:\[\d+:0\] )?\w+) = [^;]+;", r"\1;", verilog, flags=re.MULTILINE)
        assert freed > 10
    return prove("policy", {"policy.v": verilog, "proof.sv": text}, cycles=2, induction=from_power_up)


def test_precision_is_always_a_level_and_moves_by_one_at_the_end_of_an_activity():
    assert outcome().failed == ()
    assert outcome(from_power_up=False).failed == ()


BUGS = {
    "no bound at the bottom": ("self.level - self.level.any()", "self.level - 1", {"listed", "by_one"}),
    "two levels at once": (
        "self.level + (self.level < settings.top)",
        "self.level + ((self.level < settings.top) << 1)",
        {"listed", "by_one"},
    ),
    "moved before the end": (
        "(product == len(self._rounds)) & sample",
        "(product == len(self._rounds) - 1) & sample",
        {"at_the_end"},
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    before, after, caught = BUGS[bug]
    text = inspect.getsource(PolicyUnit)
    assert text.count(before) == 1
    scope = dict(vars(hdl.policy))
    exec(text.replace(before, after), scope)
    assert caught & set(outcome(scope["PolicyUnit"], from_power_up=False).failed)
