"""Fake quantisation of a Llama model with a format per layer, the cache included (docs/trace.md).

Quantised values are computed exactly as the formats say and multiplied in float32: what the accelerator computes, but for
the order of sums. Embedding, norms, head, queries and attention weights stay as they are.
"""

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model import autofp2, autofp6, block_scaled
from model.formats import E2M1, E2M3
from model.llm import Cache, Llama
from model.package import Package
from model.vmac import SUBGROUP, SUBGROUPS, check_choice

__all__ = [
    "LEVELS",
    "Control",
    "Format",
    "PackageStore",
    "QuantisedLlama",
    "Settings",
    "WeightStore",
    "quantise_activations",
]

Float = NDArray[np.float32]


class Format(enum.Enum):
    """What a layer's weights, activations, keys and values are stored in."""

    REFERENCE = "reference"
    """Nothing is quantised."""
    AUTOFP2 = "AutoFP2"
    """Weights AutoFP2, activations NVFP4, one scale per 32 with pair scaling; keys and values NVFP4 (W2A4KV4)."""
    NVFP4 = "NVFP4"
    AUTOFP6 = "AutoFP6"
    """NVFP4 refined: weights where one mask for all rows says, activations in slots left, keys and values in all slots."""
    FP6G = "FP6g"


LEVELS = {2: Format.AUTOFP2, 4: Format.NVFP4, 6: Format.AUTOFP6}
"""Format of each precision level."""

Scales = Literal["tensor", "row"]

Control = Callable[[int, Float, Float], Format]
"""Called after each layer with its index and the residual stream (tokens, width) before and after it; returns the format of the next layer."""


@dataclass(frozen=True)
class Settings:
    """Parameters of the formats.

    Attributes
    ----------
    density : float
        Share ρ of weight subgroups that AutoFP6 refines, at most ``slots / 4``.
    slots : int
        Refined subgroups per group of 16, weight's and activation's together, 1 to 4.
    threshold : float
        τ_nmse: a subgroup of activations, keys or values may be refined if its error is above ``threshold · 4 · mean square``.
    step : {"fixed", "exponent"}
        Step of AutoFP6's offsets.
    scaling : {"pair", "group"}
        Scales of AutoFP2's weights. With pairs the activations have one scale per 32.

    Raises
    ------
    ValueError
        A parameter is outside its range.
    """

    density: float = 0.2
    slots: int = 2
    threshold: float = 0.003
    step: autofp6.Step = "fixed"
    scaling: Literal["pair", "group"] = "pair"

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= SUBGROUPS:
            raise ValueError(f"slots must be from 1 to {SUBGROUPS}, not {self.slots}")
        if not 0 <= self.density <= self.slots / SUBGROUPS:
            raise ValueError(
                f"density must be from 0 to {self.slots / SUBGROUPS} with {self.slots} slots, not {self.density}"
            )
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be at least 0, not {self.threshold}")
        check_choice("step", self.step, ("fixed", "exponent"))
        check_choice("scaling", self.scaling, ("pair", "group"))


def quantise_activations(
    x: Float,
    form: Format,
    settings: Settings,
    weight_mask: NDArray[np.bool_] | None = None,
    scales: Scales = "tensor",
    shared_groups: int = 1,
) -> Float:
    """Quantise and dequantise activations, keys or values.

    Parameters
    ----------
    x : ndarray of float32, shape (rows, …, K)
        In groups along K.
    form : Format
        AUTOFP2 counts as NVFP4.
    settings : Settings
    weight_mask : ndarray of bool, shape (Kp / 4,), optional
        Subgroups that AutoFP6 leaves to the weight; none by default.
    scales : {"tensor", "row"}
        One tensor scale, and one mean square for the threshold, for all of ``x`` or for each index of the first axis.
    shared_groups : int
        2 for one scale per 32 elements; AutoFP6 has none such.

    Returns
    -------
    ndarray of float32, shape of ``x``
    """
    if scales == "row" and len(x) > 1:
        rows = [quantise_activations(row, form, settings, weight_mask, "row", shared_groups) for row in x[:, None]]
        return np.concatenate(rows)
    if form is Format.REFERENCE:
        return x
    element = E2M3 if form is Format.FP6G else E2M1
    base = block_scaled.quantize(x, element, shared_groups=shared_groups)
    if form is not Format.AUTOFP6:
        return block_scaled.dequantize(base)
    if weight_mask is None:
        weight_mask = np.zeros(base.codes.shape[-1] // SUBGROUP, dtype=bool)
    limit = SUBGROUP * settings.threshold * float(np.square(x, dtype=np.float64).mean())
    errors = autofp6.subgroup_errors(x, base)
    mask = autofp6.select_activations(errors, weight_mask, limit, settings.slots)
    return autofp6.dequantize(autofp6.refine(x, base, mask, step=settings.step))


@dataclass
class WeightStore:
    """Quantised weights of a model, made when first asked for and kept.

    Attributes
    ----------
    model : Llama
        Where the weights come from.
    settings : Settings
    """

    model: Llama
    settings: Settings = field(default_factory=Settings)
    _values: dict[tuple[int, str, Format], Float] = field(default_factory=dict, repr=False)
    _masks: dict[tuple[int, str], NDArray[np.bool_]] = field(default_factory=dict, repr=False)

    def values(self, layer: int, name: str, form: Format) -> Float:
        """Return the dequantised weights of a projection, shape (N, K)."""
        if form is Format.REFERENCE:
            return self.model.weight(layer, name)
        key = (layer, name, form)
        if key not in self._values:
            self._values[key] = self._quantise(layer, name, form)
        return self._values[key]

    def mask(self, layer: int, name: str) -> NDArray[np.bool_]:
        """Return which subgroups AutoFP6 refines in all rows of a projection, shape (Kp / 4,)."""
        if (layer, name) not in self._masks:
            w = self.model.weight(layer, name)
            gains = autofp6.subgroup_gains(w, block_scaled.quantize(w), step=self.settings.step)
            self._masks[layer, name] = autofp6.select_weights(gains, self.settings.density, self.settings.slots)
        return self._masks[layer, name]

    def forget(self, form: Format) -> None:
        """Free the weights of a format; 425 MB for SmolLM2-135M."""
        for key in [key for key in self._values if key[2] is form]:
            del self._values[key]

    def _quantise(self, layer: int, name: str, form: Format) -> Float:
        w = self.model.weight(layer, name)
        base = block_scaled.quantize(w, E2M3 if form is Format.FP6G else E2M1)
        if form is Format.AUTOFP2:
            return autofp2.dequantize(base, self.settings.scaling)
        if form is Format.AUTOFP6:
            mask = self.mask(layer, name)
            return autofp6.dequantize(autofp6.refine(w, base, mask, step=self.settings.step))
        return block_scaled.dequantize(base)


class PackageStore(WeightStore):
    """Weights of a package in NVFP4, AutoFP6 and AutoFP2; in the other formats those of the model.

    Parameters
    ----------
    model : Llama
    package : Package
    settings : Settings, optional
        Of activations; the step is the package's.

    Raises
    ------
    ValueError
        The package has masks with more subgroups in a group than there are slots, lacks a matrix of the model, has one of another shape,
        or has offsets of other than 2 bits.
    """

    def __init__(self, model: Llama, package: Package, settings: Settings | None = None) -> None:
        super().__init__(model, dataclasses.replace(settings or Settings(), step=package.step))
        if self.settings.slots < package.slots:
            raise ValueError(
                f"slots must be at least {package.slots}, those of {package.path}, not {self.settings.slots}"
            )
        self._package = package
        if package.bits != autofp6.OFFSET_BITS:
            raise ValueError(f"offsets of {package.path} must have {autofp6.OFFSET_BITS} bits, not {package.bits}")
        for layer in range(model.config.layers):
            for name, shape in model.config.shapes.items():
                entry = package.entries.get(f"{layer}.{name}")
                if entry is None or entry.shape != shape:
                    found = entry and entry.shape
                    raise ValueError(f"shape of {layer}.{name} in {package.path} must be {shape}, not {found}")

    def mask(self, layer: int, name: str) -> NDArray[np.bool_]:
        """Return which subgroups are refined in all rows of a projection, shape (Kp / 4,)."""
        if (layer, name) not in self._masks:
            self._masks[layer, name] = self._package.read(f"{layer}.{name}").mask
        return self._masks[layer, name]

    def _quantise(self, layer: int, name: str, form: Format) -> Float:
        if form not in (Format.NVFP4, Format.AUTOFP6, Format.AUTOFP2):
            return super()._quantise(layer, name, form)
        refined = self._package.read(f"{layer}.{name}")
        if form is Format.AUTOFP6:
            return autofp6.dequantize(refined)
        if form is Format.AUTOFP2:
            return autofp2.dequantize(refined.base, self.settings.scaling)
        return block_scaled.dequantize(refined.base)


class QuantisedLlama(Llama):
    """A model whose layers each run in a format; outside :meth:`run` it is the reference.

    Parameters
    ----------
    model : Llama
        Its arrays are shared.
    settings : Settings, optional
    store : WeightStore, optional
        Weights prepared before, with their own settings; rounded to nearest and refined by NMSE by default.
    """

    def __init__(self, model: Llama, settings: Settings | None = None, store: WeightStore | None = None) -> None:
        super().__init__(model.config, model.weights, model.tokenizer)
        self.store = store or WeightStore(model, settings or Settings())
        self.settings = self.store.settings
        self._format = Format.REFERENCE
        self._scales: Scales = "tensor"
        self._control: Control | None = None

    def run(
        self,
        tokens: ArrayLike,
        first: Format,
        control: Control | None = None,
        *,
        cache: Cache | None = None,
        scales: Scales = "tensor",
    ) -> Float:
        """Return the hidden states before the head, shape (tokens, width).

        Parameters
        ----------
        tokens : array_like of int, shape (tokens,)
        first : Format
            Of layer 0, and of all layers if there is no ``control``.
        control : callable, optional
            Chooses the format of every later layer.
        cache : Cache, optional
            Continued and extended; holds keys and values in the format of the layer and step that made them.
        scales : {"tensor", "row"}
            A tensor scale for all tokens, as in prefill, or one for each, as decoding them one by one gives.

        Raises
        ------
        ValueError
            As :meth:`Llama.forward`, or ``scales`` is unknown.
        """
        check_choice("scales", scales, ("tensor", "row"))
        self._format, self._scales, self._control = first, scales, control
        try:
            return self.hidden(tokens, cache=cache)
        finally:
            self._format, self._scales, self._control = Format.REFERENCE, "tensor", None

    def project(self, layer: int, name: str, x: Float) -> Float:
        """Multiply fake-quantised ``x`` (tokens, K) by fake-quantised weights, giving (tokens, N)."""
        form = self._format
        mask = self.store.mask(layer, name) if form is Format.AUTOFP6 else None
        shared = 2 if form is Format.AUTOFP2 and self.settings.scaling == "pair" else 1
        quantised = quantise_activations(x, form, self.settings, mask, self._scales, shared)
        return quantised @ self.store.values(layer, name, form).T

    def stored(self, layer: int, keys: Float, values: Float) -> tuple[Float, Float]:
        """Return keys and values, fake-quantised in groups along a head; a row is all heads of a token."""

        def quantised(x: Float) -> Float:
            by_token = np.ascontiguousarray(x.swapaxes(0, 1))
            return quantise_activations(by_token, self._format, self.settings, scales=self._scales).swapaxes(0, 1)

        return quantised(keys), quantised(values)

    def finished(self, layer: int, before: Float, after: Float) -> None:
        """Ask ``control`` for the next layer's format."""
        if self._control is not None:
            self._format = self._control(layer, before, after)
