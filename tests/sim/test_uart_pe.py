"""The processing element behind a serial line: simulated over its pins, and its host on lines that lose and change bytes."""

import json
import random
import sys
from unittest.mock import MagicMock

import numpy as np
import pytest

import sim.uart_pe
from hdl.lib.verilog import to_verilog
from hdl.uart_pe import WAITING, UartPe
from model import block_scaled
from model.accelerator import Mode
from model.gemm import product
from model.tile_engine import EngineConfig
from model.uart_pe import Opcode, UartPeConfig
from sim.bench_common import SETTINGS, bench_environment
from sim.gemm import layer_products, operands_of
from sim.runner import SimulationError, build_cocotb, run_cocotb
from sim.tiles import MODES
from sim.uart_pe import Board, BoardError, ModelTransport, SerialTransport, main, simulate

SMALL = {"weight_entries": 4, "activation_entries": 8, "accumulators": 16, "vectors": 64, "divisor": 4}
CONFIG = UartPeConfig(**SMALL)
REQUESTS = 32
TILE = {"layer": 11, "projection": "qkv", "rows": 4, "tokens": 3}


@pytest.mark.parametrize("test", ["requests_at_random", "faults_of_the_line"])
def test_bench(test, seed):
    component = UartPe(CONFIG)
    ports = ["clk", "rst", *(path[0] for path, _, _ in component.signature.flatten(component))]
    build = build_cocotb({"uart_pe.v": to_verilog(component, "uart_pe")}, "uart_pe", ports)
    environment = bench_environment("uart_pe", SMALL, {"ports": []}, REQUESTS)
    settings = json.loads(environment[SETTINGS]) | {"waiting": WAITING}
    log = run_cocotb(build, "sim.bench_uart_pe", seed, {SETTINGS: json.dumps(settings)}, 600, "uart_pe", test)
    assert "1 cocotb tests, 0 failed" in log


def test_smollm2_over_the_pins_in_every_mode():
    rows = simulate(TILE, **SMALL)
    assert [row.mode for row in rows] == list(MODES)
    assert all(row.right for row in rows)
    assert {(row.m, row.n, row.k, row.sums, row.wrong, row.retries) for row in rows} == {(3, 4, 576, 12, 0, 0)}


class BadLine(ModelTransport):
    """A line that changes a byte of one in so many frames, or loses, doubles or delays what the board says."""

    def __init__(self, config, seed, chance):
        super().__init__(config)
        self.random, self.chance, self.late, self.faults = random.Random(seed), chance, b"", 0

    def bad(self):
        happens = self.random.random() < self.chance
        self.faults += happens
        return happens

    def write(self, octets):
        line = bytearray(octets)
        if self.bad():
            line[self.random.randrange(len(line))] ^= 1 << self.random.randrange(8)
        if self.bad():
            del line[self.random.randrange(len(line)) :]
        super().write(bytes(line))

    def read(self):
        line = bytearray(self.late + super().read())
        self.late = b""
        if line and self.bad():
            line[self.random.randrange(len(line))] ^= 1 << self.random.randrange(8)
        if line and self.bad():
            self.late = bytes(line)
            return b""
        return bytes(line)


def products(seed, m=5, n=6, k=100):
    rng = np.random.default_rng(seed)
    w, x = (rng.standard_normal((count, k)).astype(np.float32) for count in (n, m))
    return list(layer_products(EngineConfig(lanes=CONFIG.lanes), w, x))


def test_a_bad_line_changes_no_sum(seed):
    line = BadLine(CONFIG, seed, 0.0)
    board = Board(line)
    line.chance = 0.1
    compared = 0
    for each in products(seed) * 3:
        while True:
            try:
                result = board.run(each.a, each.w, each.mode)
                break
            except BoardError:
                continue
        expected, status = product(CONFIG.pe, Mode(MODES.index(each.mode)), each.a, each.w)
        assert (result.sums == expected).all()
        assert result.status == status
        compared += expected.size
    assert compared == 3 * 3 * 30
    assert line.faults > 20
    assert board.retries > 10


def test_products_in_tiles_are_whole():
    for each in products(1, m=20, n=40, k=200):
        result = Board(ModelTransport(CONFIG)).run(each.a, each.w, each.mode)
        assert (result.sums == product(CONFIG.pe, Mode(MODES.index(each.mode)), each.a, each.w)[0]).all()
        assert result.tiles > 3


class Silence:
    def write(self, octets):
        """Hear nothing."""

    def read(self):
        return b""


class Chatter(Silence):
    def read(self):
        return bytes(1000)


def test_hosts_say_what_is_wrong(monkeypatch):
    for line in (Silence(), Chatter()):
        with pytest.raises(BoardError, match=r"^the board must answer INFO, and did not in 4 attempts$"):
            Board(line)
    board = Board(ModelTransport(CONFIG))
    with pytest.raises(BoardError, match=r"^the board must take SUMS \[0, 9\], and says RANGE$"):
        board.request(Opcode.SUMS, (0, 9))
    with pytest.raises(BoardError, match=r"^the board must take RUN \[1, 1, 0\], and says REFUSED$"):
        board.request(Opcode.RUN, (1, 1, 0), b"\x01")
    a, w = (operands_of(block_scaled.quantize(np.ones((rows, 64), np.float32))) for rows in (2, 3))
    long = operands_of(block_scaled.quantize(np.ones((2, 32 * 65), np.float32)))
    with pytest.raises(ValueError, match=r"^mode must be one of those of the board, not 'FP8'$"):
        board.run(a, w, "FP8")
    with pytest.raises(ValueError, match=r"^w must have an even number of rows in AutoFP2 mode, not 3$"):
        board.run(a, w, "AutoFP2")
    with pytest.raises(ValueError, match=r"^a and w must have the same number of K-vectors, not 2 and 65$"):
        board.run(a, long, "NVFP4")
    with pytest.raises(ValueError, match=r"^K must be at most 2048, not 2080$"):
        board.run(long, long, "NVFP4")
    monkeypatch.setitem(sys.modules, "serial", None)
    with pytest.raises(BoardError, match=r"^pyserial was not found"):
        SerialTransport("nowhere")


def test_a_port_of_pyserial_carries_bytes():
    pytest.importorskip("serial")
    port = SerialTransport("loop://", timeout=0.05)
    port.write(b"\xc0\x00\xff")
    assert port.read() + port.read() == b"\xc0\x00\xff"
    assert port.read() == b""


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--rows", "3"], 2, "--rows must be an even number from 2 on, not 3"),
        (["--tokens", "0"], 2, "--tokens must be at least 1, not 0"),
        (["--baud", "0"], 2, "--baud must be at least 1, not 0"),
        (["--layer", "30"], 2, "layer"),
        (["--port", "/nowhere/tty"], 1, "port must be one that opens, not '/nowhere/tty'"),
    ],
)
def test_wrong_arguments_give_one_line(arguments, status, message, capsys, monkeypatch):
    if "--layer" not in arguments:
        monkeypatch.setattr(sim.uart_pe, "load", MagicMock())
    assert main(arguments) == status
    error = capsys.readouterr().err
    assert error.startswith("sim.uart_pe: ")
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_failing_simulation_is_one_line(monkeypatch, capsys):
    def fails(*_, **__):
        raise SimulationError("make not found\nand more")

    monkeypatch.setattr(sim.uart_pe, "load", MagicMock())
    monkeypatch.setattr(sim.uart_pe, "simulate", fails)
    assert main([]) == 1
    assert capsys.readouterr().err == "sim.uart_pe: make not found\n"
