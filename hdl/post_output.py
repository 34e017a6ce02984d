"""Output stage with post-processing: rows of sums through a `hdl.ppu.Ppu` to numbers and groups in memory (docs/ppu.md)."""

from typing import Any, ClassVar

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hdl.dma import request_layout, word_layout
from hdl.group_writer import GroupWriter
from hdl.job import ARRAYS, advanced, place_bits, post_layout
from hdl.lib.fp32 import Float
from hdl.lib.streams import StreamBuffer
from hdl.lib.verilog import lint_unused
from hdl.number_writer import NumberWriter, WriteShare
from hdl.output import RawOutput, output_tile_layout
from hdl.pe import ResultWord
from hdl.ppu import Ppu, ppu_beat_layout
from hdl.reorder import ReorderBuffer, row_layout
from hdl.side_reader import SideReader
from model.accelerator import MAX_ROWS, POST_ARRAYS, AcceleratorConfig
from model.vmac import GROUP

__all__ = ["Front", "PostOutput", "PostStage", "post_tile_layout"]

_HALF = 32

kept_layout = data.StructLayout({"activity": Float, "energy": Float})
"""What is kept of a report."""


def post_tile_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of what is known of a tile: that of other output stages, and its place in its product, see `hdl.job.output_layout`."""
    return data.StructLayout(
        {
            **output_tile_layout(config.engine, config.address_width).members,
            "post": 1,
            "first": 1,
            "begin": 1,
            "last": 1,
            "index": MAX_ROWS.bit_length(),
        }
    )


def _front_layout(config: AcceleratorConfig) -> data.StructLayout:
    members = output_tile_layout(config.engine, config.address_width).members
    return data.StructLayout({name: members[name] for name in ("rows", "outputs", "mode_nvfp4")})


class Front(wiring.Component):
    """Turn rows of sums into beats of elements, and drop what only pads a tile.

    A beat of sums makes a beat of elements, in AutoFP2 mode up to two.

    Members
    -------
    tile : In(stream of {rows, outputs, mode_nvfp4})
        One per tile. Of a tile without rows or outputs everything is dropped.
    row : In(stream of beat of a row)
    beat : Out(stream of ppu_beat_layout)
        Depends on ``row`` in the same cycle.
    busy : Out(1)
        A tile was taken, and its end was not.
    """

    throughput: ClassVar[str] = "1 beat per cycle"

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        super().__init__(
            {
                "tile": In(stream.Signature(_front_layout(config))),
                "row": In(stream.Signature(row_layout(config.engine))),
                "beat": Out(stream.Signature(ppu_beat_layout(config.columns))),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Count rows and outputs."""
        m = Module()
        columns = self._config.columns
        active, tile, row, beat = Signal(), Signal(_front_layout(self._config)), self.row.payload, self.beat.payload
        left, second = Signal(len(tile.outputs)), Signal()
        keeps, completes, moves, gives, done = (
            Signal(name=name) for name in ("keeps", "completes", "moves", "gives", "done")
        )
        # Behind a row's last output only padding comes.
        complete = Signal()
        parts = [psum[low : low + _HALF] for psum in row.psum for low in (0, _HALF)]
        for k in range(columns):
            half = Signal(_HALF, name=f"half_{k}")
            wide = Cat(half, half[-1].replicate(_HALF))
            m.d.comb += [
                half.eq(Mux(second, parts[columns + k], parts[k])),
                beat.elements[k].eq(Mux(tile.mode_nvfp4, row.psum[k], wide)),
            ]
        m.d.comb += [
            self.busy.eq(active),
            keeps.eq(tile.rows.any() & ~complete),
            completes.eq(left <= columns),
            beat.count.eq(Mux(completes, left, columns)),
            beat.last.eq(completes),
            beat.end.eq(completes & (tile.rows == 1)),
            self.beat.valid.eq(active & self.row.valid & keeps),
            gives.eq(self.beat.valid & self.beat.ready),
            self.row.ready.eq(active & (~keeps | (self.beat.ready & (tile.mode_nvfp4 | second | completes)))),
            moves.eq(self.row.valid & self.row.ready),
            done.eq(moves & row.end),
            self.tile.ready.eq(~active | done),
        ]
        with m.If(gives):
            m.d.sync += [second.eq(~moves), left.eq(left - columns), complete.eq(completes)]
        with m.If(moves & row.last):
            m.d.sync += [complete.eq(0), second.eq(0), left.eq(tile.outputs), tile.rows.eq(tile.rows - tile.rows.any())]
        coming = self.tile.payload
        with m.If(self.tile.ready):
            m.d.sync += [
                active.eq(self.tile.valid),
                tile.eq(coming),
                tile.rows.eq(Mux(coming.outputs.any(), coming.rows, 0)),
                left.eq(coming.outputs),
                second.eq(0),
                complete.eq(0),
            ]
        return m


def _members(config: AcceleratorConfig) -> dict[str, wiring.Member]:
    """Return what both `PostOutput` and `PostStage` have."""
    dma = config.dma
    return {
        "block": In(stream.Signature(post_layout(config))),
        "tile": In(stream.Signature(post_tile_layout(config))),
        "request": Out(stream.Signature(request_layout(dma))),
        "word": Out(stream.Signature(dma.data_width)),
        "done": In(stream.Signature(2)),
        "read_request": Out(stream.Signature(request_layout(dma))),
        "read_word": In(stream.Signature(word_layout(dma))),
        "read_done": In(stream.Signature(2)),
        "discard": In(1),
        "clear": In(1),
        "release": In(1),
        "idle": Out(1),
        "error": Out(2),
        "read_error": Out(2),
        "status": Out(2),
        "report": Out(kept_layout),
        "reported": Out(1),
        "begun": Out(1),
        "observe": Out(1),
    }


class PostOutput(wiring.Component):
    """Process the outputs of products that have a post block, and write what comes of them.

    Parameters
    ----------
    config : AcceleratorConfig

    Members
    -------
    block : In(stream of post_layout)
        One per product, before its tiles; kept until ``release``.
    tile : In(stream of post_tile_layout)
    row : In(stream of beat of a row)
    request, word, done
        Those of a :class:`hdl.dma.WriteDma`.
    read_request, read_word, read_done
        Those of a :class:`hdl.dma.ReadDma`.
    discard : In(1)
        A row that starts to be written now is dropped.
    clear : In(1)
        Clears ``error``, ``read_error``, ``status`` and ``reported``.
    release : In(1)
        The product has ended; only while idle.
    idle : Out(1)
        All that tiles taken ask for is done.
    error, read_error : Out(2)
        The first status of a write, of a read, that was not 0.
    status : Out(2)
        {clipped, nonfinite}
    report : Out({activity, energy})
    reported : Out(1)
        There was one since ``clear``.
    begun : Out(1)
        Sums start at 0 in this cycle.
    observe : Out(1)
        The policy unit gets its activity.
    """

    throughput: ClassVar[str] = "1 element per column and cycle"

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        super().__init__({"row": In(stream.Signature(row_layout(config.engine))), **_members(config)})

    def elaborate(self, platform: object) -> Module:
        """Connect the parts, and give each what it needs of a tile."""
        m = Module()
        config = self._config
        engine, dma = config.engine, config.dma
        m.submodules.front = front = Front(config)
        m.submodules.ppu = ppu = Ppu(config.post)
        m.submodules.numbers = numbers = NumberWriter(engine, dma)
        m.submodules.groups = groups = GroupWriter(engine, dma)
        m.submodules.share = share = WriteShare(dma)
        m.submodules.side = side = SideReader(engine, dma)
        wiring.connect(m, wiring.flipped(self.row), front.row)
        wiring.connect(m, front.beat, ppu.beat)
        wiring.connect(m, ppu.number, numbers.number)
        wiring.connect(m, ppu.group, groups.group)
        for name in ("residual", "previous", "weight_mask"):
            wiring.connect(m, getattr(side, name), getattr(ppu, name))
        writers: list[Any] = [numbers, groups]
        for number, writer in enumerate(writers):
            wiring.connect(m, writer.request, share.user_request[number])
            wiring.connect(m, writer.word, share.user_word[number])
            wiring.connect(m, share.user_done[number], writer.done)
            m.d.comb += [writer.discard.eq(self.discard), writer.clear.eq(self.clear)]
        for name in ("request", "word", "done"):
            wiring.connect(m, getattr(share, name), wiring.flipped(getattr(self, name)))
            wiring.connect(m, getattr(side, name), wiring.flipped(getattr(self, f"read_{name}")))
        m.d.comb += [side.clear.eq(self.clear), ppu.clear.eq(self.clear)]

        have, block = Signal(), Signal(post_layout(config))
        m.d.comb += self.block.ready.eq(~have)
        with m.If(~have):
            m.d.sync += [have.eq(self.block.valid), block.eq(self.block.payload)]
        with m.Elif(self.release):
            m.d.sync += have.eq(0)

        # Tiles: the places of a panel's first row follow from those of the panel before, row by row.
        layout = self.tile.payload.shape()
        m.submodules.tiles = tiles = StreamBuffer(layout)
        wiring.connect(m, wiring.flipped(self.tile), tiles.input)
        tile = tiles.output.payload
        Value.cast(tile).attrs.update(lint_unused("formats and weight vectors do not matter here"))
        places = {name: Signal(place_bits(config), name=f"{name}_place") for name in POST_ARRAYS}
        rows_left = Signal((config.rows * config.max_m).bit_length())
        real, taken = Signal(), Signal()
        users = (front.tile, ppu.job, numbers.tile, groups.tile, side.tile)
        waits = Signal(len(users))
        accepts = Signal(len(users))
        m.d.comb += [real.eq(tile.rows.any() & tile.outputs.any()), tiles.output.ready.eq(taken)]
        with m.FSM() as fsm:
            with m.State("tile"):
                m.d.sync += [rows_left.eq(tile.m * config.rows), waits.eq(-1)]
                with m.If(tiles.output.valid & have):
                    with m.If(tile.begin):
                        m.d.sync += [places[name].eq(getattr(block, name)) for name in POST_ARRAYS]
                    m.next = "give"
                    with m.If(tile.first & ~tile.begin):
                        m.next = "rows"
            with m.State("rows"):
                for name in POST_ARRAYS:
                    m.d.sync += places[name].eq(advanced(m, name, places[name], getattr(block, f"{name}_stride")))
                m.d.sync += rows_left.eq(rows_left - 1)
                with m.If(rows_left == 1):
                    m.next = "give"
            with m.State("give"):
                m.d.sync += waits.eq(waits & ~accepts)
                with m.If(~(waits & ~accepts).any()):
                    m.d.comb += taken.eq(1)
                    m.next = "tile"
            giving = fsm.ongoing("give")
        wanted = (1, real, real & block.numbers, real & block.groups, real)
        for number, (user, wants) in enumerate(zip(users, wanted, strict=True)):
            m.d.comb += [
                user.valid.eq(giving & waits[number] & wants),
                accepts[number].eq(user.ready | ~Value.cast(wants)),
            ]

        def place(name: str, octets: Value) -> Value:
            return advanced(m, f"{name}_tile", places[name], octets)

        index = tile.index
        job = ppu.job.payload
        m.d.comb += [
            front.tile.payload.rows.eq(tile.rows),
            front.tile.payload.outputs.eq(tile.outputs),
            front.tile.payload.mode_nvfp4.eq(tile.mode_nvfp4),
            job.function.eq(block.function),
            job.integers.eq(1),
            job.residual.eq(block.adds),
            *(getattr(job, n).eq(getattr(block, n)) for n in ("numbers", "groups", "shared", "refine", "measure")),
            job.begin.eq(block.begin & tile.begin),
            job.report.eq(block.report & tile.last),
            job.follows.eq(~tile.begin),
            job.scale.eq(tile.scale),
            job.group_scale.eq(block.group_scale),
            job.threshold.eq(block.threshold),
            numbers.tile.payload.place.eq(tile.address),
            numbers.tile.payload.stride.eq(tile.stride),
            *(getattr(groups.tile.payload, f"{n}_stride").eq(getattr(block, f"{n}_stride")) for n in ARRAYS),
            groups.tile.payload.codes.eq(place("codes", index >> 1)),
            groups.tile.payload.scales.eq(place("scales", index >> _log2(GROUP))),
            groups.tile.payload.masks.eq(place("masks", index >> _log2(2 * GROUP))),
            groups.tile.payload.offsets.eq(places["offsets"]),
            groups.tile.payload.refine.eq(block.refine),
            groups.tile.payload.first.eq(tile.first),
            side.tile.payload.residual.eq(place("residual", index << 2)),
            side.tile.payload.residual_stride.eq(block.residual_stride),
            side.tile.payload.previous.eq(place("previous", index << 2)),
            side.tile.payload.previous_stride.eq(block.previous_stride),
            side.tile.payload.next_mask.eq(
                advanced(m, "mask_tile", Cat(block.next_mask, Signal(name="never_beyond")), index >> _log2(2 * GROUP))
            ),
            side.tile.payload.adds.eq(block.adds),
            side.tile.payload.measures.eq(block.measure),
            side.tile.payload.refines.eq(block.refine),
        ]
        for user in (numbers, groups, side):
            m.d.comb += [user.tile.payload.rows.eq(tile.rows), user.tile.payload.outputs.eq(tile.outputs)]

        Value.cast(ppu.report.payload).attrs.update(lint_unused("both sums of the activity stay here"))
        m.d.comb += ppu.report.ready.eq(1)
        with m.If(ppu.report.valid):
            m.d.sync += [getattr(self.report, n).eq(getattr(ppu.report.payload, n)) for n in kept_layout.members]
        with m.If(ppu.report.valid | self.clear):
            m.d.sync += self.reported.eq(ppu.report.valid)
        m.d.comb += [
            self.begun.eq(job.begin & ppu.job.valid & ppu.job.ready),
            self.observe.eq(block.observe),
            self.status.eq(ppu.status),
            self.read_error.eq(side.error),
            self.error.eq(Mux(numbers.error.any(), numbers.error, groups.error)),
            self.idle.eq(
                ~(tiles.output.valid | giving | fsm.ongoing("rows") | front.busy)
                & ppu.idle
                & numbers.idle
                & groups.idle
                & side.idle
            ),
        ]
        return m


class PostStage(wiring.Component):
    """Output stage of accelerators with post-processing: a reorder buffer, and behind it `hdl.output.RawOutput` and `PostOutput`.

    Tiles of one kind follow those of the other only when the stage was idle in between.

    Parameters
    ----------
    config : AcceleratorConfig

    Members
    -------
    tile : In(stream of post_tile_layout)
    result : In(stream of ResultWord), one per column
    request, word, done, discard, clear, idle, error
        As of :class:`hdl.output.RawOutput`.
    block, read_request, read_word, read_done, release, read_error, status, report, reported, begun, observe
        As of `PostOutput`.
    """

    throughput: ClassVar[str] = "1 element of 32 bits per column and cycle"

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        results = In(stream.Signature(ResultWord)).array(config.columns)
        super().__init__({"result": results, **_members(config)})

    def elaborate(self, platform: object) -> Module:
        """Give rows, and the write engine, to whom the product belongs."""
        m = Module()
        config = self._config
        m.submodules.reorder = reorder = ReorderBuffer(config.engine)
        m.submodules.raw_output = raw = RawOutput(config.engine, config.dma)
        m.submodules.post_output = post = PostOutput(config)
        for inner, outer in zip(reorder.result, self.result, strict=True):
            wiring.connect(m, wiring.flipped(outer), inner)
        for name in ("block", "read_request", "read_word", "read_done"):
            ours, theirs = wiring.flipped(getattr(self, name)), getattr(post, name)
            wiring.connect(m, ours, theirs)
        m.d.comb += post.release.eq(self.release)
        for name in ("read_error", "status", "report", "reported", "begun", "observe"):
            m.d.comb += getattr(self, name).eq(getattr(post, name))

        tile, posting, ready = self.tile.payload, Signal(), Signal()
        m.d.comb += [
            ready.eq(Mux(tile.post, post.tile.ready, raw.tile.ready) & reorder.tile.ready),
            self.tile.ready.eq(ready),
            reorder.tile.payload.m.eq(tile.m),
            reorder.tile.payload.n.eq(tile.n),
            reorder.tile.valid.eq(self.tile.valid & ready),
            post.tile.payload.eq(tile),
            post.tile.valid.eq(self.tile.valid & ready & tile.post),
            *(getattr(raw.tile.payload, n).eq(getattr(tile, n)) for n in raw.tile.payload.shape().members),
            raw.tile.valid.eq(self.tile.valid & ready & ~tile.post),
        ]
        with m.If(self.tile.valid & ready):
            m.d.sync += posting.eq(tile.post)

        m.d.comb += reorder.row.ready.eq(Mux(posting, post.row.ready, raw.row.ready))
        for part, mine in ((raw, ~posting), (post, posting)):
            m.d.comb += [
                part.row.payload.eq(reorder.row.payload),
                part.row.valid.eq(reorder.row.valid & mine),
                part.request.ready.eq(self.request.ready & mine),
                part.word.ready.eq(self.word.ready & mine),
                part.done.payload.eq(self.done.payload),
                part.done.valid.eq(self.done.valid & mine),
                part.discard.eq(self.discard),
                part.clear.eq(self.clear),
            ]
        m.d.comb += [
            self.request.payload.eq(Mux(posting, post.request.payload.as_value(), raw.request.payload.as_value())),
            self.request.valid.eq(Mux(posting, post.request.valid, raw.request.valid)),
            self.word.payload.eq(Mux(posting, post.word.payload, raw.word.payload)),
            self.word.valid.eq(Mux(posting, post.word.valid, raw.word.valid)),
            self.done.ready.eq(Mux(posting, post.done.ready, raw.done.ready)),
            self.idle.eq(raw.idle & post.idle),
            self.error.eq(Mux(raw.error.any(), raw.error, post.error)),
        ]
        return m


def _log2(power: int) -> int:
    return power.bit_length() - 1
