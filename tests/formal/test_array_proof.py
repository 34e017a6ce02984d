"""Proofs, by induction: a drain chain loses, doubles and reorders no word and goes on while its ends do; a multicast is taken by all or by none."""

import inspect

import pytest
from amaranth.hdl import Module, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

import hdl.array
import hdl.lib.streams
from hdl.array import DrainNode
from hdl.lib.streams import StreamBuffer, multicast
from hdl.lib.verilog import to_verilog
from tests.changed import changed
from tests.formal.prove import prove
from tests.formal.test_output_proof import STABLE, Watched

# A source keeps its offers. The words of both sources are numbered; those of own tiles end with `last`, and so do those from behind.
NODE = """
  reg own_stalled = 0, behind_stalled = 0;
  reg [64:0] own_before, behind_before;
  always @(posedge clk) begin
    own_stalled <= !rst && own__valid && !own__ready; own_before <= own__payload;
    behind_stalled <= !rst && behind__valid && !behind__ready; behind_before <= behind__payload;
  end
  always @* if (past) begin
    assume (!own_stalled || (own__valid && own__payload == own_before));
    assume (!behind_stalled || (behind__valid && behind__payload == behind_before));
  end

  // What is due: a tile of the own element, then what comes from behind, in turn, with `last` at the end of the latter alone.
  reg turn = 0;
  wire own_moves = own__valid && own__ready, behind_moves = behind__valid && behind__ready;
  wire own_last = own__payload[64], behind_last = behind__payload[64];
  always @(posedge clk)
    if (rst) turn <= 0;
    else if (turn ? behind_moves && behind_last : own_moves && own_last) turn <= !turn;
  always @* if (past) begin
    in_turn: assert (turn ? !own__ready : !behind__ready);
    takes: assert ((p_buffer_spare_full ? 1'b0 : 1'b1) == (turn ? behind__ready : own__ready));
    phase: assert (p_passing == turn);
    order: assert (p_buffer_front_full || !p_buffer_spare_full);
  end

  // Words that are inside, oldest first: as many as went in and did not come out, as they went in.
  wire in = own_moves || behind_moves, out = output__valid && output__ready;
  wire [64:0] word = own_moves ? {1'b0, own__payload[63:0]} : behind__payload;
  reg [64:0] held [0:1];
  reg [1:0] level = 0;
  always @(posedge clk) begin
    level <= rst ? 0 : level + in - out;
    if (out) held[0] <= held[1];
    if (in) begin
      if (level - out == 0) held[0] <= word;
      if (level - out == 1) held[1] <= word;
    end
  end
  always @* if (past) begin
    room: assert (level <= 2);
    nothing_lost: assert (output__valid == (level != 0));
    as_they_came: assert (level == 0 || output__payload == held[0]);
    behind_it: assert (level < 2 || (p_buffer_spare == held[1] && p_buffer_spare_full));
    counted: assert (level == p_buffer_front_full + p_buffer_spare_full);
    // Whatever is offered in turn moves unless two words wait for the taker.
    goes_on: assert (level == 2 || !(turn ? behind__valid : own__valid) || in);
  end
"""


def node_outcome(source=DrainNode, cycles=0):
    """Prove the statements of a link by induction, or look at so many cycles from power-up."""
    return outcome("drain_node", source(), ("passing", "buffer"), NODE, cycles, ("output",))


def outcome(name, component, names, body, cycles=0, stable=(), induction=2):
    """Prove statements by induction over some cycles, or look at so many from power-up."""
    dut = Watched(component, names)
    members = {key: (member.flow, len(Value.cast(getattr(dut, key)))) for key, member in dut.signature.members.items()}
    inputs = [f"input [{width - 1}:0] {key}" for key, (flow, width) in members.items() if flow == In]
    text = f"module proof(input clk, rst, {', '.join(inputs)});\n"
    text += "\n".join(f"  wire [{width - 1}:0] {key};" for key, (flow, width) in members.items() if flow == Out)
    verilog = to_verilog(dut, "dut")
    clocked = ("clk", "rst") if "input clk" in verilog else ()
    connections = ", ".join(f".{key}({key})" for key in (*clocked, *members))
    text += f"\n  dut dut({connections});\n  initial assume (rst);\n"
    for port in stable:
        text += STABLE.format(port=port, top=members[f"{port}__payload"][1] - 1)
    sources = {"dut.v": verilog, "proof.sv": text + body + "endmodule\n"}
    return prove(name, sources, cycles=cycles or induction, induction=not cycles)


def test_a_link_gives_a_tile_and_what_is_behind_in_turn_and_every_word_once():
    assert node_outcome().failed == ()


NODE_BUGS = {
    "the turn ends with any word": ("source.valid & source.ready & source.payload.last", "source.valid & source.ready"),
    "the turn ends with an offer": ("source.valid & source.ready & source.payload.last", "source.payload.last"),
    "last of the own tile": ("source.payload.last if chosen else 0", "source.payload.last"),
    "last is lost": ("source.payload.last if chosen else 0", "0"),
    "a word taken without room": ("source.ready.eq(buffer.input.ready)", "source.ready.eq(1)"),
    "behind comes first": ("passing == chosen", "passing != chosen"),
}


@pytest.mark.parametrize("bug", NODE_BUGS)
def test_bugs_of_a_link_are_caught(bug):
    found = node_outcome(changed(DrainNode, NODE_BUGS[bug]), cycles=8)
    assert set(found.failed) & STATEMENTS


def test_a_buffer_that_lets_new_words_pass_is_caught(monkeypatch):
    monkeypatch.setattr(StreamBuffer, "elaborate", changed(StreamBuffer, HASTY).elaborate)
    assert {"same", "counted", "as_they_came"} & set(node_outcome(cycles=6).failed)


STATEMENTS = {"in_turn", "takes", "as_they_came", "nothing_lost", "room", "goes_on", "phase", "behind_it"}
HASTY = (
    "with m.If(~front_full | self.output.ready):",
    "with m.If(~front_full | self.output.ready | self.input.valid):",
)


class Chain(wiring.Component):
    """The links of a column of four elements, as the array connects them."""

    LENGTH = 4

    def __init__(self):
        word = stream.Signature(hdl.array.ResultWord)
        super().__init__({"result": Out(word)} | {f"tile{r}": In(word) for r in range(self.LENGTH)})

    def elaborate(self, platform):
        m = Module()
        behind = wiring.flipped(getattr(self, f"tile{self.LENGTH - 1}"))
        for r in reversed(range(self.LENGTH - 1)):
            m.submodules[f"drain_{r}"] = node = DrainNode()
            wiring.connect(m, wiring.flipped(getattr(self, f"tile{r}")), node.own)
            wiring.connect(m, behind, node.behind)
            behind = node.output
        wiring.connect(m, behind, wiring.flipped(self.result))
        return m


# Elements that have a word whenever they are asked, and a taker that lets two cycles pass at most: a word leaves at least every seventh cycle.
PROGRESS = """
  reg past = 0;
  reg [1:0] waited = 0;
  reg [3:0] silent = 0;
  wire moves = result__valid && result__ready;
  always @(posedge clk) begin
    past <= !rst;
    waited <= rst || result__ready ? 0 : waited + 1;
    silent <= rst || moves ? 0 : silent + 1;
  end
  always @* begin
    assume (waited < 2 || result__ready);
    assume (tile0__valid && tile1__valid && tile2__valid && tile3__valid);
  end
  always @* if (past) progress: assert (waited <= 2 && silent <= 6);
"""


def chain_outcome(cycles=0):
    return outcome("chain", Chain(), (), PROGRESS, cycles, induction=10)


def test_a_chain_goes_on_while_elements_have_words_and_the_taker_takes():
    assert chain_outcome().failed == ()


def test_a_chain_that_stops_is_caught(monkeypatch):
    broken = changed(DrainNode, ("buffer.input.valid.eq(source.valid)", "buffer.input.valid.eq(source.valid & chosen)"))
    monkeypatch.setitem(globals(), "DrainNode", broken)
    assert "progress" in chain_outcome(cycles=12).failed


class Bus(wiring.Component):
    """A multicast to three targets."""

    def __init__(self):
        word = stream.Signature(8)
        super().__init__({"source": In(word)} | {f"target{i}": Out(word) for i in range(3)})

    def elaborate(self, platform):
        m = Module()
        hdl.lib.streams.multicast(
            m, wiring.flipped(self.source), [wiring.flipped(getattr(self, f"target{i}")) for i in range(3)]
        )
        return m


# An offer to a target is taken in the same cycle, so none can be withdrawn, and the word is the source's.
MULTICAST = """
  wire [2:0] valid = {target2__valid, target1__valid, target0__valid};
  wire [2:0] ready = {target2__ready, target1__ready, target0__ready};
  always @* begin
    all_or_none: assert ((valid & ready) == 0 || (valid & ready) == 7);
    taken_at_once: assert ((valid & ~ready) == 0);
    with_the_source: assert ((source__valid && source__ready) == (valid[0] && ready[0]));
    waits_for_none_else: assert (source__ready == (ready == 7));
    same_word: assert (valid == 0 || (target0__payload == source__payload && target1__payload == source__payload && target2__payload == source__payload));
  end
"""


def test_a_word_is_taken_by_all_targets_in_the_same_cycle_or_by_none():
    assert outcome("multicast", Bus(), (), MULTICAST, cycles=1).failed == ()


MULTICAST_BUGS = {
    "one is enough": (".all()", ".any()"),
    "targets do not wait for others": ("target.valid.eq(source.valid & ready)", "target.valid.eq(source.valid)"),
    "the source does not wait": ("source.ready.eq(ready)", "source.ready.eq(1)"),
}


@pytest.mark.parametrize("bug", MULTICAST_BUGS)
def test_bugs_of_the_multicast_are_caught(bug, monkeypatch):
    before, after = MULTICAST_BUGS[bug]
    text = inspect.getsource(multicast)
    assert text.count(before) == 1
    names = dict(vars(hdl.lib.streams))
    exec(text.replace(before, after), names)
    monkeypatch.setattr(hdl.lib.streams, "multicast", names["multicast"])
    assert not outcome("multicast", Bus(), (), MULTICAST, cycles=1).holds
