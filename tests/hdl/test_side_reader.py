# amaranth: UnusedElaboratable=no
"""Side reader and shared read engine, in front of the read DMA engine and a memory that stalls and fails, against a reference of their own."""

import random
from collections import deque
from dataclasses import dataclass

import pytest
from amaranth.hdl import Module, Value
from amaranth.lib import wiring
from amaranth.sim import Simulator

import hdl.side_reader
from hdl.dma import ReadDma
from hdl.ppu import Ppu
from hdl.side_reader import MaskReader, NumberReader, ReadShare, SideReader, side_tile_layout
from model.dma import DmaConfig, DmaStatus, refused
from model.ppu import PpuConfig
from model.tile_engine import EngineConfig
from tests.changed import changed
from tests.hdl.test_dma import Memory, content

SPACE = 16
ARRAYS = ("residual", "previous", "weight_mask")
SLVERR, DECERR = DmaStatus.SLVERR, DmaStatus.DECERR


def engine(rows, columns, accumulators=16, activation_entries=4):
    return EngineConfig(
        rows=rows, columns=columns, accumulators=accumulators, activation_entries=activation_entries, weight_depth=32
    )


def bus(data_width, **sizes):
    return DmaConfig(data_width=data_width, address_width=SPACE, **{"max_burst": 8, "outstanding": 4, **sizes})


CONFIGS = {
    "a column, 64 bits": (engine(2, 1), bus(64)),
    "3 columns, 64 bits": (engine(3, 3), bus(64)),
    "4 columns, 128 bits": (engine(2, 4, accumulators=32), bus(128)),
    "16 columns, 32 bits": (engine(1, 16), bus(32)),
    "24 columns, 32 bits, many masks": (engine(1, 24, accumulators=64), bus(32, max_burst=1, outstanding=1)),
    "5 columns, 256 bits": (engine(2, 5), bus(256)),
}


@dataclass(frozen=True)
class Tile:
    """A tile as the side reader is told of it."""

    rows: int
    outputs: int
    residual: int | None = None
    residual_stride: int = 0
    previous: int | None = None
    previous_stride: int = 0
    next_mask: int | None = None

    def raw(self, config, dma):
        """Return the payload's bits."""
        layout = side_tile_layout(config, dma)
        fields = {
            "residual": self.residual or 0,
            "residual_stride": self.residual_stride,
            "previous": self.previous or 0,
            "previous_stride": self.previous_stride,
            "next_mask": self.next_mask or 0,
            "rows": self.rows,
            "outputs": self.outputs,
            "adds": self.residual is not None,
            "measures": self.previous is not None,
            "refines": self.next_mask is not None,
        }
        return sum(int(value) << layout[name].offset for name, value in fields.items())

    def requests(self, dma):
        """Return the requests of each array, in order: lists of (place, bytes), a list per row or for all rows."""
        found = {name: [] for name in ARRAYS}
        if not self.rows or not self.outputs:
            return found
        most = 16 * dma.beat_bytes
        for name, stride in (("residual", self.residual_stride), ("previous", self.previous_stride)):
            start, size = getattr(self, name), 4 * self.outputs
            if start is not None:
                starts = [start + k * stride for k in range(self.rows)]
                found[name] = [[(at + i, min(most, size - i)) for i in range(0, size, most)] for at in starts]
        if self.next_mask is not None:
            found["weight_mask"] = [[(self.next_mask, -(-self.outputs // 32))]]
        return found


def status(dma, fails, place, size):
    """Return how a request ends."""
    if place >> SPACE or refused(dma, place, size):
        return DmaStatus.REFUSED
    beats = range(place - place % dma.beat_bytes, place + size, dma.beat_bytes)
    return next((fails[at] for at in beats if at in fails), 0)


def read(dma, fails, place, size):
    """Return the bytes of a request: zeros from the word on that has a byte of a beat that failed."""
    if status(dma, fails, place, size) == DmaStatus.REFUSED:
        return bytes(size)
    beats = range(place - place % dma.beat_bytes, place + size, dma.beat_bytes)
    end = next((at for at in beats if at in fails), place + size)
    good = max(end - place, 0) if end >= place + size else max(end - place, 0) // dma.beat_bytes * dma.beat_bytes
    return content(place, good) + bytes(size - good)


def expected(config, dma, tile, fails):
    """Return what each array gives for a tile, as raw payloads."""
    found = {}
    for name, rows in tile.requests(dma).items():
        octets = [b"".join(read(dma, fails, *request) for request in row) for row in rows]
        beat = 4 * config.columns
        found[name] = [int.from_bytes(row[i : i + beat], "little") for row in octets for i in range(0, len(row), beat)]
    found["weight_mask"] = [mask for row in octets for mask in row] * tile.rows
    return found


class Run:
    """One simulation: a side reader and a user of plain requests, ``bulk`` of (address, bytes), share an engine.

    ``stalls`` gives by stream the share of cycles in which the test does not let it pass; what is not named passes. ``coupled``: numbers and masks
    are taken as the post-processing unit does, whose pipeline takes what is to be compared some beats behind what is added, and masks last.
    ``ends``: do not ask for all. A run in which nothing has moved for 200 cycles is over.
    """

    LIMIT = 20_000

    def __init__(
        self, config, dma, tiles, *, bulk=(), stalls=(), seed=0, latency=0, fails=(), coupled=False, ends=False
    ):
        self.config, self.dma, self.tiles, self.coupled, self.ends = config, dma, tiles, coupled, ends
        self.rng, self.stalls = random.Random(seed), dict(stalls)
        self.fails = dict(fails)
        self.memory = Memory(dma, latency=latency, fails=self.fails)
        self.bulk = list(bulk)
        self.wanted = [expected(config, dma, tile, self.fails) for tile in tiles]
        self.got = {name: [] for name in ARRAYS}
        self.at = {name: [] for name in ARRAYS}
        self.requests, self.bulk_words, self.bulk_ends, self.order = [], [], [], []
        self.taken = self.cycle = 0
        self.side = hdl.side_reader.SideReader(config, dma)
        self.share = hdl.side_reader.ReadShare(dma)
        self.engine = ReadDma(dma)
        top = Module()
        top.submodules.side, top.submodules.share, top.submodules.engine = self.side, self.share, self.engine
        for name in ("request", "word", "done"):
            wiring.connect(top, getattr(self.side, name), getattr(self.share, f"user_{name}")[1])
            wiring.connect(top, getattr(self.share, name), getattr(self.engine, name))
        simulator = Simulator(top)
        simulator.add_clock(1e-8)
        simulator.add_testbench(self.bench)
        simulator.run()

    def passes(self, name):
        rate = self.stalls.get(name, 0.0)
        return not rate or self.rng.random() >= rate

    def due(self, name):
        """Return what must have come of an array for the tiles taken so far."""
        return [value for tile in self.wanted[: self.taken] for value in tile[name]]

    def may_take(self, name):
        """Say whether a unit with a pipeline takes a word of this array now."""
        if not self.coupled or name == "residual":
            return True
        counts = {array: len(self.got[array]) for array in ARRAYS}
        ahead = {"previous": "residual", "weight_mask": "previous"}[name]
        return counts[ahead] > counts[name] + 4 or counts[ahead] == len(self.due(ahead))

    async def bench(self, ctx):
        side, share, axi, memory = self.side, self.share, self.engine, self.memory
        request, word, done = share.user_request[0], share.user_word[0], share.user_done[0]
        tiles, bulk = deque(tile.raw(self.config, self.dma) for tile in self.tiles), deque(self.bulk)
        offers = dict.fromkeys(("tile", "bulk", "r"), False)
        held = {}
        still = 0
        names = ("id", "addr", "len", "size", "burst", "lock", "cache", "prot", "qos")
        while self.cycle < self.LIMIT:
            memory.cycle = self.cycle
            # Offers stay until they are taken.
            answer = memory.answers[0][1] if memory.answers and memory.answers[0][0] < self.cycle else None
            offers["tile"] = bool(tiles) and (offers["tile"] or self.passes("tile"))
            offers["bulk"] = bool(bulk) and (offers["bulk"] or self.passes("bulk"))
            offers["r"] = answer is not None and (offers["r"] or self.passes("r"))
            ctx.set(side.tile.valid, offers["tile"])
            ctx.set(request.valid, offers["bulk"])
            ctx.set(axi.m_axi_rvalid, offers["r"])
            if offers["tile"]:
                ctx.set(Value.cast(side.tile.payload), tiles[0])
            if offers["bulk"]:
                ctx.set(Value.cast(request.payload), bulk[0][0] | bulk[0][1] << SPACE)
            if offers["r"]:
                for field, value in zip(("data", "resp", "last"), answer, strict=True):
                    ctx.set(getattr(axi, f"m_axi_r{field}"), value)
            ctx.set(axi.m_axi_arready, self.passes("a"))
            ctx.set(word.ready, self.passes("word"))
            ctx.set(done.ready, self.passes("done"))
            for name in ARRAYS:
                ctx.set(getattr(side, name).ready, self.passes(name) and self.may_take(name))

            moved = False
            if ctx.get(side.idle):
                assert all(len(self.got[name]) == len(self.due(name)) for name in ARRAYS), "idle too early"
            if offers["tile"] and ctx.get(side.tile.ready):
                tiles.popleft()
                offers["tile"], moved = False, True
                self.taken += 1
            if offers["bulk"] and ctx.get(request.ready):
                bulk.popleft()
                offers["bulk"], moved = False, True
                self.order.append(0)
            for name in (*ARRAYS, "request"):
                port = getattr(side, name)
                shown = ctx.get(Value.cast(port.payload)) if ctx.get(port.valid) else None
                assert name not in held or held.pop(name) == shown, f"{name} changed while it waited"
                if shown is None:
                    continue
                if not ctx.get(port.ready):
                    held[name] = shown
                    continue
                moved = True
                if name == "request":
                    self.requests.append((shown & (1 << SPACE) - 1, shown >> SPACE))
                    self.order.append(1)
                else:
                    self.got[name].append(shown)
                    self.at[name].append(self.cycle)
            if ctx.get(side.word.valid) and (not ctx.get(side.word.payload.last) or ctx.get(side.done.valid)):
                assert ctx.get(side.word.ready), "a word waits"
            if ctx.get(word.valid) and ctx.get(word.ready):
                self.bulk_words.append((ctx.get(word.payload.data), ctx.get(word.payload.last)))
                moved = True
            if ctx.get(done.valid) and ctx.get(done.ready):
                self.bulk_ends.append(ctx.get(done.payload))
                moved = True
            if ctx.get(axi.m_axi_arvalid) and ctx.get(axi.m_axi_arready):
                memory.take_address({field: ctx.get(getattr(axi, f"m_axi_ar{field}")) for field in names}, False)
                moved = True
            if offers["r"] and ctx.get(axi.m_axi_rready):
                memory.answers.popleft()
                memory.answered += answer[2]
                offers["r"], moved = False, True
            await ctx.tick()
            self.cycle += 1
            still = 0 if moved else still + 1
            if still > 200 or (still > 20 and not self.ends and self.finished()):
                break
        self.idle, self.error = ctx.get(side.idle), ctx.get(side.error)
        if not self.ends:
            assert self.finished(), "not everything came"
            assert self.idle, "never idle"
            # An error that is cleared is forgotten.
            ctx.set(side.clear, 1)
            await ctx.tick()
            assert ctx.get(side.error) == 0

    def finished(self):
        return (
            self.taken == len(self.tiles)
            and all(len(self.got[name]) >= len(self.due(name)) for name in ARRAYS)
            and len(self.bulk_ends) == len(self.bulk)
        )

    def check_bulk(self):
        """Compare what the plain user got."""
        size = self.dma.beat_bytes
        words, ends = [], []
        for place, count in self.bulk:
            end = status(self.dma, self.fails, place, count)
            data = b"" if end == DmaStatus.REFUSED else read(self.dma, self.fails, place, count)
            parts = [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
            words += [(part, int(i == len(parts) - 1)) for i, part in enumerate(parts)]
            ends.append(end)
        assert self.bulk_words == words
        assert self.bulk_ends == ends

    def check(self):
        """Compare everything with the reference; return how many words there were."""
        for name in ARRAYS:
            assert self.got[name] == self.due(name), name
        self.check_bulk()
        asked = [
            (place & (1 << SPACE) - 1, 0 if place >> SPACE else count)
            for tile in self.tiles
            for rows in tile.requests(self.dma).values()
            for row in rows
            for place, count in row
        ]
        assert sorted(self.requests) == sorted(asked)
        ends = [status(self.dma, self.fails, place, count) for place, count in self.requests]
        assert self.error == next(filter(None, ends), 0)
        return sum(map(len, self.got.values()))


STALLS = {
    "none": {},
    "all": dict.fromkeys(["tile", "bulk", "a", "r", "word", "done", *ARRAYS], 0.4),
    "slow bus": {"a": 0.7, "r": 0.6},
    "slow readers": dict.fromkeys(ARRAYS, 0.8),
    "slow user": {"word": 0.8, "done": 0.8},
    "one slow reader": {"previous": 0.9, "bulk": 0.5},
}


def tile(rng, config, *, outputs=None, rows=None, step=16, reach=12_000):
    """Draw a tile; about three in four want an array."""
    rows = rng.randint(1, config.rows * config.max_m) if rows is None else rows
    outputs = rng.randint(1, min(2 * config.columns * config.max_n, 50)) if outputs is None else outputs
    place = lambda: rng.choice([None, *3 * [rng.randrange(0, reach, step)]])  # noqa: E731
    stride = lambda: rng.choice([0, step * -(-4 * outputs // step), rng.randrange(0, 2048, step)])  # noqa: E731
    mask = rng.choice([None, *3 * [rng.randrange(reach)]])
    return Tile(rows, outputs, place(), stride(), place(), stride(), mask)


def plain(rng, count):
    """Draw requests of the other user, some of them refused."""
    sizes = [rng.choice([0, 1, rng.randrange(300), rng.randrange(64)]) for _ in range(count)]
    return [(rng.choice([rng.randrange(0xF000), rng.randrange(0xFFE0, 0x10000)]), size) for size in sizes]


@pytest.mark.parametrize(
    ("name", "stalls"),
    [*((name, "all") for name in CONFIGS), *(("3 columns, 64 bits", stalls) for stalls in STALLS if stalls != "all")],
)
def test_both_users_get_their_bytes_whatever_stalls(name, stalls, seed):
    config, dma = CONFIGS[name]
    rng = random.Random(f"{seed} {name} {stalls}")
    tiles = [tile(rng, config, rows=rng.randint(1, 3), step=rng.choice([1, 4, 16])) for _ in range(3)]
    run = Run(config, dma, tiles, bulk=plain(rng, 12), stalls=STALLS[stalls], seed=seed)
    assert run.check() == sum(len(part) for one in run.wanted for part in one.values()) > 0


def test_every_number_of_outputs(seed):
    config, dma = CONFIGS["3 columns, 64 bits"]
    rng = random.Random(seed)
    most = 2 * config.columns * config.max_n
    tiles = [Tile(1, outputs, 16 * outputs, 320, 8192, 0, 77) for outputs in rng.sample(range(1, most + 1), most)]
    run = Run(config, dma, tiles, stalls={"r": 0.2})
    assert run.check() > 0
    assert len(tiles) == most == 48


def test_masks_of_several_words_and_tiles_without_anything(seed):
    config, dma = CONFIGS["24 columns, 32 bits, many masks"]
    rng = random.Random(seed)
    most = 2 * config.columns * config.max_n
    sizes = [most, 0, 1, 32, 33, 64, 127, 128, 129, rng.randint(1, 400)]
    tiles = [Tile(rng.choice([1, 3]), outputs, next_mask=rng.randrange(0x8000)) for outputs in sizes]
    tiles += [Tile(0, 64, 0, 0, 0, 0, 0), Tile(3, 70)]
    for stalls in ({}, {"weight_mask": 0.5, "r": 0.5}):
        run = Run(config, dma, tiles, stalls=stalls, seed=seed)
        assert run.check() == sum(tile.rows * -(-tile.outputs // 32) for tile in tiles[:-2]) > 0
        # Masks are read once for all rows of a tile.
        assert len(run.requests) == len(sizes) - 1


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("outputs", [1, 5, 40])
def test_a_unit_with_a_pipeline_never_waits_for_ever(rows, outputs, seed):
    # Rows of a beat: what is added is wanted several rows ahead of what is compared.
    config, dma = CONFIGS["4 columns, 128 bits"]
    tiles = [Tile(rows, outputs, 256 * n, 160, 64 * n, 32, n) for n in range(5 if outputs < 40 else 2)]
    for stalls in ({}, {"r": 0.5, "a": 0.5}):
        run = Run(config, dma, tiles, bulk=plain(random.Random(seed), 12), stalls=stalls, coupled=True)
        assert run.check() > 0


def test_a_stream_that_nobody_takes_holds_up_neither_its_neighbours_nor_the_other_user(seed):
    config, dma = CONFIGS["4 columns, 128 bits"]
    # A row has more words than there is room for.
    most = 2 * config.columns * config.max_n
    tiles = [Tile(5, most, 0, 512, 4096, 512, 9)] * 2
    assert 5 * most * 4 > 64 * dma.beat_bytes
    bulk = plain(random.Random(seed), 40)
    for silent in [("residual",), ("previous", "weight_mask"), ARRAYS]:
        run = Run(config, dma, tiles, bulk=bulk, stalls=dict.fromkeys(silent, 1.0), ends=True, seed=seed)
        run.check_bulk()
        assert len(run.bulk_ends) == len(bulk) > 0
        assert run.taken == len(tiles)
        assert not run.idle
        for name in ARRAYS:
            assert run.got[name] == ([] if name in silent else run.due(name))


def test_requests_of_two_users_go_by_turns():
    config, dma = CONFIGS["4 columns, 128 bits"]
    run = Run(config, dma, [Tile(4, 128, 0, 512)], bulk=[(64 * n, 64) for n in range(8)])
    run.check()
    # The first are those of the user who need not walk a tile; both go on while there is room.
    busy = run.order[run.order.index(1) :][:7]
    assert busy in ([1, 0] * 3 + [1], [1, 1, 0, 1, 0, 1, 0])


@pytest.mark.parametrize("code", [SLVERR, DECERR])
@pytest.mark.parametrize("name", ["3 columns, 64 bits", "5 columns, 256 bits"])
def test_errors_are_reported_and_give_zeros(name, code, seed):
    config, dma = CONFIGS[name]
    rng = random.Random(f"{seed} {name} {code}")
    tiles = [tile(rng, config, rows=3, reach=4000) for _ in range(4)] + [Tile(2, 9, 16, 64, 32, 64, 48)]
    fails = {at: rng.choice([code, code, SLVERR]) for at in rng.sample(range(0, 6000, dma.beat_bytes), 9)}
    fails |= {16 - 16 % dma.beat_bytes: code}
    run = Run(config, dma, tiles, bulk=plain(rng, 10), stalls=STALLS["all"], fails=fails, seed=seed)
    run.check()
    assert run.error > 1


@pytest.mark.parametrize("array", ARRAYS)
def test_places_beyond_the_address_space_give_zeros(array, seed):
    config, dma = CONFIGS["3 columns, 64 bits"]
    end = 1 << SPACE
    name = "next_mask" if array == "weight_mask" else array
    strides = {} if array == "weight_mask" else {f"{array}_stride": 64}
    # The second tile's first row is the last that is inside; the third's ends beyond.
    starts = [end + 16, end - 64 if strides else end - 2, end - 32 if strides else end - 1]
    tiles = [Tile(3, 48 if array == "weight_mask" else 16, **{name: start}, **strides) for start in starts]
    run = Run(config, dma, tiles, bulk=plain(random.Random(seed), 4), stalls={"r": 0.3, "done": 0.3}, seed=seed)
    assert run.check() > 0
    assert run.error == DmaStatus.REFUSED
    assert any(run.got[array])
    assert not any(expected(config, dma, tiles[0], {})[array])


def test_the_first_error_stays_until_it_is_cleared():
    config, dma = CONFIGS["a column, 64 bits"]
    run = Run(config, dma, [Tile(3, 4, 0, 64)], fails={64: SLVERR, 128: DECERR})
    run.check()
    assert run.error == SLVERR
    run = Run(config, dma, [Tile(3, 4, 1 << SPACE, 0), Tile(1, 4, 128)], fails={64: SLVERR, 128: DECERR})
    run.check()
    assert run.error == DmaStatus.REFUSED


def test_streams_fit_the_post_processing_unit():
    config, dma = CONFIGS["4 columns, 128 bits"]
    side, ppu = SideReader(config, dma), Ppu(PpuConfig(lanes=config.columns))
    for name in ARRAYS:
        assert getattr(side, name).payload.shape() == getattr(ppu, name).payload.shape()
        wiring.connect(Module(), getattr(side, name), getattr(ppu, name))


@pytest.mark.parametrize(("outputs", "latencies"), [(4, (0, 16)), (60, (0, 36)), (128, (36,))])
def test_a_word_comes_in_every_cycle(outputs, latencies):
    # Rows of a word are a burst each, of which 32 may be on their way.
    config, dma = engine(4, 4, accumulators=32), bus(128, max_burst=16, outstanding=32)
    tiles = [Tile(400 // outputs + 1 if outputs > 4 else 16, outputs, 512 * n, 512) for n in range(4)]
    for latency in latencies:
        run = Run(config, dma, tiles, latency=latency)
        run.check()
        cycles = run.at["residual"]
        assert (first := cycles[0]) == 12 + latency
        # From the first tile to the last no cycle is lost.
        assert cycles == list(range(first, first + len(cycles)))


def test_two_arrays_share_the_bus_evenly():
    config, dma = engine(4, 4, accumulators=32), bus(128, max_burst=16, outstanding=32)
    run = Run(config, dma, [Tile(8, 128, 0, 512, 8192, 512, 5)] * 2)
    run.check()
    total = sum(len(run.at[name]) for name in ("residual", "previous"))
    assert max(run.at["residual"] + run.at["previous"]) < total + 40
    assert abs(run.at["residual"][-1] - run.at["previous"][-1]) <= 16


# What shows a bug each.
def by_turns():
    config, dma = CONFIGS["4 columns, 128 bits"]
    run = Run(config, dma, [Tile(4, 128, 0, 512)], bulk=[(64 * n, 64) for n in range(8)])
    run.check()
    assert 0 in run.order[run.order.index(1) :][:4]
    assert 1 in run.order[:4]


def errors():
    config, dma = CONFIGS["4 columns, 128 bits"]
    tiles = [Tile(2, 65, 16, 512, 4096, 512, 9), Tile(1, 9, (1 << SPACE) + 64, 64, 0, 0, 30), Tile(3, 9, 48, 64)]
    fails = {2048: DECERR, 4096: SLVERR}
    stalls = {**STALLS["all"], "weight_mask": 0.95}
    Run(config, dma, tiles * 2, bulk=plain(random.Random(3), 10), stalls=stalls, fails=fails, seed=3).check()


def long_rows():
    # A request's numbers are no whole number of beats, and more come than there is room for.
    config, dma = CONFIGS["3 columns, 64 bits"]
    Run(config, dma, [Tile(8, 40, 0, 160)], stalls={"residual": 0.7}, seed=3).check()


def many_masks():
    config, dma = CONFIGS["24 columns, 32 bits, many masks"]
    tiles = [Tile(2, size, next_mask=100 * size) for size in (200, 1, 33, 140, 7, 8, 9)]
    Run(config, dma, tiles, stalls={"weight_mask": 0.9}, seed=3).check()


def masks_alone():
    config, dma = CONFIGS["4 columns, 128 bits"]
    Run(config, dma, [Tile(1, 9, next_mask=5)]).check()


def many_requests():
    config, dma = engine(64, 4, accumulators=32), bus(128, max_burst=16, outstanding=32)
    Run(config, dma, [Tile(64, 4, 0, 16)], bulk=[(64 * n, 4) for n in range(20)], latency=100).check()


BUGS = {
    "requests do not wait for room": (long_rows, NumberReader, "active & (room > ask.more)", "active"),
    "room is counted in requests": (by_turns, NumberReader, "Mux(asks, ask.more + 1, 0)", "asks"),
    "room is given back twice": (by_turns, NumberReader, "room + leaves", "room + leaves + (leaves & (room < 50))"),
    "rows are one place": (by_turns, NumberReader, "at.eq(below),", "at.eq(tile.place),"),
    "a row too many": (by_turns, NumberReader, "(tile.rows == 1)", "(tile.rows == 0)"),
    "a long row is cut": (errors, NumberReader, "ends.eq(left <= whole)", "ends.eq(left <= whole + 1)"),
    "busy forgets the queue": (by_turns, NumberReader, "| (room != _ROOM)", ""),
    "busy forgets the last beat": (by_turns, NumberReader, "(room != _ROOM) | gearbox.output.valid", "(room != _ROOM)"),
    "a third tile's masks": (
        many_masks, MaskReader,
        "output.valid & (used != 2)),\n            tiles.output.ready.eq(self.ask.ready & (used != 2)),",
        "output.valid), tiles.output.ready.eq(self.ask.ready),",
    ),
    "masks before they are there": (many_masks, MaskReader, "again.output.valid & filled.any()", "again.output.valid"),
    "masks of one row": (many_masks, MaskReader, "(row == now.rows - 1)", "1"),
    "one half": (many_masks, MaskReader, "at_half.eq(~at_half)", "at_half.eq(at_half)"),
    "words of masks in one place": (many_masks, MaskReader, "m.d.sync += to.eq(to + 1)", "m.d.sync += to.eq(to)"),
    "busy forgets masks": (masks_alone, MaskReader, "used.any() |", ""),
    "beyond is not refused": (errors, SideReader, "Mux(place[-1], 0, octets)", "octets"),
    "no zeros": (errors, SideReader, "Mux(refused, 0, self.word.payload.data)", "self.word.payload.data"),
    "no words for a refused request": (errors, SideReader, "Mux(refused, filled == owner.more, self.word.payload.last)", "(refused | self.word.payload.last)"),
    "the last error": (errors, SideReader, "self.clear | ~self.error.any()", "self.clear | ends"),
    "every request ends a row": (long_rows, SideReader, "(ends & owner.ends)", "(ends)"),
    "a tile when one reader is ready": (many_masks, SideReader, "residual.tile.ready & previous.tile.ready & masks.tile.ready", "residual.tile.ready"),
    "owner of both": (by_turns, ReadShare, "owners.input.payload.eq(user)", "owners.input.payload.eq(0)"),
    "the same user again": (by_turns, ReadShare, "(~first.valid | ~before)", "~first.valid"),
    "a refused request takes words": (errors, ReadShare, "worded | refused | (self.word.valid", "worded | (self.word.valid"),
    "an end twice": (errors, ReadShare, "self.done.valid & ~ended),", "self.done.valid),"),
    "requests without a record": (many_requests, ReadShare, "(first.valid | second.valid) & owners.input.ready", "(first.valid | second.valid)"),
}  # fmt: skip


def test_the_scenarios_pass_without_a_bug():
    """Each asserts what it compares; without a bug none may complain, or a bug would be caught by nothing."""
    scenarios = {scenario.__name__: scenario for scenario, *_ in BUGS.values()}
    passed = [name for name in sorted(scenarios) if scenarios[name]() is None]
    assert passed == sorted(scenarios) != []


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug, monkeypatch):
    scenario, source, *change = BUGS[bug]
    monkeypatch.setattr(hdl.side_reader, source.__name__, changed(source, tuple(change)))
    with pytest.raises((AssertionError, KeyError)):
        scenario()
