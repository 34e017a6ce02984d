"""Accelerator: products from memory to memory, by descriptors and over AXI (paper, section 6.1 and figure 9; docs/accelerator.md)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hdl.descriptor import DescriptorQueue
from hdl.dma import ReadDma, WriteDma, request_layout
from hdl.lib.arith import selected
from hdl.lib.axi import Axi4, Axi4Lite, axi_meanings, flat_members
from hdl.lib.verilog import lint_unused
from hdl.loader import READ_BASE, Loader
from hdl.output import OutputStage
from hdl.policy import PolicyUnit
from hdl.post_output import PostStage
from hdl.registers import Interrupt, RegisterBank
from hdl.side_reader import ReadShare
from hdl.tile_engine import TileEngine
from model.accelerator import MAGIC, RECORD_BYTES, RECORD_OFFSET, AcceleratorConfig, ErrorCode, Mode, registers_of
from model.dma import DmaStatus
from model.policy import PolicyFormat

__all__ = ["Accelerator", "Recorder"]

_CONTROL, _MEMORY = "s_axi", "m_axi"
_WRITE_BASE = ErrorCode.WRITE_BEYOND - DmaStatus.REFUSED
_RECORD_BASE = ErrorCode.RECORD_BEYOND - DmaStatus.REFUSED
_LAST_UNRECORDED = ErrorCode.DESCRIPTOR_DECERR
_FIRST_UNRECORDED = ErrorCode.DESCRIPTOR_BEYOND


def _log2(power: int) -> int:
    return power.bit_length() - 1


def record_layout() -> data.StructLayout:
    """Return the layout of a record in memory, see :class:`model.accelerator.Record`."""
    return data.StructLayout({"code": 8, "status": 8, "number": 16, "cycles": 32, "activity": 32, "energy": 32})


def end_layout(config: AcceleratorConfig) -> data.StructLayout:
    """Return the layout of how a product ended."""
    post = {"activity": 32, "energy": 32} if config.ppu else {}
    return data.StructLayout({"descriptor": config.address_width, "code": 8, "status": 8, "cycles": 32, **post})


class Recorder(wiring.Component):
    """Write the record of a product that has ended, and count it.

    Members
    -------
    end : In(stream of end)
    request, word, done
        Those of a :class:`hdl.dma.WriteDma`, in use while ``busy``.
    busy : Out(1)
    restart : In(1)
        Count from 0 again.
    completed : Out(16)
    ended, failed : Out(1)
        Pulses: a product ended well, or with ``code``. The count goes up with them.
    code : Out(8)
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        super().__init__(
            {
                "end": In(stream.Signature(end_layout(config))),
                "request": Out(stream.Signature(request_layout(config.dma))),
                "word": Out(stream.Signature(config.data_width)),
                "done": In(stream.Signature(2)),
                "busy": Out(1),
                "restart": In(1),
                "completed": Out(16),
                "ended": Out(1),
                "failed": Out(1),
                "code": Out(8),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the sequence."""
        m = Module()
        config = self._config
        end = Signal(end_layout(config))
        record = Signal(record_layout())
        words = max(RECORD_BYTES * 8 // config.data_width, 1)
        number = Signal(range(words + 1))
        m.d.comb += [
            record.code.eq(end.code),
            record.status.eq(end.status),
            record.number.eq(self.completed),
            record.cycles.eq(end.cycles),
            *(record[name].eq(end[name]) for name in (("activity", "energy") if config.ppu else ())),
            self.request.payload.address.eq(end.descriptor + RECORD_OFFSET),
            self.request.payload.bytes.eq(RECORD_BYTES),
            self.code.eq(end.code),
            self.busy.eq(1),
        ]
        if words > 1:
            parts = [record.as_value().word_select(i, config.data_width) for i in range(words)]
            m.d.comb += self.word.payload.eq(selected(parts, number[: _log2(words)]))
        else:
            m.d.comb += self.word.payload.eq(record)
        with m.FSM():
            with m.State("idle"):
                m.d.comb += [self.busy.eq(0), self.end.ready.eq(1)]
                m.d.sync += [end.eq(self.end.payload), number.eq(0)]
                with m.If(self.end.valid):
                    m.next = "request"
                    # There is no use in writing where nothing could be read.
                    code = self.end.payload.code
                    with m.If((code >= _FIRST_UNRECORDED) & (code <= _LAST_UNRECORDED)):
                        m.next = "count"
            with m.State("request"):
                m.d.comb += self.request.valid.eq(1)
                with m.If(self.request.ready):
                    m.next = "write"
            with m.State("write"):
                m.d.comb += [self.word.valid.eq(number != words), self.done.ready.eq(1)]
                with m.If(self.word.valid & self.word.ready):
                    m.d.sync += number.eq(number + 1)
                with m.If(self.done.valid):
                    with m.If(self.done.payload.any() & ~end.code.any()):
                        m.d.sync += end.code.eq(_RECORD_BASE + self.done.payload)
                    m.next = "count"
            with m.State("count"):
                m.d.comb += [self.ended.eq(~end.code.any()), self.failed.eq(end.code.any())]
                m.d.sync += self.completed.eq(self.completed + 1)
                m.next = "idle"
        with m.If(self.restart):
            m.d.sync += self.completed.eq(0)
        return m


class Accelerator(wiring.Component):
    """Run the products of a queue of descriptors: operands are read from memory, outputs written to it.

    Loading runs ahead of computing as far as the banks have room, also into the next product; results drain while the next tile is computed.
    Products end in order, each with a record in memory and an event; a faulty one ends with its error code and the next one runs.

    Parameters
    ----------
    config : AcceleratorConfig

    Members
    -------
    s_axi_* : AXI4-Lite subordinate, the registers of :func:`model.accelerator.registers_of`
    m_axi_* : AXI4 manager
    irq : Out(1)
    """

    throughput: ClassVar[str] = "rows x columns vectors per cycle, while a vector per cycle can be loaded"
    port_meanings: ClassVar[dict[str, str]] = {
        **axi_meanings(_CONTROL, Axi4Lite().flip()),
        **axi_meanings(_MEMORY, Axi4()),
        "irq": "level interrupt: an event whose interrupt is enabled has happened",
    }

    def __init__(self, config: AcceleratorConfig | None = None):
        self._config = config = config or AcceleratorConfig()
        control = Axi4Lite(registers_of(config).address_width).flip()
        memory = Axi4(config.address_width, config.data_width, config.id_width)
        super().__init__({**flat_members(_CONTROL, control), **flat_members(_MEMORY, memory), "irq": Out(1)})

    @property
    def config(self) -> AcceleratorConfig:
        """The configuration that this component was built with."""
        return self._config

    def elaborate(self, platform: object) -> Module:
        """Connect registers, queue, loader, tile engine, output stage and DMA engines."""
        m = Module()
        config = self._config
        m.submodules.registers = registers = RegisterBank(registers_of(config))
        m.submodules.queue = queue = DescriptorQueue(config)
        m.submodules.loader = loader = Loader(config)
        m.submodules.engine = engine = TileEngine(config.engine)
        output: Any = (
            PostStage(config) if config.ppu else OutputStage(config.engine, config.data_width, config.address_width)
        )
        m.submodules.output = output
        m.submodules.recorder = recorder = Recorder(config)
        m.submodules.read = read = ReadDma(config.dma)
        m.submodules.write = write = WriteDma(config.dma)
        self._connect_ports(m, registers, read, write)

        cycle = Signal(32)
        m.d.sync += cycle.eq(cycle + 1)

        products = Signal(range(_MOST_PRODUCTS + 1))

        # The queue has the read engine while the loader is idle.
        m.d.comb += [
            queue.loading.eq(loader.busy),
            queue.ended.eq(~(products.any() | recorder.busy)),
            queue.cycle.eq(cycle),
            loader.job.eq(queue.job),
            loader.start.eq(queue.start),
            loader.code.eq(queue.code),
            loader.since.eq(queue.since),
            loader.descriptor.eq(queue.descriptor),
        ]
        reader: Any = read
        if config.ppu:
            reader = self._share_reads(m, output, read)
            wiring.connect(m, queue.block, output.block)
        self._share(m, queue.fetching, queue, loader, reader, ("request",), ("word", "done"))
        wiring.connect(m, loader.load, engine.load)
        for inner, outer in zip(engine.result, output.result, strict=True):
            wiring.connect(m, inner, outer)

        # Tiles. Banks have sent a segment when the engine would take the next.
        token, tile = loader.token.payload, engine.tile
        sends, running, frees, entries = Signal(), Signal(), Signal(2), Signal.like(token.entries)
        ends = Signal()
        m.d.comb += [
            tile.payload.eq(token.tile),
            sends.eq(loader.token.valid & ~token.end & tile.ready & (output.tile.ready | ~token.starts)),
            tile.valid.eq(sends),
            output.tile.valid.eq(sends & token.starts),
            output.tile.payload.address.eq(token.output.address),
            output.tile.payload.stride.eq(_saturated(token.output.stride, config.address_width)),
            output.tile.payload.rows.eq(token.output.rows),
            output.tile.payload.outputs.eq(token.output.outputs),
            output.tile.payload.m.eq(token.tile.command.m),
            output.tile.payload.n.eq(token.tile.command.n),
            output.tile.payload.mode_nvfp4.eq(token.tile.command.mode_nvfp4),
            output.tile.payload.fp32.eq(token.output.fp32),
            Value.cast(output.tile.payload.scale).eq(token.output.scale),
            loader.free_entries.eq(Mux(running & tile.ready, entries, 0)),
            loader.free_activations.eq(running & tile.ready & frees[0]),
            loader.free_panel.eq(running & tile.ready & frees[1]),
            loader.token.ready.eq(sends | ends),
        ]
        with m.If(tile.ready):
            m.d.sync += running.eq(sends)
        with m.If(sends):
            m.d.sync += [frees.eq(Cat(token.frees_activations, token.frees_panel)), entries.eq(token.entries)]

        # Ends. All that a product raised is there when nothing of it is on its way.
        quiet = Signal()
        # A tile without an address has no rows for the output stage.
        beyond, output_error = Signal(), Signal(2)
        with m.If(sends & token.starts & token.output.beyond):
            m.d.sync += beyond.eq(1)
        with m.If(ends):
            m.d.sync += beyond.eq(0)
        m.d.comb += output_error.eq(Mux(output.error.any(), output.error, Mux(beyond, DmaStatus.REFUSED, 0)))
        code: Value = Mux(output_error.any(), _WRITE_BASE + output_error, 0)
        fails: Value = output_error.any()
        raised = Const(0, 4)
        if config.ppu:
            read_error = Signal(2)
            m.d.comb += read_error.eq(output.read_error)
            code = Mux(read_error.any(), READ_BASE + read_error, code)
            fails |= read_error.any()
            command = token.tile.command
            refines = command.refine_en if config.refinement != "none" else Const(0, 1)
            ran = Mux(command.mode_nvfp4, Mux(refines, Mode.AUTOFP6, Mode.NVFP4), Mode.AUTOFP2)
            reports, fault, partial = Signal(), Signal(), Signal()
            raised = Cat(output.status, Mux(fault, 0, ran))
            posting = Signal()
            with m.If(sends & token.starts):
                m.d.sync += posting.eq(token.output.post)
            with m.If(ends):
                m.d.sync += posting.eq(0)
            m.d.comb += output.release.eq(ends & posting)
            m.d.comb += [
                getattr(output.tile.payload, name).eq(token.output[name])
                for name in ("post", "first", "begin", "last", "index")
            ]
            m.d.comb += [
                fault.eq(recorder.end.payload.code.any()),
                reports.eq(output.reported & ~fault & ~partial),
            ]
            # Sums lack what a product that failed would have added, until they begin anew.
            with m.If(output.begun):
                m.d.sync += partial.eq(0)
            with m.If(ends & fault):
                m.d.sync += partial.eq(1)
            for name in ("activity", "energy"):
                number = getattr(output.report, name).as_value()
                m.d.comb += recorder.end.payload[name].eq(number & reports.replicate(32))
            observed = Signal(32)
            observes = Signal()
            m.d.comb += [
                observes.eq(ends & reports & output.observe),
                observed.eq(output.report.activity),
            ]
            self._add_policy(m, registers, queue, observes, observed)
        code = Mux(token.code.any(), token.code, code)
        status = Signal(config_status(engine), attrs=lint_unused("no command and no load is bad here"))
        m.d.comb += [
            quiet.eq(~running & ~engine.busy & output.idle),
            recorder.end.valid.eq(loader.token.valid & token.end & quiet),
            ends.eq(recorder.end.valid & recorder.end.ready),
            status.eq(engine.status),
            recorder.end.payload.descriptor.eq(token.descriptor),
            recorder.end.payload.code.eq(code),
            recorder.end.payload.status.eq(Cat(status.elements.as_value()[:4], raised)),
            recorder.end.payload.cycles.eq(cycle - token.since),
            engine.clear.eq(ends),
            output.clear.eq(ends),
            output.discard.eq(fails),
            # What goes wrong at the output may belong to a product before the one that is loaded.
            loader.stop.eq(fails & (products == 1)),
        ]
        m.d.sync += products.eq(products + queue.start - ends)
        self._share(m, recorder.busy, recorder, output, write, ("request", "word"), ("done",))

        # Registers.
        busy, restart, following = Signal(), Signal(), Signal(16)
        m.d.comb += [
            following.eq(recorder.completed + 1),
            busy.eq(queue.busy | products.any() | recorder.busy),
            restart.eq(registers.control_restart & ~busy),
            queue.restart.eq(restart),
            recorder.restart.eq(restart),
            queue.enable.eq(registers.control_enable),
            queue.base.eq(Cat(Const(0, 8), registers.queue_low_address, registers.queue_high_address)),
            queue.last.eq(registers.queue_length_last),
            queue.submitted.eq(registers.submitted_count),
            registers.state_busy.eq(busy),
            registers.completed_count.eq(recorder.completed),
            registers.cycle_count.eq(cycle),
            registers.events_done_set.eq(recorder.ended),
            registers.events_error_set.eq(recorder.failed),
            registers.events_empty_set.eq(
                (recorder.ended | recorder.failed) & (following == registers.submitted_count)
            ),
        ]
        error_code, error_number = Signal(8), Signal(16)
        with m.If(recorder.failed):
            m.d.sync += [error_code.eq(recorder.code), error_number.eq(recorder.completed)]
        m.d.comb += [registers.error_code.eq(error_code), registers.error_number.eq(error_number)]
        for name, value in _identity(config).items():
            m.d.comb += getattr(registers, name).eq(value)

        m.submodules.interrupt = interrupt = Interrupt(3)
        m.d.comb += [
            interrupt.status.eq(Cat(registers.events_done, registers.events_error, registers.events_empty)),
            interrupt.mask.eq(Cat(registers.interrupt_done, registers.interrupt_error, registers.interrupt_empty)),
            self.irq.eq(interrupt.irq),
        ]
        return m

    def _connect_ports(self, m: Module, registers: RegisterBank, read: ReadDma, write: WriteDma) -> None:
        for inner in (registers, read, write):
            for name, member in inner.signature.members.items():
                if name.startswith((f"{_CONTROL}_", f"{_MEMORY}_")):
                    outside, inside = getattr(self, name), getattr(inner, name)
                    m.d.comb += inside.eq(outside) if member.flow == In else outside.eq(inside)

    @staticmethod
    def _share_reads(m: Module, output: PostStage, read: ReadDma) -> Any:
        """Let post-processing read beside the others; return what stands for the read engine to these."""
        m.submodules.reads = reads = ReadShare(read.config)
        for name in ("request", "word", "done"):
            wiring.connect(m, getattr(reads, name), getattr(read, name))
            wiring.connect(m, getattr(reads, f"user_{name}")[1], getattr(output, f"read_{name}"))
        return _User(*(getattr(reads, f"user_{name}")[0] for name in ("request", "word", "done")))

    @staticmethod
    def _add_policy(
        m: Module, registers: RegisterBank, queue: DescriptorQueue, observes: Signal, observed: Signal
    ) -> None:
        """Build the policy unit with its registers: it gets ``observed`` with ``observes``, and tells the queue."""
        m.submodules.policy = policy = PolicyUnit()
        settings = policy.settings
        for name in PolicyFormat().settings:
            if name != "levels":
                register = next(r for r in ("rules", "weights", "tau") if hasattr(registers, f"policy_{r}_{name}"))
                m.d.comb += getattr(settings, name).eq(getattr(registers, f"policy_{register}_{name}"))
        for i in range(PolicyFormat().level_slots):
            m.d.comb += settings.levels[i].eq(getattr(registers, f"policy_levels_level_{i}"))

        # A step and an activity wait until the unit takes them. Without a step there is nobody to take an activity.
        started, activity, activity_waits, step, step_waits = (
            Signal(),
            Signal(32),
            Signal(),
            Signal(policy.step.payload.shape()),
            Signal(),
        )
        clear = registers.policy_step_clear
        m.d.comb += [
            policy.clear.eq(clear),
            policy.activity.payload.as_value().eq(activity),
            policy.activity.valid.eq(activity_waits),
            policy.step.payload.eq(step),
            policy.step.valid.eq(step_waits),
        ]
        with m.If(policy.activity.ready):
            m.d.sync += activity_waits.eq(0)
        with m.If(observes & started):
            m.d.sync += [activity_waits.eq(1), activity.eq(observed)]
        with m.If(policy.step.ready):
            m.d.sync += step_waits.eq(0)
        with m.If(step_waits & policy.step.ready):
            m.d.sync += started.eq(1)
        with m.If(registers.policy_step_begin):
            m.d.sync += [
                step_waits.eq(1),
                step.entropy.eq(registers.policy_step_entropy),
                step.decode.eq(registers.policy_step_decode),
            ]
        with m.If(clear):
            m.d.sync += [started.eq(0), activity_waits.eq(0), step_waits.eq(registers.policy_step_begin)]
        m.d.comb += [
            queue.precision.eq(policy.precision),
            queue.ready.eq(policy.valid),
            queue.settled.eq(~activity_waits & ~step_waits & (policy.valid | ~started)),
            registers.policy_state_valid.eq(policy.valid),
            registers.policy_state_spike.eq(policy.spike),
            registers.policy_state_saturated.eq(policy.status.saturated),
            registers.policy_state_invalid.eq(policy.status.invalid),
            registers.policy_state_precision.eq(policy.precision),
            registers.policy_state_level.eq(policy.level),
        ]

    @staticmethod
    def _share(
        m: Module,
        choose: Value,
        first: Any,
        second: Any,
        engine: Any,
        forth: tuple[str, ...],
        back: tuple[str, ...],
    ) -> None:
        """Give a DMA engine's streams to ``first`` while ``choose`` is set, to ``second`` otherwise."""
        for name in forth:
            target = getattr(engine, name)
            for user, mine in ((first, choose), (second, ~choose)):
                source = getattr(user, name)
                m.d.comb += source.ready.eq(target.ready & mine)
                with m.If(mine):
                    m.d.comb += [target.payload.eq(source.payload), target.valid.eq(source.valid)]
        for name in back:
            source = getattr(engine, name)
            for user, mine in ((first, choose), (second, ~choose)):
                target = getattr(user, name)
                m.d.comb += [target.payload.eq(source.payload), target.valid.eq(source.valid & mine)]
                with m.If(mine):
                    m.d.comb += source.ready.eq(target.ready)


@dataclass
class _User:
    """Streams that stand for a read engine."""

    request: Any
    word: Any
    done: Any


_MOST_PRODUCTS = 31
"""More than the queue of tokens can hold the ends of."""


def _saturated(stride: Value, width: int) -> Value:
    """Return a stride of so many bits; one that leaves the address space with the first step becomes the largest, which does so too."""
    if len(stride) <= width:
        return stride
    return Mux(stride[width:].any(), (1 << width) - 1, stride[:width])


def config_status(engine: TileEngine) -> Any:
    """Return the shape of a tile engine's status."""
    return engine.signature.members["status"].shape


def _identity(config: AcceleratorConfig) -> dict[str, int]:
    """Return the values of registers that say what was built."""
    post = {"features_ppu": 1} if config.ppu else {}
    return {
        **post,
        "id_magic": MAGIC,
        "array_rows": config.rows,
        "array_columns": config.columns,
        "array_lanes": config.lanes,
        "memories_accumulators": _log2(config.accumulators),
        "memories_activation_entries": _log2(config.activation_entries),
        "memories_activation_depth": _log2(config.activation_depth),
        "memories_weight_depth": _log2(config.weight_depth),
        "memories_data_bytes": _log2(config.data_width // 8),
        "features_refinement": ("none", "slots", "inplace").index(config.refinement),
        "features_slots": config.slots_per_block if config.refinement == "slots" else 0,
        "features_exponent_step": int(config.refinement != "none" and config.step == "exponent"),
        "features_group_scaling": int(config.scaling == "group"),
        "features_window_shift": config.window_shift,
    }
