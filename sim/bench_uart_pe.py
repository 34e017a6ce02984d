"""cocotb bench of the processing element behind a serial line: its host over the pins, random requests and noise against the golden model, line faults."""

import dataclasses
import json
import os
import random
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cocotb
import numpy as np
from cocotb.task import bridge, resume
from cocotb.triggers import ClockCycles, Timer
from cocotbext.uart import UartSink, UartSource

from model.frames import END, ESC, Decoder, encode
from model.uart_pe import FRAME_BYTES, BoardModel, Opcode, Status, UartPeConfig, entry_bytes, request_bytes
from sim.bench_common import PERIOD_NS, bench_settings, start_clock
from sim.tiles import MODES, draw_tile, entry_words
from sim.uart_pe import COMPARE, Board, Compared, compare

QUIET = 30
"""Byte times without a byte after which nothing more is expected, a tile's time aside."""


class Bench:
    """A board and the two ends of its line; the transport of a host in a thread.

    Attributes
    ----------
    model : BoardModel
    """

    def __init__(self, dut: Any) -> None:
        self.dut = dut
        self.settings = bench_settings()
        self.config = UartPeConfig(**self.settings["parameters"])
        self.model = BoardModel(self.config)
        self.random = random.Random(cocotb.RANDOM_SEED)
        self.bit_ns = PERIOD_NS * self.config.divisor
        self.source, self.sink = (
            kind(pin, baud=round(1e9 / self.bit_ns)) for kind, pin in ((UartSource, dut.rx), (UartSink, dut.tx))
        )
        for end in (self.source, self.sink):
            end.log.setLevel("WARNING")
        self.compared = 0

    async def start(self) -> None:
        """Start the clock and reset."""
        self.dut.rst.value, self.dut.rx.value = 1, 1
        start_clock(self.dut)
        await ClockCycles(self.dut.clk, 8)
        self.dut.rst.value = 0
        await ClockCycles(self.dut.clk, 8)

    async def send(self, octets: bytes) -> None:
        """Send bytes, and wait until they are on the line."""
        # Off the clock's edges, so that no simulator has a choice.
        await Timer(PERIOD_NS // 3, "ns")
        await self.source.write(octets)
        await self.source.wait()

    async def receive(self, cycles: int = 0) -> bytes:
        """Return what comes until the line is quiet, cycles of a tile aside."""
        received = b""
        wait = QUIET * 10 * self.bit_ns + cycles * PERIOD_NS
        while True:
            await self.sink.wait(wait, "ns")
            if self.sink.empty():
                return received
            received += bytes(self.sink.read_nowait())

    def write(self, octets: bytes) -> None:
        """Send bytes, from the host's thread."""
        resume(self.send)(octets)

    def read(self) -> bytes:
        """Return what comes, to the host's thread."""
        return resume(self.receive)(20_000)

    async def check(self, octets: bytes, cycles: int = 0) -> bytes:
        """Send bytes to the board, which may take so long, and to the model, and compare what they say; returns it."""
        expected = self.model.receive(octets)
        await self.send(octets)
        received = await self.receive(cycles or self.config.vectors * self.config.max_m)
        assert received == expected, (
            f"{octets[:60].hex(' ')}: the reply is {received.hex(' ')}, not {expected.hex(' ')}"
        )
        self.compared += len(received)
        return received


@cocotb.test(timeout_time=1, timeout_unit="sec")
async def real_product(dut: Any) -> None:
    """Run a product of SmolLM2-135M in every mode, by the host that boards have."""
    bench = Bench(dut)
    await bench.start()

    def host() -> list[Compared]:
        board = Board(bench)
        assert board.config == bench.config
        rows = list(compare(board, **json.loads(os.environ[COMPARE])))
        assert board.retries == 0
        return rows

    rows = await bridge(host)()
    Path(bench.settings["report"]).write_text(json.dumps([dataclasses.asdict(row) for row in rows]), encoding="utf-8")
    assert all(row.right for row in rows)
    assert [row.mode for row in rows] == ["AutoFP2", "NVFP4", "AutoFP6"][
        : 2 if bench.config.refinement == "none" else 3
    ]


def draw_vectors(bench: Bench, opcode: Opcode, count: int) -> bytes:
    """Return vectors for a store. Weights are NVFP4 weights, which every mode takes, with records of any kind."""
    config, weights = bench.config, opcode == Opcode.WEIGHTS
    rng = np.random.default_rng(bench.random.getrandbits(32))
    tile = draw_tile(
        config, rng, MODES[2 if config.refinement != "none" else 1], count, count, 1, "overlap and dropped", "any"
    )
    words = entry_words(config, tile.weights if weights else tile.activations, weights)
    return b"".join(word.to_bytes(entry_bytes(config, opcode), "little") for word in words)


def draw_request(bench: Bench, kind: str) -> bytes:
    """Return bytes for the line: a good request, one that must be refused, or something that is none."""
    rng, config = bench.random, bench.config
    tag = rng.randrange(256)
    code = rng.choice([Opcode.WEIGHTS, Opcode.ACTIVATIONS])
    size = entry_bytes(config, code)

    def store(first: int, count: int, extra: int = 0) -> bytes:
        return encode(request_bytes(code, tag, (first, count), draw_vectors(bench, code, count) + bytes(extra)))

    def run(m: int, n: int, kv: int, mode: int) -> bytes:
        return encode(request_bytes(Opcode.RUN, tag, (m, n, kv), bytes([mode])))

    def good_run() -> bytes:
        m = rng.randint(1, min(config.max_m, config.vectors))
        n = rng.randint(1, min(config.max_words // m, config.vectors))
        kv = rng.randint(1, min(config.vectors // max(m, n), config.max_kv))
        return run(m, n, kv, rng.choice([0, 1, 3] if config.refinement != "none" else [0, 1]))

    first = rng.randrange(config.vectors)
    word = rng.randrange(config.max_words)
    good = bytearray(store(first, 1))
    match kind:
        case "info":
            return encode(request_bytes(Opcode.INFO, tag))
        case "store":
            return store(first, rng.randint(1, min(config.vectors - first, (FRAME_BYTES - 10) // size, 8)))
        case "last vector":
            return store(config.vectors - 1, 1)
        case "run":
            return good_run()
        case "sums":
            return encode(request_bytes(Opcode.SUMS, tag, (word, rng.randint(1, min(config.max_words - word, 16)))))
        case "beyond":
            return rng.choice(
                [
                    store(config.vectors - 1, 2),
                    store(0xFFFF, 1),
                    encode(request_bytes(Opcode.SUMS, tag, (config.max_words - 1, 2))),
                    encode(request_bytes(Opcode.SUMS, tag, (0, 0))),
                    run(1, 1, config.vectors + 1, 1),
                ]
            )
        case "wrong length":
            return rng.choice(
                [
                    store(first, 1, rng.randint(1, size)),
                    encode(request_bytes(code, tag, (first, 0x8001), bytes(size))),
                    encode(request_bytes(rng.choice(list(Opcode)[1:]), tag, (), bytes(rng.choice([1, 2, 3, 5, 6, 8])))),
                ]
            )
        case "refused tile":
            m, n = config.max_m, config.max_words
            return rng.choice(
                [
                    *(
                        run(*sizes, 1)
                        for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (m + 1, 1, 1), (1, n + 1, 1), (2, n, 1))
                    ),
                    run(1, 1, config.max_kv + 1, 1),
                    run(0x8001, 1, 1, 1),
                    run(1, 1, 1, 2),
                    run(1, 1, 1, 1 << rng.randint(2, 7)),
                ]
            )
        case "no request":
            return encode(
                request_bytes(0, rng.choice([0, *range(6, 256)]), (), b"")[::-1] + rng.randbytes(rng.randrange(20))
            )
        case "too short":
            return encode(rng.randbytes(rng.randrange(2)))
        case "truncated":
            return bytes(good[: rng.randrange(2, len(good) - 1)]) + bytes([END])
        case "flipped":
            at = rng.randrange(1, len(good) - 1)
            good[at] ^= 1 << rng.randrange(8)
            return bytes(good)
        case "wrong escape":
            frame = request_bytes(Opcode.INFO, tag)
            return encode(frame)[:1] + bytes([ESC]) + encode(frame)[1:]
        case "ends in an escape":
            return encode(request_bytes(Opcode.INFO, tag))[:-1] + bytes([ESC, END])
        case "noise":
            return rng.randbytes(rng.randint(1, 40)) + bytes([END])
        case "two at once":
            return (
                encode(request_bytes(Opcode.INFO, tag)) + good_run() + encode(request_bytes(Opcode.SUMS, tag, (0, 1)))
            )
    raise ValueError(f"kind must be one of KINDS, not {kind!r}")


def status_of(received: bytes) -> int:
    """Return the status in the first reply."""
    first = Decoder(1 << 16, 3).feed(received)[0]
    assert isinstance(first, bytes)
    return first[2]


KINDS = {
    "info": Status.OK,
    "store": Status.OK,
    "last vector": Status.OK,
    "run": Status.OK,
    "sums": Status.OK,
    "beyond": Status.RANGE,
    "wrong length": Status.LENGTH,
    "refused tile": Status.REFUSED,
    "no request": Status.OPCODE,
    "too short": Status.BROKEN,
    "truncated": Status.BROKEN,
    "flipped": None,
    "wrong escape": Status.BROKEN,
    "ends in an escape": Status.BROKEN,
    "noise": None,
    "two at once": Status.OK,
}
"""Kinds of what comes over the line, and how each is answered if that is certain."""


@cocotb.test(timeout_time=10, timeout_unit="sec")
async def requests_at_random(dut: Any) -> None:
    """Every kind of request and of noise: the same bytes as the model's, and all vectors and sums as they should be at the end."""
    bench = Bench(dut)
    await bench.start()
    rows = bench.settings["rows"]
    # In AutoFP6 mode the zeros that a store begins with are no weights.
    most = (FRAME_BYTES - 10) // entry_bytes(bench.config, Opcode.WEIGHTS)
    for first in range(0, bench.config.vectors, most):
        count = min(most, bench.config.vectors - first)
        body = draw_vectors(bench, Opcode.WEIGHTS, count)
        await bench.check(encode(request_bytes(Opcode.WEIGHTS, 0, (first, count), body)), FRAME_BYTES)
    order = [kind for _ in range(-(-rows // len(KINDS))) for kind in bench.random.sample(list(KINDS), len(KINDS))]
    for kind in order:
        received = await bench.check(draw_request(bench, kind))
        if KINDS[kind] is not None:
            assert status_of(received) == KINDS[kind], f"{kind} is answered with {received.hex(' ')}"
    # One that is too long would take most of the time.
    received = await bench.check(encode(request_bytes(Opcode.WEIGHTS, 1, (0, 1), bytes(FRAME_BYTES))), FRAME_BYTES)
    assert status_of(received) == Status.TOO_LONG
    longest = FRAME_BYTES - 4
    received = await bench.check(encode(bytes([Opcode.INFO, 1]) + bytes(longest - 2)), FRAME_BYTES)
    assert status_of(received) == Status.LENGTH
    # Sums of what the stores hold at the end.
    received = await bench.check(encode(request_bytes(Opcode.RUN, 2, (1, 1, bench.config.vectors), b"\x01")))
    assert status_of(received) == Status.OK
    await bench.check(encode(request_bytes(Opcode.SUMS, 3, (0, bench.config.max_words))))
    assert bench.compared > 8 * rows


@cocotb.test(timeout_time=10, timeout_unit="sec")
async def faults_of_the_line(dut: Any) -> None:
    """Glitches, bytes without a stop bit, a line that is held low, more bytes than find a place: the next request is answered."""
    bench = Bench(dut)
    await bench.start()
    question = encode(request_bytes(Opcode.INFO, 7))

    async def low(nanoseconds: Iterable[float]) -> None:
        for duration in nanoseconds:
            dut.rx.value = 0
            await Timer(round(duration), "ns")
            dut.rx.value = 1
            await Timer(20 * bench.bit_ns, "ns")

    # Too short to be a start bit.
    await low([PERIOD_NS] * 3)
    await bench.check(question)
    # Low for a byte and longer: bytes without a stop bit, of which nothing is seen.
    await low([10 * bench.bit_ns, 10.7 * bench.bit_ns, 300 * bench.bit_ns])
    await bench.check(question)
    # In the midst of a frame: it is broken.
    await bench.send(question[:4])
    await low([11 * bench.bit_ns])
    bench.model.receive(question[:4] + b"?" + question[4:])
    await bench.send(question[4:])
    received = await bench.receive()
    assert status_of(received) in (Status.OK, Status.BROKEN)
    await bench.check(question)
    # Two long replies, and in the meantime more than can wait.
    sums = encode(request_bytes(Opcode.SUMS, 1, (0, bench.config.max_words)))
    waiting = int(bench.settings["waiting"])
    long = 1 + waiting // (8 * bench.config.max_words)
    await bench.send(sums * (long + 1) + bytes(2 * waiting) + bytes([END]))
    received = await bench.receive()
    assert received.count(bytes([END, Opcode.SUMS])) == long + 1
    await bench.check(question)
    assert zlib.crc32(question[1:-5]) == int.from_bytes(question[-5:-1], "little")
