"""Fetcher of the loader: read requests for chunks, and queues of the words that come (docs/accelerator.md)."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from hdl.dma import request_layout, word_layout
from hdl.job import (
    CHUNKS,
    PIECES,
    advanced,
    chunk_fields,
    chunk_layout,
    mask_request_layout,
    piece_layout,
    place_bits,
    row_bits,
    vector_bytes,
    word_bits,
)
from hdl.lib.arith import gated, tree_sum
from hdl.lib.streams import StreamBuffer, StreamFifo
from hdl.lib.verilog import lint_unused
from model.accelerator import CHUNK, AcceleratorConfig
from model.dma import DmaStatus
from model.vmac import SUBGROUPS

__all__ = ["Fetcher"]

_MASKS, _SCALES, _OFFSETS, _CODES = range(4)
_REQUESTS = 64


class Fetcher(wiring.Component):
    """Request the words of chunks and sort them by array.

    The order of requests is such that a word always finds room once what lies before it has been used: masks up to `CHUNKS` chunks
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
        members |= {name: Out(stream.Signature(bits)) for name, bits in word_bits(config).items()}
        super().__init__(members)

    def elaborate(self, platform: object) -> Module:
        """Build requests, the order of words, and their queues."""
        m = Module()
        config = self._config
        refinement = config.refinement != "none"
        beat = exact_log2(config.data_width // 8)
        size = vector_bytes(config)
        octets_bits = (CHUNK * SUBGROUPS * config.vmac.blocks).bit_length()

        def words_of(octets: int) -> int:
            return -(-octets * 8 // config.data_width)

        m.submodules.chunks = chunks = StreamFifo(chunk_layout(config), CHUNKS)
        wiring.connect(m, wiring.flipped(self.chunk), chunks.input)
        chunk = chunks.output.payload
        m.submodules.pieces = pieces = StreamFifo(piece_layout(config), PIECES)
        wiring.connect(m, pieces.output, wiring.flipped(self.piece))
        kind_layout = data.StructLayout({"kind": 2, "more": (CHUNK * config.lanes // 2).bit_length() - beat})
        m.submodules.kinds = kinds = StreamFifo(kind_layout, _REQUESTS)
        ahead = CHUNKS + PIECES + 3
        depths = {
            "masks": ahead * words_of(CHUNK * size["masks"]),
            "scales": 2 * words_of(CHUNK * size["scales"]),
            "offsets": 1 + words_of(CHUNK * SUBGROUPS * config.vmac.blocks),
            "codes": 4,
        }
        kinds_of = {"masks": _MASKS, "scales": _SCALES, "offsets": _OFFSETS, "codes": _CODES}
        queues = {}
        for name, bits in word_bits(config).items():
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
                depth=2 << row_bits(config),
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
        for name in chunk_fields(config):
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
                        octets_asked.eq(chunk.count << exact_log2(size["scales"])),
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
                        place.eq(advanced(m, "offsets", chunk.offsets, start)),
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
                    octets_asked.eq(chunk.count << exact_log2(size["codes"])),
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
                    octets_asked.eq(self.mask.payload.count << exact_log2(size["masks"])),
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
            # A byte of offsets for every bit of the masks. The bits of a word's halves are counted when it comes, before it is known whether they are
            # masks, and added to those before in the next cycle.
            masks = queues[_MASKS]
            ones = list(self.word.payload.data[: len(masks.payload)])
            halves = [ones[::2], ones[1::2]]
            came = [Signal(len(half).bit_length(), name=f"came_{i}") for i, half in enumerate(halves)]
            sum_, total = Signal(octets_bits), Signal(octets_bits)
            adds, counted = Signal(), Signal()
            m.d.sync += [
                *(count.eq(gated(tree_sum(half), ~refused)) for count, half in zip(came, halves, strict=True)),
                adds.eq(masks.valid),
                counted.eq(masks.valid & ends),
            ]
            with m.If(adds):
                m.d.sync += sum_.eq(Mux(counted, 0, total))
            counts.input.ready.attrs.update(lint_unused("there is room for as many counts as there can be masks"))
            m.d.comb += [
                total.eq(tree_sum([sum_, *came])),
                counts.input.valid.eq(counted),
                counts.input.payload.eq(total),
            ]
        return m
