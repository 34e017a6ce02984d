"""Weight encoder: from NVFP4 rows to the packed pairs and scales that a vMAC takes (paper, section 6.2; docs/formats.md)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from model.autofp2 import pair_digits, pair_scales, remap
from model.packed_pair import nvfp4_digits, pack
from model.vmac import GROUP, check_choice, check_integer, check_lanes

__all__ = ["WeightEncoderConfig", "encode"]


@dataclass(frozen=True)
class WeightEncoderConfig:
    """Parameters of a weight encoder, for model and hardware alike.

    Attributes
    ----------
    lanes : int
        Elements of a weight vector, a positive multiple of 32.
    scaling : {"pair", "group"}
        AutoFP2 scales, as in the vMAC that takes the pairs.
    registered : bool
        Whether the hardware's outputs are registers (latency 1) or combinational (latency 0).
    """

    lanes: int = 32
    scaling: Literal["pair", "group"] = "pair"
    registered: bool = False

    def __post_init__(self) -> None:
        check_integer("lanes", self.lanes)
        check_lanes(self.lanes)
        check_choice("scaling", self.scaling, ("pair", "group"))
        if not isinstance(self.registered, bool):
            raise TypeError(f"registered must be true or false, not {self.registered!r}")

    @property
    def blocks(self) -> int:
        """Groups of 16 lanes."""
        return self.lanes // GROUP

    @property
    def w_scale_bytes(self) -> int:
        """Scales that come out: one per block, or one per block and row."""
        return self.blocks * (2 if self.scaling == "group" else 1)


def encode(
    mode_nvfp4: NDArray[np.bool_],
    row_even: NDArray[np.uint8],
    row_odd: NDArray[np.uint8],
    scale_even: NDArray[np.uint8],
    scale_odd: NDArray[np.uint8],
    scaling: Literal["pair", "group"] = "pair",
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Encode N weight vectors.

    Parameters
    ----------
    mode_nvfp4 : ndarray of bool, shape (N,)
        NVFP4 and AutoFP6 rather than AutoFP2; then the odd row is ignored.
    row_even, row_odd : ndarray of uint8, shape (N, lanes)
        E2M1 codes of two adjacent output rows.
    scale_even, scale_odd : ndarray of uint8, shape (N, lanes / 16)
        Their scale bytes.
    scaling : {"pair", "group"}
        AutoFP2 scales.

    Returns
    -------
    w : ndarray of uint8, shape (N, lanes)
        Packed pairs.
    w_scale : ndarray of uint8, shape (N, lanes / 16), twice that with group scaling
        NVFP4: the even row's scales (and, with group scaling, zeros behind them). AutoFP2, pair: for each 32 lanes the pair scale of
        the even row, then of the odd row; group: the even row's scales, then the odd row's.

    Raises
    ------
    ValueError
        Shapes do not match.
    """
    mode = np.asarray(mode_nvfp4, dtype=bool)[:, None]
    rows, lanes = row_even.shape
    check_lanes(lanes)
    shapes = {"row_odd": (row_odd, (rows, lanes)), "mode_nvfp4": (mode, (rows, 1))}
    shapes |= {"scale_even": (scale_even, (rows, lanes // GROUP)), "scale_odd": (scale_odd, (rows, lanes // GROUP))}
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, not {array.shape}")
    check_choice("scaling", scaling, ("pair", "group"))
    whole = pack(*nvfp4_digits(row_even))
    if scaling == "group":
        split = pack(remap(row_even), remap(row_odd))
        split_scale = np.concatenate([scale_even, scale_odd], axis=1)
        whole_scale = np.concatenate([scale_even, np.zeros_like(scale_odd)], axis=1)
    else:
        split = pack(pair_digits(row_even, scale_even), pair_digits(row_odd, scale_odd))
        split_scale = np.stack([pair_scales(scale_even), pair_scales(scale_odd)], axis=-1).reshape(rows, -1)
        whole_scale = scale_even
    return np.where(mode, whole, split), np.where(mode, whole_scale, split_scale)
