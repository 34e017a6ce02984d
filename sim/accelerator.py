"""``python -m sim.accelerator``: matrix products of any size on the simulated accelerator, memory to memory, as NumPy arrays (docs/driver.md)."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model import accelerator_cycles, autofp2, gemm, post_output, ppu
from model.accelerator import (
    MAGIC,
    MEANINGS,
    PITCH,
    PPU_REGISTERS,
    RECORD_BYTES,
    RECORD_OFFSET,
    AcceleratorConfig,
    Descriptor,
    ErrorCode,
    Event,
    Format,
    Mode,
    Operand,
    PostBlock,
    Record,
    mode_of,
    policy_words,
    registers_of,
)
from model.activation import Function
from model.autofp6 import OFFSET_BITS, Refined
from model.block_scaled import PAD, BlockScaled
from model.formats import E2M1, scale_exponent, scale_significand
from model.llm import PROJECTIONS, layer_tensors, load
from model.memory import pack_nibbles
from model.pe import OFFSET_BYTES, Operands
from model.policy import FixedPolicy, Phase, PolicyConfig, PolicyFormat
from model.vmac import GROUP, SUBGROUP, SUBGROUPS
from sim.axi_memory import BusError, Command, MemoryHarness, Run, Timing
from sim.design import config_of, generated
from sim.gemm import layer_products, operands_of
from sim.image import REFINED, Image, Output, Plan, plan, plans, product_bytes, shared_masks
from sim.runner import SimulationError

__all__ = [
    "SHAPES",
    "Accelerator",
    "AcceleratorError",
    "Batch",
    "Gemm",
    "GroupsOf",
    "NumbersOf",
    "Post",
    "Result",
    "Step",
    "expected",
    "extended",
    "main",
    "models",
    "random_gemm",
    "random_timing",
    "unit",
    "verify",
]

MEMORY = 1 << 25
"""Bytes of the simulated memory."""
MOST_SEGMENTS = 1 << 20
"""Most segments of a product that ``--predict`` takes: some seconds."""
MEMORY_LIMIT = 1 << 28
"""Most bytes of the memory of ``--product``, which grows with the product."""
BASE = 0x8000_0000
"""Address of its first byte."""
PATIENCE = 100_000
"""Cycles that a queue may take beyond four times its estimate."""
NAMES = {Mode.AUTOFP2: "AutoFP2", Mode.NVFP4: "NVFP4", Mode.AUTOFP6: "AutoFP6"}

_LARGE = 64
"""Most elements that are compiled one by one."""
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


class AcceleratorError(RuntimeError):
    """A product ended with an error, was not finished, or its results or the memory around them are not what they must be."""


@dataclasses.dataclass(frozen=True)
class NumbersOf:
    """The FP32 numbers that an earlier product of the queue writes, as residual or as what the activity is measured against.

    Attributes
    ----------
    product : int
        Its place in the queue.
    """

    product: int


@dataclasses.dataclass(frozen=True)
class Post:
    """What is done with the outputs of a product, on accelerators with ``ppu``.

    Attributes
    ----------
    function : Function
    residual : ndarray of float32 [M, N] or NumbersOf, optional
        Added after the function.
    previous : ndarray of float32 [M, N] or NumbersOf, optional
        What the numbers are compared with for the activity.
    numbers, groups : bool
        Numbers are written as FP32, and as the groups of a tensor.
    tensor_scale : float
        T of that tensor. Its reciprocal must be finite in FP32.
    shared : bool
        32 elements have one scale, as activations of an AutoFP2 product need.
    weight_masks : ndarray of uint8 [Np / 16], optional
        Refined subgroups of the next layer's weights, bit g for subgroup g; with them refinements are chosen.
    threshold : float
        Squared error above which a subgroup is refined, in units of T².
    begin, report, observe : bool
        Sums of squares start at 0; activity and energy are reported; the policy unit gets the activity.
    """

    function: Function = Function.IDENTITY
    residual: NDArray[np.float32] | NumbersOf | None = None
    previous: NDArray[np.float32] | NumbersOf | None = None
    numbers: bool = False
    groups: bool = True
    tensor_scale: float = 1.0
    shared: bool = False
    weight_masks: NDArray[np.uint8] | None = None
    threshold: float = 0.0
    begin: bool = True
    report: bool = False
    observe: bool = False

    def job(self, scale: int) -> ppu.Job:
        """Return what the unit is told, with a factor for the sums."""
        return ppu.Job(
            function=self.function,
            scale=scale,
            residual=self.residual is not None,
            numbers=self.numbers,
            groups=self.groups,
            group_scale=_pattern(1 / np.float32(self.tensor_scale)),
            shared=self.shared,
            refine=self.weight_masks is not None,
            threshold=_pattern(self.threshold),
            measure=self.previous is not None,
            begin=self.begin,
            report=self.report,
        )


def _pattern(number: float | np.float32) -> int:
    with np.errstate(over="ignore", under="ignore"):
        return int(np.float32(number).view(np.uint32))


@dataclasses.dataclass(frozen=True)
class GroupsOf:
    """The groups that an earlier product of the queue writes, as activations.

    Attributes
    ----------
    product : int
        Its place in the queue.
    """

    product: int


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the precision policy, which the policy unit begins before its products are submitted.

    Attributes
    ----------
    phase : {"prefill", "decode"}
    entropy : float, optional
        Of the step before, in decode.
    config : PolicyConfig
    """

    phase: Phase = "prefill"
    entropy: float | None = None
    config: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)


Steps = Step | Mapping[int, Step] | None
"""A step that begins before the queue starts, or several steps of one request, each by the place of its first product in the queue."""


def _by_place(steps: Steps, count: int) -> dict[int, Step]:
    """Return steps by the place of their first product, in order.

    Raises
    ------
    ValueError
        A step begins at no product, or has other parameters than the first.
    """
    found = {} if steps is None else {0: steps} if isinstance(steps, Step) else dict(sorted(steps.items()))
    first = next(iter(found.values()), None)
    for place, step in found.items():
        if not 0 <= place < count:
            raise ValueError(f"step must begin at one of the {count} products, not at {place}")
        if first is not None and step.config != first.config:
            raise ValueError(f"config must be the same in all steps of a request, not another from product {place} on")
    return found


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One product ``a · wᵀ``.

    Attributes
    ----------
    a, w : BlockScaled, Refined or Operands
        Activations [M, K] and weights [N, K]: tensors of the model, or rows as they are stored, leading axes (rows, KV), which are taken as they are.
        Offsets count in AutoFP6 mode alone. Activations may be the `GroupsOf` an earlier product; then there must be a fence.
    mode : Mode
    out : {"raw", "fp32"}
        Exact sums as integers, or numbers in FP32.
    scale : float, optional
        What FP32 results are multiplied by beside the unit of the sums; by default the product of the tensor scales, for stored rows 1.
    tiles : (int, int, int), optional
        ``tile_m``, ``tile_n`` and ``segment``, chosen by :func:`sim.image.plan` by default.
    fence : bool
        Begin when all products before have ended.
    post : Post, optional
        ``out`` must be ``"fp32"``.
    policy : bool
        The policy unit picks the mode, behind a fence; ``mode`` does not count then.
    """

    a: BlockScaled | Refined | Operands | GroupsOf
    w: BlockScaled | Refined | Operands
    mode: Mode
    out: Literal["raw", "fp32"] = "raw"
    scale: float | None = None
    tiles: tuple[int, int, int] | None = None
    fence: bool = False
    post: Post | None = None
    policy: bool = False

    def check(self, config: AcceleratorConfig) -> None:
        """Refuse tensors whose product the hardware does not compute; stored rows pass.

        Raises
        ------
        TypeError
            An operand is no tensor.
        ValueError
            A tensor is not NVFP4 or has not two axes, its offsets are not those of the hardware, or its pairs of groups have not the
            one scale that AutoFP2 mode reads.
        """
        if self.mode not in tuple(Mode):
            raise ValueError(f"mode must be one of {', '.join(mode.name for mode in Mode)}, not {self.mode!r}")
        modes = {Mode(self.mode)} if not self.policy else set(Mode)
        for name, operand in (("a", self.a), ("w", self.w)):
            if isinstance(operand, Operands) or (name == "a" and isinstance(operand, GroupsOf)):
                continue
            if not isinstance(operand, BlockScaled | Refined):
                kind = type(operand).__name__
                raise TypeError(
                    f"{name} must be BlockScaled, Refined or Operands, not {kind}; see block_scaled.quantize"
                )
            base = _base(operand)
            if base.element != E2M1:
                raise ValueError(f"{name} must be NVFP4 (E2M1), not {base.element.name}")
            if base.codes.ndim != 2:
                raise ValueError(f"{name} must have two axes, not shape {(*base.codes.shape[:-1], base.length)}")
            if isinstance(operand, Refined) and Mode.AUTOFP6 in modes:
                if operand.bits != OFFSET_BITS:
                    raise ValueError(f"bits of {name} must be {OFFSET_BITS}, as in hardware, not {operand.bits}")
                if operand.step != config.step:
                    raise ValueError(f"step of {name} must be {config.step}, as in hardware, not {operand.step}")
            if name == "a" and Mode.AUTOFP2 in modes and config.scaling == "pair":
                _check_pairs(base)

    def stored(self, lanes: int) -> tuple[Operands, Operands]:
        """Return both operands as rows of whole vectors.

        Raises
        ------
        ValueError
            Tensors differ in K, or arrays of stored rows have not the shapes that go with so many lanes.
        """
        a, w = self.a, self.w
        if isinstance(a, GroupsOf):
            raise ValueError("a must be known before the product runs, not the groups of an earlier one")
        if not isinstance(a, Operands) and not isinstance(w, Operands):
            lengths = [_base(x).length for x in (a, w)]
            if lengths[0] != lengths[1]:
                raise ValueError(f"a and w must have the same K, not {lengths[0]} and {lengths[1]}")
        if self.mode != Mode.AUTOFP6:
            a = _base(a) if isinstance(a, Refined) else a
        return _stored("a", a, lanes), self.weights(lanes)

    def weights(self, lanes: int) -> Operands:
        """Return the weights as rows of whole vectors; raises like :meth:`stored`."""
        w = self.w
        return _stored("w", _base(w) if isinstance(w, Refined) and self.mode != Mode.AUTOFP6 else w, lanes)

    @property
    def tensor_scale(self) -> float:
        """What results are multiplied by beside the unit of the sums."""
        if self.scale is not None:
            return self.scale
        scale = 1.0
        for x in (self.a, self.w):
            if not isinstance(x, Operands | GroupsOf):
                scale *= float(_base(x).tensor_scale)
        return scale


def _source(name: str, of: GroupsOf | NumbersOf, product: Gemm, earlier: Sequence[Output]) -> Output:
    """Return where the earlier product writes what is taken from it.

    Raises
    ------
    ValueError
        It is no earlier one, or there is no fence.
    """
    if not 0 <= of.product < len(earlier):
        what = "groups" if isinstance(of, GroupsOf) else "numbers"
        raise ValueError(f"{name} must be the {what} of an earlier product, not of {of.product}")
    if not (product.fence or product.policy):
        raise ValueError(f"{name} must be behind a fence if an earlier product writes it")
    return earlier[of.product]


def _base(tensor: BlockScaled | Refined) -> BlockScaled:
    return tensor.base if isinstance(tensor, Refined) else tensor


def _check_pairs(a: BlockScaled) -> None:
    """Raise ValueError if a group that counts has not the scale of the even one beside it."""
    pairs = a.scales.reshape(len(a.codes), -1, 2)
    odd = a.codes.reshape(*pairs.shape, GROUP)[:, :, 1]
    # Without its sign bit a code of zero is 0, whatever the scale.
    wrong = np.argwhere((pairs[..., 0] != pairs[..., 1]) & (odd & 7).any(axis=-1))
    if len(wrong):
        row, pair = (int(i) for i in wrong[0])
        even, other = (int(scale) for scale in pairs[row, pair])
        raise ValueError(
            f"a must have one scale for both groups of a pair in AutoFP2 mode with pair scaling, not {even:#04x} and {other:#04x} "
            f"for groups {2 * pair} and {2 * pair + 1} of row {row}: use block_scaled.quantize(x, shared_groups=2)"
        )


def _stored(name: str, operand: BlockScaled | Refined | Operands, lanes: int) -> Operands:
    if not isinstance(operand, Operands):
        return operands_of(operand, lanes)
    if operand.codes.ndim != 3 or operand.codes.shape[2] != lanes:
        raise ValueError(f"codes of {name} must have shape (rows, KV, {lanes}), not {operand.codes.shape}")
    blocks = (*operand.codes.shape[:2], lanes // GROUP)
    shapes = {"scales": blocks, "masks": blocks, "offsets": (*blocks, OFFSET_BYTES)}
    for array, shape in shapes.items():
        found = getattr(operand, array).shape
        if found != shape:
            raise ValueError(f"{array} of {name} must have shape {shape}, not {found}")
    return operand


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a product.

    Attributes
    ----------
    output : ndarray of int64 or float32 [M, N]
        Raw sums in units of :func:`unit`, or FP32; empty if only groups are written.
    code : ErrorCode
    status : int
        Saturated 1, nan_scale 2, overlap 4, dropped 8, nonfinite 16, clipped 32.
    cycles : int
        From when its descriptor was fetched to its last output, as the accelerator counts them.
    useful : int
        Vector operations that its outputs need.
    plan : Plan
        Its tiles.
    groups : BlockScaled or Refined, optional
        The groups that it wrote.
    activity, energy : int
        Patterns of FP32 numbers that were reported, or 0.
    mode : Mode, optional
        The one that it ran in, if there is a policy unit.
    """

    output: NDArray[Any]
    code: ErrorCode
    status: int
    cycles: int
    useful: int
    plan: Plan
    groups: BlockScaled | Refined | None = None
    activity: int = 0
    energy: int = 0
    mode: Mode | None = None

    def utilisation(self, config: AcceleratorConfig) -> float:
        """Return useful vector operations by cycles and elements."""
        return self.useful / (self.cycles * config.rows * config.columns)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Results of a queue in its order, the cycles from its start to its interrupt, and the beats on the bus."""

    results: list[Result]
    cycles: int
    read_beats: int
    write_beats: int

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __getitem__(self, index: int) -> Result:
        return self.results[index]


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
    steps = _by_place(step, len(products))
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
        scale = _scale_of(products, product)
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
            job = post.job(_pattern(scale * unit(config, mode)))
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


def _scale_of(products: Sequence[Gemm], product: Gemm) -> float:
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


class Accelerator:
    """Runs products on a simulated accelerator.

    Parameters
    ----------
    simulator : str
        ``"verilator"`` or ``"icarus"``.
    memory : int
        Bytes of memory.
    stalls : int or mapping of str to int
        Chances of stalls, see :class:`sim.axi_memory.Timing`.
    latency : int or (int, int)
        Cycles that reads and writes take longer in memory.
    seed : int
        Of the stalls.
    waves : bool
        Record waveforms.
    **parameters
        Of the block ``accelerator``.

    Attributes
    ----------
    config : AcceleratorConfig
    timing : Timing
        May be replaced between runs.

    Raises
    ------
    ValueError, TypeError
        A parameter is outside its range.
    SimulationError
        The simulator is missing.

    Examples
    --------
    ``Accelerator(rows=2, columns=2).run([Gemm(a, w, Mode.NVFP4)])[0].output`` with ``a`` and ``w`` from :func:`model.block_scaled.quantize`.
    """

    def __init__(
        self,
        simulator: str = "verilator",
        *,
        memory: int = MEMORY,
        stalls: int | dict[str, int] = 0,
        latency: int | tuple[int, int] = 0,
        seed: int = 1,
        waves: bool = False,
        **parameters: Any,
    ) -> None:
        known = [field.name for field in dataclasses.fields(AcceleratorConfig)]
        for name in parameters:
            if name not in known:
                raise TypeError(f"{name} is no parameter; those of the accelerator are {', '.join(known)}")
        self.config: AcceleratorConfig = config_of("accelerator", **parameters)
        read, write = (latency, latency) if isinstance(latency, int) else latency
        self.timing = Timing(read, write, stalls, seed)
        design = generated("accelerator", **parameters)
        # Elements of large arrays are compiled once, which makes the build minutes instead of hours and the run slower.
        large = self.config.rows * self.config.columns > _LARGE and simulator == "verilator" and not waves
        units = ("pe",) if large else ()
        self.harness = MemoryHarness({"accelerator.v": design.verilog}, design.sidecar, simulator, memory, waves, units)
        # Addresses that are too narrow for the usual base leave memory at the bottom.
        self.base = BASE if BASE + memory <= 1 << self.config.address_width else 0

    def image(self, rng: np.random.Generator | None = None) -> Image:
        """Return an empty image of the memory; with ``rng`` it is scattered and filled at random, see :class:`sim.image.Image`."""
        return Image(self.base, max(64, self.config.data_width // 8), rng)

    def place(
        self, image: Image, product: Gemm, earlier: Sequence[Output] = (), scale: float | None = None
    ) -> tuple[Descriptor, Output, Plan]:
        """Place a product's operands and room for its output, and return what describes it.

        Parameters
        ----------
        image : Image
        product : Gemm
        earlier : sequence of Output
            Of the products before it in the queue, whose groups and numbers it may take.
        scale : float, optional
            What results are multiplied by beside the unit of the sums; :attr:`Gemm.tensor_scale` by default.

        Raises
        ------
        ValueError, TypeError
            Operands are not as :meth:`Gemm.check` says, sizes do not fit each other, K does not fit the banks, tiles do not fit a descriptor,
            or the configuration cannot do what is wanted.
        """
        config = self.config
        if (product.post is not None or product.policy) and not config.ppu:
            raise ValueError("post and policy must have a configuration with ppu")
        for name, wanted in (("post", product.post is not None), ("policy", product.policy)):
            if wanted and product.out != "fp32":
                raise ValueError(f"out must be fp32 with {name}, not {product.out!r}")
        product.check(config)
        source = _source("a", product.a, product, earlier) if isinstance(product.a, GroupsOf) else None
        stored = product
        if product.policy and config.refinement != "none":
            # All that any mode reads.
            stored = dataclasses.replace(product, mode=Mode.AUTOFP6)
        if isinstance(product.a, GroupsOf):
            self._check_source(product, source)
            a, m, kv = None, source.m if source else 0, -(-source.n // config.lanes) if source else 0
            w = stored.weights(config.lanes)
        else:
            a, w = stored.stored(config.lanes)
            m, kv = a.codes.shape[:2]
        n = len(w.codes)
        if w.codes.shape[1] != kv:
            raise ValueError(f"a and w must have the same number of K-vectors, not {kv} and {w.codes.shape[1]}")
        for name, operand in (("a", a), ("w", w)):
            if operand is not None and not len(operand.codes):
                raise ValueError(f"{name} must have at least one row, not shape {operand.codes.shape}")
        if product.out not in ("raw", "fp32"):
            raise ValueError(f"out must be raw or fp32, not {product.out!r}")
        mode, kind = Mode(product.mode), Format.RAW if product.out == "raw" else Format.FP32
        if mode == Mode.AUTOFP6 and config.refinement == "none":
            raise ValueError("mode must be one that the configuration has, not AUTOFP6")
        post, anything = product.post, product.policy
        found = plan(config, mode, m, n, kv * config.lanes, any_mode=anything, post=processing(post, None))
        if product.tiles is not None:
            if not (
                isinstance(product.tiles, Sequence)
                and len(product.tiles) == 3
                and all(isinstance(size, int | np.integer) for size in product.tiles)
            ):
                raise ValueError(f"tiles must be three integers, not {product.tiles}")
            # What a descriptor can say, the hardware checks.
            for name, size in zip(("tile_m", "tile_n", "segment"), product.tiles, strict=True):
                if not 0 <= size <= 0xFFFF:
                    raise ValueError(f"{name} of tiles must be from 0 to 65535, not {size}")
            tile_m, tile_n, segment = product.tiles
            found = dataclasses.replace(found, tile_m=tile_m, tile_n=tile_n, segment=segment)
        factor = product.tensor_scale if scale is None else scale
        usual, low = (_pattern(factor * unit(config, m)) for m in (Mode.NVFP4 if anything else mode, Mode.AUTOFP2))
        for bits in (usual, low) if anything else (usual,):
            if kind == Format.FP32 and bits >> 23 & 0xFF == 0xFF:
                raise ValueError(f"scale must be finite in FP32 with the unit of the sums, not {factor}")
        refined = mode == Mode.AUTOFP6 or (anything and config.refinement != "none")
        a_place = image.store_operand(a, refined) if a is not None else source.groups if source else Operand(0, 0)
        descriptor = Descriptor(
            Mode.NVFP4 if anything else mode,
            kind,
            *(m, n, kv * config.lanes, found.tile_m, found.tile_n, found.segment),
            a_place or Operand(0, 0),
            image.store_operand(w, refined),
            *(0, 0),
            usual if kind == Format.FP32 else 0,
            product.fence,
            policy=anything,
            out_scale_low=low if anything and kind == Format.FP32 else 0,
        )
        if post is None:
            output = image.reserve_output(m, n, mode, kind)
        else:
            output, block = self._place_post(image, product, post, m, n, earlier)
            address = image.allocate(len(block))
            image.write(address, block)
            descriptor = dataclasses.replace(descriptor, post=address)
        return dataclasses.replace(descriptor, out=output.address, out_stride=output.stride), output, found

    def _check_source(self, product: Gemm, source: Output | None) -> None:
        """Refuse groups that the product cannot read."""
        if source is None or source.groups is None:
            raise ValueError("a must be the groups of an earlier product that writes them")
        refines = product.mode == Mode.AUTOFP6 or (product.policy and self.config.refinement != "none")
        if refines and not source.refined:
            raise ValueError("a must have refinements for a product in AutoFP6 mode")
        if (product.mode == Mode.AUTOFP2 or product.policy) and self.config.scaling == "pair" and not source.shared:
            raise ValueError("a must have scales of 32 elements for a product in AutoFP2 mode")

    def _place_post(
        self, image: Image, product: Gemm, post: Post, m: int, n: int, earlier: Sequence[Output]
    ) -> tuple[Output, bytes]:
        """Place what post-processing reads, and room for what it writes; return where, and the post block."""
        job = post.job(0)
        for name, bits in (("tensor_scale", job.group_scale), ("threshold", job.threshold)):
            if bits >> 23 & 0xFF == 0xFF:
                raise ValueError(
                    f"{name} of post must be finite in FP32, and so its reciprocal, not {getattr(post, name)}"
                )
        output = Output(0, 0, m, n, Mode.NVFP4, Format.FP32)
        if post.numbers:
            output = image.reserve_output(m, n, Mode.NVFP4, Format.FP32)
        places: dict[str, int] = {}
        if post.groups:
            where = image.reserve_groups(m, n, self.config.lanes, job.refine)
            output = dataclasses.replace(output, groups=where, refined=job.refine, shared=job.shared)
            places |= dataclasses.asdict(where)
        output = dataclasses.replace(output, plain=post.numbers)
        for name in ("residual", "previous"):
            numbers = getattr(post, name)
            if isinstance(numbers, NumbersOf):
                made = _source(name, numbers, product, earlier)
                if not made.plain or made.format != Format.FP32 or (made.m, made.n) != (m, n):
                    raise ValueError(
                        f"{name} must be FP32 numbers of shape {(m, n)}, which product {numbers.product} does not write"
                    )
                places[name], places[f"{name}_stride"] = made.address, made.stride
            elif numbers is not None:
                if numbers.shape != (m, n):
                    raise ValueError(f"{name} of post must have shape {(m, n)}, not {numbers.shape}")
                places[name], places[f"{name}_stride"] = image.store_numbers(numbers)
        if post.weight_masks is not None:
            groups = -(-n // (2 * GROUP)) * 2
            if post.weight_masks.shape != (groups,):
                raise ValueError(f"weight_masks of post must have shape {(groups,)}, not {post.weight_masks.shape}")
            places["next_mask"], _ = image.rows(pack_nibbles(post.weight_masks[None]))
        block = PostBlock(
            function=job.function,
            adds=job.residual,
            numbers=job.numbers,
            groups=job.groups,
            shared=job.shared,
            refine=job.refine,
            measure=job.measure,
            begin=job.begin,
            report=job.report,
            observe=post.observe,
            group_scale=job.group_scale,
            threshold=job.threshold,
            **places,
        )
        return output, block.pack()

    def play(
        self,
        image: Image,
        descriptors: Sequence[Descriptor | bytes],
        outputs: Sequence[Output],
        limit: int,
        timing: Timing | None = None,
        rounds: int = 1,
        step: Steps = None,
    ) -> tuple[Run, list[Record | None], int]:
        """Run a queue once or several times around, wait for the interrupt, and update the image.

        Parameters
        ----------
        image : Image
        descriptors : sequence of Descriptor or bytes
        outputs : sequence of Output
            All that may be written beside records.
        limit : int
            Most cycles until the interrupt; of several steps each.
        timing : Timing, optional
            :attr:`timing` by default.
        rounds : int
            How often the ring is run through; all rounds together have at most 65535 descriptors, as many as can be submitted at once.
        step : Step or mapping of int to Step, optional
            Begins before the queue starts, or each before the product with its number is submitted, when all before have ended.

        Returns
        -------
        run : Run
        records : list of Record or None
            Of every place.
        cycles : int
            From the start to the interrupt.

        Raises
        ------
        ValueError
            No round, or too many, several steps with several rounds, or the memory is too small.
        AcceleratorError
            The interrupt did not come, a register has not the value that it must have, or something else was written.
        """
        most = 0xFFFF // max(len(descriptors), 1)
        if not 1 <= rounds <= most:
            raise ValueError(f"rounds must be from 1 to {most} for {len(descriptors)} descriptors, not {rounds}")
        steps = _by_place(step, len(descriptors))
        if len(steps) > 1 and rounds > 1:
            raise ValueError(f"rounds must be 1 with several steps, not {rounds}")
        queue = image.queue(descriptors)
        if len(image) > self.harness.size:
            raise ValueError(f"memory must be at least {len(image)} bytes for these products, not {self.harness.size}")
        count = len(descriptors) * rounds
        offset = {register.name: register.offset for register in registers_of(self.config).registers}
        write, read = Command.write, Command.read
        commands = [
            read(offset["id"]),
            write(offset["queue_low"], queue & 0xFFFFFFFF),
            write(offset["queue_high"], queue >> 32),
            write(offset["queue_length"], len(descriptors) - 1),
            write(offset["interrupt"], Event.EMPTY),
        ]
        quiet = [write(offset["events"], Event.DONE | Event.ERROR | Event.EMPTY), Command.interrupt(100, 0)]
        begins = [0, *(place for place in steps if place)]
        for begin, end in zip(begins, [*begins[1:], count], strict=True):
            if begin:
                commands += quiet
            words = _step_words(steps[begin], begin == min(steps)) if begin in steps else {}
            commands += [write(offset[name], word) for name, word in words.items()]
            commands.append(write(offset["submitted"], end))
            if not begin:
                commands.append(write(offset["control"], 1))
            commands.append(Command.interrupt(limit))
        commands += [
            Command.dump(),
            read(offset["completed"]),
            read(offset["state"]),
            read(offset["events"]),
            *quiet,
        ]
        before = image.contents.copy()
        try:
            run = self.harness.run(before, commands, timing or self.timing, self.base)
        except BusError as error:
            raise AcceleratorError(str(error)) from error
        image.update(run.memory)
        reads = [event for event in run.events if event.operation == 2]
        identity, completed, state, _ = (event.data for event in reads)
        if identity != MAGIC or completed != count or state or any(event.response for event in run.events):
            raise AcceleratorError(
                f"registers must have id {MAGIC:#x}, completed {count}, not busy, "
                f"not {identity:#x}, {completed}, state {state}"
            )
        changed = run.memory != before
        for output in outputs:
            changed[image.written(output)] = False
        for place in range(len(descriptors)):
            start = queue - self.base + place * PITCH + RECORD_OFFSET
            changed[start : start + RECORD_BYTES] = False
        if changed.any():
            at = self.base + int(np.argmax(changed))
            raise AcceleratorError(f"{int(changed.sum())} bytes beside the outputs were written, first {at:#x}")
        started = next(event.cycle for event in run.events if (event.operation, event.x) == (1, offset["control"]))
        # The last but one: after it the interrupt falls.
        ended = [event.cycle for event in run.events if event.operation == 3][-2]
        return run, image.records(queue, len(descriptors)), ended - started

    def run(
        self,
        products: Sequence[Gemm],
        *,
        rng: np.random.Generator | None = None,
        timing: Timing | None = None,
        check: bool = True,
        step: Steps = None,
    ) -> Batch:
        """Run products one behind the other from one queue.

        Parameters
        ----------
        products : sequence of Gemm
        rng : numpy.random.Generator, optional
            Scatter the memory, see :meth:`image`.
        timing : Timing, optional
            :attr:`timing` by default.
        check : bool
            Raise if a product ends with an error.
        step : Step or mapping of int to Step, optional
            Of the policy, for products whose mode the policy unit picks: before all products, or each before the product with its number.

        Raises
        ------
        TypeError
            What is given are no products, or a product's operand is no tensor.
        ValueError
            No products, they are not as :meth:`Gemm.check` says, or their sizes do not fit each other, the banks or the memory.
        AcceleratorError
            The hardware failed.
        """
        if isinstance(products, Gemm):
            raise TypeError("products must be a sequence of Gemm, not one: [product]")
        for product in products:
            if not isinstance(product, Gemm):
                raise TypeError(f"products must be a sequence of Gemm, not one with a {type(product).__name__}")
        if not products:
            raise ValueError("products must be at least one")
        image = self.image(rng)
        placed = self.place_all(image, products)
        descriptors, outputs, found = zip(*placed, strict=True)
        timing = timing or self.timing
        run, records, cycles = self.play(image, descriptors, outputs, cycle_limit(found, timing), timing, step=step)
        results = self.results(image, products, placed, records)
        for number, result in enumerate(results):
            if check and result.code != ErrorCode.OK:
                raise AcceleratorError(
                    f"product {number} ended with code {int(result.code)}, {result.code.name}: {MEANINGS[result.code]}"
                )
        return Batch(results, cycles, run.read_beats, run.write_beats)

    def place_all(self, image: Image, products: Sequence[Gemm]) -> list[tuple[Descriptor, Output, Plan]]:
        """Place products of a queue, whose activations may be groups of earlier ones; raises like :meth:`place`."""
        placed: list[tuple[Descriptor, Output, Plan]] = []
        written: list[Output] = []
        for number, product in enumerate(products):
            scale = None
            if isinstance(product.a, GroupsOf) and 0 <= product.a.product < number:
                scale = _scale_of(products, product)
            placed.append(self.place(image, product, written, scale))
            written.append(placed[-1][1])
        return placed

    def results(
        self,
        image: Image,
        products: Sequence[Gemm],
        placed: Sequence[tuple[Descriptor, Output, Plan]],
        records: Sequence[Record | None],
    ) -> list[Result]:
        """Read from memory what came of a queue's products.

        Raises
        ------
        AcceleratorError
            A record is missing, or that of another product.
        """
        results = []
        for number, (product, (descriptor, output, tiles), record) in enumerate(
            zip(products, placed, records, strict=True)
        ):
            if record is None:
                raise AcceleratorError(f"product {number} has no record")
            if record.number != number & 0xFFFF:
                raise AcceleratorError(f"product {number} has the record of number {record.number}")
            mode = Mode(record.mode) if self.config.ppu else Mode(descriptor.mode)
            vectors = -(-descriptor.n // 2) if mode == Mode.AUTOFP2 else descriptor.n
            useful = descriptor.m * vectors * (descriptor.k // self.config.lanes)
            empty = np.zeros((descriptor.m, 0), np.float32)
            groups = None
            if product.post is not None and output.groups is not None and record.code == ErrorCode.OK:
                groups = image.read_groups(output, product.post.tensor_scale, self.config.step)
            results.append(
                Result(
                    image.read_output(output) if output.plain else empty,
                    record.code,
                    record.status,
                    record.cycles,
                    useful,
                    tiles,
                    groups,
                    record.activity,
                    record.energy,
                    mode if self.config.ppu else None,
                )
            )
        return results


def cycle_limit(found: Sequence[Plan], timing: Timing) -> int:
    """Return how many cycles a queue of products may take with these latencies and stalls."""
    slow = 256 / (256 - max(timing.chances.values(), default=0))
    estimate = sum(p.cycles + 1000 + 20 * p.tiles * (timing.read_latency + timing.write_latency) for p in found)
    return int(PATIENCE + 4 * slow**2 * estimate)


def _step_words(step: Step, first: bool) -> dict[str, int]:
    """Return the words that begin a step of the policy, by register; a request's first one sets the parameters too."""
    entropy = int((step.entropy or 0) * 2 ** PolicyFormat().fraction_bits)
    register = PPU_REGISTERS["policy_step"]
    begin = register.pack(entropy=entropy, decode=int(step.phase == "decode"), begin=1, clear=int(first))
    return {**(policy_words(step.config) if first else {}), "policy_step": begin}


def extended(a: Operands, w: Operands, step: Literal["fixed", "exponent"] = "fixed") -> tuple[Operands, Operands]:
    """Turn an AutoFP6 product into an NVFP4 one with a longer K, which has the same sums: how hardware without refinement would run it.

    Each group of 16 that has refined subgroups is there twice: as it is, and with 4δ in the refined subgroups of the weights and the
    activations' 4δ in the others, under a quarter of the weight's scale.

    Parameters
    ----------
    a, w : Operands
        Leading axes (rows, KV); all weight rows have the same masks, which share no subgroup with any of the activations'.
    step : {"fixed", "exponent"}
        Of the offsets.

    Returns
    -------
    a, w : Operands
        Without masks, more K-vectors.

    Raises
    ------
    ValueError
        Masks are not as said, more than two subgroups of a group are refined, or a quarter of a scale that counts is no E4M3 number.
    """
    if not shared_masks(w):
        raise ValueError("w must have the same masks in all rows")
    if (w.masks[:1] & a.masks).any():
        raise ValueError("a and w must not refine the same subgroups")
    lanes, blocks = a.codes.shape[2], a.masks.shape[2]
    used = (w.masks[0] | np.bitwise_or.reduce(a.masks, axis=0)).reshape(-1) != 0
    of_w = np.repeat(_bits(w.masks[0]).reshape(-1), SUBGROUP).reshape(-1, GROUP)
    longer = []
    for operands, mine in ((a, ~of_w), (w, of_w)):
        rows = len(operands.codes)
        codes = operands.codes.reshape(rows, -1, GROUP)
        quarters = np.where(mine, _quadrupled(operands, step).reshape(codes.shape), codes)[:, used]
        scales = operands.scales.reshape(rows, -1)
        more = scales[:, used]
        if operands is w:
            more = _quarter(more)
        groups = codes.shape[1] + quarters.shape[1]
        padding = -groups % blocks
        codes = np.pad(np.concatenate([codes, quarters], axis=1), ((0, 0), (0, padding), (0, 0)))
        scales = np.pad(np.concatenate([scales, more], axis=1), ((0, 0), (0, padding)))
        masks = np.zeros((rows, (groups + padding) // blocks, blocks), np.uint8)
        longer.append(
            Operands(
                codes.reshape(rows, -1, lanes),
                scales.reshape(masks.shape),
                masks,
                np.zeros((*masks.shape, OFFSET_BYTES), np.uint8),
            )
        )
    return longer[0], longer[1]


def _bits(masks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return masks[..., None] >> np.arange(SUBGROUPS) & 1 == 1


def _quadrupled(operands: Operands, step: str) -> NDArray[np.uint8]:
    """E2M1 codes of 4δ in refined subgroups, 0 elsewhere; shape of the codes."""
    bits = _bits(operands.masks)
    if int(bits.sum(axis=-1).max(initial=0)) > OFFSET_BYTES:
        raise ValueError(f"a group must have at most {OFFSET_BYTES} refined subgroups")
    rank = np.minimum(np.cumsum(bits, axis=-1) - bits, OFFSET_BYTES - 1)
    octets = np.take_along_axis(operands.offsets, rank, axis=-1).astype(np.int64)
    d = (octets[..., None] >> np.arange(0, 2 * SUBGROUP, 2) & 3 ^ 2) - 2
    value = (d * bits[..., None]).reshape(operands.codes.shape) / 2.0
    if step == "exponent":
        value *= np.array([1, 1, 1, 1, 2, 2, 4, 4] * 2)[operands.codes]
    return E2M1.encode(value.astype(np.float32))


def _quarter(scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """E4M3 bytes of a quarter of each scale."""
    whole = scale_significand(scales) << scale_exponent(scales) - 1
    table = np.arange(0x7F, dtype=np.uint8)
    values = scale_significand(table) << scale_exponent(table) - 1
    place = np.minimum(np.searchsorted(values, whole >> 2), len(table) - 1)
    inexact = (values[place] * 4 != whole) | (scales > table[-1])
    if inexact.any():
        raise ValueError(f"a quarter of every scale must be an E4M3 number, not of {int(scales[inexact][0]):#04x}")
    return table[place]


def random_operands(
    rng: np.random.Generator,
    config: AcceleratorConfig,
    rows: int,
    kv: int,
    scales: tuple[int, int],
    most: int,
    density: float,
) -> Operands:
    """Draw rows of an operand.

    Parameters
    ----------
    rng : numpy.random.Generator
    config : AcceleratorConfig
    rows, kv : int
    scales : (int, int)
        Lowest and highest scale byte.
    most : int
        Most refined subgroups of a group; hardware drops what is above two.
    density : float
        Share of groups that have any.
    """
    blocks = config.vmac.blocks
    table = np.array([mask for mask in range(16) if mask.bit_count() <= most], np.uint8)
    count = 1 if rng.random() < 0.5 else rows
    masks = rng.choice(table, (count, kv, blocks)) * (rng.random((count, kv, blocks)) < density)
    return Operands(
        rng.integers(0, 16, (rows, kv, config.lanes), dtype=np.uint8),
        rng.integers(scales[0], scales[1] + 1, (rows, kv, blocks), dtype=np.uint8),
        np.broadcast_to(masks, (rows, kv, blocks)).astype(np.uint8),
        rng.integers(0, 256, (rows, kv, blocks, OFFSET_BYTES), dtype=np.uint8),
    )


def random_gemm(
    rng: np.random.Generator,
    config: AcceleratorConfig,
    m: int,
    n: int,
    kv: int,
    mode: Mode,
    out: Literal["raw", "fp32"] = "raw",
) -> Gemm:
    """Draw a product of given size: codes, scales (once in a while with bytes that are none), masks (some beyond the rules), and tiles."""
    scales = ((0x28, 0x60), (0, 0x7E), (0x78, 0x7E), (0x28, 0x60), (0, 0xFF))[int(rng.integers(5))]
    a, w = (
        random_operands(rng, config, rows, kv, scales, int(rng.integers(0, 5)), float(rng.random())) for rows in (m, n)
    )
    if rng.random() < 0.5:
        w = dataclasses.replace(
            w, masks=np.where(w.masks & a.masks[:1].max(axis=0, initial=0), 0, w.masks).astype(np.uint8)
        )
    tiles = None
    if rng.random() < 0.5:
        found = list(plans(config, mode, m, n, kv * config.lanes))
        chosen = found[int(rng.integers(len(found)))]
        tiles = chosen.tile_m, chosen.tile_n, int(rng.integers(1, chosen.segment + 1))
    return Gemm(a, w, mode, out, float(np.float32(rng.choice([1, -3.7, 2.0**100, 2.0**-130, 0]))), tiles)


def random_timing(rng: np.random.Generator) -> Timing:
    """Draw latencies and stalls, of all channels alike or each in its way, and once in a while none."""
    kind = int(rng.integers(4))
    read, write = (int(x) for x in rng.integers(0, 80, 2) * (rng.random(2) < 0.7))
    stalls: int | dict[str, int] = 0
    if kind == 1:
        stalls = int(rng.integers(1, 180))
    elif kind > 1:
        stalls = {c: int(rng.choice([0, 30, 128, 220])) for c in ("ar", "r", "aw", "w", "b", "lite")}
    return Timing(read, write, stalls, int(rng.integers(1 << 30)))


SMALL_MEMORY = 1 << 23
"""Bytes of the memory of ``--random``."""
CAMPAIGN: tuple[dict[str, Any], ...] = (
    {
        "rows": 2,
        "columns": 2,
        "activation_depth": 64,
        "weight_depth": 32,
        "accumulators": 64,
        "weight_entries": 8,
        "activation_entries": 16,
        "address_width": 36,
        "outstanding": 4,
    },
    {
        "rows": 1,
        "columns": 3,
        "refinement": "inplace",
        "step": "exponent",
        "data_width": 64,
        "activation_depth": 32,
        "weight_depth": 64,
    },
    {
        "rows": 3,
        "columns": 1,
        "lanes": 64,
        "scaling": "group",
        "window_shift": 26,
        "data_width": 256,
        "activation_depth": 32,
        "weight_depth": 16,
    },
)
"""Configurations of ``--random``: small banks, so that small products need many tiles and segments."""


def random_queue(rng: np.random.Generator, config: AcceleratorConfig, count: int) -> list[Gemm]:
    """Draw a queue of products of small to middling sizes in all modes of a configuration."""
    modes = [mode for mode in Mode if mode != Mode.AUTOFP6 or config.refinement != "none"]
    products = []
    for _ in range(count):
        most_m, most_n, most_kv = (1 << int(x) for x in rng.integers(1, (6, 6, 5)))
        m, n = int(rng.integers(1, most_m + 1)), int(rng.integers(1, most_n + 1))
        kv = int(rng.integers(1, min(most_kv, config.activation_depth) + 1))
        mode = modes[int(rng.integers(len(modes)))]
        products.append(random_gemm(rng, config, m, n, kv, mode, "fp32" if rng.random() < 0.4 else "raw"))
    return products


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
        f"{'name':9} {'M':>5} {'N':>5} {'K':>5} {'mode':8} {'tile':>8} {'segment':>7} {'tiles':>5} "
        f"{'cycles':>9} {'predicted':>9} {'off %':>6} {'use %':>6} {'compared':>9} {'s':>6}"
    )

    def __str__(self) -> str:
        tile = f"{self.tile_m}×{self.tile_n}"
        predicted = f"{'':>9} {'':>6}"
        if self.predicted is not None:
            predicted = f"{self.predicted:>9} {100 * (self.predicted / self.cycles - 1):>6.2f}"
        return (
            f"{self.name:9} {self.m:>5} {self.n:>5} {self.k:>5} {self.mode:8} {tile:>8} {self.segment:>7} {self.tiles:>5} "
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


def processing(post: Post | None, groups: BlockScaled | Refined | None) -> accelerator_cycles.Processing | None:
    """Return what the cycles of a product depend on beside its sizes, if it is post-processed to such groups."""
    if post is None:
        return None
    refined = 0.0
    if isinstance(groups, Refined):
        refined = float(groups.mask.sum()) / (groups.base.codes.size / PAD)
    return accelerator_cycles.Processing(
        residual=post.residual is not None,
        previous=post.previous is not None,
        numbers=post.numbers,
        groups=post.groups,
        refine=post.weight_masks is not None,
        report=post.report,
        observe=post.observe,
        refined=refined,
    )


def predicted_cycles(accelerator: Accelerator, product: Gemm, result: Result) -> int | None:
    """Return what the model predicts for a product alone in the queue, None if channels stall."""
    timing, config, found = accelerator.timing, accelerator.config, result.plan
    if any(timing.chances.values()):
        return None
    a, w = product.stored(config.lanes)
    refined = product.mode == Mode.AUTOFP6
    a_refined, w_refined = (
        float(_bits(x.masks).sum()) / (x.masks.shape[0] * x.masks.shape[1]) * refined for x in (a, w)
    )
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


def measure(accelerator: Accelerator, name: str, product: Gemm) -> Row:
    """Run one product alone, compare it, and return its line; raises like :func:`verify`."""
    started = time.monotonic()
    batch = accelerator.run([product])
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
            mode = next(mode for mode, text in NAMES.items() if text == product.mode)
            sums, status = gemm.product(accelerator.config, mode, product.a, product.w)
            worst = float(np.abs(sums - product.exact / product.unit).max())
            if worst > product.allowed or status:
                raise AcceleratorError(f"{name} in {product.mode}: sums are off by {worst} units, status {status}")
            yield measure(accelerator, name, Gemm(product.a, product.w, mode, out))


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
        options.json.write_text(json.dumps({**table, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1))
    return 0 if compared else 1


if __name__ == "__main__":
    sys.exit(main())
