"""NumPy forward pass of Llama-architecture language models (docs/figures.md).

Nothing is quantised here: the dequantised checkpoint is the reference. The matrices that share an input are fused, so
that a layer has four projections, as the accelerator sees them: ``qkv``, ``o``, ``gate_up`` and ``down``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.checkpoint import PROJECTIONS, LlamaConfig, Weights, checkpoint_path, read
from model.package import is_package, read_model
from model.sample_text import TEXT
from model.tokenizer import Tokenizer

__all__ = [
    "PROJECTIONS",
    "Cache",
    "Capture",
    "Llama",
    "LlamaConfig",
    "capture_inputs",
    "checkpoint_path",
    "layer_tensors",
    "load",
    "perplexity",
    "predictions",
]

Float = NDArray[np.float32]

Capture = Callable[[int, str, Float], None]
"""Called with layer, projection name and the projection's input, float32 of shape (tokens, K)."""

_HEAD_ROWS = 256
_QUERY_ROWS = 32


@dataclass
class Cache:
    """Keys and values of the tokens seen so far, for decoding step by step.

    Attributes
    ----------
    keys, values : dict of int to ndarray of float32, shape (kv_heads, tokens, head_size)
        By layer; keys after the rotary embedding.
    length : int
        Tokens seen.
    """

    keys: dict[int, Float] = field(default_factory=dict)
    values: dict[int, Float] = field(default_factory=dict)
    length: int = 0

    def extend(self, layer: int, keys: Float, values: Float) -> tuple[Float, Float]:
        """Append to a layer and return all of its keys and values."""
        if layer in self.keys:
            keys = np.concatenate([self.keys[layer], keys], axis=1)
            values = np.concatenate([self.values[layer], values], axis=1)
        self.keys[layer], self.values[layer] = keys, values
        return keys, values


class Llama:
    """A decoder: RMSNorm, rotary grouped-query attention, SwiGLU; everything in float32.

    Parameters
    ----------
    config : LlamaConfig
    weights : mapping of str to ndarray of float32
        ``embedding`` and ``head`` (vocabulary, width), ``norm`` (width,), and for each layer i ``{i}.attention_norm``,
        ``{i}.ffn_norm`` and ``{i}.{name}`` of shape (N, K) for each name in ``PROJECTIONS``. Rows of q and k are in the
        order of the original checkpoints: element j of a head rotates with element j + head_size / 2. Those of
        :func:`model.checkpoint.open` stay where they are until they are used.
    tokenizer : Tokenizer

    Raises
    ------
    ValueError
        A weight is missing or has another shape than ``config`` asks for.
    """

    def __init__(self, config: LlamaConfig, weights: Mapping[str, Float], tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.weights: Mapping[str, Float] = weights if isinstance(weights, Weights) else dict(weights)
        if isinstance(weights, Weights):
            return
        expected: dict[str, tuple[int, ...]] = {"norm": (config.width,)}
        expected |= dict.fromkeys(("embedding", "head"), (config.vocabulary, config.width))
        for layer in range(config.layers):
            expected |= {f"{layer}.{norm}": (config.width,) for norm in ("attention_norm", "ffn_norm")}
            expected |= {f"{layer}.{name}": shape for name, shape in config.shapes.items()}
        for key, shape in expected.items():
            given = self.weights[key].shape if key in self.weights else None
            if given != shape:
                raise ValueError(f"weights[{key!r}] must have shape {shape}, not {given}")

    def weight(self, layer: int, name: str) -> Float:
        """Return the matrix of a projection, shape (N, K).

        Raises
        ------
        ValueError
            There is no such layer or projection.
        """
        if not 0 <= layer < self.config.layers:
            raise ValueError(f"layer must be from 0 to {self.config.layers - 1}, not {layer}")
        if name not in PROJECTIONS:
            raise ValueError(f"name must be one of {', '.join(PROJECTIONS)}, not {name!r}")
        return self.weights[f"{layer}.{name}"]

    def project(self, layer: int, name: str, x: Float) -> Float:
        """Multiply ``x`` (tokens, K) by a projection's matrix, giving (tokens, N); all projections pass here."""
        return x @ self.weights[f"{layer}.{name}"].T

    def stored(self, layer: int, keys: Float, values: Float) -> tuple[Float, Float]:
        """Return what the cache keeps of new keys and values (kv_heads, tokens, head_size): all of it."""
        return keys, values

    def finished(self, layer: int, before: Float, after: Float) -> None:
        """Take note of the residual stream (tokens, width) before and after a layer; nothing is done here."""

    def forward(self, tokens: ArrayLike, capture: Capture | None = None, cache: Cache | None = None) -> Float:
        """Return the logits after each token.

        Parameters
        ----------
        tokens : array_like of int, shape (tokens,)
        capture : callable, optional
            Called with the input of every projection, in order of execution.
        cache : Cache, optional
            Tokens continue those already in the cache, which is extended.

        Returns
        -------
        ndarray of float32, shape (tokens, vocabulary)

        Raises
        ------
        ValueError
            Tokens are none, are no ids of the vocabulary, or exceed the context.
        """
        return self.logits(self.hidden(tokens, capture, cache))

    def logits(self, hidden: Float) -> Float:
        """Return the logits of final hidden states (tokens, width), shape (tokens, vocabulary)."""
        return hidden @ self.weights["head"].T

    def hidden(
        self, tokens: ArrayLike, capture: Capture | None = None, cache: Cache | None = None, layers: int | None = None
    ) -> Float:
        """Return the hidden states before the head, shape (tokens, width), after all or the first ``layers`` layers."""
        cache = cache if cache is not None else Cache()
        ids = self._checked(tokens, cache.length)
        x = self.weights["embedding"][ids]
        for layer in range(self.config.layers if layers is None else layers):
            x = self.layer(layer, x, cache, capture)
        cache.length += len(ids)
        return _rms_norm(x, self.weights["norm"], self.config.norm_epsilon)

    def layer(self, layer: int, x: Float, cache: Cache | None = None, capture: Capture | None = None) -> Float:
        """Return the residual stream (tokens, width) after a layer, from that before it.

        The tokens follow those that the cache counts; the layer's keys and values are added, the count stays.
        """
        cache = cache if cache is not None else Cache()
        w, epsilon = self.weights, self.config.norm_epsilon
        rotation = self._rotation(np.arange(cache.length, cache.length + len(x)))

        def project(name: str, x: Float) -> Float:
            if capture is not None:
                capture(layer, name, x)
            return self.project(layer, name, x)

        before = x
        mixed = self._attention(
            layer, project("qkv", _rms_norm(x, w[f"{layer}.attention_norm"], epsilon)), rotation, cache
        )
        x = x + project("o", mixed)
        gate, up = np.split(project("gate_up", _rms_norm(x, w[f"{layer}.ffn_norm"], epsilon)), 2, axis=1)
        x = x + project("down", _silu(gate) * up)
        self.finished(layer, before, x)
        return x

    def greedy(self, prompt: ArrayLike, count: int) -> NDArray[np.int64]:
        """Return the ``count`` most likely tokens after ``prompt``, each chosen with those before it."""
        cache, out = Cache(), []
        step = np.asarray(prompt)
        for _ in range(count):
            step = self.logits(self.hidden(step, cache=cache)[-1:]).argmax(axis=1)
            out.append(int(step[0]))
        return np.array(out, dtype=np.int64)

    def _checked(self, tokens: ArrayLike, seen: int) -> NDArray[np.int64]:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ValueError(f"tokens must be a list of at least one id, not {ids.dtype} of shape {ids.shape}")
        if ids.min() < 0 or ids.max() >= self.config.vocabulary:
            raise ValueError(f"tokens must be from 0 to {self.config.vocabulary - 1}, not {ids.min()} to {ids.max()}")
        if seen + len(ids) > self.config.context:
            raise ValueError(f"tokens must fit the context of {self.config.context}, not {seen + len(ids)}")
        return ids.astype(np.int64)

    def _rotation(self, positions: NDArray[np.int64]) -> tuple[Float, Float]:
        half = self.config.head_size // 2
        angles = positions[:, None] * self.config.rope_base ** -(np.arange(half) / half)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def _attention(self, layer: int, qkv: Float, rotation: tuple[Float, Float], cache: Cache) -> Float:
        config = self.config
        count = len(qkv)
        heads = qkv.reshape(count, -1, config.head_size).swapaxes(0, 1)
        q, k, v = np.split(heads, [config.heads, config.heads + config.kv_heads])
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        keys, values = cache.extend(layer, *self.stored(layer, k, v))
        # Query heads that share a key head stand side by side: (kv_heads, heads per kv head, tokens, head_size).
        q = q.reshape(config.kv_heads, -1, count, config.head_size) * np.float32(config.head_size**-0.5)
        mixed = np.empty_like(q)
        past = keys.shape[1] - count
        # A few queries at a time: the scores stay in the cache, and most keys of the future are left out.
        for start in range(0, count, _QUERY_ROWS):
            rows = slice(start, min(start + _QUERY_ROWS, count))
            seen = past + rows.stop
            scores = q[:, :, rows] @ keys[:, None, :seen].swapaxes(-1, -2)
            future = np.arange(seen) > np.arange(past + start, seen)[:, None]
            mixed[:, :, rows] = _softmax(np.where(future, np.float32(-np.inf), scores)) @ values[:, None, :seen]
        return mixed.reshape(config.heads, count, -1).swapaxes(0, 1).reshape(count, -1)


def _rms_norm(x: Float, gain: Float, epsilon: float) -> Float:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(epsilon)) * gain


def _silu(x: Float) -> Float:
    # The exponential of a large positive argument is infinite and the quotient then zero, as it should be.
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def _softmax(x: Float) -> Float:
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _rotate(x: Float, cos: Float, sin: Float) -> Float:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def perplexity(model: Llama, tokens: ArrayLike) -> float:
    """Return the exponential of the mean negative log-likelihood of each token but the first, given those before it.

    Raises
    ------
    ValueError
        There are fewer than two tokens, or as :meth:`Llama.forward`.
    """
    ids = np.asarray(tokens)
    if ids.size < 2:
        raise ValueError(f"tokens must be at least 2, not {ids.size}")
    losses, _ = predictions(model, model.hidden(ids)[:-1], ids[1:])
    return float(np.exp(losses.mean()))


def predictions(model: Llama, hidden: Float, following: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Compare what a model expects next with what follows.

    Parameters
    ----------
    model : Llama
    hidden : ndarray of float32, shape (tokens, width)
        Final hidden states, as :meth:`Llama.hidden` gives them.
    following : array_like of int, shape (tokens,)
        The token that comes after each.

    Returns
    -------
    losses : ndarray of float64, shape (tokens,)
        Negative natural logarithm of the probability of each following token.
    likeliest : ndarray of int64, shape (tokens,)
        The most likely token.

    Raises
    ------
    ValueError
        There is not one following token for each state.
    """
    targets = np.asarray(following)
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"following must have shape {hidden.shape[:1]}, not {targets.shape}")
    losses, likeliest = np.empty(len(targets)), np.empty(len(targets), dtype=np.int64)
    for start in range(0, len(targets), _HEAD_ROWS):
        part = slice(start, start + _HEAD_ROWS)
        logits = model.logits(hidden[part])
        top = logits.max(axis=1)
        spread = np.log(np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64))
        losses[part] = top + spread - logits[np.arange(len(logits)), targets[part]]
        likeliest[part] = logits.argmax(axis=1)
    return losses, likeliest


def capture_inputs(
    model: Llama, tokens: ArrayLike | None = None, wanted: Iterable[tuple[int, str]] | None = None
) -> dict[tuple[int, str], Float]:
    """Run the model once and return the inputs of projections.

    Parameters
    ----------
    model : Llama
    tokens : array_like of int, optional
        The sample text of this package by default.
    wanted : iterable of (layer, name), optional
        All projections of all layers by default; layers after the last wanted one are not run.

    Returns
    -------
    dict of (layer, name) to ndarray of float32, shape (tokens, K)

    Raises
    ------
    ValueError
        There is no such layer or projection.
    """
    ids = model.tokenizer.encode(TEXT) if tokens is None else tokens
    every = [(layer, name) for layer in range(model.config.layers) for name in PROJECTIONS]
    keys = set(every if wanted is None else wanted)
    for layer, name in keys:
        model.weight(layer, name)
    inputs: dict[tuple[int, str], Float] = {}

    def keep(layer: int, name: str, x: Float) -> None:
        if (layer, name) in keys:
            inputs[layer, name] = x

    model.hidden(ids, keep, layers=max((layer for layer, _ in keys), default=-1) + 1)
    return inputs


def layer_tensors(model: Llama, layer: int, name: str, tokens: ArrayLike | None = None) -> tuple[Float, Float]:
    """Return weights W (N, K) and input activations X (tokens, K) of one projection, float32.

    Parameters
    ----------
    model : Llama
    layer : int
    name : str
        One of ``PROJECTIONS``.
    tokens : array_like of int, optional
        The sample text of this package by default.

    Raises
    ------
    ValueError
        There is no such layer or projection.
    """
    return model.weight(layer, name), capture_inputs(model, tokens, [(layer, name)])[layer, name]


def load(path: str | Path | None = None) -> Llama:
    """Return the model of a checkpoint, or of a package; parameters and errors are those of :func:`model.checkpoint.read`."""
    checkpoint = read_model(path) if path is not None and is_package(Path(path)) else read(path)
    return Llama(checkpoint.config, checkpoint.weights, checkpoint.tokenizer)
