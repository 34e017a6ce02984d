"""Cycles of a product on the accelerator (docs/accelerator.md)."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from model.accelerator import (
    ALIGNMENT,
    CHUNK,
    MEANINGS,
    AcceleratorConfig,
    Descriptor,
    ErrorCode,
    Format,
    Mode,
    Operand,
    check,
)
from model.accelerator_flow import (
    ELEMENT,
    FILLED,
    LONGEST,
    MASKED,
    REQUEST,
    UNDER_WAY,
    Flow,
    Processing,
    Product,
    Repeats,
    Tile,
    fetched,
)
from model.block_scaled import PAD

__all__ = ["Processing", "Product", "predict", "predict_chain"]

LOOKAHEAD = 8
"""Chunks whose masks are fetched ahead."""
STORED = 11
"""Cycles from the last real row in the output stage to the product's end."""
ANSWERED = 14
"""Cycles from that row's beginning to the product's end, without the memory's latency."""
DROPPED = 4
"""Cycles from the last row, which may be padding, to the product's end."""
FP32_STAGES = 7
SUBGROUPS_OF_VECTOR = 8
TO_NUMBERS = 34
"""Cycles from a product's last elements in the post-processing unit to its end, without the words of their last request of numbers."""
TO_GROUPS = 49
"""The same for groups, without the words of the last row's."""
TO_REPORT = 115
"""The same for the report."""
RECORDED = 8
"""Cycles from a product's end to when one behind a fence goes on, without the memory's latency."""
POLICY = 212
"""Cycles from the end of a product that the policy unit observes to when one that asks for its choice goes on."""
PICKED = 2
"""Cycles that such a product takes longer."""


def _code(config: AcceleratorConfig, p: Product) -> ErrorCode | None:
    """Return what the accelerator says of such a descriptor; None if a value does not fit its field."""
    nowhere = Operand(0, 0)
    sizes = (p.m, p.n, p.k, p.tile_m, p.tile_n, p.segment)
    try:
        return check(config, Descriptor(p.mode, p.format, *sizes, nowhere, nowhere, 0, 0).pack())
    except struct.error:
        return None


def _refuse(config: AcceleratorConfig, product: Product) -> None:
    """Raise ValueError if no descriptor may be so, naming the one parameter that the smallest value would set right."""
    code = _code(config, product)
    if code == ErrorCode.OK:
        _refuse_post(config, product)
        return
    reason = "no number for its field" if code is None else MEANINGS[code]
    least: dict[str, Any] = {
        "tile_m": 1,
        "segment": 1,
        "tile_n": 1,
        "k": config.lanes,
        "m": 1,
        "n": 1,
        "mode": Mode.NVFP4,
        "format": 0,
    }
    for name, value in least.items():
        if _code(config, replace(product, **{name: value})) == ErrorCode.OK:
            raise ValueError(f"{name} must be as a descriptor may have it, not {getattr(product, name)}: {reason}")
    raise ValueError(f"product must be as a descriptor may have it, not {product}: {reason}")


def _refuse_post(config: AcceleratorConfig, p: Product) -> None:
    """Raise ValueError if a product may not have such a post block."""
    if (p.post is not None or p.policy) and not config.ppu:
        raise ValueError("ppu must be True for products with post or policy, not False")
    if p.post is None:
        return
    if p.format != Format.FP32:
        raise ValueError(f"format must be FP32 for products with post, not {Format(p.format).name}")
    width = config.columns * p.tile_n << (p.mode == Mode.AUTOFP2)
    if p.post.groups and width % PAD and width < p.n:
        raise ValueError(
            f"tile_n must make tiles of a multiple of {PAD} outputs with groups, not {p.tile_n}, of {width}"
        )


class _Rows:
    """Cycles that a row of an operand takes, segment by segment.

    Rows of an array follow each other at multiples of 16 bytes, not of a beat; masks are those of all rows.
    """

    def __init__(self, config: AcceleratorConfig, p: Product, octets: float | Sequence[float], latency: int) -> None:
        kv = p.k // config.lanes
        self._refined = p.mode == Mode.AUTOFP6
        self._beat, self._latency = config.data_width // 8, latency
        self._exact = isinstance(octets, Sequence)
        counts = list(octets) if isinstance(octets, Sequence) else [octets] * kv
        if len(counts) != kv:
            raise ValueError(f"refined subgroups must be given for {kv} vectors of a row, not for {len(counts)}")
        self._counts = counts if self._refined else [0.0] * kv
        # Offsets before each vector.
        self._before = [0.0, *accumulate(self._counts)]
        self._strided = [
            (size, -(-kv * size // ALIGNMENT) * ALIGNMENT) for size in (config.lanes // 2, config.vmac.blocks)
        ]
        self._masks = config.vmac.blocks // 2
        self._stride = -(-self._before[-1] // ALIGNMENT) * ALIGNMENT

    def bus(self, start: int, vectors: int) -> float:
        """Return the bus cycles of a segment, on average over rows."""
        phases = max(self._beat // ALIGNMENT, 1)
        slowest = (self._latency + REQUEST) / (LOOKAHEAD if self._refined else UNDER_WAY)
        total = 0.0
        for first in range(start, start + vectors, CHUNK):
            count = min(CHUNK, start + vectors - first)
            for row in range(phases):
                beats = sum(self._request(count * size, row * stride + first * size) for size, stride in self._strided)
                if self._refined:
                    beats += self._request(count * self._masks, first * self._masks) + self._offsets(row, first, count)
                total += max(beats, slowest, 4 if self._refined else 2) / phases
        return total

    def _request(self, size: float, at: float) -> float:
        """Return the cycles of a request; one that does not begin with a beat takes one more than it has words."""
        return -(-size // self._beat) + (at % self._beat > 0)

    def _offsets(self, row: int, first: int, count: int) -> float:
        before, size = self._before[first], self._before[first + count] - self._before[first]
        if not size:
            return 0
        if self._exact:
            return self._request(size, row * self._stride + before)
        # Offsets of a row's later chunks begin at any byte of a beat; so many words they have on average.
        aligned = (row * self._stride) % self._beat > 0 if not first else (self._beat - 1) / self._beat
        return max(1, size / self._beat + 0.5) + aligned

    def waits(self, start: int, vectors: int) -> float:
        """Return the cycles in which the assembler waits for the first offsets of chunks."""
        if not self._refined:
            return 0
        firsts = [self._counts[first] for first in range(start, start + vectors, CHUNK)]
        if self._exact:
            return FILLED * sum(count > 0 for count in firsts)
        # None of a vector's subgroups is refined by chance.
        return FILLED * sum(1 - (1 - min(count / SUBGROUPS_OF_VECTOR, 1)) ** SUBGROUPS_OF_VECTOR for count in firsts)


def _follow(config: AcceleratorConfig, p: Product, flow: Flow, latency: int) -> None:
    """Load all tiles but those that only repeat what was before."""
    kv = p.k // config.lanes
    fp2, refined = p.mode == Mode.AUTOFP2, p.mode == Mode.AUTOFP6
    vectors = -(-p.n // 2) if fp2 else p.n
    per_vector = 2 if fp2 else 1
    pairs = p.tile_n if fp2 else -(-p.tile_n // 2)
    panel_rows, tile_vectors = config.rows * p.tile_m, config.columns * p.tile_n
    parts = [min(p.segment, kv - first) for first in range(0, kv, p.segment)]
    a_costs, w_costs = (
        [
            (rows.bus(p.segment * i, length), length + rows.waits(p.segment * i, length))
            for i, length in enumerate(parts)
        ]
        for rows in (_Rows(config, p, octets, latency) for octets in (p.a_refined, p.w_refined))
    )
    single = p.tile_m * kv > config.activation_depth // 2
    # The last segment of each panel.
    ends: list[int] = []

    def tile(a_rows: int, sums: int, *, first: bool) -> None:
        w_rows = sums * per_vector
        for number, length in enumerate(parts):
            begins = 0.0
            if first and ends:
                if single:
                    begins = flow.sent(ends[-1] - len(parts) + 1 + number)
                elif len(ends) > 1:
                    begins = flow.sent(ends[-2])
            waits = REQUEST + latency
            if refined:
                # Offsets are asked for when masks are there, and those of other rows come meanwhile.
                rows = w_rows + (a_rows if first else 0)
                waits += MASKED + latency - min(rows, LOOKAHEAD, MASKED)
            blocks = [(a_rows, panel_rows, *a_costs[number])] if first else []
            weights = w_rows, tile_vectors * per_vector, *w_costs[number]
            flow.load(length, pairs * length, begins, waits, [*blocks, weights])

    panels, across = -(-p.m // panel_rows), -(-vectors // tile_vectors)
    repeated, panel = Repeats(flow), 0
    while panel < panels:
        a_rows = min(panel_rows, p.m - panel * panel_rows)
        within, number = Repeats(flow), 0
        while number < across:
            sums = min(tile_vectors, vectors - number * tile_vectors)
            tile(a_rows, sums, first=number == 0)
            outputs = min(p.n - 2 * number * tile_vectors, 2 * sums) if fp2 else sums
            flow.loaded(Tile(a_rows, sums, outputs, len(flow.segments) - 1))
            number += 1
            # What the panel before has left behind counts once.
            number += within.skip(across - 1 - number, ends[-1] + 1 if ends else 0)
        ends.append(len(flow.segments) - 1)
        panel += 1
        if len(ends) > 1:
            asked = range(ends[-1] - len(parts) + 1, ends[-1] + 1) if single else ends[-2:]
            panel += repeated.skip(panels - 1 - panel, also=asked)


def _whole(*times: float) -> int:
    """Return the cycles of the latest; halves are rounded the same however they were added up."""
    return round(round(max(times), 4))


def predict(config: AcceleratorConfig, product: Product, read_latency: int = 0, write_latency: int = 0) -> int:
    """Predict the cycles of a product's record: from its descriptor's fetch to its last output, with nothing before it and a bus that never stalls.

    Parameters
    ----------
    config : AcceleratorConfig
    product : Product
    read_latency, write_latency : int
        What a memory adds to a burst's first word and to its answer.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        The accelerator would refuse a descriptor with these parameters, see :func:`model.accelerator.check`, or a post block with these tiles.

    Notes
    -----
    A recursion over segments: a segment is loaded when there is room and the bus has brought the one before; computing follows when it is there
    and the one before is done; a tile drains when it and the one before are done. It is supposed that `outstanding` bursts hide the memory's latency.
    What post-processing reads shares the bus with the operands. Tiles and panels that begin in the state of an earlier one are not followed again:
    large products take no longer than small ones, unless something is read beside the sums.
    """
    _refuse(config, product)
    flow, p = Flow(config, product, read_latency), product
    _follow(config, p, flow, read_latency)
    flow.freed(len(flow.tiles) - 1)
    dropped = flow.left + DROPPED
    if p.post is None:
        written = flow.written + (FP32_STAGES if p.format == Format.FP32 else 0)
        return _whole(written + STORED, flow.requested + ANSWERED + write_latency, dropped)
    ends_at = [dropped]
    outputs = flow.tiles[-1].outputs
    if p.post.numbers:
        last = -(-outputs * ELEMENT // config.data_width)
        ends_at.append(flow.written + TO_NUMBERS + ((last - 1) % LONGEST + 1) + write_latency)
    if p.post.groups:
        ends_at.append(flow.written + TO_GROUPS + flow.group_words(outputs) + write_latency)
    if p.post.report:
        ends_at.append(flow.written + TO_REPORT)
    return _whole(*ends_at)


def predict_chain(
    config: AcceleratorConfig, products: Sequence[Product], read_latency: int = 0, write_latency: int = 0
) -> int:
    """Predict the cycles of products that each wait behind a fence for the one before: from the first one's fetch to the last one's end.

    Parameters, result and errors are those of :func:`predict`.
    """
    total = 0
    for number, product in enumerate(products):
        total += predict(config, product, read_latency, write_latency)
        if number:
            # Its descriptor was fetched meanwhile.
            before = products[number - 1].post
            waits = RECORDED + write_latency
            if product.policy:
                waits = PICKED + max(waits, POLICY if before is not None and before.observe else 0)
            total += waits - fetched(config, read_latency)
    return total
