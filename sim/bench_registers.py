"""cocotb bench of a register bank: cocotbext-axi's manager against the table, for any register map (settings: ``table``, its JSON)."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import cocotb
from cocotb.triggers import Combine, FallingEdge, RisingEdge
from cocotbext.axi import AxiLiteBus, AxiLiteMaster, AxiResp

from model.registers import REGISTER_BYTES, Field, Register, from_json
from sim.bench_common import bench_settings, cover, coverage_goals_met, pins, start_clock

NONE = "none"
BURST = 12


class Setup:
    """Manager, monitor of pulses, and what every register must hold."""

    def __init__(self, dut: Any) -> None:
        settings = bench_settings()
        self.dut = dut
        self.table = from_json(settings["parameters"]["table"])
        self.rows: int = settings["rows"]
        self.random = random.Random(cocotb.RANDOM_SEED)
        self.parts: list[tuple[str, Register, Field]] = [
            (f"{register.name}_{field.name}", register, field)
            for register in self.table.registers
            for field in register.fields
        ]
        self.values = {name: field.reset for name, _, field in self.parts}
        self.pulses = dict.fromkeys((name for name, _, field in self.parts if field.access == "w1p"), 0)
        self.seen = dict(self.pulses)
        self.manager: AxiLiteMaster

    async def start(self) -> None:
        """Reset, and connect the manager."""
        start_clock(self.dut)
        for name, _, field in self.parts:
            if field.access in ("ro", "w1c"):
                port = name if field.access == "ro" else f"{name}_set"
                getattr(self.dut, port).value = 0
        self.dut.rst.value = 1
        self.manager = AxiLiteMaster(AxiLiteBus.from_prefix(self.dut, "s_axi"), self.dut.clk, self.dut.rst)
        for _ in range(4):
            await RisingEdge(self.dut.clk)
        self.dut.rst.value = 0
        await RisingEdge(self.dut.clk)
        cocotb.start_soon(self._count())

    async def _count(self) -> None:
        """Add up the ones of every pulse."""
        while self.seen:
            await FallingEdge(self.dut.clk)
            for name, value in pins(self.dut, list(self.seen)).items():
                self.seen[name] += value.bit_count()

    def stall(self, chance: float) -> None:
        """Pause each of the manager's channels at random."""

        def pauses() -> Iterator[bool]:
            while True:
                yield self.random.random() < chance

        write, read = self.manager.write_if, self.manager.read_if
        for channel in (write.aw_channel, write.w_channel, write.b_channel, read.ar_channel, read.r_channel):
            channel.set_pause_generator(pauses())

    async def raise_hardware(self) -> None:
        """Give read-only fields new values and set bits for one cycle, while the bus is idle."""
        await RisingEdge(self.dut.clk)
        for name, _, field in self.parts:
            if field.access == "ro":
                self.values[name] = self.random.getrandbits(field.width)
                getattr(self.dut, name).value = self.values[name]
            elif field.access == "w1c":
                bits = self.random.getrandbits(field.width)
                self.values[name] |= bits
                getattr(self.dut, f"{name}_set").value = bits
        await RisingEdge(self.dut.clk)
        for name, _, field in self.parts:
            if field.access == "w1c":
                getattr(self.dut, f"{name}_set").value = 0
        await RisingEdge(self.dut.clk)

    def register_at(self, address: int) -> Register | None:
        """Return the register of a byte address, if there is one."""
        word = address - address % REGISTER_BYTES
        return next((register for register in self.table.registers if register.offset == word), None)

    def expected(self, register: Register | None) -> int:
        """Return the word that a read must give."""
        if register is None:
            return 0
        fields = {f.name: self.values[f"{register.name}_{f.name}"] for f in register.fields if f.access != "w1p"}
        return register.pack(**fields)

    def note_write(self, address: int, octets: bytes) -> AxiResp:
        """Do in the model what a write does, and return its response."""
        register = self.register_at(address)
        if register is None or not register.writable:
            return AxiResp.SLVERR
        shift = 8 * (address % REGISTER_BYTES)
        data, bits = int.from_bytes(octets, "little") << shift, ((1 << 8 * len(octets)) - 1) << shift
        for field in register.fields:
            name = f"{register.name}_{field.name}"
            mask = (bits & field.mask) >> field.position
            ones = (data >> field.position) & mask
            if field.access == "rw":
                self.values[name] = (self.values[name] & ~mask) | ones
            elif field.access == "w1c":
                self.values[name] &= ~ones
            elif field.access == "w1p":
                self.pulses[name] += ones.bit_count()
        return AxiResp.OKAY

    def draw_address(self) -> int:
        """Draw the offset of a register, or once in a while of none."""
        if self.random.random() < 0.1:
            return self.random.randrange(0, 1 << self.table.address_width, REGISTER_BYTES)
        return self.random.choice(self.table.registers).offset

    def name_at(self, address: int) -> str:
        """Return the name of the register of an address, for coverage."""
        register = self.register_at(address)
        return NONE if register is None else register.name


@cocotb.test(timeout_time=100, timeout_unit="us")
async def reset_values_and_errors(dut: Any) -> None:
    """Every word of the address range after reset, read and written with nothing."""
    setup = Setup(dut)
    await setup.start()
    compared = 0
    for address in range(0, min(1 << setup.table.address_width, 4096), REGISTER_BYTES):
        register = setup.register_at(address)
        answer = await setup.manager.read(address, REGISTER_BYTES)
        assert answer.resp == (AxiResp.SLVERR if register is None else AxiResp.OKAY), f"{address:#x}: {answer}"
        assert int.from_bytes(answer.data, "little") == setup.expected(register), f"{address:#x}: {answer}"
        written = await setup.manager.write(address, bytes(1))
        writable = register is not None and register.writable
        assert written.resp == (AxiResp.OKAY if writable else AxiResp.SLVERR), f"{address:#x}: {written}"
        if writable:
            setup.note_write(address, bytes(1))
        compared += register is not None
    assert compared == len(setup.table.registers)


@cocotb.test(timeout_time=20, timeout_unit="ms")
async def random_accesses(dut: Any) -> None:
    """Bursts of writes, then of reads, both queued at once, with stalls of every channel and every set of adjacent bytes."""
    setup = Setup(dut)
    await setup.start()
    names = [register.name for register in setup.table.registers]
    lanes = [(low, high) for low in range(REGISTER_BYTES) for high in range(low + 1, REGISTER_BYTES + 1)]
    sample = cover(
        "registers",
        {"operation": ["read", "write"], "register": [*names, NONE], "bytes": lanes},
        [("operation", "register"), ("operation", "bytes")],
    )
    compared = 0
    for burst in itertools.count():
        if compared >= setup.rows:
            break
        setup.stall(setup.random.choice((0.0, 0.3, 0.8)))
        await setup.raise_hardware()
        writes, due = [], []
        for _ in range(BURST):
            address, (low, high) = setup.draw_address(), setup.random.choice(lanes)
            octets = setup.random.randbytes(high - low)
            writes.append(cocotb.start_soon(setup.manager.write(address + low, octets)))
            due.append(setup.note_write(address + low, octets))
            sample(operation="write", register=setup.name_at(address), bytes=(low, high))
        await Combine(*writes)
        assert [task.result().resp for task in writes] == due, f"burst {burst}"
        reads, words = [], []
        for _ in range(BURST):
            address, (low, high) = setup.draw_address(), setup.random.choice(lanes)
            register = setup.register_at(address)
            reads.append(cocotb.start_soon(setup.manager.read(address + low, high - low)))
            word = setup.expected(register).to_bytes(REGISTER_BYTES, "little")[low:high]
            words.append((word, AxiResp.SLVERR if register is None else AxiResp.OKAY))
            sample(operation="read", register=setup.name_at(address), bytes=(low, high))
        await Combine(*reads)
        assert [(task.result().data, task.result().resp) for task in reads] == words, f"burst {burst}"
        outputs = {name: setup.values[name] for name, _, field in setup.parts if field.access in ("rw", "w1c")}
        assert pins(dut, list(outputs)) == outputs, f"burst {burst}"
        assert setup.seen == setup.pulses, f"burst {burst}"
        compared += 2 * BURST
    assert compared >= setup.rows > 0
    assert all(setup.pulses.values())
    coverage_goals_met("registers", cocotb.log.info)
