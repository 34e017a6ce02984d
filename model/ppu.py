"""Post-processing unit, bit for bit: accumulators to binary32, activation function, residual, NVFP4 groups and signals (docs/ppu.md)."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model import autofp6, block_scaled
from model.activation import Function, apply, reference
from model.activity import SquareSum, activity
from model.autofp6 import Step
from model.block_scaled import GROUP, PAD
from model.fp32 import add, from_int, multiply
from model.quantiser import Groups, quantise
from model.vmac import SUBGROUPS, check_choice

if TYPE_CHECKING:
    from model.llm import Llama

__all__ = ["CLIPPED", "NONFINITE", "Job", "PpuConfig", "Report", "Result", "Sums", "main", "run"]

NONFINITE, CLIPPED = 1, 2
"""Bits of ``status``: a group had a number that is NaN or infinite; a group's scale would have been above 448."""

_ONE = 0x3F800000
_DENSE = 0x3B800000, 0x43000000
_INFINITY = 0x7F800000
_TAU = 0.003
_POINTS = (4, 6, 8, 10, 12)
_SIGN = np.uint32(1 << 31)


@dataclass(frozen=True)
class PpuConfig:
    """Parameters of a post-processing unit, for model and hardware alike.

    Attributes
    ----------
    lanes : int
        Elements that come per cycle, 1 to 32; 16 make a group per cycle.
    slots_per_block : int
        Refined subgroups of a group at most, the weight's included; 1 to 4.
    step : {"fixed", "exponent"}
        Value of an offset of 1: an eighth, or an eighth of the code's power of two.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    lanes: int = 16
    slots_per_block: int = 2
    step: Step = "fixed"

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= PAD:
            raise ValueError(f"lanes must be from 1 to {PAD}, not {self.lanes}")
        if not 1 <= self.slots_per_block <= SUBGROUPS:
            raise ValueError(f"slots_per_block must be from 1 to {SUBGROUPS}, not {self.slots_per_block}")
        check_choice("step", self.step, ("fixed", "exponent"))


@dataclass(frozen=True)
class Job:
    """What is done with rows of elements. Numbers are bit patterns of binary32.

    Attributes
    ----------
    function : Function
    integers : bool
        Elements are accumulators, otherwise binary32 numbers already.
    scale : int
        Factor of every element, before the function.
    residual : bool
        A second stream is added after the function.
    numbers, groups : bool
        Numbers leave as binary32; they leave as NVFP4 groups.
    group_scale : int
        Factor of numbers on their way to groups: 1 over the next layer's T, or 1 if that is in ``scale``.
    shared : bool
        One scale for 32 elements, as the activations of an AutoFP2 layer need.
    refine : bool
        Choose refinements for an AutoFP6 layer.
    threshold : int
        Squared error above which a subgroup is refined, ``4·τ·ms``, in units of the next layer's T².
    measure : bool
        Compare with a third stream, the numbers before the layer.
    begin, report : bool
        Sums start at 0; they are reported after the job.
    """

    function: Function = Function.IDENTITY
    integers: bool = True
    scale: int = _ONE
    residual: bool = False
    numbers: bool = False
    groups: bool = True
    group_scale: int = _ONE
    shared: bool = False
    refine: bool = False
    threshold: int = 0
    measure: bool = False
    begin: bool = True
    report: bool = False


@dataclass
class Sums:
    """Running sums of squares.

    Attributes
    ----------
    change, before : SquareSum
        Of what numbers differ from those of the third stream, and of that stream's.
    energy : SquareSum
        Of the numbers that make groups.
    """

    change: SquareSum = field(default_factory=SquareSum)
    before: SquareSum = field(default_factory=SquareSum)
    energy: SquareSum = field(default_factory=SquareSum)


@dataclass(frozen=True)
class Report:
    """Sums as binary32, and L_A, the root of ``change / before``."""

    activity: int
    change: int
    before: int
    energy: int


@dataclass(frozen=True)
class Result:
    """What leaves the unit.

    Attributes
    ----------
    numbers : ndarray of uint32, shape (rows, K), or None
    groups : Groups or None
        rows · Kp / 16 groups, row after row, Kp being K up to the next multiple of 32.
    report : Report or None
    status : int
        Bits that the job raises.
    """

    numbers: NDArray[np.uint32] | None
    groups: Groups | None
    report: Report | None
    status: int


def _beats(numbers: NDArray[np.uint32], lanes: int) -> NDArray[np.uint32]:
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % lanes)))
    return padded.reshape(-1, lanes)


def run(
    config: PpuConfig,
    job: Job,
    values: ArrayLike,
    *,
    residual: NDArray[np.uint32] | None = None,
    previous: NDArray[np.uint32] | None = None,
    weight_masks: NDArray[np.uint8] | None = None,
    sums: Sums | None = None,
) -> Result:
    """Do a job.

    Parameters
    ----------
    config : PpuConfig
    job : Job
    values : array of int64 or uint32, shape (rows, K)
        Accumulators, or binary32 patterns.
    residual, previous : ndarray of uint32, shape (rows, K), optional
        The second and third stream, if the job has them.
    weight_masks : ndarray of uint8, shape (Kp / 16,) or (rows, Kp / 16), optional
        M_W of each group, if the job refines; bit g for subgroup g.
    sums : Sums, optional
        Running sums from earlier jobs; they are updated. Without them, and without a report, nothing is added up.

    Raises
    ------
    ValueError
        A stream that the job needs is missing or has another shape, or one comes that it does not take.

    Examples
    --------
    >>> job = Job(Function.RELU, scale=0x3F000000)
    >>> result = run(PpuConfig(), job, np.arange(-16, 16)[None])
    >>> result.groups.scales.tolist(), result.groups.codes[1, -4:].tolist()
    ([0, 58], [6, 7, 7, 7])
    """
    given = np.asarray(values)
    if given.ndim != 2:
        raise ValueError(f"values must have shape (rows, K), not {given.shape}")
    rows, width = given.shape
    padded = -(-width // PAD) * PAD
    for name, stream, wanted in (("residual", residual, job.residual), ("previous", previous, job.measure)):
        if wanted != (stream is not None):
            raise ValueError(f"{name} must {'come' if wanted else 'not come'} with this job")
        if stream is not None and stream.shape != given.shape:
            raise ValueError(f"{name} must have shape {given.shape}, not {stream.shape}")
    if weight_masks is not None and weight_masks.shape not in ((padded // GROUP,), (rows, padded // GROUP)):
        raise ValueError(f"weight_masks must have shape {(padded // GROUP,)}, not {weight_masks.shape}")
    totals = sums if sums is not None else Sums()
    if job.begin:
        totals.change, totals.before, totals.energy = SquareSum(), SquareSum(), SquareSum()

    x = multiply(from_int(given) if job.integers else given.astype(np.uint32), job.scale)
    number = apply(x, job.function)
    if residual is not None:
        number = add(number, residual)
    scaled = multiply(number, job.group_scale)
    if sums is not None or job.report:
        if previous is not None:
            totals.change.add(_beats(add(number, previous ^ _SIGN), config.lanes))
            totals.before.add(_beats(previous, config.lanes))
        totals.energy.add(_beats(scaled, config.lanes))

    groups = None
    status = 0
    if job.groups:
        grouped = np.pad(scaled, ((0, 0), (0, padded - width))).reshape(-1, GROUP)
        masks = np.zeros(padded // GROUP, np.uint8) if weight_masks is None else weight_masks
        groups = quantise(
            grouped,
            shared=job.shared,
            refine=job.refine,
            threshold=job.threshold,
            weight_masks=np.broadcast_to(masks, (rows, padded // GROUP)).reshape(-1),
            slots=config.slots_per_block,
            step=config.step,
        )
        status = NONFINITE * bool(groups.nonfinite.any()) | CLIPPED * bool(groups.clipped.any())
    report = None
    if job.report:
        root = activity(totals.change, totals.before)
        report = Report(root, totals.change.bits, totals.before.bits, totals.energy.bits)
    return Result(number if job.numbers else None, groups, report, status)


def _patterns(step: int, dense: int) -> Iterator[NDArray[np.uint32]]:
    """Yield every ``step``-th finite pattern of either sign, every ``dense``-th from 2^-8 to 128, a million at a time."""
    ends = [(0, _DENSE[0], step), (*_DENSE, dense), (_DENSE[1], _INFINITY, step)]
    for sign in (0, 1 << 31):
        for low, high, each in ends:
            for start in range(low, high, each << 20):
                yield (np.arange(start, min(high, start + (each << 20)), each) | sign).astype(np.uint32)


def _function_errors(step: int, dense: int) -> Iterator[str]:
    """Yield the largest errors of SiLU and GELU over :func:`_patterns`."""
    yield f"| function | numbers | largest relative error | at | in units of 2^-8 |\n|---|{'---:|' * 4}"
    for function in (Function.SILU, Function.GELU):
        count, largest, at = 0, -1.0, 0.0
        for bits in _patterns(step, dense):
            x = bits.view(np.float32).astype(np.float64)
            exact = reference(x, function)
            error = np.abs(apply(bits, function).view(np.float32) - exact) / np.maximum(np.abs(exact), 2.0**-126)
            worst = int(error.argmax())
            count += len(bits)
            if error[worst] > largest:
                largest, at = float(error[worst]), float(x[worst])
        yield f"| {function.name} | {count} | {largest:.2e} | {at:.6g} | {largest * 2**8:.3f} |"


def _checked_input(tokens: int, layers: Sequence[int]) -> tuple["Llama", NDArray[np.int64]]:
    """Return SmolLM2 and the first ``tokens`` tokens of the sample text; raises ValueError if either has not so many."""
    from model import llm
    from model.sample_text import TEXT

    model = llm.load()
    for layer in layers:
        if not 0 <= layer < model.config.layers:
            raise ValueError(f"--layers must be from 0 to {model.config.layers - 1}, not {layer}")
    ids = model.tokenizer.encode(TEXT)
    if not 1 <= tokens <= len(ids):
        raise ValueError(f"--tokens must be from 1 to {len(ids)}, not {tokens}")
    return model, ids[:tokens]


def _differences(model: "Llama", ids: NDArray[np.int64], layers: Sequence[int]) -> Iterator[str]:
    """Yield how often scales, codes and choices differ from the software quantiser's on inputs of SmolLM2's projections."""
    from model import llm

    inputs = llm.capture_inputs(model, ids, [(layer, name) for layer in layers for name in llm.PROJECTIONS])
    yield "Subgroups refined otherwise, by fraction bits of the error:"
    bits = " | ".join(map(str, _POINTS))
    yield f"| layer | groups | scales | codes | refined | {bits} |\n|---|{'---:|' * (4 + len(_POINTS))}"
    for (layer, name), x in inputs.items():
        soft = block_scaled.quantize(x)
        square = float(np.square(x, dtype=np.float64).mean())
        mask = autofp6.select_activations(
            autofp6.subgroup_errors(x, soft), np.zeros(soft.codes.shape[-1] // 4, bool), 4 * _TAU * square
        ).reshape(-1, SUBGROUPS)
        limit = np.float32(4 * _TAU * square / float(soft.tensor_scale) ** 2).view(np.uint32)
        padded = np.pad(x, ((0, 0), (0, -x.shape[1] % PAD)))
        numbers = multiply(padded.view(np.uint32), np.float32(1 / soft.tensor_scale).view(np.uint32)).reshape(-1, GROUP)
        shares = []
        for point in _POINTS:
            groups = quantise(numbers, refine=True, threshold=int(limit), point=point)
            chosen = groups.masks[:, None] >> np.arange(SUBGROUPS) & 1 == 1
            shares.append(float((chosen != mask).mean()))
        scales = groups.scales != soft.scales.reshape(-1)
        codes = (groups.codes != soft.codes.reshape(-1, GROUP))[~scales]
        yield (
            f"| {layer} {name} | {len(numbers)} | {scales.mean():.1e} | {codes.mean():.1e} | {mask.mean():.3f} | "
            + " | ".join(f"{share:.1e}" for share in shares)
            + " |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors of the activation functions, and how often quantiser and software differ; returns 0, or 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m model.ppu",
        description="Errors of activation functions, and where the quantiser differs from the software's on SmolLM2-135M.",
    )
    parser.add_argument(
        "--step", type=int, default=4093, help="look at one binary32 pattern of so many (default: %(default)s)"
    )
    parser.add_argument(
        "--dense", type=int, metavar="STEP", help="the same from 2^-8 to 128 (default: a sixteenth of --step)"
    )
    parser.add_argument("--tokens", type=int, default=200, help="tokens of the sample text (default: %(default)s)")
    parser.add_argument(
        "--layers", type=int, nargs="*", default=[0, 11, 29], help="layers (default: 0 11 29; none: functions alone)"
    )
    options = parser.parse_args(arguments)
    if options.step < 1:
        parser.error(f"--step must be at least 1, not {options.step}")
    if options.dense is not None and options.dense < 1:
        parser.error(f"--dense must be at least 1, not {options.dense}")
    try:
        given = _checked_input(options.tokens, options.layers) if options.layers else None
    except (ValueError, OSError, ImportError) as error:
        print(f"model.ppu: {error}", file=sys.stderr)
        return 2
    for line in _function_errors(options.step, options.dense or max(options.step // 16, 1)):
        print(line)
    if given is not None:
        print()
        for line in _differences(*given, options.layers):
            print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
