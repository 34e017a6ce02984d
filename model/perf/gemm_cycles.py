"""Cycles of matrix products: of the array alone, for any number of products at once, and of the whole accelerator, as its RTL takes them."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.accelerator import AcceleratorConfig, Format, Mode
from model.accelerator_cycles import Product, predict
from model.tiling import REFINED, Plan, plan

__all__ = ["Tiled", "array_cycles", "rtl_cycles"]

Float = NDArray[np.float64]
Refined = float | tuple[float, ...]

ENCODED = 3
"""Cycles that banks and encoders add to a product (docs/tile_engine.md)."""


@dataclass(frozen=True)
class Tiled:
    """Tilings of products; arrays of one shape.

    Attributes
    ----------
    cycles : ndarray
        Of each product.
    panels : ndarray
        How often all weights are read.
    tile_m, tile_n, tiles : ndarray
    """

    cycles: Float
    panels: Float
    tile_m: Float
    tile_n: Float
    tiles: Float


def array_cycles(
    config: AcceleratorConfig, mode: Mode, m: ArrayLike, n: ArrayLike, kv: ArrayLike, reading: ArrayLike = 0.0
) -> Tiled:
    """Tile products for the array and return cycles, supposing that no element waits for operands.

    The cycles are those of :func:`model.array.cycles` for tiles of one size: computing or draining, whichever takes longer; of short tiles
    also half of both, because there are two banks of sums.

    Parameters
    ----------
    config : AcceleratorConfig
    mode : Mode
    m, n : array_like of int
        Rows of activations and of weights.
    kv : array_like of int
        K-vectors.
    reading : array_like of float
        Cycles that reading a weight vector costs; of all tilings the one with the smallest sum is taken.

    Raises
    ------
    ValueError
        One row's K does not fit the banks.
    """
    m, n, kv = (np.asarray(each, np.float64) for each in (m, n, kv))
    longest = min(config.activation_depth, config.max_kv)
    if float(np.max(kv)) > longest:
        raise ValueError(
            f"K must be at most {longest * config.lanes} for these banks, not {int(np.max(kv)) * config.lanes}"
        )
    vectors = np.ceil(n / 2) if mode == Mode.AUTOFP2 else n
    caps = [1 << power for power in range(config.max_m.bit_length())]
    cap = np.array(caps, np.float64).reshape(-1, *[1] * np.broadcast(m, n, kv).ndim)
    # A cap that the banks do not allow comes down to one that they do.
    cap = np.maximum(np.minimum(cap, config.activation_depth // kv), 1)
    panels = np.ceil(m / (config.rows * cap))
    tile_m = np.ceil(m / (config.rows * panels))
    most = np.minimum(config.max_words // tile_m, 2 * (config.weight_depth // 2))
    across = np.ceil(vectors / (config.columns * most))
    tile_n = np.ceil(vectors / (config.columns * across))
    words, tiles = tile_m * tile_n, panels * across
    issued = words + np.maximum(words, config.read_after_write) * (kv - 1)
    drained = config.rows * words
    # A tile begins when the sums of the one before the last have left their bank.
    waiting = (issued + config.deposit + drained - config.rows + 3) / 2
    each = np.maximum(np.maximum(issued, drained), waiting)
    cycles = issued + drained + (tiles - 1) * each + config.deposit + 1 + ENCODED
    cost = cycles + reading * panels * n * kv
    best = np.argmin(cost, axis=0)[np.newaxis]
    shape = cost.shape

    def chosen(values: Float) -> Float:
        picked: Float = np.take_along_axis(np.broadcast_to(values, shape), best, axis=0)[0]
        return picked

    return Tiled(*(chosen(each) for each in (cycles, panels, tile_m, tile_n, tiles)))


@lru_cache(maxsize=65536)
def rtl_cycles(
    config: AcceleratorConfig,
    mode: Mode,
    m: int,
    n: int,
    k: int,
    latency: int = 0,
    refined: tuple[Refined, Refined] = (REFINED, REFINED),
) -> tuple[int, Plan]:
    """Return the cycles of a product alone on the accelerator, raw outputs, and its tiles.

    Parameters
    ----------
    config : AcceleratorConfig
    mode : Mode
    m, n, k : int
    latency : int
        What memory adds to a burst.
    refined : pair of float or of tuples of float
        Refined subgroups of a vector of activations and of one of weights, for AutoFP6, see :class:`model.accelerator_cycles.Product`.

    Examples
    --------
    >>> rtl_cycles(AcceleratorConfig(rows=4, columns=4), Mode.NVFP4, 128, 576, 1536)[0]
    222679
    """
    found = plan(config, mode, m, n, k)
    chosen = found.tile_m, found.tile_n, found.segment
    product = Product(mode, Format.RAW, m, n, k, *chosen, *refined)
    return predict(config, product, latency, latency), found
