"""Output stage: the bytes that a tile's sums are written as, and where (docs/output.md)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.array import ArrayConfig
from model.fp32 import scaled

__all__ = ["OutputTile", "writes"]


@dataclass(frozen=True)
class OutputTile:
    """What the output stage is told of a tile.

    Attributes
    ----------
    address : int
        Byte address of the tile's first output.
    stride : int
        Bytes from a row of outputs to the next.
    rows : int
        Rows that are written, up to the array's rows · M.
    outputs : int
        Outputs of a row that are written, up to columns · N, twice as many in AutoFP2 mode.
    mode_nvfp4 : bool
        One 64-bit sum per weight vector (NVFP4, AutoFP6) or two of 32 bits (AutoFP2).
    fp32 : bool
        Sums are converted to binary32 and multiplied by ``scale``; otherwise they are written as they are.
    scale : int
        Bit pattern of a binary32 number.
    """

    address: int
    stride: int
    rows: int
    outputs: int
    mode_nvfp4: bool
    fp32: bool
    scale: int = 0x3F800000

    @property
    def output_bytes(self) -> int:
        """Bytes of an output: 8 for a sum of 64 bits, otherwise 4."""
        return 8 if self.mode_nvfp4 and not self.fp32 else 4


def writes(config: ArrayConfig, tile: OutputTile, psum: NDArray[np.uint64]) -> list[tuple[int, bytes]]:
    """Return the rows that are written, as their addresses and little-endian bytes, in order.

    Parameters
    ----------
    config : ArrayConfig
    tile : OutputTile
    psum : ndarray of uint64, shape (columns, rows, N, M)
        Sums as :func:`model.array.run` gives them.

    Raises
    ------
    ValueError
        The sums are not those of this array, or the tile asks for more than they are.
    """
    columns, rows, n, m = psum.shape
    if (columns, rows) != (config.columns, config.rows):
        raise ValueError(f"psum must be of {config.columns} columns and {config.rows} rows, not {columns} and {rows}")
    # A row of outputs runs through the columns first, then through their weight vectors.
    sums = np.ascontiguousarray(psum.transpose(1, 3, 2, 0)).reshape(rows * m, n * columns).astype("<u8")
    outputs = sums.view("<i8" if tile.mode_nvfp4 else "<i4")
    for name, most in (("rows", outputs.shape[0]), ("outputs", outputs.shape[1])):
        value = getattr(tile, name)
        if not 1 <= value <= most:
            raise ValueError(f"{name} must be from 1 to {most}, not {value}")
    outputs = outputs[: tile.rows, : tile.outputs]
    written = scaled(outputs, np.uint32(tile.scale)).astype("<u4") if tile.fp32 else outputs
    return [(tile.address + k * tile.stride, row.tobytes()) for k, row in enumerate(written)]
