"""DMA engines of an AXI4 manager: configuration, bursts of a request, words and beats (docs/dma.md). Shared by every accelerator family."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

__all__ = ["MAX_BYTES", "PAGE", "Beat", "Burst", "DmaConfig", "DmaStatus", "bursts", "refused", "words", "write_beats"]

MAX_BYTES = 1 << 20
"""Longest request."""
PAGE = 4096
"""Bytes of a page that no AXI burst may leave."""


class DmaStatus(IntEnum):
    """How a request ended; the errors of the bus have the codes of ``RRESP`` and ``BRESP``."""

    OK = 0
    REFUSED = 1
    SLVERR = 2
    DECERR = 3


@dataclass(frozen=True)
class DmaConfig:
    """Parameters of a DMA engine, for model and hardware alike.

    Attributes
    ----------
    data_width : int
        Bits of the data bus and of a word: a power of two from 32 to 1024.
    address_width : int
        Bits of a byte address, 13 to 64.
    id_width : int
        Bits of the transaction identifiers, 1 to 32; every transaction has identifier 0.
    max_burst : int
        Most beats of a burst: a power of two from 1 to 256. A burst never leaves an aligned block of that many beats or of 4096 bytes,
        whichever is smaller.
    outstanding : int
        Most bursts that are on their way at a time, 1 to 64.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong kind or outside its range.
    """

    data_width: int = 128
    address_width: int = 40
    id_width: int = 1
    max_burst: int = 16
    outstanding: int = 4

    def __post_init__(self) -> None:
        limits = {
            "data_width": (32, 1024),
            "address_width": (13, 64),
            "id_width": (1, 32),
            "max_burst": (1, 256),
            "outstanding": (1, 64),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, not {value!r}")
            power = name in ("data_width", "max_burst")
            if not least <= value <= most or (power and value & (value - 1)):
                raise ValueError(f"{name} must be {'a power of two ' * power}from {least} to {most}, not {value}")

    @property
    def beat_bytes(self) -> int:
        """Bytes of a beat and of a word."""
        return self.data_width // 8

    @property
    def block_beats(self) -> int:
        """Beats of the aligned blocks that bursts stay in, a power of two."""
        return min(self.max_burst, PAGE // self.beat_bytes)


class Burst(NamedTuple):
    """An INCR burst of full-width beats; the address is that of its first beat, aligned to a beat."""

    address: int
    beats: int


class Beat(NamedTuple):
    """A beat of write data; bit i of ``strobe`` is byte i, and bytes that are not written are 0."""

    data: int
    strobe: int
    last: bool


def refused(config: DmaConfig, address: int, size: int) -> bool:
    """Return whether a request is refused: its size is 0 or above `MAX_BYTES`, or it ends beyond the address space.

    Parameters
    ----------
    config : DmaConfig
    address, size : int
        In bytes.
    """
    return not 0 < size <= MAX_BYTES or address + size > 1 << config.address_width


def bursts(config: DmaConfig, address: int, size: int) -> list[Burst]:
    """Return the bursts of a request in their order; none if it is refused.

    >>> bursts(DmaConfig(), 0xFFE, 4)
    [Burst(address=4080, beats=1), Burst(address=4096, beats=1)]
    """
    if refused(config, address, size):
        return []
    beat = address // config.beat_bytes
    end = -(-(address + size) // config.beat_bytes)
    found = []
    while beat < end:
        stop = min(end, (beat // config.block_beats + 1) * config.block_beats)
        found.append(Burst(beat * config.beat_bytes, stop - beat))
        beat = stop
    return found


def words(config: DmaConfig, data: bytes) -> list[int]:
    """Return bytes as the words of a request's data stream: byte 0 lowest in the first word, zeros behind the last byte.

    >>> [hex(word) for word in words(DmaConfig(data_width=32), bytes(range(1, 7)))]
    ['0x4030201', '0x605']
    """
    return [
        int.from_bytes(data[at : at + config.beat_bytes], "little") for at in range(0, len(data), config.beat_bytes)
    ]


def write_beats(config: DmaConfig, address: int, data: bytes) -> Iterator[Beat]:
    """Yield the beats that write bytes to an address, in the order of `bursts`; ``last`` ends a burst."""
    at = -(address % config.beat_bytes)
    for burst in bursts(config, address, len(data)):
        for n in range(burst.beats):
            inside = range(max(at, 0), min(at + config.beat_bytes, len(data)))
            value = int.from_bytes(data[inside.start : inside.stop], "little") << 8 * (inside.start - at)
            strobe = (1 << len(inside)) - 1 << inside.start - at
            yield Beat(value, strobe, n == burst.beats - 1)
            at += config.beat_bytes
