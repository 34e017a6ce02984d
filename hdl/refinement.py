"""Refinement lanes: the products of base operands with signed offsets (paper, section 6.3, sparse refinement lanes)."""

from collections.abc import Sequence
from itertools import combinations, product

from amaranth.hdl import Cat, Const, Module, Signal, Value, signed, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lanes import GROUP
from hdl.lib.arith import gated, shallow_sum, signed_sum_width, signed_terms, tree_sum
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.verilog import lint_unused
from hdl.packed_pair import PackedPair
from model.packed_pair import pack
from model.vmac import VmacConfig

__all__ = [
    "InPlaceRecord",
    "InPlaceRefinement",
    "RecordGate",
    "SlotRecord",
    "SlotRefinement",
    "held_layout",
    "record_layout",
]

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


def held_layout(config: VmacConfig) -> data.Layout:
    """Return the layout of what a vMAC holds of one block's records while it computes; :class:`RecordGate` makes it.

    An offset that does nothing is ``2'b10``: its high bit is held inverted, which turns AND gates into NAND gates. Masks are 0 then.
    A slot holds ``choice``, the code of its subgroup (:func:`choice_codes`); ``of_weight`` says that weights are refined.
    """
    offset = unsigned(2)
    if config.refinement == "inplace":
        return data.StructLayout(
            {
                "offsets": data.ArrayLayout(offset, GROUP),
                "of_weight": SUBGROUPS,
                "of_activation": SUBGROUPS,
            }
        )
    slot = {
        "offsets": data.ArrayLayout(offset, SUBGROUP),
        "choice": max(choice_codes(config, 0)[0].values()).bit_length(),
        "of_weight": 1,
    }
    return data.ArrayLayout(data.StructLayout(slot), config.slots_per_block)


def choice_codes(config: VmacConfig, slot: int) -> tuple[dict[int, int], int]:
    """Return the code of each subgroup that a slot may hold and that of an idle slot, of as few bits as there can be.

    The idle code is all zeros or all ones. Two slots hold the inverted subgroup; idle is the subgroup that is not theirs.
    """
    slots = config.slots_per_block
    subgroups = range(slot, SUBGROUPS - slots + slot + 1)
    codes = {1: [4, 5, 6, 7], 2: [3 - g for g in subgroups], 3: [1 + g % 2 for g in subgroups], 4: [1]}[slots]
    return dict(zip(subgroups, codes, strict=True)), 3 if slots == 2 and slot else 0


def choice(config: VmacConfig, slot: int, subgroup: Value, live: Value) -> Value:
    """Encode the subgroup of a slot, idle unless ``live``, as :func:`choice_codes` says."""
    low = subgroup[0]
    inverted = {
        1: Cat(~subgroup, Const(0, 1)),
        2: subgroup,
        3: Cat(low, ~low),
        4: Const(0, 1),
    }[config.slots_per_block]
    _, idle = choice_codes(config, slot)
    lives = live.replicate(len(inverted))
    return ~(inverted & lives) if idle else ~(inverted | ~lives)


def sum_width(config: VmacConfig) -> int:
    """Bits of a block's refinement sum R.

    As its tree gives it, for synthesis merges the tree into the next sum only if nothing is cut off; or as R needs, if registers are between them.
    """
    if config.pipeline == "fast":
        return config.refinement_limit.bit_length() + 1
    return signed_sum_width(config.refined_lanes, 5 if config.step == "fixed" else 7)


def refinement_sum(config: VmacConfig, terms: Sequence[Value], signs: Sequence[Value]) -> Value:
    """Return R of the offset products of a block's lanes."""
    if config.pipeline == "fast":
        return shallow_sum(terms, signs, sum_width(config))
    return tree_sum(signed_terms(terms, signs))


def choose(code: Value, candidates: Sequence[int]) -> dict[int, Value]:
    """Return for each of ``candidates`` the smallest test of ``code`` that tells it from the others; no other code occurs."""
    width = len(code)

    def tells_apart(bits: Sequence[int], chosen: int) -> bool:
        return all(any((chosen ^ other) >> b & 1 for b in bits) for other in candidates if other != chosen)

    subsets = [bits for count in range(width + 1) for bits in combinations(range(width), count)]
    tests: dict[int, Value] = {}
    for chosen in candidates:
        bits = next(subset for subset in subsets if tells_apart(subset, chosen))
        tests[chosen] = Cat(*(code[b] if chosen >> b & 1 else ~code[b] for b in bits)).all() if bits else Const(1, 1)
    return tests


def hold_offset(offset: Value, live: Value) -> Value:
    """Return an offset as it is held, its high bit inverted, and 0 unless ``live``."""
    return Cat(offset[0] & live, ~(offset[1] & live))


def held_offset(held: Value) -> Value:
    """Return the offset, 2 bits, that :func:`hold_offset` made."""
    return Cat(held[0], ~held[1])


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


class RecordGate(wiring.Component):
    """Turn a block's refinement records into what the vMAC holds of them; combinational, to be put before the registers.

    What does nothing is held as a constant: all of a block with ``enable = 0``, a slot without a valid record, a subgroup that no mask names.
    So nothing behind the registers needs gates, and disabled records do not reach the registers either.

    Members
    -------
    enable : In(1)
    record : In(record_layout)
    held : Out(held_layout)
    """

    def __init__(self, config: VmacConfig):
        self._config = config
        super().__init__({"enable": In(1), "record": In(record_layout(config)), "held": Out(held_layout(config))})
        if config.refinement == "slots" and config.slots_per_block > 2:
            self.record.as_value().attrs.update(
                lint_unused("a slot with few subgroups to choose from needs not all index bits")
            )

    def elaborate(self, platform: object) -> Module:
        """Build the gates."""
        m = Module()
        if self._config.refinement == "inplace":
            self._gate_block(m)
        else:
            self._gate_slots(m)
        return m

    def _gate_slots(self, m: Module) -> None:
        for slot, (record, held) in enumerate(zip(self.record, self.held, strict=True)):
            live = Signal(name=f"slot{slot}_live")
            m.d.comb += [
                live.eq(self.enable & record.valid),
                held.choice.eq(choice(self._config, slot, record.subgroup, live)),
                held.of_weight.eq(live & ~record.is_activation),
            ]
            for offset, to in zip(record.offsets, held.offsets, strict=True):
                m.d.comb += to.eq(hold_offset(offset, live))

    def _gate_block(self, m: Module) -> None:
        record, held = self.record, self.held
        live = Signal(SUBGROUPS)
        m.d.comb += [
            live.eq(held.of_weight | held.of_activation),
            held.of_weight.eq(gated(record.weight_mask, self.enable)),
            held.of_activation.eq(gated(record.activation_mask & ~record.weight_mask, self.enable)),
        ]
        for k, (offset, to) in enumerate(zip(record.offsets, held.offsets, strict=True)):
            m.d.comb += to.eq(hold_offset(offset, live[k // SUBGROUP]))


class SlotRefinement(wiring.Component):
    """Refinement sum of a block with a few slots of four lanes; combinational.

    Each slot picks the operands of its subgroup: base activations where the weight is refined, base weights where the activation is. Slot
    i of n holds a subgroup from i to 4 − n + i. The lanes of an idle slot are still: operands, offsets, terms and signs are constants and add
    nothing to R, whatever a and w do.

    Members
    -------
    a : In(16 × E2M1)
    w : In(16 × packed pair of an NVFP4 weight)
    held : In(slots × held slot)
        What :class:`RecordGate` gives, :func:`held_layout`.
    r : Out(signed)
        ``Σ 2·X·d``, with the exponent step each d scaled by the binade (1, 2 or 4) of the element that it refines.
    """

    def __init__(self, config: VmacConfig):
        self._config = config
        super().__init__(
            {
                "a": In(data.ArrayLayout(E2M1Code, GROUP)),
                "w": In(data.ArrayLayout(PackedPair, GROUP)),
                "held": In(held_layout(config)),
                "r": Out(signed(sum_width(config))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the slots and their common tree."""
        m = Module()
        config = self._config
        slots = config.slots_per_block
        terms, signs = [], []
        for slot, i in product(range(slots), range(SUBGROUP)):
            held = self.held[slot]
            codes, idle = choice_codes(config, slot)
            if i == 0:
                of_weight, of_activation = held.of_weight, ~held.of_weight
                chosen = choose(held.choice, [*codes.values(), idle])
                busy = choose(held.choice, list(codes.values()))
                take_a: list[Value] = []
                take_w: list[Value] = []
                for g, code in codes.items():
                    # With the exponent step both elements of a lane are picked: one is the operand, the other gives the binade.
                    pick_a, pick_w = chosen[code], chosen[code]
                    if config.step == "fixed":
                        # An idle slot refines no weight, so that its code needs not be told apart there.
                        pick_a, pick_w = busy[code] & of_weight, chosen[code] & of_activation
                    for kind, pick, take in (("a", pick_a, take_a), ("w", pick_w, take_w)):
                        taken = Signal(name=f"slot{slot}_{kind}{g}")
                        m.d.comb += taken.eq(pick)
                        take.append(taken)
            name = f"slot{slot}_{i}"
            elements = [SUBGROUP * g + i for g in codes]
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
                refined = _selected([Cat(*pair.weight_binade()), Cat(*code.binade())], [of_weight, of_activation])
                picked = Signal(3, name=f"{name}_binade")
                m.d.comb += [
                    code.eq(_selected([self.a[k].as_value() for k in elements], take_a)),
                    operand.eq(_selected([_activation(code), _weight(pair)], [of_weight, of_activation])),
                    picked.eq(refined),
                ]
                binade = list(picked)
            m.d.comb += offset.eq(held_offset(held.offsets[i]))
            term, sign = _offset_terms(m, name, config, operand[:4], operand[4], offset, binade)
            terms.append(term)
            signs.append(sign)
        m.d.comb += self.r.eq(refinement_sum(config, terms, signs))
        return m


class InPlaceRefinement(wiring.Component):
    """Refinement sum of a block in which every lane forms its own offset product; combinational.

    No slots and no limit on refined subgroups. The lanes of a subgroup that no mask names are still. Members as in :class:`SlotRefinement`.
    """

    def __init__(self, config: VmacConfig):
        self._config = config
        super().__init__(
            {
                "a": In(data.ArrayLayout(E2M1Code, GROUP)),
                "w": In(data.ArrayLayout(PackedPair, GROUP)),
                "held": In(held_layout(config)),
                "r": Out(signed(sum_width(config))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the lanes and their tree."""
        m = Module()
        config = self._config
        terms, signs = [], []
        for k in range(GROUP):
            of_weight, of_activation = (mask[k // SUBGROUP] for mask in (self.held.of_weight, self.held.of_activation))
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
            m.d.comb += offset.eq(held_offset(self.held.offsets[k]))
            term, sign = _offset_terms(m, f"lane{k}", config, operand[:4], operand[4], offset, binade)
            terms.append(term)
            signs.append(sign)
        m.d.comb += self.r.eq(refinement_sum(config, terms, signs))
        return m
