"""NVFP4 groups from binary32 numbers and the choice of refinements, by exact comparisons, bit for bit (docs/ppu.md)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.autofp6 import Step
from model.formats import E2M1, E4M3, scale_exponent, scale_significand
from model.vmac import GROUP, SUBGROUP, SUBGROUPS, check_choice

__all__ = [
    "ERROR_BITS",
    "LARGEST",
    "MIDPOINTS",
    "POINT",
    "Groups",
    "aligned_threshold",
    "quantise",
    "scale_bytes",
]

POINT = 8
"""Fraction bits of elements in units of ``2**(E - 10)``, E the exponent of the group's scale."""

INTEGER = 7
"""Integer bits of such elements: enough unless the scale is clamped."""

RESIDUE = 4
"""Integer bits of what rounding leaves of an element: enough unless the scale is clamped."""

ERROR_BITS = 2 * (RESIDUE + POINT) + 2
"""Bits of a subgroup's squared error, in units of ``2**(2·(E - 10 - POINT))``."""

LARGEST = 0x7F7FFFFF
"""The largest finite binary32 number, which stands for infinity and NaN."""

MIDPOINTS = tuple(int(4 * m) for m in (E2M1.magnitudes[1:].astype(float) + E2M1.magnitudes[:-1]) / 2)
"""Four times what lies in the middle between neighbouring E2M1 magnitudes: 1 3 5 7 10 14 20."""

_DOUBLED = (2 * E2M1.magnitudes).astype(np.int64)
_FRACTION, _BIAS = 23, 127
# E4M3's smallest exponent, and that of a unit of its significand when the exponent field is 0.
_LEAST = 1 - E4M3.bias
_UNIT = E4M3.bias + E4M3.mantissa_bits


@dataclass(frozen=True)
class Groups:
    """N groups of 16 elements.

    Attributes
    ----------
    codes : ndarray of uint8, shape (N, 16)
        E2M1 codes.
    scales : ndarray of uint8, shape (N,)
        E4M3 bytes.
    masks : ndarray of uint8, shape (N,)
        Bit g is set if subgroup g is refined.
    offsets : ndarray of int8, shape (N, 16)
        From -2 to 1; 0 in subgroups that are not refined.
    nonfinite, clipped : ndarray of bool, shape (N,)
        An element was NaN or infinite; the scale would have been larger than 448 (with a shared scale, the same for both groups).
    errors : ndarray of int64, shape (N, 4)
        Squared errors of subgroups in units of ``2**(2·(E - 10 - point))``.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    masks: NDArray[np.uint8]
    offsets: NDArray[np.int8]
    nonfinite: NDArray[np.bool_]
    clipped: NDArray[np.bool_]
    errors: NDArray[np.int64]


def _fields(magnitude: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return significand and exponent e of numbers ``significand · 2**(e - 150)``."""
    field = (magnitude >> np.uint32(_FRACTION)).astype(np.int64)
    hidden = (field > 0).astype(np.int64) << _FRACTION
    return (magnitude & np.uint32((1 << _FRACTION) - 1)).astype(np.int64) | hidden, np.maximum(field, 1)


def _shifted(value: NDArray[np.int64], distance: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Shift to the right; say where bits that are set were lost."""
    distance = np.clip(distance, 0, 62)
    kept = value >> distance
    return kept, kept << distance != value


def scale_bytes(largest: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Round a sixth of finite binary32 magnitudes to E4M3, to nearest even, once.

    Parameters
    ----------
    largest : ndarray of uint32
        Patterns without sign.

    Returns
    -------
    bytes : ndarray of uint8
        At most 0x7E.
    clipped : ndarray of bool
        Rounding would have given more.
    """
    significand, exponent = _fields(largest)
    # The scale's binade: a sixth of 1.5·2**k and above is in [2**(k - 2), 2**(k - 1)), of less in the one below.
    binade = exponent - _BIAS - 3 + (significand >= 3 << _FRACTION - 1)
    binade = np.maximum(binade, _LEAST)
    # In eighths of the binade, times six: below 96.
    distance = _BIAS + _FRACTION - exponent - E4M3.mantissa_bits + binade
    sixfold, sticky = _shifted(significand, distance)
    # Between n and n + 1 lies 3·(2n + 1) / 6.
    quotient, rest = sixfold // 6, sixfold % 6
    up = (rest > 3) | ((rest == 3) & (sticky | (quotient & 1 == 1)))
    code = (binade - _LEAST << E4M3.mantissa_bits) + quotient + up
    return np.minimum(code, E4M3.max_code).astype(np.uint8), code > E4M3.max_code


def aligned_threshold(threshold: int, scales: NDArray[np.uint8], point: int = POINT) -> NDArray[np.int64]:
    """Return a binary32 threshold in the units of each group's errors, rounded down; what is too large becomes the largest error.

    Parameters
    ----------
    threshold : int
        Pattern; the sign is not looked at, and NaN is larger than everything.
    scales : ndarray of uint8
    point : int
        Fraction bits of elements.
    """
    significand, exponent = _fields(np.array(threshold & 0x7FFFFFFF, np.uint32))
    left = exponent - (_BIAS + _FRACTION) + 2 * (_UNIT + point) - 2 * scale_exponent(scales)
    most = (1 << ERROR_BITS + 2 * (point - POINT)) - 1
    value = np.where(left >= 0, significand << np.clip(left, 0, 38), significand >> np.clip(-left, 0, 62))
    return np.minimum(value, most)


def quantise(
    numbers: ArrayLike,
    *,
    shared: bool = False,
    refine: bool = False,
    threshold: int = 0,
    weight_masks: NDArray[np.uint8] | None = None,
    slots: int = 2,
    step: Step = "fixed",
    point: int = POINT,
) -> Groups:
    """Quantise groups of 16 numbers to NVFP4 and choose what is refined.

    The scale is ``B = RNE_E4M3(largest / 6)``, at most 448; an element's code is the one nearest to x/B, the even one of two, compared exactly.
    With B = 0 all codes are 0 and nothing is refined. NaN and infinity count as the largest finite number of their sign.

    Parameters
    ----------
    numbers : array of uint32, shape (N, 16)
        Binary32 patterns, in units of the tensor's scale T.
    shared : bool
        One scale for two groups each; N is even.
    refine : bool
        Choose subgroups whose squared error is above the threshold and which the weight leaves free: those of largest error, lowest index first on
        ties, at most ``slots - |M_W|``.
    threshold : int
        Pattern of a binary32 number: ``4·τ·ms`` in units of T².
    weight_masks : ndarray of uint8, shape (N,), optional
        M_W of each group, bit g for subgroup g; none by default.
    slots : int
        1 to 4.
    step : {"fixed", "exponent"}
        How much an offset of 1 is: an eighth, or an eighth of the code's power of two.
    point : int
        Fraction bits with which errors are computed, 4 to 12; the hardware's by default.

    Raises
    ------
    ValueError
        A shape or parameter is out of its range.

    Examples
    --------
    >>> x = np.array([[2.76, -0.62, 4.24, -2.02] + [6.0] * 12], np.float32)
    >>> groups = quantise(x.view(np.uint32), refine=True)
    >>> groups.scales.tolist(), groups.masks.tolist(), groups.offsets[0, :4].tolist()
    ([56], [1], [-2, -1, 1, 0])
    """
    bits = np.asarray(numbers, np.uint32)
    check_choice("step", step, ("fixed", "exponent"))
    if bits.ndim != 2 or bits.shape[1] != GROUP:
        raise ValueError(f"numbers must have shape (N, {GROUP}), not {bits.shape}")
    count = len(bits)
    if shared and count % 2:
        raise ValueError(f"numbers must be an even number of groups to share scales, not {count}")
    if not 1 <= slots <= SUBGROUPS:
        raise ValueError(f"slots must be from 1 to {SUBGROUPS}, not {slots}")
    if not 4 <= point <= 12:
        raise ValueError(f"point must be from 4 to 12, not {point}")
    taken = np.zeros(count, np.uint8) if weight_masks is None else np.asarray(weight_masks, np.uint8)
    if taken.shape != (count,):
        raise ValueError(f"weight_masks must have shape {(count,)}, not {taken.shape}")

    magnitude = bits & np.uint32(0x7FFFFFFF)
    nonfinite = np.asarray((magnitude > LARGEST).any(axis=1))
    magnitude = np.minimum(magnitude, np.uint32(LARGEST))
    largest = magnitude.max(axis=1)
    if shared:
        largest = np.repeat(largest.reshape(-1, 2).max(axis=1), 2)
    scales, clipped = scale_bytes(largest)
    m, e = scale_significand(scales)[:, None], scale_exponent(scales)[:, None]

    # Elements in units of 2**(E - 10): rounded down, and whether that lost anything.
    significand, exponent = _fields(magnitude)
    distance = _BIAS + _FRACTION - _UNIT - point + e - exponent
    value, lost = _shifted(significand, distance)
    beyond = distance < _FRACTION + 1 - INTEGER - point
    value, lost = np.where(beyond, (1 << INTEGER + point) - 1, value), lost | beyond
    quarters = value >> point - 2
    more = lost | (value & ((1 << point - 2) - 1) != 0)
    level = np.zeros(bits.shape, np.int64)
    for code, middle in enumerate(MIDPOINTS):
        above = quarters >= middle * m
        # On the middle itself the even one of the two codes is taken.
        level += above if code % 2 else above & (more | (quarters != middle * m))
    live = scales != 0
    codes = (level | (bits >> np.uint32(31)).astype(np.int64) << 3) * live[:, None]

    rest = value - (_DOUBLED[level] * m << point - 1)
    residue = np.minimum(np.abs(rest), (1 << RESIDUE + point) - 1)
    errors = (residue**2).reshape(count, SUBGROUPS, SUBGROUP).sum(axis=2)

    masks = np.zeros(count, np.uint8)
    offsets = np.zeros(bits.shape, np.int64)
    if refine:
        free = (taken[:, None] >> np.arange(SUBGROUPS) & 1) == 0
        passes = free & live[:, None] & (errors > aligned_threshold(threshold, scales, point)[:, None])
        room = slots - (~free).sum(axis=1)
        rank = np.zeros(errors.shape, np.int64)
        for i in range(SUBGROUPS):
            for j in range(SUBGROUPS):
                if i != j:
                    before = errors[:, j] >= errors[:, i] if j < i else errors[:, j] > errors[:, i]
                    rank[:, i] += passes[:, j] & before
        chosen = passes & (rank < room[:, None])
        masks = (chosen << np.arange(SUBGROUPS)).sum(axis=1).astype(np.uint8)
        half = m << point - 4
        if step == "exponent":
            half = half << np.maximum((level >> E2M1.mantissa_bits) - E2M1.bias, 0)
        # Exactly: what rounding down lost makes an element larger than its value says.
        over, under = (rest > half) | ((rest == half) & lost), rest < -half
        far_over, far_under = (rest > 3 * half) | ((rest == 3 * half) & lost), rest < -3 * half
        positive = over.astype(np.int64) - under - far_under
        negative = under.astype(np.int64) - over - far_over
        offsets = np.where(codes >> 3 == 1, negative, positive) * np.repeat(chosen, SUBGROUP, axis=1)
    return Groups(codes.astype(np.uint8), scales, masks, offsets.astype(np.int8), nonfinite, clipped, errors)
