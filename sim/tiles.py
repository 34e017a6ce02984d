"""Random tiles of a processing element: operands, the words on its streams, refused commands, plans and coverage (docs/pe.md)."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.packed_pair import NVFP4_PAIRS
from model.pe import DROPPED, OFFSET_BYTES, OVERLAP, Operands, PeConfig, Tile
from model.vmac import SUBGROUPS
from sim.coverage import Coverage, CoverPoint
from sim.harness import pack_fields
from sim.stimuli import LEGAL_PAIRS

__all__ = [
    "KV_CLASSES",
    "MASK_PATTERNS",
    "MODES",
    "PATTERNS",
    "SCALE_PROFILES",
    "SIZE_CLASSES",
    "Planned",
    "command_word",
    "draw_tile",
    "entry_words",
    "mask_pattern",
    "modes",
    "plan",
    "plan_length",
    "refused_commands",
    "sample_tile",
    "tile_coverage",
]

MODES = ("AutoFP2", "NVFP4", "AutoFP6")
SIZE_CLASSES = ("1", "2", "3…", "max")
KV_CLASSES = ("1", "2", "3…")
PATTERNS = ("none", "inputs", "outputs", "both", "bursts")
"""Which streams stall."""
MASK_PATTERNS = ("none", "weights", "activations", "disjoint", "overlap", "dropped", "overlap and dropped")
SCALE_PROFILES = ("medium", "any", "high", "no number")
_LONGEST_KV = 6


def modes(config: PeConfig) -> tuple[str, ...]:
    """Return the modes that a configuration has."""
    return MODES if config.refinement != "none" else MODES[:2]


def command_word(config: PeConfig, m: int, n: int, kv: int, mode_nvfp4: bool, refine_en: bool = False) -> int:
    """Return the payload of a command: sizes and mode, from bit 0 up.

    Raises
    ------
    ValueError
        A size does not fit its field.
    """
    word = position = 0
    sizes = (("m", m, config.max_m), ("n", n, config.max_n), ("kv", kv, config.max_kv))
    for name, size, limit in sizes:
        if not 0 <= size < 1 << limit.bit_length():
            raise ValueError(f"{name} must fit {limit.bit_length()} bits, not {size}")
        word |= size << position
        position += limit.bit_length()
    return word | int(mode_nvfp4) << position | int(refine_en) << position + 1


def entry_words(config: PeConfig, operands: Operands, weights: bool) -> list[int]:
    """Return the payloads of vectors of one operand, in the order of the leading axes.

    Parameters
    ----------
    config : PeConfig
    operands : Operands
        Leading axes (KV, vectors).
    weights : bool
        Packed pairs of 5 bits instead of codes of 4.
    """
    bits = 5 if weights else 4
    blocks = config.vmac.blocks
    codes = operands.codes.reshape(-1, config.lanes)
    scales = operands.scales.reshape(len(codes), -1)
    fields = [(pack_fields(codes, bits), bits * config.lanes), (pack_fields(scales, 8), 8 * scales.shape[1])]
    if config.refinement != "none":
        offsets = operands.offsets.reshape(len(codes), blocks, OFFSET_BYTES).astype(np.int64)
        records = operands.masks.reshape(len(codes), blocks).astype(np.int64)
        for i in range(OFFSET_BYTES):
            records |= offsets[..., i] << SUBGROUPS + 8 * i
        width = SUBGROUPS + 8 * OFFSET_BYTES
        fields.append((pack_fields(records, width), width * blocks))
    words = []
    for row in range(len(codes)):
        word = position = 0
        for octets, width in fields:
            word |= int.from_bytes(octets[row].tobytes(), "little") << position
            position += width
        words.append(word)
    return words


def _few(rng: np.random.Generator, most: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Masks with at most so many subgroups."""
    table = np.array([mask for mask in range(16) if mask.bit_count() <= most], np.uint8)
    return rng.choice(table, shape)


def _masks(
    config: PeConfig, rng: np.random.Generator, pattern: str, m: int, n: int, kv: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Weight and activation masks, [KV, vectors, blocks], whose combinations make up a pattern of `MASK_PATTERNS`."""
    blocks = config.vmac.blocks
    slots = config.slots_per_block if config.refinement == "slots" else SUBGROUPS
    w, a = np.zeros((kv, n, blocks), np.uint8), np.zeros((kv, m, blocks), np.uint8)
    first = (0, 0, 0)

    def some(kept: NDArray[Any], count: int) -> NDArray[np.uint8]:
        masks = np.where(rng.random((kv, count, blocks)) < 0.7, kept[:, None, :], 0).astype(np.uint8)
        masks[first] = kept[0, 0]
        return masks

    # Two different subgroups of every block, alike for all vectors of a K-vector.
    g = rng.integers(0, SUBGROUPS, (kv, blocks))
    h = (g + rng.integers(1, SUBGROUPS, (kv, blocks))) % SUBGROUPS
    one, other = (1 << g).astype(np.uint8), (1 << h).astype(np.uint8)
    if pattern == "weights":
        w = _few(rng, min(slots, OFFSET_BYTES), w.shape)
        w[first] = 1
    elif pattern == "activations":
        a = _few(rng, min(slots, OFFSET_BYTES), a.shape)
        a[first] = 1
    elif pattern == "disjoint":
        if slots == 1:
            one[:, 1::2], other[:, 0::2] = 0, 0
        w, a = some(one, n), some(other, m)
        if slots == 1:
            a[0, 0, 1] = other[0, 1]
    elif pattern == "overlap":
        w, a = some(one | (other if slots > 1 else 0), n), some(one, m)
    elif pattern == "dropped":
        w, a = some(~one & 15, n), some(one, m)
    elif pattern == "overlap and dropped":
        w, a = rng.integers(0, 16, w.shape, dtype=np.uint8), rng.integers(0, 16, a.shape, dtype=np.uint8)
        w[first], a[first] = 0b1011, 0b0011
    return w, a


def _scales(rng: np.random.Generator, profile: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    low, high = {"medium": (0x28, 0x60), "any": (0, 0x7F), "high": (0x78, 0x7F), "no number": (0x28, 0x60)}[profile]
    scales = rng.integers(low, high, shape, dtype=np.uint8)
    if profile == "no number":
        # Only here and there: which of the vectors raises the bit must not matter.
        bad = rng.random(shape) < 0.02
        bad.reshape(-1)[rng.integers(bad.size)] = True
        scales = np.where(bad, rng.choice(np.array([0x7F, 0x80, 0xC1, 0xFF], np.uint8), shape), scales)
    return scales.astype(np.uint8)


def draw_tile(
    config: PeConfig,
    rng: np.random.Generator,
    mode: str,
    m: int,
    n: int,
    kv: int,
    masks: str = "none",
    scales: str = "medium",
) -> Tile:
    """Draw the operands of a tile.

    Parameters
    ----------
    config : PeConfig
    rng : numpy.random.Generator
    mode : str
        One of `MODES`.
    m, n, kv : int
        Sizes.
    masks : str
        One of `MASK_PATTERNS`; counts in AutoFP6 mode, in the others masks are at random and must not matter.
    scales : str
        One of `SCALE_PROFILES`; ``"high"`` saturates AutoFP2 sums.
    """
    nvfp4 = mode != "AutoFP2"
    blocks = config.vmac.blocks
    w_shape, a_shape = (kv, n, config.lanes), (kv, m, config.lanes)
    w = rng.choice(np.array(NVFP4_PAIRS if nvfp4 else LEGAL_PAIRS, np.uint8), w_shape)
    a = rng.integers(0, 16, a_shape, dtype=np.uint8)
    if rng.random() < 0.2 or scales == "high":
        # All of one sign, so that sums grow.
        w = rng.choice(np.array([0b00001] if nvfp4 else [0b00101], np.uint8), w_shape)
        a = np.where(rng.random(a_shape) < 0.9, np.uint8(7), a)
    if mode != "AutoFP6":
        w_masks, a_masks = (rng.integers(0, 16, (kv, count, blocks), dtype=np.uint8) for count in (n, m))
    else:
        w_masks, a_masks = _masks(config, rng, masks, m, n, kv)
    w_offsets, a_offsets = (rng.integers(0, 256, (kv, count, blocks, OFFSET_BYTES), dtype=np.uint8) for count in (n, m))
    return Tile(
        nvfp4,
        mode == "AutoFP6",
        Operands(w.astype(np.uint8), _scales(rng, scales, (kv, n, config.vmac.w_scale_bytes)), w_masks, w_offsets),
        Operands(
            a.astype(np.uint8),
            _scales(rng, scales if scales != "no number" else "medium", (kv, m, blocks)),
            a_masks,
            a_offsets,
        ),
    )


def refused_commands(config: PeConfig) -> dict[str, tuple[int, int, int, bool, bool]]:
    """Return a command ``(m, n, kv, mode_nvfp4, refine_en)`` for each reason to refuse one that its fields can hold."""
    m, n, kv = config.max_m, config.max_n, config.max_kv
    largest_m, largest_n, largest_kv = ((1 << limit.bit_length()) - 1 for limit in (m, n, kv))
    commands = {"m = 0": (0, 1, 1, True, False), "n = 0": (1, 0, 1, True, False), "kv = 0": (1, 1, 0, True, False)}
    commands["m too large"] = (m + 1, 1, 1, True, False)
    commands["n too large"] = (1, n + 1, 1, True, False)
    commands["all largest"] = (largest_m, largest_n, largest_kv, True, False)
    if n > 1:
        # Both are within their own limits.
        commands["m·n too large"] = (m, config.max_words // m + 1, 1, True, False)
    if kv < largest_kv:
        commands["kv too large"] = (1, 1, kv + 1, True, False)
    if config.refinement != "none":
        commands["refine_en without mode_nvfp4"] = (1, 1, 1, False, True)
    return commands


def _size_class(size: int, limit: int) -> int:
    return size - 1 if size < 3 else 3 if size == limit else 2


def _sizes(config: PeConfig) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return every (M, N) that is allowed, by the classes of M and N; an N is largest for its M."""
    cells: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for m in range(1, config.max_m + 1):
        most = config.max_words // m
        for n in range(1, most + 1):
            cells.setdefault((_size_class(m, config.max_m), _size_class(n, most)), []).append((m, n))
    return cells


def mask_pattern(tile: Tile, status: int) -> int:
    """Return the class of a tile's masks, an index into `MASK_PATTERNS`, given the status that it raises."""
    if status & (OVERLAP | DROPPED):
        return {OVERLAP: 4, DROPPED: 5, OVERLAP | DROPPED: 6}[status & (OVERLAP | DROPPED)]
    return bool(tile.weights.masks.any()) + 2 * bool(tile.activations.masks.any())


def tile_coverage(config: PeConfig) -> Coverage:
    """Return empty coverage of a configuration: the crosses of docs/simulation.md."""
    names = modes(config)
    legal = np.zeros((len(SIZE_CLASSES), len(SIZE_CLASSES)), bool)
    for cell in _sizes(config):
        legal[cell] = True
    sizes = {"m": SIZE_CLASSES, "n": SIZE_CLASSES}
    by_mode = np.broadcast_to(legal, (len(names), *legal.shape))
    points = [
        CoverPoint.cross(
            "shape",
            {"mode": names, **sizes, "kv": KV_CLASSES},
            np.repeat(by_mode[..., None], len(KV_CLASSES), axis=3),
        ),
        CoverPoint.cross(
            "stall", {"pattern": PATTERNS, "mode": names, **sizes}, np.repeat(by_mode[None], len(PATTERNS), axis=0)
        ),
        CoverPoint.cross("kv", {"pattern": PATTERNS, "kv": KV_CLASSES}),
        CoverPoint.cross("refused", {"pattern": PATTERNS, "reason": tuple(refused_commands(config))}),
        CoverPoint.cross("modes", {"before": names, "then": names}),
    ]
    if config.refinement != "none":
        points.append(CoverPoint.cross("masks", {"pattern": PATTERNS, "masks": MASK_PATTERNS}))
    return Coverage(points)


def sample_tile(
    coverage: Coverage, config: PeConfig, pattern: str, tile: Tile, status: int, before: Tile | None
) -> None:
    """Count a tile whose results were compared; ``before`` is the tile before it, of the same stall pattern."""

    def mode(one: Tile) -> int:
        return int(one.mode_nvfp4) + int(one.refine_en)

    def count(name: str, *bins: int) -> None:
        coverage.sample(name, *(np.array([index]) for index in bins))

    p = PATTERNS.index(pattern)
    size = _size_class(tile.m, config.max_m), _size_class(tile.n, config.max_words // tile.m)
    kv = min(tile.kv, 3) - 1
    count("shape", mode(tile), *size, kv)
    count("stall", p, mode(tile), *size)
    count("kv", p, kv)
    if tile.refine_en:
        count("masks", p, mask_pattern(tile, status))
    if before is not None:
        count("modes", mode(before), mode(tile))


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a bench is to do next.

    Attributes
    ----------
    pattern : str
        Which streams stall, one of `PATTERNS`.
    tiles : list of Tile
    refused : list of (int, str)
        Commands to be refused: each comes before the tile of that number, for that reason.
    """

    pattern: str
    tiles: list[Tile]
    refused: list[tuple[int, str]]


def plan_length(config: PeConfig) -> int:
    """Return the number of tiles after which a plan has reached every bin of `tile_coverage`."""
    cells = len(_sizes(config))
    rounds = -(-len(MASK_PATTERNS) // cells)
    return rounds * len(PATTERNS) * len(modes(config)) * cells


def plan(config: PeConfig, rng: np.random.Generator, tiles: int, epoch: int = 8) -> Iterator[Planned]:
    """Draw ``tiles`` tiles in epochs of one stall pattern each; `plan_length` of them, or a multiple, reach every bin of coverage."""
    sizes = _sizes(config)
    cells = [(mode, cell) for mode in modes(config) for cell in sizes]
    reasons = tuple(refused_commands(config))
    masks = rng.integers(0, len(MASK_PATTERNS), len(PATTERNS))
    while tiles > 0:
        epochs: list[tuple[int, Sequence[int]]] = []
        for p in range(len(PATTERNS)):
            order = rng.permutation(len(cells)).tolist()
            epochs += [(p, order[i : i + epoch]) for i in range(0, len(order), epoch)]
        shift = rng.integers(0, len(KV_CLASSES), len(cells))
        # Every reason twice in each pattern, each before a tile of its own choice.
        before = [rng.integers(0, len(cells), (2, len(reasons))) for _ in PATTERNS]
        done = [0] * len(PATTERNS)
        for index in rng.permutation(len(epochs)):
            p, chosen = epochs[index]
            drawn: list[Tile] = []
            bad: list[tuple[int, str]] = []
            for number in chosen[: max(tiles, 0)]:
                mode, cell = cells[number]
                pairs = np.array(sizes[cell])
                weight = 1 / np.sqrt(pairs.prod(axis=1))
                m, n = map(int, pairs[rng.choice(len(pairs), p=weight / weight.sum())])
                kv = int((shift[number] + p) % len(KV_CLASSES)) + 1
                kv = kv if kv < len(KV_CLASSES) else int(rng.integers(kv, _LONGEST_KV + 1))
                profile = SCALE_PROFILES[rng.choice(len(SCALE_PROFILES), p=[0.4, 0.3, 0.15, 0.15])]
                drawn.append(draw_tile(config, rng, mode, m, n, kv, MASK_PATTERNS[masks[p]], profile))
                masks[p] = (masks[p] + (mode == "AutoFP6")) % len(MASK_PATTERNS)
                bad += [(len(drawn) - 1, reasons[reason]) for reason in np.nonzero(before[p] == done[p])[1]]
                done[p] += 1
            if drawn:
                yield Planned(PATTERNS[p], drawn, bad)
            tiles -= len(drawn)
