"""Weights and activations of SmolLM2-135M through encoder and vMAC hardware, bit for bit and against a matrix product."""

import numpy as np
import pytest

from model.llm import load
from sim.real_input import main, run_layer, sampled_tensors
from sim.regress import CASES


@pytest.fixture(scope="module")
def language_model():
    return load()


@pytest.mark.parametrize(
    ("case", "layer", "name", "modes"),
    [
        ("vmac-slots", 11, "qkv", ["AutoFP2", "NVFP4", "AutoFP6"]),
        ("vmac-slots", 11, "down", ["AutoFP2", "NVFP4", "AutoFP6"]),
        ("vmac-inplace-exponent", 0, "o", ["AutoFP2", "NVFP4", "AutoFP6"]),
        pytest.param("vmac-slots-lanes-64", 2, "gate_up", ["AutoFP2", "NVFP4", "AutoFP6"], marks=pytest.mark.campaign),
        ("vmac-none-group", 11, "qkv", ["AutoFP2", "NVFP4"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_layer_is_exact(language_model, case, layer, name, modes):
    w, x = sampled_tensors(language_model, layer, name, rows=32, tokens=16)
    outcomes = run_layer(w, x, CASES[case])
    assert [outcome.mode for outcome in outcomes] == modes
    error = {}
    for outcome in outcomes:
        assert outcome.faults == []
        assert outcome.dots == len(w) * len(x)
        # Padding to whole vectors adds at most one vector to each dot product.
        rows_at_once = 2 if outcome.mode == "AutoFP2" else 1
        assert (
            outcome.tally.total >= outcome.dots * w.shape[1] // CASES[case].parameters.get("lanes", 32) // rows_at_once
        )
        if outcome.mode != "AutoFP2":
            assert outcome.exact == outcome.dots
        error[outcome.mode] = outcome.nmse
    assert error["NVFP4"] < error["AutoFP2"]
    if "AutoFP6" in error:
        # A spike that saturates its group's scale can hide what refinement gains, hence no strict order.
        assert error["AutoFP6"] < 1.02 * error["NVFP4"]


def test_k_that_is_no_multiple_of_the_lanes(seed):
    rng = np.random.default_rng(seed)
    w, x = (rng.standard_normal((count, 49)).astype(np.float32) for count in (4, 3))
    for outcome in run_layer(w, x):
        assert outcome.faults == []


def test_wrong_shapes():
    w = np.zeros((3, 32), np.float32)
    with pytest.raises(ValueError, match=r"^w must have an even number of rows, not 3$"):
        run_layer(w, w)
    with pytest.raises(ValueError, match=r"^w and x must have the same K, not 32 and 16$"):
        run_layer(w[:2], w[:, :16])


def test_command_line(capsys):
    assert main(["--layers", "0", "--projections", "o", "--rows", "4", "--tokens", "2"]) == 0
    assert capsys.readouterr().out.count(" ok") == 3
    assert main(["--rows", "3"]) == 2
    assert capsys.readouterr().err == "sim.real_input: --rows must be even and --tokens positive, not 3 and 32\n"
    assert main(["--case", "vmac_nvfp4"]) == 2
    assert capsys.readouterr().err == "sim.real_input: --case must be a vmac case of sim.regress, not 'vmac_nvfp4'\n"
    for layers, wrong in ((["-1", "3"], -1), (["3", "30"], 30)):
        assert main(["--layers", *layers]) == 2
        assert capsys.readouterr().err == f"sim.real_input: --layers must be from 0 to 29, not {wrong}\n"
    with pytest.raises(SystemExit, match="2"):
        main(["--simulator", "foo"])
    assert "invalid choice: 'foo'" in capsys.readouterr().err
