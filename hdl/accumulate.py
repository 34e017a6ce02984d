"""The vMAC's accumulator: one exact 64-bit sum or two windowed 32-bit sums (paper, section 6.3; docs/datapath.md)."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.verilog import lint_unused

__all__ = ["DualAccumulator", "Saturate"]

HALF = 32
"""Bits of an AutoFP2 accumulator."""


def _extended(value: Value, width: int) -> Value:
    """Sign-extend or cut ``value`` to ``width`` bits."""
    return Cat(value, value[-1].replicate(max(width - len(value), 0)))[:width]


class Saturate(wiring.Component):
    """Clamp the sum of two signed 32-bit numbers that may have overflowed; combinational.

    Members
    -------
    enable : In(1)
        0 passes ``total`` through.
    addend_negative, psum_negative : In(1)
        Signs of the two numbers.
    total : In(32)
        Their sum modulo 2³².
    clamped : Out(32)
        ``total``, or the limit that it went over.
    saturated : Out(1)
        The sum overflowed and ``enable`` was set.
    """

    enable: In(1)
    addend_negative: In(1)
    psum_negative: In(1)
    total: In(HALF)
    clamped: Out(HALF)
    saturated: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Build the clamp."""
        m = Module()
        limit = Cat((~self.addend_negative).replicate(HALF - 1), self.addend_negative)
        same_signs = self.addend_negative == self.psum_negative
        m.d.comb += [
            self.saturated.eq(self.enable & same_signs & (self.total[-1] != self.addend_negative)),
            self.clamped.eq(Mux(self.saturated, limit, self.total)),
        ]
        return m


class DualAccumulator(wiring.Component):
    """Add two scaled values to a partial sum; combinational.

    ``exact = 1``: ``total = psum + even + odd`` modulo 2⁶⁴. ``exact = 0``: ``total = {odd half, even half}``; each value is rounded to a
    multiple of ``2**window_shift`` (half is added, then shifted right arithmetically), and added to its 32-bit half with saturation.

    Parameters
    ----------
    width : int
        Bits of ``even`` and ``odd``.
    window_shift : int
        Weight of an AutoFP2 accumulator's unit, in bits of ``even`` and ``odd``; at least ``width - 32`` so that a rounded value fits.
    switchable : bool
        Without it there is no ``exact`` member, and it counts as 0.

    Members
    -------
    exact : In(1)
    even, odd : In(signed(width))
    psum, total : In(64), Out(64)
    saturated : Out(1)
        A half was clamped.
    """

    def __init__(self, width: int, window_shift: int, *, switchable: bool = True):
        if window_shift < max(width - HALF, 1):
            raise ValueError(
                f"window_shift must be at least {max(width - HALF, 1)} for {width}-bit values, not {window_shift}"
            )
        self._width = width
        self._window_shift = window_shift
        self._switchable = switchable
        members = {
            "even": In(signed(width)),
            "odd": In(signed(width)),
            "psum": In(2 * HALF),
            "total": Out(2 * HALF),
            "saturated": Out(1),
        }
        super().__init__(members | ({"exact": In(1)} if switchable else {}))

    def elaborate(self, platform: object) -> Module:
        """Build a 3:2 compressor, an adder that splits into two, and the clamps."""
        m = Module()
        shift = self._window_shift
        windowed = [_extended(value[shift:], HALF) for value in (self.even, self.odd)]
        round_up = [value[shift - 1] for value in (self.even, self.odd)]
        exact: Value = Const(0, 1)
        if self._switchable:
            exact = self.exact
            addends, halves = self._switched(m, windowed, round_up)
        else:
            addends = windowed
            psums = (self.psum[:HALF], self.psum[HALF:])
            halves = [(psum + addend + up)[:HALF] for psum, addend, up in zip(psums, addends, round_up, strict=True)]
        saturated = []
        for name, low, addend, half in zip(("even", "odd"), (0, HALF), addends, halves, strict=True):
            clamp = Saturate()
            m.submodules[f"saturate_{name}"] = clamp
            m.d.comb += [
                clamp.enable.eq(~exact),
                clamp.addend_negative.eq(addend[-1]),
                clamp.psum_negative.eq(self.psum[low + HALF - 1]),
                clamp.total.eq(half),
                self.total[low : low + HALF].eq(clamp.clamped),
            ]
            saturated.append(clamp.saturated)
        m.d.comb += self.saturated.eq(saturated[0] | saturated[1])
        return m

    def _switched(self, m: Module, windowed: list[Value], round_up: list[Value]) -> tuple[list[Value], list[Value]]:
        """Build the adder of both modes; returns the windowed addends as added, and the two halves of the sum."""
        # In AutoFP2 mode x holds both windowed values and y, free otherwise, their rounding.
        x, y = Signal(2 * HALF), Signal(2 * HALF)
        m.d.comb += x.eq(Cat(*windowed))
        m.d.comb += y.eq(Cat(round_up[0], Const(0, HALF - 1), round_up[1]))
        with m.If(self.exact):
            m.d.comb += [x.eq(self.even), y.eq(self.odd)]

        # Sums of bits, not their logic, so that synthesis takes full-adder cells where the library has them.
        carry_save, carries = Signal(2 * HALF), Signal(2 * HALF)
        for k in range(2 * HALF):
            m.d.comb += Cat(carry_save[k], carries[k]).eq(x[k] + y[k] + self.psum[k])
        # One adder with an extra bit between the halves: it hands the carry on only when one of its operands is set.
        split = Signal(2 * HALF + 1, attrs=lint_unused("the bit between the halves only passes the carry on"))
        m.d.comb += split.eq(
            Cat(carry_save[:HALF], self.exact, carry_save[HALF:])
            + Cat(Const(0, 1), carries[: HALF - 1], Const(0, 1), carries[HALF - 1] & self.exact, carries[HALF:-1])
        )
        return [x[:HALF], x[HALF:]], [split[:HALF], split[HALF + 1 :]]
