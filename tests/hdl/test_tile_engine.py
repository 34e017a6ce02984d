"""Tile engine in Amaranth's own simulator: operands loaded, tiles run, every sum compared."""

import numpy as np
import pytest
from amaranth.sim import Simulator

from hdl.tile_engine import TileEngine
from model import array
from model.tile_engine import EngineConfig, array_tile
from sim.tiles import command_word, entry_words
from tests.model.test_tile_engine import rows_of

LIMIT = 20_000


class Loaded:
    """Random tiles, the words that load them, and what must come out."""

    def __init__(self, config, rng, count, tile_sizes=None, *, cut=False):
        self.cut = cut
        self.config, self.loads, self.tiles, self.sizes = config, [], [], []
        self.expected = [[] for _ in range(config.columns)]
        self.status = 0
        self.a_base = self.w_base = 0
        for number in range(count):
            m, n, kv = tile_sizes or (int(rng.integers(1, 7)), int(rng.integers(1, 4)), int(rng.integers(1, 4)))
            mode = number % (3 if config.refinement != "none" else 2)
            self.add(rng, m, n, kv, mode > 0, mode == 2)

    def add(self, rng, m, n, kv, nvfp4, refine):
        config = self.config
        rows = n if nvfp4 else 2 * n
        weights = [rows_of(rng, kv, rows, config) for _ in range(config.columns)]
        activations = [rows_of(rng, kv, m, config) for _ in range(config.rows)]
        result = array.run(config.array, array_tile(config, nvfp4, refine, weights, activations))
        for c, sums in enumerate(result.psum):
            self.expected[c] += sums.ravel().tolist()
        self.status |= result.status
        for index, stored in enumerate(activations):
            for place, entry in enumerate(entry_words(config.pe, stored.operands, weights=False)):
                self.load(entry, self.a_base + place, index=index)
        pairs = (rows + 1) // 2
        for index, stored in enumerate(weights):
            for place, entry in enumerate(entry_words(config.pe, stored.operands, weights=False)):
                k, row = divmod(place, rows)
                self.load(entry, self.w_base + k * pairs + row // 2, index=index, odd=row % 2, weight=1)
        first = int(rng.integers(1, kv + 1)) if self.cut else kv
        self.tile(m, n, kv, nvfp4, refine, self.a_base, self.w_base, [first, kv - first] if first < kv else None)
        self.sizes.append((m, n, kv))
        self.a_base += m * kv
        self.w_base += pairs * kv

    def load(self, entry, address, *, index=0, odd=0, weight=0):
        self.loads.append({"entry": entry, "address": address, "index": index, "odd": odd, "weight": weight})

    def tile(self, m, n, kv, nvfp4, refine, a_base, w_base, segments=None):
        command = command_word(self.config.pe, m, n, kv, nvfp4, refine)
        pairs = (n + 1) // 2 if nvfp4 else n
        for length in segments or (kv,):
            self.tiles.append((command, a_base, w_base, length))
            a_base += m * length
            w_base += pairs * length


def simulate(loaded, rng, stall=0.0):
    """Load everything, then run the tiles; returns sums per column, cycles of last sums since the tiles were offered, status and busy."""
    config = loaded.config
    dut = TileEngine(config)
    sums = [[] for _ in range(config.columns)]
    ends = [[] for _ in range(config.columns)]
    final = []
    total = len(loaded.expected[0])

    async def run(ctx):
        for load in loaded.loads:
            payload = dut.load.payload
            for name, value in load.items():
                field = getattr(payload, name)
                ctx.set(field.as_value() if hasattr(field, "as_value") else field, value)
            ctx.set(dut.load.valid, 1)
            await ctx.tick()
        ctx.set(dut.load.valid, 0)
        for command, a_base, w_base, length in loaded.tiles:
            while rng.random() < stall:
                await ctx.tick()
            ctx.set(dut.tile.payload.command.as_value(), command)
            ctx.set(dut.tile.payload.activation_base, a_base)
            ctx.set(dut.tile.payload.weight_base, w_base)
            ctx.set(dut.tile.payload.segment, length)
            ctx.set(dut.tile.valid, 1)
            await ctx.tick().until(dut.tile.ready)
            ctx.set(dut.tile.valid, 0)

    def collect(c):
        async def bench(ctx):
            port = dut.result[c]
            for cycle in range(LIMIT):
                if len(sums[c]) == total:
                    break
                ctx.set(port.ready, rng.random() >= stall)
                *_, valid, ready, psum, last = await ctx.tick().sample(
                    port.valid, port.ready, port.payload.psum, port.payload.last
                )
                if valid and ready:
                    sums[c].append(psum)
                    if last:
                        ends[c].append(cycle - len(loaded.loads))
            ctx.set(port.ready, 0)
            if all(len(column) == total for column in sums):
                await ctx.tick().repeat(3)
                final.append((ctx.get(dut.status.as_value()), ctx.get(dut.busy)))

        return bench

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(run, background=True)
    for c in range(config.columns):
        simulator.add_testbench(collect(c))
    simulator.run()
    assert final, "not all results came"
    return sums, ends, final[-1]


CONFIGURATIONS = [
    EngineConfig(rows=2, columns=1, activation_depth=128, weight_depth=64),
    EngineConfig(rows=1, columns=2, refinement="inplace", activation_depth=64, weight_depth=128),
    EngineConfig(rows=1, columns=1, refinement="none", activation_depth=128, weight_depth=128, activation_entries=8),
]


@pytest.mark.parametrize("stall", [0.0, 0.4])
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: f"{c.rows}x{c.columns}-{c.refinement}")
def test_loaded_tiles_of_every_mode_give_the_model_s_sums_in_order(config, stall, seed):
    rng = np.random.default_rng([seed, config.rows, config.columns])
    loaded = Loaded(config, rng, 5, cut=True)
    sums, _, (status, busy) = simulate(loaded, rng, stall)
    assert sums == loaded.expected
    assert sum(map(len, sums)) == config.rows * config.columns * sum(m * n for m, n, _ in loaded.sizes)
    assert (status, busy) == (loaded.status, 0)


def test_banks_keep_the_array_busy(seed):
    config = EngineConfig(rows=1, columns=1, activation_depth=256, weight_depth=128)
    rng = np.random.default_rng(seed)
    loaded = Loaded(config, rng, 5, (6, 4, 5))
    _, (ends,), _ = simulate(loaded, rng)
    predicted = array.cycles(config.array, loaded.sizes)
    # The way through bank and encoder costs three cycles once.
    assert ends == [cycle + 3 for cycle in predicted]


def test_tiles_that_do_not_fit_are_reported_and_change_nothing(seed):
    config = EngineConfig(rows=1, columns=1, activation_depth=32, weight_depth=16)
    rng = np.random.default_rng(seed)
    loaded = Loaded(config, rng, 1, (4, 3, 2))
    good = loaded.tiles.pop()
    for refused in (
        (0, 3, 2, True, False, 0, 0),
        (4, 3, 2, False, True, 0, 0),
        (4, 3, 2, True, False, 25, 0),
        (1, 3, 9, True, False, 0, 13),
        (4, 9, 2, False, False, 0, 0),
        (4, 3, 9, True, False, 0, 0),
        (4, 3, 2, True, False, 0, 0, [3]),
        (4, 3, 2, True, False, 0, 0, [0]),
    ):
        loaded.tile(*refused)
    # Faults in the middle of a tile: longer than what is left, empty, beyond the bank.
    command, a_base, w_base, _ = good
    for place in ((0, 0, 1), (a_base, w_base, 2), (a_base, w_base, 0), (29, 0, 1), (4, 3, 1)):
        loaded.tiles.append((command, *place))
    sums, _, (status, busy) = simulate(loaded, rng)
    assert sums == loaded.expected
    assert (status, busy) == (loaded.status | 16, 0)


def test_weights_go_on_at_the_beginning_of_their_bank(seed):
    config = EngineConfig(rows=1, columns=1, activation_depth=32, weight_depth=8)
    rng = np.random.default_rng(seed)
    loaded = Loaded(config, rng, 0)
    loaded.w_base = 5
    loaded.add(rng, 2, 3, 3, True, False)
    for load in loaded.loads:
        load["address"] %= config.weight_depth
    sums, _, (status, _) = simulate(loaded, rng)
    assert sums == loaded.expected
    assert status == loaded.status


@pytest.mark.parametrize("bad", [{"address": 16, "weight": 1}, {"address": 0, "odd": 1}], ids=["address", "odd row"])
def test_a_load_that_does_not_fit_is_reported_and_changes_nothing(bad, seed):
    config = EngineConfig(rows=1, columns=1, activation_depth=32, weight_depth=16)
    rng = np.random.default_rng(seed)
    loaded = Loaded(config, rng, 1, (4, 3, 2))
    loaded.load(rng.integers(1 << 62).item(), **bad)
    sums, _, (status, _) = simulate(loaded, rng)
    assert sums == loaded.expected
    assert status == loaded.status | 32
