"""``python -m sim.accelerator``: matrix products of any size on the simulated accelerator, memory to memory, as NumPy arrays (docs/driver.md)."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from model import accelerator_cycles, gemm
from model.accelerator import (
    AcceleratorConfig,
    Format,
    Mode,
)
from model.command import write_json
from model.llm import PROJECTIONS, layer_tensors, load
from model.pe import Operands
from model.tiling import REFINED, plan, plans
from sim.axi_memory import Timing
from sim.driver import MEMORY, MEMORY_LIMIT, Accelerator
from sim.expected import expected, models, unit, verify
from sim.gemm import Product, layer_products
from sim.image import product_bytes, shared_masks
from sim.longer_k import extended, mask_bits
from sim.product import NAMES, AcceleratorError, Batch, Gemm, GroupsOf, NumbersOf, Post, Result, Step, processing
from sim.random_products import CAMPAIGN, SMALL_MEMORY, random_gemm, random_queue, random_timing
from sim.runner import SimulationError

__all__ = [
    "CAMPAIGN",
    "SHAPES",
    "SMALL_MEMORY",
    "Accelerator",
    "AcceleratorError",
    "Batch",
    "Gemm",
    "GroupsOf",
    "NumbersOf",
    "Post",
    "Result",
    "Row",
    "Step",
    "checked",
    "expected",
    "extended",
    "main",
    "models",
    "random_gemm",
    "random_timing",
    "unit",
    "verify",
]

MOST_SEGMENTS = 1 << 20
"""Most segments of a product that ``--predict`` takes: some seconds."""


SHAPES = (
    (128, 128, 1024),
    (256, 256, 1024),
    (128, 576, 1536),
    (128, 1024, 1024),
    (128, 512, 2048),
    (512, 128, 1024),
    (64, 64, 64),
    (1, 512, 1024),
    (512, 2, 1024),
    (16, 16, 8192),
    (128, 128, 8192),
    (200, 200, 32),
    (127, 129, 1056),
    (33, 70, 96),
    (131, 254, 2080),
    (5, 7, 160),
)
"""Sizes M, N, K that ``--shapes`` runs. 128 × 576 × 1536 is the down projection of SmolLM2-135M, 128 × 1024 × 1024 key or value of Qwen3-0.6B."""


GOAL_USE, GOAL_M, GOAL_K = 0.95, 128, 1024
"""What the array is to be used for sizes from M and K on."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table: a product that ran and was compared.

    Attributes
    ----------
    name : str
    m, n, k : int
    mode : str
    tile_m, tile_n, segment, tiles : int
    cycles : int
        By the accelerator's own count, alone in the queue.
    predicted : int or None
        Cycles that :func:`model.accelerator_cycles.predict` gives; None if channels stall.
    use : float
        Useful vector operations by cycles and elements.
    compared : int
        Outputs that are equal to the model's.
    seconds : float
    """

    name: str
    m: int
    n: int
    k: int
    mode: str
    tile_m: int
    tile_n: int
    segment: int
    tiles: int
    cycles: int
    predicted: int | None
    use: float
    compared: int
    seconds: float

    HEAD = (
        f"{'name':10} {'M':>5} {'N':>5} {'K':>5} {'mode':8} {'tile':>8} {'segment':>7} {'tiles':>5} "
        f"{'cycles':>9} {'predicted':>9} {'off %':>6} {'use %':>6} {'compared':>9} {'s':>6}"
    )

    def __str__(self) -> str:
        tile = f"{self.tile_m}×{self.tile_n}"
        predicted = f"{'':>9} {'':>6}"
        if self.predicted is not None:
            predicted = f"{self.predicted:>9} {100 * (self.predicted / self.cycles - 1):>6.2f}"
        return (
            f"{self.name:10} {self.m:>5} {self.n:>5} {self.k:>5} {self.mode:8} {tile:>8} {self.segment:>7} {self.tiles:>5} "
            f"{self.cycles:>9} {predicted} {100 * self.use:>6.1f} {self.compared:>9} {self.seconds:>6.1f}"
        )


def summary(rows: Sequence[Row]) -> list[str]:
    """Return what a table comes to: how far off predictions are at most, and which sizes that should reach the goal of use do."""
    lines = []
    predicted = [(abs(row.predicted / row.cycles - 1), row) for row in rows if row.predicted is not None]
    if predicted:
        off, row = max(predicted, key=lambda pair: pair[0])
        lines.append(f"predictions are off by at most {100 * off:.2f} %: {row.m} × {row.n} × {row.k}, {row.mode}")
    large = [row for row in rows if row.m >= GOAL_M and row.k >= GOAL_K]
    if large:
        below = [f"{row.m} × {row.n} × {row.k} {row.mode} {100 * row.use:.1f}" for row in large if row.use < GOAL_USE]
        lines.append(
            f"use of at least {100 * GOAL_USE:.0f} % where M >= {GOAL_M} and K >= {GOAL_K}: {len(large) - len(below)} of {len(large)}"
            + (f"; below: {', '.join(below)}" if below else "")
        )
    return lines


def _refined(x: Operands) -> float | list[float]:
    """Return the refined subgroups of each vector of a row if all rows have the same, otherwise their mean."""
    counts = mask_bits(x.masks).reshape(*x.masks.shape[:2], -1).sum(axis=-1)
    return [float(count) for count in counts[0]] if shared_masks(x) else float(counts.mean())


def predicted_cycles(accelerator: Accelerator, product: Gemm, result: Result) -> int | None:
    """Return what the model predicts for a product alone in the queue, None if channels stall."""
    timing, config, found = accelerator.timing, accelerator.config, result.plan
    if any(timing.chances.values()):
        return None
    a, w = product.stored(config.lanes)
    a_refined, w_refined = (_refined(x) if product.mode == Mode.AUTOFP6 else 0.0 for x in (a, w))
    return accelerator_cycles.predict(
        config,
        accelerator_cycles.Product(
            product.mode,
            Format.RAW if product.out == "raw" else Format.FP32,
            len(a.codes),
            len(w.codes),
            a.codes.shape[1] * config.lanes,
            found.tile_m,
            found.tile_n,
            found.segment,
            a_refined,
            w_refined,
            processing(product.post, result.groups),
        ),
        timing.read_latency,
        timing.write_latency,
    )


def measure(accelerator: Accelerator, name: str, product: Gemm, run: Callable[[Gemm], Batch] | None = None) -> Row:
    """Run one product alone, compare it, and return its line; raises like :func:`verify`."""
    started = time.monotonic()
    batch = accelerator.run([product]) if run is None else run(product)
    compared = verify(accelerator.config, [product], batch)
    a, w = product.stored(accelerator.config.lanes)
    result = batch[0]
    found = result.plan
    return Row(
        name,
        len(a.codes),
        len(w.codes),
        a.codes.shape[1] * accelerator.config.lanes,
        NAMES[product.mode],
        found.tile_m,
        found.tile_n,
        found.segment,
        found.tiles,
        result.cycles,
        predicted_cycles(accelerator, product, result),
        result.utilisation(accelerator.config),
        compared,
        time.monotonic() - started,
    )


def layer_rows(
    accelerator: Accelerator, layer: int, tokens: int, projections: Sequence[str], out: Literal["raw", "fp32"]
) -> Iterator[Row]:
    """Run projections of a layer of SmolLM2-135M on its own activations, in every mode.

    Raises
    ------
    AcceleratorError
        A sum is not that of the model, or is farther from the product of the dequantised tensors than rounding allows.
    """
    model = load()
    for name in projections:
        w, x = layer_tensors(model, layer, name)
        for product in layer_products(accelerator.config, w, x[:tokens]):
            yield checked(accelerator, name, product, out)


def checked(
    accelerator: Accelerator,
    name: str,
    product: Product,
    out: Literal["raw", "fp32"] = "raw",
    run: Callable[[Gemm], Batch] | None = None,
) -> Row:
    """Run a product of quantised tensors alone, and compare it with the model and with the product of the dequantised tensors.

    ``run`` runs it, :meth:`Accelerator.run` by default.

    Raises
    ------
    AcceleratorError
        A sum is not that of the model, or is farther from the product of the dequantised tensors than rounding allows.
    """
    mode = next(mode for mode, text in NAMES.items() if text == product.mode)
    sums, status = gemm.product(accelerator.config, mode, product.a, product.w)
    worst = float(np.abs(sums - product.exact / product.unit).max())
    if worst > product.allowed or status:
        raise AcceleratorError(f"{name} in {product.mode}: sums are off by {worst} units, status {status}")
    return measure(accelerator, name, Gemm(product.a, product.w, mode, out), run)


def shape_rows(accelerator: Accelerator, shapes: Sequence[tuple[int, int, int]], seed: int) -> Iterator[Row]:
    """Run products of random numbers of given sizes, in every mode."""
    config = accelerator.config
    rng = np.random.default_rng(seed)
    for m, n, k in shapes:
        x, w = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (m, n))
        for product in layer_products(config, w, x):
            mode = next(mode for mode, text in NAMES.items() if text == product.mode)
            yield measure(accelerator, "", Gemm(product.a, product.w, mode))


def extended_rows(
    accelerator: Accelerator, layer: int, tokens: int, projections: Sequence[str]
) -> Iterator[tuple[Row, Row]]:
    """Run AutoFP6 products of a layer natively, and by NVFP4 with a longer K; both have the same sums.

    Raises
    ------
    AcceleratorError
        They differ.
    """
    model = load()
    config = accelerator.config
    for name in projections:
        w, x = layer_tensors(model, layer, name)
        *_, native = layer_products(config, w, x[:tokens])
        a_long, w_long = extended(native.a, native.w, config.step)
        both = [Gemm(native.a, native.w, Mode.AUTOFP6), Gemm(a_long, w_long, Mode.NVFP4)]
        sums = [gemm.product(config, product.mode, *product.stored(config.lanes))[0] for product in both]
        if not (sums[0] == sums[1]).all():
            raise AcceleratorError(f"{name}: the longer product has other sums")
        first, second = (measure(accelerator, name, product) for product in both)
        yield first, second


def campaign(count: int, seed: int, simulator: str, together: int = 40) -> Iterator[str]:
    """Run random products in queues, on each configuration of `CAMPAIGN` in turn; yields lines of progress.

    Raises
    ------
    AcceleratorError
        Something differs; the message has the configuration and the number of the queue, which with the seed gives it back.
    """
    done = compared = cycles = 0
    accelerators: list[Accelerator] = []
    started = time.monotonic()
    for number in range(-(-count // together)):
        which = number % len(CAMPAIGN)
        if which == len(accelerators):
            accelerators.append(Accelerator(simulator, memory=SMALL_MEMORY, **CAMPAIGN[which]))
        accelerator = accelerators[which]
        rng = np.random.default_rng((seed, number))
        products = random_queue(rng, accelerator.config, min(together, count - done))
        timing = random_timing(rng)
        try:
            batch = accelerator.run(products, rng=rng, timing=timing)
            compared += verify(accelerator.config, products, batch)
        except AcceleratorError as error:
            raise AcceleratorError(f"seed {seed}, queue {number}, {CAMPAIGN[which]}, {timing}: {error}") from error
        done += len(batch)
        cycles += batch.cycles
        yield f"{done:>7} products, {compared:>9} outputs, {cycles:>10} cycles, {time.monotonic() - started:7.1f} s"
    if done != count:
        raise AcceleratorError(f"{done} products ran, not {count}")


def product_memory(config: AcceleratorConfig, m: int, n: int, k: int) -> int:
    """Return how many bytes the memory for a product gets, in any mode.

    Raises
    ------
    ValueError
        A size is 0, K does not fit the banks, or the product does not fit the largest memory.
    """
    for name, size in (("M", m), ("N", n), ("K", k)):
        if size < 1:
            raise ValueError(f"{name} of --product must be at least 1, not {size}")
    k = -(-k // config.lanes) * config.lanes
    next(plans(config, Mode.AUTOFP6, m, n, k))
    needed = max(product_bytes(config, mode, Format.RAW, m, n, k) for mode in Mode)
    if needed > MEMORY_LIMIT:
        raise ValueError(
            f"--product must be of sizes that fit {MEMORY_LIMIT} bytes of memory, not {m} {n} {k}, which take up to {needed}"
        )
    return max(MEMORY, 1 << (needed - 1).bit_length())


def predicted_lines(
    config: AcceleratorConfig, m: int, n: int, k: int, out: Literal["raw", "fp32"], latency: int
) -> Iterator[str]:
    """Yield a table of the plan of a product in every mode, and the cycles that the model predicts, without any simulation.

    Raises
    ------
    ValueError
        A size is outside its range, or predicting would take too long.
    """
    padded = -(-k // config.lanes) * config.lanes
    yield f"{'M':>7} {'N':>7} {'K':>7} {'mode':8} {'tile':>8} {'segment':>7} {'tiles':>7} {'predicted':>10} {'use %':>6}"
    for mode in NAMES:
        if mode == Mode.AUTOFP6 and config.refinement == "none":
            continue
        found = plan(config, mode, m, n, padded)
        segments = found.tiles * -(-padded // (config.lanes * found.segment))
        if segments > MOST_SEGMENTS:
            raise ValueError(f"--predict must be of sizes that take at most {MOST_SEGMENTS} segments, not {segments}")
        refined = REFINED if mode == Mode.AUTOFP6 else 0.0
        kind = Format.RAW if out == "raw" else Format.FP32
        sizes = (m, n, padded, found.tile_m, found.tile_n, found.segment)
        product = accelerator_cycles.Product(mode, kind, *sizes, refined, refined)
        cycles = accelerator_cycles.predict(config, product, latency, latency)
        vectors = -(-n // 2) if mode == Mode.AUTOFP2 else n
        use = m * vectors * (padded // config.lanes) / (cycles * config.rows * config.columns)
        tile = f"{found.tile_m}×{found.tile_n}"
        yield (
            f"{m:>7} {n:>7} {padded:>7} {NAMES[mode]:8} {tile:>8} {found.segment:>7} {found.tiles:>7} {cycles:>10} {100 * use:>6.1f}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.accelerator",
        description="Matrix products on the simulated accelerator, memory to memory, compared with the model bit for bit. "
        "By default projections of SmolLM2-135M in every mode.",
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shapes", action="store_true", help="products of many sizes instead")
    what.add_argument(
        "--product", nargs=3, type=int, metavar=("M", "N", "K"), help="one size instead, random numbers, in every mode"
    )
    what.add_argument(
        "--predict",
        nargs=3,
        type=int,
        metavar=("M", "N", "K"),
        help="tiles and predicted cycles of one size instead, in every mode, at once and without simulation; "
        f"AutoFP6 is supposed to refine {REFINED} subgroups of a vector on either side",
    )
    what.add_argument(
        "--extended", action="store_true", help="AutoFP6 beside NVFP4 with a longer K, on a layer's projections"
    )
    what.add_argument("--random", type=int, metavar="N", help="N random products in several configurations instead")
    add("--layer", type=int, default=11, help="decoder layer (default: 11, where activations spike)")
    add("--projections", nargs="+", default=list(PROJECTIONS), choices=PROJECTIONS, help="matrices (default: all four)")
    add("--tokens", type=int, default=64, help="tokens (default: 64)")
    add("--rows", type=int, default=4, help="rows of the array (default: 4)")
    add("--columns", type=int, default=4, help="columns of the array (default: 4)")
    add("--data-width", type=int, default=128, help="bits of the data bus (default: 128)")
    add(
        "--out",
        choices=("raw", "fp32"),
        default="raw",
        help="what a layer's products give, or --predict (default: raw)",
    )
    add(
        "--stalls",
        type=int,
        help="chance of a stall per channel and cycle, in 1/256 (default: 40; 0 with --shapes, --product, --predict and --extended)",
    )
    add(
        "--latency",
        type=int,
        help="cycles that memory takes longer (default: 20; 0 with --shapes, --product, --predict and --extended)",
    )
    add("--seed", type=int, default=1, help="seed of stalls and random numbers (default: 1)")
    add("--simulator", choices=("verilator", "icarus"), default="verilator")
    add("--json", type=Path, metavar="FILE", help="write the table as JSON as well")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if every product is right, 1 if not, 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    ideal = options.shapes or options.extended or options.product or options.predict
    stalls = options.stalls if options.stalls is not None else 0 if ideal else 40
    latency = options.latency if options.latency is not None else 0 if ideal else 20
    try:
        for name in ("tokens", "random"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, not {value}")
        Timing(latency, latency, stalls, options.seed)
        sizes = {"rows": options.rows, "columns": options.columns, "data_width": options.data_width}
        width = options.data_width
        if not 64 <= width <= 1024 or width & (width - 1):
            raise ValueError(f"--data-width must be a power of two from 64 to 1024, not {width}")
        config = AcceleratorConfig(**sizes)
        memory = product_memory(config, *options.product) if options.product else MEMORY
        if options.predict:
            if stalls or options.json:
                raise ValueError("--predict takes neither --stalls nor --json")
            m, n, k = options.predict
            print("\n".join(predicted_lines(config, m, n, k, options.out, latency)))
            return 0
        if options.json is not None and not options.json.parent.is_dir():
            raise ValueError(f"--json must be in a folder that exists, not {options.json}")
        if not (options.shapes or options.product) and options.random is None:
            load().weight(options.layer, options.projections[0])
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"sim.accelerator: {error}", file=sys.stderr)
        return 2
    drawn = options.random is not None
    print(f"seed {options.seed}" + ("" if drawn else f", stalls {stalls}/256, latency {latency}"), flush=True)
    rows: list[Row] = []
    try:
        if options.random is not None:
            for line in campaign(options.random, options.seed, options.simulator):
                print(line, flush=True)
            return 0
        accelerator = Accelerator(
            options.simulator, memory=memory, stalls=stalls, latency=latency, seed=options.seed, **sizes
        )
        print(Row.HEAD + ("  cycles by native" if options.extended else ""), flush=True)
        if options.extended:
            for native, longer in extended_rows(accelerator, options.layer, options.tokens, options.projections):
                print(f"{native}\n{longer} {longer.cycles / native.cycles:>16.2f}", flush=True)
                rows += [native, longer]
        else:
            found = (
                shape_rows(accelerator, SHAPES if options.shapes else [tuple(options.product)], options.seed)
                if options.shapes or options.product
                else layer_rows(accelerator, options.layer, options.tokens, options.projections, options.out)
            )
            for row in found:
                print(row, flush=True)
                rows.append(row)
    except (AcceleratorError, SimulationError, OSError) as error:
        print(f"sim.accelerator: {error}", file=sys.stderr)
        return 1
    compared = sum(row.compared for row in rows)
    if options.shapes or options.product:
        print(*summary(rows), sep="\n")
    print(f"{len(rows)} products, {compared} outputs, all equal to the model's")
    if options.json is not None:
        table = {"seed": options.seed, "stalls": stalls, "latency": latency, **sizes}
        write_json(options.json, {**table, "products": [dataclasses.asdict(row) for row in rows]}, 1)
    return 0 if compared else 1


if __name__ == "__main__":
    sys.exit(main())
