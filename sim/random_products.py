"""Random products, queues and bus timings for campaigns."""

import dataclasses
from typing import Any, Literal

import numpy as np

from model.accelerator import (
    AcceleratorConfig,
    Mode,
)
from model.pe import OFFSET_BYTES, Operands
from model.tiling import plans
from sim.axi_memory import Timing
from sim.product import Gemm

__all__ = ["CAMPAIGN", "SMALL_MEMORY", "random_gemm", "random_operands", "random_queue", "random_timing"]


def random_operands(
    rng: np.random.Generator,
    config: AcceleratorConfig,
    rows: int,
    kv: int,
    scales: tuple[int, int],
    most: int,
    density: float,
) -> Operands:
    """Draw rows of an operand.

    Parameters
    ----------
    rng : numpy.random.Generator
    config : AcceleratorConfig
    rows, kv : int
    scales : (int, int)
        Lowest and highest scale byte.
    most : int
        Most refined subgroups of a group; hardware drops what is above two.
    density : float
        Share of groups that have any.
    """
    blocks = config.vmac.blocks
    table = np.array([mask for mask in range(16) if mask.bit_count() <= most], np.uint8)
    count = 1 if rng.random() < 0.5 else rows
    masks = rng.choice(table, (count, kv, blocks)) * (rng.random((count, kv, blocks)) < density)
    return Operands(
        rng.integers(0, 16, (rows, kv, config.lanes), dtype=np.uint8),
        rng.integers(scales[0], scales[1] + 1, (rows, kv, blocks), dtype=np.uint8),
        np.broadcast_to(masks, (rows, kv, blocks)).astype(np.uint8),
        rng.integers(0, 256, (rows, kv, blocks, OFFSET_BYTES), dtype=np.uint8),
    )


def random_gemm(
    rng: np.random.Generator,
    config: AcceleratorConfig,
    m: int,
    n: int,
    kv: int,
    mode: Mode,
    out: Literal["raw", "fp32"] = "raw",
) -> Gemm:
    """Draw a product of given size: codes, scales (once in a while with bytes that are none), masks (some beyond the rules), and tiles."""
    scales = ((0x28, 0x60), (0, 0x7E), (0x78, 0x7E), (0x28, 0x60), (0, 0xFF))[int(rng.integers(5))]
    a, w = (
        random_operands(rng, config, rows, kv, scales, int(rng.integers(0, 5)), float(rng.random())) for rows in (m, n)
    )
    if rng.random() < 0.5:
        w = dataclasses.replace(
            w, masks=np.where(w.masks & a.masks[:1].max(axis=0, initial=0), 0, w.masks).astype(np.uint8)
        )
    tiles = None
    if rng.random() < 0.5:
        found = list(plans(config, mode, m, n, kv * config.lanes))
        chosen = found[int(rng.integers(len(found)))]
        tiles = chosen.tile_m, chosen.tile_n, int(rng.integers(1, chosen.segment + 1))
    return Gemm(a, w, mode, out, float(np.float32(rng.choice([1, -3.7, 2.0**100, 2.0**-130, 0]))), tiles)


def random_timing(rng: np.random.Generator) -> Timing:
    """Draw latencies and stalls, of all channels alike or each in its way, and once in a while none."""
    kind = int(rng.integers(4))
    read, write = (int(x) for x in rng.integers(0, 80, 2) * (rng.random(2) < 0.7))
    stalls: int | dict[str, int] = 0
    if kind == 1:
        stalls = int(rng.integers(1, 180))
    elif kind > 1:
        stalls = {c: int(rng.choice([0, 30, 128, 220])) for c in ("ar", "r", "aw", "w", "b", "lite")}
    return Timing(read, write, stalls, int(rng.integers(1 << 30)))


SMALL_MEMORY = 1 << 23
"""Bytes of the memory of ``--random``."""


CAMPAIGN: tuple[dict[str, Any], ...] = (
    {
        "rows": 2,
        "columns": 2,
        "activation_depth": 64,
        "weight_depth": 32,
        "accumulators": 64,
        "weight_entries": 8,
        "activation_entries": 16,
        "address_width": 36,
        "outstanding": 4,
    },
    {
        "rows": 1,
        "columns": 3,
        "refinement": "inplace",
        "step": "exponent",
        "data_width": 64,
        "activation_depth": 32,
        "weight_depth": 64,
    },
    {
        "rows": 3,
        "columns": 1,
        "lanes": 64,
        "scaling": "group",
        "window_shift": 26,
        "pipeline": "fast",
        "data_width": 256,
        "activation_depth": 32,
        "weight_depth": 16,
    },
)
"""Configurations of ``--random``: small banks, so that small products need many tiles and segments."""


def random_queue(rng: np.random.Generator, config: AcceleratorConfig, count: int) -> list[Gemm]:
    """Draw a queue of products of small to middling sizes in all modes of a configuration."""
    modes = [mode for mode in Mode if mode != Mode.AUTOFP6 or config.refinement != "none"]
    products = []
    for _ in range(count):
        most_m, most_n, most_kv = (1 << int(x) for x in rng.integers(1, (6, 6, 5)))
        m, n = int(rng.integers(1, most_m + 1)), int(rng.integers(1, most_n + 1))
        kv = int(rng.integers(1, min(most_kv, config.activation_depth) + 1))
        mode = modes[int(rng.integers(len(modes)))]
        products.append(random_gemm(rng, config, m, n, kv, mode, "fp32" if rng.random() < 0.4 else "raw"))
    return products
