"""Sums of squares that stream by, and the square root of the ratio of two of them (docs/ppu.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.arith import tree_sum
from hdl.lib.fp32 import Float
from hdl.lib.verilog import lint_unused
from model.activity import KEPT, LARGEST, SUM_BITS

__all__ = ["RootOfRatio", "SquareSum", "rounded_sum", "sum_layout"]

_FRACTION, _BIAS = 23, 127
_SIGNIFICAND = _FRACTION + 1
_EXPONENT = 11
_ROOT = _SIGNIFICAND + 3
_QUOTIENT = 2 * _ROOT - 1

sum_layout = data.StructLayout({"significand": SUM_BITS, "exponent": signed(_EXPONENT)})
"""``significand · 2**exponent``; the significand is 0 or has its top bit set."""


def _finite(m: Module, sign: Value, field: Value, rounded: Value, zero: Value, number: data.View) -> None:
    """Give a positive number, 0 instead of what is below the normal numbers, the largest instead of what is beyond."""
    m.d.comb += number.as_value().eq(Cat(rounded, sign))
    with m.If(zero | (field < 1)):
        m.d.comb += number.as_value().eq(0)
    with m.Elif((field > 2 * _BIAS) | rounded[_FRACTION:].all()):
        m.d.comb += number.as_value().eq(LARGEST)


def rounded_sum(m: Module, total: data.View, name: str) -> data.View:
    """Return a running sum as binary32, to nearest even."""
    number = Signal(Float, name=name)
    field = Signal(signed(_EXPONENT + 1), name=f"{name}_field")
    rounded = Signal(_FRACTION + 8, name=f"{name}_rounded")
    drop = SUM_BITS - _SIGNIFICAND
    kept, rest = total.significand[drop:], total.significand[:drop]
    m.d.comb += [
        field.eq(total.exponent + (drop + _BIAS + _FRACTION)),
        rounded.eq(Cat(kept[:_FRACTION], field[:8]) + (rest[-1] & (rest[:-1].any() | kept[0]))),
    ]
    _finite(m, Const(0, 1), field, rounded, ~total.significand[-1], number)
    return number


class SquareSum(wiring.Component):
    """Add the squares of beats of binary32 numbers, as `model.activity.SquareSum`; a beat per cycle.

    Parameters
    ----------
    lanes : int
        Numbers of a beat, 1 to 32.

    Attributes
    ----------
    latency : int
        Cycles from a beat to the sum that has it.

    Members
    -------
    numbers : In(Float), one per lane
    valid : In(1)
        The beat counts.
    clear : In(1)
        The sum is 0 from the next cycle on; beats on their way are still added.
    total : Out(sum_layout)
    busy : Out(1)
        Beats are on their way.

    Raises
    ------
    ValueError
        ``lanes`` is out of range.
    """

    latency: ClassVar[int] = 6

    def __init__(self, lanes: int):
        if not 1 <= lanes <= 32:
            raise ValueError(f"lanes must be from 1 to 32, not {lanes}")
        self._lanes = lanes
        super().__init__(
            {
                "numbers": In(Float).array(lanes),
                "valid": In(1),
                "clear": In(1),
                "total": Out(sum_layout),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the stages and the sum."""
        m = Module()
        full = Signal(self.latency - 1)
        m.d.sync += full.eq(Cat(self.valid, full))
        m.d.comb += self.busy.eq(full.any())

        def register(name: str, *values: Value) -> list[Signal]:
            registers = [Signal.like(value, name=f"{name}_{i}", reset_less=True) for i, value in enumerate(values)]
            m.d.sync += [after.eq(before) for after, before in zip(registers, values, strict=True)]
            return registers

        # The largest exponent, and the upper half of each significand.
        significands, exponents = [], []
        for k, number in enumerate(self.numbers):
            Value.cast(number).attrs.update(lint_unused("squares have no sign"))
            seen = Signal(Float, name=f"seen_{k}", attrs=lint_unused("low bits are cut"))
            m.d.comb += seen.as_value().eq(Mux(number.exponent.all(), LARGEST, number.as_value()))
            significands.append(seen.significand()[_SIGNIFICAND - KEPT :])
            exponents.append(seen.scale())
        level = exponents
        depth = 0
        while len(level) > 1:
            best = []
            for i in range(0, len(level) - 1, 2):
                larger = Signal(8, name=f"larger_{depth}_{i // 2}")
                m.d.comb += larger.eq(Mux(level[i] < level[i + 1], level[i + 1], level[i]))
                best.append(larger)
            level = best + level[len(level) & ~1 :]
            depth += 1
        largest, *rest = register("seen", level[0], *significands, *exponents)
        significands, exponents = rest[: self._lanes], rest[self._lanes :]

        cuts = []
        for k, (significand, exponent) in enumerate(zip(significands, exponents, strict=True)):
            gap = Signal(8, name=f"gap_{k}")
            m.d.comb += gap.eq(largest - exponent)
            cuts.append(Mux(gap[4:].any(), 0, significand >> gap[:4]))
        largest, *cuts = register("cut", largest, *cuts)
        squares = []
        for k, cut in enumerate(cuts):
            square = Signal(2 * KEPT, name=f"square_{k}")
            m.d.comb += square.eq(cut * cut)
            squares.append(square)
        largest, *squares = register("square", largest, *squares)
        total = tree_sum(squares)
        largest, total = register("total", largest, total)

        # 32 bits of it, the highest one set.
        spare = len(total) - 1
        value, shift = total, Signal(range(spare + 1))
        for step in reversed(range(spare.bit_length())):
            distance = 1 << step
            moved = Signal(len(total), name=f"moved_{step}", attrs=lint_unused("low bits are cut"))
            empty = Signal(name=f"empty_{step}")
            m.d.comb += [
                empty.eq(~value[max(len(total) - distance, 0) :].any()),
                shift[step].eq(empty),
                moved.eq(Mux(empty, value << distance, value)),
            ]
            value = moved
        exponent = Signal(signed(_EXPONENT))
        unit = 2 * (_SIGNIFICAND - KEPT - _BIAS - _FRACTION) + len(total) - SUM_BITS
        m.d.comb += exponent.eq((largest << 1) + unit - shift)
        beat = Signal(sum_layout, reset_less=True)
        m.d.sync += [beat.significand.eq(value[len(total) - SUM_BITS :]), beat.exponent.eq(exponent)]

        # The smaller one is cut to the places of the larger one.
        state = self.total
        large, small = Signal(sum_layout), Signal(sum_layout)
        gap, ahead, behind = (Signal(_EXPONENT + 1, name=name) for name in ("gap", "ahead", "behind"))
        added = Signal(SUM_BITS + 1)
        swap = ~state.significand[-1] | (beat.significand[-1] & (state.exponent < beat.exponent))
        m.d.comb += [
            large.eq(Mux(swap, beat.as_value(), state.as_value())),
            small.eq(Mux(swap, state.as_value(), beat.as_value())),
            # Both distances are there when it is known which one counts.
            ahead.eq(state.exponent - beat.exponent),
            behind.eq(beat.exponent - state.exponent),
            gap.eq(Mux(swap, behind, ahead)),
            added.eq(large.significand + Mux(gap[5:].any(), 0, small.significand >> gap[:5])),
        ]
        with m.If(full[-1]):
            m.d.sync += [
                state.significand.eq(Mux(added[-1], added[1:], added)),
                state.exponent.eq(large.exponent + added[-1]),
            ]
        with m.If(self.clear):
            m.d.sync += [state.significand.eq(0), state.exponent.eq(0)]
        return m


class RootOfRatio(wiring.Component):
    """Give ``sqrt(a / b)`` as binary32, as `model.activity.activity`, in at most 82 cycles.

    Members
    -------
    a, b : In(sum_layout)
        Constant from ``start`` on until ``done``.
    start : In(1)
        Begins; not while it is at work.
    number : Out(Float)
    done : Out(1)
        For one cycle: the number is there, and stays until the next start.

    Attributes
    ----------
    latency : int
        Cycles from ``start`` to ``done``, at most.
    """

    latency: ClassVar[int] = _QUOTIENT + _ROOT + 2

    a: In(sum_layout)
    b: In(sum_layout)
    start: In(1)
    number: Out(Float)
    done: Out(1)

    def elaborate(self, platform: object) -> Module:
        """Build divider and root, a bit per cycle each."""
        m = Module()
        exponent = Signal(signed(_EXPONENT + 2))
        odd = Signal()
        rest = Signal(SUM_BITS + 1)
        quotient = Signal(2 * _ROOT)
        root = Signal(_ROOT)
        left = Signal(_ROOT + 2)
        sticky = Signal()
        count = Signal(range(_QUOTIENT + 1))
        difference = Signal(signed(_EXPONENT + 1))
        twice = Signal(signed(_EXPONENT + 2), attrs=lint_unused("an even number"))
        wide = 2 * (_SIGNIFICAND + 2) - 1
        m.d.comb += [difference.eq(self.a.exponent - self.b.exponent), twice.eq(difference - wide - odd)]

        with m.FSM():
            with m.State("IDLE"), m.If(self.start):
                # The exponent of the quotient is even: 51 or 52 bits behind its point.
                m.d.sync += [
                    odd.eq((difference ^ wide) & 1),
                    rest.eq(self.a.significand),
                    quotient.eq(0),
                    count.eq(0),
                ]
                m.next = "DIVIDE"
            with m.State("DIVIDE"):
                fits = Signal()
                after = Signal(SUM_BITS + 1)
                m.d.comb += [fits.eq(rest >= self.b.significand), after.eq(Mux(fits, rest - self.b.significand, rest))]
                m.d.sync += [
                    quotient.eq(Cat(fits, quotient)),
                    rest.eq(after << 1),
                    sticky.eq(after.any()),
                    count.eq(count + 1),
                    exponent.eq(twice >> 1),
                    root.eq(0),
                    left.eq(0),
                ]
                with m.If(count == wide + odd):
                    m.d.sync += count.eq(0)
                    m.next = "ROOT"
            with m.State("ROOT"):
                bits = Signal(_ROOT + 2)
                taken = Signal(_ROOT + 2)
                above = Signal()
                m.d.comb += [
                    bits.eq(Cat(quotient[-2:], left)),
                    taken.eq(Cat(Const(1, 2), root)),
                    above.eq(bits >= taken),
                ]
                m.d.sync += [
                    left.eq(Mux(above, bits - taken, bits)),
                    root.eq(Cat(above, root)),
                    quotient.eq(quotient << 2),
                    count.eq(count + 1),
                ]
                with m.If(count == _ROOT - 1):
                    m.next = "ROUND"
            with m.State("ROUND"):
                field = Signal(signed(_EXPONENT + 2))
                rounded = Signal(_FRACTION + 8)
                short = Signal(_ROOT)
                below = Signal()
                number = Signal(Float)
                # 26 or 27 bits: three or two more than are kept.
                long = root[-1]
                m.d.comb += [
                    short.eq(Mux(long, root, root << 1)),
                    below.eq(short[:2].any() | sticky | left.any()),
                    field.eq(exponent + (2 + _BIAS + _FRACTION) + long),
                    rounded.eq(
                        Cat(short[3 : 3 + _FRACTION], field[:8]) + (short[2] & (below | short[3])),
                    ),
                ]
                _finite(m, Const(0, 1), field, rounded, ~self.a.significand[-1], number)
                m.d.sync += self.number.eq(number)
                with m.If(self.a.significand[-1] & ~self.b.significand[-1]):
                    m.d.sync += self.number.as_value().eq(LARGEST)
                m.next = "DONE"
            with m.State("DONE"):
                m.d.comb += self.done.eq(1)
                m.next = "IDLE"
        return m
