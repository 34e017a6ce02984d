# amaranth: UnusedElaboratable=no
"""Binary32 pipelines: directed and random operands against the model, stalls, and many vectors in the emitted Verilog."""

import inspect
import itertools

import numpy as np
import pytest
from amaranth.sim import Simulator

import hdl.lib.fp32
from hdl.lib.fp32 import FloatAdd, FloatMultiply, IntToFloat
from hdl.lib.verilog import to_verilog
from model.fp32 import add, from_int, multiply
from sim.harness import BulkHarness

PATTERNS = [
    *(exponent << 23 | fraction for exponent in (0, 1, 126, 127, 254, 255) for fraction in (0, 1, 0x7FFFFF)),
    *(0x3F800000 + (k << 23) for k in (-24, -23, -1, 23)),
    *(0x00400000, 0x00000003, 0x007FFFFE, 0x3FC00000, 0x1FFFFFFF, 0x20000000, 0x5F000000, 0x7FC00000),
]


def integers(width, rng, count):
    """Integers of all lengths, with ties and powers of two among them."""
    directed = []
    for power in range(width - 1):
        directed += [(1 << power) + delta for delta in (-1, 0, 1)]
        if power > 24:
            half = 1 << power - 24
            directed += [(1 << power) + odd * half + delta for odd in (1, 3) for delta in (-1, 0, 1)]
    directed += [-number for number in directed]
    least = -(1 << width - 1)
    directed = [number for number in directed if least <= number < -least] + [least, -least - 1]
    numbers = [*rng.integers(0, 2**64, count, np.uint64, endpoint=False).tolist()]
    drawn = [
        (number - 2**63) >> int(shift)
        for number, shift in zip(numbers, rng.integers(64 - width, 64, count), strict=True)
    ]
    return np.array(directed + drawn, np.int64)


def factors(rng, count):
    """Pairs of patterns: each two of `PATTERNS` in both signs, random ones, products around the smallest normal number, and ties."""
    signed = PATTERNS + [pattern | 1 << 31 for pattern in PATTERNS]
    pairs = np.array(list(itertools.product(signed, PATTERNS)), np.uint32)
    # With two significands of 2**23 + 1 and a subnormal product, all that makes it more than a tie is its lowest bit, which is shifted out.
    below = [(low << 23 | 1, 126 - low << 23 | 1) for low in (1, 60, 125)]
    drawn = rng.integers(0, 2**32, (count, 2), np.uint32, endpoint=False)
    small = rng.integers(0, 2**23, (count, 2), np.uint32) | rng.integers(0, 2, (count, 2), np.uint32) << np.uint32(31)
    low = rng.integers(0, 127, count)
    high = np.maximum(127 - low + rng.integers(-27, 3, count), 0)
    small |= (np.stack([low, high], 1) << 23).astype(np.uint32)
    # Few bits in each significand make exact ties.
    sparse = drawn & np.uint32(0xFFFFF800)
    ties = np.stack([sparse[:, 0], (sparse[:, 1] & np.uint32(0xFF800000)) | np.uint32(0x00400000) >> np.uint32(10)], 1)
    ties[: count // 2] = small[: count // 2] & np.uint32(0xFFFFF000)
    return np.concatenate([pairs, np.array(below, np.uint32), drawn, small, ties])


def terms(rng, count):
    """Pairs of patterns: each two of `PATTERNS` in all signs, random ones, exponents at all distances that matter, few bits, near cancellation."""
    signed = PATTERNS + [pattern | 1 << 31 for pattern in PATTERNS]
    pairs = np.array(list(itertools.product(signed, signed)), np.uint32)
    drawn = rng.integers(0, 2**32, (count, 2), np.uint32, endpoint=False)
    close = drawn.copy()
    exponent = rng.integers(0, 255, count)
    distance = np.where(rng.random(count) < 0.5, rng.integers(-3, 4, count), rng.integers(-28, 29, count))
    for column, field in enumerate((exponent, np.clip(exponent + distance, 0, 254))):
        close[:, column] = (close[:, column] & 0x807FFFFF) | field.astype(np.uint32) << np.uint32(23)
    # Few bits make ties, ones below the top make long carries.
    sparse = close & rng.choice(np.array([0xFFFFFFFF, 0xFFF00000, 0xFF800001, 0xFF800003], np.uint32), close.shape)
    sparse |= rng.choice(np.array([0, 0, 0x7FFFF0, 0x7FFFFF], np.uint32), close.shape)
    near = close[:, :1] + np.stack([np.zeros(count), rng.integers(-3, 4, count) + 2**31], 1).astype(np.uint32)
    return np.concatenate([pairs, drawn, close, sparse, near])


def through(dut, names, columns, stalls, rng):
    """Present a row per cycle in which the pipeline moves; returns the results as integers."""
    results = []

    async def bench(ctx):
        rows = len(columns[0])
        for step in range(rows + dut.latency):
            for name, column in zip(names, columns, strict=True):
                port = getattr(dut, name)
                ctx.set(getattr(port, "as_value", lambda port=port: port)(), int(column[min(step, rows - 1)]))
            while stalls and rng.random() < stalls:
                ctx.set(dut.enable, 0)
                await ctx.tick()
            if step >= dut.latency:
                results.append(ctx.get(dut.number.as_value()))
            ctx.set(dut.enable, 1)
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return results


@pytest.mark.parametrize("width", [2, 20, 24, 25, 26, 32, 64])
def test_integers_become_the_nearest_numbers_whatever_the_stalls(width, seed):
    rng = np.random.default_rng(seed)
    numbers = integers(width, rng, 100)
    assert through(IntToFloat(width), ["value"], [numbers], 0.2, rng) == from_int(numbers).tolist()
    assert len(numbers) > 100


def test_products_are_the_nearest_numbers_whatever_the_stalls(seed):
    rng = np.random.default_rng(seed)
    a, b = factors(rng, 200)[rng.permutation(len(PATTERNS) ** 2 * 2 + 600)[:1500]].T
    assert through(FloatMultiply(), ["a", "b"], [a, b], 0.1, rng) == multiply(a, b).tolist()
    assert len(a) == 1500


def test_sums_are_the_nearest_numbers_whatever_the_stalls(seed):
    rng = np.random.default_rng(seed)
    rows = terms(rng, 300)
    a, b = rows[rng.permutation(len(rows))[:1500]].T
    assert through(FloatAdd(), ["a", "b"], [a, b], 0.1, rng) == add(a, b).tolist()
    assert len(a) == 1500


@pytest.mark.parametrize("width", [1, 65])
def test_widths_beyond_the_range_are_refused(width):
    with pytest.raises(ValueError, match=f"^width must be from 2 to 64, not {width}$"):
        IntToFloat(width)


def bulk(dut, widths):
    """Return a function that runs columns through the emitted Verilog."""
    ports = [{"name": "clk", "direction": "input", "width": 1}, {"name": "enable", "direction": "input", "width": 1}]
    ports += [{"name": name, "direction": "input", "width": width} for name, width in widths.items()]
    ports += [{"name": "number", "direction": "output", "width": 32}]
    text = to_verilog(dut, "block")
    assert "rst" not in text
    harness = BulkHarness({"block.v": text}, {"top": "block", "ports": ports})

    def run(**columns):
        padded = {name: np.append(column, column[:1].repeat(dut.latency)) for name, column in columns.items()}
        enable = np.ones(len(next(iter(padded.values()))), np.uint8)
        return harness.run({"enable": enable, **padded})["number"][dut.latency :]

    return run


def test_many_integers_in_the_emitted_verilog(seed):
    numbers = integers(64, np.random.default_rng(seed), 200_000)
    results = bulk(IntToFloat(64), {"value": 64})(value=numbers.view(np.uint64))
    assert len(results) == len(numbers) > 200_000
    np.testing.assert_array_equal(results, from_int(numbers))


@pytest.fixture(scope="module")
def product_rows():
    return factors(np.random.default_rng(12), 150_000)


def test_many_products_in_the_emitted_verilog(product_rows):
    a, b = product_rows.T
    results = bulk(FloatMultiply(), {"a": 32, "b": 32})(a=a, b=b)
    expected = multiply(a, b)
    assert len(results) == len(a) > 450_000
    np.testing.assert_array_equal(results, expected)
    subnormal = (expected << np.uint32(1) != 0) & (expected & np.uint32(0x7F800000) == 0)
    infinite = expected & np.uint32(0x7FFFFFFF) == 0x7F800000
    assert min(subnormal.sum(), infinite.sum()) > 10_000


def test_many_sums_in_the_emitted_verilog(seed):
    a, b = terms(np.random.default_rng(seed), 300_000).T
    results = bulk(FloatAdd(), {"a": 32, "b": 32})(a=a, b=b)
    expected = add(a, b)
    assert len(results) == len(a) > 1_200_000
    np.testing.assert_array_equal(results, expected)
    subnormal = (expected << np.uint32(1) != 0) & (expected & np.uint32(0x7F800000) == 0)
    assert min(subnormal.sum(), (expected << np.uint32(1) == 0).sum()) > 1000


BUGS = {
    "ties go up": (IntToFloat, "short[1] & (short[0] | short[2])", "short[1]"),
    "no sticky bit of an integer": (IntToFloat, "padded[: below - 1].any()", "Const(0, 1)"),
    "the least integer": (IntToFloat, "[negative, magnitude]", "[negative, magnitude & (1 << width - 1) - 1]"),
    "ties of products go up": (FloatMultiply, "short[1] & (short[0] | short[2])", "short[1]"),
    "bits shifted out are lost": (FloatMultiply, "distance[step] & right & lost", "Const(0, 1)"),
    "a shift too short": (FloatMultiply, "Mux(need > _SIGNIFICAND + 2, _SIGNIFICAND + 2, need)", "need"),
    "subnormals flushed": (FloatMultiply, "room < zeros", "Const(0, 1)"),
    "overflow unnoticed": (FloatMultiply, "(1 << _EXPONENT) - 1)):", "1 << _EXPONENT)):"),
    "ties of sums go up": (FloatAdd, "short[1] & (short[0] | short[2])", "short[1]"),
    "bits aligned away are lost": (FloatAdd, "shifted[0] | sticky", "shifted[0]"),
    "one step of alignment too few": (FloatAdd, "Mux(gap > width, width, gap)", "gap"),
    "subnormal sums": (FloatAdd, "total | lowest", "total"),
    "what cancels is negative": (FloatAdd, "large.sign & ~cancels", "large.sign"),
    "infinities of two signs": (FloatAdd, "(a.is_infinite() & b.is_infinite() & differ)", "Const(0, 1)"),
    "a sum beyond the largest": (FloatAdd, " | rounded[_FRACTION:].all()", ""),
    "zero times infinity": (FloatMultiply, "| (zero[0] & infinite[1])", ""),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    """The same comparison as above, with one expression of the source changed."""
    source, before, after = BUGS[bug]
    text = inspect.getsource(source)
    assert text.count(before) == 1
    scope = dict(vars(hdl.lib.fp32))
    exec(text.replace(before, after), scope)
    rng = np.random.default_rng(7)
    if source is IntToFloat:
        columns = {"value": integers(64, rng, 50)}
        expected = from_int(columns["value"])
    else:
        a, b = (terms if source is FloatAdd else factors)(rng, 100).T
        columns = {"a": a, "b": b}
        expected = (add if source is FloatAdd else multiply)(a, b)
    assert through(scope[source.__name__](), list(columns), list(columns.values()), 0, rng) != expected.tolist()
