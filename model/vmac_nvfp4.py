"""NVFP4-only baseline of the vector MAC: direct E2M1 products, same scaling and accumulation (docs/datapath.md)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.formats import is_nan_scale
from model.vmac import GROUP, LATENCY, Pipeline, VmacConfig, accumulate_exact, doubled_values, scaled

__all__ = ["NAN_SCALE", "Nvfp4Config", "vmac_nvfp4"]

NAN_SCALE = 1
"""The one status bit."""


@dataclass(frozen=True)
class Nvfp4Config:
    """Parameters of the NVFP4-only vector MAC; as in :class:`model.vmac.VmacConfig`, but both pipelines have the same latency."""

    lanes: int = 32
    pipeline: Pipeline = "compact"

    def __post_init__(self) -> None:
        self.as_vmac()

    def as_vmac(self) -> VmacConfig:
        """Return the vMAC without refinement whose NVFP4 mode this is."""
        return VmacConfig(lanes=self.lanes, refinement="none", pipeline=self.pipeline)

    @property
    def latency(self) -> int:
        """Cycles from a vector to its sum; nothing comes between trees and scalers, so ``fast`` has no cut more."""
        return LATENCY["compact"]

    @property
    def psum_delay(self) -> int:
        """Cycles from a vector to its partial sum."""
        return self.latency - 1

    @property
    def blocks(self) -> int:
        """Blocks of 16 lanes."""
        return self.lanes // GROUP

    @property
    def output_bits(self) -> int:
        """Bits of a block's dot product in quarters, signed."""
        return self.as_vmac().output_bits - 2


def vmac_nvfp4(
    config: Nvfp4Config,
    a: NDArray[np.uint8],
    w: NDArray[np.uint8],
    a_scale: NDArray[np.uint8],
    w_scale: NDArray[np.uint8],
    psum: NDArray[np.uint64],
) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Run N vectors of E2M1 codes through the baseline.

    Parameters
    ----------
    config : Nvfp4Config
    a, w : ndarray of uint8, shape (N, lanes)
        E2M1 codes.
    a_scale, w_scale : ndarray of uint8, shape (N, blocks)
        E4M3 bytes.
    psum : ndarray of uint64, shape (N,)

    Returns
    -------
    psum : ndarray of uint64, shape (N,)
        In units of 2⁻²² T_W·T_A.
    status : ndarray of uint8, shape (N,)
        1 where a vector has a scale byte that is no scale.

    Raises
    ------
    ValueError
        Shapes do not match ``config``.
    """
    rows = len(psum)
    expected = {
        "a": (a, config.lanes),
        "w": (w, config.lanes),
        "a_scale": (a_scale, config.blocks),
        "w_scale": (w_scale, config.blocks),
    }
    for name, (array, width) in expected.items():
        if array.shape != (rows, width):
            raise ValueError(f"{name} must have shape {(rows, width)}, not {array.shape}")
    dot = (doubled_values(a) * doubled_values(w)).reshape(rows, config.blocks, GROUP).sum(axis=2)
    total = accumulate_exact(psum, scaled(4 * dot, w_scale, a_scale))
    bad = is_nan_scale(np.concatenate([a_scale, w_scale], axis=1)).any(axis=1)
    return total, np.asarray(bad).astype(np.uint8)
