"""Reorder buffer: tiles of every shape come out row by row, whatever the stalls, and without a gap."""

import inspect
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hdl.reorder
from hdl.reorder import ReorderBuffer
from model.tile_engine import EngineConfig
from tests.hdl.test_gearbox import drive, joined


def config_of(rows, columns, accumulators=16):
    return EngineConfig(rows=rows, columns=columns, accumulators=accumulators, activation_entries=4)


def transfers(config, tiles, rng):
    """Raw payloads of the column streams and of the row stream, for sums that are drawn."""
    columns = [[] for _ in range(config.columns)]
    beats = []
    for m, n in tiles:
        for r in range(config.rows):
            final = r == config.rows - 1
            sums = [[[rng.getrandbits(64) for _ in range(m)] for _ in range(n)] for _ in range(config.columns)]
            for column, part in zip(columns, sums, strict=True):
                column += [part[j][i] | (final and (j, i) == (n - 1, m - 1)) << 64 for j in range(n) for i in range(m)]
            for i in range(m):
                for j in range(n):
                    last = j == n - 1
                    end = last and final and i == m - 1
                    psums = joined([part[j][i] for part in sums], 64)
                    beats.append(psums | (last | end << 1) << 64 * config.columns)
    return columns, beats


def run(dut, config, tiles, *, seed=0, **options):
    """Send tiles; returns whether the rows are right, and the cycles of their beats."""
    columns, beats = transfers(config, tiles, random.Random(seed))
    offered = {f"result {c}": (dut.result[c], column) for c, column in enumerate(columns)}
    offered["tile"] = (dut.tile, [m | n << config.max_m.bit_length() for m, n in tiles])
    found = drive(dut, offered, {"row": (dut.row, len(beats))}, seed=seed, **options)["row"]
    return [beat for _, beat in found] == beats, [cycle for cycle, _ in found]


SHAPES = [(m, n) for m in range(1, 5) for n in range(1, 9) if m * n <= 8]


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8), st.integers(0, 99)
)
def test_rows_come_out_in_order_whatever_the_sizes_and_stalls(rows, columns, tiles, seed):
    config = config_of(rows, columns)
    right, cycles = run(ReorderBuffer(config), config, tiles, seed=seed, stalls=seed % 4 * 0.2)
    assert right
    assert len(cycles) == rows * sum(m * n for m, n in tiles) > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_all_shapes_of_a_tile(rows, seed):
    config = config_of(rows, 2)
    tiles = random.Random(seed).sample(SHAPES, len(SHAPES))
    assert run(ReorderBuffer(config), config, tiles, seed=seed, stalls=0.3)[0]
    assert len(tiles) == 16


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (4, 2), (2, 4), (1, 8)])
def test_a_beat_comes_out_in_every_cycle(rows, shape):
    config = config_of(rows, 1)
    right, cycles = run(ReorderBuffer(config), config, [shape] * 12)
    assert right
    # A tile is taken first, then a half fills, then its first beat is fetched.
    first = 1 + shape[0] * shape[1] + 1
    assert cycles == list(range(first, first + 12 * rows * shape[0] * shape[1]))


BUGS = {
    "no transposition": ("at.eq(at + held.sizes.m)", "at.eq(at + 1)"),
    "a row too far": ("at.eq(out_i)", "at.eq(out_i + 1)"),
    "one half": ("half.eq(~half)", "half.eq(half)"),
    "a full half is filled": ("& ~Mux(half, full[1], full[0])", ""),
    "rows are not marked": ("last.eq(row_ends)", "last.eq(half_ends)"),
    "every element row ends a tile": ("end.eq(half_ends & held.final)", "end.eq(half_ends)"),
    "beats do not wait": ("(~have | self.row.ready)", "1"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    before, after = BUGS[bug]
    text = inspect.getsource(ReorderBuffer)
    assert text.count(before) >= 1
    scope = dict(vars(hdl.reorder))
    exec(text.replace(before, after), scope)
    config = config_of(2, 2)
    rng = random.Random(7)
    tiles = [rng.choice(SHAPES) for _ in range(6)]
    try:
        right, _ = run(scope["ReorderBuffer"](config), config, [(2, 3), *tiles], seed=7, stalls=0.3, limit=2000)
    except AssertionError:
        return
    assert not right
