"""Assembler of the loader: vectors of a bank from the words of their arrays (docs/accelerator.md)."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from hdl.job import piece_layout, vector_bytes, word_bits
from hdl.lib.arith import gated, selected, tree_sum
from hdl.lib.streams import StreamBuffer
from hdl.lib.verilog import lint_unused
from hdl.tile_engine import load_layout
from model.accelerator import CHUNK, AcceleratorConfig
from model.pe import OFFSET_BYTES
from model.vmac import SUBGROUPS

__all__ = ["Assembler"]


class Assembler(wiring.Component):
    """Put vectors together from the words of their arrays, 1 per cycle, and say where in the banks they go.

    Members
    -------
    piece : In(stream of piece)
    scales, codes, masks, offsets : In(streams of bus words)
    load : Out(stream of load word)
        Latency 1.
    done : Out(1)
        The last vector of a piece is in its bank from the next cycle on.
    segment_done : Out(1)
        It was the last of a segment.
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        members = {
            "piece": In(stream.Signature(piece_layout(config))),
            "load": Out(stream.Signature(load_layout(config))),
            "done": Out(1),
            "segment_done": Out(1),
        }
        members |= {name: In(stream.Signature(bits)) for name, bits in word_bits(config).items()}
        super().__init__(members)

    def elaborate(self, platform: object) -> Module:
        """Build the sequence of a piece, and a reader per array."""
        m = Module()
        config = self._config
        refinement = config.refinement != "none"
        size = vector_bytes(config)

        piece = Signal(piece_layout(config))
        # ``may``: all but the offsets, about which is known late, is there.
        active, may, go, last, takes = Signal(), Signal(), Signal(), Signal(), Signal()
        vector = Signal(range(CHUNK))
        m.submodules.loads = loads = StreamBuffer(
            data.StructLayout({"word": load_layout(config), "last": 1, "ends": 1})
        )
        out = loads.input.payload
        available = []

        def slices(words: stream.Interface, octets: int, name: str) -> Value:
            """Return the vector's share of a word, or of several; each is given up with the last vector in it."""
            bits, width = octets * 8, len(words.payload)
            if bits > width:
                parts = bits // width
                got = Signal(range(parts), name=f"{name}_got")
                held = [Signal(width, name=f"{name}_{i}") for i in range(parts - 1)]
                whole = got == parts - 1
                collects = words.valid & ~whole & active & ~piece.zero
                m.d.comb += words.ready.eq(collects | (go & ~piece.zero))
                for i, part in enumerate(held):
                    with m.If(collects & (got == i if i else ~got.any())):
                        m.d.sync += part.eq(words.payload)
                with m.If(collects):
                    m.d.sync += got.eq(got + 1)
                with m.If(go):
                    m.d.sync += got.eq(0)
                available.append(words.valid & whole)
                return Cat(*held, words.payload)
            count = exact_log2(width // bits)
            place = vector[:count]
            m.d.comb += words.ready.eq(go & ~piece.zero & (place.all() | last))
            available.append(words.valid)
            return selected([words.payload.word_select(i, bits) for i in range(width // bits)], place)

        codes = slices(self.codes, size["codes"], "codes")
        scales = slices(self.scales, size["scales"], "scales")
        entry = out.word.entry
        m.d.comb += [
            entry.codes.eq(Mux(piece.zero, 0, codes)),
            entry.scales.eq(Mux(piece.zero, 0, scales)),
            out.word.address.eq(Mux(piece.weight, piece.line[: exact_log2(config.weight_depth)], piece.line)),
            out.word.odd.eq(piece.odd),
            out.word.index.eq(piece.index),
            out.word.weight.eq(piece.weight),
            out.last.eq(last),
            out.ends.eq(piece.ends),
        ]
        ready = Cat(available).all()
        waits: Value = Const(0, 1)
        if refinement:
            ready &= ~piece.refined | self.masks.valid
            waits = self._records(m, piece, vector, entry, may, go, last, takes)
        m.d.comb += [
            last.eq(vector == piece.count - 1),
            may.eq(active & loads.input.ready & (piece.zero | ready)),
            go.eq(may & ~waits),
            loads.input.valid.eq(go),
            takes.eq(~active | (go & last)),
            self.piece.ready.eq(takes),
        ]
        with m.If(go):
            m.d.sync += [vector.eq(vector + 1), piece.line.eq(piece.line + piece.step)]
        with m.If(takes):
            m.d.sync += [active.eq(self.piece.valid), piece.eq(self.piece.payload), vector.eq(0)]

        output = loads.output
        moved = output.valid & output.ready
        m.d.comb += [
            self.load.payload.eq(output.payload.word),
            self.load.valid.eq(output.valid),
            output.ready.eq(self.load.ready),
            self.done.eq(moved & output.payload.last),
            self.segment_done.eq(self.done & output.payload.ends),
        ]
        return m

    def _records(
        self,
        m: Module,
        piece: data.View,
        vector: Signal,
        entry: data.View,
        may: Signal,
        go: Signal,
        last: Signal,
        takes: Signal,
    ) -> Value:
        """Build the readers of masks and offsets and return whether the vector's offsets are missing."""
        config = self._config
        blocks = config.vmac.blocks
        words = self.masks.payload
        width, octets = len(self.offsets.payload), len(self.offsets.payload) // 8
        bits = vector_bytes(config)["masks"] * 8
        slots = len(words) // bits
        count = exact_log2(slots)
        refines = Signal()
        masks, waits = Signal(bits), Signal()
        needs = Signal((SUBGROUPS * blocks).bit_length())
        m.d.comb += [
            refines.eq(piece.refined & ~piece.zero),
            masks.eq(gated(selected([words.word_select(i, bits) for i in range(slots)], vector[:count]), refines)),
            self.masks.ready.eq((may & refines & (vector[:count].all() | last)) & ~waits),
            needs.eq(tree_sum(list(masks))),
        ]

        # Two words are in sight: the current one, from a byte on, and the next. Words belong to one piece.
        current, have = Signal(width), Signal()
        at = Signal(range(octets))
        left = Signal(len(piece.octets))
        end = Signal(range(2 * octets))
        over = Signal()
        ahead = Signal(range(2 * octets))
        reach = Signal(len(ahead) + 1, attrs=lint_unused("only what is carried out of it matters"))
        window = Signal((SUBGROUPS * blocks) * 8)
        sight = Cat(current, self.offsets.payload)
        m.d.comb += [
            end.eq(at + needs),
            # end > octets, as a carry: the vector's needs are known late.
            ahead.eq(at + (octets - 1)),
            reach.eq(ahead + needs),
            over.eq(reach[-1]),
            window.eq(selected([sight[8 * i :][: len(window)] for i in range(octets)], at)),
        ]
        fills = ~have & left.any()
        crosses = go & refines & have & (end >= octets) & needs.any()
        # Without masks nothing is needed, so nothing is missing; the count of needs is the last to be known.
        m.d.comb += [
            waits.eq((~have & masks.any()) | (over & ~self.offsets.valid)),
            # What goes on in the next word moves if that is there.
            self.offsets.ready.eq(fills | ((may & have & self.offsets.valid) & over)),
        ]
        with m.If(fills & self.offsets.valid):
            m.d.sync += [current.eq(self.offsets.payload), have.eq(1)]
        with m.If(go & refines):
            m.d.sync += [left.eq(left - needs), at.eq(end)]
        with m.If(crosses):
            m.d.sync += [current.eq(self.offsets.payload), have.eq(over)]
        with m.If(takes):
            # Words of the next piece may come before it.
            m.d.sync += [left.eq(Mux(self.piece.valid, self.piece.payload.octets, 0)), at.eq(0), have.eq(0)]

        following: Value = Const(0, 0)
        for block in range(blocks):
            before = Signal(range(SUBGROUPS * block + 1), name=f"before_{block}")
            m.d.comb += before.eq(following)
            mask = masks.word_select(block, SUBGROUPS)
            ones = Signal(range(SUBGROUPS + 1), name=f"ones_{block}")
            record = entry.records[block]
            m.d.comb += [ones.eq(tree_sum(list(mask))), record.mask.eq(mask)]
            for i in range(OFFSET_BYTES):
                octet = selected([window.word_select(j, 8) for j in range(i, SUBGROUPS * blocks)], before)
                m.d.comb += record.offsets[i].eq(Mux(ones > i if i else ones.any(), octet, 0))
            following = before + ones
        return waits
