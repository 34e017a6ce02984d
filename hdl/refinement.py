"""Refinement lanes: the products of base operands with signed offsets (paper, section 6.3, sparse refinement lanes)."""

from collections.abc import Sequence
from itertools import combinations, product

from amaranth.hdl import Cat, Const, Module, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lanes import GROUP
from hdl.lib.arith import gated, signed_sum_width, signed_terms, tree_sum
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.verilog import lint_unused
from hdl.packed_pair import PackedPair
from model.packed_pair import pack
from model.vmac import VmacConfig

__all__ = ["InPlaceRecord", "InPlaceRefinement", "SlotRecord", "SlotRefinement", "record_layout"]

SUBGROUP = 4
"""Elements of a refined subgroup."""
SUBGROUPS = GROUP // SUBGROUP
_ZERO_PAIR = int(pack(0, 0))


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


def _selected_pair(m: Module, name: str, pairs: Sequence[PackedPair], gates: Sequence[Value]) -> PackedPair:
    """Select a packed pair; while every gate is 0 it is the pair of zero, whose weight needs no gate behind it."""
    selected = Signal(PackedPair, name=name)
    m.d.comb += selected.eq(_selected([pair.as_value() ^ _ZERO_PAIR for pair in pairs], gates) ^ _ZERO_PAIR)
    return selected


def _activation(code: E2M1Code) -> Value:
    """Sign and doubled magnitude, 5 bits."""
    return Cat(code.doubled_magnitude(), code.sign)


def _weight(pair: PackedPair) -> Value:
    """Sign and doubled magnitude of the weight that a pair stands for, 5 bits."""
    return Cat(pair.weight_doubled_magnitude(), pair.weight_negative())


class SlotRefinement(wiring.Component):
    """Refinement sum of a block with a few slots of four lanes; combinational.

    Each slot picks the operands of its subgroup: base activations where the weight is refined, base weights where the activation is. Slot
    i of n holds a subgroup from i to 4 − n + i. With ``enable = 0`` the lanes are still: operands, offsets, terms and signs are constants,
    R is 0, whatever comes in. So are those of a slot whose record is invalid.

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
                live, a_live, w_live = (Signal(name=f"slot{slot}_{which}") for which in ("live", "a_live", "w_live"))
                m.d.comb += [
                    live.eq(self.enable & record.valid),
                    a_live.eq(live & ~record.is_activation),
                    w_live.eq(live & record.is_activation),
                ]
                # With the exponent step both elements of a lane are picked: one is the operand, the other gives the binade.
                a_gate, w_gate = (a_live, w_live) if config.step == "fixed" else (live, live)
                take_a: list[Value] = []
                take_w: list[Value] = []
                for g, chosen in choose(record.subgroup, candidates).items():
                    for kind, gate, take in (("a", a_gate, take_a), ("w", w_gate, take_w)):
                        taken = Signal(name=f"slot{slot}_{kind}{g}")
                        m.d.comb += taken.eq(gate & chosen)
                        take.append(taken)
            name = f"slot{slot}_{i}"
            elements = [SUBGROUP * g + i for g in candidates]
            pair = _selected_pair(m, f"{name}_w", [self.w[k] for k in elements], take_w)
            operand, offset = Signal(5, name=f"{name}_operand"), Signal(2, name=f"{name}_offset")
            binade: list[Value] = []
            if config.step == "fixed":
                # The base lanes need all doubled magnitudes anyway, so they are picked and not the codes.
                activation = Signal(5, name=f"{name}_a")
                m.d.comb += [
                    activation.eq(_selected([_activation(self.a[k]) for k in elements], take_a)),
                    operand.eq(activation | _weight(pair)),
                ]
            else:
                code = Signal(E2M1Code, name=f"{name}_a")
                refined = _selected([Cat(*pair.weight_binade()), Cat(*code.binade())], [a_live, w_live])
                picked = Signal(3, name=f"{name}_binade")
                m.d.comb += [
                    code.eq(_selected([self.a[k].as_value() for k in elements], take_a)),
                    operand.eq(_selected([_activation(code), _weight(pair)], [a_live, w_live])),
                    picked.eq(refined),
                ]
                binade = list(picked)
            m.d.comb += offset.eq(gated(record.offsets[i].as_unsigned(), live))
            term, sign = _offset_terms(m, name, config, operand[:4], operand[4], offset, binade)
            terms.append(term)
            signs.append(sign)
        m.d.comb += self.r.eq(tree_sum(signed_terms(terms, signs)))
        return m


class InPlaceRefinement(wiring.Component):
    """Refinement sum of a block in which every lane forms its own offset product; combinational.

    No slots and no limit on refined subgroups. With ``enable = 0`` the lanes are still, and so are those of a subgroup that no mask names.
    Members as in :class:`SlotRefinement`, with ``record`` an :class:`InPlaceRecord`.
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
            lane_live = of_weight | of_activation
            operand, offset = Signal(5, name=f"lane{k}_operand"), Signal(2, name=f"lane{k}_offset")
            binade: list[Value] = []
            if config.step == "fixed":
                pair = _selected_pair(m, f"lane{k}_w", [self.w[k]], [of_activation])
                m.d.comb += operand.eq(gated(_activation(self.a[k]), of_weight) | _weight(pair))
            else:
                # Both elements are needed: one is the operand, the other gives the binade.
                pair = _selected_pair(m, f"lane{k}_w", [self.w[k]], [lane_live])
                code = Signal(E2M1Code, name=f"lane{k}_a")
                gates = [of_weight, of_activation]
                picked = Signal(3, name=f"lane{k}_binade")
                m.d.comb += [
                    code.eq(gated(self.a[k].as_value(), lane_live)),
                    operand.eq(_selected([_activation(code), _weight(pair)], gates)),
                    picked.eq(_selected([Cat(*pair.weight_binade()), Cat(*code.binade())], gates)),
                ]
                binade = list(picked)
            m.d.comb += offset.eq(gated(self.record.offsets[k].as_unsigned(), lane_live))
            term, sign = _offset_terms(m, f"lane{k}", config, operand[:4], operand[4], offset, binade)
            terms.append(term)
            signs.append(sign)
        m.d.comb += self.r.eq(tree_sum(signed_terms(terms, signs)))
        return m
