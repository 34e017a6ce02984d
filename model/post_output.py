"""Outputs of a whole product through the post-processing unit, tile by tile as the accelerator does it (docs/ppu.md)."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from model.accelerator import AcceleratorConfig, Mode
from model.autofp6 import Refined
from model.block_scaled import GROUP, PAD, BlockScaled
from model.ppu import Job, Report, Sums, run
from model.vmac import SUBGROUPS

__all__ = ["Processed", "process"]


@dataclass(frozen=True)
class Processed:
    """What comes of a product's sums.

    Attributes
    ----------
    numbers : ndarray of float32 [M, N], or None
    codes : ndarray of uint8 [M, Np], or None
        Np is N up to the next multiple of 32.
    scales, masks : ndarray of uint8 [M, Np / 16], or None
    offsets : ndarray of int8 [M, Np], or None
    report : Report or None
    status : int
        See :class:`model.ppu.Result`.
    """

    numbers: NDArray[np.float32] | None
    codes: NDArray[np.uint8] | None
    scales: NDArray[np.uint8] | None
    masks: NDArray[np.uint8] | None
    offsets: NDArray[np.int8] | None
    report: Report | None
    status: int

    def tensor(self, tensor_scale: float, length: int, *, refined: bool, step: str = "fixed") -> BlockScaled | Refined:
        """Return the groups as a tensor of the next layer.

        Raises
        ------
        ValueError
            There are no groups.
        """
        if self.codes is None or self.scales is None or self.masks is None or self.offsets is None:
            raise ValueError("groups must have been made")
        base = BlockScaled(self.codes, self.scales, np.float32(tensor_scale), length)
        if not refined:
            return base
        mask = (self.masks[..., None] >> np.arange(SUBGROUPS) & 1 == 1).reshape(len(self.codes), -1)
        return Refined(base, mask, self.offsets, step="exponent" if step == "exponent" else "fixed")


def process(
    config: AcceleratorConfig,
    mode: Mode,
    tile_m: int,
    tile_n: int,
    job: Job,
    sums: NDArray[np.int64],
    *,
    residual: NDArray[np.float32] | None = None,
    previous: NDArray[np.float32] | None = None,
    weight_masks: NDArray[np.uint8] | None = None,
    totals: Sums | None = None,
) -> Processed:
    """Process the sums of a product, in the order of its tiles, which the sums of squares depend on.

    Parameters
    ----------
    config : AcceleratorConfig
    mode : Mode
    tile_m, tile_n : int
        See :class:`model.accelerator.Descriptor`.
    job : Job
        Of the whole product: ``begin`` counts with its first tile, ``report`` with its last.
    sums : ndarray of int64 [M, N]
    residual, previous : ndarray of float32 [M, N], optional
    weight_masks : ndarray of uint8 [Np / 16], optional
    totals : Sums, optional
        Running sums from the products before; they are updated.

    Raises
    ------
    ValueError
        As :func:`model.ppu.run`; or groups are wanted, and a tile ends in the middle of a pair of them.
    """
    m, n = sums.shape
    height, width = config.rows * tile_m, config.columns * tile_n << (mode == Mode.AUTOFP2)
    if job.groups and width % PAD and width < n:
        raise ValueError(f"tiles must be a multiple of {PAD} outputs wide or cover all {n}, not {width}")
    totals = Sums() if totals is None else totals
    padded = -(-n // PAD) * PAD
    numbers = np.zeros((m, n), np.uint32) if job.numbers else None
    codes, scales, masks = (np.zeros((m, padded // size), np.uint8) for size in (1, GROUP, GROUP))
    offsets = np.zeros((m, padded), np.int8)
    status, report = 0, None
    for top in range(0, m, height):
        rows = slice(top, top + height)
        for left in range(0, n, width):
            part = slice(left, left + width)
            first, last = not (top or left), top + height >= m and left + width >= n
            found = run(
                config.post,
                replace(job, begin=job.begin and first, report=job.report and last),
                sums[rows, part],
                residual=None if residual is None else _bits(residual[rows, part]),
                previous=None if previous is None else _bits(previous[rows, part]),
                weight_masks=None
                if weight_masks is None
                else weight_masks[left // GROUP : -(-min(left + width, n) // PAD) * (PAD // GROUP)],
                sums=totals,
            )
            status |= found.status
            report = found.report or report
            if numbers is not None and found.numbers is not None:
                numbers[rows, part] = found.numbers
            if found.groups is not None:
                count = len(sums[rows])
                wide = found.groups.codes.reshape(count, -1)
                codes[rows, left : left + wide.shape[1]] = wide
                offsets[rows, left : left + wide.shape[1]] = found.groups.offsets.reshape(count, -1)
                places = slice(left // GROUP, left // GROUP + wide.shape[1] // GROUP)
                scales[rows, places] = found.groups.scales.reshape(count, -1)
                masks[rows, places] = found.groups.masks.reshape(count, -1)
    written = None if numbers is None else numbers.view(np.float32)
    if not job.groups:
        return Processed(written, None, None, None, None, report, status)
    return Processed(written, codes, scales, masks, offsets, report, status)


def _bits(numbers: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(numbers, np.float32).view(np.uint32)
