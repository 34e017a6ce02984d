"""DMA engines in Amaranth's simulator, with a memory that stalls, delays and fails as it likes, against the model byte by byte."""

import itertools
import random
from collections import deque

import pytest
from amaranth.hdl import Module, Value
from amaranth.sim import Simulator

from hdl.dma import ReadDma, WriteDma
from model.dma import MAX_BYTES, DmaConfig, DmaStatus, bursts, refused, words, write_beats

LIMIT = 60_000
SLVERR, DECERR = DmaStatus.SLVERR, DmaStatus.DECERR

CONFIGS = {
    "default": DmaConfig(),
    "narrow": DmaConfig(data_width=32, address_width=16, max_burst=8, outstanding=2),
    "single": DmaConfig(data_width=64, address_width=15, max_burst=1, outstanding=1),
    "long": DmaConfig(data_width=256, max_burst=256, outstanding=3, id_width=4),
    "wide": DmaConfig(data_width=512, address_width=64, max_burst=8, outstanding=8),
}


def byte(address):
    return (address * 2654435761 >> 7 ^ address) & 0xFF


def content(address, size):
    return bytes(map(byte, range(address, address + size)))


class Memory:
    """An AXI subordinate whose bytes are computed; it asserts the rules that a manager must keep.

    ``fails`` maps the address of a beat (reads) or of a burst (writes) to a response, ``latency`` is in cycles, from an address or the last
    data to the response.
    """

    def __init__(self, config, latency=0, fails=()):
        self.config, self.latency, self.fails = config, latency, dict(fails)
        self.bursts, self.written = [], {}
        self.addresses, self.writing, self.answers = deque(), deque(), deque()
        self.cycle = self.answered = self.most = 0

    def take_address(self, values, write):
        address, beats = values["addr"], values["len"] + 1
        rest = tuple(values[name] for name in ("id", "size", "burst", "lock", "cache", "prot", "qos"))
        assert rest == (0, (self.config.beat_bytes - 1).bit_length(), 1, 0, 3, 0, 0)
        assert address % self.config.beat_bytes == 0
        assert beats <= self.config.max_burst
        assert address // 4096 == (address + beats * self.config.beat_bytes - 1) // 4096
        self.bursts.append((address, beats))
        self.most = max(self.most, len(self.bursts) - self.answered)
        if write:
            self.addresses.append((address, beats))
            self.complete()
            return
        for n in range(beats):
            at = address + n * self.config.beat_bytes
            data = int.from_bytes(content(at, self.config.beat_bytes), "little")
            self.answers.append((self.cycle + self.latency, (data, self.fails.get(at, 0), int(n == beats - 1))))

    def take_data(self, values):
        self.writing.append(values)
        self.complete()

    def complete(self):
        """Answer a write when its address and its last data are there, in whatever order they came."""
        while self.addresses and any(values["last"] for values in self.writing):
            address, beats = self.addresses.popleft()
            for n in range(beats):
                values = self.writing.popleft()
                assert values["last"] == (n == beats - 1)
                for i in range(self.config.beat_bytes):
                    at, value = address + n * self.config.beat_bytes + i, values["data"] >> 8 * i & 0xFF
                    if values["strb"] >> i & 1:
                        assert at not in self.written
                        self.written[at] = value
                    else:
                        assert value == 0
            self.answers.append((self.cycle + self.latency, (self.fails.get(address, 0), 1)))


class Run:
    """One simulation: sends requests and words, serves the bus, collects words and ends; checks that every offer stays until it is taken.

    ``stalls`` gives by channel the share of cycles that its side of the test lets pass; ``probe`` turns inputs in the middle of cycles to show
    that no output depends on them.
    """

    def __init__(self, config, requests, *, data=(), write=False, seed=0, stalls=0.0, probe=False, **memory):
        self.config, self.write, self.rng, self.probe = config, write, random.Random(seed), probe
        self.stalls = (
            stalls
            if isinstance(stalls, dict)
            else dict.fromkeys(["request", "word", "done", "a", "w", "r", "b"], stalls)
        )
        self.memory = Memory(config, **memory)
        self.count = len(requests)
        self.queues = {"request": deque((a | size << config.address_width,) for a, size in requests)}
        self.queues |= {"word": deque((word,) for one in data for word in words(config, one))} if write else {}
        self.words, self.ends, self.cycles = [], [], []
        self.dut = WriteDma(config) if write else ReadDma(config)
        # Channels as (payload, valid, ready).
        a, answer = ("aw", "b") if write else ("ar", "r")
        self.inputs = {name: self.stream(name) for name in self.queues} | {
            "answer": self.channel(answer, ("resp",) if write else ("data", "resp", "last"))
        }
        self.names = ("id", "addr", "len", "size", "burst", "lock", "cache", "prot", "qos")
        self.outputs = {"a": self.channel(a, self.names), "done": self.stream("done")}
        self.outputs |= {"w": self.channel("w", ("data", "strb", "last"))} if write else {"word": self.stream("word")}
        top = Module()
        top.submodules.dut = self.dut
        simulator = Simulator(top)
        simulator.add_clock(1e-8)
        simulator.add_testbench(self.bench)
        simulator.run()

    def stream(self, name):
        port = getattr(self.dut, name)
        return [Value.cast(port.payload)], port.valid, port.ready

    def channel(self, name, fields):
        at = lambda field: getattr(self.dut, f"m_axi_{name}{field}")  # noqa: E731
        return [at(field) for field in fields], at("valid"), at("ready")

    def passes(self, name):
        name = ("b" if self.write else "r") if name == "answer" else name
        return self.rng.random() < self.stalls[name]

    def next_offer(self, name):
        if name != "answer":
            return self.queues[name][0] if self.queues[name] else None
        answers = self.memory.answers
        return answers[0][1] if answers and answers[0][0] < self.memory.cycle else None

    def taken(self, name, values):
        if name == "a":
            self.memory.take_address(dict(zip(self.names, values, strict=True)), self.write)
        elif name == "w":
            self.memory.take_data(dict(zip(("data", "strb", "last"), values, strict=True)))
            self.cycles.append(self.memory.cycle)
        elif name == "word":
            self.words.append(values[0])
            self.cycles.append(self.memory.cycle)
        else:
            self.ends.append(values[0])

    async def bench(self, ctx):
        offers, held, idle = dict.fromkeys(self.inputs), {}, 0
        for self.memory.cycle in range(LIMIT):
            for name, (payload, valid, _) in self.inputs.items():
                if offers[name] is None and not self.passes(name):
                    offers[name] = self.next_offer(name)
                ctx.set(valid, offers[name] is not None)
                for n, signal in enumerate(payload):
                    ctx.set(signal, self.rng.getrandbits(len(signal)) if offers[name] is None else offers[name][n])
            for name, (_, _, ready) in self.outputs.items():
                ctx.set(ready, not self.passes(name))
            if self.probe:
                self.turn_inputs(ctx)
            seen = {
                name: [ctx.get(signal) for signal in payload] if ctx.get(valid) else None
                for name, (payload, valid, _) in self.outputs.items()
            }
            for name, values in held.items():
                assert seen[name] == values, f"{name} changed while it waited"
            held = {}
            for name, values in seen.items():
                if values is not None and ctx.get(self.outputs[name][2]):
                    self.taken(name, values)
                elif values is not None:
                    held[name] = values
            for name, (_, _, ready) in self.inputs.items():
                if offers[name] is not None and ctx.get(ready):
                    offers[name] = None
                    if name != "answer":
                        self.queues[name].popleft()
                    else:
                        self.memory.answered += self.memory.answers.popleft()[1][-1]
            await ctx.tick()
            # Nothing may come after the end.
            idle = idle + 1 if len(self.ends) == self.count else 0
            if idle > 30 + self.memory.latency:
                break
        assert len(self.ends) == self.count, f"{len(self.ends)} of {self.count} requests ended in {LIMIT} cycles"
        assert not any(self.queues.values())
        assert not self.memory.answers
        assert self.memory.answered == len(self.memory.bursts)
        assert self.memory.most <= self.config.outstanding

    def turn_inputs(self, ctx):
        signals = [s for payload, valid, _ in self.inputs.values() for s in (*payload, valid)]
        signals += [ready for _, _, ready in self.outputs.values()]
        results = [s for payload, valid, _ in self.outputs.values() for s in (*payload, valid)]
        results += [ready for _, _, ready in self.inputs.values()]
        right, before = [ctx.get(s) for s in signals], [ctx.get(s) for s in results]
        for signal, value in zip(signals, right, strict=True):
            ctx.set(signal, ~value)
            assert [ctx.get(s) for s in results] == before
            ctx.set(signal, value)


def draw_requests(config, rng, count, longest):
    """Requests of all kinds that fit into the memory side by side, so that no byte is written twice."""
    chosen, at = [], rng.randrange(config.beat_bytes)
    for _ in range(count):
        size = rng.choice([1, rng.randrange(1, 2 * config.beat_bytes), rng.randrange(1, longest)])
        if rng.random() < 0.15:
            page = (at + 4095) & ~4095
            at = page - rng.randrange(min(size, page - at + 1))
        if rng.random() < 0.3:
            at = -(-at // config.beat_bytes) * config.beat_bytes
        if refused(config, at, size):
            break
        chosen.append((at, size))
        at += size + rng.choice([0, 1, rng.randrange(100)])
    return chosen


def read_words(config, requests, fails=()):
    """Words and ends that reads must give."""
    expected, ends = [], []
    for address, size in requests:
        if refused(config, address, size):
            ends.append(DmaStatus.REFUSED)
            continue
        beats = [a + config.beat_bytes * n for a, count in bursts(config, address, size) for n in range(count)]
        failed = next((at for at in beats if dict(fails).get(at, 0) > 1), None)
        found = words(config, content(address, size))
        if failed is not None:
            good = max(failed - address, 0) // config.beat_bytes
            found[good:] = [0] * (len(found) - good)
        expected += [*found[:-1], found[-1] | 1 << config.data_width]
        ends.append(DmaStatus.OK if failed is None else dict(fails)[failed])
    return expected, ends


def all_bursts(config, requests):
    return [tuple(burst) for request in requests for burst in bursts(config, *request)]


READ_STALLS = {
    "free": dict.fromkeys(["a", "r", "word", "request", "done"], 0.0),
    "all": dict.fromkeys(["a", "r", "word", "request", "done"], 0.5),
    "slow memory": {"r": 0.8, "a": 0.2, "word": 0.1, "request": 0.0, "done": 0.0},
    "slow reader": {"r": 0.0, "a": 0.9, "word": 0.7, "request": 0.3, "done": 0.8},
}
WRITE_STALLS = {
    "free": dict.fromkeys(["a", "w", "b", "word", "request", "done"], 0.0),
    "all": dict.fromkeys(["a", "w", "b", "word", "request", "done"], 0.5),
    "slow memory": {"w": 0.8, "a": 0.0, "b": 0.2, "word": 0.1, "request": 0.0, "done": 0.0},
    "slow writer": {"w": 0.0, "a": 0.9, "b": 0.5, "word": 0.5, "request": 0.3, "done": 0.8},
}


@pytest.mark.parametrize("stalls", READ_STALLS)
@pytest.mark.parametrize("name", CONFIGS)
def test_reads_give_the_bytes_of_every_request_in_order(name, stalls, seed):
    config, rng = CONFIGS[name], random.Random(seed)
    requests = draw_requests(config, rng, 16, 20 * config.beat_bytes)
    run = Run(config, requests, stalls=READ_STALLS[stalls], seed=seed, latency=rng.choice([0, 3, 20]))
    assert (run.words, run.ends) == read_words(config, requests)
    assert run.memory.bursts == all_bursts(config, requests)
    assert len(requests) > 5


@pytest.mark.parametrize("stalls", WRITE_STALLS)
@pytest.mark.parametrize("name", CONFIGS)
def test_writes_put_every_byte_in_its_place_and_no_other(name, stalls, seed):
    config, rng = CONFIGS[name], random.Random(seed)
    requests = draw_requests(config, rng, 16, 20 * config.beat_bytes)
    data = [rng.randbytes(size) for _, size in requests]
    latency = rng.choice([0, 3, 20])
    run = Run(config, requests, data=data, write=True, stalls=WRITE_STALLS[stalls], seed=seed, latency=latency)
    assert run.memory.written == {a + i: x for (a, _), d in zip(requests, data, strict=True) for i, x in enumerate(d)}
    assert run.ends == [DmaStatus.OK] * len(requests)
    assert run.memory.bursts == all_bursts(config, requests)
    beats = [beat for (a, _), d in zip(requests, data, strict=True) for beat in write_beats(config, a, d)]
    assert len(run.cycles) == len(beats)
    assert len(requests) > 5


def mixed_requests(config, rng, write):
    """Good requests, requests that fail somewhere, and refused ones; with what fails."""
    space = 1 << config.address_width
    requests, fails, codes = [], {}, itertools.cycle([SLVERR, DECERR, 1])
    for address, size in draw_requests(config, rng, 14, 50 * config.beat_bytes):
        requests.append((address, size))
        found = bursts(config, address, size)
        places = [b.address if write else b.address + rng.randrange(b.beats) * config.beat_bytes for b in found]
        # Neighbours share a beat, so only inner beats may fail.
        if len(found) > 2 and rng.random() < 0.8:
            fails[places[rng.randrange(1, len(found) - 1)]] = next(codes)
        if rng.random() < 0.3:
            requests.append(
                rng.choice([(address, 0), (address, MAX_BYTES + 1), (space - 1, 2), (space - 1, MAX_BYTES)])
            )
    return requests, fails


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("stalls", ["free", "all"])
@pytest.mark.parametrize("name", CONFIGS)
def test_errors_and_refusals_end_their_request_alone(name, stalls, write, seed):
    config, rng = CONFIGS[name], random.Random(seed + 1)
    requests, fails = mixed_requests(config, rng, write)
    stalls = (WRITE_STALLS if write else READ_STALLS)[stalls]
    legal = [request for request in requests if not refused(config, *request)]
    data = [rng.randbytes(size) for _, size in legal]
    run = Run(
        config, requests, data=data, write=write, stalls=stalls, seed=seed, latency=rng.choice([0, 9]), fails=fails
    )
    expected, ends = read_words(config, requests, fails)
    assert run.ends == ends
    assert set(ends) >= {DmaStatus.OK, DmaStatus.REFUSED}
    assert name == "long" or {SLVERR, DECERR} & set(ends)
    if not write:
        assert run.words == expected
    issued = deque(run.memory.bursts)
    for address, size in legal:
        due = all_bursts(config, [(address, size)])
        bad = [
            n
            for n, (at, beats) in enumerate(due)
            if any(fails.get(at + i * config.beat_bytes, 0) > 1 for i in range(beats))
        ]
        # Everything up to the burst that fails, and behind it no more than was on its way by then.
        sure = bad[0] + 1 if bad else len(due)
        count = 0
        while issued and count < len(due) and issued[0] == due[count]:
            issued.popleft()
            count += 1
        assert sure <= count <= min(len(due), sure + config.outstanding + 2)
    assert not issued
    if write:
        assert set(run.memory.written) <= {a + i for a, size in legal for i in range(size)}
        for ((address, _), given), end in zip(zip(legal, data, strict=True), [e for e in ends if e != 1], strict=True):
            for i, value in enumerate(given):
                assert run.memory.written.get(address + i, value if end else None) == value


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_an_error_at_the_start_of_a_long_request_stops_its_bursts(write):
    config = DmaConfig(data_width=32)
    data = [bytes(range(256)) * 20, b"next one"]
    run = Run(config, [(2, 5120), (9000, 8)], data=data if write else (), write=write, fails={0: DECERR})
    assert run.ends == [DECERR, DmaStatus.OK]
    assert len(run.memory.bursts) < 10
    if write:
        assert run.memory.written[9000] == ord("n")
    else:
        assert run.words == read_words(config, [(2, 5120), (9000, 8)], {0: DECERR})[0]


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("width", [13, 40, 64])
def test_the_last_byte_of_the_address_space_is_the_last_that_can_be_reached(width, write):
    config = DmaConfig(address_width=width)
    top = (1 << width) - 5
    run = Run(config, [(top, 5), (top, 6), (0, 3)], data=[b"12345", b"678"] if write else (), write=write)
    assert run.ends == [DmaStatus.OK, DmaStatus.REFUSED, DmaStatus.OK]
    if write:
        assert bytes(run.memory.written[at] for at in [*range(top, top + 5), 0, 1, 2]) == b"12345678"
    else:
        assert run.words == read_words(config, [(top, 5), (0, 3)])[0]


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_no_output_depends_on_an_input_of_the_same_cycle(write, seed):
    config = CONFIGS["narrow"]
    requests = draw_requests(config, random.Random(seed), 12, 60)
    data = [bytes(size) for _, size in requests] if write else ()
    run = Run(config, requests, data=data, write=write, stalls=0.3, seed=seed, probe=True)
    assert len(run.ends) == len(requests) > 5


def cycles_from_first_to_last(run):
    return run.cycles[-1] - run.cycles[0] + 1


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(("offset", "lost"), [(0, 0), (1, 1), (15, 1)])
def test_a_beat_moves_in_every_cycle_and_an_unaligned_request_costs_one_more(offset, lost, write):
    config = DmaConfig()
    requests = [(4096 * n + offset, 1024) for n in range(20)]
    data = [bytes(1024)] * 20 if write else ()
    run = Run(config, requests, data=data, write=write)
    # The first cycle that is lost comes before the first word of a read.
    moved = 20 * 64 + (20 if write else 19) * lost
    assert cycles_from_first_to_last(run) == moved


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(
    ("latency", "outstanding", "least"), [(50, 4, 0.90), (50, 5, 0.99), (50, 1, 0.2), (200, 16, 0.99)]
)
def test_outstanding_bursts_hide_latency(latency, outstanding, least, write):
    config = DmaConfig(outstanding=outstanding)
    requests = [(4096 * n, 4096) for n in range(2 if outstanding == 1 else 8)]
    run = Run(config, requests, data=[bytes(4096)] * len(requests) if write else (), write=write, latency=latency)
    rate = len(run.cycles) / cycles_from_first_to_last(run)
    assert rate >= least
    assert run.memory.most == outstanding


def test_short_requests_follow_each_other_without_a_gap():
    config = DmaConfig()
    run = Run(config, [(16 * n, 16) for n in range(100)])
    assert cycles_from_first_to_last(run) == 100


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_the_memory_notices_bursts_that_cross_a_page(write, monkeypatch):
    monkeypatch.setattr(DmaConfig, "block_beats", 512)
    config = DmaConfig(max_burst=256)
    with pytest.raises(AssertionError, match=r"// 4096"):
        Run(config, [(4080, 32)], data=[bytes(32)] if write else (), write=write)
