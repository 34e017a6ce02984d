"""AutoFP2-only baseline of the vector MAC: two quinary dot products, same scaling and window (docs/datapath.md)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from model.vmac import ILLEGAL, Pipeline, Vectors, VmacConfig, vmac

__all__ = ["NAN_SCALE", "SATURATED", "AutoFp2Config", "vmac_autofp2"]

SATURATED, NAN_SCALE = 1, 2
"""Bits of ``status``."""


@dataclass(frozen=True)
class AutoFp2Config:
    """Parameters of the AutoFP2-only vector MAC; as in :class:`model.vmac.VmacConfig`."""

    lanes: int = 32
    scaling: Literal["pair", "group"] = "pair"
    window_shift: int = 24
    pipeline: Pipeline = "compact"

    def __post_init__(self) -> None:
        self.as_vmac()

    def as_vmac(self) -> VmacConfig:
        """Return the vMAC without refinement whose AutoFP2 mode this is."""
        return VmacConfig(
            lanes=self.lanes,
            refinement="none",
            scaling=self.scaling,
            window_shift=self.window_shift,
            pipeline=self.pipeline,
        )

    @property
    def latency(self) -> int:
        """Cycles from a vector to its sum."""
        return self.as_vmac().latency

    @property
    def psum_delay(self) -> int:
        """Cycles from a vector to its partial sum."""
        return self.as_vmac().psum_delay

    @property
    def blocks(self) -> int:
        """Blocks of 16 lanes."""
        return self.as_vmac().blocks

    @property
    def w_scale_bytes(self) -> int:
        """Weight scales of a vector."""
        return self.as_vmac().w_scale_bytes


def vmac_autofp2(
    config: AutoFp2Config,
    a: NDArray[np.uint8],
    w: NDArray[np.uint8],
    a_scale: NDArray[np.uint8],
    w_scale: NDArray[np.uint8],
    psum: NDArray[np.uint64],
) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Run N vectors through the baseline; arrays as in :class:`model.vmac.Vectors`.

    Returns
    -------
    psum : ndarray of uint64, shape (N,)
        ``{odd row, even row}``.
    status : ndarray of uint8, shape (N,)
        ``{nan_scale, saturated}`` raised by each vector.
    """
    rows = len(psum)
    no = np.zeros(rows, dtype=bool)
    vectors = Vectors(no, no, a, w, a_scale, w_scale, np.zeros((rows, 0), np.uint64), psum)
    result = vmac(config.as_vmac(), vectors)
    return result.psum, result.status // (2 * ILLEGAL)
