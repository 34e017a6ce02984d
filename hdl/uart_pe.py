"""Processing element behind a serial line: operand stores, requests and replies (docs/fpga.md)."""

from typing import ClassVar

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from hdl.collector import activation_entry, weight_entry
from hdl.lib.frames import FrameByte, FrameReceiver, FrameSender
from hdl.lib.streams import StreamFifo
from hdl.lib.uart import UartReceiver, UartTransmitter
from hdl.pe import Pe, check_command
from model.uart_pe import FRAME_BYTES, LEAST_BYTES, Opcode, Status, UartPeConfig, entry_bytes, info

__all__ = ["OperandStore", "PeServer", "UartPe"]

WAITING = 1024
"""Bytes that wait while a request is answered."""


class RunRequest(data.Struct):
    """What follows opcode and tag in a request to run; loads and reads have ``first`` and ``count`` in place of ``m`` and ``n``."""

    m: 16
    n: 16
    kv: 16
    nvfp4: 1
    refine: 1
    reserved: 6


class OperandStore(wiring.Component):
    """Vectors that are written one by one and played from the first on; 1 per cycle, the first two cycles after ``play``.

    Members
    -------
    write : In(1)
    address : In(range(depth))
    entry : In(layout)
    play : In(1)
        Begin again with the first vector.
    count : In(range(depth + 1))
        Vectors to play, with ``play``.
    output : Out(stream of layout)
    """

    def __init__(self, layout: data.Layout, depth: int):
        self._layout, self._depth = layout, depth
        super().__init__(
            {
                "write": In(1),
                "address": In(range(depth)),
                "entry": In(layout),
                "play": In(1),
                "count": In(range(depth + 1)),
                "output": Out(stream.Signature(layout)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build the memory and its player."""
        m = Module()
        m.submodules.memory = memory = Memory(shape=self._layout, depth=self._depth, init=[])
        write, read = memory.write_port(), memory.read_port()
        at, left, step = Signal(range(self._depth)), Signal.like(self.count), Signal()
        m.d.comb += [
            write.en.eq(self.write),
            write.addr.eq(self.address),
            write.data.eq(self.entry),
            step.eq(~self.output.valid | self.output.ready),
            read.en.eq(step),
            read.addr.eq(at),
            self.output.payload.eq(read.data),
        ]
        with m.If(self.play):
            m.d.sync += [at.eq(0), left.eq(self.count)]
        with m.Elif(step):
            m.d.sync += self.output.valid.eq(left.any())
            with m.If(left.any()):
                m.d.sync += [at.eq(at + 1), left.eq(left - 1)]
        return m


class PeServer(wiring.Component):
    """Answers requests, one after the other, as :class:`model.uart_pe.BoardModel` does.

    Parameters
    ----------
    config : UartPeConfig

    Members
    -------
    request : In(stream of FrameByte)
    length : In(range(FRAME_BYTES))
        Bytes of the request, from its first byte on.
    fault : In(stream of 2 bits)
        Instead of a request: why a frame was thrown away.
    reply : Out(stream of FrameByte)
    busy : Out(1)
        A request is being answered.
    """

    def __init__(self, config: UartPeConfig):
        self._config = config
        super().__init__(
            {
                "request": In(stream.Signature(FrameByte)),
                "length": In(range(FRAME_BYTES)),
                "fault": In(stream.Signature(2)),
                "reply": Out(stream.Signature(FrameByte)),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Build processing element, stores, sums, and the states of a request."""
        m = Module()
        config = self._config
        m.submodules.pe = pe = Pe(config.pe)
        stores = {
            Opcode.WEIGHTS: OperandStore(weight_entry(config.vmac), config.vectors),
            Opcode.ACTIVATIONS: OperandStore(activation_entry(config.vmac), config.vectors),
        }
        m.submodules.weights, m.submodules.activations = weights, activations = stores.values()
        wiring.connect(m, weights.output, pe.weight)
        wiring.connect(m, activations.output, pe.activation)
        m.submodules.sums = sums = Memory(shape=64, depth=config.max_words, init=[])
        m.submodules.about = about = Memory(shape=8, depth=len(info(config)), init=info(config))
        sum_write, sum_read, about_read = sums.write_port(), sums.read_port(), about.read_port()

        # A request: opcode, tag, and what it says of itself.
        opcode, tag = Signal(8), Signal(8)
        arguments = Signal(RunRequest)
        first, count, size = arguments.m, arguments.n, len(arguments.as_value()) // 8
        length, at, over = Signal.like(self.length), Signal(range(LEAST_BYTES + size)), Signal()
        taken = self.request.valid & self.request.ready
        byte = self.request.payload.byte
        arguments_of = {
            Opcode.INFO: 0,
            Opcode.WEIGHTS: 4,
            Opcode.ACTIVATIONS: 4,
            Opcode.RUN: size,
            Opcode.SUMS: 4,
        }
        head, known = Signal(range(LEAST_BYTES + size + 1), init=LEAST_BYTES), Signal()
        body = Signal(range((1 << 16) * max(entry_bytes(config, code) for code in stores)))
        with m.Switch(opcode):
            for code, argument_bytes in arguments_of.items():
                with m.Case(code):
                    m.d.comb += [known.eq(1), head.eq(LEAST_BYTES + argument_bytes)]
                    if code in stores:
                        m.d.comb += body.eq(count * entry_bytes(config, code))

        # The tile that it asks for.
        command = pe.command.payload
        m.d.comb += [
            command.m.eq(arguments.m),
            command.n.eq(arguments.n),
            command.kv.eq(arguments.kv),
            command.mode_nvfp4.eq(arguments.nvfp4),
        ]
        fits = [(arguments[name] >> len(command[name])) == 0 for name in ("m", "n", "kv")]
        if config.refinement == "none":
            fits.append(~arguments.refine)
        else:
            m.d.comb += command.refine_en.eq(arguments.refine)
        refused = check_command(config.pe, command)[1] | ~Cat(*fits).all() | arguments.reserved.any()
        needs = [command.kv * command.n, command.kv * command.m]
        m.d.comb += [store.count.eq(need) for store, need in zip(stores.values(), needs, strict=True)]

        status = Signal(Status)
        runs, ends = opcode == Opcode.RUN, Signal(17)
        limit = Mux(opcode == Opcode.SUMS, config.max_words, config.vectors)
        beyond = Signal()
        m.d.comb += ends.eq(first + count)
        m.d.comb += beyond.eq(
            Mux(runs, Cat(need > config.vectors for need in needs).any(), ~count.any() | (ends > limit))
        )
        with m.If(~known):
            m.d.comb += status.eq(Status.OPCODE)
        with m.Elif(length != head + body):
            m.d.comb += status.eq(Status.LENGTH)
        with m.Elif(runs & refused):
            m.d.comb += status.eq(Status.REFUSED)
        with m.Elif((opcode != Opcode.INFO) & beyond):
            m.d.comb += status.eq(Status.RANGE)

        # Bytes of a vector come in at the top; it is stored with its last byte.
        longest = max(entry_bytes(config, code) for code in stores)
        before = Signal(8 * (longest - 1))
        place, part = Signal(range(config.vectors)), Signal(range(longest))
        fills = Signal()
        for code, store in stores.items():
            whole = Cat(before, byte)[-8 * entry_bytes(config, code) :]
            m.d.comb += [
                store.entry.as_value().eq(whole),
                store.address.eq(place),
                store.write.eq(fills & (opcode == code) & (part == entry_bytes(config, code) - 1)),
            ]
        with m.If(fills):
            m.d.sync += [before.eq(Cat(before, byte)[8:]), part.eq(part + 1)]
            with m.If(Cat(store.write for store in stores.values()).any()):
                m.d.sync += [part.eq(0), place.eq(place + 1)]

        # A reply: three bytes and up to five more from a register, or bytes of a memory behind them.
        reply, left = Signal(64), Signal(range(9))
        elapsed, results = Signal(32), Signal(range(config.max_words))
        from_info = Signal()
        address, stop = Signal(range(max(8 * config.max_words, len(info(config))) + 1)), Signal()
        following = Signal.like(address)
        last = Signal.like(address)
        m.d.comb += [
            following.eq(address + stop),
            about_read.addr.eq(following),
            sum_read.addr.eq(following[3:]),
            sum_write.addr.eq(results),
            sum_write.data.eq(pe.result.payload.psum),
            sum_write.en.eq(pe.result.valid),
            pe.result.ready.eq(1),
        ]
        sum_bytes = Array(sum_read.data.word_select(index, 8) for index in range(8))
        from_memory = from_info | (opcode == Opcode.SUMS)
        finished = pe.result.valid & pe.result.payload.last

        with m.FSM() as states:
            with m.State("IDLE"):
                m.d.sync += [length.eq(self.length), at.eq(0)]
                with m.If(self.fault.valid):
                    m.next = "FAULT"
                with m.Elif(self.request.valid):
                    m.next = "HEAD"
            with m.State("FAULT"):
                m.d.comb += self.fault.ready.eq(1)
                m.d.sync += [reply.eq(Cat(Const(0, 16), self.fault.payload)), left.eq(3), opcode.eq(0), from_info.eq(0)]
                m.next = "REPLY"
            with m.State("HEAD"):
                m.d.comb += self.request.ready.eq(1)
                with m.If(taken):
                    m.d.sync += [at.eq(at + 1), over.eq(self.request.payload.last)]
                    with m.Switch(at):
                        with m.Case(0):
                            m.d.sync += opcode.eq(byte)
                        with m.Case(1):
                            m.d.sync += tag.eq(byte)
                        for index in range(size):
                            with m.Case(LEAST_BYTES + index):
                                m.d.sync += arguments.as_value().word_select(index, 8).eq(byte)
                    with m.If(self.request.payload.last | (at.any() & (at == head - 1))):
                        m.next = "CHECK"
            with m.State("CHECK"):
                m.d.sync += [
                    reply.eq(Cat(opcode, tag, status)),
                    left.eq(3),
                    from_info.eq((opcode == Opcode.INFO) & (status == Status.OK)),
                    place.eq(first),
                    part.eq(0),
                    address.eq(Mux(opcode == Opcode.INFO, 0, first << 3)),
                    last.eq(Mux(opcode == Opcode.INFO, len(info(config)) - 1, (ends << 3) - 1)),
                ]
                with m.If(status != Status.OK):
                    m.d.sync += opcode.eq(Opcode.NONE)
                    m.next = "REPLY"
                    with m.If(~over):
                        m.next = "SKIP"
                with m.Elif(runs):
                    m.next = "RUN"
                with m.Elif(~over):
                    m.next = "LOAD"
                with m.Else():
                    m.next = "REPLY"
            with m.State("SKIP"):
                m.d.comb += self.request.ready.eq(1)
                with m.If(taken & self.request.payload.last):
                    m.next = "REPLY"
            with m.State("LOAD"):
                m.d.comb += [self.request.ready.eq(1), fills.eq(taken)]
                with m.If(taken & self.request.payload.last):
                    m.next = "REPLY"
            with m.State("RUN"):
                m.d.comb += [pe.clear.eq(1), *(store.play.eq(1) for store in stores.values())]
                m.d.sync += [elapsed.eq(0), results.eq(0)]
                m.next = "FETCH"
            with m.State("FETCH"):
                m.next = "START"
            with m.State("START"):
                # The first cycle in which command, weights and activations are offered.
                m.d.comb += pe.command.valid.eq(1)
                m.d.sync += elapsed.eq(elapsed + 1)
                m.next = "WAIT"
            with m.State("WAIT"):
                m.d.sync += elapsed.eq(elapsed + 1)
                with m.If(pe.result.valid):
                    m.d.sync += results.eq(results + 1)
                with m.If(finished):
                    m.d.sync += [
                        reply.eq(Cat(reply[:24], pe.status.as_value(), Const(0, 3), elapsed + 1)),
                        left.eq(8),
                    ]
                    m.next = "REPLY"
            with m.State("REPLY"):
                m.d.comb += [
                    self.reply.valid.eq(1),
                    self.reply.payload.byte.eq(reply[:8]),
                    self.reply.payload.last.eq((left == 1) & ~from_memory),
                ]
                with m.If(self.reply.ready):
                    m.d.sync += [reply.eq(reply >> 8), left.eq(left - 1)]
                    with m.If(left == 1):
                        m.next = "IDLE"
                        with m.If(from_memory):
                            m.next = "MEMORY"
            with m.State("MEMORY"):
                m.d.comb += [
                    self.reply.valid.eq(1),
                    self.reply.payload.byte.eq(Mux(from_info, about_read.data, sum_bytes[address[:3]])),
                    self.reply.payload.last.eq(address == last),
                    stop.eq(self.reply.ready),
                ]
                m.d.sync += address.eq(following)
                with m.If(self.reply.ready & (address == last)):
                    m.next = "IDLE"
        m.d.comb += self.busy.eq(~states.ongoing("IDLE"))
        return m


class UartPe(wiring.Component):
    """Processing element whose tiles come and go over a serial line.

    Parameters
    ----------
    config : UartPeConfig

    Members
    -------
    rx : In(1)
        From the host; high when idle.
    tx : Out(1)
        To the host.
    busy : Out(1)
        A request is being answered.
    """

    throughput: ClassVar[str] = "1 byte per 10 · divisor cycles in each direction; 1 vector per cycle while a tile runs"
    port_meanings: ClassVar[dict[str, str]] = {
        "rx": "serial line from the host, at any time; high when idle",
        "tx": "serial line to the host",
        "busy": "a request is being answered",
    }

    def __init__(self, config: UartPeConfig | None = None):
        self._config = config or UartPeConfig()
        super().__init__({"rx": In(1, init=1), "tx": Out(1, init=1), "busy": Out(1)})

    @property
    def config(self) -> UartPeConfig:
        """The configuration that this component was built with."""
        return self._config

    def elaborate(self, platform: object) -> Module:
        """Build the line, frames, and what answers them."""
        m = Module()
        m.submodules.receiver = receiver = UartReceiver(self._config.divisor)
        m.submodules.transmitter = transmitter = UartTransmitter(self._config.divisor)
        m.submodules.waiting = waiting = StreamFifo(8, WAITING)
        m.submodules.requests = requests = FrameReceiver(FRAME_BYTES, LEAST_BYTES)
        m.submodules.replies = replies = FrameSender()
        m.submodules.server = server = PeServer(self._config)
        # The line does not wait: a byte that finds no place is lost, and its frame with it.
        m.d.comb += [
            receiver.rx.eq(self.rx),
            waiting.input.payload.eq(receiver.byte.payload),
            waiting.input.valid.eq(receiver.byte.valid & waiting.input.ready),
            server.length.eq(requests.length),
            self.tx.eq(transmitter.tx),
            self.busy.eq(server.busy),
        ]
        wiring.connect(m, waiting.output, requests.input)
        wiring.connect(m, requests.frame, server.request)
        wiring.connect(m, requests.fault, server.fault)
        wiring.connect(m, server.reply, replies.frame)
        wiring.connect(m, replies.output, transmitter.byte)
        return m
