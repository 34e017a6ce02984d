"""Proofs: the dot products and refinement sums of a block are the sums of their lanes' products, for all inputs."""

import math

import numpy as np
import pytest
import z3
from amaranth.hdl import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

import hdl.lanes
import hdl.lib.arith
import hdl.refinement
from hdl.lanes import DigitBlock
from hdl.lib.verilog import to_verilog
from hdl.packed_pair import Digit
from hdl.refinement import InPlaceRefinement, RecordGate, SlotRefinement, record_layout
from hdl.vmac_nvfp4 import ProductBlock
from model.vmac import VmacConfig
from tests.formal.linear import Netlist, NotLinearError, all_values

GROUP, SUBGROUP = 16, 4

# Twice the value of every E2M1 code, from the format: (1 + m/2) · 2**(e - 1), or m/2 for e = 0.
DOUBLED = np.array([(-1) ** (c >> 3) * (c & 1 if c & 6 == 0 else (2 + (c & 1)) << (c >> 1 & 3) - 1) for c in range(16)])
BINADE = np.array([max(0, math.floor(math.log2(abs(d) / 2))) if d else 0 for d in DOUBLED])

# Digits (Q0, Q1) of every pattern {E, F1, F0}.
CODE = [1, 2, -1, -2]
DIGITS = np.array(
    [
        [0 if p & 4 else CODE[p & 3], 0 if p & 8 else CODE[p & 3]] if p & 16 else [CODE[p & 3], CODE[p >> 2 & 3]]
        for p in range(32)
    ]
)
# Weights as digits, table 8 of the paper.
TABLE_8 = [(0, 0), (1, -2), (0, 1), (1, -1), (0, 2), (2, -2), (2, -1), (2, 1)]
WEIGHT = np.array([5 * q0 + 2 * q1 for q0, q1 in DIGITS])
IS_WEIGHT = np.array([(q0, q1) in TABLE_8 or (-q0, -q1) in TABLE_8 for q0, q1 in DIGITS])
WEIGHT_BINADE = np.array([max(0, math.floor(math.log2(abs(w) / 2))) if w else 0 for w in WEIGHT])
OFFSET = np.array([0, 1, -2, -1])

FIXED = VmacConfig()
CONFIGURATIONS = {
    "fixed": FIXED,
    "exponent": VmacConfig(step="exponent"),
    "fast": VmacConfig(pipeline="fast"),
    "one slot": VmacConfig(slots_per_block=1),
    "three slots": VmacConfig(slots_per_block=3),
    "four slots": VmacConfig(slots_per_block=4, step="exponent"),
}


def netlist(component):
    return Netlist(to_verilog(component, "dut"), "dut")


def by_lane(block, polynomial, owned):
    """Assign each bit of the polynomial to the one lane whose own inputs, a set per lane, it depends on."""
    lanes = [[] for _ in owned]
    for bit in polynomial.coefficients:
        support = block.support([bit])
        owners = [lane for lane, bits in enumerate(owned) if support & bits]
        if len(owners) != 1:
            raise NotLinearError(f"a term depends on lanes {owners}")
        lanes[owners[0]].append(bit)
    return lanes


def exhaustive_sum(block, port, inputs, expected):
    """Check that ``port`` is the sum over lanes of ``expected(lane, numbers)``, for all values of each lane's ``inputs``.

    ``inputs`` lists the bits of each lane, its own first; a lane's own bits are those that no other lane lists.
    """
    polynomial = block.normal_form(port)
    shared = [set().union(*(set(other) for j, other in enumerate(inputs) if j != i)) for i in range(len(inputs))]
    lanes = by_lane(block, polynomial, [set(bits) - rest for bits, rest in zip(inputs, shared, strict=True)])
    total = polynomial.constant
    for lane, (terms, bits) in enumerate(zip(lanes, inputs, strict=True)):
        values, numbers = all_values(bits)
        zero, one = np.zeros(len(numbers), bool), np.ones(len(numbers), bool)
        assert block.support(terms) <= set(bits)
        term = sum(
            polynomial.coefficients[bit] * value.astype(np.int64)
            for bit, value in zip(terms, block.evaluate(terms, values, zero, one), strict=True)
        )
        wanted, considered = expected(lane, numbers)
        difference = np.unique(((term - wanted) % (1 << polynomial.width))[considered])
        if len(difference) != 1:
            return False
        total += int(difference[0])
    # The output's width holds every true sum, so that equality modulo its range is equality.
    return total % (1 << polynomial.width) == 0


def digit_sums_hold(fast=False):
    block = netlist(DigitBlock(fast=fast))
    a, w = block.ports["a"], block.ports["w"]
    inputs = [a[4 * k : 4 * k + 4] + w[5 * k : 5 * k + 5] for k in range(GROUP)]
    assert (GROUP * 12 * 2).bit_length() < len(block.ports["even"]) == len(block.ports["odd"])

    def product(digit):
        return lambda lane, n: (DOUBLED[n & 15] * DIGITS[n >> 4, digit], np.ones(len(n), bool))

    return exhaustive_sum(block, "even", inputs, product(0)) and exhaustive_sum(block, "odd", inputs, product(1))


@pytest.mark.parametrize("fast", [False, True], ids=["compact", "fast"])
def test_a_block_adds_sixteen_products_of_digits_and_activations_exactly(fast):
    assert digit_sums_hold(fast)


def test_a_missing_shift_of_digit_two_is_caught(monkeypatch):
    monkeypatch.setattr(
        Digit, "times", lambda self, magnitude: (magnitude & (self.single | self.double).replicate(4)) << 0
    )
    assert not digit_sums_hold()


def test_a_tree_that_drops_a_carry_is_caught(monkeypatch):
    def tree_sum(terms, width=None, original=hdl.lib.arith.tree_sum):
        return original([original(terms[:16])[:8], *terms[16:]], width)

    monkeypatch.setattr(hdl.lanes, "tree_sum", tree_sum)
    with pytest.raises(NotLinearError, match="carry"):
        digit_sums_hold()


def product_sum_holds(fast=False):
    block = netlist(ProductBlock(fast=fast))
    a, w = block.ports["a"], block.ports["w"]
    inputs = [a[4 * k : 4 * k + 4] + w[4 * k : 4 * k + 4] for k in range(GROUP)]
    assert (GROUP * 12 * 12).bit_length() < len(block.ports["dot"])
    return exhaustive_sum(
        block, "dot", inputs, lambda lane, n: (DOUBLED[n & 15] * DOUBLED[n >> 4], np.ones(len(n), bool))
    )


@pytest.mark.parametrize("fast", [False, True], ids=["compact", "fast"])
def test_a_baseline_block_adds_sixteen_direct_products_exactly(fast):
    assert product_sum_holds(fast)


def test_a_sign_that_is_counted_for_another_lane_is_caught(monkeypatch):
    def shallow_sum(magnitudes, signs, width, original=hdl.lib.arith.shallow_sum):
        return original(magnitudes, [*signs[:-1], signs[-2]], width)

    monkeypatch.setattr(hdl.lanes, "shallow_sum", shallow_sum)
    with pytest.raises(NotLinearError):
        digit_sums_hold(fast=True)


class Refinement(wiring.Component):
    """The refinement lanes of a block with their gate, without the vMAC's registers between them."""

    def __init__(self, config):
        self.gate = RecordGate(config)
        self.lanes = {"slots": SlotRefinement, "inplace": InPlaceRefinement}[config.refinement](config)
        lanes = self.lanes.signature.members
        ports = {
            "enable": In(1),
            "a": lanes["a"],
            "w": lanes["w"],
            "record": In(record_layout(config)),
            "r": Out(lanes["r"].shape),
        }
        super().__init__(ports)

    def elaborate(self, platform):
        m = Module()
        gate, lanes = m.submodules.gate, m.submodules.lanes = self.gate, self.lanes
        m.d.comb += [gate.enable.eq(self.enable), gate.record.eq(self.record), lanes.held.eq(gate.held)]
        m.d.comb += [lanes.a.eq(self.a), lanes.w.eq(self.w), self.r.eq(lanes.r)]
        return m


def in_place(config):
    """Netlist of a block, and the inputs of each lane: offset, a, w, then what lanes share: both masks and the enable."""
    block = netlist(Refinement(config))
    a, w, record, enable = (block.ports[name] for name in ("a", "w", "record", "enable"))
    inputs = [
        record[2 * k : 2 * k + 2]
        + a[4 * k : 4 * k + 4]
        + w[5 * k : 5 * k + 5]
        + [record[32 + k // SUBGROUP], record[36 + k // SUBGROUP], enable[0]]
        for k in range(GROUP)
    ]
    return block, inputs


def in_place_sum_holds(step):
    config = VmacConfig(refinement="inplace", step=step)
    block, inputs = in_place(config)

    def term(lane, n):
        d, a, w = OFFSET[n & 3], n >> 2 & 15, n >> 6 & 31
        of_weight, of_activation, enabled = (n >> bit & 1 == 1 for bit in (11, 12, 13))
        operand = np.where(of_weight, DOUBLED[a], np.where(of_activation, WEIGHT[w], 0)) * enabled
        if step == "exponent":
            operand = operand << np.where(of_weight, WEIGHT_BINADE[w], BINADE[a])
        return operand * d, IS_WEIGHT[w]

    limit = config.output_limit - GROUP * 4 * 12 * 12
    assert limit.bit_length() < len(block.ports["r"])
    return exhaustive_sum(block, "r", inputs, term)


@pytest.mark.parametrize("step", ["fixed", "exponent"])
def test_in_place_refinement_adds_the_offset_products_of_masked_subgroups_and_nothing_when_disabled(step):
    assert in_place_sum_holds(step)


def test_an_offset_of_minus_two_read_as_minus_one_is_caught(monkeypatch):
    def offset_terms(m, name, config, magnitude, negative, offset, binade, original=hdl.refinement._offset_terms):
        return original(m, name, config, magnitude, negative, offset | offset[1], binade)

    monkeypatch.setattr(hdl.refinement, "_offset_terms", offset_terms)
    assert not in_place_sum_holds("fixed")


def lookup(table, index, width):
    """Entry of a table of integers, as a z3 expression."""
    entries = [z3.BitVecVal(int(value), width) for value in table]
    for bit in index:
        entries = [z3.If(bit == 1, high, low) for low, high in zip(entries[::2], entries[1::2], strict=True)]
    return entries[0]


def slots(config):
    """Netlist of a block, one z3 variable per input bit, and the offset bits that each lane owns."""
    block = netlist(Refinement(config))
    values = {bit: z3.BitVec(f"in{bit}", 1) for bit in block.inputs}
    record = block.ports["record"]
    owned = [
        record[12 * s + 2 * i : 12 * s + 2 * i + 2] for s in range(config.slots_per_block) for i in range(SUBGROUP)
    ]
    return block, values, owned


def slot_counter_example(config):
    """Return what z3 says about each lane of a block: a slot's term is wrong by more than a constant, or the constants do not cancel."""
    block, values, owned = slots(config)
    a, w, record, enable = (
        [values[bit] for bit in block.ports[name]] if name in block.ports else []
        for name in ("a", "w", "record", "enable")
    )
    polynomial = block.normal_form("r")
    width = polynomial.width
    assert (config.output_limit - GROUP * 4 * 12 * 12).bit_length() < width
    lanes = by_lane(block, polynomial, [set(bits) for bits in owned])
    zero, one = z3.BitVecVal(0, 1), z3.BitVecVal(1, 1)
    total = polynomial.constant
    for lane, terms in enumerate(lanes):
        slot, i = divmod(lane, SUBGROUP)
        fields = record[12 * slot : 12 * slot + 12]
        d, valid, index, of_activation = fields[2 * i : 2 * i + 2], fields[8], fields[9:11], fields[11]
        candidates = range(slot, SUBGROUP - config.slots_per_block + slot + 1)
        solver = z3.Solver()
        solver.set("timeout", 60_000)
        product = z3.BitVecVal(0, width)
        legal = []
        for g in candidates:
            k = SUBGROUP * g + i
            code, pair = a[4 * k : 4 * k + 4], w[5 * k : 5 * k + 5]
            activation, weight = lookup(DOUBLED, code, width), lookup(WEIGHT, pair, width)
            solver.add(lookup(IS_WEIGHT, pair, 1) == 1)
            if config.step == "exponent":
                activation = activation << lookup(WEIGHT_BINADE, pair, width)
                weight = weight << lookup(BINADE, code, width)
            chosen = z3.And(index[0] == g & 1, index[1] == g >> 1)
            legal.append(chosen)
            product = z3.If(chosen, z3.If(of_activation == 1, weight, activation), product)
        solver.add(z3.Or(legal))
        live = z3.And(valid == 1, enable[0] == 1)
        wanted = z3.If(live, product * lookup(OFFSET, d, width), 0)
        term = sum(
            (
                z3.ZeroExt(width - 1, value) * z3.BitVecVal(polynomial.coefficients[bit], width)
                for bit, value in zip(terms, block.evaluate(terms, values, zero, one), strict=True)
            ),
            z3.BitVecVal(0, width),
        )
        at_zero = block.evaluate(terms, dict.fromkeys(block.inputs, False), False, True)
        constant = sum(polynomial.coefficients[bit] * bool(v & 1) for bit, v in zip(terms, at_zero, strict=True))
        solver.add(term - wanted != constant)
        verdict = solver.check()
        if verdict != z3.unsat:
            return f"lane {lane}: {verdict}"
        total += constant
    return None if total % (1 << width) == 0 else "constants do not cancel"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_slots_add_the_offset_products_of_their_subgroups_and_nothing_when_disabled_or_invalid(name):
    assert slot_counter_example(CONFIGURATIONS[name]) is None


def test_a_slot_that_picks_the_wrong_subgroup_is_caught(monkeypatch):
    def choose(subgroup, candidates, original=hdl.refinement.choose):
        tests = original(subgroup, candidates)
        return dict(zip(tests, [*list(tests.values())[1:], next(iter(tests.values()))], strict=True))

    monkeypatch.setattr(hdl.refinement, "choose", choose)
    assert slot_counter_example(FIXED) == "lane 0: sat"


def stillness(config):
    """Return what is not still in a block with its enable at 0, as sentences; every input but the enable does what it likes.

    Nets that do not depend on the enable come before its gates. Each may belong to one activation, which the base lanes decode too, or to the
    control bits of one record; none may belong to an offset, to a weight or to two elements, and none may enter the tree. Inverters are
    wires.
    """
    slotted = config.refinement == "slots"
    block = netlist(Refinement(config))
    (enable,), a, record = (block.ports[name] for name in ("enable", "a", "record"))
    free = [set(a[4 * k : 4 * k + 4]) for k in range(GROUP)]
    free += (
        [set(record[12 * s + 8 : 12 * s + 12]) for s in range(config.slots_per_block)]
        if slotted
        else [{record[32 + g], record[36 + g]} for g in range(SUBGROUP)]
    )
    moving = set(block.moving([*block.nets, *block.ports["r"]], {enable: False}))
    terms = block.normal_form("r").coefficients
    zero = block.evaluate(block.ports["r"], dict.fromkeys(block.inputs, False), False, True)
    supports = {bit: block.support([bit]) for bit in moving}
    return [
        *["a bit that enters the tree moves"] * any(bit in moving for bit in terms),
        *["R moves"] * any(bit in moving for bit in block.ports["r"]),
        *["R is not 0"] * any(value & 1 for value in zero),
        *["a net behind the enable moves"] * any(enable in inputs for inputs in supports.values()),
        *["a net before the enable moves"]
        * any(len(inputs) > 1 and not any(inputs <= own for own in free) for inputs in supports.values()),
    ]


@pytest.mark.parametrize("refinement", ["slots", "inplace"])
@pytest.mark.parametrize("step", ["fixed", "exponent"])
def test_disabled_refinement_lanes_are_still_whatever_comes_in(refinement, step):
    assert stillness(VmacConfig(refinement=refinement, step=step)) == []


@pytest.mark.parametrize("slots_per_block", [1, 3, 4])
def test_any_number_of_disabled_slots_is_still(slots_per_block):
    assert stillness(VmacConfig(slots_per_block=slots_per_block, step="exponent")) == []
    assert stillness(VmacConfig(slots_per_block=slots_per_block)) == []


@pytest.mark.parametrize("step", ["fixed", "exponent"])
def test_a_slot_without_a_valid_record_is_still_while_others_work(step):
    block, _, owned = slots(VmacConfig(step=step))
    lanes = by_lane(block, block.normal_form("r"), [set(bits) for bits in owned])
    for slot in range(2):
        terms = [bit for lane in lanes[SUBGROUP * slot : SUBGROUP * slot + SUBGROUP] for bit in lane]
        assert len(terms) > 4 * SUBGROUP
        assert block.moving(terms, {block.ports["record"][12 * slot + 8]: False}) == []


@pytest.mark.parametrize("step", ["fixed", "exponent"])
def test_an_unmasked_subgroup_in_place_is_still_while_others_work(step):
    block, inputs = in_place(VmacConfig(refinement="inplace", step=step))
    lanes = by_lane(block, block.normal_form("r"), [set(bits[:2]) for bits in inputs])
    record = block.ports["record"]
    for k, terms in enumerate(lanes):
        masks = [record[32 + k // SUBGROUP], record[36 + k // SUBGROUP]]
        assert len(terms) > 4
        assert block.moving(terms, dict.fromkeys(masks, False)) == []


@pytest.mark.parametrize("refinement", ["slots", "inplace"])
def test_operands_that_are_not_held_are_caught(refinement, monkeypatch):
    monkeypatch.setattr(hdl.refinement, "_selected", lambda values, gates: values[0])
    assert "a net before the enable moves" in stillness(VmacConfig(refinement=refinement, step="exponent"))


@pytest.mark.parametrize("refinement", ["slots", "inplace"])
@pytest.mark.parametrize("step", ["fixed", "exponent"])
def test_a_sign_that_follows_the_offset_of_a_disabled_lane_is_caught(refinement, step, monkeypatch):
    def offset_terms(m, name, config, magnitude, negative, offset, binade, original=hdl.refinement._offset_terms):
        record, lane = records[-1], int(name.rpartition("_")[2].removeprefix("lane"))
        ungated = (record[0] if refinement == "slots" else record).offsets[lane]
        term, _ = original(m, name, config, magnitude, negative, offset, binade)
        return term, negative ^ ungated[1]

    records = []

    def elaborate(self, platform, original=RecordGate.elaborate):
        records.append(self.record)
        return original(self, platform)

    monkeypatch.setattr(RecordGate, "elaborate", elaborate)
    monkeypatch.setattr(hdl.refinement, "_offset_terms", offset_terms)
    assert "a bit that enters the tree moves" in stillness(VmacConfig(refinement=refinement, step=step))


def test_offsets_that_are_not_gated_are_caught(monkeypatch):
    monkeypatch.setattr(hdl.refinement, "hold_offset", lambda offset, live: Cat(offset[0], ~offset[1]))
    assert "a bit that enters the tree moves" in stillness(FIXED)


def held_bits_move(config):
    """Whether what the vMAC's registers hold of a block's records moves while the block is disabled, or that of a slot without a valid record."""
    block = netlist(RecordGate(config))
    held, record, (enable,) = (block.ports[name] for name in ("held", "record", "enable"))
    if block.moving(held, {enable: False}):
        return True
    if config.refinement == "inplace":
        parts = [
            ([*held[8 * g : 8 * g + 8], held[32 + g], held[36 + g]], [record[32 + g], record[36 + g]])
            for g in range(SUBGROUP)
        ]
    else:
        width = len(held) // config.slots_per_block
        parts = [(held[width * s : width * (s + 1)], [record[12 * s + 8]]) for s in range(config.slots_per_block)]
    return any(block.moving(bits, dict.fromkeys(off, False)) for bits, off in parts)


@pytest.mark.parametrize(
    "config",
    [VmacConfig(refinement="inplace"), *(VmacConfig(slots_per_block=n) for n in (1, 2, 3, 4))],
    ids=["inplace", "1", "2", "3", "4"],
)
def test_registers_of_records_that_do_nothing_are_still(config):
    assert not held_bits_move(config)


def test_a_subgroup_that_is_held_without_a_gate_is_caught(monkeypatch):
    monkeypatch.setattr(hdl.refinement, "choice", lambda config, slot, subgroup, live: subgroup)
    assert held_bits_move(FIXED)


def zero_digits_move():
    """Whether a bit that enters a tree follows the activation, or anything else, in a sub-lane whose digit is and stays zero."""
    block = netlist(DigitBlock())
    a, w = block.ports["a"], block.ports["w"]
    inputs = [a[4 * k : 4 * k + 4] + w[5 * k : 5 * k + 5] for k in range(GROUP)]
    for digit, port in enumerate(("even", "odd")):
        lanes = by_lane(block, block.normal_form(port), [set(bits) for bits in inputs])
        for terms, bits in zip(lanes, inputs, strict=True):
            values, numbers = all_values(bits)
            zero, one = np.zeros(len(numbers), bool), np.ones(len(numbers), bool)
            assert len(terms) > 5
            entering = np.array(block.evaluate(terms, values, zero, one))[:, DIGITS[numbers >> 4, digit] == 0]
            if (entering != entering[:, :1]).any():
                return True
    return False


def test_nothing_of_a_sub_lane_with_a_zero_digit_moves():
    assert not zero_digits_move()


def test_a_sign_that_follows_the_activation_of_a_zero_digit_is_caught(monkeypatch):
    monkeypatch.setattr(Digit, "product_sign", lambda self, negative: negative ^ self.negative)
    assert zero_digits_move()
