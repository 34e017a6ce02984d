"""Accuracy of the formats that the hardware's options give, on layers of SmolLM2-135M: what stands beside an area (docs/compare.md)."""

from functools import cache
from typing import Any, Literal, cast

import numpy as np

from model import llm
from model.figures import nmse
from model.quantised_llm import Format, Settings, WeightStore, quantise_activations
from synth.points import Point, Row

__all__ = ["DENSITY", "LAYERS", "TOKENS", "accuracy_point"]

DENSITY = 0.2
"""Share of weight subgroups that AutoFP6 refines, the paper's default budget."""

LAYERS = tuple(range(0, 30, 3))
TOKENS = 512


@cache
def _tensors(layers: tuple[int, ...], tokens: int) -> tuple[llm.Llama, dict[tuple[int, str], Any]]:
    model = llm.load()
    wanted = [(layer, name) for layer in layers for name in llm.PROJECTIONS]
    return model, llm.capture_inputs(model, model.tokenizer.encode(llm.TEXT)[:tokens], wanted)


def accuracy_point(point: Point) -> Row:
    """Return errors of the products of a layer of SmolLM2-135M, means over its projections.

    Parameters
    ----------
    point : Point
        ``layer`` and ``format``, a value of `model.quantised_llm.Format`; also ``slots`` and ``step`` for AutoFP6, ``scaling`` for AutoFP2.

    Returns
    -------
    Row
        ``nmse`` of outputs, ``Σ(y - ŷ)² / Σy²``, with weights and activations quantised, and ``nmse_weights`` of the weights alone.
    """
    model, inputs = _tensors(LAYERS, TOKENS)
    form, layer = Format(point["format"]), int(cast(int, point["layer"]))
    if layer not in LAYERS:
        raise ValueError(f"layer must be one of {', '.join(map(str, LAYERS))}, not {layer}")
    settings = Settings(
        density=DENSITY,
        slots=int(cast(int, point.get("slots") or 2)),
        step=cast(Literal["fixed", "exponent"], point.get("step") or "fixed"),
        scaling=cast(Literal["pair", "group"], point.get("scaling") or "pair"),
    )
    store = WeightStore(model, settings)
    shared = 2 if form is Format.AUTOFP2 and settings.scaling == "pair" else 1
    of_outputs, of_weights = [], []
    for name in llm.PROJECTIONS:
        x, w = inputs[layer, name], model.weight(layer, name)
        mask = store.mask(layer, name) if form is Format.AUTOFP6 else None
        approximate = store.values(layer, name, form)
        y = quantise_activations(x, form, settings, mask, shared_groups=shared) @ approximate.T
        of_outputs.append(nmse(x @ w.T, y))
        of_weights.append(nmse(w, approximate))
    return {"nmse": float(np.mean(of_outputs)), "nmse_weights": float(np.mean(of_weights))}
