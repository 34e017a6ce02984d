"""Loader: walks a product tile by tile, fetches operands from memory and writes them into the banks (docs/accelerator.md)."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from hdl.dma import request_layout, word_layout
from hdl.lib.arith import gated, selected, tree_sum
from hdl.lib.streams import StreamBuffer, StreamFifo
from hdl.lib.verilog import lint_unused
from hdl.tile_engine import load_layout, tile_layout
from model.accelerator import CHUNK, MAX_ROWS, AcceleratorConfig, ErrorCode
from model.dma import DmaStatus
from model.pe import OFFSET_BYTES
from model.vmac import GROUP, SUBGROUPS

__all__ = ["ARRAYS", "Assembler", "Fetcher", "Loader", "Walker", "job_layout", "token_layout"]

ARRAYS = ("codes", "scales", "masks", "offsets")
"""Arrays of an operand in memory."""
_MASKS, _SCALES, _OFFSETS, _CODES = range(4)
_CHUNKS, _PIECES = 8, 8
"""Chunks whose masks are fetched ahead, and chunks that wait for their words."""
_TOKENS = 16
_REQUESTS = 64
READ_BASE = ErrorCode.READ_BEYOND - DmaStatus.REFUSED
"""Added to the status of a failed read gives its code."""


def arrays_of(config: AcceleratorConfig) -> tuple[str, ...]:
    """Return the arrays that the configuration reads."""
    return ARRAYS[: 2 if config.refinement == "none" else 4]


def vector_bytes(config: AcceleratorConfig) -> dict[str, int]:
    """Return the bytes of a vector in the arrays that have a fixed size for it."""
    return {"codes": config.lanes // 2, "scales": config.lanes // GROUP, "masks": config.lanes // GROUP // 2}


def _word_bits(config: AcceleratorConfig) -> dict[str, int]:
    """Return how much of a bus word can be needed of each array: no more than there is of a chunk."""
    chunk = {name: CHUNK * size for name, size in vector_bytes(config).items()}
    chunk["offsets"] = CHUNK * SUBGROUPS * config.vmac.blocks
    return {name: min(config.data_width, 8 * chunk[name]) for name in arrays_of(config)}


def _address_bits(config: AcceleratorConfig) -> int:
    return max(config.activation_depth, config.weight_depth).bit_length() - 1


def _index_bits(config: AcceleratorConfig) -> int:
    return (max(config.rows, config.columns) - 1).bit_length()


def job_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a product that was checked: fields of its descriptor, with what follows from them.

    ``kv`` are K-vectors, ``single``: activations fill more than half a bank.
    """
    arrays = arrays_of(config)
    operand = data.StructLayout(
        {**dict.fromkeys(arrays, config.address_width), **{f"{name}_stride": 32 for name in arrays}}
    )
    return data.StructLayout(
        {
            "fp2": 1,
            "refined": 1,
            "fp32": 1,
            "single": 1,
            "m": MAX_ROWS.bit_length(),
            "n": MAX_ROWS.bit_length(),
            "kv": config.max_kv.bit_length(),
            "tile_m": config.max_m.bit_length(),
            "tile_n": config.max_n.bit_length(),
            "segment": config.max_kv.bit_length(),
            "out_scale": 32,
            "a": operand,
            "w": operand,
            "out": config.address_width,
            "out_stride": 32,
        }
    )


def output_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of what the output stage is told of a tile, see :class:`hdl.output.OutputStage`; ``beyond``: it has no address."""
    return data.StructLayout(
        {
            "address": config.address_width,
            "stride": 32,
            "beyond": 1,
            "rows": (config.rows * config.max_m).bit_length(),
            "outputs": (2 * config.columns * config.max_n).bit_length(),
            "fp32": 1,
            "scale": 32,
        }
    )


def token_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a token: a segment that is loaded, or a product's end.

    ``starts``: the first segment of a tile; ``entries``: what it fills of a bank of weights; ``frees_activations``: no later one needs its
    activations; ``frees_panel``: nor any of its panel; ``code``: how loading ended; ``since`` and ``descriptor``: when the product began and the
    address of its descriptor.
    """
    return data.StructLayout(
        {
            "end": 1,
            "code": 8,
            "since": 32,
            "descriptor": config.address_width,
            "starts": 1,
            "frees_activations": 1,
            "frees_panel": 1,
            "entries": config.weight_depth.bit_length(),
            "tile": tile_layout(config),
            "output": output_layout(config),
        }
    )


def place_bits(config: AcceleratorConfig) -> int:
    """Return the bits of a place in memory: an address, and above it whether it is beyond the address space."""
    return config.address_width + 1


def _advanced(m: Module, name: str, place: Value, amount: Value) -> Value:
    """Return a place so many bytes further on; what is beyond the address space stays there."""
    space = len(place) - 1
    total = Signal(max(space, len(amount)) + 1, name=f"{name}_further")
    m.d.comb += total.eq(place[:space] + amount)
    return Cat(total[:space], place[space] | total[space:].any())


def mask_request_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a request for the masks of a chunk."""
    return data.StructLayout({"place": place_bits(config), "count": CHUNK.bit_length()})


def _chunk_fields(config: AcceleratorConfig) -> dict[str, object]:
    return {
        "zero": 1,
        "refined": 1,
        "weight": 1,
        "odd": 1,
        "ends": 1,
        "index": _index_bits(config),
        "line": _address_bits(config),
        "step": _address_bits(config),
        "count": CHUNK.bit_length(),
    }


def chunk_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a chunk: up to 32 vectors of a row, where they are in memory and where they go.

    ``zero``: they are padding; ``ends``: the segment's last; ``line`` and ``step``: address of the first vector in its bank, and from one to the
    next; ``first``: the row begins; ``resumes``: the row goes on behind an earlier segment, as row ``row`` of its tile.
    """
    refinement = (
        {}
        if config.refinement == "none"
        else {"offsets": place_bits(config), "first": 1, "resumes": 1, "row": _row_bits(config)}
    )
    return data.StructLayout(
        {
            **_chunk_fields(config),
            "codes": place_bits(config),
            "scales": place_bits(config),
            **refinement,
        }
    )


def piece_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of a chunk whose words are on their way; ``octets``: bytes of offsets."""
    octets = {} if config.refinement == "none" else {"octets": (CHUNK * SUBGROUPS * config.vmac.blocks).bit_length()}
    return data.StructLayout({**_chunk_fields(config), **octets})


def _row_bits(config: AcceleratorConfig) -> int:
    return (max(config.rows * config.max_m, config.columns * config.max_n) - 1).bit_length()


def _ones(value: Value) -> Value:
    return tree_sum([value[i] for i in range(len(value))])


def _log2(power: int) -> int:
    return power.bit_length() - 1


class Walker(wiring.Component):
    """Walk a product: panel of activations by panel, within it tile by tile of weights, within it segment by segment of K.

    Chunks come in the order in which they are to be loaded, 1 per cycle. Activations come with the segments of their panel's first tile. A panel
    that fits half of the banks begins when the other half's last use is over; one that does not follows segment by segment where the panel before
    is no longer needed. Padding and, after an error, everything else gives chunks of zeros until the tile is complete.

    Members
    -------
    job : In(job)
        Stable while ``busy``.
    start : In(1)
        Begin; ``code`` is then how the check of the descriptor ended, and if it is not 0 there is nothing but an end.
    busy : Out(1)
    failed : In(1)
        A fetch failed. No more is fetched.
    stop : In(1)
        End with this tile.
    code, since, descriptor : In
        Go into the end's token. They must hold while ``busy``.
    free_panel, free_activations : In(1)
        The oldest panel, its next segment of activations is no longer needed. A panel goes with its last segment.
    free_entries : In
        So many entries of the banks of weights are no longer needed.
    quiet : In(1)
        All chunks were assembled.
    mask : Out(stream of mask request)
        Comes with its chunk or before it.
    chunk : Out(stream of chunk)
    token : Out(stream of token)
        A segment's comes when its loading begins.
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        members = {
            "job": In(job_layout(config)),
            "start": In(1),
            "busy": Out(1),
            "failed": In(1),
            "stop": In(1),
            "code": In(8),
            "since": In(32),
            "descriptor": In(config.address_width),
            "free_panel": In(1),
            "free_activations": In(1),
            "free_entries": In(config.weight_depth.bit_length()),
            "quiet": In(1),
            "chunk": Out(stream.Signature(chunk_layout(config))),
            "token": Out(stream.Signature(token_layout(config))),
        }
        if config.refinement != "none":
            members["mask"] = Out(stream.Signature(mask_request_layout(config)))
        super().__init__(members)

    def elaborate(self, platform: object) -> Module:
        """Build the nested loops."""
        m = Module()
        config = self._config
        arrays = arrays_of(config)
        refinement = config.refinement != "none"
        job = self.job
        chunk, token = self.chunk.payload, self.token.payload
        # Bytes of a vector in each array.
        shift = {name: _log2(size) for name, size in vector_bytes(config).items()}

        # Where the next panel, the tile and the row that is loaded begin in memory.
        panel, tile, row = (
            {name: Signal(place_bits(config), name=f"{kind}_{name}") for name in arrays}
            for kind in ("panel", "tile", "row")
        )
        out_next, out_tile = (Signal(place_bits(config), name=f"out_{n}") for n in ("next", "tile"))
        a_left, w_left, row_left = (Signal(MAX_ROWS.bit_length(), name=f"{n}_left") for n in ("a", "w", "row"))
        k_start, k_row, length = (Signal(len(job.kv), name=n) for n in ("k_start", "k_row", "length"))
        weight, odd = Signal(), Signal()
        index = Signal(range(max(config.rows, config.columns)))
        place = Signal(max(len(job.tile_m), len(job.tile_n)))
        number = Signal(_row_bits(config))
        base, line = Signal(_address_bits(config)), Signal(_address_bits(config))
        step = Signal(_address_bits(config))
        a_half, was_single = Signal(), Signal()
        a_base = Signal(tile_layout(config)["activation_base"].shape)
        panels = Signal(range(3))
        # The banks of weights are rings of segments.
        w_base = Signal(_log2(config.weight_depth))
        used, needs = Signal(range(config.weight_depth + 1)), Signal(range(config.weight_depth + 1))
        # Segments of the panel: which is loaded, and how many of the panel before are free.
        part, freed = Signal(len(job.kv)), Signal(len(job.kv))
        first_tile = Signal()

        # Sizes of a tile in rows of memory.
        panel_rows = Signal((config.rows * config.max_m).bit_length())
        tile_rows = Signal((2 * config.columns * config.max_n).bit_length())
        tile_bytes = Signal(len(tile_rows) + 3)
        pairs = Signal(len(job.tile_n))
        wide = Signal()
        m.d.comb += [
            panel_rows.eq(job.tile_m * config.rows),
            tile_rows.eq(Mux(job.fp2, (job.tile_n * config.columns) << 1, job.tile_n * config.columns)),
            wide.eq(~job.fp2 & ~job.fp32),
            tile_bytes.eq(Mux(wide, tile_rows << 3, tile_rows << 2)),
            pairs.eq(Mux(job.fp2, job.tile_n, job.tile_n[1:] + job.tile_n[0])),
        ]

        # Chunks.
        left = Signal(len(job.kv))
        row_ends, load_ends, real = Signal(), Signal(), Signal()
        last_place, last_index = Signal(), Signal()
        k_at = Signal(len(job.kv))
        pushes = Signal()
        at = {name: Signal(place_bits(config), name=f"at_{name}") for name in arrays if name != "offsets"}
        m.d.comb += [
            left.eq(length - k_row),
            row_ends.eq(left <= CHUNK),
            k_at.eq(k_start + k_row),
            real.eq(row_left.any() & ~self.failed),
            last_place.eq(place == Mux(weight, job.tile_n, job.tile_m) - 1),
            last_index.eq(index == Mux(weight, config.columns - 1, config.rows - 1)),
            load_ends.eq(row_ends & last_place & last_index & (odd | ~weight | ~job.fp2)),
            *(at[name].eq(_advanced(m, f"at_{name}", row[name], k_at << shift[name])) for name in at),
            chunk.zero.eq(~real),
            chunk.refined.eq(job.refined),
            chunk.weight.eq(weight),
            chunk.odd.eq(weight & Mux(job.fp2, odd, place[0])),
            chunk.ends.eq(load_ends & weight),
            chunk.index.eq(index),
            chunk.line.eq(line),
            chunk.step.eq(step),
            chunk.count.eq(Mux(row_ends, left, CHUNK)),
            chunk.codes.eq(at["codes"]),
            chunk.scales.eq(at["scales"]),
        ]
        if refinement:
            m.d.comb += [
                chunk.offsets.eq(row["offsets"]),
                chunk.first.eq(~k_at.any()),
                chunk.resumes.eq(~k_row.any() & k_start.any()),
                chunk.row.eq(number),
                self.mask.payload.place.eq(at["masks"]),
                self.mask.payload.count.eq(chunk.count),
            ]

        # Segments and what follows them.
        tile_ends, panel_ends = Signal(), Signal()
        behind = Signal(len(job.kv) + 1)
        m.d.comb += [
            behind.eq(k_start + job.segment),
            tile_ends.eq(behind >= job.kv),
            panel_ends.eq(w_left <= tile_rows),
            token.tile.command.m.eq(job.tile_m),
            token.tile.command.n.eq(job.tile_n),
            token.tile.command.kv.eq(job.kv),
            token.tile.command.mode_nvfp4.eq(~job.fp2),
            token.tile.activation_base.eq(a_base),
            token.tile.weight_base.eq(w_base),
            token.entries.eq(needs),
            token.tile.segment.eq(Mux(tile_ends, job.kv - k_start, job.segment)),
            token.output.address.eq(out_tile),
            token.output.beyond.eq(out_tile[-1]),
            token.output.stride.eq(job.out_stride),
            token.output.rows.eq(Mux(out_tile[-1], 0, Mux(a_left < panel_rows, a_left, panel_rows))),
            token.output.outputs.eq(Mux(w_left < tile_rows, w_left, tile_rows)),
            token.output.fp32.eq(job.fp32),
            token.output.scale.eq(job.out_scale),
            token.starts.eq(~k_start.any()),
            token.frees_activations.eq(panel_ends | self.stop),
            token.frees_panel.eq(tile_ends & (panel_ends | self.stop)),
            token.code.eq(self.code),
            token.since.eq(self.since),
            token.descriptor.eq(self.descriptor),
        ]
        if refinement:
            m.d.comb += token.tile.command.refine_en.eq(job.refined)

        takes_panel, takes_segment = Signal(), Signal()
        m.d.sync += [
            panels.eq(panels + takes_panel - self.free_panel),
            used.eq(used + Mux(takes_segment, needs, 0) - self.free_entries),
            freed.eq(Mux(self.free_panel, 0, freed + self.free_activations)),
        ]
        stopped = Signal()
        half = _log2(config.activation_depth) - 1
        m.d.comb += self.busy.eq(1)
        with m.FSM():
            with m.State("idle"):
                m.d.comb += self.busy.eq(0)
                m.d.sync += [
                    *(panel[name].eq(job.a[name]) for name in arrays),
                    out_next.eq(job.out),
                    a_left.eq(job.m),
                ]
                with m.If(self.start):
                    m.next = "first panel"
                    with m.If(self.code.any()):
                        m.next = "end"
            with m.State("first panel"), m.If(~panels.any() | ~(job.single | was_single)):
                m.next = "panel"
            with m.State("panel"):
                m.d.comb += takes_panel.eq(~panels[1])
                m.d.sync += [
                    *(tile[name].eq(job.w[name]) for name in arrays),
                    w_left.eq(job.n),
                    out_tile.eq(out_next),
                    k_start.eq(0),
                    part.eq(0),
                    first_tile.eq(1),
                    a_base.eq(Cat(Const(0, half), ~a_half & ~job.single)),
                ]
                with m.If(takes_panel):
                    m.d.sync += [a_half.eq(~a_half & ~job.single), was_single.eq(job.single)]
                    m.next = "size"
            with m.State("size"):
                m.d.sync += needs.eq(pairs * token.tile.segment)
                m.next = "segment"
            with m.State("segment"):
                # Activations may take the place of the panel before.
                in_place = first_tile & job.single & panels[1]
                m.d.comb += [
                    self.token.valid.eq((used + needs <= config.weight_depth) & (~in_place | (freed > part))),
                    takes_segment.eq(self.token.valid & self.token.ready),
                ]
                m.d.sync += [
                    *(row[name].eq(Mux(first_tile, panel[name], tile[name])) for name in arrays),
                    row_left.eq(Mux(first_tile, a_left, w_left)),
                    weight.eq(~first_tile),
                    length.eq(token.tile.segment),
                    step.eq(Mux(first_tile, job.tile_m, pairs)),
                ]
                for target in (base, line):
                    m.d.sync += target.eq(Mux(first_tile, a_base, token.tile.weight_base))
                with m.If(takes_segment):
                    m.d.sync += [part.eq(part + 1), stopped.eq(tile_ends & self.stop)]
                    m.next = "rows"
            with m.State("weights"):
                m.d.sync += [
                    *(row[name].eq(tile[name]) for name in arrays),
                    row_left.eq(w_left),
                    weight.eq(1),
                    step.eq(pairs),
                ]
                for target in (base, line):
                    m.d.sync += target.eq(token.tile.weight_base)
                with m.If(tile_ends):
                    m.d.sync += [panel[name].eq(row[name]) for name in arrays]
                m.next = "rows"
            with m.State("rows"):
                if refinement:
                    wanted = Signal()
                    m.d.comb += [
                        wanted.eq(job.refined & real),
                        self.mask.valid.eq(wanted & self.chunk.ready),
                        self.chunk.valid.eq(~wanted | self.mask.ready),
                    ]
                else:
                    m.d.comb += self.chunk.valid.eq(1)
                m.d.comb += pushes.eq(self.chunk.valid & self.chunk.ready)
                with m.If(pushes):
                    m.d.sync += [k_row.eq(k_row + CHUNK), line.eq(line + (step << _log2(CHUNK)))]
                with m.If(pushes & row_ends):
                    following = Signal(len(place))
                    stays = Signal()
                    m.d.comb += stays.eq(weight & job.fp2 & ~odd)
                    m.d.comb += following.eq(place)
                    m.d.sync += [
                        *(
                            row[name].eq(
                                _advanced(
                                    m,
                                    f"row_{name}",
                                    row[name],
                                    Mux(weight, job.w[f"{name}_stride"], job.a[f"{name}_stride"]),
                                )
                            )
                            for name in arrays
                        ),
                        row_left.eq(row_left - row_left.any()),
                        k_row.eq(0),
                        number.eq(number + 1),
                        odd.eq(stays),
                    ]
                    with m.If(~weight & ~k_start.any()):
                        m.d.sync += out_next.eq(_advanced(m, "out_next", out_next, job.out_stride))
                    # Rows of activations go to one element row after the other, those of weights to each column in turn.
                    with m.If(~stays):
                        with m.If(weight):
                            m.d.sync += index.eq(Mux(last_index, 0, index + 1))
                            with m.If(last_index):
                                m.d.comb += following.eq(Mux(last_place, 0, place + 1))
                        with m.Else():
                            m.d.comb += following.eq(Mux(last_place, 0, place + 1))
                            with m.If(last_place):
                                m.d.sync += index.eq(Mux(last_index, 0, index + 1))
                    m.d.sync += place.eq(following)
                    m.d.sync += line.eq(base + Mux(weight & ~job.fp2, following >> 1, following))
                    with m.If(load_ends):
                        m.d.sync += number.eq(0)
                        m.next = "weights"
                        with m.If(weight):
                            m.next = "segment loaded"
            with m.State("segment loaded"):
                m.d.sync += [
                    k_start.eq(behind),
                    a_base.eq(a_base + job.tile_m * job.segment),
                    w_base.eq(w_base + needs),
                ]
                m.next = "size"
                with m.If(tile_ends):
                    m.d.sync += [
                        *(tile[name].eq(row[name]) for name in arrays),
                        k_start.eq(0),
                        a_base.eq(Cat(Const(0, half), a_half)),
                        first_tile.eq(0),
                        w_left.eq(w_left - tile_rows),
                        out_tile.eq(_advanced(m, "out_tile", out_tile, tile_bytes)),
                    ]
                    with m.If(panel_ends):
                        m.d.sync += a_left.eq(a_left - panel_rows)
                        m.next = "panel"
                        with m.If(a_left <= panel_rows):
                            m.next = "end"
                    with m.If(stopped):
                        m.next = "end"
            with m.State("end"):
                m.d.comb += [self.token.valid.eq(self.quiet), token.end.eq(1)]
                with m.If(self.token.valid & self.token.ready):
                    m.next = "idle"
        return m


class Fetcher(wiring.Component):
    """Request the words of chunks and sort them by array.

    The order of requests is such that a word always finds room once what lies before it has been used: masks of a chunk up to four chunks
    ahead, because its offsets cannot be requested before they are counted; then its scales, offsets and codes.

    Members
    -------
    mask : In(stream of mask request)
        With refinement.
    chunk : In(stream of chunk)
    request, word, done
        Those of a :class:`hdl.dma.ReadDma`.
    piece : Out(stream of piece)
        A chunk whose words were requested.
    words : Out(streams of bus words), masks, scales, offsets and codes
        Each request begins with a new word. Zeros after an error.
    error : Out(DmaStatus)
        The first error since ``clear``.
    clear : In(1)
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        members = {
            "chunk": In(stream.Signature(chunk_layout(config))),
            "request": Out(stream.Signature(request_layout(config.dma))),
            "word": In(stream.Signature(word_layout(config.dma))),
            "done": In(stream.Signature(2)),
            "piece": Out(stream.Signature(piece_layout(config))),
            "error": Out(2),
            "clear": In(1),
        }
        if config.refinement != "none":
            members["mask"] = In(stream.Signature(mask_request_layout(config)))
        members |= {name: Out(stream.Signature(bits)) for name, bits in _word_bits(config).items()}
        super().__init__(members)

    def elaborate(self, platform: object) -> Module:
        """Build requests, the order of words, and their queues."""
        m = Module()
        config = self._config
        refinement = config.refinement != "none"
        beat = _log2(config.data_width // 8)
        size = vector_bytes(config)
        octets_bits = (CHUNK * SUBGROUPS * config.vmac.blocks).bit_length()

        def words_of(octets: int) -> int:
            return -(-octets * 8 // config.data_width)

        m.submodules.chunks = chunks = StreamFifo(chunk_layout(config), _CHUNKS)
        wiring.connect(m, wiring.flipped(self.chunk), chunks.input)
        chunk = chunks.output.payload
        m.submodules.pieces = pieces = StreamFifo(piece_layout(config), _PIECES)
        wiring.connect(m, pieces.output, wiring.flipped(self.piece))
        kind_layout = data.StructLayout({"kind": 2, "more": (CHUNK * config.lanes // 2).bit_length() - beat})
        m.submodules.kinds = kinds = StreamFifo(kind_layout, _REQUESTS)
        ahead = _CHUNKS + _PIECES + 3
        depths = {
            "masks": ahead * words_of(CHUNK * size["masks"]),
            "scales": 2 * words_of(CHUNK * size["scales"]),
            "offsets": 1 + words_of(CHUNK * SUBGROUPS * config.vmac.blocks),
            "codes": 4,
        }
        kinds_of = {"masks": _MASKS, "scales": _SCALES, "offsets": _OFFSETS, "codes": _CODES}
        queues = {}
        for name, bits in _word_bits(config).items():
            m.submodules[f"{name}_words"] = queue = StreamFifo(bits, max(depths[name], 2))
            wiring.connect(m, queue.output, wiring.flipped(getattr(self, name)))
            queues[kinds_of[name]] = queue.input

        # Requests.
        # A request for masks goes before one that waits, so what is offered may change; behind the buffer it stays.
        m.submodules.requests = requests = StreamBuffer(request_layout(config.dma))
        wiring.connect(m, requests.output, wiring.flipped(self.request))
        request = requests.input.payload
        kind, wants, accepted = Signal(2), Signal(), Signal()
        # A place beyond the address space becomes a request that the DMA engine refuses: one of no bytes.
        place, octets_asked = Signal(place_bits(config)), Signal(len(request.bytes))
        behind = Signal(len(request.bytes), attrs=lint_unused("words are counted, not bytes"))
        asks_mask: Value = Const(0, 1)
        m.d.comb += [
            requests.input.valid.eq(wants & kinds.input.ready),
            accepted.eq(requests.input.valid & requests.input.ready),
            kinds.input.valid.eq(accepted),
            kinds.input.payload.kind.eq(kind),
            request.address.eq(place),
            request.bytes.eq(Mux(place[-1], 0, octets_asked)),
            behind.eq(octets_asked - 1),
            kinds.input.payload.more.eq(behind[beat:]),
        ]
        if refinement:
            asks_mask = self.mask.valid
            m.d.comb += self.mask.ready.eq(requests.input.ready & kinds.input.ready)
            m.submodules.counts = counts = StreamFifo(octets_bits, ahead)
            m.submodules.pointers = memory = Memory(
                shape=(config.max_kv * SUBGROUPS * config.vmac.blocks).bit_length(),
                depth=2 << _row_bits(config),
                init=[],
            )
            read, write = memory.read_port(), memory.write_port()
            pointer, start = Signal(memory.shape), Signal(memory.shape)
            octets = Signal(octets_bits)
            m.d.comb += [
                read.en.eq(1),
                read.addr.eq(Cat(chunk.row, chunk.weight)),
                start.eq(Mux(chunk.first, 0, Mux(chunk.resumes, read.data, pointer))),
                write.addr.eq(read.addr),
                write.data.eq(start + counts.output.payload),
                pieces.input.payload.octets.eq(Mux(chunk.zero, 0, octets)),
            ]
        for name in _chunk_fields(config):
            m.d.comb += pieces.input.payload[name].eq(chunk[name])

        with m.FSM():
            with m.State("scales"):
                if refinement:
                    m.d.sync += octets.eq(0)
                with m.If(chunks.output.valid & chunk.zero):
                    m.d.comb += [pieces.input.valid.eq(1), chunks.output.ready.eq(pieces.input.ready)]
                with m.Elif(chunks.output.valid):
                    m.d.comb += [
                        wants.eq(1),
                        kind.eq(_SCALES),
                        place.eq(chunk.scales),
                        octets_asked.eq(chunk.count << _log2(size["scales"])),
                    ]
                    with m.If(accepted & ~asks_mask):
                        m.next = "codes"
                        if refinement:
                            with m.If(chunk.refined):
                                m.next = "offsets"
            if refinement:
                with m.State("offsets"), m.If(counts.output.valid):
                    m.d.comb += [
                        wants.eq(counts.output.payload.any()),
                        kind.eq(_OFFSETS),
                        place.eq(_advanced(m, "offsets", chunk.offsets, start)),
                        octets_asked.eq(counts.output.payload),
                    ]
                    with m.If(~counts.output.payload.any() | (accepted & ~asks_mask)):
                        m.d.comb += [counts.output.ready.eq(1), write.en.eq(1)]
                        m.d.sync += [octets.eq(counts.output.payload), pointer.eq(write.data)]
                        m.next = "codes"
            with m.State("codes"):
                m.d.comb += [
                    wants.eq(pieces.input.ready),
                    kind.eq(_CODES),
                    place.eq(chunk.codes),
                    octets_asked.eq(chunk.count << _log2(size["codes"])),
                ]
                with m.If(accepted & ~asks_mask):
                    m.d.comb += [pieces.input.valid.eq(1), chunks.output.ready.eq(1)]
                    m.next = "scales"
        if refinement:
            with m.If(asks_mask):
                m.d.comb += [
                    wants.eq(1),
                    kind.eq(_MASKS),
                    place.eq(self.mask.payload.place),
                    octets_asked.eq(self.mask.payload.count << _log2(size["masks"])),
                ]

        # Words go to the queue of their request. One that was refused has no words, so zeros stand for them.
        entry = kinds.output.payload
        refused, room, moves, ends = (Signal(name=name) for name in ("refused", "room", "moves", "ends"))
        filled = Signal(len(entry.more))
        m.d.comb += [
            refused.eq(self.done.valid & (self.done.payload == DmaStatus.REFUSED)),
            moves.eq(
                kinds.output.valid & room & (refused | (self.word.valid & (~self.word.payload.last | self.done.valid)))
            ),
            ends.eq(moves & Mux(refused, filled == entry.more, self.word.payload.last)),
            self.word.ready.eq(moves & ~refused),
            self.done.ready.eq(ends),
            kinds.output.ready.eq(ends),
        ]
        for number, queue in queues.items():
            with m.If(entry.kind == number if number else ~entry.kind.any()):
                m.d.comb += [room.eq(queue.ready), queue.valid.eq(moves)]
            m.d.comb += queue.payload.eq(Mux(refused, 0, self.word.payload.data))
        with m.If(moves):
            m.d.sync += filled.eq(Mux(ends, 0, filled + 1))
        with m.If(self.clear):
            m.d.sync += self.error.eq(0)
        with m.Elif(ends & ~self.error.any()):
            m.d.sync += self.error.eq(self.done.payload)

        if refinement:
            # A byte of offsets for every bit of the masks.
            sum_, total = Signal(octets_bits), Signal(octets_bits)
            masks = queues[_MASKS]
            m.d.comb += total.eq(sum_ + _ones(masks.payload))
            counted, count = Signal(), Signal(octets_bits)
            with m.If(counts.input.ready):
                m.d.sync += counted.eq(0)
            with m.If(masks.valid):
                m.d.sync += sum_.eq(total)
                with m.If(ends):
                    m.d.sync += [sum_.eq(0), counted.eq(1), count.eq(total)]
            # There is room for as many counts as there can be masks.
            m.d.comb += [counts.input.valid.eq(counted), counts.input.payload.eq(count)]
        return m


class Assembler(wiring.Component):
    """Put vectors together from the words of their arrays, 1 per cycle, and say where in the banks they go.

    Members
    -------
    piece : In(stream of piece)
    scales, codes, masks, offsets : In(streams of bus words)
    load : Out(stream of load word)
        Latency 1.
    done : Out(1)
        The last vector of a piece is in its bank from the next cycle on.
    segment_done : Out(1)
        It was the last of a segment.
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        members = {
            "piece": In(stream.Signature(piece_layout(config))),
            "load": Out(stream.Signature(load_layout(config))),
            "done": Out(1),
            "segment_done": Out(1),
        }
        members |= {name: In(stream.Signature(bits)) for name, bits in _word_bits(config).items()}
        super().__init__(members)

    def elaborate(self, platform: object) -> Module:
        """Build the sequence of a piece, and a reader per array."""
        m = Module()
        config = self._config
        refinement = config.refinement != "none"
        size = vector_bytes(config)

        piece = Signal(piece_layout(config))
        active, go, last, takes = Signal(), Signal(), Signal(), Signal()
        vector = Signal(range(CHUNK))
        m.submodules.loads = loads = StreamBuffer(
            data.StructLayout({"word": load_layout(config), "last": 1, "ends": 1})
        )
        out = loads.input.payload
        available = []

        def slices(words: stream.Interface, octets: int, name: str) -> Value:
            """Return the vector's share of a word, or of several; each is given up with the last vector in it."""
            bits, width = octets * 8, len(words.payload)
            if bits > width:
                parts = bits // width
                got = Signal(range(parts), name=f"{name}_got")
                held = [Signal(width, name=f"{name}_{i}") for i in range(parts - 1)]
                whole = got == parts - 1
                collects = words.valid & ~whole & active & ~piece.zero
                m.d.comb += words.ready.eq(collects | (go & ~piece.zero))
                for i, part in enumerate(held):
                    with m.If(collects & (got == i if i else ~got.any())):
                        m.d.sync += part.eq(words.payload)
                with m.If(collects):
                    m.d.sync += got.eq(got + 1)
                with m.If(go):
                    m.d.sync += got.eq(0)
                available.append(words.valid & whole)
                return Cat(*held, words.payload)
            count = _log2(width // bits)
            place = vector[:count]
            m.d.comb += words.ready.eq(go & ~piece.zero & (place.all() | last))
            available.append(words.valid)
            return selected([words.payload.word_select(i, bits) for i in range(width // bits)], place)

        codes = slices(self.codes, size["codes"], "codes")
        scales = slices(self.scales, size["scales"], "scales")
        entry = out.word.entry
        m.d.comb += [
            entry.codes.eq(Mux(piece.zero, 0, codes)),
            entry.scales.eq(Mux(piece.zero, 0, scales)),
            out.word.address.eq(Mux(piece.weight, piece.line[: _log2(config.weight_depth)], piece.line)),
            out.word.odd.eq(piece.odd),
            out.word.index.eq(piece.index),
            out.word.weight.eq(piece.weight),
            out.last.eq(last),
            out.ends.eq(piece.ends),
        ]
        ready = Cat(available).all()
        if refinement:
            ready &= ~piece.refined | self._records(m, piece, vector, entry, go, last, takes)
        m.d.comb += [
            last.eq(vector == piece.count - 1),
            go.eq(active & loads.input.ready & (piece.zero | ready)),
            loads.input.valid.eq(go),
            takes.eq(~active | (go & last)),
            self.piece.ready.eq(takes),
        ]
        with m.If(go):
            m.d.sync += [vector.eq(vector + 1), piece.line.eq(piece.line + piece.step)]
        with m.If(takes):
            m.d.sync += [active.eq(self.piece.valid), piece.eq(self.piece.payload), vector.eq(0)]

        output = loads.output
        moved = output.valid & output.ready
        m.d.comb += [
            self.load.payload.eq(output.payload.word),
            self.load.valid.eq(output.valid),
            output.ready.eq(self.load.ready),
            self.done.eq(moved & output.payload.last),
            self.segment_done.eq(self.done & output.payload.ends),
        ]
        return m

    def _records(
        self, m: Module, piece: data.View, vector: Signal, entry: data.View, go: Signal, last: Signal, takes: Signal
    ) -> Value:
        """Build the readers of masks and offsets and return whether the vector's are there."""
        config = self._config
        blocks = config.vmac.blocks
        words = self.masks.payload
        width, octets = len(self.offsets.payload), len(self.offsets.payload) // 8
        bits = vector_bytes(config)["masks"] * 8
        slots = len(words) // bits
        count = _log2(slots)
        refines = Signal()
        masks = Signal(bits)
        needs = Signal((SUBGROUPS * blocks).bit_length())
        m.d.comb += [
            refines.eq(piece.refined & ~piece.zero),
            masks.eq(gated(selected([words.word_select(i, bits) for i in range(slots)], vector[:count]), refines)),
            self.masks.ready.eq(go & refines & (vector[:count].all() | last)),
            needs.eq(_ones(masks)),
        ]

        # Two words are in sight: the current one, from a byte on, and the next. Words belong to one piece.
        current, have = Signal(width), Signal()
        at = Signal(range(octets))
        left = Signal(len(piece.octets))
        end = Signal(range(2 * octets))
        over, there = Signal(), Signal()
        window = Signal((SUBGROUPS * blocks) * 8)
        sight = Cat(current, self.offsets.payload)
        m.d.comb += [
            end.eq(at + needs),
            over.eq(end > octets),
            window.eq(selected([sight[8 * i :][: len(window)] for i in range(octets)], at)),
            there.eq(~needs.any() | (have & (~over | self.offsets.valid))),
        ]
        fills = ~have & left.any()
        crosses = go & refines & have & (end >= octets) & needs.any()
        m.d.comb += self.offsets.ready.eq(fills | (crosses & over))
        with m.If(fills & self.offsets.valid):
            m.d.sync += [current.eq(self.offsets.payload), have.eq(1)]
        with m.If(go & refines):
            m.d.sync += [left.eq(left - needs), at.eq(end)]
        with m.If(crosses):
            m.d.sync += [current.eq(self.offsets.payload), have.eq(over)]
        with m.If(takes):
            # Words of the next piece may come before it.
            m.d.sync += [left.eq(Mux(self.piece.valid, self.piece.payload.octets, 0)), at.eq(0), have.eq(0)]

        following: Value = Const(0, 0)
        for block in range(blocks):
            before = Signal(range(SUBGROUPS * block + 1), name=f"before_{block}")
            m.d.comb += before.eq(following)
            mask = masks.word_select(block, SUBGROUPS)
            ones = Signal(range(SUBGROUPS + 1), name=f"ones_{block}")
            record = entry.records[block]
            m.d.comb += [ones.eq(_ones(mask)), record.mask.eq(mask)]
            for i in range(OFFSET_BYTES):
                octet = selected([window.word_select(j, 8) for j in range(i, SUBGROUPS * blocks)], before)
                m.d.comb += record.offsets[i].eq(Mux(ones > i if i else ones.any(), octet, 0))
            following = before + ones
        return self.masks.valid & there


class Loader(wiring.Component):
    """Fetch the operands of a product and write them into the banks, as far ahead as there is room.

    Parameters
    ----------
    config : AcceleratorConfig

    Members
    -------
    job : In(job)
        Stable while ``busy``.
    start : In(1)
        Begin the job, or, if ``code`` is not 0, only end it. Counts while ``busy`` is 0.
    code, since, descriptor : In
        Stable while ``busy``; they go into the end's token, ``code`` if no fetch failed.
    busy : Out(1)
    stop : In(1)
        End with the tile that is being loaded.
    free_panel, free_activations, free_entries : In
        As of :class:`Walker`.
    request, word, done
        Those of a :class:`hdl.dma.ReadDma`.
    load : Out(stream of load word)
    token : Out(stream of token)
        Segments that are loaded, in order, and the end.
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        super().__init__(
            {
                "job": In(job_layout(config)),
                "start": In(1),
                "code": In(8),
                "since": In(32),
                "descriptor": In(config.address_width),
                "busy": Out(1),
                "stop": In(1),
                "free_panel": In(1),
                "free_activations": In(1),
                "free_entries": In(config.weight_depth.bit_length()),
                "request": Out(stream.Signature(request_layout(config.dma))),
                "word": In(stream.Signature(word_layout(config.dma))),
                "done": In(stream.Signature(2)),
                "load": Out(stream.Signature(load_layout(config))),
                "token": Out(stream.Signature(token_layout(config))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Connect walker, fetcher and assembler."""
        m = Module()
        config = self._config
        m.submodules.walker = walker = Walker(config)
        m.submodules.fetcher = fetcher = Fetcher(config)
        m.submodules.assembler = assembler = Assembler(config)
        m.submodules.tokens = tokens = StreamFifo(token_layout(config), _TOKENS)
        wiring.connect(m, walker.chunk, fetcher.chunk)
        wiring.connect(m, fetcher.piece, assembler.piece)
        wiring.connect(m, walker.token, tokens.input)
        wiring.connect(m, assembler.load, wiring.flipped(self.load))
        names = ["scales", "codes"]
        if config.refinement != "none":
            wiring.connect(m, walker.mask, fetcher.mask)
            names += ["masks", "offsets"]
        for name in names:
            wiring.connect(m, getattr(fetcher, name), getattr(assembler, name))
        for name in ("request", "word", "done"):
            wiring.connect(m, getattr(fetcher, name), wiring.flipped(getattr(self, name)))

        begins, failed = Signal(), Signal()
        m.d.comb += [
            begins.eq(self.start & ~walker.busy),
            failed.eq(fetcher.error.any()),
            fetcher.clear.eq(begins),
            walker.job.eq(self.job),
            walker.start.eq(self.start),
            # The failure of the product before is forgotten with the start.
            walker.code.eq(Mux(failed & ~begins, READ_BASE + fetcher.error, self.code)),
            walker.since.eq(self.since),
            walker.descriptor.eq(self.descriptor),
            walker.failed.eq(failed),
            walker.stop.eq(self.stop | failed),
            walker.free_panel.eq(self.free_panel),
            walker.free_activations.eq(self.free_activations),
            walker.free_entries.eq(self.free_entries),
            self.busy.eq(walker.busy),
        ]

        # A chunk is on its way from when it is made until its last vector is in a bank.
        on_way = Signal(range(_CHUNKS + _PIECES + 4))  # with the assembler's piece and two last vectors in its buffer
        m.d.sync += on_way.eq(on_way + (walker.chunk.valid & walker.chunk.ready) - assembler.done)
        m.d.comb += walker.quiet.eq(~on_way.any())

        # A segment's token waits until it is loaded.
        loaded = Signal(range(_TOKENS + 1))
        leaves = Signal()
        m.d.comb += [
            self.token.payload.eq(tokens.output.payload),
            self.token.valid.eq(tokens.output.valid & (loaded.any() | tokens.output.payload.end)),
            tokens.output.ready.eq(self.token.valid & self.token.ready),
            leaves.eq(tokens.output.ready & ~tokens.output.payload.end),
        ]
        m.d.sync += loaded.eq(loaded + assembler.segment_done - leaves)
        return m
