"""Accuracy of the hardware's options: better options give smaller errors, the formats are those of the model, errors name the rule."""

import numpy as np
import pytest

from model import llm
from model.block_scaled import dequantize, quantize
from model.figures import nmse
from model.quantised_llm import Format, quantise_activations
from synth import accuracy
from synth.accuracy import LAYERS, accuracy_point


class Tensors:
    """Weights and activations of the kind that projections have, small."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.w = {name: rng.standard_normal((32, 64)).astype(np.float32) for name in llm.PROJECTIONS}
        self.x = {(0, name): rng.standard_t(4, (48, 64)).astype(np.float32) for name in llm.PROJECTIONS}

    def weight(self, layer, name):
        return self.w[name]


@pytest.fixture
def tensors(monkeypatch, seed):
    found = Tensors(seed)
    monkeypatch.setattr(accuracy, "_tensors", lambda layers, tokens: (found, found.x))
    return found


def error(**point):
    return accuracy_point({"layer": 0, **point})["nmse"]


def test_better_options_have_smaller_errors(tensors):
    fixed = [error(format="AutoFP6", slots=slots, step="fixed") for slots in (1, 2, 3, 4)]
    assert sorted(fixed, reverse=True) == fixed
    assert error(format="AutoFP6", slots=2, step="exponent") < fixed[1] < error(format="NVFP4")
    assert error(format="AutoFP2", scaling="group") < error(format="AutoFP2", scaling="pair")
    assert error(format="NVFP4") < error(format="AutoFP2", scaling="group")
    assert error(format="reference") == 0


def test_operands_that_bring_less_have_larger_errors(tensors):
    brought = [error(format="AutoFP6", slots=4, step="fixed", per_operand=most) for most in (1, 2, 3, 4)]
    assert sorted(brought, reverse=True) == brought
    assert brought[3] == error(format="AutoFP6", slots=4, step="fixed")
    # Two slots never need more than two of an operand.
    assert error(format="AutoFP6", slots=2, step="fixed", per_operand=2) == error(
        format="AutoFP6", slots=2, step="fixed"
    )


def test_refined_activations_are_those_of_the_quantiser(tensors, monkeypatch):
    row = accuracy_point({"layer": 0, "format": "AutoFP6", "slots": 2})
    monkeypatch.setattr(
        accuracy, "_refined", lambda x, mask, settings, most: quantise_activations(x, Format.AUTOFP6, settings, mask)
    )
    assert accuracy_point({"layer": 0, "format": "AutoFP6", "slots": 2}) == row


def test_default_options_are_those_of_the_hardware(tensors):
    assert error(format="AutoFP6") == error(format="AutoFP6", slots=2, step="fixed")
    assert error(format="AutoFP2") == error(format="AutoFP2", scaling="pair")


def test_nvfp4_is_the_mean_over_projections(tensors):
    row = accuracy_point({"layer": 0, "format": "NVFP4"})
    names = llm.PROJECTIONS
    values = {name: (dequantize(quantize(tensors.x[0, name])), dequantize(quantize(tensors.w[name]))) for name in names}
    outputs = [nmse(tensors.x[0, name] @ tensors.w[name].T, values[name][0] @ values[name][1].T) for name in names]
    assert row["nmse"] == pytest.approx(np.mean(outputs), rel=1e-6)
    assert row["nmse_weights"] == pytest.approx(np.mean([nmse(tensors.w[name], values[name][1]) for name in names]))


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"layer": 1, "format": "NVFP4"}, rf"layer must be one of {', '.join(map(str, LAYERS))}, not 1"),
        ({"layer": 0, "format": "NVFP5"}, "'NVFP5' is not a valid Format"),
        ({"layer": 0, "format": "AutoFP6", "slots": 5}, "slots must be from 1 to 4, not 5"),
    ],
)
def test_wrong_points(point, message, tensors):
    with pytest.raises(ValueError, match=f"^{message}$"):
        accuracy_point(point)
