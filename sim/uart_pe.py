"""``python -m sim.uart_pe``: host of a processing element behind a serial line, on a board or simulated: products of SmolLM2-135M on it (docs/fpga.md)."""

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from model.accelerator import Mode
from model.frames import Decoder, Fault, encode
from model.gemm import product
from model.llm import PROJECTIONS, load
from model.pe import Operands
from model.tile_engine import EngineConfig, RowOperands, packed_weights
from model.uart_pe import (
    FRAME_BYTES,
    LEAST_DIVISOR,
    MODE_NVFP4,
    REFINE_EN,
    VERSION,
    BoardModel,
    Opcode,
    Status,
    UartPeConfig,
    entry_bytes,
    request_bytes,
)
from sim.bench_common import bench_environment
from sim.design import generated
from sim.gemm import GemmResult, layer_products
from sim.real_input import sampled_tensors
from sim.runner import SimulationError, build_cocotb, run_cocotb, run_folder
from sim.tiles import MODES, entry_words

__all__ = [
    "Board",
    "BoardError",
    "Compared",
    "ModelTransport",
    "SerialTransport",
    "Transport",
    "compare",
    "main",
    "simulate",
]

COMPARE = "AUTOEMATIC_COMPARE"
"""Environment variable with the arguments of `compare` for the bench."""
RETRIES = 3
"""Times that a request is sent again."""
LARGEST_REPLY = 1 << 16
_HEAD = 3


class BoardError(RuntimeError):
    """The board does not answer, or refuses a request."""


class Transport(Protocol):
    """A serial line: what a host needs of it."""

    def write(self, octets: bytes) -> None:
        """Send bytes."""

    def read(self) -> bytes:
        """Return the bytes that have come; wait for the first one, and return none if it takes too long."""


class SerialTransport:
    """A serial port of this machine, through pyserial.

    Parameters
    ----------
    port : str
        Such as ``/dev/ttyUSB0``, or a URL that pyserial knows.
    baud : int
    timeout : float
        Seconds without a byte after which nothing more is expected.

    Raises
    ------
    BoardError
        pyserial is missing, or the port does not open.
    """

    def __init__(self, port: str, baud: int = 1_000_000, timeout: float = 0.5) -> None:
        try:
            serial = importlib.import_module("serial")
        except ImportError:
            raise BoardError("pyserial was not found: this needs pip install -e '.[serial]'") from None
        try:
            self._port = serial.serial_for_url(port, baudrate=baud, timeout=timeout)
        except (OSError, ValueError) as error:
            raise BoardError(f"port must be one that opens, not {port!r}: {error}") from None

    def write(self, octets: bytes) -> None:
        """Send bytes."""
        self._port.write(octets)

    def read(self) -> bytes:
        """Return the bytes that have come."""
        return bytes(self._port.read(max(1, self._port.in_waiting)))


class ModelTransport:
    """The golden model of the board in place of a line."""

    def __init__(self, config: UartPeConfig) -> None:
        self._board = BoardModel(config)
        self._sent = b""

    def write(self, octets: bytes) -> None:
        """Send bytes."""
        self._sent += self._board.receive(octets)

    def read(self) -> bytes:
        """Return the bytes that have come."""
        sent, self._sent = self._sent, b""
        return sent


class Board:
    """A processing element at the other end of a line: what :class:`sim.gemm.Gemm` is for the simulated tile engine.

    Every request may be sent again if its reply does not come or is damaged, because doing it twice is doing it once.

    Parameters
    ----------
    transport : Transport

    Attributes
    ----------
    config : UartPeConfig
        What the board says that it is.
    retries : int
        Requests that were sent again.

    Raises
    ------
    BoardError
        There is no board, or one of another version.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._tag = self.retries = 0
        about = json.loads(self.request(Opcode.INFO))
        if about.pop("version", None) != VERSION:
            raise BoardError(f"the board must speak version {VERSION}, and says {about}")
        self.config = UartPeConfig(**about)

    def request(self, opcode: Opcode, words: Sequence[int] = (), body: bytes = b"") -> bytes:
        """Send a request until it is answered; return what the reply has behind its status.

        Raises
        ------
        BoardError
            No reply, or the board says no.
        """
        self._tag = (self._tag + 1) % 256
        line = encode(request_bytes(opcode, self._tag, words, body))
        for attempt in range(1 + RETRIES):
            self.retries += attempt > 0
            self._transport.write(line)
            reply = self._reply(opcode)
            if reply is not None:
                status = reply[_HEAD - 1]
                if status != Status.OK:
                    name = Status(status).name if status in list(Status) else str(status)
                    raise BoardError(f"the board must take {opcode.name} {list(words)}, and says {name}")
                return reply[_HEAD:]
        raise BoardError(f"the board must answer {opcode.name}, and did not in {1 + RETRIES} attempts")

    def _reply(self, opcode: Opcode) -> bytes | None:
        """Return the reply to the present request, or None if it is time to send it again."""
        decoder = Decoder(LARGEST_REPLY, _HEAD)
        # What says more than any reply is no board.
        most = 2 * LARGEST_REPLY
        while most > 0 and (received := self._transport.read()):
            most -= len(received)
            for frame in decoder.feed(received):
                # Late replies to what was sent before have another tag.
                if not isinstance(frame, Fault) and frame[:2] == bytes([opcode, self._tag]):
                    return frame
        return None

    def load(self, opcode: Opcode, entries: Sequence[int]) -> None:
        """Write vectors to the store of weights or of activations, from its beginning.

        Raises
        ------
        BoardError
            The board does not take them.
        """
        size = entry_bytes(self.config, opcode)
        most = (FRAME_BYTES - 16) // size
        for first in range(0, len(entries), most):
            part = entries[first : first + most]
            body = b"".join(entry.to_bytes(size, "little") for entry in part)
            self.request(opcode, (first, len(part)), body)

    def tile(self, m: int, n: int, kv: int, mode: str) -> tuple[NDArray[np.uint64], int, int]:
        """Run a tile of the vectors in the stores.

        Returns
        -------
        psum : ndarray of uint64 [N, M]
        status : int
            Status bits of the processing element.
        cycles : int
            Clock cycles from the first vector to the last sum.

        Raises
        ------
        BoardError
            The board does not take it.
        """
        bits = MODE_NVFP4 * (mode != MODES[0]) | REFINE_EN * (mode == MODES[2])
        ran = self.request(Opcode.RUN, (m, n, kv), bytes([bits]))
        sums = self.request(Opcode.SUMS, (0, m * n))
        return np.frombuffer(sums, "<u8").reshape(n, m).astype(np.uint64), ran[0], int.from_bytes(ran[1:5], "little")

    def run(self, a: Operands, w: Operands, mode: str) -> GemmResult:
        """Multiply, ``a · wᵀ``, in as many tiles as it takes.

        Parameters
        ----------
        a : Operands
            Activations, leading axes (M, KV), as from :func:`sim.gemm.operands_of`.
        w : Operands
            Weights, leading axes (N, KV).
        mode : {"AutoFP2", "NVFP4", "AutoFP6"}
            In AutoFP2 mode N must be even.

        Returns
        -------
        GemmResult
            ``cycles`` are those of the tiles, without the line.

        Raises
        ------
        ValueError
            Wrong sizes or mode.
        BoardError
            The board does not answer, or refuses.
        """
        config = self.config
        if mode not in MODES or (mode == MODES[2] and config.refinement == "none"):
            raise ValueError(f"mode must be one of those of the board, not {mode!r}")
        (m, kv), n = a.codes.shape[:2], len(w.codes)
        if w.codes.shape[1] != kv:
            raise ValueError(f"a and w must have the same number of K-vectors, not {kv} and {w.codes.shape[1]}")
        if kv > min(config.vectors, config.max_kv):
            raise ValueError(
                f"K must be at most {min(config.vectors, config.max_kv) * config.lanes}, not {kv * config.lanes}"
            )
        nvfp4 = mode != MODES[0]
        if not nvfp4 and n % 2:
            raise ValueError(f"w must have an even number of rows in AutoFP2 mode, not {n}")
        together = 1 if nvfp4 else 2
        engine = EngineConfig(**dataclasses.asdict(config.pe), rows=1, columns=1)
        stored = packed_weights(engine, nvfp4, RowOperands(_by_vector(w)))
        turned = _by_vector(a)
        rows = min(m, config.max_m, config.vectors // kv)
        columns = min(n // together, config.max_words // rows, config.vectors // kv)
        sums = np.zeros((m, n), np.int64)
        cycles = tiles = status = 0
        for i in range(0, m, rows):
            part = turned[:, i : i + rows]
            self.load(Opcode.ACTIVATIONS, entry_words(config, part, weights=False))
            for j in range(0, n // together, columns):
                weights = stored[:, j : j + columns]
                self.load(Opcode.WEIGHTS, entry_words(config, weights, weights=True))
                shape = part.codes.shape[1], weights.codes.shape[1]
                psum, bits, took = self.tile(*shape, kv, mode)
                halves = (
                    psum.view(np.int64)[..., None]
                    if nvfp4
                    else np.ascontiguousarray(psum).view("<i4").reshape(*psum.shape, 2)
                )
                block = np.moveaxis(halves, 2, 1).reshape(-1, shape[0])
                sums[i : i + rows, together * j : together * j + len(block)] = block.T
                cycles, tiles, status = cycles + took, tiles + 1, status | bits
        return GemmResult(sums, cycles, tiles, status)


def _by_vector(stored: Operands) -> Operands:
    """Swap the two leading axes."""
    return Operands(
        *(
            np.ascontiguousarray(np.swapaxes(getattr(stored, field.name), 0, 1))
            for field in dataclasses.fields(Operands)
        )
    )


@dataclasses.dataclass(frozen=True)
class Compared:
    """A product on a board, beside the golden model.

    Attributes
    ----------
    mode : str
    m, n, k : int
    sums, wrong : int
        Sums that were compared, and those that differ.
    status, expected_status : int
    tiles, cycles, retries : int
    """

    mode: str
    m: int
    n: int
    k: int
    sums: int
    wrong: int
    status: int
    expected_status: int
    tiles: int
    cycles: int
    retries: int

    @property
    def right(self) -> bool:
        """Everything agreed, and there was something."""
        return self.sums > 0 and not self.wrong and self.status == self.expected_status


def compare(board: Board, layer: int, projection: str, rows: int, tokens: int) -> Iterator[Compared]:
    """Run part of a projection of SmolLM2-135M on a board in each of its modes, and compare every sum with the golden model.

    Parameters
    ----------
    board : Board
    layer : int
    projection : str
    rows, tokens : int
        Rows of the weights, an even number, and vectors of activations.
    """
    w, x = sampled_tensors(load(), layer, projection, rows, tokens)
    config = board.config
    engine = EngineConfig(**dataclasses.asdict(config.pe))
    for each in layer_products(engine, w, x):
        before = board.retries
        result = board.run(each.a, each.w, each.mode)
        expected, status = product(config.pe, Mode(MODES.index(each.mode)), each.a, each.w)
        wrong = int((result.sums != expected).sum())
        retries, (m, n) = board.retries - before, expected.shape
        yield Compared(
            each.mode,
            m,
            n,
            w.shape[1],
            expected.size,
            wrong,
            result.status,
            status,
            result.tiles,
            result.cycles,
            retries,
        )


def simulate(arguments: Mapping[str, Any], **parameters: Any) -> list[Compared]:
    """Do `compare` with the simulated board, over the pins of its serial line.

    Parameters
    ----------
    arguments : mapping
        Of `compare`.
    **parameters
        Of the block ``uart_pe``.

    Raises
    ------
    SimulationError
        The simulator is missing, or the simulation failed.
    """
    design = generated("uart_pe", **parameters)
    ports = [port["name"] for port in design.sidecar["ports"]]
    built = build_cocotb({"uart_pe.v": design.verilog}, "uart_pe", ports)
    with run_folder("uart_pe") as folder:
        report = folder / "compared.json"
        environment = bench_environment("uart_pe", parameters, design.sidecar, 0, report)
        run_cocotb(
            built, "sim.bench_uart_pe", 1, {**environment, COMPARE: json.dumps(dict(arguments))}, only="real_product"
        )
        return [Compared(**row) for row in json.loads(report.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if every sum is right, 1 if not, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m sim.uart_pe", description=__doc__)
    add = parser.add_argument
    add("--port", help="serial port of a board, such as /dev/ttyUSB0 (default: the simulated board)")
    add("--baud", type=int, default=1_000_000, metavar="N", help="of the port (default: %(default)s)")
    add("--layer", type=int, default=11, metavar="N", help="decoder layer (default: 11, where activations spike)")
    add("--projection", default="qkv", choices=PROJECTIONS, help="matrix (default: %(default)s)")
    add("--rows", type=int, default=8, metavar="N", help="rows of the matrix, an even number (default: %(default)s)")
    add("--tokens", type=int, default=8, metavar="N", help="tokens (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the table there too")
    options = parser.parse_args(arguments)
    chosen = {name: getattr(options, name) for name in ("layer", "projection", "rows", "tokens")}
    try:
        if options.rows < 2 or options.rows % 2:
            raise ValueError(f"--rows must be an even number from 2 on, not {options.rows}")
        for name in ("tokens", "baud"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} must be at least 1, not {getattr(options, name)}")
        load().weight(options.layer, options.projection)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"sim.uart_pe: {error}", file=sys.stderr)
        return 2
    rows: list[Compared] = []
    print(
        f"{'mode':8} {'M':>4} {'N':>4} {'K':>5} {'sums':>6} {'wrong':>6} {'tiles':>6} {'cycles':>8} {'retries':>7}",
        flush=True,
    )
    try:
        board = options.port and Board(SerialTransport(options.port, options.baud))
        for row in compare(board, **chosen) if board else simulate(chosen, divisor=LEAST_DIVISOR):
            print(
                f"{row.mode:8} {row.m:4} {row.n:4} {row.k:5} {row.sums:6} {row.wrong:6} {row.tiles:6} {row.cycles:8} {row.retries:7} "
                f"{'ok' if row.right else 'WRONG'}",
                flush=True,
            )
            rows.append(row)
        if options.json:
            options.json.write_text(
                json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8"
            )
    except (BoardError, SimulationError, OSError) as error:
        print(f"sim.uart_pe: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    return int(not rows or not all(row.right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
