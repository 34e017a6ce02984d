"""Proofs, by induction, of number writer and group writer: every request has exactly its words, which are there when it is made; none is lost."""

import pytest
from amaranth.hdl import Const, Mux

import hdl.group_writer
import hdl.lib.streams
import hdl.number_writer
from hdl.group_writer import GroupWriter
from hdl.lib.gearbox import beat_layout
from hdl.number_writer import NumberWriter, number_tile_layout
from hdl.quantiser import group_layout
from model.dma import DmaConfig
from model.tile_engine import EngineConfig
from tests.changed import changed
from tests.formal.test_dma_proof import Queue
from tests.formal.test_loader_proof import Probed, outcome

DMA = DmaConfig(data_width=64, address_width=13)
LIMITS = {"_CHUNK": 2, "_WAITING": 2, "_ROWS": 2, "_RUNS": 2, "_OUTSTANDING": 3}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    changed_names = set()
    for module in (hdl.number_writer, hdl.group_writer):
        for name in LIMITS.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, LIMITS[name])
            changed_names.add(name)
    assert changed_names == LIMITS.keys()
    monkeypatch.setattr(hdl.lib.streams, "SyncFIFOBuffered", Queue)


def total(queue, size, amount):
    """Return the sum over a queue's entries of what ``amount`` says of each."""
    found = Const(0, size)
    for i, place in enumerate(queue.places):
        found += Mux(queue.level > i if i else queue.level.any(), amount(place), 0)
    return found[:size]


# Requests that the engine has taken and not ended, it says of each once how it ended.
ENGINE = """
  reg [3:0] open = 0;
  always @(posedge clk) open <= rst ? 0 : open + (request__valid && request__ready) - done__valid;
  always @* assume (!done__valid || open != 0);
  wire [1:0] buffered = p_requests_front_full + p_requests_spare_full;
  wire asked = p_request_valid && p_request_ready, wrote = word__valid && word__ready;
  // Words of the requests that were made, which have not left.
  reg [7:0] owed = 0;
  always @(posedge clk) owed <= rst ? 0 : owed + (asked ? (p_request_bytes + 7) >> 3 : 0) - wrote;
  reg stalled = 0;
  always @(posedge clk) stalled <= !rst && word__valid && !word__ready;
  always @* if (past) begin
    word_waits: assert (!stalled || word__valid);
    order: assert (p_requests_front_full || !p_requests_spare_full);
    counted: assert (p_outstanding == open + buffered);
    limit: assert (open <= OUTSTANDING && p_outstanding <= OUTSTANDING);
    levels: assert (p_runs_level <= RUNS);
    some: assert (!asked || p_request_bytes != 0);
    request_has_its_words: assert (owed == p_kept);
    word_of_a_request: assert (!word__valid || owed != 0);
    idle_is_empty: assert (!idle || (p_runs_level == 0 && !p_busy && open == 0 && buffered == 0));
  end
"""

# Tiles of rows of n numbers, from 1 to 6: one to three words, one or two chunks.
NUMBERS = """
  (* anyconst *) reg [2:0] n;
  always @* assume (n >= 1 && n <= 6);
  wire [1:0] words = (n + 1) >> 1;
  wire [1:0] chunks = (words + 1) >> 1;
  // Beats of a row of two numbers each, and words that have left the gearbox.
  reg [1:0] beat = 0, word = 0;
  wire takes = number__valid && number__ready;
  always @(posedge clk) begin
    if (rst) beat <= 0; else if (takes) beat <= beat + 1 == words ? 0 : beat + 1;
    if (rst) word <= 0; else if (p_moves) word <= word + 1 == words ? 0 : word + 1;
  end
  always @* begin
    assume (!number__valid || number__payload[LAST_AT] == (beat + 1 == words));
    assume (number__payload[COUNT_AT +: 2] == (n[0] && beat + 1 == words ? 1 : 2));
    assume (!tile__valid || (tile__payload[OUTPUTS_AT +: OUTPUTS] == n && tile__payload[ROWS_AT +: ROWS] != 0));
  end
  function [1:0] wrapped(input [2:0] at, input [1:0] size);
    wrapped = at >= 2 * size ? at - 2 * size : at >= size ? at - size : at;
  endfunction
  wire [1:0] next_chunk = p_first ? 0 : 1;
  wire [1:0] second_chunk = wrapped(next_chunk + 1, chunks);
  function right(input [1:0] place, input last, more);
    right = last == (place + 1 == chunks) && more == (place + 1 == chunks ? !words[0] : 1'b1);
  endfunction
  wire [12:0] behind = p_tile_place + 8 * CHUNK;
  reg kept = 0;
  reg [12:0] begun = 0;
  wire [12:0] further = begun + 8 * CHUNK;
  always @(posedge clk) if (p_steps && p_first) begin
    kept <= p_asks; begun <= p_request_address;
  end
  always @* if (past) begin
    chunks_fit: assert (p_chunks_level <= WAITING);
    words_fit: assert (p_words_level <= 2 * CHUNK);
    // Nothing but whole chunks is asked for, and all of their words are here.
    every_word: assert (p_words_level == p_promised + p_count);
    words_are_there: assert (!p_busy || p_words_level != 0);
    whole_rows: assert (p_first || !p_steps || p_asks == kept);
    in_a_row: assert (p_first || !p_steps || !p_asks || p_request_address == further);
    goes_on: assert (!(p_active && p_chunks_level != 0 && p_runs_level != RUNS && p_request_ready && p_outstanding != OUTSTANDING)
      || p_steps);
    held: assert (p_held == p_runs_level + p_busy);
    // What makes it so: where chunks are in their rows.
    packed: assert (p_level <= 2 && beat == wrapped(word + p_level, words));
    ends: assert (p_end_0 == (p_level >= 1 && word + 1 == words)
      && p_end_1 == (p_level >= 2 && wrapped(word + 1, words) + 1 == words));
    at: assert (word < words && beat < words && p_count == word[0]);
    place: assert (wrapped(next_chunk + p_chunks_level, chunks) == word[1]);
    first: assert (next_chunk < chunks);
    chunk_0: assert (p_chunks_level < 1 || right(next_chunk, p_chunk_0[1], p_chunk_0[0]));
    chunk_1: assert (p_chunks_level < 2 || right(second_chunk, p_chunk_1[1], p_chunk_1[0]));
    tiles: assert (p_tiles_front_full || !p_tiles_spare_full);
    left: assert (p_first || p_left == n - 2 * CHUNK);
    keep: assert (p_first || (p_active && p_keep == kept && p_place == behind && begun == p_tile_place));
    rows: assert (!p_active || (p_tile_rows != 0 && p_tile_outputs == n));
    front: assert (!p_tiles_front_full || (p_front_rows != 0 && p_front_outputs == n));
    spare: assert (!p_tiles_spare_full || (p_spare_rows != 0 && p_spare_outputs == n));
  end
"""


def common(inside, part, runs, words_of):
    """What both writers have."""
    buffer, current = part(inside["requests"]), inside["current"]
    request = inside["requests"].input
    busy = inside["busy"]
    return {
        **{f"requests_{key}_full": buffer[f"{key}_full"] for key in ("front", "spare")},
        "request_valid": request.valid,
        "request_ready": request.ready,
        "request_bytes": request.payload.bytes,
        "request_address": request.payload.address,
        "runs_level": runs.level,
        "kept": total(runs, 8, lambda run: Mux(words_of(run).keep, words_of(run).more + 1, 0))
        + Mux(busy & current.keep, current.more + 1, 0),
        **{key: inside[key] for key in ("busy", "outstanding", "held", "steps", "asks")},
    }


def numbers_outcome(monkeypatch, source=NumberWriter, cycles=0):
    config = EngineConfig(rows=1, columns=2, accumulators=4, activation_entries=2)

    def probe(inside, part):
        chunks, runs, words = (part(inside[key])["queue"] for key in ("chunks", "runs", "words"))
        chunk_of, run_of = inside["chunk_layout"], inside["run_layout"]
        gearbox, tiles = part(inside["gearbox"]), part(inside["tiles"])
        unit = len(gearbox["store"]) // 2
        tile = inside["tile"]
        found = common(inside, part, runs, run_of)
        promised = total(chunks, 8, lambda chunk: chunk_of(chunk).more + 1) + total(
            runs, 8, lambda run: run_of(run).more + 1
        )
        return found | {
            "promised": promised + Mux(inside["busy"], inside["current"].more + 1, 0),
            "chunks_level": chunks.level,
            "words_level": words.level,
            "level": gearbox["level"],
            **{f"end_{i}": gearbox["store"][(i + 1) * unit - 1] for i in range(2)},
            **{f"chunk_{i}": place for i, place in enumerate(chunks.places)},
            **{key: inside[key] for key in ("count", "moves", "first", "active", "left", "keep")},
            "place": inside["place"][:-1],
            "tile_place": tile.place[:-1],
            "tile_rows": tile.rows,
            "tile_outputs": tile.outputs,
            **{f"tiles_{key}_full": tiles[f"{key}_full"] for key in ("front", "spare")},
            **{
                f"{key}_{part_}": getattr(tiles[key], part_)
                for key in ("front", "spare")
                for part_ in ("rows", "outputs")
            },
        }

    dut = Probed(source(config, DMA), probe, monkeypatch)
    tile, number = number_tile_layout(config, DMA.address_width), beat_layout(32, config.columns)
    parameters = {
        **{key[1:]: number_ for key, number_ in LIMITS.items() if key not in ("_ROWS",)},
        "LAST_AT": number["last"].offset,
        "COUNT_AT": number["count"].offset,
        **{f"{key.upper()}_AT": tile[key].offset for key in ("rows", "outputs")},
        **{key.upper(): tile[key].width for key in ("rows", "outputs")},
    }
    return outcome(
        "number_writer",
        dut,
        ENGINE + NUMBERS,
        stays=["request"],
        assumed=["number", "tile"],
        parameters=parameters,
        cycles=cycles,
    )


def test_every_request_for_numbers_has_its_words_and_all_are_written(monkeypatch):
    assert numbers_outcome(monkeypatch).failed == ()


NUMBER_BUGS = {
    "a request before its words": (
        "chunks.input.valid.eq(moves & full)",
        "chunks.input.valid.eq(moves & ~count.any())",
    ),
    "fewer words than bytes": ("run.more.eq(chunk.more)", "run.more.eq(0)"),
    "a request too many": ("free = outstanding != _OUTSTANDING", "free = Const(1)"),
    "a second chunk at the first one's place": ("at.eq(Mux(first, tile.place, place))", "at.eq(tile.place)"),
    "words of a row that is dropped": ("self.word.valid.eq(busy & current.keep &", "self.word.valid.eq(busy &"),
    "idle too soon": ("held.any() | outstanding.any()", "held.any()"),
}


@pytest.mark.parametrize("bug", NUMBER_BUGS)
def test_bugs_of_the_number_writer_are_caught(bug, monkeypatch):
    monkeypatch.setattr(hdl.number_writer, "Const", Const, raising=False)
    found = numbers_outcome(monkeypatch, changed(NumberWriter, NUMBER_BUGS[bug]), cycles=14)
    assert set(found.failed) & {
        "every_word",
        "request_has_its_words",
        "limit",
        "counted",
        "whole_rows",
        "in_a_row",
        "word_of_a_request",
        "idle_is_empty",
        "words_are_there",
    }


# Tiles of rows of one or two pairs of groups: two or four words of codes, one each of scales and masks.
GROUPS = """
  (* anyconst *) reg [1:0] n;
  always @* assume (n == 1 || n == 2);
  reg [1:0] at = 0;
  wire takes = group__valid && group__ready;
  always @(posedge clk) if (rst) at <= 0; else if (takes) at <= group__payload[LAST_AT] ? 0 : at + 1;
  always @* assume (!group__valid || group__payload[LAST_AT] == (at == 2 * n - 1));
  reg kept = 0;
  always @(posedge clk) if (p_steps && !p_begun) kept <= p_wanted;
  always @* if (past) begin
    rows_fit: assert (p_rows_level <= ROWS);
    // Words of each array, packed or about to be, are those of rows that wait, of requests that were made, and of the row that comes.
    every_code: assert (p_codes_words == p_codes_promised + p_codes_asked + at);
    every_scale: assert (p_scales_words == p_scales_promised + p_scales_asked);
    every_mask: assert (p_masks_words == p_masks_promised + p_masks_asked);
    words_are_there: assert (!p_busy || p_array == 3 || p_words_there);
    whole_rows: assert (!p_steps || !p_begun || p_wanted == kept);
    goes_on: assert (!(p_rows_level != 0 && p_runs_level != RUNS && p_request_ready && p_outstanding != OUTSTANDING) || p_steps);
    held: assert (p_held == p_rows_level + p_finals);
    // What makes it so: the row that comes, and how far the first one that waits has got.
    row: assert (p_active ? at == 2 * p_pairs + p_half && at < 2 * n : at == 0 && p_pairs == 0 && !p_half && p_octets == 0);
    levels_fit: assert (p_codes_level <= 2 && p_scales_level <= 16 && p_masks_level <= 16);
    queues_fit: assert (p_codes_queue <= 8 && p_scales_queue <= 2 && p_masks_queue <= 2 && p_offsets_queue <= 4);
    scales: assert (p_scales_part == at);
    masks: assert (p_masks_part == (p_refined && p_active ? p_pairs : 0));
    pairs: assert ((p_rows_level < 1 || p_pairs_0 == n) && (p_rows_level < 2 || p_pairs_1 == n));
    begun: assert (p_begun == (p_array_next != 0) && (!p_begun || (p_rows_level != 0 && p_keep == kept)));
    final: assert ((p_runs_level == 0 && !p_busy) || p_last_final == !p_begun);
    refines: assert (p_array_next < 2 || p_front_refine);
    offsets: assert (p_array_next != 3 || p_front_octets != 0);
  end
"""


def groups_outcome(monkeypatch, source=GroupWriter, cycles=0):
    config = EngineConfig(rows=1, columns=16, accumulators=4, activation_entries=2)

    def probe(inside, part):
        rows, runs = (part(inside[key])["queue"] for key in ("rows", "runs"))
        row_of, run_of = inside["row_layout"], inside["run_layout"]
        current, array, busy = inside["current"], inside["array"], inside["busy"]
        front = row_of(rows.places[0])
        found = common(inside, part, runs, run_of)
        there = []
        for k, (name, per_word) in enumerate((("codes", 1), ("scales", 8), ("masks", 8))):
            queue = part(getattr(inside["m"].submodules, f"words_{name}"))["queue"]
            level = part(inside[f"pack_{name}"])["level"]
            words = queue.level + (level if per_word == 1 else level[3:])

            def of_row(row, k=k):
                return (row.pairs << 1, 1, row.refine)[k]

            waiting = total(rows, 8, lambda place, of_row=of_row: of_row(row_of(place)))
            asked = total(runs, 8, lambda place, k=k: Mux(run_of(place).array == k, run_of(place).more + 1, 0))
            found |= {
                f"{name}_words": words,
                f"{name}_promised": waiting - Mux(array > k, of_row(front), 0),
                f"{name}_asked": asked + Mux(busy & (current.array == k), current.more + 1, 0),
                f"{name}_part": level[:3],
                f"{name}_level": level,
                f"{name}_queue": queue.level,
            }
            there.append(words.any())
        return found | {
            "rows_level": rows.level,
            "offsets_queue": part(inside["m"].submodules.words_offsets)["queue"].level,
            **{f"pairs_{i}": row_of(place).pairs for i, place in enumerate(rows.places)},
            "array": current.array,
            "array_next": array,
            "words_there": Mux(current.array == 0, there[0], Mux(current.array == 1, there[1], there[2])),
            "finals": total(runs, 8, lambda place: run_of(place).final) + (busy & current.final),
            # Of the request that was made last.
            "last_final": Mux(
                runs.level == 2,
                run_of(runs.places[1]).final,
                Mux(runs.level == 1, run_of(runs.places[0]).final, current.final),
            ),
            "front_refine": front.refine,
            "front_octets": front.octets,
            **{key: inside[key] for key in ("active", "pairs", "half", "octets", "refined", "begun", "wanted", "keep")},
        }

    dut = Probed(source(config, DMA), probe, monkeypatch)
    parameters = {key[1:]: number for key, number in LIMITS.items()} | {"LAST_AT": group_layout["last"].offset}
    body = ENGINE + GROUPS
    return outcome(
        "group_writer", dut, body, stays=["request"], assumed=["group", "tile"], parameters=parameters, cycles=cycles
    )


def test_every_request_for_groups_has_its_words_and_all_are_written(monkeypatch):
    assert groups_outcome(monkeypatch).failed == ()


GROUP_BUGS = {
    "a row before its last group": ("self.group.ready & group.last)", "self.group.ready & half)"),
    "scales of a row as one word too many": ("behind.eq(amount - 1)", "behind.eq(amount)"),
    "half a row": ("wanted.eq(Mux(begun, keep, ~self.discard))", "wanted.eq(~self.discard)"),
    "idle before the last request": ("held.any() | outstanding.any()", "outstanding.any()"),
}


@pytest.mark.parametrize("bug", GROUP_BUGS)
def test_bugs_of_the_group_writer_are_caught(bug, monkeypatch):
    found = groups_outcome(monkeypatch, changed(GroupWriter, GROUP_BUGS[bug]), cycles=12)
    assert set(found.failed) & {
        "every_code",
        "every_scale",
        "every_mask",
        "request_has_its_words",
        "whole_rows",
        "idle_is_empty",
        "words_are_there",
    }
