"""The processing element in Amaranth's simulator: small tiles, commands, status and cycles; injected bugs are noticed."""

import dataclasses
import random
import types
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from amaranth.sim import Simulator

import hdl.collector
import hdl.pe
from hdl.pe import Pe
from model.pe import BAD_COMMAND, DROPPED, NAN_SCALE, OVERLAP, SATURATED, Operands, PeConfig, Tile, cycles, run_tile
from sim.tiles import command_word, draw_tile, entry_words, modes, refused_commands

SMALL = PeConfig(weight_entries=4, activation_entries=8, accumulators=16)
UNIT = 1 << 22
ZERO_PAIR, ONE_PAIR, TWO_PAIR = 0b11100, 0b10100, 0b10101


class Run:
    """A processing element and what goes in and comes out; every word of every stream may wait at random.

    ``results`` are (cycle, sum, last); ``taken`` are the cycles in which commands were taken; cycle 0 is the first.
    """

    def __init__(self, config, component=None, stall=0.0, seed=0):
        self.config = config
        self.pe = component or Pe(config)
        self.queues = {name: deque() for name in ("command", "weight", "activation")}
        self.random = random.Random(seed)
        self.stall = stall
        self.ready = True
        self.clear = 0
        self.cycle = 0
        self.results, self.taken = [], []
        self.status = self.busy = 0
        self._offered = dict.fromkeys(self.queues, False)
        self._waiting = None

    def send(self, tile):
        self.queues["command"].append(
            command_word(self.config, tile.m, tile.n, tile.kv, tile.mode_nvfp4, tile.refine_en)
        )
        self.queues["weight"].extend(entry_words(self.config, tile.weights, True))
        self.queues["activation"].extend(entry_words(self.config, tile.activations, False))

    async def step(self, ctx, count=1):
        streams = {name: getattr(self.pe, name) for name in self.queues}
        for _ in range(count):
            for name, queue in self.queues.items():
                if not self._offered[name] and queue and self.random.random() >= self.stall:
                    ctx.set(streams[name].payload.as_value(), queue[0])
                    self._offered[name] = True
                ctx.set(streams[name].valid, self._offered[name])
            ready = self.ready and self.random.random() >= self.stall
            ctx.set(self.pe.result.ready, ready)
            ctx.set(self.pe.clear, self.clear)
            _, _, *taken, valid, psum, last, self.status, self.busy = await ctx.tick().sample(
                *(one.ready for one in streams.values()),
                self.pe.result.valid,
                self.pe.result.payload.psum,
                self.pe.result.payload.last,
                self.pe.status.as_value(),
                self.pe.busy,
            )
            for name, was_taken in zip(self.queues, taken, strict=True):
                if self._offered[name] and was_taken:
                    self.queues[name].popleft()
                    self._offered[name] = False
                    if name == "command":
                        self.taken.append(self.cycle)
            assert self._waiting in (None, (valid, psum, last)), "a result changed before it was taken"
            self._waiting = (valid, psum, last) if valid and not ready else None
            if valid and ready:
                self.results.append((self.cycle, psum, bool(last)))
            self.cycle += 1

    async def finish(self, ctx, results, limit=4000):
        """Run until so many results have come, and a little longer."""
        while len(self.results) < results:
            await self.step(ctx)
            limit -= 1
            assert limit, f"stuck with {len(self.results)} of {results} results"
        await self.step(ctx, 12)
        assert len(self.results) == results
        assert not any(self.queues.values())

    def go(self, bench):
        simulator = Simulator(self.pe)
        simulator.add_clock(1e-6)
        simulator.add_testbench(bench)
        simulator.run()
        return self


def plain(m, n, kv, nvfp4=True, refine_en=False, config=SMALL):
    """Zeros under scales of 1."""

    def operands(count, zero):
        return Operands(
            np.full((kv, count, config.lanes), zero, np.uint8),
            np.full((kv, count, 2), 0x38, np.uint8),
            np.zeros((kv, count, 2), np.uint8),
            np.zeros((kv, count, 2, 2), np.uint8),
        )

    return Tile(nvfp4, refine_en, operands(n, ZERO_PAIR), operands(m, 0))


async def compare(ctx, run, tiles):
    """Run tiles and compare sums, order and ``last`` with the model; return their results, in cycles from now on."""
    first, now = len(run.results), run.cycle
    expected = []
    for tile in tiles:
        run.send(tile)
        sums = run_tile(run.config, tile).psum.ravel().tolist()
        expected += [(value, i == len(sums) - 1) for i, value in enumerate(sums)]
    await run.finish(ctx, first + len(expected))
    assert [result[1:] for result in run.results[first:]] == expected
    assert not run.busy
    return [(cycle - now, psum, last) for cycle, psum, last in run.results[first:]]


async def compare_cycles(ctx, run, tiles):
    """Compare the cycle in which each tile's last result leaves, too; return how many were compared."""
    leaves = [cycle for cycle, _, last in await compare(ctx, run, tiles) if last]
    assert leaves == cycles(run.config, [(tile.m, tile.n, tile.kv) for tile in tiles])
    return len(leaves)


def status_of(config, tiles):
    status = 0
    for tile in tiles:
        status |= run_tile(config, tile).status
    return status


def random_tiles(config, rng, count, most=3, longest=3):
    tiles = []
    for _ in range(count):
        m = int(rng.integers(1, min(config.max_m, most) + 1))
        n = int(rng.integers(1, min(config.max_words // m, most) + 1))
        mode = modes(config)[rng.integers(len(modes(config)))]
        masks = ("disjoint", "overlap and dropped")[rng.integers(2)]
        tiles.append(draw_tile(config, rng, mode, m, n, int(rng.integers(1, longest + 1)), masks))
    return tiles


def test_a_tile_worked_by_hand():
    """Activations 1, 2 and weights 1, 2 in the first K-vector; activations -1, 3 and weights 2, 1 in the second."""
    tile = plain(2, 2, 2)
    tile.activations.codes[:, :, 5] = [[2, 4], [10, 5]]
    tile.weights.codes[:, :, 5] = [[ONE_PAIR, TWO_PAIR], [TWO_PAIR, ONE_PAIR]]
    run = Run(SMALL)
    run.send(tile)

    async def bench(ctx):
        await run.finish(ctx, 4)

    run.go(bench)
    sums = [1 - 2, 2 + 6, 2 - 1, 4 + 3]
    # Eight vectors from cycle 1 on, six cycles behind the last, then one result after the other.
    assert run.results == [(8 + 7 + i, value * UNIT % 2**64, i == 3) for i, value in enumerate(sums)]
    assert run.taken == [0]
    assert (run.status, run.busy) == (0, 0)


@pytest.mark.parametrize(
    "config",
    [
        PeConfig(),
        PeConfig(refinement="inplace", weight_entries=2),
        PeConfig(refinement="none", activation_entries=2, accumulators=8),
        PeConfig(slots_per_block=1, scaling="group", step="exponent", accumulators=4),
        PeConfig(pipeline="fast", weight_entries=2, activation_entries=4, accumulators=8),
    ],
    ids=["default", "inplace", "none", "two-words", "fast"],
)
def test_random_tiles_and_their_cycles(config, seed):
    rng = np.random.default_rng(seed)
    run = Run(config, seed=seed)
    even, uneven = (random_tiles(config, rng, count, most, 2) for count, most in ((10, 5), (6, 3)))

    async def bench(ctx):
        assert await compare_cycles(ctx, run, even) == len(even)
        run.stall = 0.5
        await compare(ctx, run, uneven)
        assert run.status == status_of(config, even + uneven)

    run.go(bench)


@pytest.mark.parametrize(("pipeline", "behind"), [("compact", 6), ("fast", 7)])
def test_short_tiles(pipeline, behind):
    """With fewer than three sums a K-vector takes three cycles, with three as many; single vectors come back to back."""
    run = Run(dataclasses.replace(SMALL, pipeline=pipeline))

    def ones(m, n, kv, code=2):
        tile = plain(m, n, kv)
        tile.activations.codes[..., 0], tile.weights.codes[..., 0] = code, ONE_PAIR
        return tile

    async def bench(ctx):
        for m, n, kv in ((1, 1, 4), (2, 1, 4), (1, 2, 4), (3, 1, 4), (1, 3, 4)):
            results = await compare(ctx, run, [ones(m, n, kv)])
            assert [psum for _, psum, _ in results] == [kv * UNIT] * m * n
            assert results[-1][0] == 3 * (kv - 1) + m * n + behind + m * n
        results = await compare(ctx, run, [ones(1, 1, 1, code) for code in range(1, 7)])
        assert [psum for _, psum, _ in results] == [int(value * UNIT) for value in (0.5, 1, 1.5, 2, 3, 4)]
        assert [cycle for cycle, _, _ in results] == [
            (behind + 3) * pair + behind + 2 + single for pair in range(3) for single in range(2)
        ]
        # Masks mean nothing without refine_en.
        masked = ones(1, 1, 1)
        masked.weights.masks[:] = masked.activations.masks[:] = 15
        await compare(ctx, run, [masked])
        assert run.status == 0
        assert await compare_cycles(
            ctx, run, [ones(1, 1, 3), ones(2, 1, 3), ones(1, 2, 2), ones(1, 1, 1), ones(4, 2, 1)]
        )

    run.go(bench)


async def late_operands(ctx, run):
    """Withhold operands of a tile, one after the other; nothing comes out before the last, and then what must."""
    tile = plain(2, 2, 1)
    tile.activations.codes[0, :, 0], tile.weights.codes[0, :, 0] = [2, 4], [ONE_PAIR, TWO_PAIR]
    first = len(run.results)
    run.send(tile)
    late = [(name, run.queues[name].pop()) for name in ("activation", "weight", "activation")]
    while late:
        await run.step(ctx, 12)
        assert run.busy
        assert len(run.results) == first
        name, word = late.pop()
        run.queues[name].append(word)
    await run.finish(ctx, first + 4)
    assert [psum for _, psum, _ in run.results[first:]] == [UNIT, 2 * UNIT, 2 * UNIT, 4 * UNIT]


def test_no_result_before_its_operands():
    run = Run(SMALL)

    async def bench(ctx):
        await late_operands(ctx, run)
        assert run.taken == [0]

    run.go(bench)


@pytest.mark.parametrize(
    "config",
    [SMALL, PeConfig(), PeConfig(slots_per_block=4, step="exponent"), PeConfig(refinement="none", accumulators=8)],
    ids=["small", "default", "short-k", "none"],
)
def test_refused_commands(config, seed):
    """Each is taken at once and gives nothing but its status bit; a good command before and behind it runs, and no operand is lost."""
    rng = np.random.default_rng(seed)
    commands = refused_commands(config)
    assert len(commands) >= 7
    run = Run(config)

    async def bench(ctx):
        for reason, command in commands.items():
            run.clear = 1
            await run.step(ctx)
            run.clear = 0
            await run.step(ctx)
            assert (run.status, run.busy) == (0, 0)
            before = len(run.results), len(run.taken)
            run.queues["command"].append(command_word(config, *command))
            await run.step(ctx)
            assert len(run.taken) == before[1] + 1, reason
            await run.step(ctx, 15)
            assert (run.status, run.busy) == (BAD_COMMAND, 0), reason
            assert len(run.results) == before[0], reason
            tile = draw_tile(config, rng, "NVFP4", 1, 2, 2)
            run.send(tile)
            await run.finish(ctx, before[0] + 2)
            assert [psum for _, psum, _ in run.results[-2:]] == run_tile(config, tile).psum.ravel().tolist()
            assert run.status == BAD_COMMAND

    run.go(bench)


def raising():
    """Tiles that raise one status bit each."""
    no_number = plain(1, 2, 1)
    no_number.activations.scales[0, 0, 1] = 0xB8
    overlap = plain(1, 1, 1, refine_en=True)
    overlap.weights.masks[0, 0, 1] = overlap.activations.masks[0, 0, 1] = 8
    dropped = plain(2, 1, 1, refine_en=True)
    dropped.activations.masks[0, 1, 0] = 0b1011
    saturated = plain(1, 1, 8, nvfp4=False)
    # Both digits 2, 32 lanes of 6, scales of 448: 384 · 448² of 2⁻² units a vector.
    saturated.weights.codes[:], saturated.activations.codes[:] = 0b00101, 7
    saturated.weights.scales[:] = saturated.activations.scales[:] = 0x7E
    return {NAN_SCALE: no_number, OVERLAP: overlap, DROPPED: dropped, SATURATED: saturated}


@pytest.mark.parametrize("bit", [SATURATED, NAN_SCALE, OVERLAP, DROPPED, BAD_COMMAND])
def test_status_is_raised_kept_and_cleared_when_idle_only(bit):
    config = PeConfig(window_shift=20, weight_entries=4, activation_entries=8, accumulators=16)
    run = Run(config)
    harmless = plain(2, 1, 2)

    async def bench(ctx):
        if bit == BAD_COMMAND:
            run.queues["command"].append(command_word(config, 1, 0, 1, True))
        else:
            run.send(raising()[bit])
            run.ready = False
            await run.step(ctx, 60)
            # The bit is there before the result is taken; clear does nothing while the tile is here.
            assert (run.status, run.busy) == (bit, 1)
            run.clear = 1
            await run.step(ctx, 3)
            run.clear, run.ready = 0, True
        await run.step(ctx, 10)
        assert (run.status, run.busy) == (bit, 0)
        run.send(harmless)
        await run.step(ctx, 4)
        run.clear = 1
        await run.step(ctx, 3)
        run.clear = 0
        await run.step(ctx, 20)
        assert (run.status, run.busy) == (bit, 0)
        run.clear = 1
        await run.step(ctx)
        run.clear = 0
        await run.step(ctx)
        assert run.status == 0
        run.send(harmless)
        await run.step(ctx, 30)
        assert (run.status, run.busy) == (0, 0)

    run.go(bench)


def test_two_tiles_wait_for_a_blocked_result():
    """The third command is not taken before the first tile's results have left."""
    run = Run(SMALL)
    run.ready = False
    for _ in range(3):
        run.send(plain(2, 1, 2))

    async def bench(ctx):
        await run.step(ctx, 60)
        assert len(run.taken) == 2
        run.ready = True
        await run.finish(ctx, 6)
        first = run.results[1][0]
        assert run.taken[2] == first + 1

    run.go(bench)


BUGS = {
    "a sum is fetched a cycle early": ("fetch, deposit = vmac.psum_delay,", "fetch, deposit = vmac.psum_delay - 1,"),
    "a sum is stored under the next one's address": ("1 + vmac.latency\n", "vmac.latency\n"),
    "no interlock": ("hazard.eq(short & ", "hazard.eq(0 & "),
    "one activation is not rewound": ("rewind.eq(last_m & ~last_n)", "rewind.eq(last_m & ~last_n & ~first_m)"),
    "no rewind": ("rewind.eq(last_m & ~last_n)", "rewind.eq(0)"),
    "bank freed one word early": (
        "with m.If(self.result.ready & out_valid & out_last & (out_bank == i)):",
        "with m.If(drained & drain_ends & (drain_bank == i)):",
    ),
    "results do not wait": ("& (~out_valid | self.result.ready))", ")"),
    "activations leave in the first pass": ("free.eq(issue & last_n)", "free.eq(issue & ~at.n.any())"),
    "activations need not be there": ("activations.level > Mux(last_n, 0, at.m)", "activations.level > 0"),
    "weights need not be there": ("(~first_m | weights.level.any())", "Const(1)"),
    "full buffers take more": ("self.entry.ready.eq(self.level != self._depth)", "self.entry.ready.eq(1)"),
    "sums are not begun afresh": (
        '_delayed(m, "first", ~at.kv.any(), fetch + 1)',
        '_delayed(m, "first", Const(0), fetch + 1)',
    ),
    "the wrong bank drains": ("drain_bank.eq(drain_bank ^ drain_ends)", "drain_bank.eq(0)"),
    "mode of the next tile": ('mode = _delayed(m, "nvfp4", nvfp4, 1)[1]', "mode = nvfp4"),
    "status counts masks in any mode": ("with m.If(valid[1] & refine):", "with m.If(valid[1]):"),
    "not busy while it drains": ("self.busy.eq(active | occupied.any())", "self.busy.eq(active)"),
    "clear at any time": ("clear.eq(self.clear & ~self.busy)", "clear.eq(self.clear)"),
    "a tile of three waits": ("short.eq(product < again)", "short.eq(product <= again)"),
    "no K-vectors": ("| ~command.kv.any()", "| Const(0, 1)"),
    "a product one too large": ("_exceeds(product, config.max_words)", "_exceeds(product, config.max_words + 1)"),
}
COLLECTOR_BUGS = {
    "activations win": (
        ("kept.eq(w_mask[g] & w_within)", "kept.eq(w_mask[g] & ~a_mask[g] & w_within)"),
        ("unmasked.eq(a_mask & ~w_mask)", "unmasked.eq(a_mask)"),
    ),
    "hidden records have no byte": (("a_first = ~a_mask[:g].any()", "a_first = ~unmasked[:g].any()"),),
}


def edited(module, *edits):
    """A copy of a module with its source edited."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = types.ModuleType("edited")
    exec(compile(text, module.__file__, "exec"), copy.__dict__)
    return copy


def all_is_well(component_type):
    """Raise AssertionError unless a processing element passes a short form of the tests above.

    Returns how many tiles were compared in their cycles, how many sums came without stalls, and how many with them.
    """
    rng = np.random.default_rng(7)
    config = PeConfig(weight_entries=2, activation_entries=4, accumulators=8)
    silent = plain(1, 1, 1)
    silent.weights.masks[:] = silent.activations.masks[:] = 15
    even = [
        silent,
        plain(3, 1, 2),
        draw_tile(config, rng, "NVFP4", 1, 1, 3),
        draw_tile(config, rng, "AutoFP2", 2, 2, 2),
    ]
    even += [draw_tile(config, rng, "NVFP4", 1, 3, 1), draw_tile(config, rng, "NVFP4", 4, 1, 1)]
    uneven = [draw_tile(config, rng, "AutoFP6", 2, 2, 2, "overlap and dropped") for _ in range(2)]
    uneven += random_tiles(config, rng, 6, 4)
    run = Run(config, component_type(config), seed=3)
    compared = []

    async def bench(ctx):
        compared.append(await compare_cycles(ctx, run, even))
        assert run.status == 0
        for m, n, kv in ((1, 1, 0), (1, config.max_words + 1, 1)):
            run.queues["command"].append(command_word(config, m, n, kv, True))
        await run.step(ctx, 4)
        assert (run.status, run.busy) == (BAD_COMMAND, 0)
        # Blocked, with clear raised after the vector has left the pipeline.
        run.send(plain(1, 1, 1))
        run.ready = False
        await run.step(ctx, 14)
        run.clear = 1
        await run.step(ctx, 3)
        assert (run.status, run.busy) == (BAD_COMMAND, 1)
        run.clear, run.ready = 0, True
        await run.step(ctx, 10)
        await late_operands(ctx, run)
        run.stall = 0.5
        before = len(run.results)
        stalled = await compare(ctx, run, uneven)
        assert run.status == BAD_COMMAND | status_of(config, uneven)
        compared.extend((before, len(stalled)))

    run.go(bench)
    return tuple(compared)


def test_sound_element_passes_what_the_bugs_are_put_to():
    tiles, unhindered, stalled = all_is_well(Pe)
    # Six tiles of 16 sums, one that was blocked, and four that waited for operands.
    assert (tiles, unhindered) == (6, 16 + 1 + 4)
    assert stalled > 8


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_noticed(bug):
    with pytest.raises(AssertionError):
        all_is_well(edited(hdl.pe, BUGS[bug]).Pe)


def test_a_latency_that_the_model_does_not_know_is_noticed():
    run = Run(SMALL, Pe(dataclasses.replace(SMALL, pipeline="fast")))

    async def bench(ctx):
        await compare(ctx, run, [plain(2, 2, 2)])
        with pytest.raises(AssertionError):
            await compare_cycles(ctx, run, [plain(2, 2, 2)])

    run.go(bench)


@pytest.mark.parametrize("bug", COLLECTOR_BUGS)
def test_bugs_of_the_collector_are_noticed(bug, monkeypatch):
    monkeypatch.setattr(hdl.pe, "RecordMerger", edited(hdl.collector, *COLLECTOR_BUGS[bug]).RecordMerger)
    with pytest.raises(AssertionError):
        all_is_well(Pe)
