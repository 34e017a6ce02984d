"""Processing element: operand entries, merging of refinement records, tiles, and cycles (paper, section 6.1; docs/pe.md)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from model.vmac import GROUP, SUBGROUP, SUBGROUPS, Pipeline, Vectors, VmacConfig, check_integer, vmac

__all__ = [
    "BAD_COMMAND",
    "DROPPED",
    "OFFSET_BYTES",
    "OVERLAP",
    "Operands",
    "PeConfig",
    "Tile",
    "TileResult",
    "cycles",
    "merge_records",
    "run_tile",
]

OFFSET_BYTES = 2
"""Refined subgroups of a block that an operand's entry has offsets for."""

SATURATED, NAN_SCALE, OVERLAP, DROPPED, BAD_COMMAND = 1, 2, 4, 8, 16
"""Bits of ``status``."""

MAX_K = 2**18 - 1
"""Longest reduction that any configuration may run, in elements."""


@dataclass(frozen=True)
class PeConfig:
    """Parameters of a processing element, for model and hardware alike.

    Attributes
    ----------
    lanes, refinement, slots_per_block, step, scaling, window_shift, pipeline
        Those of the vector MAC inside, :class:`model.vmac.VmacConfig`.
    weight_entries, activation_entries : int
        Vectors that the operand buffers hold, powers of two from 2 on.
    accumulators : int
        64-bit sums, half of them for the tile that is computed and half for the tile that drains; a power of two from 4 on.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong kind or outside its range.
    """

    lanes: int = 32
    refinement: Literal["slots", "inplace", "none"] = "slots"
    slots_per_block: int = 2
    step: Literal["fixed", "exponent"] = "fixed"
    scaling: Literal["pair", "group"] = "pair"
    window_shift: int = 24
    pipeline: Pipeline = "compact"
    weight_entries: int = 32
    activation_entries: int = 64
    accumulators: int = 256

    def __post_init__(self) -> None:
        _ = self.vmac
        for name, least in (("weight_entries", 2), ("activation_entries", 2), ("accumulators", 4)):
            value = getattr(self, name)
            check_integer(name, value)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from {least} on, not {value}")

    @cached_property
    def vmac(self) -> VmacConfig:
        """Parameters of the vector MAC; made and checked once, since cycles ask for them at every step."""
        return VmacConfig(**{name: getattr(self, name) for name in VmacConfig.__dataclass_fields__})

    @property
    def deposit(self) -> int:
        """Cycles from the issue of a tile's last vector to the first that can fetch a sum for the drain.

        One to read the operands, those of the vector MAC, one to write the sum.
        """
        return 1 + self.vmac.latency + 1

    @property
    def read_after_write(self) -> int:
        """Cycles from the issue of a vector to the first issue that may fetch its sum again.

        A sum is fetched the cycle before the vector MAC takes it in, as many cycles after the issue as that takes it in after its vector.
        """
        return self.deposit - self.vmac.psum_delay

    @property
    def max_words(self) -> int:
        """Largest number of accumulators of a tile, M·N."""
        return self.accumulators // 2

    @property
    def max_m(self) -> int:
        """Largest number of activation vectors of a tile; a whole K-vector of them must fit the buffer."""
        return min(self.activation_entries, self.max_words)

    @property
    def max_n(self) -> int:
        """Largest number of weight vectors of a tile; they stream through, so only the accumulators limit them."""
        return self.max_words

    @property
    def max_kv(self) -> int:
        """Largest number of K-vectors of a tile, for which no exact sum can overflow."""
        return min(self.vmac.max_k, MAX_K) // self.lanes


@dataclass(frozen=True)
class Operands:
    """Vectors of one operand, any number of leading axes.

    Attributes
    ----------
    codes : ndarray of uint8, shape (…, lanes)
        E2M1 codes of activations, packed pairs of weights.
    scales : ndarray of uint8, shape (…, scale bytes)
    masks : ndarray of uint8, shape (…, blocks)
        4 bits: bit g is subgroup g.
    offsets : ndarray of uint8, shape (…, blocks, 2)
        Four 2-bit offsets of the first and of the second refined subgroup, element 0 in bits 1:0.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    masks: NDArray[np.uint8]
    offsets: NDArray[np.uint8]

    def __getitem__(self, index: Any) -> "Operands":
        """Index the leading axes of every array."""
        return Operands(self.codes[index], self.scales[index], self.masks[index], self.offsets[index])


@dataclass(frozen=True)
class Tile:
    """One command and its operands.

    Attributes
    ----------
    mode_nvfp4, refine_en : bool
    weights : Operands
        Leading axes (KV, N), in the order in which they are sent.
    activations : Operands
        Leading axes (KV, M).
    """

    mode_nvfp4: bool
    refine_en: bool
    weights: Operands
    activations: Operands

    @property
    def m(self) -> int:
        """Activation vectors."""
        return self.activations.codes.shape[1]

    @property
    def n(self) -> int:
        """Weight vectors."""
        return self.weights.codes.shape[1]

    @property
    def kv(self) -> int:
        """K-vectors."""
        return self.weights.codes.shape[0]


@dataclass(frozen=True)
class TileResult:
    """Sums of a tile: ``psum`` uint64 of shape (N, M), and the status bits that it raised."""

    psum: NDArray[np.uint64]
    status: int


def merge_records(
    config: VmacConfig,
    weight_masks: NDArray[np.uint8],
    weight_offsets: NDArray[np.uint8],
    activation_masks: NDArray[np.uint8],
    activation_offsets: NDArray[np.uint8],
) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Merge the records of weights and activations into a vector MAC's ``refine`` input.

    The weight's record wins where both refine a subgroup. Slots go to weight records first, then to activation records, to lower
    subgroups first; what finds no slot, or has no offset byte, is dropped. Records keep the order of their subgroups: each goes to the
    first slot behind the one before it that may hold its subgroup.

    Parameters
    ----------
    config : VmacConfig
    weight_masks, activation_masks : ndarray of uint8, shape (rows, blocks)
    weight_offsets, activation_offsets : ndarray of uint8, shape (rows, blocks, 2)

    Returns
    -------
    refine : ndarray of uint64, shape (rows, records)
    overlap, dropped : ndarray of bool, shape (rows,)
        A subgroup was refined by both; a record was dropped for want of a slot or an offset byte.
    """
    rows, blocks = weight_masks.shape
    slots = config.slots_per_block if config.refinement == "slots" else SUBGROUPS
    subgroups = np.arange(SUBGROUPS)
    w_bits, a_bits = (masks[..., None] >> subgroups & 1 == 1 for masks in (weight_masks, activation_masks))
    overlap = (w_bits & a_bits).any(axis=(1, 2))
    # An operand's record number is the number of its records in lower subgroups; it has offset bytes for two.
    w_rank, a_rank = (np.cumsum(bits, axis=2) - bits for bits in (w_bits, a_bits))
    w_kept = w_bits & (w_rank < min(OFFSET_BYTES, slots))
    candidates = a_bits & ~w_bits & (a_rank < OFFSET_BYTES)
    place = np.cumsum(candidates, axis=2) - candidates + w_kept.sum(axis=2, keepdims=True)
    a_kept = candidates & (place < slots)
    dropped = ((w_bits & ~w_kept) | (a_bits & ~w_bits & ~a_kept)).any(axis=(1, 2))

    def chosen(offsets: NDArray[np.uint8], rank: NDArray[np.int64]) -> NDArray[np.uint64]:
        return np.take_along_axis(offsets, np.minimum(rank, OFFSET_BYTES - 1), axis=2).astype(np.uint64)

    offsets = np.where(w_kept, chosen(weight_offsets, w_rank), chosen(activation_offsets, a_rank))
    kept = w_kept | a_kept
    if config.refinement == "none":
        return np.zeros((rows, 0), np.uint64), overlap, dropped
    if config.refinement == "inplace":
        words = np.zeros((rows, blocks), np.uint64)
        for g in range(SUBGROUPS):
            words |= np.where(kept[..., g], offsets[..., g] << np.uint64(2 * SUBGROUP * g), np.uint64(0))
            words |= w_kept[..., g].astype(np.uint64) << np.uint64(2 * GROUP + g)
            words |= a_kept[..., g].astype(np.uint64) << np.uint64(2 * GROUP + SUBGROUPS + g)
        return words, overlap, dropped
    records = np.zeros((rows, blocks, slots), np.uint64)
    free = np.zeros((rows, blocks), np.int64)
    for g in range(SUBGROUPS):
        slot = np.maximum(free, g - (SUBGROUPS - slots))
        word = offsets[..., g] | np.uint64(1 << 8 | g << 9) | a_kept[..., g].astype(np.uint64) << np.uint64(11)
        for i in range(slots):
            records[..., i] = np.where(kept[..., g] & (slot == i), word, records[..., i])
        free = np.where(kept[..., g], slot + 1, free)
    return records.reshape(rows, -1), overlap, dropped


def run_tile(config: PeConfig, tile: Tile) -> TileResult:
    """Compute a tile: for each K-vector, for each weight vector, for each activation vector, in this order.

    Raises
    ------
    ValueError
        Shapes do not fit each other or ``config``, or the hardware would refuse the command.
    """
    check_tile(config, tile)
    vector = config.vmac
    m, n = tile.m, tile.n
    psum = np.zeros(n * m, np.uint64)
    status = 0
    refined = tile.mode_nvfp4 and tile.refine_en and config.refinement != "none"
    nvfp4, refine_en = (np.full(n * m, flag) for flag in (tile.mode_nvfp4, refined))
    weight, activation = np.repeat(np.arange(n), m), np.tile(np.arange(m), n)
    for k in range(tile.kv):
        w, a = tile.weights[k, weight], tile.activations[k, activation]
        if refined:
            refine, overlap, dropped = merge_records(vector, w.masks, w.offsets, a.masks, a.offsets)
            status |= OVERLAP * bool(overlap.any()) | DROPPED * bool(dropped.any())
        else:
            refine = np.zeros((n * m, vector.records), np.uint64)
        result = vmac(vector, Vectors(nvfp4, refine_en, a.codes, w.codes, a.scales, w.scales, refine, psum))
        psum = result.psum
        # The vector MAC's status has the illegal mode below these two; a tile never runs in it.
        status |= int(np.bitwise_or.reduce(result.status)) >> 1
    return TileResult(psum.reshape(n, m), status)


def check_tile(config: PeConfig, tile: Tile) -> None:
    """Raise ValueError unless a tile's shapes fit ``config`` and its command is one that the hardware takes."""
    blocks = config.vmac.blocks
    for name, operands, count, scales in (
        ("weights", tile.weights, tile.n, config.vmac.w_scale_bytes),
        ("activations", tile.activations, tile.m, blocks),
    ):
        shapes = {"codes": (config.lanes,), "scales": (scales,), "masks": (blocks,), "offsets": (blocks, OFFSET_BYTES)}
        for field, shape in shapes.items():
            found = getattr(operands, field).shape
            if found != (tile.kv, count, *shape):
                raise ValueError(f"{name}.{field} must have shape {(tile.kv, count, *shape)}, not {found}")
    for name, size, limit in (("M", tile.m, config.max_m), ("N", tile.n, config.max_n), ("KV", tile.kv, config.max_kv)):
        if not 1 <= size <= limit:
            raise ValueError(f"{name} must be from 1 to {limit}, not {size}")
    check_words(config, tile.m, tile.n)
    if tile.refine_en and (not tile.mode_nvfp4 or config.refinement == "none"):
        raise ValueError("refine_en must come with mode_nvfp4 and refinement hardware")


def check_words(config: PeConfig, m: int, n: int) -> int:
    """Return M·N; raise ValueError unless a bank of accumulators holds so many sums."""
    if not 1 <= m * n <= config.max_words:
        raise ValueError(f"M·N must be from 1 to {config.max_words}, not {m}·{n}")
    return m * n


def cycles(config: PeConfig, tiles: Sequence[tuple[int, int, int]]) -> list[int]:
    """Predict the cycle in which each tile's last result leaves, if no stream ever waits.

    Cycle 0 is the first in which command, weights and activations are offered; one of each comes in per cycle.

    Parameters
    ----------
    config : PeConfig
    tiles : sequence of (M, N, KV)

    Returns
    -------
    list of int

    Raises
    ------
    ValueError
        A tile's M·N is 0 or above the accumulators of a bank.

    Examples
    --------
    >>> cycles(PeConfig(), [(16, 8, 32), (16, 8, 32)])
    [4230, 8326]
    """
    leaves: list[int] = []
    issued = 0
    for number, (m, n, kv) in enumerate(tiles):
        words = check_words(config, m, n)
        # A command is taken with the last vector of the tile before, or when the last sum of the one before that has left its bank.
        taken = max(issued, leaves[number - 2] + 1 if number > 1 else 0)
        issued = taken + words + max(words, config.read_after_write) * (kv - 1)
        stored = issued + config.deposit
        leaves.append(max(stored, leaves[-1] if leaves else 0) + words)
    return leaves
