"""``python -m sim.post_cycles``: cycles of products with post-processing, counted and predicted, beside those without (docs/driver.md)."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.accelerator import AcceleratorConfig, Mode
from model.activation import Function
from model.block_scaled import PAD
from model.tiling import plans
from sim.accelerator import Row, measure, summary
from sim.axi_memory import Timing
from sim.driver import Accelerator
from sim.gemm import layer_products
from sim.product import NAMES, AcceleratorError, Gemm, Post
from sim.runner import SimulationError

__all__ = ["KINDS", "SHAPES", "main", "post_of", "post_rows"]

SHAPES = ((128, 128, 512), (128, 576, 576), (64, 576, 1536), (1, 576, 1536), (33, 70, 544))
"""Sizes M, N, K; those with 576 are projections of SmolLM2-135M."""
_GROUPS = Post(tensor_scale=0.1)
KINDS: dict[str, Post | None] = {
    "none": None,
    "numbers": Post(numbers=True, groups=False),
    "residual": Post(numbers=True, groups=False),
    "activity": Post(numbers=True, groups=False, report=True),
    "NVFP4": _GROUPS,
    "W2A4": dataclasses.replace(_GROUPS, shared=True),
    "AutoFP6": dataclasses.replace(_GROUPS, threshold=300.0),
    "all": dataclasses.replace(_GROUPS, function=Function.SILU, numbers=True, report=True, threshold=300.0),
}
"""What is done with outputs: nothing; FP32 numbers, with a residual, and compared with earlier ones; groups for a next layer of each kind; all at once."""


def post_of(rng: np.random.Generator, kind: str, m: int, n: int) -> Post | None:
    """Return what is done with M × N outputs, with random numbers for what is read beside them."""

    def numbers() -> NDArray[np.float32]:
        return rng.standard_normal((m, n)).astype(np.float32)

    post = KINDS[kind]
    if post is None:
        return None
    changes: dict[str, Any] = {}
    if kind in ("residual", "activity", "all"):
        changes["residual"] = numbers()
    if kind in ("activity", "all"):
        changes["previous"] = numbers()
    if kind in ("AutoFP6", "all"):
        changes["weight_masks"] = rng.choice(np.array([0, 0, 0, 1, 2, 4, 8], np.uint8), -(-n // PAD) * 2)
    return dataclasses.replace(post, **changes)


def post_rows(
    accelerator: Accelerator, shapes: Sequence[tuple[int, int, int]], kinds: Sequence[str], seed: int
) -> Iterator[Row]:
    """Run products of random numbers in every mode; raises like `measure`."""
    rng = np.random.default_rng(seed)
    for m, n, k in shapes:
        x, w = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (m, n))
        for product in layer_products(accelerator.config, w, x):
            mode = next(mode for mode, text in NAMES.items() if text == product.mode)
            for kind in kinds:
                post = post_of(rng, kind, m, n)
                yield measure(accelerator, kind, Gemm(product.a, product.w, mode, "fp32", post=post))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.post_cycles",
        description="Cycles of products with post-processing on the simulated accelerator, counted and predicted, beside the same products without; "
        "all results are compared with the model bit for bit.",
    )
    add = parser.add_argument
    add(
        "--product",
        nargs=3,
        type=int,
        action="append",
        metavar=("M", "N", "K"),
        help="a size, in every mode (default: several); may be given more than once",
    )
    add(
        "--kinds",
        nargs="+",
        default=list(KINDS),
        choices=list(KINDS),
        help="what is done with outputs (default: each of these)",
    )
    add("--rows", type=int, default=4, help="rows of the array (default: 4)")
    add("--columns", type=int, default=4, help="columns of the array (default: 4)")
    add("--data-width", type=int, default=128, help="bits of the data bus (default: 128)")
    add("--latency", type=int, default=0, help="cycles that memory takes longer (default: 0)")
    add("--seed", type=int, default=1, help="seed of the numbers (default: 1)")
    add("--simulator", choices=("verilator", "icarus"), default="verilator")
    add("--json", type=Path, metavar="FILE", help="write the table as JSON as well")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if every product is right, 1 if not, 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    sizes = {"rows": options.rows, "columns": options.columns, "data_width": options.data_width}
    try:
        config = AcceleratorConfig(ppu=True, **sizes)
        Timing(options.latency, options.latency)
        if options.json is not None and not options.json.parent.is_dir():
            raise ValueError(f"--json must be in a folder that exists, not {options.json}")
        if options.seed < 0:
            raise ValueError(f"--seed must not be negative, not {options.seed}")
        shapes = [(m, n, k) for m, n, k in options.product or SHAPES]
        for m, n, k in shapes:
            next(plans(config, Mode.AUTOFP6, m, n, -(-k // config.lanes) * config.lanes))
    except ValueError as error:
        print(f"sim.post_cycles: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    plain = 0
    try:
        accelerator = Accelerator(options.simulator, latency=options.latency, seed=options.seed, ppu=True, **sizes)
        print(f"{Row.HEAD} by none", flush=True)
        for row in post_rows(accelerator, shapes, options.kinds, options.seed):
            plain = row.cycles if row.name == "none" else plain
            print(f"{row} {row.cycles / plain:>7.3f}" if plain else row, flush=True)
            rows.append(row)
    except (AcceleratorError, SimulationError, OSError, ValueError) as error:
        print(f"sim.post_cycles: {error}", file=sys.stderr)
        return 1
    compared = sum(row.compared for row in rows)
    print(*summary(rows)[:1], sep="\n")
    print(f"{len(rows)} products, {compared} outputs, all equal to the model's")
    if options.json is not None:
        table = {"seed": options.seed, "latency": options.latency, **sizes}
        options.json.write_text(json.dumps({**table, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1))
    return 0 if compared else 1


if __name__ == "__main__":
    sys.exit(main())
