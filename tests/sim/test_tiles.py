"""Random tiles: words of the streams, refused commands, and plans that reach every bin."""

import numpy as np
import pytest

from model.pe import Operands, PeConfig, check_tile, run_tile
from sim.tiles import (
    MASK_PATTERNS,
    PATTERNS,
    command_word,
    draw_tile,
    entry_words,
    mask_pattern,
    plan,
    plan_length,
    refused_commands,
    sample_tile,
    tile_coverage,
)

CONFIGURATIONS = [
    PeConfig(),
    PeConfig(slots_per_block=1, weight_entries=2, activation_entries=4, accumulators=8),
    PeConfig(slots_per_block=4, step="exponent"),
    PeConfig(refinement="inplace", accumulators=4),
    PeConfig(refinement="none"),
]
IDS = ["slots", "slots-1-small", "slots-4", "inplace-two-words", "none"]


def test_words_worked_by_hand():
    config = PeConfig()
    # 7 bits of M, 8 of N, 13 of KV, then the mode.
    assert command_word(config, 3, 5, 7, True) == 3 | 5 << 7 | 7 << 15 | 1 << 28
    assert command_word(config, 64, 1, 1, False, True) == 64 | 1 << 7 | 1 << 15 | 1 << 29
    blank = Operands(*(np.zeros((1, 1, *shape), np.uint8) for shape in ((32,), (2,), (2,), (2, 2))))
    blank.codes[0, 0, 1], blank.scales[0, 0, 1] = 9, 0x7E
    blank.masks[0, 0, 1], blank.offsets[0, 0, 1] = 5, (0x12, 0x34)
    record = (5 | 0x12 << 4 | 0x34 << 12) << 20
    assert entry_words(config, blank, True) == [9 << 5 | 0x7E << 168 | record << 176]
    assert entry_words(config, blank, False) == [9 << 4 | 0x7E << 136 | record << 144]
    assert entry_words(PeConfig(refinement="none"), blank, False) == [9 << 4 | 0x7E << 136]


def test_sizes_must_fit_their_fields():
    with pytest.raises(ValueError, match=r"^m must fit 7 bits, not 128$"):
        command_word(PeConfig(), 128, 1, 1, True)


def test_refused_commands_are_out_of_range():
    config = PeConfig(slots_per_block=4, step="exponent")
    commands = refused_commands(config)
    assert commands["m·n too large"] == (64, 3, 1, True, False)
    assert commands["kv too large"] == (1, 1, config.max_kv + 1, True, False)
    for m, n, kv, nvfp4, refine_en in commands.values():
        fits = 1 <= m <= config.max_m and 1 <= m * n <= config.max_words and 1 <= kv <= config.max_kv
        assert not fits or (refine_en and not nvfp4)
    # All values of the default configuration's field are within its limit.
    assert "kv too large" not in refused_commands(PeConfig())


@pytest.mark.parametrize("pattern", MASK_PATTERNS)
@pytest.mark.parametrize("config", CONFIGURATIONS[:4], ids=IDS[:4])
def test_masks_are_of_their_pattern(config, pattern, seed):
    rng = np.random.default_rng(seed)
    for m, n, kv in ((1, 1, 1), (2, 1, 2), (1, 2, 3)):
        tile = draw_tile(config, rng, "AutoFP6", m, n, kv, pattern)
        assert MASK_PATTERNS[mask_pattern(tile, run_tile(config, tile).status)] == pattern


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=IDS)
def test_a_plan_reaches_every_bin(config, seed):
    length = plan_length(config)
    coverage = tile_coverage(config)
    reasons = list(refused_commands(config))
    tiles = 0
    for epoch in plan(config, np.random.default_rng(seed), length):
        before = None
        for tile in epoch.tiles:
            check_tile(config, tile)
            sample_tile(coverage, config, epoch.pattern, tile, run_tile(config, tile).status, before)
            before = tile
            tiles += 1
        for number, reason in epoch.refused:
            assert 0 <= number < len(epoch.tiles)
            coverage.sample("refused", np.array([PATTERNS.index(epoch.pattern)]), np.array([reasons.index(reason)]))
    assert tiles == length
    assert coverage.share == 1
    assert sum(len(epoch.tiles) for epoch in plan(config, np.random.default_rng(seed), 17)) == 17
