# amaranth: UnusedElaboratable=no
"""Output stage: every byte and request of tiles of all formats and sizes against the model, with stalls, errors and rows that are dropped."""

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdl.dma import request_layout
from hdl.output import OutputStage, output_tile_layout
from model.dma import DmaConfig, words
from model.output import OutputTile, writes
from model.tile_engine import EngineConfig
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


class Run:
    """One simulation: offers tiles and sums, stands for the DMA engine, and compares."""

    def __init__(self, config, tiles, *, data_width=32, address_width=40, dut=None, ends=(), discard=None, **options):
        self.dma = DmaConfig(data_width=data_width, address_width=address_width)
        self.dut = dut or OutputStage(config, data_width, address_width)
        self.tiles, self.ends, self.discard = tiles, deque(ends), discard
        self.per_tile = [writes(config, tile, sums) for tile, sums in tiles]
        expected = [write for per_tile in self.per_tile for write in per_tile]
        self.expected = [(address % (1 << address_width), row) for address, row in expected]
        layout, request = output_tile_layout(config, address_width), request_layout(self.dma)
        given = {
            f"result {c}": (
                self.dut.result[c],
                [
                    int(word) | last << 64
                    for _, sums in tiles
                    for last, word in zip([*[0] * (sums[c].size - 1), 1], sums[c].ravel(), strict=True)
                ],
            )
            for c in range(config.columns)
        }
        self.offered = deque(
            raw(
                layout,
                m=sums.shape[3],
                n=sums.shape[2],
                **{name: getattr(t, name) for name in ("address", "stride", "rows", "outputs", "scale")},
                mode_nvfp4=t.mode_nvfp4,
                fp32=t.fp32,
            )
            for t, sums in tiles
        )
        self.open, self.parts, self.done = deque(), deque(), deque()
        self.written, self.reported, self.idle = [], [], []
        # What is dropped is not known before.
        known = discard is None
        beats = [words(self.dma, row) for _, row in self.expected]
        taken = {
            "request": (self.dut.request, len(beats) if known else None),
            "word": (self.dut.word, sum(map(len, beats)) if known else None),
        }
        given |= {"tile": (self.dut.tile, self.offered), "done": (self.dut.done, self.done)}
        self.address = request["address"]
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
            self.open.append((payload & (1 << self.dma.address_width) - 1, payload >> self.dma.address_width))
        else:
            self.parts.append(payload)
        while self.open and len(self.parts) * self.dma.beat_bytes >= self.open[0][1]:
            address, size = self.open.popleft()
            beats = -(-size // self.dma.beat_bytes)
            data = b"".join(self.parts.popleft().to_bytes(self.dma.beat_bytes, "little") for _ in range(beats))
            assert not any(data[size:])
            self.written.append((address, data[:size]))
            self.done.append(self.ends.popleft() if self.ends else 0)

    def every(self, ctx):
        self.idle.append(ctx.get(self.dut.idle))
        self.reported.append(ctx.get(self.dut.error))
        if self.discard:
            self.discard(ctx, self)
        elif self.idle[-1]:
            begun = len(self.tiles) - len(self.offered)
            assert len(self.written) == sum(map(len, self.per_tile[:begun])), "idle while rows are to be written"
            assert not self.done


@settings(max_examples=14, deadline=None)
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
@pytest.mark.parametrize("columns", [1, 3, 4])
def test_every_format_with_every_cut_of_rows_and_outputs(mode_nvfp4, fp32, columns, seed):
    rng = random.Random(seed)
    config = config_of(2, columns)
    tiles = []
    most = columns * 2 * (2 - mode_nvfp4)
    for outputs in range(1, most + 1):
        (tile, sums), *_ = draw_tiles(config, rng, 1, [(mode_nvfp4, fp32)], [(2, 2)])
        tiles.append((OutputTile(**{**vars(tile), "outputs": outputs, "rows": 1 + outputs % 4}), sums))
    run = Run(config, tiles, data_width=64, seed=seed, stalls=0.2)
    assert run.written == run.expected
    assert len(run.written) == sum(1 + outputs % 4 for outputs in range(1, most + 1))


FORMATS = {"64-bit": (1, 0), "32-bit": (0, 0), "fp32": (1, 1), "fp32 pairs": (0, 1)}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(4, 2), (1, 4), (1, 1)])
def test_a_beat_of_elements_goes_through_in_every_cycle(name, shape, seed):
    """Words as wide as a beat, rows full, tile after tile."""
    rng = random.Random(seed)
    config = config_of(2, 4)
    tiles = []
    for tile, sums in draw_tiles(config, rng, 12, [FORMATS[name]], [shape]):
        m, n = shape
        full = {"rows": 2 * m, "outputs": 4 * n * (2 - tile.mode_nvfp4)}
        tiles.append((OutputTile(**{**vars(tile), **full}), sums))
    run = Run(config, tiles, data_width=128)
    assert run.written == run.expected
    assert run.cycles == list(range(run.cycles[0], run.cycles[0] + len(run.cycles)))
    beats = 12 * 2 * shape[0] * shape[1] * (1 if name == "fp32" else 2)
    assert len(run.cycles) == beats
    # A tile is taken, a half fills, its first beat is fetched; then stage 0, the lanes, and the gearbox.
    latency = OutputStage.latency_fp32 if "fp32" in name else OutputStage.latency
    assert run.cycles[0] == shape[0] * shape[1] + 2 + latency
