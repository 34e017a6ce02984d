"""Multiply-and-add blocks of sixteen lanes: AutoFP2 digits times E2M1 activations (paper, section 6.3)."""

from amaranth.hdl import Module, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.arith import shallow_sum, signed_terms, tree_sum
from hdl.lib.e2m1 import E2M1Code
from hdl.packed_pair import PackedPair

__all__ = ["GROUP", "DigitBlock"]

GROUP = 16
"""Lanes of a block, the elements of an NVFP4 group."""


class DigitBlock(wiring.Component):
    """Two dot products of 16 E2M1 activations with the two digits of 16 packed pairs; combinational.

    A zero digit bypasses its sub-lane: product and sign are 0, so nothing of it toggles in the tree whatever the activation does.

    Parameters
    ----------
    fast : bool
        Trees with a shorter path, :func:`hdl.lib.arith.shallow_sum`.

    Members
    -------
    a : In(16 × E2M1)
    w : In(16 × packed pair)
    even, odd : Out(signed(10))
        ``Σ 2·A_k·Q0_k`` and ``Σ 2·A_k·Q1_k``, each within ±384.
    """

    a: In(data.ArrayLayout(E2M1Code, GROUP))
    w: In(data.ArrayLayout(PackedPair, GROUP))
    even: Out(signed(10))
    odd: Out(signed(10))

    def __init__(self, *, fast: bool = False):
        self._fast = fast
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        """Build the two trees."""
        m = Module()
        lanes = []
        for k in range(GROUP):
            magnitude = Signal(4, name=f"a{k}_magnitude")
            m.d.comb += magnitude.eq(self.a[k].doubled_magnitude())
            lanes.append((magnitude, self.a[k].sign, self.w[k]))
        for out, digit_of in ((self.even, PackedPair.q0), (self.odd, PackedPair.q1)):
            products, signs = [], []
            for k, (magnitude, negative, pair) in enumerate(lanes):
                digit = digit_of(pair)
                product = Signal(5, name=f"{out.name}{k}_product")
                sign = Signal(name=f"{out.name}{k}_sign")
                m.d.comb += [product.eq(digit.times(magnitude)), sign.eq(digit.product_sign(negative))]
                products.append(product)
                signs.append(sign)
            total = shallow_sum(products, signs, len(out)) if self._fast else tree_sum(signed_terms(products, signs))
            m.d.comb += out.eq(total)
        return m
