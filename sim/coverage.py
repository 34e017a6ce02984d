"""Functional coverage of the vector MACs: declared bins, counted from the vectors whose results were compared.

The bulk benches check millions of vectors per second of Python time, so they count with NumPy; the cocotb benches put
the same bins into cocotb-coverage. Every declared bin must be hit.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.stimuli import (
    AUTOFP2,
    AUTOFP6,
    MODES,
    SCALE_CLASSES,
    EncoderShape,
    Stimulus,
    VectorShape,
    counting_scales,
    scale_class,
    slot_table,
)

__all__ = [
    "GOAL",
    "MASK_CLASSES",
    "STALL_CLASSES",
    "CoverPoint",
    "Coverage",
    "encoder_coverage",
    "masks",
    "sample_encoder",
    "sample_resets",
    "sample_saturation",
    "sample_vectors",
    "stall_class",
    "vector_coverage",
]

GOAL = 1.0
"""Share of the declared bins that a regression must hit."""

STALL_CLASSES = ("after reset", "back to back", "gap 1", "gap 2 or 3", "gap 4 and more")
MASK_CLASSES = ("none", "weights", "activations", "both")
CAUSES = ("0x7F", "sign")
RESULT_CLASSES = ("negative", "zero", "positive")


@dataclasses.dataclass(frozen=True)
class CoverPoint:
    """A group of bins, the cross of its axes.

    Attributes
    ----------
    name : str
    axes : tuple of (str, tuple of str)
        Name and bin names of each axis.
    declared : ndarray of bool, shape of the axes
        Bins that can and must occur; the others are impossible by contract.
    """

    name: str
    axes: tuple[tuple[str, tuple[str, ...]], ...]
    declared: NDArray[np.bool_]

    @classmethod
    def cross(
        cls, name: str, axes: Mapping[str, Sequence[object]], declared: NDArray[np.bool_] | None = None
    ) -> "CoverPoint":
        """Declare the cross of the given axes, all of it unless ``declared`` says otherwise."""
        named = tuple((axis, tuple(map(str, bins))) for axis, bins in axes.items())
        shape = tuple(len(bins) for _, bins in named)
        return cls(name, named, np.ones(shape, bool) if declared is None else declared.reshape(shape))


class Coverage:
    """Counts of a set of cover points.

    Parameters
    ----------
    points : sequence of CoverPoint
    """

    def __init__(self, points: Sequence[CoverPoint]) -> None:
        self.points = {point.name: point for point in points}
        self.counts = {point.name: np.zeros(point.declared.shape, np.int64) for point in points}

    def sample(self, name: str, *bins: NDArray[Any]) -> None:
        """Count vectors; one array of bin numbers per axis, of a common shape."""
        shape = self.points[name].declared.shape
        index = np.ravel_multi_index(tuple(np.asarray(b, np.int64) for b in np.broadcast_arrays(*bins)), shape)
        self.counts[name] += np.bincount(index.ravel(), minlength=int(np.prod(shape))).reshape(shape)

    def merge(self, other: "Coverage") -> None:
        """Add the counts of the same cover points in another run."""
        for name, counts in other.counts.items():
            self.counts[name] += counts

    def missing(self, name: str) -> list[str]:
        """Return the declared bins of a cover point that nothing hit, by name."""
        point = self.points[name]
        holes = np.argwhere(point.declared & (self.counts[name] == 0))
        return [" × ".join(bins[i] for (_, bins), i in zip(point.axes, hole, strict=True)) for hole in holes]

    def summary(self) -> dict[str, dict[str, int]]:
        """Return ``{"bins", "hit"}`` of every cover point."""
        return {
            name: {"bins": int(point.declared.sum()), "hit": int((self.counts[name][point.declared] > 0).sum())}
            for name, point in self.points.items()
        }

    @property
    def share(self) -> float:
        """Share of all declared bins that were hit."""
        totals = self.summary().values()
        return sum(point["hit"] for point in totals) / max(sum(point["bins"] for point in totals), 1)


def masks(shape: VectorShape, refine: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the 4-bit weight and activation masks of each block, [N, blocks], that refinement records stand for."""
    rows = len(refine)
    words = refine.astype(np.int64)
    if shape.refinement == "none":
        nothing = np.zeros((rows, shape.blocks), np.int64)
        return nothing, nothing
    if shape.refinement == "inplace":
        return words >> 32 & 15, words >> 36 & 15
    words = words.reshape(rows, shape.blocks, shape.slots)
    bit = (words >> 8 & 1) << (words >> 9 & 3)
    activation = words >> 11 & 1 == 1
    weight_mask = np.bitwise_or.reduce(np.where(activation, 0, bit), axis=2)
    return weight_mask, np.bitwise_or.reduce(np.where(activation, bit, 0), axis=2)


def stall_class(rst: NDArray[np.bool_], valid: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each row how long the vector before it is ago, an index into `STALL_CLASSES`."""
    row = np.arange(len(rst))
    last_reset = np.maximum.accumulate(np.where(rst, row, -1))
    last_vector = np.maximum.accumulate(np.where(valid & ~rst, row, -1))
    before = np.concatenate([[-1], last_vector[:-1]])
    gap = row - before - 1
    table = np.select([before <= last_reset, gap == 0, gap == 1, gap <= 3], [0, 1, 2, 3], 4)
    return table.astype(np.int64)


def _declared_masks(shape: VectorShape) -> NDArray[np.bool_]:
    declared = np.ones((16, 16), bool)
    if shape.refinement == "slots":
        declared[:] = False
        weight, activation = masks(dataclasses.replace(shape, lanes=16), slot_table(shape.slots))
        declared[weight[:, 0], activation[:, 0]] = True
    return declared


def vector_coverage(shape: VectorShape, latency: int) -> Coverage:
    """Declare the cover points of a vector MAC.

    ``vector``: mode × worst scale class × mask class × stall. ``scales``: mode × class of weight and activation
    scale, for each block. ``masks``: every legal pair of masks, for each block. ``offsets``: every offset in every
    element, refining weight or activation. ``operands``: every activation code against every weight code, in every
    lane. ``modes``: mode after mode without a gap. ``saturation``: which halves saturate to which side. ``reset``:
    how many vectors are in flight. ``sum``: mode × sign of what a vector adds. ``nan``: mode × scale byte that counts
    in it × why it is no scale, as the only such byte between two resets, since the status bit is sticky.
    """
    modes = [MODES[mode] for mode in shape.modes]
    lanes = np.ones((shape.lanes, 16, 1 << shape.weight_bits), bool)
    if shape.weight_bits == 5:
        lanes[:, :, 0b10000:0b10100] = False
    mask_classes = MASK_CLASSES if shape.refinement != "none" else MASK_CLASSES[:1]
    blocks = range(shape.blocks)
    octets = [f"w_scale {n}" for n in range(shape.w_scales)] + [f"a_scale {n}" for n in blocks]
    of_a, of_w = counting_scales(shape, np.array(shape.modes))
    counting = np.repeat(np.concatenate([of_w, of_a], axis=1)[:, :, None], len(CAUSES), axis=2)
    points = [
        CoverPoint.cross(
            "vector", {"mode": modes, "scale": SCALE_CLASSES, "mask": mask_classes, "stall": STALL_CLASSES}
        ),
        CoverPoint.cross(
            "scales", {"block": blocks, "mode": modes, "weight scale": SCALE_CLASSES, "activation scale": SCALE_CLASSES}
        ),
        CoverPoint.cross(
            "operands", {"lane": range(shape.lanes), "a": range(16), "w": range(1 << shape.weight_bits)}, lanes
        ),
        CoverPoint.cross("modes", {"before": modes, "mode": modes}),
        CoverPoint.cross("reset", {"vectors in flight": range(latency + 1)}),
        CoverPoint.cross("sum", {"mode": modes, "sign": RESULT_CLASSES}),
        CoverPoint.cross("nan", {"mode": modes, "byte": octets, "cause": CAUSES}, counting),
    ]
    if AUTOFP2 in shape.modes:
        points.append(CoverPoint.cross("saturation", {"row": ("even", "odd"), "side": ("low", "none", "high")}))
    if shape.refinement != "none":
        elements = range(shape.lanes)
        declared = np.repeat(_declared_masks(shape)[None], shape.blocks, axis=0)
        points.append(
            CoverPoint.cross(
                "masks", {"block": blocks, "weight mask": range(16), "activation mask": range(16)}, declared
            )
        )
        points.append(
            CoverPoint.cross("offsets", {"lane": elements, "refined": ("weight", "activation"), "d": (0, 1, -2, -1)})
        )
    return Coverage(points)


ENCODER_MODES = ("AutoFP2", "NVFP4")
SCALE_RELATIONS = ("first smaller", "equal", "second smaller")
_DISTANCES = ("0", "1", "2", "3", "4", "5 and more")


def encoder_coverage(shape: EncoderShape) -> Coverage:
    """Declare the cover points of a weight encoder.

    ``codes``: every code in every lane of both rows, by mode. ``scales``: for each pair of groups of both rows, which
    scale is smaller, how many binades apart they are, and whether the smaller one is subnormal. ``digits``: every
    code with every digit that it can become in AutoFP2 mode.
    """
    rows, pairs = ("even", "odd"), range(shape.lanes // 32)
    related = np.ones((2, len(pairs), 3, len(_DISTANCES), 2), bool)
    related[:, :, 1, 1:] = False
    digits = np.zeros((16, 3), bool)
    for code in range(16):
        own = (0, 0, 1, 1, 1, 1, 2, 2)[code & 7]
        digits[code, : own + 1 if not shape.grouped else 0] = True
        digits[code, own] = True
    return Coverage(
        [
            CoverPoint.cross(
                "codes", {"row": rows, "lane": range(shape.lanes), "mode": ENCODER_MODES, "code": range(16)}
            ),
            CoverPoint.cross(
                "scales",
                {
                    "row": rows,
                    "pair": pairs,
                    "relation": SCALE_RELATIONS,
                    "binades": _DISTANCES,
                    "subnormal": ("no", "yes"),
                },
                related,
            ),
            CoverPoint.cross("digits", {"code": range(16), "digit": range(3)}, digits),
        ]
    )


def sample_encoder(
    coverage: Coverage,
    shape: EncoderShape,
    inputs: Mapping[str, NDArray[np.uint8]],
    digits: tuple[NDArray[np.int8], ...],
) -> None:
    """Count rows of inputs, all compared; ``digits`` are those of the even and the odd row."""
    mode = inputs["mode_nvfp4"].astype(np.int64)
    lanes, pairs = np.arange(shape.lanes), np.arange(shape.lanes // 32)
    for row, name in enumerate(("even", "odd")):
        codes = inputs[f"row_{name}"]
        coverage.sample("codes", np.full(1, row), lanes, mode[:, None], codes)
        split = mode == 0
        coverage.sample("digits", codes[split], np.abs(digits[row][split]))
        scales = (inputs[f"scale_{name}"] & 0x7F).reshape(len(mode), -1, 2).astype(np.int64)
        first, second = scales[..., 0], scales[..., 1]
        small, large = np.minimum(first, second), np.maximum(first, second)
        distance = np.minimum(np.maximum(large >> 3, 1) - np.maximum(small >> 3, 1), len(_DISTANCES) - 1)
        coverage.sample("scales", np.full(1, row), pairs, np.sign(first - second) + 1, distance, small < 8)


def _spread_offsets(
    shape: VectorShape, refine: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return lane, kind (0 weight, 1 activation) and two-bit offset of every refined element."""
    words = refine.astype(np.int64)
    if shape.refinement == "inplace":
        lane_of = np.arange(shape.lanes)
        block, element = lane_of // 16, lane_of % 16
        d = words[:, block] >> (2 * element) & 3
        of_weight = words[:, block] >> (32 + element // 4) & 1 == 1
        of_activation = (words[:, block] >> (36 + element // 4) & 1 == 1) & ~of_weight
        rows, lanes = np.nonzero(of_weight | of_activation)
        return lanes, of_activation[rows, lanes].astype(np.int64), d[rows, lanes]
    block = np.arange(words.shape[1]) // shape.slots
    valid = words >> 8 & 1 == 1
    rows, record = np.nonzero(valid)
    word = words[rows, record]
    lane = block[record] * 16 + (word >> 9 & 3) * 4
    lanes = lane[:, None] + np.arange(4)
    d = word[:, None] >> (2 * np.arange(4)) & 3
    return lanes.ravel(), np.repeat(word >> 11 & 1, 4), d.ravel()


def sample_vectors(
    coverage: Coverage,
    shape: VectorShape,
    stimulus: Stimulus,
    rows: NDArray[np.intp],
    before: NDArray[np.uint64],
    after: NDArray[np.uint64],
) -> None:
    """Count the vectors of ``rows``, all compared; ``before`` and ``after`` are their partial sums in and out."""
    index = np.full(len(MODES), -1)
    index[list(shape.modes)] = np.arange(len(shape.modes))
    mode = index[stimulus.mode]
    picked = mode[rows]
    nvfp4 = stimulus.mode[rows] & 1 == 1

    a_class, w_class = scale_class(stimulus.a_scale[rows]), scale_class(stimulus.w_scale[rows])
    if not shape.grouped:
        a_class = np.where(nvfp4[:, None], a_class, np.repeat(a_class[:, 0::2], 2, axis=1))
        used = w_class
    else:
        used = np.where(nvfp4[:, None] & (np.arange(shape.w_scales) >= shape.blocks), 0, w_class)
    coverage.sample("scales", np.arange(shape.blocks), picked[:, None], w_class[:, : shape.blocks], a_class)
    worst = np.maximum(used.max(axis=1), a_class.max(axis=1))

    weight_mask, activation_mask = masks(shape, stimulus.refine[rows])
    mask_class = np.asarray(weight_mask.any(axis=1) + 2 * activation_mask.any(axis=1))
    stall = stall_class(stimulus.rst, stimulus.valid)
    coverage.sample("vector", picked, worst, mask_class, stall[rows])
    adjacent = rows[(stall[rows] == 1)]
    coverage.sample("modes", mode[adjacent - 1], mode[adjacent])
    lanes = np.arange(shape.lanes)
    coverage.sample("operands", lanes, stimulus.a[rows], stimulus.w[rows])
    if shape.refinement != "none":
        refined = stimulus.mode[rows] == AUTOFP6
        coverage.sample("masks", np.arange(shape.blocks), weight_mask[refined], activation_mask[refined])
        coverage.sample("offsets", *_spread_offsets(shape, stimulus.refine[rows[refined]]))

    exact = (after - before).view(np.int64)
    halves = [
        (word.astype(np.uint64).view(np.uint32).reshape(-1, 2)).view(np.int32).astype(np.int64)
        for word in (before, after)
    ]
    moved = halves[1] - halves[0]
    sign = np.where(nvfp4, np.sign(exact), np.sign(moved[:, 0]) + (moved[:, 0] == 0) * np.sign(moved[:, 1]))
    coverage.sample("sum", picked, np.asarray(sign, np.int64) + 1)

    of_a, of_w = counting_scales(shape, stimulus.mode)
    octets = np.concatenate([stimulus.w_scale, stimulus.a_scale], axis=1)
    harmful = np.concatenate([of_w, of_a], axis=1) & (octets >= 0x7F) & (stimulus.valid & ~stimulus.rst)[:, None]
    epoch = np.cumsum(stimulus.rst)
    alone = np.bincount(epoch, harmful.sum(axis=1))[epoch] == 1
    row, byte = np.nonzero(harmful[rows] & alone[rows, None])
    octet = octets[rows][row, byte]
    # 0xFF has both causes, so it shows neither.
    single = octet != 0xFF
    coverage.sample("nan", picked[row][single], byte[single], octet[single] >> 7)


def sample_saturation(coverage: Coverage, even_odd: NDArray[np.int64]) -> None:
    """Count saturations of AutoFP2 vectors: -1, 0 or 1 for the even and odd row, [N, 2]."""
    coverage.sample("saturation", np.arange(2), even_odd + 1)


def sample_resets(coverage: Coverage, stimulus: Stimulus, latency: int) -> None:
    """Count resets by the number of vectors that each meets in the pipeline, the one of its own row included."""
    entered = np.concatenate([[0], np.cumsum(stimulus.valid)])
    row = np.flatnonzero(stimulus.rst)
    first = np.maximum(row - latency + 1, 0)
    coverage.sample("reset", entered[row + 1] - entered[first])
