"""Refinement as a longer K: how hardware without it would run an AutoFP6 product."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from model.formats import E2M1, scale_exponent, scale_significand
from model.pe import OFFSET_BYTES, Operands
from model.vmac import GROUP, SUBGROUP, SUBGROUPS
from sim.image import shared_masks

__all__ = ["extended", "mask_bits"]


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
    of_w = np.repeat(mask_bits(w.masks[0]).reshape(-1), SUBGROUP).reshape(-1, GROUP)
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


def mask_bits(masks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which subgroups masks name, with an axis of subgroups added last."""
    return masks[..., None] >> np.arange(SUBGROUPS) & 1 == 1


def _quadrupled(operands: Operands, step: str) -> NDArray[np.uint8]:
    """E2M1 codes of 4δ in refined subgroups, 0 elsewhere; shape of the codes."""
    bits = mask_bits(operands.masks)
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
