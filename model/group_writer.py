"""Group writer: the bytes that a tile's NVFP4 groups are written as, and where (docs/group_writer.md)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.block_scaled import GROUP, PAD
from model.memory import pack_masks, pack_nibbles, pack_offsets, unpack_masks
from model.quantiser import Groups

__all__ = ["GroupTile", "writes"]


@dataclass(frozen=True)
class GroupTile:
    """What the group writer is told of a tile.

    Attributes
    ----------
    codes, scales, masks, offsets : int
        Byte addresses: of the tile's first codes, scales and masks, and of where the offsets of its first row begin, those of tiles before
        included.
    codes_stride, scales_stride, masks_stride, offsets_stride : int
        Bytes from a row to the next.
    rows, outputs : int
        Rows, and outputs of a row in this tile; with either 0 nothing is written.
    refine : bool
        Masks and offsets are written too.
    first : bool
        The tile begins its rows: their offsets begin at ``offsets``, not behind those of tiles before.
    """

    codes: int
    scales: int
    masks: int
    offsets: int
    codes_stride: int
    scales_stride: int
    masks_stride: int
    offsets_stride: int
    rows: int
    outputs: int
    refine: bool = True
    first: bool = True

    @property
    def pairs(self) -> int:
        """Pairs of groups of a row, the last one filled up with zeros."""
        return -(-self.outputs // PAD)


def writes(
    tile: GroupTile, groups: Groups, pointers: NDArray[np.int64] | None = None
) -> tuple[list[tuple[int, bytes]], NDArray[np.int64]]:
    """Return the requests of a tile, as addresses and bytes in order, and how many bytes of offsets its rows have then.

    Per row: codes, scales, and with ``refine`` masks and offsets; no request for no offsets.

    Parameters
    ----------
    tile : GroupTile
    groups : Groups
        ``rows · 2 · pairs`` of them, row after row.
    pointers : ndarray of int64, shape (rows,), optional
        What this returned for the tile before on the same rows, unless this one is their first.

    Raises
    ------
    ValueError
        Groups or pointers are too few or too many.
    """
    rows, per_row = (tile.rows, 2 * tile.pairs) if tile.outputs else (0, 0)
    if len(groups.scales) != rows * per_row:
        raise ValueError(f"groups must be {rows} rows of {per_row}, not {len(groups.scales)} groups")
    reached = np.zeros(tile.rows, np.int64)
    if not tile.first:
        if pointers is None or pointers.shape != (tile.rows,):
            shape = None if pointers is None else pointers.shape
            raise ValueError(f"pointers must have shape {(tile.rows,)}, not {shape}")
        reached[:] = pointers
    if not rows:
        return [], reached
    codes = pack_nibbles(groups.codes.reshape(rows, -1))
    scales = groups.scales.reshape(rows, -1)
    chosen = unpack_masks(groups.masks[:, None]).reshape(rows, -1, 8)[..., : GROUP // 4].reshape(rows, -1)
    offsets = groups.offsets.reshape(rows, -1)
    found = []
    for k in range(rows):
        found.append((tile.codes + k * tile.codes_stride, codes[k].tobytes()))
        found.append((tile.scales + k * tile.scales_stride, scales[k].tobytes()))
        if not tile.refine:
            continue
        found.append((tile.masks + k * tile.masks_stride, pack_masks(chosen[k]).tobytes()))
        octets = pack_offsets(offsets[k], chosen[k]).tobytes()
        if octets:
            found.append((tile.offsets + k * tile.offsets_stride + int(reached[k]), octets))
        reached[k] += len(octets)
    return found, reached
