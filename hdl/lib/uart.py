"""UART: bytes over one wire each way, 8 data bits, no parity, one stop bit. Shared by every accelerator family."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.cdc import FFSynchronizer
from amaranth.lib.wiring import In, Out

__all__ = ["LEAST_DIVISOR", "UartReceiver", "UartTransmitter", "check_divisor"]

LEAST_DIVISOR = 4
"""Fewest cycles of a bit: its middle must be one of them, though it is seen up to a cycle late."""
BITS = 8


def check_divisor(divisor: int) -> None:
    """Raise ValueError unless a bit may last so many cycles."""
    if divisor < LEAST_DIVISOR:
        raise ValueError(f"divisor must be at least {LEAST_DIVISOR}, not {divisor}")


class UartReceiver(wiring.Component):
    """Bytes from a wire, each sampled in the middle of its bits.

    A start bit that is over before its middle is noise. A byte without a stop bit is left out, and the next one begins after the wire has been high.
    A byte comes about half a bit before its stop bit ends.

    Parameters
    ----------
    divisor : int
        Cycles of a bit.

    Members
    -------
    rx : In(1)
        The wire, at any time; high when idle.
    byte : Out(stream of 8 bits, always ready)

    Raises
    ------
    ValueError
        ``divisor`` is below 4.
    """

    def __init__(self, divisor: int):
        check_divisor(divisor)
        self._divisor = divisor
        super().__init__({"rx": In(1, init=1), "byte": Out(stream.Signature(BITS, always_ready=True))})

    def elaborate(self, platform: object) -> Module:
        """Build the synchroniser and the sampling."""
        m = Module()
        line = Signal(init=1)
        m.submodules.line = FFSynchronizer(self.rx, line, init=1)
        timer = Signal(range(self._divisor))
        sample = Signal()
        # Start bit, data bits and stop bit move through this register, the first one down to bit 0.
        bits = Signal(BITS + 2)
        left = Signal(range(BITS + 3))
        m.d.comb += [sample.eq(~timer.any()), self.byte.payload.eq(bits[1:-1])]
        m.d.sync += [timer.eq(timer - 1), self.byte.valid.eq(0)]
        with m.If(sample):
            m.d.sync += timer.eq(self._divisor - 1)
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [timer.eq(self._divisor // 2 - 1), left.eq(BITS + 2)]
                with m.If(~line):
                    m.next = "BITS"
            with m.State("BITS"), m.If(sample):
                m.d.sync += [bits.eq(Cat(bits[1:], line)), left.eq(left - 1)]
                with m.If((left == BITS + 2) & line):
                    m.next = "IDLE"
                with m.Elif(left == 1):
                    m.d.sync += self.byte.valid.eq(line)
                    # The next start bit may come early: behind a stop bit it is not waited for the line to be high.
                    m.next = "IDLE"
                    with m.If(~line):
                        m.next = "HIGH"
            with m.State("HIGH"), m.If(line):
                m.next = "IDLE"
        return m


class UartTransmitter(wiring.Component):
    """Bytes to a wire, back to back if there are any.

    Parameters
    ----------
    divisor : int
        Cycles of a bit.

    Members
    -------
    byte : In(stream of 8 bits)
    tx : Out(1)

    Raises
    ------
    ValueError
        ``divisor`` is below 4.
    """

    def __init__(self, divisor: int):
        check_divisor(divisor)
        self._divisor = divisor
        super().__init__({"byte": In(stream.Signature(BITS)), "tx": Out(1, init=1)})

    def elaborate(self, platform: object) -> Module:
        """Build the shift register."""
        m = Module()
        timer = Signal(range(self._divisor))
        bits = Signal(BITS + 2, init=-1)
        left = Signal(range(BITS + 3))
        ends = Signal()
        m.d.comb += [ends.eq(~timer.any()), self.byte.ready.eq(~left.any() | ((left == 1) & ends))]
        # A register of its own, so that the wire never glitches.
        m.d.sync += [self.tx.eq(bits[0]), timer.eq(Mux(ends | ~left.any(), self._divisor - 1, timer - 1))]
        with m.If(self.byte.ready & self.byte.valid):
            m.d.sync += [left.eq(BITS + 2), bits.eq(Cat(Const(0, 1), self.byte.payload, Const(1, 1)))]
        with m.Elif(left.any() & ends):
            m.d.sync += [left.eq(left - 1), bits.eq(Cat(bits[1:], Const(1, 1)))]
        return m
