"""The DMA engines in the stream player, with a memory on their bus whose contents and errors are functions of the address; the model judges.

The memory is a subordinate of AXI4 that answers in order, and takes write data before their address if they come first. Rows say when a channel
may move. Every output of every row is judged: bursts, beats, strobes, words, how requests end, what stays while it waits, and how long it takes.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.dma import MAX_BYTES, PAGE, Burst, DmaConfig, DmaStatus, bursts, refused, words, write_beats
from sim.design import config_of, generated
from sim.mutation_player import judged
from sim.player import DEPTH_BITS, WORTH, Bus, Player, Script
from sim.scoreboard import Tally

__all__ = ["EnginePlayer", "memory_bus", "memory_bytes", "responses"]

DIRECTED_ROWS, LONG_ROWS = 4096, 16384
"""Portions from these lengths on have the directed sections, and the longest request."""
RESETS = 40
BATCH = 10
"""Requests of a random section."""
PROMPT = 2
"""Rows after an error in which a burst of the request can still come."""
JUST_REFUSED, JUST_TAKEN = 150, 60
"""Requests near the limits."""
CLOSED = 150
"""Rows for which a stream or channel that comes late does nothing."""
START_READ, START_WRITE = 4, 6
"""Rows from the first request to its first word or beat, and from the last to the end, in all."""
HIDING = 4
"""Bursts on their way that hide the latency of the memory here."""

_ERROR_SHARES = {5: 0b111, 6: 0b11111}
"""By the three bits below the highest of an address: a beat fails if these bits of its hash are 0."""
_STREAM_KINDS = ("never", "rarely", "often", "bursts", "behind valid")
_CHANNEL_KINDS = ("never", "rarely", "often", "mostly", "bursts", "behind valid")

_FUNCTIONS = """\
    function [31:0] mix(input [31:0] x);
        reg [31:0] t;
        begin
            t = x * 32'h9E3779B1;
            t = t ^ (t >> 15);
            t = t * 32'h85EBCA77;
            mix = t ^ (t >> 13);
        end
    endfunction
    function [31:0] fold(input [63:0] at);
        fold = at[31:0] ^ (at[63:32] * 32'h27D4EB2F);
    endfunction
    function [1:0] answer(input [63:0] at);
        reg [31:0] h;
        reg [2:0] region;
        begin
            h = mix(fold(at) ^ 32'hA5A5A5A5);
            region = at[REGION+2:REGION];
            answer = {(region == 3'd5 & h[2:0] == 3'd0) | (region == 3'd6 & h[4:0] == 5'd0), h[8]};
        end
    endfunction
"""
_ADDRESSES = """\
    reg A__waited;
    reg [63:0] A__at [0:255];
    reg [7:0] A__beats [0:255];
    reg [7:0] A__in, A__out;
    assign m_axi_Aready = A__go & (~A__behind | A__waited);
    always @(posedge clk) begin
        A__waited <= ~rst & m_axi_Avalid & ~m_axi_Aready;
        if (rst) A__in <= 0;
        else if (m_axi_Avalid & m_axi_Aready) begin
            A__at[A__in] <= m_axi_Aaddr;
            A__beats[A__in] <= m_axi_Alen;
            A__in <= A__in + 1'b1;
        end
    end
"""
_READ = """\
    reg [7:0] r__beat;
    reg r__offered;
    wire [63:0] r__at = ar__at[ar__out] + ({56'd0, r__beat} << LANE);
    wire [WIDTH-1:0] r__data;
    assign m_axi_rid = 0;
    assign m_axi_rvalid = ~rst & (r__offered | (r__go & ar__in != ar__out));
    assign m_axi_rlast = m_axi_rvalid ? r__beat == ar__beats[ar__out] : r__junk[0];
    assign m_axi_rresp = m_axi_rvalid ? answer(r__at) : r__junk[2:1];
    assign m_axi_rdata = m_axi_rvalid ? r__data : ~r__data;
    always @(posedge clk) if (rst) begin
        ar__out <= 0; r__beat <= 0; r__offered <= 0;
    end else begin
        r__offered <= m_axi_rvalid & ~m_axi_rready;
        if (m_axi_rvalid & m_axi_rready) begin
            r__beat <= m_axi_rlast ? 8'd0 : r__beat + 1'b1;
            if (m_axi_rlast) ar__out <= ar__out + 1'b1;
        end
    end
"""
_WRITE = """\
    reg w__waited, b__offered;
    reg [7:0] w__ends;
    assign m_axi_wready = w__go & (~w__behind | w__waited);
    assign m_axi_bid = 0;
    assign m_axi_bvalid = ~rst & (b__offered | (b__go & aw__in != aw__out & w__ends != aw__out));
    assign m_axi_bresp = m_axi_bvalid ? answer(aw__at[aw__out]) : b__junk;
    always @(posedge clk) begin
        w__waited <= ~rst & m_axi_wvalid & ~m_axi_wready;
        if (rst) begin
            aw__out <= 0; w__ends <= 0; b__offered <= 0;
        end else begin
            b__offered <= m_axi_bvalid & ~m_axi_bready;
            if (m_axi_wvalid & m_axi_wready & m_axi_wlast) w__ends <= w__ends + 1'b1;
            if (m_axi_bvalid & m_axi_bready) aw__out <= aw__out + 1'b1;
        end
    end
"""


def memory_bus(config: DmaConfig, write: bool) -> Bus:
    """Return the memory behind an engine."""
    lane = config.beat_bytes.bit_length() - 1
    text = _FUNCTIONS.replace("REGION", str(config.address_width - 4))
    if write:
        channels = {"aw__go": 1, "aw__behind": 1, "w__go": 1, "w__behind": 1, "b__go": 1, "b__junk": 2}
        driven = ("awready", "wready", "bid", "bresp", "bvalid")
        return Bus(text + _ADDRESSES.replace("A__", "aw__").replace("_A", "_aw") + _WRITE, channels, _bus_pins(driven))
    read = _READ.replace("LANE", str(lane)).replace("WIDTH", str(config.data_width))
    for part in range(config.data_width // 32):
        read += f"    assign r__data[{32 * part + 31}:{32 * part}] = mix(fold(r__at) ^ 32'd{part});\n"
    channels = {"ar__go": 1, "ar__behind": 1, "r__go": 1, "r__junk": 3}
    read = text + _ADDRESSES.replace("A__", "ar__").replace("_A", "_ar") + read
    return Bus(read, channels, _bus_pins(("arready", "rid", "rresp", "rdata", "rlast", "rvalid")))


def _bus_pins(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"m_axi_{name}" for name in names)


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    t = x * np.uint32(0x9E3779B1)
    t = t ^ (t >> np.uint32(15))
    t = t * np.uint32(0x85EBCA77)
    return t ^ (t >> np.uint32(13))


def _fold(beats: NDArray[np.uint64]) -> NDArray[np.uint32]:
    high = (beats >> np.uint64(32)).astype(np.uint32)
    return beats.astype(np.uint32) ^ high * np.uint32(0x27D4EB2F)


def memory_bytes(config: DmaConfig, address: int, size: int) -> bytes:
    """Return what the memory behind ``read_dma`` holds."""
    start = address // config.beat_bytes * config.beat_bytes
    beats = np.arange(start, address + size, config.beat_bytes, dtype=np.uint64)
    parts = np.arange(config.data_width // 32, dtype=np.uint32)
    data = _mix(_fold(beats)[:, None] ^ parts).astype("<u4").tobytes()
    return data[address - start : address - start + size]


def responses(config: DmaConfig, addresses: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Return the response of each beat, or of bursts that begin at these addresses."""
    h = _mix(_fold(addresses) ^ np.uint32(0xA5A5A5A5))
    region = (addresses >> np.uint64(config.address_width - 4)) & np.uint64(7)
    fails = np.zeros(len(addresses), bool)
    for number, bits in _ERROR_SHARES.items():
        fails |= (region == number) & (h & np.uint32(bits) == 0)
    return (2 * fails + (h >> np.uint32(8) & np.uint32(1))).astype(np.uint8)


@dataclasses.dataclass
class Request:
    """A request and what it must give.

    Attributes
    ----------
    address, size : int
    bursts : list of Burst
        All of them; none if it is refused.
    failing : int or None
        The burst whose response ends it.
    code : DmaStatus
    words : ndarray of uint8, shape (words, bytes)
        Those that it gives, or takes.
    data, strobes : ndarray of uint8, shape (beats, bytes)
        Of a write, beat by beat; strobes as bits.
    lasts : ndarray of bool
    """

    address: int
    size: int
    bursts: list[Burst]
    failing: int | None
    code: DmaStatus
    words: NDArray[np.uint8]
    data: NDArray[np.uint8]
    strobes: NDArray[np.uint8]
    lasts: NDArray[np.bool_]


def _octets(numbers: Sequence[int], size: int) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(n.to_bytes(size, "little") for n in numbers), np.uint8).reshape(len(numbers), size)


def _request(config: DmaConfig, write: bool, address: int, size: int, rng: np.random.Generator) -> Request:
    """Work out a request with the model."""
    width = config.beat_bytes
    none = np.zeros((0, width), np.uint8)
    nothing = none, none, np.zeros((0, -(-width // 8)), np.uint8), np.zeros(0, bool)
    if refused(config, address, size):
        return Request(address, size, [], None, DmaStatus.REFUSED, *nothing)
    found = bursts(config, address, size)
    if write:
        data = rng.bytes(size)
        beats = list(write_beats(config, address, data))
        answers = responses(config, np.array([burst.address for burst in found], np.uint64))
        bad = np.flatnonzero(answers & 2)
        failing = int(bad[0]) if len(bad) else None
        code = DmaStatus.OK if failing is None else DmaStatus(int(answers[failing]))
        taken = np.frombuffer(rng.bytes(-(-size // width) * width), np.uint8).copy()
        # What is behind the last byte must not matter.
        taken[:size] = np.frombuffer(data, np.uint8)
        strobes = _octets([beat.strobe for beat in beats], -(-width // 8))
        lasts = np.array([beat.last for beat in beats])
        return Request(
            address, size, found, failing, code,
            taken.reshape(-1, width), _octets([beat.data for beat in beats], width), strobes, lasts,
        )  # fmt: skip
    start = found[0].address
    answers = responses(config, np.arange(start, address + size, width, dtype=np.uint64))
    bad = np.flatnonzero(answers & 2)
    given = _octets(words(config, memory_bytes(config, address, size)), width).copy()
    failing, code = None, DmaStatus.OK
    if len(bad):
        at = start + int(bad[0]) * width
        given[max(at - address, 0) // width :] = 0
        failing = next(n for n, burst in enumerate(found) if at < burst.address + burst.beats * width)
        code = DmaStatus(int(answers[bad[0]]))
    return Request(address, size, found, failing, code, given, *nothing[1:])


@dataclasses.dataclass
class Section:
    """A stretch of rows behind a reset.

    Attributes
    ----------
    first, rows : int
    requests : list of Request
    complete : bool
        All of them are done at its end.
    prompt : bool
        Nothing stalls, so bursts end at once behind an error.
    takes : int or None
        Rows from the first request to the last end.
    """

    first: int
    rows: int
    requests: list[Request]
    complete: bool = True
    prompt: bool = False
    takes: int | None = None


@dataclasses.dataclass
class Stimulus:
    """Sections, and outputs that were right; the same again are right again."""

    sections: list[Section]
    passed: Mapping[str, NDArray[Any]] | None = None


class _WrongError(Exception):
    """The engine did something wrong."""


class _Writer:
    """Writes sections."""

    def __init__(self, config: DmaConfig, write: bool, widths: Mapping[str, int], rng: np.random.Generator) -> None:
        self.config = config
        self.write = write
        self.rng = rng
        self.random = random.Random(int(rng.integers(1 << 62)))
        self.script = Script(widths, rng)
        self.sections: list[Section] = []
        self.inputs = ("request", "word") if write else ("request",)
        self.movers = tuple(name.removesuffix("__go") for name in widths if name.endswith("__go"))
        self._behind = {name for name in self.movers if f"{name}__behind" in widths}

    def request(self, address: int, size: int) -> Request:
        """Work out a request."""
        return _request(self.config, self.write, address, size, self.rng)

    def base(self, region: int | None = None) -> int:
        """Draw an address of the first byte of a block of pages: in a region with errors or without, or near the end of the space."""
        width = self.config.address_width
        region = self.random.choice([*range(8), 5, 6]) if region is None else region
        top = self.random.randrange(2)
        return (top << 3 | region) << width - 4 | self.random.randrange(1 << width - 4) & -4 * PAGE

    def draw(self) -> Request:
        """Draw a request like those of the cocotb bench."""
        config, rng = self.config, self.random
        space = 1 << config.address_width
        size = rng.choice([rng.randrange(1, 2 * config.beat_bytes), rng.randrange(1, 40 * config.beat_bytes)])
        address = self.base() + rng.randrange(PAGE)
        match rng.randrange(10):
            case 0 | 1 | 2:
                address = (address | PAGE - 1) + 1 - rng.randrange(size + 1)
            case 3 | 4:
                address &= -config.beat_bytes
            case 5:
                address = space - size - rng.choice([0, 0, rng.randrange(64)])
            case 6:
                # Refused, most of them only just.
                odd = MAX_BYTES + 1 + rng.choice([0, rng.randrange(MAX_BYTES - 1)])
                size, address = rng.choice([(0, address), (odd, address), (size, space - rng.randrange(size))])
        address = min(max(address, 0), space - 1)
        return self.request(address, size)

    def play(
        self,
        requests: Sequence[Request],
        kinds: Mapping[str, str] | None = None,
        rows: int | None = None,
        closed: Mapping[str, int] | None = None,
        **known: Any,
    ) -> None:
        """Write a reset and a section; the parameters are those of `sim.mutation_pe`."""
        kinds = {**dict.fromkeys(self.movers, "never"), **(kinds or {})}
        closed = closed or {}
        moved = self.random.randint(1, 3)
        go = {f"{name}__go": self.rng.integers(0, 2, moved) for name in self.movers}
        self.script.add(moved, rst=1, **go)
        given = [int.from_bytes(row.tobytes(), "little") for request in requests for row in request.words]
        queued = {"request": [request.address | request.size << self.config.address_width for request in requests]}
        if self.write:
            queued["word"] = given
        beats = sum(burst.beats for request in requests for burst in request.bursts)
        issued = sum(len(request.bursts) for request in requests)
        hidden = sum(max(burst.beats, 8) for request in requests for burst in request.bursts)
        counts = {"request": len(requests), "done": len(requests), "word": len(given), "r": beats, "w": beats}
        counts |= {"ar": issued, "aw": issued, "b": issued}
        if rows is None:
            stalled = sum(int(counts[name] * WORTH[kind]) for name, kind in kinds.items() if kind != "never")
            rows = 60 + 50 * ("bursts" in kinds.values()) + 60 * ("mostly" in kinds.values())
            # Short bursts and errors show the latency.
            failing = sum(request.failing is not None for request in requests)
            rows += hidden if not (stalled or failing) else beats + 8 * issued
            rows += failing * self.config.outstanding * self.config.block_beats
            rows += 4 * len(requests) + stalled + stalled // 8 + max([0, *closed.values()])
        columns: dict[str, Any] = {}
        for name, kind in kinds.items():
            allowed = self.script.stalls(kind, rows)
            allowed[: closed.get(name, 0)] = False
            columns[f"{name}__go"] = allowed
            if name in self._behind:
                columns[f"{name}__behind"] = kind == "behind valid"
        section = Section(self.script.length, rows, list(requests), **known)
        self.script.add(rows, **columns, **{name: listed[:rows] for name, listed in queued.items()})
        self.sections.append(section)

    # Sections.

    def kinds(self) -> dict[str, str]:
        """Draw how each stream and channel stalls."""
        return {
            name: self.random.choice(_STREAM_KINDS if name in ("request", "word", "done") else _CHANNEL_KINDS)
            for name in self.movers
        }

    def random_requests(self) -> None:
        """Good, failing and refused requests, every stream and channel stalling in a way of its own."""
        self.play([self.draw() for _ in range(BATCH)], self.kinds())

    def unhindered(self) -> None:
        """Long requests without stalls, to the cycle."""
        width = self.config.beat_bytes
        size = 3 * self.config.block_beats * width
        requests = []
        for n in range(4):
            offset = 0 if n % 2 else self.random.randrange(1, width)
            address = self.base(0) + self.random.randrange(4) * width + offset
            requests.append(self.request(address, size + self.random.randrange(size)))
        if self.config.outstanding < HIDING:
            self.play(requests)
        elif self.write:
            beats = sum(burst.beats for request in requests for burst in request.bursts)
            self.play(requests, takes=beats + START_WRITE)
        else:
            given = sum(len(request.words) + (request.address % width != 0) for request in requests)
            self.play(requests, takes=given + START_READ)

    def late(self) -> None:
        """Each stream and channel comes late, with requests of single beats, of many, and with refused ones."""
        width = self.config.beat_bytes
        for name in self.movers:
            short = [self.request(self.base(0) + self.random.randrange(PAGE), 1 + n % 3) for n in range(24)]
            long = [self.request(self.base(0) + 3, 40 * width) for _ in range(3)]
            mixed = [self.draw() for _ in range(12)]
            bad = [self.request(0, 0) for _ in range(16)]
            for requests in (short, long, mixed, bad):
                self.play(requests, closed={name: CLOSED})

    def failing(self) -> None:
        """Play requests of so many bursts that it shows whether they stop behind an error, between short ones."""
        for region in (5, 6, 5, 6):
            for kinds in ({}, self.kinds(), self.kinds()):
                many = []
                for _ in range(4):
                    few = range(self.random.randrange(4) if kinds else 0)
                    many += [self.request(self.base(0) + self.random.randrange(PAGE), 1) for _ in few]
                    many.append(self.long_failing(region))
                self.play(many, kinds, prompt=not kinds)

    def short_failing(self) -> None:
        """Play requests of a beat or two of which some fail, and whose ends come late."""
        for closed in ({"done": CLOSED}, {}, {}):
            few = [self.request(self.base(5) + self.random.randrange(PAGE), 1 + n % 20) for n in range(60)]
            self.play(few, {} if closed else {"done": self.random.choice(["often", "bursts"])}, closed=closed)

    def long_failing(self, region: int) -> Request:
        """Draw a request of many bursts in a region with errors."""
        size = 5 * (self.config.outstanding + 2) * self.config.block_beats * self.config.beat_bytes
        return self.request(self.base(region) + self.random.randrange(PAGE), self.random.randint(size // 4, size))

    def resets(self) -> None:
        """Reset after every number of cycles; afterwards it is as new."""
        width = self.config.beat_bytes
        for distance in range(RESETS):
            requests = [self.draw() for _ in range(BATCH)]
            self.play(requests, self.kinds() if distance % 2 else None, rows=distance + 1, complete=False)
            self.play([self.draw(), self.long_failing(5), self.draw()])
            many = [self.request(self.base(0) + self.random.randrange(PAGE), 80 * width) for _ in range(4)]
            self.play(many, self.kinds(), rows=self.random.randrange(20, 200), complete=False)
            if distance % 8:
                self.play([self.long_failing(5), self.draw()])
            else:
                self.unhindered()

    def limits(self) -> None:
        """Refused requests of all sizes, most of them only just, and others near the end of the address space."""
        config, rng = self.config, self.random
        space = 1 << config.address_width
        bad = []
        for _ in range(JUST_REFUSED):
            size = rng.randrange(2, 1 << rng.randrange(2, MAX_BYTES.bit_length()))
            beyond = rng.choice([1, 1, rng.randrange(1, size)])
            bad.append((space - size + beyond, size))
            bad.append((rng.randrange(space), rng.choice([0, MAX_BYTES + 1 + rng.randrange(1 << rng.randrange(20))])))
        self.play([self.request(address, min(size, 2 * MAX_BYTES - 1)) for address, size in bad])
        good = []
        for _ in range(JUST_TAKEN):
            size = rng.randrange(1, 1 << rng.randrange(1, 12))
            address = space - size
            for _ in range(rng.randrange(5)):
                address &= ~(1 << rng.randrange(config.address_width))
            good.append((address, size))
        for shift in range(PAGE.bit_length() - 1, config.address_width):
            # Over the end of a block of every size.
            end = (self.base(0) >> shift | 1) << shift
            good.append((end - rng.randrange(1, 8 * config.beat_bytes), 16 * config.beat_bytes))
        self.play([self.request(address, size) for address, size in good])

    def every_offset(self) -> None:
        """Every offset of the first byte with every place of the last."""
        width = self.config.beat_bytes
        places = [(offset, tail) for offset in range(width) for tail in range(1, width + 1)]
        self.random.shuffle(places)
        for start in range(0, len(places), 32):
            requests = [
                self.request(self.base(0) + offset, tail + width * self.random.randrange(3))
                for offset, tail in places[start : start + 32]
            ]
            self.play(requests)

    def longest(self) -> None:
        """2^20 bytes from an odd address, more than half of that for every place in the queue, and a short request behind.

        Engines that do not hide the latency would have to be sent their words more slowly.
        """
        if self.config.outstanding < HIDING:
            return
        address = self.base(0) + 13
        places = range(self.config.outstanding)
        more = [self.request(address + n, MAX_BYTES // 2 + 1 + n * self.config.beat_bytes) for n in places]
        self.play([self.request(address, MAX_BYTES), *more, self.request(address, 5)])

    def longer(self) -> None:
        """Sizes of every order of magnitude."""
        # The words of three fit the player's queue.
        most = min(MAX_BYTES, self.config.beat_bytes << DEPTH_BITS).bit_length() - 3
        for shift in range(most):
            self.play(
                [self.request(self.base(0) + self.random.randrange(PAGE), (1 << shift) + 1 + n) for n in range(3)]
            )


class EnginePlayer:
    """A DMA engine in the stream player, with what `sim.regress.Bench` has for blocks that take a vector in every cycle.

    Parameters
    ----------
    block : {"read_dma", "write_dma"}
    parameters : mapping
        Of the engine; its addresses have at least 18 bits.
    verilog : str, optional
        Another implementation.
    simulator, optimise, plusargs
        As for `sim.player.Player`.
    """

    def __init__(
        self,
        block: str,
        parameters: Mapping[str, Any],
        verilog: str | None = None,
        simulator: str = "verilator",
        optimise: str = "-O1",
        plusargs: Mapping[str, int] | None = None,
    ) -> None:
        design = generated(block, **parameters)
        self.config: DmaConfig = config_of(block, **parameters)
        self.write = block == "write_dma"
        self.player = Player(
            design.sidecar,
            design.verilog if verilog is None else verilog,
            memory_bus(self.config, self.write),
            simulator,
            optimise,
            plusargs,
        )
        self.harness = self.player.harness

    def stimuli(self, rows: int, rng: np.random.Generator) -> tuple[Stimulus, NDArray[np.uint8]]:
        """Write at least so many rows: the stimulus, for `check`, and the harness's file."""
        writer = _Writer(self.config, self.write, self.player.widths, rng)
        parts: list[Callable[[], None]] = []
        if rows >= DIRECTED_ROWS:
            parts += [writer.late, writer.failing, writer.resets, writer.every_offset, writer.limits]
        if rows >= LONG_ROWS:
            parts += [writer.longer, writer.longest]
        if rows >= DIRECTED_ROWS:
            parts += [writer.short_failing]
        for part in (*parts, writer.unhindered, writer.random_requests):
            part()
        while writer.script.length < rows:
            writer.random_requests()
        # What is on its way at the end must still come.
        return Stimulus(writer.sections), self.harness.pack(writer.script.columns())

    def check(self, stimulus: Stimulus, outputs: Mapping[str, NDArray[Any]]) -> Tally:
        """Judge the harness's outputs for a stimulus of `stimuli`."""
        expected = {"requests": sum(len(section.requests) for section in stimulus.sections if section.complete)}

        def judge() -> str:
            try:
                _Judge(self.config, self.write, self.player.recorded, outputs).judge(stimulus)
            except _WrongError as wrong:
                return str(wrong)
            return ""

        return judged(stimulus, outputs, expected, judge)


@dataclasses.dataclass
class _Moves:
    """What moved on a stream or channel in a section: rows, and fields by name."""

    rows: NDArray[np.intp]
    fields: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.rows)


class _Judge:
    """Judges outputs.

    Parameters
    ----------
    config : DmaConfig
    write : bool
    widths : mapping of str to int
        Of the recorded ports.
    outputs : mapping of str to ndarray
    """

    def __init__(
        self, config: DmaConfig, write: bool, widths: Mapping[str, int], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        self.config = config
        self.write = write
        self._widths = widths
        self._outputs = outputs
        self._most = 0
        address = "aw" if write else "ar"
        shape = ("id", "addr", "len", "size", "burst", "lock", "cache", "prot", "qos")
        self.address = f"m_axi_{address}"
        # The channels, whether the engine drives them, and their fields.
        channels: dict[str, tuple[bool, tuple[str, ...]]] = {self.address: (True, shape)}
        if write:
            channels |= {"m_axi_w": (True, ("data", "strb", "last")), "m_axi_b": (False, ("resp",))}
        else:
            channels |= {"m_axi_r": (False, ("resp", "last"))}
        self._channels = {
            name: (drives, {field: f"{name}{field}" for field in fields}, f"{name}valid", f"{name}ready")
            for name, (drives, fields) in channels.items()
        }
        for name, drives in (("request", False), ("word", not write), ("done", True)):
            pins = {"payload": f"{name}__payload"}
            self._channels[name] = (drives, pins, f"{name}__valid", f"{name}__ready")

    def judge(self, stimulus: Stimulus) -> None:
        """Judge all sections."""
        if any(flags.any() for name, flags in self._outputs.items() if name.endswith("__x")):
            raise _WrongError("unknown bits")
        for section in stimulus.sections:
            moves = {name: self._moves(section, name) for name in self._channels}
            try:
                self._shapes(moves[self.address])
                self._in_flight(section, moves)
                self._requests(section, moves)
            except _WrongError as wrong:
                raise _WrongError(f"rows {section.first} to {section.first + section.rows}: {wrong}") from None
        if self._most != self.config.outstanding:
            raise _WrongError(f"never more than {self._most} bursts were on their way")

    def _moves(self, section: Section, name: str) -> _Moves:
        """Return what moved, after a look at what waited."""
        drives, fields, valid_name, ready_name = self._channels[name]
        rows = slice(section.first, section.first + section.rows)
        valid, ready = (self._outputs[pin][rows].astype(bool) for pin in (valid_name, ready_name))
        columns = {field: self._outputs[pin][rows] for field, pin in fields.items()}
        if drives:
            waits = np.flatnonzero(valid[:-1] & ~ready[:-1])
            if not valid[waits + 1].all():
                raise _WrongError(f"row {section.first + waits[~valid[waits + 1]][0]}: {name} went away")
            for field, column in columns.items():
                if not np.array_equal(column[waits], column[waits + 1]):
                    raise _WrongError(f"{name} {field} changed while it waited, from row {section.first} on")
        at = np.flatnonzero(valid & ready)
        return _Moves(at, {field: column[at] for field, column in columns.items()})

    def _bytes(self, column: NDArray[Any], size: int) -> NDArray[np.uint8]:
        """Bytes of a field, whatever its width."""
        if column.ndim == 2:
            return column[:, :size]
        return np.ascontiguousarray(column.astype("<u8")).view(np.uint8).reshape(-1, 8)[:, :size]

    def _shapes(self, moves: _Moves) -> None:
        size = self.config.beat_bytes.bit_length() - 1
        constants = {"id": 0, "size": size, "burst": 1, "lock": 0, "cache": 3, "prot": 0, "qos": 0}
        for field, value in constants.items():
            if (moves.fields[field] != value).any():
                raise _WrongError(f"{field} of an address is not {value}")

    def _in_flight(self, section: Section, moves: Mapping[str, _Moves]) -> None:
        """Never more bursts than allowed, and write data not before their address waits."""
        change = np.zeros(section.rows + 1, int)
        np.add.at(change, moves[self.address].rows + 1, 1)
        answers = moves["m_axi_b" if self.write else "m_axi_r"]
        ends = answers.rows if self.write else answers.rows[answers.fields["last"] == 1]
        np.subtract.at(change, ends + 1, 1)
        most = int(change.cumsum().max())
        if most > self.config.outstanding:
            raise _WrongError(f"{most} bursts on their way")
        self._most = max(self._most, most)
        if self.write:
            taken = np.zeros(section.rows, int)
            taken[moves[self.address].rows] = 1
            rows = slice(section.first, section.first + section.rows)
            # Two addresses can wait, of which one is seen.
            offers = np.concatenate([[0], taken.cumsum()[:-1]]) + 2 * self._outputs[f"{self.address}valid"][
                rows
            ].astype(int)
            last = np.zeros(section.rows, int)
            last[moves["m_axi_w"].rows] = moves["m_axi_w"].fields["last"]
            begun = np.concatenate([[0], last.cumsum()[:-1]]) + self._outputs["m_axi_wvalid"][rows].astype(int)
            if (begun > offers).any():
                raise _WrongError("write data without a burst")

    def _requests(self, section: Section, moves: Mapping[str, _Moves]) -> None:
        """Go through the requests, and demand that nothing is left."""
        taken, words, done, issued = moves["request"], moves["word"], moves["done"], moves[self.address]
        beats, answers = moves["m_axi_w" if self.write else "m_axi_r"], moves["m_axi_b" if self.write else "m_axi_r"]
        answered = answers.rows if self.write else answers.rows[answers.fields["last"] == 1]
        size = self.config.beat_bytes
        at_burst = at_word = at_beat = 0
        addresses, lengths = issued.fields["addr"], issued.fields["len"]
        for number, request in enumerate(section.requests):
            known = number < len(taken)
            count, left = 0, len(issued) - at_burst
            while count < min(len(request.bursts), left) and request.bursts[count] == (
                int(addresses[at_burst + count]),
                int(lengths[at_burst + count]) + 1,
            ):
                count += 1
            ended = number < len(done)
            sure = len(request.bursts) if request.failing is None else request.failing + 1
            if ended and count < sure:
                raise _WrongError(f"request {number} ended with {count} bursts of {sure}")
            if count > min(len(request.bursts), sure + self.config.outstanding + 2):
                raise _WrongError(f"request {number} went on for {count} bursts although {sure} is wrong")
            if count and (not known or issued.rows[at_burst] <= taken.rows[number]):
                raise _WrongError(f"a burst of request {number} before the request")
            if ended:
                if done.fields["payload"][number] != request.code:
                    raise _WrongError(
                        f"request {number} ended with {done.fields['payload'][number]}, not {request.code}"
                    )
                if not known or done.rows[number] <= taken.rows[number]:
                    raise _WrongError(f"request {number} ended before it began")
                if at_burst + count > len(answered) or (count and done.rows[number] <= answered[at_burst + count - 1]):
                    raise _WrongError(f"request {number} ended before its last response")
                if section.prompt and request.failing is not None:
                    index = at_burst + request.failing
                    wrong = answers.rows[np.flatnonzero(answers.fields["resp"] & 2)]
                    first = wrong[np.searchsorted(wrong, answered[index - 1] + 1 if index else 0)]
                    if issued.rows[at_burst + count - 1] > first + PROMPT:
                        raise _WrongError(f"bursts of request {number} went on after an error")
            if self.write:
                # Data of two more may have come before their addresses, when a reset ends it all.
                more = 0 if section.complete or (request.failing is not None and count > request.failing) else 2
                many = sum(burst.beats for burst in request.bursts[: count + more])
                found = slice(at_beat, at_beat + many)
                got = self._bytes(beats.fields["data"][found], size)
                if not np.array_equal(got, request.data[: len(got)]):
                    raise _WrongError(f"data of request {number}")
                strobes = self._bytes(beats.fields["strb"][found], -(-size // 8))
                if not np.array_equal(strobes, request.strobes[: len(got)]):
                    raise _WrongError(f"strobes of request {number}")
                if not np.array_equal(beats.fields["last"][found], request.lasts[: len(got)]):
                    raise _WrongError(f"last beats of request {number}")
                if ended and len(got) != many:
                    raise _WrongError(f"request {number} ended with {len(got)} beats of {many}")
                at_beat += len(got)
                at_word += len(request.words)
            else:
                found = slice(at_word, at_word + len(request.words))
                column = words.fields["payload"][found]
                got = self._bytes(column, size)
                if not np.array_equal(got, request.words[: len(got)]):
                    raise _WrongError(f"words of request {number}")
                lasts = self._bytes(column, size + 1)[:, size] & 1
                if not np.array_equal(lasts, np.arange(1, len(got) + 1) == len(request.words)):
                    raise _WrongError(f"last word of request {number}")
                at_word += len(got)
                if section.complete and len(got) != len(request.words):
                    raise _WrongError(f"request {number} has {len(got)} words of {len(request.words)}")
            at_burst += count
            if not ended and section.complete:
                raise _WrongError(f"request {number} did not end")
        if len(done) > len(section.requests) or at_burst != len(issued):
            raise _WrongError(f"{len(issued)} bursts and {len(done)} ends, more than there are requests for")
        if len(words) > at_word or (section.complete and len(words) < at_word):
            raise _WrongError(f"{len(words)} words moved, not {at_word}")
        failing = any(request.failing is not None for request in section.requests)
        if self.write and len(beats) != at_beat and (section.complete or not failing):
            raise _WrongError(f"{len(beats)} beats moved, not {at_beat}")
        if section.complete and len(answered) != at_burst:
            raise _WrongError("a response was not taken")
        if section.takes is not None and done.rows[-1] - taken.rows[0] != section.takes:
            raise _WrongError(f"{done.rows[-1] - taken.rows[0]} rows instead of {section.takes}")
