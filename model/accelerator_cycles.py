"""Cycles of a product on the accelerator (docs/accelerator.md)."""

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from model.accelerator import (
    CHUNK,
    DESCRIPTOR_BYTES,
    MEANINGS,
    POST_BYTES,
    AcceleratorConfig,
    Descriptor,
    ErrorCode,
    Format,
    Mode,
    Operand,
    check,
)
from model.block_scaled import PAD
from model.vmac import GROUP

__all__ = ["Processing", "Product", "predict", "predict_chain"]

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
BLOCK = 12
"""Cycles that a post block's fetch takes, without the memory's latency and the block's beats."""
TO_NUMBERS = 34
"""Cycles from a product's last elements in the post-processing unit to its end, without the words of their last request of numbers."""
TO_GROUPS = 49
"""The same for groups, without the words of the last row's."""
TO_REPORT = 115
"""The same for the report."""
TO_RESIDUAL = 14
"""Cycles from elements in the post-processing unit to where they need what is read beside them."""
SIDE = 12
"""Cycles from a request of the side reader to its first word, without the memory's latency."""
ROOM = 64
"""Words of each array beside the sums that are on their way or wait."""
LONGEST = 16
"""Most words of a request of numbers."""
TURNS = 16
"""Requests that the side reader has on their way while the loader has as many."""
RECORDED = 8
"""Cycles from a product's end to when one behind a fence goes on, without the memory's latency."""
POLICY = 212
"""Cycles from the end of a product that the policy unit observes to when one that asks for its choice goes on."""
PICKED = 2
"""Cycles that such a product takes longer."""
_ELEMENT = 32


@dataclass(frozen=True)
class Processing:
    """What cycles depend on if outputs are post-processed.

    Attributes
    ----------
    residual, previous, numbers, groups, refine, report, observe : bool
        As in :class:`model.accelerator.PostBlock`, where the first two are ``adds`` and ``measure``.
    refined : float
        Refined subgroups of 32 outputs, on average.
    """

    residual: bool = False
    previous: bool = False
    numbers: bool = False
    groups: bool = False
    refine: bool = False
    report: bool = False
    observe: bool = False
    refined: float = 0.0


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
    post : Processing, optional
        What is done with the outputs; the accelerator has a post-processing unit then.
    policy : bool
        The mode is the policy unit's choice.
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
    post: Processing | None = None
    policy: bool = False


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


@dataclass(slots=True)
class _Segment:
    """A segment of a tile: when it is in the banks, taken by them to be sent, and sent."""

    tile: int
    length: int
    assembled: float
    offered: float = 0.0
    sent: float = 0.0


@dataclass(slots=True)
class _Tile:
    """A tile that is loaded: real rows, weight vectors and outputs of a row, its last segment, and when its sums are complete."""

    rows: int
    sums: int
    outputs: int
    segment: int
    computed: float = 0.0


def _fetched(config: AcceleratorConfig, read_latency: int) -> int:
    """Return the cycles of a descriptor's fetch."""
    return FETCH + read_latency + DESCRIPTOR_BYTES * 8 // config.data_width


class _Flow:
    """Loader, elements and output, each followed as far as another needs to know.

    The loader goes from segment to segment. Where it waits for banks, elements are followed so far; where those wait for accumulators, so is the
    output. What post-processing reads beside the sums is asked for in between, and has its turn on the bus in the order of requests.
    """

    def __init__(self, config: AcceleratorConfig, product: Product, read_latency: int):
        self._config, self._product, self._latency = config, product, read_latency
        self._words = product.tile_m * product.tile_n
        self._beat = config.data_width // 8
        self._fp2 = product.mode == Mode.AUTOFP2
        post = product.post or Processing()
        self._reads = post.residual + post.previous
        self.bus = float(_fetched(config, read_latency))
        if product.post is not None:
            self.bus += BLOCK + read_latency + POST_BYTES // self._beat
        self.segments: list[_Segment] = []
        self.tiles: list[_Tile] = []
        self._assembled = self._computed = self._sent = 0.0
        # When the loader can take words again.
        self._earliest = 0.0
        self._followed = 0
        self._held: deque[tuple[int, int]] = deque()
        self._used = 0
        # Element rows that have entered and left the reorder buffer, which holds two.
        self._entered, self._left = [0.0, 0.0], [0.0, 0.0]
        self._freed: list[float] = []
        self._under_way: deque[float] = deque()
        self._drain = self._drains()
        self._asks = inf
        self.written = self.requested = self.beaten = 0.0

    @property
    def left(self) -> float:
        """When the last row has left the reorder buffer."""
        return self._left[-1]

    def load(self, length: int, size: int, begins: float, waits: float, blocks: list[tuple[int, int, float]]) -> None:
        """Follow the loading of a segment of so many vectors, which fills ``size`` places of a bank.

        ``begins`` is when there is room for activations, ``waits`` goes by from a request to its first word, and a block has real rows, all rows,
        and the bus cycles of one.
        """
        if len(self.segments) >= TOKENS:
            begins = max(begins, self.sent(len(self.segments) - TOKENS, offered=True))
        while self._used + size > self._config.weight_depth:
            segment, entries = self._held.popleft()
            self._used -= entries
            begins = max(begins, self.sent(segment))
        if self._reads:
            self._serve(begins)
        self.bus = max(self.bus, begins + waits) if self.segments else self.bus + waits
        # Padding takes the time of its vectors, while the bus brings what comes behind it.
        for rows, places, cost in blocks:
            starts = max(self.bus, self._earliest)
            self._fetch(rows, cost, length, begins)
            if rows:
                self._assembled = max(max(self._assembled, starts) + rows * length, self.bus)
            self._assembled += (places - rows) * length
            # Words cannot run ahead far; those behind much padding are asked for while it is assembled.
            ahead = UNDER_WAY * min(length, CHUNK) - REQUEST - self._latency
            far = (places - rows) * length > UNDER_WAY * min(length, CHUNK)
            self._earliest = self._assembled - (min(QUEUED, ahead) if far else QUEUED)
        self._used += size
        self._held.append((len(self.segments), size))
        self.segments.append(_Segment(len(self.tiles), length, self._assembled))

    def loaded(self, tile: _Tile) -> None:
        """Note a tile whose segments are all loaded."""
        self.tiles.append(tile)
        if self._reads and self._asks == inf:
            self._asks = next(self._drain)

    def _fetch(self, rows: int, cost: float, length: int, begins: float) -> None:
        """Give the bus to rows of a segment; row by row, if something else is read."""
        if not self._reads:
            self.bus = max(self.bus, self._earliest) + rows * cost
            return
        requests = 4 if self._product.mode == Mode.AUTOFP6 else 2
        most = max(1, min(UNDER_WAY, TURNS // requests) // -(-length // CHUNK))
        for _ in range(rows):
            asked = max(begins, self._earliest - REQUEST - self._latency)
            if len(self._under_way) >= most:
                asked = max(asked, self._under_way.popleft())
            self._serve(asked)
            self.bus = max(self.bus, asked + REQUEST + self._latency) + cost
            self._under_way.append(self.bus)

    def _serve(self, until: float) -> None:
        """Give the bus to what post-processing asks for before some time."""
        while self._asks < until:
            self._asks = next(self._drain)

    def sent(self, segment: int, *, offered: bool = False) -> float:
        """Return when the banks have sent a segment, or were offered it; elements are followed so far."""
        p = self._product
        while self._followed <= segment:
            number = self._followed
            now = self.segments[number]
            now.offered = max(now.assembled + LOADED, self._sent + SENT)
            start = max(now.offered, self._computed)
            if now.tile > 1 and self.segments[number - 1].tile != now.tile:
                start = max(start, self.freed(now.tile - 2))
            self._computed = start + max(self._words, self._config.read_after_write) * now.length
            a_sent = self._computed - min(self._config.activation_entries, p.tile_m * now.length)
            w_sent = self._computed - min(self._config.weight_entries, p.tile_n * now.length) * p.tile_m
            now.sent = self._sent = max(now.offered + max(p.tile_m, p.tile_n) * now.length, min(a_sent, w_sent))
            if now.tile < len(self.tiles) and number == self.tiles[now.tile].segment:
                self.tiles[now.tile].computed = self._computed
            self._followed += 1
        return self.segments[segment].offered if offered else self.segments[segment].sent

    def freed(self, tile: int) -> float:
        """Return when the sums of a tile have left the elements; the output is followed so far."""
        while len(self._freed) <= tile:
            self._asks = next(self._drain)
        return self._freed[tile]

    def _drains(self) -> Iterator[float]:
        """Follow tile after tile through the output. Yields when something is asked for beside the sums, and behind each tile."""
        config, p, words = self._config, self._product, self._words
        # Elements of 32 bits per sum that is written.
        halves = 1 if p.format == Format.FP32 and not self._fp2 else 2
        taken: deque[float] = deque()
        given = 0.0
        while True:
            number = len(self._freed)
            while number >= len(self.tiles):
                yield inf
            tile = self.tiles[number]
            self.sent(tile.segment)
            elements = tile.outputs if self._fp2 or p.post is not None else halves * tile.sums
            dropped = p.tile_n - -(-tile.sums // config.columns)
            row, beats = self._row_words(elements), -(-elements // config.columns)
            pace = max(beats, row) + dropped if p.post is None else self._pace(elements, beats + dropped)
            following = given
            for element_row in range(config.rows):
                real = min(max(tile.rows - element_row * p.tile_m, 0), p.tile_m)
                full = max(tile.computed + config.deposit, self._entered[-1], self._left[-2] - REORDERED) + words
                self._entered.append(full)
                begins = max(self._left[-1], full + REORDERED)
                following = following if element_row else begins
                ends = begins
                if not self._reads:
                    ends += real * pace
                for _ in range(real if self._reads else 0):
                    ends += pace
                    for part in self._requests(row):
                        asked = given
                        if len(taken) >= min(self._reads * max(1, ROOM // part), TURNS):
                            asked = max(asked, taken.popleft())
                        yield asked
                        self.bus = max(self.bus, asked + SIDE + self._latency) + part
                        ends = max(ends, self.bus - TO_RESIDUAL)
                        taken.append(ends + TO_RESIDUAL)
                if real:
                    self.written = self.beaten = ends - dropped
                    self.requested = self.written - max(beats, row)
                self._left.append(ends + (p.tile_m - real) * p.tile_n)
            given = following
            self._freed.append(self._entered[-1])
            yield -inf

    def _row_words(self, elements: int) -> int:
        """Return the bus words of so many elements of 32 bits."""
        return -(-elements * _ELEMENT // self._config.data_width)

    def _requests(self, row: int) -> Iterator[int]:
        """Yield the words of the requests for what is read beside a row's sums."""
        for first in range(0, row, LONGEST):
            yield from [min(LONGEST, row - first)] * self._reads

    def group_words(self, outputs: int) -> float:
        """Return the bus words of the groups of a row."""
        post = self._product.post
        if post is None or not post.groups:
            return 0
        pairs = -(-outputs // PAD)
        octets = [pairs * PAD // 2, pairs * PAD // GROUP]
        if post.refine:
            octets += [pairs * PAD // (2 * GROUP), max(1, round(pairs * post.refined))]
        return sum(-(-size // self._beat) for size in octets)

    def _pace(self, outputs: int, cycles: int) -> float:
        """Return the cycles of a row in post-processing, by what takes longest: elements, pairs of groups, words written."""
        post = self._product.post or Processing()
        written = self.group_words(outputs) + (self._row_words(outputs) if post.numbers else 0)
        return max(cycles, 2 * -(-outputs // PAD) if post.groups else 0, written)


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
    What post-processing reads shares the bus with the operands.
    """
    _refuse(config, product)
    p = product
    kv = p.k // config.lanes
    fp2, refined = p.mode == Mode.AUTOFP2, p.mode == Mode.AUTOFP6
    vectors = -(-p.n // 2) if fp2 else p.n
    per_vector = 2 if fp2 else 1
    pairs = p.tile_n if fp2 else -(-p.tile_n // 2)
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
    flow = _Flow(config, p, read_latency)
    # The last segment of each panel.
    ends: list[int] = []
    for first_row in range(0, p.m, panel_rows):
        a_rows = min(panel_rows, p.m - first_row)
        for first_vector in range(0, vectors, config.columns * p.tile_n):
            w_rows = min(tile_rows, (vectors - first_vector) * per_vector)
            first_tile = first_vector == 0
            for number, length in enumerate(parts):
                begins = 0.0
                if first_tile and ends:
                    if single:
                        begins = flow.sent(ends[-1] - len(parts) + 1 + number)
                    elif len(ends) > 1:
                        begins = flow.sent(ends[-2])
                waits = REQUEST + read_latency
                if refined:
                    # Offsets are asked for when masks are there, and those of other rows come meanwhile.
                    rows = w_rows + (a_rows if first_tile else 0)
                    waits += MASKED + read_latency - min(rows, LOOKAHEAD, MASKED)
                blocks = [(a_rows, panel_rows, a_costs[number])] if first_tile else []
                flow.load(length, pairs * length, begins, waits, [*blocks, (w_rows, tile_rows, w_costs[number])])
            sums = min(vectors - first_vector, config.columns * p.tile_n)
            outputs = min(p.n - 2 * first_vector, 2 * sums) if fp2 else sums
            flow.loaded(_Tile(a_rows, sums, outputs, len(flow.segments) - 1))
        ends.append(len(flow.segments) - 1)
    flow.freed(len(flow.tiles) - 1)
    dropped = flow.left + DROPPED
    if p.post is None:
        written = flow.written + (FP32_STAGES if p.format == Format.FP32 else 0)
        return round(max(written + STORED, flow.requested + ANSWERED + write_latency, dropped))
    ends_at = [dropped]
    outputs = flow.tiles[-1].outputs
    if p.post.numbers:
        last = -(-outputs * _ELEMENT // config.data_width)
        ends_at.append(flow.beaten + TO_NUMBERS + ((last - 1) % LONGEST + 1) + write_latency)
    if p.post.groups:
        ends_at.append(flow.beaten + TO_GROUPS + flow.group_words(outputs) + write_latency)
    if p.post.report:
        ends_at.append(flow.beaten + TO_REPORT)
    return round(max(ends_at))


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
            total += waits - _fetched(config, read_latency)
    return total
