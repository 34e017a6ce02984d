"""Refinement lanes: the products of base operands with signed offsets (paper, section 6.3, sparse refinement lanes)."""

from collections.abc import Sequence
from itertools import combinations, product

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lanes import GROUP
from hdl.lib.arith import gated, signed_sum_width, signed_terms, tree_sum
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.verilog import lint_unused
from hdl.packed_pair import PackedPair
from model.vmac import VmacConfig

__all__ = ["InPlaceRecord", "InPlaceRefinement", "SlotRecord", "SlotRefinement", "record_layout"]

SUBGROUP = 4
"""Elements of a refined subgroup."""
SUBGROUPS = GROUP // SUBGROUP


class SlotRecord(data.Struct):
    """One refined subgroup of a block, 12 bits: ``{is_activation, subgroup, valid, d3, d2, d1, d0}``."""

    offsets: data.ArrayLayout(signed(2), SUBGROUP)
    valid: 1
    subgroup: 2
    is_activation: 1


class InPlaceRecord(data.Struct):
    """The refinement of a whole block, 40 bits: ``{activation mask, weight mask, d15 … d0}``; the weight wins where both masks are set."""

    offsets: data.ArrayLayout(signed(2), GROUP)
    weight_mask: SUBGROUPS
    activation_mask: SUBGROUPS


def record_layout(config: VmacConfig) -> data.Layout:
    """Return the layout of one block's refinement records under ``config``."""
    if config.refinement == "inplace":
        return InPlaceRecord
    return data.ArrayLayout(SlotRecord, config.slots_per_block)


def sum_width(config: VmacConfig) -> int:
    """Bits of a block's refinement sum R as its tree gives it: synthesis merges the tree into the next sum only if nothing is cut off."""
    return signed_sum_width(config.refined_lanes, 5 if config.step == "fixed" else 7)


def choose(subgroup: Value, candidates: Sequence[int]) -> dict[int, Value]:
    """Return for each of ``candidates`` the smallest test of ``subgroup`` that tells it from the others.

    The collector never sends another one, so those are don't-cares.
    """
    width = len(subgroup)

    def tells_apart(bits: Sequence[int], chosen: int) -> bool:
        return all(any((chosen ^ other) >> b & 1 for b in bits) for other in candidates if other != chosen)

    subsets = [bits for count in range(width + 1) for bits in combinations(range(width), count)]
    tests: dict[int, Value] = {}
    for chosen in candidates:
        bits = next(subset for subset in subsets if tells_apart(subset, chosen))
        tests[chosen] = (
            Cat(*(subgroup[b] if chosen >> b & 1 else ~subgroup[b] for b in bits)).all() if bits else Const(1, 1)
        )
    return tests


def _offset_terms(
    m: Module,
    name: str,
    config: VmacConfig,
    magnitude: Value,
    negative: Value,
    offset: Value,
    binade: Sequence[Value],
) -> tuple[Signal, Signal]:
    """Return magnitude and sign of ``2·X·d``, times the binade of the refined operand under the exponent step."""
    minus_two = offset[1] & ~offset[0]
    if config.step == "fixed":
        shifts = [offset[0], minus_two]
    else:
        below_two, below_four, four_up = binade
        one = offset[0]
        shifts = [
            one & below_two,
            (one & below_four) | (minus_two & below_two),
            (one & four_up) | (minus_two & below_four),
            minus_two & four_up,
        ]
    width = len(magnitude) + len(shifts) - 1
    term, sign = Signal(width, name=f"{name}_term"), Signal(name=f"{name}_sign")
    value = Const(0, width)
    for shift, chosen in enumerate(shifts):
        value = value | (gated(magnitude, chosen) << shift)
    m.d.comb += [term.eq(value), sign.eq(negative ^ offset[1])]
    return term, sign


def _selected(values: Sequence[Value], gates: Sequence[Value]) -> Value:
    """AND-OR selection; nothing toggles while every gate is 0."""
    result = Const(0, len(values[0]))
    for value, gate in zip(values, gates, strict=True):
        result = result | gated(value, gate)
    return result


class SlotRefinement(wiring.Component):
    """Refinement sum of a block with a few slots of four lanes; combinational.

    Each slot picks the operands of its subgroup: base activations where the weight is refined, base weights where the activation is. Slot
    i of n holds a subgroup from i to 4 − n + i. With ``enable = 0`` every picked operand is a constant 0
    and so is R; a lane's sign still follows the record's offset bits.

    Members
    -------
    enable : In(1)
    a : In(16 × E2M1)
    w : In(16 × packed pair of an NVFP4 weight)
    record : In(slots × SlotRecord)
    r : Out(signed)
        ``Σ 2·X·d``, with the exponent step each d scaled by the binade (1, 2 or 4) of the element that it refines.
    """

    def __init__(self, config: VmacConfig):
        self._config = config
        super().__init__(
            {
                "enable": In(1),
                "a": In(data.ArrayLayout(E2M1Code, GROUP)),
                "w": In(data.ArrayLayout(PackedPair, GROUP)),
                "record": In(record_layout(config)),
                "r": Out(signed(sum_width(config))),
            }
        )
        if config.slots_per_block > 2:
            self.record.as_value().attrs.update(
                lint_unused("a slot with few subgroups to choose from needs not all index bits")
            )

    def elaborate(self, platform: object) -> Module:
        """Build the slots and their common tree."""
        m = Module()
        config = self._config
        slots = config.slots_per_block
        terms, signs = [], []
        for slot, i in product(range(slots), range(SUBGROUP)):
            record = self.record[slot]
            candidates = range(slot, SUBGROUPS - slots + slot + 1)
            if i == 0:
                live = Signal(name=f"slot{slot}_live")
                weights_live = Signal(name=f"slot{slot}_weights_live")
                m.d.comb += [live.eq(self.enable & record.valid), weights_live.eq(live & record.is_activation)]
                take_a, take_w = [], []
                for g, chosen in choose(record.subgroup, candidates).items():
                    from_a, from_w = Signal(name=f"slot{slot}_a{g}"), Signal(name=f"slot{slot}_w{g}")
                    m.d.comb += [from_a.eq(live & ~record.is_activation & chosen), from_w.eq(weights_live & chosen)]
                    take_a.append(from_a)
                    take_w.append(from_w)
            name = f"slot{slot}_{i}"
            elements = [SUBGROUP * g + i for g in candidates]
            activation, pair = Signal(5, name=f"{name}_a"), Signal(PackedPair, name=f"{name}_w")
            m.d.comb += [
                activation.eq(
                    _selected([Cat(self.a[k].doubled_magnitude(), self.a[k].sign) for k in elements], take_a)
                ),
                pair.eq(_selected([self.w[k].as_value() for k in elements], take_w)),
            ]
            weight = Cat(gated(pair.weight_doubled_magnitude(), weights_live), pair.weight_negative())
            operand = Signal(5, name=f"{name}_operand")
            m.d.comb += operand.eq(activation | weight)
            binade: list[Value] = []
            if config.step == "exponent":
                refined = [Cat(*self.a[k].binade()) for k in elements] + [
                    Cat(*self.w[k].weight_binade()) for k in elements
                ]
                picked = Signal(3, name=f"{name}_binade")
                m.d.comb += picked.eq(_selected(refined, take_w + take_a))
                binade = list(picked)
            term, sign = _offset_terms(m, name, config, operand[:4], operand[4], record.offsets[i], binade)
            terms.append(term)
            signs.append(sign)
        m.d.comb += self.r.eq(tree_sum(signed_terms(terms, signs)))
        return m


class InPlaceRefinement(wiring.Component):
    """Refinement sum of a block in which every lane forms its own offset product; combinational.

    No slots and no limit on refined subgroups. Members as in :class:`SlotRefinement`, with ``record`` an :class:`InPlaceRecord`.
    """

    def __init__(self, config: VmacConfig):
        self._config = config
        super().__init__(
            {
                "enable": In(1),
                "a": In(data.ArrayLayout(E2M1Code, GROUP)),
                "w": In(data.ArrayLayout(PackedPair, GROUP)),
                "record": In(record_layout(config)),
                "r": Out(signed(sum_width(config))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the lanes and their tree."""
        m = Module()
        config = self._config
        weight_refined, activation_refined = Signal(SUBGROUPS), Signal(SUBGROUPS)
        live = self.enable.replicate(SUBGROUPS)
        m.d.comb += [
            weight_refined.eq(self.record.weight_mask & live),
            activation_refined.eq(self.record.activation_mask & ~self.record.weight_mask & live),
        ]
        terms, signs = [], []
        for k in range(GROUP):
            of_weight, of_activation = weight_refined[k // SUBGROUP], activation_refined[k // SUBGROUP]
            a, w = self.a[k], self.w[k]
            operand = Signal(5, name=f"lane{k}_operand")
            chosen = _selected(
                [
                    Cat(a.doubled_magnitude(), a.sign),
                    Cat(w.weight_doubled_magnitude(), w.weight_negative()),
                ],
                [of_weight, of_activation],
            )
            m.d.comb += operand.eq(chosen)
            binade = [Mux(of_weight, of_w, of_a) for of_w, of_a in zip(w.weight_binade(), a.binade(), strict=True)]
            offset = self.record.offsets[k]
            term, sign = _offset_terms(m, f"lane{k}", config, operand[:4], operand[4], offset, binade)
            terms.append(term)
            signs.append(sign)
        m.d.comb += self.r.eq(tree_sum(signed_terms(terms, signs)))
        return m
