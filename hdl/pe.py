"""Processing element: operand buffers, output-stationary schedule, vector MAC and accumulators (paper, section 6.1; docs/pe.md)."""

from typing import ClassVar

from amaranth.hdl import Cat, ClockDomain, ClockSignal, Const, DomainRenamer, Module, Mux, ResetSignal, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from hdl.collector import RecordMerger, activation_entry, weight_entry
from hdl.lib.arith import gated
from hdl.lib.verilog import lint_unused
from hdl.vmac import StatusBits, Vmac
from model.pe import PeConfig

__all__ = ["Pe", "PeStatus", "ResultWord", "check_command", "command_layout"]


class PeStatus(data.Struct):
    """Sticky status: AutoFP2 saturation, a scale byte that is no number, masks that overlap, records that found no place, a refused command."""

    saturated: 1
    nan_scale: 1
    overlap: 1
    dropped: 1
    bad_command: 1


class ResultWord(data.Struct):
    """One finished accumulator, 65 bits; ``last`` marks the last of a tile."""

    psum: 64
    last: 1


def command_layout(config: PeConfig) -> data.StructLayout:
    """Return the layout of a tile command: sizes as they are (not less one), then the mode."""
    return data.StructLayout(
        {
            "m": config.max_m.bit_length(),
            "n": config.max_n.bit_length(),
            "kv": config.max_kv.bit_length(),
            "mode_nvfp4": 1,
            **({} if config.refinement == "none" else {"refine_en": 1}),
        }
    )


class Pe(wiring.Component):
    """Compute tiles of M activation vectors times N weight vectors over KV K-vectors, one vector pair per cycle.

    For each K-vector the N weight vectors pass once, each kept while the M activation vectors pass before it. Operands come in by two
    streams in the order of use: per K-vector N weight entries, M activation entries. Finished sums leave by a third, M of the first weight
    vector, then of the next. Loading, computing and draining overlap; computing starts as soon as an entry is there.

    A command with a size of 0, M above the activation buffer, M·N above half the accumulators, KV above ``config.max_kv`` or
    ``refine_en`` without ``mode_nvfp4`` is refused: it is taken, sets ``bad_command`` and does nothing else.

    A tile with M·N below 3 runs at M·N vectors per 3 cycles, because a sum comes back to its accumulator only then.

    Parameters
    ----------
    config : PeConfig

    Members
    -------
    command : In(stream of command)
    weight : In(stream of weight entry)
    activation : In(stream of activation entry)
    result : Out(stream of ResultWord)
    clear : In(1)
        Clears the status; only while ``busy`` is 0.
    busy : Out(1)
        A command is running or results have not left.
    status : Out(PeStatus)
    """

    throughput: ClassVar[str] = "1 vector per cycle while operands and accumulators are there"
    port_meanings: ClassVar[dict[str, str]] = {
        "command__payload": "tile to run: {refine_en, mode_nvfp4, kv, n, m}, m lowest",
        "command__valid": "a command is offered",
        "command__ready": "the command is taken",
        "weight__payload": "weight vector: {records, scales, packed pairs}; records per block {offsets 1, offsets 0, mask}",
        "weight__valid": "a weight vector is offered",
        "weight__ready": "the weight vector is taken",
        "activation__payload": "activation vector: {records, scales, E2M1 codes}; records per block {offsets 1, offsets 0, mask}",
        "activation__valid": "an activation vector is offered",
        "activation__ready": "the activation vector is taken",
        "result__payload": "{last of the tile, 64-bit sum}; {odd row, even row} in AutoFP2 mode",
        "result__valid": "a sum is offered",
        "result__ready": "the sum is taken",
        "clear": "clears the status, only while busy is 0",
        "busy": "a command is running or results have not left",
        "status": "sticky until reset or clear: {bad_command, dropped, overlap, nan_scale, saturated}",
    }

    def __init__(self, config: PeConfig | None = None):
        self._config = config = config or PeConfig()
        super().__init__(
            {
                "command": In(stream.Signature(command_layout(config))),
                "weight": In(stream.Signature(weight_entry(config.vmac))),
                "activation": In(stream.Signature(activation_entry(config.vmac))),
                "result": Out(stream.Signature(ResultWord)),
                "clear": In(1),
                "busy": Out(1),
                "status": Out(PeStatus),
            }
        )

    @property
    def config(self) -> PeConfig:
        """The configuration that this component was built with."""
        return self._config

    def elaborate(self, platform: object) -> Module:
        """Build buffers, schedule, collectors, vector MAC and drain."""
        m = Module()
        config = self._config
        vmac = Vmac(config.vmac)
        refined = config.refinement != "none"
        command = self.command.payload

        m.submodules.weights = weights = OperandBuffer(weight_entry(config.vmac), config.weight_entries)
        m.submodules.activations = activations = OperandBuffer(activation_entry(config.vmac), config.activation_entries)
        wiring.connect(m, wiring.flipped(self.weight), weights.entry)
        wiring.connect(m, wiring.flipped(self.activation), activations.entry)

        # The tile that is being issued; sizes are kept as last indices.
        active, short, nvfp4, refine_en = (Signal(name=n) for n in ("active", "short", "nvfp4", "refine_en"))
        bank = Signal(init=1)
        sizes = data.StructLayout({name: len(command[name]) for name in ("m", "n", "kv")})
        last, at = Signal(sizes), Signal(sizes)
        address = Signal(range(config.max_words))
        last_m, last_n, last_kv = Signal(), Signal(), Signal()
        m.d.comb += [last_m.eq(at.m == last.m), last_n.eq(at.n == last.n), last_kv.eq(at.kv == last.kv)]

        # A sum can be fetched again so many cycles after its last use was issued; the passes of a short tile want it sooner.
        again = config.read_after_write
        recent = Signal(data.ArrayLayout(data.StructLayout({"valid": 1, "odd": 1}), again - 1))
        hazard = Signal()
        m.d.comb += hazard.eq(short & at.kv.any() & Cat(past.valid & (past.odd == address[0]) for past in recent).any())

        # A weight is fetched once and stays at the buffer's output while the activations pass. Activations come back for every weight
        # and are released during the last one's pass.
        issue, first_m, tile_ends = Signal(), Signal(), Signal()
        m.d.comb += [
            first_m.eq(~at.m.any()),
            issue.eq(active & (~first_m | weights.level.any()) & (activations.level > Mux(last_n, 0, at.m)) & ~hazard),
            tile_ends.eq(issue & last_m & last_n & last_kv),
            weights.read.eq(issue & first_m),
            weights.free.eq(issue & first_m),
            weights.rewind.eq(0),
            weights.back.eq(0),
            activations.read.eq(issue),
            activations.free.eq(issue & last_n),
            activations.rewind.eq(last_m & ~last_n),
            activations.back.eq(last.m),
        ]
        m.d.sync += [recent[0].valid.eq(issue), recent[0].odd.eq(address[0]), recent[1].eq(recent[0])]
        with m.If(issue):
            m.d.sync += [at.m.eq(at.m + 1), address.eq(address + 1)]
            with m.If(last_m):
                m.d.sync += [at.m.eq(0), at.n.eq(at.n + 1)]
                with m.If(last_n):
                    m.d.sync += [at.n.eq(0), at.kv.eq(at.kv + 1), address.eq(0)]

        # Commands.
        starts, refused = Signal(), Signal()
        occupied = Signal(2)
        product, refusal = check_command(config, command)
        m.d.comb += [
            refused.eq(refusal),
            self.command.ready.eq((~active | tile_ends) & ~Mux(bank, occupied[0], occupied[1])),
            starts.eq(self.command.valid & self.command.ready & ~refused),
        ]
        with m.If(tile_ends):
            m.d.sync += active.eq(0)
        with m.If(starts):
            m.d.sync += [
                active.eq(1),
                bank.eq(~bank),
                short.eq(product < again),
                nvfp4.eq(command.mode_nvfp4),
                refine_en.eq(command.refine_en if refined else 0),
                last.m.eq(command.m - 1),
                last.n.eq(command.n - 1),
                last.kv.eq(command.kv - 1),
                at.eq(0),
            ]

        # What is known of a vector on its way: stage 1 enters the vector MAC, its sum is fetched, comes in one later and goes back.
        fetch, deposit = vmac.psum_delay, 1 + vmac.latency
        valid = _delayed(m, "valid", issue, fetch)
        first = _delayed(m, "first", ~at.kv.any(), fetch + 1)
        ends = _delayed(m, "ends", tile_ends, deposit)
        to_bank = _delayed(m, "bank", bank, deposit)
        to = _delayed(m, "address", address, deposit)
        mode = _delayed(m, "nvfp4", nvfp4, 1)[1]

        # The vector MAC. What clears the status may also reset the pipeline, because it is empty then.
        clear = Signal()
        m.d.comb += clear.eq(self.clear & ~self.busy)
        m.domains.vmac = ClockDomain(local=True)
        m.d.comb += [ClockSignal("vmac").eq(ClockSignal()), ResetSignal("vmac").eq(ResetSignal() | clear)]
        m.submodules.vmac = DomainRenamer("vmac")(vmac)
        m.d.comb += [
            vmac.valid_i.eq(valid[1]),
            vmac.mode_nvfp4.eq(mode),
            vmac.a.eq(activations.data.codes),
            vmac.a_scale.eq(activations.data.scales),
            vmac.w.eq(weights.data.codes),
            vmac.w_scale.eq(weights.data.scales),
        ]
        vmac_status = Signal(StatusBits, attrs=lint_unused("no tile runs in the illegal mode"))
        m.d.comb += vmac_status.eq(vmac.status)
        overlap, dropped = [], []
        if refined:
            refine = _delayed(m, "refine", refine_en, 1)[1]
            m.d.comb += vmac.refine_en.eq(refine)
            for block in range(config.vmac.blocks):
                merger = RecordMerger(config.vmac)
                m.submodules[f"records{block}"] = merger
                m.d.comb += [
                    merger.weight.eq(weights.data.records[block]),
                    merger.activation.eq(activations.data.records[block]),
                    vmac.refine[block].eq(merger.record),
                ]
                overlap.append(merger.overlap)
                dropped.append(merger.dropped)

        # Accumulators: one bank computes while the other drains.
        banks = []
        for i in range(2):
            memory = Memory(shape=64, depth=config.max_words, init=[])
            m.submodules[f"accumulators{i}"] = memory
            banks.append((memory.read_port(), memory.write_port()))
        full = Signal(2)
        lengths = Signal(data.ArrayLayout(address.shape(), 2))
        # A new tile takes the other bank, so the first takes bank 0, where the drain begins.
        drain_bank, drain_address = Signal(), Signal.like(address)
        drained, out_bank = Signal(), Signal()
        out_valid, out_last = Signal(), Signal()
        m.d.comb += drained.eq(Mux(drain_bank, full[1], full[0]) & (~out_valid | self.result.ready))
        for i, (read, write) in enumerate(banks):
            fetched = Signal(name=f"fetched{i}")
            m.d.comb += [
                fetched.eq(valid[fetch] & ~first[fetch] & (to_bank[fetch] == i)),
                read.en.eq(fetched | (drained & (drain_bank == i))),
                read.addr.eq(Mux(fetched, to[fetch], drain_address)),
                write.en.eq(vmac.valid_o & (to_bank[deposit] == i)),
                write.addr.eq(to[deposit]),
                write.data.eq(vmac.psum_o),
            ]
            with m.If(ends[deposit] & (to_bank[deposit] == i)):
                m.d.sync += [full[i].eq(1), lengths[i].eq(to[deposit])]
        sums = [read.data for read, _ in banks]
        m.d.comb += vmac.psum_i.eq(gated(Mux(to_bank[fetch + 1], sums[1], sums[0]), ~first[fetch + 1]))

        # Drain.
        drain_ends = Signal()
        m.d.comb += drain_ends.eq(drain_address == Mux(drain_bank, lengths[1], lengths[0]))
        with m.If(self.result.ready):
            m.d.sync += out_valid.eq(0)
        with m.If(drained):
            m.d.sync += [
                out_valid.eq(1),
                out_last.eq(drain_ends),
                out_bank.eq(drain_bank),
                drain_address.eq(Mux(drain_ends, 0, drain_address + 1)),
                drain_bank.eq(drain_bank ^ drain_ends),
            ]
            for i in range(2):
                with m.If(drain_ends & (drain_bank == i)):
                    m.d.sync += full[i].eq(0)
        m.d.comb += [
            self.result.valid.eq(out_valid),
            self.result.payload.psum.eq(Mux(out_bank, sums[1], sums[0])),
            self.result.payload.last.eq(out_last),
        ]
        # A bank is free when its last sum has left: until then its read port holds that sum.
        for i in range(2):
            with m.If(self.result.ready & out_valid & out_last & (out_bank == i)):
                m.d.sync += occupied[i].eq(0)
            with m.If(starts & (bank != i)):
                m.d.sync += occupied[i].eq(1)

        # Status.
        sticky = Signal(data.StructLayout({"overlap": 1, "dropped": 1, "bad_command": 1}))
        with m.If(clear):
            m.d.sync += sticky.eq(0)
        with m.If(self.command.valid & self.command.ready & refused):
            m.d.sync += sticky.bad_command.eq(1)
        if refined:
            with m.If(valid[1] & refine):
                m.d.sync += [
                    sticky.overlap.eq(sticky.overlap | Cat(*overlap).any()),
                    sticky.dropped.eq(sticky.dropped | Cat(*dropped).any()),
                ]
        m.d.comb += [
            self.busy.eq(active | occupied.any()),
            self.status.saturated.eq(vmac_status.saturated),
            self.status.nan_scale.eq(vmac_status.nan_scale),
            self.status.overlap.eq(sticky.overlap),
            self.status.dropped.eq(sticky.dropped),
            self.status.bad_command.eq(sticky.bad_command),
        ]
        return m


def check_command(config: PeConfig, command: data.View) -> tuple[Value, Value]:
    """Return M·N of a command, and 1 bit: elements refuse it."""
    product = command.m * command.n
    illegal = command.refine_en & ~command.mode_nvfp4 if config.refinement != "none" else Const(0, 1)
    return product, (
        ~product.any()
        | _exceeds(product, config.max_words)
        | _exceeds(command.m, config.max_m)
        | ~command.kv.any()
        | _exceeds(command.kv, config.max_kv)
        | illegal
    )


def _delayed(m: Module, name: str, value: Value, cycles: int) -> list[Value]:
    """Return ``value`` as it is and as it was up to so many cycles ago."""
    stages = [value]
    for i in range(1, cycles + 1):
        stage = Signal(value.shape(), name=f"{name}_{i}")
        m.d.sync += stage.eq(stages[-1])
        stages.append(stage)
    return stages


def _exceeds(value: Value, limit: int) -> Value:
    """1 bit: ``value`` is greater than ``limit``."""
    return value > limit if limit < (1 << len(value)) - 1 else Const(0, 1)


class OperandBuffer(wiring.Component):
    """Ring of entries that are read in order, some of them several times.

    Members
    -------
    entry : In(stream of layout)
    read : In(1)
        Fetch the entry at the read position; ``data`` has it from the next cycle until the next fetch. The position moves on by one.
    rewind : In(1)
        With ``read``: it moves back by ``back`` instead.
    free : In(1)
        Give the oldest entry up.
    back : In(range(depth))
    level : Out(range(depth + 1))
        Entries that have come in and have not been released.
    data : Out(layout)
    """

    def __init__(self, layout: data.Layout, depth: int):
        self._layout = layout
        self._depth = depth
        super().__init__(
            {
                "entry": In(stream.Signature(layout)),
                "read": In(1),
                "free": In(1),
                "rewind": In(1),
                "back": In(range(depth)),
                "level": Out(range(depth + 1)),
                "data": Out(layout),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build memory, pointers and level."""
        m = Module()
        m.submodules.memory = memory = Memory(shape=self._layout, depth=self._depth, init=[])
        write, read = memory.write_port(), memory.read_port()
        taken = Signal()
        m.d.comb += [
            self.entry.ready.eq(self.level != self._depth),
            taken.eq(self.entry.valid & self.entry.ready),
            write.en.eq(taken),
            write.data.eq(self.entry.payload),
            read.en.eq(self.read),
            self.data.eq(read.data),
        ]
        with m.If(taken):
            m.d.sync += write.addr.eq(write.addr + 1)
        with m.If(self.read):
            m.d.sync += read.addr.eq(Mux(self.rewind, read.addr - self.back, read.addr + 1))
        m.d.sync += self.level.eq(self.level + taken - self.free)
        return m
