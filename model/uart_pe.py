"""Processing element behind a serial line: configuration, requests, and what the board replies to any bytes (docs/fpga.md)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from model.frames import Decoder, Fault, encode
from model.pe import OFFSET_BYTES, Operands, PeConfig, Tile, check_words, cycles, run_tile
from model.vmac import SUBGROUPS, check_integer

__all__ = [
    "FRAME_BYTES",
    "LEAST_BYTES",
    "LEAST_DIVISOR",
    "MODE_NVFP4",
    "REFINE_EN",
    "VERSION",
    "BoardModel",
    "Opcode",
    "Status",
    "UartPeConfig",
    "entry_bytes",
    "info",
    "request_bytes",
]

VERSION = 1
"""Version of the requests and replies."""
FRAME_BYTES = 2048
"""Most bytes of a request, CRC included."""
LEAST_BYTES = 2
"""Opcode and tag."""
MODE_NVFP4, REFINE_EN = 1, 2
"""Bits of the mode byte."""
LEAST_DIVISOR = 4
"""Fewest cycles of a bit on the line: its middle must be one of them, though it is seen up to a cycle late."""


class Opcode(IntEnum):
    """First byte of a request and of its reply."""

    NONE = 0
    """Of the reply to a frame that was thrown away."""
    INFO = 1
    WEIGHTS = 2
    ACTIVATIONS = 3
    RUN = 4
    SUMS = 5


class Status(IntEnum):
    """Third byte of a reply; from OPCODE on nothing was done because of it."""

    OK = 0
    BROKEN = int(Fault.BROKEN)
    TOO_LONG = int(Fault.TOO_LONG)
    OPCODE = 3
    """There is no such request."""
    LENGTH = 4
    """It is not as long as it must be."""
    RANGE = 5
    """It goes beyond a memory, or counts to 0."""
    REFUSED = 6
    """A tile that the processing element does not take."""


@dataclass(frozen=True)
class UartPeConfig(PeConfig):
    """Parameters of a processing element behind a serial line: its own, and those of the line and the operand stores.

    Attributes
    ----------
    divisor : int
        Clock cycles of a bit on the line, from 4 on.
    vectors : int
        Vectors that each operand store holds, a power of two from 2 to 32768.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong kind or outside its range.
    """

    divisor: int = 25
    vectors: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("divisor", self.divisor)
        check_integer("vectors", self.vectors)
        if self.divisor < LEAST_DIVISOR:
            raise ValueError(f"divisor must be at least {LEAST_DIVISOR}, not {self.divisor}")
        if not 2 <= self.vectors <= 1 << 15 or self.vectors & (self.vectors - 1):
            raise ValueError(f"vectors must be a power of two from 2 to 32768, not {self.vectors}")

    @property
    def pe(self) -> PeConfig:
        """Parameters of the processing element."""
        return PeConfig(**{name: getattr(self, name) for name in PeConfig.__dataclass_fields__})


def entry_bytes(config: PeConfig, opcode: Opcode) -> int:
    """Return the bytes of a stored vector, of weights or of activations."""
    vector = config.vmac
    records = 0 if config.refinement == "none" else (SUBGROUPS + 8 * OFFSET_BYTES) * vector.blocks
    if opcode == Opcode.WEIGHTS:
        return (5 * config.lanes + 8 * vector.w_scale_bytes + records) // 8
    return (4 * config.lanes + 8 * vector.blocks + records) // 8


def info(config: UartPeConfig) -> bytes:
    """Return what INFO replies: version and parameters as JSON."""
    return json.dumps({"version": VERSION, **asdict(config)}, separators=(",", ":")).encode()


def request_bytes(opcode: int, tag: int, words: Sequence[int] = (), body: bytes = b"") -> bytes:
    """Return a request: opcode, tag, 16-bit words with the lower byte first, and whatever follows."""
    return bytes([opcode, tag]) + b"".join(word.to_bytes(2, "little") for word in words) + body


def _operands(config: PeConfig, opcode: Opcode, entries: NDArray[np.uint8]) -> Operands:
    """Return stored vectors as operands; ``entries`` has shape (…, bytes)."""
    vector = config.vmac
    bits = np.unpackbits(entries, axis=-1, bitorder="little")
    position = 0

    def field(width: int, *shape: int) -> NDArray[np.uint8]:
        nonlocal position
        count = int(np.prod(shape))
        part = bits[..., position : position + width * count].reshape(*bits.shape[:-1], *shape, width)
        position += width * count
        return (part << np.arange(width)).sum(axis=-1).astype(np.uint8)

    weights = opcode == Opcode.WEIGHTS
    codes = field(5 if weights else 4, config.lanes)
    scales = field(8, vector.w_scale_bytes if weights else vector.blocks)
    shape = (*bits.shape[:-1], vector.blocks)
    masks, offsets = np.zeros(shape, np.uint8), np.zeros((*shape, OFFSET_BYTES), np.uint8)
    if config.refinement != "none":
        for block in range(vector.blocks):
            masks[..., block] = field(SUBGROUPS, 1)[..., 0]
            offsets[..., block, :] = field(8, OFFSET_BYTES)
    return Operands(codes, scales, masks, offsets)


class BoardModel:
    """The board: bytes that it gets, and bytes that it sends back.

    Parameters
    ----------
    config : UartPeConfig
    """

    def __init__(self, config: UartPeConfig) -> None:
        self.config = config
        self._decoder = Decoder(FRAME_BYTES, LEAST_BYTES)
        self._stores = {
            opcode: np.zeros((config.vectors, entry_bytes(config, opcode)), np.uint8)
            for opcode in (Opcode.WEIGHTS, Opcode.ACTIVATIONS)
        }
        self._sums = np.zeros(config.max_words, np.uint64)

    def receive(self, received: bytes) -> bytes:
        """Take bytes from the line; return the bytes that they are answered with."""
        return b"".join(encode(self._reply(frame)) for frame in self._decoder.feed(received))

    def _reply(self, frame: bytes | Fault) -> bytes:
        if isinstance(frame, Fault):
            return bytes([Opcode.NONE, 0, frame])
        status, body = self._answer(frame)
        return frame[:LEAST_BYTES] + bytes([status]) + body

    def _answer(self, frame: bytes) -> tuple[Status, bytes]:
        config, body = self.config, frame[LEAST_BYTES:]
        words = np.frombuffer(body[: len(body) // 2 * 2], "<u2").astype(int).tolist()
        try:
            opcode = Opcode(frame[0])
        except ValueError:
            return Status.OPCODE, b""
        match opcode:
            case Opcode.INFO:
                return (Status.LENGTH, b"") if body else (Status.OK, info(config))
            case Opcode.WEIGHTS | Opcode.ACTIVATIONS:
                store = self._stores[opcode]
                size = store.shape[1]
                if len(body) < 4 or len(body) != 4 + words[1] * size:
                    return Status.LENGTH, b""
                first, count = words[:2]
                if not count or first + count > config.vectors:
                    return Status.RANGE, b""
                store[first : first + count] = np.frombuffer(body[4:], np.uint8).reshape(count, size)
                return Status.OK, b""
            case Opcode.RUN:
                if len(body) != 7:
                    return Status.LENGTH, b""
                m, n, kv = words
                return self._run(m, n, kv, body[6])
            case Opcode.SUMS:
                if len(body) != 4:
                    return Status.LENGTH, b""
                first, count = words
                if not count or first + count > config.max_words:
                    return Status.RANGE, b""
                return Status.OK, self._sums[first : first + count].astype("<u8").tobytes()
        return Status.OPCODE, b""

    def _run(self, m: int, n: int, kv: int, mode: int) -> tuple[Status, bytes]:
        config = self.config
        nvfp4, refine = bool(mode & MODE_NVFP4), bool(mode & REFINE_EN)
        fits = m <= config.max_m and 1 <= m * n <= config.max_words and 1 <= kv <= config.max_kv
        legal = mode < 4 and (not refine or (nvfp4 and config.refinement != "none"))
        if not fits or not legal:
            return Status.REFUSED, b""
        if kv * max(m, n) > config.vectors:
            return Status.RANGE, b""
        weights, activations = (
            _operands(config, opcode, self._stores[opcode][: kv * count].reshape(kv, count, -1))
            for opcode, count in ((Opcode.WEIGHTS, n), (Opcode.ACTIVATIONS, m))
        )
        result = run_tile(config.pe, Tile(nvfp4, refine, weights, activations))
        self._sums[: check_words(config, m, n)] = result.psum.ravel()
        duration = cycles(config, [(m, n, kv)])[0] + 1
        return Status.OK, bytes([result.status]) + duration.to_bytes(4, "little")
