"""``python -m model.damping``: errors of algorithm 1 over the damping of the Hessian, on some layers of a checkpoint (docs/weights.md)."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from model import autofp6, block_scaled, checkpoint
from model.calibration import Options, calibrate, gram, loss
from model.checkpoint import PROJECTIONS, Checkpoint
from model.command import Progress, check_outputs, command, write_json
from model.llm import Llama
from model.quantize import Streams, Texts, read_texts

__all__ = ["Ratio", "main", "ratios"]


@dataclass(frozen=True)
class Ratio:
    """Error of the outputs of a matrix on the evaluation text over that of NVFP4.

    Attributes
    ----------
    name : str
    damping : float
        As it was asked for.
    raised : bool
        It was not enough to factor the Hessian.
    ratio : float
    """

    name: str
    damping: float
    raised: bool
    ratio: float


def ratios(
    source: Checkpoint,
    layers: Sequence[int],
    dampings: Sequence[float],
    texts: Texts,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Ratio]:
    """Prepare the matrices of some layers by algorithm 1 with each damping; their inputs are those of the unquantised model.

    Parameters
    ----------
    source : Checkpoint
    layers : sequence of int
    dampings : sequence of float
    texts : Texts
    progress : callable
        Called with a line of text for each layer.

    Raises
    ------
    ValueError
        There is no such layer, or a damping is out of range.
    """
    wrong = [layer for layer in layers if not 0 <= layer < source.config.layers]
    if wrong:
        raise ValueError(f"--layers must be from 0 to {source.config.layers - 1}, not {wrong[0]}")
    options = [Options(damping=damping) for damping in dampings]
    streams = Streams(Llama(source.config, source.weights, source.tokenizer))
    streams.begin(source.weights["embedding"], texts)
    found: list[Ratio] = []
    for layer in range(max(layers) + 1):
        progress(f"layer {layer}")
        held = streams.hold(layer, source.weights)
        for name in PROJECTIONS if layer in layers else ():
            key = f"{layer}.{name}"
            w, hessian = held[key], streams.hessian(layer, name)
            seen = sum(gram(x) for x in streams.inputs(layer, name, streams.evaluated))
            plain = loss(w - block_scaled.dequantize(block_scaled.quantize(w)), np.asarray(seen))
            for option in options:
                made = calibrate(w, option, hessian)
                error = loss(w - autofp6.dequantize(made.weights), np.asarray(seen))
                raised = made.condition is not None and made.condition.raised
                found.append(Ratio(key, option.damping, raised, error / plain if plain else 1.0))
        if layer < max(layers):
            streams.advance(layer)
    return found


@command(prefix="model.damping", status=2)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m model.damping",
        description="Errors of outputs over the damping of the Hessian, over those of NVFP4; docs/weights.md.",
    )
    add = parser.add_argument
    add("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT", help="as model.quantize (default: SmolLM2-135M)")
    add("--layers", type=int, nargs="+", default=[2, 8, 14, 20, 26], metavar="L", help="(default: 2 8 14 20 26)")
    add("--damping", type=float, nargs="+", default=[0.01, 0.03, 0.1, 0.3], metavar="X", help="(default: 0.01 to 0.3)")
    add("--text", type=Path, metavar="FILE", help="calibration text")
    add("--evaluation", type=Path, metavar="FILE", help="text to measure on")
    add("--tokens", type=int, default=16384, metavar="N", help="most tokens of each text (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the error of every matrix as JSON")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    options = parser.parse_args(arguments)
    if options.tokens < 2:
        raise ValueError(f"--tokens must be at least 2, not {options.tokens}")
    check_outputs(options.json)
    source = checkpoint.open(options.checkpoint)
    texts = read_texts(source, options)
    rows = ratios(source, options.layers, options.damping, texts, Progress(options.quiet))
    means = {
        damping: float(np.mean([row.ratio for row in rows if row.damping == damping])) for damping in options.damping
    }
    counts = {"calibration_tokens": len(texts.calibration), "evaluation_tokens": len(texts.evaluation)}
    write_json(options.json, counts | {"layers": options.layers, "rows": [asdict(row) for row in rows]}, indent=1)
    print(f"{'damping':>8} {'mean':>6} " + " ".join(f"{name:>8}" for name in PROJECTIONS))
    for damping, mean in means.items():
        parts = [
            np.mean([row.ratio for row in rows if row.damping == damping and row.name.endswith(f".{name}")])
            for name in PROJECTIONS
        ]
        print(f"{damping:>8g} {mean:>6.3f} " + " ".join(f"{part:>8.3f}" for part in parts))
    print(f"layers {', '.join(map(str, options.layers))}; {len(texts.calibration)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
