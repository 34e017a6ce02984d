"""Accuracy of the formats that the hardware's options give, on layers of SmolLM2-135M: what stands beside an area (docs/compare.md)."""

from dataclasses import replace
from functools import cache
from typing import Any, Literal, cast

import numpy as np

from model import autofp6, block_scaled, llm
from model.figures import nmse
from model.pe import OFFSET_BYTES
from model.quantised_llm import Format, Settings, WeightStore, quantise_activations
from model.vmac import SUBGROUP
from synth.points import Point, Row

__all__ = ["DENSITY", "LAYERS", "PER_OPERAND", "TOKENS", "accuracy_point"]

PER_OPERAND = OFFSET_BYTES
"""Refined subgroups of a group that an operand's entry in a processing element has offsets for."""

DENSITY = 0.2
"""Share of weight subgroups that AutoFP6 refines, the paper's default budget."""

LAYERS = tuple(range(0, 30, 3))
TOKENS = 512


@cache
def _tensors(layers: tuple[int, ...], tokens: int) -> tuple[llm.Llama, dict[tuple[int, str], Any]]:
    model = llm.load()
    wanted = [(layer, name) for layer in layers for name in llm.PROJECTIONS]
    return model, llm.capture_inputs(model, model.tokenizer.encode(llm.TEXT)[:tokens], wanted)


def _refined(x: Any, weight_mask: Any, settings: Settings, most: int) -> Any:
    """Return AutoFP6 of activations, at most ``most`` subgroups of a group of them refined."""
    base = block_scaled.quantize(x)
    errors = autofp6.subgroup_errors(x, base)
    limit = SUBGROUP * settings.threshold * float(np.square(x, dtype=np.float64).mean())
    # Both take subgroups in the same order, so that what is in both is what the stricter limit leaves.
    mask = autofp6.select_activations(errors, weight_mask, limit, settings.slots)
    mask &= autofp6.select_activations(np.where(weight_mask, 0, errors), np.zeros_like(weight_mask), limit, most)
    return autofp6.dequantize(autofp6.refine(x, base, mask, step=settings.step))


def accuracy_point(point: Point) -> Row:
    """Return errors of the products of a layer of SmolLM2-135M, means over its projections.

    Parameters
    ----------
    point : Point
        ``layer`` and ``format``, a value of `model.quantised_llm.Format`; ``scaling`` for AutoFP2; for AutoFP6 ``step``, ``slots``, and
        ``per_operand``, how many refined subgroups of a group an operand can bring (4 by default).

    Returns
    -------
    Row
        ``nmse`` of outputs, ``Σ(y - ŷ)² / Σy²``, with weights and activations quantised, and ``nmse_weights`` of the weights alone.
    """
    model, inputs = _tensors(LAYERS, TOKENS)
    form, layer = Format(point["format"]), int(cast(int, point["layer"]))
    if layer not in LAYERS:
        raise ValueError(f"layer must be one of {', '.join(map(str, LAYERS))}, not {layer}")
    slots, most = int(cast(int, point.get("slots") or 2)), int(cast(int, point.get("per_operand") or 4))
    settings = Settings(
        density=DENSITY,
        slots=slots,
        step=cast(autofp6.Step, point.get("step") or "fixed"),
        scaling=cast(Literal["pair", "group"], point.get("scaling") or "pair"),
    )
    store = WeightStore(model, replace(settings, slots=min(slots, most)))
    shared = 2 if form is Format.AUTOFP2 and settings.scaling == "pair" else 1
    of_outputs, of_weights = [], []
    for name in llm.PROJECTIONS:
        x, w = inputs[layer, name], model.weight(layer, name)
        approximate = store.values(layer, name, form)
        if form is Format.AUTOFP6:
            quantised = _refined(x, store.mask(layer, name), settings, most)
        else:
            quantised = quantise_activations(x, form, settings, shared_groups=shared)
        of_outputs.append(nmse(x @ w.T, quantised @ approximate.T))
        of_weights.append(nmse(w, approximate))
    return {"nmse": float(np.mean(of_outputs)), "nmse_weights": float(np.mean(of_weights))}
