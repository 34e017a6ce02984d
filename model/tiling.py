"""Tiles of a product on the accelerator: all sensible ones, and the one with the fewest cycles (docs/driver.md)."""

import dataclasses
import math
from collections.abc import Iterator

from model.accelerator import AcceleratorConfig, Format, Mode
from model.accelerator_cycles import Processing, Product, predict
from model.vmac import GROUP

__all__ = ["REFINED", "Plan", "plan", "plans"]

_OVERHEAD = 4
"""Cycles between tiles that nothing hides, roughly; only for choosing between plans."""
_SEGMENT = 16
"""K-vectors of a segment: fewer cost bus time, more let computing start later."""
_COMPARED = 12
"""Plans whose cycles are predicted."""
REFINED = 1.6
"""Refined subgroups of a vector, of weights and of activations, that a prediction supposes: the usual budget of a fifth."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tiles of a product.

    Attributes
    ----------
    tile_m, tile_n, segment : int
        As in :class:`model.accelerator.Descriptor`.
    tiles : int
    cycles : int
        Estimate that plans are compared by, without latencies.
    """

    tile_m: int
    tile_n: int
    segment: int
    tiles: int
    cycles: int


def plans(
    config: AcceleratorConfig,
    mode: Mode,
    m: int,
    n: int,
    k: int,
    *,
    any_mode: bool = False,
    post: Processing | None = None,
) -> Iterator[Plan]:
    """Yield all sensible tilings of a product, unordered.

    Each tile size is the smallest for its number of rounds, so that the last round is as full as the others. If ``post`` makes groups, a tile is
    a multiple of 32 outputs wide, or covers all; with ``any_mode`` it is legal in every mode.

    Raises
    ------
    ValueError
        A size is 0, k is not a multiple of the lanes, or one row's K does not fit the banks.
    """
    for name, value in (("m", m), ("n", n), ("k", k)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if k % config.lanes:
        raise ValueError(f"k must be a multiple of {config.lanes} lanes, not {k}")
    kv = k // config.lanes
    longest = min(config.activation_depth, config.max_kv)
    if kv > longest:
        raise ValueError(f"k must be at most {longest * config.lanes} for these banks, not {k}")
    if any_mode:
        mode = Mode.NVFP4
    paired = mode == Mode.AUTOFP2
    vectors = -(-n // 2) if paired else n
    grouped = post is not None and post.groups
    together = 2 * GROUP // math.gcd(2 * GROUP, config.columns << paired) if grouped else 1
    reads = 0 if post is None else post.residual + post.previous
    half = config.weight_depth // 2
    rows_bytes = config.lanes // 2 + config.vmac.blocks * (1 if mode != Mode.AUTOFP6 else 3)
    beat = config.data_width // 8
    for tile_m in _sizes(m, config.rows, min(config.max_m, config.activation_depth // kv)):
        panels = -(-m // (config.rows * tile_m))
        a_load = min(m, config.rows * tile_m) * kv * max(1, rows_bytes / beat)
        most = min(config.max_words // tile_m, half if paired or any_mode else 2 * half)
        for share in _sizes(vectors, config.columns, most):
            tile_n = share
            if config.columns * share < vectors:
                # A row of a tile ends with a pair of groups: so far up as the banks allow, or there may be none.
                tile_n = min(-(-share // together) * together, most - most % together)
            if not tile_n:
                continue
            pairs = tile_n if paired or any_mode else -(-tile_n // 2)
            segments = max(-(-kv // (half // pairs)), -(-kv // _SEGMENT))
            per_panel = -(-vectors // (config.columns * tile_n))
            words = tile_m * tile_n
            compute = max(words, config.read_after_write) * kv
            w_rows = min(vectors, config.columns * tile_n) * (2 if paired else 1)
            load = w_rows * kv * max(1, rows_bytes / beat)
            # What post-processing reads beside the sums.
            width = min(n, config.columns * tile_n << paired)
            load += reads * min(m, config.rows * tile_m) * -(-4 * width // beat)
            drain = config.rows * words * max(1, 8 * config.columns / beat)
            tile = max(compute, load, drain) + _OVERHEAD
            if 2 * tile_m * kv <= config.activation_depth:
                panel = max(per_panel * tile, per_panel * load + a_load)
            else:
                panel = (per_panel - 1) * tile + max(tile, load + a_load)
            start = (a_load + load) / segments + drain
            yield Plan(tile_m, tile_n, -(-kv // segments), panels * per_panel, int(panels * panel + start))


def plan(
    config: AcceleratorConfig,
    mode: Mode,
    m: int,
    n: int,
    k: int,
    *,
    any_mode: bool = False,
    post: Processing | None = None,
) -> Plan:
    """Return the tiling with the fewest cycles; raises like :func:`plans`, or if banks and accumulators are too small for groups.

    The best by estimate are compared by :func:`model.accelerator_cycles.predict`, also with shorter segments.

    Examples
    --------
    >>> found = plan(AcceleratorConfig(rows=2, columns=2), Mode.NVFP4, 64, 1536, 576)
    >>> found.tile_m, found.tile_n, found.segment, found.tiles
    (8, 8, 8, 384)
    """
    tilings = plans(config, mode, m, n, k, any_mode=any_mode, post=post)
    found = sorted(tilings, key=lambda found: (found.cycles, found.tiles, -found.tile_m))
    if not found:
        raise ValueError(f"accumulators and banks must hold tiles of {2 * GROUP} outputs, not only narrower ones")

    def predicted(chosen: Plan) -> tuple[int, int, int]:
        sizes = (m, n, k, chosen.tile_m, chosen.tile_n, chosen.segment)
        kind = Format.RAW if post is None else Format.FP32
        product = Product(mode, kind, *sizes, REFINED, REFINED, post)
        return predict(config, product), chosen.tiles, -chosen.tile_m

    shorter = (dataclasses.replace(chosen, segment=min(chosen.segment, _SEGMENT // 2)) for chosen in found[:_COMPARED])
    best, fewest = found[0], predicted(found[0])
    for chosen in dict.fromkeys((*found[:_COMPARED], *shorter)):
        if chosen != found[0] and _least(config, mode, m, k, chosen) <= fewest[0]:
            cycles = predicted(chosen)
            if cycles < fewest:
                best, fewest = chosen, cycles
    return best


def _least(config: AcceleratorConfig, mode: Mode, m: int, k: int, tiles: Plan) -> int:
    """Return cycles that a product takes at least: its loader's vectors, padding included, or its elements', and what comes behind or before."""
    kv, words = k // config.lanes, tiles.tile_m * tiles.tile_n
    computing = max(words, config.read_after_write)
    panel = config.rows * tiles.tile_m
    tile = config.columns * tiles.tile_n * (2 if mode == Mode.AUTOFP2 else 1)
    loading = tiles.tiles * tile + -(-m // panel) * panel
    loaded = loading * kv + computing * ((kv - 1) % tiles.segment + 1)
    computed = (panel + tile) * min(tiles.segment, kv) + tiles.tiles * computing * kv
    return max(loaded, computed) + config.rows * words


def _sizes(total: int, banks: int, most: int) -> Iterator[int]:
    """Yield for every number of rounds the smallest share of a bank that does, at most ``most``."""
    share = -(-total // banks)
    rounds = -(-share // most)
    last = 0
    while rounds <= share:
        size = -(-share // rounds)
        if size != last:
            yield size
        last = size
        # The next number of rounds that makes tiles smaller.
        rounds = rounds + 1 if size == 1 else max(rounds + 1, -(-share // (size - 1)))
