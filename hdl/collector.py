"""Operand entries of a processing element, and the merging of their refinement records (paper, section 6.1; docs/pe.md)."""

from amaranth.hdl import Cat, Const, Module, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.arith import gated, tree_sum
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.scale import ScaleByte
from hdl.packed_pair import PackedPair
from hdl.refinement import SUBGROUPS, SlotRecord, record_layout
from model.pe import OFFSET_BYTES
from model.vmac import VmacConfig

__all__ = ["BlockRecords", "RecordMerger", "activation_entry", "weight_entry"]


class BlockRecords(data.Struct):
    """Refinement of one operand in one block, 20 bits: the mask, and the offsets of the first two subgroups in it, element 0 lowest."""

    mask: SUBGROUPS
    offsets: data.ArrayLayout(8, OFFSET_BYTES)


def weight_entry(config: VmacConfig) -> data.StructLayout:
    """Return the layout of a weight vector as it is stored: packed pairs, scales and, with refinement hardware, records by block."""
    return _entry(config, PackedPair, config.w_scale_bytes)


def activation_entry(config: VmacConfig) -> data.StructLayout:
    """Return the layout of an activation vector as it is stored: E2M1 codes, scales and, with refinement hardware, records by block."""
    return _entry(config, E2M1Code, config.blocks)


def _entry(config: VmacConfig, element: type[data.Struct], scales: int) -> data.StructLayout:
    records = {} if config.refinement == "none" else {"records": data.ArrayLayout(BlockRecords, config.blocks)}
    return data.StructLayout(
        {"codes": data.ArrayLayout(element, config.lanes), "scales": data.ArrayLayout(ScaleByte, scales), **records}
    )


class RecordMerger(wiring.Component):
    """Merge a weight's and an activation's records of one block into what the refinement lanes take; combinational.

    The rules are those of :func:`model.pe.merge_records`: the weight wins an overlap, weight records take slots before activation records
    and lower subgroups before higher, the rest is dropped, and records stand in the order of their subgroups.

    Members
    -------
    weight, activation : In(BlockRecords)
    record : Out(records of the block)
    overlap : Out(1)
        A subgroup is in both masks.
    dropped : Out(1)
        A record had no slot or no offset byte.
    """

    def __init__(self, config: VmacConfig):
        self._config = config
        super().__init__(
            {
                "weight": In(BlockRecords),
                "activation": In(BlockRecords),
                "record": Out(record_layout(config)),
                "overlap": Out(1),
                "dropped": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the merging of one block."""
        m = Module()
        config = self._config
        slots = config.slots_per_block if config.refinement == "slots" else SUBGROUPS
        w_mask, a_mask = self.weight.mask, self.activation.mask
        w_kept, a_kept, offsets = [], [], []
        unmasked = Signal(SUBGROUPS)
        m.d.comb += [unmasked.eq(a_mask & ~w_mask), self.overlap.eq((a_mask & w_mask).any())]

        for g in range(SUBGROUPS):
            w_first, w_within = ~w_mask[:g].any(), _at_most(w_mask[:g], min(OFFSET_BYTES, slots) - 1)
            kept = Signal(name=f"w{g}_kept")
            m.d.comb += kept.eq(w_mask[g] & w_within)
            w_kept.append(kept)
            byte = Signal(8, name=f"offsets{g}")
            a_first = ~a_mask[:g].any()
            m.d.comb += byte.eq(
                gated(self.weight.offsets[0], kept & w_first)
                | gated(self.weight.offsets[1], kept & ~w_first)
                | gated(self.activation.offsets[0], ~kept & a_first)
                | gated(self.activation.offsets[1], ~kept & ~a_first)
            )
            offsets.append(byte)
        candidates: list[Value] = []
        for g in range(SUBGROUPS):
            candidate, kept = Signal(name=f"a{g}_candidate"), Signal(name=f"a{g}_kept")
            m.d.comb += [
                candidate.eq(unmasked[g] & _at_most(a_mask[:g], OFFSET_BYTES - 1)),
                kept.eq(candidate & _at_most(Cat(*w_kept, *candidates), slots - 1)),
            ]
            candidates.append(candidate)
            a_kept.append(kept)
        m.d.comb += self.dropped.eq((w_mask & ~Cat(*w_kept)).any() | (unmasked & ~Cat(*a_kept)).any())

        if config.refinement == "inplace":
            pairs = zip(offsets, w_kept, a_kept, strict=True)
            held = [gated(byte, w | a) for byte, w, a in pairs]
            m.d.comb += self.record.as_value().eq(Cat(*held, *w_kept, *a_kept))
            return m

        # The first free slot, one bit for each; a record takes the first that is free and may hold its subgroup.
        free: list[Value] = [Const(1, 1), *(Const(0, 1) for _ in range(slots))]
        takes: list[list[tuple[int, Value]]] = [[] for _ in range(slots)]
        for g in range(SUBGROUPS):
            kept = w_kept[g] | a_kept[g]
            least = max(g - (SUBGROUPS - slots), 0)
            first = Cat(*free[: least + 1]).any()
            slot = [first if i == least else free[i] for i in range(slots)]
            following: list[Value] = []
            for i in range(slots + 1):
                here = Signal(name=f"free{g}_{i}")
                taken_before = slot[i - 1] if i > least else Const(0, 1)
                m.d.comb += here.eq((kept & taken_before) | (~kept & free[i]))
                following.append(here)
            for i in range(least, min(g, slots - 1) + 1):
                take = Signal(name=f"slot{i}_takes{g}")
                m.d.comb += take.eq(kept & slot[i])
                takes[i].append((g, take))
            free = following
        for i, choices in enumerate(takes):
            record = SlotRecord(self.record[i])
            m.d.comb += [
                record.offsets.as_value().eq(_either([gated(offsets[g], take) for g, take in choices])),
                record.valid.eq(Cat(take for _, take in choices).any()),
                record.subgroup.eq(_either([gated(Const(g, 2), take) for g, take in choices])),
                record.is_activation.eq(Cat(take & a_kept[g] for g, take in choices).any()),
            ]
        return m


def _at_most(bits: Value, limit: int) -> Value:
    """1 bit: no more than ``limit`` of ``bits`` are set."""
    if len(bits) <= limit:
        return Const(1, 1)
    if limit == 0:
        return ~bits.any()
    return tree_sum(list(bits)) <= limit


def _either(values: list[Value]) -> Value:
    """OR of values."""
    result = values[0]
    for value in values[1:]:
        result = result | value
    return result
