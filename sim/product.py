"""Products for the accelerator as NumPy arrays, and their results: what a driver takes and gives (docs/driver.md)."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model import accelerator_cycles, ppu
from model.accelerator import (
    AcceleratorConfig,
    ErrorCode,
    Mode,
)
from model.activation import Function
from model.autofp6 import OFFSET_BITS, Refined
from model.block_scaled import PAD, BlockScaled
from model.formats import E2M1
from model.pe import OFFSET_BYTES, Operands
from model.policy import Phase, PolicyConfig
from model.tiling import Plan
from model.vmac import GROUP
from sim.gemm import operands_of
from sim.image import Output

__all__ = [
    "NAMES",
    "AcceleratorError",
    "Batch",
    "Gemm",
    "GroupsOf",
    "NumbersOf",
    "Post",
    "Result",
    "Step",
    "Steps",
    "by_place",
    "pattern_of",
    "processing",
    "source_of",
]

NAMES = {Mode.AUTOFP2: "AutoFP2", Mode.NVFP4: "NVFP4", Mode.AUTOFP6: "AutoFP6"}


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
            group_scale=pattern_of(1 / np.float32(self.tensor_scale)),
            shared=self.shared,
            refine=self.weight_masks is not None,
            threshold=pattern_of(self.threshold),
            measure=self.previous is not None,
            begin=self.begin,
            report=self.report,
        )


def pattern_of(number: float | np.float32) -> int:
    """Return the bits of a number as FP32, which is infinite or 0 beyond its range."""
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


def by_place(steps: Steps, count: int) -> dict[int, Step]:
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
        ``tile_m``, ``tile_n`` and ``segment``, chosen by :func:`model.tiling.plan` by default.
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


def source_of(name: str, of: GroupsOf | NumbersOf, product: Gemm, earlier: Sequence[Output]) -> Output:
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
