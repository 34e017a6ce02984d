"""Cycles of a product on the accelerator (docs/accelerator.md)."""

import struct
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from model.accelerator import (
    CHUNK,
    DESCRIPTOR_BYTES,
    MEANINGS,
    AcceleratorConfig,
    Descriptor,
    ErrorCode,
    Format,
    Mode,
    Operand,
    check,
)
from model.pe import DEPOSIT, READ_AFTER_WRITE

__all__ = ["Product", "predict"]

FETCH = 6
"""Cycles from when a descriptor is asked for to the first chunk, without the memory's latency and the beats of the descriptor."""
LOADED = 9
"""Cycles from the last word of a segment on the bus to the first vector issued."""
REQUEST = 9
"""Cycles from a request to its first word in the assembler, without the memory's latency."""
MASKED = 7
"""Cycles from a row's masks to the request for its offsets."""
LOOKAHEAD = 8
"""Chunks whose masks are fetched ahead."""
UNDER_WAY = 10
"""Chunks whose other words are asked for ahead."""
TOKENS = 17
"""Segments that are loaded or being loaded and have not begun."""
QUEUED = 2
"""Words that wait for the assembler."""
SENT = 2
"""Cycles from when banks have sent a segment to the next one's first vectors."""
REORDERED = 2
"""Cycles from the last sum of an element row to its first row."""
STORED = 11
"""Cycles from the last real row in the output stage to the product's end."""
ANSWERED = 14
"""Cycles from that row's beginning to the product's end, without the memory's latency."""
DROPPED = 4
"""Cycles from the last row, which may be padding, to the product's end."""
FP32_STAGES = 7
_ELEMENT = 32


@dataclass(frozen=True)
class Product:
    """What the cycles of a product depend on.

    Attributes
    ----------
    mode : Mode
    format : Format
    m, n, k : int
    tile_m, tile_n, segment : int
        As in :class:`model.accelerator.Descriptor`.
    a_refined, w_refined : float
        Refined subgroups of a vector, on average, of activations and weights; for AutoFP6 alone.
    """

    mode: Mode
    format: Format
    m: int
    n: int
    k: int
    tile_m: int
    tile_n: int
    segment: int
    a_refined: float = 0.0
    w_refined: float = 0.0


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


def _row_cycles(
    config: AcceleratorConfig, start: int, vectors: int, refined: bool, octets: float, latency: int
) -> float:
    """Bus cycles of a row's segment."""
    beat = config.data_width // 8
    blocks = config.vmac.blocks
    sizes = [config.lanes // 2, blocks, *([blocks // 2] if refined else [])]
    total = 0.0
    for first in range(0, vectors, CHUNK):
        count = min(CHUNK, vectors - first)
        # A request that does not begin with a beat takes a cycle more than it has words.
        beats: float = sum(-(-count * size // beat) + ((start + first) * size % beat > 0) for size in sizes)
        wanted = count * octets if refined else 0
        # A row's offsets begin with a beat, those of later chunks at any byte of one; so many words they have on average.
        if wanted:
            beats += max(1, wanted / beat + 0.5) + ((beat - 1) / beat if start + first else 0)
        total += max(beats, (latency + REQUEST) / (LOOKAHEAD if refined else UNDER_WAY), 4 if refined else 2)
    return total


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
        The accelerator would refuse a descriptor with these parameters, see :func:`model.accelerator.check`.

    Notes
    -----
    A recursion over segments: a segment is loaded when there is room and the bus has brought the one before; computing follows when it is there
    and the one before is done; a tile drains when it and the one before are done. It is supposed that `outstanding` bursts hide the memory's latency.
    """
    _refuse(config, product)
    p = product
    kv = p.k // config.lanes
    fp2, refined = p.mode == Mode.AUTOFP2, p.mode == Mode.AUTOFP6
    vectors = -(-p.n // 2) if fp2 else p.n
    per_vector = 2 if fp2 else 1
    words = p.tile_m * p.tile_n
    pairs = p.tile_n if fp2 else -(-p.tile_n // 2)
    pace = max(words, READ_AFTER_WRITE)
    panel_rows, tile_rows = config.rows * p.tile_m, config.columns * p.tile_n * per_vector
    parts = [min(p.segment, kv - first) for first in range(0, kv, p.segment)]
    a_costs, w_costs = (
        [
            _row_cycles(config, p.segment * number, length, refined, octets, read_latency)
            for number, length in enumerate(parts)
        ]
        for octets in (p.a_refined, p.w_refined)
    )
    single = p.tile_m * kv > config.activation_depth // 2
    # Elements of 32 bits per sum that is written.
    halves = 1 if p.format == Format.FP32 and not fp2 else 2

    bus = float(FETCH + read_latency + DESCRIPTOR_BYTES * 8 // config.data_width)
    held: deque[tuple[float, int]] = deque()
    taken: deque[float] = deque()
    used = 0
    assembled = computed = sent = written = requested = 0.0
    # Element rows that have entered and left the reorder buffer, which holds two.
    entered, left = [0.0, 0.0], [0.0, 0.0]
    freed: list[float] = []
    panel_freed: list[list[float]] = []
    for first_row in range(0, p.m, panel_rows):
        a_rows = min(panel_rows, p.m - first_row)
        last_use: list[float] = []
        for first_vector in range(0, vectors, config.columns * p.tile_n):
            w_rows = min(tile_rows, (vectors - first_vector) * per_vector)
            first_tile = first_vector == 0
            starts = True
            for number, length in enumerate(parts):
                # Room in the banks, and in the queue of segments.
                begins = 0.0
                if len(taken) == TOKENS:
                    begins = max(begins, taken.popleft())
                size = pairs * length
                while used + size > config.weight_depth:
                    time, entries = held.popleft()
                    used -= entries
                    begins = max(begins, time)
                if first_tile and panel_freed:
                    if single:
                        begins = max(begins, panel_freed[-1][number])
                    elif len(panel_freed) > 1:
                        begins = max(begins, panel_freed[-2][-1])
                waits = REQUEST + read_latency
                if refined:
                    # Offsets are asked for when masks are there, and those of other rows come meanwhile.
                    rows = w_rows + (a_rows if first_tile else 0)
                    waits += MASKED + read_latency - min(rows, LOOKAHEAD, MASKED)
                bus = max(bus, begins + waits) if used or computed else bus + waits
                # Loading: padding takes the time of its vectors, while the bus brings what comes behind it.
                blocks = [(a_rows, panel_rows, a_costs[number])] if first_tile else []
                for rows, places, cost in (*blocks, (w_rows, tile_rows, w_costs[number])):
                    if rows:
                        assembled = max(max(assembled, bus) + rows * length, bus + rows * cost)
                    bus += rows * cost
                    assembled += (places - rows) * length
                    # Words cannot run ahead far; those behind much padding are asked for while it is assembled.
                    ahead = UNDER_WAY * min(length, CHUNK) - REQUEST - read_latency
                    far = (places - rows) * length > UNDER_WAY * min(length, CHUNK)
                    bus = max(bus, assembled - (min(QUEUED, ahead) if far else QUEUED))
                used += size
                # Computing.
                offered = max(assembled + LOADED, sent + SENT)
                taken.append(offered)
                start = max(offered, computed)
                if starts and len(freed) > 1:
                    start = max(start, freed[-2])
                starts = False
                computed = start + pace * length
                a_sent = computed - min(config.activation_entries, p.tile_m * length)
                w_sent = computed - min(config.weight_entries, p.tile_n * length) * p.tile_m
                sent = max(offered + max(p.tile_m, p.tile_n) * length, min(a_sent, w_sent))
                held.append((sent, size))
                last_use = last_use if number else []
                last_use.append(sent)
            # Draining.
            sums = min(vectors - first_vector, config.columns * p.tile_n)
            elements = min(p.n - 2 * first_vector, 2 * sums) if fp2 else halves * sums
            dropped = p.tile_n - -(-sums // config.columns)
            row = max(-(-elements // config.columns), -(-elements * _ELEMENT // config.data_width))
            for element_row in range(config.rows):
                real = min(max(a_rows - element_row * p.tile_m, 0), p.tile_m)
                entered.append(max(computed + DEPOSIT, entered[-1], left[-2] - REORDERED) + words)
                begins = max(left[-1], entered[-1] + REORDERED)
                rows = real * (row + dropped)
                if real:
                    written = begins + rows - dropped
                    requested = written - row
                left.append(begins + rows + (p.tile_m - real) * p.tile_n)
            freed.append(entered[-1])
        panel_freed.append(last_use)
    written += FP32_STAGES if p.format == Format.FP32 else 0
    return round(max(written + STORED, requested + ANSWERED + write_latency, left[-1] + DROPPED))
