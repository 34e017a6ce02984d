"""cocotb bench of the accelerator: cocotbext-axi's memory and register manager, random stalls of every channel, and the model bit for bit.

Settings: ``rows`` is the number of random products.
"""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import cocotb
import numpy as np
from cocotb.triggers import ClockCycles, FallingEdge, RisingEdge
from cocotbext.axi import AxiBus, AxiLiteBus, AxiLiteMaster, AxiSlave
from cocotbext.axi.memory import Memory

from model import gemm
from model.accelerator import (
    MAGIC,
    PITCH,
    RECORD_BYTES,
    RECORD_OFFSET,
    REGISTERS,
    AcceleratorConfig,
    Descriptor,
    ErrorCode,
    Event,
    Format,
    Mode,
    check,
)
from model.pe import OFFSET_BYTES, Operands
from model.tiling import plan
from sim.bench_common import bench_settings, pins, start_clock
from sim.image import Image, Output

BASE = 0x3000
SPACE = 1 << 20
PLACES = 4
PATIENCE = 40_000
"""Cycles that may pass without a product ending."""
KINDS = {"none": "0", "slots": "1", "inplace": "2"}


@dataclasses.dataclass(frozen=True)
class Job:
    """A product in memory."""

    mode: Mode
    a: Operands
    w: Operands
    descriptor: Descriptor
    output: Output


class Target:
    """What the bus sees of a memory: it repeats, and accesses to some of its addresses end with SLVERR.

    Attributes
    ----------
    failing_reads, failing_writes : range
        Addresses whose accesses fail.
    failed : int
        Accesses that failed.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.failing_reads = self.failing_writes = range(0)
        self.failed = 0

    def _check(self, failing: range, address: int, size: int) -> int:
        if address < failing.stop and failing.start < address + size:
            self.failed += 1
            raise ValueError("this address fails")
        return address % SPACE

    async def read(self, address: int, length: int) -> bytes:
        """Read as cocotbext-axi does; what is raised becomes SLVERR."""
        octets: bytes = self._memory.read(self._check(self.failing_reads, address, length), length)
        return octets

    async def write(self, address: int, data: bytes) -> None:
        """Write likewise."""
        self._memory.write(self._check(self.failing_writes, address, len(data)), data)


class Bench:
    """An accelerator with its memory and whoever uses it."""

    def __init__(self, dut: Any) -> None:
        settings = bench_settings()
        self.dut = dut
        self.config = AcceleratorConfig(**settings["parameters"])
        self.rows: int = settings["rows"]
        self.random = random.Random(cocotb.RANDOM_SEED)
        self.rng = np.random.default_rng(cocotb.RANDOM_SEED)
        self.image = Image(BASE, max(64, self.config.data_width // 8), self.rng)
        self.queue = self.image.allocate(PLACES * PITCH, PITCH)
        self.outputs: list[Output] = []
        self._sent = 0

    async def start(self) -> None:
        """Reset, and connect memory and manager."""
        start_clock(self.dut)
        self.dut.rst.value = 1
        self.memory = Memory(SPACE)
        self.target = Target(self.memory)
        bus = AxiBus.from_prefix(self.dut, "m_axi")
        self.subordinate = AxiSlave(bus, self.dut.clk, self.dut.rst, target=self.target)
        self.manager = AxiLiteMaster(AxiLiteBus.from_prefix(self.dut, "s_axi"), self.dut.clk, self.dut.rst)
        for part in (self.subordinate.write_if, self.subordinate.read_if, self.manager.write_if, self.manager.read_if):
            part.log.setLevel("ERROR")
        await ClockCycles(self.dut.clk, 4)
        self.dut.rst.value = 0
        await RisingEdge(self.dut.clk)

    def stall(self) -> None:
        """Pause every channel in a way of its own, some for long, which is how latency looks."""

        def pauses(share: float, length: int) -> Iterator[bool]:
            while True:
                paused = self.random.random() < share
                for _ in range(self.random.randrange(1, length + 1)):
                    yield paused

        memory, manager = self.subordinate, self.manager
        for interface in (memory.write_if, manager.write_if):
            for channel in (interface.aw_channel, interface.w_channel, interface.b_channel):
                channel.set_pause_generator(pauses(self.random.choice([0, 0.3, 0.7]), self.random.choice([1, 3, 40])))
        for interface in (memory.read_if, manager.read_if):
            for channel in (interface.ar_channel, interface.r_channel):
                channel.set_pause_generator(pauses(self.random.choice([0, 0.3, 0.7]), self.random.choice([1, 3, 40])))

    async def write(self, name: str, **values: int) -> None:
        """Write a register."""
        register = REGISTERS[name]
        answer = await self.manager.write(register.offset, register.pack(**values).to_bytes(4, "little"))
        assert not answer.resp, name

    async def read(self, name: str) -> int:
        """Read a register."""
        answer = await self.manager.read(REGISTERS[name].offset, 4)
        assert not answer.resp, name
        return int.from_bytes(answer.data, "little")

    async def interrupted(self, level: int = 1, limit: int = PATIENCE) -> None:
        """Wait until the interrupt has a level."""
        for _ in range(limit):
            await FallingEdge(self.dut.clk)
            if pins(self.dut, ["irq"])["irq"] == level:
                return
        raise AssertionError(f"irq was not {level} in {limit} cycles")

    async def enable(self, *events: Event) -> None:
        """Tell where the queue is, which events interrupt, and start."""
        await self.write("queue_low", address=self.queue >> 8)
        await self.write("queue_high", address=self.queue >> 32)
        await self.write("queue_length", last=PLACES - 1)
        await self.write("interrupt", **{event.name.lower(): 1 for event in events})
        await self.write("control", enable=1)

    def operands(self, rows: int, kv: int) -> Operands:
        """Draw rows; masks may break the rules, once in a while a scale is none."""
        rng, config = self.rng, self.config
        blocks = config.vmac.blocks
        high = self.random.choice([0x60, 0x7E, 0xFF])
        masks = rng.integers(0, 16, (rows if self.random.random() < 0.5 else 1, kv, blocks), dtype=np.uint8)
        return Operands(
            rng.integers(0, 16, (rows, kv, config.lanes), dtype=np.uint8),
            rng.integers(0, high + 1, (rows, kv, blocks), dtype=np.uint8),
            np.broadcast_to(masks & rng.integers(0, 16, dtype=np.uint8), (rows, kv, blocks)).copy(),
            rng.integers(0, 256, (rows, kv, blocks, OFFSET_BYTES), dtype=np.uint8),
        )

    def job(self) -> Job:
        """Draw a product and place it."""
        config, draw = self.config, self.random.randint
        modes = [mode for mode in Mode if mode != Mode.AUTOFP6 or config.refinement != "none"]
        mode, kind = self.random.choice(modes), self.random.choice(list(Format))
        m, n, kv = draw(1, 9), draw(1, 9), draw(1, min(9, config.activation_depth))
        a, w = self.operands(m, kv), self.operands(n, kv)
        tiles = plan(config, mode, m, n, kv * config.lanes)
        scale = self.random.choice([0x3F800000, 0x3A123456, 0xC0490FDB, 0x00000001, 0x7F7FFFFF])
        descriptor, output = self.image.store_product(mode, kind, a, w, tiles, scale)
        self.outputs.append(output)
        return Job(mode, a, w, descriptor, output)

    def send(self, number: int, descriptor: Descriptor | bytes) -> None:
        """Write a descriptor to its place of the ring, and to memory what was placed since the last time."""
        at = self.queue + number % PLACES * PITCH
        self.image.write_descriptor(at, descriptor)
        self.memory.write(BASE + self._sent, self.image.contents[self._sent :].tobytes())
        self.memory.write(at, self.image.read(at, PITCH))
        self._sent = len(self.image)

    def record(self, number: int) -> Any:
        """Return the record of a descriptor that has ended."""
        at = self.queue + number % PLACES * PITCH + RECORD_OFFSET
        self.image.write(at, self.memory.read(at, RECORD_BYTES))
        return self.image.record(self.queue, number % PLACES)

    def compare(self, number: int, job: Job) -> int:
        """Check record and output of a product that has ended; returns how many outputs were compared."""
        record = self.record(number)
        sums, status = gemm.product(self.config, job.mode, job.a, job.w)
        vectors = -(-job.output.n // 2) if job.mode == Mode.AUTOFP2 else job.output.n
        if job.mode == Mode.AUTOFP6 and vectors % (self.config.columns * job.descriptor.tile_n):
            status |= gemm.overcrowded(self.config, job.a)
        assert record is not None
        assert (record.code, record.status, record.number) == (ErrorCode.OK, status, number & 0xFFFF)
        assert record.cycles > 0
        copy = Image(BASE)
        copy.allocate(len(self.image))
        copy.update(self.memory.read(BASE, len(self.image)))
        found = copy.read_output(job.output)
        if job.output.format == Format.FP32:
            scale = float(np.uint32(job.descriptor.out_scale).view(np.float32))
            assert (found.view(np.uint32) == gemm.to_fp32(sums, scale).view(np.uint32)).all()
        else:
            assert (found == sums).all()
        return found.size

    def nothing_else_was_written(self, spare: int = 0) -> None:
        """Compare all memory beside outputs, queue and the last ``spare`` bytes with what was put there."""
        now = np.frombuffer(self.memory.read(0, SPACE), np.uint8)
        expected = np.zeros(SPACE, np.uint8)
        expected[BASE : BASE + self._sent] = self.image.contents[: self._sent]
        changed = now != expected
        for output in self.outputs:
            changed[BASE + self.image.written(output)] = False
        for place in range(PLACES):
            at = self.queue + place * PITCH + RECORD_OFFSET
            changed[at : at + RECORD_BYTES] = False
        changed = changed[: SPACE - spare]
        assert not changed.any(), f"first {int(np.argmax(changed)):#x}"


@cocotb.test(timeout_time=10, timeout_unit="ms")
async def reset_values(dut: Any) -> None:
    """Every register after reset, and what the accelerator says about itself."""
    bench = Bench(dut)
    await bench.start()
    config = bench.config

    def log2(value: int) -> int:
        return value.bit_length() - 1

    vmac = config.vmac
    expected = {register.name: 0 for register in REGISTERS.registers}
    expected["id"] = MAGIC
    expected["array"] = REGISTERS["array"].pack(rows=config.rows, columns=config.columns, lanes=config.lanes)
    expected["memories"] = REGISTERS["memories"].pack(
        accumulators=log2(config.accumulators),
        activation_entries=log2(config.activation_entries),
        activation_depth=log2(config.activation_depth),
        weight_depth=log2(config.weight_depth),
        data_bytes=log2(config.data_width // 8),
    )
    expected["features"] = REGISTERS["features"].pack(
        refinement=int(KINDS[config.refinement]),
        slots=vmac.slots_per_block if config.refinement == "slots" else 4 * (config.refinement == "inplace"),
        exponent_step=int(config.step == "exponent"),
        group_scaling=int(config.scaling == "group"),
        window_shift=config.window_shift,
    )
    cycles = [await bench.read("cycle") for _ in range(2)]
    assert 0 < cycles[0] < cycles[1] < 1000
    found = {name: await bench.read(name) for name in expected if name != "cycle"}
    assert found == {name: value for name, value in expected.items() if name != "cycle"}
    assert pins(dut, ["irq"]) == {"irq": 0}
    assert len(found) == len(REGISTERS.registers) - 1


@cocotb.test(timeout_time=200, timeout_unit="ms")
async def random_products(dut: Any) -> None:
    """Products in all modes through a small ring, whose places are used again as soon as they are free."""
    bench = Bench(dut)
    await bench.start()
    bench.stall()
    await bench.enable(Event.DONE, Event.ERROR)
    jobs: list[Job] = []
    ended = compared = waits = 0
    while ended < bench.rows:
        # At times the queue runs empty, at times it is full.
        while (
            len(jobs) < bench.rows
            and len(jobs) - ended < PLACES
            and (len(jobs) == ended or bench.random.random() < 0.8)
        ):
            jobs.append(bench.job())
            bench.send(len(jobs) - 1, jobs[-1].descriptor)
        await bench.write("submitted", count=len(jobs) & 0xFFFF)
        await bench.interrupted()
        waits += 1
        await bench.write("events", done=1)
        completed = await bench.read("completed")
        assert ended <= completed <= len(jobs)
        while ended < completed:
            compared += bench.compare(ended, jobs[ended])
            ended += 1
        if ended == len(jobs):
            await bench.write("events", done=1, empty=1)
            bench.stall()
        assert not await bench.read("events") & Event.ERROR
    await bench.interrupted(0, 100)
    assert await bench.read("state") == 0
    bench.nothing_else_was_written()
    assert ended == len(jobs) == bench.rows
    assert compared == sum(job.output.m * job.output.n for job in jobs) > 0
    assert waits > 1
    if bench.rows >= 20:
        assert {job.mode for job in jobs} == {
            mode for mode in Mode if mode != Mode.AUTOFP6 or bench.config.refinement != "none"
        }
    dut._log.info("%d products, %d outputs", ended, compared)


@cocotb.test(timeout_time=50, timeout_unit="ms")
async def events_and_interrupts(dut: Any) -> None:
    """Every event with every mask; events stay until they are cleared; enable and restart."""
    bench = Bench(dut)
    await bench.start()
    bench.stall()
    good, bad = bench.job(), dataclasses.replace(bench.job().descriptor, m=0)
    await bench.enable()
    await bench.write("control", enable=0)
    number = 0
    for mask in range(8):
        failing = mask % 2 == 1
        for event in Event:
            if mask & event:
                assert pins(dut, ["irq"]) == {"irq": 0}
        await bench.write("interrupt", done=mask & 1, error=mask >> 1 & 1, empty=mask >> 2)
        bench.send(number, bad if failing else good.descriptor)
        await bench.write("submitted", count=number + 1)
        # Nothing is fetched while the accelerator is not enabled.
        await ClockCycles(dut.clk, 50)
        assert await bench.read("completed") == number
        assert await bench.read("state") == 0
        await bench.write("control", enable=1)
        for _ in range(PATIENCE):
            if await bench.read("completed") == number + 1:
                break
        number += 1
        await ClockCycles(dut.clk, 4)
        raised = (Event.ERROR if failing else Event.DONE) | Event.EMPTY
        assert await bench.read("events") == raised
        assert pins(dut, ["irq"]) == {"irq": int(bool(raised & mask))}
        if failing:
            assert await bench.read("error") == ErrorCode.SIZE_ZERO | (number - 1) << 16
            assert bench.record(number - 1).code == ErrorCode.SIZE_ZERO
        else:
            bench.compare(number - 1, good)
        await bench.write("events", empty=1)
        assert await bench.read("events") == raised & ~Event.EMPTY
        await bench.write("events", done=1, error=1)
        assert await bench.read("events") == 0
        await ClockCycles(dut.clk, 4)
        assert pins(dut, ["irq"]) == {"irq": 0}
        await bench.write("control", enable=0)
    assert number == 8
    # From the first place again, with numbers from 0.
    await bench.write("submitted", count=0)
    await bench.write("control", restart=1)
    assert await bench.read("completed") == 0
    bench.send(0, good.descriptor)
    await bench.write("interrupt", done=1)
    await bench.write("submitted", count=1)
    await bench.write("control", enable=1)
    await bench.interrupted()
    bench.compare(0, good)
    bench.nothing_else_was_written()


@cocotb.test(timeout_time=50, timeout_unit="ms")
async def bad_descriptors(dut: Any) -> None:
    """Each code of a bad descriptor, and a good product behind it, without a reset."""
    bench = Bench(dut)
    await bench.start()
    bench.stall()
    job = bench.job()
    good = dataclasses.replace(job.descriptor, mode=Mode.NVFP4, format=Format.FP32)
    lanes = bench.config.lanes
    changes: dict[ErrorCode, dict[str, Any]] = {
        ErrorCode.RESERVED: {"mode": 1 | 1 << 7},
        ErrorCode.MODE: {"mode": 3},
        ErrorCode.FORMAT: {"format": 2},
        ErrorCode.SCALE: {"out_scale": 0xFF800000},
        ErrorCode.SIZE_ZERO: {"n": 0},
        ErrorCode.SIZE_LIMIT: {"k": lanes * (bench.config.max_kv + 1)},
        ErrorCode.K_MULTIPLE: {"k": lanes + 16},
        ErrorCode.TILE: {"tile_m": bench.config.max_m + 1},
        ErrorCode.ALIGNMENT: {"out": good.out + 8},
        ErrorCode.ADDRESS: {"a": dataclasses.replace(good.a, scales=1 << bench.config.address_width)},
        ErrorCode.READ_BEYOND: {
            "w": dataclasses.replace(good.w, codes=(1 << bench.config.address_width) - 16, codes_stride=16)
        },
        ErrorCode.WRITE_BEYOND: {"out": (1 << bench.config.address_width) - 16, "n": 5},
    }
    await bench.enable(Event.EMPTY)
    submitted = 0
    for code, change in changes.items():
        bad = dataclasses.replace(good, **{"m": 2, "n": 2, **change}).pack()
        if code <= ErrorCode.ADDRESS:
            assert check(bench.config, bad) == code
        bench.send(submitted, bad)
        bench.send(submitted + 1, job.descriptor)
        submitted += 2
        await bench.write("submitted", count=submitted)
        await bench.interrupted()
        assert await bench.read("events") == Event.DONE | Event.ERROR | Event.EMPTY
        assert await bench.read("error") == code | submitted - 2 << 16
        assert (bench.record(submitted - 2).code, bench.record(submitted - 2).number) == (code, submitted - 2)
        bench.compare(submitted - 1, job)
        await bench.write("events", done=1, error=1, empty=1)
        await bench.interrupted(0, 100)
    assert submitted == 2 * len(changes)
    # The memory repeats; what reaches beyond the address space begins at its last 16 bytes, and the part inside may be written.
    bench.nothing_else_was_written(16)


@cocotb.test(timeout_time=50, timeout_unit="ms")
async def bus_errors(dut: Any) -> None:
    """Codes of a read and a write that fail while a product runs; the product behind it is right, without a reset."""
    bench = Bench(dut)
    await bench.start()
    await bench.enable(Event.EMPTY)
    submitted = 0
    for code in (ErrorCode.READ_SLVERR, ErrorCode.WRITE_SLVERR):
        bench.stall()
        failing, good = bench.job(), bench.job()
        # Each product reads the first row's first codes and writes its first output.
        reads = code == ErrorCode.READ_SLVERR
        address = failing.descriptor.w.codes if reads else failing.output.address
        setattr(bench.target, "failing_reads" if reads else "failing_writes", range(address, address + 1))
        bench.send(submitted, failing.descriptor)
        bench.send(submitted + 1, good.descriptor)
        submitted += 2
        before = bench.target.failed
        await bench.write("submitted", count=submitted)
        await bench.interrupted()
        assert bench.target.failed > before
        assert await bench.read("events") == Event.DONE | Event.ERROR | Event.EMPTY
        assert await bench.read("error") == code | submitted - 2 << 16
        assert (bench.record(submitted - 2).code, bench.record(submitted - 2).number) == (code, submitted - 2)
        assert bench.compare(submitted - 1, good) == good.output.m * good.output.n
        await bench.write("events", done=1, error=1, empty=1)
        await bench.interrupted(0, 100)
    assert submitted == 4
    bench.nothing_else_was_written()
