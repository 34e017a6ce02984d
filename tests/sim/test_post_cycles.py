"""Cycles of products with post-processing: the command, predictions, chains; on the array of the other tests of post-processing."""

import dataclasses
import json

import numpy as np
import pytest

import sim.post_cycles
from model import block_scaled
from model.accelerator import Format, Mode
from model.accelerator_cycles import Product, predict, predict_chain
from sim.axi_memory import Timing
from sim.driver import Accelerator
from sim.expected import verify
from sim.post_cycles import main
from sim.product import Gemm, GroupsOf, Post, Step, processing
from sim.random_products import CAMPAIGN, SMALL_MEMORY


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(memory=SMALL_MEMORY, **CAMPAIGN[0], ppu=True)


@pytest.fixture
def command(accelerator, monkeypatch):
    """Run the command line on the array of these tests."""
    monkeypatch.setattr(accelerator, "timing", Timing())
    monkeypatch.setattr(sim.post_cycles, "Accelerator", lambda *_, **__: accelerator)
    monkeypatch.setattr(sim.post_cycles, "SHAPES", ((16, 64, 512),))
    return main


def test_the_command_counts_and_predicts(command, capsys, tmp_path):
    file = tmp_path / "table.json"
    kinds = ["none", "residual", "activity", "AutoFP6", "all"]
    assert command(["--json", str(file), "--kinds", *kinds]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(file.read_text())["rows"]
    assert [(row["mode"], row["name"]) for row in rows] == [
        (mode, kind) for mode in ("AutoFP2", "NVFP4", "AutoFP6") for kind in kinds
    ]
    # Numbers, groups, or both.
    assert lines[-1] == f"15 products, {3 * 6 * 16 * 64} outputs, all equal to the model's"
    # Four bursts at a time, as there are here, do not keep the bus busy all the time.
    assert [row for row in rows if row["predicted"] != pytest.approx(row["cycles"], rel=0.03)] == []
    assert lines[1].split()[-1] == "1.000"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--product", "1", "1", "131073"], "k must be at most 131072 for these banks, not 131104"),
        (["--product", "0", "1", "32"], "m must be at least 1, not 0"),
        (["--columns", "33"], "columns must be at most 32 with a post-processing unit, not 33"),
        (["--latency", "-1"], "read_latency must be from 0 to"),
        (["--seed", "-1"], "--seed must not be negative, not -1"),
        (["--json", "/nowhere/at/all.json"], "--json must be in a folder that exists, not /nowhere/at/all.json"),
    ],
)
def test_wrong_arguments_are_refused_with_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sim.post_cycles: {message}")


def test_a_wrong_result_is_no_success(command, capsys, monkeypatch):
    monkeypatch.setattr(sim.post_cycles, "KINDS", {"numbers": Post(numbers=True, groups=False, tensor_scale=2.0)})
    real = sim.accelerator.Accelerator.run

    def run(self, products, **options):
        return real(self, [dataclasses.replace(p, scale=3.0) for p in products], **options)

    monkeypatch.setattr(sim.accelerator.Accelerator, "run", run)
    assert command(["--product", "3", "5", "64", "--kinds", "numbers"]) == 1
    assert "differ, first at" in capsys.readouterr().err


def chain(rng, policy):
    """A layer that is added to what came in, and one that reads its groups, in the precision that the policy unit picks."""
    m, n, k, last = 9, 64, 256, 70
    x, w, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (n, k), (last, n)))
    before = rng.standard_normal((m, n)).astype(np.float32)
    masks = np.zeros(-(-n // 32) * 2, np.uint8)
    post = Post(residual=before, previous=before, tensor_scale=0.1, shared=True, weight_masks=masks, threshold=1e9)
    post = dataclasses.replace(post, report=True, observe=True)
    first = Gemm(block_scaled.quantize(x), block_scaled.quantize(w), Mode.NVFP4, "fp32", post=post)
    return [first, Gemm(GroupsOf(0), block_scaled.quantize(v), Mode.NVFP4, "fp32", fence=True, policy=policy)]


@pytest.mark.parametrize("policy", [False, True])
def test_chains_take_the_time_that_is_predicted(policy, accelerator, seed):
    """What a product in a chain takes, beyond what it takes alone."""
    products, step = chain(np.random.default_rng(seed), policy), Step("decode", 0.5)
    for timing in (Timing(), Timing(20, 20)):
        batch, first = (accelerator.run(queue, timing=timing, step=step) for queue in (products, products[:1]))
        assert verify(accelerator.config, products, batch, step) == 9 * 64 + 9 * 70
        assert batch[1].mode == Mode.NVFP4
        found = batch[1].plan
        tiles = found.tile_m, found.tile_n, found.segment
        alone = dataclasses.replace(products[1], a=batch[0].groups, fence=False, policy=False, tiles=tiles)
        counted = batch.cycles - first.cycles - accelerator.run([alone], timing=timing)[0].cycles
        post = processing(products[0].post, batch[0].groups)
        pair = [
            Product(Mode.NVFP4, Format.FP32, 9, 64, 256, 1, 16, 1, post=post),
            Product(Mode.NVFP4, Format.FP32, 9, 70, 64, *tiles, policy=policy),
        ]
        latency = timing.read_latency, timing.write_latency
        one_by_one = sum(predict(accelerator.config, product, *latency) for product in pair)
        predicted = predict_chain(accelerator.config, pair, *latency) - one_by_one
        assert predicted == pytest.approx(counted, abs=3)
        assert predicted > 150 if policy else predicted < 0
