"""Reads beside the operands: two users of one read engine, and what post-processing wants from memory (docs/side_reader.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from hdl.dma import request_layout, word_layout
from hdl.job import advanced
from hdl.lib.fp32 import Float
from hdl.lib.gearbox import Gearbox, beat_layout
from hdl.lib.streams import StreamBuffer, StreamFifo
from hdl.lib.verilog import lint_unused
from model.block_scaled import PAD
from model.dma import DmaConfig, DmaStatus
from model.tile_engine import EngineConfig
from model.vmac import SUBGROUPS

__all__ = ["MaskReader", "NumberReader", "ReadShare", "SideReader", "side_tile_layout"]

_ELEMENT = 32
_MASK = 2 * SUBGROUPS
_ROOM = 64
"""Words of an array that may be on their way or wait: a word per cycle, if memory answers within 40 cycles."""
_REQUEST = 16
"""Most words of a request for numbers."""
_REQUESTS = 32
"""Requests that may be on their way."""
_RESIDUAL, _PREVIOUS, _MASKS = range(3)


def side_tile_layout(config: EngineConfig, dma: DmaConfig) -> data.StructLayout:
    """Return the layout of what is known of a tile's side arrays.

    ``residual``, ``previous``, ``next_mask``: places of the tile's first output, each an address and above it whether it is beyond the address
    space; for ``next_mask`` of the byte that stands for the first 32 outputs. Strides are bytes from a row to the next. ``rows`` and ``outputs``:
    real ones, as they are (not less one). ``adds``, ``measures``, ``refines``: whether residual, previous and masks are read.
    """
    place = dma.address_width + 1
    return data.StructLayout(
        {
            "residual": place,
            "residual_stride": 32,
            "previous": place,
            "previous_stride": 32,
            "next_mask": place,
            "rows": (config.rows * config.max_m).bit_length(),
            "outputs": _outputs(config).bit_length(),
            "adds": 1,
            "measures": 1,
            "refines": 1,
        }
    )


def _outputs(config: EngineConfig) -> int:
    """Return the most outputs of a row in a tile."""
    return 2 * config.columns * config.max_n


def _mask_bytes(config: EngineConfig) -> int:
    """Return the most bytes of masks of a row in a tile."""
    return -(-_outputs(config) // PAD)


def _kept_bytes(config: EngineConfig, dma: DmaConfig) -> int:
    """Return how many bytes of a word can be masks."""
    return min(dma.beat_bytes, _mask_bytes(config))


def _ask_layout(dma: DmaConfig, most: int) -> data.StructLayout:
    """Return the layout of a request of up to ``most`` units; what a unit is, the reader knows."""
    return data.StructLayout({"place": dma.address_width + 1, "units": most.bit_length()})


class ReadShare(wiring.Component):
    """Let two users read with one `hdl.dma.ReadDma`; each sees its own requests, words and ends, as if the engine were its own.

    Requests of both go by turns, one per cycle. Words come in the order of requests: a user that does not take its words or its ends holds up the
    other. It should request only what it will take whatever the other does.

    Parameters
    ----------
    config : DmaConfig

    Members
    -------
    user_request : In(stream of {address, bytes}), two
    user_word : Out(stream of {data, last}), two
        What is offered depends on what the engine offers in the same cycle.
    user_done : Out(stream of DmaStatus), two
    request, word, done
        Those of a :class:`hdl.dma.ReadDma`. Requests leave a cycle later.
    """

    def __init__(self, config: DmaConfig):
        self._config = config
        super().__init__(
            {
                "user_request": In(stream.Signature(request_layout(config))).array(2),
                "user_word": Out(stream.Signature(word_layout(config))).array(2),
                "user_done": Out(stream.Signature(2)).array(2),
                "request": Out(stream.Signature(request_layout(config))),
                "word": In(stream.Signature(word_layout(config))),
                "done": In(stream.Signature(2)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the choice of requests and the way back."""
        m = Module()
        Value.cast(self.word.payload).attrs.update(lint_unused("data go by to both users"))
        m.submodules.requests = requests = StreamBuffer(request_layout(self._config))
        m.submodules.owners = owners = StreamFifo(1, _REQUESTS)
        wiring.connect(m, requests.output, wiring.flipped(self.request))

        # Whoever was served last gives way.
        before, user, accepted = Signal(), Signal(), Signal()
        first, second = self.user_request
        m.d.comb += [
            user.eq(second.valid & (~first.valid | ~before)),
            requests.input.payload.eq(Mux(user, second.payload.as_value(), first.payload.as_value())),
            requests.input.valid.eq((first.valid | second.valid) & owners.input.ready),
            accepted.eq(requests.input.valid & requests.input.ready),
            owners.input.payload.eq(user),
            owners.input.valid.eq(accepted),
            first.ready.eq(requests.input.ready & owners.input.ready & ~user),
            second.ready.eq(requests.input.ready & owners.input.ready & user),
        ]
        with m.If(accepted):
            m.d.sync += before.eq(user)

        # A request is over when its last word and its end are taken, in whatever order. One that was refused has no words: those that are
        # offered belong to a later one.
        worded, ended, refused = (Signal(name=name) for name in ("worded", "ended", "refused"))
        gives_word, gives_done, words_over, over = (
            Signal(name=name) for name in ("gives_word", "gives_done", "words_over", "over")
        )
        owner = owners.output.payload
        word_taken = Mux(owner, self.user_word[1].ready, self.user_word[0].ready)
        done_taken = Mux(owner, self.user_done[1].ready, self.user_done[0].ready)
        m.d.comb += [
            refused.eq(self.done.valid & ~ended & (self.done.payload == DmaStatus.REFUSED)),
            gives_word.eq(owners.output.valid & self.word.valid & ~worded & ~refused),
            gives_done.eq(owners.output.valid & self.done.valid & ~ended),
            self.word.ready.eq(owners.output.valid & ~worded & ~refused & word_taken),
            self.done.ready.eq(owners.output.valid & ~ended & done_taken),
            words_over.eq(worded | refused | (self.word.valid & self.word.ready & self.word.payload.last)),
            over.eq(words_over & (ended | (self.done.valid & self.done.ready))),
            owners.output.ready.eq(over),
        ]
        for number, (word, done) in enumerate(zip(self.user_word, self.user_done, strict=True)):
            mine = owner if number else ~owner
            m.d.comb += [
                word.payload.eq(self.word.payload),
                word.valid.eq(gives_word & mine),
                done.payload.eq(self.done.payload),
                done.valid.eq(gives_done & mine),
            ]
        with m.If(over):
            m.d.sync += [worded.eq(0), ended.eq(0)]
        with m.Else():
            m.d.sync += [
                worded.eq(worded | (self.word.valid & self.word.ready & self.word.payload.last)),
                ended.eq(ended | (self.done.valid & self.done.ready)),
            ]
        return m


class NumberReader(wiring.Component):
    """Request the rows of an array of binary32 numbers, and make beats of their words.

    A request has up to 16 words, and waits until there is room for all of them.

    Parameters
    ----------
    config : EngineConfig
    dma : DmaConfig

    Members
    -------
    tile : In(stream of {place, stride, rows, outputs})
        Neither rows nor outputs are 0. Two wait while one is at work.
    ask : Out(stream of {place, units, more, count, ends})
        ``units`` numbers from ``place`` on, in ``more`` + 1 words; if it ``ends`` a row, ``count`` numbers count in the last word.
    word : In(stream of {word, count, last})
        Always ready. ``last`` is a row's last.
    number : Out(stream of numbers)
        Behind a row's end they are 0.
    busy : Out(1)
        A tile waits, or some of its numbers were not taken.
    """

    def __init__(self, config: EngineConfig, dma: DmaConfig):
        self._config, self._dma = config, dma
        self._per_word = dma.data_width // _ELEMENT
        tile = side_tile_layout(config, dma)
        ask = _ask_layout(dma, _REQUEST * self._per_word).members
        count = self._per_word.bit_length()
        self._tile_layout = data.StructLayout(
            {"place": ask["place"], "stride": 32, "rows": tile["rows"].width, "outputs": tile["outputs"].width}
        )
        super().__init__(
            {
                "tile": In(stream.Signature(self._tile_layout)),
                "ask": Out(
                    stream.Signature(
                        data.StructLayout({**ask, "more": (_REQUEST - 1).bit_length(), "count": count, "ends": 1})
                    )
                ),
                "word": In(stream.Signature(beat_layout(_ELEMENT, self._per_word), always_ready=True)),
                "number": Out(stream.Signature(data.ArrayLayout(Float, config.columns))),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build requests, the queue and the gearbox."""
        m = Module()
        per_word = self._per_word
        lane = exact_log2(per_word)
        m.submodules.tiles = tiles = StreamBuffer(self._tile_layout)
        wiring.connect(m, wiring.flipped(self.tile), tiles.input)
        coming = tiles.output.payload

        active = Signal()
        tile = Signal(self._tile_layout)  # of the row at work; rows that are left
        at, left = Signal(len(coming.place)), Signal(len(coming.outputs))
        room = Signal(range(_ROOM + 1), init=_ROOM)
        ask = self.ask.payload
        whole, ends, behind = _REQUEST * per_word, Signal(), Signal(len(ask.units))
        m.d.comb += [
            ask.place.eq(at),
            ends.eq(left <= whole),
            ask.ends.eq(ends),
            ask.units.eq(Mux(ends, left, whole)),
            behind.eq(Mux(ends, left - 1, whole - 1)),
            ask.more.eq(behind[lane:]),
            ask.count.eq(behind[:lane] + 1),
            self.ask.valid.eq(active & (room > ask.more)),
        ]
        asks = Signal()
        below, further = Signal(len(at)), Signal(len(at))
        m.d.comb += [
            asks.eq(self.ask.valid & self.ask.ready),
            below.eq(advanced(m, "below", tile.place, tile.stride)),
            further.eq(advanced(m, "behind", at, Const(whole * _ELEMENT // 8))),
        ]
        m.d.comb += tiles.output.ready.eq(~active | (asks & ends & (tile.rows == 1)))
        with m.If(asks):
            m.d.sync += [at.eq(further), left.eq(left - whole)]
            with m.If(ends):
                m.d.sync += [at.eq(below), tile.place.eq(below), left.eq(tile.outputs), tile.rows.eq(tile.rows - 1)]
        with m.If(tiles.output.ready):
            m.d.sync += [active.eq(tiles.output.valid), tile.eq(coming), at.eq(coming.place), left.eq(coming.outputs)]

        # The queue's output register is not counted, so that its input is always ready.
        m.submodules.words = words = StreamFifo(beat_layout(_ELEMENT, per_word), _ROOM + 1)
        m.submodules.gearbox = gearbox = Gearbox(_ELEMENT, per_word, self._config.columns)
        Value.cast(gearbox.output.payload).attrs.update(lint_unused("who takes numbers knows where rows end"))
        words.input.ready.attrs.update(lint_unused("room is counted before words are requested"))
        wiring.connect(m, words.output, gearbox.input)
        leaves = Signal()
        m.d.comb += [
            words.input.payload.eq(self.word.payload),
            words.input.valid.eq(self.word.valid),
            leaves.eq(gearbox.input.valid & gearbox.input.ready),
            self.number.payload.as_value().eq(gearbox.output.payload.word.as_value()),
            self.number.valid.eq(gearbox.output.valid),
            gearbox.output.ready.eq(self.number.ready),
            self.busy.eq(active | tiles.output.valid | (room != _ROOM) | gearbox.output.valid),
        ]
        m.d.sync += room.eq(room + leaves - Mux(asks, ask.more + 1, 0))
        return m


class MaskReader(wiring.Component):
    """Request the masks of a tile once, and give them for every row.

    The masks of the next tile come while those of one are given.

    Parameters
    ----------
    config : EngineConfig
    dma : DmaConfig

    Members
    -------
    tile : In(stream of {place, rows, outputs})
        Neither rows nor outputs are 0. Two wait beside those whose masks are requested.
    ask : Out(stream of {place, units, more})
        ``units`` bytes from ``place`` on, in ``more`` + 1 words.
    word : In(stream of {data, last})
        Always ready. The bytes of a word that can be masks; ``last`` is the request's last.
    mask : Out(stream of 8)
    busy : Out(1)
        A tile waits, or some of its masks were not taken.
    """

    def __init__(self, config: EngineConfig, dma: DmaConfig):
        self._config, self._dma = config, dma
        self._most = _mask_bytes(config)
        self._per_word = _kept_bytes(config, dma)
        self._words = -(-self._most // self._per_word)
        tile = side_tile_layout(config, dma)
        ask = _ask_layout(dma, self._most).members
        self._tile_layout = data.StructLayout(
            {"place": ask["place"], "rows": tile["rows"].width, "outputs": tile["outputs"].width}
        )
        super().__init__(
            {
                "tile": In(stream.Signature(self._tile_layout)),
                "ask": Out(stream.Signature(data.StructLayout({**ask, "more": (self._words - 1).bit_length()}))),
                "word": In(
                    stream.Signature(data.StructLayout({"data": 8 * self._per_word, "last": 1}), always_ready=True)
                ),
                "mask": Out(stream.Signature(_MASK)),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build requests, a memory of two halves, and the way from it to bytes."""
        m = Module()
        per_word, index_bits = self._per_word, (self._words - 1).bit_length()
        m.submodules.tiles = tiles = StreamBuffer(self._tile_layout)
        wiring.connect(m, wiring.flipped(self.tile), tiles.input)
        coming, ask = tiles.output.payload, self.ask.payload
        again_layout = data.StructLayout({"rows": len(coming.rows), "more": index_bits, "count": per_word.bit_length()})
        m.submodules.again = again = StreamBuffer(again_layout)
        used, filled = Signal(range(3)), Signal(range(3))

        # A unit of 1 to 32 outputs is a byte. Only words of a power of two bytes can be more than one.
        behind = Signal(len(coming.outputs), attrs=lint_unused("bytes are counted, not outputs"))
        last_byte = behind[exact_log2(PAD) :]
        m.d.comb += [
            behind.eq(coming.outputs - 1),
            ask.place.eq(coming.place),
            ask.units.eq(last_byte + 1),
            again.input.payload.rows.eq(coming.rows),
            self.ask.valid.eq(tiles.output.valid & (used != 2)),
            tiles.output.ready.eq(self.ask.ready & (used != 2)),
            again.input.valid.eq(self.ask.valid & self.ask.ready),
        ]
        if self._words > 1:
            lane = exact_log2(per_word)
            m.d.comb += [
                ask.more.eq(last_byte[lane:]),
                again.input.payload.more.eq(last_byte[lane:]),
                again.input.payload.count.eq(last_byte[:lane] + 1),
            ]
        else:
            m.d.comb += again.input.payload.count.eq(last_byte + 1)

        m.submodules.store = memory = Memory(shape=8 * per_word, depth=2 << index_bits, init=[])
        write, read = memory.write_port(), memory.read_port()
        to, to_half, fills = Signal(index_bits), Signal(), Signal()
        m.d.comb += [
            write.addr.eq(Cat(to, to_half)),
            write.data.eq(self.word.payload.data),
            write.en.eq(self.word.valid),
            fills.eq(self.word.valid & self.word.payload.last),
        ]
        with m.If(self.word.valid):
            m.d.sync += to.eq(to + 1)
        with m.If(fills):
            m.d.sync += [to.eq(0), to_half.eq(~to_half)]

        # Rows are given one after the other, from the half that was filled first.
        m.submodules.gearbox = gearbox = Gearbox(8, per_word, 1)
        Value.cast(gearbox.output.payload).attrs.update(lint_unused("who takes masks knows how many a row has"))
        beat = gearbox.input.payload
        at, at_half, row = Signal(index_bits), Signal(), Signal(len(coming.rows))
        have, steps, ends, frees = (Signal(name=name) for name in ("have", "steps", "ends", "frees"))
        last, count = Signal(), Signal(len(beat.count))
        now = again.output.payload
        m.d.comb += [
            read.addr.eq(Cat(at, at_half)),
            read.en.eq(steps),
            steps.eq(again.output.valid & filled.any() & (~have | gearbox.input.ready)),
            ends.eq(at == now.more),
            frees.eq(steps & ends & (row == now.rows - 1)),
            again.output.ready.eq(frees),
            gearbox.input.valid.eq(have),
            Value.cast(beat.elements).eq(read.data),
            beat.count.eq(count),
            beat.last.eq(last),
            self.mask.payload.eq(gearbox.output.payload.word[0]),
            self.mask.valid.eq(gearbox.output.valid),
            gearbox.output.ready.eq(self.mask.ready),
            self.busy.eq(tiles.output.valid | used.any() | have | gearbox.output.valid),
        ]
        with m.If(~have | gearbox.input.ready):
            m.d.sync += have.eq(steps)
        with m.If(steps):
            m.d.sync += [at.eq(at + 1), last.eq(ends), count.eq(now.count)]
            with m.If(ends):
                m.d.sync += [at.eq(0), row.eq(row + 1)]
            with m.If(frees):
                m.d.sync += [row.eq(0), at_half.eq(~at_half)]
        m.d.sync += [
            used.eq(used + again.input.valid - frees),
            filled.eq(filled + fills - frees),
        ]
        return m


class SideReader(wiring.Component):
    """Read what a post-processing unit takes beside the results: a residual, the layer before's numbers, the next layer's weight masks.

    The three arrays do not wait for each other: each has its own queue, and nothing is requested that has no room there, so words are always
    taken. After an error zeros stand in place of what was not read.

    Parameters
    ----------
    config : EngineConfig
    dma : DmaConfig

    Members
    -------
    tile : In(stream of side_tile_layout)
        One per tile, in order. Without rows or outputs nothing is read.
    residual, previous : Out(stream of numbers)
        A word of as many numbers as there are columns for each beat of the tile's real rows; the last one of a row is filled up with zeros.
    weight_mask : Out(stream of 8)
        A byte per 32 outputs or part of them, for every row again.
    request, word, done
        Those of a :class:`hdl.dma.ReadDma`.
    clear : In(1)
        Clears ``error``.
    idle : Out(1)
        All that tiles taken have asked for has been taken.
    error : Out(2)
        The first status of a request that was not 0, until ``clear``.
    """

    throughput: ClassVar[str] = "1 word of the bus per cycle; a beat or a mask per cycle"

    def __init__(self, config: EngineConfig, dma: DmaConfig):
        self._config, self._dma = config, dma
        numbers = data.ArrayLayout(Float, config.columns)
        super().__init__(
            {
                "tile": In(stream.Signature(side_tile_layout(config, dma))),
                "residual": Out(stream.Signature(numbers)),
                "previous": Out(stream.Signature(numbers)),
                "weight_mask": Out(stream.Signature(_MASK)),
                "request": Out(stream.Signature(request_layout(dma))),
                "word": In(stream.Signature(word_layout(dma))),
                "done": In(stream.Signature(2)),
                "clear": In(1),
                "idle": Out(1),
                "error": Out(2),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the readers, the choice of requests and the way of words."""
        m = Module()
        m.submodules.residual_reader = residual = NumberReader(self._config, self._dma)
        m.submodules.previous_reader = previous = NumberReader(self._config, self._dma)
        m.submodules.mask_reader = masks = MaskReader(self._config, self._dma)
        wiring.connect(m, residual.number, wiring.flipped(self.residual))
        wiring.connect(m, previous.number, wiring.flipped(self.previous))
        wiring.connect(m, masks.mask, wiring.flipped(self.weight_mask))

        # Tiles go to the readers that they name, when all have a place.
        tile, takes, real = self.tile.payload, Signal(), Signal()
        m.d.comb += [
            self.tile.ready.eq(residual.tile.ready & previous.tile.ready & masks.tile.ready),
            real.eq(tile.rows.any() & tile.outputs.any()),
            takes.eq(self.tile.valid & self.tile.ready & real),
            residual.tile.payload.place.eq(tile.residual),
            residual.tile.payload.stride.eq(tile.residual_stride),
            previous.tile.payload.place.eq(tile.previous),
            previous.tile.payload.stride.eq(tile.previous_stride),
            masks.tile.payload.place.eq(tile.next_mask),
            residual.tile.valid.eq(takes & tile.adds),
            previous.tile.valid.eq(takes & tile.measures),
            masks.tile.valid.eq(takes & tile.refines),
        ]
        for reader in (residual, previous, masks):
            m.d.comb += [reader.tile.payload.rows.eq(tile.rows), reader.tile.payload.outputs.eq(tile.outputs)]

        # Masks go first, there are few of them; numbers go by turns.
        m.submodules.requests = requests = StreamBuffer(request_layout(self._dma))
        wiring.connect(m, requests.output, wiring.flipped(self.request))
        numbers = residual.ask.payload
        more_bits = max(len(numbers.more), len(masks.ask.payload.more))
        m.submodules.owners = owners = StreamFifo(
            data.StructLayout({"kind": 2, "more": more_bits, "count": len(numbers.count), "ends": 1}), _REQUESTS
        )
        before, kind, accepted, may = Signal(), Signal(2), Signal(), Signal()
        place, octets = Signal(len(numbers.place)), Signal(len(requests.input.payload.bytes))
        entry, ask = owners.input.payload, Signal(numbers.shape())
        with m.If(masks.ask.valid):
            m.d.comb += [
                kind.eq(_MASKS),
                place.eq(masks.ask.payload.place),
                octets.eq(masks.ask.payload.units),
                entry.more.eq(masks.ask.payload.more),
            ]
        with m.Else():
            with m.If(previous.ask.valid & (~residual.ask.valid | ~before)):
                m.d.comb += kind.eq(_PREVIOUS)
            m.d.comb += [
                ask.eq(Mux(kind[0], previous.ask.payload.as_value(), residual.ask.payload.as_value())),
                place.eq(ask.place),
                octets.eq(ask.units << exact_log2(_ELEMENT // 8)),
                entry.more.eq(ask.more),
                entry.count.eq(ask.count),
                entry.ends.eq(ask.ends),
            ]
        m.d.comb += [
            may.eq(requests.input.ready & owners.input.ready),
            requests.input.valid.eq((masks.ask.valid | previous.ask.valid | residual.ask.valid) & owners.input.ready),
            accepted.eq(requests.input.valid & requests.input.ready),
            # A place beyond the address space becomes a request that the DMA engine refuses: one of no bytes.
            requests.input.payload.address.eq(place),
            requests.input.payload.bytes.eq(Mux(place[-1], 0, octets)),
            entry.kind.eq(kind),
            owners.input.valid.eq(accepted),
            residual.ask.ready.eq(may & (kind == _RESIDUAL)),
            previous.ask.ready.eq(may & (kind == _PREVIOUS)),
            masks.ask.ready.eq(may & (kind == _MASKS)),
        ]
        with m.If(accepted & (kind != _MASKS)):
            m.d.sync += before.eq(kind[0])

        # Zeros stand for the words of a request that was refused.
        owner = owners.output.payload
        refused, moves, ends = (Signal(name=name) for name in ("refused", "moves", "ends"))
        filled = Signal(more_bits)
        word = Signal(self._dma.data_width)
        m.d.comb += [
            refused.eq(self.done.valid & (self.done.payload == DmaStatus.REFUSED)),
            moves.eq(owners.output.valid & (refused | (self.word.valid & (~self.word.payload.last | self.done.valid)))),
            ends.eq(moves & Mux(refused, filled == owner.more, self.word.payload.last)),
            word.eq(Mux(refused, 0, self.word.payload.data)),
            self.word.ready.eq(moves & ~refused),
            self.done.ready.eq(ends),
            owners.output.ready.eq(ends),
            masks.word.payload.data.eq(word),
            masks.word.payload.last.eq(ends),
            masks.word.valid.eq(moves & (owner.kind == _MASKS)),
        ]
        for number, reader in ((_RESIDUAL, residual), (_PREVIOUS, previous)):
            m.d.comb += [
                reader.word.payload.elements.as_value().eq(word),
                reader.word.payload.count.eq(owner.count),
                reader.word.payload.last.eq(ends & owner.ends),
                reader.word.valid.eq(moves & (owner.kind == number)),
            ]
        with m.If(moves):
            m.d.sync += filled.eq(Mux(ends, 0, filled + 1))
        with m.If(self.clear | ~self.error.any()):
            m.d.sync += self.error.eq(self.done.payload & ends.replicate(2))
        m.d.comb += self.idle.eq(~(residual.busy | previous.busy | masks.busy))
        return m
