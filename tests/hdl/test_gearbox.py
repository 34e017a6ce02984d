# amaranth: UnusedElaboratable=no
"""Gearbox: packets of every length through every ratio, with stalls; and what drives streams in the tests of the output path."""

import random
from collections import deque

import pytest
from amaranth.hdl import Value
from amaranth.sim import Simulator

from hdl.lib.gearbox import Gearbox
from tests.changed import changed

RATIOS = [(1, 1), (3, 4), (4, 3), (1, 16), (16, 4), (4, 4), (2, 6), (6, 2), (5, 3), (1, 2), (3, 1), (8, 12)]


def drive(dut, given, taken, *, stalls=0.0, seed=0, limit=20_000, quiet=20, every=None, seen=None):
    """Offer raw payloads to streams and take from others, until all are through and nothing has moved for ``quiet`` cycles.

    ``given`` maps names to (port, payloads), ``taken`` to (port, what is to come); what is offered by the component must stay until it is taken.
    What is to come may be None if it is not known, and payloads a deque that grows. ``every`` is called with the context in each cycle, after inputs
    are set, ``seen`` with the name and the payload of what is taken. Returns what came, by name, as (cycle, payload).
    """
    rng = random.Random(seed)
    queues = {name: p if isinstance(p, deque) else deque(p) for name, (_, p) in given.items()}
    found = {name: [] for name in taken}

    async def bench(ctx):
        offered, held, still = dict.fromkeys(given, False), {}, 0
        for cycle in range(limit):
            for name, (port, _) in given.items():
                offered[name] = bool(queues[name]) and (offered[name] or rng.random() >= stalls)
                payload = Value.cast(port.payload)
                ctx.set(port.valid, offered[name])
                ctx.set(payload, queues[name][0] if offered[name] else rng.getrandbits(len(payload)))
            for port, _ in taken.values():
                ctx.set(port.ready, rng.random() >= stalls)
            if every:
                every(ctx)
            moved = False
            for name, (port, _) in taken.items():
                shown = ctx.get(Value.cast(port.payload)) if ctx.get(port.valid) else None
                assert name not in held or held.pop(name) == shown, f"{name} changed while it waited"
                if shown is not None and ctx.get(port.ready):
                    found[name].append((cycle, shown))
                    moved = True
                    if seen:
                        seen(name, shown)
                elif shown is not None:
                    held[name] = shown
            for name, (port, _) in given.items():
                if offered[name] and ctx.get(port.ready):
                    queues[name].popleft()
                    offered[name], moved = False, True
            await ctx.tick()
            still = 0 if moved else still + 1
            if still >= quiet and all(len(found[name]) >= (count or 0) for name, (_, count) in taken.items()):
                break
        assert not any(queues.values()), {name: len(queue) for name, queue in queues.items()}

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    for name, (_, count) in taken.items():
        assert count is None or len(found[name]) == count, f"{name}: {len(found[name])} of {count}"
    return found


def joined(values, width):
    return sum(value << width * k for k, value in enumerate(values))


def beats_of(rng, packets, bits, size):
    """Raw beats of packets; what does not count is random."""
    beats = []
    for packet in packets:
        for at in range(0, len(packet), size):
            part = packet[at : at + size]
            last = at + size >= len(packet)
            count = len(part) if last else rng.getrandbits(size.bit_length())
            part = part + [rng.getrandbits(bits) for _ in range(size - len(part))]
            beats.append(joined(part, bits) | count << bits * size | last << bits * size + size.bit_length())
    return beats


def words_of(packets, bits, size):
    return [
        joined(packet[at : at + size], bits) | (at + size >= len(packet)) << bits * size
        for packet in packets
        for at in range(0, len(packet), size)
    ]


def run(dut, packets, bits, ratio, **options):
    """Send packets; returns whether the words are right, and their cycles."""
    beats = beats_of(random.Random(1), packets, bits, ratio[0])
    words = words_of(packets, bits, ratio[1])
    ports = {"input": (dut.input, beats)}, {"output": (dut.output, len(words))}
    found = drive(dut, *ports, **options)["output"]
    return [word for _, word in found] == words, [cycle for cycle, _ in found]


@pytest.mark.parametrize("stalls", [0.0, 0.4])
@pytest.mark.parametrize("ratio", RATIOS)
def test_packets_of_every_length_come_out_whole(ratio, stalls, seed):
    rng = random.Random(seed)
    bits = 5
    lengths = [*range(1, 2 * max(ratio) + 2), *(rng.randrange(1, 4 * max(ratio)) for _ in range(10))]
    rng.shuffle(lengths)
    packets = [[rng.getrandbits(bits) for _ in range(length)] for length in lengths]
    assert run(Gearbox(bits, *ratio), packets, bits, ratio, stalls=stalls, seed=seed)[0]


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_long_packet_takes_no_more_cycles_than_the_slower_side_has_to_move(ratio):
    packet = [n % 16 for n in range(60 * max(ratio))]
    right, cycles = run(Gearbox(4, *ratio), [packet], 4, ratio)
    assert right
    beats, words = len(packet) // ratio[0], len(packet) // ratio[1]
    assert cycles[-1] + 1 == max(beats + 1, words + 1)


@pytest.mark.parametrize("ratio", RATIOS)
def test_packets_of_one_element_follow_each_other_without_a_gap(ratio):
    right, cycles = run(Gearbox(4, *ratio), [[n % 16] for n in range(40)], 4, ratio)
    assert right
    assert cycles == list(range(1, 41))


@pytest.mark.parametrize("name", ["element_bits", "elements_in", "elements_out"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, not 0$"):
        Gearbox(**{"element_bits": 1, "elements_in": 1, "elements_out": 1, name: 0})


BUGS = {
    "padding is not cleared": ("beat.elements[i] & count.replicate(self._bits)", "beat.elements[i]"),
    "no new word for the next packet": ("Mux(beat.last, rounded, total)", "total"),
    "one place less": ("level <= most", "level < most"),
    "one place more": ("level <= most", "level <= most + 1"),
    "the last word is not marked": ("beat.last & use & ~after", "beat.last & use & ~use"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    broken = changed(Gearbox, BUGS[bug])
    rng = random.Random(7)
    packets = [[rng.getrandbits(5) for _ in range(rng.randrange(1, 30))] for _ in range(20)]
    try:
        right, cycles = run(broken(5, 3, 4), packets, 5, (3, 4), stalls=0.2, seed=7, limit=2000)
    except AssertionError:
        return
    if bug == "one place less":
        # Nothing is wrong but the rate.
        packet = [n % 16 for n in range(240)]
        right, cycles = run(broken(5, 3, 4), [packet], 5, (3, 4), limit=2000)
        right = right and cycles[-1] == 80
    assert not right
