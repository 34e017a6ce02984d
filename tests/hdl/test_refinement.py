# amaranth: UnusedElaboratable=no
"""Refinement lanes behind their record gate: sums by hand, idle lanes that stay idle, random records against the model."""

import numpy as np
import pytest
from amaranth.hdl import Module, Shape
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lanes import GROUP
from hdl.lib.e2m1 import E2M1Code
from hdl.packed_pair import PackedPair
from hdl.refinement import InPlaceRefinement, RecordGate, SlotRefinement, held_layout, record_layout
from model.packed_pair import nvfp4_digits, pack
from model.vmac import Vectors, VmacConfig, refinement_sums
from tests.hdl.simulate import evaluate, signed

SLOTS, IN_PLACE = VmacConfig(), VmacConfig(refinement="inplace")
VALID, ACTIVATION = 1 << 8, 1 << 11
PAIRS = [int(pair) for pair in pack(*nvfp4_digits(range(16)))]


class Block(wiring.Component):
    """A gate and a refinement of one block, without the registers between them."""

    def __init__(self, config):
        self.config = config
        super().__init__(
            {
                "enable": In(1),
                "record": In(record_layout(config)),
                "a": In(data.ArrayLayout(E2M1Code, GROUP)),
                "w": In(data.ArrayLayout(PackedPair, GROUP)),
                "held": Out(held_layout(config)),
                "r": Out(16),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.gate = gate = RecordGate(self.config)
        slots = self.config.refinement == "slots"
        m.submodules.lanes = lanes = SlotRefinement(self.config) if slots else InPlaceRefinement(self.config)
        m.d.comb += [
            gate.enable.eq(self.enable),
            gate.record.eq(self.record),
            lanes.held.eq(gate.held),
            lanes.a.eq(self.a),
            lanes.w.eq(self.w),
            self.held.eq(gate.held),
            self.r.eq(lanes.r),
        ]
        return m


def row(record, a, w, enable=1):
    """Record, codes of activations and codes of weights; codes that are left out are 0."""
    return {
        "enable": enable,
        "record": record,
        "a": sum(int(code) << 4 * k for k, code in enumerate(a)),
        "w": sum((PAIRS[w[k]] if k < len(w) else PAIRS[0]) << 5 * k for k in range(GROUP)),
    }


def sums(config, rows):
    return [signed(r, 16) for (r,) in evaluate(Block(config), rows, ["r"])]


def slot(subgroup, offsets, kind=0):
    return VALID | subgroup << 9 | kind | sum((d & 3) << 2 * i for i, d in enumerate(offsets))


# A = 1.5 (code 3) and W = 3 (code 5) in lane 0: a refined weight gives 2·1.5·d, a refined activation 2·3·d. With the exponent step
# W, in [2, 4), counts its offset twice, and A, below 2, once.
@pytest.mark.parametrize(("step", "of_weight", "of_activation"), [("fixed", 3, 6), ("exponent", 6, 6)])
def test_offsets_times_base_operands_by_hand(step, of_weight, of_activation):
    config = VmacConfig(step=step)
    rows = [row(slot(0, [d], kind), [3], [5]) for kind in (0, ACTIVATION) for d in (-2, -1, 0, 1)]
    rows += [row(slot(0, [-1]), [11], [5]), row(slot(0, [-1], ACTIVATION), [3], [13])]
    expected = [factor * d for factor in (of_weight, of_activation) for d in (-2, -1, 0, 1)]
    assert sums(config, rows) == [*expected, of_weight, of_activation]


def test_the_exponent_step_follows_the_binade_of_the_refined_element():
    """Codes 0 to 7 have binades 0 0 0 0 1 1 2 2; the other operand is 1.5, so a count of 1 is worth 3."""
    config = VmacConfig(step="exponent")
    rows = [row(slot(0, [1]), [3], [code]) for code in range(16)]
    rows += [row(slot(0, [1], ACTIVATION), [code], [3]) for code in range(16)]
    assert sums(config, rows) == [3, 3, 3, 3, 6, 6, 12, 12] * 4


def test_each_slot_picks_the_subgroup_that_it_names():
    """Activations are 0.5, 1, 1.5 and 2 in subgroup 0, 1, 2 and 3: a sum of doubled values 1 to 4."""
    a = [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    rows, expected = [], []
    for first, second in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]:
        rows.append(row(slot(first, [1, 0, 0, 0]) | slot(second, [0, 0, 0, -2]) << 12, a, []))
        expected.append((first + 1) - 2 * (second + 1))
    assert sums(SLOTS, rows) == expected


def test_records_that_are_invalid_or_disabled_add_nothing_and_hold_constants():
    a, w = [7] * 16, [7] * 16
    dead = [0, 0x0FF & ~VALID, 0xEFF, 0xEFF << 12 | 0xEFF]
    rows = [row(record, a, w) for record in dead]
    rows += [row(record, a, w, enable=0) for record in (slot(0, [-2] * 4), slot(3, [1] * 4, ACTIVATION) << 12)]
    found = evaluate(Block(SLOTS), rows, ["r", "held"])
    assert [r for r, _ in found] == [0] * 6
    assert len({held for _, held in found}) == 1


def test_a_block_refined_in_place_takes_both_masks_and_the_weight_wins():
    a, w = [3] * 16, [5] * 16
    offsets = int("01" * 16, 2)
    weights, activations = (lambda mask: mask << 32), (lambda mask: mask << 36)
    cases = {
        offsets: 0,
        offsets | weights(0b0001): 4 * 3,
        offsets | weights(0b1111): 16 * 3,
        offsets | activations(0b1000): 4 * 6,
        offsets | weights(0b0110) | activations(0b1001): 8 * 3 + 8 * 6,
        offsets | weights(0b0001) | activations(0b0001): 4 * 3,
        offsets | weights(0b1111) | activations(0b1111): 16 * 3,
        0b10 | weights(0b0001): -2 * 3,
        0b11 << 30 | activations(0b1000): -6,
    }
    rows = [row(record, a, w) for record in cases] + [row(offsets | weights(15), a, w, enable=0)]
    assert sums(IN_PLACE, rows) == [*cases.values(), 0]


def draw(rng, config, count):
    """Records that keep to the order of slots, in one block of the two of a vector."""
    if config.refinement == "inplace":
        return rng.integers(0, 1 << 40, (count, 1), dtype=np.uint64)
    slots = config.slots_per_block
    subgroup = np.arange(slots) + rng.integers(0, 5 - slots, (count, slots))
    return (rng.integers(0, 512, (count, slots)) | subgroup << 9 | rng.integers(0, 2, (count, slots)) << 11).astype(
        np.uint64
    )


@pytest.mark.parametrize(
    "config",
    [
        VmacConfig(),
        VmacConfig(slots_per_block=3, step="exponent"),
        VmacConfig(refinement="inplace"),
    ],
    ids=["slots-2", "slots-3-exponent", "inplace"],
)
def test_random_records_sum_as_in_the_model(config, seed):
    rng = np.random.default_rng(seed)
    count = 200
    refine = draw(rng, config, count)
    a, w = rng.integers(0, 16, (2, count, GROUP))
    pad = np.zeros((count, GROUP), dtype=np.uint8)
    vectors = Vectors(
        mode_nvfp4=np.ones(count, dtype=bool),
        refine_en=np.ones(count, dtype=bool),
        a=np.concatenate([a.astype(np.uint8), pad], axis=1),
        w=np.concatenate([np.array(PAIRS, dtype=np.uint8)[w], pad + np.uint8(PAIRS[0])], axis=1),
        a_scale=pad[:, :2],
        w_scale=pad[:, :2],
        refine=np.concatenate([refine, np.zeros_like(refine)], axis=1),
        psum=np.zeros(count, dtype=np.uint64),
    )
    expected = refinement_sums(config, vectors)[:, 0].tolist()
    words = [sum(int(record) << 12 * n for n, record in enumerate(records)) for records in refine]
    assert sums(config, [row(*vector) for vector in zip(words, a, w, strict=True)]) == expected
    assert len(set(expected)) > 20


def test_records_are_as_wide_as_documented():
    widths = [Shape.cast(record_layout(config)).width for config in (SLOTS, VmacConfig(slots_per_block=4), IN_PLACE)]
    assert widths == [24, 48, 40]


@pytest.mark.parametrize("component", [RecordGate, SlotRefinement])
@pytest.mark.parametrize("slots", [0, 5])
def test_slots_beyond_the_subgroups_are_refused(component, slots):
    with pytest.raises(ValueError, match=f"^slots_per_block must be from 1 to 4, not {slots}$"):
        component(VmacConfig(slots_per_block=slots))
