"""Descriptors: the queue in memory, and the check of what was fetched (docs/accelerator.md)."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

import model.accelerator
from hdl.dma import request_layout, word_layout
from hdl.job import ARRAYS, arrays_of, job_layout, post_layout
from hdl.lib.verilog import lint_unused
from model.accelerator import (
    ALIGNMENT,
    DESCRIPTOR_BYTES,
    MAX_ROWS,
    PITCH,
    POST_ARRAYS,
    POST_BYTES,
    AcceleratorConfig,
    ErrorCode,
    Format,
    Mode,
    descriptor_of,
)
from model.activation import Function
from model.block_scaled import PAD
from model.dma import DmaStatus
from model.policy import LEVEL_BITS
from model.registers import Structure

__all__ = ["POST", "DescriptorCheck", "DescriptorQueue", "PostCheck", "memory_layout"]

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


POST = memory_layout(model.accelerator.POST)
"""Layout of a post block in memory, see :class:`model.accelerator.PostBlock`."""
_DESCRIPTOR_BASE = ErrorCode.DESCRIPTOR_BEYOND - DmaStatus.REFUSED
_POST_BASE = ErrorCode.POST_BEYOND - DmaStatus.REFUSED


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _is(value: Value, number: int) -> Value:
    return value == number if number else ~value.any()


class DescriptorCheck(wiring.Component):
    """Check a descriptor as :func:`model.accelerator.check` does, and take from it what the loader needs; latency 2.

    ``fence`` is not the loader's business.

    Members
    -------
    descriptor : In(layout of a descriptor in memory)
    precision : In(5)
        With ``ppu``: that of the policy unit.
    ready : In(1)
        It has one.
    code : Out(8)
    job : Out(job)
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        layout = memory_layout(descriptor_of(config))
        members = {"descriptor": In(layout), "code": Out(8), "job": Out(job_layout(config))}
        if config.ppu:
            members |= {"precision": In(LEVEL_BITS), "ready": In(1)}
        super().__init__(members)
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
        mode, scale = d.mode, d.out_scale
        if config.ppu:
            chosen, picks, mode, scale = Signal(2), Signal(), Signal(2), Signal(32)
            m.d.comb += [
                picks.eq(d.policy & self.ready),
                chosen.eq(mode_of(self.precision)),
                mode.eq(Mux(picks, chosen, d.mode)),
                scale.eq(Mux(picks & _is(chosen, Mode.AUTOFP2), d.out_scale_low, d.out_scale)),
            ]
        fp2 = _is(mode, Mode.AUTOFP2)
        pairs = Signal(len(tile_n))
        words, panel, bank = (Signal(32, name=name) for name in ("words", "panel", "bank"))
        m.d.comb += [kv.eq(d.k[_log2(config.lanes) :]), pairs.eq(Mux(fp2, tile_n, tile_n[1:] + tile_n[0]))]
        m.d.sync += [words.eq(tile_m * tile_n), panel.eq(tile_m * short_kv), bank.eq(pairs * segment)]

        addresses = [d[name] for name in _NAMES]
        strides = [d[f"{name}_stride"] for name in _NAMES]
        low = _log2(ALIGNMENT)
        spare = [d[name] for name in d.shape().members if name.startswith("spare")]
        sizes = [d.tile_m, d.tile_n, d.segment]
        rules = {
            ErrorCode.RESERVED: Cat(spare).any(),
            ErrorCode.MODE: (d.mode == 3) | (d.mode == Mode.AUTOFP6 if config.refinement == "none" else Const(0, 1)),
            ErrorCode.FORMAT: d.format > Format.FP32,
            ErrorCode.SCALE: (d.format == Format.FP32) & scale[23:31].all(),
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
        if config.ppu:
            post = d.post_address
            rules[ErrorCode.RESERVED] |= (post.any() & ~d.post) | (d.out_scale_low.any() & ~d.policy)
            if config.refinement == "none":
                rules[ErrorCode.MODE] |= mode == Mode.AUTOFP6
            rules[ErrorCode.ALIGNMENT] |= post[:low].any()
            rules[ErrorCode.ADDRESS] |= post[config.address_width :].any()
            rules[ErrorCode.POLICY] = d.policy & ~self.ready
            rules[ErrorCode.POST_FORMAT] = d.post & (d.format != Format.FP32)
        code: Value = Const(ErrorCode.OK, 8)
        for number, broken in sorted(rules.items(), reverse=True):
            code = Mux(broken, number, code)
        job = self.job
        m.d.sync += [
            self.code.eq(code),
            job.fp2.eq(fp2),
            job.refined.eq(mode == Mode.AUTOFP6),
            job.fp32.eq(d.format == Format.FP32),
            job.single.eq(panel > config.activation_depth // 2),
            job.m.eq(d.m),
            job.n.eq(d.n),
            job.kv.eq(kv),
            job.tile_m.eq(tile_m),
            job.tile_n.eq(tile_n),
            job.segment.eq(Mux(d.segment > kv, kv, d.segment)),
            job.out_scale.eq(scale),
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


def mode_of(precision: Value) -> Value:
    """Return the mode that goes with a precision, see :func:`model.accelerator.mode_of`."""
    return Mux(precision < 4, Mode.AUTOFP2, Mux(precision < 6, Mode.NVFP4, Mode.AUTOFP6))


class PostCheck(wiring.Component):
    """Check a post block as :func:`model.accelerator.check_post` does, and take from it what is needed; latency 1.

    Members
    -------
    post : In(POST)
    n, tile_n : In
        Of a descriptor that is right.
    fp2 : In(1)
        The product is in AutoFP2 mode.
    code : Out(8)
    block : Out(post_layout)
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        super().__init__(
            {
                "post": In(POST),
                "n": In(MAX_ROWS.bit_length()),
                "tile_n": In(config.max_n.bit_length()),
                "fp2": In(1),
                "code": Out(8),
                "block": Out(post_layout(config)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the comparisons."""
        m = Module()
        config, post = self._config, self.post
        spare = [post[name] for name in POST.members if name.startswith("spare")]
        addresses = [post[name] for name in (*POST_ARRAYS, "next_mask")]
        strides = [post[f"{name}_stride"] for name in POST_ARRAYS]
        low = _log2(ALIGNMENT)
        width = Signal((2 * config.columns * config.max_n).bit_length())
        m.d.comb += width.eq(Mux(self.fp2, (self.tile_n * config.columns) << 1, self.tile_n * config.columns))
        rules = {
            ErrorCode.POST_RESERVED: Cat(spare).any() | (post.function > max(Function)),
            ErrorCode.POST_FLAGS: ~(post.numbers | post.groups)
            | ((post.shared | post.refine) & ~post.groups)
            | (post.observe & ~(post.measure & post.report)),
            ErrorCode.POST_SCALE: post.group_scale[23:31].all() | post.threshold[23:31].all(),
            ErrorCode.POST_TILE: post.groups & width[: _log2(PAD)].any() & (width < self.n),
            ErrorCode.POST_ALIGNMENT: Cat(value[:low] for value in (*addresses, *strides)).any(),
            ErrorCode.POST_ADDRESS: Cat(value[config.address_width :] for value in addresses).any(),
        }
        code: Value = Const(ErrorCode.OK, 8)
        for number, broken in sorted(rules.items(), reverse=True):
            code = Mux(broken, number, code)
        m.d.sync += self.code.eq(code)
        for name in post_layout(config).members:
            m.d.comb += Value.cast(self.block[name]).eq(post[name])
        return m


class PostFetcher(wiring.Component):
    """Fetch a post block, check it, and give it away when its product starts.

    Members
    -------
    fetch : In(1)
        Held until ``finished``.
    address : In(address)
    n, tile_n, fp2 : In
        As of `PostCheck`.
    request, word, done
        Those of a :class:`hdl.dma.ReadDma`, in use while ``fetch`` is set.
    finished : Out(1)
        The block is here, from then until the next ``forget``.
    code : Out(8)
    forget : In(1)
        The next descriptor is fetched.
    give : In(1)
        Its product starts.
    block : Out(stream of post_layout)
        The payload holds until the next block is fetched, which is when this one was taken.
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        super().__init__(
            {
                "fetch": In(1),
                "address": In(config.address_width),
                "n": In(MAX_ROWS.bit_length()),
                "tile_n": In(config.max_n.bit_length()),
                "fp2": In(1),
                "request": Out(stream.Signature(request_layout(config.dma))),
                "word": In(stream.Signature(word_layout(config.dma))),
                "done": In(stream.Signature(2)),
                "finished": Out(1),
                "code": Out(8),
                "forget": In(1),
                "give": In(1),
                "block": Out(stream.Signature(post_layout(config))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the sequence and the block's registers."""
        m = Module()
        width = self._config.data_width
        m.submodules.check = check = PostCheck(self._config)
        words = 8 * POST_BYTES // width
        raw, number, status = Signal(8 * POST_BYTES), Signal(range(words)), Signal(2)
        m.d.comb += [
            check.post.as_value().eq(raw),
            check.n.eq(self.n),
            check.tile_n.eq(self.tile_n),
            check.fp2.eq(self.fp2),
            self.code.eq(Mux(status.any(), _POST_BASE + status, check.code)),
            self.block.payload.eq(check.block),
            self.request.payload.address.eq(self.address),
            self.request.payload.bytes.eq(POST_BYTES),
        ]
        with m.If(self.give):
            m.d.sync += self.block.valid.eq(1)
        with m.Elif(self.block.ready):
            m.d.sync += self.block.valid.eq(0)
        with m.FSM():
            with m.State("idle"):
                m.d.sync += number.eq(0)
                m.d.comb += self.request.valid.eq(self.fetch & ~self.block.valid)
                with m.If(self.request.valid & self.request.ready):
                    m.next = "words"
            with m.State("words"):
                m.d.comb += [
                    self.word.ready.eq(1),
                    self.done.ready.eq(~self.word.valid | self.word.payload.last),
                ]
                with m.If(self.word.valid):
                    m.d.sync += number.eq(number + 1)
                    for i in range(words):
                        with m.If(_is(number, i)):
                            m.d.sync += raw.word_select(i, width).eq(self.word.payload.data)
                with m.If(self.done.valid & self.done.ready):
                    m.d.sync += status.eq(self.done.payload)
                    m.next = "check"
            with m.State("check"):
                m.next = "finished"
            with m.State("finished"):
                m.d.comb += self.finished.eq(1)
                with m.If(self.forget):
                    m.next = "idle"
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
    block : Out(stream of post_layout)
        With ``ppu``: the post block of each product that starts and has one. The next one is not read before it was taken.
    precision, ready : In
        With ``ppu``: of the policy unit, see `DescriptorCheck`.
    settled : In(1)
        With ``ppu``: the policy unit has nothing left to do.
    """

    def __init__(self, config: AcceleratorConfig):
        self._config = config
        post = {
            "block": Out(stream.Signature(post_layout(config))),
            "precision": In(LEVEL_BITS),
            "ready": In(1),
            "settled": In(1),
        }
        super().__init__(
            {
                **(post if config.ppu else {}),
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
        if config.ppu:
            Value.cast(check.job).attrs.update(lint_unused("of a post block the check knows nothing"))

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
        d = check.descriptor
        fenced, settled = d.fence, self.ended
        if config.ppu:
            asked = Signal()
            m.submodules.post = post = PostFetcher(config)
            fenced, settled = d.fence | d.policy, self.ended & (~d.policy | self.settled)
            m.d.comb += [
                post.address.eq(d.post_address),
                post.n.eq(check.job.n),
                post.tile_n.eq(check.job.tile_n),
                post.fp2.eq(check.job.fp2),
                post.give.eq(self.start & self.job.post),
                post.forget.eq(~self.busy),
                self.job.post.eq(post.finished & ~self.code.any()),
                self.job.numbers.eq(post.block.payload.numbers),
            ]
            wiring.connect(m, post.block, wiring.flipped(self.block))
            with m.If(post.finished & ~status.any() & ~check.code.any()):
                m.d.comb += self.code.eq(post.code)

        with m.FSM() as fsm:
            m.d.comb += self.busy.eq(~fsm.ongoing("idle"))
            with m.State("idle"), m.If(self.enable & (fetched != self.submitted) & ~self.loading & ~self.restart):
                m.d.sync += [
                    *([asked.eq(0)] if config.ppu else []),
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
            with m.State("compare"), m.If(~fenced | settled):
                m.next = "start"
                if config.ppu:
                    with m.If(d.policy & ~asked):
                        m.d.sync += [
                            asked.eq(1),
                            check.precision.eq(self.precision),
                            check.ready.eq(self.ready),
                        ]
                        m.next = "picked"
                    with m.Elif(d.post & ~self.code.any()):
                        m.next = "post"
            if config.ppu:
                # The check takes two cycles; if its code were not the one for this mode yet, the block would be left out.
                with m.State("picked"):
                    m.next = "check"
                with m.State("post"):
                    m.d.comb += [self.fetching.eq(1), post.fetch.eq(1)]
                    for name in ("request", "word", "done"):
                        wiring.connect(m, getattr(post, name), wiring.flipped(getattr(self, name)))
                    with m.If(post.finished):
                        m.next = "start"
            with m.State("start"):
                m.d.comb += self.start.eq(1)
                m.next = "wait"
            with m.State("wait"), m.If(~self.loading):
                m.next = "idle"
        with m.If(self.restart):
            m.d.sync += [place.eq(0), fetched.eq(0)]
        return m
