"""AutoFP6: NVFP4 refined by signed offsets in 4-element subgroups (paper, section 3.2; docs/formats.md)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from model import block_scaled
from model.block_scaled import BlockScaled, chunks, effective_scales
from model.formats import E2M1
from model.vmac import GROUP, SUBGROUP, SUBGROUPS, VmacConfig, check_choice

__all__ = [
    "OFFSET_BITS",
    "Records",
    "Refined",
    "dequantize",
    "offset_step",
    "offsets",
    "refine",
    "refinement_records",
    "select_activations",
    "select_best",
    "select_weights",
    "subgroup_errors",
    "subgroup_gains",
]

OFFSET_BITS = 2
"""Bits of an AutoFP6 offset; 4 gives AutoFP8."""

# Four offsets, a byte each, seen as one number.
_SUBGROUP = np.uint32

Step = Literal["fixed", "exponent"]


def _check_offsets(bits: int, step: str) -> None:
    if not 2 <= bits <= 6:
        raise ValueError(f"bits must be from 2 to 6, not {bits}")
    check_choice("step", step, ("fixed", "exponent"))


def offset_step(codes: NDArray[np.uint8], bits: int = OFFSET_BITS, step: Step = "fixed") -> NDArray[np.float32]:
    """Return the value of one offset unit for each E2M1 code, in units of the group's scale.

    Fixed: 2⁻³ for 2-bit offsets and 2⁻⁵ for 4-bit ones. Exponent: that times 1, 2 or 4, for magnitudes below 2, below 4, and from 4 on.

    Raises
    ------
    ValueError
        ``bits`` is not from 2 to 6, or ``step`` is unknown.
    """
    _check_offsets(bits, step)
    unit = np.float32(2.0 ** -(bits + 1))
    if step == "fixed":
        return np.full(np.shape(codes), unit, np.float32)
    return unit * np.array([1, 1, 1, 1, 2, 2, 4, 4] * 2, np.float32)[codes]


def offsets(
    ratio: NDArray[np.float32], codes: NDArray[np.uint8], bits: int = OFFSET_BITS, step: Step = "fixed"
) -> NDArray[np.int8]:
    """Choose for each element the offset d that brings ``q + d·step`` nearest to ``ratio``.

    Ties go to the smaller ``|d|``, then to the positive d. ``d`` adds to the signed value.

    Parameters
    ----------
    ratio : ndarray of float32
        Elements over their group's scale, ``x / (T·B)``; any shape.
    codes : ndarray of uint8
        Their E2M1 codes, same shape.
    bits : int
        Width of d, two's complement.
    step : {"fixed", "exponent"}

    Returns
    -------
    ndarray of int8, same shape

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([2.76, -0.62, 4.24, -2.02], np.float32)
    >>> offsets(x, E2M1.encode(x)).tolist()
    [-2, -1, 1, 0]
    """
    # Exact where it matters: within half a step of any threshold, ratio and q differ by less than a factor of two.
    distance = ratio - E2M1.decode(codes)
    if step == "exponent":
        distance = distance / offset_step(codes, bits, step)
        unit = np.float32(1)
    else:
        unit = offset_step(np.zeros(1, np.uint8), bits, step)[0]
    d = np.zeros(distance.shape, dtype=np.int8)
    # The next offset up or down pays beyond the middle between it and its neighbour; at the middle the smaller |d| stays.
    for k in range(1 << (bits - 1)):
        middle = (k + np.float32(0.5)) * unit
        if k + 1 < 1 << (bits - 1):
            d += (distance > middle).view(np.int8)
        d -= (distance < -middle).view(np.int8)
    return d


@dataclass(frozen=True)
class Refined:
    """An NVFP4 tensor with offsets in the subgroups that a mask selects.

    Attributes
    ----------
    base : BlockScaled
        NVFP4, codes of shape (…, Kp).
    mask : ndarray of bool, shape (…, Kp / 4)
        Refined subgroups. A weight's mask may have fewer leading axes and then serves all rows.
    offsets : ndarray of int8, shape (…, Kp)
        0 outside the mask.
    bits : int
    step : {"fixed", "exponent"}

    Raises
    ------
    ValueError
        ``base`` is not NVFP4, a shape does not fit it, an offset does not fit ``bits`` or lies outside the mask, or a parameter is outside
        its range.
    """

    base: BlockScaled
    mask: NDArray[np.bool_]
    offsets: NDArray[np.int8]
    bits: int = OFFSET_BITS
    step: Step = "fixed"

    def __post_init__(self) -> None:
        _check_offsets(self.bits, self.step)
        if self.base.element != E2M1:
            raise ValueError(f"base must be NVFP4, not blocks of {self.base.element.name}")
        if self.offsets.shape != self.base.codes.shape:
            raise ValueError(f"offsets must have shape {self.base.codes.shape}, not {self.offsets.shape}")
        low, high = -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        if self.offsets.size and not low <= int(self.offsets.min()) <= int(self.offsets.max()) <= high:
            raise ValueError(f"offsets must be from {low} to {high}, not {self.offsets.min()} to {self.offsets.max()}")
        try:
            mask = np.broadcast_to(self.mask, (*self.base.codes.shape[:-1], self.base.codes.shape[-1] // SUBGROUP))
        except ValueError:
            raise ValueError(
                f"mask must fit codes of shape {self.base.codes.shape}, not shape {self.mask.shape}"
            ) from None
        if (np.ascontiguousarray(self.offsets).view(_SUBGROUP).astype(bool) > mask).any():
            raise ValueError("offsets must be 0 outside the mask")


def refine(
    x: NDArray[np.float32],
    base: BlockScaled,
    mask: NDArray[np.bool_] | None = None,
    *,
    bits: int = OFFSET_BITS,
    step: Step = "fixed",
) -> Refined:
    """Refine ``base``, a quantised ``x``, in the subgroups of ``mask`` (all of them by default).

    Parameters
    ----------
    x : ndarray of float32, shape (…, K)
    base : BlockScaled
        NVFP4 of ``x``.
    mask : ndarray of bool, shape (…, Kp / 4), optional
        Broadcast over leading axes.
    bits, step
        As in :func:`offsets`.

    Raises
    ------
    ValueError
        A value is NaN or infinite (names the first index), a shape does not fit ``base``, or a parameter is outside its range.
    """
    if x.shape != (*base.codes.shape[:-1], base.length):
        raise ValueError(f"x must have shape {(*base.codes.shape[:-1], base.length)}, not {x.shape}")
    padded = base.codes.shape[-1]
    values: NDArray[np.float32] = np.asarray(x, dtype=np.float32)
    if padded != base.length:
        values = np.zeros(base.codes.shape, np.float32)
        values[..., : base.length] = x
    steps = effective_scales(base).reshape(-1)
    steps[steps == 0] = np.inf
    groups, codes = values.reshape(-1, GROUP), base.codes.reshape(-1, GROUP)
    chosen = np.empty(groups.shape, dtype=np.int8)
    for part in chunks(*groups.shape):
        if not np.isfinite(groups[part]).all():
            index = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
            raise ValueError(f"x must be finite, not {values[index]} at index {index}")
        with np.errstate(over="ignore"):
            ratio = np.divide(groups[part].reshape(-1), np.repeat(steps[part], GROUP), dtype=np.float32)
        chosen[part] = offsets(ratio, codes[part].reshape(-1), bits, step).reshape(-1, GROUP)
    d = chosen.reshape(base.codes.shape)
    if mask is None:
        mask = np.ones(padded // SUBGROUP, dtype=bool)
    else:
        subgroups = d.view(_SUBGROUP)
        subgroups *= mask
    return Refined(base, mask, d, bits, step)


def dequantize(tensor: Refined) -> NDArray[np.float32]:
    """Return the values ``T·B·(q + d·step)``, float32, shape (…, K)."""
    base = tensor.base
    q = E2M1.decode(base.codes) + tensor.offsets * offset_step(base.codes, tensor.bits, tensor.step)
    return (q * np.repeat(effective_scales(base), GROUP, axis=-1))[..., : base.length]


def _squared_by_subgroup(error: NDArray[np.float32], padded: int) -> NDArray[np.float64]:
    full = np.zeros((*error.shape[:-1], padded))
    full[..., : error.shape[-1]] = error
    return (full.reshape(*error.shape[:-1], -1, SUBGROUP) ** 2).sum(axis=-1)


def subgroup_errors(x: NDArray[np.float32], base: BlockScaled) -> NDArray[np.float64]:
    """Return ``Σ(x - q·s)²`` of every subgroup, shape (…, Kp / 4), in float64."""
    return _squared_by_subgroup(x - block_scaled.dequantize(base), base.codes.shape[-1])


def subgroup_gains(
    x: NDArray[np.float32], base: BlockScaled, *, bits: int = OFFSET_BITS, step: Step = "fixed"
) -> NDArray[np.float64]:
    """Return how much squared error refining each subgroup would remove, shape (…, Kp / 4), in float64."""
    refined = dequantize(refine(x, base, bits=bits, step=step))
    return subgroup_errors(x, base) - _squared_by_subgroup(x - refined, base.codes.shape[-1])


def _best(score: NDArray[np.float64], limit: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark per group the ``limit`` subgroups of highest score, lowest index first on ties; -inf is never marked."""
    order = np.argsort(-score, axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(score.shape[-1]), order.shape), axis=-1)
    return (rank < limit[..., None]) & np.isfinite(score)


def _check_slots(slots: int) -> None:
    if not 1 <= slots <= SUBGROUPS:
        raise ValueError(f"slots must be from 1 to {SUBGROUPS}, not {slots}")


def select_best(gains: NDArray[np.float64], count: int, slots: int = 2) -> NDArray[np.bool_]:
    """Choose the ``count`` subgroups of largest gain, at most ``slots`` per group, lowest index first on ties.

    Parameters
    ----------
    gains : ndarray, shape (Kp / 4,)
        Summed over the rows that share the mask; -inf is never chosen.
    count : int
    slots : int
        1 to 4.

    Returns
    -------
    ndarray of bool, shape (Kp / 4,)

    Raises
    ------
    ValueError
        ``slots`` is outside its range.
    """
    _check_slots(slots)
    total = gains.reshape(-1, SUBGROUPS)
    allowed = _best(total, np.full(len(total), slots))
    candidates = np.where(allowed, total, -np.inf).reshape(-1)
    chosen = np.argsort(-candidates, kind="stable")[:count]
    mask = np.zeros(candidates.size, dtype=bool)
    mask[chosen] = np.isfinite(candidates[chosen])
    return mask


def select_weights(gains: NDArray[np.float64], density: float, slots: int = 2) -> NDArray[np.bool_]:
    """Choose the subgroups of a weight matrix to refine, one mask for all its rows.

    The best ``round(density · subgroups)`` by gain summed over rows, at most ``slots`` per group, lowest index first on ties.

    Parameters
    ----------
    gains : ndarray, shape (N, Kp / 4)
        From :func:`subgroup_gains`.
    density : float
        Share ρ of subgroups, at most ``slots / 4``.
    slots : int
        1 to 4.

    Returns
    -------
    ndarray of bool, shape (Kp / 4,)

    Raises
    ------
    ValueError
        ``density`` or ``slots`` is outside its range.
    """
    _check_slots(slots)
    if not 0 <= density <= slots / SUBGROUPS:
        raise ValueError(f"density must be from 0 to {slots / SUBGROUPS} with {slots} slots, not {density}")
    return select_best(gains.sum(axis=0), round(density * gains.shape[-1]), slots)


def select_activations(
    errors: NDArray[np.float64], weight_mask: NDArray[np.bool_], threshold: float, slots: int = 2
) -> NDArray[np.bool_]:
    """Choose the subgroups of activations to refine among those that the weight leaves free.

    Parameters
    ----------
    errors : ndarray, shape (…, Kp / 4)
        Subgroup errors, from :func:`subgroup_errors`.
    weight_mask : ndarray of bool, shape (Kp / 4,)
    threshold : float
        Only subgroups with a larger error are refined; for τ relative to the tensor's mean square ms it is ``4·τ·ms``.
    slots : int
        Refined subgroups per group, weight's and activation's together; 1 to 4.

    Returns
    -------
    ndarray of bool, shape (…, Kp / 4)
        Disjoint from ``weight_mask``; of too many, those with the largest error stay, lowest index first on ties.

    Raises
    ------
    ValueError
        ``slots`` is outside its range.
    """
    _check_slots(slots)
    free = ~weight_mask.reshape(-1, SUBGROUPS)
    score = errors.reshape(*errors.shape[:-1], -1, SUBGROUPS)
    score = np.where(free & (score > threshold), score, -np.inf)
    room = np.maximum(slots - (~free).sum(axis=-1), 0)
    return _best(score, np.broadcast_to(room, score.shape[:-1])).reshape(errors.shape)


@dataclass(frozen=True)
class Records:
    """Refinement words for a vMAC, and what did not fit.

    Attributes
    ----------
    words : ndarray of uint64, shape (N, records)
        As :attr:`model.vmac.Vectors.refine`.
    overlap, dropped : ndarray of bool, shape (N,)
        A subgroup was refined on both sides (the weight's record stays); more records came than there are slots.
    """

    words: NDArray[np.uint64]
    overlap: NDArray[np.bool_]
    dropped: NDArray[np.bool_]


def refinement_records(
    config: VmacConfig,
    weight_mask: NDArray[np.bool_],
    weight_offsets: NDArray[np.int8],
    activation_mask: NDArray[np.bool_],
    activation_offsets: NDArray[np.int8],
) -> Records:
    """Merge the refinements of N weight and N activation vectors into the words of the ``refine`` port.

    The weight wins an overlap; weight records take slots before activation records, lower subgroups before higher; the rest is dropped.
    Records then stand in ascending order, each in the lowest slot that its subgroup allows: slot i of n holds subgroups i to 4 - n + i.

    Parameters
    ----------
    config : VmacConfig
    weight_mask, activation_mask : ndarray of bool, shape (N, lanes / 4)
    weight_offsets, activation_offsets : ndarray of int8, shape (N, lanes)
        From -2 to 1.

    Raises
    ------
    ValueError
        ``config`` has no refinement, or shapes do not match.
    """
    if not config.records:
        raise ValueError(f"config must have refinement, not {config.refinement!r}")
    rows, blocks = len(weight_mask), config.blocks
    arrays = {
        "weight_mask": (weight_mask, config.lanes // SUBGROUP),
        "activation_mask": (activation_mask, config.lanes // SUBGROUP),
        "weight_offsets": (weight_offsets, config.lanes),
        "activation_offsets": (activation_offsets, config.lanes),
    }
    for name, (array, width) in arrays.items():
        if array.shape != (rows, width):
            raise ValueError(f"{name} must have shape {(rows, width)}, not {array.shape}")
    of_weight = weight_mask.reshape(rows, blocks, SUBGROUPS)
    both = of_weight & activation_mask.reshape(rows, blocks, SUBGROUPS)
    of_activation = activation_mask.reshape(rows, blocks, SUBGROUPS) & ~of_weight
    side = np.repeat(of_weight.reshape(rows, -1), SUBGROUP, axis=1)
    d = np.where(side, weight_offsets, activation_offsets).astype(np.int64) & 3
    overlap = np.asarray(both.any(axis=(1, 2)))
    if config.refinement == "inplace":
        bits = (d.reshape(rows, blocks, GROUP) << np.arange(0, 2 * GROUP, 2)).sum(axis=2)
        masks = np.concatenate([of_weight, activation_mask.reshape(rows, blocks, SUBGROUPS)], axis=2)
        words = bits | (masks.astype(np.int64) << (2 * GROUP + np.arange(2 * SUBGROUPS))).sum(axis=2)
        return Records(words.astype(np.uint64), overlap, np.zeros(rows, dtype=bool))

    slots = config.slots_per_block
    # Weights first, then activations, lower subgroups first: keep what ranks below the number of slots.
    wanted = np.concatenate([of_weight, of_activation], axis=2)
    kept = wanted & (np.cumsum(wanted, axis=2) <= slots)
    dropped = (wanted & ~kept).any(axis=(1, 2))
    keep_weight, keep_activation = kept[..., :SUBGROUPS], kept[..., SUBGROUPS:]
    byte = (d.reshape(rows, blocks, SUBGROUPS, SUBGROUP) << np.arange(0, 2 * SUBGROUP, 2)).sum(axis=3)
    words = np.zeros((rows, blocks, slots), dtype=np.int64)
    used = np.full((rows, blocks), -1)
    for subgroup in range(SUBGROUPS):
        here = keep_weight[..., subgroup] | keep_activation[..., subgroup]
        slot = np.maximum(used + 1, subgroup - (SUBGROUPS - slots))
        word = keep_activation[..., subgroup].astype(np.int64) << 11 | subgroup << 9 | 1 << 8 | byte[..., subgroup]
        n, b = np.nonzero(here)
        words[n, b, slot[n, b]] = word[n, b]
        used = np.where(here, slot, used)
    return Records(words.reshape(rows, -1).astype(np.uint64), np.asarray(overlap), np.asarray(dropped))
