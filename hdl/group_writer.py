"""Group writer: NVFP4 groups as rows of the next layer's operand, written by DMA requests (docs/group_writer.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from hdl.dma import request_layout
from hdl.job import ARRAYS, advanced
from hdl.lib.arith import tree_sum
from hdl.lib.gearbox import Gearbox
from hdl.lib.streams import StreamBuffer, StreamFifo
from hdl.lib.verilog import lint_unused
from hdl.output import writer_members
from hdl.quantiser import group_layout
from model.accelerator import MAX_ROWS
from model.block_scaled import PAD
from model.dma import MAX_BYTES, DmaConfig, DmaStatus
from model.tile_engine import EngineConfig
from model.vmac import GROUP, SUBGROUP, SUBGROUPS

__all__ = ["GroupWriter", "OffsetPacker", "group_tile_layout", "octets_layout"]

_OUTSTANDING = 255
_ROWS, _RUNS = 4, 8
"""Rows that wait for their requests, and requests that wait for their words."""
_PAIR = {"codes": PAD // 2, "scales": PAD // GROUP, "masks": PAD // GROUP // 2, "offsets": PAD // SUBGROUP}
"""Bytes of a pair of groups, at most."""
_CODES, _SCALES, _MASKS, _OFFSETS = range(4)

octets_layout = data.StructLayout(
    {"octets": data.ArrayLayout(8, SUBGROUPS), "count": SUBGROUPS.bit_length(), "last": 1}
)
"""Bytes, the lowest ``count`` of which count, and whether they end a packet."""


def group_tile_layout(config: EngineConfig, address_width: int) -> data.StructLayout:
    """Return the layout of what is known of a tile's groups, see `model.group_writer.GroupTile`; addresses are places, see `hdl.job.place_bits`."""
    return data.StructLayout(
        {
            **dict.fromkeys(ARRAYS, address_width + 1),
            **{f"{name}_stride": 32 for name in ARRAYS},
            "rows": (config.rows * config.max_m).bit_length(),
            "outputs": (2 * config.columns * config.max_n).bit_length(),
            "refine": 1,
            "first": 1,
        }
    )


class OffsetPacker(wiring.Component):
    """Pack bytes, 0 to 4 at a time, into words; a packet without bytes gives no word, the last word of others is filled up with zeros.

    A beat goes in per cycle if words are taken at once; with words of 4 bytes, or if a packet's last beat is the next one's first, a word that
    is left over costs a cycle. Latency 0.

    Parameters
    ----------
    data_width : int
        Bits of a word, from 32 on.

    Members
    -------
    input : In(stream of octets_layout)
    output : Out(stream of data)
        ``valid`` depends on ``input.valid``, and ``input.ready`` on ``ready``.
    """

    def __init__(self, data_width: int):
        self._size = data_width // 8
        super().__init__(
            {"input": In(stream.Signature(octets_layout)), "output": Out(stream.Signature(8 * self._size))}
        )

    def elaborate(self, platform: object) -> Module:
        """Build a store of one word; of a packet that ends within the next word, the rest stands in the store by itself."""
        m = Module()
        size, beat = self._size, self.input.payload
        store, level, rest = Signal(8 * size), Signal(range(size)), Signal()
        octets = [beat.octets[i] & (beat.count > i).replicate(8) for i in range(SUBGROUPS)]
        shifted = Cat(*octets, Const(0, 8 * (size - 1)))
        for step in range(len(level)):
            moved = Signal(len(shifted), name=f"moved_{step}")
            m.d.comb += moved.eq(Mux(level[step], Cat(Const(0, 8 << step), shifted)[: len(shifted)], shifted))
            shifted = moved
        merged = Signal(len(shifted))
        total = Signal(range(size + SUBGROUPS))
        completes, more, ends, accepts = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            merged.eq(shifted | (store & ~rest.replicate(len(store)))),
            total.eq(level + beat.count),
            completes.eq(total >= size),
            more.eq(total > size),
            ends.eq(beat.last & total.any()),
            self.input.ready.eq(self.output.ready & ~(rest & (beat.last | (size <= SUBGROUPS)))),
            self.output.valid.eq(rest | (self.input.valid & (completes | ends))),
            self.output.payload.eq(Mux(rest, store, merged[: 8 * size])),
            accepts.eq(self.input.valid & self.input.ready),
        ]
        with m.If(accepts):
            m.d.sync += [
                rest.eq(beat.last & more),
                level.eq(Mux(beat.last, 0, Mux(completes, total - size, total))),
                store.eq(Mux(completes, merged[8 * size :], merged[: 8 * size] & ~beat.last.replicate(8 * size))),
            ]
        with m.Elif(rest & self.output.ready):
            m.d.sync += [rest.eq(0), store.eq(0)]
        return m


class GroupWriter(wiring.Component):
    """Write rows of groups as codes, scales, masks and offsets; DMA requests for each row in this order (docs/group_writer.md).

    A row's requests are offered when all of its groups are here, so none ever waits for groups. Two of the longest rows have room: one comes
    while the other leaves. A request that would end beyond the address space, which the DMA engine would refuse, is dropped and reported in
    ``error``.

    Parameters
    ----------
    config : EngineConfig
    dma : DmaConfig

    Members
    -------
    tile : In(stream of group_tile_layout)
        One per tile, in order; groups wait for it. There are none of a tile of 0 rows or 0 outputs.
    group : In(stream of group_layout)
        An even number for each of the tile's rows, ``last`` with the last of a row.
    request : Out(stream of {address, bytes})
    word : Out(stream of data)
    done : In(stream of DmaStatus)
        Always ready.
    discard : In(1)
        A row whose first request would come now is dropped; the requests of one that has started are all made.
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

    throughput: ClassVar[str] = "1 group or 1 word per cycle"
    latency: ClassVar[int] = 5

    def __init__(self, config: EngineConfig, dma: DmaConfig):
        self._config, self._dma = config, dma
        self._pairs = -(-2 * config.columns * config.max_n // PAD)
        longest = self._pairs * _PAIR["codes"]
        if longest > MAX_BYTES:
            raise ValueError(f"columns * max_n bytes must be at most {MAX_BYTES}, not {longest}")
        super().__init__(
            {
                "tile": In(stream.Signature(group_tile_layout(config, dma.address_width))),
                "group": In(stream.Signature(group_layout)),
                **writer_members(dma),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build what collects rows, what makes requests of them, and what sends their words."""
        m = Module()
        width, space, size = self._dma.data_width, self._dma.address_width, self._dma.beat_bytes
        layout = self.tile.payload.shape()
        row_layout = data.StructLayout(
            {
                **dict.fromkeys(ARRAYS, space + 1),
                "pairs": self._pairs.bit_length(),
                "octets": (self._pairs * _PAIR["offsets"]).bit_length(),
                "refine": 1,
            }
        )
        most_words = [-(-self._pairs * pair // size) for pair in _PAIR.values()]
        m.submodules.tiles = tiles = StreamBuffer(layout)
        wiring.connect(m, wiring.flipped(self.tile), tiles.input)
        m.submodules.rows = rows = StreamFifo(row_layout, _ROWS)

        # Groups of a row. Which is the second of a pair shows in the count.
        active, coming = Signal(), tiles.output.payload
        tile = Signal(layout, attrs=lint_unused("outputs only matter if there are none"))
        most_rows = max(self._config.rows * self._config.max_m, 2)
        reached = -(-MAX_ROWS // PAD) * _PAIR["offsets"]
        group, record = self.group.payload, rows.input.payload
        index = Signal(range(most_rows))
        half, pairs, octets = Signal(), Signal.like(record.pairs), Signal.like(record.octets)
        accepts, completes, refined = Signal(), Signal(), Signal()
        m.submodules.pointers = pointers = Memory(shape=reached.bit_length(), depth=most_rows, init=[])
        read, write = pointers.read_port(), pointers.write_port()
        pointer = Signal(reached.bit_length())
        chosen = Signal(range(SUBGROUPS + 1))
        m.d.comb += [
            # A row has two groups at least, so its pointer is there before its last group.
            read.addr.eq(index),
            write.addr.eq(index),
            write.en.eq(completes),
            write.data.eq(pointer + record.octets),
            pointer.eq(Mux(tile.first, 0, read.data)),
            accepts.eq(self.group.valid & self.group.ready),
            completes.eq(accepts & group.last),
            refined.eq(tile.refine),
            chosen.eq(tree_sum(list(group.mask)) & refined.replicate(len(chosen))),
            rows.input.valid.eq(self.group.valid & self.group.ready & group.last),
            *(getattr(record, name).eq(getattr(tile, name)) for name in ("codes", "scales", "masks", "refine")),
            record.offsets.eq(advanced(m, "offsets_row", tile.offsets, pointer)),
            record.pairs.eq(pairs + 1),
            record.octets.eq(octets + chosen),
        ]
        with m.If(accepts):
            m.d.sync += [half.eq(~half), pairs.eq(pairs + half), octets.eq(record.octets)]
        with m.If(completes):
            m.d.sync += [half.eq(0), pairs.eq(0), octets.eq(0), index.eq(index + 1), tile.rows.eq(tile.rows - 1)]
            for name in ARRAYS:
                place = getattr(tile, name)
                m.d.sync += place.eq(advanced(m, name, place, getattr(tile, f"{name}_stride")))
        m.d.comb += tiles.output.ready.eq(~active | (completes & (tile.rows == 1)))
        with m.If(tiles.output.ready):
            m.d.sync += [
                active.eq(tiles.output.valid & coming.rows.any() & coming.outputs.any()),
                tile.eq(coming),
                index.eq(0),
            ]

        # Words of each array.
        m.submodules.pack_codes = pack_codes = Gearbox(32, 2, width // 32)
        m.submodules.pack_scales = pack_scales = Gearbox(8, 1, size)
        m.submodules.pack_masks = pack_masks = Gearbox(8, 1, size)
        m.submodules.chosen_octets = chosen_octets = StreamBuffer(octets_layout)
        m.submodules.pack_offsets = pack_offsets = OffsetPacker(width)
        wiring.connect(m, chosen_octets.output, pack_offsets.input)
        packers = (pack_codes, pack_scales, pack_masks)
        first_mask = Signal(SUBGROUPS)
        with m.If(accepts):
            m.d.sync += first_mask.eq(group.mask)
        m.d.comb += [
            self.group.ready.eq(
                active & rows.input.ready & chosen_octets.input.ready & Cat(part.input.ready for part in packers).all()
            ),
            *(part.input.payload.last.eq(group.last) for part in (*packers, chosen_octets)),
            pack_codes.input.valid.eq(accepts),
            pack_codes.input.payload.elements.as_value().eq(group.codes.as_value()),
            pack_codes.input.payload.count.eq(2),
            pack_scales.input.valid.eq(accepts),
            pack_scales.input.payload.elements[0].eq(group.scale),
            pack_scales.input.payload.count.eq(1),
            pack_masks.input.valid.eq(accepts & refined & half),
            pack_masks.input.payload.elements[0].eq(Cat(first_mask, group.mask)),
            pack_masks.input.payload.count.eq(1),
            chosen_octets.input.valid.eq(accepts & refined),
            chosen_octets.input.payload.count.eq(chosen),
        ]
        before = [Const(0, 1), *(tree_sum(list(group.mask[:g])) for g in range(1, SUBGROUPS))]
        for place in range(SUBGROUPS):
            octet: Value = Const(0, 8)
            for g in range(place, SUBGROUPS):
                here = group.mask[g] & (before[g] == place)
                octet |= group.offsets.as_value().word_select(g, 8) & here.replicate(8)
            m.d.comb += chosen_octets.input.payload.octets[place].eq(octet)
        for part in packers:
            Value.cast(part.output.payload).attrs.update(lint_unused("DMA requests say where rows end"))
        packed = [(part.output, part.output.payload.word.as_value()) for part in packers]
        packed.append((pack_offsets.output, pack_offsets.output.payload))
        queues = []
        for name, most, (source, payload) in zip(ARRAYS, most_words, packed, strict=True):
            m.submodules[f"words_{name}"] = queue = StreamFifo(width, max(2 * most, _ROWS))
            m.d.comb += [
                queue.input.payload.eq(payload),
                queue.input.valid.eq(source.valid),
                source.ready.eq(queue.input.ready),
            ]
            queues.append(queue.output)

        # Requests of a row, one per cycle. A run is what the request takes of the array's words.
        run_layout = data.StructLayout({"array": 2, "more": range(max(*most_words, 2)), "keep": 1, "final": 1})
        m.submodules.runs = runs = StreamFifo(run_layout, _RUNS)
        m.submodules.requests = requests = StreamBuffer(request_layout(self._dma))
        wiring.connect(m, requests.output, wiring.flipped(self.request))
        row, run, request = rows.output.payload, runs.input.payload, requests.input.payload
        array, keep, begun = Signal(2), Signal(), Signal()
        wanted, beyond, asks, may_ask, steps = Signal(), Signal(), Signal(), Signal(), Signal()
        place, amount = Signal(space + 1), Signal(range(self._pairs * _PAIR["codes"] + 1))
        behind = Signal(len(amount), attrs=lint_unused("words are counted, not bytes"))
        end = Signal(max(space, len(amount)) + 2)
        outstanding = Signal(range(_OUTSTANDING + 1))
        with m.Switch(array):
            for k, (name, octets_here) in enumerate(
                zip(ARRAYS, (row.pairs << 4, row.pairs << 1, row.pairs, row.octets), strict=True)
            ):
                with m.Case(k):
                    m.d.comb += [place.eq(getattr(row, name)), amount.eq(octets_here)]
        m.d.comb += [
            end.eq(place + amount),
            beyond.eq(end[space + 1 :].any() | (end[space] & end[:space].any())),
            wanted.eq(Mux(begun, keep, ~self.discard)),
            asks.eq(wanted & ~beyond),
            may_ask.eq(requests.input.ready & (outstanding != _OUTSTANDING)),
            steps.eq(rows.output.valid & runs.input.ready & (~asks | may_ask)),
            requests.input.valid.eq(rows.output.valid & runs.input.ready & asks & (outstanding != _OUTSTANDING)),
            request.address.eq(place),
            request.bytes.eq(amount),
            runs.input.valid.eq(steps),
            run.array.eq(array),
            behind.eq(amount - 1),
            run.more.eq(behind >> size.bit_length() - 1),
            run.keep.eq(asks),
            run.final.eq(
                Mux(row.refine, (array == _OFFSETS) | ((array == _MASKS) & ~row.octets.any()), array == _SCALES)
            ),
            rows.output.ready.eq(steps & run.final),
        ]
        with m.If(steps):
            m.d.sync += [
                begun.eq(~run.final),
                keep.eq(wanted),
                array.eq(Mux(run.final, _CODES, array + 1)),
            ]

        # Words.
        busy, current = Signal(), Signal(run_layout)
        moves, finishes = Signal(), Signal()
        with m.Switch(current.array):
            for k, queue in enumerate(queues):
                with m.Case(k):
                    m.d.comb += [
                        self.word.payload.eq(queue.payload),
                        self.word.valid.eq(busy & current.keep & queue.valid),
                        queue.ready.eq(busy & (self.word.ready | ~current.keep)),
                        moves.eq(queue.valid & queue.ready),
                    ]
        m.d.comb += [
            finishes.eq(moves & ~current.more.any()),
            runs.output.ready.eq(~busy | finishes),
        ]
        with m.If(moves):
            m.d.sync += current.more.eq(current.more - 1)
        with m.If(runs.output.ready):
            m.d.sync += [busy.eq(runs.output.valid), current.eq(runs.output.payload)]

        # Status.
        held = Signal(range(_ROWS + _RUNS + 2))
        ended, refuses = Signal(2), Signal()
        m.d.comb += [
            self.done.ready.eq(1),
            self.idle.eq(~(active | tiles.output.valid | held.any() | outstanding.any())),
            ended.eq(self.done.payload & self.done.valid.replicate(2)),
            refuses.eq(steps & wanted & beyond),
        ]
        m.d.sync += [
            held.eq(held + completes - (finishes & current.final)),
            outstanding.eq(outstanding + (requests.input.valid & requests.input.ready) - self.done.valid),
        ]
        with m.If(self.clear | ~self.error.any()):
            m.d.sync += self.error.eq(Mux(refuses & ~ended.any(), DmaStatus.REFUSED.value, ended))
        return m
