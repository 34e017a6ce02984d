"""Loader in Amaranth's simulator, between stand-ins for read engine and tile engine that stall, fail and free as they like, against a reference of its own."""

import random
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from amaranth.hdl import Module, Value
from amaranth.sim import Simulator

import hdl.loader
from hdl.assembler import Assembler
from hdl.fetcher import Fetcher
from hdl.job import job_layout, token_layout
from hdl.loader import Loader
from hdl.walker import Walker
from model.accelerator import AcceleratorConfig
from tests.changed import changed

SMALL = {"rows": 2, "columns": 3, "accumulators": 16, "activation_entries": 4}
CONFIGS = {
    "64 bits": AcceleratorConfig(**SMALL, activation_depth=64, weight_depth=32, data_width=64),
    "128 bits": AcceleratorConfig(**SMALL, activation_depth=128, weight_depth=256),
    "1024 bits": AcceleratorConfig(**SMALL, activation_depth=128, weight_depth=256, data_width=1024),
    "64 lanes": AcceleratorConfig(
        **SMALL, lanes=64, activation_depth=32, weight_depth=64, data_width=128, refinement="inplace"
    ),
    "64 lanes, 1024 bits": AcceleratorConfig(**SMALL, lanes=64, activation_depth=64, weight_depth=8, data_width=1024),
    "no refinement": AcceleratorConfig(**SMALL, activation_depth=64, weight_depth=32, refinement="none"),
    "one element": AcceleratorConfig(
        rows=1, columns=1, accumulators=8, activation_entries=2, activation_depth=8, weight_depth=4, data_width=64
    ),
}
ARRAYS = ("codes", "scales", "masks", "offsets")


@dataclass(frozen=True)
class Job:
    """A product as its descriptor says it; ``address`` and ``stride`` by operand and array."""

    mode: int
    fp32: bool
    m: int
    n: int
    kv: int
    tile_m: int
    tile_n: int
    segment: int
    address: dict
    stride: dict
    out: int
    out_stride: int
    out_scale: int

    @property
    def pairs(self):
        return self.tile_n if self.mode == 0 else -(-self.tile_n // 2)


def draw(config, rng, most=900):
    """Return a product of a few tiles that asks for no more than so many vectors."""
    while True:
        mode = rng.choice([0, 1] if config.refinement == "none" else [0, 1, 2, 2])
        tile_m = rng.randint(1, config.max_m)
        tile_n = rng.randint(1, config.max_words // tile_m)
        depth = config.activation_depth // tile_m
        kv = rng.choice([rng.randint(1, depth), rng.randint(1, depth // 2 or 1), rng.randint(1, 3)])
        pairs = tile_n if mode == 0 else (tile_n + 1) // 2
        if not 1 <= kv <= depth or 2 * pairs > config.weight_depth:
            continue
        segment = min(rng.randint(1, config.weight_depth // 2 // pairs), kv)
        panel, tile = config.rows * tile_m, config.columns * tile_n * (2 if mode == 0 else 1)
        m, n = rng.randint(1, 3 * panel), rng.randint(1, 3 * tile)
        panels, tiles = -(-m // panel), -(-n // tile)
        if panels * kv * (panel + tiles * tile) <= most:
            break
    space = 1 << 12
    names = [(operand, array) for operand in "aw" for array in ARRAYS]
    address = {name: 16 * rng.randrange(space) for name in names}
    stride = {name: 16 * rng.randrange(1, 40) for name in names}
    if rng.random() < 0.3:
        stride["w", "masks"] = 0
    out, out_stride = 16 * rng.randrange(space), 16 * rng.randrange(100)
    sizes = (mode, rng.random() < 0.5, m, n, kv, tile_m, tile_n, segment)
    return Job(*sizes, address, stride, out, out_stride, rng.getrandbits(32))


class Image:
    """Memory of random bytes that repeats, with the rows that the arrays in it make."""

    def __init__(self, config, rng):
        self.config, self.octets = config, rng.randbytes(1 << 14)

    def read(self, address, size):
        address %= len(self.octets)
        return (self.octets * (2 + size // len(self.octets)))[address : address + size]

    def entries(self, job, operand, row):
        """Return what the banks are to hold of a row, K-vector by K-vector, as one number each."""
        lanes, blocks = self.config.lanes, self.config.lanes // 16
        at = {array: job.address[operand, array] + row * job.stride[operand, array] for array in ARRAYS}
        skipped, found = 0, []
        for k in range(job.kv):
            codes = self.read(at["codes"] + k * lanes // 2, lanes // 2)
            scales = self.read(at["scales"] + k * blocks, blocks)
            entry = int.from_bytes(codes + scales, "little")
            position = 4 * lanes + 8 * blocks
            for block in range(blocks):
                group = k * blocks + block
                mask = self.read(at["masks"] + group // 2, 1)[0] >> 4 * (group % 2) & 15 if job.mode == 2 else 0
                count = mask.bit_count()
                octets = self.read(at["offsets"] + skipped, count)[:2]
                skipped += count
                entry |= (mask | int.from_bytes(octets, "little") << 4) << position
                position += 20
            found.append(entry)
        return found


class Segment(NamedTuple):
    """A segment: what its token says, apart from the places; whether it brings activations; rows by (bank, place in a K-vector, odd)."""

    token: dict
    first: bool
    panel: int
    k0: int
    activations: dict
    weights: dict


def plan(config, job):
    """Return a product's segments in order."""
    fp2 = job.mode == 0
    panel, tile = config.rows * job.tile_m, config.columns * job.tile_n * (1 + fp2)
    size = 4 if fp2 or job.fp32 else 8
    found = []
    for m0 in range(0, job.m, panel):
        for n0 in range(0, job.n, tile):
            for k0 in range(0, job.kv, job.segment):
                length = min(job.segment, job.kv - k0)
                ends = n0 + tile >= job.n
                token = {
                    "end": 0,
                    "starts": int(k0 == 0),
                    "frees_activations": int(ends),
                    "frees_panel": int(ends and k0 + length == job.kv),
                    "entries": job.pairs * length,
                    "segment": length,
                    "m": job.tile_m,
                    "n": job.tile_n,
                    "kv": job.kv,
                    "mode_nvfp4": int(not fp2),
                    "address": job.out + m0 * job.out_stride + n0 * size,
                    "stride": job.out_stride,
                    "rows": min(panel, job.m - m0),
                    "outputs": min(tile, job.n - n0),
                    "fp32": int(job.fp32),
                    "scale": job.out_scale,
                }
                if config.refinement != "none":
                    token["refine_en"] = int(job.mode == 2)
                activations = {
                    (r, i, 0): m0 + r * job.tile_m + i for r in range(config.rows) for i in range(job.tile_m)
                }
                weights = {}
                for c in range(config.columns):
                    for j in range(job.tile_n):
                        vector = j * config.columns + c
                        if fp2:
                            weights |= {(c, j, odd): n0 + 2 * vector + odd for odd in (0, 1)}
                        else:
                            weights[c, j // 2, j % 2] = n0 + vector
                found.append(Segment(token, n0 == 0, m0 // panel, k0, activations, weights))
    return found


def flat(config, raw):
    """Return a token's fields by name."""
    token = token_layout(config).from_bits(raw)
    fields = {name: token[name] for name in ("end", "code", "since", "descriptor", "starts", "entries")}
    fields |= {name: token[name] for name in ("frees_activations", "frees_panel")}
    tile, output = token["tile"], token["output"]
    fields |= {name: tile[name] for name in ("activation_base", "weight_base", "segment")}
    fields |= {name: tile["command"][name] for name in ("m", "n", "kv", "mode_nvfp4")}
    if config.refinement != "none":
        fields["refine_en"] = tile["command"]["refine_en"]
    return fields | {name: output[name] for name in ("address", "stride", "rows", "outputs", "fp32", "scale")}


STALLS = {
    "free": {},
    "all": dict.fromkeys(["request", "word", "done", "load", "token", "free"], 0.4),
    "slow bus": {"request": 0.5, "word": 0.6, "done": 0.5},
    "slow engine": {"load": 0.2, "token": 0.8, "free": 0.97},
    "late frees": {"free": 0.985},
    "slow requests": {"request": 0.8},
}


class Run:
    """One simulation of products one after the other.

    Of every place of the banks the stand-in for the tile engine knows what it holds and whether it is still to be used: a place is busy from
    when it is loaded until the segment that uses it for the last time gives it back. ``fails`` maps the number of a request to a status,
    ``codes`` the number of a product to the code of its check, ``stops`` the number of a product to the vectors after which ``stop`` is set.
    ``stalls`` names the stalls of one product after the other, from :data:`STALLS`.
    """

    LIMIT = 30_000

    def __init__(self, config, jobs, image, *, seed=0, stalls=(), fails=(), codes=(), stops=()):
        self.config, self.jobs, self.image, self.rng = config, jobs, image, random.Random(seed)
        self.styles = list(stalls) or ["free"]
        self.fails, self.codes, self.stops = dict(fails), dict(codes), dict(stops)
        self.plans = [[] if self.codes.get(n) else plan(config, job) for n, job in enumerate(jobs)]
        self.rows = [{} for _ in jobs]
        self.banks, self.busy, self.failed_at = {}, {}, {}
        self.requests = self.loads = self.checked = self.cycle = self.overlaps = self.late = 0
        self.ends, self.given = [], [0] * len(jobs)
        self.words, self.dones, self.running, self.due = deque(), deque(), deque(), deque()
        self.word_on = self.done_on = False
        self.loading, self.stalls, self.hold, self.latency = -1, {}, 1, 0
        self.dut = Loader(config)
        top = Module()
        top.submodules.dut = self.dut
        simulator = Simulator(top)
        simulator.add_clock(1e-8)
        simulator.add_testbench(self.bench)
        simulator.run()

    def passes(self, name):
        return self.rng.random() >= self.stalls.get(name, 0.0)

    def early(self, number):
        return number in self.failed_at or number in self.stops

    def answer(self, request):
        """Take a request and put its words and its end into the queues."""
        space, size = self.config.address_width, self.config.data_width // 8
        address, octets = request & (1 << space) - 1, request >> space
        # As the engine does, refuse what is empty or leaves the address space.
        refused = not octets or address + octets > 1 << space
        status = 1 if refused else self.fails.get(self.requests, 0)
        data = self.image.read(address, octets)
        words = [int.from_bytes(data[i : i + size], "little") for i in range(0, octets, size)]
        if status > 1:
            good = self.rng.randrange(len(words))
            words[good:] = [0] * (len(words) - good)
        if status == 1:
            words = []
        at = self.cycle + 1 + self.latency
        for n, word in enumerate(words):
            self.words.append((self.requests, at, word, n == len(words) - 1))
        self.dones.append([self.requests, at, status, len(words)])
        self.late += any(number == self.loading and seen for number, seen in self.reported)
        if status:
            self.failed_at.setdefault(self.loading, status)
        self.requests += 1

    def offers(self, ctx):
        """Offer a word and an end: an offer stays, and an end comes when the last word is offered or follows the one that is."""
        front = self.dones[0] if self.dones else None
        if self.words and not self.word_on:
            number, at, *_ = self.words[0]
            mine = number == front[0] or (self.done_on and not front[3])
            self.word_on = mine and at <= self.cycle and (self.done_on or self.passes("word"))
        if front and not self.done_on:
            near = front[3] <= 2 * (self.word_on and self.words[0][0] == front[0])
            self.done_on = near and front[1] <= self.cycle and self.passes("done")
        dut = self.dut
        ctx.set(dut.word.valid, self.word_on)
        if self.word_on:
            _, _, word, last = self.words[0]
            ctx.set(Value.cast(dut.word.payload), word | last << self.config.data_width)
        ctx.set(dut.done.valid, self.done_on)
        if self.done_on:
            ctx.set(dut.done.payload, front[2])

    def load(self, raw):
        """Write a vector into its place, which must be free."""
        config = self.config
        blocks = config.lanes // 16
        width = 4 * config.lanes + 8 * blocks + (20 * blocks if config.refinement != "none" else 0)
        sizes = (width, (max(config.activation_depth, config.weight_depth) - 1).bit_length(), 1)
        sizes += ((max(config.rows, config.columns) - 1).bit_length(), 1)
        fields = []
        for bits in sizes:
            fields.append(raw & (1 << bits) - 1)
            raw >>= bits
        entry, address, odd, index, weight = fields
        assert index < (config.columns if weight else config.rows)
        assert address < (config.weight_depth if weight else config.activation_depth)
        assert weight or not odd
        place = (weight, index, address, odd)
        assert place not in self.busy, f"{place} is still to be used"
        while not any(self.due[0][2:4]):
            self.due.popleft()
        segment = self.due[0]
        assert segment[2 + weight], "more vectors than the segment has"
        segment[2 + weight] -= 1
        self.banks[place] = entry
        self.busy[place] = (segment[0], None if weight else segment[1])
        self.overlaps += bool(self.running)
        self.loads += 1

    def places(self, token, segment):
        """Return the places of a segment, with the row and the K-vector that belongs there."""
        config, found = self.config, {}
        pairs = token["entries"] // token["segment"]
        for k in range(token["segment"]):
            for (r, i, _), row in segment.activations.items():
                found[0, r, token["activation_base"] + k * token["m"] + i, 0] = ("a", row, k)
            for (c, j, odd), row in segment.weights.items():
                address = (token["weight_base"] + k * pairs + j) % config.weight_depth
                found[1, c, address, odd] = ("w", row, k)
        assert len(found) == (len(segment.activations) + len(segment.weights)) * token["segment"]
        return found

    def take(self, raw):
        """Take a token: a segment must lie in its places, and all segments must come before an end."""
        token, number = flat(self.config, raw), len(self.ends)
        job, segments, given = self.jobs[number], self.plans[number], self.given[number]
        if token["end"]:
            code = 20 + self.failed_at[number] if number in self.failed_at else self.codes.get(number, 0)
            assert (token["code"], token["since"], token["descriptor"]) == (code, number + 77, 256 * number)
            if given < len(segments):
                assert self.early(number), "segments are missing"
                assert segments[given].token["starts"], "a tile is not complete"
            self.ends.append(code)
            return
        segment = segments[given]
        self.given[number] += 1
        for name, value in segment.token.items():
            if not (name.startswith("frees_") and self.early(number)):
                assert token[name] == value, name
        used = self.places(token, segment)
        for place, (operand, row, k) in used.items():
            assert self.busy.get(place) == (number, None if place[0] else segment.panel), f"{place} was not loaded"
            if number not in self.failed_at:
                value = 0
                if row < (job.m if operand == "a" else job.n):
                    value = self.row(number, operand, row)[segment.k0 + k]
                assert self.banks[place] == value, (place, operand, row, segment.k0 + k)
                self.checked += 1
        self.running.append((token, used, (number, segment.panel)))

    def row(self, number, operand, row):
        rows = self.rows[number]
        if (operand, row) not in rows:
            rows[operand, row] = self.image.entries(self.jobs[number], operand, row)
        return rows[operand, row]

    def free(self):
        """Give back the oldest segment's places."""
        token, used, panel = self.running.popleft()
        for place in used:
            if place[0] or token["frees_activations"]:
                self.busy.pop(place)
        if token["frees_panel"]:
            for place in [place for place, owner in self.busy.items() if owner == panel]:
                self.busy.pop(place)
        return token["entries"], token["frees_activations"], token["frees_panel"]

    def begin(self, ctx):
        """Put the next product before the loader."""
        self.loading += 1
        number, job, dut = self.loading, self.jobs[self.loading], self.dut
        self.stalls = STALLS[self.styles[number % len(self.styles)]]
        self.hold, self.latency = self.rng.choice([1, 2, 4]), self.rng.choice([0, 0, 20])
        self.before = self.loads
        for token, first, panel, _, activations, weights in self.plans[number]:
            vectors = [len(activations) * first * token["segment"], len(weights) * token["segment"]]
            self.due.append([number, panel, *vectors, vectors])
        arrays = ARRAYS[: 2 if self.config.refinement == "none" else 4]
        operands = {
            operand: {array: job.address[operand, array] for array in arrays}
            | {f"{array}_stride": job.stride[operand, array] for array in arrays}
            for operand in "aw"
        }
        fields = {name: getattr(job, name) for name in ("m", "n", "kv", "tile_m", "tile_n", "segment", "fp32")}
        fields |= {name: getattr(job, name) for name in ("out", "out_stride", "out_scale")} | operands
        fields |= {"fp2": job.mode == 0, "refined": job.mode == 2}
        fields["single"] = 2 * job.tile_m * job.kv > self.config.activation_depth
        ctx.set(dut.job, job_layout(self.config).const(fields))
        for name, value in (("start", 1), ("since", number + 77), ("descriptor", 256 * number)):
            ctx.set(getattr(dut, name), value)
        ctx.set(dut.code, self.codes.get(number, 0))

    def loaded(self):
        """Close the books of a product whose loading has ended."""
        left = [(segment[2:4], segment[4]) for segment in self.due if any(segment[2:4])]
        assert all(now == total for now, total in left), "vectors are missing"
        assert not left or self.early(self.loading)
        self.due.clear()

    async def bench(self, ctx):
        dut = self.dut
        payloads = {name: Value.cast(getattr(dut, name).payload) for name in ("request", "load", "token")}
        waiting = {"load": None, "token": None}
        since_busy, self.reported, self.before = False, [], 0
        while len(self.ends) < len(self.jobs) or self.running:
            busy = ctx.get(dut.busy)
            if since_busy and not busy:
                self.loaded()
            since_busy = busy
            ctx.set(dut.start, 0)
            if not busy and self.loading + 1 < len(self.jobs):
                self.begin(ctx)
            number = self.loading
            ctx.set(dut.stop, number in self.stops and self.loads - self.before >= self.stops[number])
            gives = self.free() if self.running and self.passes("free") else (0, 0, 0)
            for name, value in zip(("entries", "activations", "panel"), gives, strict=True):
                ctx.set(getattr(dut, f"free_{name}"), value)
            takes = {name: self.passes(name) for name in payloads}
            takes["token"] &= len(self.running) < self.hold
            for name, value in takes.items():
                ctx.set(getattr(dut, name).ready, value)
            self.offers(ctx)
            raw = {name: ctx.get(payloads[name]) if ctx.get(getattr(dut, name).valid) else None for name in payloads}
            for name, before in waiting.items():
                assert before is None or raw[name] == before, f"{name} does not stay"
                waiting[name] = None if takes[name] else raw[name]
            word_taken = self.word_on and ctx.get(dut.word.ready)
            done_taken = self.done_on and ctx.get(dut.done.ready)
            if takes["request"] and raw["request"] is not None:
                self.answer(raw["request"])
            if word_taken:
                one = self.words.popleft()
                assert one[0] == self.dones[0][0]
                self.dones[0][3] -= 1
                self.word_on = False
            if done_taken:
                _, _, status, left = self.dones.popleft()
                assert not left
                self.done_on = False
                if status:
                    self.reported.append((number, True))
            # A vector is in its bank in the cycle after, when its token may be there.
            if takes["token"] and raw["token"] is not None:
                self.take(raw["token"])
            if takes["load"] and raw["load"] is not None:
                self.load(raw["load"])
            await ctx.tick()
            self.cycle += 1
            assert self.cycle < self.LIMIT, "the loader hangs"
        assert not self.busy
        assert not self.words
        assert not self.dones


def products(name, rng, count, most=250):
    config = CONFIGS[name]
    return config, [draw(config, rng, most) for _ in range(count)], Image(config, rng)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_place_holds_its_vector_when_its_segment_is_given(name, seed):
    rng = random.Random(f"{seed} {name}")
    config, jobs, image = products(name, rng, 6)
    run = Run(config, jobs, image, seed=seed, stalls=rng.sample(list(STALLS), len(STALLS)))
    assert run.ends == [0] * len(jobs)
    assert run.given == [len(segments) for segments in run.plans]
    assert run.checked > 100


def sized(config, rng, **sizes):
    """Return a product like a drawn one with sizes of its own."""
    return replace(draw(config, rng), **sizes)


def test_panels_of_half_a_bank_and_more_follow_each_other_and_leave_room_for_what_is_in_use(seed):
    # So much room for weights that activations alone have to wait.
    rng, config = random.Random(seed), replace(CONFIGS["no refinement"], weight_depth=64)
    # 64 vectors in a bank: with 2 rows of activations, 16 K-vectors are half of it.
    kinds = [5, 16, 17, 5, 32]
    sizes = {"m": 9, "n": 12, "tile_m": 2, "tile_n": 2, "segment": 5, "mode": 1}
    jobs = [sized(config, rng, kv=kv, **sizes) for kv in kinds]
    run = Run(config, jobs, Image(config, rng), seed=seed, stalls=["late frees"])
    assert run.ends == [0] * len(jobs)
    assert run.overlaps > 200


@pytest.mark.parametrize("name", ["128 bits", "1024 bits"])
def test_rows_of_several_chunks_and_segments_find_their_offsets(name, seed):
    rng, config = random.Random(seed), CONFIGS[name]
    sizes = {"mode": 2, "m": 2, "n": 3, "tile_m": 1, "tile_n": 1}
    jobs = [sized(config, rng, kv=kv, segment=segment, **sizes) for kv, segment in ((70, 40), (64, 32))]
    image = Image(config, rng)
    more = sum(octet.bit_count() > 4 for octet in image.octets)
    run = Run(config, jobs, image, seed=seed, stalls=["slow requests", "all"])
    assert run.ends == [0] * 2
    assert more > 1000


@pytest.mark.parametrize("name", ["64 bits", "no refinement"])
def test_a_fetch_that_fails_ends_its_product_with_its_code_and_the_next_one_runs(name, seed):
    rng = random.Random(f"{seed} {name}")
    config, jobs, image = products(name, rng, 9, 80)
    clean = Run(config, jobs[:1], image, seed=seed)
    first = rng.randrange(clean.requests)
    # Failures of later products fall where they fall, so that some products have several.
    fails = {first: 2, first + 1: 3} | {first + 20 * n + rng.randrange(20): 1 + n % 3 for n in range(1, 6)}
    codes = {4: 9, 6: 1}
    run = Run(config, jobs, image, seed=seed, fails=fails, codes=codes, stalls=["free", "all", "slow bus"])
    assert run.ends[0] == 22
    assert run.ends[4] == 9
    assert run.ends[6] == 1
    assert len(run.failed_at) >= 2
    assert run.ends.count(0) >= 2
    assert run.late <= 24 * len(run.failed_at)


def test_each_status_of_a_read_has_its_code(seed):
    rng = random.Random(seed)
    config, sizes = CONFIGS["one element"], {"mode": 1, "m": 2, "n": 1, "tile_m": 1, "tile_n": 1, "kv": 8, "segment": 2}
    jobs, image = [sized(config, rng, **sizes) for _ in range(4)], Image(config, rng)
    # Scales in one word, then codes in several.
    for status, request in ((1, 1), (2, 0), (3, 1)):
        run = Run(config, jobs, image, seed=seed, fails={request: status})
        assert run.ends == [20 + status, 0, 0, 0]


def test_an_operand_that_leaves_the_address_space_is_not_read_at_its_beginning(seed):
    rng, config = random.Random(seed), CONFIGS["one element"]
    jobs = [sized(config, rng, mode=2, m=4, n=1, kv=2, segment=1, tile_m=1, tile_n=1) for _ in range(5)]
    for n, array in enumerate(ARRAYS):
        top = (1 << config.address_width) - 32
        jobs[n] = replace(
            jobs[n],
            address=jobs[n].address | {("a", array): top},
            stride=jobs[n].stride | {("a", array): 16},
        )
    run = Run(config, jobs, Image(config, rng), seed=seed)
    assert run.ends == [21, 21, 21, 21, 0]


def test_stop_ends_a_product_with_the_tile_that_is_loaded(seed):
    rng, config = random.Random(seed), CONFIGS["no refinement"]
    sizes = {"m": 8, "n": 18, "tile_m": 2, "tile_n": 2, "segment": 2, "kv": 5, "mode": 1}
    jobs = [sized(config, rng, **sizes) for _ in range(5)]
    stops = {0: 0, 1: 40, 3: 60}
    run = Run(config, jobs, Image(config, rng), seed=seed, stops=stops, stalls=["all", "late frees"])
    assert run.ends == [0] * 5
    whole = len(run.plans[0])
    assert run.given[2] == run.given[4] == whole
    assert run.given[0] < run.given[3] < whole


def mixed(seed):
    rng, config = random.Random(seed), CONFIGS["64 bits"]
    sizes = {"m": 5, "n": 9, "kv": 5, "tile_m": 2, "tile_n": 2, "segment": 3, "fp32": False}
    jobs = [sized(config, rng, mode=mode, **sizes) for mode in (2, 1, 0, 2)]
    Run(config, jobs, Image(config, rng), seed=seed, stalls=["all", "free", "slow requests"])


def short(seed):
    rng, config = random.Random(seed), CONFIGS["128 bits"]
    jobs = [sized(config, rng, mode=2, m=14, n=16, kv=1, tile_m=4, tile_n=2, segment=1) for _ in range(2)]
    Run(config, jobs, Image(config, rng), seed=seed, stalls=["slow requests", "slow engine"])


def three(seed):
    rng, config = random.Random(seed), CONFIGS["no refinement"]
    jobs = [sized(config, rng, mode=1, m=40, n=1, kv=2, tile_m=2, tile_n=1, segment=2) for _ in range(2)]
    Run(config, jobs, Image(config, rng), seed=seed, stalls=["late frees"])


def tiny(seed):
    rng, config = random.Random(seed), CONFIGS["one element"]
    jobs = [sized(config, rng, mode=2, m=3, n=4, kv=3, tile_m=1, tile_n=1, segment=2) for _ in range(2)]
    Run(config, jobs, Image(config, rng), seed=seed, stalls=["late frees"])


def panels(seed):
    test_panels_of_half_a_bank_and_more_follow_each_other_and_leave_room_for_what_is_in_use(seed)


def failing(seed):
    test_each_status_of_a_read_has_its_code(seed)
    test_a_fetch_that_fails_ends_its_product_with_its_code_and_the_next_one_runs("64 bits", seed)


def long(seed):
    test_rows_of_several_chunks_and_segments_find_their_offsets("128 bits", seed)


OCTETS = "self.piece.payload.octets"
BUGS = {
    "weights of a segment in use": (tiny, Walker, "used + needs <= config.weight_depth", "used <= config.weight_depth"),
    "activations of a segment in use": (panels, Walker, "(freed > part)", "(freed >= part)"),
    "a third panel": (three, Walker, "takes_panel.eq(~panels[1])", "takes_panel.eq(1)"),
    "double panel behind a single one": (panels, Walker, "~(job.single | was_single)", "~job.single"),
    "rows in the wrong half": (mixed, Walker, "a_base.eq(Cat(Const(0, half), a_half)),", "a_base.eq(0),"),
    "odd rows": (mixed, Walker, "Mux(job.fp2, odd, place[0])", "place[0]"),
    "padding is fetched": (mixed, Walker, "real.eq(row_left.any() & ~self.failed)", "real.eq(~self.failed)"),
    "address of outputs": (mixed, Walker, "Mux(wide, tile_rows << 3, tile_rows << 2)", "tile_rows << 2"),
    "end before its vectors": (mixed, Walker, "self.token.valid.eq(self.quiet)", "self.token.valid.eq(1)"),
    "offsets of a later segment": (long, Fetcher, "Mux(chunk.resumes, read.data, pointer)", "pointer"),
    "refused reads have one word": (failing, Fetcher, "Mux(refused, filled == entry.more,", "Mux(refused, 1,"),
    "end not waited for": (mixed, Fetcher, "(~self.word.payload.last | self.done.valid)", "1"),
    "an error that is lost": (failing, Fetcher, "self.error.eq(self.done.payload)", "self.error.eq(0)"),
    "scales' request for a mask's": (mixed, Fetcher, "kind.eq(_MASKS)", "kind.eq(_SCALES)"),
    "zeros of padding": (mixed, Assembler, "Mux(piece.zero, 0, codes)", "codes"),
    "offsets of the second block": (mixed, Assembler, "before.eq(following)", "before.eq(0)"),
    "offsets across words": (mixed, Assembler, "at + (octets - 1)", "at + octets"),
    "offsets before their piece": (short, Assembler, "Mux(self.piece.valid, self.piece.payload.octets, 0)", OCTETS),
    "second offset always": (mixed, Assembler, "Mux(ones > i if i else ones.any(), octet, 0)", "octet"),
    "word given up late": (mixed, Assembler, "(place.all() | last)", "place.all()"),
    "token before its segment": (mixed, Loader, "(loaded.any() | tokens.output.payload.end)", "1"),
    "code of the check": (failing, Loader, "READ_BASE + fetcher.error", "READ_BASE"),
    "old failure": (failing, Loader, "fetcher.clear.eq(begins)", "fetcher.clear.eq(0)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug, seed, monkeypatch):
    scenario, source, before, after = BUGS[bug]
    broken = changed(source, (before, after))
    monkeypatch.setattr(hdl.loader, source.__name__, broken)
    monkeypatch.setitem(globals(), "Loader", broken if source is Loader else Loader)
    monkeypatch.setattr(Run, "LIMIT", 6000)
    with pytest.raises((AssertionError, IndexError)):
        scenario(seed)
