"""Tile engine model: what elements get from stored rows."""

import numpy as np
import pytest

from model.packed_pair import unpack
from model.pe import Operands
from model.tile_engine import EngineConfig, RowOperands, array_tile, packed_weights
from model.weight_encoder import encode

CONFIG = EngineConfig(rows=2, columns=2)


def rows_of(rng, kv, count, config=CONFIG):
    blocks = config.vmac.blocks
    return RowOperands(
        Operands(
            rng.integers(0, 16, (kv, count, config.lanes), dtype=np.uint8),
            rng.integers(0, 0x7F, (kv, count, blocks), dtype=np.uint8),
            rng.integers(0, 16, (kv, count, blocks), dtype=np.uint8),
            rng.integers(0, 256, (kv, count, blocks, 2), dtype=np.uint8),
        )
    )


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def test_rows_pass_as_the_pairs_of_equation_6_with_their_scales_and_records(rng):
    stored = rows_of(rng, 3, 5)
    got = packed_weights(CONFIG, True, stored)
    q0, q1 = unpack(got.codes)
    values = np.array([0, 1, 2, 3, 4, 6, 8, 12])[stored.operands.codes & 7] * np.where(stored.operands.codes & 8, -1, 1)
    assert (5 * q0.astype(int) + 2 * q1 == values).all()
    assert (got.scales == stored.operands.scales).all()
    assert (got.masks == stored.operands.masks).all()
    assert (got.offsets == stored.operands.offsets).all()


def test_in_autofp2_mode_adjacent_rows_share_a_vector(rng):
    stored = rows_of(rng, 2, 6)
    got = packed_weights(CONFIG, False, stored)
    assert got.codes.shape == (2, 3, 32)
    codes, scales = stored.operands.codes, stored.operands.scales
    compared = 0
    for kv in range(2):
        for pair in range(3):
            even, odd = 2 * pair, 2 * pair + 1
            w, scale = encode(
                np.array([False]),
                codes[kv, even : even + 1],
                codes[kv, odd : odd + 1],
                scales[kv, even : even + 1],
                scales[kv, odd : odd + 1],
            )
            assert (got.codes[kv, pair] == w[0]).all()
            assert (got.scales[kv, pair] == scale[0]).all()
            compared += 1
    assert compared == 6
    with pytest.raises(ValueError, match=r"^weights must have an even number of rows in AutoFP2 mode, not 5$"):
        packed_weights(CONFIG, False, rows_of(rng, 2, 5))


def test_activations_are_sent_as_they_are(rng):
    activations = [rows_of(rng, 2, 3) for _ in range(2)]
    weights = [rows_of(rng, 2, 4) for _ in range(2)]
    tile = array_tile(CONFIG, True, False, weights, activations)
    assert (tile.mode_nvfp4, tile.refine_en) == (True, False)
    assert all(sent is stored.operands for sent, stored in zip(tile.activations, activations, strict=True))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"activation_depth": 100}, "activation_depth must be a power of two from 2 on, not 100"),
        ({"weight_depth": 1}, "weight_depth must be a power of two from 2 on, not 1"),
        ({"rows": 0}, "rows must be at least 1, not 0"),
    ],
)
def test_a_wrong_parameter_is_named(parameters, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        EngineConfig(**parameters)


def test_array_and_encoder_parameters_are_handed_on():
    config = EngineConfig(lanes=64, scaling="group", window_shift=27, rows=3, weight_entries=8)
    assert (config.array.rows, config.array.lanes, config.array.weight_entries) == (3, 64, 8)
    assert (config.encoder.lanes, config.encoder.scaling) == (64, "group")
