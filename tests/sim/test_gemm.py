"""Matrix products of any size on the simulated tile engine, against the golden model and a float64 product."""

import dataclasses

import numpy as np
import pytest

import sim.gemm
from model import autofp6, block_scaled
from model.llm import load
from model.pe import Operands, PeConfig, Tile, run_tile
from model.tile_engine import RowOperands, packed_weights
from sim.gemm import Gemm, layer_products, main, operands_of
from sim.real_input import sampled_tensors
from sim.runner import SimulationError
from sim.tiles import MODES

PARAMETERS = {"rows": 2, "columns": 2, "activation_depth": 256, "weight_depth": 256}
UNBOUNDED = PeConfig(activation_entries=1 << 12, accumulators=1 << 20)
"""An element that takes a whole product as one tile."""


@pytest.fixture(scope="module")
def gemm():
    return Gemm(**PARAMETERS)


def model_sums(config, a, w, mode):
    """Sums [M, N] of the golden model, and its status."""
    nvfp4 = mode != MODES[0]

    def turned(stored):
        return Operands(*(np.swapaxes(getattr(stored, f.name), 0, 1) for f in dataclasses.fields(Operands)))

    weights = packed_weights(config, nvfp4, RowOperands(turned(w)))
    result = run_tile(UNBOUNDED, Tile(nvfp4, mode == MODES[2], weights, turned(a)))
    if nvfp4:
        return result.psum.view(np.int64).T, result.status
    halves = np.ascontiguousarray(result.psum).view("<i4").reshape(*result.psum.shape, 2)
    return np.moveaxis(halves, 2, 1).reshape(-1, len(a.codes)).T.astype(np.int64), result.status


def test_projections_of_a_real_layer_are_exact_in_every_mode(gemm):
    model = load()
    compared = dict.fromkeys(MODES, 0)
    for name in ("qkv", "o", "gate_up", "down"):
        w, x = sampled_tensors(model, 11, name, rows=64, tokens=64)
        for product in layer_products(gemm.config, w, x):
            result = gemm.run(product.a, product.w, product.mode)
            expected, status = model_sums(gemm.config, product.a, product.w, product.mode)
            assert (result.sums == expected).all()
            assert result.status == status == 0
            assert np.abs(result.sums - product.exact / product.unit).max() <= product.allowed
            compared[product.mode] += result.sums.size
    assert compared == dict.fromkeys(MODES, 4 * 64 * 64)


def test_products_of_any_size_and_mode_are_those_of_the_model(gemm, seed):
    rng = np.random.default_rng(seed)
    sums = 0
    for number in range(36):
        m, n, k = (int(size) for size in rng.integers(1, (40, 40, 300)))
        n += n % 2
        w, x = (rng.standard_normal((count, k)).astype(np.float32) for count in (n, m))
        product = list(layer_products(gemm.config, w, x, density=float(rng.random() / 2)))[number % 3]
        result = gemm.run(product.a, product.w, product.mode)
        expected, status = model_sums(gemm.config, product.a, product.w, product.mode)
        assert result.sums.shape == (m, n)
        assert (result.sums == expected).all()
        assert result.status == status
        sums += result.sums.size
    assert sums > 5_000


def test_stored_operands_are_what_the_tensor_says(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 80)).astype(np.float32)
    base = block_scaled.quantize(x)
    refined = autofp6.refine(
        x,
        base,
        autofp6.select_activations(autofp6.subgroup_errors(x, base), np.zeros(base.codes.shape[1] // 4, bool), 0.0, 2),
    )
    stored = operands_of(refined)
    assert stored.codes.shape == (3, 3, 32)
    compared = 0
    for row in range(3):
        for group in range(5):
            step, block = divmod(group, 2)
            lanes = slice(16 * block, 16 * block + 16)
            assert (stored.codes[row, step, lanes] == base.codes[row, 16 * group : 16 * group + 16]).all()
            assert stored.scales[row, step, block] == base.scales[row, group]
            kept = [g for g in range(4) if refined.mask[row, 4 * group + g]]
            assert stored.masks[row, step, block] == sum(1 << g for g in kept)
            for place, g in enumerate(kept):
                offsets = refined.offsets[row, 16 * group + 4 * g : 16 * group + 4 * g + 4]
                assert stored.offsets[row, step, block, place] == sum(
                    (int(d) & 3) << 2 * i for i, d in enumerate(offsets)
                )
                compared += 1
    assert compared == int(refined.mask.sum()) > 10
    assert not stored.codes[:, 2, 16:].any()
    everything = dataclasses.replace(refined, mask=np.ones_like(refined.mask))
    with pytest.raises(ValueError, match=r"^tensor must have at most 2 refined subgroups in a group, not 4$"):
        operands_of(everything)


def test_wrong_products_are_refused(gemm, seed):
    rng = np.random.default_rng(seed)
    a, w = (operands_of(block_scaled.quantize(rng.standard_normal((n, 64)).astype(np.float32))) for n in (4, 3))
    long = operands_of(block_scaled.quantize(rng.standard_normal((2, 8192)).astype(np.float32)))
    with pytest.raises(ValueError, match=r"^w must have an even number of rows in AutoFP2 mode, not 3$"):
        gemm.run(a, w, "AutoFP2")
    with pytest.raises(ValueError, match=r"^mode must be one of those of the configuration, not 'FP8'$"):
        gemm.run(a, w, "FP8")
    with pytest.raises(ValueError, match=r"^a and w must have the same number of K-vectors, not 2 and 256$"):
        gemm.run(a, long, "NVFP4")
    with pytest.raises(ValueError, match=r"^K must be at most 4096, not 8192$"):
        gemm.run(long, long, "NVFP4")


def test_a_missing_tool_is_one_line(monkeypatch, capsys):
    def none(**_):
        raise SimulationError("make not found")

    monkeypatch.setattr(sim.gemm, "Gemm", none)
    assert main([]) == 1
    assert capsys.readouterr().err == "sim.gemm: make not found\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must be at least 1, not 0"),
        (["--rows", "0"], "rows must be at least 1, not 0"),
        (["--layer", "30"], "layer"),
    ],
)
def test_wrong_arguments_give_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("sim.gemm: ")
    assert message in error
    assert len(error.splitlines()) == 1
