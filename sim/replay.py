"""``python -m sim.replay``: recorded L_A and G_E through descriptors of the accelerator, whose policy unit picks every layer's mode (docs/policy.md)."""

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import autofp6, block_scaled, post_output
from model.accelerator import AcceleratorConfig, Mode, mode_of
from model.accelerator_cycles import Processing
from model.activity import beat_squares
from model.autofp6 import Refined
from model.fp32 import add, from_int, multiply
from model.policy import FixedPolicy, Policy, PolicyConfig, PolicyFormat, to_fixed
from model.policy_replay import TraceSample, read_trace
from model.policy_replay import replay as decide
from model.tiling import plan
from model.vmac import SUBGROUPS
from sim.axi_memory import Timing
from sim.driver import Accelerator
from sim.expected import expected, unit, verify
from sim.product import NAMES, AcceleratorError, Batch, Gemm, GroupsOf, NumbersOf, Post, Step
from sim.random_products import CAMPAIGN, SMALL_MEMORY
from sim.runner import SimulationError

__all__ = ["PARAMETERS", "Planned", "Row", "compare", "main", "memory_of", "planned", "summary"]

PARAMETERS: dict[str, Any] = {**CAMPAIGN[0], "ppu": True}
"""Of the accelerator: small banks, 2 × 2 elements."""
TRACE = Path(__file__).parents[1] / "tests/model/smollm2_trace.csv.gz"
WIDTH = 32
"""Numbers of a token: the slice of the residual stream that layers read and write."""
TOKENS = {"prefill": 4, "decode": 1}
DENSITY, TAU = 0.2, 0.003
"""Share of the weights' subgroups that are refined, and the threshold of the activations', as in docs/trace.md."""
SPAN = 256
"""Factors to either side of the computed one that are tried, neighbours in FP32."""
PRODUCT_BYTES = 4096
"""Of memory, the most that a layer takes."""
MOST_LAYERS = 0xFFFF
"""What a queue takes."""
LARGEST_BITS = 40
LARGEST = 2.0**LARGEST_BITS
"""Numbers stay below: far from where FP32, and the squares that are summed up, end."""
_SIGN = np.uint32(1 << 31)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A trace as products: one for each layer of each step.

    Attributes
    ----------
    samples : list of TraceSample
    products : list of Gemm
        All with ``policy``: none says its mode.
    steps : dict of int to Step
        Steps of the policy by the place of their first product.
    """

    samples: list[TraceSample]
    products: list[Gemm]
    steps: dict[int, Step]


@dataclasses.dataclass(frozen=True)
class Row:
    """A layer of the trace, as it was recorded and as the accelerator ran it.

    Attributes
    ----------
    step : int
    phase : str
    layer : int
    L_A : float
        Recorded.
    G_E : float or None
        Recorded, of the step before.
    activity : float
        L_A in the record of the product.
    precision : int
        That `model.policy.Policy` gives the layer from the recorded signals, in float64.
    mode : str
        That the product ran in.
    same : bool
        The mode is that of ``precision``.
    cycles : int
        Of the product, from its descriptor on: with those that it waits for the product before.
    """

    step: int
    phase: str
    layer: int
    L_A: float
    G_E: float | None
    activity: float
    precision: int
    mode: str
    same: bool
    cycles: int


def _layer(number: int) -> Refined:
    """Draw the weights of a layer."""
    weights = np.random.default_rng((2, number)).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    base = block_scaled.quantize(weights)
    chosen = autofp6.select_weights(autofp6.subgroup_errors(weights, base), DENSITY)
    return autofp6.refine(weights, base, chosen)


def _activities(
    config: AcceleratorConfig, sums: NDArray[np.int64], before: NDArray[np.float32], scales: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Return what the unit reports for each of some factors of the sums, but for the rounding of its running sums."""

    def norms(numbers: NDArray[np.uint32]) -> NDArray[np.float64]:
        total, exponent = beat_squares(numbers.reshape(-1, config.columns))
        return np.ldexp(total.astype(np.float64), 2 * exponent.astype(np.int32) - 284).reshape(len(numbers), -1).sum(1)

    bits = before.view(np.uint32)
    numbers = add(multiply(from_int(sums), scales.view(np.uint32)[:, None, None]), bits)
    return np.sqrt(norms(add(numbers, bits ^ _SIGN)) / norms(bits[None]))


def _factor(
    config: AcceleratorConfig, mode: Mode, sums: NDArray[np.int64], before: NDArray[np.float32], wanted: float
) -> float:
    """Return the factor of a layer's sums with which it changes ``before`` by ``wanted``, as near as FP32 and the unit allow.

    Near the right factor L_A goes up in small steps, as one square after another reaches its next value: the best of neighbouring factors is
    taken, if possible one that gives the policy unit the same integer.
    """
    worth = unit(config, mode)
    length = float(np.linalg.norm(sums.astype(np.float64)))
    if not wanted or not length:
        return 0.0
    factor = np.float32(wanted * float(np.linalg.norm(before.astype(np.float64))) / length)
    for _ in range(2):
        factor *= np.float32(wanted / max(float(_activities(config, sums, before, np.array([factor]))[0]), wanted / 2))
    bits = np.arange(-SPAN, SPAN + 1) + int(factor.view(np.uint32))
    tried = np.clip(bits, 0, 0x7F7FFFFF).astype(np.uint32).view(np.float32)
    found = _activities(config, sums, before, tried)
    one = 2.0 ** PolicyFormat().fraction_bits
    other = np.floor(found * one) != np.floor(np.float32(wanted) * one)
    best = np.lexsort((np.abs(found - np.float32(wanted)), other))[0]
    return float(tried[best]) / worth


def planned(
    config: AcceleratorConfig,
    samples: Sequence[TraceSample],
    policy: PolicyConfig | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Planned:
    """Turn a trace into products.

    Each step is a small residual network, ``H_l = H_{l-1} + σ_l · Q(H_{l-1}) · W_lᵀ``: a product's activations are the groups that the product
    before wrote, its residual and what its activity is measured against the numbers of that product. Only σ_l is chosen here, the factor
    of the descriptor: so that L_A is the recorded one in the mode which `model.policy.FixedPolicy` gives the layer.

    Parameters
    ----------
    config : AcceleratorConfig
    samples : sequence of TraceSample
    policy : PolicyConfig, optional
    progress : callable
        Is told after every so many steps.

    Raises
    ------
    ValueError
        More layers than a queue takes, or activities so large that numbers are not finite.
    """
    if len(samples) > MOST_LAYERS:
        raise ValueError(f"TRACE must have at most {MOST_LAYERS} layers for one queue, not {len(samples)}")
    chosen = policy or PolicyConfig()
    fixed = FixedPolicy(chosen)
    count = max(sample.layer for sample in samples) + 1
    weights = [_layer(number) for number in range(count)]
    masks = [(w.mask.reshape(-1, SUBGROUPS) << np.arange(SUBGROUPS)).sum(axis=1).astype(np.uint8) for w in weights]
    result = Planned(list(samples), [], {})
    number = sum(1 for sample in samples if sample.layer == 0)
    for done, (_, lines) in enumerate(groupby(samples, key=lambda sample: sample.step)):
        if done % 20 == 0:
            progress(f"planned {done} of {number} steps")
        step = list(lines)
        first = step[0]
        fixed.reset_step(first.phase, first.entropy)
        result.steps[len(result.products)] = Step(first.phase, first.entropy, chosen)
        rng = np.random.default_rng((1, first.step))
        hidden = rng.standard_normal((TOKENS[first.phase], WIDTH)).astype(np.float32)
        a: Any = block_scaled.quantize(hidden, shared_groups=2)
        for sample in step:
            if not sample.activity * float(np.abs(hidden).max()) < LARGEST:
                raise ValueError(
                    f"L_A must leave numbers below 2^{LARGEST_BITS}, not {sample.activity} in step {sample.step}, layer {sample.layer}"
                )
            place, w, mode = len(result.products), weights[sample.layer], mode_of(fixed.precision)
            tiles = plan(config, Mode.NVFP4, len(hidden), WIDTH, WIDTH, any_mode=True, post=Processing(groups=True))
            sums, _ = expected(config, Gemm(a, w, mode), tiles)
            factor = _factor(config, mode, sums, hidden, sample.activity)
            after = hidden + np.float32(factor * unit(config, mode)) * sums.astype(np.float32)
            scale = float(np.float32(np.abs(after).max() / (6 * 448)))
            last = sample is step[-1]
            post = Post(
                residual=hidden if not sample.layer else NumbersOf(place - 1),
                previous=hidden if not sample.layer else NumbersOf(place - 1),
                numbers=True,
                groups=not last,
                tensor_scale=scale,
                shared=not last,
                weight_masks=None if last else masks[sample.layer + 1],
                threshold=4 * TAU * float(np.square(after).mean()) / scale**2,
                report=True,
                observe=True,
            )
            source = GroupsOf(place - 1) if sample.layer else a
            sizes = tiles.tile_m, tiles.tile_n, tiles.segment
            result.products.append(Gemm(source, w, mode, "fp32", factor, sizes, post=post, policy=True))
            made = post_output.process(
                config,
                mode,
                tiles.tile_m,
                tiles.tile_n,
                post.job(int(np.float32(factor * unit(config, mode)).view(np.uint32))),
                sums,
                residual=hidden,
                previous=hidden,
                weight_masks=post.weight_masks,
            )
            if made.numbers is None or made.report is None:
                raise AssertionError("numbers and a report were asked for")
            hidden = made.numbers
            if not last:
                a = made.tensor(scale, WIDTH, refined=True, step=config.step)
            fixed.observe_bits(sample.layer, made.report.activity)
    return result


def memory_of(samples: Sequence[TraceSample]) -> int:
    """Return how many bytes of memory a trace needs, a power of two."""
    return max(SMALL_MEMORY, 1 << (len(samples) * PRODUCT_BYTES).bit_length())


def compare(config: AcceleratorConfig, trace: Planned, batch: Batch) -> tuple[list[Row], int]:
    """Compare what ran with the model, bit for bit, and with the decisions of the recorded trace.

    Returns
    -------
    rows : list of Row
    compared : int
        Numbers and elements of groups that are those of the model.

    Raises
    ------
    AcceleratorError
        A mode, an activity or an output is not the model's.
    """
    compared = verify(config, trace.products, batch, trace.steps)
    policy = Policy(next(iter(trace.steps.values())).config)
    rows = []
    for decided, result in zip(decide(trace.samples, policy), batch, strict=True):
        sample, mode = decided.sample, result.mode
        if mode is None:
            raise AssertionError("accelerators with a policy unit report the mode")
        rows.append(
            Row(
                sample.step,
                sample.phase,
                sample.layer,
                sample.activity,
                sample.entropy,
                float(np.uint32(result.activity).view(np.float32)),
                decided.precision,
                NAMES[mode],
                mode == mode_of(decided.precision),
                result.cycles,
            )
        )
    return rows, compared


def summary(rows: Sequence[Row], compared: int) -> dict[str, Any]:
    """Return the figures of a replay: decisions and how many differ, outputs, modes, and how far activities are from the recorded ones.

    ``same_number`` counts activities that are the recorded L_A rounded to FP32, ``same_integer`` those of which the policy unit makes the
    same integer; layers 0 are no samples, and not in it.
    """
    form = PolicyFormat()
    wanted, found = (np.array([getattr(row, name) for row in rows], np.float32) for name in ("L_A", "activity"))
    one, other = (
        np.array([to_fixed(form, int(bits)) or 0 for bits in numbers.view(np.uint32)]) for numbers in (wanted, found)
    )
    off = np.abs(one - other)[[row.layer > 0 for row in rows]]
    relative = np.abs(found.astype(np.float64) - wanted) / np.maximum(wanted, np.finfo(np.float32).tiny)
    return {
        "steps": len({row.step for row in rows}),
        "decisions": len(rows),
        "different": sum(not row.same for row in rows),
        "outputs": compared,
        "modes": dict(sorted(Counter(row.mode for row in rows).items())),
        "samples": len(off),
        "same_number": int((wanted == found).sum()),
        "same_integer": int((off == 0).sum()),
        "largest_difference_of_integers": int(off.max(initial=0)),
        "largest_relative_difference": float(relative.max()),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim.replay",
        description="Replay a recorded trace through the simulated accelerator: a descriptor per layer, in the mode that its policy unit picks; "
        "modes, activities and outputs are compared with the model bit for bit, decisions with those of the recorded signals.",
    )
    add_option = parser.add_argument
    add_option(
        "--trace",
        type=Path,
        default=TRACE,
        metavar="FILE",
        help="CSV or JSON as python -m model.trace writes it, or with .gz behind its name (default: the recorded one of SmolLM2-135M)",
    )
    add_option("--steps", type=int, metavar="N", help="the first N steps (default: all)")
    add_option("--stalls", type=int, default=0, help="chance of a stall per channel and cycle, in 1/256 (default: 0)")
    add_option("--latency", type=int, default=0, help="cycles that memory takes longer (default: 0)")
    add_option("--json", type=Path, metavar="FILE", help="write figures and a line per layer as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 if something differs, 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    started = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True)

    try:
        if options.steps is not None and options.steps < 1:
            raise ValueError(f"--steps must be at least 1, not {options.steps}")
        if options.json is not None and not options.json.parent.is_dir():
            raise ValueError(f"--json must be in a folder that exists, not {options.json}")
        timing = Timing(options.latency, options.latency, options.stalls)
        samples = read_trace(options.trace)
        kept = set(list(dict.fromkeys(sample.step for sample in samples))[: options.steps])
        samples = [sample for sample in samples if sample.step in kept]
        trace = planned(AcceleratorConfig(**PARAMETERS), samples, progress=progress)
    except (ValueError, OSError) as error:
        print(f"sim.replay: {error}", file=sys.stderr)
        return 2
    try:
        progress("building the accelerator")
        accelerator = Accelerator(memory=memory_of(samples), **PARAMETERS)
        progress(f"simulating {len(samples)} products in {len(kept)} steps")
        batch = accelerator.run(trace.products, timing=timing, step=trace.steps)
        progress(f"comparing {batch.cycles} cycles' results with the model")
        rows, compared = compare(accelerator.config, trace, batch)
    except (AcceleratorError, SimulationError, OSError) as error:
        print(f"sim.replay: {error}", file=sys.stderr)
        return 1
    figures = {**summary(rows, compared), "cycles": batch.cycles}
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):31} {value}")
    if options.json is not None:
        table = {**figures, "rows": [dataclasses.asdict(row) for row in rows]}
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0 if not figures["different"] else 1


if __name__ == "__main__":
    sys.exit(main())
