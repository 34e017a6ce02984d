"""Array in Amaranth's own simulator: every sum, its order, its cycle, and nothing lost when streams stall."""

import numpy as np
import pytest
from amaranth.sim import Simulator

from hdl.array import Array
from model.array import ArrayConfig, ArrayTile, cycles, run
from sim.tiles import MODES, command_word, draw_tile, entry_words

CLOCK = 1e-6
LIMIT = 20_000


def draw(config, rng, count, stage=None):
    """Tiles of random sizes and modes."""
    tiles = []
    for n in range(count):
        mode = MODES[n % (3 if config.refinement != "none" else 2)]
        m, n_, kv = stage or (int(rng.integers(1, 7)), int(rng.integers(1, 4)), int(rng.integers(1, 5)))
        drawn = [draw_tile(config.pe, rng, mode, m, n_, kv) for _ in range(max(config.rows, config.columns))]
        first = drawn[0]
        tiles.append(
            ArrayTile(
                first.mode_nvfp4,
                first.refine_en,
                [tile.weights for tile in drawn[: config.columns]],
                [tile.activations for tile in drawn[: config.rows]],
            )
        )
    return tiles


def sizes(tile):
    kv, m = tile.activations[0].codes.shape[:2]
    return m, tile.weights[0].codes.shape[1], kv


def simulate(config, tiles, rng, stall=0.0, commands=None):
    """Run tiles; returns per column the words with ``last`` and the cycles of the words, then the status, and whether the end was idle."""
    dut = Array(config)
    words = [[] for _ in range(config.columns)]
    end = []
    expected = sum(m * n for m, n, _ in map(sizes, tiles)) * config.rows

    def feed(port, payloads):
        async def bench(ctx):
            for payload in payloads:
                while rng.random() < stall:
                    await ctx.tick()
                ctx.set(port.payload.as_value(), payload)
                ctx.set(port.valid, 1)
                await ctx.tick().until(port.ready)
                ctx.set(port.valid, 0)

        return bench

    def collect(c):
        async def bench(ctx):
            port = dut.result[c]
            for cycle in range(LIMIT):
                if len(words[c]) == expected:
                    break
                ctx.set(port.ready, rng.random() >= stall)
                *_, valid, ready, psum, last = await ctx.tick().sample(
                    port.valid, port.ready, port.payload.psum, port.payload.last
                )
                if valid and ready:
                    words[c].append((psum, last, cycle))
            ctx.set(port.ready, 0)
            # All columns have ended when the last one has.
            if sum(map(len, words)) == expected * config.columns:
                await ctx.tick().repeat(3)
                end.append((ctx.get(dut.status.as_value()), ctx.get(dut.busy)))

        return bench

    simulator = Simulator(dut)
    simulator.add_clock(CLOCK)
    if commands is None:
        commands = [command_word(config.pe, *sizes(t), t.mode_nvfp4, t.refine_en) for t in tiles]
    simulator.add_testbench(feed(dut.command, commands), background=True)
    for c in range(config.columns):
        payloads = [word for tile in tiles for word in entry_words(config.pe, tile.weights[c], weights=True)]
        simulator.add_testbench(feed(dut.weight[c], payloads), background=True)
        simulator.add_testbench(collect(c))
    for r in range(config.rows):
        payloads = [word for tile in tiles for word in entry_words(config.pe, tile.activations[r], weights=False)]
        simulator.add_testbench(feed(dut.activation[r], payloads), background=True)
    simulator.run()
    assert end, "not all results came"
    return words, end[-1]


CONFIGURATIONS = [
    ArrayConfig(rows=1, columns=1),
    ArrayConfig(rows=2, columns=2),
    ArrayConfig(rows=3, columns=1, refinement="inplace"),
    ArrayConfig(rows=1, columns=3, refinement="none", weight_entries=2, activation_entries=8, accumulators=64),
]


@pytest.mark.parametrize("stall", [0.0, 0.4])
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: f"{c.rows}x{c.columns}-{c.refinement}")
def test_every_sum_leaves_once_in_order_and_without_stalls_in_the_cycle_predicted(config, stall, seed):
    rng = np.random.default_rng([seed, config.rows, config.columns])
    tiles = draw(config, rng, 6)
    words, (status, busy) = simulate(config, tiles, rng, stall)
    results = [run(config, tile) for tile in tiles]
    compared = 0
    for c in range(config.columns):
        expected = np.concatenate([result.psum[c].ravel() for result in results])
        assert [psum for psum, _, _ in words[c]] == expected.tolist()
        ends = np.cumsum([result.psum[c].size for result in results])
        assert [n + 1 for n, (_, last, _) in enumerate(words[c]) if last] == ends.tolist()
        compared += len(expected)
        if not stall:
            predicted = cycles(config, [sizes(tile) for tile in tiles])
            assert [cycle for _, last, cycle in words[c] if last] == predicted
    assert compared == config.rows * config.columns * sum(m * n for m, n, _ in map(sizes, tiles))
    assert (status, busy) == (int(np.bitwise_or.reduce([result.status for result in results])), 0)


def test_short_tiles_are_right_too_and_within_a_few_cycles_of_the_prediction(seed):
    config = ArrayConfig(rows=3, columns=1)
    rng = np.random.default_rng(seed)
    tiles = draw(config, rng, 6, (1, 1, 4))
    words, _ = simulate(config, tiles, rng)
    expected = [run(config, tile).psum for tile in tiles]
    for c in range(config.columns):
        assert [psum for psum, _, _ in words[c]] == np.concatenate([psum[c].ravel() for psum in expected]).tolist()
        assert len(words[c]) == 18
        last = words[c][-1][2]
        assert abs(last - cycles(config, [(1, 1, 4)] * 6)[-1]) <= 0.02 * last + 8


def test_a_refused_command_is_reported_and_the_next_tile_is_right(seed):
    config = ArrayConfig(rows=2, columns=1)
    rng = np.random.default_rng(seed)
    tiles = draw(config, rng, 1, (3, 2, 2))
    good = command_word(config.pe, 3, 2, 2, tiles[0].mode_nvfp4, tiles[0].refine_en)
    refused = [command_word(config.pe, 0, 2, 2, True), command_word(config.pe, 64, 3, 1, True)]
    words, (status, busy) = simulate(config, tiles, rng, commands=[*refused, good])
    result = run(config, tiles[0])
    for c in range(config.columns):
        assert [psum for psum, _, _ in words[c]] == result.psum[c].ravel().tolist()
    assert (status, busy) == (result.status | 16, 0)
