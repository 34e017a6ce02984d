# amaranth: UnusedElaboratable=no
"""Number writer: every byte and request of tiles, with stalls, errors and rows that are dropped; two users of one write engine."""

import random
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdl.dma import request_layout
from hdl.lib.gearbox import beat_layout
from hdl.number_writer import NumberWriter, WriteShare, number_tile_layout
from model.dma import DmaConfig, DmaStatus
from model.tile_engine import EngineConfig
from tests.changed import changed
from tests.hdl.test_gearbox import drive, joined

CHUNK = 16


def raw(layout, **values):
    return sum(int(value) << layout[name].offset for name, value in values.items())


class Run:
    """One simulation: offers tiles and their numbers, stands for the DMA engine.

    A tile is (place, stride, rows, outputs). ``ends`` are the statuses of requests, 0 behind them; in cycles of ``discards`` rows are dropped,
    of ``clears`` the error is cleared.
    """

    def __init__(
        self,
        tiles,
        *,
        columns=3,
        data_width=64,
        space=40,
        seed=0,
        dut=None,
        ends=(),
        discards=(),
        clears=(),
        stalls=0.3,
    ):
        config = EngineConfig(rows=2, columns=columns, accumulators=64, activation_entries=4)
        self.dma = DmaConfig(data_width=data_width, address_width=space)
        self.dut = dut or NumberWriter(config, self.dma)
        rng = random.Random(seed)
        layout, beats = number_tile_layout(config, space), []
        self.expected, self.rows = [], []
        for place, stride, rows, outputs in tiles:
            for k in range(rows):
                numbers = [rng.getrandbits(32) for _ in range(outputs)]
                for i in range(0, outputs, columns):
                    part = numbers[i : i + columns]
                    last = i + columns >= outputs
                    elements = joined(part + [rng.getrandbits(32)] * (columns - len(part)), 32)
                    count = len(part) if last else rng.getrandbits(columns.bit_length())
                    beats.append(raw(beat_layout(32, columns), elements=elements, count=count, last=last))
                octets, at, size = (
                    b"".join(n.to_bytes(4, "little") for n in numbers),
                    place + k * stride,
                    CHUNK * data_width // 8,
                )
                row = [(at + i, octets[i : i + size]) for i in range(0, len(octets), size)]
                self.rows.append(row)
                if at + len(octets) <= 1 << space:
                    self.expected += row
        offered = [raw(layout, place=p, stride=s, rows=r, outputs=n) for p, s, r, n in tiles]
        self.ends, self.open, self.parts, self.done = deque(ends), deque(), deque(), deque()
        self.written, self.errors, self.idle = [], [], []
        self.discards, self.clears = set(discards), set(clears)
        given_ = {
            "tile": (self.dut.tile, offered),
            "number": (self.dut.number, beats),
            "done": (self.dut.done, self.done),
        }
        taken = {"request": (self.dut.request, None), "word": (self.dut.word, None)}
        drive(self.dut, given_, taken, every=self.every, seen=self.seen, quiet=60, stalls=stalls, seed=seed)
        assert not self.open
        assert not self.parts
        assert self.idle[-1]

    def every(self, ctx):
        cycle = len(self.idle)
        ctx.set(self.dut.discard, cycle in self.discards)
        ctx.set(self.dut.clear, cycle in self.clears)
        self.idle.append(ctx.get(self.dut.idle))
        self.errors.append(ctx.get(self.dut.error))
        assert not (self.idle[-1] and (self.open or self.done)), "idle while requests have not ended"

    def seen(self, name, payload):
        if name == "request":
            self.open.append((payload & (1 << self.dma.address_width) - 1, payload >> self.dma.address_width))
        else:
            self.parts.append(payload)
        size = self.dma.data_width // 8
        while self.open and len(self.parts) * size >= self.open[0][1]:
            address, octets = self.open.popleft()
            data = b"".join(self.parts.popleft().to_bytes(size, "little") for _ in range(-(-octets // size)))
            self.written.append((address, data[:octets]))
            self.done.append(self.ends.popleft() if self.ends else 0)


def draw(rng, columns, count=6):
    most = 2 * columns * 32
    return [
        (
            4 * rng.getrandbits(36),
            4 * rng.randrange(1 << 10),
            rng.randint(1, 8),
            rng.choice([1, columns, rng.randint(1, most), most]),
        )
        for _ in range(count)
    ]


@settings(max_examples=5, deadline=None, database=None)
@given(columns=st.sampled_from([1, 2, 3, 8]), data_width=st.sampled_from([64, 128, 256]), seed=st.integers(0, 999))
def test_rows_are_written_in_requests_of_sixteen_words(columns, data_width, seed):
    run = Run(draw(random.Random(seed), columns), columns=columns, data_width=data_width, seed=seed)
    assert run.written == run.expected
    assert not any(run.errors)


def test_errors_are_kept_until_they_are_cleared(seed):
    run = Run([(64, 64, 4, 5)] * 4, seed=seed, ends=[0, 2, 3], clears=[60], stalls=0.0)
    assert run.written == run.expected
    assert {error for error in run.errors[:60] if error} == {DmaStatus.SLVERR}
    assert run.errors[62] == 0


def test_rows_beyond_the_address_space_are_dropped_and_reported(seed):
    """Of each tile from the row on that would end beyond; what fits exactly is written."""
    space = 1 << 20
    tiles = [(space - 4 * 10, 0, 2, 10), (space - 4 * 10 - 64, 64, 3, 11), (128, 16, 2, 7)]
    run = Run(tiles, space=20, seed=seed)
    assert run.written == run.expected
    assert len(run.expected) == 2 + 1 + 2
    assert run.errors[-1] == DmaStatus.REFUSED


def test_rows_that_start_while_results_are_discarded_are_dropped_whole(seed):
    tiles = [(4096 * i, 512, 3, 96) for i in range(6)]
    run = Run(tiles, seed=seed, discards=range(100, 250))
    assert 0 < len(run.written) < len(run.expected)
    assert all(
        all(part in run.written for part in row) or not any(part in run.written for part in row) for row in run.rows
    )
    assert [part for part in run.expected if part in run.written] == run.written


BUGS = {
    "a request before its words": ("full.eq(packed.last | count.all())", "full.eq(packed.last | count.any())"),
    "the row's end": ("Mux(chunk.last, here, per_chunk) << 2", "Mux(chunk.last, tile.outputs, per_chunk) << 2"),
    "the next request": ('advanced(m, "place", at, octets)', 'advanced(m, "place", tile.place, octets)'),
    "the next row": ("tile.place, tile.stride)", "tile.place, tile.stride << 1)"),
    "beyond": ("end.eq(at + (here << 2))", "end.eq(at)"),
    "dropped in the middle": ("wanted.eq(Mux(first, ~self.discard, keep))", "wanted.eq(~self.discard & keep)"),
    "idle too soon": ("| held.any() | outstanding.any()))", "| held.any()))"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_of_the_writer_are_caught(bug, seed):
    wrong = changed(NumberWriter, BUGS[bug])

    def dut(columns, data_width, space):
        config = EngineConfig(rows=2, columns=columns, accumulators=64, activation_entries=4)
        return wrong(config, DmaConfig(data_width=data_width, address_width=space))

    with pytest.raises((AssertionError, ValueError)):  # noqa: PT012
        run = Run(draw(random.Random(seed), 3), seed=seed, dut=dut(3, 64, 40))
        assert run.written == run.expected
        run = Run([((1 << 20) - 4 * 9, 64, 3, 10)], space=20, seed=seed, dut=dut(3, 64, 20))
        assert (run.written, run.errors[-1]) == (run.expected, DmaStatus.REFUSED)


def share(seed, dut=None, stalls=0.4):
    """Two users with requests of their own; returns the requests of each, and what the engine and the users got."""
    rng, dma = random.Random(seed), DmaConfig(data_width=64, address_width=32)
    dut = dut or WriteShare(dma)
    layout = request_layout(dma)
    asked = [[(rng.getrandbits(31) << 1 | user, rng.randint(1, 40)) for _ in range(60)] for user in range(2)]
    words = [deque(), deque()]
    done, got, open_, parts, answers = deque(), [[], []], deque(), deque(), []

    def seen(name, payload):
        if name.startswith("done"):
            got[int(name[-1])].append(payload)
            return
        if name == "request":
            open_.append((payload & 2**32 - 1, payload >> 32))
        else:
            parts.append(payload)
        while open_ and len(parts) * 8 >= open_[0][1]:
            address, octets = open_.popleft()
            count = -(-octets // 8)
            answers.append((address, octets, [parts.popleft() for _ in range(count)]))
            done.append(rng.randrange(4))
            ends[address & 1].append(done[-1])

    ends = [[], []]
    sent = [[], []]
    for user in range(2):
        for address, octets in asked[user]:
            data = [rng.getrandbits(63) << 1 | user for _ in range(-(-octets // 8))]
            words[user].extend(data)
            sent[user].append((address, octets, data))
    given_ = {
        f"request{u}": (dut.user_request[u], [raw(layout, address=a, bytes=n) for a, n in asked[u]]) for u in range(2)
    }
    given_ |= {f"word{u}": (dut.user_word[u], words[u]) for u in range(2)}
    given_["done"] = (dut.done, done)
    taken = {"request": (dut.request, 120), "word": (dut.word, sum(len(d) for s in sent for _, _, d in s))}
    taken |= {f"done{u}": (dut.user_done[u], 60) for u in range(2)}

    def every(ctx):
        for port in dut.user_done:
            ctx.set(port.ready, 1)

    drive(dut, given_, taken, every=every, seen=seen, quiet=80, stalls=stalls, seed=seed)
    return sent, answers, ends, got


def right(sent, answers, ends, got):
    mine = [[answer for answer in answers if answer[0] & 1 == user] for user in range(2)]
    turns = sum(a[0] & 1 != b[0] & 1 for a, b in pairwise(answers))
    return mine == sent and got == ends and turns > 60


@pytest.mark.parametrize("stalls", [0.0, 0.5])
def test_each_user_has_its_requests_words_and_ends(stalls, seed):
    assert right(*share(seed, stalls=stalls))


SHARE_BUGS = {
    "words of the other": ("Mux(turn.user, self.user_word[1].payload", "Mux(~turn.user, self.user_word[1].payload"),
    "ends of the other": ("mine = owners.output.payload if number", "mine = ~owners.output.payload if number"),
    "words miscounted": (
        "turns.input.payload.more.eq(behind[lane:])",
        "turns.input.payload.more.eq(behind[lane + 1 :])",
    ),
    "one before the other": (
        "user.eq(second.valid & (~first.valid | ~before))",
        "user.eq(second.valid & ~first.valid)",
    ),
}


@pytest.mark.parametrize("bug", SHARE_BUGS)
def test_bugs_of_the_share_are_caught(bug, seed):
    dut = changed(WriteShare, SHARE_BUGS[bug])(DmaConfig(data_width=64, address_width=32))
    with pytest.raises((AssertionError, IndexError)):
        assert right(*share(seed, dut))
