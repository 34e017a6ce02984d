# amaranth: UnusedElaboratable=no
"""Output stage: every byte and request of tiles of all formats and sizes against the model, with stalls, errors and rows that are dropped."""

import inspect
import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from amaranth.hdl import Cat, Module, Value
from amaranth.lib import wiring
from hypothesis import given, settings
from hypothesis import strategies as st

import hdl.output
from hdl.dma import WriteDma
from hdl.output import OutputStage, RawOutput, output_tile_layout
from model.dma import MAX_BYTES, DmaConfig, DmaStatus, words
from model.output import OutputTile, writes
from model.tile_engine import EngineConfig
from tests.hdl.test_dma import Memory
from tests.hdl.test_gearbox import drive

SCALES = [0x3F800000, 0xB4800000, 0x34800001, 0x00000003, 0x01400000, 0x7F000000, 0x80000000, 0x3FFFFFFF]


def config_of(rows, columns, accumulators=16):
    return EngineConfig(rows=rows, columns=columns, accumulators=accumulators, activation_entries=4)


def raw(layout, **values):
    return sum(int(values.pop(name)) << layout[name].offset for name in list(values))


def draw_sums(rng, shape):
    """Sums of all lengths, ties of the conversion among them."""
    generator = np.random.default_rng(rng.getrandbits(32))
    sums = generator.integers(-(2**63), 2**63 - 1, shape, np.int64, endpoint=True)
    sums >>= generator.integers(0, 63, shape)
    ties = generator.random(shape) < 0.3
    return np.where(ties, (sums & ~0x1FFFF) | 1 << 16, sums).view(np.uint64)


def draw_tiles(config, rng, count, formats=((0, 0), (0, 1), (1, 0), (1, 1)), shapes=None, space=40):
    """Tiles side by side with their sums; in AutoFP2 mode often an odd number of outputs."""
    tiles = []
    shapes = shapes or [(m, n) for m in range(1, 5) for n in range(1, 9) if m * n <= config.max_words]
    for _ in range(count):
        m, n = rng.choice(shapes)
        mode_nvfp4, fp32 = rng.choice(formats)
        most_rows, most = config.rows * m, config.columns * n * (1 if mode_nvfp4 else 2)
        tile = OutputTile(
            address=rng.getrandbits(space - 1),
            stride=rng.randrange(1 << 12),
            rows=rng.choice([most_rows, rng.randint(1, most_rows)]),
            outputs=rng.choice([most, rng.randint(1, most)]),
            mode_nvfp4=bool(mode_nvfp4),
            fp32=bool(fp32),
            scale=rng.choice([*SCALES, rng.getrandbits(32)]),
        )
        tiles.append((tile, draw_sums(rng, (config.columns, config.rows, n, m))))
    return tiles


def stage_tiles(tiles, address_width, config):
    """Raw payloads of the tile stream."""
    layout = output_tile_layout(config, address_width)
    return [
        raw(layout, m=sums.shape[3], n=sums.shape[2], **{name: getattr(tile, name) for name in vars(tile)})
        for tile, sums in tiles
    ]


def column_words(tiles, column):
    """Raw payloads of a column's result stream."""
    return [
        int(word) | (k == sums[column].size - 1) << 64
        for _, sums in tiles
        for k, word in enumerate(sums[column].ravel())
    ]


class Run:
    """One simulation: offers tiles and sums, stands for the DMA engine, and compares.

    ``ends`` are the statuses of requests, 0 behind them; ``discard`` and ``each`` are called in each cycle; ``beyond`` says that there are rows
    beyond the address space, which are not expected; the engine ends requests only after ``hold`` cycles.
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
        discard=None,
        each=None,
        beyond=False,
        hold=0,
        **options,
    ):
        self.dma = DmaConfig(data_width=data_width, address_width=address_width)
        self.dut = dut or OutputStage(config, data_width, address_width)
        self.tiles, self.ends, self.discard = tiles, deque(ends), discard
        self.per_tile = [writes(config, tile, sums) if tile.rows and tile.outputs else [] for tile, sums in tiles]
        space = 1 << address_width
        expected = [write for per_tile in self.per_tile for write in per_tile]
        if beyond:
            expected = [(address, row) for address, row in expected if address + len(row) <= space]
        self.expected, self.beyond, self.each, self.hold = expected, beyond, each, hold
        assert all(address + len(row) <= space for address, row in expected)
        given = {f"result {c}": (self.dut.result[c], column_words(tiles, c)) for c in range(config.columns)}
        self.offered = deque(stage_tiles(tiles, address_width, config))
        self.open, self.parts, self.done = deque(), deque(), deque()
        self.written, self.reported, self.idle, self.ending = [], [], [], deque()
        self.asked = self.most = 0
        # What is dropped is not known before.
        known = discard is None
        beats = [words(self.dma, row) for _, row in self.expected]
        taken = {
            "request": (self.dut.request, len(beats) if known else None),
            "word": (self.dut.word, sum(map(len, beats)) if known else None),
        }
        given |= {"tile": (self.dut.tile, self.offered), "done": (self.dut.done, self.done)}
        found = drive(self.dut, given, taken, every=self.every, seen=self.seen, quiet=60, **options)
        self.cycles = [cycle for cycle, _ in found["word"]]
        self.words = [word for _, word in found["word"]]
        assert not self.open
        assert not self.parts
        assert self.idle[-1], "it never becomes idle"
        assert sum(self.idle) < len(self.idle)

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
        if self.each:
            self.each(ctx, self)
        if self.discard:
            self.discard(ctx, self)
        elif self.idle[-1] and not self.beyond:
            begun = len(self.tiles) - len(self.offered)
            assert len(self.written) == sum(map(len, self.per_tile[:begun])), "idle while rows are to be written"
            assert not self.done


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    data_width=st.sampled_from([32, 64, 128, 256]),
    count=st.integers(1, 10),
    seed=st.integers(0, 999),
)
def test_rows_are_written_as_the_model_says(rows, columns, data_width, count, seed):
    rng = random.Random(seed)
    config = config_of(rows, columns)
    tiles = draw_tiles(config, rng, count)
    run = Run(config, tiles, data_width=data_width, seed=seed, stalls=seed % 3 * 0.25)
    assert run.written == run.expected
    assert len(run.written) == sum(tile.rows for tile, _ in tiles) > 0
    assert set(run.reported) == {0}


@pytest.mark.parametrize("mode_nvfp4", [0, 1])
@pytest.mark.parametrize("fp32", [0, 1])
@pytest.mark.parametrize("columns", [1, 3])
def test_every_format_with_every_cut_of_rows_and_outputs(mode_nvfp4, fp32, columns, seed):
    rng = random.Random(seed)
    config = config_of(2, columns)
    tiles = []
    most = columns * 2 * (2 - mode_nvfp4)
    for outputs in range(1, most + 1):
        (tile, sums), *_ = draw_tiles(config, rng, 1, [(mode_nvfp4, fp32)], [(2, 2)])
        tiles.append((replace(tile, outputs=outputs, rows=1 + outputs % 4), sums))
    run = Run(config, tiles, data_width=64, seed=seed, stalls=0.2)
    assert run.written == run.expected
    assert len(run.written) == sum(1 + outputs % 4 for outputs in range(1, most + 1))


FORMATS = {"64-bit": (1, 0), "32-bit": (0, 0), "fp32": (1, 1), "fp32 pairs": (0, 1)}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(4, 2), (1, 1)])
def test_a_beat_of_elements_goes_through_in_every_cycle(name, shape, seed):
    """Words as wide as a beat, rows full, tile after tile."""
    rng = random.Random(seed)
    config = config_of(2, 2)
    mode_nvfp4 = FORMATS[name][0]
    full = {"rows": 2 * shape[0], "outputs": 2 * shape[1] * (2 - mode_nvfp4)}
    tiles = [(replace(tile, **full), sums) for tile, sums in draw_tiles(config, rng, 12, [FORMATS[name]], [shape])]
    run = Run(config, tiles, data_width=64)
    assert run.written == run.expected
    assert run.cycles == list(range(run.cycles[0], run.cycles[0] + len(run.cycles)))
    assert len(run.cycles) == 12 * 2 * shape[0] * shape[1] * (1 if name == "fp32" else 2)
    # A tile is taken, a half fills, its first beat is fetched.
    latency = OutputStage.latency_fp32 if "fp32" in name else OutputStage.latency
    assert run.cycles[0] == shape[0] * shape[1] + 2 + latency


def run_with_errors(seed, dut=None):
    """Requests end with errors, which are cleared now and then; returns whether all was right, and the statuses that were cleared."""
    config = config_of(2, 2)
    tiles = draw_tiles(config, random.Random(seed), 8, shapes=[(4, 2)])
    tiles = [(replace(tile, rows=8), sums) for tile, sums in tiles]
    statuses = [0, 0, DmaStatus.SLVERR, DmaStatus.DECERR, 0, DmaStatus.REFUSED, 0, DmaStatus.DECERR] * 8
    rng, clears, model = random.Random(seed), [], []

    def every(ctx, run):
        model.append(model[-1] if model else 0)
        assert run.reported[-1] == model[-1]
        clear = rng.random() < 0.1
        ctx.set(run.dut.clear, clear)
        clears.append(clear and model[-1])
        if clear:
            model[-1] = 0
        if not model[-1] and ctx.get(run.dut.done.valid):
            model[-1] = ctx.get(run.dut.done.payload)

    run = Run(config, tiles, dut=dut, ends=statuses, each=every, seed=seed, stalls=0.3)
    return run.written == run.expected, set(filter(None, clears))


def test_errors_are_kept_until_they_are_cleared(seed):
    """The first status that is not 0 counts, and one that comes while it is cleared is not lost."""
    right, cleared = run_with_errors(seed)
    assert right
    assert {2, 3} <= cleared


def run_with_discards(seed, dut=None):
    """Rows are dropped for a while now and then; returns whether the others are right, and how many were written and dropped."""
    config = config_of(2, 2)
    rng = random.Random(seed)
    tiles = draw_tiles(config, rng, 14)
    state = {"discard": 0}

    def discard(ctx, run):
        state["discard"] ^= rng.random() < 0.1
        ctx.set(run.dut.discard, state["discard"])

    run = Run(config, tiles, dut=dut, discard=discard, seed=seed, stalls=0.2, limit=5000)
    right = run.written == [row for row in run.expected if row in run.written]
    return right, len(run.written), len(run.expected) - len(run.written)


def test_rows_that_start_while_results_are_discarded_are_dropped_whole(seed):
    right, written, dropped = run_with_discards(seed)
    assert right
    assert min(written, dropped) > 10


def test_everything_is_dropped_and_the_stage_becomes_idle_while_results_are_discarded(seed):
    config = config_of(2, 2)
    tiles = draw_tiles(config, random.Random(seed), 5)
    run = Run(config, tiles, discard=lambda ctx, run: ctx.set(run.dut.discard, 1), seed=seed)
    assert run.written == []
    assert set(run.reported) == {0}
    assert len(run.expected) > 5


def test_tiles_without_rows_or_outputs_are_dropped(seed):
    config = config_of(2, 2)
    cuts = [{"rows": 0}, {}, {"outputs": 0}, {"rows": 0, "outputs": 0}, {}]
    drawn = draw_tiles(config, random.Random(seed), len(cuts))
    tiles = [(replace(tile, **cut), sums) for (tile, sums), cut in zip(drawn, cuts, strict=True)]
    run = Run(config, tiles, seed=seed, stalls=0.2)
    assert run.written == run.expected
    assert len(run.written) == drawn[1][0].rows + drawn[4][0].rows


@pytest.mark.parametrize("address_width", [13, 40])
def test_rows_beyond_the_address_space_are_refused_here(address_width, seed):
    """Also those of a later row whose address would come back to the start of memory."""
    config = config_of(2, 2)
    space = 1 << address_width
    drawn = draw_tiles(config, random.Random(seed), 4, [(1, 0)], [(2, 2)])
    places = [(space - 32, 8), (space - 33, 1), (space - 100, space // 2), (0, 32)]
    tiles = [
        (replace(tile, address=address, stride=stride, rows=4, outputs=4), sums)
        for (tile, sums), (address, stride) in zip(drawn, places, strict=True)
    ]
    run = Run(config, tiles, address_width=address_width, seed=seed, beyond=True)
    assert run.written == run.expected
    # Of the first tile one row ends with the last byte of memory, of the second two, of the third one stands before it.
    assert len(run.written) == 1 + 2 + 1 + 4
    assert run.reported[-1] == DmaStatus.REFUSED


def test_no_more_rows_are_on_their_way_than_can_be_counted(seed, monkeypatch):
    monkeypatch.setattr(hdl.output, "_OUTSTANDING", 3)
    config = config_of(2, 1)
    tiles = [(replace(t, rows=8), sums) for t, sums in draw_tiles(config, random.Random(seed), 6, shapes=[(4, 1)])]
    run = Run(config, tiles, hold=60, seed=seed)
    assert run.written == run.expected
    assert len(run.written) == 48
    assert run.most == 3


class Written(wiring.Component):
    """An output stage with its DMA engine."""

    def __init__(self, config, dma):
        self.stage, self.engine = OutputStage(config, dma.data_width, dma.address_width), WriteDma(dma)
        super().__init__({})

    def elaborate(self, platform):
        m = Module()
        m.submodules.stage, m.submodules.engine = self.stage, self.engine
        for name in ("request", "word", "done"):
            wiring.connect(m, getattr(self.stage, name), getattr(self.engine, name))
        return m


def channel(engine, name, *fields):
    """Return an AXI channel as a stream."""
    ports = {part: getattr(engine, f"m_axi_{name}{part}") for part in ("valid", "ready")}
    return SimpleNamespace(payload=Cat(getattr(engine, f"m_axi_{name}{field}") for field in fields), **ports)


@pytest.mark.parametrize("fails", [False, True])
def test_bytes_reach_memory_by_the_dma_engine(fails, seed):
    """With an error all that starts behind it is discarded; the stage becomes idle, and works again when it was cleared."""
    rng = random.Random(seed)
    config, dma = config_of(2, 3), DmaConfig(data_width=64, outstanding=2)
    tiles, at = [], 5
    for tile, sums in draw_tiles(config, rng, 12, shapes=[(2, 2), (4, 2), (1, 5)]):
        size = tile.outputs * tile.output_bytes
        tiles.append((replace(tile, address=at, stride=size + rng.randrange(3)), sums))
        at += 8 * (size + 3)
    per_tile = [writes(config, tile, sums) for tile, sums in tiles]
    broken = per_tile[4][0][0] // dma.beat_bytes * dma.beat_bytes
    memory = Memory(dma, fails={broken: DmaStatus.SLVERR} if fails else {})
    dut = Written(config, dma)
    answers, errors, idle = deque(), [0], []
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
            values = {"data": payload & 2**64 - 1, "strb": payload >> 64 & 255, "last": payload >> 72}
            memory.take_data(values)
        while memory.answers:
            answers.append(memory.answers.popleft()[1][0])
            memory.answered += 1

    waiting = deque(stage_tiles(tiles, dma.address_width, config))
    offered = deque(waiting.popleft() for _ in range(10))

    def every(ctx):
        errors.append(ctx.get(dut.stage.error))
        idle.append(ctx.get(dut.stage.idle))
        ctx.set(dut.stage.discard, errors[-1] != 0)
        # The last tiles wait until the others are through.
        if waiting and not offered and idle[-1]:
            ctx.set(dut.stage.clear, 1)
            offered.extend(waiting)
            waiting.clear()
        else:
            ctx.set(dut.stage.clear, 0)

    given = {f"result {c}": (dut.stage.result[c], column_words(tiles, c)) for c in range(3)}
    given |= {"tile": (dut.stage.tile, offered), "b": (channel(dut.engine, "b", "resp"), answers)}
    taken = {
        "aw": (channel(dut.engine, "aw", *fields), None),
        "w": (channel(dut.engine, "w", "data", "strb", "last"), None),
    }
    drive(dut, given, taken, seed=seed, stalls=0.1, every=every, seen=seen, quiet=80)
    assert not waiting
    assert idle[-1]
    rows = [row for rows in per_tile for row in rows]
    expected = {address + k: byte for address, row in rows for k, byte in enumerate(row)}
    if not fails:
        assert memory.written == expected
        assert set(errors) == {0}
        return
    assert set(errors) == {0, DmaStatus.SLVERR}
    assert errors[-1] == 0
    assert memory.written.items() <= expected.items()
    certain = [row for n in (0, 1, 2, 3, 10, 11) for row in per_tile[n]]
    assert all(memory.written[address + k] == byte for address, row in certain for k, byte in enumerate(row))
    assert len(memory.written) < len(expected)


def test_no_output_but_the_results_ready_follows_an_input_of_the_same_cycle(seed):
    config = config_of(1, 2)
    tiles = draw_tiles(config, random.Random(seed), 6, shapes=[(2, 2), (1, 3)])
    probed = []

    def each(ctx, run):
        dut = run.dut
        inputs = [dut.clear, dut.discard, dut.request.ready, dut.word.ready]
        for port in (dut.tile, dut.done, *dut.result):
            inputs += [port.valid, Value.cast(port.payload)]
        outputs = [dut.request.valid, dut.request.payload.as_value(), dut.word.valid, dut.word.payload]
        outputs += [dut.tile.ready, dut.done.ready, dut.idle, dut.error]
        before = [ctx.get(signal) for signal in outputs]
        readies = [ctx.get(port.ready) for port in dut.result]
        for signal in inputs:
            right = ctx.get(signal)
            ctx.set(signal, ~right)
            assert [ctx.get(output) for output in outputs] == before
            if not any(signal is port.valid for port in dut.result):
                assert [ctx.get(port.ready) for port in dut.result] == readies
            ctx.set(signal, right)
        probed.append(before)

    run = Run(config, tiles, each=each, seed=seed, stalls=0.3)
    assert run.written == run.expected
    assert all(len(set(values)) > 1 for values in list(zip(*probed, strict=True))[:5])


def test_wrong_widths_and_rows_too_long_for_a_request_are_refused():
    config = config_of(1, 1)
    for width in (16, 48, 2048):
        with pytest.raises(ValueError, match=f"^data_width must be a power of two from 32 to 1024, not {width}$"):
            OutputStage(config, width, 40)
    with pytest.raises(ValueError, match=r"^address_width must be from 13 to 64, not 12$"):
        OutputStage(config, 32, 12)
    long = EngineConfig(columns=1024, accumulators=512)
    with pytest.raises(
        ValueError, match=rf"^columns \* max_n \* 8 bytes must be at most {MAX_BYTES}, not {2 * MAX_BYTES}$"
    ):
        OutputStage(long)


BUGS = {
    "ones behind the row's end": ("Mux(completes, left, columns)", "columns"),
    "rows that pad": ("(tile.rows - tile.rows.any())", "(tile.rows)"),
    "columns of the second half": ("parts[columns + k], parts[k]", "parts[k], parts[k]"),
    "no sign": ("half[-1].replicate", "half[0].replicate"),
    "integers overtake numbers": ("waits.eq(~tile.fp32 & ", "waits.eq(tile.fp32 & ~tile.fp32 & "),
    "a scale too early": ("scales[-1]", "scales[-2]"),
    "addresses stay": ("tile.address + tile.stride", "tile.address"),
    "bytes of a pair of words": ("Mux(tile_in.mode_nvfp4 & ~tile_in.fp32,", "Mux(tile_in.mode_nvfp4,"),
    "numbers do not wait": ("enable.eq(gearbox.input.ready | ~gearbox.input.valid)", "enable.eq(1)"),
    "idle too soon": ("| outstanding.any()", ""),
}


def changed(before, after):
    """Return an output stage with a piece of the source changed."""
    text = inspect.getsource(RawOutput)
    assert text.count(before) == 1
    scope = dict(vars(hdl.output))
    exec(text.replace(before, after), scope)
    exec(inspect.getsource(OutputStage), scope)
    return scope["OutputStage"](config_of(2, 2), 32, 40)


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    config = config_of(2, 2)
    tiles = draw_tiles(config, random.Random(7), 14)
    try:
        run = Run(config, tiles, dut=changed(*BUGS[bug]), seed=7, stalls=0.3, limit=1500)
    except AssertionError:
        return
    assert run.written != run.expected


@pytest.mark.parametrize(
    ("run", "before", "after"),
    [
        (run_with_discards, "wanted & ~beyond, keep)", "wanted & ~beyond, keep & ~self.discard)"),
        (run_with_errors, "self.clear | ~self.error.any()", "~self.error.any()"),
        (run_with_errors, "self.clear | ~self.error.any()", "self.clear | ended.any()"),
    ],
    ids=["a row is cut short", "never cleared", "the last status counts"],
)
def test_bugs_of_discarding_and_of_errors_are_caught(run, before, after):
    try:
        right, *_ = run(7, changed(before, after))
    except AssertionError:
        return
    assert not right
