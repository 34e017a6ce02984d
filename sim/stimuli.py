"""Random and extreme stimuli of the vector MACs and the weight encoder, one array per port and row.

A run is a row of epochs. Each starts with reset and has a character of its own: how often vectors stall, which modes
come, which values and scales, whether status bits may be raised at all (they are sticky, so an epoch that raises one
early would hide the others). Within an epoch everything changes from row to row.
"""

import dataclasses
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.packed_pair import NVFP4_PAIRS
from sim.harness import pack_fields

__all__ = [
    "AUTOFP2",
    "AUTOFP6",
    "ILLEGAL",
    "MODES",
    "NVFP4",
    "EncoderShape",
    "Stimulus",
    "VectorShape",
    "counting_scales",
    "encoder_stimulus",
    "slot_table",
    "vector_stimulus",
]

MODES = ("AutoFP2", "NVFP4", "illegal", "AutoFP6")
"""Names of ``mode_nvfp4 + 2 * refine_en``."""
AUTOFP2, NVFP4, ILLEGAL, AUTOFP6 = range(4)

RESET_ROWS = 3
MEAN_EPOCH = 300
# Most epochs (not most rows) are short and draw every class of mode, scale and mask alike, for the rare crosses.
STEERED_EPOCHS = 0.81
STEERED_EPOCH = 20
# Short ones in between have one byte that is no scale, because the sticky bit of the first hides whether another counts.
LONE_EPOCHS = 0.15
LONE_EPOCH = 12
LONE_REST = 8

# F1 = 00 with E = 1 never occurs: such a vector must give no X, but its result is anybody's.
FREE_PAIRS = np.arange(0b10000, 0b10100, dtype=np.uint8)
LEGAL_PAIRS = np.setdiff1d(np.arange(32, dtype=np.uint8), FREE_PAIRS)
ZERO_PAIRS = np.arange(0b11100, 0b100000, dtype=np.uint8)
_ENCODED = np.concatenate([NVFP4_PAIRS, ZERO_PAIRS[1:]]).astype(np.uint8)

SCALE_CLASSES = ("normal", "subnormal", "zero", "max", "nan", "signed")
"""Classes of a scale byte, from harmless to harmful."""


@dataclasses.dataclass(frozen=True)
class VectorShape:
    """What a vector MAC's ports hold, taken from its configuration.

    Attributes
    ----------
    block : str
        Name of the block.
    modes : tuple of int
        Modes that it has, indices into `MODES`.
    lanes, blocks : int
        Lanes of a vector, and groups of 16 of them.
    weight_bits : int
        5 for packed pairs, 4 for E2M1 codes.
    w_scales : int
        Weight scale bytes.
    refinement : str
        ``"slots"``, ``"inplace"`` or ``"none"``.
    slots : int
        Slots per block; 1 for in-place records, 0 without refinement.
    record_bits : int
        Bits of a refinement record.
    grouped : bool
        AutoFP2 scales per group of 16.
    """

    block: str
    modes: tuple[int, ...]
    lanes: int
    weight_bits: int
    w_scales: int
    refinement: str
    slots: int
    record_bits: int
    grouped: bool

    @property
    def blocks(self) -> int:
        """Groups of 16 lanes."""
        return self.lanes // 16

    @classmethod
    def of(cls, block: str, config: Any) -> "VectorShape":
        """Describe a vector MAC by its name and configuration."""
        refinement = getattr(config, "refinement", "none")
        grouped = getattr(config, "scaling", "pair") == "group"
        only: dict[str, tuple[int, ...]] = {"vmac_nvfp4": (NVFP4,), "vmac_autofp2": (AUTOFP2,)}
        modes = only.get(block, (AUTOFP2, NVFP4))
        if refinement != "none":
            modes = (AUTOFP2, NVFP4, ILLEGAL, AUTOFP6)
        slots = {"slots": getattr(config, "slots_per_block", 0), "inplace": 1, "none": 0}[refinement]
        return cls(
            block=block,
            modes=modes,
            lanes=config.lanes,
            weight_bits=4 if block == "vmac_nvfp4" else 5,
            w_scales=config.lanes // 16 * (2 if grouped else 1),
            refinement=refinement,
            slots=slots,
            record_bits={"slots": 12, "inplace": 40, "none": 0}[refinement],
            grouped=grouped,
        )


@dataclasses.dataclass(frozen=True)
class EncoderShape:
    """What a weight encoder's ports hold.

    Attributes
    ----------
    lanes : int
        Weights of a row.
    grouped : bool
        Scales per group of 16 in AutoFP2 mode.
    clocked : bool
        There are ``clk`` and ``rst``.
    """

    lanes: int
    grouped: bool
    clocked: bool

    @classmethod
    def of(cls, config: Any) -> "EncoderShape":
        """Describe a weight encoder by its configuration."""
        return cls(config.lanes, config.scaling == "group", config.registered)


@dataclasses.dataclass(frozen=True)
class Stimulus:
    """Inputs of a vector MAC, row by row; a row is a clock cycle.

    ``psum[n]`` is the partial sum of the vector of row ``n`` and reaches the port some rows later.

    Attributes
    ----------
    rst, valid : ndarray of bool [N]
    mode : ndarray of uint8 [N]
        Index into `MODES`.
    a, w : ndarray of uint8 [N, lanes]
    a_scale, w_scale : ndarray of uint8 [N, bytes]
    refine : ndarray of uint64 [N, records]
    psum : ndarray of uint64 [N]
    chain : ndarray of bool [N]
        Take the partial sum from the block's own output, where the vector before it in time is there just then.
    """

    rst: NDArray[np.bool_]
    valid: NDArray[np.bool_]
    mode: NDArray[np.uint8]
    a: NDArray[np.uint8]
    w: NDArray[np.uint8]
    a_scale: NDArray[np.uint8]
    w_scale: NDArray[np.uint8]
    refine: NDArray[np.uint64]
    psum: NDArray[np.uint64]
    chain: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.rst)

    def alive(self, latency: int) -> NDArray[np.bool_]:
        """Return which rows hold a vector that comes out: none before the first reset, none that a later reset overtakes."""
        row = np.arange(len(self))
        last = np.maximum.accumulate(np.where(self.rst, row, -1))
        until = np.minimum(row + latency - 1, len(self) - 1)
        return self.valid & (last >= 0) & (last[until] < row)

    def settled(self, latency: int, psum_delay: int) -> "Stimulus":
        """Return the stimulus with ``chain`` only where a result is there to be taken, ``latency - psum_delay`` rows earlier."""
        back = latency - psum_delay
        source = np.zeros(len(self), bool)
        source[back:] = self.alive(latency)[: len(self) - back]
        return dataclasses.replace(self, chain=self.chain & source)

    def columns(self, shape: VectorShape, psum_delay: int, tail: int) -> dict[str, NDArray[Any]]:
        """Return the harness's columns, with ``tail`` idle rows behind the last one."""
        rows = len(self) + tail

        def padded(values: NDArray[Any], delay: int = 0) -> NDArray[Any]:
            out = np.zeros((rows, *values.shape[1:]), values.dtype)
            out[delay : delay + len(values)] = values[: rows - delay]
            return out

        columns = {
            "rst": padded(self.rst),
            "valid_i": padded(self.valid),
            "a": padded(pack_fields(self.a, 4)),
            "w": padded(pack_fields(self.w, shape.weight_bits)),
            "a_scale": padded(pack_fields(self.a_scale, 8)),
            "w_scale": padded(pack_fields(self.w_scale, 8)),
            "psum_i": padded(self.psum, psum_delay),
            "psum_i__feedback": padded(self.chain, psum_delay),
        }
        if len(shape.modes) > 1:
            columns["mode_nvfp4"] = padded(self.mode & 1)
        if shape.refinement != "none":
            columns["refine_en"] = padded(self.mode >> 1)
            columns["refine"] = padded(pack_fields(self.refine, shape.record_bits))
        return columns


def slot_table(slots: int) -> NDArray[np.uint64]:
    """Return every legal filling of a block's slots, without offsets: uint64 [fillings, slots].

    A record is ``{is_activation, subgroup, valid}`` above eight zero bits. Subgroups rise with the slot, and slot
    ``i`` of ``n`` holds one of ``i`` to ``4 - n + i``.
    """
    table = []
    places = [[None, *range(i, 4 - slots + i + 1)] for i in range(slots)]
    for groups in product(*places):
        used = [g for g in groups if g is not None]
        if used != sorted(set(used)):
            continue
        for kinds in product(*[(0,) if g is None else (0, 1) for g in groups]):
            pairs = zip(groups, kinds, strict=True)
            table.append([0 if g is None else (kind << 3 | g << 1 | 1) << 8 for g, kind in pairs])
    return np.array(table, np.uint64).reshape(len(table), slots)


def counting_scales(
    shape: VectorShape, mode: NDArray[np.uint8] | NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which scale bytes count in vectors of the given modes: of activations [N, blocks], of weights [N, bytes]."""
    nvfp4 = (mode & 1 == 1)[:, None]
    of_a = nvfp4 | (np.arange(shape.blocks) % 2 == 0) | shape.grouped
    return of_a, ~nvfp4 | (np.arange(shape.w_scales) < shape.blocks)


def _lone_causes(rng: np.random.Generator, shape: VectorShape, count: int) -> NDArray[np.int64]:
    """Modes, scale bytes (weights before activations) and kinds (0 for 0x7F, 1 signed), [count, 3]: each as often as the others."""
    modes = np.array(shape.modes)
    of_a, of_w = counting_scales(shape, modes)
    number, byte = np.nonzero(np.concatenate([of_w, of_a], axis=1))
    cases = np.concatenate([np.stack([modes[number], byte, np.full(len(byte), kind)], axis=1) for kind in (0, 1)])
    order = [rng.permutation(len(cases)) for _ in range(-(-count // len(cases)))]
    return cases[np.concatenate([*order, np.zeros(0, np.int64)])[:count].astype(np.int64)]


def _choose(rng: np.random.Generator, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return values[rng.integers(0, len(values), shape, dtype=np.uint8 if len(values) < 256 else np.int64)]


def _pick(rng: np.random.Generator, weights: list[float], shape: tuple[int, ...]) -> NDArray[np.int64]:
    edges = np.cumsum(weights) / np.sum(weights)
    return np.searchsorted(edges, rng.random(shape), side="right")


def scale_class(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the class of each scale byte, an index into `SCALE_CLASSES`."""
    table = np.zeros(256, np.uint8)
    table[1:8] = 1
    table[0] = 2
    table[0x7E] = 3
    table[0x7F] = 4
    table[0x80:] = 5
    return table[octets]


def _scales(
    rng: np.random.Generator, rows: int, count: int, bad: NDArray[np.bool_], profile: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Scale bytes [rows, count]: ``profile`` 0 mid-range, 1 any normal, 2 high, 3 mixed with every class of valid byte."""
    wide = rng.integers(0x08, 0x7F, (rows, count), dtype=np.uint8)
    mid = rng.integers(0x28, 0x60, (rows, count), dtype=np.uint8)
    high = rng.integers(0x60, 0x7F, (rows, count), dtype=np.uint8)
    mixed = _choose(rng, np.array([0, 0, 1, 2, 3, 4, 5, 6, 7, 0x7E, 0x7E, 0x7E, 0x40, 0x60], np.uint8), (rows, count))
    keep = rng.random((rows, count)) < 0.5
    octets = np.select([profile[:, None] == k for k in range(3)], [mid, wide, high], np.where(keep, mixed, wide))
    harmful = np.where(rng.random((rows, count)) < 0.4, 0x7F, rng.integers(0x80, 0x100, (rows, count))).astype(np.uint8)
    where = bad[:, None] & (rng.random((rows, count)) < 0.4)
    return np.where(where, harmful, octets).astype(np.uint8)


def _weights(
    rng: np.random.Generator, shape: VectorShape, nvfp4: NDArray[np.bool_], profile: NDArray[np.int64]
) -> NDArray[np.uint8]:
    size = (len(nvfp4), shape.lanes)
    if shape.weight_bits == 4:
        w = rng.integers(0, 16, size, dtype=np.uint8)
        w = np.where((profile == 1)[:, None], rng.choice(np.array([7, 15], np.uint8), size), w)
        return np.where((profile == 2)[:, None] & (rng.random(size) < 0.85), w & 8, w).astype(np.uint8)
    encoded, any_pair = _choose(rng, _ENCODED, size), _choose(rng, LEGAL_PAIRS, size)
    # The largest sums: weights of 6 and -6 as pairs, both digits 2 or -2 in AutoFP2 mode.
    extreme = np.where(
        nvfp4[:, None],
        _choose(rng, np.array([0b00001, 0b01011], np.uint8), size),
        _choose(rng, np.array([0b00101, 0b01111, 0b01101], np.uint8), size),
    )
    w = np.where(nvfp4[:, None], encoded, any_pair)
    w = np.where((profile == 1)[:, None], extreme, w)
    return np.where((profile == 2)[:, None] & (rng.random(size) < 0.85), 0b11100, w).astype(np.uint8)


def _steered_scales(rng: np.random.Generator, shape: VectorShape, rows: int) -> tuple[NDArray[np.uint8], ...]:
    """Scale bytes of both operands whose worst class is each class equally often, in a byte that every mode uses."""
    worst = rng.integers(0, len(SCALE_CLASSES), rows)
    count = shape.blocks + shape.w_scales
    below = np.minimum(rng.integers(0, len(SCALE_CLASSES), (rows, count)), worst[:, None])
    kinds = np.where(rng.random((rows, count)) < 0.5, below, 0)
    target = rng.integers(0, shape.blocks + 1, rows)
    kinds[np.arange(rows), np.where(target == 0, 0, shape.blocks + target - 1)] = worst
    drawn = [
        rng.integers(low, high, (rows, count))
        for low, high in ((8, 0x7E), (1, 8), (0, 1), (0x7E, 0x7F), (0x7F, 0x80), (0x80, 0x100))
    ]
    octets = np.choose(kinds, drawn).astype(np.uint8)
    return octets[:, : shape.blocks], octets[:, shape.blocks :]


def _refine(
    rng: np.random.Generator, shape: VectorShape, mode: NDArray[np.uint8], steered: NDArray[np.bool_]
) -> NDArray[np.uint64]:
    rows = len(mode)
    if shape.refinement == "none":
        return np.zeros((rows, 0), np.uint64)
    count = shape.blocks * shape.slots
    noise = rng.integers(0, 1 << shape.record_bits, (rows, count), dtype=np.uint64)
    same = rng.choice(np.array([0b10, 0b01, 0b11, 0b00], np.uint64), (rows, 1))
    alike = rng.random((rows, 1)) < 0.25
    legal: NDArray[Any]
    no_weights, no_activations = rng.random((2, rows, 1)) < np.where(steered, 0.5, 0.2)[:, None]
    if shape.refinement == "inplace":
        offsets = np.where(alike, same * np.uint64(0x5555_5555), noise & np.uint64(2**32 - 1))
        weight_mask, activation_mask = noise >> np.uint64(32) & np.uint64(15), noise >> np.uint64(36)
        disjoint = rng.random((rows, count)) < 0.6
        activation_mask = np.where(disjoint, activation_mask & ~weight_mask, activation_mask)
        weight_mask = np.where(no_weights, np.uint64(0), weight_mask)
        activation_mask = np.where(no_activations, np.uint64(0), activation_mask)
        legal = activation_mask << np.uint64(36) | weight_mask << np.uint64(32) | offsets
    else:
        table = slot_table(shape.slots)
        filling = table[rng.integers(0, len(table), (rows, shape.blocks))].reshape(rows, count)
        dropped = np.where(filling >> np.uint64(11) == 0, no_weights, no_activations)
        filling = np.where(dropped, 0, filling).astype(np.uint64)
        offsets = np.where(alike, same * np.uint64(0x55), noise & np.uint64(255))
        # An invalid record may hold anything in its other fields.
        legal = filling | offsets | np.where(filling == 0, noise & ~np.uint64(0x1FF), np.uint64(0))
    return np.where((mode == AUTOFP6)[:, None] | steered[:, None] | (rng.random((rows, 1)) < 0.5), legal, noise)


def _psums(
    rng: np.random.Generator, mode: NDArray[np.uint8], may_saturate: NDArray[np.bool_], profile: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Partial sums: ``profile`` 0 any, 1 zero, 2 small of either sign, 3 at the limits; halves within ±2³⁰ where they must not saturate."""
    rows = len(mode)
    anything = rng.integers(0, 2**64, rows, dtype=np.uint64)
    small = rng.integers(-(2**20), 2**20, (rows, 2))
    edge = np.where(rng.random((rows, 2)) < 0.5, 2**31 - 1, -(2**31)) ^ (
        rng.integers(0, 2**31, (rows, 2)) >> rng.integers(4, 32, (rows, 2))
    )
    pairs = np.where((profile == 2)[:, None], small, edge).astype(np.int64)
    halves = (pairs & 0xFFFFFFFF).astype(np.uint64)
    joined = halves[:, 1] << np.uint64(32) | halves[:, 0]
    exact = np.where(profile == 2, pairs[:, 0].astype(np.uint64), joined)
    value = np.select([profile == 0, profile == 1], [anything, np.uint64(0)], np.where(mode & 1 == 1, exact, joined))
    # Clear all but the sign and 30 bits of each half.
    low, high = (value & np.uint64(0xFFFFFFFF)).astype(np.int64), (value >> np.uint64(32)).astype(np.int64)
    calm = [((half ^ 0x8000_0000) - 0x8000_0000) >> 1 & 0xFFFFFFFF for half in (low, high)]
    quiet = calm[1].astype(np.uint64) << np.uint64(32) | calm[0].astype(np.uint64)
    return np.where((mode & 1 == 0) & ~may_saturate, quiet, value)


def vector_stimulus(shape: VectorShape, rows: int, rng: np.random.Generator, mean_epoch: int = MEAN_EPOCH) -> Stimulus:
    """Draw ``rows`` rows of stimuli for a vector MAC.

    Parameters
    ----------
    shape : VectorShape
        The block.
    rows : int
        Clock cycles.
    rng : Generator
        Everything follows from its state.
    mean_epoch : int
        Mean rows between two resets.

    Raises
    ------
    ValueError
        Fewer rows than the first reset takes.
    """
    if rows <= RESET_ROWS:
        raise ValueError(f"rows must be more than {RESET_ROWS}, not {rows}")
    lengths, steering, loneliness = [RESET_ROWS], [False], [False]
    while sum(lengths) < rows:
        loneliness.append(bool(rng.random() < LONE_EPOCHS))
        steering.append(loneliness[-1] or bool(rng.random() < STEERED_EPOCHS))
        if loneliness[-1]:
            lengths.append(LONE_EPOCH + int(rng.integers(0, LONE_REST)))
        else:
            lengths.append(1 + int(rng.exponential(STEERED_EPOCH if steering[-1] else mean_epoch)))
    starts = np.cumsum([0, *lengths[:-1]])
    epochs = len(starts)
    epoch = np.zeros(rows, np.int64)
    epoch[starts[1:]] = 1
    epoch = np.cumsum(epoch)
    rst = np.zeros(rows, bool)
    rst[:RESET_ROWS] = True
    rst[starts[1:]] = True
    rst[np.minimum(starts[1:] + 1, rows - 1)] |= rng.random(epochs - 1) < 0.3
    steered, lone = np.array(steering)[epoch], np.array(loneliness)[epoch]
    # The vector with the byte that is no scale: behind the reset, and out before the next one.
    whole = np.flatnonzero(np.array(loneliness) & (starts + lengths <= rows))
    causes = _lone_causes(rng, shape, len(whole))
    cause_rows = rng.integers(starts[whole] + 2, starts[whole] + np.array(lengths)[whole] - LONE_REST)

    stall = np.where(steered, 0.5, rng.choice([0.0, 0.0, 0.05, 0.3, 0.9], epochs)[epoch])
    # Stalls come alone or in bursts, and reset meets vectors in flight as well as an empty pipeline.
    valid = rng.random(rows) >= stall
    burst = rng.random(rows) < np.where(stall > 0, 0.02, 0.0)
    for gap in range(1, 6):
        valid[gap:] &= ~burst[:-gap]
    valid[cause_rows] = True

    legal = [mode for mode in shape.modes if mode != ILLEGAL]
    weights = np.where(rng.random((epochs, 1)) < 0.6, 1.0, rng.random((epochs, len(legal))) ** 4 + 1e-3)
    edges = np.cumsum(weights / weights.sum(1, keepdims=True), axis=1)
    mode = np.array(legal, np.uint8)[np.minimum((rng.random((rows, 1)) > edges[epoch]).sum(1), len(legal) - 1)]
    if ILLEGAL in shape.modes:
        often = rng.choice([0.0, 0.0, 0.02, 0.3], epochs)[epoch]
        mode[(rng.random(rows) < often) & (mode == AUTOFP2)] = ILLEGAL
    mode = np.where(steered, _choose(rng, np.array(shape.modes, np.uint8), (rows,)), mode)
    mode[cause_rows] = causes[:, 0]
    nvfp4 = mode & 1 == 1

    profile = _pick(rng, [6, 2, 1, 1], (rows,))
    size = (rows, shape.lanes)
    a = rng.integers(0, 16, size, dtype=np.uint8)
    a = np.where((profile == 1)[:, None], rng.choice(np.array([7, 15], np.uint8), size), a)
    a = np.where((profile == 2)[:, None] & (rng.random(size) < 0.85), a & 8, a)
    w = _weights(rng, shape, nvfp4, profile)
    # Profile 3: all lanes alike, so that every partial sum reaches its limits.
    alike = profile == 3
    a[alike] = a[alike, :1]
    w[alike] = w[alike, :1]
    if shape.weight_bits == 5:
        free = np.setdiff1d(np.flatnonzero(rng.random(rows) < 0.01), cause_rows)
        w[free, rng.integers(0, shape.lanes, len(free))] = rng.choice(FREE_PAIRS, len(free))

    bad_rate = rng.choice([0.0, 0.0, 0.0, 0.01, 0.3], epochs)[epoch]
    bad = rng.random(rows) < bad_rate
    kind = _pick(rng, [3, 3, 3, 3], (rows,))
    a_scale = _scales(rng, rows, shape.blocks, bad, kind)
    w_scale = _scales(rng, rows, shape.w_scales, bad, kind)
    chosen_a, chosen_w = _steered_scales(rng, shape, rows)
    a_scale, w_scale = np.where(steered[:, None], chosen_a, a_scale), np.where(steered[:, None], chosen_w, w_scale)
    # Scale bytes that a mode does not use must not matter, least of all when they are no numbers.
    for octets, counting in zip((a_scale, w_scale), counting_scales(shape, mode), strict=True):
        octets[lone[:, None] & counting] = np.minimum(octets[lone[:, None] & counting] & 0x7F, 0x7E)
        stray = ~counting & (rng.random(octets.shape) < 0.3)
        octets[stray] = rng.integers(0x7F, 0x100, int(stray.sum()), dtype=np.uint8)
    harmful = np.where(causes[:, 2] == 0, 0x7F, rng.integers(0x80, 0xFF, len(causes))).astype(np.uint8)
    for octets, first, last in ((w_scale, 0, shape.w_scales), (a_scale, shape.w_scales, shape.w_scales + shape.blocks)):
        here = (causes[:, 1] >= first) & (causes[:, 1] < last)
        octets[cause_rows[here], causes[here, 1] - first] = harmful[here]

    may_saturate = rng.choice([False, True], epochs)[epoch]
    edge_rate = rng.choice([0.02, 0.4], epochs)[epoch]
    psum_profile = np.where(may_saturate & (rng.random(rows) < edge_rate), 3, _pick(rng, [5, 2, 3], (rows,)))
    chained = rng.choice([0.0, 0.2, 0.9], epochs)[epoch]
    return Stimulus(
        rst=rst,
        valid=valid,
        mode=mode,
        a=a,
        w=w,
        a_scale=a_scale,
        w_scale=w_scale,
        refine=_refine(rng, shape, mode, steered),
        psum=_psums(rng, mode, may_saturate, psum_profile),
        chain=rng.random(rows) < chained,
    )


def encoder_stimulus(shape: EncoderShape, rows: int, rng: np.random.Generator) -> dict[str, NDArray[np.uint8]]:
    """Draw ``rows`` rows of inputs for a weight encoder: mode [N], codes [N, lanes] and scale bytes [N, groups].

    Pairs of scales are often close, because the digits' thresholds lie between equal scales and a factor of 12.
    """
    groups = shape.lanes // 16
    inputs: dict[str, NDArray[np.uint8]] = {"mode_nvfp4": rng.integers(0, 2, rows, dtype=np.uint8)}
    for row in ("even", "odd"):
        inputs[f"row_{row}"] = rng.integers(0, 16, (rows, shape.lanes), dtype=np.uint8)
        first = rng.integers(0, 0x80, (rows, groups // 2))
        near = first + rng.integers(-36, 37, first.shape)
        tiny = rng.integers(0, 0x18, first.shape)
        kind = rng.random(first.shape)
        second = np.select(
            [kind < 0.6, kind < 0.75, kind < 0.85], [near, tiny, first], rng.integers(0, 0x80, first.shape)
        )
        first = np.where((kind >= 0.6) & (kind < 0.75), rng.integers(0, 0x18, first.shape), first)
        swap = rng.random(first.shape) < 0.5
        first, second = np.where(swap, second, first), np.where(swap, first, second)
        octets = np.stack([first, second], axis=2).reshape(rows, groups) & 0x7F
        octets |= (rng.random((rows, groups)) < 0.03) * 0x80
        inputs[f"scale_{row}"] = octets.astype(np.uint8)
    return inputs
