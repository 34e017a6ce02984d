# amaranth: UnusedElaboratable=no
"""UART: bytes at every phase and with clocks that differ, what is no byte, and injected bugs."""

import itertools
import random

import pytest
from amaranth.hdl import Module
from amaranth.sim import Simulator

from hdl.lib.uart import LEAST_DIVISOR, UartReceiver, UartTransmitter
from model.uart_pe import LEAST_DIVISOR as OF_THE_MODEL
from tests.changed import changed


def receive(component, levels):
    """Drive the wire with (level, nanoseconds), at a clock of 1 ns; returns the bytes that come."""
    found = []

    async def wire(ctx):
        for level, duration in levels:
            ctx.set(component.rx, level)
            await ctx.delay(duration * 1e-9)

    async def bytes_of(ctx):
        async for _, _, valid, byte in ctx.tick().sample(component.byte.valid, component.byte.payload):
            if valid:
                found.append(byte)

    simulator = Simulator(component)
    simulator.add_clock(1e-9)
    simulator.add_testbench(wire)
    simulator.add_testbench(bytes_of, background=True)
    simulator.run()
    return found


def levels_of(octets, bit, idle=0.0):
    for byte in octets:
        yield from ((level, bit) for level in (0, *(byte >> n & 1 for n in range(8)), 1))
        if idle:
            yield 1, idle


@pytest.mark.parametrize(("divisor", "error"), [(LEAST_DIVISOR, 0.0), (7, 0.02), (7, -0.02), (25, 0.04), (25, -0.04)])
def test_bytes_at_every_phase(divisor, error, seed):
    rng = random.Random(seed)
    octets = [0x00, 0xFF, 0x55, 0xAA, *rng.randbytes(40)]
    levels = [(1, 10.3)]
    for byte in octets:
        levels += levels_of([byte], divisor * (1 + error), rng.choice([0.0, 0.1, rng.random() * divisor]))
    assert receive(UartReceiver(divisor), [*levels, (1, 20)]) == octets


def noise(divisor):
    """A glitch, a byte without a stop bit, a line that is held low, each before a byte that is one."""
    yield 1, 5
    for low in (divisor / 3, 10 * divisor, 33 * divisor):
        yield 0, low
        yield 1, 12 * divisor
        yield from levels_of([0x5A], divisor)
        yield 1, divisor


def test_what_is_no_byte_is_left_out():
    assert receive(UartReceiver(8), noise(8)) == [0x5A] * 3


BUGS = {
    "no start bit is asked for": ("(left == BITS + 2) & line", "(left == BITS + 2) & 0"),
    "no stop bit is asked for": ("self.byte.valid.eq(line)", "self.byte.valid.eq(1)"),
    "a bit is sampled at its end": ("self._divisor // 2 - 1", "self._divisor - 1"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    broken = changed(UartReceiver, BUGS[bug])(8)
    late = levels_of([0x5A, 0x11, 0xE7] * 4, 8 * 0.96)
    assert receive(broken, [*noise(8), *late, (1, 20)]) != [0x5A] * 3 + [0x5A, 0x11, 0xE7] * 4


@pytest.mark.parametrize("divisor", [LEAST_DIVISOR, 5, 25])
def test_sent_bytes_come_back_and_follow_each_other_without_a_gap(divisor, seed):
    octets = [0x00, 0xFF, 0x55, *random.Random(seed).randbytes(20)]
    m = Module()
    m.submodules.sender = sender = UartTransmitter(divisor)
    m.submodules.receiver = receiver = UartReceiver(divisor)
    m.d.comb += receiver.rx.eq(sender.tx)
    found = []

    async def bench(ctx):
        queue = list(octets)
        for cycle in range((len(octets) + 2) * 10 * divisor):
            ctx.set(sender.byte.valid, bool(queue))
            ctx.set(sender.byte.payload, queue[0] if queue else 0)
            if queue and ctx.get(sender.byte.ready):
                queue.pop(0)
            if ctx.get(receiver.byte.valid):
                found.append((cycle, ctx.get(receiver.byte.payload)))
            await ctx.tick()

    simulator = Simulator(m)
    simulator.add_clock(1e-9)
    simulator.add_testbench(bench)
    simulator.run()
    assert [byte for _, byte in found] == octets
    cycles = [cycle for cycle, _ in found]
    assert {after - before for before, after in itertools.pairwise(cycles)} == {10 * divisor}


def test_divisors_below_four_are_refused():
    assert LEAST_DIVISOR == OF_THE_MODEL
    for component in (UartReceiver, UartTransmitter):
        with pytest.raises(ValueError, match=r"^divisor must be at least 4, not 3$"):
            component(3)
