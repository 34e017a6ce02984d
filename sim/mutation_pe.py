"""The processing element in the stream player, judged by monitors and scoreboard of its cocotb bench (`sim.bench_pe`).

The stimuli are those of the bench as well: its plan of random tiles, commands to be refused, each status bit, blocked streams, resets at any time,
and runs whose every cycle is known. Only the time that a section gets is fixed before, generously, because rows cannot wait.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.pe import BAD_COMMAND, PeConfig, Tile, TileResult, cycles, run_tile
from sim.bench_pe import Due, Scoreboard, plain, raising
from sim.design import config_of, generated
from sim.mutation_player import judged
from sim.player import WORTH, Player, Rows, Script
from sim.scoreboard import Tally
from sim.streams import Monitor
from sim.tiles import PATTERNS, command_word, draw_tile, entry_words, modes, plan, refused_commands

__all__ = ["ElementPlayer"]

DIRECTED_ROWS, LONG_ROWS = 4096, 16384
"""Portions from these lengths on have the directed sections, and the longest tiles."""
RESETS = 40
ANY_SIZES, JUST_FIT = 300, 16
"""Commands of any size, and tiles of nearly the largest."""
MOST_COMMANDS, SOME_FIT = 20_000, 100
"""Commands of every size that are to be refused, and tiles of sizes that are not."""
MASK_ROWS = 14
"""Enough for a tile of one vector."""
EPOCH = 6
"""Tiles of an epoch of the plan."""

INPUTS, OUTPUTS = ("command", "weight", "activation"), ("result",)


@dataclasses.dataclass
class Section:
    """A stretch of rows and what is known of it.

    Attributes
    ----------
    first, rows : int
    reset : bool
        A reset comes before it.
    commands : list of (Tile or None)
        What its commands stand for, in order; None is refused.
    counts : dict of str to int
        Words that it offers, by stream.
    complete : bool
        All of it, and of those before, is done at its end.
    status : int or None
        Status at its end.
    cycles : list of int or None
        When the last result of each tile leaves.
    """

    first: int
    rows: int
    reset: bool
    commands: list[Tile | None]
    counts: dict[str, int]
    complete: bool = True
    status: int | None = None
    cycles: list[int] | None = None


@dataclasses.dataclass
class Stimulus:
    """Rows, their sections, and what is remembered of runs of them.

    Attributes
    ----------
    columns : dict of ndarray
    sections : list of Section
    results : dict
        Golden results, by identity of the tile.
    passed : dict of ndarray or None
        Outputs that were right; the same again are right again.
    """

    columns: Rows
    sections: list[Section]
    results: dict[int, TileResult] = dataclasses.field(default_factory=dict)
    passed: Mapping[str, NDArray[Any]] | None = None


class _Board(Scoreboard):
    """The bench's scoreboard, which remembers the golden results."""

    def __init__(self, bench: Any, results: dict[int, TileResult]) -> None:
        super().__init__(bench)
        self._results = results

    def accept(self) -> None:
        """Note the command that is taken in this cycle."""
        tile = self.commands[0]
        if tile is None:
            super().accept()
            return
        self.commands.popleft()
        if id(tile) not in self._results:
            self._results[id(tile)] = run_tile(self.bench.config, tile)
        result = self._results[id(tile)]
        sums = result.psum.ravel().tolist()
        self.weights += tile.kv * tile.n
        self.activations += tile.kv * tile.m
        self.may |= result.status
        words = deque([*sums[:-1], sums[-1] | 1 << 64])
        self.due.append(Due(tile, words, result.status, (self.weights, self.activations)))


class _Writer:
    """Writes sections."""

    def __init__(self, config: PeConfig, widths: Mapping[str, int], rng: np.random.Generator) -> None:
        self.config = config
        self.rng = rng
        self.random = random.Random(int(rng.integers(1 << 62)))
        self.script = Script(widths, rng)
        self.sections: list[Section] = []
        self._reset = False

    def reset(self) -> None:
        """Reset for a few rows, with whatever at the inputs."""
        rows = self.random.randint(1, 3)
        go = {f"{name}__go": self.rng.integers(0, 2, rows) for name in (*INPUTS, *OUTPUTS)}
        self.script.add(rows, rst=1, clear=self.rng.integers(0, 2, rows), **go)
        self._reset = True

    def kinds(self, pattern: str) -> dict[str, str]:
        """Draw how each stream stalls, for one of `PATTERNS`."""
        kinds = {}
        for name in (*INPUTS, *OUTPUTS):
            if pattern == "bursts":
                kinds[name] = "bursts"
            elif pattern == "none" or pattern == ("outputs" if name in INPUTS else "inputs"):
                kinds[name] = "never"
            else:
                several = ["rarely"] * 5 + ["often"] * 5 + ["mostly"]
                kinds[name] = self.random.choice(several if name in INPUTS else [*several, *["behind valid"] * 3])
        return kinds

    def play(
        self,
        commands: Sequence[Tile | tuple[int, int, int, bool, bool]],
        kinds: Mapping[str, str] | None = None,
        rows: int | None = None,
        clear: float | NDArray[Any] = 0.0,
        closed: Mapping[str, int] | None = None,
        **known: Any,
    ) -> None:
        """Write a section.

        Parameters
        ----------
        commands : sequence
            Tiles, and commands to be refused.
        kinds : mapping of str to str, optional
            How each stream stalls, one of `sim.streams.STALLS`; none does by default.
        rows : int, optional
            Enough to finish, by default.
        clear : float or ndarray
            Share of rows with ``clear``, or each row's.
        closed : mapping of str to int, optional
            Rows for which a stream does nothing at first.
        known : dict
            Further attributes of `Section`.
        """
        kinds = {**dict.fromkeys((*INPUTS, *OUTPUTS), "never"), **(kinds or {})}
        words: dict[str, list[int]] = {name: [] for name in INPUTS}
        count = dict.fromkeys((*INPUTS, *OUTPUTS), 0)
        steps = 0
        due: list[Tile | None] = []
        for command in commands:
            if isinstance(command, Tile):
                tile = command
                due.append(tile)
                head = tile.m, tile.n, tile.kv, tile.mode_nvfp4, tile.refine_en
                words["command"].append(command_word(self.config, *head))
                words["weight"] += entry_words(self.config, tile.weights, True)
                words["activation"] += entry_words(self.config, tile.activations, False)
                count["result"] += tile.m * tile.n
                steps += tile.kv * max(tile.m * tile.n, 3) + 8
            else:
                due.append(None)
                words["command"].append(command_word(self.config, *command))
        count |= {name: len(words[name]) for name in INPUTS}
        closed = closed or {}
        if rows is None:
            stalled = sum(int(count[name] * WORTH[kind]) for name, kind in kinds.items() if kind != "never")
            rows = 60 + 50 * ("bursts" in kinds.values()) + steps + count["result"] + stalled + stalled // 8
            rows = max(rows, *(count[name] + 30 for name in INPUTS)) + max([0, *closed.values()])
            rows += 60 * ("mostly" in kinds.values())
        columns: dict[str, Any] = {}
        for name, kind in kinds.items():
            go = self.script.stalls(kind, rows)
            go[: closed.get(name, 0)] = False
            columns[f"{name}__go"] = go
            if name in OUTPUTS:
                columns[f"{name}__behind"] = kind == "behind valid"
        clears = self.rng.random(rows) < clear if isinstance(clear, float) else clear
        section = Section(self.script.length, rows, self._reset, due, {name: count[name] for name in INPUTS}, **known)
        # More words than rows are those that a reset makes forget.
        words = {name: listed[:rows] for name, listed in words.items()}
        self.script.add(rows, clear=clears, **columns, **words)
        self.sections.append(section)
        self._reset = False

    # Sections, each like a test of the bench.

    def uninterrupted(self, sizes: Sequence[tuple[int, int, int]]) -> None:
        """Tiles of these sizes with streams that never wait, to the cycle."""
        self.reset()
        tiles = [
            draw_tile(self.config, self.rng, self.random.choice(modes(self.config)), *size, "disjoint")
            for size in sizes
        ]
        # The first word is in its queue one row later.
        self.play(tiles, cycles=[cycle + 1 for cycle in cycles(self.config, sizes)])

    def every_cycle(self) -> None:
        """Short tiles and single vectors back to back."""
        config = self.config
        few = min(3, config.max_n)
        runs = [[(1, 1, 1)] * 8, [(1, 1, 3), (1, 2, 3), (min(2, config.max_m), 1, 3), (1, 1, 1)], [(1, few, 4)] * 3]
        run = []
        for _ in range(6):
            m = self.random.randint(1, min(config.max_m, self.random.choice([2, 4, 64])))
            n = self.random.randint(1, min(config.max_words // m, self.random.choice([1, 2, 4, 16])))
            run.append((m, n, self.random.choice([1, 1, 2, 3, 5])))
        for each in (*runs, run):
            self.uninterrupted(each)

    def full(self) -> None:
        """Tiles as large as the buffers, without stalls and with."""
        config = self.config
        words, m = config.max_words, config.max_m
        self.uninterrupted([(m, words // m, 2), (1, words, 2), (m, words // m, 1)])
        for pattern in ("both", "bursts"):
            tiles = [draw_tile(config, self.rng, modes(config)[-1], m, words // m, 2, "overlap and dropped")]
            tiles.append(draw_tile(config, self.rng, "NVFP4", 1, words, 1))
            self.play(tiles, self.kinds(pattern))

    def longest(self) -> None:
        """As many K-vectors as a command can say."""
        few = min(3, self.config.max_n)
        self.uninterrupted([(1, few, 520), (1, few, self.config.max_kv)])

    def refusals(self) -> None:
        """Each refused command does nothing but set its bit: alone, while a tile is computed, and twice in a row."""
        config = self.config
        for command in refused_commands(config).values():
            self.reset()
            self.play([], rows=1, status=0)
            self.play([command], rows=30, status=BAD_COMMAND)
            tiles = [draw_tile(config, self.rng, mode, 1, min(4, config.max_n), 3) for mode in ("AutoFP2", "NVFP4")]
            self.play([tiles[0], command, command, tiles[1]], status=None)
            self.play([], rows=2, clear=np.array([1, 0]), status=0)
            self.play([command], rows=4, status=BAD_COMMAND)

    def products(self) -> None:
        """Commands on both sides of every limit: M·N too large, and any sizes; then tiles that just fit."""
        config = self.config
        most = tuple((1 << limit.bit_length()) - 1 for limit in (config.max_m, config.max_n, config.max_kv))
        bad = [(m, min(config.max_words // m + 1, most[1]), 1, True, False) for m in range(1, config.max_m + 1)]
        for _ in range(ANY_SIZES):
            m, n, kv = (self.random.randint(0, limit >> self.random.randrange(limit.bit_length())) for limit in most)
            legal = 1 <= m <= config.max_m and 1 <= m * n <= config.max_words and 1 <= kv <= config.max_kv
            illegal = self.random.random() < 0.3 and config.refinement != "none"
            if illegal or not legal:
                bad.append((m, n, kv, not illegal, illegal))
        self.random.shuffle(bad)
        self.play(bad, self.kinds("both"), status=BAD_COMMAND)
        self.play([], rows=2, clear=np.array([1, 0]), status=0)
        for _ in range(JUST_FIT):
            m = self.random.randint(1, config.max_m)
            n = max(config.max_words // m - self.random.choice([0, 0, 1, 2]), 1)
            self.play([draw_tile(config, self.rng, "NVFP4", m, n, 1)], status=0)

    def every_size(self) -> None:
        """Every M and N whose product is too large, and some that fit, to the cycle."""
        config = self.config
        most = (1 << config.max_n.bit_length()) - 1
        pairs = [(m, n) for m in range(1, config.max_m + 1) for n in range(1, most + 1)]
        bad = [(m, n, 1, True, False) for m, n in pairs if m * n > config.max_words]
        self.random.shuffle(bad)
        self.reset()
        self.play(bad[:MOST_COMMANDS], status=BAD_COMMAND)
        fit = [(m, n, 2) for m, n in pairs if m * n <= config.max_words]
        self.uninterrupted(self.random.sample(fit, min(SOME_FIT, len(fit))))

    def masks(self) -> None:
        """Each pair of masks in each block by itself, so that nothing else raises the status or changes the sum."""
        if self.config.refinement == "none":
            return
        for block in range(self.config.vmac.blocks):
            for pair in self.rng.permutation(256).tolist():
                tile = draw_tile(self.config, self.rng, "AutoFP6", 1, 1, 1)
                tile.weights.masks[0, 0, block], tile.activations.masks[0, 0, block] = pair & 15, pair >> 4
                # The last row clears what the tile raised.
                self.play([tile], rows=MASK_ROWS, clear=np.arange(MASK_ROWS) == MASK_ROWS - 1)

    def status_bits(self) -> None:
        """Each bit by itself stays through harmless tiles and ``clear`` while busy, and falls by ``clear`` when idle or reset."""
        harmless = plain(self, 2, 1, 3)  # type: ignore[arg-type]
        for bit, tile in raising(self).items():  # type: ignore[arg-type]
            for by_reset in (False, True):
                self.play([harmless], status=0)
                self.play([(0, 1, 1, True, False) if tile is None else tile], status=bit)
                self.play([harmless] * 2, status=bit)
                # Busy and then blocked, with clear high from when it is busy until it is not for long.
                held = 40
                clear = np.zeros(held + 60)
                clear[4:held] = 1
                self.play([harmless], rows=held + 60, clear=clear, closed={"result": held}, status=bit)
                if by_reset:
                    self.reset()
                    self.play([], rows=2, status=0)
                else:
                    self.play([], rows=2, clear=np.array([1, 0]), status=0)

    def blocked(self) -> None:
        """Operands that come late, one after the other, and results that nobody takes."""
        config = self.config
        tiles = [draw_tile(config, self.rng, "NVFP4", min(2, config.max_m), 1, kv) for kv in (2, 1, 1, 3)]
        self.reset()
        for late in INPUTS:
            self.play(tiles, closed={late: 60})
        self.play(tiles, closed={"weight": 30, "activation": 60})
        self.play(tiles, closed={"activation": 30, "weight": 60})
        self.play(tiles, closed={"result": 120})
        large = [draw_tile(config, self.rng, "NVFP4", config.max_m, max(config.max_words // config.max_m, 1), 1)] * 3
        self.play(large, closed={"result": 3 * config.max_words + 40})
        self.play(large, closed={"command": 3 * config.max_words + 40})

    def resets(self) -> None:
        """Reset after every number of cycles, with all streams in motion or stalling."""
        config = self.config
        for distance in range(RESETS):
            size = min(2, config.max_m), 1, 2
            tiles = [draw_tile(config, self.rng, modes(config)[-1], *size, "dropped") for _ in range(3)]
            self.play(tiles, self.kinds(PATTERNS[distance % len(PATTERNS)]), rows=distance + 1, complete=False)
            self.reset()
            self.play([draw_tile(config, self.rng, "AutoFP2", 1, min(3, config.max_n), 2)])

    def epoch(self) -> None:
        """Random tiles and refused commands in one stall pattern, then a reset, a clear, or neither."""
        config = self.config
        for planned in plan(config, self.rng, EPOCH, EPOCH):
            bad = deque(planned.refused)
            commands: list[Any] = []
            for number, tile in enumerate(planned.tiles):
                while bad and bad[0][0] == number:
                    commands.append(refused_commands(config)[bad.popleft()[1]])
                commands.append(tile)
            self.play(commands, self.kinds(planned.pattern), clear=self.random.choice([0.0, 0.1]))
            match self.random.randrange(3):
                case 0:
                    self.reset()
                case 1:
                    self.play([], rows=2, clear=np.array([1, 1]), status=0)


class ElementPlayer:
    """A processing element in the stream player, with what `sim.regress.Bench` has for blocks that take a vector in every cycle.

    Parameters
    ----------
    parameters : mapping
        Of the processing element.
    verilog : str, optional
        Another implementation.
    simulator, optimise, plusargs
        As for `sim.player.Player`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        verilog: str | None = None,
        simulator: str = "verilator",
        optimise: str = "-O1",
        plusargs: Mapping[str, int] | None = None,
    ) -> None:
        design = generated("pe", **parameters)
        self.config: PeConfig = config_of("pe", **parameters)
        self.player = Player(
            design.sidecar, design.verilog if verilog is None else verilog, None, simulator, optimise, plusargs
        )
        self.harness = self.player.harness

    def stimuli(self, rows: int, rng: np.random.Generator) -> tuple[Stimulus, NDArray[np.uint8]]:
        """Write at least so many rows: the stimulus, for `check`, and the harness's file."""
        writer = _Writer(self.config, self.player.widths, rng)
        writer.reset()
        parts: list[Callable[[], None]] = []
        if rows >= DIRECTED_ROWS:
            parts += [writer.status_bits, writer.refusals, writer.blocked, writer.resets, writer.products, writer.masks]
        if rows >= LONG_ROWS:
            parts += [writer.full, writer.every_size, writer.longest]
        for part in (*parts, writer.every_cycle, writer.epoch):
            part()
        while writer.script.length < rows:
            writer.epoch()
        columns = writer.script.columns()
        return Stimulus(columns, writer.sections), self.harness.pack(columns)

    def check(self, stimulus: Stimulus, outputs: Mapping[str, NDArray[Any]]) -> Tally:
        """Judge the harness's outputs for a stimulus of `stimuli`."""
        expected = {
            "sums": sum(tile.m * tile.n for s in stimulus.sections if s.complete for tile in s.commands if tile)
        }
        return judged(stimulus, outputs, expected, lambda: self._judge(stimulus, outputs))

    def _judge(self, stimulus: Stimulus, outputs: Mapping[str, NDArray[Any]]) -> str:
        dut = self.player.recording(outputs, stimulus.columns, ("clear",))
        if any(flags.any() for name, flags in outputs.items() if name.endswith("__x")):
            return "unknown bits"
        monitors = {name: Monitor(dut, name) for name in (*INPUTS, *OUTPUTS)}
        streams = SimpleNamespace(monitors=monitors, cycle_number=-1)
        board = _Board(SimpleNamespace(streams=streams, dut=dut, config=self.config), stimulus.results)
        offered = dict.fromkeys(INPUTS, 0)
        for section in stimulus.sections:
            if section.reset:
                board.reset()
                streams.cycle_number = -1
                offered = dict.fromkeys(INPUTS, 0)
                for monitor in monitors.values():
                    monitor.forget()
            finished = len(board.finished)
            board.commands.extend(section.commands)
            for name, count in section.counts.items():
                offered[name] += count
            try:
                for dut.row in range(section.first, section.first + section.rows):
                    streams.cycle_number += 1
                    for monitor in monitors.values():
                        monitor.sample()
                    board.check()
            except (AssertionError, IndexError) as error:
                # A command too many finds no tile.
                return f"row {dut.row}: {error}"
            if not section.complete:
                continue
            if not board.idle:
                return f"row {dut.row}: {len(board.due)} tiles unfinished, {len(board.commands)} commands not taken"
            if any(monitors[name].count != count for name, count in offered.items()):
                return f"row {dut.row}: operands were left over"
            if section.status is not None and board.seen != section.status:
                return f"row {dut.row}: status is {board.seen:05b}, not {section.status:05b}"
            found = [cycle for _, _, cycle in board.finished[finished:]]
            if section.cycles is not None and found != section.cycles:
                return f"row {dut.row}: tiles ended in cycles {found}, not {section.cycles}"
        return ""
