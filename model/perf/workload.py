"""Matrix products of a language model: prefill and decode, attention and experts included; and the precisions that its layers run at."""

import csv
import gzip
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.perf.constants import constant
from model.perf.hardware import PRECISIONS
from model.perf.language_model import LanguageModel
from model.policy import Policy
from model.policy_replay import read_trace, replay

__all__ = ["Gemm", "Mix", "decode", "prefill", "read_mix"]

Float = NDArray[np.float64]


@dataclass(frozen=True)
class Gemm:
    """Products ``out[M, N] = a[M, K] · w[N, K]ᵀ`` of the same kind; sizes are arrays of one shape, a value for each step or block.

    Attributes
    ----------
    name : str
    m, n, k : ndarray
    count : ndarray
        Products of a layer.
    layers : int
        Layers that have them.
    fixed : bool
        Runs at 4 bits, whatever the layer asks for: head and routers.
    cached : {"", "n", "k"}
        Which size is the number of keys and values.
    """

    name: str
    m: Float
    n: Float
    k: Float
    count: Float
    layers: int
    fixed: bool = False
    cached: str = ""

    @property
    def macs(self) -> Float:
        """Multiplications and additions that the model asks for, all layers together."""
        found: Float = self.m * self.n * self.k * self.count * self.layers
        return found


def _gemm(name: str, sizes: Sequence[Any], count: Any, layers: int, **more: Any) -> Gemm:
    m, n, k, count = np.broadcast_arrays(*(np.atleast_1d(np.asarray(each, np.float64)) for each in (*sizes, count)))
    return Gemm(name, m, n, k, count, layers, **more)


def _linear(model: LanguageModel, tokens: int, logits: int, steps: int) -> list[Gemm]:
    """Return the products with weights for so many tokens at a time, of which so many give logits, in each of some steps."""
    one, width = np.ones(steps), model.width
    q, kv = model.heads * model.head_size, model.kv_heads * model.head_size
    found = [
        _gemm("qkv", (tokens * one, q + 2 * kv, width), 1, model.layers),
        _gemm("o", (tokens * one, width, q), 1, model.layers),
    ]
    if model.dense_layers:
        found += _gated("", tokens * one, model.hidden, width, 1, model.dense_layers)
    sparse = model.layers - model.dense_layers
    if sparse:
        # Tokens choose experts independently of each other; those that are met share the tokens evenly.
        share = model.experts_per_token / model.experts
        met = model.experts * -math.expm1(tokens * math.log1p(-share)) if share < 1 else model.experts
        each = np.ceil(tokens * model.experts_per_token / met - 1e-9)
        found.append(_gemm("router", (tokens * one, model.experts, width), 1, sparse, fixed=True))
        found += _gated("expert ", each * one, model.expert_hidden, width, met, sparse)
        if model.shared_hidden:
            found += _gated("shared ", tokens * one, model.shared_hidden, width, 1, sparse)
    return [*found, _gemm("head", (logits * one, model.vocabulary, width), 1, 1, fixed=True)]


def _gated(prefix: str, tokens: Float, hidden: int, width: int, count: float, layers: int) -> list[Gemm]:
    return [
        _gemm(f"{prefix}gate_up", (tokens, 2 * hidden, width), count, layers),
        _gemm(f"{prefix}down", (tokens, width, hidden), count, layers),
    ]


def _attention(model: LanguageModel, queries: Any, keys: Any, batch: int) -> list[Gemm]:
    """Return the products with keys and values; the query heads that share them are rows of one product."""
    rows = np.asarray(queries, np.float64) * (model.heads // model.kv_heads)
    count = model.kv_heads * batch
    return [
        _gemm("scores", (rows, keys, model.head_size), count, model.layers, cached="n"),
        _gemm("values", (rows, model.head_size, keys), count, model.layers, cached="k"),
    ]


def prefill(model: LanguageModel, prompt: int, batch: int) -> list[Gemm]:
    """Return the products of a prefill of ``batch`` prompts of so many tokens.

    Attention runs in blocks of queries, each over the keys and values up to its own last token; one value for each block.
    """
    block = int(constant("query_block"))
    starts = np.arange(0, prompt, block)
    ends = np.minimum(starts + block, prompt)
    linear = _linear(model, prompt * batch, batch, 1)
    return [*linear[:1], *_attention(model, ends - starts, ends, batch), *linear[1:]]


def decode(model: LanguageModel, contexts: Any, batch: int) -> list[Gemm]:
    """Return the products of decode steps, in which each of ``batch`` sequences has so many keys and values, its own included."""
    linear = _linear(model, batch, batch, len(contexts))
    return [*linear[:1], *_attention(model, 1, contexts, batch), *linear[1:]]


@dataclass(frozen=True)
class Mix:
    """Which share of the layers runs at each of :data:`PRECISIONS`.

    Attributes
    ----------
    prefill : ndarray [3]
    decode : ndarray [steps, 3]
        A recorded trace of fewer steps is repeated.

    Raises
    ------
    ValueError
        Shares are negative, or their sum is not 1.
    """

    prefill: Float
    decode: Float

    def __post_init__(self) -> None:
        for name, shares in (("prefill", self.prefill), ("decode", self.decode)):
            if not (
                np.isfinite(shares).all() and (shares >= 0).all() and np.allclose(shares.sum(axis=-1), 1, atol=1e-6)
            ):
                raise ValueError(f"shares of {name} must be from 0 on and sum up to 1, not {shares.tolist()}")

    @classmethod
    def of(cls, prefill: str, decode: str | None = None) -> "Mix":
        """Make a mix of shares in percent, as ``15/45/40`` for 2, 4 and 6 bits; decode as prefill if it is not given.

        Examples
        --------
        >>> Mix.of("15/45/40").decode.tolist()
        [[0.15, 0.45, 0.4]]
        """
        first = _shares(prefill)
        return cls(first, first[None] if decode is None else _shares(decode)[None])

    def steps(self, count: int) -> Float:
        """Return the shares of so many decode steps, of shape (count, 3)."""
        found: Float = self.decode[np.arange(count) % len(self.decode)]
        return found


def _shares(text: str) -> Float:
    try:
        found = np.array([float(part) for part in text.split("/")]) / 100
    except ValueError:
        found = np.zeros(0)
    if found.shape != (3,) or not (found >= 0).all() or abs(float(found.sum()) - 1) > 1e-6:
        raise ValueError(f"shares must be three percentages that sum up to 100, as 15/45/40, not {text!r}")
    return found


def read_mix(path: Path) -> Mix:
    """Read the precisions of a trace of `model.trace` or `model.policy`; one without them goes through the default policy.

    Parameters
    ----------
    path : Path
        CSV or JSON, or either packed by gzip; docs/policy.md describes both forms.

    Raises
    ------
    OSError, ValueError
        It cannot be read, is no trace, or lacks prefill or decode.
    """
    samples = read_trace(path)
    bits = [str(row.get("precision")) for row in _cells(path)]
    if set(bits) == {"None"}:
        bits = [str(row.precision) for row in replay(samples, Policy())]
    known = [str(each) for each in PRECISIONS]
    wrong = sorted(set(bits) - set(known))
    if wrong:
        raise ValueError(f"precision of TRACE must be one of {', '.join(known)} in each sample, not {wrong[0]!r}")
    by_step: dict[int, tuple[str, list[int]]] = {}
    for sample, bit in zip(samples, bits, strict=True):
        by_step.setdefault(sample.step, (sample.phase, [0, 0, 0]))[1][known.index(bit)] += 1
    whole = sum(next(iter(by_step.values()))[1])
    for step, (_, counts) in by_step.items():
        if sum(counts) != whole:
            raise ValueError(f"TRACE must have {whole} layers in each step, not {sum(counts)} in step {step}")
    shares = {
        phase: [np.array(counts) / sum(counts) for kind, counts in by_step.values() if kind == phase]
        for phase in ("prefill", "decode")
    }
    for phase, found in shares.items():
        if not found:
            raise ValueError(f"TRACE must have a step of {phase}")
    return Mix(np.mean(shares["prefill"], axis=0), np.array(shares["decode"]))


def _cells(path: Path) -> list[Mapping[str, Any]]:
    """Return the lines of a trace that `read_trace` has checked."""
    packed = path.suffix.lower() == ".gz"
    octets = path.read_bytes()
    text = (gzip.decompress(octets) if packed else octets).decode("utf-8-sig")
    if (path.with_suffix("") if packed else path).suffix.lower() != ".json":
        return list(csv.DictReader(io.StringIO(text, newline="")))
    content = json.loads(text)
    found: list[Mapping[str, Any]] = content["samples"] if isinstance(content, dict) else content
    return found
