"""cocotb bench of the DMA engines: cocotbext-axi's memory behind them, random stalls on every channel, errors, and the model byte by byte.

The memory of cocotbext-axi refuses bursts that leave a page and ``wlast`` in a wrong place; the bench looks at every cycle of the other rules.
"""

import itertools
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import cocotb
from cocotbext.axi import AxiRamRead, AxiRamWrite, AxiReadBus, AxiResp, AxiWriteBus

from model.dma import MAX_BYTES, Burst, DmaConfig, DmaStatus, bursts, refused, words
from sim.bench_common import bench_settings, pins, start_clock
from sim.streams import STALLS, Streams

SPACE = 1 << 17
"""Bytes that random requests touch."""
DRAIN = 64
"""Cycles behind the last end in which nothing may come."""
PATIENCE = 20_000
"""Cycles without any end after which something hangs."""


class Bench:
    """An engine, its streams, and a memory that fails where it is told to.

    Attributes
    ----------
    fails : dict of int to (int, AxiResp)
        By number of a burst: its beat that fails (0 for writing), and how.
    issued : list of Burst
    """

    def __init__(self, dut: Any) -> None:
        settings = bench_settings()
        self.dut = dut
        self.config = DmaConfig(**settings["parameters"])
        self.write = settings["block"] == "write_dma"
        self.rows: int = settings["rows"]
        self.random = random.Random(cocotb.RANDOM_SEED)
        inputs, outputs = (("request", "word"), ("done",)) if self.write else (("request",), ("word", "done"))
        self.streams = Streams(dut, inputs, outputs)
        self.fails: dict[int, tuple[int, AxiResp]] = {}
        self.issued: list[Burst] = []
        self.responses = self.most = self.waited = 0
        self.words: list[int] = []
        self.ends: list[int] = []
        self._held: dict[str, dict[str, int]] = {}
        channels: dict[str, tuple[str, ...]] = {
            "aw": ("id", "addr", "len", "size", "burst"),
            "w": ("data", "strb", "last"),
            "b": (),
            "ar": ("id", "addr", "len", "size", "burst"),
            "r": (),
        }
        self._channels = {
            name: tuple(f"m_axi_{name}{field}" for field in (*channels[name], "valid", "ready"))
            for name in (("aw", "w", "b") if self.write else ("ar", "r"))
        }

    async def start(self) -> None:
        """Connect the memory, start the clock and reset."""
        self.dut.rst.value = 1
        start_clock(self.dut)
        options = {"reset": self.dut.rst, "size": SPACE if self.rows else MAX_BYTES * 2}
        if self.write:
            self.memory = AxiRamWrite(AxiWriteBus.from_prefix(self.dut, "m_axi"), self.dut.clk, **options)
            self.answers = self.memory.b_channel
            self.paused = [self.memory.aw_channel, self.memory.w_channel, self.memory.b_channel]
        else:
            self.memory = AxiRamRead(AxiReadBus.from_prefix(self.dut, "m_axi"), self.dut.clk, **options)
            self.answers = self.memory.r_channel
            self.paused = [self.memory.ar_channel, self.memory.r_channel]
        self.memory.log.setLevel("ERROR")
        send = self.answers.send
        burst, beat = 0, 0

        async def answer(transaction: Any) -> None:
            nonlocal burst, beat
            at, code = self.fails.get(burst, (0, AxiResp.OKAY))
            if at == beat:
                setattr(transaction, "bresp" if self.write else "rresp", code)
            last = self.write or transaction.rlast
            burst, beat = (burst + 1, 0) if last else (burst, beat + 1)
            await send(transaction)

        self.answers.send = answer
        await self.streams.reset(4)

    def stall(self, chance: float | None = None) -> None:
        """Stall every stream and every channel in a way of its own, or with one chance for the channels and no stalls of the streams."""
        kinds = [kind for kind in STALLS if kind not in ("mostly", "behind valid")] if chance is None else ["never"]
        drivers: list[Any] = [*self.streams.sources.values(), *self.streams.sinks.values()]
        for driver in drivers:
            driver.stall(self.random.choice(kinds), self.random)

        def pauses(share: float) -> Iterator[bool]:
            while True:
                yield self.random.random() < share

        for channel in self.paused:
            share = self.random.choice([0, 0.2, 0.5, 0.8]) if chance is None else chance
            channel.set_pause_generator(pauses(share))

    def send(self, address: int, size: int, data: bytes = b"") -> None:
        """Queue a request and, for writing, its data."""
        self.streams.sources["request"].words.append(address | size << self.config.address_width)
        if self.write:
            self.streams.sources["word"].words.extend(words(self.config, data))

    def look(self) -> None:
        """Look at the pins of this cycle: rules of the bus, and what moves."""
        values = pins(self.dut, list(itertools.chain(*self._channels.values())))
        for name in self._channels:
            if name in ("b", "r"):
                if values[f"m_axi_{name}valid"] and values[f"m_axi_{name}ready"]:
                    self.responses += self.write or pins(self.dut, ["m_axi_rlast"])["m_axi_rlast"]
                continue
            offer = {pin: values[pin] for pin in self._channels[name][:-1]}
            if name in self._held:
                assert offer == self._held[name], f"{name} changed while it waited"
            self._held.pop(name, None)
            if not values[f"m_axi_{name}valid"]:
                continue
            if not values[f"m_axi_{name}ready"]:
                self._held[name] = offer
            elif name != "w":
                shape = tuple(values[f"m_axi_{name}{field}"] for field in ("id", "size", "burst"))
                assert shape == (0, self.config.beat_bytes.bit_length() - 1, 1)
                self.waited = 0
                self.issued.append(Burst(values[f"m_axi_{name}addr"], values[f"m_axi_{name}len"] + 1))
                self.most = max(self.most, len(self.issued) - self.responses)
                assert self.most <= self.config.outstanding

    async def finish(self, count: int) -> None:
        """Run until so many requests have ended, then a little longer."""
        self.waited = left = 0
        while left < DRAIN:
            await self.streams.cycle()
            self.look()
            monitors = self.streams.monitors
            if monitors["done"].moved is not None:
                self.ends.append(monitors["done"].moved)
                self.waited = 0
            if not self.write and monitors["word"].moved is not None:
                self.words.append(monitors["word"].moved)
                self.waited = 0
            self.waited += 1
            assert self.waited < PATIENCE, f"{len(self.ends)} of {count} requests ended, then nothing"
            left = left + 1 if len(self.ends) >= count else 0
        assert len(self.ends) == count
        assert self.responses == len(self.issued)
        assert not any(source.words for source in self.streams.sources.values())


@cocotb.test(timeout_time=100, timeout_unit="ms")
async def random_requests(dut: Any) -> None:
    """Good, failing and refused requests; contents, ends, bursts and counts."""
    bench = Bench(dut)
    config, rng = bench.config, bench.random
    await bench.start()
    memory = bytearray(rng.randbytes(SPACE))
    bench.memory.write(0, bytes(memory))
    expected_words: list[int] = []
    expected_ends: list[int] = []
    due: list[tuple[list[Burst], int | None]] = []
    uncertain: set[int] = set()
    total, batch = 0, 10
    while total < bench.rows:
        bench.stall()
        # One request of a batch fails, so that the numbers of its bursts are known before.
        number, failing = len(bench.issued), rng.randrange(batch)
        for n in range(batch):
            size = rng.choice([rng.randrange(1, 2 * config.beat_bytes), rng.randrange(1, 40 * config.beat_bytes)])
            if n == failing and rng.random() < 0.5:
                # More bursts than may follow an error.
                size = min(
                    rng.randrange(1, 3 * (config.outstanding + 2) * config.block_beats * config.beat_bytes), SPACE // 2
                )
            address = rng.randrange(SPACE - size)
            if rng.random() < 0.3:
                address = max(0, (address | 4095) + 1 - rng.randrange(size + 1))
            if rng.random() < 0.3:
                address &= -config.beat_bytes
            if rng.random() < 0.1 or address + size > SPACE:
                address, size = rng.choice(
                    [(address, 0), ((1 << config.address_width) - 1, 2), (address, MAX_BYTES + 1)]
                )
            data = b"" if refused(config, address, size) else rng.randbytes(size)
            bench.send(address, size, data)
            if not data:
                expected_ends.append(DmaStatus.REFUSED)
                continue
            found = bursts(config, address, size)
            bad = rng.randrange(len(found)) if n == failing else None
            code, good = rng.choice([AxiResp.SLVERR, AxiResp.DECERR]), size
            if bad is not None:
                beat = 0 if bench.write else rng.randrange(found[bad].beats)
                bench.fails[number + bad] = beat, code
                at = found[bad].address + beat * config.beat_bytes
                good = max(at - address, 0) // config.beat_bytes * config.beat_bytes
            number += len(found)
            due.append((found, bad))
            if bench.write:
                # Behind an error any of the rest may have been written.
                stop = (
                    address + size
                    if bad is None
                    else min(address + size, found[bad].address + found[bad].beats * config.beat_bytes)
                )
                memory[address:stop] = data[: stop - address]
                uncertain -= set(range(address, stop))
                uncertain |= set(range(stop, address + size))
            else:
                seen = bytes(memory[address : address + size])
                seen = seen[:good] + bytes(size - good) if bad is not None else seen
                row = words(config, seen)
                expected_words += [*row[:-1], row[-1] | 1 << config.data_width]
            expected_ends.append(DmaStatus.OK if bad is None else DmaStatus(int(code)))
        total = len(expected_ends)
        await bench.finish(total)
        assert bench.ends == expected_ends
        assert bench.words == expected_words
    issued = deque(bench.issued)
    for found, bad in due:
        count = 0
        while issued and count < len(found) and issued[0] == found[count]:
            issued.popleft()
            count += 1
        sure = len(found) if bad is None else bad + 1
        assert sure <= count <= min(len(found), sure + config.outstanding + 2)
    assert not issued
    if bench.write:
        now = bench.memory.read(0, SPACE)
        assert all(now[at] == memory[at] or at in uncertain for at in range(SPACE))
    assert len(bench.ends) == total >= bench.rows > 0
    assert set(bench.ends) == set(DmaStatus), "a kind of end never came"
    assert bench.most == config.outstanding
    dut._log.info("%d requests, %d bursts, %d words", total, len(bench.issued), len(bench.words))


@cocotb.test(timeout_time=100, timeout_unit="ms")
async def longest_request(dut: Any) -> None:
    """2^20 bytes from an odd address, then a short request."""
    bench = Bench(dut)
    bench.rows = 0
    await bench.start()
    bench.stall(0.0)
    data = bench.random.randbytes(MAX_BYTES)
    if not bench.write:
        bench.memory.write(13, data)
    bench.send(13, MAX_BYTES, data)
    bench.send(13, 5, data[:5])
    await bench.finish(2)
    assert bench.ends == [DmaStatus.OK] * 2
    assert bench.issued == bursts(bench.config, 13, MAX_BYTES) + bursts(bench.config, 13, 5)
    if bench.write:
        assert bench.memory.read(13, MAX_BYTES) == data
        assert not any(bench.memory.read(0, 13) + bench.memory.read(13 + MAX_BYTES, 100))
    else:
        expected = [*words(bench.config, data), *words(bench.config, data[:5])]
        ends = [n for n, word in enumerate(bench.words) if word >> bench.config.data_width]
        assert ends == [-(-MAX_BYTES // bench.config.beat_bytes) - 1, len(expected) - 1]
        assert [word & (1 << bench.config.data_width) - 1 for word in bench.words] == expected
