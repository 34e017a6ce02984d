"""Array model: what its elements compute, in the order of the drain, and the cycles that follow from it."""

import dataclasses

import numpy as np
import pytest

from model import pe
from model.array import ArrayConfig, ArrayTile, cycles, run
from model.packed_pair import PAIR_DIGITS
from model.pe import PeConfig, Tile, run_tile
from model.vmac import doubled_values
from sim.tiles import draw_tile

SMALL = ArrayConfig(rows=3, columns=2)


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def tile_of(config, rng, mode="AutoFP6", m=2, n=3, kv=2):
    drawn = [draw_tile(config.pe, rng, mode, m, n, kv) for _ in range(max(config.rows, config.columns))]
    return ArrayTile(
        drawn[0].mode_nvfp4,
        drawn[0].refine_en,
        [tile.weights for tile in drawn[: config.columns]],
        [tile.activations for tile in drawn[: config.rows]],
    )


def test_element_of_row_and_column_multiplies_the_row_s_activations_with_the_column_s_weights(rng):
    tile = tile_of(SMALL, rng)
    result = run(SMALL, tile)
    assert result.psum.shape == (2, 3, 3, 2)
    compared = 0
    for c, w in enumerate(tile.weights):
        for r, a in enumerate(tile.activations):
            alone = run_tile(SMALL.pe, Tile(tile.mode_nvfp4, tile.refine_en, w, a))
            assert (result.psum[c, r] == alone.psum).all()
            compared += alone.psum.size
    assert compared == result.psum.size == 36


def test_status_is_that_of_any_element(rng):
    tile = tile_of(SMALL, rng, "NVFP4")
    assert run(SMALL, tile).status == 0
    scales = tile.weights[1].scales.copy()
    scales[0, 0, 0] = 0x7F
    bad = dataclasses.replace(tile.weights[1], scales=scales)
    assert run(SMALL, dataclasses.replace(tile, weights=[tile.weights[0], bad])).status == pe.NAN_SCALE


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("weights", "weights must be as many as columns, 2, not 1"),
        ("activations", "activations must be as many as rows, 3, not 2"),
    ],
)
def test_a_missing_operand_is_named(rng, field, message):
    tile = tile_of(SMALL, rng)
    with pytest.raises(ValueError, match=f"^{message}$"):
        run(SMALL, dataclasses.replace(tile, **{field: getattr(tile, field)[:-1]}))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, not 0"),
        ({"columns": -1}, "columns must be at least 1, not -1"),
        ({"accumulators": 3}, "accumulators must be a power of two from 4 on, not 3"),
        ({"lanes": 8}, "lanes must be a positive multiple of 32, not 8"),
    ],
)
def test_a_wrong_parameter_is_named(parameters, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        ArrayConfig(**parameters)
    with pytest.raises(TypeError, match=r"^rows must be an integer, not 2\.0$"):
        ArrayConfig(rows=2.0)


def test_element_parameters_are_handed_on():
    given = {
        "lanes": 64,
        "refinement": "slots",
        "slots_per_block": 3,
        "step": "exponent",
        "scaling": "group",
        "window_shift": 27,
        "pipeline": "fast",
        "weight_entries": 8,
        "activation_entries": 16,
        "accumulators": 32,
    }
    assert ArrayConfig(**given, rows=2).pe == PeConfig(**given)
    assert {field.name for field in dataclasses.fields(PeConfig)} == set(given)


def test_one_row_takes_the_cycles_of_one_element():
    tiles = [(4, 3, 4), (1, 1, 5), (8, 4, 1), (8, 4, 1), (2, 1, 3)]
    assert cycles(ArrayConfig(rows=1, columns=5), tiles) == pe.cycles(PeConfig(), tiles)


def test_cycles_worked_by_hand():
    # 7 vectors are issued in cycles 1 to 7, and the drain begins with cycle 14: 4·7 sums enter the first link until cycle 41.
    assert cycles(ArrayConfig(rows=4, columns=1), [(7, 1, 1)]) == [42]
    with pytest.raises(ValueError, match=r"^M·N must be from 1 to 128, not 16·9$"):
        cycles(ArrayConfig(rows=2), [(16, 9, 1)])


def test_full_tiles_from_k_512_on_keep_16_rows_busy():
    config = ArrayConfig(rows=16, columns=16)
    for kv in (16, 32, 256):
        first, *_, last = cycles(config, [(16, 8, kv)] * 50)
        assert 49 * 128 * kv / (last - first) > 0.999
    first, *_, last = cycles(config, [(16, 8, 8)] * 50)
    assert 49 * 128 * 8 / (last - first) == pytest.approx(0.5, abs=0.01)


def test_results_are_a_matrix_product(rng):
    config = ArrayConfig(rows=2, columns=2)
    tile = tile_of(config, rng, "NVFP4", 3, 2, 1)
    plain = [dataclasses.replace(o, scales=np.full_like(o.scales, 0x38)) for o in (*tile.weights, *tile.activations)]
    result = run(config, dataclasses.replace(tile, weights=plain[:2], activations=plain[2:])).psum.astype(np.int64)
    w = [PAIR_DIGITS[o.codes[0]].astype(np.int64) @ [5, 2] for o in plain[:2]]
    a = [doubled_values(o.codes[0]) for o in plain[2:]]
    # A scale of 1 is 8·2^-3 with exponent 7. A unit is 2^-22, and a product of doubled values is four times that of the values.
    for c in range(2):
        for r in range(2):
            assert (result[c, r] == (w[c] @ a[r].T) << 20).all()
