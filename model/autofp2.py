"""AutoFP2: quinary digits derived from NVFP4 weights (paper, section 3.2; docs/formats.md)."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.block_scaled import BlockScaled
from model.formats import E2M1, E4M3, scale_exponent, scale_significand

__all__ = ["C", "dequantize", "digits", "pair_digits", "pair_scales", "remap"]

C = 2
"""The constant that AutoFP2 values carry: an element is ``C · T · B · digit``."""

_REMAP = np.array([0, 0, 1, 1, 1, 1, 2, 2], dtype=np.int8)
_DOUBLED = (2 * E2M1.magnitudes).astype(np.int64)
_GROUPS = 2


def remap(codes: ArrayLike) -> NDArray[np.int8]:
    """Return the digit of every E2M1 code under its own scale: magnitude ``{e1·e0, e1⊕e0}``, sign kept.

    Parameters
    ----------
    codes : array_like of int
        E2M1 codes, any shape.

    Examples
    --------
    >>> remap([0, 1, 2, 3, 4, 5, 6, 7, 15]).tolist()
    [0, 0, 1, 1, 1, 1, 2, 2, -2]
    """
    given = np.asarray(codes)
    return _REMAP[given & 7] * np.where(given & 8, -1, 1).astype(np.int8)


def pair_scales(scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the shared scale byte of each pair of adjacent groups: the larger one, shape (…, G) to (…, G / 2).

    Compared without the sign bit, which is set if either byte has it, so that a bad scale stays visible.
    """
    pairs = _paired(scales)
    return (pairs & 0x7F).max(axis=-1) | (pairs & 0x80).max(axis=-1)


def pair_digits(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Re-derive the digits of each group against the scale B_p that it shares with its neighbour.

    Magnitude 0 if ``|q|·B < B_p``, 2 if ``|q|·B ≥ 3.5·B_p``, else 1; a group that has the larger scale keeps :func:`remap`.

    Parameters
    ----------
    codes : ndarray of uint8, shape (…, 16·G)
        E2M1 codes; G is even.
    scales : ndarray of uint8, shape (…, G)
        Scale bytes; read without the sign bit.

    Returns
    -------
    ndarray of int8, shape (…, 16·G)
    """
    pairs = _paired(scales) & 0x7F
    shared = pairs.max(axis=-1, keepdims=True)
    # Scales as integers in units of 2**-9: exact, and at most 15·2**14.
    own = scale_significand(pairs) << (scale_exponent(pairs) - 1)
    whole = (scale_significand(shared) << (scale_exponent(shared) - 1))[..., None]
    grouped = codes.reshape(*pairs.shape, -1)
    scaled = _DOUBLED[grouped & 7] * own[..., None]
    magnitude = (scaled >= 2 * whole).astype(np.int8) + (scaled >= 7 * whole)
    magnitude = np.where((pairs == shared)[..., None], _REMAP[grouped & 7], magnitude)
    return (magnitude * np.where(grouped & 8, -1, 1)).astype(np.int8).reshape(codes.shape)


def _paired(scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if scales.shape[-1] % _GROUPS:
        raise ValueError(f"scales must come in pairs along the last axis, not {scales.shape[-1]}")
    return scales.reshape(*scales.shape[:-1], -1, _GROUPS)


def digits(
    weights: BlockScaled, scaling: Literal["pair", "group"] = "pair"
) -> tuple[NDArray[np.int8], NDArray[np.uint8]]:
    """Return AutoFP2 digits of NVFP4 weights and the scale byte of every group of 16.

    Parameters
    ----------
    weights : BlockScaled
        NVFP4, codes of shape (…, Kp).
    scaling : {"pair", "group"}
        One scale per two groups, digits re-derived; or each group's own scale.

    Returns
    -------
    digits : ndarray of int8, shape (…, Kp)
    scales : ndarray of uint8, shape (…, Kp / 16)

    Raises
    ------
    ValueError
        ``weights`` is not NVFP4, or ``scaling`` is unknown.
    """
    if weights.element != E2M1:
        raise ValueError(f"weights must be NVFP4, not blocks of {weights.element.name}")
    if scaling == "group":
        return remap(weights.codes), weights.scales
    if scaling != "pair":
        raise ValueError(f"scaling must be pair or group, not {scaling!r}")
    return pair_digits(weights.codes, weights.scales), np.repeat(pair_scales(weights.scales), _GROUPS, axis=-1)


def dequantize(weights: BlockScaled, scaling: Literal["pair", "group"] = "pair", c: float = C) -> NDArray[np.float32]:
    """Return the values ``c · T · B · digit``, cropped to the true length, float32."""
    values, scales = digits(weights, scaling)
    per_element = np.repeat(E4M3.decode(scales), weights.group, axis=-1)
    return (values * per_element * np.float32(weights.tensor_scale) * np.float32(c))[..., : weights.length].astype(
        np.float32
    )
