"""DMA engines of an AXI4 manager: bytes at any address as streams of words (docs/dma.md). Shared by every accelerator family."""

from typing import ClassVar

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.fifo import SyncFIFOBuffered
from amaranth.lib.wiring import In, Out

from hdl.lib.axi import Axi4, FlatPorts, axi_meanings, axi_receive, axi_send, flat_members
from hdl.lib.streams import StreamBuffer
from hdl.lib.verilog import lint_unused
from model.dma import MAX_BYTES, DmaConfig, DmaStatus

__all__ = ["ReadDma", "Splitter", "WriteDma", "burst_layout", "job_layout", "request_layout", "word_layout"]

_INCR = 1
_NORMAL_BUFFERABLE = 3
_PREFIX = "m_axi"


def request_layout(config: DmaConfig) -> data.StructLayout:
    """Return the layout of a request: the address of its first byte, and its bytes as they are (not less one)."""
    return data.StructLayout({"address": config.address_width, "bytes": MAX_BYTES.bit_length()})


def word_layout(config: DmaConfig) -> data.StructLayout:
    """Return the layout of a word that was read; ``last`` marks the last of a request."""
    return data.StructLayout({"data": config.data_width, "last": 1})


def job_layout(config: DmaConfig) -> data.StructLayout:
    """Return what the data side knows of a request.

    ``beat`` is the first beat's index in its block, ``offset`` the first byte's in that beat, ``more`` the words behind the first, ``tail`` the
    index of the last byte in the last word; ``refused``.
    """
    lane = _log2(config.beat_bytes)
    return data.StructLayout(
        {
            "offset": lane,
            "beat": _log2(config.block_beats),
            "tail": lane,
            "more": _log2(MAX_BYTES) - lane,
            "refused": 1,
        }
    )


def burst_layout(config: DmaConfig) -> data.StructLayout:
    """Return the layout of a burst: the beat that it starts with, its beats less one, whether it is its request's last or stands for a refused one."""
    return data.StructLayout(
        {"beat": config.address_width - _log2(config.beat_bytes), "more": 8, "last": 1, "refused": 1}
    )


def _log2(power: int) -> int:
    return power.bit_length() - 1


class Splitter(wiring.Component):
    """Split requests into bursts that stay in aligned blocks of ``config.block_beats``, hence of 4096 bytes; 1 burst per cycle.

    A refused request gives one burst that says so.

    Parameters
    ----------
    config : DmaConfig

    Members
    -------
    request : In(stream of request)
    job : Out(stream of job)
        One per request, at the moment it is taken.
    burst : Out(stream of burst)
        Latency 1.
    stop : In(1)
        No burst is offered in this cycle, and the rest of the request is given up.
    hold : In(1)
        No request is taken in this cycle.
    active : Out(1)
        Bursts of a request are still to come, and no later request was taken.
    """

    def __init__(self, config: DmaConfig):
        self._config = config
        super().__init__(
            {
                "request": In(stream.Signature(request_layout(config))),
                "job": Out(stream.Signature(job_layout(config))),
                "burst": Out(stream.Signature(burst_layout(config))),
                "stop": In(1),
                "hold": In(1),
                "active": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the arithmetic of addresses."""
        m = Module()
        config = self._config
        lane, block = _log2(config.beat_bytes), _log2(config.block_beats)
        request, job, burst = self.request.payload, self.job.payload, self.burst.payload

        behind = Signal(len(request.bytes))
        only_carry = lint_unused("only what is carried out of it matters")
        reach = Signal(max(config.address_width, len(behind)) + 1, attrs=only_carry)
        beats = Signal(len(behind), attrs=only_carry)
        m.d.comb += [
            behind.eq(request.bytes - 1),
            reach.eq(request.address + behind),
            beats.eq(behind + request.address[:lane]),
            job.offset.eq(request.address[:lane]),
            job.beat.eq(request.address[lane : lane + block]),
            job.tail.eq(behind[:lane]),
            job.more.eq(behind[lane : _log2(MAX_BYTES)]),
            job.refused.eq(behind[_log2(MAX_BYTES)] | reach[config.address_width :].any()),
        ]

        active, refused = Signal(), Signal()
        beat = Signal(len(burst.beat))
        left = Signal(len(behind) - lane)
        room, more = Signal(range(max(config.block_beats, 2))), Signal(range(max(config.block_beats, 2)))
        free, ends = Signal(), Signal()
        m.d.comb += [
            room.eq(config.block_beats - 1 - beat[:block]),
            burst.last.eq(refused | (left <= room)),
            more.eq(Mux(left <= room, left, room)),
            burst.more.eq(more),
            burst.beat.eq(beat),
            burst.refused.eq(refused),
            self.burst.valid.eq(active & ~self.stop),
            self.active.eq(active),
            ends.eq(self.burst.valid & self.burst.ready & burst.last),
            free.eq((~active | ends) & ~self.hold),
            self.request.ready.eq(free & self.job.ready),
            self.job.valid.eq(free & self.request.valid),
        ]
        with m.If(self.burst.valid & self.burst.ready):
            m.d.sync += [left.eq(left - more - 1), beat.eq(Cat(Const(0, block), beat[block:] + 1))]
        with m.If(ends | self.stop):
            m.d.sync += active.eq(0)
        with m.If(self.request.valid & self.request.ready):
            m.d.sync += [
                active.eq(1),
                refused.eq(job.refused),
                beat.eq(request.address[lane:]),
                left.eq(beats[lane:]),
            ]
        return m


class _Engine(wiring.Component):
    """What both directions share: configuration, ports, and the address channel."""

    def __init__(self, config: DmaConfig | None, signature: Axi4, members: dict[str, wiring.Member]):
        self._config = config or DmaConfig()
        self._axi = signature
        super().__init__({**members, **flat_members(_PREFIX, signature)})

    @property
    def config(self) -> DmaConfig:
        """The configuration that this component was built with."""
        return self._config

    def _address_channel(self, m: Module, ports: FlatPorts, channel: str) -> stream.Interface:
        """Build the address channel and return what takes its bursts: address and beats less one."""
        lane = _log2(self._config.beat_bytes)
        m.submodules.address = buffer = StreamBuffer(
            data.StructLayout({"beat": self._config.address_width - lane, "len": 8})
        )
        output = buffer.output
        constants = {"id": 0, "size": lane, "burst": _INCR, "lock": 0, "cache": _NORMAL_BUFFERABLE, "prot": 0, "qos": 0}
        m.d.comb += [getattr(ports, f"{channel}{name}").eq(value) for name, value in constants.items()]
        m.d.comb += [
            getattr(ports, f"{channel}addr").eq(Cat(Const(0, lane), output.payload.beat)),
            getattr(ports, f"{channel}len").eq(output.payload.len),
            getattr(ports, f"{channel}valid").eq(output.valid),
            output.ready.eq(getattr(ports, f"{channel}ready")),
        ]
        return buffer.input

    def _outstanding(self, m: Module, starts: Value, ends: Value) -> Signal:
        """Return the number of bursts on their way."""
        outstanding = Signal(range(self._config.outstanding + 1), name="outstanding")
        m.d.sync += outstanding.eq(outstanding + starts - ends)
        return outstanding


def _above(m: Module, value: Value, name: str) -> Signal:
    """Bit i says whether an unsigned value of n bits is above i, for i from 0 to 2^n - 2."""

    def bits(value: Value) -> list[Value]:
        if len(value) == 1:
            return [value[0]]
        top, below = value[-1], bits(value[:-1])
        return [*(bit | top for bit in below), top, *(bit & top for bit in below)]

    above = Signal((1 << len(value)) - 1, name=name)
    m.d.comb += above.eq(Cat(bits(value)))
    return above


def _chosen(select: list[Value], one: Value, other: Value) -> Value:
    """Bytes of ``one`` where their bit is 1, of ``other`` elsewhere."""
    return Cat(Mux(bit, one.word_select(i, 8), other.word_select(i, 8)) for i, bit in enumerate(select))


def _masked(select: list[Value], word: Value) -> Value:
    """Bytes whose bit is 1, zeros elsewhere."""
    return Cat(word.word_select(i, 8) & bit.replicate(8) for i, bit in enumerate(select))


def _rotated(m: Module, word: Value, amount: Value) -> Value:
    """Rotate bytes towards byte 0, by an amount modulo their number, in stages of powers of two."""
    for stage in range(_log2(len(word) // 8)):
        turned = Signal(len(word), name=f"turned{stage}")
        m.d.comb += turned.eq(Mux(amount[stage], word.rotate_right(8 << stage), word))
        word = turned
    return word


class ReadDma(_Engine):
    """Read requests of bytes from an AXI4 subordinate, in order, as words that begin with each request's first byte.

    Any byte address and 1 to 2^20 bytes. A request gives ⌈bytes / bytes of a word⌉ words whatever happens; bytes behind its end are 0. If a
    response is an error, every word with a byte of that beat or of a later one is 0, no more bursts of the request are issued, and those on
    their way are drained. A request of no bytes, of more than 2^20 or beyond the address space gives no words and no transfers.

    One beat per cycle; a request whose address is not a multiple of a beat costs at most one cycle more than it has words. No port depends
    on another in the same cycle.

    Parameters
    ----------
    config : DmaConfig

    Members
    -------
    request : In(stream of {address, bytes})
    word : Out(stream of {data, last})
    done : Out(stream of DmaStatus)
        One per request, in order; offered when the request's last word is. Must be taken, or words stop.
    m_axi_* : Out(AXI4, ar and r)
    """

    throughput: ClassVar[str] = "1 beat per cycle; an unaligned request takes 1 cycle more than it has words"
    port_meanings: ClassVar[dict[str, str]] = {
        "request__payload": "bytes to read: {bytes, address}, 1 to 2^20 bytes at any address",
        "request__valid": "a request is offered",
        "request__ready": "the request is taken",
        "word__payload": "{last of the request, data}; byte 0 of the first word is the request's first",
        "word__valid": "a word is offered",
        "word__ready": "the word is taken",
        "done__payload": "how a request ended: 0 well, 1 refused, 2 SLVERR, 3 DECERR",
        "done__valid": "a request has ended",
        "done__ready": "the end is noted",
        **axi_meanings(_PREFIX, Axi4(write=False)),
    }

    def __init__(self, config: DmaConfig | None = None):
        config = config or DmaConfig()
        super().__init__(
            config,
            Axi4(config.address_width, config.data_width, config.id_width, write=False),
            {
                "request": In(stream.Signature(request_layout(config))),
                "word": Out(stream.Signature(word_layout(config))),
                "done": Out(stream.Signature(2)),
            },
        )
        self.m_axi_rid.attrs.update(lint_unused("responses come in order, because all identifiers are 0"))
        self.m_axi_rresp.attrs.update(lint_unused("OKAY and EXOKAY are the same"))

    def elaborate(self, platform: object) -> Module:
        """Build address side and data side."""
        m = Module()
        config = self._config
        lane = _log2(config.beat_bytes)
        axi = FlatPorts(self, _PREFIX, self._axi)

        # Address side.
        m.submodules.splitter = splitter = Splitter(config)
        wiring.connect(m, wiring.flipped(self.request), splitter.request)
        m.submodules.jobs = jobs = SyncFIFOBuffered(width=job_layout(config).size, depth=config.outstanding + 1)
        address = self._address_channel(m, axi, "ar")
        burst = splitter.burst
        Value.cast(burst.payload).attrs.update(lint_unused("data are counted in words, not in bursts"))
        issue, returned = Signal(), Signal()
        outstanding = self._outstanding(m, issue, returned)
        m.d.comb += [
            jobs.w_data.eq(splitter.job.payload.as_value()),
            jobs.w_en.eq(splitter.job.valid),
            splitter.job.ready.eq(jobs.w_rdy),
            address.payload.beat.eq(burst.payload.beat),
            address.payload.len.eq(burst.payload.more),
            address.valid.eq(burst.valid & ~burst.payload.refused & (outstanding != config.outstanding)),
            issue.eq(address.valid & address.ready),
            burst.ready.eq(burst.payload.refused | (address.ready & (outstanding != config.outstanding))),
        ]

        # Data side. Buffers make every ready and valid a register.
        beat_layout = data.StructLayout({"data": config.data_width, "resp": 2, "last": 1})
        m.submodules.beats = beats = StreamBuffer(beat_layout)
        m.submodules.words = words = StreamBuffer(word_layout(config))
        m.submodules.ends = ends = StreamBuffer(2)
        axi_receive(m, axi, "r", beats.input)
        wiring.connect(m, words.output, wiring.flipped(self.word))
        wiring.connect(m, ends.output, wiring.flipped(self.done))
        beat = beats.output

        busy, absorb, unaligned, spill, cut = (
            Signal(name=name) for name in ("busy", "absorb", "unaligned", "spill", "cut")
        )
        job = Signal(job_layout(config), attrs=lint_unused("the block's beats matter to writing only"))
        fetched = data.View(job_layout(config), jobs.r_data)
        # Where the last byte of the last word comes to lie, counted from the start of the beat with the word's first.
        spread = Signal(lane + 1, attrs=lint_unused("only the carry matters"))
        m.d.comb += spread.eq(fetched.offset + fetched.tail)
        code = Signal(2)
        held = Signal(config.data_width)

        # An unaligned request takes a beat first, then with every word one more, if there is one.
        take, give, final, go = Signal(), Signal(), Signal(), Signal()
        last_word, draining = Signal(), Signal()
        failing = Signal()
        m.d.comb += [
            last_word.eq(~job.more.any()),
            draining.eq(outstanding.any()),
            take.eq(~job.refused & Mux(cut, draining, absorb | ~(last_word & unaligned & ~spill))),
            give.eq(~job.refused & Mux(cut, ~draining, ~absorb)),
            final.eq(job.refused | (give & last_word)),
            go.eq(busy & (~take | beat.valid) & (~give | words.input.ready) & (~final | ends.input.ready)),
            beat.ready.eq(go & take),
            returned.eq(beat.ready & beat.payload.last),
            failing.eq(take & beat.payload.resp[1]),
            jobs.r_en.eq(~busy | (go & final)),
        ]
        turned = _rotated(m, beat.payload.data, job.offset)
        ahead, behind = _above(m, job.offset, "ahead"), _above(m, job.tail, "behind")
        mixed = Signal(config.data_width)
        good = Signal()
        # Byte i of a word stands in the beat before unless the offset is above size - 1 - i; the word goes on to byte ``tail``.
        before = [Const(1, 1), *(~bit for bit in reversed(ahead))]
        inside = [good, *(good & (~last_word | bit) for bit in behind)]
        m.d.comb += [
            mixed.eq(Mux(unaligned, _chosen(before, held, turned), turned)),
            good.eq(~(code[1] | failing)),
            words.input.valid.eq(go & give),
            words.input.payload.data.eq(_masked(inside, mixed)),
            words.input.payload.last.eq(last_word),
            ends.input.valid.eq(go & final),
            ends.input.payload.eq(Mux(failing & ~code[1], beat.payload.resp, code)),
        ]
        with m.If(go & take):
            m.d.sync += [held.eq(turned), absorb.eq(0)]
            with m.If(failing & ~code[1]):
                m.d.sync += code.eq(beat.payload.resp)
        with m.If(go & give):
            m.d.sync += job.more.eq(job.more - 1)
        with m.If(jobs.r_en):
            m.d.sync += [
                busy.eq(jobs.r_rdy),
                job.eq(fetched),
                unaligned.eq(fetched.offset.any()),
                absorb.eq(fetched.offset.any()),
                spill.eq(spread[-1]),
                code.eq(Mux(fetched.refused, DmaStatus.REFUSED.value, DmaStatus.OK.value)),
            ]

        # The splitter works at the request that fails here if no later job waits.
        stop = Signal()
        m.d.comb += [
            stop.eq(busy & code[1] & splitter.active & ~jobs.level.any()),
            splitter.stop.eq(stop),
            splitter.hold.eq(stop | cut),
        ]
        with m.If(go & final):
            m.d.sync += cut.eq(0)
        with m.Elif(stop):
            m.d.sync += cut.eq(1)
        return m


class WriteDma(_Engine):
    """Write streams of words to an AXI4 subordinate, request after request, from each request's first byte on.

    Any byte address and 1 to 2^20 bytes. A request takes ⌈bytes / bytes of a word⌉ words whatever happens; bytes behind its end are ignored.
    If a response is an error, no more bursts of the request are issued and the rest of its words are taken and dropped. A request of no
    bytes, of more than 2^20 or beyond the address space takes no words and makes no transfers.

    One beat per cycle. No port depends on another in the same cycle; data of a burst follow its address without waiting for it to be taken.

    Parameters
    ----------
    config : DmaConfig

    Members
    -------
    request : In(stream of {address, bytes})
    word : In(stream of data)
    done : Out(stream of DmaStatus)
        One per request, in order, when all its responses are there.
    m_axi_* : Out(AXI4, aw, w and b)
    """

    throughput: ClassVar[str] = "1 beat per cycle"
    port_meanings: ClassVar[dict[str, str]] = {
        "request__payload": "bytes to write: {bytes, address}, 1 to 2^20 bytes at any address",
        "request__valid": "a request is offered",
        "request__ready": "the request is taken",
        "word__payload": "data; byte 0 of the first word is the request's first",
        "word__valid": "a word is offered",
        "word__ready": "the word is taken",
        "done__payload": "how a request ended: 0 well, 1 refused, 2 SLVERR, 3 DECERR",
        "done__valid": "a request has ended",
        "done__ready": "the end is noted",
        **axi_meanings(_PREFIX, Axi4(read=False)),
    }

    def __init__(self, config: DmaConfig | None = None):
        config = config or DmaConfig()
        super().__init__(
            config,
            Axi4(config.address_width, config.data_width, config.id_width, read=False),
            {
                "request": In(stream.Signature(request_layout(config))),
                "word": In(stream.Signature(config.data_width)),
                "done": Out(stream.Signature(2)),
            },
        )
        self.m_axi_bid.attrs.update(lint_unused("responses come in order, because all identifiers are 0"))

    def elaborate(self, platform: object) -> Module:
        """Build address side, data side and response side."""
        m = Module()
        config = self._config
        size, lane, block = config.beat_bytes, _log2(config.beat_bytes), _log2(config.block_beats)
        axi = FlatPorts(self, _PREFIX, self._axi)

        # Address side. Every burst, refused request and given-up request is one entry of the queue for the response side.
        m.submodules.splitter = splitter = Splitter(config)
        wiring.connect(m, wiring.flipped(self.request), splitter.request)
        m.submodules.jobs = jobs = SyncFIFOBuffered(width=job_layout(config).size, depth=config.outstanding + 1)
        entry_layout = data.StructLayout({"last": 1, "bus": 1})
        m.submodules.entries = entries = SyncFIFOBuffered(width=2, depth=config.outstanding + 1)
        address = self._address_channel(m, axi, "aw")
        burst = splitter.burst
        entry_in, entry = data.View(entry_layout, entries.w_data), data.View(entry_layout, entries.r_data)
        issue, answered, finished, stop = Signal(), Signal(), Signal(), Signal()
        outstanding = self._outstanding(m, issue, answered)
        may = outstanding != config.outstanding
        m.d.comb += [
            jobs.w_data.eq(splitter.job.payload.as_value()),
            jobs.w_en.eq(splitter.job.valid & ~splitter.job.payload.refused),
            splitter.job.ready.eq(jobs.w_rdy),
            address.payload.beat.eq(burst.payload.beat),
            address.payload.len.eq(burst.payload.more),
            address.valid.eq(burst.valid & ~burst.payload.refused & may & entries.w_rdy),
            issue.eq(address.valid & address.ready),
            burst.ready.eq(entries.w_rdy & (burst.payload.refused | (address.ready & may))),
            entries.w_en.eq(stop | (burst.valid & burst.ready)),
            entry_in.last.eq(stop | burst.payload.last),
            entry_in.bus.eq(~stop & ~burst.payload.refused),
        ]

        # Data side.
        beat_layout = data.StructLayout({"data": config.data_width, "strb": size, "last": 1})
        m.submodules.words = words = StreamBuffer(config.data_width)
        m.submodules.beats = beats = StreamBuffer(beat_layout)
        wiring.connect(m, wiring.flipped(self.word), words.input)
        axi_send(m, beats.output, axi, "w")
        word, beat = words.output, beats.input

        busy, first, spill, spilling, cut = (
            Signal(name=name) for name in ("busy", "first", "spill", "spilling", "cut")
        )
        job = Signal(job_layout(config), attrs=lint_unused("refused requests have no data"))
        fetched = data.View(job_layout(config), jobs.r_data)
        # Where the last byte of the last word comes to lie, counted from the start of the beat with the word's first.
        spread = Signal(lane + 1, attrs=lint_unused("only the carry matters"))
        m.d.comb += spread.eq(fetched.offset + fetched.tail)
        held = Signal(config.data_width)
        issued = Signal(range(config.outstanding + 1))

        # Every word makes a beat; if the last word does not fit into its beat, one more beat follows.
        take, give, final, go, burst_ends = Signal(), Signal(), Signal(), Signal(), Signal()
        last_word, last_lane = Signal(), Signal(lane)
        m.d.comb += [
            last_word.eq(~job.more.any()),
            last_lane.eq(job.offset + job.tail),
            take.eq(~spilling),
            give.eq(issued.any()),
            final.eq(spilling | (last_word & ~spill)),
            go.eq(busy & (give | cut) & (~take | word.valid) & (~give | beat.ready)),
            word.ready.eq(go & take),
            beat.valid.eq(go & give),
            burst_ends.eq(final | (job.beat.all() if block else 1)),
            jobs.r_en.eq(~busy | (go & final)),
        ]
        amount = Signal(lane)
        m.d.comb += amount.eq(-job.offset)
        turned = _rotated(m, word.payload, amount)
        ahead, behind = _above(m, job.offset, "ahead"), _above(m, last_lane, "behind")
        mixed, strobe = Signal(config.data_width), Signal(size)
        # Byte i of a beat stands in the word before if the offset is above i.
        before = [*ahead, Const(0, 1)]
        begun = [*(~first | ~bit for bit in ahead), Const(1, 1)]
        inside = [Const(1, 1), *(~final | bit for bit in behind)]
        m.d.comb += [
            mixed.eq(_chosen(before, held, turned)),
            strobe.eq(Cat(one & other for one, other in zip(begun, inside, strict=True))),
            beat.payload.data.eq(_masked(list(strobe), mixed)),
            beat.payload.strb.eq(strobe),
            beat.payload.last.eq(burst_ends),
        ]
        m.d.sync += issued.eq(issued + issue - (go & give & burst_ends))
        with m.If(go):
            m.d.sync += [first.eq(0), job.beat.eq(job.beat + 1)]
            with m.If(take):
                m.d.sync += [held.eq(turned), job.more.eq(job.more - 1), spilling.eq(last_word)]
        with m.If(jobs.r_en):
            m.d.sync += [
                busy.eq(jobs.r_rdy),
                job.eq(fetched),
                first.eq(1),
                spill.eq(spread[-1]),
                spilling.eq(0),
            ]

        # Response side.
        m.submodules.answers = answers = StreamBuffer(data.StructLayout({"resp": 2}))
        m.submodules.ends = ends = StreamBuffer(2)
        axi_receive(m, axi, "b", answers.input)
        wiring.connect(m, ends.output, wiring.flipped(self.done))
        answer = answers.output
        code = Signal(2)
        unfinished = Signal(range(config.outstanding + 2))
        step, now = Signal(), Signal(2)
        m.d.comb += [
            step.eq(entries.r_rdy & (~entry.bus | answer.valid) & (~entry.last | ends.input.ready)),
            entries.r_en.eq(step),
            answer.ready.eq(step & entry.bus),
            answered.eq(step & entry.bus),
            finished.eq(step & entry.last),
            ends.input.valid.eq(finished),
            ends.input.payload.eq(now),
        ]
        with m.If(code[1]):
            m.d.comb += now.eq(code)
        with m.Elif(~entry.bus):
            m.d.comb += now.eq(DmaStatus.REFUSED.value)
        with m.Elif(answer.payload.resp[1]):
            m.d.comb += now.eq(answer.payload.resp)
        with m.If(step):
            m.d.sync += code.eq(Mux(entry.last, 0, now))

        # The splitter works at the request that fails here if no later one's end waits.
        m.d.sync += unfinished.eq(unfinished + (entries.w_en & entries.w_rdy & entry_in.last) - finished)
        m.d.comb += [
            stop.eq(code[1] & splitter.active & ~unfinished.any() & entries.w_rdy),
            splitter.stop.eq(stop),
            splitter.hold.eq(stop | cut),
        ]
        with m.If(go & final):
            m.d.sync += cut.eq(0)
        with m.Elif(stop):
            m.d.sync += cut.eq(1)
        return m
