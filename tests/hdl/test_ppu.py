# amaranth: UnusedElaboratable=no
"""Post-processing unit in the emitted Verilog: bit for bit the model, with and without stalls, on more than a million groups."""

import dataclasses
import inspect
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.sim import Simulator

import hdl.ppu
from hdl.ppu import Ppu, PpuLane, job_layout
from model import autofp6, block_scaled, llm
from model.activation import Function
from model.ppu import CLIPPED, NONFINITE, Job, PpuConfig, Sums, run
from model.quantiser import quantise
from model.sample_text import TEXT
from sim.design import generated
from sim.player import Player
from tests.hdl.bulk import packed, unpacked
from tests.hdl.test_activation import numbers as numbers_of_all_sizes
from tests.model.test_quantiser import groups_of_all_kinds, patterns

CONFIG = PpuConfig(lanes=4)
LANES = CONFIG.lanes
JOB_FIELDS = [(name, field.width) for name, field in job_layout]
GROUP = [(16, 4), (1, 8), (1, 4), (16, 2), (1, 1)]


@dataclass
class Work:
    """A job with its streams."""

    job: Job
    values: np.ndarray
    residual: np.ndarray | None = None
    previous: np.ndarray | None = None
    weight_masks: np.ndarray | None = None
    follows: bool = False

    @property
    def streams(self):
        return {"residual": self.residual, "previous": self.previous, "weight_masks": self.weight_masks}


def beats(array, lanes=LANES):
    """Elements of rows (rows, K) in beats, the last one of a row filled up with junk."""
    filled = np.pad(array, ((0, 0), (0, -array.shape[1] % lanes)), constant_values=0x7F7F7F)
    return filled.reshape(-1, lanes)


def words(work, lanes=LANES):
    """Words of every stream of one job, and for each the beat that it may not come before."""
    rows, width = work.values.shape
    per_row = -(-width // lanes)
    count = rows * per_row
    last = np.arange(count) % per_row == per_row - 1
    unsigned = work.values.astype(np.int64).view(np.uint64) if work.job.integers else work.values.astype(np.uint64)
    full = np.where(last, width - (per_row - 1) * lanes, 0)
    end = np.arange(count) == count - 1
    at = np.arange(count)
    elements = np.ascontiguousarray(beats(unsigned, lanes)).astype("<u8").view(np.uint8).reshape(count, -1)
    marks = packed([full, last, end], [lanes.bit_length(), 1, 1])
    fields = {**dataclasses.asdict(work.job), "follows": work.follows}
    out = {
        "beat": (np.concatenate([elements, marks], axis=1), at),
        "job": (
            packed([np.array([int(fields[name])]) for name, _ in JOB_FIELDS], [w for _, w in JOB_FIELDS]),
            at[:1],
        ),
    }
    for name in ("residual", "previous"):
        array = getattr(work, name)
        if array is not None:
            out[name] = (beats(array, lanes).astype("<u4").view(np.uint8).reshape(count, 4 * lanes), at)
    if work.job.refine:
        pairs = -(-width // 32)
        masks = np.broadcast_to(work.weight_masks, (rows, 2 * pairs)).reshape(-1, 2)
        # The beat with which a pair is complete.
        done = np.minimum(np.arange(1, pairs + 1) * 32 // lanes, per_row) - 1
        out["weight_mask"] = (
            (masks[:, :1] | masks[:, 1:] << 4).astype(np.uint8),
            (np.arange(rows)[:, None] * per_row + done).reshape(-1),
        )
    return out, count


def play(player, works, rng, stall=0.0):
    """Play jobs one behind the other; returns the words of the three output streams, and the status at the end."""
    all_words, start = {}, 0
    for work in works:
        out, count = words(work)
        for name, (octets, at) in out.items():
            all_words.setdefault(name, []).append((octets, at + start))
        start += count
    share = 1 - stall
    stretch = 1 / share**2 * 1.3 if stall else 1.0
    groups = sum(-(-w.values.shape[1] // 32) * 2 * len(w.values) for w in works)
    rows = int(max(start, groups) * stretch) + 400 * len(works) + 200
    columns = {
        name: np.zeros((rows, -(-width // 8)), np.uint8) if name.endswith("__word") else np.zeros(rows, np.uint8)
        for name, width in player.widths.items()
    }
    columns["rst"][:2] = 1
    for name, parts in all_words.items():
        at = 3 + (np.concatenate([part[1] for part in parts]) * stretch).astype(np.int64)
        # One word a row.
        at = np.maximum.accumulate(at - np.arange(len(at))) + np.arange(len(at))
        columns[f"{name}__word"][at] = np.concatenate([part[0] for part in parts])
        columns[f"{name}__push"][at] = 1
    for name in player.widths:
        if name.endswith("__go"):
            columns[name][2:] = rng.random(rows - 2) < share if stall else 1
    outputs = player.harness.run(columns)
    results = {}
    for name in ("number", "group", "report"):
        valid, ready = outputs[f"{name}__valid"] == 1, outputs[f"{name}__ready"] == 1
        payload = outputs[f"{name}__payload"]
        held = np.flatnonzero(valid[:-1] & ~ready[:-1] & (columns["rst"][1:] == 0))
        assert valid[held + 1].all()
        assert (payload[held] == payload[held + 1]).all()
        results[name] = payload[valid & ready]
    assert outputs["idle"][-1] == 1
    assert not any(outputs[name].any() for name in outputs if name.endswith("__x"))
    return results, int(outputs["status"][-1])


def expected(config, works):
    """What the model says of the same."""
    numbers, groups, lasts, reports, status = [], [], [], [], 0
    sums = Sums()
    wanted = any(work.job.report for work in works)
    for work in works:
        result = run(config, work.job, work.values, **work.streams, sums=sums if wanted else None)
        status |= result.status
        rows, width = work.values.shape
        if result.numbers is not None:
            numbers.append(result.numbers)
        if result.groups is not None:
            groups.append(result.groups)
            per_row = -(-width // 32) * 2
            lasts.append(np.arange(rows * per_row) % per_row == per_row - 1)
        if result.report is not None:
            reports.append(dataclasses.astuple(result.report))
    return numbers, groups, np.concatenate(lasts) if lasts else np.zeros(0, bool), reports, status


def check(player, config, works, rng, stall=0.0):
    """Compare everything; returns the model's groups."""
    results, status = play(player, works, rng, stall)
    numbers, groups, lasts, reports, status_expected = expected(config, works)
    codes, scales, masks, offsets, last = unpacked(results["group"], GROUP)
    assert len(codes) == len(lasts)
    for k, name, got in (
        (0, "codes", codes),
        (1, "scales", scales[:, 0]),
        (2, "masks", masks[:, 0]),
        (3, "offsets", offsets),
    ):
        wanted = np.concatenate([getattr(group, name) for group in groups]) if groups else np.zeros(got.shape, np.uint8)
        np.testing.assert_array_equal(got, wanted & 3 if k == 3 else wanted, name)
    np.testing.assert_array_equal(last[:, 0], lasts)
    elements, count, last = unpacked(results["number"], [(LANES, 32), (1, 3), (1, 1)])
    at = 0
    for array in numbers:
        width = array.shape[1]
        per_row = -(-width // LANES)
        part = elements[at : at + per_row * len(array)].reshape(len(array), -1)
        np.testing.assert_array_equal(part[:, :width], array)
        ends = slice(at + per_row - 1, at + per_row * len(array), per_row)
        assert (last[ends] == 1).all()
        assert (count[ends] == width - (per_row - 1) * LANES).all()
        at += per_row * len(array)
    assert at == len(elements)
    got = (
        [tuple(row) for row in np.concatenate(unpacked(results["report"], [(4, 32)]), axis=1).tolist()]
        if len(results["report"])
        else []
    )
    assert got == reports
    assert status == status_expected
    return groups


@pytest.fixture(scope="module")
def player():
    design = generated("ppu", lanes=LANES)
    return Player(design.sidecar, design.verilog)


TAKEN = np.array([0, 0, 0, 1, 2, 8, 5, 12, 7, 15], np.uint8)


def test_a_million_groups_of_all_kinds(player, seed):
    """Numbers as they are, so that every kind of group reaches the quantiser."""
    rng = np.random.default_rng(seed)
    compared = refined = 0
    status = 0
    for part in range(5):
        bits = rng.permutation(groups_of_all_kinds(rng, 26_000))
        works = []
        for k, chunk in enumerate(np.split(bits, 8)):
            width = (32, 96, 64, 32)[k % 4]
            rows = len(chunk) * 16 // width
            job = Job(
                integers=False,
                refine=k % 4 != 1,
                shared=k in (1, 6),
                threshold=int(patterns([1e-4, 0.01, 0.0, 3.0, 40.0, 1e-30, 2000.0, 0.3][k])),
                group_scale=int(patterns([1.0, 1.0, 1.0, 1.0, 2.0**-20, 1.0, 1e30, 1.0][(part + k) % 8])),
            )
            masks = TAKEN[rng.integers(0, len(TAKEN), (rows, width // 16))] if job.refine else None
            works.append(Work(job, chunk.reshape(-1)[: rows * width].reshape(rows, width), weight_masks=masks))
        groups = check(player, CONFIG, works, rng)
        compared += sum(len(group.scales) for group in groups)
        refined += sum(int((group.masks != 0).sum()) for group in groups)
        status |= NONFINITE * any(group.nonfinite.any() for group in groups) | CLIPPED * any(
            group.clipped.any() for group in groups
        )
    assert compared > 1_000_000
    assert refined > 100_000
    assert status == NONFINITE | CLIPPED


def accumulators(rng, shape, sizes=(1, 62)):
    """Integers of all lengths."""
    length = rng.integers(*sizes, (shape[0], 1))
    return rng.integers(-(2**62), 2**62, shape) >> (62 - length)


def some_job(rng, k, before=None):
    """A job with a mixture of everything, or one that follows another."""
    width = int(rng.integers(1, 150))
    rows = int(rng.integers(1, 12))
    integers = bool(rng.random() < 0.7) if before is None else before.job.integers
    values = accumulators(rng, (rows, width), (4, 40)) if integers else rng.integers(0, 2**32, (rows, width), np.uint32)
    if not integers and k % 3:
        values = patterns(rng.standard_normal((rows, width)) * 4)
    scale = 2.0 ** rng.integers(-30, -4) if integers else 1.0
    if k % 11 == 5:
        scale = rng.choice([1e-38, 1e-44, 1e30, 1.7e38])
    flags = {
        name: bool(rng.random() < share)
        for name, share in {
            "residual": 0.4,
            "numbers": 0.5,
            "measure": 0.4,
            "shared": 0.2,
            "refine": 0.5,
            "report": 0.4,
        }.items()
    }
    job = Job(
        function=Function(int(rng.integers(4))),
        integers=integers,
        scale=int(patterns([scale * rng.uniform(0.5, 2)])[0]),
        groups=bool(rng.random() < 0.8),
        group_scale=int(patterns([2.0 ** rng.integers(-4, 12) * rng.uniform(0.5, 1)])[0]),
        threshold=int(patterns([rng.choice([0.0, 1e-3, 1.0, 100.0])])[0]),
        begin=bool(k == 0 or rng.random() < 0.5),
        **flags,
    )
    job = dataclasses.replace(job, refine=job.refine and job.groups)
    if before is not None:
        job = dataclasses.replace(before.job, begin=False, report=job.report)
    near = lambda: patterns(rng.standard_normal((rows, width)) * 2.0 ** rng.integers(-3, 8))  # noqa: E731
    masks = TAKEN[rng.integers(0, len(TAKEN), -(-width // 32) * 2)] if job.refine else None
    residual, previous = near() if job.residual else None, near() if job.measure else None
    return Work(job, values, residual, previous, masks, before is not None)


@pytest.mark.parametrize("stall", [0.0, 0.15, 0.6])
def test_jobs_of_all_kinds(player, stall, seed):
    rng = np.random.default_rng([seed, int(100 * stall)])
    works = [some_job(rng, 0)]
    for k in range(1, 60):
        works.append(some_job(rng, k, works[-1] if rng.random() < 0.5 else None))
    check(player, CONFIG, works, rng, stall)
    behind = {(before.job.report, work.job.report) for before, work in pairwise(works) if work.follows}
    assert len(behind) == 4
    assert {work.job.function for work in works} == set(Function)


def test_activations_by_accumulators_of_all_sizes(player, seed):
    """Every function on accumulators with tiny and huge factors."""
    rng = np.random.default_rng(seed)
    works = []
    for k in range(24):
        values = accumulators(rng, (150, 64))
        scale = patterns([2.0 ** rng.integers(-60, -10) if k % 3 else rng.choice([1e-45, 1e-39, 1e20, 3.4e38])])
        group_scale = patterns([rng.choice([1.0, 300.0, 1e-3, 1e38, 1e-45])])
        works.append(
            Work(Job(Function(k % 4), scale=int(scale[0]), group_scale=int(group_scale[0]), numbers=True), values)
        )
    groups = check(player, CONFIG, works, rng)
    assert sum(len(group.scales) for group in groups) == 24 * 150 * 4


def test_functions_of_numbers_of_all_sizes(player, seed):
    rng = np.random.default_rng(seed)
    bits = numbers_of_all_sizes(rng, 40_000)
    bits = bits[: len(bits) // 64 * 64].reshape(-1, 64)
    works = [Work(Job(function, integers=False, numbers=True, groups=False), bits) for function in Function]
    assert check(player, CONFIG, works, rng) == []
    assert bits.size > 80_000


@pytest.fixture(scope="module")
def activations():
    """Inputs of two projections of SmolLM2."""
    model = llm.load()
    inputs = llm.capture_inputs(model, model.tokenizer.encode(TEXT)[:200], [(1, "qkv"), (1, "down")])
    return list(inputs.values())


def in_units(x, t):
    """Numbers over T as the quantiser gets them: a product with 1/T."""
    return (x * (np.float32(1) / np.float32(t))).view(np.uint32).reshape(-1, 16)


@pytest.mark.parametrize("shared", [1, 2])
def test_codes_on_real_activations_are_the_software_s_but_for_near_ties(activations, shared):
    for x in activations:
        soft = block_scaled.quantize(x, shared_groups=shared)
        groups = quantise(in_units(x, soft.tensor_scale), shared=shared == 2)
        different = groups.scales != soft.scales.reshape(-1)
        assert different.mean() < 1e-3
        same = ~different
        assert (groups.codes != soft.codes.reshape(-1, 16))[same].mean() < 1e-5
        assert (groups.codes & 7 != 0).mean() > 0.5


def test_refinements_of_real_activations(player, activations, seed):
    """In hardware as in the model; and as the software chooses, but where errors are nearly equal to the threshold or to each other."""
    rng = np.random.default_rng(seed)
    for x in activations:
        soft = block_scaled.quantize(x)
        weight_mask = rng.random(x.shape[1] // 4) < 0.2
        square = float(np.square(x, dtype=np.float64).mean())
        mask = autofp6.select_activations(autofp6.subgroup_errors(x, soft), weight_mask, 4 * 0.003 * square)
        job = Job(
            integers=False,
            refine=True,
            numbers=True,
            threshold=int(patterns([4 * 0.003 * square / float(soft.tensor_scale) ** 2])[0]),
            group_scale=int(patterns([np.float32(1) / soft.tensor_scale])[0]),
        )
        taken = (weight_mask.reshape(-1, 4) << np.arange(4)).sum(axis=1).astype(np.uint8)
        [groups] = check(player, CONFIG, [Work(job, x.view(np.uint32), weight_masks=taken)], rng)
        chosen = (groups.masks[:, None] >> np.arange(4) & 1).astype(bool)
        different = chosen != mask.reshape(-1, 4)
        assert 0.02 < chosen.mean() < 0.4
        assert different.mean() < 2e-3
        d = autofp6.refine(x, soft, mask).offsets.reshape(-1, 4, 4)
        same = chosen & mask.reshape(-1, 4) & (groups.scales == soft.scales.reshape(-1))[:, None]
        assert (groups.offsets.reshape(-1, 4, 4) != d)[same].mean() < 1e-5


def simulated(dut, works, lanes):
    """Run jobs in Amaranth's simulator, streams never stalling; returns the words of the output streams with their cycles, and when beats were taken."""
    queues = {}
    for work in works:
        for name, (octets, _) in words(work, lanes)[0].items():
            queues.setdefault(name, []).extend(int.from_bytes(row.tobytes(), "little") for row in octets)
    inputs = {name: getattr(dut, name) for name in queues}
    results = {name: [] for name in ("number", "group", "report")}
    taken = []

    def raw(value):
        return value.as_value() if hasattr(value, "as_value") else value

    async def bench(ctx):
        places = dict.fromkeys(queues, 0)
        quiet = cycle = 0
        for name in results:
            ctx.set(getattr(dut, name).ready, 1)
        while quiet < 150 and cycle < 3000:
            for name, port in inputs.items():
                more = places[name] < len(queues[name])
                ctx.set(port.valid, more)
                if more:
                    ctx.set(raw(port.payload), queues[name][places[name]])
            moved = False
            for name, port in inputs.items():
                if ctx.get(port.valid) and ctx.get(port.ready):
                    places[name] += 1
                    moved = True
                    if name == "beat":
                        taken.append(cycle)
            for name, words_of in results.items():
                port = getattr(dut, name)
                if ctx.get(port.valid):
                    words_of.append((cycle, ctx.get(raw(port.payload))))
                    moved = True
            quiet = 0 if moved else quiet + 1
            cycle += 1
            await ctx.tick()
        results["idle"] = ctx.get(dut.idle) and all(place == len(queues[name]) for name, place in places.items())
        results["status"] = ctx.get(dut.status)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return results, taken


def agrees(config, works, results):
    """Say whether everything is as in the model."""
    numbers, groups, _, reports, status = expected(config, works)

    def octets(name, size):
        return np.array([list(word.to_bytes(size, "little")) for _, word in results[name]], np.uint8).reshape(-1, size)

    wanted = [
        np.concatenate([getattr(group, name) for group in groups]).reshape(-1)
        for name in ("codes", "scales", "masks", "offsets")
    ]
    got = [field.reshape(-1) for field in unpacked(octets("group", 14), GROUP)[:4]]
    wanted[3] = wanted[3].view(np.uint8) & 3
    same = [a.shape == b.shape and (a == b).all() for a, b in zip(got, wanted, strict=True)]
    flat = np.concatenate([beats(array, config.lanes) for array in numbers])
    words_of, count, last = unpacked(
        octets("number", config.lanes * 4 + 1), [(config.lanes, 32), (1, config.lanes.bit_length()), (1, 1)]
    )
    counts = np.where(last == 1, count, config.lanes)
    here = np.arange(config.lanes) < counts
    same.append(words_of.shape == flat.shape and (words_of[here] == flat[here]).all())
    got_reports = [tuple(row) for row in np.concatenate(unpacked(octets("report", 16), [(4, 32)]), axis=1).tolist()]
    return bool(all(same)) and got_reports == reports and results["status"] == status and bool(results["idle"])


def few_jobs(rng, lanes):
    """Three short jobs that use everything, the last one of which follows."""
    one = Job(
        function=Function.SILU,
        scale=int(patterns([2.0**-9])[0]),
        residual=True,
        numbers=True,
        measure=True,
        refine=True,
    )
    two = Job(
        integers=False,
        numbers=True,
        shared=True,
        measure=True,
        begin=False,
        report=True,
        group_scale=int(patterns([3.0])[0]),
    )
    works = []
    for job, rows, width in ((one, 1, 35), (two, 2, 64), (two, 1, 9)):
        values = (
            rng.integers(-4000, 4000, (rows, width))
            if job.integers
            else patterns(rng.standard_normal((rows, width)) * 99)
        )
        streams = [patterns(rng.standard_normal((rows, width))) for _ in range(2)]
        masks = np.array([1, 0, 2, 5], np.uint8) if job.refine else None
        residual = streams[0] if job.residual else None
        works.append(Work(job, values, residual, streams[1], masks, follows=len(works) == 2))
    return works


BUGS = {
    "": ("class Ppu(", "class Ppu("),
    "numbers are converted": ("gated(self.value, self.integers)", "self.value"),
    "a residual that is not wanted": (
        "Mux(self.adds, self.residual.as_value(), 1 << _NUMBER - 1)",
        "self.residual.as_value()",
    ),
    "junk behind rows is added up": ("lane.scaled.as_value() & at_last", "lane.scaled.as_value()"),
    "sums begin anew": ("begins.eq(self.job.valid & coming.begin)", "begins.eq(self.job.valid)"),
    "a residual is not waited for": ("~(at_residual & job.residual & ~residual.output.valid)", "1"),
    "the next job comes too soon": ("drained.eq(~(valid.any() |", "drained.eq(~(0 |"),
    "a job that does not follow": ("coming.follows & ~job.report", "~job.report"),
    "a job joins one that reports": ("coming.follows & ~job.report & ~more", "coming.follows & ~more"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    before, after = BUGS[bug]
    text = inspect.getsource(hdl.ppu)
    assert text.count(before) == 1
    scope = {}
    exec(text.replace(before, after), scope)
    works = few_jobs(np.random.default_rng(5), 3)
    config = PpuConfig(lanes=3)
    dut = scope["Ppu"](config)
    if "waited" in bug:
        # Nothing to add ever comes, so nothing may leave.
        works = [dataclasses.replace(works[0], residual=None)]
        results, _ = simulated(dut, works, 3)
        assert results["number"]
        return
    results, _ = simulated(dut, works, 3)
    assert agrees(config, works, results) == (not bug)


class Wires(wiring.Component):
    """In place of a lane: numbers go through as they are, as late as through a lane."""

    latency, to_number, to_residual = PpuLane.latency, PpuLane.to_number, PpuLane.to_residual

    def __init__(self):
        super().__init__(dict(PpuLane().signature.members.items()))

    def elaborate(self, platform):
        m = Module()
        stages = [self.value[:32], *(Signal(32) for _ in range(self.latency))]
        with m.If(self.enable):
            m.d.sync += [after.eq(before) for before, after in pairwise(stages)]
        m.d.comb += [
            self.number.as_value().eq(stages[self.to_number]),
            self.scaled.as_value().eq(stages[self.latency]),
        ]
        return m


def test_sixteen_lanes_give_a_group_per_cycle(seed, monkeypatch):
    monkeypatch.setattr(hdl.ppu, "PpuLane", Wires)
    rng = np.random.default_rng(seed)
    config = PpuConfig()
    job = Job(integers=False, numbers=True, report=True)
    work = Work(job, patterns(rng.standard_normal((2, 384))))
    results, taken = simulated(Ppu(config), [work], config.lanes)
    assert agrees(config, [work], results)
    assert np.diff(taken).tolist() == [1] * 47
    cycles = [cycle for cycle, _ in results["group"]]
    assert np.diff(cycles).tolist() == [1] * 47
    # Of the first pair the second beat is the one that fills it.
    assert cycles[0] - taken[1] == Ppu.latency


def test_jobs_that_follow_lose_no_cycle(seed, monkeypatch):
    monkeypatch.setattr(hdl.ppu, "PpuLane", Wires)
    rng = np.random.default_rng(seed)
    config = PpuConfig()
    job = Job(integers=False, numbers=True)
    works = [
        Work(dataclasses.replace(job, begin=not k, report=k in (2, 3)), numbers, follows=k > 0)
        for k, numbers in enumerate(patterns(rng.standard_normal((4, 2, 48))))
    ]
    results, taken = simulated(Ppu(config), works, config.lanes)
    assert agrees(config, works, results)
    assert len(results["report"]) == 2
    gaps = np.diff(taken).tolist()
    # Only the last one waits, for the report of the one before.
    assert gaps[:17] + gaps[18:] == [1] * 22
    assert gaps[17] > 80
