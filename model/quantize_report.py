"""What was made of a checkpoint, as table, summary and picture (docs/weights.md)."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from model.calibration import Condition
from model.checkpoint import PROJECTIONS

__all__ = ["GRID", "NMSE", "OURS", "PLAIN", "Row", "picture", "summary", "table", "total"]

PLAIN, NMSE, OURS, GRID = "NVFP4", "AutoFP6 (nmse)", "AutoFP6", "FP6g"
"""Names of what a matrix is compared in; ``OURS`` is what goes into the package."""


@dataclass(frozen=True)
class Row:
    """A matrix.

    Attributes
    ----------
    name : str
    shape : (int, int)
        N and K.
    bits : float
        Storage bits per weight, see :func:`model.quantize.storage_bits`.
    refined : float
        Share of refined subgroups.
    weights : dict of str to float
        Error of the weights by format, ``Σ(w − ŵ)² / Σw²``.
    outputs : dict of str to float
        Error of the outputs on the evaluation text by format, ``‖X(W − Ŵ)ᵀ‖² / ‖XWᵀ‖²``; empty without one.
    condition : Condition or None
        Of the Hessian, if there was one.
    seconds : float
    """

    name: str
    shape: tuple[int, int]
    bits: float
    refined: float
    weights: dict[str, float]
    outputs: dict[str, float]
    condition: Condition | None
    seconds: float


def _mean(rows: Sequence[Row], what: str, form: str) -> float:
    return float(np.mean([getattr(row, what)[form] for row in rows]))


def total(rows: Sequence[Row]) -> dict[str, Any]:
    """Return sums and means over all matrices."""
    sizes = [row.shape[0] * row.shape[1] for row in rows]
    found: dict[str, Any] = {
        "matrices": len(rows),
        "weights": sum(sizes),
        "bits_per_weight": float(np.average([row.bits for row in rows], weights=sizes)),
        "refined": float(np.average([row.refined for row in rows], weights=sizes)),
        "weight_nmse": {form: _mean(rows, "weights", form) for form in rows[0].weights},
        "seconds": sum(row.seconds for row in rows),
    }
    if rows[0].outputs:
        found["output_nmse"] = {form: _mean(rows, "outputs", form) for form in rows[0].outputs}
        # Matrices of zeros have no error.
        if some := [row for row in rows if row.outputs[PLAIN]]:
            found["output_ratio"] = {
                form: float(np.mean([row.outputs[form] / row.outputs[PLAIN] for row in some]))
                for form in some[0].outputs
            }
    return found


def table(rows: Sequence[Row]) -> str:
    """Return a line for each matrix."""
    forms = list(rows[0].weights)
    outputs = list(rows[0].outputs)
    head = [
        "matrix",
        "N",
        "K",
        "bits",
        "refined",
        *(f"weights {f}" for f in forms),
        *(f"outputs {f}" for f in outputs),
        "seconds",
        "",
    ]
    lines = [head]
    for row in rows:
        note = ""
        if row.condition is not None and (row.condition.dead or row.condition.raised):
            raised = f", damping raised to {row.condition.damping:g}" if row.condition.raised else ""
            note = f"{row.condition.dead} dead inputs{raised}"
        numbers = [*(row.weights[f] for f in forms), *(row.outputs[f] for f in outputs)]
        lines.append(
            [row.name, *map(str, row.shape), f"{row.bits:.3f}", f"{100 * row.refined:.1f} %"]
            + [f"{number:.3e}" for number in numbers]
            + [f"{row.seconds:.2f}", note]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def picture(rows: Sequence[Row]) -> str:
    """Draw the errors of every matrix by layer as SVG, those of the outputs if they are known.

    Raises
    ------
    ModuleNotFoundError
        The package ``matplotlib`` is missing; the message is the pip command.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("the picture needs the package matplotlib: pip install matplotlib") from None
    what = "outputs" if rows[0].outputs else "weights"
    with matplotlib.rc_context({"svg.hashsalt": "quantize", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 6), layout="constrained")
        for axes, name in zip(figure.subplots(2, 2, sharex=True).flat, PROJECTIONS, strict=True):
            chosen = [row for row in rows if row.name.endswith(f".{name}")]
            layers = [int(row.name.partition(".")[0]) for row in chosen]
            for form in getattr(rows[0], what):
                axes.plot(layers, [getattr(row, what)[form] for row in chosen], "o-", ms=3, label=form)
            some = any(getattr(row, what)[form] > 0 for row in chosen for form in getattr(row, what))
            axes.set(title=name, yscale="log" if some else "linear", ylabel=f"NMSE of {what}")
            axes.grid(visible=True, which="both", alpha=0.25)
        for axes in figure.axes[2:]:
            axes.set(xlabel="layer")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def summary(report: dict[str, Any]) -> str:
    """Return the totals of a report in a few lines."""
    total = report["total"]
    lines = [
        f"{total['matrices']} matrices, {total['weights']} weights, {total['bits_per_weight']:.3f} bits each, "
        f"{100 * total['refined']:.2f} % of subgroups refined"
    ]
    for key, title in (
        ("weight_nmse", "NMSE of weights, mean"),
        ("output_nmse", "NMSE of outputs, mean"),
        ("output_ratio", "NMSE of outputs over NVFP4's, mean"),
    ):
        if key in total:
            lines.append(f"{title}: " + ", ".join(f"{form} {value:.4g}" for form, value in total[key].items()))
    if "perplexity" in report:
        lines.append("perplexity: " + ", ".join(f"{form} {value:.2f}" for form, value in report["perplexity"].items()))
    if "evaluation_tokens" in report:
        lines.append(
            f"calibrated on {report['calibration_tokens']} tokens of {report['calibration_text']}, "
            f"evaluated on {report['evaluation_tokens']} of {report['evaluation_text']}"
        )
    return "\n".join(lines)
