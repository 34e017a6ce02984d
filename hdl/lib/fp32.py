"""Binary32 arithmetic in pipelines that can stall: integer to float, product and sum. Shared by every accelerator family."""

from collections.abc import Sequence

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.verilog import lint_unused

__all__ = ["Float", "FloatAdd", "FloatMultiply", "IntToFloat"]

_FRACTION, _EXPONENT, _BIAS = 23, 8, 127
_SIGNIFICAND = _FRACTION + 1
_QUIET_NAN = Cat(Const(1 << _FRACTION - 1, _FRACTION), Const(-1, _EXPONENT), Const(0, 1))


class Float(data.Struct):
    """A binary32 number."""

    fraction: 23
    exponent: 8
    sign: 1

    def significand(self) -> Value:
        """24 bits, with the hidden one unless the number is subnormal or zero."""
        return Cat(self.fraction, self.exponent.any())

    def is_nan(self) -> Value:
        """1 bit."""
        return self.exponent.all() & self.fraction.any()

    def is_infinite(self) -> Value:
        """1 bit: an infinity of either sign."""
        return self.exponent.all() & ~self.fraction.any()

    def scale(self) -> Value:
        """Return the biased exponent by which the significand counts: that of subnormals is 1."""
        return Cat(self.exponent[0] | ~self.exponent.any(), self.exponent[1:])


def _normalised(m: Module, value: Value, name: str, most: int | None = None) -> tuple[Value, Value]:
    """Shift the highest 1 to the top, by at most ``most`` bits; return the value and by how many bits, step by step from the longest."""
    width = len(value)
    limit = width - 1 if most is None else most
    steps: list[Value] = []
    for step in reversed(range(limit.bit_length())):
        shifted = Signal(width, name=f"{name}_{step}", attrs=lint_unused("only the distance may matter"))
        empty = Signal(name=f"{name}_empty_{step}")
        distance = 1 << step
        top = value[max(width - distance, 0) :]
        m.d.comb += [empty.eq(~top.any()), shifted.eq(Mux(empty, value << distance, value))]
        steps.insert(0, empty)
        value = shifted
    return value, Cat(steps)


def _registers(m: Module, enable: Value, values: Sequence[Value], name: str) -> list[Signal]:
    """Return registers that follow values while ``enable`` is set."""
    registers = [Signal.like(value, name=f"{name}_{i}", reset_less=True) for i, value in enumerate(values)]
    with m.If(enable):
        m.d.sync += [register.eq(value) for register, value in zip(registers, values, strict=True)]
    return registers


class IntToFloat(wiring.Component):
    """Round a signed integer to binary32, to nearest even; 1 per cycle in which ``enable`` is set.

    Stages: magnitude, leading one to the top, rounding. The result stands in registers.

    Parameters
    ----------
    width : int
        Bits of the integer, 2 to 64.

    Attributes
    ----------
    latency : int
        Cycles with ``enable`` from value to result.

    Members
    -------
    enable : In(1)
    value : In(signed)
    number : Out(Float)

    Raises
    ------
    ValueError
        ``width`` is out of range.
    """

    latency = 3

    def __init__(self, width: int = 64):
        if not 2 <= width <= 64:
            raise ValueError(f"width must be from 2 to 64, not {width}")
        self._width = width
        super().__init__({"enable": In(1), "value": In(signed(width)), "number": Out(Float)})

    def elaborate(self, platform: object) -> Module:
        """Build the three stages."""
        m = Module()
        width, enable = self._width, self.enable
        negative = self.value[-1]
        magnitude = Signal(width)
        m.d.comb += magnitude.eq((self.value.as_unsigned() ^ negative.replicate(width)) + negative)
        sign, magnitude = _registers(m, enable, [negative, magnitude], "magnitude")

        found, shift = _normalised(m, magnitude, "normal")
        exponent = Signal(_EXPONENT)
        m.d.comb += exponent.eq(Mux(found[-1], _BIAS + width - 1 - shift, 0))
        padded = Cat(Const(0, max(_SIGNIFICAND + 2 - width, 0)), found)
        below = len(padded) - _SIGNIFICAND
        short = Cat(padded[: below - 1].any(), padded[below - 1 : -1])
        sign, exponent, short = _registers(m, enable, [sign, exponent, short], "normal")

        up = short[1] & (short[0] | short[2])
        rounded = Signal(_EXPONENT + _FRACTION)
        m.d.comb += rounded.eq(Cat(short[2:], exponent) + up)
        (result,) = _registers(m, enable, [Cat(rounded, sign)], "result")
        m.d.comb += self.number.as_value().eq(result)
        return m


class FloatMultiply(wiring.Component):
    """Multiply two binary32 numbers as IEEE 754 says, to nearest even; 1 product per cycle in which ``enable`` is set.

    Subnormals are kept, as operands and as results. Every NaN is the quiet one 0x7FC00000; there are no flags. Stages: products with both halves of
    ``b``, their sum and the distance of its leading one, shift, rounding. The result stands in registers.

    Attributes
    ----------
    latency : int
        Cycles with ``enable`` from operands to result.

    Members
    -------
    enable : In(1)
    a, b : In(Float)
    number : Out(Float)
    """

    latency = 4

    enable: In(1)
    a: In(Float)
    b: In(Float)
    number: Out(Float)

    def elaborate(self, platform: object) -> Module:
        """Build the four stages."""
        m = Module()
        enable = self.enable
        width = 2 * _SIGNIFICAND

        # Products, and the exponent that the result has if the product's top bit is set; a signed number.
        zero, infinite, nan = ([], [], [])
        for operand in (self.a, self.b):
            zero.append(~(operand.exponent.any() | operand.fraction.any()))
            infinite.append(operand.is_infinite())
            nan.append(operand.is_nan())
        is_nan, is_infinite = Signal(), Signal()
        half = _SIGNIFICAND // 2
        low, high = Signal(_SIGNIFICAND + half), Signal(_SIGNIFICAND + half)
        exponent = Signal(signed(_EXPONENT + 2))
        m.d.comb += [
            is_nan.eq(nan[0] | nan[1] | (infinite[0] & zero[1]) | (zero[0] & infinite[1])),
            is_infinite.eq(infinite[0] | infinite[1]),
            low.eq(self.a.significand() * self.b.significand()[:half]),
            high.eq(self.a.significand() * self.b.significand()[half:]),
            exponent.eq(self.a.scale() + self.b.scale() - (_BIAS - 1)),
        ]
        sign = self.a.sign ^ self.b.sign
        sign, is_nan, is_infinite, low, high, exponent = _registers(
            m, enable, [sign, is_nan, is_infinite, low, high, exponent], "product"
        )
        product = Signal(width)
        m.d.comb += product.eq(Cat(low[:half], low[half:] + high))

        # The exponent may not fall below 1: a small one limits the shift to the left, or asks for one to the right. A product with more than
        # 24 zeros on top has two subnormal factors and is shifted to the right anyway; one shifted by 26 has only a sticky bit left.
        top = product[-(_SIGNIFICAND + 1) :]
        _, zeros = _normalised(m, top, "leading", _SIGNIFICAND)
        right = Signal()
        room, need = Signal(_EXPONENT + 2), Signal(_EXPONENT + 2)
        distance, left_over = Signal(5), Signal(signed(_EXPONENT + 2))
        m.d.comb += [right.eq(exponent < 1), room.eq(exponent - 1), need.eq(1 - exponent)]
        with m.If(right):
            m.d.comb += [distance.eq(Mux(need > _SIGNIFICAND + 2, _SIGNIFICAND + 2, need)), left_over.eq(1)]
        with m.Elif(room < zeros):
            m.d.comb += [distance.eq(room), left_over.eq(1)]
        with m.Else():
            m.d.comb += [distance.eq(zeros), left_over.eq(exponent - zeros)]
        sign, is_nan, is_infinite, product, exponent, right, distance = _registers(
            m, enable, [sign, is_nan, is_infinite, product, left_over.as_unsigned()[:-1], right, distance], "distance"
        )

        # 24 bits, one more and a sticky bit of all below.
        shifted, sticky = product, Const(0, 1)
        for step in range(5):
            lost = shifted[: 1 << step].any()
            moved = Signal(width, name=f"moved_{step}")
            m.d.comb += moved.eq(
                Mux(distance[step], Mux(right, shifted >> (1 << step), shifted << (1 << step)), shifted)
            )
            shifted, sticky = moved, sticky | (distance[step] & right & lost)
        short = Cat(sticky | shifted[: _SIGNIFICAND - 1].any(), shifted[_SIGNIFICAND - 1 :])
        sign, is_nan, is_infinite, short, exponent = _registers(
            m, enable, [sign, is_nan, is_infinite, short, exponent], "shifted"
        )

        # The hidden bit turns exponent 1 into 0 for subnormals; a carry out of the fraction makes the exponent right.
        rounded = Signal(1 + _EXPONENT + _FRACTION)
        m.d.comb += rounded.eq(
            Cat(short[2:-1], Mux(short[-1], exponent, 0)) + (short[1] & (short[0] | short[2])),
        )
        result = Signal(Float)
        m.d.comb += [result.as_value().eq(Cat(rounded, sign)), result.sign.eq(sign)]
        with m.If(is_nan):
            m.d.comb += result.eq(_QUIET_NAN)
        with m.Elif(is_infinite | (rounded[_FRACTION:] >= (1 << _EXPONENT) - 1)):
            m.d.comb += [result.fraction.eq(0), result.exponent.eq((1 << _EXPONENT) - 1)]
        (output,) = _registers(m, enable, [result.as_value()], "result")
        m.d.comb += self.number.as_value().eq(output)
        return m


class FloatAdd(wiring.Component):
    """Add two binary32 numbers as IEEE 754 says, to nearest even; 1 sum per cycle in which ``enable`` is set.

    Subnormals are kept. Every NaN is the quiet one 0x7FC00000, and a sum of 0 is +0 unless both numbers are -0. Stages: larger number and distance,
    alignment, sum and its leading one, shift and rounding. The result stands in registers.

    Attributes
    ----------
    latency : int
        Cycles with ``enable`` from operands to result.

    Members
    -------
    enable : In(1)
    a, b : In(Float)
    number : Out(Float)
    """

    latency = 4

    enable: In(1)
    a: In(Float)
    b: In(Float)
    number: Out(Float)

    def elaborate(self, platform: object) -> Module:
        """Build the four stages."""
        m = Module()
        enable = self.enable
        a, b = self.a, self.b
        # Behind the significand: a bit for rounding, one more for a shift to the left, and a sticky one.
        width = _SIGNIFICAND + 3

        # The number of larger magnitude gives exponent and sign.
        swap, differ, is_nan, is_infinite = (Signal(name=name) for name in ("swap", "differ", "is_nan", "is_infinite"))
        large, small = Signal(Float), Signal(Float)
        gap = Signal(_EXPONENT)
        m.d.comb += [
            swap.eq(Cat(a.fraction, a.exponent) < Cat(b.fraction, b.exponent)),
            large.as_value().eq(Mux(swap, b.as_value(), a.as_value())),
            small.as_value().eq(Mux(swap, a.as_value(), b.as_value())),
            differ.eq(a.sign ^ b.sign),
            is_nan.eq(a.is_nan() | b.is_nan() | (a.is_infinite() & b.is_infinite() & differ)),
            is_infinite.eq(a.is_infinite() | b.is_infinite()),
            gap.eq(large.scale() - small.scale()),
        ]
        # What cancels is +0; the signs of two zeros that add are alike.
        cancels = differ & (Cat(a.fraction, a.exponent) == Cat(b.fraction, b.exponent))
        sign, differ, is_nan, is_infinite, exponent, gap, large, small = _registers(
            m,
            enable,
            [
                large.sign & ~cancels,
                differ,
                is_nan,
                is_infinite,
                large.scale(),
                Mux(gap > width, width, gap)[: width.bit_length()],
                large.significand(),
                small.significand(),
            ],
            "ordered",
        )

        shifted, sticky = Cat(Const(0, 3), small), Const(0, 1)
        for step in range(len(gap)):
            moved = Signal(width, name=f"moved_{step}")
            m.d.comb += moved.eq(Mux(gap[step], shifted >> (1 << step), shifted))
            shifted, sticky = moved, sticky | (gap[step] & shifted[: 1 << step].any())
        sign, differ, is_nan, is_infinite, exponent, large, small = _registers(
            m,
            enable,
            [sign, differ, is_nan, is_infinite, exponent, large, Cat(shifted[0] | sticky, shifted[1:])],
            "aligned",
        )

        # The sum's top bit counts twice what the exponent says. The exponent may not fall below 1: a bit that stands for that ends the search
        # for the leading one, so that no comparison is behind it.
        total = Signal(width + 1)
        lowest, ends = (
            Signal(width + 1),
            Signal(width + 1, attrs=lint_unused("only the highest bit that is set matters")),
        )
        m.d.comb += total.eq(Cat(Const(0, 3), large) + (small ^ differ.replicate(width)) + differ)
        total = Cat(total[:width], total[width] & ~differ)
        m.d.comb += lowest.eq(Cat((exponent == width - i) for i in range(width)))
        m.d.comb += ends.eq(total | lowest)
        _, distance = _normalised(m, ends, "leading", _SIGNIFICAND + 2)
        sign, is_nan, is_infinite, total, distance, exponent = _registers(
            m, enable, [sign, is_nan, is_infinite, total, distance, exponent], "sum"
        )

        left_over = Signal(_EXPONENT)
        m.d.comb += left_over.eq(exponent + 1 - distance)
        for step in range(len(distance)):
            moved = Signal(width + 1, name=f"normal_{step}")
            m.d.comb += moved.eq(Mux(distance[step], total << (1 << step), total))
            total = moved
        short = Cat(total[:3].any(), total[3:])
        rounded = Signal(_EXPONENT + _FRACTION)
        m.d.comb += rounded.eq(
            Cat(short[2:-1], Mux(short[-1], left_over, 0)) + (short[1] & (short[0] | short[2])),
        )
        result = Signal(Float)
        m.d.comb += [result.as_value().eq(Cat(rounded, sign)), result.sign.eq(sign)]
        with m.If(is_nan):
            m.d.comb += result.eq(_QUIET_NAN)
        with m.Elif(is_infinite | rounded[_FRACTION:].all()):
            m.d.comb += [result.fraction.eq(0), result.exponent.eq((1 << _EXPONENT) - 1)]
        (output,) = _registers(m, enable, [result.as_value()], "result")
        m.d.comb += self.number.as_value().eq(output)
        return m
