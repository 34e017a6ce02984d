"""Proofs, by induction: what gearbox and reorder buffer offer stays, and no word of a half is overwritten before it was read or read before it was written."""

import sys

import pytest
from amaranth.hdl import Fragment, Module, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.gearbox import Gearbox
from hdl.lib.streams import StreamBuffer
from hdl.lib.verilog import to_verilog
from hdl.reorder import ReorderBuffer
from model.tile_engine import EngineConfig
from tests.changed import changed
from tests.formal.prove import prove


class Watched(wiring.Component):
    """A component with some of the local names of its ``elaborate`` as outputs ``p_…``; of a stream buffer the two places and whether they are full."""

    def __init__(self, component, names):
        found = {}

        def note(frame, event, _):
            if event == "return" and frame.f_code.co_name == "elaborate":
                found[id(frame.f_locals.get("self"))] = dict(frame.f_locals)

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            self._inner = Fragment.get(component, None)
        finally:
            sys.setprofile(before)
        inside = found[id(component)]
        probes = {}
        for name in names:
            thing = inside[name]
            if isinstance(thing, StreamBuffer):
                parts = ("front", "spare", "front_full", "spare_full")
                probes |= {f"{name}_{part}": found[id(thing)][part] for part in parts}
            elif hasattr(thing, "addr"):
                probes |= {f"{name}_en": thing.en, f"{name}_addr": thing.addr}
            else:
                probes[name] = thing
        self._probes = {f"p_{name}": Value.cast(value) for name, value in probes.items()}
        self._ports = {
            "__".join(map(str, path)): (member, Value.cast(value))
            for path, member, value in component.signature.flatten(component)
        }
        members = {name: (In if m.flow == In else Out)(len(value)) for name, (m, value) in self._ports.items()}
        super().__init__(members | {name: Out(len(value)) for name, value in self._probes.items()})

    def elaborate(self, platform):
        m = Module()
        m.submodules.inner = self._inner
        for name, (member, value) in self._ports.items():
            outside = getattr(self, name)
            m.d.comb += value.eq(outside) if member.flow == In else outside.eq(value)
        m.d.comb += [getattr(self, name).eq(value) for name, value in self._probes.items()]
        return m


STABLE = """
  reg past = 0, stalled = 0;
  reg [{top}:0] before;
  always @(posedge clk) begin
    past <= !rst;
    stalled <= !rst && {port}__valid && !{port}__ready;
    before <= {port}__payload;
  end
  always @* if (past) begin
    stays: assert (!stalled || {port}__valid);
    same: assert (!stalled || {port}__payload == before);
  end
"""


def outcome(name, component, names, port, body, parameters=(), cycles=0):
    """Prove by induction, or look at so many cycles from power-up."""
    dut = Watched(component, names)
    members = {key: (member.flow, len(Value.cast(getattr(dut, key)))) for key, member in dut.signature.members.items()}
    inputs = [f"input [{width - 1}:0] {key}" for key, (flow, width) in members.items() if flow == In]
    wires = [f"  wire [{width - 1}:0] {key};" for key, (flow, width) in members.items() if flow == Out]
    connections = ", ".join(f".{key}({key})" for key in ("clk", "rst", *members))
    text = f"module proof(input clk, rst, {', '.join(inputs)});\n" + "\n".join(wires)
    text += "".join(f"\n  localparam {key} = {value};" for key, value in dict(parameters).items())
    text += f"\n  dut dut({connections});\n  initial assume (rst);\n"
    text += STABLE.format(port=port, top=members[f"{port}__payload"][1] - 1) + body + "endmodule\n"
    sources = {"dut.v": to_verilog(dut, "dut"), "proof.sv": text}
    return prove(name, sources, cycles=cycles or 2, induction=not cycles)


# Elements that are in the store: what came in less what went out, with the zeros that fill words up.
GEARBOX = """
  always @* if (input__valid && beat_last) assume (beat_count >= 1 && beat_count <= IN);
  wire beat_last = input__payload[BITS*IN + COUNT];
  wire [COUNT-1:0] beat_count = input__payload[BITS*IN +: COUNT];
  integer k;
  reg above;
  always @* begin
    above = 0;
    for (k = 0; k < PLACES; k = k + 1) if (k >= p_level) above = above | (|p_store[k*UNIT +: UNIT]);
  end
  always @* if (past) begin
    room: assert (p_level <= LIMIT);
    cleared: assert (!above);
    fits: assert (!input__ready || p_level + IN_UNITS <= PLACES);
  end
"""

RATIOS = [(3, 4), (4, 3), (1, 4), (4, 1), (2, 2), (4, 6)]


def gearbox_outcome(ratio, source=Gearbox, cycles=0):
    bits, (size_in, size_out) = 2, ratio
    unit = next(n for n in range(min(ratio), 0, -1) if size_in % n == size_out % n == 0)
    a, b = size_in // unit, size_out // unit
    places = b - 1 + min(a, b) + a
    parameters = {
        "BITS": bits,
        "IN": size_in,
        "COUNT": size_in.bit_length(),
        "UNIT": unit * bits + 1,
        "IN_UNITS": a,
        "PLACES": places,
        "LIMIT": -(-places // b) * b,
    }
    names = ("level", "store")
    return outcome("gearbox", source(bits, *ratio), names, "output", GEARBOX, parameters, cycles)


@pytest.mark.parametrize("ratio", RATIOS)
def test_words_of_the_gearbox_stay_and_its_store_never_overflows(ratio):
    assert gearbox_outcome(ratio).failed == ()


GEARBOX_BUGS = {
    "one place too many": ("level <= most", "level <= most + 1", {"fits"}),
    "words move on their own": ("self.output.valid & self.output.ready", "self.output.valid", {"stays", "same"}),
    "beats fall on others": ("Mux(level[step],", "Mux(level[step] & ~(self.output.valid),", {"same"}),
}


@pytest.mark.parametrize("bug", GEARBOX_BUGS)
def test_bugs_of_the_gearbox_are_caught(bug):
    before, after, caught = GEARBOX_BUGS[bug]
    found = gearbox_outcome((3, 4), changed(Gearbox, (before, after)), cycles=10)
    assert caught & set(found.failed)


# A bit per place says whether what was written there is still to be read.
REORDER = """
  wire [M_BITS-1:0] tile_m = tile__payload[0 +: M_BITS];
  wire [N_BITS-1:0] tile_n = tile__payload[M_BITS +: N_BITS];
  function legal(input [M_BITS-1:0] m, input [N_BITS-1:0] n);
    legal = m != 0 && n != 0 && m <= MAX_M && n <= WORDS && m * n <= WORDS;
  endfunction
  always @* assume (!tile__valid || legal(tile_m, tile_n));

  reg [2*WORDS-1:0] fresh = 0;
  always @(posedge clk)
    if (rst) fresh <= 0;
    else fresh <= (fresh | (p_write_en << p_write_addr)) & ~(p_read_en << p_read_addr);
  always @* if (past) begin
    free: assert (!p_write_en || !fresh[p_write_addr]);
    written: assert (!p_read_en || fresh[p_read_addr]);
    moved: assert (p_write_en == (result__0__valid && result__0__ready));
  end
"""

# What makes it so: where writer and reader are.
INVARIANTS = """
  wire [M_BITS-1:0] m = p_tiles_front[0 +: M_BITS];
  wire [N_BITS-1:0] n = p_tiles_front[M_BITS +: N_BITS];
  wire [M_BITS+N_BITS:0] out = p_out_half ? p_halves[M_BITS+N_BITS+1 +: M_BITS+N_BITS+1] : p_halves[0 +: M_BITS+N_BITS+1];
  wire [M_BITS-1:0] out_m = out[0 +: M_BITS];
  wire [N_BITS-1:0] out_n = out[M_BITS +: N_BITS];
  wire [WORDS-1:0] filling = p_half ? fresh[WORDS +: WORDS] : fresh[0 +: WORDS];
  wire [WORDS-1:0] draining = p_out_half ? fresh[WORDS +: WORDS] : fresh[0 +: WORDS];
  reg [WORDS-1:0] put, left;
  reg [2*WORDS-1:0] whole;
  integer a, b;
  always @* begin
    left = 0; put = 0;
    for (a = 1; a <= MAX_M; a = a + 1) for (b = 1; b <= WORDS; b = b + 1)
      if (a <= out_m && b <= out_n && (b - 1) * out_m + a - 1 < WORDS)
        left[(b - 1) * out_m + a - 1] = a > p_out_i || (a == p_out_i && b >= p_out_j);
    for (a = 0; a < WORDS; a = a + 1) put[a] = a < p_place;
    // Of the half that waits behind the one that drains, all that its sizes say.
    whole = (p_out_half ? p_halves[0 +: M_BITS] * p_halves[M_BITS +: N_BITS]
                        : p_halves[M_BITS+N_BITS+1 +: M_BITS] * p_halves[2*M_BITS+N_BITS+1 +: N_BITS]);
  end
  wire [WORDS-1:0] waiting = p_out_half ? fresh[0 +: WORDS] : fresh[WORDS +: WORDS];
  always @* if (past) begin
    tile_order: assert (p_tiles_front_full || !p_tiles_spare_full);
    tile_front: assert (!p_tiles_front_full || legal(m, n));
    tile_spare: assert (!p_tiles_spare_full || legal(p_tiles_spare[0 +: M_BITS], p_tiles_spare[M_BITS +: N_BITS]));
    halves: assert (p_full == 0 ? p_half == p_out_half : p_full == 3 ? p_half == p_out_half : p_full[p_out_half] && p_half != p_out_half);
    begun: assert (p_tiles_front_full || (p_i == 1 && p_j == 1 && p_place == 0));
    write_at: assert (p_i >= 1 && p_j >= 1 && (!p_tiles_front_full || (p_i <= m && p_j <= n && p_place == (p_j - 1) * m + p_i - 1)));
    filled: assert (p_full[p_half] ? p_place == 0 && p_i == 1 && p_j == 1 : filling == put);
    read_at: assert (p_full[p_out_half]
      ? legal(out_m, out_n) && p_out_i >= 1 && p_out_j >= 1 && p_out_i <= out_m && p_out_j <= out_n && p_at == (p_out_j - 1) * out_m + p_out_i - 1
      : p_out_i == 1 && p_out_j == 1 && p_at == 0);
    drained: assert (!p_full[p_out_half] || draining == left);
    behind: assert (p_full != 3 || waiting == (1 << whole) - 1);
    behind_legal: assert (p_full != 3 || (p_out_half ? legal(p_halves[0 +: M_BITS], p_halves[M_BITS +: N_BITS])
      : legal(p_halves[M_BITS+N_BITS+1 +: M_BITS], p_halves[2*M_BITS+N_BITS+1 +: N_BITS])));
    empty: assert (p_full != 0 || waiting == 0);
  end
"""


def reorder_outcome(accumulators, rows, source=ReorderBuffer, cycles=0):
    config = EngineConfig(rows=rows, columns=1, accumulators=accumulators, activation_entries=2)
    names = ("write", "read", "full", "half", "place", "i", "j", "out_half", "out_i", "out_j", "at", "halves", "tiles")
    parameters = {
        "WORDS": config.max_words,
        "MAX_M": config.max_m,
        "M_BITS": config.max_m.bit_length(),
        "N_BITS": config.max_n.bit_length(),
    }
    body = REORDER + ("" if cycles else INVARIANTS)
    return outcome("reorder", source(config), names, "row", body, parameters, cycles)


@pytest.mark.parametrize(("accumulators", "rows"), [(4, 1), (4, 2), (8, 3)])
def test_rows_stay_and_every_word_is_read_once_after_it_was_written(accumulators, rows):
    assert reorder_outcome(accumulators, rows).failed == ()


REORDER_BUGS = {
    "a full half is filled": ("& ~Mux(half, full[1], full[0])", "", {"free"}),
    "an empty half is read": ("go.eq(Mux(out_half, full[1], full[0]) &", "go.eq(tiles.output.valid &", {"written"}),
    "a word is skipped": ("at.eq(at + held.sizes.m)", "at.eq(at + 2)", {"written"}),
    "beats do not wait": ("(~have | self.row.ready)", "1", {"same"}),
    "a half is free too soon": ("empties.eq(Cat(go & half_ends", "empties.eq(Cat(go & row_ends", {"free", "written"}),
}


@pytest.mark.parametrize("bug", REORDER_BUGS)
def test_bugs_of_the_reorder_buffer_are_caught(bug):
    before, after, caught = REORDER_BUGS[bug]
    found = reorder_outcome(8, 1, changed(ReorderBuffer, (before, after)), cycles=14)
    assert caught & set(found.failed)
