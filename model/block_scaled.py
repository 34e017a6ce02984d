"""Block-scaled tensors: NVFP4 and its E2M3 sibling FP6g (paper, equations 2 and 3; docs/formats.md)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.formats import CHUNK, E2M1, E4M3, MiniFloat, is_nan_scale

__all__ = ["GROUP", "PAD", "BlockScaled", "chunks", "dequantize", "effective_scales", "quantize", "tensor_scale_of"]

GROUP = 16
"""Elements that share a scale."""

PAD = 32
"""Reduction lengths are padded with zeros to a multiple of this."""


@dataclass(frozen=True)
class BlockScaled:
    """A tensor in groups along its last axis, an element being ``tensor_scale · scale · code``.

    Attributes
    ----------
    codes : ndarray of uint8, shape (…, Kp)
        Element codes; Kp is the reduction length padded to a multiple of 32.
    scales : ndarray of uint8, shape (…, Kp / 16)
        E4M3 bytes.
    tensor_scale : numpy.float32
        T, positive and finite.
    length : int
        True reduction length K ≤ Kp.
    element : MiniFloat
        E2M1 for NVFP4, E2M3 for FP6g.

    Raises
    ------
    ValueError
        Shapes do not match, a scale byte is no scale, a code is out of range or T is not positive.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    tensor_scale: np.float32
    length: int
    element: MiniFloat = E2M1

    def __post_init__(self) -> None:
        padded = self.codes.shape[-1]
        if padded % PAD:
            raise ValueError(f"codes must have a multiple of {PAD} elements along K, not {padded}")
        if not 0 <= padded - self.length < PAD:
            raise ValueError(f"length must be from {padded - PAD + 1} to {padded}, not {self.length}")
        expected = (*self.codes.shape[:-1], padded // GROUP)
        if self.scales.shape != expected:
            raise ValueError(f"scales must have shape {expected}, not {self.scales.shape}")
        if self.codes.size and int(self.codes.max()) >= 2 * self.element.sign_mask:
            raise ValueError(f"codes must be {self.element.name} codes, not {int(self.codes.max()):#04x}")
        bad = is_nan_scale(self.scales)
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"scales must be from 0x00 to 0x7e, not {int(self.scales[index]):#04x} at index {index}")
        if not (np.isfinite(self.tensor_scale) and self.tensor_scale > 0):
            raise ValueError(f"tensor_scale must be positive and finite, not {self.tensor_scale}")

    @property
    def group(self) -> int:
        """Elements of a group."""
        return GROUP


def chunks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices that cut ``rows`` rows of ``width`` elements into pieces that stay in the cache."""
    step = max(CHUNK // width, 1)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _group_maxima(groups: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the largest magnitude of each row; NaN or infinity if the row has one."""
    maxima = np.empty(len(groups), dtype=np.float32)
    for part in chunks(*groups.shape):
        # Transposed, two numbers at a time, the reduction runs over long rows; bit patterns order magnitudes as their values do.
        columns = np.ascontiguousarray(groups[part].view(np.uint64).T).view(np.uint32)
        columns &= np.uint32(0x7FFFFFFF)
        largest = columns.max(axis=0)
        np.maximum(largest[0::2], largest[1::2], out=maxima[part].view(np.uint32))
    return maxima


def effective_scales(tensor: BlockScaled) -> NDArray[np.float32]:
    """Return ``T · B`` of every group, float32, shape (…, Kp / 16)."""
    return np.float32(tensor.tensor_scale) * E4M3.decode(tensor.scales)


def tensor_scale_of(largest: np.float32, element: MiniFloat = E2M1) -> np.float32:
    """Return T of a tensor whose largest magnitude is ``largest``; 1 if that is zero."""
    if largest == 0:
        return np.float32(1)
    t = largest / (np.float32(element.max) * np.float32(E4M3.max))
    # A tensor of float32 subnormals: T may not become zero.
    return max(np.float32(t), np.finfo(np.float32).smallest_subnormal)


def quantize(
    x: ArrayLike, element: MiniFloat = E2M1, *, tensor_scale: float | None = None, shared_groups: int = 1
) -> BlockScaled:
    """Quantise to NVFP4 (or FP6g), all arithmetic in float32 and in the order of equations 2 and 3.

    Parameters
    ----------
    x : array_like, shape (…, K)
        Taken as float32; K ≥ 1 is padded with zeros to a multiple of 32.
    element : MiniFloat
        E2M1 or E2M3.
    tensor_scale : float, optional
        A T that is given rather than measured; values beyond its range saturate.
    shared_groups : int
        1, or 2 for one scale per 32 elements, as activations of an AutoFP2 layer need; both bytes are then equal.

    Returns
    -------
    BlockScaled

    Raises
    ------
    ValueError
        A value is NaN or infinite (names the first index), K is 0, or a parameter is outside its range.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros(32, np.float32)
    >>> x[0] = 2688
    >>> t = quantize(x)
    >>> float(t.tensor_scale), t.scales.tolist(), int(t.codes[0])
    (1.0, [126, 0], 7)
    """
    values = np.asarray(x, dtype=np.float32)
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"x must have at least one element along its last axis, not shape {values.shape}")
    if shared_groups not in (1, 2):
        raise ValueError(f"shared_groups must be 1 or 2, not {shared_groups!r}")
    length = values.shape[-1]
    padding = -length % PAD
    if padding:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], padding), np.float32)], axis=-1)
    groups = np.ascontiguousarray(values).reshape(-1, GROUP * shared_groups)
    amax = _group_maxima(groups)
    if not np.isfinite(amax).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise ValueError(f"x must be finite, not {values[index]} at index {index}")

    limit = np.float32(element.max)
    if tensor_scale is None:
        t = tensor_scale_of(amax.max(initial=np.float32(0)), element)
    else:
        t = np.float32(tensor_scale)
        if not (np.isfinite(t) and t > 0):
            raise ValueError(f"tensor_scale must be positive and finite, not {tensor_scale}")
    t = np.float32(t)
    with np.errstate(over="ignore"):
        ratios = amax / (limit * t)
    scales = E4M3.encode(np.minimum(ratios, np.float32(E4M3.max)))
    steps = t * E4M3.decode(scales)
    # A scale of zero, or one that T makes vanish, leaves only zeros.
    steps[(scales == 0) | (steps == 0)] = np.inf

    codes = np.empty(groups.shape, dtype=np.uint8)
    for part in chunks(len(groups), groups.shape[1]):
        with np.errstate(over="ignore"):
            ratios = groups[part].reshape(-1) / np.repeat(steps[part], groups.shape[1])
        element.encode_bits(ratios.view(np.uint32), codes[part].reshape(-1))
    codes[scales == 0] = 0
    return BlockScaled(
        codes.reshape(values.shape),
        np.repeat(scales, shared_groups).reshape(*values.shape[:-1], values.shape[-1] // GROUP),
        t,
        length,
        element,
    )


def dequantize(tensor: BlockScaled) -> NDArray[np.float32]:
    """Return the float32 values ``T · B · q``, shape (…, K), cropped to the true length."""
    steps = np.repeat(effective_scales(tensor), GROUP, axis=-1)
    return (tensor.element.decode(tensor.codes) * steps)[..., : tensor.length]
