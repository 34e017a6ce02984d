"""Block scaling and exact alignment of dot products (paper, sections 6.3 and D.8); the vMAC and both baselines share it."""

from collections.abc import Iterable
from typing import Any

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.scale import ScaleByte, ScaleMagnitude
from model.formats import E4M3

__all__ = ["ALIGNED_GROWTH", "BlockScaler", "input_registers", "registered"]

SIGNIFICAND = E4M3.mantissa_bits + 1
SHIFT = E4M3.exponent_bits + 1
MAX_SHIFT = 2 * (2**E4M3.exponent_bits - 1) - 2
"""Largest ``E_W + E_A - 2``."""

ALIGNED_GROWTH = 2 * SIGNIFICAND + MAX_SHIFT
"""Bits that scaling and alignment add to a dot product, 36."""


def input_registers(m: Module, component: wiring.Component, names: Iterable[str]) -> dict[str, Any]:
    """Register inputs of a vMAC, without reset, and return the registers by name; of scale bytes only the magnitudes are kept."""
    stage = {}
    for name in names:
        port = getattr(component, name)
        shape = port.shape()
        scales = isinstance(shape, data.ArrayLayout) and shape.elem_shape is ScaleByte
        if scales:
            shape = data.ArrayLayout(ScaleMagnitude, shape.length)
        register = Signal(shape, name=f"{name}_q", reset_less=True)
        m.d.sync += register.eq(Cat(*(byte.magnitude for byte in port)) if scales else port)
        stage[name] = register
    return stage


def registered(m: Module, name: str, value: Value) -> Signal:
    """Return a value as it was a cycle ago, in a register without reset."""
    register = Signal(value.shape(), name=name, reset_less=True)
    m.d.sync += register.eq(value)
    return register


class BlockScaler(wiring.Component):
    """Scale a dot product by two E4M3 scales and align it, exactly.

    ``aligned = o · M_W · M_A · 2**(E_W + E_A - 2)``, two clock cycles after ``o``: one register stage holds the operands, one the product;
    the shifter behind it is combinational. One result per cycle.

    Parameters
    ----------
    width : int
        Bits of the signed dot product.
    lead : int, optional
        The scales are multiplied with each other first, and come so many cycles before ``o``: a shorter path, more area. By default they come
        with ``o``, which is multiplied by one after the other.

    Members
    -------
    o : In(signed(width))
        Dot product.
    w_scale, a_scale : In(ScaleMagnitude)
        Scales, sampled with ``o``, or ``lead`` cycles before it.
    half : In(1)
        The dot product is given in half units; the result is twice as large. Sampled with the scales.
    aligned : Out(signed(width + 36))
        Scaled value. The caller keeps ``|o| · (half + 1)`` within ``width`` bits.
    """

    def __init__(self, width: int, *, lead: int | None = None):
        self._lead = lead
        super().__init__(
            {
                "o": In(signed(width)),
                "half": In(1),
                "w_scale": In(ScaleMagnitude),
                "a_scale": In(ScaleMagnitude),
                "aligned": Out(signed(width + ALIGNED_GROWTH)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the two register stages, the multiplier and the shifter."""
        m = Module()
        o = Signal.like(self.o, reset_less=True)
        m.d.sync += o.eq(self.o)
        product = Signal(signed(len(self.o) + 2 * SIGNIFICAND), reset_less=True)
        shift = Signal(SHIFT, reset_less=True)
        if self._lead is not None:
            significands = self.w_scale.significand() * self.a_scale.significand()
            distance = (self.w_scale.exponent() + self.a_scale.exponent() - 2 + self.half)[:SHIFT]
            for stage in range(self._lead + 1):
                significands = registered(m, f"significands_{stage}", significands)
                distance = registered(m, f"shift_{stage}", distance)
            m.d.sync += [product.eq(o * significands), shift.eq(distance)]
        else:
            w_significand, a_significand = Signal(SIGNIFICAND, reset_less=True), Signal(SIGNIFICAND, reset_less=True)
            exponents, half = Signal(SHIFT, reset_less=True), Signal(reset_less=True)
            m.d.sync += [
                w_significand.eq(self.w_scale.significand()),
                a_significand.eq(self.a_scale.significand()),
                exponents.eq(self.w_scale.exponent() + self.a_scale.exponent()),
                half.eq(self.half),
            ]
            # By one significand after the other: two 4-bit multipliers in a row are smaller than an 8-bit one.
            m.d.sync += [product.eq(o * w_significand * a_significand), shift.eq(exponents - 2 + half)]

        # Short shifts first keep the early stages narrow.
        negative = product[-1]
        shifted: Value = product[:-1]
        for stage, select in enumerate(shift):
            distance = 1 << stage
            width = min(len(shifted) + distance, len(self.aligned) - 1)
            following = Signal(width, name=f"shifted{stage}")
            extended = Cat(shifted, negative.replicate(distance))
            m.d.comb += following.eq(Mux(select, Cat(Const(0, distance), shifted), extended))
            shifted = following
        m.d.comb += self.aligned.eq(Cat(shifted, negative))
        return m
