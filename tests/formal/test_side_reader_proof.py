"""Proof, by induction, of the side reader: what was requested always finds room, every request is answered once, and idle means that nothing is left."""

import pytest
from amaranth.hdl import Mux

import hdl.lib.streams
import hdl.side_reader
from hdl.side_reader import MaskReader, NumberReader, SideReader, side_tile_layout
from model.dma import DmaConfig
from model.tile_engine import EngineConfig
from tests.changed import changed
from tests.formal.test_dma_proof import Queue
from tests.formal.test_loader_proof import Probed, outcome
from tests.formal.test_writers_proof import total

DMA = DmaConfig(data_width=64, address_width=13)
CONFIG = EngineConfig(rows=1, columns=2, accumulators=4, activation_entries=2)
LIMITS = {"_ROOM": 3, "_REQUEST": 2, "_REQUESTS": 3}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in LIMITS.items():
        assert hasattr(hdl.side_reader, name)
        monkeypatch.setattr(hdl.side_reader, name, value)
    monkeypatch.setattr(hdl.lib.streams, "SyncFIFOBuffered", Queue)


# The engine's side: requests that it was given have an end each, and as many words as they asked for unless they are refused.
SIDE = """
  reg [3:0] open = 0;
  // A request that is being refused has given some of its zeros.
  reg refusing = 0;
  always @(posedge clk) refusing <= !rst && refused && !ended && (refusing || p_moves);
  wire ended = done__valid && done__ready, took = word__valid && word__ready;
  always @(posedge clk) open <= rst ? 0 : open + (request__valid && request__ready) - ended;
  wire refused = done__valid && done__payload == 1;
  always @* begin
    assume ((!word__valid && !done__valid) || open != 0);
    assume (!word__valid || refused || word__payload[64] == (p_filled == p_more));
    // A refused request has no words.
    assume (!done__valid || p_filled == 0 || done__payload != 1 || refusing);
    assume (!refusing || refused);
  end
  wire [1:0] buffered = p_requests_front_full + p_requests_spare_full;
  always @* begin
    assume (!tile__valid || tile__payload[OUTPUTS_AT +: OUTPUTS] <= 8);
  end
  always @* if (past) begin
    order: assert (p_requests_front_full || !p_requests_spare_full);
    answered_once: assert (p_owners_level == open + buffered);
    requests_fit: assert (p_owners_level <= REQUESTS && open <= REQUESTS);
    filled: assert (p_owners_level == 0 ? p_filled == 0 : p_filled <= p_more);
    kinds: assert (p_strange == 0);
    // Room is what neither is on its way nor waits.
    room_residual: assert (p_residual_room + p_residual_level + p_residual_owed == ROOM);
    room_previous: assert (p_previous_room + p_previous_level + p_previous_owed == ROOM);
    no_word_is_lost: assert ((!p_residual_word || p_residual_level <= ROOM) && (!p_previous_word || p_previous_level <= ROOM));
    word_moves: assert (!(open != 0 && word__valid && done__valid && !refused) || word__ready);
    refusal_moves: assert (!(open != 0 && refused) || p_moves);
    // Of masks two tiles at most are here or on their way.
    masks_fit: assert (p_used <= 2 && p_used == p_mask_filled + p_mask_owed && (!p_mask_word || p_mask_filled != 2));
    rows_wait: assert (p_used == p_again_front_full + p_again_spare_full && (p_again_front_full || !p_again_spare_full));
    halves: assert ((p_to_half ^ p_at_half) == p_mask_filled[0]);
    idle_is_empty: assert (!idle || (p_owners_level == 0 && p_residual_level == 0 && p_previous_level == 0 && p_used == 0));
  end
"""


def side_outcome(monkeypatch, source=SideReader, cycles=0):
    def probe(inside, part):
        owners = part(inside["owners"])["queue"]
        entry_of = inside["entry"].shape()
        front = entry_of(owners.places[0])
        filled = inside["filled"]
        found = {
            "owners_level": owners.level,
            "more": front.more,
            "strange": total(owners, 8, lambda place: entry_of(place).kind == 3),
            **{key: inside[key] for key in ("filled", "moves")},
            **{f"requests_{key}_full": part(inside["requests"])[f"{key}_full"] for key in ("front", "spare")},
        }
        for number, name in enumerate(("residual", "previous")):
            local = part(inside[name])
            owed = total(owners, 8, lambda place, n=number: Mux(entry_of(place).kind == n, entry_of(place).more + 1, 0))
            here = owners.level.any() & (front.kind == number)
            found |= {
                f"{name}_room": local["room"],
                f"{name}_level": part(local["words"])["queue"].level,
                f"{name}_owed": owed - Mux(here, filled, 0),
                f"{name}_word": inside[name].word.valid,
            }
        masks = part(inside["masks"])
        return found | {
            "used": masks["used"],
            "mask_filled": masks["filled"],
            "mask_owed": total(owners, 8, lambda place: entry_of(place).kind == hdl.side_reader._MASKS),
            "mask_word": inside["masks"].word.valid,
            **{key: masks[key] for key in ("to_half", "at_half")},
            **{f"again_{key}_full": part(masks["again"])[f"{key}_full"] for key in ("front", "spare")},
        }

    dut = Probed(source(CONFIG, DMA), probe, monkeypatch)
    tile = side_tile_layout(CONFIG, DMA)
    parameters = {key[1:]: value for key, value in LIMITS.items()}
    parameters |= {"OUTPUTS_AT": tile["outputs"].offset, "OUTPUTS": tile["outputs"].width}
    return outcome(
        "side_reader",
        dut,
        SIDE,
        stays=["request"],
        assumed=["tile", "word", "done"],
        parameters=parameters,
        cycles=cycles,
    )


def test_what_the_side_reader_requests_finds_room_and_is_answered_once(monkeypatch):
    assert side_outcome(monkeypatch).failed == ()


BUGS = {
    "numbers without room": (NumberReader, "active & (room > ask.more)", "active & room.any()", "no_word_is_lost"),
    "masks without room": (MaskReader, "tiles.output.valid & (used != 2)", "tiles.output.valid", "masks_fit"),
    "an end for each zero": (SideReader, "self.done.ready.eq(ends)", "self.done.ready.eq(moves)", "answered_once"),
    "idle before masks": (SideReader, "previous.busy | masks.busy", "previous.busy", "idle_is_empty"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_of_the_side_reader_are_caught(bug, monkeypatch):
    source, before, after, label = BUGS[bug]
    broken = changed(source, (before, after))
    monkeypatch.setattr(hdl.side_reader, source.__name__, broken)
    found = side_outcome(monkeypatch, broken if source is SideReader else SideReader, cycles=11)
    assert {label, "room_residual", "room_previous"} & set(found.failed)
