"""Loader: walks a product tile by tile, fetches operands from memory and writes them into the banks (docs/accelerator.md)."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hdl.assembler import Assembler
from hdl.dma import request_layout, word_layout
from hdl.fetcher import Fetcher
from hdl.job import CHUNKS, PIECES, job_layout, token_layout
from hdl.lib.streams import StreamFifo
from hdl.tile_engine import load_layout
from hdl.walker import Walker
from model.accelerator import AcceleratorConfig, ErrorCode
from model.dma import DmaStatus

__all__ = ["Loader"]

_TOKENS = 16
READ_BASE = ErrorCode.READ_BEYOND - DmaStatus.REFUSED
"""Added to the status of a failed read gives its code."""


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
        on_way = Signal(range(CHUNKS + PIECES + 4))  # with the assembler's piece and two last vectors in its buffer
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
