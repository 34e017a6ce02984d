"""Byte layouts of the memory image: codes, masks and offsets (paper, appendix D.3; docs/formats.md)."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_masks", "pack_nibbles", "pack_offsets", "unpack_masks", "unpack_nibbles", "unpack_offsets"]


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack 4-bit codes two to a byte, element 2i in the low nibble; shape (…, K) to (…, K / 2).

    Raises
    ------
    ValueError
        K is odd, or a code does not fit 4 bits.

    Examples
    --------
    >>> [hex(b) for b in pack_nibbles(np.array([0, 1, 2, 3], np.uint8))]
    ['0x10', '0x32']
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes must have an even number of elements along K, not {codes.shape[-1]}")
    if codes.size:
        low, high = int(codes.min()), int(codes.max())
        if low < 0 or high > 15:
            raise ValueError(f"codes must fit 4 bits, not {low if low < 0 else high:#x}")
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the codes of :func:`pack_nibbles`, shape (…, B) to (…, 2·B)."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def pack_masks(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Pack subgroup masks, two groups to a byte, the even group in the low nibble; shape (…, S) to (…, S / 8).

    Bit g of a nibble is the subgroup of elements 4g to 4g + 3.

    Raises
    ------
    ValueError
        S is not a multiple of 8, that is an even number of groups.
    """
    if mask.shape[-1] % 8:
        raise ValueError(f"mask must hold a multiple of 8 subgroups, not {mask.shape[-1]}")
    return np.packbits(mask, axis=-1, bitorder="little")


def unpack_masks(packed: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return the masks of :func:`pack_masks`, shape (…, B) to (…, 8·B)."""
    return np.unpackbits(packed, axis=-1, bitorder="little").astype(bool)


def _check_mask(mask: NDArray[np.bool_]) -> None:
    # Integers would select subgroups by their index.
    if mask.dtype != np.bool_:
        raise TypeError(f"mask must be bool, not {mask.dtype}")


def pack_offsets(offsets: NDArray[np.int8], mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Pack the 2-bit offsets of one row's refined subgroups, a byte each in group order, element 0 in bits 1:0.

    Parameters
    ----------
    offsets : ndarray of int8, shape (K,)
        From -2 to 1.
    mask : ndarray of bool, shape (K / 4,)

    Returns
    -------
    ndarray of uint8, shape (number of refined subgroups,)

    Raises
    ------
    TypeError
        ``mask`` is not bool.
    ValueError
        Shapes do not match, or an offset does not fit 2 bits.
    """
    _check_mask(mask)
    if offsets.shape != (4 * len(mask),):
        raise ValueError(f"offsets must have shape {(4 * len(mask),)}, not {offsets.shape}")
    if offsets.size and not -2 <= int(offsets.min()) <= int(offsets.max()) <= 1:
        raise ValueError(f"offsets must be from -2 to 1, not {int(offsets.min())} to {int(offsets.max())}")
    chosen = offsets.reshape(-1, 4)[mask].astype(np.uint8) & 3
    return (chosen << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)


def unpack_offsets(packed: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Return the offsets of :func:`pack_offsets`, shape (K,), 0 outside the mask.

    Raises
    ------
    TypeError
        ``mask`` is not bool.
    ValueError
        ``packed`` does not hold a byte for each refined subgroup.
    """
    _check_mask(mask)
    if packed.shape != (int(mask.sum()),):
        raise ValueError(
            f"packed must have shape {(int(mask.sum()),)}, a byte per refined subgroup, not {packed.shape}"
        )
    offsets = np.zeros((len(mask), 4), dtype=np.int8)
    offsets[mask] = ((packed[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).astype(np.int8) ^ 2) - 2
    return offsets.reshape(-1)
