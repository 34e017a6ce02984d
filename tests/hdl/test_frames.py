# amaranth: UnusedElaboratable=no
"""Frames: random frames and noise against the model, with stalls; injected bugs are noticed."""

import random

import pytest

from hdl.lib.frames import FrameReceiver, FrameSender
from model.frames import END, ESC, ESC_END, ESC_ESC, Decoder, Fault, encode
from tests.changed import changed
from tests.hdl.test_gearbox import drive

LIMIT, LEAST = 40, 2


def lines(rng, count):
    """What comes over a line: frames of every length, some of them damaged, and noise."""
    special = [END, ESC, ESC_END, ESC_ESC, 0]
    for n in range(count):
        length = n % (LIMIT + 3)
        frame = bytes(rng.choices(special if n % 2 else range(256), k=length))
        line = bytearray(encode(frame))
        if n % 5 == 1:
            at = rng.randrange(len(line))
            line[at] ^= 1 << rng.randrange(8)
        elif n % 5 == 2:
            line[rng.randrange(1, len(line)) :] = bytes(rng.choices(special, k=rng.randrange(6)))
        elif n % 11 == 3:
            line[:-1] += bytes([ESC])
        yield bytes(line)
    yield bytes([END, END])


def frame_bytes(frames):
    return [byte | (at == len(frame) - 1) << 8 for frame in frames for at, byte in enumerate(frame)]


def received(component, seed, stalls):
    """Send lines to a receiver; returns what it found and what the model finds, and the numbers of frames and faults."""
    line = b"".join(lines(random.Random(seed), 130))
    found = Decoder(LIMIT, LEAST).feed(line)
    frames = [frame for frame in found if not isinstance(frame, Fault)]
    faults = [frame for frame in found if isinstance(frame, Fault)]
    lengths = []
    out = drive(
        component,
        {"input": (component.input, list(line))},
        {"frame": (component.frame, None), "fault": (component.fault, None)},
        stalls=stalls,
        seed=seed,
        quiet=60,
        every=lambda ctx: ctx.get(component.frame.valid) and lengths.append(ctx.get(component.length)),
    )
    got = {name: [payload for _, payload in out[name]] for name in out}
    right = got == {"frame": frame_bytes(frames), "fault": [int(fault) for fault in faults]}
    return right and {*lengths} == {len(frame) for frame in frames}, len(frames), faults


@pytest.mark.parametrize("stalls", [0.0, 0.3])
def test_receiver_finds_what_the_model_finds(stalls, seed):
    right, frames, faults = received(FrameReceiver(LIMIT, LEAST), seed, stalls)
    assert right
    assert frames > 50
    assert faults.count(Fault.BROKEN) > 20
    assert faults.count(Fault.TOO_LONG) > 5


@pytest.mark.parametrize("stalls", [0.0, 0.3])
def test_sender_writes_what_the_model_writes(stalls, seed):
    rng = random.Random(seed)
    frames = [bytes(rng.choices([END, ESC, *range(256)], k=rng.randrange(1, 30))) for _ in range(60)]
    expected = b"".join(map(encode, frames))
    dut = FrameSender()
    out = drive(
        dut,
        {"frame": (dut.frame, frame_bytes(frames))},
        {"output": (dut.output, len(expected))},
        stalls=stalls,
        seed=seed,
    )
    assert bytes(payload for _, payload in out["output"]) == expected


BUGS = {
    "no check": ("(crc == RESIDUE) & ", ""),
    "a wrong escape passes": (" & ~escaped & ~broken", " & ~escaped"),
    "an escape at the end passes": (" & ~escaped & ~broken", " & ~broken"),
    "one byte fewer fits": ("filled == self._limit", "filled == self._limit - 1"),
    "too short passes": ("self._least + CHECK_BYTES", "self._least + CHECK_BYTES - 1"),
    "empty frames are faults": ("with m.If(begun):", "with m.If(1):"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug, seed):
    try:
        right, *_ = received(changed(FrameReceiver, BUGS[bug])(LIMIT, LEAST), seed, 0.0)
    except AssertionError:
        return
    assert not right
