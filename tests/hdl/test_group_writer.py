# amaranth: UnusedElaboratable=no
"""Group writer: every byte and request of tiles against the model, with stalls, errors and rows that are dropped; words of offsets."""

import random
from collections import deque
from itertools import pairwise

import numpy as np
import pytest
from amaranth.hdl import Module, Value
from amaranth.lib import wiring
from hypothesis import given, settings
from hypothesis import strategies as st

import hdl.group_writer
from hdl.dma import WriteDma
from hdl.group_writer import GroupWriter, OffsetPacker, group_tile_layout
from hdl.quantiser import group_layout
from model.dma import MAX_BYTES, DmaConfig, DmaStatus, words
from model.group_writer import GroupTile, writes
from model.quantiser import Groups
from model.tile_engine import EngineConfig
from tests.changed import changed
from tests.hdl.test_dma import Memory
from tests.hdl.test_gearbox import drive, joined
from tests.hdl.test_output import channel


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


def rows_of(tiles):
    """Raw payloads of the group stream, row by row; offsets of subgroups that are not refined are 0, as the quantiser's are."""
    rows = []
    for tile, groups, _ in tiles:
        for k in range(len(groups.scales)):
            if k % (2 * tile.pairs) == 0:
                rows.append([])
            rows[-1].append(
                raw(
                    group_layout,
                    codes=joined(groups.codes[k].tolist(), 4),
                    scale=groups.scales[k],
                    mask=groups.masks[k],
                    offsets=joined([int(d) & 3 for d in groups.offsets[k]], 2),
                    last=(k + 1) % (2 * tile.pairs) == 0,
                )
            )
    return rows


class Run:
    """One simulation: offers tiles and groups, stands for the DMA engine, and compares.

    ``ends`` are the statuses of requests, 0 behind them; ``each`` is called in each cycle; with ``dropping`` it is not known what comes;
    ``groups`` are what is offered at first, otherwise all; the engine ends requests only after ``hold`` cycles.
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
        groups=None,
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
        self.groups = deque([group for row in rows_of(tiles) for group in row] if groups is None else groups)
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


@settings(max_examples=5, deadline=None)
@given(
    rows=st.integers(1, 2),
    columns=st.integers(1, 5),
    data_width=st.sampled_from([32, 64, 128, 256]),
    seed=st.integers(0, 999),
)
def test_groups_are_written_as_the_model_says(rows, columns, data_width, seed):
    rng = random.Random(seed)
    config = config_of(rows, columns, 8)
    tiles = draw_tiles(config, rng, 3, most=2)
    run = Run(config, tiles, data_width=data_width, seed=seed, stalls=seed % 3 * 0.25)
    assert run.right
    assert len(run.written) >= 2 * sum(tile.rows for tile, _, _ in tiles) > 0
    assert set(run.reported) == {0}


@pytest.mark.parametrize("data_width", [32, 128])
def test_every_length_of_offsets_on_rows_that_go_on_in_the_next_tile(data_width, seed):
    rng = random.Random(seed)
    config = config_of(1, 4, 8)
    tiles = []
    for step in range(6):
        tiles += draw_tiles(config, rng, 1, rows=2, outputs=32, refine=True, density=step / 5, most=3)
    run = Run(config, tiles, data_width=data_width, seed=seed, stalls=0.2)
    assert run.right
    lengths = {
        int(n) for tile, groups, _ in tiles for n in np.bitwise_count(groups.masks).reshape(tile.rows, -1).sum(axis=1)
    }
    assert lengths >= {0, 8}
    assert len(lengths) > 4


def taken_groups():
    """Cycles in which groups are taken."""
    cycles = []

    def each(ctx, run):
        if ctx.get(run.dut.group.valid) and ctx.get(run.dut.group.ready):
            cycles.append(len(run.idle) - 1)

    return each, cycles


@pytest.mark.parametrize(("outputs", "density"), [(256, 0.5), (128, 1.0), (96, 0.3), (64, 0.0)])
def test_a_group_is_taken_in_every_cycle_if_the_bus_can_follow(outputs, density, seed):
    config = config_of(1, 16)
    tiles = draw_tiles(
        config, random.Random(seed), 4, rows=4, outputs=outputs, refine=outputs > 64, density=density, most=1
    )
    each, cycles = taken_groups()
    run = Run(config, tiles, data_width=128, each=each)
    assert run.right
    assert len(cycles) == 16 * outputs // 16
    # No row and no tile costs a cycle; a tile is there from the second cycle after its offer on.
    assert cycles == list(range(2, 2 + len(cycles)))


def test_words_follow_each_other_if_rows_are_short(seed):
    config = config_of(1, 4)
    tiles = draw_tiles(config, random.Random(seed), 5, rows=4, outputs=32, refine=True, density=1.0, most=1)
    each, cycles = taken_groups()
    run = Run(config, tiles, data_width=128, each=each)
    assert run.right
    # Per row a word of codes, of scales, of masks, of offsets.
    assert run.cycles == list(range(run.cycles[0], run.cycles[0] + 4 * 20))
    assert run.cycles[0] == cycles[1] + GroupWriter.latency


def row_ends(tiles):
    """How many requests there have been at each row's end."""
    counts = []
    for tile, groups, _ in tiles:
        refined = groups.masks.reshape(tile.rows, -1).any(axis=1)
        counts += [3 + int(some) if tile.refine else 2 for some in refined]
    return np.cumsum(counts).tolist()


def run_row_by_row(seed, dut=None):
    """Groups of a row come when the row before has been written; no request may come before its row's last group."""
    config = config_of(1, 4)
    tiles = draw_tiles(config, random.Random(seed), 3, most=2)
    ends, lines, state = row_ends(tiles), rows_of(tiles), {"fed": 0, "here": 0}

    def each(ctx, run):
        if ctx.get(run.dut.request.valid):
            assert run.asked < ends[state["here"] - 1] * (state["here"] > 0)
        if ctx.get(run.dut.group.valid) and ctx.get(run.dut.group.ready):
            state["here"] += ctx.get(run.dut.group.payload.last)
        if state["fed"] < len(ends) and len(run.written) == (ends[state["fed"] - 1] if state["fed"] else 0):
            run.groups.extend(lines[state["fed"]])
            state["fed"] += 1

    run = Run(config, tiles, dut=dut, data_width=64, each=each, groups=(), seed=seed, stalls=0.1)
    assert state["here"] == len(ends)
    return run.right


def test_a_request_comes_when_all_groups_of_its_row_are_here_and_waits_for_no_other(seed):
    assert run_row_by_row(seed)


@pytest.mark.parametrize("held", ["request", "word"])
def test_two_of_the_longest_rows_have_room(held, seed):
    config = config_of(1, 6)
    tiles = draw_tiles(config, random.Random(seed), 1, rows=4, outputs=96, refine=True, density=1.0, most=1)
    taken = [0]

    def each(ctx, run):
        if len(run.idle) < 60:
            ctx.set(getattr(run.dut, held).ready, 0)
            taken[0] += ctx.get(run.dut.group.valid) and ctx.get(run.dut.group.ready)

    run = Run(config, tiles, data_width=128, each=each)
    assert run.right
    assert 12 <= taken[0] < 24


def run_with_errors(seed, dut=None):
    """Requests end with errors, which are cleared now and then; returns whether all was right, and the statuses that were cleared."""
    config = config_of(2, 2)
    tiles = draw_tiles(config, random.Random(seed), 4, rows=6, most=2)
    statuses = [0, 0, DmaStatus.SLVERR, DmaStatus.DECERR, 0, DmaStatus.REFUSED, 0, DmaStatus.DECERR] * 20
    rng, clears, model = random.Random(seed), [], []

    def each(ctx, run):
        model.append(model[-1] if model else 0)
        assert run.reported[-1] == model[-1]
        clear = rng.random() < 0.1
        ctx.set(run.dut.clear, clear)
        clears.append(clear and model[-1])
        if clear:
            model[-1] = 0
        if not model[-1] and ctx.get(run.dut.done.valid):
            model[-1] = ctx.get(run.dut.done.payload)

    run = Run(config, tiles, dut=dut, ends=statuses, each=each, seed=seed, stalls=0.3)
    return run.right, set(filter(None, clears))


def test_errors_are_kept_until_they_are_cleared(seed):
    """The first status that is not 0 counts, and one that comes while it is cleared is not lost."""
    right, cleared = run_with_errors(seed)
    assert right
    assert {2, 3} <= cleared


def run_with_discards(seed, dut=None):
    """Rows are dropped for a while now and then; returns whether the others are right and whole, how many there are and how many were dropped."""
    config = config_of(2, 3)
    rng = random.Random(seed)
    tiles = draw_tiles(config, rng, 6, rows=6, most=2)
    state = {"discard": 0}

    def each(ctx, run):
        state["discard"] ^= rng.random() < 0.1
        ctx.set(run.dut.discard, state["discard"])

    run = Run(config, tiles, dut=dut, each=each, dropping=True, seed=seed, stalls=0.2, limit=5000)
    written = set(run.written)
    ends = [0, *row_ends(tiles)]
    rows = [run.expected[a:b] for a, b in pairwise(ends)]
    kept = [row for row in rows if row[0] in written]
    wanted = [write for row in kept for write in row]
    return run.written == wanted and set(run.reported) == {0}, len(kept), len(rows) - len(kept)


def test_rows_that_start_while_results_are_discarded_are_dropped_whole(seed):
    right, written, dropped = run_with_discards(seed)
    assert right
    assert min(written, dropped) > 5


def test_everything_is_dropped_and_the_writer_becomes_idle_while_results_are_discarded(seed):
    config = config_of(2, 2)
    tiles = draw_tiles(config, random.Random(seed), 3)
    run = Run(config, tiles, each=lambda ctx, run: ctx.set(run.dut.discard, 1), dropping=True, seed=seed)
    assert run.written == []
    assert set(run.reported) == {0}
    assert len(run.expected) > 5


def test_tiles_without_rows_or_outputs_are_dropped(seed):
    config = config_of(2, 2)
    drawn = draw_tiles(config, random.Random(seed), 3, most=1)
    tiles = []
    for cut in ({"rows": 0}, {}, {"outputs": 0}, {"rows": 0, "outputs": 0}, {}, {}):
        if not cut:
            tiles.append(drawn.pop())
            continue
        tile, _, _ = drawn[0]
        values = {**vars(tile), **cut}
        tiles.append((GroupTile(**values), draw_groups(random.Random(0), 0, 0), []))
    run = Run(config, tiles, seed=seed, stalls=0.2)
    assert run.right
    assert len(run.written) > 6


def run_beyond(seed, address_width, dut=None):
    """Requests end with the last byte of memory, behind it and beyond it, in each array; returns whether all was right, and what came of each."""
    config = config_of(1, 4)
    space = 1 << address_width
    rng = random.Random(seed)
    sizes = {"codes": 16, "scales": 2, "masks": 1, "offsets": 8}
    tiles = []
    for name, size in sizes.items():
        for place, stride in ((space - size, 1), (space - size + 1, 0), (space - 2 * size, size), (space + 40, 8)):
            ((tile, groups, _),) = draw_tiles(
                config, rng, 1, space=address_width, rows=4, outputs=32, refine=True, density=1.0, most=1
            )
            values = {**vars(tile), **{f"{other}_stride": 3 for other in sizes}, name: place, f"{name}_stride": stride}
            moved = GroupTile(**{k: v % (space // 2) if k in sizes and k != name else v for k, v in values.items()})
            tiles.append((moved, groups, writes(moved, groups)[0]))
    # What was counted up to 2·space and more stays beyond.
    far, groups, _ = tiles[0]
    far = GroupTile(**{**vars(far), "codes": space - 1, "codes_stride": (1 << 32) - 1})
    tiles.append((far, groups, writes(far, groups)[0]))
    run = Run(config, tiles, address_width=address_width, dut=dut, seed=seed, stalls=0.1)
    return run.right, len(run.written), run.reported[-1]


@pytest.mark.parametrize("address_width", [13, 40])
def test_requests_beyond_the_address_space_are_refused_here(address_width, seed):
    """Also those of a later row whose address would come back to the start of memory, and of an address that was beyond from the start."""
    right, written, reported = run_beyond(seed, address_width)
    assert right
    # Of the four requests in four rows, those of one array are dropped in 3, 4, 2 and all rows; those of codes of the last tile in all.
    assert written == 4 * (4 * 16 - 3 - 4 - 2 - 4) + 12
    assert reported == DmaStatus.REFUSED


def test_no_more_requests_are_on_their_way_than_can_be_counted(seed, monkeypatch):
    monkeypatch.setattr(hdl.group_writer, "_OUTSTANDING", 3)
    config = config_of(2, 1)
    tiles = draw_tiles(config, random.Random(seed), 2, rows=4, most=1)
    run = Run(config, tiles, hold=40, seed=seed)
    assert run.right
    assert run.most == 3


class Written(wiring.Component):
    """A group writer with its DMA engine."""

    def __init__(self, config, dma):
        self.writer, self.engine = GroupWriter(config, dma), WriteDma(dma)
        super().__init__({})

    def elaborate(self, platform):
        m = Module()
        m.submodules.writer, m.submodules.engine = self.writer, self.engine
        for name in ("request", "word", "done"):
            wiring.connect(m, getattr(self.writer, name), getattr(self.engine, name))
        return m


def test_bytes_reach_memory_by_the_dma_engine(seed):
    rng = random.Random(seed)
    config, dma = config_of(2, 3), DmaConfig(data_width=64, outstanding=2)
    tiles, at = [], 5
    for _ in range(4):
        pointers, reached = None, 0
        rows, sizes = rng.randint(1, 8), [rng.randint(1, 24) for _ in range(2)]
        places = {"codes": at, "scales": at + 1000, "masks": at + 1200, "offsets": at + 1300}
        strides = {"codes_stride": 64, "scales_stride": 9, "masks_stride": 5, "offsets_stride": 33}
        for k, outputs in enumerate(sizes):
            now = {
                name: place + size * reached for (name, place), size in zip(places.items(), (16, 2, 1, 0), strict=True)
            }
            tile = GroupTile(**now, **strides, rows=rows, outputs=outputs, refine=True, first=k == 0)
            groups = draw_groups(rng, rows * 2 * tile.pairs, 0.5)
            found, pointers = writes(tile, groups, pointers)
            reached += tile.pairs
            tiles.append((tile, groups, found))
        at += 2000
    memory = Memory(dma)
    dut = Written(config, dma)
    answers = deque()
    fields = ("id", "addr", "len", "size", "burst", "lock", "cache", "prot", "qos")
    widths = (1, 40, 8, 3, 2, 1, 4, 3, 4)

    def seen(name, payload):
        if name == "aw":
            values = {}
            for field, width in zip(fields, widths, strict=True):
                values[field] = payload & (1 << width) - 1
                payload >>= width
            memory.take_address(values, True)
        else:
            memory.take_data({"data": payload & 2**64 - 1, "strb": payload >> 64 & 255, "last": payload >> 72})
        while memory.answers:
            answers.append(memory.answers.popleft()[1][0])
            memory.answered += 1

    layout = group_tile_layout(config, dma.address_width)
    given = {
        "tile": (dut.writer.tile, [raw(layout, **vars(tile)) for tile, _, _ in tiles]),
        "group": (dut.writer.group, [group for row in rows_of(tiles) for group in row]),
        "b": (channel(dut.engine, "b", "resp"), answers),
    }
    taken = {
        "aw": (channel(dut.engine, "aw", *fields), None),
        "w": (channel(dut.engine, "w", "data", "strb", "last"), None),
    }
    drive(dut, given, taken, seed=seed, stalls=0.1, seen=seen, quiet=80)
    expected = {address + k: octet for _, _, found in tiles for address, row in found for k, octet in enumerate(row)}
    assert memory.written == expected
    assert len(expected) > 200


def test_no_output_follows_an_input_of_the_same_cycle(seed):
    config = config_of(1, 2, 8)
    tiles = draw_tiles(config, random.Random(seed), 5, rows=2, refine=True, most=2)
    probed = []

    def each(ctx, run):
        dut = run.dut
        inputs = [dut.clear, dut.discard, dut.request.ready, dut.word.ready]
        for port in (dut.tile, dut.done, dut.group):
            inputs += [port.valid, Value.cast(port.payload)]
        outputs = [dut.request.valid, dut.request.payload.as_value(), dut.word.valid, dut.word.payload]
        outputs += [dut.tile.ready, dut.group.ready, dut.done.ready, dut.idle, dut.error]
        before = [ctx.get(signal) for signal in outputs]
        for signal in inputs:
            right = ctx.get(signal)
            ctx.set(signal, ~right)
            assert [ctx.get(output) for output in outputs] == before
            ctx.set(signal, right)
        probed.append(before)

    run = Run(config, tiles, each=each, seed=seed, stalls=0.3)
    assert run.right
    assert all(len(set(values)) > 1 for values in list(zip(*probed, strict=True))[:6])


def test_rows_too_long_for_a_request_are_refused():
    long = EngineConfig(columns=4096, accumulators=1024)
    with pytest.raises(ValueError, match=rf"^columns \* max_n bytes must be at most {MAX_BYTES}, not {2 * MAX_BYTES}$"):
        GroupWriter(long, DmaConfig())


def run_packer(dut, data_width, seed, stalls):
    """Packets of bytes in beats of 0 to 4, of all lengths; returns whether the words are right, and their cycles."""
    rng = random.Random(seed)
    size, beats, expected = data_width // 8, [], []
    for _ in range(60):
        packet = b""
        share = rng.choice([0.1, 0.5, 1.0])
        count = rng.randint(1, 2 * size // 4 + 3)
        for k in range(count):
            octets = [rng.getrandbits(8) for _ in range(4)]
            some = rng.randint(0, 4) if rng.random() < share else 0
            packet += bytes(octets[:some])
            beats.append(joined(octets, 8) | some << 32 | (k == count - 1) << 35)
        expected += [int.from_bytes(packet[at : at + size], "little") for at in range(0, len(packet), size)]
    found = drive(dut, {"input": (dut.input, beats)}, {"output": (dut.output, None)}, seed=seed, stalls=stalls)
    return [word for _, word in found["output"]] == expected


@pytest.mark.parametrize("data_width", [32, 64, 128])
@pytest.mark.parametrize("stalls", [0.0, 0.3])
def test_offsets_are_packed(data_width, stalls, seed):
    assert run_packer(OffsetPacker(data_width), data_width, seed, stalls)


PACKER_BUGS = {
    "bytes that do not count": ("(beat.count > i).replicate(8)", "Const(255, 8)"),
    "the rest is lost": ("rest.eq(beat.last & more)", "rest.eq(0)"),
    "a rest of nothing": ("more.eq(total > size)", "more.eq(total >= size)"),
    "the rest stays": ("store & ~rest.replicate(len(store))", "store"),
    "no new word for the next packet": ("Mux(beat.last, 0, Mux(completes, total - size, total))", "total"),
    "packets without bytes": ("ends.eq(beat.last & total.any())", "ends.eq(beat.last)"),
}


@pytest.mark.parametrize("bug", PACKER_BUGS)
def test_bugs_of_the_packer_are_caught(bug):
    try:
        right = run_packer(changed(OffsetPacker, PACKER_BUGS[bug])(64), 64, 7, 0.2)
    except AssertionError:
        return
    assert not right


def run_short(seed, dut=None):
    """Some tiles in one simulation; returns whether all was right."""
    tiles = draw_tiles(config_of(2, 3, 8), random.Random(seed), 4, rows=2, refine=True, density=0.15, most=3)
    run = Run(config_of(2, 3, 8), tiles, dut=dut, data_width=32, seed=seed, stalls=0.3, limit=3000)
    return run.right


BUGS = {
    "offsets never begin anew": (run_short, "Mux(tile.first, 0, read.data)", "read.data"),
    "offsets always begin anew": (run_short, "Mux(tile.first, 0, read.data)", "0"),
    "bytes of the last group are not counted": (
        run_short,
        "record.octets.eq(octets + chosen)",
        "record.octets.eq(octets)",
    ),
    "masks the wrong way round": (run_short, "Cat(first_mask, group.mask)", "Cat(group.mask, first_mask)"),
    "masks of half a pair": (run_short, "accepts & refined & half", "accepts & refined & ~half"),
    "bytes are not moved together": (run_short, "(before[g] == place)", "(g == place)"),
    "addresses of a row stay": (run_short, "for name in ARRAYS:", "for name in ARRAYS[1:]:"),
    "the count goes on": (run_short, "octets.eq(0)", "octets.eq(octets)"),
    "a request for no offsets": (run_short, "((array == _MASKS) & ~row.octets.any())", "0"),
    "idle while a row waits": (run_row_by_row, "| held.any() | outstanding.any()", "| outstanding.any()"),
    "idle while requests have not ended": (run_short, "| held.any() | outstanding.any()", "| held.any()"),
    "a request in front of its row": (
        run_row_by_row,
        "rows.input.valid.eq(self.group.valid & self.group.ready & group.last)",
        "rows.input.valid.eq(self.group.valid & self.group.ready & ~half & ~pairs.any())",
    ),
    "a row is cut short": (run_with_discards, "Mux(begun, keep, ~self.discard)", "~self.discard"),
    "never cleared": (run_with_errors, "self.clear | ~self.error.any()", "~self.error.any()"),
    "the last status counts": (run_with_errors, "self.clear | ~self.error.any()", "self.clear | ended.any()"),
    "beyond is forgotten": (run_beyond, "end.eq(place + ", "end.eq(place[:space] + "),
    "the last byte is beyond": (run_beyond, "(end[space] & end[:space].any())", "end[space]"),
    "words of what is refused": (run_beyond, "run.keep.eq(asks)", "run.keep.eq(wanted)"),
    "refused without a word": (run_beyond, "refuses.eq(steps & wanted & beyond)", "refuses.eq(0)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    run, *change = BUGS[bug]
    config, width, space = {
        run_short: (config_of(2, 3, 8), 32, 40),
        run_row_by_row: (config_of(1, 4), 64, 40),
        run_with_discards: (config_of(2, 3), 32, 40),
        run_with_errors: (config_of(2, 2), 32, 40),
        run_beyond: (config_of(1, 4), 32, 13),
    }[run]
    dut = changed(GroupWriter, tuple(change))(config, DmaConfig(data_width=width, address_width=space))
    try:
        result = run(7, 13, dut) if run is run_beyond else run(7, dut)
    except AssertionError:
        return
    right, *more = result if isinstance(result, tuple) else (result,)
    assert not right or (run is run_beyond and more[-1] == 0)
