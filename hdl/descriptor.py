"""Descriptors: the queue in memory, and the check of what was fetched (docs/accelerator.md)."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

import model.accelerator
from hdl.dma import request_layout, word_layout
from hdl.job import ARRAYS, arrays_of, job_layout
from hdl.lib.verilog import lint_unused
from model.accelerator import ALIGNMENT, DESCRIPTOR_BYTES, MAX_ROWS, PITCH, AcceleratorConfig, ErrorCode, Format, Mode
from model.dma import DmaStatus
from model.registers import Structure

__all__ = ["DESCRIPTOR", "DescriptorCheck", "DescriptorQueue", "memory_layout"]

_NAMES = [f"{operand}_{array}" for operand in "aw" for array in ARRAYS] + ["out"]


def memory_layout(structure: Structure) -> data.StructLayout:
    """Return the layout of a structure in memory; what lies between its members is ``spare_0``, ``spare_1`` and so on."""
    members: dict[str, int] = {}
    end = spares = 0
    for member in structure.by_position:
        if member.position > end:
            members[f"spare_{spares}"] = member.position - end
            spares += 1
        members[member.name] = member.width
        end = member.position + member.width
    if end < 8 * structure.size:
        members[f"spare_{spares}"] = 8 * structure.size - end
    return data.StructLayout(members)


DESCRIPTOR = memory_layout(model.accelerator.DESCRIPTOR)
"""Layout of a descriptor in memory, see :class:`model.accelerator.Descriptor`."""
_DESCRIPTOR_BASE = ErrorCode.DESCRIPTOR_BEYOND - DmaStatus.REFUSED


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _is(value: Value, number: int) -> Value:
    return value == number if number else ~value.any()


class DescriptorCheck(wiring.Component):
    """Check a descriptor as :func:`model.accelerator.check` does, and take from it what the loader needs; latency 2.

    ``fence`` is not the loader's business.

    Members
    -------
    descriptor : In(DESCRIPTOR)
    code : Out(8)
    job : Out(job)
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        super().__init__({"descriptor": In(DESCRIPTOR), "code": Out(8), "job": Out(job_layout(config))})
        Value.cast(self.descriptor).attrs.update(
            lint_unused("without refinement, addresses of masks and offsets do not count")
        )

    def elaborate(self, platform: object) -> Module:
        """Build the products first, then the comparisons."""
        m = Module()
        config = self._config
        d = self.descriptor
        # Cut to what a size may be: if it is more, that alone is the error.
        tile_m = d.tile_m[: config.max_m.bit_length()]
        tile_n = d.tile_n[: config.max_n.bit_length()]
        kv = Signal(32 - _log2(config.lanes))
        short_kv = kv[: config.max_kv.bit_length()]
        half = config.weight_depth // 2
        segment = d.segment[: min(half.bit_length(), 16)]
        fp2 = _is(d.mode, Mode.AUTOFP2)
        pairs = Signal(len(tile_n))
        words, panel, bank = (Signal(32, name=name) for name in ("words", "panel", "bank"))
        m.d.comb += [kv.eq(d.k[_log2(config.lanes) :]), pairs.eq(Mux(fp2, tile_n, tile_n[1:] + tile_n[0]))]
        m.d.sync += [words.eq(tile_m * tile_n), panel.eq(tile_m * short_kv), bank.eq(pairs * segment)]

        addresses = [d[name] for name in _NAMES]
        strides = [d[f"{name}_stride"] for name in _NAMES]
        low = _log2(ALIGNMENT)
        spare = [d[name] for name in DESCRIPTOR.members if name.startswith("spare")]
        sizes = [d.tile_m, d.tile_n, d.segment]
        rules = {
            ErrorCode.RESERVED: Cat(spare).any(),
            ErrorCode.MODE: (d.mode == 3) | (d.mode == Mode.AUTOFP6 if config.refinement == "none" else Const(0, 1)),
            ErrorCode.FORMAT: d.format > Format.FP32,
            ErrorCode.SCALE: (d.format == Format.FP32) & d.out_scale[23:31].all(),
            ErrorCode.SIZE_ZERO: Cat(~value.any() for value in (d.m, d.n, d.k)).any(),
            ErrorCode.SIZE_LIMIT: d.m[MAX_ROWS.bit_length() :].any()
            | d.n[MAX_ROWS.bit_length() :].any()
            | (kv > config.max_kv),
            ErrorCode.K_MULTIPLE: d.k[: _log2(config.lanes)].any(),
            ErrorCode.TILE: Cat(~value.any() for value in sizes).any()
            | (d.tile_m > config.max_m)
            | (d.tile_n > config.max_n)
            | (d.segment > half)
            | (words > config.max_words)
            | (panel > config.activation_depth)
            | (bank > half),
            ErrorCode.ALIGNMENT: Cat(value[:low] for value in (*addresses, *strides)).any(),
            ErrorCode.ADDRESS: Cat(value[config.address_width :] for value in addresses).any(),
        }
        code: Value = Const(ErrorCode.OK, 8)
        for number, broken in sorted(rules.items(), reverse=True):
            code = Mux(broken, number, code)
        job = self.job
        m.d.sync += [
            self.code.eq(code),
            job.fp2.eq(fp2),
            job.refined.eq(d.mode == Mode.AUTOFP6),
            job.fp32.eq(d.format == Format.FP32),
            job.single.eq(panel > config.activation_depth // 2),
            job.m.eq(d.m),
            job.n.eq(d.n),
            job.kv.eq(kv),
            job.tile_m.eq(tile_m),
            job.tile_n.eq(tile_n),
            job.segment.eq(Mux(d.segment > kv, kv, d.segment)),
            job.out_scale.eq(d.out_scale),
            job.out.eq(d.out),
            job.out_stride.eq(d.out_stride),
        ]
        for operand in "aw":
            for name in arrays_of(config):
                m.d.sync += [
                    job[operand][name].eq(d[f"{operand}_{name}"]),
                    job[operand][f"{name}_stride"].eq(d[f"{operand}_{name}_stride"]),
                ]
        return m


class DescriptorQueue(wiring.Component):
    """Fetch descriptors from a ring in memory, check them and hand them to the loader, one after the other.

    Parameters
    ----------
    config : AcceleratorConfig

    Members
    -------
    enable : In(1)
    base : In(64)
        Address of the first place, a multiple of 256.
    last : In(16)
        Number of the ring's last place.
    submitted : In(16)
    restart : In(1)
        Go back to the first place, and to no descriptor fetched.
    cycle : In(32)
    request, word, done
        Those of a :class:`hdl.dma.ReadDma`. They are in use while ``fetching``.
    fetching : Out(1)
    busy : Out(1)
        A descriptor was taken from the ring and the loader has not ended it.
    loading : In(1)
        The loader is busy.
    ended : In(1)
        All products that were started have ended, and their records are written.
    start : Out(1)
        The loader may begin with what the following say; they hold until the next.
    job : Out(job)
    code : Out(8)
    since : Out(32)
        ``cycle`` when the descriptor was asked for.
    descriptor : Out(address)
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        super().__init__(
            {
                "enable": In(1),
                "base": In(64),
                "last": In(16),
                "submitted": In(16),
                "restart": In(1),
                "cycle": In(32),
                "request": Out(stream.Signature(request_layout(config.dma))),
                "word": In(stream.Signature(word_layout(config.dma))),
                "done": In(stream.Signature(2)),
                "fetching": Out(1),
                "busy": Out(1),
                "loading": In(1),
                "ended": In(1),
                "start": Out(1),
                "job": Out(job_layout(config)),
                "code": Out(8),
                "since": Out(32),
                "descriptor": Out(config.address_width),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the sequence and the descriptor's registers."""
        m = Module()
        config = self._config
        m.submodules.check = check = DescriptorCheck(config)
        m.d.comb += self.job.eq(check.job)

        place, fetched = Signal(16), Signal(16)
        address = Signal(65)
        beyond = Signal()
        high_only = address[config.address_width :]
        m.d.comb += [address.eq(self.base + (place << _log2(PITCH))), beyond.eq(high_only.any())]

        words = -(-DESCRIPTOR_BYTES * 8 // config.data_width)
        raw = Signal(
            words * config.data_width, attrs=lint_unused("a bus word may be longer than what is left of a descriptor")
        )
        number = Signal(range(words))
        m.d.comb += check.descriptor.as_value().eq(raw)
        status = Signal(2)
        bad = Signal()
        m.d.comb += self.code.eq(Mux(status.any(), _DESCRIPTOR_BASE + status, check.code))

        with m.FSM() as fsm:
            m.d.comb += self.busy.eq(~fsm.ongoing("idle"))
            with m.State("idle"), m.If(self.enable & (fetched != self.submitted) & ~self.loading & ~self.restart):
                m.d.sync += [
                    self.since.eq(self.cycle),
                    self.descriptor.eq(address),
                    bad.eq(beyond),
                    number.eq(0),
                    fetched.eq(fetched + 1),
                    place.eq(Mux(place >= self.last, 0, place + 1)),
                ]
                m.next = "ask"
            with m.State("ask"):
                m.d.comb += [
                    self.fetching.eq(1),
                    self.request.valid.eq(~bad),
                    self.request.payload.address.eq(self.descriptor),
                    self.request.payload.bytes.eq(DESCRIPTOR_BYTES),
                ]
                m.d.sync += status.eq(DmaStatus.REFUSED)
                with m.If(bad):
                    m.next = "start"
                with m.Elif(self.request.ready):
                    m.next = "fetch"
            with m.State("fetch"):
                m.d.comb += [self.fetching.eq(1), self.word.ready.eq(1)]
                with m.If(self.word.valid):
                    m.d.sync += number.eq(number + 1)
                    for i in range(words):
                        with m.If(_is(number, i)):
                            m.d.sync += raw.word_select(i, config.data_width).eq(self.word.payload.data)
                m.d.comb += self.done.ready.eq(~self.word.valid | self.word.payload.last)
                with m.If(self.done.valid & self.done.ready):
                    m.d.sync += status.eq(self.done.payload)
                    m.next = "check"
            with m.State("check"):
                m.next = "compare"
            with m.State("compare"), m.If(~check.descriptor.fence | self.ended):
                m.next = "start"
            with m.State("start"):
                m.d.comb += self.start.eq(1)
                m.next = "wait"
            with m.State("wait"), m.If(~self.loading):
                m.next = "idle"
        with m.If(self.restart):
            m.d.sync += [place.eq(0), fetched.eq(0)]
        return m
