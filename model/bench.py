"""Speed of the quantisers and of the vMAC model on one core: ``python -m model.bench`` (docs/formats.md).

The yardstick is ``ml_dtypes``' plain cast of the same array to 4-bit floats: no scales, no offsets, but compiled.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from model import autofp6, block_scaled
from model.formats import E2M1, E2M3
from model.packed_pair import NVFP4_PAIRS
from model.vmac import Vectors, VmacConfig, vmac

__all__ = ["GOAL", "Speed", "main", "measure_quantizers", "measure_vmac"]

GOAL = 1.0
"""NVFP4 and AutoFP6 together, in elements per second, over the plain cast."""

_GOAL_NAME = "NVFP4, then AutoFP6 of every subgroup"


@dataclass(frozen=True)
class Speed:
    """One measurement: the best of several runs, in seconds of processor time of this process.

    Attributes
    ----------
    name, unit : str
        What was done, and what was counted.
    count : int
        Elements or vectors of a run.
    seconds : float
    ratio : float or None
        Speed over that of the plain cast, where comparable.
    """

    name: str
    unit: str
    count: int
    seconds: float
    ratio: float | None = None

    @property
    def per_second(self) -> float:
        """Elements or vectors per second."""
        return self.count / self.seconds


def _best(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Run all tasks in turn ``repeats`` times and return each one's shortest processor time in seconds."""
    best = dict.fromkeys(tasks, float("inf"))
    for _ in range(repeats):
        for name, task in tasks.items():
            started = time.process_time()
            task()
            best[name] = min(best[name], time.process_time() - started)
    return best


def measure_quantizers(rows: int, columns: int, repeats: int, seed: int = 0) -> list[Speed]:
    """Time the quantisers on Gaussian float32 data of shape (rows, columns).

    Raises
    ------
    ModuleNotFoundError
        ``ml_dtypes`` is not installed.
    """
    import ml_dtypes

    x = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    cast = "plain cast to float4_e2m1fn (ml_dtypes)"
    tasks: dict[str, Callable[[], object]] = {
        cast: lambda: x.astype(ml_dtypes.float4_e2m1fn),
        "plain encoding to E2M1": lambda: E2M1.encode(x),
        "NVFP4": lambda: block_scaled.quantize(x),
        "FP6g": lambda: block_scaled.quantize(x, E2M3),
        _GOAL_NAME: lambda: autofp6.refine(x, block_scaled.quantize(x)),
        "the same with the exponent step": lambda: autofp6.refine(x, block_scaled.quantize(x), step="exponent"),
    }
    seconds = _best(tasks, repeats)
    return [Speed(name, "elements", x.size, time, seconds[cast] / time) for name, time in seconds.items()]


def measure_vmac(vectors: int, repeats: int, seed: int = 0) -> list[Speed]:
    """Time the default vMAC on random vectors of all modes, 32 lanes each."""
    config = VmacConfig()
    rng = np.random.default_rng(seed)
    subgroup = np.arange(config.records) % config.slots_per_block + rng.integers(0, 3, (vectors, config.records))
    records = rng.integers(0, 2, subgroup.shape) << 11 | subgroup << 9 | rng.integers(0, 512, subgroup.shape)
    inputs = Vectors(
        rng.random(vectors) < 2 / 3,
        rng.random(vectors) < 0.5,
        rng.integers(0, 16, (vectors, config.lanes), dtype=np.uint8),
        NVFP4_PAIRS[rng.integers(0, len(NVFP4_PAIRS), (vectors, config.lanes))],
        rng.integers(0, 127, (vectors, config.blocks), dtype=np.uint8),
        rng.integers(0, 127, (vectors, config.w_scale_bytes), dtype=np.uint8),
        records.astype(np.uint64),
        rng.integers(0, 2**64, vectors, dtype=np.uint64),
    )
    seconds = _best({"vMAC, 32 lanes, modes mixed": lambda: vmac(config, inputs)}, repeats)
    return [Speed(name, "vectors", vectors, time) for name, time in seconds.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if the goal is met, 1 if it is not, 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m model.bench", description="Time the golden model on one core against a plain cast."
    )
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the matrix (default 4096)")
    parser.add_argument("--vectors", type=int, default=1_000_000, help="vMAC vectors (default 1000000)")
    parser.add_argument("--repeats", type=int, default=5, help="runs, of which the best counts (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON to FILE rather than below the table")
    options = parser.parse_args(arguments)
    for name in ("size", "vectors", "repeats"):
        if getattr(options, name) < 1:
            print(f"model.bench: {name} must be positive, not {getattr(options, name)}", file=sys.stderr)
            return 2
    try:
        speeds = measure_quantizers(options.size, options.size, options.repeats)
    except ModuleNotFoundError as error:
        print(f"model.bench: {error}", file=sys.stderr)
        return 2
    speeds += measure_vmac(options.vectors, min(options.repeats, 2))

    print(f"{'':44}{'seconds':>9}{'million/s':>11}{'of plain cast':>15}")
    for speed in speeds:
        ratio = "" if speed.ratio is None else f"{speed.ratio:.2f}"
        print(f"{speed.name:44}{speed.seconds:9.3f}{speed.per_second / 1e6:11.1f}{ratio:>15}")
    reached = next(speed.ratio for speed in speeds if speed.name == _GOAL_NAME) or 0.0
    print(
        f"{_GOAL_NAME}: {reached:.2f} of the plain cast's speed, goal {GOAL:.2f}: {'met' if reached >= GOAL else 'missed'}"
    )
    report = {
        "size": options.size,
        "clock": "processor time, one core, best run",
        "goal": GOAL,
        "ratio": reached,
        "met": reached >= GOAL,
        "speeds": [asdict(speed) | {"per_second": speed.per_second} for speed in speeds],
    }
    text = json.dumps(report, indent=1) + "\n"
    if options.json is None:
        print(text, end="")
    else:
        options.json.write_text(text, newline="\n")
    return 0 if reached >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
