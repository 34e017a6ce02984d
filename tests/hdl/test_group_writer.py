# amaranth: UnusedElaboratable=no
"""Group writer: every byte and request of tiles against the model, with stalls, errors and rows that are dropped; words of offsets."""

import random
from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hdl.group_writer import GroupWriter, group_tile_layout
from hdl.quantiser import group_layout
from model.dma import DmaConfig, words
from model.group_writer import GroupTile, writes
from model.quantiser import Groups
from model.tile_engine import EngineConfig
from tests.hdl.test_gearbox import drive, joined


def config_of(rows, columns, accumulators=16):
    return EngineConfig(rows=rows, columns=columns, accumulators=accumulators, activation_entries=4)


def raw(layout, **values):
    return sum(int(value) << layout[name].offset for name, value in values.items())


def draw_groups(rng, count, density):
    """Groups of all contents; of a subgroup's refinement there is a chance of ``density``."""
    generator = np.random.default_rng(rng.getrandbits(32))
    chosen = generator.random((count, 4)) < density
    offsets = generator.integers(-2, 2, (count, 16)) * np.repeat(chosen, 4, axis=1)
    nothing = np.zeros(count, bool)
    return Groups(
        generator.integers(0, 16, (count, 16), np.uint8),
        generator.integers(0, 127, count, np.uint8),
        (chosen << np.arange(4)).sum(axis=1).astype(np.uint8),
        offsets.astype(np.int8),
        nothing,
        nothing,
        np.zeros((count, 4), np.int64),
    )


def draw_tiles(config, rng, panels, *, space=40, outputs=None, rows=None, refine=None, density=None, most=3):
    """Panels of tiles side by side, each with its groups and what the model says of it."""
    tiles = []
    for _ in range(panels):
        height = rows or rng.randint(1, config.rows * config.max_m)
        places = {name: rng.getrandbits(space - 1) for name in ("codes", "scales", "masks", "offsets")}
        strides = {f"{name}_stride": rng.randrange(1 << 12) for name in places}
        refined = rng.random() < 0.7 if refine is None else refine
        pointers = None
        for k in range(rng.randint(1, most)):
            share = rng.choice([0.0, 0.05, 0.4, 1.0]) if density is None else density
            size = outputs or rng.randint(1, 2 * config.columns * config.max_n)
            tile = GroupTile(**places, **strides, rows=height, outputs=size, refine=refined, first=k == 0)
            groups = draw_groups(rng, height * 2 * tile.pairs, share)
            found, pointers = writes(tile, groups, pointers)
            tiles.append((tile, groups, found))
            for name, size in (("codes", 16), ("scales", 2), ("masks", 1)):
                places[name] += size * tile.pairs
    return tiles


def group_words(tiles):
    """Raw payloads of the group stream; offsets of subgroups that are not refined are 0, as the quantiser's are."""
    found = []
    for tile, groups, _ in tiles:
        for k in range(len(groups.scales)):
            found.append(
                raw(
                    group_layout,
                    codes=joined(groups.codes[k].tolist(), 4),
                    scale=groups.scales[k],
                    mask=groups.masks[k],
                    offsets=joined([int(d) & 3 for d in groups.offsets[k]], 2),
                    last=(k + 1) % (2 * tile.pairs) == 0,
                )
            )
    return found


class Run:
    """One simulation: offers tiles and groups, stands for the DMA engine, and compares.

    ``ends`` are the statuses of requests, 0 behind them; ``each`` is called in each cycle; with ``dropping`` it is not known what comes; requests
    are taken only after ``wait`` cycles in which nothing else moves, and end only after ``hold`` cycles.
    """

    def __init__(
        self,
        config,
        tiles,
        *,
        data_width=32,
        address_width=40,
        dut=None,
        ends=(),
        each=None,
        dropping=False,
        hold=0,
        **options,
    ):
        self.dma = DmaConfig(data_width=data_width, address_width=address_width)
        self.dut = dut or GroupWriter(config, self.dma)
        self.tiles, self.ends, self.each, self.hold, self.dropping = tiles, deque(ends), each, hold, dropping
        space = 1 << address_width
        self.per_tile = [[write for write in found if write[0] + len(write[1]) <= space] for _, _, found in tiles]
        self.expected = [write for found in self.per_tile for write in found]
        layout = group_tile_layout(config, address_width)
        self.offered = deque(raw(layout, **vars(tile)) for tile, _, _ in tiles)
        self.groups = deque(group_words(tiles))
        self.open, self.parts, self.done = deque(), deque(), deque()
        self.written, self.reported, self.idle, self.ending = [], [], [], deque()
        self.asked = self.most = 0
        beats = [words(self.dma, row) for _, row in self.expected]
        taken = {
            "request": (self.dut.request, None if dropping else len(beats)),
            "word": (self.dut.word, None if dropping else sum(map(len, beats))),
        }
        given = {
            "tile": (self.dut.tile, self.offered),
            "group": (self.dut.group, self.groups),
            "done": (self.dut.done, self.done),
        }
        found = drive(self.dut, given, taken, every=self.every, seen=self.seen, quiet=60, **options)
        self.cycles = [cycle for cycle, _ in found["word"]]
        assert not self.open
        assert not self.parts
        assert self.idle[-1], "it never becomes idle"
        assert sum(self.idle) < len(self.idle)

    @property
    def right(self):
        return self.written == self.expected

    def seen(self, name, payload):
        """Note what the DMA engine gets; a request ends some time after its last word."""
        if name == "request":
            self.asked += 1
            self.open.append((payload & (1 << self.dma.address_width) - 1, payload >> self.dma.address_width))
        else:
            self.parts.append(payload)
        while self.open and len(self.parts) * self.dma.beat_bytes >= self.open[0][1]:
            address, size = self.open.popleft()
            beats = -(-size // self.dma.beat_bytes)
            data = b"".join(self.parts.popleft().to_bytes(self.dma.beat_bytes, "little") for _ in range(beats))
            assert not any(data[size:])
            self.written.append((address, data[:size]))
            self.ending.append((len(self.idle) + self.hold, self.ends.popleft() if self.ends else 0))

    def every(self, ctx):
        self.idle.append(ctx.get(self.dut.idle))
        self.reported.append(ctx.get(self.dut.error))
        while self.ending and self.ending[0][0] <= len(self.idle):
            self.done.append(self.ending.popleft()[1])
        waiting = self.asked - len(self.written) + len(self.ending) + len(self.done)
        self.most = max(self.most, waiting)
        assert not (self.idle[-1] and waiting), "idle while requests have not ended"
        if self.idle[-1] and not self.dropping:
            begun = len(self.tiles) - len(self.offered)
            assert len(self.written) == sum(map(len, self.per_tile[:begun])), "idle while rows are to be written"
        if self.each:
            self.each(ctx, self)


@settings(max_examples=4, deadline=None)
@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 5),
    data_width=st.sampled_from([32, 64, 128, 256]),
    panels=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_groups_are_written_as_the_model_says(rows, columns, data_width, panels, seed):
    rng = random.Random(seed)
    config = config_of(rows, columns)
    tiles = draw_tiles(config, rng, panels)
    run = Run(config, tiles, data_width=data_width, seed=seed, stalls=seed % 3 * 0.25)
    assert run.right
    assert len(run.written) >= 2 * sum(tile.rows for tile, _, _ in tiles) > 0
    assert set(run.reported) == {0}
