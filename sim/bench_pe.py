"""cocotb bench of the processing element: streams with random stalls, and a scoreboard whose reference is the golden model.

The scoreboard predicts every result, ``busy`` in every cycle, and which status bits must and may be set; the monitors check the rules of the streams.
"""

import dataclasses
import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cocotb
import numpy as np

from model.packed_pair import pack
from model.pe import BAD_COMMAND, DROPPED, NAN_SCALE, OVERLAP, SATURATED, Operands, PeConfig, Tile, cycles, run_tile
from sim.bench_common import bench_settings, pins, start_clock
from sim.coverage import GOAL
from sim.design import config_of
from sim.streams import Streams
from sim.tiles import (
    PATTERNS,
    Planned,
    command_word,
    draw_tile,
    entry_words,
    modes,
    plan,
    plan_length,
    refused_commands,
    sample_tile,
    tile_coverage,
)

ONE, TWO, LARGEST = 0x38, 0x40, 0x7E
"""Scale bytes."""
UNIT = 1 << 22
"""A product of 1 under scales of 1, in an exact sum."""
ZERO_PAIR = 0b11100
USEFUL = 0.98
"""Least share of cycles with a vector over a long run of full tiles."""
FULL = 32
"""Sums of a bank from which on a full tile's length hides its beginning and its end."""


@dataclasses.dataclass
class Due:
    """A tile that was accepted: what it must give."""

    tile: Tile
    words: deque[int]
    status: int
    operands: tuple[int, int]


class Scoreboard:
    """Looks at every cycle and compares it with what the commands and the golden model say.

    Attributes
    ----------
    commands : deque of (Tile or None)
        What the commands that are offered stand for; None must be refused.
    compared, nonzero : dict and int
        Sums compared, by mode, and those that are not zero.
    finished : list of (Tile, int, int)
        Tiles whose results have all come, their status and the cycle in which their last result left.
    refused : int
    """

    def __init__(self, bench: "Bench") -> None:
        self.bench = bench
        self.commands: deque[Tile | None] = deque()
        self.compared = dict.fromkeys(modes(bench.config), 0)
        self.nonzero = self.refused = 0
        self.reset()

    def reset(self) -> None:
        """Forget what a reset makes the block forget."""
        self.commands.clear()
        self.due: deque[Due] = deque()
        self.finished: list[tuple[Tile, int, int]] = []
        self.must = self.may = self.seen = 0
        self.busy = False
        self.weights = self.activations = 0

    @property
    def idle(self) -> bool:
        """Nothing is due."""
        return not self.commands and not self.due

    def accept(self) -> None:
        """Note the command that is taken in this cycle."""
        tile = self.commands.popleft()
        if tile is None:
            self.refused += 1
            self.must |= BAD_COMMAND
            self.may |= BAD_COMMAND
            return
        result = run_tile(self.bench.config, tile)
        sums = result.psum.ravel().tolist()
        words = deque([*sums[:-1], sums[-1] | 1 << 64])
        self.weights += tile.kv * tile.n
        self.activations += tile.kv * tile.m
        self.may |= result.status
        self.due.append(Due(tile, words, result.status, (self.weights, self.activations)))

    def compare(self, word: int, cycle: int) -> None:
        """Compare the result that is taken in this cycle."""
        due = self.due[0]
        expected = due.words.popleft()
        tile = due.tile
        assert word == expected, (
            f"cycle {cycle}: result is {word:#x}, not {expected:#x}, {len(due.words)} from the end of a tile of "
            f"{tile.m}·{tile.n}·{tile.kv} in mode {mode_of(tile)}"
        )
        self.compared[mode_of(tile)] += 1
        self.nonzero += word & (1 << 64) - 1 != 0
        if not due.words:
            self.finished.append((tile, due.status, cycle))
            self.due.popleft()

    def check(self) -> None:
        """Look at the pins of this cycle."""
        monitors, cycle = self.bench.streams.monitors, self.bench.streams.cycle_number
        values = pins(self.bench.dut, ("busy", "status", "clear"))
        assert values["busy"] == self.busy, f"cycle {cycle}: busy is {values['busy']}"
        result = monitors["result"]
        offered = result.waiting if result.moved is None else result.moved
        if offered is not None:
            assert self.due, f"cycle {cycle}: a result of nothing, {offered:#x}"
            counts = monitors["weight"].count, monitors["activation"].count
            assert all(have >= need for have, need in zip(counts, self.due[0].operands, strict=True)), (
                f"cycle {cycle}: a result before its operands"
            )
            if offered >> 64:
                self.must |= self.due[0].status
        status = values["status"]
        assert status & self.must == self.must, f"cycle {cycle}: status {status:05b} lacks bits of {self.must:05b}"
        assert not status & ~self.may, f"cycle {cycle}: status {status:05b} has more than {self.may:05b}"
        assert not self.seen & ~status, f"cycle {cycle}: status {status:05b} forgot {self.seen:05b}"
        self.seen = status
        if values["clear"] and not values["busy"]:
            self.must = self.may = self.seen = 0
        if monitors["command"].moved is not None:
            self.accept()
        if result.moved is not None:
            self.compare(result.moved, cycle)
        self.busy = bool(self.due)


class Bench:
    """The block, its streams and its scoreboard.

    Parameters
    ----------
    dut : handle
        The top module.
    """

    def __init__(self, dut: Any) -> None:
        self.settings = bench_settings()
        self.dut = dut
        self.config = config_of(self.settings["block"], **self.settings["parameters"])
        self.tiles: int = self.settings["rows"]
        self.rng = np.random.default_rng(cocotb.RANDOM_SEED)
        self.random = random.Random(cocotb.RANDOM_SEED)
        self.streams = Streams(dut, ("command", "weight", "activation"), ("result",))
        self.board = Scoreboard(self)
        self.clears = 0.0
        self.streams.drivers.append(self._clear)
        self._cleared = 0
        dut.clear.value = 0

    def _clear(self) -> None:
        clear = int(self.random.random() < self.clears)
        if clear != self._cleared:
            self.dut.clear.value = clear
        self._cleared = clear

    async def start(self) -> None:
        """Start the clock and reset."""
        start_clock(self.dut)
        await self.reset()

    async def reset(self) -> None:
        """Reset the block; nothing that was asked of it is due any more."""
        await self.streams.reset()
        self.board.reset()

    def stall(self, pattern: str) -> None:
        """Stall the streams as one of `PATTERNS` says, each in a way of its own."""

        def kind(inputs: bool) -> str:
            if pattern == "bursts":
                return "bursts"
            if pattern == "none" or pattern == ("outputs" if inputs else "inputs"):
                return "never"
            kinds = ["rarely"] * 5 + ["often"] * 5 + ["mostly"]
            return self.random.choice(kinds if inputs else [*kinds, *["behind valid"] * 3])

        for source in self.streams.sources.values():
            source.stall(kind(True), self.random)
        for sink in self.streams.sinks.values():
            sink.stall(kind(False), self.random)

    def send(self, tile: Tile) -> None:
        """Queue a tile."""
        words = self.streams.sources
        command = tile.m, tile.n, tile.kv, tile.mode_nvfp4, tile.refine_en
        words["command"].words.append(command_word(self.config, *command))
        words["weight"].words.extend(entry_words(self.config, tile.weights, True))
        words["activation"].words.extend(entry_words(self.config, tile.activations, False))
        self.board.commands.append(tile)

    def send_refused(self, command: tuple[int, int, int, bool, bool]) -> None:
        """Queue a command that must be refused."""
        self.streams.sources["command"].words.append(command_word(self.config, *command))
        self.board.commands.append(None)

    async def step(self, count: int = 1) -> None:
        """Run so many cycles, each checked."""
        for _ in range(count):
            await self.streams.cycle()
            self.board.check()

    async def finish(self) -> None:
        """Run until nothing is due, and some cycles more in which nothing may come."""
        left = 1000
        for tile in self.board.commands:
            left += 0 if tile is None else 40 * (tile.kv * (3 + tile.m * tile.n + tile.m + tile.n) + tile.m * tile.n)
        for due in self.board.due:
            left += 40 * (due.tile.kv + 1) * (3 + due.tile.m + due.tile.n + due.tile.m * due.tile.n)
        while not self.board.idle:
            await self.step()
            left -= 1
            assert left, (
                f"stuck with {len(self.board.due)} tiles accepted and {len(self.board.commands)} commands to come"
            )
        await self.step(20)
        assert not any(source.words for source in self.streams.sources.values()), "operands were left over"

    async def run(self, tiles: Iterable[Tile]) -> None:
        """Send tiles and wait for their results."""
        for tile in tiles:
            self.send(tile)
        await self.finish()


def mode_of(tile: Tile) -> str:
    """Return the name of a tile's mode."""
    return ("AutoFP2", "NVFP4", "AutoFP6")[int(tile.mode_nvfp4) + int(tile.refine_en)]


def plain(bench: Bench, m: int, n: int, kv: int, nvfp4: bool = True, refine_en: bool = False) -> Tile:
    """Return a tile of zeros under scales of 1, without records."""
    config = bench.config

    def operands(count: int, scales: int, zero: int) -> Operands:
        blocks = config.vmac.blocks
        return Operands(
            np.full((kv, count, config.lanes), zero, np.uint8),
            np.full((kv, count, scales), ONE, np.uint8),
            np.zeros((kv, count, blocks), np.uint8),
            np.zeros((kv, count, blocks, 2), np.uint8),
        )

    weights = operands(n, config.vmac.w_scale_bytes, ZERO_PAIR)
    return Tile(nvfp4, refine_en, weights, operands(m, config.vmac.blocks, 0))


async def sums_of(bench: Bench, tile: Tile) -> list[int]:
    """Run a tile and return what came out, in order and without ``last``, as the pins had it.

    If no bank holds it, each weight vector is a tile by itself, which gives the same.
    """
    got: list[int] = []
    if tile.m * tile.n <= bench.config.max_words:
        bench.send(tile)
    else:
        for n in range(tile.n):
            bench.send(dataclasses.replace(tile, weights=tile.weights[:, [n]]))
    while not bench.board.idle:
        await bench.step()
        word = bench.streams.monitors["result"].moved
        if word is not None:
            got.append(word & (1 << 64) - 1)
    await bench.step(3)
    return got


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def worked_by_hand(dut: Any) -> None:
    """Compare tiles of 2 activations, 3 weights and 2 K-vectors with sums that were worked by hand, in every mode."""
    bench = Bench(dut)
    await bench.start()
    # Lane 0. Activations 1, 2, then -1, 3; weights 0.5, 6, -4, then 1, 1, 1.5, as pairs of table 8.
    tile = plain(bench, 2, 3, 2)
    tile.activations.codes[:, :, 0] = [[2, 4], [10, 5]]
    tile.weights.codes[:, :, 0] = [[0b01100, 0b00001, 0b00011], [0b10100, 0b10100, 0b01000]]
    # The last lane, in another block under scales of 2: weight 1 and activation 1 with the first weight vector only, in the first K-vector.
    tile.activations.codes[0, :, -1] = 2
    tile.weights.codes[0, 0, -1] = 0b10100
    tile.activations.scales[0, :, -1] = TWO
    tile.weights.scales[0, :, bench.config.vmac.blocks - 1] = TWO
    expected = [-0.5 + 4, 4 + 4, 5, 15, -5.5, -3.5]

    def exact(values: Sequence[float]) -> list[int]:
        return [int(value * UNIT) % 2**64 for value in values]

    assert await sums_of(bench, tile) == exact(expected)
    if bench.config.refinement != "none" and bench.config.step == "fixed":
        # 1/8 on the weight 6 in the first K-vector; -1/4 on the activation 3 in the second.
        tile.weights.masks[0, 1, 0], tile.weights.offsets[0, 1, 0, 0] = 1, 0b01
        tile.activations.masks[1, 1, 0], tile.activations.offsets[1, 1, 0, 0] = 1, 0b10
        refined = dataclasses.replace(tile, refine_en=True)
        assert await sums_of(bench, tile) == exact(expected)
        more = [0, -0.25, 0.125, 0.25 - 0.25, 0, -0.375]
        assert await sums_of(bench, refined) == exact([x + y for x, y in zip(expected, more, strict=True)])
    # Digits of the even rows 1, 2, -1, of the odd rows -2, 0, 1, the same in both K-vectors.
    tile = plain(bench, 2, 3, 2, nvfp4=False)
    tile.activations.codes[:, :, 0] = [[2, 4], [10, 5]]
    tile.weights.codes[:, :, 0] = pack([1, 2, -1], [-2, 0, 1])
    tile.weights.scales[:] = 0x7C
    # 0x7C is 384.
    half = 1 << bench.config.window_shift - 1

    def windowed(*products: int) -> int:
        return sum(product * 384 * UNIT + half >> bench.config.window_shift for product in products) % 2**32

    rows = [((1, -1), (-2, 2)), ((2, 3), (-4, -6)), ((2, -2), (0, 0)), ((4, 6), (0, 0)), ((-1, 1), (1, -1))]
    rows.append(((-2, -3), (2, 3)))
    assert await sums_of(bench, tile) == [windowed(*odd) << 32 | windowed(*even) for even, odd in rows]
    assert bench.board.refused == 0


@cocotb.test(timeout_time=2, timeout_unit="sec")
async def random_tiles(dut: Any) -> None:
    """Random tiles in all modes, sizes and stall patterns, with refused commands, resets and clears in between."""
    bench = Bench(dut)
    await bench.start()
    config, board = bench.config, bench.board
    coverage = tile_coverage(config)
    reasons = tuple(refused_commands(config))
    expected = dict.fromkeys(board.compared, 0)
    tiles = refused = 0

    async def run(epoch: Planned) -> None:
        nonlocal tiles, refused
        bench.stall(epoch.pattern)
        bench.clears = bench.random.choice([0, 0.1])
        bad = deque(epoch.refused)
        for number, tile in enumerate(epoch.tiles):
            while bad and bad[0][0] == number:
                bench.send_refused(refused_commands(config)[bad[0][1]])
                coverage.sample(
                    "refused", np.array([PATTERNS.index(epoch.pattern)]), np.array([reasons.index(bad[0][1])])
                )
                bad.popleft()
                refused += 1
            bench.send(tile)
            expected[mode_of(tile)] += tile.m * tile.n
            tiles += 1
        before = None
        first = len(board.finished)
        await bench.finish()
        assert board.refused == refused
        for tile, status, _ in board.finished[first:]:
            sample_tile(coverage, config, epoch.pattern, tile, status, before)
            before = tile

    for epoch in plan(config, bench.rng, bench.tiles):
        await run(epoch)
        match bench.random.randrange(3):
            case 0:
                await bench.reset()
            case 1:
                bench.clears = 1
                await bench.step(2)
    compared = sum(board.compared.values())
    cocotb.log.info(
        "compared %d sums of %d tiles, %d not zero; %d commands refused", compared, tiles, board.nonzero, refused
    )
    assert tiles == bench.tiles > 0
    assert board.compared == expected
    assert 2 * board.nonzero > compared
    for name, counted in coverage.summary().items():
        cocotb.log.info("%s: %d of %d bins", name, counted["hit"], counted["bins"])
    if bench.settings["report"]:
        report = {
            "tally": {"expected": expected, "compared": board.compared, "nonzero": board.nonzero},
            "counts": {name: counts.tolist() for name, counts in coverage.counts.items()},
        }
        Path(bench.settings["report"]).write_text(json.dumps(report), encoding="utf-8")
    if tiles >= plan_length(config):
        holes = {name: coverage.missing(name)[:3] for name in coverage.points if coverage.missing(name)}
        assert coverage.share >= GOAL, f"coverage is {coverage.share:.4%}, missing for example {holes}"


@cocotb.test(timeout_time=10, timeout_unit="ms")
async def refused_commands_do_nothing(dut: Any) -> None:
    """Each refused command is taken and sets its bit; nothing comes out, and the next tile is right, with its own operands."""
    bench = Bench(dut)
    await bench.start()
    config = bench.config
    for number, (reason, command) in enumerate(refused_commands(config).items()):
        await bench.reset()
        assert pins(dut, ["status"])["status"] == 0
        bench.send_refused(command)
        for _ in range(4):
            await bench.step()
            assert bench.streams.monitors["command"].count == 1, f"{reason}: not taken at once"
        await bench.step(40)
        values = pins(dut, ["status", "busy"])
        assert values == {"status": BAD_COMMAND, "busy": 0}, f"{reason}: {values}"
        assert bench.board.refused == number + 1
        await bench.run([draw_tile(config, bench.rng, "NVFP4", 1, 2, 2)])
        assert len(bench.board.finished) == 1
        # While a tile is computed, and twice in a row.
        bench.send(draw_tile(config, bench.rng, "AutoFP2", 1, min(4, config.max_n), 8))
        await bench.step(5)
        bench.send_refused(command)
        bench.send_refused(command)
        await bench.run([draw_tile(config, bench.rng, "NVFP4", 1, 2, 1)])
        bench.board.refused -= 2


def raising(bench: Bench) -> dict[int, Tile | None]:
    """Return a tile, or None for a bad command, for each status bit, that raises no other."""
    no_number = plain(bench, 1, 2, 2)
    no_number.weights.scales[0, 1, 0] = 0x7F
    # As many K-vectors as it takes until the sum of largest products is beyond 32 bits.
    worth = bench.config.lanes * 12 * 448**2 * UNIT >> bench.config.window_shift
    full = plain(bench, 1, 1, 2**31 // worth + 1, nvfp4=False)
    full.weights.codes[:], full.activations.codes[:] = 0b00101, 7
    full.weights.scales[:] = full.activations.scales[:] = LARGEST
    tiles: dict[int, Tile | None] = {BAD_COMMAND: None, NAN_SCALE: no_number, SATURATED: full}
    if bench.config.refinement != "none":
        overlap = plain(bench, 2, 1, 1, refine_en=True)
        overlap.weights.masks[0, 0, -1] = overlap.activations.masks[0, 1, -1] = 4
        dropped = plain(bench, 1, 2, 1, refine_en=True)
        dropped.weights.masks[0, 1, 0] = 0b0111
        tiles |= {OVERLAP: overlap, DROPPED: dropped}
    return tiles


@cocotb.test(timeout_time=10, timeout_unit="ms")
async def status_bits(dut: Any) -> None:
    """Each bit is raised by itself, stays through harmless tiles and ``clear`` while busy, and falls by ``clear`` when idle or reset."""
    bench = Bench(dut)
    await bench.start()
    harmless = plain(bench, 2, 1, 3)
    for bit, tile in raising(bench).items():
        for by_reset in (False, True):
            await bench.run([harmless])
            assert pins(dut, ["status"])["status"] == 0
            if tile is None:
                bench.send_refused((0, 1, 1, True, False))
            else:
                bench.send(tile)
            await bench.finish()
            assert pins(dut, ["status"])["status"] == bit, f"{pins(dut, ['status'])} is not {bit:05b}"
            await bench.run([harmless] * 2)
            # Busy and then blocked: the sink takes nothing, clear is high all the time.
            bench.streams.sinks["result"].blocked = True
            bench.send(harmless)
            await bench.step(2)
            bench.clears = 1
            await bench.step(30)
            assert pins(dut, ["status", "busy"]) == {"status": bit, "busy": 1}
            bench.clears = 0
            await bench.step()
            bench.streams.sinks["result"].blocked = False
            await bench.finish()
            assert pins(dut, ["status", "busy"]) == {"status": bit, "busy": 0}
            if by_reset:
                await bench.reset()
            else:
                bench.clears = 1
                await bench.step()
                bench.clears = 0
                await bench.step()
            assert pins(dut, ["status"])["status"] == 0
            await bench.run([harmless])
    assert len(bench.board.finished) > 0


@cocotb.test(timeout_time=10, timeout_unit="ms")
async def blocked_streams(dut: Any) -> None:
    """Without operands nothing comes out; with its results not taken it computes two tiles, takes no third command, and loses nothing."""
    bench = Bench(dut)
    await bench.start()
    config, streams = bench.config, bench.streams
    tiles = [draw_tile(config, bench.rng, "NVFP4", min(2, config.max_m), 1, kv) for kv in (2, 1, 1, 3)]
    # The command alone.
    bench.send(tiles[0])
    operands = {name: list(streams.sources[name].words) for name in ("weight", "activation")}
    for name in operands:
        streams.sources[name].words.clear()
    await bench.step(30)
    assert streams.monitors["result"].waiting is None
    # The weights, then the activations too.
    for name, words in operands.items():
        streams.sources[name].words.extend(words)
        if name == "weight":
            await bench.step(30)
            assert streams.monitors["result"].count == 0
    await bench.finish()
    # Results are offered although nobody is ready.
    streams.sinks["result"].blocked = True
    for tile in tiles:
        bench.send(tile)
    await bench.step(100)
    assert streams.monitors["result"].waiting is not None
    assert streams.monitors["command"].count == 3
    assert streams.monitors["command"].waiting is not None
    streams.sinks["result"].blocked = False
    await bench.finish()
    assert len(bench.board.finished) == 5


@cocotb.test(timeout_time=50, timeout_unit="ms")
async def reset_at_any_time(dut: Any) -> None:
    """Reset after every number of cycles, with all streams in motion or stalling: afterwards it is as new."""
    bench = Bench(dut)
    await bench.start()
    config = bench.config
    finished = 0
    for distance in range(40):
        bench.stall(PATTERNS[distance % len(PATTERNS)])
        for _ in range(3):
            bench.send(draw_tile(config, bench.rng, modes(config)[-1], min(2, config.max_m), 1, 2, "dropped"))
        await bench.step(distance)
        await bench.reset()
        await bench.run([draw_tile(config, bench.rng, "AutoFP2", 1, min(3, config.max_n), 2)])
        finished += len(bench.board.finished)
        assert bench.board.seen == 0
    assert finished == 40


async def uninterrupted(bench: Bench, sizes: Sequence[tuple[int, int, int]]) -> list[int]:
    """Run tiles of these sizes with streams that never wait; return the cycle in which each one's last result leaves."""
    await bench.reset()
    bench.stall("none")
    for m, n, kv in sizes:
        bench.send(draw_tile(bench.config, bench.rng, bench.random.choice(modes(bench.config)), m, n, kv, "disjoint"))
    await bench.finish()
    return [cycle for _, _, cycle in bench.board.finished]


@cocotb.test(timeout_time=100, timeout_unit="ms")
async def cycles_without_stalls(dut: Any) -> None:
    """Tiles of random sizes, short ones and single vectors back to back take exactly the cycles that `model.pe.cycles` says."""
    bench = Bench(dut)
    await bench.start()
    config = bench.config
    few = min(3, config.max_n)
    runs = [[(1, 1, 1)] * 8, [(1, 1, 3), (1, 2, 3), (2, 1, 3), (1, 1, 1)], [(1, few, 4)] * 3, [(1, few, 520)]]
    if config == PeConfig() and bench.tiles >= plan_length(config):
        runs.append([(1, few, config.max_kv)])
    for _ in range(8):
        run = []
        for _ in range(bench.random.randint(2, 8)):
            m = bench.random.randint(1, min(config.max_m, bench.random.choice([2, 4, 64])))
            n = bench.random.randint(1, min(config.max_words // m, bench.random.choice([1, 2, 4, 16])))
            run.append((m, n, bench.random.choice([1, 1, 2, 3, 5])))
        runs.append(run)
    for run in runs:
        assert await uninterrupted(bench, run) == cycles(config, run), run


@cocotb.test(timeout_time=100, timeout_unit="ms")
async def full_tiles(dut: Any) -> None:
    """Over a long run of full tiles, loads and drains included, nearly every cycle has a vector."""
    bench = Bench(dut)
    await bench.start()
    words, m = bench.config.max_words, bench.config.max_m
    long = bench.tiles >= plan_length(bench.config)
    shapes = [(m, words // m), (1, words)]
    shapes += [(size, words // size) for size in (16, 16, 32, 2, 16, 8) if long and size <= m]
    kv = 32 if long else 8
    run = [(*shape, kv) for shape in shapes]
    last = (await uninterrupted(bench, run))[-1]
    vectors = sum(m * n * kv for m, n, kv in run)
    share = vectors / (last + 1)
    cocotb.log.info("utilisation: %d vectors in %d cycles, %.2f %%", vectors, last + 1, 100 * share)
    assert last == cycles(bench.config, run)[-1]
    if long and words >= FULL:
        assert share >= USEFUL
