"""Loading, computing and draining of a product's segments on the accelerator, each followed in time (docs/accelerator.md)."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from model.accelerator import CHUNK, DESCRIPTOR_BYTES, POST_BYTES, AcceleratorConfig, Format, Mode
from model.block_scaled import PAD
from model.vmac import GROUP

__all__ = ["Flow", "Processing", "Product", "Repeats", "Tile", "fetched"]

FETCH = 6
"""Cycles from when a descriptor is asked for to the first chunk, without the memory's latency and the beats of the descriptor."""
LOADED = 9
"""Cycles from the last word of a segment on the bus to the first vector issued."""
REQUEST = 9
"""Cycles from a request to its first word in the assembler, without the memory's latency."""
MASKED = 7
"""Cycles from a row's masks to the request for its offsets."""
UNDER_WAY = 10
"""Chunks whose other words are asked for ahead."""
FILLED = 1
"""Cycles from when the assembler begins a chunk until it has the first offsets."""
TOKENS = 17
"""Segments that are loaded or being loaded and have not begun."""
QUEUED = 2
"""Words that wait for the assembler."""
SENT = 2
"""Cycles from when banks have sent a segment to the next one's first vectors."""
REORDERED = 2
"""Cycles from the last sum of an element row to its first row."""
BLOCK = 12
"""Cycles that a post block's fetch takes, without the memory's latency and the block's beats."""
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
ELEMENT = 32


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
    a_refined, w_refined : float or sequence of float
        Refined subgroups of a vector of activations and of weights, for AutoFP6 alone: on average, or of each of a row's vectors, the same in all rows.
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
    a_refined: float | Sequence[float] = 0.0
    w_refined: float | Sequence[float] = 0.0
    post: Processing | None = None
    policy: bool = False


@dataclass(slots=True)
class Segment:
    """A segment of a tile: when it is in the banks, taken by them to be sent, and sent."""

    tile: int
    length: int
    assembled: float
    offered: float = 0.0
    sent: float = 0.0


@dataclass(slots=True)
class Tile:
    """A tile that is loaded: real rows, weight vectors and outputs of a row, its last segment, and when its sums are complete."""

    rows: int
    sums: int
    outputs: int
    segment: int
    computed: float = 0.0


def fetched(config: AcceleratorConfig, read_latency: int) -> int:
    """Return the cycles of a descriptor's fetch."""
    return FETCH + read_latency + DESCRIPTOR_BYTES * 8 // config.data_width


class Flow:
    """Loader, elements and output, each followed as far as another needs to know.

    The loader goes from segment to segment. Where it waits for banks, elements are followed so far; where those wait for accumulators, so is the
    output. What post-processing reads beside the sums is asked for in between, and has its turn on the bus in the order of requests.
    """

    def __init__(self, config: AcceleratorConfig, product: Product, read_latency: int):
        self._config, self._product, self._latency = config, product, read_latency
        self._words = product.tile_m * product.tile_n
        self._deposit = config.deposit
        self._paced = max(self._words, config.read_after_write)
        self._beat = config.data_width // 8
        # Vectors whose codes wait for the assembler.
        self._queued = QUEUED * self._beat / (config.lanes // 2)
        self._fp2 = product.mode == Mode.AUTOFP2
        post = product.post or Processing()
        self.reads = post.residual + post.previous
        self.bus = float(fetched(config, read_latency))
        if product.post is not None:
            self.bus += BLOCK + read_latency + POST_BYTES // self._beat
        self.segments: list[Segment] = []
        self.tiles: list[Tile] = []
        self._assembled = self._computed = self._sent = 0.0
        # When the loader can take words again.
        self._earliest = self._past = 0.0
        self._followed = 0
        self._held: deque[tuple[int, int]] = deque()
        self._used = 0
        # When the last element row has entered the reorder buffer, and the last two have left it.
        self._entered, self._left = 0.0, (0.0, 0.0)
        self._freed: list[float] = []
        self._under_way: deque[float] = deque()
        self._drain = self._drains()
        self._asks = inf
        self.written = self.requested = 0.0

    @property
    def left(self) -> float:
        """When the last row has left the reorder buffer."""
        return self._left[1]

    def load(
        self, length: int, size: int, begins: float, waits: float, blocks: list[tuple[int, int, float, float]]
    ) -> None:
        """Follow the loading of a segment of so many vectors, which fills ``size`` places of a bank.

        ``begins`` is when there is room for activations, ``waits`` goes by from a request to its first word, and a block has real rows, all rows,
        and the cycles of one on the bus and in the assembler.
        """
        if len(self.segments) >= TOKENS:
            begins = max(begins, self.sent(len(self.segments) - TOKENS, offered=True))
        while self._used + size > self._config.weight_depth:
            segment, entries = self._held.popleft()
            self._used -= entries
            begins = max(begins, self.sent(segment))
        if self.reads:
            self._serve(begins)
        self.bus = max(self.bus, begins + waits) if self.segments else self.bus + waits
        # Padding takes the time of its vectors, while the bus brings what comes behind it.
        for rows, places, cost, spent in blocks:
            starts = max(self.bus, self._earliest)
            self._fetch(rows, cost, length, begins)
            if rows:
                self._assembled = max(max(self._assembled, starts) + rows * spent, self.bus)
            self._assembled += (places - rows) * length
            # Words cannot run ahead far; those behind much padding are asked for while it is assembled.
            ahead = UNDER_WAY * min(length, CHUNK) - REQUEST - self._latency
            far = (places - rows) * length > UNDER_WAY * min(length, CHUNK)
            self._earliest = self._assembled - (min(self._queued, ahead) if far else self._queued)
        self._used += size
        self._held.append((len(self.segments), size))
        self.segments.append(Segment(len(self.tiles), length, self._assembled))

    def loaded(self, tile: Tile) -> None:
        """Note a tile whose segments are all loaded."""
        self.tiles.append(tile)
        if self.reads and self._asks == inf:
            self._asks = next(self._drain)

    def _fetch(self, rows: int, cost: float, length: int, begins: float) -> None:
        """Give the bus to rows of a segment; row by row, if something else is read."""
        if not self.reads:
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
            self._computed = start + self._paced * now.length
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
            if self.reads:
                self._asks = next(self._drain)
            else:
                self._output(self.tiles[len(self._freed)])
        return self._freed[tile]

    def _shape(self, tile: Tile) -> tuple[int, int, float]:
        """Return of a row of sums the places that are dropped, the cycles that the writer has for it, and those until the next row."""
        p, columns = self._product, self._config.columns
        # Elements of 32 bits per sum that is written.
        halves = 1 if p.format == Format.FP32 and not self._fp2 else 2
        elements = tile.outputs if self._fp2 or p.post is not None else halves * tile.sums
        dropped = p.tile_n - -(-tile.sums // columns)
        beats = -(-elements // columns)
        written = max(beats, self._row_words(elements))
        return dropped, written, written + dropped if p.post is None else self._pace(elements, beats + dropped)

    def _output(self, tile: Tile) -> None:
        """Follow a tile through the output, which nothing is read beside: element rows that are full, the one that is not, empty ones."""
        self.sent(tile.segment)
        p = self._product
        dropped, written, pace = self._shape(tile)
        full, partial = divmod(tile.rows, p.tile_m)
        empty = self._config.rows - full - bool(partial)
        for count, real in ((full, p.tile_m), (int(partial > 0), partial), (empty, 0)):
            # At least the words of an element row, so that sums are there in time for all rows of a kind but the first.
            spent = real * pace + (p.tile_m - real) * p.tile_n
            for _ in range(min(count, 2)):
                self._enter(tile, spent)
            if count > 2:
                last = self._left[1] + (count - 2) * spent
                self._entered += (count - 2) * self._words
                self._entered = max(self._entered, last - 2 * spent - REORDERED + self._words)
                self._left = last - spent, last
            if count and real:
                self.written = self._left[1] - (p.tile_m - real) * p.tile_n - dropped
                self.requested = self.written - written
        self._freed.append(self._entered)

    def _enter(self, tile: Tile, spent: float) -> float:
        """Follow the sums of an element row into the reorder buffer, which holds two, and out of it; return when it began to leave."""
        free = max(tile.computed + self._deposit, self._entered, self._left[0] - REORDERED)
        self._entered = free + self._words
        begins = max(self._left[1], self._entered + REORDERED)
        self._left = self._left[1], begins + spent
        return begins

    def _drains(self) -> Iterator[float]:
        """Follow tile after tile through an output that something is read beside. Yields when it is asked for, and behind each tile."""
        p = self._product
        taken: deque[float] = deque()
        given = 0.0
        while True:
            number = len(self._freed)
            while number >= len(self.tiles):
                yield inf
            tile = self.tiles[number]
            self.sent(tile.segment)
            dropped, _, pace = self._shape(tile)
            row = self._row_words(tile.outputs)
            following = given
            for element_row in range(self._config.rows):
                real = min(max(tile.rows - element_row * p.tile_m, 0), p.tile_m)
                ends = self._enter(tile, 0)
                following = following if element_row else ends
                for _ in range(real):
                    ends += pace
                    for part in self._requests(row):
                        asked = given
                        if len(taken) >= min(self.reads * max(1, ROOM // part), TURNS):
                            asked = max(asked, taken.popleft())
                        yield asked
                        self.bus = max(self.bus, asked + SIDE + self._latency) + part
                        ends = max(ends, self.bus - TO_RESIDUAL)
                        taken.append(ends + TO_RESIDUAL)
                if real:
                    self.written = ends - dropped
                self._left = self._left[0], ends + (p.tile_m - real) * p.tile_n
            given = following
            self._freed.append(self._entered)
            yield -inf

    def _row_words(self, elements: int) -> int:
        """Return the bus words of so many elements of 32 bits."""
        return -(-elements * ELEMENT // self._config.data_width)

    def _requests(self, row: int) -> Iterator[int]:
        """Yield the words of the requests for what is read beside a row's sums."""
        for first in range(0, row, LONGEST):
            yield from [min(LONGEST, row - first)] * self.reads

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

    def settle(self) -> None:
        """Follow elements up to the last segment, and give back places in banks that the loader will not wait for."""
        self.sent(len(self.segments) - 1)
        self._past = self.bus - REQUEST - MASKED - 2 * self._latency
        while self._held and self.segments[self._held[0][0]].sent <= self._past:
            self._used -= self._held.popleft()[1]

    @property
    def oldest(self) -> int:
        """Number of the first segment that the loader may wait for, once it is settled."""
        count = len(self.segments)
        waiting = (each for each in range(max(0, count - TOKENS), count) if self.segments[each].offered > self._past)
        return min(next(waiting, count), self._held[0][0] if self._held else count)

    def state(self, also: Sequence[int] = ()) -> tuple[object, ...]:
        """Return what the times to come depend on, if nothing is read beside the sums and it is settled; times count from when the bus is free.

        ``also`` are segments that are done, but will be asked for.
        """
        count, past = len(self.segments), self._past
        held = [(segment - count, size) for segment, size in self._held]
        times = [self._assembled, self._earliest, self._computed, self._sent, self._entered, *self._left]
        times += [tile.computed for tile in self.tiles[len(self._freed) :]] + self._freed[-2:]
        # The loader does not wait for what was earlier than `past`.
        times += [past] * (TOKENS - count) + [max(past, each.offered) for each in self.segments[-TOKENS:]]
        times += [max(past, self.segments[number].sent) for number in (*also, *(segment for segment, _ in self._held))]
        return held, len(self.tiles) - len(self._freed), [round(time - self.bus, 6) for time in times]

    def shift(self, by: float, also: Sequence[int] = ()) -> None:
        """Let so much time go by in which everything comes back to the same state."""
        self.bus += by
        self._assembled += by
        self._earliest += by
        self._computed += by
        self._sent += by
        self._entered += by
        self._left = self._left[0] + by, self._left[1] + by
        for segment in {*also, *range(self.oldest, len(self.segments))}:
            self.segments[segment].offered += by
            self.segments[segment].sent += by
        for tile in self.tiles[len(self._freed) :]:
            tile.computed += by
        self._freed[-2:] = [time + by for time in self._freed[-2:]]


class Repeats:
    """Finds where a product repeats itself: in the same state before steps of the same kind, everything takes the same time again.

    Examples
    --------
    Of 1000 steps that are alike few have to be followed::

        repeats, left = Repeats(flow), 1000
        while left:
            follow(flow)
            left -= 1 + repeats.skip(left - 1)
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._seen: deque[tuple[float, tuple[object, ...]]] = deque(maxlen=4)

    def skip(self, left: int, since: int = 0, also: Sequence[int] = ()) -> int:
        """Return how many of so many steps need not be followed, and let their time go by; not while the loader may wait for segments before ``since``."""
        flow = self._flow
        if left < 1 or flow.reads:
            return 0
        flow.settle()
        if flow.oldest < since:
            return 0
        now, state = flow.bus, flow.state(also)
        for back, (then, seen) in enumerate(reversed(self._seen), 1):
            if seen == state:
                rounds = left // back
                flow.shift(rounds * (now - then), also)
                self._seen.clear()
                return rounds * back
        self._seen.append((now, state))
        return 0
