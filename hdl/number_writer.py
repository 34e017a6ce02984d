"""Number writer: rows of binary32 numbers, written by DMA requests; and a write engine shared by two users (docs/ppu.md)."""

from typing import ClassVar

from amaranth.hdl import Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from hdl.dma import request_layout
from hdl.job import advanced
from hdl.lib.gearbox import Gearbox, beat_layout
from hdl.lib.streams import StreamBuffer, StreamFifo
from hdl.lib.verilog import lint_unused
from hdl.output import writer_members
from model.dma import DmaConfig, DmaStatus
from model.tile_engine import EngineConfig

__all__ = ["NumberWriter", "WriteShare", "number_tile_layout"]

_ELEMENT = 32
_CHUNK = 16
"""Most words of a request."""
_WAITING, _RUNS, _OUTSTANDING, _OWNERS = 32, 8, 255, 32
"""Chunks that wait for their requests, requests that wait for their words, requests on their way of a writer and of both."""


def number_tile_layout(config: EngineConfig, address_width: int) -> data.StructLayout:
    """Return the layout of what is known of a tile's numbers: place of the first one, see `hdl.job.place_bits`, stride, real rows and outputs."""
    return data.StructLayout(
        {
            "place": address_width + 1,
            "stride": 32,
            "rows": (config.rows * config.max_m).bit_length(),
            "outputs": (2 * config.columns * config.max_n).bit_length(),
        }
    )


class NumberWriter(wiring.Component):
    """Write rows of binary32 numbers, in requests of up to 16 words.

    A request is made when all of its words are here, so none waits for numbers. A row that would end beyond the address space is dropped and
    reported in ``error``.

    Parameters
    ----------
    config : EngineConfig
    dma : DmaConfig

    Members
    -------
    tile : In(stream of number_tile_layout)
        One per tile, in order; neither rows nor outputs are 0.
    number : In(stream of beat of numbers)
        As many as there are columns; numbers wait for their tile.
    request, word, done
        Those of a :class:`hdl.dma.WriteDma`; ``done`` is always taken.
    discard : In(1)
        A row whose first request would come now is dropped; all requests of one that has started are made.
    clear : In(1)
        Clears ``error``.
    idle : Out(1)
        All rows of all tiles taken are dropped or have ended.
    error : Out(2)
        The first status of a request that was not 0, until ``clear``.
    """

    throughput: ClassVar[str] = "1 beat or 1 word per cycle"

    def __init__(self, config: EngineConfig, dma: DmaConfig):
        self._config, self._dma = config, dma
        super().__init__(
            {
                "tile": In(stream.Signature(number_tile_layout(config, dma.address_width))),
                "number": In(stream.Signature(beat_layout(_ELEMENT, config.columns))),
                **writer_members(dma),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the way to words, what cuts rows into requests, and what sends their words."""
        m = Module()
        width, space, size = self._dma.data_width, self._dma.address_width, self._dma.beat_bytes
        layout = self.tile.payload.shape()
        m.submodules.tiles = tiles = StreamBuffer(layout)
        wiring.connect(m, wiring.flipped(self.tile), tiles.input)
        active, tile, coming = Signal(), Signal(layout), tiles.output.payload

        # Words wait until there are as many as a request has.
        chunk_layout = data.StructLayout({"more": exact_log2(_CHUNK), "last": 1})
        m.submodules.gearbox = gearbox = Gearbox(_ELEMENT, self._config.columns, width // _ELEMENT)
        m.submodules.words = words = StreamFifo(width, 2 * _CHUNK)
        m.submodules.chunks = chunks = StreamFifo(chunk_layout, _WAITING)
        wiring.connect(m, wiring.flipped(self.number), gearbox.input)
        count, full, moves = Signal(exact_log2(_CHUNK)), Signal(), Signal()
        packed = gearbox.output.payload
        m.d.comb += [
            moves.eq(gearbox.output.valid & words.input.ready & chunks.input.ready),
            gearbox.output.ready.eq(words.input.ready & chunks.input.ready),
            words.input.valid.eq(moves),
            words.input.payload.eq(packed.word.as_value()),
            full.eq(packed.last | count.all()),
            chunks.input.valid.eq(moves & full),
            chunks.input.payload.more.eq(count),
            chunks.input.payload.last.eq(packed.last),
        ]
        with m.If(moves):
            m.d.sync += count.eq(Mux(full, 0, count + 1))

        # Requests.
        run_layout = data.StructLayout({"more": exact_log2(_CHUNK), "keep": 1})
        m.submodules.runs = runs = StreamFifo(run_layout, _RUNS)
        m.submodules.requests = requests = StreamBuffer(request_layout(self._dma))
        wiring.connect(m, requests.output, wiring.flipped(self.request))
        chunk, run, request = chunks.output.payload, runs.input.payload, requests.input.payload
        first, keep = Signal(init=1), Signal()
        place, left = Signal(space + 1), Signal(len(tile.outputs))
        at, here = Signal(space + 1), Signal(len(tile.outputs))
        octets = Signal(len(here) + 2)
        end = Signal(max(space, len(octets)) + 2)
        wanted, beyond, asks, steps, done = (Signal(name=n) for n in ("wanted", "beyond", "asks", "steps", "done"))
        outstanding = Signal(range(_OUTSTANDING + 1))
        free = outstanding != _OUTSTANDING
        per_chunk = _CHUNK * size // (_ELEMENT // 8)
        m.d.comb += [
            at.eq(Mux(first, tile.place, place)),
            here.eq(Mux(first, tile.outputs, left)),
            octets.eq(Mux(chunk.last, here, per_chunk) << 2),
            # Of the whole row, at its beginning.
            end.eq(at + (here << 2)),
            beyond.eq(end[space + 1 :].any() | (end[space] & end[:space].any())),
            wanted.eq(Mux(first, ~self.discard, keep)),
            asks.eq(Mux(first, wanted & ~beyond, keep)),
            steps.eq(active & chunks.output.valid & runs.input.ready & (~asks | (requests.input.ready & free))),
            requests.input.valid.eq(active & chunks.output.valid & runs.input.ready & asks & free),
            request.address.eq(at),
            request.bytes.eq(octets),
            chunks.output.ready.eq(steps),
            runs.input.valid.eq(steps),
            run.more.eq(chunk.more),
            run.keep.eq(asks),
            done.eq(steps & chunk.last),
            tiles.output.ready.eq(~active | (done & (tile.rows == 1))),
        ]
        with m.If(steps):
            m.d.sync += [
                first.eq(chunk.last),
                keep.eq(asks),
                left.eq(here - per_chunk),
                place.eq(advanced(m, "place", at, octets)),
            ]
        with m.If(done):
            m.d.sync += [tile.place.eq(advanced(m, "row", tile.place, tile.stride)), tile.rows.eq(tile.rows - 1)]
        with m.If(tiles.output.ready):
            m.d.sync += [active.eq(tiles.output.valid), tile.eq(coming)]

        # Words.
        busy, current, gives, finishes = Signal(), Signal(run_layout), Signal(), Signal()
        m.d.comb += [
            self.word.payload.eq(words.output.payload),
            self.word.valid.eq(busy & current.keep & words.output.valid),
            words.output.ready.eq(busy & (self.word.ready | ~current.keep)),
            gives.eq(words.output.valid & words.output.ready),
            finishes.eq(gives & ~current.more.any()),
            runs.output.ready.eq(~busy | finishes),
        ]
        with m.If(gives):
            m.d.sync += current.more.eq(current.more - 1)
        with m.If(runs.output.ready):
            m.d.sync += [busy.eq(runs.output.valid), current.eq(runs.output.payload)]

        # Status.
        held = Signal(range(_RUNS + 4))
        ended, refuses = Signal(2), Signal()
        m.d.comb += [
            self.done.ready.eq(1),
            self.idle.eq(~(active | tiles.output.valid | held.any() | outstanding.any())),
            ended.eq(self.done.payload & self.done.valid.replicate(2)),
            refuses.eq(steps & first & wanted & beyond),
        ]
        m.d.sync += [
            held.eq(held + steps - finishes),
            outstanding.eq(outstanding + (requests.input.valid & requests.input.ready) - self.done.valid),
        ]
        with m.If(self.clear | ~self.error.any()):
            m.d.sync += self.error.eq(Mux(refuses & ~ended.any(), DmaStatus.REFUSED.value, ended))
        return m


class WriteShare(wiring.Component):
    """Let two users write with one `hdl.dma.WriteDma`; each sees its own requests, words and ends, as if the engine were its own.

    Requests of both go by turns. Words are taken in the order of requests, so a user must have those of a request without waiting for the
    other. No request is one that the engine refuses.

    Parameters
    ----------
    config : DmaConfig

    Members
    -------
    user_request : In(stream of {address, bytes}), two
    user_word : In(stream of data), two
    user_done : Out(stream of DmaStatus), two
        Always ready.
    request, word, done
        Those of a :class:`hdl.dma.WriteDma`. Requests leave a cycle later.
    """

    def __init__(self, config: DmaConfig):
        self._config = config
        super().__init__(
            {
                "user_request": In(stream.Signature(request_layout(config))).array(2),
                "user_word": In(stream.Signature(config.data_width)).array(2),
                "user_done": Out(stream.Signature(2)).array(2),
                "request": Out(stream.Signature(request_layout(config))),
                "word": Out(stream.Signature(config.data_width)),
                "done": In(stream.Signature(2)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the choice of requests, the order of words, and the way of ends."""
        m = Module()
        Value.cast(self.done.payload).attrs.update(lint_unused("statuses go by to both users"))
        lane = exact_log2(self._config.beat_bytes)
        layout = request_layout(self._config)
        m.submodules.requests = requests = StreamBuffer(layout)
        wiring.connect(m, requests.output, wiring.flipped(self.request))
        first, second = self.user_request
        behind = Signal(len(first.payload.bytes), attrs=lint_unused("words are counted, not bytes"))
        turn_layout = data.StructLayout({"user": 1, "more": len(behind) - lane})
        m.submodules.turns = turns = StreamFifo(turn_layout, _OWNERS)
        m.submodules.owners = owners = StreamFifo(1, _OWNERS)

        # Whoever was served last gives way.
        before, user, may, accepted = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            user.eq(second.valid & (~first.valid | ~before)),
            may.eq(requests.input.ready & turns.input.ready & owners.input.ready),
            accepted.eq((first.valid | second.valid) & may),
            requests.input.payload.eq(Mux(user, second.payload.as_value(), first.payload.as_value())),
            requests.input.valid.eq(accepted),
            first.ready.eq(may & ~user),
            second.ready.eq(may & user),
            behind.eq(requests.input.payload.bytes - 1),
            turns.input.payload.user.eq(user),
            turns.input.payload.more.eq(behind[lane:]),
            turns.input.valid.eq(accepted),
            owners.input.payload.eq(user),
            owners.input.valid.eq(accepted),
        ]
        with m.If(accepted):
            m.d.sync += before.eq(user)

        busy, turn = Signal(), Signal(turn_layout)
        source, moves, ends = Signal(), Signal(), Signal()
        m.d.comb += [
            source.eq(Mux(turn.user, self.user_word[1].valid, self.user_word[0].valid)),
            self.word.payload.eq(Mux(turn.user, self.user_word[1].payload, self.user_word[0].payload)),
            self.word.valid.eq(busy & source),
            self.user_word[0].ready.eq(busy & ~turn.user & self.word.ready),
            self.user_word[1].ready.eq(busy & turn.user & self.word.ready),
            moves.eq(self.word.valid & self.word.ready),
            ends.eq(moves & ~turn.more.any()),
            turns.output.ready.eq(~busy | ends),
            self.done.ready.eq(owners.output.valid),
            owners.output.ready.eq(self.done.valid),
        ]
        with m.If(moves):
            m.d.sync += turn.more.eq(turn.more - 1)
        with m.If(turns.output.ready):
            m.d.sync += [busy.eq(turns.output.valid), turn.eq(turns.output.payload)]
        for number, done in enumerate(self.user_done):
            mine = owners.output.payload if number else ~owners.output.payload
            m.d.comb += [
                done.payload.eq(self.done.payload),
                done.valid.eq(self.done.valid & owners.output.valid & mine),
            ]
        return m
