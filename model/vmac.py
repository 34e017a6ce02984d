"""Integer arithmetic of the AutoEMatic vector MAC, bit for bit (paper, sections 6.3 and D.8; docs/datapath.md)."""

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from model.formats import E2M1, E4M3, is_nan_scale, scale_exponent, scale_significand
from model.packed_pair import NVFP4_PAIRS, PAIR_DIGITS

__all__ = [
    "GROUP",
    "ILLEGAL",
    "LATENCY",
    "NAN_SCALE",
    "SATURATED",
    "Pipeline",
    "Result",
    "Vectors",
    "VmacConfig",
    "accumulate_exact",
    "accumulate_windowed",
    "base_sums",
    "doubled_values",
    "refinement_sums",
    "scaled",
    "vmac",
]

GROUP = 16
"""Lanes of a block, elements of a group."""
SUBGROUP = 4
SUBGROUPS = GROUP // SUBGROUP

Pipeline = Literal["compact", "fast"]
LATENCY: dict[Pipeline, int] = {"compact": 4, "fast": 5}
"""Cycles from a vector to its sum; the accumulator takes the last of them, so the partial sum comes in one cycle earlier."""

ILLEGAL, SATURATED, NAN_SCALE = 1, 2, 4
"""Bits of ``status``."""

_MAX_M = 2 ** (E4M3.mantissa_bits + 1) - 1
_MAX_E = 2**E4M3.exponent_bits - 1
_CHUNK = 1 << 14
_DEFAULT_SLOTS = 2

# Twice the E2M1 value, and the binade (0, 1, 2) that sets the exponent-scaled step, of every code.
_DOUBLED = (2 * E2M1.decode(np.arange(16))).astype(np.int64)
_IS_NVFP4 = np.isin(np.arange(32), NVFP4_PAIRS) | (np.arange(32) >> 2 == 0b111)
_BINADE = np.maximum((np.arange(16) >> E2M1.mantissa_bits & 3).astype(np.int64) - E2M1.bias, 0)


def doubled_values(codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return twice the value of E2M1 codes, integers within ±12."""
    return _DOUBLED[codes]


@dataclass(frozen=True)
class VmacConfig:
    """Parameters of a vector MAC, for model and hardware alike.

    Attributes
    ----------
    lanes : int
        Elements of a vector, a positive multiple of 32.
    refinement : {"slots", "inplace", "none"}
        Refinement hardware: a few slots per block, one offset product per lane, or none.
    slots_per_block : int
        Subgroups per block that slots can refine, 1 to 4.
    step : {"fixed", "exponent"}
        Offset step: 2⁻³ for every element, or 2^(e-3) with e the element's binade (0 below 2, then 1, 2 from 4 on).
    scaling : {"pair", "group"}
        AutoFP2 scales: one per row and 32 lanes, or one per row and 16 lanes.
    window_shift : int
        Bits, in units of 2⁻²², below the unit of an AutoFP2 accumulator.
    pipeline : {"compact", "fast"}
        Fewest registers, or a cut more and a shorter longest path (docs/timing.md); results are the same.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong kind or outside its range.
    """

    lanes: int = 32
    refinement: Literal["slots", "inplace", "none"] = "slots"
    slots_per_block: int = _DEFAULT_SLOTS
    step: Literal["fixed", "exponent"] = "fixed"
    scaling: Literal["pair", "group"] = "pair"
    window_shift: int = 24
    pipeline: Pipeline = "compact"

    def __post_init__(self) -> None:
        check_integer("lanes", self.lanes)
        check_integer("slots_per_block", self.slots_per_block)
        check_integer("window_shift", self.window_shift)
        check_lanes(self.lanes)
        check_choice("refinement", self.refinement, ("slots", "inplace", "none"))
        check_choice("step", self.step, ("fixed", "exponent"))
        check_choice("scaling", self.scaling, ("pair", "group"))
        check_choice("pipeline", self.pipeline, tuple(LATENCY))
        if not 1 <= self.slots_per_block <= SUBGROUPS:
            raise ValueError(f"slots_per_block must be from 1 to {SUBGROUPS}, not {self.slots_per_block}")
        # What has no effect is not accepted.
        if self.refinement != "slots" and self.slots_per_block != _DEFAULT_SLOTS:
            raise ValueError(
                f"slots_per_block must be {_DEFAULT_SLOTS} unless refinement is slots, not {self.slots_per_block}"
            )
        if self.refinement == "none" and self.step != "fixed":
            raise ValueError(f"step must be fixed if refinement is none, not {self.step!r}")
        check_window(self.window_shift, self.total_bits)

    @property
    def latency(self) -> int:
        """Cycles from a vector to its sum."""
        return LATENCY[self.pipeline]

    @property
    def psum_delay(self) -> int:
        """Cycles from a vector to its partial sum."""
        return self.latency - 1

    @property
    def blocks(self) -> int:
        """Blocks of 16 lanes."""
        return self.lanes // GROUP

    @property
    def refined_lanes(self) -> int:
        """Lanes of a block that can hold an offset at once."""
        return {"slots": SUBGROUP * self.slots_per_block, "inplace": GROUP, "none": 0}[self.refinement]

    @property
    def record_bits(self) -> int:
        """Bits of one refinement record: a slot's subgroup, or a whole block in place."""
        offsets = {"slots": SUBGROUP, "inplace": GROUP, "none": 0}[self.refinement] * 2
        extra = {"slots": 4, "inplace": 2 * SUBGROUPS, "none": 0}[self.refinement]
        return offsets + extra

    @property
    def records(self) -> int:
        """Refinement records of a vector."""
        return self.blocks * (self.slots_per_block if self.refinement == "slots" else 1) * (self.refinement != "none")

    @property
    def refine_width(self) -> int:
        """Bits of the ``refine`` port, 0 without refinement."""
        return self.records * self.record_bits

    @property
    def w_scale_bytes(self) -> int:
        """Weight scales of a vector: one per block, or one per block and row."""
        return self.blocks * (2 if self.scaling == "group" else 1)

    @property
    def output_limit(self) -> int:
        """Largest magnitude of a block's O, sixteen times its dot product."""
        return GROUP * 4 * 12 * 12 + self.refinement_limit

    @property
    def refinement_limit(self) -> int:
        """Largest magnitude of a block's refinement sum R."""
        return self.refined_lanes * 12 * 2 * (4 if self.step == "exponent" else 1)

    @property
    def output_bits(self) -> int:
        """Bits of O, signed."""
        return self.output_limit.bit_length() + 1

    @property
    def aligned_bits(self) -> int:
        """Bits of a scaled and aligned O, signed, for every scale byte, 0x7F included."""
        return ((self.output_limit * _MAX_M**2) << (2 * _MAX_E - 2)).bit_length() + 1

    @property
    def total_bits(self) -> int:
        """Bits of a row's sum of aligned values in AutoFP2 mode, signed."""
        terms = self.blocks // 2 * (2 if self.scaling == "group" else 1)
        return self.aligned_bits + (terms - 1).bit_length()

    @property
    def max_k(self) -> int:
        """Largest reduction length, a multiple of 16, for which no sum of valid scales leaves 64 bits in NVFP4 and AutoFP6 mode."""
        worst_m = int(scale_significand(np.array([E4M3.max_code], np.uint8))[0])
        return GROUP * ((2**63 - 1) // ((self.output_limit * worst_m**2) << (2 * _MAX_E - 2)))


def check_integer(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is an int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def check_lanes(lanes: int) -> None:
    """Raise ValueError unless ``lanes`` is a positive multiple of 32."""
    if lanes <= 0 or lanes % (2 * GROUP):
        raise ValueError(f"lanes must be a positive multiple of {2 * GROUP}, not {lanes}")


def check_window(window_shift: int, total_bits: int) -> None:
    """Raise ValueError unless a rounded value of ``total_bits`` bits fits 32 bits and is not always zero."""
    low, high = max(total_bits - 32, 1), total_bits - 1
    if not low <= window_shift <= high:
        raise ValueError(f"window_shift must be from {low} to {high}, not {window_shift}")


@dataclass(frozen=True)
class Vectors:
    """Inputs of N vectors, as arrays with N rows.

    Attributes
    ----------
    mode_nvfp4, refine_en : ndarray of bool, shape (N,)
    a : ndarray of uint8, shape (N, lanes)
        E2M1 codes.
    w : ndarray of uint8, shape (N, lanes)
        Packed pairs.
    a_scale : ndarray of uint8, shape (N, blocks)
    w_scale : ndarray of uint8, shape (N, w_scale_bytes)
        In AutoFP2 mode bytes 2i and 2i + 1 are the even and the odd row's; with group scaling the first half of the bytes is the even row's.
    refine : ndarray of uint64, shape (N, records)
        Slots: 12 bits ``{is_activation, subgroup, valid, d3, d2, d1, d0}``, ordered by block, then slot. In place: 40 bits per block
        ``{activation mask, weight mask, d15 … d0}``.
    psum : ndarray of uint64, shape (N,)
        Partial sum that comes in with each vector.
    """

    mode_nvfp4: NDArray[np.bool_]
    refine_en: NDArray[np.bool_]
    a: NDArray[np.uint8]
    w: NDArray[np.uint8]
    a_scale: NDArray[np.uint8]
    w_scale: NDArray[np.uint8]
    refine: NDArray[np.uint64]
    psum: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.a)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> "Vectors":
        return Vectors(*(getattr(self, field.name)[rows] for field in fields(self)))

    def check(self, config: VmacConfig) -> None:
        """Raise ValueError unless every array has the shape that ``config`` asks for and its codes are in range."""
        rows = len(self.a)
        shapes = {
            "mode_nvfp4": (rows,),
            "refine_en": (rows,),
            "a": (rows, config.lanes),
            "w": (rows, config.lanes),
            "a_scale": (rows, config.blocks),
            "w_scale": (rows, config.w_scale_bytes),
            "refine": (rows, config.records),
            "psum": (rows,),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} must have shape {shape}, not {getattr(self, name).shape}")
        limits = {"a": E2M1.width, "w": 5, **({"refine": config.record_bits} if config.records else {})}
        for name, bits in limits.items():
            values = getattr(self, name)
            if values.size and int(values.max()) >> bits:
                raise ValueError(f"{name} must fit {bits} bits, not {int(values.max()):#x}")


@dataclass(frozen=True)
class Result:
    """Outputs of N vectors.

    Attributes
    ----------
    psum : ndarray of uint64, shape (N,)
    status : ndarray of uint8, shape (N,)
        Status bits that each vector raises; hardware keeps their OR.
    o : ndarray of int64, shape (N, blocks)
        O of each block, or in AutoFP2 mode of the even and odd row of each pair of blocks (group scaling: of all four sums, shape
        (N, 2·blocks), even row first; the second half is 0 in the other modes).
    """

    psum: NDArray[np.uint64]
    status: NDArray[np.uint8]
    o: NDArray[np.int64]


def base_sums(a: NDArray[np.uint8], w: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return per block ``Σ 2·A·Q0`` and ``Σ 2·A·Q1``, each int64 of shape (N, blocks) within ±384."""
    blocks = a.shape[1] // GROUP
    doubled = _DOUBLED[a].reshape(len(a), blocks, GROUP)
    digits = PAIR_DIGITS[w].astype(np.int64).reshape(len(a), blocks, GROUP, 2)
    even, odd = np.einsum("nbk,nbkd->dnb", doubled, digits)
    return even, odd


def refinement_sums(config: VmacConfig, vectors: Vectors) -> NDArray[np.int64]:
    """Return per block ``R = Σ 2·X·d·step``, int64 of shape (N, blocks), whatever the mode.

    X is the base activation where the weight is refined and the base weight where the activation is. Records of a block add up; nothing
    here depends on their order beyond the place of each.

    Raises
    ------
    ValueError
        A slot holds a subgroup that its place does not allow, or a refined activation meets a pair that is no NVFP4 weight.
    """
    rows, blocks = len(vectors), config.blocks
    if not config.records:
        return np.zeros((rows, blocks), dtype=np.int64)
    lanes, d, live, of_activation = _refined_lanes(config, vectors.refine)
    a = np.take_along_axis(vectors.a.reshape(rows, blocks, GROUP), lanes, axis=2)
    w = np.take_along_axis(vectors.w.reshape(rows, blocks, GROUP), lanes, axis=2)
    stray = live & of_activation & ~_IS_NVFP4[w]
    if stray.any():
        at = tuple(np.argwhere(stray)[0])
        row, lane = at[0], GROUP * at[1] + lanes[at]
        raise ValueError(
            f"w must hold NVFP4 weights where the activation is refined, not pair {w[at]:#04x} at ({row}, {lane})"
        )
    doubled_a, doubled_w = _DOUBLED[a], PAIR_DIGITS[w].astype(np.int64) @ np.array([5, 2])
    if config.step == "exponent":
        d = d << np.where(of_activation, _BINADE[a], np.select([abs(doubled_w) >= 8, abs(doubled_w) >= 4], [2, 1], 0))
    return (np.where(of_activation, doubled_w, doubled_a) * d * live).sum(axis=2)


def _refined_lanes(config: VmacConfig, refine: NDArray[np.uint64]) -> tuple[NDArray[np.int64], ...]:
    """Decode refinement records into lanes of their block, offsets, whether they count, and whether they refine the activation.

    Each of shape (N, blocks, refined lanes).
    """
    rows, blocks = len(refine), config.blocks
    words = refine.astype(np.int64).reshape(rows, blocks, config.records // blocks)
    if config.refinement == "inplace":
        lanes = np.broadcast_to(np.arange(GROUP), (rows, blocks, GROUP))
        masks = words >> (2 * GROUP + np.arange(2 * SUBGROUPS)) & 1 == 1
        of_weight, of_activation = np.split(np.repeat(masks, SUBGROUP, axis=2), 2, axis=2)
        d = words >> np.arange(0, 2 * GROUP, 2) & 3
        return lanes, (d ^ 2) - 2, of_weight | of_activation, ~of_weight
    slots = config.slots_per_block
    valid, subgroup, of_activation = words >> 8 & 1 == 1, words >> 9 & 3, words >> 11 & 1 == 1
    place = np.arange(slots)
    misplaced = valid & ((subgroup < place) | (subgroup > place + SUBGROUPS - slots))
    if misplaced.any():
        row, block, slot = np.argwhere(misplaced)[0]
        raise ValueError(
            f"refine must hold subgroups {slot} to {slot + SUBGROUPS - slots} in slot {slot}, "
            f"not {subgroup[row, block, slot]} at vector {row}, block {block}"
        )
    lanes = SUBGROUP * subgroup[..., None] + np.arange(SUBGROUP)
    d = words[..., None] >> np.arange(0, 2 * SUBGROUP, 2) & 3
    spread = (np.broadcast_to(flag[..., None], d.shape) for flag in (valid, of_activation))
    return tuple(part.reshape(rows, blocks, config.refined_lanes) for part in (lanes, (d ^ 2) - 2, *spread))


def scaled(o: NDArray[np.int64], w_scale: NDArray[np.uint8], a_scale: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return ``O · M_W·M_A << (E_W + E_A - 2)``, exact in int64, in units of 2⁻²² T_W·T_A."""
    significands = scale_significand(w_scale) * scale_significand(a_scale)
    return (o * significands) << (scale_exponent(w_scale) + scale_exponent(a_scale) - 2)


def accumulate_exact(psum: NDArray[np.uint64], values: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Add ``values`` (N, n) to 64-bit two's-complement sums, modulo 2⁶⁴."""
    return psum + values.astype(np.uint64).sum(axis=1, dtype=np.uint64)


def accumulate_windowed(
    psum: NDArray[np.uint64], even: NDArray[np.int64], odd: NDArray[np.int64], window_shift: int
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Add two values to the 32-bit halves ``{odd, even}``, rounded to the window and saturating.

    Returns
    -------
    psum : ndarray of uint64
    saturated : ndarray of bool
        Either half was clamped.
    """
    halves, saturated = [], np.zeros(len(psum), dtype=bool)
    for shift, value in ((0, even), (32, odd)):
        half = (psum >> np.uint64(shift)).astype(np.uint32).view(np.int32).astype(np.int64)
        rounded = (value + (1 << (window_shift - 1))) >> window_shift
        total = half + rounded
        clamped = np.clip(total, -(2**31), 2**31 - 1)
        saturated |= clamped != total
        halves.append((clamped & 0xFFFFFFFF).astype(np.uint64))
    return halves[1] << np.uint64(32) | halves[0], saturated


def vmac(config: VmacConfig, vectors: Vectors) -> Result:
    """Run vectors through the vector MAC, each with the partial sum that it brings.

    Parameters
    ----------
    config : VmacConfig
    vectors : Vectors
        N vectors; any mixture of modes. ``refine_en`` without ``mode_nvfp4`` is illegal and runs as AutoFP2 without refinement.

    Returns
    -------
    Result

    Raises
    ------
    ValueError
        Shapes or codes do not fit ``config``, or an AutoFP6 vector breaks a rule of :func:`refinement_sums`.
    """
    vectors.check(config)
    parts = [_vmac(config, vectors[start : start + _CHUNK]) for start in range(0, max(len(vectors), 1), _CHUNK)]
    return Result(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Result)))


def _vmac(config: VmacConfig, v: Vectors) -> Result:
    rows, blocks = len(v), config.blocks
    nvfp4 = v.mode_nvfp4.astype(bool)
    refined = nvfp4 & v.refine_en.astype(bool) & (config.refinement != "none")
    even, odd = base_sums(v.a, v.w)
    grouped = config.scaling == "group"
    o = np.zeros((rows, blocks * (2 if grouped else 1)), dtype=np.int64)
    values = np.zeros_like(o)
    status = np.zeros(rows, dtype=np.uint8)
    psum = np.empty(rows, dtype=np.uint64)

    n = np.flatnonzero(nvfp4)
    o[n, :blocks] = 4 * (5 * even[n] + 2 * odd[n])
    r = np.flatnonzero(refined)
    if len(r):
        o[r, :blocks] += refinement_sums(config, v[r])
    values[n, :blocks] = scaled(o[n, :blocks], v.w_scale[n, :blocks], v.a_scale[n])
    psum[n] = accumulate_exact(v.psum[n], values[n])
    status[n] |= np.where(
        is_nan_scale(v.w_scale[n, :blocks]).any(1) | is_nan_scale(v.a_scale[n]).any(1), NAN_SCALE, 0
    ).astype(np.uint8)

    n = np.flatnonzero(~nvfp4)
    if grouped:
        o[n] = 4 * 2 * np.concatenate([even[n], odd[n]], axis=1)
        a_scale = np.concatenate([v.a_scale[n]] * 2, axis=1)
        even_values, odd_values = np.split(scaled(o[n], v.w_scale[n], a_scale), 2, axis=1)
    else:
        o[n, 0::2] = 4 * 2 * (even[n, 0::2] + even[n, 1::2])
        o[n, 1::2] = 4 * 2 * (odd[n, 0::2] + odd[n, 1::2])
        a_scale = np.repeat(v.a_scale[n, 0::2], 2, axis=1)
        both = scaled(o[n], v.w_scale[n], a_scale)
        even_values, odd_values = both[:, 0::2], both[:, 1::2]
    psum[n], saturated = accumulate_windowed(v.psum[n], even_values.sum(1), odd_values.sum(1), config.window_shift)
    status[n] |= np.where(saturated, SATURATED, 0).astype(np.uint8)
    status[n] |= np.where(is_nan_scale(v.w_scale[n]).any(1) | is_nan_scale(a_scale).any(1), NAN_SCALE, 0).astype(
        np.uint8
    )
    if config.refinement != "none":
        status[n] |= np.where(v.refine_en[n], ILLEGAL, 0).astype(np.uint8)
    return Result(psum, status, o)
