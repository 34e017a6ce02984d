"""Parts for ready/valid streams of :mod:`amaranth.lib.stream`."""

from collections.abc import Sequence

from amaranth.hdl import Cat, Const, Module, Shape, ShapeLike, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.fifo import SyncFIFOBuffered
from amaranth.lib.wiring import In, Out

__all__ = ["StreamBuffer", "StreamFifo", "multicast"]


class StreamBuffer(wiring.Component):
    """A register stage with room for two, so that neither ``valid`` nor ``ready`` passes through; 1 word per cycle, latency 1.

    Parameters
    ----------
    shape : ShapeLike
    late_valid : bool
        Take payloads before it is known whether they are offered: the path from ``valid`` is short, but registers move more often.

    Members
    -------
    input : In(stream)
    output : Out(stream)
    """

    def __init__(self, shape: ShapeLike, *, late_valid: bool = False):
        self._shape = shape
        self._late_valid = late_valid
        super().__init__({"input": In(stream.Signature(shape)), "output": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Module:
        """Build the two places: the front one is the output."""
        m = Module()
        front, spare = Signal(self._shape), Signal(self._shape)
        front_full, spare_full = Signal(), Signal()
        takes = Const(1, 1) if self._late_valid else self.input.valid
        m.d.comb += [
            self.output.payload.eq(front),
            self.output.valid.eq(front_full),
            self.input.ready.eq(~spare_full),
        ]
        with m.If(~front_full | self.output.ready):
            m.d.sync += [
                front_full.eq(spare_full | self.input.valid),
                spare_full.eq(0),
            ]
            with m.If(spare_full):
                m.d.sync += front.eq(spare)
            with m.Elif(takes):
                m.d.sync += front.eq(self.input.payload)
        with m.Elif(takes & ~spare_full):
            m.d.sync += [spare.eq(self.input.payload), spare_full.eq(self.input.valid if self._late_valid else 1)]
        return m


class StreamFifo(wiring.Component):
    """The library's queue as streams; 1 word per cycle, latency 2.

    Members
    -------
    input : In(stream)
    output : Out(stream)
    """

    def __init__(self, shape: ShapeLike, depth: int):
        self._shape = shape
        self._depth = depth
        super().__init__({"input": In(stream.Signature(shape)), "output": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Module:
        """Build the queue."""
        m = Module()
        m.submodules.queue = queue = SyncFIFOBuffered(width=Shape.cast(self._shape).width, depth=self._depth)
        m.d.comb += [
            queue.w_data.eq(self.input.payload),
            queue.w_en.eq(self.input.valid),
            self.input.ready.eq(queue.w_rdy),
            Value.cast(self.output.payload).eq(queue.r_data),
            self.output.valid.eq(queue.r_rdy),
            queue.r_en.eq(self.output.ready),
        ]
        return m


def multicast(m: Module, source: stream.Interface, targets: Sequence[stream.Interface]) -> None:
    """Connect one stream to several that all take a word in the same cycle.

    No target's ``ready`` may depend on its ``valid``, or there is a combinational loop.
    """
    ready = Signal(name=f"{source.ready.name}_all")
    m.d.comb += [ready.eq(Cat(target.ready for target in targets).all()), source.ready.eq(ready)]
    for target in targets:
        m.d.comb += [target.payload.eq(source.payload), target.valid.eq(source.valid & ready)]
