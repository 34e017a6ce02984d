"""Frames of :mod:`model.frames` from a stream of bytes and back. Shared by every accelerator family."""

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from model.frames import CHECK_BYTES, END, ESC, ESC_END, ESC_ESC, Fault

__all__ = ["FrameByte", "FrameReceiver", "FrameSender"]


class FrameByte(data.Struct):
    """A byte of a frame, and whether it is its last."""

    byte: 8
    last: 1


POLYNOMIAL, BEGIN, RESIDUE = 0xEDB88320, 0xFFFF_FFFF, 0xDEBB_20E3
"""CRC-32 of Ethernet and zlib, bits reflected: register before the first byte, and behind a frame that has its CRC at its end."""


def crc_after(crc: Value, byte: Value) -> Value:
    """Return the CRC register behind one more byte, 32 bits."""
    # The catalogue of amaranth.lib.crc has it too, but as Verilog that linters find unused bits in.
    inputs = [*crc, *byte]
    # Which inputs each bit is the XOR of, as masks.
    state = [1 << bit ^ (1 << 32 + bit if bit < 8 else 0) for bit in range(32)]
    for _ in range(8):
        out = state[0]
        state = [after ^ (out if POLYNOMIAL >> bit & 1 else 0) for bit, after in enumerate([*state[1:], 0])]
    return Cat(Cat(value for at, value in enumerate(inputs) if mask >> at & 1).xor() for mask in state)


class FrameReceiver(wiring.Component):
    """Frames whose CRC is right, and why others are thrown away; the rules are those of :class:`model.frames.Decoder`.

    A frame is kept until its end, and only then handed on; in the meantime nothing more is taken in.

    Parameters
    ----------
    limit, least : int
        Most bytes of a frame, CRC included, and fewest, CRC not included.

    Members
    -------
    input : In(stream of 8 bits)
    frame : Out(stream of FrameByte)
    length : Out(range(limit))
        Bytes of the frame that is being handed on.
    fault : Out(stream of 2 bits)
        A :class:`model.frames.Fault`.
    """

    def __init__(self, limit: int, least: int = 1):
        self._limit, self._least = limit, least
        super().__init__(
            {
                "input": In(stream.Signature(8)),
                "frame": Out(stream.Signature(FrameByte)),
                "length": Out(range(limit)),
                "fault": Out(stream.Signature(2)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build buffer, check, and the states of a frame."""
        m = Module()
        m.submodules.buffer = buffer = Memory(shape=8, depth=self._limit, init=[])
        crc = Signal(32, init=BEGIN)
        write, read = buffer.write_port(), buffer.read_port()
        filled, at = Signal(range(self._limit + 1)), Signal(range(self._limit))
        begun, escaped, broken, long = (Signal(name=name) for name in ("begun", "escaped", "broken", "long"))
        byte, content = self.input.payload, Signal(8)
        ends, whole, good = Signal(), Signal(), Signal()
        m.d.comb += [
            content.eq(Mux(escaped, Mux(byte == ESC_END, END, ESC), byte)),
            ends.eq(byte == END),
            whole.eq(~ends & (escaped | (byte != ESC))),
            good.eq((crc == RESIDUE) & (filled >= self._least + CHECK_BYTES) & ~escaped & ~broken),
            write.addr.eq(filled),
            write.data.eq(content),
            self.frame.payload.byte.eq(read.data),
            self.frame.payload.last.eq(at == self.length - 1),
        ]
        with m.FSM():
            with m.State("COLLECT"):
                m.d.comb += self.input.ready.eq(1)
                with m.If(self.input.valid):
                    m.d.sync += [begun.eq(1), escaped.eq(~ends & ~whole)]
                    with m.If(escaped & (byte != ESC_END) & (byte != ESC_ESC)):
                        m.d.sync += broken.eq(1)
                    with m.If(whole & (filled == self._limit)):
                        m.d.sync += long.eq(1)
                    with m.Elif(whole):
                        m.d.comb += write.en.eq(1)
                        m.d.sync += [filled.eq(filled + 1), crc.eq(crc_after(crc, content))]
                    with m.If(ends):
                        m.d.sync += [
                            *(state.eq(0) for state in (filled, at, begun, escaped, broken, long)),
                            crc.eq(BEGIN),
                            self.length.eq(filled - CHECK_BYTES),
                            self.fault.payload.eq(Mux(long, Fault.TOO_LONG, Fault.BROKEN)),
                        ]
                        with m.If(begun):
                            m.next = "FAULT"
                        with m.If(begun & good & ~long):
                            m.next = "FRAME"
            with m.State("FRAME"):
                m.d.comb += self.frame.valid.eq(1)
                with m.If(self.frame.ready):
                    m.d.sync += at.eq(at + 1)
                    m.d.comb += read.addr.eq(at + 1)
                    with m.If(self.frame.payload.last):
                        m.next = "COLLECT"
                with m.Else():
                    m.d.comb += read.addr.eq(at)
            with m.State("FAULT"):
                m.d.comb += self.fault.valid.eq(1)
                with m.If(self.fault.ready):
                    m.next = "COLLECT"
        return m


class FrameSender(wiring.Component):
    """Frames as bytes for the line, as :func:`model.frames.encode` makes them.

    Members
    -------
    frame : In(stream of FrameByte)
    output : Out(stream of 8 bits)
    """

    frame: In(stream.Signature(FrameByte))
    output: Out(stream.Signature(8))

    def elaborate(self, platform: object) -> Module:
        """Build check and stuffing."""
        m = Module()
        crc = Signal(32, init=BEGIN)
        content, offered, taken = Signal(8), Signal(), Signal()
        special, second = Signal(), Signal()
        at = Signal(range(CHECK_BYTES))
        moved = self.output.ready & self.output.valid
        m.d.comb += [
            special.eq((content == END) | (content == ESC)),
            taken.eq(offered & self.output.ready & (~special | second)),
        ]
        with m.If(offered):
            replaced = Mux(content == END, ESC_END, ESC_ESC)
            m.d.comb += [
                self.output.valid.eq(1),
                self.output.payload.eq(Mux(special, Mux(second, replaced, ESC), content)),
            ]
            with m.If(self.output.ready):
                m.d.sync += second.eq(special & ~second)
        with m.FSM():
            with m.State("START"):
                m.d.comb += [self.output.valid.eq(self.frame.valid), self.output.payload.eq(END)]
                m.d.sync += [crc.eq(BEGIN), at.eq(0)]
                with m.If(moved):
                    m.next = "FRAME"
            with m.State("FRAME"):
                m.d.comb += [
                    content.eq(self.frame.payload.byte),
                    offered.eq(self.frame.valid),
                    self.frame.ready.eq(taken),
                ]
                with m.If(taken):
                    m.d.sync += crc.eq(crc_after(crc, content))
                with m.If(taken & self.frame.payload.last):
                    m.next = "CHECK"
            with m.State("CHECK"):
                m.d.comb += [content.eq(~crc[:8]), offered.eq(1)]
                with m.If(taken):
                    m.d.sync += [at.eq(at + 1), crc.eq(crc >> 8)]
                    with m.If(at == CHECK_BYTES - 1):
                        m.next = "END"
            with m.State("END"):
                m.d.comb += [self.output.valid.eq(1), self.output.payload.eq(END)]
                with m.If(moved):
                    m.next = "START"
        return m
