"""Proofs, by induction: streams of the loader's parts stay, its queues have room for what they cannot refuse, and its counters do not overflow."""

import sys

import pytest
from amaranth.hdl import Cat, Module, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

import hdl.lib.streams
from hdl import assembler, fetcher, job, loader, walker
from hdl.assembler import Assembler
from hdl.fetcher import Fetcher
from hdl.job import chunk_layout, mask_request_layout, piece_layout, token_layout
from hdl.lib.verilog import to_verilog
from hdl.loader import Loader
from hdl.walker import Walker
from model.accelerator import AcceleratorConfig
from tests.changed import changed
from tests.formal.cut import Cut
from tests.formal.prove import prove
from tests.formal.test_dma_proof import Queue

# Chunks of 4 vectors, few of them: a word of masks each, offsets and codes of several words.
LIMITS = {"CHUNK": 4, "CHUNKS": 2, "PIECES": 2, "_REQUESTS": 4, "_TOKENS": 2}
SMALL = {"rows": 1, "columns": 1, "accumulators": 4, "activation_entries": 2, "activation_depth": 4, "weight_depth": 4}
CONFIGS = {
    "64 bits": AcceleratorConfig(**SMALL, data_width=64, address_width=13),
    "128 bits": AcceleratorConfig(**SMALL, data_width=128, address_width=13),
    "no refinement": AcceleratorConfig(**SMALL, data_width=64, address_width=13, refinement="none"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small = set()
    for module in (job, walker, fetcher, assembler, loader):
        for name in LIMITS.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, LIMITS[name])
            small.add(name)
    assert small == LIMITS.keys()
    monkeypatch.setattr(hdl.lib.streams, "SyncFIFOBuffered", Queue)


class Probed(wiring.Component):
    """A component with outputs ``p_…`` for what ``probe`` finds among the local names of its ``elaborate``.

    ``probe`` gets these names and a function that gives those of a part.
    """

    def __init__(self, component, probe, monkeypatch):
        found = {}

        def note(frame, event, _):
            if event == "return" and frame.f_code.co_name in ("elaborate", "_records"):
                found.setdefault(id(frame.f_locals.get("self")), {}).update(frame.f_locals)

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            self._cut = Cut(component, monkeypatch, {})
        finally:
            sys.setprofile(before)
        probes = probe(found[id(component)], lambda part: found[id(part)])
        self._probes = {f"p_{name}": Value.cast(value) for name, value in probes.items()}
        members = {n: (In if m.flow == In else Out)(m.shape) for n, m in self._cut.signature.members.items()}
        super().__init__(members | {name: Out(len(value)) for name, value in self._probes.items()})

    def elaborate(self, platform):
        m = Module()
        m.submodules.inner = self._cut
        for name, member in self._cut.signature.members.items():
            inside, outside = getattr(self._cut, name), getattr(self, name)
            m.d.comb += inside.eq(outside) if member.flow == In else outside.eq(inside)
        m.d.comb += [getattr(self, name).eq(value) for name, value in self._probes.items()]
        return m


STABLE = """
  reg {port}_stalled = 0;
  reg [{top}:0] {port}_before;
  always @(posedge clk) begin
    {port}_stalled <= !rst && {port}__valid && !{port}__ready;
    {port}_before <= {port}__payload;
  end
  always @* if (past) begin
    {port}_stays: {verb} (!{port}_stalled || {port}__valid);
    {port}_same: {verb} (!{port}_stalled || {port}__payload == {port}_before);
  end
"""


def outcome(name, dut, body, *, stays=(), assumed=(), parameters=(), cycles=0, induction=2):
    """Prove by induction over some cycles, or look at so many from power-up; streams that ``stay``, and that are assumed to."""
    members = {key: (m.flow, len(Value.cast(getattr(dut, key)))) for key, m in dut.signature.members.items()}
    ports = [f"input [{width - 1}:0] {key}" for key, (flow, width) in members.items() if flow == In and width]
    text = f"module proof(input clk, rst, {', '.join(ports)});\n"
    text += "".join(f"  wire [{w - 1}:0] {key};\n" for key, (flow, w) in members.items() if flow == Out and w)
    text += "".join(f"  localparam {key} = {value};\n" for key, value in dict(parameters).items())
    connections = ", ".join(f".{key}({key})" for key in ("clk", "rst", *(key for key in members if members[key][1])))
    text += (
        f"  dut dut({connections});\n  initial assume (rst);\n  reg past = 0;\n  always @(posedge clk) past <= !rst;\n"
    )
    for streams, verb in ((stays, "assert"), (assumed, "assume")):
        for port in streams:
            text += STABLE.format(port=port, top=members[f"{port}__payload"][1] - 1, verb=verb)
    sources = {"dut.v": to_verilog(dut, "dut"), "proof.sv": text + body + "endmodule\n"}
    return prove(name, sources, cycles=cycles or induction, induction=not cycles)


# Assembler. Pieces are of 1 to 4 vectors.
ASSEMBLER = """
  wire [2:0] count = piece__payload[COUNT_AT +: 3];
  always @* assume (!piece__valid || (count >= 1 && count <= 4));
  wire takes = piece__valid && piece__ready;
  // Pieces that were taken and have not been said to be done.
  reg [3:0] owed = 0;
  always @(posedge clk) owed <= rst ? 0 : owed + takes - done;
  wire front = p_front_full && p_front_last, spare = p_spare_full && p_spare_last;
  always @* if (past) begin
    at_most: assert (owed <= 3);
    counted: assert (owed == p_active + front + spare);
    order: assert (p_front_full || !p_spare_full);
    inside: assert (!p_active || (p_count >= 1 && p_count <= 4 && p_vector < p_count));
    ends_with_a_piece: assert (!segment_done || done);
    // Words are taken for a piece alone.
    for_a_piece: assert (p_active || !((codes__valid && codes__ready) || (scales__valid && scales__ready)));
  end
"""
REFINED = """
  // Refined pieces whose masks are still to be taken: one at most.
  reg [1:0] unmasked = 0;
  wire masked = masks__valid && masks__ready;
  wire refined = piece__payload[REFINED_AT] && !piece__payload[0];
  always @(posedge clk) unmasked <= rst ? 0 : unmasked + (takes && refined) - masked;
  always @* if (past) begin
    one: assert (unmasked <= 1);
    masks_of_the_piece: assert (unmasked == (p_active && p_refines));
    offsets_for_a_piece: assert (p_active || !(offsets__valid && offsets__ready));
    none_left: assert (p_active || (p_left == 0 && !p_have));
  end
"""
# All words there, and a taker that waits two cycles at most.
ASSEMBLING = """
  reg [1:0] waited = 0;
  reg [3:0] silent = 0;
  always @(posedge clk) begin
    waited <= rst || load__ready ? 0 : waited + 1;
    silent <= rst || (load__valid && load__ready) ? 0 : silent + 1;
  end
  always @* begin
    assume (waited < 2 || load__ready);
    assume (piece__valid && codes__valid && scales__valid);
    MORE
  end
  always @* if (past) progress: assert (waited <= 2 && silent <= SILENT);
  LEFT
"""
LEFT = "always @* if (past) enough: assert (!(p_active && p_refines) || p_left >= 32 - 8 * p_vector);"
WORDS = "assume (masks__valid && offsets__valid && piece__payload[OCTETS_AT +: 6] == 32);"


def assembler_outcome(name, monkeypatch, source=Assembler, cycles=0, progress=False):
    config = CONFIGS[name]
    refined = config.refinement != "none"

    def probe(inside, part):
        loads = part(inside["loads"])
        probes = {f"{n}_full": loads[f"{n}_full"] for n in ("front", "spare")}
        probes |= {f"{n}_last": loads[n].last for n in ("front", "spare")}
        probes |= {"active": inside["active"], "vector": inside["vector"], "count": inside["piece"].count}
        if refined:
            probes |= {key: inside[key] for key in ("left", "have", "refines")}
        return probes

    dut = Probed(source(config), probe, monkeypatch)
    layout = piece_layout(config)
    parameters = {"COUNT_AT": layout["count"].offset, "REFINED_AT": layout["refined"].offset, "SILENT": 6}
    body = ASSEMBLER + (REFINED if refined else "")
    if refined:
        parameters["OCTETS_AT"] = layout["octets"].offset
    if progress:
        body += ASSEMBLING.replace("MORE", WORDS if refined else "").replace(
            "LEFT", LEFT if refined and not cycles else ""
        )
    return outcome(
        "assembler", dut, body, stays=["load"], parameters=parameters, cycles=cycles, induction=8 if progress else 2
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_loads_stay_and_words_are_taken_for_the_piece_that_is_assembled(name, monkeypatch):
    assert assembler_outcome(name, monkeypatch).failed == ()


ASSEMBLER_BUGS = {
    "offsets before their piece": ("Mux(self.piece.valid, self.piece.payload.octets, 0)", "self.piece.payload.octets"),
    "a load that does not wait": ("output.ready.eq(self.load.ready)", "output.ready.eq(1)"),
    "done with every vector": ("self.done.eq(moved & output.payload.last)", "self.done.eq(moved)"),
    "masks given up late": ("(vector[:count].all() | last)", "vector[:count].all()"),
    "a piece over another": ("takes.eq(~active | (go & last))", "takes.eq(~active | go)"),
}


@pytest.mark.parametrize("bug", ASSEMBLER_BUGS)
def test_bugs_of_the_assembler_are_caught(bug, monkeypatch):
    broken = changed(Assembler, ASSEMBLER_BUGS[bug])
    found = assembler_outcome("64 bits", monkeypatch, broken, cycles=9)
    assert set(found.failed) & {
        "load_stays",
        "load_same",
        "at_most",
        "for_a_piece",
        "masks_of_the_piece",
        "one",
        "offsets_for_a_piece",
        "counted",
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_an_assembler_with_words_and_a_taker_goes_on(name, monkeypatch):
    assert assembler_outcome(name, monkeypatch, progress=True).failed == ()


def test_an_assembler_that_stops_is_caught(monkeypatch):
    broken = changed(Assembler, ("whole = got == parts - 1", "whole = got == parts"))
    assert "progress" in assembler_outcome("no refinement", monkeypatch, broken, cycles=14, progress=True).failed


# Fetcher. The walker's side: a mask is requested with its chunk and not without; sizes are 1 to 4 vectors.
FETCHER = """
  wire refined_in = chunk__payload[REFINED_AT] && !chunk__payload[0];
  wire takes = chunk__valid && chunk__ready, gives = piece__valid && piece__ready;
  always @* begin
    assume (chunk__payload[COUNT_AT +: 3] >= 1 && chunk__payload[COUNT_AT +: 3] <= 4);
    // The engine's side: a request has as many words as it asked for, unless it is refused.
    assume (!word__valid || word__payload[WIDTH] == (p_filled == p_front_more));
  end
  reg [3:0] owed = 0;
  always @(posedge clk) owed <= rst ? 0 : owed + takes - gives;
  integer i;
  always @* if (past) begin
    chunks_counted: assert (owed == p_chunks_level + p_pieces_level);
    chunks_fit: assert (owed <= 4);
    filling: assert (p_kinds_level != 0 ? p_filled <= p_front_more : p_filled == 0);
    order: assert (p_request_front_full || !p_request_spare_full);
    levels: assert (p_chunks_level <= 2 && p_pieces_level <= 2 && p_kinds_level <= 4);
    state: assert (p_state == SCALES || (p_chunks_level != 0 && !p_chunk_zero && (p_state == CODES || p_state == OFFSETS)));
    // What goes on when it can: a word that is there, a request of the first chunk.
    words_move: assert (!(p_kinds_level != 0 && p_room && word__valid && done__valid) || p_moves);
    chunk_moves: assert (!(p_chunks_level != 0 && p_request_room && p_kinds_level != 4 && p_pieces_level != 2 && STEADY)
      || p_accepted || p_chunk_zero || p_state == OFFSETS);
  end
"""
FETCHER_REFINED = """
  always @* begin
    assume ((mask__valid && mask__ready) == (takes && refined_in));
    assume (mask__payload[MASK_COUNT_AT +: 3] >= 1 && mask__payload[MASK_COUNT_AT +: 3] <= 4);
  end
  function [3:0] ones(input [7:0] bits);
    ones = bits[0] + bits[1] + bits[2] + bits[3] + bits[4] + bits[5] + bits[6] + bits[7];
  endfunction
  // The assembler's side (proven of it): masks are taken for refined pieces that were given, and none of a piece is left when the next one is.
  reg unmasked = 0;
  wire refined_out = gives && piece__payload[PIECE_REFINED_AT] && !piece__payload[0], masked = masks__valid && masks__ready;
  always @(posedge clk) unmasked <= rst ? 0 : unmasked + refined_out - masked;
  always @* assume ((unmasked || !masked) && (!unmasked || masked || !refined_out));

  wire [3:0] in_chunks = ones(p_chunks_refined), in_pieces = ones(p_pieces_refined), asked = ones(p_kinds_masks);
  always @* if (past) begin
    counts_fit: assert (!p_counted || p_counts_level != AHEAD);
    no_mask_waits: assert (!p_front_is_mask || p_masks_level != AHEAD);
    counts: assert (in_chunks - (p_state == CODES && p_chunks_refined[0]) == asked + p_counted + p_counts_level);
    masks: assert (in_chunks + in_pieces + unmasked == asked + p_masks_level);
    one_word: assert (!(|(p_kinds_masks & p_kinds_long)));
    state_offsets: assert (p_state != OFFSETS || p_chunks_refined[0]);
  end
"""


def fetcher_outcome(name, monkeypatch, source=Fetcher, cycles=0):
    config = CONFIGS[name]
    refined = config.refinement != "none"

    def probe(inside, part):
        fsm = inside["m"]._generated["fsm"]
        states.update(fsm.encoding)
        queue = {key: part(inside[key])["queue"] for key in ("chunks", "pieces", "kinds")}
        chunks, pieces = chunk_layout(config), piece_layout(config)
        kinds = inside["kind_layout"]
        views = {
            "chunks": [chunks(place) for place in queue["chunks"].places],
            "pieces": [pieces(place) for place in queue["pieces"].places],
            "kinds": [kinds(place) for place in queue["kinds"].places],
        }
        there = {
            key: [queue[key].level > i if i else queue[key].level.any() for i in range(len(views[key]))]
            for key in views
        }
        masks = [t & (v.kind == fetcher._MASKS) for t, v in zip(there["kinds"], views["kinds"], strict=True)]
        probes = {f"{key}_level": queue[key].level for key in queue}
        probes |= {
            f"{key}_refined": Cat(t & v.refined & ~v.zero for t, v in zip(there[key], views[key], strict=True))
            for key in ("chunks", "pieces")
        }
        probes |= {
            "kinds_masks": Cat(masks),
            "kinds_long": Cat(v.more.any() for v in views["kinds"]),
            "front_is_mask": masks[0],
            "front_more": views["kinds"][0].more,
            "chunk_zero": views["chunks"][0].zero,
            "state": fsm.state,
            "request_room": inside["requests"].input.ready,
            **{f"request_{key}_full": part(inside["requests"])[f"{key}_full"] for key in ("front", "spare")},
            **{key: inside[key] for key in ("filled", "room", "moves", "accepted")},
        }
        if refined:
            words.append("masks")
            words.append("offsets")
            probes |= {"counts_level": part(inside["counts"])["queue"].level, "counted": inside["counted"]}
        for key in words:
            queue = part(inside["m"].submodules[f"{key}_words"])["queue"]
            probes[f"{key}_level"], depths[key] = queue.level, queue.depth
        return probes

    states, depths, words = {}, {}, ["codes", "scales"]
    dut = Probed(source(config), probe, monkeypatch)
    chunks, pieces = chunk_layout(config), piece_layout(config)
    parameters = {
        "COUNT_AT": chunks["count"].offset,
        "REFINED_AT": chunks["refined"].offset,
        "PIECE_REFINED_AT": pieces["refined"].offset,
        "WIDTH": config.data_width,
        "AHEAD": job.CHUNKS + job.PIECES + 3,
        **{key.upper(): number for key, number in states.items()},
    }
    stays = ["request", "piece", "codes", "scales"]
    body = FETCHER.replace("STEADY", "!mask__valid" if refined else "1")
    body += "".join(f"  always @* if (past) {k}_fit: assert (p_{k}_level <= {depth});\n" for k, depth in depths.items())
    if refined:
        body += "  always @* if (past) counts_in: assert (p_counts_level <= AHEAD);\n"
        parameters["MASK_COUNT_AT"] = mask_request_layout(config)["count"].offset
        body, stays = body + FETCHER_REFINED, [*stays, "masks", "offsets"]
    else:
        parameters["OFFSETS"] = 3
    assumed = ["mask"] if refined else []
    return outcome(
        "fetcher", dut, body, stays=stays, assumed=assumed, parameters=parameters, cycles=cycles, induction=3
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_and_masks_always_find_room_and_what_is_fetched_stays(name, monkeypatch):
    assert fetcher_outcome(name, monkeypatch).failed == ()


FETCHER_BUGS = {
    "a count that nobody takes": ("counts.output.ready.eq(1), write.en.eq(1)", "write.en.eq(1)"),
    "a piece without its codes": ("wants.eq(pieces.input.ready),", "wants.eq(1),"),
    "a request that is expected twice": (
        "kinds.input.valid.eq(accepted),",
        "kinds.input.valid.eq(requests.input.valid),",
    ),
    "words that wait for a later end": (
        "self.word.valid & (~self.word.payload.last | self.done.valid)",
        "self.word.valid & ~self.word.payload.last",
    ),
}


@pytest.mark.parametrize("bug", FETCHER_BUGS)
def test_bugs_of_the_fetcher_are_caught(bug, monkeypatch):
    found = fetcher_outcome("64 bits", monkeypatch, changed(Fetcher, FETCHER_BUGS[bug]), cycles=12)
    assert set(found.failed) & {
        "counts",
        "counts_fit",
        "chunks_fit",
        "chunks_counted",
        "masks",
        "words_move",
        "request_same",
    }


# Walker. The engine's side: it gives back what it was given, once.
WALKER = """
  always @* begin
    assume (!free_panel || p_panels != 0);
    assume (free_entries <= p_used);
    assume (!free_activations || &p_freed == 0);
  end
  // A product does not change while it is walked, nor what ends it early.
  reg [JOB-1:0] job_before;
  reg stop_before, failed_before;
  reg [7:0] code_before;
  reg [31:0] since_before;
  reg [ADDRESS-1:0] descriptor_before;
  reg busy_before = 0;
  always @(posedge clk) begin
    busy_before <= !rst && busy;
    job_before <= job; stop_before <= stop; failed_before <= failed;
    code_before <= code; since_before <= since; descriptor_before <= descriptor;
  end
  always @* if (past && busy_before) begin
    assume (job == job_before && stop == stop_before && failed == failed_before);
    assume (code == code_before && since == since_before && descriptor == descriptor_before);
  end
  reg quiet_before = 0;
  always @(posedge clk) quiet_before <= !rst && quiet && !(chunk__valid && chunk__ready);
  always @* if (past && quiet_before) assume (quiet);

  reg stalled = 0;
  reg [TOKEN-1:0] before;
  always @(posedge clk) begin
    stalled <= !rst && token__valid && !token__ready;
    before <= token__payload;
  end
  always @* if (past) begin
    two_panels: assert (p_panels <= 2);
    entries_fit: assert (p_used <= DEPTH);
    token_stays: assert (!stalled || token__valid);
    token_same: assert (!stalled || token__payload == before);
    MASKS
  end
"""
MASKS = """with_its_chunk: assert ((mask__valid && mask__ready) == (chunk__valid && chunk__ready && chunk__payload[REFINED_AT] && !chunk__payload[0]));"""


# Long products of small tiles, by their first bits.
WALKED = """
  always @* assume (job[3:0] == 0 && job[4 +: 24] >= 3 && job[4 +: 24] < 8 && job[28 +: 24] < 8 && job[28 +: 24] >= 1);
  always @* assume (job[52 +: 13] == 2 && job[65 +: 2] == 1 && job[67 +: 2] == 1 && job[69 +: 13] == 2);
  always @* assume (code == 0 && !failed && !stop && chunk__ready && token__ready && free_entries == 0 && !free_panel && !free_activations);
"""


def walker_outcome(name, monkeypatch, source=Walker, cycles=0):
    config = CONFIGS[name]
    dut = Probed(
        source(config), lambda inside, part: {key: inside[key] for key in ("panels", "used", "freed")}, monkeypatch
    )
    refined = config.refinement != "none"
    parameters = {
        "JOB": len(Value.cast(dut.job)),
        "ADDRESS": config.address_width,
        "TOKEN": token_layout(config).size,
        "DEPTH": config.weight_depth,
        "REFINED_AT": chunk_layout(config)["refined"].offset,
    }
    body = WALKER.replace("MASKS", MASKS if refined else "") + (WALKED if cycles else "")
    return outcome("walker", dut, body, parameters=parameters, cycles=cycles)


@pytest.mark.parametrize("name", ["64 bits", "no refinement"])
def test_tokens_stay_and_no_more_than_two_panels_and_a_bank_of_weights_are_in_use(name, monkeypatch):
    assert walker_outcome(name, monkeypatch).failed == ()


WALKER_BUGS = {
    "a third panel": ("takes_panel.eq(~panels[1])", "takes_panel.eq(1)"),
    "weights beyond the bank": ("used + needs <= config.weight_depth", "used <= config.weight_depth"),
}


@pytest.mark.parametrize("bug", WALKER_BUGS)
def test_bugs_of_the_walker_are_caught(bug, monkeypatch):
    found = walker_outcome("no refinement", monkeypatch, changed(Walker, WALKER_BUGS[bug]), cycles=22)
    assert set(found.failed) & {"two_panels", "entries_fit", "token_stays", "token_same"}


# Loader around its parts, which keep what is proven of them: chunks that were taken are done once, no more than MOST on their way,
# and segments are done in the order of their tokens, which come before.
LOADER = """
  reg [5:0] owed = 0;
  always @(posedge clk) owed <= rst ? 0 : owed + p_taken - p_done;
  wire [2:0] segments = (p_level > 0 && !p_ends[0]) + (p_level > 1 && !p_ends[1]);
  always @* begin
    assume (!p_done || owed != 0);
    assume (!p_taken || owed < MOST);
    assume (!p_segment_done || segments > p_loaded);
  end
  always @* if (past) begin
    on_its_way: assert (owed <= MOST && p_on_way == owed);
    quiet: assert (p_quiet == (owed == 0));
    queue: assert (p_level <= 2);
    no_more_than_tokens: assert (p_loaded <= segments);
    only_loaded: assert (!token__valid || token__payload[0] || p_loaded != 0);
  end
"""


def loader_outcome(monkeypatch, source=Loader, cycles=0):
    config = CONFIGS["no refinement"]

    def probe(inside, part):
        queue = part(inside["tokens"])["queue"]
        ends = Cat(token_layout(config)(place).end for place in queue.places)
        walker, assembler = inside["walker"], inside["assembler"]
        return {
            **{key: inside[key] for key in ("on_way", "loaded")},
            **{"level": queue.level, "ends": ends, "quiet": walker.quiet},
            "taken": walker.chunk.valid & walker.chunk.ready,
            **{key: getattr(assembler, key) for key in ("done", "segment_done")},
        }

    dut = Probed(source(config), probe, monkeypatch)
    # What queues hold, the piece in the assembler and two last vectors in its buffer: proven of fetcher and assembler.
    parameters = {"MOST": job.CHUNKS + job.PIECES + 3}
    return outcome("loader", dut, LOADER, stays=["token"], parameters=parameters, cycles=cycles)


def test_counters_do_not_overflow_and_segments_are_given_when_they_are_loaded(monkeypatch):
    assert loader_outcome(monkeypatch).failed == ()


LOADER_BUGS = {
    "a counter that is too short": ("range(CHUNKS + PIECES + 4)", "range(2)"),
    "a token before its segment": ("(loaded.any() | tokens.output.payload.end)", "1"),
    "ends are counted": ("tokens.output.ready & ~tokens.output.payload.end", "tokens.output.ready"),
}


@pytest.mark.parametrize("bug", LOADER_BUGS)
def test_bugs_of_the_loader_are_caught(bug, monkeypatch):
    found = loader_outcome(monkeypatch, changed(Loader, LOADER_BUGS[bug]), cycles=9)
    assert set(found.failed) & {"on_its_way", "only_loaded", "no_more_than_tokens", "token_stays"}
