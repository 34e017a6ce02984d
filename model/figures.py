"""Measured figures of the number formats, on Gaussian data and on SmolLM2, against their goals (docs/figures.md)."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model import autofp2, autofp6, block_scaled, llm
from model.block_scaled import PAD, BlockScaled
from model.formats import E2M1, E2M3, E4M3
from model.sample_text import TEXT
from model.vmac import VmacConfig, accumulate_windowed, scaled

__all__ = [
    "Figure",
    "WindowError",
    "gaussian_figures",
    "main",
    "matrix_measures",
    "model_figures",
    "nmse",
    "share_removed",
    "window_error",
]

Float = NDArray[np.float32]

DENSITY = 0.2
"""Share of weight subgroups that the second-order term is measured with, the paper's default budget."""

_SHAPE, _SAMPLES = (1024, 2048), 4
_MAX_TOKENS, _MIN_TOKENS, _WINDOW_TOKENS = 1024, 32, 16


@dataclass(frozen=True)
class Figure:
    """A measured value and what it should be.

    Attributes
    ----------
    data : str
        What was measured on.
    name : str
    measured : float
    goal : float or None
        None if the figure only gives orientation, or its goal is a range.
    low, high : float or None
        Limits of a pass, both included.
    note : str
        Definition, or related values.
    """

    data: str
    name: str
    measured: float
    goal: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    @classmethod
    def near(cls, data: str, name: str, measured: float, goal: float, tolerance: float, note: str = "") -> "Figure":
        """Make a figure that passes within ``goal · (1 ± tolerance)``."""
        return cls(data, name, measured, goal, goal * (1 - tolerance), goal * (1 + tolerance), note)

    @property
    def passed(self) -> bool | None:
        """Whether the value is within its limits; None without limits."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

    def target(self) -> str:
        """Return goal and tolerance as text."""
        if self.low is None or self.high is None:
            return ""
        if self.goal is None:
            return f"{self.low:.3g} to {self.high:.3g}"
        return f"{self.goal:.4g} ±{100 * (self.high / self.goal - 1):.2g} %"


def _energy(x: NDArray[Any]) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def nmse(exact: Float, approximate: Float) -> float:
    """Return ``Σ(x - y)² / Σx²`` over all elements of two arrays of one shape, summed in float64."""
    return _energy(exact - approximate) / _energy(exact)


def share_removed(x: Float, base: BlockScaled, share: float = 0.5) -> float:
    """Return the share of the NVFP4-to-E2M3 error reduction that refining only the best subgroups reaches.

    The subgroups of the whole matrix are ranked by their absolute squared error under NVFP4; those refined are rounded to
    E2M3 under NVFP4's scale, the others stay. Each row has its own mask, and the slot limit is not applied.

    Parameters
    ----------
    x : ndarray of float32, shape (N, K)
        K is a multiple of 32.
    base : BlockScaled
        NVFP4 of ``x``.
    share : float
        Share of subgroups refined, 0 to 1.
    """
    steps = np.repeat(block_scaled.effective_scales(base), base.group, axis=-1)
    ratio = np.divide(x, steps, out=np.zeros_like(x), where=steps != 0)
    finer = E2M3.decode(E2M3.encode(np.clip(ratio, -E2M3.max, E2M3.max))) * steps
    before = autofp6.subgroup_errors(x, base)
    after = np.square(x - finer, dtype=np.float64).reshape(*before.shape, -1).sum(axis=-1)
    removed = (before - after).reshape(-1)
    best = np.argsort(-before.reshape(-1), kind="stable")[: round(share * removed.size)]
    return float(removed[best].sum() / removed.sum())


@dataclass(frozen=True)
class WindowError:
    """What the 32-bit accumulator of AutoFP2 mode adds to the exact sums of a matrix product.

    Attributes
    ----------
    pooled : float
        Energy of the difference over that of the exact sums.
    worst_token : float
        The same for the activation row where it is largest.
    saturated : int
        Accumulations that were clamped.
    """

    pooled: float
    worst_token: float
    saturated: int


def window_error(weights: BlockScaled, activations: BlockScaled, config: VmacConfig | None = None) -> WindowError:
    """Run a matrix product through the vMAC's AutoFP2 accumulators and compare with exact sums.

    Parameters
    ----------
    weights : BlockScaled
        NVFP4, codes of shape (N, Kp), N even; used with pair scaling.
    activations : BlockScaled
        NVFP4 with one scale per 32 elements, codes of shape (tokens, Kp).
    config : VmacConfig, optional
        Says where the window is; the default vMAC if not given.

    Raises
    ------
    ValueError
        N is odd, or the activations' scales differ within 32 elements.
    """
    window_shift = (config or VmacConfig()).window_shift
    if len(weights.codes) % 2:
        raise ValueError(f"weights must have an even number of rows, not {len(weights.codes)}")
    if (activations.scales[:, 0::2] != activations.scales[:, 1::2]).any():
        raise ValueError("activations must have one scale per 32 elements")
    digits, w_scales = autofp2.digits(weights)
    doubled = 2 * E2M1.decode(activations.codes)
    shape = len(doubled), len(digits)
    exact = np.zeros(shape, dtype=np.int64)
    psum = np.zeros(shape[0] * shape[1] // 2, dtype=np.uint64)
    clamped = 0
    for segment in range(doubled.shape[1] // PAD):
        lanes = slice(PAD * segment, PAD * (segment + 1))
        # Integers below 2**10: exact in float32.
        o = 8 * (doubled[:, lanes] @ digits[:, lanes].astype(np.float32).T).astype(np.int64)
        values = scaled(o, w_scales[:, 2 * segment], activations.scales[:, 2 * segment, None])
        exact += values
        psum, saturated = accumulate_windowed(psum, values[:, 0::2].ravel(), values[:, 1::2].ravel(), window_shift)
        clamped += int(saturated.sum())
    halves = [(psum >> np.uint64(shift)).astype(np.uint32).view(np.int32) for shift in (0, 32)]
    windowed = np.stack(halves, axis=-1).reshape(shape) * 2.0**window_shift
    error = np.square(windowed - exact).sum(axis=1)
    energy = np.square(exact.astype(np.float64)).sum(axis=1)
    # A row of zeros has no error either.
    by_token = error / np.where(energy == 0, 1, energy)
    return WindowError(float(error.sum() / max(energy.sum(), 1)), float(by_token.max()), clamped)


def gaussian_figures(samples: int = _SAMPLES, seed: int = 0) -> list[Figure]:
    """Measure the formats on ``samples`` matrices of 1024 × 2048 standard normal numbers (and Laplace, for pair scaling).

    Values are means over the matrices, each with its own tensor scale.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}")
    rng = np.random.default_rng(seed)
    data = {
        "Gaussian": [rng.standard_normal(_SHAPE, dtype=np.float32) for _ in range(samples)],
        "Laplace": [rng.laplace(size=_SHAPE).astype(np.float32) for _ in range(samples)],
    }
    bases = {name: [block_scaled.quantize(x) for x in matrices] for name, matrices in data.items()}

    def error(name: str, approximate: Callable[[Float, BlockScaled], Float]) -> float:
        pairs = zip(data[name], bases[name], strict=True)
        return float(np.mean([nmse(x, approximate(x, base)) for x, base in pairs]))

    def coarse(scaling: Literal["pair", "group"], c: float) -> Callable[[Float, BlockScaled], Float]:
        return lambda x, base: autofp2.dequantize(base, scaling, c)

    def refined(step: autofp6.Step) -> Callable[[Float, BlockScaled], Float]:
        return lambda x, base: autofp6.dequantize(autofp6.refine(x, base, step=step))

    goals: list[tuple[str, Callable[[Float, BlockScaled], Float], float, float]] = [
        ("NVFP4", lambda x, base: block_scaled.dequantize(base), 0.00904, 0.01),
        ("FP6g", lambda x, base: block_scaled.dequantize(block_scaled.quantize(x, E2M3)), 0.00066, 0.02),
        ("AutoFP6, all refined, fixed step", refined("fixed"), 0.00340, 0.01),
        ("AutoFP6, all refined, exponent step", refined("exponent"), 0.00123, 0.01),
        ("AutoFP2, scale per group, c = 1", coarse("group", 1), 0.364, 0.01),
        ("AutoFP2, scale per group, c = 2", coarse("group", 2), 0.0924, 0.01),
        ("AutoFP2, scale per group, c = 3", coarse("group", 3), 0.185, 0.01),
    ]
    orientation: list[tuple[str, str, Callable[[Float, BlockScaled], Float], str]] = [
        ("Gaussian", "AutoFP2, pair scale, c = 2", coarse("pair", 2), "0.095 expected"),
        ("Gaussian", "AutoFP2, larger scale, digits unchanged", _unchanged_digits, "0.113 expected"),
        ("Laplace", "AutoFP2, scale per group, c = 2", coarse("group", 2), "0.119 expected"),
        ("Laplace", "AutoFP2, pair scale, c = 2", coarse("pair", 2), "0.128 expected"),
        ("Laplace", "AutoFP2, larger scale, digits unchanged", _unchanged_digits, "0.210 expected"),
    ]
    return [
        Figure.near("Gaussian", name, error("Gaussian", approximate), goal, tolerance)
        for name, approximate, goal, tolerance in goals
    ] + [Figure(where, name, error(where, approximate), note=note) for where, name, approximate, note in orientation]


def _unchanged_digits(x: Float, base: BlockScaled) -> Float:
    """Return AutoFP2 values under the larger scale of two groups, with the digits that each group's own scale gives."""
    scales = np.repeat(E4M3.decode(autofp2.pair_scales(base.scales)), PAD, axis=-1)
    return (autofp2.remap(base.codes) * scales * base.tensor_scale * np.float32(autofp2.C))[..., : base.length]


def matrix_measures(w: Float, x: Float) -> dict[str, float]:
    """Measure everything that :func:`model_figures` needs from one projection.

    Parameters
    ----------
    w : ndarray of float32, shape (N, K)
        Weights; N even, K a multiple of 32.
    x : ndarray of float32, shape (tokens, K)
        Input activations.

    Returns
    -------
    dict of str to float
    """
    w_base, x_base = block_scaled.quantize(w), block_scaled.quantize(x)
    w_fine, x_fine = autofp6.refine(w, w_base), autofp6.refine(x, x_base)
    w_nvfp4, w_refined = block_scaled.dequantize(w_base), autofp6.dequantize(w_fine)
    x_nvfp4 = block_scaled.dequantize(x_base)
    y = x @ w.T
    energy = _energy(y)
    measures = {
        "nvfp4": nmse(w, w_nvfp4),
        "autofp6": nmse(w, w_refined),
        "share": share_removed(w, w_base),
    }

    def coarse(a: Float, scaling: Literal["pair", "group"]) -> Float:
        return a @ autofp2.dequantize(w_base, scaling, 1).T

    grouped = coarse(x_nvfp4, "group")
    measures |= {f"w2a4 c = {c}": _energy(y - np.float32(c) * grouped) / energy for c in (1, 2, 3)}
    x_shared = block_scaled.quantize(x, shared_groups=2)
    measures["w2a4 pair"] = (
        _energy(y - np.float32(autofp2.C) * coarse(block_scaled.dequantize(x_shared), "pair")) / energy
    )

    w_offset, x_offset = w_refined - w_nvfp4, autofp6.dequantize(x_fine) - x_nvfp4
    mask = autofp6.select_weights(autofp6.subgroup_gains(w, w_base), DENSITY)
    columns = np.repeat(mask, w.shape[1] // mask.size)
    measures["second order"] = _energy(x_offset[:, columns] @ w_offset[:, columns].T) / energy
    measures["second order, all"] = _energy(x_offset @ w_offset.T) / energy

    rows = np.unique(np.linspace(0, len(x) - 1, _WINDOW_TOKENS).astype(np.int64))
    some = dataclasses.replace(x_shared, codes=x_shared.codes[rows], scales=x_shared.scales[rows])
    window = window_error(w_base, some)
    return measures | {
        "window": window.pooled,
        "window, token": window.worst_token,
        "saturated": window.saturated,
    }


def model_figures(
    model: llm.Llama, tokens: ArrayLike, progress: Callable[[str], None] = lambda message: None
) -> list[Figure]:
    """Measure the formats on the weights of every projection and on the activations that ``tokens`` give them.

    Values are means over the matrices unless a name says otherwise.

    Parameters
    ----------
    model : Llama
    tokens : array_like of int, shape (tokens,)
    progress : callable
        Told what is done, in a line of text.
    """
    progress("forward pass")
    inputs = llm.capture_inputs(model, tokens)
    rows = []
    for count, ((layer, name), x) in enumerate(inputs.items(), 1):
        rows.append(matrix_measures(model.weight(layer, name), x))
        progress(f"matrix {count} of {len(inputs)} (layer {layer}, {name})")
    values = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    mean = {key: float(array.mean()) for key, array in values.items()}
    energies = [_energy(model.weight(layer, name)) for layer, name in inputs]

    def pooled(key: str) -> str:
        return f"{float(np.average(values[key], weights=energies)):.4g} pooled over all weights"

    weights, outputs = "SmolLM2 weights", "SmolLM2 outputs"
    figures = [
        Figure.near(weights, "NVFP4", mean["nvfp4"], 0.00897, 0.02, pooled("nvfp4")),
        Figure.near(weights, "AutoFP6, all refined, fixed step", mean["autofp6"], 0.00332, 0.02, pooled("autofp6")),
        Figure.near(weights, "NVFP4→E2M3 error removed by best 50 %", mean["share"], 0.865, 0.02, "a mask per row"),
    ]
    for c, goal, paper in ((1, 0.375, 0.38), (2, 0.097, 0.09), (3, 0.165, 0.15)):
        note = f"scale per group; paper {paper}"
        figures.append(Figure.near(outputs, f"W2A4, c = {c}", mean[f"w2a4 c = {c}"], goal, 0.05, note))
    second = f"{DENSITY:.0%} of weight and all activation subgroups; {mean['second order, all']:.2g} with all of both"
    worst = list(inputs)[int(values["window, token"].argmax())]
    return [
        *figures,
        Figure(outputs, "W2A4, c = 2, pair scale", mean["w2a4 pair"], note="as the accelerator runs it by default"),
        Figure(outputs, "energy of second-order term", mean["second order"], low=1e-6, high=4e-6, note=second),
        Figure(outputs, "AutoFP2 window error", mean["window"], note=f"largest matrix {values['window'].max():.2g}"),
        Figure(
            outputs,
            "AutoFP2 window error, worst token",
            float(values["window, token"].max()),
            note=f"layer {worst[0]}, {worst[1]}; median over matrices {np.median(values['window, token']):.2g}",
        ),
        Figure(outputs, "AutoFP2 accumulations saturated", float(values["saturated"].sum())),
    ]


def _table(figures: Sequence[Figure]) -> str:
    verdict = {True: "pass", False: "FAIL", None: ""}
    head = ("data", "figure", "measured", "goal", "", "note")
    lines = [(f.data, f.name, f"{f.measured:.4g}", f.target(), verdict[f.passed], f.note) for f in figures]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *lines)]
    return "\n".join(row.rstrip() for row in rows)


def _report(figures: Sequence[Figure], **context: Any) -> str:
    entries = [dataclasses.asdict(figure) | {"passed": figure.passed} for figure in figures]
    return json.dumps({**context, "figures": entries}, indent=2, ensure_ascii=False) + "\n"


def _progress(message: str) -> None:
    # A terminal keeps one line; a log gets few.
    if sys.stderr.isatty():
        print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)
    elif not message.startswith("matrix ") or int(message.split()[1]) % 20 == 0:
        print(message, file=sys.stderr, flush=True)


def _run(options: argparse.Namespace) -> list[Figure]:
    if options.gaussian_only and options.text is not None:
        raise ValueError("--text must be given without --gaussian-only, which reads no text")
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise ValueError(f"--json must name a file in an existing folder, not {options.json}")
    text = TEXT
    if options.text is not None:
        try:
            text = options.text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--text must be UTF-8, not {options.text}: {error}") from None
    model = None if options.gaussian_only else llm.load()
    context: dict[str, Any] = {}
    tokens = np.zeros(0, dtype=np.int64)
    if model is not None:
        tokens = model.tokenizer.encode(text)[:_MAX_TOKENS]
        if len(tokens) < _MIN_TOKENS:
            raise ValueError(f"--text must have at least {_MIN_TOKENS} tokens, not {len(tokens)}")
    _progress("Gaussian and Laplace samples")
    figures = gaussian_figures()
    if model is not None:
        figures += model_figures(model, tokens, _progress)
        context = {"tokens": len(tokens), "perplexity": llm.perplexity(model, tokens)}
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(_table(figures))
    if context:
        print(f"\n{context['tokens']} tokens, perplexity of the unquantised model {context['perplexity']:.2f}")
    if options.json is not None:
        options.json.write_text(_report(figures, **context), encoding="utf-8", newline="\n")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if every figure is within tolerance, 1 if one is not, 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m model.figures", description="Measure the number formats and compare with the goals."
    )
    parser.add_argument("--gaussian-only", action="store_true", help="leave SmolLM2 out; needs NumPy only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON as well")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help=f"text that gives the activations, first {_MAX_TOKENS} tokens"
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        figures = _run(options)
    except (ValueError, ModuleNotFoundError, OSError) as error:
        print(f"model.figures: {error}", file=sys.stderr)
        return 2
    failed = [figure for figure in figures if figure.passed is False]
    goals = sum(figure.passed is not None for figure in figures)
    print(f"{goals - len(failed)} of {goals} within tolerance, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
