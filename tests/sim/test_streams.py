"""Stalls, and what the monitors of streams object to."""

import random
from itertools import islice, pairwise

import pytest

from sim.streams import STALLS, Monitor, StreamError, stalls


class Value(str):
    @property
    def value(self):
        return self


class Pins:
    """A stream whose pins are set as text."""

    def __init__(self):
        self.set("0", "0", "0")

    def set(self, valid, ready, payload):
        self.s__valid, self.s__ready, self.s__payload = Value(valid), Value(ready), Value(payload)


class Handle:
    def __init__(self, pins, name):
        self._pins, self._name = pins, name

    @property
    def value(self):
        return getattr(self._pins, self._name)


class Dut:
    def __init__(self, pins):
        for part in ("valid", "ready", "payload"):
            setattr(self, f"s__{part}", Handle(pins, f"s__{part}"))


def sampled(*cycles):
    """Sample cycles of (valid, ready, payload); return the monitor and what moved in each."""
    pins = Pins()
    monitor = Monitor(Dut(pins), "s")
    moved = []
    for cycle in cycles:
        pins.set(*cycle)
        monitor.sample()
        moved.append(monitor.moved)
    return monitor, moved


def test_words_move_when_valid_and_ready():
    monitor, moved = sampled(
        ("0", "1", "XX"), ("1", "0", "10"), ("1", "1", "10"), ("1", "1", "10"), ("0", "0", "10"), ("1", "1", "01")
    )
    assert moved == [None, None, 2, 2, None, 1]
    assert monitor.count == 3
    assert monitor.waiting is None
    monitor.forget()
    assert monitor.count == 0


@pytest.mark.parametrize(
    ("cycles", "message"),
    [
        ([("1", "0", "10"), ("0", "0", "10")], "s: valid went away before 0x2 was taken, behind word 0"),
        ([("1", "0", "10"), ("1", "1", "11")], "s: word 0 changed from 0x2 to 0x3 before it was taken"),
        ([("1", "1", "1X")], "s: valid payload of word 0 is 1X"),
        ([("X", "1", "11")], "s: valid is X"),
        ([("0", "Z", "11")], "s: ready is Z"),
    ],
)
def test_broken_rules_are_named(cycles, message):
    with pytest.raises(StreamError) as error:
        sampled(*cycles)
    assert str(error.value) == message


def test_stalls_are_as_frequent_as_their_names_say(seed):
    shares = {kind: sum(islice(stalls(kind, random.Random(seed)), 4000)) / 4000 for kind in STALLS}
    assert shares["never"] == shares["behind valid"] == 0
    assert 0 < shares["rarely"] < 0.2 < 0.4 < shares["often"] < 0.6 < 0.8 < shares["mostly"] < 1
    assert 0.4 < shares["bursts"] < 0.6
    flags = list(islice(stalls("bursts", random.Random(seed)), 4000))
    changes = sum(one != other for one, other in pairwise(flags))
    assert changes < 4000 / 10


def test_unknown_stalls_are_refused():
    with pytest.raises(
        ValueError, match=r"^stalls must be one of never, rarely, often, mostly, bursts, behind valid, not 'x'$"
    ):
        next(stalls("x", random.Random(1)))
