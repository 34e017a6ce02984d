"""Descriptors in hardware: the check against the model, and the queue with a stand-in for the DMA engine that stalls and fails."""

import dataclasses
import random
from collections import Counter, deque

import pytest
from amaranth.hdl import Module, Value
from amaranth.sim import Simulator
from hypothesis import given, settings
from hypothesis import strategies as st

from hdl.accelerator import record_layout
from hdl.descriptor import DescriptorCheck, DescriptorQueue, PostCheck, memory_layout
from hdl.job import job_layout, post_layout
from model.accelerator import (
    POST,
    POST_ARRAYS,
    POST_BYTES,
    RECORD,
    AcceleratorConfig,
    Descriptor,
    ErrorCode,
    Mode,
    Operand,
    PostBlock,
    check,
    check_post,
    mode_of,
)
from tests.changed import changed
from tests.hdl.simulate import evaluate

CONFIGS = {
    "default": AcceleratorConfig(),
    "no refinement": AcceleratorConfig(refinement="none", lanes=64, address_width=64, accumulators=64),
    "small banks": AcceleratorConfig(
        activation_depth=16, weight_depth=8, accumulators=16, activation_entries=4, address_width=24
    ),
    "deep banks": AcceleratorConfig(activation_depth=1 << 16, weight_depth=1 << 18, refinement="inplace"),
    "ppu": AcceleratorConfig(ppu=True, columns=3),
}


def near(*limits):
    """Values around limits, with the smallest."""
    return [value for limit in limits for value in (limit - 1, limit, limit + 1) if value >= 0] + [0, 1, 2, 3]


def descriptors(config):
    """Descriptors with most fields at their limits."""
    depth, half = config.activation_depth, config.weight_depth // 2
    sixteen = lambda values: [min(value, 0xFFFF) for value in values]  # noqa: E731
    address = st.one_of(
        st.integers(0, (1 << config.address_width - 4) - 1).map(lambda value: value << 4),
        st.sampled_from([0, (1 << config.address_width) - 16, (1 << config.address_width) % (1 << 64), 8, 1]),
    )
    stride = st.one_of(st.integers(0, (1 << 28) - 1).map(lambda value: value << 4), st.just(15))
    operand = st.builds(Operand, *[address] * 4, *[stride] * 4)
    kv = st.one_of(st.sampled_from(near(config.max_kv, depth, depth // 2)), st.integers(1, depth))
    k = st.one_of(
        kv.map(lambda value: value * config.lanes), st.sampled_from(near(32, config.lanes, 1 << 18, (1 << 32) - 2))
    )
    size = st.one_of(st.integers(1, 1000), st.sampled_from(near(1 << 24, (1 << 32) - 2)))
    good = (
        st.tuples(st.integers(1, min(config.max_m, depth)), st.integers(0, 1 << 30))
        .map(lambda t: (t[0], 1 + t[1] % (config.max_words // t[0]), 1 + t[1] % (depth // t[0])))
        .map(lambda t: {"tile_m": t[0], "tile_n": t[1], "k": t[2] % (config.max_kv + 1) * config.lanes})
    )
    any_size = st.fixed_dictionaries(
        {
            "tile_m": st.sampled_from(sixteen(near(config.max_m, depth, 1 << config.max_m.bit_length()))),
            "tile_n": st.sampled_from(sixteen(near(config.max_n, half, 1 << config.max_n.bit_length()))),
            "k": k,
        }
    )
    rest = st.fixed_dictionaries(
        {
            "mode": st.integers(0, 3),
            "format": st.integers(0, 3).map(lambda value: value if value > 2 else value & 1),
            "m": size,
            "n": size,
            "segment": st.sampled_from(sixteen(near(half, half // 2, half // 3, 1 << half.bit_length()))),
            "out_scale": st.one_of(st.integers(0, (1 << 32) - 1), st.sampled_from([0x7F800000, 0x7F7FFFFF])),
            "a": operand,
            "w": operand,
            "out": address,
            "out_stride": stride,
        }
    )
    return st.builds(lambda sizes, others: Descriptor(**sizes, **others), st.one_of(good, any_size), rest)


def good(config):
    a, w = (Operand(*(base + 64 * i for i in range(4)), 16, 32, 48, 64) for base in (1024, 2048))
    return Descriptor(1, 1, 5, 7, 2 * config.lanes, 2, 3, 2, a, w, 4096, 32)


def expected_job(config, descriptor):
    """What the loader is to be told, by name."""
    d = descriptor
    kv = d.k // config.lanes
    job = {
        "fp2": d.mode == Mode.AUTOFP2,
        "refined": d.mode == Mode.AUTOFP6,
        "fp32": d.format == 1,
        "single": 2 * d.tile_m * kv > config.activation_depth,
        "kv": kv,
        "segment": min(d.segment, kv),
        **{name: getattr(d, name) for name in ("m", "n", "tile_m", "tile_n", "out_scale", "out", "out_stride")},
    }
    if config.ppu:
        job |= {"post": 0, "numbers": 0}
    arrays = ("codes", "scales") if config.refinement == "none" else ("codes", "scales", "masks", "offsets")
    for operand in "aw":
        for array in arrays:
            for name in (array, f"{array}_stride"):
                job[f"{operand}.{name}"] = getattr(getattr(d, operand), name)
    return {name: int(value) for name, value in job.items()}


def job_of(config, raw):
    """Fields of a job by name."""
    found = job_layout(config).from_bits(raw)
    fields = {}
    for name in job_layout(config).members:
        value = found[name]
        if name in ("a", "w"):
            fields |= {f"{name}.{inner}": value[inner] for inner in job_layout(config)[name].shape.members}
        else:
            fields[name] = value
    return fields


def compare(config, octets, descriptors=()):
    """Compare the hardware with the model for every descriptor's bytes, and jobs with what they were made of."""
    # A descriptor holds for the two cycles that its check takes.
    rows = [{"descriptor": int.from_bytes(one, "little")} for one in octets for _ in range(2)]
    found = evaluate(DescriptorCheck(config), rows, ["code", "job"], clocked=True, latency=2)[::2]
    codes = Counter()
    for n, (one, (code, job)) in enumerate(zip(octets, found, strict=True)):
        assert code == check(config, one), one.hex()
        codes[ErrorCode(code)] += 1
        if n < len(descriptors) and code == 0:
            assert job_of(config, job) == expected_job(config, descriptors[n])
    return codes


POST_CONFIGS = {
    "default": AcceleratorConfig(ppu=True),
    "three columns": AcceleratorConfig(ppu=True, columns=3, accumulators=256, address_width=20),
    "no refinement": AcceleratorConfig(ppu=True, refinement="none", columns=5, address_width=64),
}


@pytest.mark.parametrize("name", POST_CONFIGS)
def test_flags_and_precisions_count_as_in_the_model(name, seed):
    config, rng = POST_CONFIGS[name], random.Random(seed)
    given_, rows = [], []
    for _ in range(600):
        policy, post = rng.random() < 0.6, rng.choice([None, None, 16, 4096, 8, 1 << 20])
        one = dataclasses.replace(
            good(config),
            mode=rng.choice([0, 1, 2]),
            format=rng.choice([0, 1, 1]),
            out_scale=rng.choice([0x3F800000, 0x7F800000]) if rng.random() < 0.2 else 0x3F800000,
            out_scale_low=rng.choice([1, 0x40000000, 0x7FC00000]) if policy or rng.random() < 0.1 else 0,
            tile_n=rng.choice([1, 2, config.weight_depth // 2]),
            segment=rng.choice([1, 2]),
            post=post,
            policy=policy,
            fence=rng.random() < 0.3,
        )
        octets = one.pack()
        if rng.random() < 0.1:
            # An address without its flag, or the flag without an address.
            octets = octets[:140] + bytes([octets[140] ^ 1]) + octets[141:]
        precision = rng.choice([None, 2, 3, 4, 5, 6, 8])
        given_.append((one, octets, precision))
        rows += 2 * [
            {
                "descriptor": int.from_bytes(octets, "little"),
                "precision": precision or 0,
                "ready": precision is not None,
            }
        ]
    found = evaluate(DescriptorCheck(config), rows, ["code", "job"], clocked=True, latency=2)[::2]
    codes = Counter()
    for (one, octets, precision), (code, job) in zip(given_, found, strict=True):
        assert code == check(config, octets, precision), (one, precision)
        codes[ErrorCode(code)] += 1
        if code == 0:
            low = one.policy and mode_of(precision) == Mode.AUTOFP2
            chosen = dataclasses.replace(
                one,
                mode=mode_of(precision) if one.policy else one.mode,
                out_scale=one.out_scale_low if low else one.out_scale,
            )
            assert job_of(config, job) == expected_job(config, chosen)
    seen = {ErrorCode.OK, ErrorCode.RESERVED, ErrorCode.SCALE, ErrorCode.ALIGNMENT, ErrorCode.POLICY}
    assert seen | {ErrorCode.POST_FORMAT, ErrorCode.TILE} <= set(codes)


def blocks(config, rng, count):
    """Post blocks of which most are right but for one thing."""
    found = []
    for _ in range(count):
        flags = {name: rng.random() < 0.5 for name in ("adds", "numbers", "groups", "shared", "refine")}
        flags |= {name: rng.random() < 0.5 for name in ("measure", "begin", "report", "observe")}
        if rng.random() < 0.7:
            flags |= {"groups": True, "measure": True, "report": True}
        places = {name: 16 * rng.getrandbits(config.address_width - 4) for name in (*POST_ARRAYS, "next_mask")}
        places |= {f"{name}_stride": 16 * rng.getrandbits(28) for name in POST_ARRAYS}
        numbers = {name: rng.choice([0, 0x7F7FFFFF, 0xFF7FFFFF, 1]) for name in ("group_scale", "threshold")}
        block = PostBlock(rng.randrange(4), **flags, **places, **numbers)
        number = int.from_bytes(block.pack(), "little")
        if rng.random() < 0.7:
            number ^= 1 << rng.randrange(8 * POST_BYTES)
        if rng.random() < 0.1:
            number ^= 1 << rng.randrange(4)
        if rng.random() < 0.1:
            number |= 0x7F800000 << rng.choice([32, 64])
        found.append(number)
    return found


@pytest.mark.parametrize("name", POST_CONFIGS)
def test_the_check_of_post_blocks_is_that_of_the_model(name, seed):
    config, rng = POST_CONFIGS[name], random.Random(seed)
    rows, cases = [], []
    for number in blocks(config, rng, 500):
        mode, tile_n, n = rng.choice([0, 1]), rng.choice([1, 5, 16, 32, config.max_n]), rng.choice([1, 31, 40, 1 << 20])
        octets = dataclasses.replace(good(config), mode=mode, tile_n=tile_n, n=n).pack()
        rows.append({"post": number, "n": n, "tile_n": tile_n, "fp2": mode == 0})
        cases.append((octets, number.to_bytes(POST_BYTES, "little")))
    found = evaluate(PostCheck(config), rows, ["code", "block"], clocked=True, latency=1)
    codes = Counter()
    for (octets, post), (code, block) in zip(cases, found, strict=True):
        assert code == check_post(config, octets, post)
        codes[ErrorCode(code)] += 1
        layout = post_layout(config)
        for member in POST.members:
            field = block >> layout[member.name].offset & (1 << layout[member.name].width) - 1
            right = int.from_bytes(post, "little") >> member.position & (1 << member.width) - 1
            assert field == right & (1 << layout[member.name].width) - 1
    wanted = {code for code in ErrorCode if code.name.startswith("POST_") and code > ErrorCode.POST_DECERR}
    assert wanted - ({ErrorCode.POST_ADDRESS} if config.address_width == 64 else set()) <= set(codes)
    assert codes[ErrorCode.OK] > 50


POST_BUGS = {
    "width": ("width[: _log2(PAD)].any() & (width < self.n)", "width[: _log2(PAD)].any()"),
    "pairs of rows": (
        "Mux(self.fp2, (self.tile_n * config.columns) << 1",
        "Mux(self.fp2, (self.tile_n * config.columns)",
    ),
    "next mask": ('(*POST_ARRAYS, "next_mask")]', "POST_ARRAYS]"),
    "threshold": ("| post.threshold[23:31].all()", ""),
    "observe": ("(post.observe & ~(post.measure & post.report))", "(post.observe & ~post.report)"),
    "function": ("(post.function > max(Function))", "(post.function > max(Function) + 1)"),
}


@pytest.mark.parametrize("bug", POST_BUGS)
def test_bugs_of_the_check_of_post_blocks_are_caught(bug, seed, monkeypatch):
    monkeypatch.setitem(globals(), "PostCheck", changed(PostCheck, POST_BUGS[bug]))
    with pytest.raises(AssertionError):
        test_the_check_of_post_blocks_is_that_of_the_model("three columns", seed)


def test_the_record_that_is_written_is_that_of_the_table():
    table, written = memory_layout(RECORD), record_layout()
    for name in ("code", "number", "cycles"):
        assert (table[name].offset, table[name].width) == (written[name].offset, written[name].width)
    bits = [table[name].offset - written["status"].offset for name in ("saturated", "nan_scale", "overlap", "dropped")]
    assert bits == [0, 1, 2, 3]
    assert table.size == written.size == 8 * 16


@pytest.mark.parametrize("name", CONFIGS)
def test_the_check_and_the_job_are_those_of_the_model_at_every_limit(name):
    config, drawn = CONFIGS[name], []

    @given(descriptors(config))
    @settings(max_examples=250, deadline=None, database=None)
    def draw(descriptor):
        drawn.append(descriptor)

    draw()
    seen = compare(config, [one.pack() for one in drawn], drawn)
    assert sum(seen.values()) >= 250
    assert len(seen) >= 5


@pytest.mark.parametrize("name", CONFIGS)
def test_every_single_bit_counts_as_in_the_model(name):
    config = CONFIGS[name]
    octets = good(config).pack()
    number = int.from_bytes(octets, "little")
    flips = [(number ^ 1 << bit).to_bytes(192, "little") for bit in range(8 * 192)]
    codes = compare(config, [octets, *flips], [good(config)])
    assert codes[ErrorCode.RESERVED] == 28 + 16 + 32 + 13 * 32 - (3 if config.ppu else 1)
    assert {ErrorCode.OK, ErrorCode.FORMAT, ErrorCode.TILE, ErrorCode.ALIGNMENT, ErrorCode.SIZE_LIMIT} <= set(codes)


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_on_both_sides_of_what_banks_and_accumulators_hold(name, seed):
    config, rng = CONFIGS[name], random.Random(seed)
    cases = []
    for _ in range(500):
        tile_m = min(rng.choice([1, 2, 3, config.max_m - 1, config.max_m, config.max_m + 1]), 0xFFFF)
        tile_n = max(rng.choice([config.max_words // tile_m, 1, 2, 5]) + rng.choice([-1, 0, 1]), 1)
        mode = rng.choice([0, 1])
        kv = max(config.activation_depth // rng.choice([1, 2]) // tile_m + rng.choice([-1, 0, 1]), 1)
        pairs = tile_n if mode == 0 else (tile_n + 1) // 2
        segment = min(max(config.weight_depth // 2 // pairs + rng.choice([-1, 0, 1]), 1), 0xFFFF)
        sizes = {"tile_m": tile_m, "tile_n": tile_n, "mode": mode, "k": kv * config.lanes, "segment": segment}
        cases.append(dataclasses.replace(good(config), **sizes))
    codes = compare(config, [one.pack() for one in cases], cases)
    assert min(codes[ErrorCode.OK], codes[ErrorCode.TILE]) > 20


CHECK_BUGS = {
    "highest code wins": ("sorted(rules.items(), reverse=True)", "sorted(rules.items())"),
    "scale counts in RAW": ("(d.format == Format.FP32) & scale", "scale"),
    "reserved word forgotten": ('name.startswith("spare")', 'name.startswith("spare") and name != "spare_3"'),
    "accumulators": ("(words > config.max_words)", "(words > config.max_words + 1)"),
    "activations": ("(panel > config.activation_depth)", "(panel >= config.activation_depth)"),
    "weights": ("(bank > half)", "(bank > 2 * half)"),
    "odd vectors": ("tile_n[1:] + tile_n[0]", "tile_n[1:]"),
    "short sizes": ("(d.tile_m > config.max_m)", "(tile_m > config.max_m)"),
    "strides unchecked": ("(*addresses, *strides)", "addresses"),
    "address": ("value[config.address_width :]", "value[config.address_width + 1 :]"),
    "single": ("panel > config.activation_depth // 2", "panel >= config.activation_depth // 2"),
    "segment": ("Mux(d.segment > kv, kv, d.segment)", "d.segment"),
}


@pytest.mark.parametrize("bug", CHECK_BUGS)
def test_bugs_of_the_check_are_caught(bug, seed, monkeypatch):
    monkeypatch.setitem(globals(), "DescriptorCheck", changed(DescriptorCheck, CHECK_BUGS[bug]))
    with pytest.raises(AssertionError):  # noqa: PT012
        test_sizes_on_both_sides_of_what_banks_and_accumulators_hold("small banks", seed)
        rng = random.Random(seed)
        number = int.from_bytes(good(CONFIGS["default"]).pack(), "little")
        pairs = [number ^ 1 << rng.randrange(1536) ^ 1 << rng.randrange(1120) for _ in range(300)]
        # Two faults of different codes; a scale that is infinite where it does not count; every bit in turn.
        infinite = dataclasses.replace(good(CONFIGS["default"]), out_scale=0x7F800000, format=0)
        compare(CONFIGS["default"], [*(n.to_bytes(192, "little") for n in pairs), infinite.pack()])
        test_every_single_bit_counts_as_in_the_model("small banks")


class QueueRun:
    """One simulation of a queue: a memory of descriptors behind a stand-in for the read engine, and one for the loader that is busy as long as it likes.

    ``fails`` maps the number of a descriptor to the status of its read; ``script`` maps cycles to inputs that change then. Ends when so many
    have started and nothing happened for a while.
    """

    def __init__(self, config, memory, script, *, seed=0, stall=0.0, fails=(), quiet=60):
        self.config, self.memory, self.script = config, memory, dict(script)
        self.rng, self.stall, self.fails, self.quiet = random.Random(seed), stall, dict(fails), quiet
        self.requests, self.starts, self.times = [], [], []
        self.dut = DescriptorQueue(config)
        top = Module()
        top.submodules.dut = self.dut
        simulator = Simulator(top)
        simulator.add_clock(1e-8)
        simulator.add_testbench(self.bench)
        simulator.run()

    def answers(self, address):
        """Words with ``last``, the data of a failed read from some word on 0; a refused read has none."""
        status = self.fails.get(len(self.requests) - 1, 0)
        size = self.config.data_width // 8
        octets = self.memory[address][:192]
        words = [octets[i : i + size] for i in range(0, 192, size)]
        if status:
            good = self.rng.randrange(len(words))
            words[good:] = [b""] * (len(words) - good)
        if status == 1:
            words = []
        numbers = [int.from_bytes(word, "little") for word in words]
        return deque((number, n == len(numbers) - 1) for n, number in enumerate(numbers)), status

    async def bench(self, ctx):
        dut, rng = self.dut, self.rng
        get = lambda signal: ctx.get(Value.cast(signal))  # noqa: E731
        words, done = deque(), None
        load, idle, cycle = 0, 0, 0
        waiting = None
        held = None
        word_on = done_on = False
        while idle < self.quiet or any(at >= cycle for at in self.script):
            for name, value in self.script.get(cycle, {}).items():
                ctx.set(getattr(dut, name), value)
            if "restart" not in self.script.get(cycle, {}):
                ctx.set(dut.restart, 0)
            ctx.set(dut.cycle, cycle)
            ready = rng.random() >= self.stall
            # An offer stays; an end comes when the last word is offered or follows the one that is.
            word_on = bool(words) and (word_on or done_on or rng.random() >= self.stall)
            done_on = done is not None and (done_on or (len(words) <= 2 * word_on and rng.random() >= self.stall))
            ctx.set(dut.request.ready, ready)
            ctx.set(dut.word.valid, word_on)
            ctx.set(Value.cast(dut.word.payload), words[0][0] | words[0][1] << self.config.data_width if words else 0)
            ctx.set(dut.done.valid, done_on)
            ctx.set(dut.done.payload, done or 0)
            ctx.set(dut.loading, load > 0)
            request = get(dut.request.payload) if get(dut.request.valid) else None
            assert waiting is None or request == waiting, "a request that waits stays"
            outputs = tuple(get(getattr(dut, name)) for name in ("job", "code", "since", "descriptor"))
            start = get(dut.start)
            busy = request is not None or words or done is not None or start or load or cycle in self.script
            idle = 0 if busy else idle + 1
            if request is not None or words or done is not None:
                assert get(dut.fetching)
                assert not load, "nothing is fetched while the loader is busy"
            if load:
                assert outputs == held, "what the loader was told holds"
                load -= 1
            if start:
                assert not load
                held = outputs
                self.starts.append(outputs)
                self.times.append(cycle)
                load = rng.choice([1, 2, 30])
            taken_word = word_on and get(dut.word.ready)
            taken_done = done_on and get(dut.done.ready)
            if request is not None and ready:
                assert not words
                assert done is None
                size = self.config.address_width
                address, octets = request & (1 << size) - 1, request >> size
                assert octets == 192
                self.requests.append(address)
                words, done = self.answers(address)
                word_on = done_on = False
            waiting = request if not ready else None
            if taken_word:
                words.popleft()
                word_on = False
            if taken_done:
                assert not words
                done = None
            await ctx.tick()
            cycle += 1


def ring(config, rng, base, count):
    """Descriptors of a ring, some of them bad."""
    places = []
    for _ in range(count):
        sizes = {name: rng.randrange(1, 1 << 24) for name in ("m", "n")}
        sizes |= {"tile_m": rng.choice([1, 60]), "k": config.lanes * rng.choice([1, 25]), "mode": rng.choice([0, 1])}
        sizes |= {"out_stride": 16 * rng.randrange(1000)}
        # One that is too large is wrong by a product of two fields alone.
        places.append(dataclasses.replace(good(config), **sizes, tile_n=rng.choice([1, 2, 2, 3])))
    noise = lambda: rng.randbytes(64)  # noqa: E731
    return {base + 256 * n: one.pack() + noise() for n, one in enumerate(places)}, places


def told(config, started, descriptor, address, code=None):
    """Compare what the loader was told with a descriptor."""
    job, found, _, at = started
    assert at == address
    assert found == (check(config, descriptor.pack()) if code is None else code)
    if found == 0:
        assert job_of(config, job) == expected_job(config, descriptor)


QUEUES = {
    "64": AcceleratorConfig(data_width=64, address_width=32),
    "128": AcceleratorConfig(refinement="none"),
    "256": AcceleratorConfig(data_width=256, address_width=64),
    "1024": AcceleratorConfig(data_width=1024),
}
BASE = 0x123400


@pytest.mark.parametrize("stall", [0.0, 0.6])
@pytest.mark.parametrize("name", QUEUES)
def test_descriptors_come_in_the_order_of_a_ring_that_wraps(name, stall, seed):
    config, rng = QUEUES[name], random.Random(seed)
    memory, places = ring(config, rng, BASE, 3)
    run = QueueRun(
        config,
        memory,
        {0: {"base": BASE, "last": 2, "submitted": 2, "enable": 1}, 200: {"submitted": 10}},
        seed=seed,
        stall=stall,
    )
    assert run.requests == [BASE + 256 * (n % 3) for n in range(10)]
    assert len(run.starts) == 10
    for n, started in enumerate(run.starts):
        told(config, started, places[n % 3], BASE + 256 * (n % 3))
    since = [started[2] for started in run.starts]
    assert since == sorted(since)
    assert since[1] < 200 <= since[2]


def test_counts_of_submitted_descriptors_go_round_at_2_to_the_16(seed, monkeypatch):
    config = QUEUES["128"]
    # As if 65533 had been fetched before.
    monkeypatch.setitem(
        globals(), "DescriptorQueue", changed(DescriptorQueue, ("fetched = Signal(16), Signal(16)", NEARLY_ROUND))
    )
    memory, _ = ring(config, random.Random(seed), BASE, 2)
    run = QueueRun(config, memory, {0: {"base": BASE, "last": 1, "submitted": 4, "enable": 1}})
    assert run.requests == [BASE + 256 * (n % 2) for n in range(7)]


NEARLY_ROUND = "fetched = Signal(16), Signal(16, init=65533)"


def test_without_enable_nothing_is_fetched_and_what_was_fetched_runs_on(seed):
    config = QUEUES["64"]
    memory, _ = ring(config, random.Random(seed), BASE, 4)
    off = {0: {"base": BASE, "last": 3, "submitted": 4}, 50: {"enable": 1}, 55: {"enable": 0}, 300: {"enable": 1}}
    run = QueueRun(config, memory, off, seed=seed)
    assert [started[2] < 300 for started in run.starts] == [True, False, False, False]
    assert run.starts[0][2] >= 50


def test_a_restart_begins_with_the_first_place(seed):
    config = QUEUES["128"]
    memory, places = ring(config, random.Random(seed), BASE, 4)
    script = {
        0: {"base": BASE, "last": 3, "submitted": 2, "enable": 1},
        300: {"submitted": 0, "enable": 0},
        310: {"restart": 1},
        320: {"submitted": 3, "enable": 1},
    }
    run = QueueRun(config, memory, script, seed=seed)
    assert run.requests == [BASE + 256 * n for n in (0, 1, 0, 1, 2)]
    for n, started in zip((0, 1, 0, 1, 2), run.starts, strict=True):
        told(config, started, places[n], BASE + 256 * n)


@pytest.mark.parametrize("name", QUEUES)
def test_behind_a_fence_nothing_starts_until_what_was_before_has_ended(name, seed):
    config = QUEUES[name]
    memory, places = ring(config, random.Random(seed), BASE, 3)
    octets = dataclasses.replace(places[1], fence=True).pack()
    memory[BASE + 256] = octets + memory[BASE + 256][192:]
    on = {"base": BASE, "last": 2, "submitted": 6, "enable": 1}
    run = QueueRun(config, memory, {0: on, 400: {"ended": 1}, 401: {"ended": 0}, 600: {"ended": 1}}, seed=seed)
    assert run.requests == [BASE + 256 * (n % 3) for n in range(6)]
    assert [time for time in run.times if time < 400] == run.times[:1]
    # The next fence begins in the cycle of its own end; others do not wait.
    assert run.times[1] == 401
    assert run.times[3] < 600 <= run.times[4]
    for n, started in enumerate(run.starts):
        told(config, started, dataclasses.replace(places[n % 3]), BASE + 256 * (n % 3))


def test_a_restart_in_the_cycle_of_a_submission_wins(seed):
    config = QUEUES["128"]
    memory, _ = ring(config, random.Random(seed), BASE, 4)
    script = {
        0: {"base": BASE, "last": 3, "submitted": 1, "enable": 1},
        300: {"restart": 1, "submitted": 2},
    }
    assert QueueRun(config, memory, script, seed=seed).requests == [BASE + 256 * n for n in (0, 0, 1)]


@pytest.mark.parametrize("stall", [0.0, 0.5])
@pytest.mark.parametrize("name", QUEUES)
def test_reads_that_fail_give_their_code_and_the_next_descriptor_comes(name, stall, seed):
    config, rng = QUEUES[name], random.Random(seed)
    memory, places = ring(config, rng, BASE, 8)
    fails = {0: 2, 1: 3, 3: 1, 4: 1, 6: 3}
    run = QueueRun(
        config,
        memory,
        {0: {"base": BASE, "last": 7, "submitted": 8, "enable": 1}},
        seed=seed,
        stall=stall,
        fails=fails,
    )
    assert len(run.starts) == 8
    for n, started in enumerate(run.starts):
        told(config, started, places[n], BASE + 256 * n, 16 + fails[n] if n in fails else None)


@pytest.mark.parametrize("width", [13, 32, 40, 63])
def test_a_place_beyond_the_address_space_is_not_read(width, seed):
    config = AcceleratorConfig(address_width=width, refinement="none")
    base = (1 << width) - 512
    operand = Operand(0, 16)
    places = [dataclasses.replace(good(config), n=n + 1, a=operand, w=operand, out=0) for n in range(2)]
    memory = {base + 256 * n: one.pack() for n, one in enumerate(places)}
    run = QueueRun(config, memory, {0: {"base": base, "last": 3, "submitted": 6, "enable": 1}}, seed=seed)
    assert run.requests == [base, base + 256, base, base + 256]
    assert [started[1] for started in run.starts] == [0, 0, 17, 17, 0, 0]


def test_an_address_that_overflows_64_bits_is_beyond_the_address_space(seed):
    config = QUEUES["256"]
    base = (1 << 64) - 256
    run = QueueRun(
        config,
        {base: good(config).pack()},
        {0: {"base": base, "last": 1, "submitted": 3, "enable": 1}},
        seed=seed,
    )
    assert run.requests == [base, base]
    assert [started[1] for started in run.starts] == [0, 17, 0]


def test_a_ring_that_is_made_shorter_goes_on_with_its_first_place(seed):
    config = QUEUES["128"]
    memory, _ = ring(config, random.Random(seed), BASE, 4)
    script = {
        0: {"base": BASE, "last": 3, "submitted": 3, "enable": 1},
        300: {"last": 1},
        310: {"submitted": 6},
    }
    assert QueueRun(config, memory, script, seed=seed).requests == [BASE + 256 * n for n in (0, 1, 2, 3, 0, 1)]


NOT_FREE = ("& ~self.loading & ~self.restart", "& ~self.restart")
QUEUE_BUGS = {
    "no wrap": [("Mux(place >= self.last, 0, place + 1)", "place + 1")],
    "two at a time": [NOT_FREE, ('with m.State("wait"), m.If(~self.loading):', 'with m.State("wait"):')],
    "restart keeps the place": [("[place.eq(0), fetched.eq(0)]", "fetched.eq(0)")],
    "end of a refused read is not seen": [("~self.word.valid | self.word.payload.last", "self.word.payload.last")],
    "end taken before the words": [("~self.word.valid | self.word.payload.last", "1")],
    "status lost": [("status.eq(self.done.payload)", "status.eq(0)")],
    "check not waited for": [
        (
            'm.d.sync += status.eq(self.done.payload)\n                    m.next = "check"',
            'm.d.sync += status.eq(self.done.payload)\n                    m.next = "start"',
        )
    ],
    "words in one place": [("raw.word_select(i, config.data_width)", "raw.word_select(0, config.data_width)")],
    "beyond is read": [("bad.eq(beyond)", "bad.eq(0)")],
    "enable ignored": [("self.enable & (fetched", "(fetched")],
}


@pytest.mark.parametrize("bug", QUEUE_BUGS)
def test_bugs_of_the_queue_are_caught(bug, seed, monkeypatch):
    monkeypatch.setitem(globals(), "DescriptorQueue", changed(DescriptorQueue, *QUEUE_BUGS[bug]))
    monkeypatch.setattr(QueueRun, "bench", limited(QueueRun.bench))
    with pytest.raises((AssertionError, KeyError, IndexError)):  # noqa: PT012
        test_descriptors_come_in_the_order_of_a_ring_that_wraps("64", 0.6, seed)
        test_reads_that_fail_give_their_code_and_the_next_descriptor_comes("64", 0.5, seed)
        test_descriptors_come_in_the_order_of_a_ring_that_wraps("1024", 0.0, seed)
        test_without_enable_nothing_is_fetched_and_what_was_fetched_runs_on(seed)
        test_a_restart_begins_with_the_first_place(seed)
        test_a_place_beyond_the_address_space_is_not_read(32, seed)


def limited(bench):
    """Give a bench an end, for hardware that hangs."""

    async def run(self, ctx):
        class Context:
            left = 3000

            def __getattr__(self, name):
                return getattr(ctx, name)

            async def tick(self):
                self.left -= 1
                assert self.left, "the queue hangs"
                await ctx.tick()

        await bench(self, Context())

    return run
