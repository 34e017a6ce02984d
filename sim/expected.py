"""What the model says of products, and whether results are that, bit for bit."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import autofp2, gemm, post_output, ppu
from model.accelerator import (
    AcceleratorConfig,
    ErrorCode,
    Mode,
    mode_of,
)
from model.autofp6 import Refined
from model.block_scaled import BlockScaled
from model.policy import FixedPolicy
from model.tiling import Plan
from sim.product import NAMES, AcceleratorError, Batch, Gemm, GroupsOf, NumbersOf, Steps, by_place, pattern_of

__all__ = ["Expected", "expected", "models", "scale_of", "unit", "verify"]


def unit(config: AcceleratorConfig, mode: Mode) -> float:
    """Return what 1 in the sums is worth beside the tensor scales: 2⁻²², in AutoFP2 mode 2^(window_shift - 22) and its constant."""
    return 2.0**-22 if mode != Mode.AUTOFP2 else 2.0 ** (config.window_shift - 22) * autofp2.C


def expected(config: AcceleratorConfig, product: Gemm, found: Plan) -> tuple[NDArray[Any], int]:
    """Return what the accelerator must give for a product in certain tiles: output and status."""
    a, w = product.stored(config.lanes)
    sums, status = gemm.product(config, product.mode, a, w)
    vectors = -(-len(w.codes) // 2) if product.mode == Mode.AUTOFP2 else len(w.codes)
    if product.mode == Mode.AUTOFP6 and vectors % (config.columns * found.tile_n):
        status |= gemm.overcrowded(config, a)
    if product.out == "raw":
        return sums, status
    return gemm.to_fp32(sums, product.tensor_scale * unit(config, product.mode)), status


@dataclasses.dataclass(frozen=True)
class Expected:
    """What the model says of a product: output, status, groups, report and mode, see `Result`."""

    output: NDArray[Any]
    status: int
    groups: BlockScaled | Refined | None
    activity: int
    energy: int
    mode: Mode


def models(
    config: AcceleratorConfig,
    products: Sequence[Gemm],
    found: Sequence[Plan],
    step: Steps = None,
    failed: Collection[int] = (),
) -> Iterator[Expected]:
    """Yield what the accelerator must give for products of a queue one after the other, each in certain tiles.

    Of those that ``failed`` end with an error there is nothing. Sums lack them, so there is no report until a product begins anew.
    """
    steps = by_place(step, len(products))
    policy = FixedPolicy(next(iter(steps.values())).config if steps else None)
    before: list[Expected] = []
    totals, layer, begun, whole = ppu.Sums(), 0, False, True
    for place, (product, tiles) in enumerate(zip(products, found, strict=True)):
        if place in steps:
            policy.reset_step(steps[place].phase, steps[place].entropy)
            layer, begun = 0, True
        if place in failed:
            whole = False
            before.append(Expected(np.zeros((0, 0), np.float32), 0, None, 0, 0, Mode.AUTOFP2))
            yield before[-1]
            continue
        mode = mode_of(policy.precision) if product.policy else Mode(product.mode)
        scale = scale_of(products, product)
        known = dataclasses.replace(product, mode=mode, scale=scale, post=None)
        if isinstance(product.a, GroupsOf):
            groups = before[product.a.product].groups
            if groups is None:
                raise ValueError("a must be the groups of an earlier product that writes them")
            known = dataclasses.replace(known, a=groups)
        if product.post is None:
            output, status = expected(config, known, tiles)
            before.append(Expected(output, status, None, 0, 0, mode))
        else:
            post = product.post
            sums, status = expected(config, dataclasses.replace(known, out="raw"), tiles)
            job = post.job(pattern_of(scale * unit(config, mode)))
            made = post_output.process(
                config,
                mode,
                tiles.tile_m,
                tiles.tile_n,
                job,
                sums,
                residual=_known(post.residual, before),
                previous=_known(post.previous, before),
                weight_masks=post.weight_masks,
                totals=totals,
            )
            output = np.zeros((len(sums), 0), np.float32) if made.numbers is None else made.numbers
            refined = post.weight_masks is not None
            length = sums.shape[1]
            groups = made.tensor(post.tensor_scale, length, refined=refined, step=config.step) if post.groups else None
            whole |= post.begin
            report = made.report if whole else None
            activity, energy = (report.activity, report.energy) if report is not None else (0, 0)
            if post.observe and report is not None and begun:
                policy.observe_bits(layer, activity)
                layer += 1
            before.append(Expected(output, status | made.status << 4, groups, activity, energy, mode))
        yield before[-1]


def _known(numbers: NDArray[np.float32] | NumbersOf | None, before: Sequence[Expected]) -> NDArray[np.float32] | None:
    """Return numbers, also if an earlier product made them."""
    return before[numbers.product].output if isinstance(numbers, NumbersOf) else numbers


def scale_of(products: Sequence[Gemm], product: Gemm) -> float:
    """Return what the results of a product are multiplied by beside the unit of the sums, also if activations are an earlier one's groups."""
    scale = product.tensor_scale
    if product.scale is None and isinstance(product.a, GroupsOf):
        source = products[product.a.product].post
        scale *= float(np.float32(source.tensor_scale)) if source is not None else 1.0
    return scale


def _same(one: BlockScaled | Refined | None, other: BlockScaled | Refined | None) -> bool:
    """Return whether two tensors are the same, bit for bit."""
    if one is None or other is None or isinstance(one, Refined) != isinstance(other, Refined):
        return one is other
    if isinstance(one, Refined) and isinstance(other, Refined):
        same = bool((one.mask == other.mask).all() and (one.offsets == other.offsets).all())
        return same and _same(one.base, other.base)
    if isinstance(one, BlockScaled) and isinstance(other, BlockScaled):
        return bool((one.codes == other.codes).all() and (one.scales == other.scales).all())
    return False


def verify(
    config: AcceleratorConfig,
    products: Sequence[Gemm],
    batch: Batch,
    step: Steps = None,
    failed: Collection[int] = (),
) -> int:
    """Compare all results with the model, bit for bit; of products that ``failed`` only that they report nothing.

    Returns
    -------
    int
        Outputs that were compared.

    Raises
    ------
    AcceleratorError
        A result differs; the message says which and where.
    """
    compared = 0
    found = models(config, products, [result.plan for result in batch], step, failed)
    for number, (product, result, correct) in enumerate(zip(products, batch, found, strict=True)):
        if number in failed:
            if result.code == ErrorCode.OK or result.activity or result.energy:
                raise AcceleratorError(f"product {number} must end with an error and report nothing")
            continue
        output, status = correct.output, correct.status
        width = np.int32 if product.out == "fp32" else np.int64
        same = result.output.shape == output.shape
        wrong = np.argwhere(result.output.view(width) != output.view(width)) if same else np.empty((0, 2))
        name = f"product {number} ({NAMES[product.mode]}, {output.shape[0]} × {output.shape[1]})"
        if result.mode is not None and result.mode != correct.mode:
            raise AcceleratorError(f"{name} ran in mode {result.mode.name}, not {correct.mode.name}")
        if output.shape != result.output.shape or output.dtype != result.output.dtype:
            raise AcceleratorError(f"{name} has shape {result.output.shape}, not {output.shape}")
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            raise AcceleratorError(
                f"{name}: {len(wrong)} outputs of {output.size} differ, first at {at}: {result.output[at]}, not {output[at]}"
            )
        if status != result.status:
            raise AcceleratorError(f"{name} has status {result.status}, not {status}")
        if not _same(result.groups, correct.groups):
            raise AcceleratorError(f"{name} has other groups")
        reported = (result.activity, result.energy)
        if reported != (correct.activity, correct.energy):
            raise AcceleratorError(f"{name} reports {reported}, not {(correct.activity, correct.energy)}")
        compared += output.size
        if correct.groups is not None:
            base = correct.groups.base if isinstance(correct.groups, Refined) else correct.groups
            compared += base.codes.size
    return compared
