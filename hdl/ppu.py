"""Post-processing unit: accumulators to binary32, activation function, residual, NVFP4 groups and signals (docs/ppu.md)."""

from itertools import pairwise
from typing import ClassVar

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from hdl.activation import Activation
from hdl.activity import RootOfRatio, SquareSum, rounded_sum
from hdl.lib.arith import gated
from hdl.lib.fp32 import Float, FloatAdd, FloatMultiply, IntToFloat
from hdl.lib.gearbox import Gearbox, beat_layout
from hdl.lib.streams import StreamBuffer
from hdl.quantiser import Quantiser, group_layout
from model.activation import Function
from model.block_scaled import PAD
from model.ppu import PpuConfig
from model.vmac import SUBGROUPS

__all__ = ["Ppu", "PpuLane", "job_layout", "ppu_beat_layout", "report_layout"]

_NUMBER = 32

job_layout = data.StructLayout(
    {
        "function": Function,
        "integers": 1,
        "residual": 1,
        "numbers": 1,
        "groups": 1,
        "shared": 1,
        "refine": 1,
        "measure": 1,
        "begin": 1,
        "report": 1,
        "follows": 1,
        "scale": Float,
        "group_scale": Float,
        "threshold": Float,
    }
)
"""What is done with the beats that follow, see `model.ppu.Job`; and whether all of that but ``report`` is as in the job before, see `Ppu`."""

report_layout = data.StructLayout({"activity": Float, "change": Float, "before": Float, "energy": Float})
"""Sums, see `model.ppu.Report`."""


def ppu_beat_layout(lanes: int) -> data.StructLayout:
    """Return the layout of what comes in: elements, how many count (looked at only with ``last``), a row's last beat, the job's last."""
    return data.StructLayout(
        {"elements": data.ArrayLayout(64, lanes), "count": lanes.bit_length(), "last": 1, "end": 1}
    )


class PpuLane(wiring.Component):
    """Arithmetic of one element; 1 per cycle in which ``enable`` is set. What is said about the job is constant meanwhile.

    Attributes
    ----------
    to_residual, to_number, latency : int
        Cycles with ``enable`` from ``value`` to when ``residual`` is taken, to ``number`` and when ``previous`` is taken, and to ``scaled``
        and ``change``.

    Members
    -------
    enable : In(1)
    integers : In(1)
    function : In(Function)
    adds : In(1)
        Add ``residual``.
    scale, group_scale : In(Float)
    value : In(64)
        An integer, or in the low bits a number.
    residual, previous : In(Float)
    number : Out(Float)
        ``f(value · scale) + residual``.
    scaled : Out(Float)
        ``number · group_scale``.
    change : Out(Float)
        ``number - previous``.
    """

    to_residual = IntToFloat.latency + FloatMultiply.latency + Activation.latency
    to_number = to_residual + FloatAdd.latency
    latency = to_number + FloatMultiply.latency

    enable: In(1)
    integers: In(1)
    function: In(Function)
    adds: In(1)
    scale: In(Float)
    group_scale: In(Float)
    value: In(64)
    residual: In(Float)
    previous: In(Float)
    number: Out(Float)
    scaled: Out(Float)
    change: Out(Float)

    def elaborate(self, platform: object) -> Module:
        """Put the parts one behind the other."""
        m = Module()
        m.submodules.convert = convert = IntToFloat(64)
        m.submodules.multiply = multiply = FloatMultiply()
        m.submodules.activation = activation = Activation()
        m.submodules.add = add = FloatAdd()
        m.submodules.rescale = rescale = FloatMultiply()
        m.submodules.subtract = subtract = FloatAdd()
        for part in (convert, multiply, activation, add, rescale, subtract):
            m.d.comb += part.enable.eq(self.enable)

        # Numbers go beside the conversion. What is not there is 0, so that both meet without a choice.
        beside = gated(self.value[:_NUMBER], ~self.integers)
        for stage in range(IntToFloat.latency):
            delayed = Signal(_NUMBER, name=f"beside_{stage}", reset_less=True)
            with m.If(self.enable):
                m.d.sync += delayed.eq(beside)
            beside = delayed
        m.d.comb += [
            convert.value.eq(gated(self.value, self.integers)),
            multiply.a.as_value().eq(convert.number.as_value() | beside),
            multiply.b.eq(self.scale),
            activation.function.eq(self.function),
            activation.value.eq(multiply.number),
            add.a.eq(activation.number),
            # A sum with -0 is the number itself, -0 too.
            add.b.as_value().eq(Mux(self.adds, self.residual.as_value(), 1 << _NUMBER - 1)),
            self.number.eq(add.number),
            rescale.a.eq(add.number),
            rescale.b.eq(self.group_scale),
            self.scaled.eq(rescale.number),
            subtract.a.eq(add.number),
            subtract.b.as_value().eq(self.previous.as_value() ^ 1 << _NUMBER - 1),
            self.change.eq(subtract.number),
        ]
        return m


class Ppu(wiring.Component):
    """Take rows of elements, job by job; give binary32 numbers, NVFP4 groups and a report, as `model.ppu.run`.

    A job is taken when everything of the one before has left. Elements of all rows follow, the last beat with ``end``. A row is filled up with
    zeros to whole pairs of groups. Streams that a job does not need are not touched.

    A job that ``follows`` does the same as the one before, neither begins sums nor comes behind a report, and is taken while that is at work:
    no cycle is lost between their beats.

    Parameters
    ----------
    config : PpuConfig, optional

    Attributes
    ----------
    latency : int
        Cycles from a beat that fills a pair to its first group's offer.

    Members
    -------
    job : In(stream of job_layout)
    beat : In(stream of {elements, count, last, end})
        ``count`` is 1 to lanes with ``last``; ``end`` only with ``last``.
    residual, previous : In(stream of numbers)
        A word for each beat, if the job says so.
    weight_mask : In(stream of 8)
        For each pair of groups, if the job refines; of the first one in the low bits.
    number : Out(stream of {elements, count, last})
    group : Out(stream of group_layout)
    report : Out(stream of report_layout)
    status : Out(2)
        {clipped, nonfinite}, each until ``clear``.
    clear : In(1)
    idle : Out(1)
        No job is at work. Numbers and groups may still be on offer.
    """

    throughput: ClassVar[str] = "lanes elements per cycle, a group per cycle at most"
    latency: ClassVar[int] = PpuLane.latency + 1 + Quantiser.latency

    port_meanings: ClassVar[dict[str, str]] = {
        "job__payload": "what is done with the beats that follow",
        "job__valid": "a job is offered",
        "job__ready": "a job is taken",
        "beat__payload": "elements of a row",
        "beat__valid": "elements are offered",
        "beat__ready": "elements are taken",
        "residual__payload": "numbers that are added to those of a beat",
        "residual__valid": "numbers to add are offered",
        "residual__ready": "numbers to add are taken",
        "previous__payload": "numbers that those of a beat are compared with",
        "previous__valid": "numbers to compare are offered",
        "previous__ready": "numbers to compare are taken",
        "weight_mask__payload": "subgroups of two groups that the weight refines",
        "weight_mask__valid": "masks are offered",
        "weight_mask__ready": "masks are taken",
        "number__payload": "binary32 numbers of a beat",
        "number__valid": "numbers are offered",
        "number__ready": "numbers are taken",
        "group__payload": "codes, scale, mask and offsets of a group",
        "group__valid": "a group is offered",
        "group__ready": "a group is taken",
        "report__payload": "activity and sums of squares",
        "report__valid": "a report is offered",
        "report__ready": "a report is taken",
        "status": "a scale was clipped, a number was not finite",
        "clear": "clears status",
        "idle": "no job is at work",
    }

    def __init__(self, config: PpuConfig | None = None):
        self._config = config = config or PpuConfig()
        numbers = data.ArrayLayout(Float, config.lanes)
        super().__init__(
            {
                "job": In(stream.Signature(job_layout)),
                "beat": In(stream.Signature(ppu_beat_layout(config.lanes))),
                "residual": In(stream.Signature(numbers)),
                "previous": In(stream.Signature(numbers)),
                "weight_mask": In(stream.Signature(2 * SUBGROUPS)),
                "number": Out(stream.Signature(beat_layout(_NUMBER, config.lanes))),
                "group": Out(stream.Signature(group_layout)),
                "report": Out(stream.Signature(report_layout)),
                "status": Out(2),
                "clear": In(1),
                "idle": Out(1),
            }
        )

    @property
    def config(self) -> PpuConfig:
        """The configuration that this component was built with."""
        return self._config

    def elaborate(self, platform: object) -> Module:
        """Build the lanes, the way to groups, the sums and the order of jobs."""
        m = Module()
        config = self._config
        lanes = config.lanes
        job = Signal(job_layout)
        enable, running, drained = Signal(), Signal(), Signal()

        m.submodules.to_add = residual = StreamBuffer(data.ArrayLayout(Float, lanes))
        m.submodules.to_compare = previous = StreamBuffer(data.ArrayLayout(Float, lanes))
        wiring.connect(m, wiring.flipped(self.residual), residual.input)
        wiring.connect(m, wiring.flipped(self.previous), previous.input)
        m.submodules.numbers = numbers = StreamBuffer(beat_layout(_NUMBER, lanes))
        wiring.connect(m, numbers.output, wiring.flipped(self.number))

        # What goes along with the numbers.
        side = data.StructLayout({"count": lanes.bit_length(), "last": 1})
        tags = [Signal(side, name=f"tag_{stage}", reset_less=True) for stage in range(PpuLane.latency)]
        valid = Signal(PpuLane.latency)
        entering = self.beat.payload
        m.d.comb += self.beat.ready.eq(enable & running)
        with m.If(enable):
            m.d.sync += [
                valid.eq(Cat(self.beat.valid & self.beat.ready, valid)),
                tags[0].count.eq(entering.count),
                tags[0].last.eq(entering.last),
            ]
            m.d.sync += [after.eq(before) for before, after in pairwise(tags)]

        def present(tag: data.View) -> list[Signal]:
            """Say which lanes count."""
            return [~tag.last | (tag.count > i if i else tag.count.any()) for i in range(lanes)]

        at_residual, at_number, at_end = (
            valid[stage - 1] for stage in (PpuLane.to_residual, PpuLane.to_number, PpuLane.latency)
        )
        m.submodules.gearbox = gearbox = Gearbox(_NUMBER, lanes, PAD)
        m.d.comb += [
            enable.eq(
                ~(at_residual & job.residual & ~residual.output.valid)
                & ~(at_number & job.measure & ~previous.output.valid)
                & ~(at_number & job.numbers & ~numbers.input.ready)
                & ~(at_end & job.groups & ~gearbox.input.ready)
            ),
            residual.output.ready.eq(enable & at_residual & job.residual),
            previous.output.ready.eq(enable & at_number & job.measure),
            numbers.input.valid.eq(enable & at_number & job.numbers),
            gearbox.input.valid.eq(enable & at_end & job.groups),
        ]
        number_tag, end_tag = tags[PpuLane.to_number - 1], tags[PpuLane.latency - 1]
        m.d.comb += [
            numbers.input.payload.count.eq(number_tag.count),
            numbers.input.payload.last.eq(number_tag.last),
            gearbox.input.payload.count.eq(end_tag.count),
            gearbox.input.payload.last.eq(end_tag.last),
        ]

        m.submodules.sum_change = change = SquareSum(lanes)
        m.submodules.sum_before = before = SquareSum(lanes)
        m.submodules.sum_energy = energy = SquareSum(lanes)
        begins = Signal()
        m.d.comb += [
            change.valid.eq(enable & at_end & job.measure),
            before.valid.eq(enable & at_number & job.measure),
            energy.valid.eq(enable & at_end),
        ]
        m.d.comb += [total.clear.eq(begins) for total in (change, before, energy)]
        counts, end_counts = present(number_tag), present(end_tag)
        for i in range(lanes):
            lane = PpuLane()
            m.submodules[f"lane_{i}"] = lane
            here, at_last = counts[i].replicate(_NUMBER), end_counts[i].replicate(_NUMBER)
            m.d.comb += [
                lane.enable.eq(enable),
                lane.integers.eq(job.integers),
                lane.function.eq(job.function),
                lane.adds.eq(job.residual),
                lane.scale.eq(job.scale),
                lane.group_scale.eq(job.group_scale),
                lane.value.eq(entering.elements[i]),
                lane.residual.eq(residual.output.payload[i]),
                lane.previous.eq(previous.output.payload[i]),
                numbers.input.payload.elements[i].eq(lane.number.as_value()),
                gearbox.input.payload.elements[i].eq(lane.scaled.as_value()),
                change.numbers[i].as_value().eq(lane.change.as_value() & at_last),
                before.numbers[i].as_value().eq(previous.output.payload[i].as_value() & here),
                energy.numbers[i].as_value().eq(lane.scaled.as_value() & at_last),
            ]

        m.submodules.quantiser = quantiser = Quantiser(config.slots_per_block, config.step)
        wiring.connect(m, wiring.flipped(self.weight_mask), quantiser.weight_mask)
        wiring.connect(m, quantiser.group, wiring.flipped(self.group))
        m.d.comb += [
            quantiser.shared.eq(job.shared),
            quantiser.refine.eq(job.refine),
            quantiser.threshold.eq(job.threshold),
            quantiser.pair.payload.numbers.as_value().eq(gearbox.output.payload.word.as_value()),
            quantiser.pair.payload.last.eq(gearbox.output.payload.last),
            quantiser.pair.valid.eq(gearbox.output.valid),
            gearbox.output.ready.eq(quantiser.pair.ready),
            drained.eq(~(valid.any() | gearbox.output.valid | quantiser.busy)),
        ]
        m.d.sync += self.status.eq(Mux(self.clear, 0, self.status) | Cat(quantiser.nonfinite, quantiser.clipped))

        m.submodules.ratio = root = RootOfRatio()
        m.d.comb += [root.a.eq(change.total), root.b.eq(before.total)]
        report = self.report.payload
        m.d.comb += [
            report.activity.eq(root.number),
            report.change.eq(rounded_sum(m, change.total, "rounded_change")),
            report.before.eq(rounded_sum(m, before.total, "rounded_before")),
            report.energy.eq(rounded_sum(m, energy.total, "rounded_energy")),
        ]
        # Whether the job behind was taken, and reports.
        more, more_reports, joins = Signal(), Signal(), Signal()
        coming = self.job.payload
        with m.FSM() as fsm:
            m.d.comb += [
                joins.eq((fsm.ongoing("RUN") | fsm.ongoing("DRAIN")) & coming.follows & ~job.report & ~more),
                self.job.ready.eq(self.idle | joins),
            ]
            with m.State("IDLE"):
                m.d.comb += [self.idle.eq(1), begins.eq(self.job.valid & coming.begin)]
                with m.If(self.job.valid):
                    m.d.sync += job.eq(coming)
                    m.next = "RUN"
            with m.State("RUN"):
                m.d.comb += running.eq(1)
                with m.If(self.job.valid & joins):
                    m.d.sync += [more.eq(1), more_reports.eq(coming.report)]
                with m.If(self.beat.valid & enable & entering.end):
                    m.d.sync += more.eq(0)
                    with m.If(more):
                        m.d.sync += job.report.eq(more_reports)
                    with m.Elif(self.job.valid & joins):
                        m.d.sync += job.report.eq(coming.report)
                    with m.Else():
                        m.next = "DRAIN"
            with m.State("DRAIN"):
                with m.If(self.job.valid & joins):
                    m.d.sync += job.report.eq(coming.report)
                    m.next = "RUN"
                with m.Elif(drained & ~(change.busy | before.busy | energy.busy)):
                    m.next = "IDLE"
                    with m.If(job.report):
                        m.d.comb += root.start.eq(1)
                        m.next = "ROOT"
            with m.State("ROOT"), m.If(root.done):
                m.next = "REPORT"
            with m.State("REPORT"):
                m.d.comb += self.report.valid.eq(1)
                with m.If(self.report.ready):
                    m.next = "IDLE"
        return m
