"""Recorder of the accelerator: what it writes, when it counts. The whole is tested in tests/sim/test_accelerator.py."""

from pathlib import Path

import numpy as np
import pytest
from amaranth.hdl import Elaboratable, Module, Signal
from amaranth.sim import Simulator

import hdl.accelerator
from hdl.accelerator import Recorder
from model.accelerator import RECORD_OFFSET, AcceleratorConfig, ErrorCode, Record
from model.dma import DmaStatus

ENDS = [
    # Address, code, status bits, cycles, how the write ends.
    (0x1000, 0, 0b0101, 12345, DmaStatus.OK),
    (0x2100, ErrorCode.READ_DECERR, 0, 1, DmaStatus.OK),
    (0x3200, 0, 0, 7, DmaStatus.SLVERR),
    (0x3300, ErrorCode.MODE, 0b1111, 2**32 - 1, DmaStatus.DECERR),
    (0x3400, ErrorCode.DESCRIPTOR_SLVERR, 0, 9, None),
    (0x3500, ErrorCode.DESCRIPTOR_BEYOND, 0, 9, None),
    (0x3600, 0, 0, 8, DmaStatus.OK),
]


def simulate(config, rng, ends=ENDS, stall=0.4):
    """Give ends one after the other; returns requests, words, counts and codes of the pulses."""
    dut = Recorder(config)
    requests, words, pulses = [], [], []

    async def give(ctx):
        for address, code, status, cycles, _ in ends:
            while rng.random() < stall:
                await ctx.tick()
            payload = dut.end.payload
            for name, value in (("descriptor", address), ("code", code), ("status", status), ("cycles", cycles)):
                ctx.set(payload[name], int(value))
            ctx.set(dut.end.valid, 1)
            for _ in range(200):
                *_, ready = await ctx.tick().sample(dut.end.ready)
                if ready:
                    break
            ctx.set(dut.end.valid, 0)

    async def take(ctx):
        per_record = max(128 // config.data_width, 1)
        statuses = [status for *_, status in ends if status is not None]
        for _ in range(2000):
            ready = rng.random() >= stall
            ctx.set(dut.request.ready, ready)
            ctx.set(dut.word.ready, ready)
            done = (
                len(words) == per_record * len(requests)
                and len(statuses) > len(answered)
                and len(answered) < len(requests)
            )
            ctx.set(dut.done.valid, done)
            ctx.set(dut.done.payload, int(statuses[len(answered)]) if done else 0)
            sampled = await ctx.tick().sample(
                dut.request.valid & dut.request.ready,
                dut.request.payload.address,
                dut.request.payload.bytes,
                dut.word.valid & dut.word.ready,
                dut.word.payload,
                dut.done.valid & dut.done.ready,
                dut.ended,
                dut.failed,
                dut.code,
                dut.completed,
            )
            asks, address, octets, moves, word, ends_write, ended, failed, code, completed = sampled[2:]
            if asks:
                requests.append((address, octets))
            if moves:
                words.append(word)
            if ends_write:
                answered.append(1)
            if ended or failed:
                assert ended != failed
                pulses.append((bool(failed), code if failed else 0, completed))
            if len(pulses) == len(ends):
                break

    answered: list[int] = []
    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(give)
    simulator.add_testbench(take)
    simulator.run()
    return requests, words, pulses


def expected():
    requests, records, pulses = [], [], []
    for number, (address, code, status, cycles, write) in enumerate(ENDS):
        if write is None:
            pulses.append((True, int(code), number))
            continue
        requests.append((address + RECORD_OFFSET, 16))
        records.append(Record(ErrorCode(code), status, number, cycles))
        final = code or (ErrorCode.RECORD_BEYOND - 1 + write if write else 0)
        pulses.append((bool(final), int(final), number))
    return requests, records, pulses


@pytest.mark.parametrize("data_width", [64, 128, 512])
def test_records_are_written_and_counted_in_order(data_width, seed):
    config = AcceleratorConfig(data_width=data_width)
    requests, words, pulses = simulate(config, np.random.default_rng(seed))
    octets = b"".join(word.to_bytes(data_width // 8, "little") for word in words)
    size = max(16, data_width // 8)
    found = [Record.unpack(octets[i : i + 16]) for i in range(0, len(octets), size)]
    assert (requests, found, pulses) == expected()


BUGS = {
    "the write's error is forgotten": (
        "with m.If(self.done.payload.any() & ~end.code.any()):",
        "with m.If(Const(0, 1)):",
    ),
    "an unreadable descriptor gets a record": (
        "with m.If((code >= _FIRST_UNRECORDED)",
        "with m.If(Const(0, 1) & (code >= _FIRST_UNRECORDED)",
    ),
    "the number is not counted": ("self.completed.eq(self.completed + 1)", "self.completed.eq(self.completed)"),
    "the record has no place of its own": ("end.descriptor + RECORD_OFFSET", "end.descriptor"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug, monkeypatch):
    before, after = BUGS[bug]
    text = Path(hdl.accelerator.__file__).read_text(encoding="utf-8")
    assert text.count(before) == 1
    names = dict(vars(hdl.accelerator))
    exec(compile(text.replace(before, after), "wrong", "exec"), names)
    monkeypatch.setattr("tests.hdl.test_accelerator.Recorder", names["Recorder"])
    requests, words, pulses = simulate(AcceleratorConfig(), np.random.default_rng(1))
    found = [Record.unpack(word.to_bytes(16, "little")) for word in words]
    assert (requests, found, pulses) != expected()


@pytest.mark.parametrize(("width", "expected"), [(20, 2**20 - 1), (31, 2**31 - 1), (32, 0x80000010), (40, 0x80000010)])
def test_a_stride_that_leaves_the_address_space_still_does_so_when_it_is_cut(width, expected):
    assert stride_of(width) == expected


def stride_of(width):
    """Evaluate the cut stride of 2**31 + 16."""
    found = []

    class Cut(Elaboratable):
        def elaborate(self, platform):
            m = Module()
            self.stride, self.cut = Signal(32, init=0x80000010), Signal(64)
            m.d.comb += self.cut.eq(hdl.accelerator._saturated(self.stride, width))
            return m

    async def look(ctx):
        found.append(ctx.get(dut.cut))

    dut = Cut()
    simulator = Simulator(dut)
    simulator.add_testbench(look)
    simulator.run()
    return found[0]
