"""Whole products as the accelerator computes them, bit for bit like its elements but fast (paper, section 6.1; docs/driver.md)."""

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from model.accelerator import Mode
from model.autofp2 import pair_digits, pair_scales, remap
from model.formats import E2M1, is_nan_scale, scale_exponent, scale_significand
from model.pe import DROPPED, NAN_SCALE, OFFSET_BYTES, OVERLAP, SATURATED, Operands, PeConfig
from model.vmac import GROUP, SUBGROUP, SUBGROUPS, VmacConfig

__all__ = ["overcrowded", "product", "to_fp32"]

_EXACT = 1 << 53
"""Integers up to here, and sums of them, are exact in float64 in whatever order they are added."""
_MASKS = np.arange(1 << SUBGROUPS)
_BITS = _MASKS[:, None] >> np.arange(SUBGROUPS) & 1 == 1
_RANKS = np.cumsum(_BITS, axis=1) - _BITS
_DOUBLED = (2 * E2M1.decode(np.arange(16))).astype(np.int64)
_BINADE = np.maximum((np.arange(16) >> E2M1.mantissa_bits & 3) - E2M1.bias, 0)


def product(config: PeConfig, mode: Mode, a: Operands, w: Operands) -> tuple[NDArray[np.int64], int]:
    """Return ``a · wᵀ`` as the accelerator sums it up, and the status bits that it raises.

    The sums are those of :func:`model.pe.run_tile` on one tile that holds everything. Padding of edges adds nothing to them; what it can
    add to the status says :func:`overcrowded`.

    Parameters
    ----------
    config : PeConfig
        Lanes, refinement, step, scaling and window count.
    mode : Mode
    a : Operands
        Activations, leading axes (M, KV).
    w : Operands
        Weights as they are stored, E2M1 codes, leading axes (N, KV). In AutoFP2 mode rows 2i and 2i + 1 are computed together; of an odd
        number the last has zeros beside it.

    Returns
    -------
    sums : ndarray of int64 [M, N]
        Modulo 2⁶⁴; in AutoFP2 mode saturated to 32 bits after each K-vector.
    status : int
        Saturated 1, nan_scale 2, overlap 4, dropped 8.

    Raises
    ------
    ValueError
        Shapes do not fit each other or ``config``, or there is no such mode or no hardware for it.
    """
    mode = Mode(mode)
    _check(config, mode, a, w)
    if mode == Mode.AUTOFP2:
        return _windowed(config, a, w)
    scale_a, scale_w = _scale(a.scales), _scale(w.scales)
    doubled_a, doubled_w = _DOUBLED[a.codes], _DOUBLED[w.codes]
    status = NAN_SCALE * bool(is_nan_scale(a.scales).any() or is_nan_scale(w.scales).any())
    if mode == Mode.NVFP4:
        return 4 * _exact(_spread(doubled_a, scale_a), _spread(doubled_w, scale_w)), status
    # What O holds of a lane is 2A·(4·2W + d_W), or 2A·4·2W + d_A·2W: two products of matrices, the second with those d_A that find a slot.
    kept_w, kept_a = _kept(config.vmac)
    d_w = _offsets(config, w) * np.repeat(kept_w[w.masks], SUBGROUP, axis=-1).reshape(w.codes.shape)
    d_a = _offsets(config, a)
    sums = _exact(_spread(doubled_a, scale_a), _spread(4 * doubled_w + d_w, scale_w))
    for mask in np.unique(w.masks):
        chosen_a = d_a * np.repeat(kept_a[mask, a.masks], SUBGROUP, axis=-1).reshape(a.codes.shape)
        blocks = (w.masks == mask)[..., None]
        if chosen_a.any():
            chosen_w = np.where(blocks, doubled_w.reshape(*w.masks.shape, GROUP), 0).reshape(w.codes.shape)
            sums += _exact(_spread(chosen_a, scale_a), _spread(chosen_w, scale_w))
    return sums, status | _merging(config.vmac, a.masks, w.masks)


def overcrowded(config: PeConfig, a: Operands) -> int:
    """Return the status bits that activations raise in AutoFP6 mode where rows of zeros pad the weights."""
    return _merging(config.vmac, a.masks, np.zeros_like(a.masks[:1]))


def to_fp32(sums: NDArray[np.int64], out_scale: float) -> NDArray[np.float32]:
    """Return sums as FP32 numbers: rounded to nearest even, then multiplied by ``out_scale`` and rounded again; subnormals stay.

    Raises
    ------
    ValueError
        ``out_scale`` is infinite or not a number in FP32.
    """
    with np.errstate(over="ignore", under="ignore"):
        scale = np.float32(out_scale)
        if not np.isfinite(scale):
            raise ValueError(f"out_scale must be finite in FP32, not {out_scale}")
        return sums.astype(np.float32) * scale


def _check(config: PeConfig, mode: Mode, a: Operands, w: Operands) -> None:
    if mode == Mode.AUTOFP6 and config.refinement == "none":
        raise ValueError("mode must be one that the configuration has, not AUTOFP6")
    kv = a.codes.shape[1]
    blocks = config.vmac.blocks
    shapes = {"codes": (config.lanes,), "scales": (blocks,), "masks": (blocks,), "offsets": (blocks, OFFSET_BYTES)}
    for name, operands in (("a", a), ("w", w)):
        for field in fields(Operands):
            expected = (len(operands.codes), kv, *shapes[field.name])
            found = getattr(operands, field.name).shape
            if found != expected:
                raise ValueError(f"{name}.{field.name} must have shape {expected}, not {found}")


def _scale(octets: NDArray[np.uint8]) -> NDArray[np.int64]:
    """E4M3 scales as integers, up to 15·2¹⁴."""
    return scale_significand(octets) << scale_exponent(octets) - 1


def _spread(values: NDArray[np.int64], scales: NDArray[np.int64]) -> NDArray[np.int64]:
    """Multiply rows of integers (rows, KV, lanes) by a scale for each so many lanes; shape (rows, K)."""
    return (values * np.repeat(scales, values.shape[-1] // scales.shape[-1], axis=-1)).reshape(len(values), -1)


def _exact(x: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``x · yᵀ`` modulo 2⁶⁴, by float64 products of slices of K that are short enough to be exact."""
    largest = int(np.abs(x).max(initial=1)) * int(np.abs(y).max(initial=1))
    step = _EXACT // largest
    sums = np.zeros((len(x), len(y)), np.int64)
    for start in range(0, x.shape[1], step):
        part = slice(start, start + step)
        sums += (x[:, part].astype(np.float64) @ y[:, part].astype(np.float64).T).astype(np.int64)
    return sums


def _windowed(config: PeConfig, a: Operands, w: Operands) -> tuple[NDArray[np.int64], int]:
    rows, kv = w.codes.shape[:2]
    blocks = config.vmac.blocks
    scales_a = a.scales
    if config.scaling == "group":
        digits, scales_w = remap(w.codes), w.scales
    else:
        # Pairs of groups share a scale: the larger of the weights', the first of the activations'.
        digits, scales_w = pair_digits(w.codes, w.scales), pair_scales(w.scales)
        scales_a = a.scales.reshape(len(a.scales), kv, blocks // 2, 2)[..., 0]
    status = NAN_SCALE * bool(is_nan_scale(scales_a).any() or is_nan_scale(scales_w).any())
    x = _spread(_DOUBLED[a.codes], _scale(scales_a)).reshape(-1, kv, config.lanes)
    y = _spread(digits.astype(np.int64), _scale(scales_w)).reshape(-1, kv, config.lanes)
    sums = np.zeros((len(a.codes), rows), np.int64)
    half, low, high = 1 << config.window_shift - 1, -(2**31), 2**31 - 1
    for k in range(kv):
        total = sums + (8 * _exact(x[:, k], y[:, k]) + half >> config.window_shift)
        sums = np.clip(total, low, high)
        if not status & SATURATED and (sums != total).any():
            status |= SATURATED
    return sums, status


def _offsets(config: PeConfig, operands: Operands) -> NDArray[np.int64]:
    """Offsets of all lanes that a mask refines and an offset byte is there for, in units of 2⁻³, or 0; shape (rows, KV, lanes)."""
    ranks = _RANKS[operands.masks]
    octets = np.take_along_axis(operands.offsets, np.minimum(ranks, OFFSET_BYTES - 1), axis=-1).astype(np.int64)
    d = (octets[..., None] >> np.arange(0, 2 * SUBGROUP, 2) & 3 ^ 2) - 2
    d *= (_BITS[operands.masks] & (ranks < OFFSET_BYTES))[..., None]
    d = d.reshape(operands.codes.shape)
    return d << _BINADE[operands.codes] if config.step == "exponent" else d


def _kept(config: VmacConfig) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For every mask of weights [16], and of weights and activations [16, 16], which subgroups keep their record; last axis 4."""
    slots = config.slots_per_block if config.refinement == "slots" else SUBGROUPS
    most = min(OFFSET_BYTES, slots)
    kept_w = _BITS & np.less(_RANKS, most)
    candidates = _BITS & ~_BITS[:, None] & (_RANKS < OFFSET_BYTES)
    place = np.cumsum(candidates, axis=2) - candidates + kept_w.sum(axis=1)[:, None, None]
    return kept_w, candidates & (place < slots)


def _merging(config: VmacConfig, a_masks: NDArray[np.uint8], w_masks: NDArray[np.uint8]) -> int:
    """Status bits of all pairs of an activation vector and a weight vector; masks are (rows, KV, blocks)."""
    kept_w, kept_a = _kept(config)
    overlap = (_BITS[:, None] & _BITS).any(axis=2)
    lost_w = (_BITS & ~kept_w)[:, None]
    dropped = (lost_w | (_BITS & ~_BITS[:, None] & ~kept_a)).any(axis=2)
    # Which masks there are in each block, of weights and of activations: every one of the former meets every one of the latter.
    here_w, here_a = ((masks[..., None] == _MASKS).any(axis=0).reshape(-1, len(_MASKS)) for masks in (w_masks, a_masks))
    met = here_w.T.astype(np.int64) @ here_a.astype(np.int64) > 0
    return OVERLAP * bool((met & overlap).any()) | DROPPED * bool((met & dropped).any())
