"""Output stage: rows of sums as integers or binary32 numbers, written by DMA requests (docs/output.md)."""

from itertools import pairwise
from typing import ClassVar

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hdl.dma import request_layout
from hdl.lib.fp32 import Float, FloatMultiply, IntToFloat
from hdl.lib.gearbox import Gearbox
from hdl.lib.streams import StreamBuffer, StreamFifo, multicast
from hdl.lib.verilog import lint_unused
from hdl.pe import ResultWord
from hdl.reorder import ReorderBuffer, row_layout
from model.dma import MAX_BYTES, DmaConfig, DmaStatus
from model.tile_engine import EngineConfig

__all__ = ["Lane", "OutputStage", "RawOutput", "output_tile_layout", "writer_members"]

_ELEMENT = 32
_OUTSTANDING = 255
_WORDS = 4
"""Words that wait in front of the DMA engine: fewer would cost it a cycle per short row."""


def output_tile_layout(config: EngineConfig, address_width: int) -> data.StructLayout:
    """Return the layout of what is known of a tile's outputs; sizes as they are (not less one)."""
    return data.StructLayout(
        {
            "address": address_width,
            "stride": address_width,
            "rows": (config.rows * config.max_m).bit_length(),
            "outputs": (2 * config.columns * config.max_n).bit_length(),
            "m": config.max_m.bit_length(),
            "n": config.max_n.bit_length(),
            "mode_nvfp4": 1,
            "fp32": 1,
            "scale": Float,
        }
    )


class Lane(wiring.Component):
    """Turn a 64-bit integer into binary32, then multiply; 1 per cycle in which ``enable`` is set.

    Attributes
    ----------
    latency : int

    Members
    -------
    enable : In(1)
    value : In(64)
        Two's complement.
    scale : In(Float)
        ``IntToFloat.latency`` cycles behind its value.
    number : Out(Float)
    """

    latency = IntToFloat.latency + FloatMultiply.latency

    enable: In(1)
    value: In(64)
    scale: In(Float)
    number: Out(Float)

    def elaborate(self, platform: object) -> Module:
        """Put one behind the other."""
        m = Module()
        m.submodules.convert = convert = IntToFloat(64)
        m.submodules.multiply = multiply = FloatMultiply()
        m.d.comb += [
            convert.enable.eq(self.enable),
            convert.value.eq(self.value),
            multiply.enable.eq(self.enable),
            multiply.a.eq(convert.number),
            multiply.b.eq(self.scale),
            self.number.eq(multiply.number),
        ]
        return m


def writer_members(dma: DmaConfig) -> dict[str, wiring.Member]:
    """Return what all have that give requests to a write engine: the engine's streams, and what becomes of rows; see `RawOutput`."""
    return {
        "request": Out(stream.Signature(request_layout(dma))),
        "word": Out(stream.Signature(dma.data_width)),
        "done": In(stream.Signature(2)),
        "discard": In(1),
        "clear": In(1),
        "idle": Out(1),
        "error": Out(2),
    }


def _members(config: EngineConfig, dma: DmaConfig) -> dict[str, wiring.Member]:
    """Return what both `RawOutput` and `OutputStage` have."""
    longest = config.columns * config.max_n * 8
    if longest > MAX_BYTES:
        raise ValueError(f"columns * max_n * 8 bytes must be at most {MAX_BYTES}, not {longest}")
    return {"tile": In(stream.Signature(output_tile_layout(config, dma.address_width))), **writer_members(dma)}


class RawOutput(wiring.Component):
    """Write rows of sums: as integers, or as binary32 numbers times the tile's scale; a DMA request per row.

    The first ``rows`` rows of a tile are written, of each the first ``outputs`` outputs, row k to ``address + k·stride``; the rest is taken and
    dropped, everything if one of the two is 0. One beat of as many elements of 32 bits as there are columns goes through per cycle; of what is
    dropped, a sum per column. A row that would end beyond the address space, which the DMA engine would refuse, is dropped and reported in
    ``error``.

    Parameters
    ----------
    config : EngineConfig
    dma : DmaConfig

    Members
    -------
    tile : In(stream of output tile)
        One per tile, in order; rows wait for it. ``m`` and ``n`` are not looked at.
    row : In(stream of beat of a row)
    request : Out(stream of {address, bytes})
    word : Out(stream of data)
    done : In(stream of DmaStatus)
        Always ready.
    discard : In(1)
        A row that starts now is dropped; one that has started is finished.
    clear : In(1)
        Clears ``error``.
    idle : Out(1)
        All rows of all tiles taken are dropped or have ended.
    error : Out(2)
        The first status of a request that was not 0, until ``clear``.

    Raises
    ------
    ValueError
        A row can be longer than a DMA request.
    """

    throughput: ClassVar[str] = "1 element of 32 bits per column and cycle"

    def __init__(self, config: EngineConfig, dma: DmaConfig):
        self._config, self._dma = config, dma
        super().__init__({"row": In(stream.Signature(row_layout(config))), **_members(config, dma)})

    def elaborate(self, platform: object) -> Module:
        """Build the control of rows, the lanes and the way to words."""
        m = Module()
        Value.cast(self.tile.payload).attrs.update(lint_unused("the reorder buffer's sizes do not matter here"))
        columns, space = self._config.columns, self._dma.address_width
        tile_in = self.tile.payload
        elements_bits = len(tile_in.outputs)
        # Where a row ends may be beyond the address space.
        reach_bits = max(space, MAX_BYTES.bit_length()) + 1

        # Tiles in terms of elements. The next one waits, so that no cycle is lost between two.
        prepared = data.StructLayout(
            {
                "address": space,
                "reach": reach_bits,
                "stride": space,
                "rows": len(tile_in.rows),
                "elements": elements_bits,
                "mode_nvfp4": 1,
                "fp32": 1,
                "scale": Float,
            }
        )
        m.submodules.tiles = tiles = StreamBuffer(prepared)
        given, coming = tiles.input.payload, tiles.output.payload
        m.d.comb += [
            getattr(given, name).eq(getattr(tile_in, name))
            for name in ("address", "stride", "mode_nvfp4", "fp32", "scale")
        ]
        m.d.comb += [
            given.rows.eq(Mux(tile_in.outputs.any(), tile_in.rows, 0)),
            given.elements.eq(Mux(tile_in.mode_nvfp4 & ~tile_in.fp32, tile_in.outputs << 1, tile_in.outputs)),
            given.reach.eq(tile_in.address + (given.elements << 2)),
            tiles.input.valid.eq(self.tile.valid),
            self.tile.ready.eq(tiles.input.ready),
        ]

        active, first, keep, second, beyond_before = (
            Signal(name=name) for name in ("active", "first", "keep", "second", "beyond_before")
        )
        tile = Signal(prepared)
        left = Signal(elements_bits)
        row = self.row.payload
        enable, outstanding = Signal(), Signal(range(_OUTSTANDING + 1))
        m.submodules.requests = requests = StreamBuffer(request_layout(self._dma))
        wiring.connect(m, requests.output, wiring.flipped(self.request))

        # A beat of sums makes one or two beats of elements.
        two, completes, beyond, wanted, keeps = (
            Signal(name=name) for name in ("two", "completes", "beyond", "wanted", "keeps")
        )
        enters, may_enter, moves, waits, starts = (
            Signal(name=name) for name in ("enters", "may_enter", "moves", "waits", "starts")
        )
        m.d.comb += [
            two.eq(~(tile.fp32 & tile.mode_nvfp4)),
            completes.eq(left <= columns),
            beyond.eq(beyond_before | tile.reach[space + 1 :].any() | (tile.reach[space] & tile.reach[:space].any())),
            wanted.eq(tile.rows.any() & ~self.discard),
            keeps.eq(Mux(first, wanted & ~beyond, keep)),
            may_enter.eq(enable & ~waits & (~first | (requests.input.ready & (outstanding != _OUTSTANDING)))),
            enters.eq(active & self.row.valid & keeps & may_enter),
            self.row.ready.eq(active & (~keeps | (may_enter & (~two | second | completes)))),
            moves.eq(self.row.valid & self.row.ready),
            starts.eq(enters & first),
            requests.input.valid.eq(
                active & self.row.valid & keeps & first & enable & ~waits & (outstanding != _OUTSTANDING)
            ),
            requests.input.payload.address.eq(tile.address),
            requests.input.payload.bytes.eq(tile.elements << 2),
        ]
        with m.If(enters):
            m.d.sync += [first.eq(0), keep.eq(~completes), second.eq(~moves), left.eq(left - columns)]
        with m.If(moves & ~keeps):
            m.d.sync += [first.eq(0), keep.eq(0)]
        with m.If(moves & row.last):
            m.d.sync += [
                first.eq(1),
                left.eq(tile.elements),
                tile.address.eq(tile.address + tile.stride),
                tile.reach.eq(tile.reach + tile.stride),
                tile.rows.eq(tile.rows - tile.rows.any()),
                beyond_before.eq(beyond),
            ]
        m.d.comb += tiles.output.ready.eq(~active | (moves & row.end))
        with m.If(tiles.output.ready):
            m.d.sync += [
                active.eq(tiles.output.valid),
                tile.eq(coming),
                left.eq(coming.elements),
                first.eq(1),
                beyond_before.eq(0),
            ]

        # Status.
        ended, refuses = Signal(2), Signal()
        m.d.comb += [
            self.done.ready.eq(1),
            self.idle.eq(~(active | tiles.output.valid | outstanding.any())),
            ended.eq(self.done.payload & self.done.valid.replicate(2)),
            refuses.eq(moves & first & wanted & beyond),
        ]
        m.d.sync += outstanding.eq(outstanding + starts - self.done.valid)
        with m.If(self.clear | ~self.error.any()):
            m.d.sync += self.error.eq(Mux(refuses & ~ended.any(), DmaStatus.REFUSED.value, ended))

        # The lanes' operands. Integers that are written as they are leave from here, so they may not overtake numbers behind.
        operands = Signal(data.ArrayLayout(64, columns), reset_less=True)
        full, raw = Signal(), Signal(reset_less=True)
        side = data.StructLayout({"count": columns.bit_length(), "last": 1})
        tag = Signal(side, reset_less=True)
        scale = Signal(Float, reset_less=True)
        parts = [psum[low : low + _ELEMENT] for psum in row.psum for low in (0, _ELEMENT)]
        with m.If(enable):
            m.d.sync += [
                full.eq(enters),
                raw.eq(~tile.fp32),
                tag.count.eq(Mux(completes, left, columns)),
                tag.last.eq(completes),
                scale.eq(tile.scale),
            ]
            for k in range(columns):
                half = Signal(_ELEMENT, name=f"half_{k}")
                m.d.comb += half.eq(Mux(second, parts[columns + k], parts[k]))
                m.d.sync += operands[k].eq(Mux(two, Cat(half, half[-1].replicate(64 - _ELEMENT)), row.psum[k]))

        # What goes along with the numbers.
        valid = Signal(Lane.latency)
        tags: list[Signal] = [tag]
        scales = [scale]
        for stage in range(Lane.latency):
            tags.append(Signal(side, name=f"tag_{stage}", reset_less=True))
            if stage < IntToFloat.latency:
                scales.append(Signal(Float, name=f"scale_{stage}", reset_less=True))
        with m.If(enable):
            m.d.sync += valid.eq(Cat(full & ~raw, valid))
            m.d.sync += [after.eq(before) for chain in (tags, scales) for before, after in pairwise(chain)]
        m.d.comb += waits.eq(~tile.fp32 & ((full & ~raw) | valid.any()))

        m.submodules.gearbox = gearbox = Gearbox(_ELEMENT, columns, self._dma.data_width // _ELEMENT)
        Value.cast(gearbox.output.payload).attrs.update(lint_unused("DMA requests say where rows end"))
        # A request takes longer to the engine's data side than words do; rows follow each other if their words wait here.
        m.submodules.words = words = StreamFifo(self._dma.data_width, _WORDS)
        wiring.connect(m, words.output, wiring.flipped(self.word))
        ready_numbers = valid[-1]
        beat = gearbox.input.payload
        for k in range(columns):
            lane = Lane()
            m.submodules[f"lane_{k}"] = lane
            m.d.comb += [
                lane.enable.eq(enable),
                lane.value.eq(operands[k]),
                lane.scale.eq(scales[-1]),
                beat.elements[k].eq(Mux(ready_numbers, lane.number.as_value(), operands[k][:_ELEMENT])),
            ]
        leaving = Mux(ready_numbers, tags[-1].as_value(), tag.as_value())
        m.d.comb += [
            gearbox.input.valid.eq(ready_numbers | (full & raw)),
            Cat(beat.count, beat.last).eq(leaving),
            enable.eq(gearbox.input.ready | ~gearbox.input.valid),
            words.input.valid.eq(gearbox.output.valid),
            words.input.payload.eq(gearbox.output.payload.word.as_value()),
            gearbox.output.ready.eq(words.input.ready),
        ]
        return m


class OutputStage(wiring.Component):
    """Take the array's results and write the outputs of each tile: a reorder buffer and `RawOutput` behind it.

    Parameters
    ----------
    config : EngineConfig
    data_width : int
        Bits of a word: a power of two from 32 to 1024.
    address_width : int
        Bits of a byte address, 13 to 64.

    Members
    -------
    tile : In(stream of output tile)
        One per tile, in order, before or while its results come.
    result : In(stream of ResultWord), one per column
        Taken from all columns in the same cycle.
    request, word, done, discard, clear, idle, error
        As of `RawOutput`; the first three are for a `hdl.dma.WriteDma`.

    Raises
    ------
    ValueError
        A width is out of range, or a row can be longer than a DMA request.
    """

    throughput: ClassVar[str] = "1 element of 32 bits per column and cycle"
    latency: ClassVar[int] = 4
    latency_fp32: ClassVar[int] = 4 + Lane.latency

    def __init__(self, config: EngineConfig | None = None, data_width: int = 128, address_width: int = 40):
        self._config = config = config or EngineConfig()
        self._dma = DmaConfig(data_width=data_width, address_width=address_width)
        results = In(stream.Signature(ResultWord)).array(config.columns)
        super().__init__({"result": results, **_members(config, self._dma)})

    @property
    def config(self) -> EngineConfig:
        """The configuration that this component was built with."""
        return self._config

    def elaborate(self, platform: object) -> Module:
        """Put one behind the other; both get every tile."""
        m = Module()
        m.submodules.reorder = reorder = ReorderBuffer(self._config)
        m.submodules.output = output = RawOutput(self._config, self._dma)
        for inner, outer in zip(reorder.result, self.result, strict=True):
            wiring.connect(m, wiring.flipped(outer), inner)
        wiring.connect(m, reorder.row, output.row)
        for name in ("request", "word", "done"):
            wiring.connect(m, getattr(output, name), wiring.flipped(getattr(self, name)))
        tile = self.tile.payload
        sizes = stream.Interface(stream.Signature(output_tile_layout(self._config, self._dma.address_width)))
        multicast(m, self.tile, [output.tile, sizes])
        m.d.comb += [
            reorder.tile.payload.m.eq(tile.m),
            reorder.tile.payload.n.eq(tile.n),
            reorder.tile.valid.eq(sizes.valid),
            sizes.ready.eq(reorder.tile.ready),
            output.discard.eq(self.discard),
            output.clear.eq(self.clear),
            self.idle.eq(output.idle),
            self.error.eq(output.error),
        ]
        return m
