"""Activation functions of the post-processing unit (docs/ppu.md)."""

from collections.abc import Sequence

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.arith import gated, tree_sum
from hdl.lib.fp32 import Float, FloatMultiply
from hdl.lib.verilog import lint_unused
from model.activation import LOG2E, POINT, POSITION, POWER_POINT, Function, logarithm_table, power_table

__all__ = ["Activation"]

_FRACTION, _BIAS = 23, 127
# |x| from 2**7 on is far away from where anything happens.
_INTEGER = 7


def _bits(values: Sequence[int]) -> int:
    """Return the bits of two's complement that hold all values."""
    return max((value if value >= 0 else ~value).bit_length() for value in values) + 1


def _line(m: Module, table: Sequence[tuple[int, int]], piece: Value, name: str) -> tuple[Signal, Signal]:
    """Look a piece up: its start and its rise."""
    start, rise = (
        Signal(signed(_bits(column)), name=f"{name}_{part}")
        for part, column in zip(("start", "rise"), zip(*table, strict=True), strict=True)
    )
    with m.Switch(piece):
        for k, (first, slope) in enumerate(table):
            with m.Case(k):
                m.d.comb += [start.eq(first), rise.eq(slope)]
    return start, rise


class Activation(wiring.Component):
    """Identity, ReLU, SiLU or GELU of a binary32 number, as `model.activation.apply`; 1 per cycle in which ``enable`` is set.

    Stages: fixed point, square and piece of the logarithm, exponent, power of two, weight; then the product of number and weight.

    Attributes
    ----------
    latency : int
        Cycles with ``enable`` from number to result.

    Members
    -------
    enable : In(1)
    function : In(Function)
        Constant while numbers are on their way.
    value : In(Float)
    number : Out(Float)
    """

    latency = 5 + FloatMultiply.latency

    enable: In(1)
    function: In(Function)
    value: In(Float)
    number: Out(Float)

    def elaborate(self, platform: object) -> Module:
        """Build the stages of the weight, and the multiplier."""
        m = Module()
        enable = self.enable

        def register(name: str, *values: Value) -> list[Signal]:
            registers = [Signal.like(value, name=f"{name}_{i}", reset_less=True) for i, value in enumerate(values)]
            with m.If(enable):
                m.d.sync += [after.eq(before) for after, before in zip(registers, values, strict=True)]
            return registers

        smooth, gelu = Signal(), Signal()
        m.d.comb += [
            smooth.eq((self.function == Function.SILU) | (self.function == Function.GELU)),
            gelu.eq(self.function == Function.GELU),
        ]

        # |x| in fixed point, rounded half up.
        x = self.value
        number, far = Signal(), Signal()
        distance = Signal(5)
        highest = _BIAS + _INTEGER - 1
        width = _INTEGER + POINT + 1
        m.d.comb += [
            number.eq(~x.is_nan()),
            far.eq(x.scale() > highest),
            distance.eq(Mux(x.scale() < highest - 31, 31, (highest - x.scale())[:5])),
        ]
        shifted = x.significand()[_FRACTION - _INTEGER - POINT :]
        for step in range(5):
            moved = Signal(width, name=f"moved_{step}")
            m.d.comb += moved.eq(Mux(distance[step], shifted >> (1 << step), shifted))
            shifted = moved
        a = Signal(width)
        m.d.comb += a.eq((shifted >> 1) + shifted[0])
        # What is 0 for ReLU is so from here on.
        zero = (self.function == Function.RELU) & x.sign & number
        value, number, far, a = register("fixed", x.as_value() & ~zero.replicate(32), number, far, a)

        # Piece of the logarithm, and half the square.
        top = POINT + 1
        above, octave = Signal(), Signal(2)
        piece, position = Signal(6), Signal(POSITION)
        m.d.comb += [
            above.eq(a[top + 3 :].any()),
            octave.eq(Mux(a[top + 2], 3, Mux(a[top + 1], 2, a[top]))),
        ]
        with m.Switch(octave):
            for k in range(4):
                low = POINT - 3 + k
                with m.Case(k):
                    m.d.comb += [
                        piece.eq(
                            Cat(a[low : low + 4], Const(0, 1)) if k == 0 else Cat(a[low : low + 3], Const(1 + k, 3))
                        ),
                        position.eq(a[low - POSITION : low]),
                    ]
        square = Signal(2 * (POINT + 4), attrs=lint_unused("more bits than matter"))
        main = Signal(width)
        m.d.comb += [
            square.eq(a[: POINT + 4] * a[: POINT + 4]),
            main.eq(Mux(gelu, square >> POINT + 1, a)),
        ]
        starts, rises = zip(
            *(
                _line(m, logarithm_table(function), piece, function.name.lower())
                for function in (Function.SILU, Function.GELU)
            ),
            strict=True,
        )
        # Far out nothing is left of SiLU's rest, and GELU is not looked at.
        start, rise = Signal(signed(max(map(len, starts)))), Signal(signed(max(map(len, rises))))
        m.d.comb += [start.eq(Mux(gelu, starts[1], starts[0])), rise.eq(Mux(gelu, rises[1], rises[0]))]
        with m.If(above):
            m.d.comb += [start.eq(0), rise.eq(0)]
        value, number, far, main, start, rise, position = register(
            "piece", value, number, far | (gelu & above), main, start, rise, position
        )

        # Minus the exponent, as a whole number and a fraction.
        # Minus a sum is the inverse of the sum less 1. A start has no fraction, so it and this 1 go into the compressor of the product, for which
        # all terms are unsigned, modulo a power of two. What the sign of a rise counts is such a term, inverted, and a constant.
        rests = Signal(signed(len(start) + POSITION + 1), attrs=lint_unused("more bits than matter"))
        scaled = Signal(width + POINT + 1, attrs=lint_unused("more bits than matter"))
        minus = Signal(signed(width + 1))
        low, size = len(rise) - 1, len(rests)
        m.d.comb += [
            rests.eq(
                tree_sum(
                    [
                        *(Cat(Const(0, k), gated(rise[:low], position[k])) for k in range(POSITION)),
                        Cat(Const(0, low), ~gated(position, rise[low]), Const(-1, size - low - POSITION)),
                        Cat(Const(0, POSITION), start, start[-1]),
                        Const((1 << low) - (1 << POSITION) & (1 << size) - 1, size),
                    ]
                )
            ),
            scaled.eq(main * Const(LOG2E)),
            minus.eq(~((scaled >> POINT) + (rests >> POSITION))),
        ]
        value, number, far, minus = register("exponent", value, number, far, minus)

        start, rise = _line(m, power_table(), minus[POSITION:POINT], "power")
        rising = Signal(POWER_POINT + POSITION, attrs=lint_unused("more bits than matter"))
        mantissa = Signal(POWER_POINT)
        # Both are positive. A start has no fraction.
        m.d.comb += [
            rising.eq(rise[:-1] * minus[:POSITION] + Cat(Const(0, POSITION), start[:POWER_POINT])),
            mantissa.eq(rising >> POSITION),
        ]
        power = minus[POINT:].as_signed()
        value, number, far, power, mantissa = register("power", value, number, far, power, mantissa)

        # Below 0 the weight is the power, above it is 1 less the power.
        x = Signal(Float)
        weight = Signal(Float)
        field = Signal(signed(len(power) + 1))
        drop, share = Signal(5), Signal(POWER_POINT + 1)
        significand = Cat(Const(0, _FRACTION - POWER_POINT), mantissa, Const(1, 1))
        m.d.comb += [
            x.as_value().eq(value),
            field.eq(power + _BIAS),
            drop.eq(Mux(-field > 31, 31, (-field)[:5])),
        ]
        away = Signal(len(power))
        m.d.comb += away.eq(~power)
        whole = Cat(mantissa, Const(1, 1))
        m.d.comb += share.eq(Mux(away[5:].any(), 0, whole >> away[:5]))
        rest = Signal(POWER_POINT)
        m.d.comb += rest.eq(-Cat(share[:POWER_POINT]))
        operand = Signal(Float)
        m.d.comb += operand.eq(x)
        with m.If(~smooth | far | (~x.sign & ~share.any())):
            m.d.comb += weight.exponent.eq(_BIAS)
            with m.If(smooth & far & x.sign & number):
                m.d.comb += [operand.exponent.eq(0), operand.fraction.eq(0)]
        with m.Elif(~x.sign):
            m.d.comb += [weight.exponent.eq(_BIAS - 1), weight.fraction.eq(rest << _FRACTION - POWER_POINT)]
            with m.If(share[POWER_POINT]):
                m.d.comb += weight.fraction.eq(0)
        with m.Elif(field > 0):
            m.d.comb += [weight.exponent.eq(field), weight.fraction.eq(significand[:_FRACTION])]
        with m.Else():
            m.d.comb += weight.fraction.eq(significand[1:] >> drop)
        operand, weight = register("weight", operand.as_value(), weight.as_value())

        m.submodules.multiply = multiply = FloatMultiply()
        m.d.comb += [
            multiply.enable.eq(enable),
            multiply.a.as_value().eq(operand),
            multiply.b.as_value().eq(weight),
            self.number.eq(multiply.number),
        ]
        return m
