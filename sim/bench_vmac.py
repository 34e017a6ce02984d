"""cocotb bench of the vector MACs: driver, monitor and a scoreboard whose reference is the golden model.

It runs on any configuration of ``vmac``, ``vmac_nvfp4`` and ``vmac_autofp2``. The driver changes inputs after the rising edge, the monitor
looks at the pins just before the next one, and the scoreboard knows only what the monitor saw.
"""

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import cocotb
import numpy as np
from cocotb.triggers import FallingEdge, ReadOnly, RisingEdge, Timer

from model.formats import E2M1
from model.packed_pair import nvfp4_digits, pack
from sim.bench_common import PERIOD_NS, bench_settings, cover, coverage_goals_met, pins, start_clock
from sim.coverage import MASK_CLASSES, STALL_CLASSES, masks
from sim.design import config_of
from sim.scoreboard import reference
from sim.stimuli import (
    AUTOFP2,
    AUTOFP6,
    FREE_PAIRS,
    ILLEGAL,
    MODES,
    NVFP4,
    SCALE_CLASSES,
    Stimulus,
    VectorShape,
    scale_class,
    vector_stimulus,
)

SATURATED = {"vmac": 2, "vmac_autofp2": 1, "vmac_nvfp4": 0}
NAN_SCALE = {"vmac": 4, "vmac_autofp2": 2, "vmac_nvfp4": 1}
# Short epochs, so that few rows reach the coverage goals.
MEAN_EPOCH = 60
ONE, ONE_ROW = 0x38, 1 << 18
"""The scale 1.0, and what one unit of O is then worth in the partial sum."""


@dataclasses.dataclass
class Vector:
    """A vector as the input monitor saw it; ``psum`` follows later."""

    row: int
    pins: dict[str, int]
    psum: int | None = None


class Setup:
    """The block under test and its bench.

    Parameters
    ----------
    dut : handle
        The top module.
    """

    def __init__(self, dut: Any) -> None:
        settings = bench_settings()
        self.dut = dut
        self.block: str = settings["block"]
        self.config = config_of(self.block, **settings["parameters"])
        self.shape = VectorShape.of(self.block, self.config)
        self.latency: int = settings["latency"]
        self.psum_delay: int = settings["psum_delay"]
        self.rows: int = settings["rows"]
        clocking = ("clk", "rst")
        self.inputs = [name for name, way in settings["ports"].items() if way == "input" and name not in clocking]
        self.driver = Driver(self)
        self.scoreboard = Scoreboard(self)

    async def start(self) -> None:
        """Start clock and monitors, and reset."""
        self.driver.idle()
        self.dut.rst.value = 1
        start_clock(self.dut)
        cocotb.start_soon(self.scoreboard.watch())
        for _ in range(3):
            await RisingEdge(self.dut.clk)
        self.dut.rst.value = 0

    async def finish(self) -> None:
        """Let the pipeline run dry and check that everything came out."""
        self.driver.idle()
        for _ in range(self.latency + 2):
            await RisingEdge(self.dut.clk)
        self.scoreboard.finish()


class Driver:
    """Puts vectors on the pins, one per clock cycle, and each one's partial sum later."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.sums: deque[int | None] = deque([0] * setup.psum_delay)

    def idle(self) -> None:
        """Drive zeros."""
        for name in self.setup.inputs:
            getattr(self.setup.dut, name).value = 0

    async def drive(self, vector: Mapping[str, int], psum: int | None, valid: int = 1, rst: int = 0) -> None:
        """Drive one row; ``psum=None`` feeds the block's own output back when this vector's partial sum is due."""
        await RisingEdge(self.setup.dut.clk)
        self.setup.dut.rst.value = rst
        self.setup.dut.valid_i.value = valid
        for name, value in vector.items():
            if name in self.setup.inputs:
                getattr(self.setup.dut, name).value = value
        self.sums.append(psum)
        due = self.sums.popleft()
        if due is not None:
            self.setup.dut.psum_i.value = due
        else:
            await FallingEdge(self.setup.dut.clk)
            value = self.setup.dut.psum_o.value
            self.setup.dut.psum_i.value = value.to_unsigned() if value.is_resolvable else 0


class Scoreboard:
    """Samples the pins in every row, asks the golden model, and compares.

    Inputs and outputs are sampled just before the rising edge, when everything has settled.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.row = 0
        self.since_reset: int | None = None
        self.flying: deque[Vector] = deque()
        self.waiting: deque[Vector] = deque()
        self.results: list[int] = []
        self.expected = self.compared = self.nonzero = 0
        self.must = self.may = self.seen_status = 0
        self.last_valid: int | None = None
        shape = setup.shape
        modes = [MODES[mode] for mode in shape.modes]
        mask_bins = MASK_CLASSES if shape.refinement != "none" else MASK_CLASSES[:1]
        self.cover = cover(
            setup.block,
            {"mode": modes, "scale": SCALE_CLASSES, "mask": mask_bins, "stall": STALL_CLASSES},
            [("mode", "scale"), ("mode", "mask"), ("mode", "stall"), ("mask", "stall")],
        )

    def mode_of(self, values: Mapping[str, int]) -> int:
        """Return the mode, an index into `MODES`, of sampled pins."""
        if len(self.setup.shape.modes) == 1:
            return self.setup.shape.modes[0]
        return values["mode_nvfp4"] + 2 * values.get("refine_en", 0)

    async def watch(self) -> None:
        """Sample every row, for ever."""
        dut = self.setup.dut
        outputs = ("valid_o", "status")
        while True:
            await FallingEdge(dut.clk)
            await Timer(PERIOD_NS // 2 - 1, "ns")
            await ReadOnly()
            values = pins(dut, ["rst", *self.setup.inputs])
            if self.since_reset is not None:
                self.check(pins(dut, outputs))
            self.accept(values)
            self.row += 1

    def check(self, outputs: Mapping[str, int]) -> None:
        """Compare the outputs of a row."""
        due = bool(self.flying) and self.flying[0].row + self.setup.latency == self.row
        assert outputs["valid_o"] == due, f"row {self.row}: valid_o is {outputs['valid_o']}, expected {int(due)}"
        status = outputs["status"]
        if due:
            vector = self.flying.popleft()
            assert vector.psum is not None
            psum, bits, known = self.golden(vector)
            self.must |= bits
            got = pins(self.setup.dut, ["psum_o"])["psum_o"]
            if known:
                self.expected += 1
                assert got == psum, f"row {self.row}: psum_o is {got:#x}, expected {psum:#x} for {vector}"
                self.compared += 1
                self.nonzero += psum != vector.psum
            self.results.append(got)
        assert status & self.must == self.must, f"row {self.row}: status {status:03b} lacks bits of {self.must:03b}"
        assert not status & ~self.may, f"row {self.row}: status {status:03b} has more than {self.may:03b}"
        assert not self.seen_status & ~status, f"row {self.row}: status {status:03b} forgot {self.seen_status:03b}"
        self.seen_status = status

    def accept(self, values: Mapping[str, int]) -> None:
        """Note the inputs of a row."""
        if self.waiting and self.waiting[0].row + self.setup.psum_delay == self.row:
            vector = self.waiting.popleft()
            vector.psum = values["psum_i"]
            _, bits, known = self.golden(vector)
            self.may |= bits if known else SATURATED[self.setup.block]
        if values["rst"]:
            self.flying.clear()
            self.waiting.clear()
            self.must = self.may = self.seen_status = 0
            self.since_reset, self.last_valid = self.row, None
        elif values["valid_i"] and self.since_reset is not None:
            vector = Vector(self.row, dict(values))
            self.flying.append(vector)
            self.waiting.append(vector)
            # Bits that do not need the partial sum may come at once.
            self.may |= self.golden(dataclasses.replace(vector, psum=0))[1] & ~SATURATED[self.setup.block]
            self.sample(vector)
            self.last_valid = self.row

    def arrays(self, vector: Vector) -> Stimulus:
        """Return a sampled vector as the model's arrays, with one row."""
        shape, values = self.setup.shape, vector.pins

        def fields(name: str, width: int, count: int, kind: type = np.uint8) -> np.ndarray:
            word = values.get(name, 0)
            return np.array([[word >> (width * k) & ((1 << width) - 1) for k in range(count)]], dtype=kind)

        return Stimulus(
            rst=np.zeros(1, bool),
            valid=np.ones(1, bool),
            mode=np.array([self.mode_of(values)], np.uint8),
            a=fields("a", 4, shape.lanes),
            w=fields("w", shape.weight_bits, shape.lanes),
            a_scale=fields("a_scale", 8, shape.blocks),
            w_scale=fields("w_scale", 8, shape.w_scales),
            refine=fields("refine", shape.record_bits or 1, shape.blocks * shape.slots, np.uint64),
            psum=np.array([vector.psum or 0], np.uint64),
            chain=np.zeros(1, bool),
        )

    def golden(self, vector: Vector) -> tuple[int, int, bool]:
        """Return the model's partial sum and status bits, and whether the contract fixes the sum."""
        stimulus = self.arrays(vector)
        known = self.setup.shape.weight_bits == 4 or not np.isin(stimulus.w, FREE_PAIRS).any()
        if not known:
            stimulus = dataclasses.replace(stimulus, w=np.where(np.isin(stimulus.w, FREE_PAIRS), 0b11100, stimulus.w))
        psum, bits = reference(self.setup.shape, self.setup.config, stimulus, np.arange(1), stimulus.psum)
        certain = int(bits[0]) if known else int(bits[0]) & ~SATURATED[self.setup.block]
        return int(psum[0]), certain, known

    def sample(self, vector: Vector) -> None:
        """Count functional coverage of an accepted vector."""
        shape, stimulus = self.setup.shape, self.arrays(vector)
        mode = int(stimulus.mode[0])
        used_a = stimulus.a_scale[0] if mode & 1 or shape.grouped else stimulus.a_scale[0, ::2]
        used_w = stimulus.w_scale[0, : shape.blocks] if mode & 1 else stimulus.w_scale[0]
        worst = int(scale_class(np.concatenate([used_a, used_w])).max())
        weight, activation = masks(shape, stimulus.refine)
        gap = None if self.last_valid is None else vector.row - self.last_valid - 1
        stall = 0 if gap is None else (1, 2, 3, 3, 4)[min(gap, 4)]
        self.cover(
            mode=MODES[mode],
            scale=SCALE_CLASSES[worst],
            mask=MASK_CLASSES[int(weight.any()) + 2 * int(activation.any())],
            stall=STALL_CLASSES[stall],
        )

    def finish(self) -> None:
        """Demand empty queues and a run that compared something."""
        assert not self.flying
        assert not self.waiting
        assert self.compared == self.expected > 0, f"compared {self.compared} of {self.expected}"


def word(fields: Mapping[int, int], width: int, count: int, default: int = 0) -> int:
    """Return ``count`` fields of ``width`` bits as one integer, field 0 lowest."""
    return sum(fields.get(k, default) << (width * k) for k in range(count))


def weight_code(setup: Setup, code: int) -> int:
    """Return an E2M1 weight as the block takes it: itself, or its packed pair."""
    if setup.shape.weight_bits == 4:
        return code
    return int(pack(*nvfp4_digits(np.array([code])))[0])


def vector(
    setup: Setup,
    mode: int,
    a: Mapping[int, int],
    w: Mapping[int, int],
    a_scale: Mapping[int, int] | None = None,
    w_scale: Mapping[int, int] | None = None,
    refine: Mapping[int, int] | None = None,
) -> dict[str, int]:
    """Return the pins of a vector from a few lanes; the other lanes are 0 and the other scales 1."""
    shape = setup.shape
    return {
        "mode_nvfp4": mode & 1,
        "refine_en": mode >> 1,
        "a": word(a, 4, shape.lanes),
        "w": word(w, shape.weight_bits, shape.lanes, weight_code(setup, 0)),
        "a_scale": word(a_scale or {}, 8, shape.blocks, ONE),
        "w_scale": word(w_scale or {}, 8, shape.w_scales, ONE),
        "refine": word(refine or {}, max(shape.record_bits, 1), shape.blocks * shape.slots),
    }


def record(setup: Setup, subgroup: int, offsets: Sequence[int], is_activation: bool) -> int:
    """Return a refinement record of one subgroup, for either kind of refinement hardware."""
    d = word({k: offset & 3 for k, offset in enumerate(offsets)}, 2, 4)
    if setup.shape.refinement == "inplace":
        return 1 << (32 + 4 * is_activation + subgroup) | d << (8 * subgroup)
    return is_activation << 11 | subgroup << 9 | 1 << 8 | d


def worked_examples(setup: Setup) -> list[tuple[str, dict[str, int], int, int, int]]:
    """Return (name, vector, psum in, psum out, status) that were worked by hand, as far as the block has the mode."""
    modes, refinement = setup.shape.modes, setup.shape.refinement
    nan, sat, illegal = NAN_SCALE[setup.block], SATURATED[setup.block], 1
    half, one, three, six, minus = 1, 2, 5, 7, 8
    examples: list[tuple[str, dict[str, int], int, int, int]] = []
    wrap = (1 << 64) - 1

    def add(name: str, pins: dict[str, int], before: int, after: int, status: int = 0) -> None:
        examples.append((name, pins, before & wrap, after & wrap, status))

    def code(e2m1: int) -> int:
        return weight_code(setup, e2m1)

    if NVFP4 in modes:
        add("zero", vector(setup, NVFP4, {}, {}), 77, 77)
        add("0.5 × 0.5", vector(setup, NVFP4, {0: half}, {0: code(half)}), 0, 4 * ONE_ROW)
        add("0.5 × -0.5", vector(setup, NVFP4, {0: half}, {0: code(half | minus)}), 0, -4 * ONE_ROW)
        add("-0 × 6", vector(setup, NVFP4, {0: minus}, {0: code(six)}), -5, -5)
        add("6 × -0", vector(setup, NVFP4, {0: six}, {0: code(minus)}), -5, -5)
        full = dict.fromkeys(range(16), six), dict.fromkeys(range(16), code(six))
        add("6 × 6 in a block", vector(setup, NVFP4, *full), 0, 9216 * ONE_ROW)
        largest = {0: 0x7E}, {0: 0x7E}
        add("largest", vector(setup, NVFP4, *full, *largest), 0, 9216 * 196 << 28)
        add("B = 0", vector(setup, NVFP4, *full, {0: 0}, {0: ONE}), 9, 9)
        add("smallest scales", vector(setup, NVFP4, {0: half}, {0: code(half)}, {0: 1}, {0: 1}), 0, 4)
        add(
            "no number in the activation scale",
            vector(setup, NVFP4, {0: one}, {0: code(one)}, {0: 0x7F}),
            0,
            16 * 15 * 8 << 20,
            nan,
        )
        add(
            "signed weight scale",
            vector(setup, NVFP4, {0: one}, {0: code(one)}, {}, {0: 0x80 | ONE}),
            0,
            16 * ONE_ROW,
            nan,
        )
        add(
            "last lane",
            vector(setup, NVFP4, {setup.shape.lanes - 1: one}, {setup.shape.lanes - 1: code(three)}),
            1,
            1 + 48 * ONE_ROW,
        )
    if AUTOFP2 in modes:
        plus, twice = int(pack([1], [0])[0]), int(pack([0], [2])[0])
        row = {0: one}, {0: plus}, {0: 0x60}, {0: 0x60}
        # Worth 2¹⁰ of T_W·T_A; a unit of the accumulator is 2² of it with the window of 24 bits.
        worth = 1 << (32 - setup.config.window_shift)
        other = setup.shape.blocks if setup.shape.grouped else 1
        add("fig. 11: even row", vector(setup, AUTOFP2, *row), 0, worth)
        add("odd row", vector(setup, AUTOFP2, {0: one}, {0: twice}, {0: 0x60}, {other: 0x60}), 0, 2 * worth << 32)
        add(
            "odd row at scale 1",
            vector(setup, AUTOFP2, {0: one}, {0: twice}, {0: 0x60}, {0: 0x60}),
            0,
            worth >> 4 << 32,
        )
        add("saturates upwards", vector(setup, AUTOFP2, *row), 2**31 - worth + 1, 2**31 - 1, sat)
        down = vector(setup, AUTOFP2, {0: one | minus}, *row[1:])
        add("saturates downwards", down, 2**31 + worth - 1, 2**31, sat)
        add("reaches the limit", down, 2**31 + worth, 2**31)
        exponent = setup.config.window_shift - 16
        # Half of a unit, and a little less: half is rounded up, towards plus infinity.
        if 0 < exponent < 16:
            half_unit = {0: exponent << 3}, {0: ONE}
            add("half of a unit", vector(setup, AUTOFP2, {0: one}, {0: plus}, *half_unit), 0, 1)
            add("minus half of a unit", vector(setup, AUTOFP2, {0: one | minus}, {0: plus}, *half_unit), 0, 0)
            add("less than half", vector(setup, AUTOFP2, {0: half}, {0: plus}, *half_unit), 0, 0)
    if AUTOFP6 in modes:
        weight = {0: record(setup, 0, (-1, 0, 0, 0), False)}
        product = {0: 3}, {0: code(three)}
        # With the exponent step a weight of 3 moves by 2/8.
        refined = 69 if setup.config.step == "fixed" else 66
        add("appendix D.8", vector(setup, AUTOFP6, *product, refine=weight), 0, refined * ONE_ROW)
        add("the same without refine_en", vector(setup, NVFP4, *product, refine=weight), 0, 72 * ONE_ROW)
        activation = {0: record(setup, 0, (1, 0, 0, 0), True)}
        add("activation refined", vector(setup, AUTOFP6, *product, refine=activation), 0, 78 * ONE_ROW)
        add("illegal", vector(setup, ILLEGAL, *row, refine=weight), 0, worth, illegal)
    if refinement == "slots" and setup.shape.slots == 2:
        # The second block's second slot: a weight of 1 with d = -2 and an activation of 6, so 6 · 0.75.
        last = {3: record(setup, 3, (0, 0, 0, -2), False)}
        add("second slot", vector(setup, AUTOFP6, {31: six}, {31: code(one)}, refine=last), 0, 72 * ONE_ROW)
    return examples


@cocotb.test(timeout_time=100, timeout_unit="us")
async def worked_by_hand(dut: Any) -> None:
    """Vectors whose results were worked by hand, not by the model; reset in between clears the status."""
    setup = Setup(dut)
    await setup.start()
    for name, values, before, after, status in worked_examples(setup):
        setup.scoreboard.results.clear()
        await setup.driver.drive({}, 0, valid=0, rst=1)
        await setup.driver.drive(values, before)
        for _ in range(setup.latency + 1):
            await setup.driver.drive({}, 0, valid=0)
        assert setup.scoreboard.results == [after], f"{name}: {setup.scoreboard.results} is not {after:#x}"
        await Timer(1, "ns")
        got = pins(dut, ["status"])["status"]
        assert got == status, f"{name}: status {got:03b} is not {status:03b}"
    await setup.finish()


@cocotb.test(timeout_time=10, timeout_unit="ms")
async def random_streams(dut: Any) -> None:
    """Random modes, values, scales, refinements, stalls and resets, with partial sums of the bench's or the block's own."""
    setup = Setup(dut)
    await setup.start()
    shape = setup.shape
    stimulus = vector_stimulus(shape, setup.rows, np.random.default_rng(cocotb.RANDOM_SEED), MEAN_EPOCH)
    columns = stimulus.columns(shape, 0, 0)
    names = [name for name in setup.inputs if name in columns and name not in ("psum_i", "valid_i")]
    for row in range(setup.rows):
        values = {}
        for name in names:
            value = columns[name][row]
            values[name] = int(value) if np.ndim(value) == 0 else int.from_bytes(value.tobytes(), "little")
        psum = None if stimulus.chain[row] else int(stimulus.psum[row])
        await setup.driver.drive(values, psum, int(stimulus.valid[row]), int(stimulus.rst[row]))
    await setup.driver.drive({}, 0, valid=0)
    await setup.finish()
    board = setup.scoreboard
    cocotb.log.info("compared %d vectors, %d of them non-zero", board.compared, board.nonzero)
    assert 2 * board.nonzero > board.compared
    coverage_goals_met(setup.block, cocotb.log.info)


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def accumulates_over_k(dut: Any) -> None:
    """Add up a long dot product, every vector taking what the one before it left; the sum is worked out without the model."""
    setup = Setup(dut)
    await setup.start()
    shape, rng = setup.shape, np.random.default_rng(cocotb.RANDOM_SEED)
    interleaved = setup.latency - setup.psum_delay
    for mode in shape.modes:
        if mode in (ILLEGAL, AUTOFP6):
            continue
        exact = mode == NVFP4
        a = rng.integers(0, 16, (64, shape.lanes))
        codes = rng.integers(0, 16, (64, shape.lanes))
        await setup.driver.drive({}, 0, valid=0, rst=1)
        for k in range(64):
            weights = {lane: weight_code(setup, int(code)) for lane, code in enumerate(codes[k])}
            if not exact:
                # The even row's digits are 1, the odd row's -1.
                weights = dict.fromkeys(range(shape.lanes), int(pack([1], [-1])[0]))
            # Scale 64: six binades above 1.
            scales = dict.fromkeys(range(shape.w_scales), ONE + 0x30)
            values = vector(setup, mode, dict(enumerate(map(int, a[k]))), weights, None, scales)
            # The output comes back in time for the next vector but one, if the accumulator is that deep.
            await setup.driver.drive(values, 0 if k == 0 else None)
            for _ in range(interleaved - 1):
                await setup.driver.drive({}, 0, valid=0)
        for _ in range(setup.latency + 1):
            await setup.driver.drive({}, 0, valid=0)
        got = setup.scoreboard.results[-1]
        x, y = E2M1.decode(a.astype(np.uint8)), E2M1.decode(codes.astype(np.uint8))
        if exact:
            expected = int(16 * (x * y).sum(dtype=np.float64)) * ONE_ROW << 6
        else:
            unit = setup.config.window_shift
            sums = [int(16 * row.sum(dtype=np.float64)) * ONE_ROW << 6 for row in x]
            even = sum(total + (1 << unit - 1) >> unit for total in sums)
            odd = sum(-total + (1 << unit - 1) >> unit for total in sums)
            expected = (odd & 0xFFFFFFFF) << 32 | even & 0xFFFFFFFF
        assert got == expected & ((1 << 64) - 1), f"{MODES[mode]}: {got:#x} is not {expected & ((1 << 64) - 1):#x}"
    await setup.finish()


@cocotb.test(timeout_time=100, timeout_unit="us")
async def reset_drops_vectors_in_flight(dut: Any) -> None:
    """Reset at every distance behind a burst; what was in the pipeline never comes out, and the next vector does."""
    setup = Setup(dut)
    await setup.start()
    mode = setup.shape.modes[0]
    scales = dict.fromkeys(range(setup.shape.w_scales), 0x60)
    values = vector(
        setup, mode, {0: 2, 17: 5}, {0: weight_code(setup, 2), 17: weight_code(setup, 7)}, {0: 0x60}, scales
    )
    for distance in range(setup.latency + 2):
        await setup.driver.drive(values, 1)
        for _ in range(distance):
            await setup.driver.drive(values, 2)
        await setup.driver.drive(values, 3, rst=1)
        await setup.driver.drive(values, 4)
        for _ in range(setup.latency + 1):
            await setup.driver.drive({}, 0, valid=0)
    await setup.finish()
    assert setup.scoreboard.compared >= setup.latency + 2


@cocotb.test(timeout_time=100, timeout_unit="us")
async def status_is_sticky(dut: Any) -> None:
    """Each status bit stays through harmless vectors until reset, and vectors without ``valid_i`` raise none."""
    setup = Setup(dut)
    await setup.start()
    nothing = vector(setup, setup.shape.modes[0], {}, {})
    for name, values, before, _, status in worked_examples(setup):
        if not status:
            continue
        await setup.driver.drive({}, 0, valid=0, rst=1)
        await setup.driver.drive(values, before, valid=0)
        for _ in range(setup.latency + 1):
            await setup.driver.drive(nothing, 0)
        await Timer(1, "ns")
        assert pins(dut, ["status"])["status"] == 0, f"{name}: raised without valid_i"
        await setup.driver.drive(values, before)
        for _ in range(setup.latency + 6):
            await setup.driver.drive(nothing, 0)
        await Timer(1, "ns")
        assert pins(dut, ["status"])["status"] == status, f"{name}: forgotten"
        await setup.driver.drive({}, 0, valid=0, rst=1)
        await setup.driver.drive({}, 0, valid=0)
        await Timer(1, "ns")
        assert pins(dut, ["status"])["status"] == 0, f"{name}: outlived reset"
    await setup.finish()
