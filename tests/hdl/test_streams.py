"""Parts for streams, and instances of one module."""

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator

from hdl.lib.shared import Shared, Unit, VerilogPlatform
from hdl.lib.streams import StreamBuffer, multicast
from hdl.lib.verilog import to_verilog


def transfers(dut, offered, taken):
    """Offer numbers in cycles in which ``offered`` says so and junk in others, take in those of ``taken``; returns (cycle, number) of what came out."""
    out = []

    async def bench(ctx):
        number = 1
        for cycle, (offer, take) in enumerate(zip(offered, taken, strict=True)):
            ctx.set(dut.input.valid, offer)
            ctx.set(dut.input.payload, number if offer else 255 - cycle)
            ctx.set(dut.output.ready, take)
            *_, ready, valid, payload = await ctx.tick().sample(dut.input.ready, dut.output.valid, dut.output.payload)
            number += offer and ready
            if valid and take:
                out.append((cycle, payload))

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return out


def test_a_buffer_passes_one_word_per_cycle_with_a_latency_of_one():
    assert transfers(StreamBuffer(8), [1] * 20, [1] * 20) == [(n, n) for n in range(1, 20)]


def test_a_buffer_keeps_two_words_and_loses_none_when_it_is_not_emptied():
    out = transfers(StreamBuffer(8), [1] * 12, [0] * 5 + [1] * 7)
    assert [number for _, number in out] == list(range(1, 8))
    assert [cycle for cycle, _ in out] == list(range(5, 12))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("pattern", range(1, 64))
def test_a_buffer_is_a_queue_of_two_for_every_pattern_of_offers(pattern, late):
    offered = [pattern >> n % 6 & 1 for n in range(60)]
    for takes in (0b1, 0b011, 0b101, 0b0111):
        taken = [takes >> n % 4 & 1 for n in range(60)]
        queue, expected, number = [], [], 1
        for cycle, (offer, take) in enumerate(zip(offered, taken, strict=True)):
            ready = len(queue) < 2
            if queue and take:
                expected.append((cycle, queue.pop(0)))
            if offer and ready:
                queue.append(number)
                number += 1
        assert len(expected) >= 5
        assert transfers(StreamBuffer(8, late_valid=late), offered, taken) == expected


class Fork(wiring.Component):
    """Two buffers behind one stream."""

    source: In(stream.Signature(8))
    left: Out(stream.Signature(8))
    right: Out(stream.Signature(8))

    def elaborate(self, platform):
        m = Module()
        buffers = [StreamBuffer(8), StreamBuffer(8)]
        for name, buffer, port in zip(("left", "right"), buffers, (self.left, self.right), strict=True):
            m.submodules[name] = buffer
            wiring.connect(m, buffer.output, wiring.flipped(port))
        multicast(m, self.source, [buffer.input for buffer in buffers])
        return m


def test_all_targets_of_a_multicast_get_every_word_once():
    dut = Fork()
    got = {"left": [], "right": []}

    async def bench(ctx):
        number = 0
        for cycle in range(40):
            ctx.set(dut.source.valid, 1)
            ctx.set(dut.source.payload, number)
            ctx.set(dut.left.ready, cycle % 3 == 0)
            ctx.set(dut.right.ready, cycle % 4 > 0)
            *_, ready, left, right, a, b = await ctx.tick().sample(
                dut.source.ready, dut.left.valid, dut.right.valid, dut.left.payload, dut.right.payload
            )
            number += ready
            if left and cycle % 3 == 0:
                got["left"].append(a)
            if right and cycle % 4:
                got["right"].append(b)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert got["left"] == list(range(len(got["left"])))
    assert got["right"] == list(range(len(got["right"])))
    assert len(got["left"]) >= 12


class Pair(wiring.Component):
    """Two instances in a row."""

    input: In(stream.Signature(8))
    output: Out(stream.Signature(8))

    def elaborate(self, platform):
        m = Module()
        unit = Unit(lambda: StreamBuffer(8), "stage")
        m.submodules.first = first = Shared(unit)
        m.submodules.second = second = Shared(unit)
        wiring.connect(m, wiring.flipped(self.input), first.input)
        wiring.connect(m, first.output, second.input)
        wiring.connect(m, second.output, wiring.flipped(self.output))
        return m


def test_shared_components_simulate_as_themselves_and_are_one_module_in_verilog():
    assert transfers(Pair(), [1] * 12, [1] * 12) == [(n + 1, n) for n in range(1, 11)]
    text = to_verilog(Pair(), "pair")
    assert text.count("module stage(") == 1
    assert text.count("  stage ") == 2


def test_two_units_of_one_name_are_refused():
    platform = VerilogPlatform()
    unit = Unit(lambda: StreamBuffer(8), "stage")
    platform.add(unit)
    platform.add(unit)
    other = Unit(lambda: StreamBuffer(9), "stage")
    with pytest.raises(ValueError, match=r"^name must belong to one unit, not to two: 'stage'$"):
        platform.add(other)
    for each in (unit, other):
        to_verilog(each.keep(), "used")
