# amaranth: UnusedElaboratable=no
"""The server of a processing element in Amaranth's simulator: bytes of requests against the model; injected bugs are noticed."""

import random

import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from hdl.lib.frames import FrameReceiver, FrameSender
from hdl.uart_pe import PeServer
from model.frames import END, encode
from model.uart_pe import FRAME_BYTES, LEAST_BYTES, BoardModel, Opcode, UartPeConfig, entry_bytes, request_bytes
from sim.tiles import draw_tile, entry_words
from tests.changed import changed
from tests.hdl.test_gearbox import drive

CONFIG = UartPeConfig(weight_entries=2, activation_entries=4, accumulators=8, vectors=8, divisor=4)


class Framed(wiring.Component):
    """A server between frames."""

    input: In(stream.Signature(8))
    output: Out(stream.Signature(8))

    def __init__(self, server):
        super().__init__()
        self.server = server

    def elaborate(self, platform):
        m = Module()
        m.submodules.requests = requests = FrameReceiver(FRAME_BYTES, LEAST_BYTES)
        m.submodules.replies = replies = FrameSender()
        m.submodules.server = server = self.server
        m.d.comb += server.length.eq(requests.length)
        wiring.connect(m, wiring.flipped(self.input), requests.input)
        wiring.connect(m, requests.frame, server.request)
        wiring.connect(m, requests.fault, server.fault)
        wiring.connect(m, server.reply, replies.frame)
        wiring.connect(m, replies.output, wiring.flipped(self.output))
        return m


def line_of(rng):
    """Return requests that fill the stores, run tiles in every mode, and go beyond every limit; in between one that is broken."""
    requests = []

    def add(opcode, words, body=b""):
        requests.append(encode(request_bytes(opcode, len(requests), words, body)))

    for first in (0, 4):
        for opcode in (Opcode.WEIGHTS, Opcode.ACTIVATIONS):
            tile = draw_tile(
                CONFIG, np.random.default_rng(rng.getrandbits(32)), "AutoFP6", 4, 4, 1, "overlap and dropped"
            )
            weights = opcode == Opcode.WEIGHTS
            words = entry_words(CONFIG, tile.weights if weights else tile.activations, weights)
            add(opcode, (first, 4), b"".join(word.to_bytes(entry_bytes(CONFIG, opcode), "little") for word in words))
    for m, n, kv, mode in (
        (2, 1, 4, 3),
        (1, 2, 3, 0),
        (1, 1, 8, 1),
        (1, 1, 9, 1),
        (2, 3, 1, 1),
        (1, 1, 1, 2),
        (1, 1, 1, 4),
    ):
        add(Opcode.RUN, (m, n, kv), bytes([mode]))
        add(Opcode.SUMS, (0, 4))
    add(Opcode.WEIGHTS, (7, 2), bytes(2 * entry_bytes(CONFIG, Opcode.WEIGHTS)))
    add(Opcode.ACTIVATIONS, (0, 1), bytes(entry_bytes(CONFIG, Opcode.ACTIVATIONS) - 1))
    requests.append(encode(b"no")[:-3] + bytes([END]))
    add(Opcode.SUMS, (3, 2))
    add(6, ())
    add(Opcode.INFO, ())
    add(Opcode.RUN, (1, 1, 8), b"\x01")
    add(Opcode.SUMS, (0, 1))
    return b"".join(requests), len(requests)


def replies(server, seed):
    """Return what comes out, and what must."""
    line, count = line_of(random.Random(seed))
    expected = BoardModel(CONFIG).receive(line)
    assert expected.count(bytes([END, END])) == count - 1
    dut = Framed(server)
    ports = {"input": (dut.input, list(line))}, {"output": (dut.output, None)}
    out = drive(dut, *ports, seed=seed, quiet=400)["output"]
    return bytes(payload for _, payload in out), expected


def test_replies_are_those_of_the_model(seed):
    found, expected = replies(PeServer(CONFIG), seed)
    assert found == expected
    assert len(expected) > 500


BUGS = {
    "a store may be written beyond its end": ("(ends > limit)", "(ends > 2 * limit)"),
    "the status is that of all tiles": ("pe.clear.eq(1)", "pe.clear.eq(0)"),
    "sums are read from the next one on": ("sum_read.addr.eq(following[3:])", "sum_read.addr.eq(following[3:] + 1)"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug, seed):
    try:
        found, expected = replies(changed(PeServer, BUGS[bug])(CONFIG), seed)
    except AssertionError:
        return
    assert found != expected
