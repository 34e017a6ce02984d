"""The AutoEMatic vector MAC (paper, section 6.3 and figure 11; docs/datapath.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from hdl.accumulate import DualAccumulator
from hdl.lanes import GROUP, DigitBlock
from hdl.lib.arith import gated, tree_sum
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.scale import ScaleByte
from hdl.lib.verilog import lint_unused
from hdl.packed_pair import PackedPair
from hdl.refinement import InPlaceRefinement, RecordGate, SlotRefinement, held_layout, record_layout
from hdl.scaling import BlockScaler, input_registers, registered
from model.vmac import VmacConfig

__all__ = ["ModeReduction", "StatusBits", "Vmac"]


class StatusBits(data.Struct):
    """Sticky status: an illegal mode, an AutoFP2 sum that saturated, a scale byte that is no number."""

    illegal: 1
    saturated: 1
    nan_scale: 1


class ModeReduction(wiring.Component):
    """Combine the trees and refinements of two blocks into two dot products, by mode; combinational.

    NVFP4 and AutoFP6: ``o0 = 4·(5A + 2B) + R0`` and ``o1 = 4·(5C + 2D) + R1``. AutoFP2: ``o0 = 4·(A + C)``, which is half of ``4·P0``, and
    ``o1 = 4·2·(B + D)``. The half saves a multiplexer; the scaler makes up for it. Without refinement both are a quarter of this.

    Parameters
    ----------
    refinement_width : int
        Bits of ``r0`` and ``r1``, 0 for hardware without refinement.
    width : int
        Bits of ``o0`` and ``o1``.
    group_scaling : bool
        AutoFP2 sums stay apart by group: ``o0 = 4·A``, ``o1 = 4·2·D``, both of one block.

    Members
    -------
    mode_nvfp4 : In(1)
    a, b, c, d : In(signed(10))
        Even and odd sums of block 0, even and odd sums of block 1.
    r0, r1 : In(signed(refinement_width))
        Refinement sums, 0 outside AutoFP6.
    o0, o1 : Out(signed(width))
    """

    def __init__(self, refinement_width: int, width: int, *, group_scaling: bool = False):
        self._refinement_width = refinement_width
        self._group_scaling = group_scaling
        trees = {name: In(signed(10)) for name in "abcd"}
        refinement = {name: In(signed(refinement_width)) for name in ("r0", "r1")} if refinement_width else {}
        outputs = {name: Out(signed(width)) for name in ("o0", "o1")}
        super().__init__({"mode_nvfp4": In(1)} | trees | refinement | outputs)
        if refinement_width > width:
            for port in (self.r0, self.r1):
                port.attrs.update(lint_unused("the tree's own width exceeds the output's"))

    def elaborate(self, platform: object) -> Module:
        """Build the two sums."""
        m = Module()
        nvfp4 = self.mode_nvfp4

        if self._group_scaling:
            swapped0, swapped1 = gated(self.b, nvfp4) << 1, gated(self.c, nvfp4) << 2
        else:
            swapped0, swapped1 = Mux(nvfp4, self.b << 1, self.c), Mux(nvfp4, self.c << 2, self.b << 1)
        sums = [
            [self.a, gated(self.a, nvfp4) << 2, swapped0],
            [self.d << 1, gated(self.c, nvfp4), swapped1],
        ]
        if self._refinement_width:
            sums = [[*(term << 2 for term in terms), r] for terms, r in zip(sums, (self.r0, self.r1), strict=True)]
        for out, terms in zip((self.o0, self.o1), sums, strict=True):
            m.d.comb += out.eq(tree_sum(terms, len(out)))
        return m


class Vmac(wiring.Component):
    """Multiply 32 (or a multiple) activations with weights held as packed pairs, scale and accumulate.

    Modes, sampled with each vector: AutoFP2 (two dot products of ``lanes`` elements, one per output row), NVFP4 and AutoFP6 (one dot product,
    AutoFP6 with refined subgroups). Results are those of :func:`model.vmac.vmac`, bit for bit. One vector per cycle, never stalls.

    Weights in NVFP4 and AutoFP6 mode must be pairs that :mod:`hdl.weight_encoder` makes, records in slot order; the vMAC does not check it.

    Parameters
    ----------
    config : VmacConfig
        Lanes, refinement, slots, step rule, AutoFP2 scaling and window, pipeline.

    Members
    -------
    mode_nvfp4, refine_en : In(1)
        0/0 AutoFP2, 1/0 NVFP4, 1/1 AutoFP6; 0/1 is illegal, runs as AutoFP2 and is reported. ``refine_en`` exists with refinement only.
    valid_i, valid_o : In(1), Out(1)
    a : In(lanes × E2M1)
    w : In(lanes × PackedPair)
    a_scale, w_scale : In(ScaleByte each)
        One byte per block of 16 lanes. In AutoFP2 mode bytes 2i and 2i + 1 of ``w_scale`` are the even and odd row's, and byte 2i of
        ``a_scale`` serves both blocks. With ``scaling = "group"`` ``w_scale`` has two bytes per block: the even row's, then the odd row's.
    refine : In(records)
        Refinement records of each block; only looked at in AutoFP6 mode.
    psum_i, psum_o : In(64), Out(64)
        Partial sum, in units of 2⁻²² T_W·T_A; in AutoFP2 mode ``{odd row, even row}`` in units of ``2**(window_shift - 22)``.
    status : Out(3)
        :class:`StatusBits`, sticky until reset; includes a vector's bits no later than its ``valid_o``.
    """

    throughput: ClassVar[str] = "1 vector per cycle"
    port_meanings: ClassVar[dict[str, str]] = {
        "mode_nvfp4": "1 NVFP4 or AutoFP6, 0 AutoFP2; sampled with the vector",
        "refine_en": "1 AutoFP6; illegal without mode_nvfp4; sampled with the vector",
        "valid_i": "a vector is on the inputs",
        "valid_o": "psum_o belongs to a vector",
        "a": "E2M1 activation of lane k at [4k+3:4k]",
        "w": "packed pair of lane k at [5k+4:5k]",
        "a_scale": "E4M3 scale of block j at [8j+7:8j]; AutoFP2 with pair scaling uses the even blocks' only",
        "w_scale": "E4M3 scale of block j at [8j+7:8j]; AutoFP2: of the even row, odd row in turn (pair), or even row's, then odd row's (group)",
        "refine": "refinement records, block 0 lowest; slots: 12 bits {is_activation, subgroup, valid, d3..d0}; inplace: 40 bits {A mask, W mask, d15..d0}",
        "psum_i": "partial sum of the vector presented psum_delay cycles earlier; {odd row, even row} in AutoFP2 mode",
        "psum_o": "partial sum with the vector added",
        "status": "sticky until reset: {nan_scale, saturated, illegal}",
    }

    def __init__(self, config: VmacConfig | None = None):
        self._config = config = config or VmacConfig()
        refine = (
            {}
            if config.refinement == "none"
            else {"refine_en": In(1), "refine": In(data.ArrayLayout(record_layout(config), config.blocks))}
        )
        super().__init__(
            {
                "mode_nvfp4": In(1),
                "valid_i": In(1),
                "a": In(data.ArrayLayout(E2M1Code, config.lanes)),
                "w": In(data.ArrayLayout(PackedPair, config.lanes)),
                "a_scale": In(data.ArrayLayout(ScaleByte, config.blocks)),
                "w_scale": In(data.ArrayLayout(ScaleByte, config.blocks * (2 if config.scaling == "group" else 1))),
                **refine,
                "psum_i": In(64),
                "valid_o": Out(1),
                "psum_o": Out(64),
                "status": Out(StatusBits),
            }
        )

    @property
    def config(self) -> VmacConfig:
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
        refined, grouped = config.refinement != "none", config.scaling == "group"
        fast = config.pipeline == "fast"

        # Stage 1: input registers, of records behind their gates. Only what marks a vector as valid is reset.
        stage = input_registers(m, self, ["mode_nvfp4", "a", "w", "a_scale", "w_scale"])
        valid = Signal(self.latency - 1)
        m.d.sync += Cat(valid, self.valid_o).eq(Cat(self.valid_i, valid))
        nvfp4 = stage["mode_nvfp4"]
        a_scale, w_scale = stage["a_scale"], stage["w_scale"]

        # Dot products of every block, then of every pair of blocks.
        trees, refinements = [], []
        if refined:
            enable = Signal()
            held = Signal(data.ArrayLayout(held_layout(config), config.blocks), name="refine_q", reset_less=True)
            m.d.comb += enable.eq(self.mode_nvfp4 & self.refine_en)
        for block in range(config.blocks):
            lanes = range(GROUP * block, GROUP * (block + 1))
            digits = DigitBlock(fast=fast)
            m.submodules[f"digits{block}"] = digits
            for k, lane in enumerate(lanes):
                m.d.comb += [digits.a[k].eq(stage["a"][lane]), digits.w[k].eq(stage["w"][lane])]
            sums = [digits.even, digits.odd]
            if fast:
                sums = [registered(m, f"block{block}_{tree.name}", tree) for tree in sums]
            trees.append(sums)
            if refined:
                refinement = SlotRefinement(config) if config.refinement == "slots" else InPlaceRefinement(config)
                m.submodules[f"refinement{block}"] = refinement
                gate = RecordGate(config)
                m.submodules[f"gate{block}"] = gate
                m.d.comb += [
                    gate.enable.eq(enable),
                    gate.record.eq(self.refine[block]),
                    refinement.held.eq(held[block]),
                ]
                m.d.sync += held[block].eq(gate.held)
                for k, lane in enumerate(lanes):
                    m.d.comb += [refinement.a[k].eq(stage["a"][lane]), refinement.w[k].eq(stage["w"][lane])]
                refinements.append(registered(m, f"block{block}_r", refinement.r) if fast else refinement.r)
        # The scalers want the scales when the trees are summed; what comes behind the trees is a cut later.
        reduced_nvfp4 = registered(m, "reduced_nvfp4", nvfp4) if fast else nvfp4

        # A dot product without refinement comes in quarters, 2 bits less.
        unit = 0 if refined else 2
        width = config.output_bits - unit
        even: list[Value] = []
        odd: list[Value] = []

        def scaled(name: str, o: Value, half: Value, w_byte: Value, a_byte: Value) -> Signal:
            scaler = BlockScaler(width, lead=1 if fast else None)
            m.submodules[f"scaler_{name}"] = scaler
            m.d.comb += [scaler.o.eq(o), scaler.half.eq(half), scaler.w_scale.eq(w_byte), scaler.a_scale.eq(a_byte)]
            if unit:
                scaler.aligned.attrs.update(lint_unused("without refinement the sum needs fewer high bits"))
            return scaler.aligned

        for pair in range(config.blocks // 2):
            first, second = 2 * pair, 2 * pair + 1
            (a, b), (c, d) = trees[first], trees[second]
            reduction = ModeReduction(len(refinements[0]) if refined else 0, width, group_scaling=grouped)
            m.submodules[f"reduction{pair}"] = reduction
            m.d.comb += [
                reduction.mode_nvfp4.eq(reduced_nvfp4),
                *(
                    port.eq(tree)
                    for port, tree in zip(
                        (reduction.a, reduction.b, reduction.c, reduction.d), (a, b, c, d), strict=True
                    )
                ),
            ]
            if refined:
                m.d.comb += [reduction.r0.eq(refinements[first]), reduction.r1.eq(refinements[second])]
            if grouped:
                second_scale = Mux(nvfp4, w_scale[second].as_value(), w_scale[config.blocks + second].as_value())
                second_activation = a_scale[second]
                for rows, name, dot, w_byte, a_byte in (
                    (even, f"{second}_even", c, second, second),
                    (odd, f"{first}_odd", b, config.blocks + first, first),
                ):
                    half_units = gated(dot, ~reduced_nvfp4) << 2 - unit
                    rows.append(scaled(name, half_units, Const(1, 1), w_scale[w_byte], a_scale[a_byte]))
            else:
                second_scale = w_scale[second]
                second_activation = Mux(nvfp4, a_scale[second].as_value(), a_scale[first].as_value())
            even.append(scaled(f"{first}", reduction.o0, ~nvfp4, w_scale[first], a_scale[first]))
            odd.append(scaled(f"{second}", reduction.o1, Const(0, 1), second_scale, second_activation))

        # Accumulation, in the units of the scaled values.
        exact = Signal(2, reset_less=True)
        m.d.sync += exact.eq(Cat(reduced_nvfp4, exact[0]))
        totals = [tree_sum(values) << unit for values in (even, odd)]
        accumulator = DualAccumulator(config.total_bits, config.window_shift)
        m.submodules.accumulator = accumulator
        m.d.comb += [
            accumulator.exact.eq(exact[1]),
            accumulator.even.eq(totals[0]),
            accumulator.odd.eq(totals[1]),
            accumulator.psum.eq(self.psum_i),
        ]
        m.d.sync += self.psum_o.eq(accumulator.total)

        self._report(m, valid[-1] & accumulator.saturated)
        return m

    def _report(self, m: Module, saturated: Value) -> None:
        """Keep the sticky status bits."""
        config = self._config
        nvfp4 = self.mode_nvfp4
        nan = []
        for n, byte in enumerate(self.w_scale):
            # Scales of the odd row are nobody's in NVFP4 mode.
            nan.append(byte.is_nan() & ~nvfp4 if n >= config.blocks else byte.is_nan())
        for n, byte in enumerate(self.a_scale):
            shared = config.scaling == "pair" and n % 2
            nan.append(byte.is_nan() & nvfp4 if shared else byte.is_nan())
        nan_scale = Signal()
        m.d.comb += nan_scale.eq(Cat(*nan).any())
        with m.If(self.valid_i & nan_scale):
            m.d.sync += self.status.nan_scale.eq(1)
        if config.refinement != "none":
            with m.If(self.valid_i & self.refine_en & ~nvfp4):
                m.d.sync += self.status.illegal.eq(1)
        with m.If(saturated):
            m.d.sync += self.status.saturated.eq(1)
