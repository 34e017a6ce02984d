"""Reorder buffer: results leave the array weight by weight; here they come out activation row by activation row (docs/output.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from hdl.lib.streams import StreamBuffer
from hdl.lib.verilog import lint_unused
from hdl.pe import ResultWord
from model.tile_engine import EngineConfig

__all__ = ["ReorderBuffer", "row_layout", "sizes_layout"]


def sizes_layout(config: EngineConfig) -> data.StructLayout:
    """Return the layout of a tile's sizes, those of one element: activation rows, weight vectors."""
    return data.StructLayout({"m": config.max_m.bit_length(), "n": config.max_n.bit_length()})


def row_layout(config: EngineConfig) -> data.StructLayout:
    """Return the layout of a beat of a row: a sum per column; the row's last beat; the tile's last beat."""
    return data.StructLayout({"psum": data.ArrayLayout(64, config.columns), "last": 1, "end": 1})


class ReorderBuffer(wiring.Component):
    """Transpose the results of each element row of a tile: columns give them with i inside j, rows leave with j inside i.

    A beat has the sums of all columns. For each element row and each i from 0 to m - 1 there are n beats, j = 0 to n - 1. Rows that only pad
    the tile come out like others.

    Of two halves one fills while the other empties; a beat goes in and one comes out per cycle, also if each half has only one. The first
    beat of an element row is offered 2 cycles after its last result was taken.

    Parameters
    ----------
    config : EngineConfig

    Members
    -------
    result : In(stream of ResultWord), one per column
        Taken from all columns in the same cycle. ``ready`` depends on every ``valid``.
    tile : In(stream of {m, n})
        One per tile, in order; results wait for it.
    row : Out(stream of {psum, last, end})
    """

    throughput: ClassVar[str] = "1 result per column and cycle"

    def __init__(self, config: EngineConfig | None = None):
        self._config = config = config or EngineConfig()
        super().__init__(
            {
                "result": In(stream.Signature(ResultWord)).array(config.columns),
                "tile": In(stream.Signature(sizes_layout(config))),
                "row": Out(stream.Signature(row_layout(config))),
            }
        )

    @property
    def config(self) -> EngineConfig:
        """The configuration that this component was built with."""
        return self._config

    def elaborate(self, platform: object) -> Module:
        """Build the memory, its writer and its reader."""
        m = Module()
        config = self._config
        sums = data.ArrayLayout(64, config.columns)
        m.submodules.tiles = tiles = StreamBuffer(sizes_layout(config))
        m.submodules.memory = memory = Memory(shape=sums, depth=2 * config.max_words, init=[])
        write, read = memory.write_port(), memory.read_port()
        wiring.connect(m, wiring.flipped(self.tile), tiles.input)

        # A half knows the sizes of what it holds, and whether that is the tile's last element row.
        kept = data.StructLayout({"sizes": sizes_layout(config), "final": 1})
        halves = Signal(data.ArrayLayout(kept, 2))
        full, fills, empties = Signal(2), Signal(2), Signal(2)
        m.d.sync += full.eq((full | fills) & ~empties)

        # Writer: in the order of arrival.
        half, element_row = Signal(), Signal(range(config.rows))
        sizes = tiles.output.payload
        place = Signal(range(config.max_words))
        i, j = Signal.like(sizes.m, init=1), Signal.like(sizes.n, init=1)
        takes, ends, final = Signal(), Signal(), Signal()
        for column, result in enumerate(self.result):
            Value.cast(result.payload).attrs.update(lint_unused("the ends of tiles are counted"))
            m.d.comb += [result.ready.eq(takes), write.data[column].eq(result.payload.psum)]
        m.d.comb += [
            takes.eq(
                Cat(result.valid for result in self.result).all() & tiles.output.valid & ~Mux(half, full[1], full[0])
            ),
            ends.eq((i == sizes.m) & (j == sizes.n)),
            final.eq(element_row == config.rows - 1 if config.rows > 1 else 1),
            tiles.output.ready.eq(takes & ends & final),
            fills.eq(Cat(takes & ends & ~half, takes & ends & half)),
            write.en.eq(takes),
            write.addr.eq(Cat(place, half)),
        ]
        with m.If(takes):
            m.d.sync += [place.eq(place + 1), i.eq(i + 1)]
            with m.If(i == sizes.m):
                m.d.sync += [i.eq(1), j.eq(j + 1)]
            with m.If(ends):
                m.d.sync += [
                    place.eq(0),
                    j.eq(1),
                    half.eq(~half),
                    element_row.eq(Mux(final, 0, element_row + 1)),
                    halves[half].sizes.eq(sizes),
                    halves[half].final.eq(final),
                ]

        # Reader: beat j of row i stands at place j·m + i.
        out_half, have, last, end = Signal(), Signal(), Signal(), Signal()
        held = Signal(kept)
        at = Signal.like(place)
        out_i, out_j = Signal.like(i, init=1), Signal.like(j, init=1)
        go, row_ends, half_ends = Signal(), Signal(), Signal()
        m.d.comb += [
            held.eq(Mux(out_half, halves[1].as_value(), halves[0].as_value())),
            go.eq(Mux(out_half, full[1], full[0]) & (~have | self.row.ready)),
            row_ends.eq(out_j == held.sizes.n),
            half_ends.eq(row_ends & (out_i == held.sizes.m)),
            empties.eq(Cat(go & half_ends & ~out_half, go & half_ends & out_half)),
            read.en.eq(go),
            read.addr.eq(Cat(at, out_half)),
            self.row.valid.eq(have),
            self.row.payload.psum.eq(read.data),
            self.row.payload.last.eq(last),
            self.row.payload.end.eq(end),
        ]
        with m.If(self.row.ready):
            m.d.sync += have.eq(0)
        with m.If(go):
            m.d.sync += [
                have.eq(1),
                last.eq(row_ends),
                end.eq(half_ends & held.final),
                at.eq(at + held.sizes.m),
                out_j.eq(out_j + 1),
            ]
            with m.If(row_ends):
                # Row i starts at place i, and i counts from 1.
                m.d.sync += [at.eq(out_i), out_i.eq(out_i + 1), out_j.eq(1)]
            with m.If(half_ends):
                m.d.sync += [at.eq(0), out_i.eq(1), out_half.eq(~out_half)]
        return m
