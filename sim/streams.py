"""Drivers and monitors of ready/valid streams for cocotb benches: random stalls, and the rules that every stream must keep.

A stream ``x`` of a block is its ports ``x__payload``, ``x__valid`` and ``x__ready``. Inputs change after the rising edge and everything
is sampled at the falling one, when it has settled. One coroutine serves all streams of a bench, because in cocotb each costs more than what it does.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cocotb.triggers import FallingEdge, RisingEdge

__all__ = ["STALLS", "Monitor", "Sink", "Source", "StreamError", "Streams", "stalls"]

STALLS = ("never", "rarely", "often", "mostly", "bursts", "behind valid")
"""How a driver stalls; ``"behind valid"``, for sinks, waits until ``valid`` has been seen, so that a source must not wait for ``ready``."""

_SHARES = {"never": 0.0, "rarely": 0.1, "often": 0.5, "mostly": 0.9}
_LONGEST_BURST = 40


class StreamError(AssertionError):
    """A stream broke a rule: a valid word changed or went away before it was taken, or a handshake is unknown."""


def stalls(kind: str, rng: random.Random) -> Iterator[bool]:
    """Yield for each cycle whether a driver of one of `STALLS` stalls, for ever.

    Raises
    ------
    ValueError
        There is no such kind.
    """
    if kind not in STALLS:
        raise ValueError(f"stalls must be one of {', '.join(STALLS)}, not {kind!r}")
    if kind == "bursts":
        while True:
            for stalled in (False, True):
                for _ in range(rng.randint(1, _LONGEST_BURST)):
                    yield stalled
    share = _SHARES.get(kind, 0.0)
    while True:
        yield share > 0 and rng.random() < share


class Monitor:
    """Watches one stream.

    Parameters
    ----------
    dut : handle
        The block.
    name : str
        Name of the stream.

    Attributes
    ----------
    moved : int or None
        The word that is taken in this cycle.
    waiting : int or None
        The word that was offered in this cycle and not taken.
    count : int
        Words taken since the last `forget`.
    """

    def __init__(self, dut: Any, name: str) -> None:
        self.name = name
        self._payload, self._valid, self._ready = (
            getattr(dut, f"{name}__{part}") for part in ("payload", "valid", "ready")
        )
        self.forget()

    def forget(self) -> None:
        """Start afresh, as after a reset."""
        self.moved: int | None = None
        self.waiting: int | None = None
        self.count = 0

    def sample(self) -> None:
        """Look at the pins of this cycle.

        Raises
        ------
        StreamError
            The stream broke a rule.
        """
        valid, ready = self._bit("valid", self._valid), self._bit("ready", self._ready)
        before, self.waiting, self.moved = self.waiting, None, None
        if not valid:
            if before is not None:
                raise StreamError(
                    f"{self.name}: valid went away before {before:#x} was taken, behind word {self.count}"
                )
            return
        digits = str(self._payload.value)
        if digits.strip("01"):
            raise StreamError(f"{self.name}: valid payload of word {self.count} is {digits}")
        word = int(digits, 2)
        if before is not None and word != before:
            raise StreamError(
                f"{self.name}: word {self.count} changed from {before:#x} to {word:#x} before it was taken"
            )
        if ready:
            self.moved = word
            self.count += 1
        else:
            self.waiting = word

    def _bit(self, part: str, handle: Any) -> bool:
        text = str(handle.value)
        if text not in ("0", "1"):
            raise StreamError(f"{self.name}: {part} is {text}")
        return text == "1"


class Source:
    """Offers words to an input stream of the block; a word stays until it is taken.

    Parameters
    ----------
    monitor : Monitor
        Of this stream.
    dut : handle

    Attributes
    ----------
    words : deque of int
        What is still to be taken.
    """

    def __init__(self, monitor: Monitor, dut: Any) -> None:
        self.monitor = monitor
        self.words: deque[int] = deque()
        self._payload, self._valid = (getattr(dut, f"{monitor.name}__{part}") for part in ("payload", "valid"))
        self._offered = False
        self._stalls = stalls("never", random.Random(0))
        self.idle()

    def stall(self, kind: str, rng: random.Random) -> None:
        """Choose how to stall from now on."""
        self._stalls = stalls(kind, rng)

    def idle(self) -> None:
        """Drop all words, as in a reset."""
        self.words.clear()
        self._offered = False
        self._payload.value = 0
        self._valid.value = 0

    def drive(self) -> None:
        """Set the pins for a new cycle."""
        if self._offered:
            if self.monitor.moved is None:
                return
            self.words.popleft()
        stalled = next(self._stalls)
        offer = bool(self.words) and not stalled
        if offer:
            self._payload.value = self.words[0]
        if offer != self._offered:
            self._valid.value = int(offer)
        self._offered = offer


class Sink:
    """Takes words from an output stream of the block.

    Parameters
    ----------
    monitor : Monitor
        Of this stream; it has the words.
    dut : handle
    """

    def __init__(self, monitor: Monitor, dut: Any) -> None:
        self.monitor = monitor
        self._handle = getattr(dut, f"{monitor.name}__ready")
        self.idle()

    def stall(self, kind: str, rng: random.Random) -> None:
        """Choose how to stall from now on."""
        self._stalls = stalls(kind, rng)
        self._behind_valid = kind == "behind valid"
        self.blocked = False

    def idle(self) -> None:
        """Take whatever comes."""
        self.stall("never", random.Random(0))
        self._ready = True
        self._handle.value = 1

    def drive(self) -> None:
        """Set the pin for a new cycle; ``blocked`` keeps it low."""
        ready = not next(self._stalls) and not self.blocked
        if self._behind_valid:
            ready &= self.monitor.waiting is not None
        if ready != self._ready:
            self._handle.value = int(ready)
        self._ready = ready


class Streams:
    """All streams of a block.

    Parameters
    ----------
    dut : handle
        The block, with a clock ``clk`` and a reset ``rst``.
    inputs, outputs : iterable of str
        Names of the streams.

    Attributes
    ----------
    monitors, sources, sinks : dict
        By name of the stream.
    drivers : list of callables
        What else changes inputs; called in every cycle when inputs change.
    cycle_number : int
        Cycles since the last reset; that of the sampled pins.
    """

    def __init__(self, dut: Any, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        inputs, outputs = tuple(inputs), tuple(outputs)
        self.dut = dut
        self.monitors = {name: Monitor(dut, name) for name in (*inputs, *outputs)}
        self.sources = {name: Source(self.monitors[name], dut) for name in inputs}
        self.sinks = {name: Sink(self.monitors[name], dut) for name in outputs}
        self.drivers: list[Callable[[], None]] = []
        self.cycle_number = -1

    async def reset(self, cycles: int = 2) -> None:
        """Reset the block; every word that was offered or waited for is forgotten."""
        await RisingEdge(self.dut.clk)
        self.dut.rst.value = 1
        for source in self.sources.values():
            source.idle()
        for sink in self.sinks.values():
            sink.idle()
        for _ in range(cycles):
            await RisingEdge(self.dut.clk)
        self.dut.rst.value = 0
        for monitor in self.monitors.values():
            monitor.forget()
        await FallingEdge(self.dut.clk)
        self.cycle_number = -1

    async def cycle(self) -> None:
        """Drive the inputs of one cycle and sample it.

        Raises
        ------
        StreamError
            A stream broke a rule.
        """
        await RisingEdge(self.dut.clk)
        for source in self.sources.values():
            source.drive()
        for sink in self.sinks.values():
            sink.drive()
        for driver in self.drivers:
            driver()
        await FallingEdge(self.dut.clk)
        self.cycle_number += 1
        for monitor in self.monitors.values():
            monitor.sample()
