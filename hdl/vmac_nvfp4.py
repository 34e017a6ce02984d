"""NVFP4-only baseline of the vector MAC: what every area ratio is measured against (docs/datapath.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, Const, Module, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.lanes import GROUP
from hdl.lib.arith import shallow_sum, signed_terms, tree_sum
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.scale import ScaleByte
from hdl.scaling import BlockScaler, input_registers
from model.vmac_nvfp4 import Nvfp4Config

__all__ = ["ProductBlock", "VmacNvfp4"]


class ProductBlock(wiring.Component):
    """Dot product of 16 E2M1 activations with 16 E2M1 weights, in quarters; combinational.

    Each lane multiplies two 2-bit significands and shifts by both binades.

    Parameters
    ----------
    fast : bool
        A tree with a shorter path, :func:`hdl.lib.arith.shallow_sum`.

    Members
    -------
    a, w : In(16 × E2M1)
    dot : Out(signed(13))
        ``Σ 2·A_k·2·W_k``, within ±2304.
    """

    a: In(data.ArrayLayout(E2M1Code, GROUP))
    w: In(data.ArrayLayout(E2M1Code, GROUP))
    dot: Out(signed(13))

    def __init__(self, *, fast: bool = False):
        self._fast = fast
        super().__init__()

    def elaborate(self, platform: object) -> Module:
        """Build lanes and tree."""
        m = Module()

        def scaled_up(value: Value, code: E2M1Code) -> Value:
            result = Const(0, len(value))
            for shift, chosen in enumerate(code.binade()):
                result = result | ((value & chosen.replicate(len(value))) << shift)
            return result

        def significand(code: E2M1Code) -> Value:
            return Cat(code.mantissa, code.exponent.any())

        products, signs = [], []
        for k, (a, w) in enumerate(zip(self.a, self.w, strict=True)):
            core, by_a, product = (
                Signal(4, name=f"core{k}"),
                Signal(6, name=f"core{k}_a"),
                Signal(8, name=f"product{k}"),
            )
            sign = Signal(name=f"sign{k}")
            m.d.comb += [
                core.eq(significand(a) * significand(w)),
                by_a.eq(scaled_up(core, a)),
                product.eq(scaled_up(by_a, w)),
                sign.eq(a.sign ^ w.sign),
            ]
            products.append(product)
            signs.append(sign)
        total = shallow_sum(products, signs, len(self.dot)) if self._fast else tree_sum(signed_terms(products, signs))
        m.d.comb += self.dot.eq(total)
        return m


class VmacNvfp4(wiring.Component):
    """Multiply activations with NVFP4 weights, scale and accumulate into 64 bits: NVFP4 mode alone.

    Scaling and accumulation as in :class:`hdl.vmac.Vmac`, and the same port names for what it needs; ``w`` holds E2M1 codes. The fast pipeline
    has no cut more: nothing comes between trees and scalers. Results are those of :func:`model.vmac_nvfp4.vmac_nvfp4`, bit for bit. One vector per cycle.

    Parameters
    ----------
    config : Nvfp4Config
        Lanes, pipeline.

    Members
    -------
    valid_i, valid_o : In(1), Out(1)
    a, w : In(lanes × E2M1)
    a_scale, w_scale : In(lanes / 16 × ScaleByte)
    psum_i, psum_o : In(64), Out(64)
        In units of 2⁻²² T_W·T_A.
    status : Out(1)
        A scale byte was no scale; sticky until reset.
    """

    throughput: ClassVar[str] = "1 vector per cycle"
    port_meanings: ClassVar[dict[str, str]] = {
        "valid_i": "a vector is on the inputs",
        "valid_o": "psum_o belongs to a vector",
        "a": "E2M1 activation of lane k at [4k+3:4k]",
        "w": "E2M1 weight of lane k at [4k+3:4k]",
        "a_scale": "E4M3 scale of block j at [8j+7:8j]",
        "w_scale": "E4M3 scale of block j at [8j+7:8j]",
        "psum_i": "partial sum of the vector presented psum_delay cycles earlier",
        "psum_o": "partial sum with the vector added",
        "status": "sticky until reset: nan_scale",
    }

    def __init__(self, config: Nvfp4Config | None = None):
        self._config = config = config or Nvfp4Config()
        super().__init__(
            {
                "valid_i": In(1),
                "a": In(data.ArrayLayout(E2M1Code, config.lanes)),
                "w": In(data.ArrayLayout(E2M1Code, config.lanes)),
                "a_scale": In(data.ArrayLayout(ScaleByte, config.blocks)),
                "w_scale": In(data.ArrayLayout(ScaleByte, config.blocks)),
                "psum_i": In(64),
                "valid_o": Out(1),
                "psum_o": Out(64),
                "status": Out(1),
            }
        )

    @property
    def config(self) -> Nvfp4Config:
        """The configuration that this component was built with."""
        return self._config

    @property
    def latency(self) -> int:
        """Cycles from a vector to its ``valid_o``."""
        return self._config.latency

    @property
    def psum_delay(self) -> int:
        """Cycles from a vector to its ``psum_i``."""
        return self._config.psum_delay

    def elaborate(self, platform: object) -> Module:
        """Build the pipeline: input registers, dot products, scaling, accumulation."""
        m = Module()
        config = self._config
        fast = config.pipeline == "fast"
        stage = input_registers(m, self, ("a", "w", "a_scale", "w_scale"))
        valid = Signal(self.latency - 1)
        m.d.sync += Cat(valid, self.valid_o).eq(Cat(self.valid_i, valid))

        values = []
        for block in range(config.blocks):
            products = ProductBlock(fast=fast)
            m.submodules[f"products{block}"] = products
            for k, lane in enumerate(range(GROUP * block, GROUP * (block + 1))):
                m.d.comb += [products.a[k].eq(stage["a"][lane]), products.w[k].eq(stage["w"][lane])]
            scaler = BlockScaler(config.output_bits, lead=0 if fast else None)
            m.submodules[f"scaler{block}"] = scaler
            m.d.comb += [
                scaler.o.eq(products.dot),
                scaler.w_scale.eq(stage["w_scale"][block]),
                scaler.a_scale.eq(stage["a_scale"][block]),
            ]
            # The dot product comes in quarters, the sum counts sixteenths.
            values.append(scaler.aligned << 2)
        m.d.sync += self.psum_o.eq(tree_sum([self.psum_i, *values]))

        bad = Cat(*(byte.is_nan() for byte in (*self.a_scale, *self.w_scale))).any()
        with m.If(self.valid_i & bad):
            m.d.sync += self.status.eq(1)
        return m
