"""Cycles of a product on the accelerator (docs/accelerator.md)."""

from collections import deque
from dataclasses import dataclass

from model.accelerator import CHUNK, DESCRIPTOR_BYTES, AcceleratorConfig, Format, Mode
from model.pe import DEPOSIT, READ_AFTER_WRITE

__all__ = ["Product", "predict"]

FETCH = 6
"""Cycles from when a descriptor is asked for to the first chunk, without the memory's latency and the beats of the descriptor."""
LOADED = 9
"""Cycles from the last word of a segment on the bus to the first vector issued."""
REQUEST = 8
"""Cycles from a request to its first word in the assembler, without the memory's latency."""
LOOKAHEAD = 8
"""Chunks whose masks are fetched ahead."""
UNDER_WAY = 10
"""Chunks whose other words are asked for ahead."""
SENT = 2
"""Cycles from when banks have sent a segment to the next one's first vectors."""
REORDERED = 2
"""Cycles from the last sum of an element row to its first row."""
STORED = 5
"""Cycles from the last row in the output stage to the product's end, without the memory's latency."""
FP32_STAGES = 7


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


def _row_cycles(
    config: AcceleratorConfig, start: int, vectors: int, refined: bool, octets: float, latency: int
) -> float:
    """Bus cycles of a row's segment, or those of the assembler if they are more."""
    beat = config.data_width // 8
    blocks = config.vmac.blocks
    sizes = [config.lanes // 2, blocks, *([blocks // 2] if refined else [])]
    total = 0.0
    for first in range(0, vectors, CHUNK):
        count = min(CHUNK, vectors - first)
        # A request that does not begin with a beat takes a cycle more than it has words.
        beats: float = sum(-(-count * size // beat) + ((start + first) * size % beat > 0) for size in sizes)
        wanted = count * octets if refined else 0
        # Offsets begin at any byte of a beat: so many beats do they touch on average.
        beats += (wanted + beat - 1) / beat if wanted else 0
        total += max(beats, count, (latency + REQUEST) / (LOOKAHEAD if refined else UNDER_WAY), 4 if refined else 3)
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

    Notes
    -----
    A recursion over segments: a segment is loaded when there is room and the bus has brought the one before; computing follows when it is there
    and the one before is done; a tile drains when it and the one before are done.
    """
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
    # Beats of elements per sum that is written, and bus words per beat.
    halves = 1 if p.format == Format.FP32 and not fp2 else 2
    # Measured: what is lost from a row to the next where a sum is written as two elements.
    between = min(1, max(p.tile_n / 4, 1 / 3)) if halves == 2 else 0
    per_sum = max(halves, halves * 32 * config.columns / config.data_width)

    bus = float(FETCH + read_latency + DESCRIPTOR_BYTES * 8 // config.data_width)
    held: deque[tuple[float, int]] = deque()
    used = 0
    computed = sent = 0.0
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
                # Room in the banks.
                begins = bus
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
                waited = begins > bus or not (used or computed)
                # Loading: padding takes the time of its vectors.
                cost = w_rows * w_costs[number]
                padding = tile_rows - w_rows
                if first_tile:
                    cost += a_rows * a_costs[number]
                    padding += panel_rows - a_rows
                bus = begins + cost + padding * length + (REQUEST + read_latency if waited else 0)
                used += size
                # Computing.
                offered = max(bus + LOADED, sent + SENT)
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
            beats = min(-(-(vectors - first_vector) // config.columns), p.tile_n)
            for element_row in range(config.rows):
                real = min(max(a_rows - element_row * p.tile_m, 0), p.tile_m)
                entered.append(max(computed + DEPOSIT, entered[-1], left[-2]) + words)
                passes = real * (beats * per_sum + p.tile_n - beats + between) + (p.tile_m - real) * p.tile_n
                left.append(max(left[-1], entered[-1] + REORDERED) + passes)
            freed.append(entered[-1])
        panel_freed.append(last_use)
    end = left[-1] + STORED + write_latency
    return round(end + (FP32_STAGES if p.format == Format.FP32 else 0))
