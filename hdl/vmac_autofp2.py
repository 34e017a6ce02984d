"""AutoFP2-only baseline of the vector MAC (docs/datapath.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, Const, Module, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.accumulate import DualAccumulator
from hdl.lanes import GROUP, DigitBlock
from hdl.lib.arith import tree_sum
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.scale import ScaleByte, ScaleMagnitude
from hdl.lib.verilog import lint_unused
from hdl.packed_pair import PackedPair
from hdl.scaling import BlockScaler, input_registers, registered
from model.vmac_autofp2 import AutoFp2Config

__all__ = ["AutoFp2Status", "VmacAutoFp2"]

_HALVES = 3
"""Bits between the unit of a digit sum, half a dot product, and a sixteenth."""


class AutoFp2Status(data.Struct):
    """Sticky status: a sum saturated, a scale byte was no scale."""

    saturated: 1
    nan_scale: 1


class VmacAutoFp2(wiring.Component):
    """Multiply activations with two rows of AutoFP2 digits, scale and accumulate into two 32-bit halves: AutoFP2 mode alone.

    Same pipeline, window and latency as :class:`hdl.vmac.Vmac`, and the same ports for what it needs. Results are those of
    :func:`model.vmac_autofp2.vmac_autofp2`, bit for bit. One vector per cycle.

    Parameters
    ----------
    config : AutoFp2Config
        Lanes, scaling, window, pipeline.

    Members
    -------
    valid_i, valid_o : In(1), Out(1)
    a : In(lanes × E2M1)
    w : In(lanes × PackedPair)
    a_scale, w_scale : In(ScaleByte each)
        With pair scaling only the even bytes of ``a_scale`` are used.
    psum_i, psum_o : In(64), Out(64)
        ``{odd row, even row}``.
    status : Out(2)
        :class:`AutoFp2Status`, sticky until reset.
    """

    throughput: ClassVar[str] = "1 vector per cycle"
    port_meanings: ClassVar[dict[str, str]] = {
        "valid_i": "a vector is on the inputs",
        "valid_o": "psum_o belongs to a vector",
        "a": "E2M1 activation of lane k at [4k+3:4k]",
        "w": "packed pair of lane k at [5k+4:5k]",
        "a_scale": "E4M3 scale of block j at [8j+7:8j]; pair scaling uses the even blocks' only",
        "w_scale": "E4M3 scales: of the even row, odd row in turn (pair), or even row's, then odd row's (group)",
        "psum_i": "{odd row, even row} partial sums of the vector presented psum_delay cycles earlier",
        "psum_o": "partial sums with the vector added",
        "status": "sticky until reset: {nan_scale, saturated}",
    }

    def __init__(self, config: AutoFp2Config | None = None):
        self._config = config = config or AutoFp2Config()
        super().__init__(
            {
                "valid_i": In(1),
                "a": In(data.ArrayLayout(E2M1Code, config.lanes)),
                "w": In(data.ArrayLayout(PackedPair, config.lanes)),
                "a_scale": In(data.ArrayLayout(ScaleByte, config.blocks)),
                "w_scale": In(data.ArrayLayout(ScaleByte, config.w_scale_bytes)),
                "psum_i": In(64),
                "valid_o": Out(1),
                "psum_o": Out(64),
                "status": Out(AutoFp2Status),
            }
        )
        if config.scaling == "pair":
            self.a_scale.as_value().attrs.update(lint_unused("odd bytes keep the port of the vMAC"))

    @property
    def config(self) -> AutoFp2Config:
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
        grouped, fast = config.scaling == "group", config.pipeline == "fast"
        used = range(config.blocks) if grouped else range(0, config.blocks, 2)
        stage = input_registers(m, self, ("a", "w", "w_scale"))
        a_scales = {}
        for block in used:
            a_scales[block] = Signal(ScaleMagnitude, name=f"a_scale{block}_q", reset_less=True)
            m.d.sync += a_scales[block].eq(self.a_scale[block].magnitude)
        valid = Signal(self.latency - 1)
        m.d.sync += Cat(valid, self.valid_o).eq(Cat(self.valid_i, valid))

        sums: list[tuple[Value, Value]] = []
        for block in range(config.blocks):
            digits = DigitBlock(fast=fast)
            m.submodules[f"digits{block}"] = digits
            for k, lane in enumerate(range(GROUP * block, GROUP * (block + 1))):
                m.d.comb += [digits.a[k].eq(stage["a"][lane]), digits.w[k].eq(stage["w"][lane])]
            trees = (digits.even, digits.odd)
            if fast:
                trees = tuple(registered(m, f"block{block}_{tree.name}", tree) for tree in trees)
            sums.append(trees)

        rows: tuple[list[Value], list[Value]] = ([], [])
        for first in used:
            for row, name in enumerate(("even", "odd")):
                dot = sums[first][row] if grouped else sums[first][row] + sums[first + 1][row]
                w_byte = row * config.blocks + first if grouped else first + row
                scaler = BlockScaler(len(dot), lead=1 if fast else None)
                m.submodules[f"scaler_{name}{first}"] = scaler
                m.d.comb += [
                    scaler.o.eq(dot),
                    scaler.half.eq(Const(0, 1)),
                    scaler.w_scale.eq(stage["w_scale"][w_byte]),
                    scaler.a_scale.eq(a_scales[first]),
                ]
                scaler.aligned.attrs.update(lint_unused("bits below the window are rounded away"))
                rows[row].append(scaler.aligned)
        # The accumulator needs one bit below its unit, to round.
        dropped = config.window_shift - 1
        accumulator = DualAccumulator(config.as_vmac().total_bits - dropped, 1, switchable=False)
        m.submodules.accumulator = accumulator
        for addend, values in ((accumulator.even, rows[0]), (accumulator.odd, rows[1])):
            summed = tree_sum(values)
            total = Signal(
                summed.shape(), name=f"{addend.name}_total", attrs=lint_unused("bits below the window are rounded away")
            )
            m.d.comb += [total.eq(summed), addend.eq(total << _HALVES >> dropped)]
        m.d.comb += accumulator.psum.eq(self.psum_i)
        m.d.sync += self.psum_o.eq(accumulator.total)

        bad = Cat(*(byte.is_nan() for byte in (*self.w_scale, *(self.a_scale[i] for i in used)))).any()
        with m.If(self.valid_i & bad):
            m.d.sync += self.status.nan_scale.eq(1)
        with m.If(valid[-1] & accumulator.saturated):
            m.d.sync += self.status.saturated.eq(1)
        return m
