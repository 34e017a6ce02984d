# amaranth: UnusedElaboratable=no
"""Sums of squares and the root of their ratio in hardware: bit for bit the model."""

import inspect

import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.sim import Simulator

import hdl.activity
from hdl.activity import RootOfRatio, SquareSum, rounded_sum
from model import activity as model


def beats_of_all_kinds(rng, count, lanes):
    """Patterns (beats, lanes): ordinary, of all sizes, growing and shrinking, zeros, subnormal, not finite."""
    ordinary = rng.standard_normal((count, lanes)).astype(np.float32).view(np.uint32)
    anything = rng.integers(0, 2**32, (count, lanes), np.uint32)
    small = rng.integers(0, 2**23, (count, lanes), np.uint32)
    scaled = (
        (rng.standard_normal((count, lanes)) * 2.0 ** rng.integers(-40, 40, (count, 1)))
        .astype(np.float32)
        .view(np.uint32)
    )
    zeros = np.where(rng.random((count, lanes)) < 0.8, 0, ordinary).astype(np.uint32)
    return [
        ordinary,
        np.concatenate([small, scaled, ordinary]),
        np.concatenate([zeros, scaled]),
        anything,
        np.zeros_like(zeros),
    ]


def sums(source, lanes, parts, rng):
    """Run parts, each after a clear, with gaps; returns the sums and their roundings."""
    top = Module()
    top.submodules.dut = dut = source(lanes)
    rounded = rounded_sum(top, dut.total, "rounded")
    results = []

    async def bench(ctx):
        for part in parts:
            ctx.set(dut.clear, 1)
            await ctx.tick()
            ctx.set(dut.clear, 0)
            for beat in part.tolist():
                for port, value in zip(dut.numbers, beat, strict=True):
                    ctx.set(port.as_value(), value)
                ctx.set(dut.valid, 1)
                await ctx.tick()
                if rng.random() < 0.2:
                    ctx.set(dut.valid, 0)
                    await ctx.tick()
            ctx.set(dut.valid, 0)
            # The beat on its way for longest has gone one stage by now.
            for _ in range(dut.latency - 1):
                await ctx.tick()
            assert not ctx.get(dut.busy)
            significand, exponent = ctx.get(dut.total.significand), ctx.get(dut.total.exponent)
            # The exponent of 0 means nothing.
            results.append((significand, exponent if significand else 0, ctx.get(rounded.as_value())))

    simulator = Simulator(top)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return results


def expected_sums(parts):
    results = []
    for part in parts:
        total = model.SquareSum()
        total.add(part)
        results.append((total.significand, total.exponent, total.bits))
    return results


@pytest.mark.parametrize("lanes", [1, 3, 16])
def test_sums_are_the_model_s(lanes, seed):
    rng = np.random.default_rng(seed)
    parts = beats_of_all_kinds(rng, 60, lanes)
    assert sums(SquareSum, lanes, parts, rng) == expected_sums(parts)


def pairs(rng, count):
    """Sums of which the root of the ratio is taken: any, of few bits, nearly alike, at the ends, 0."""
    significands = rng.integers(2**31, 2**32, (count, 2))
    exponents = rng.integers(-60, 60, (count, 2))
    few = (significands >> 24) << 24
    few[: count // 2, 1] = 1 << 31
    alike = significands.copy()
    alike[:, 1] = np.clip(alike[:, 0] + rng.integers(-2, 3, count), 2**31, 2**32 - 1)
    ends = [((1 << 31, e), (1 << 31, 0)) for e in (252, 253, 254, 255, 256, -250, -251, -252, -253, -254)]
    ends += [((2**32 - 1, e), (1 << 31, 0)) for e in (-1, 253, 254, 255, -252, -253)]
    ends += [((0, 0), (0, 0)), ((0, 0), (1 << 31, 0)), ((1 << 31, 0), (0, 0))]
    drawn = [
        ((int(s[0]), int(e[0])), (int(s[1]), int(e[1])))
        for part in (significands, few, alike)
        for s, e in zip(part, exponents, strict=True)
    ]
    squares = [((n * n << 32 - (n * n).bit_length(), 0), (1 << 31, 0)) for n in (3, 5, 7, 255, 4095, 65535, 40961)]
    return drawn + ends + squares


def roots(source, rows):
    dut = source()
    results = []

    async def bench(ctx):
        for a, b in rows:
            for port, (significand, exponent) in ((dut.a, a), (dut.b, b)):
                ctx.set(port.significand, significand)
                ctx.set(port.exponent, exponent)
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            cycles = 1
            while not ctx.get(dut.done):
                await ctx.tick()
                cycles += 1
                assert cycles < 100
            results.append(ctx.get(dut.number.as_value()))
            assert dut.latency - 1 <= cycles <= dut.latency
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return results


def test_roots_are_the_model_s(seed):
    rows = pairs(np.random.default_rng(seed), 60)
    assert roots(RootOfRatio, rows) == [model.activity(model.SquareSum(*a), model.SquareSum(*b)) for a, b in rows]
    assert len(rows) > 180


BUGS = {
    "numbers that are not finite": (SquareSum, "number.exponent.all()", "0"),
    "a long way apart": (SquareSum, "Mux(gap[4:].any(), 0, significand >> gap[:4])", "significand >> gap[:4]"),
    "small beats wrap around": (
        SquareSum,
        "Mux(gap[5:].any(), 0, small.significand >> gap[:5])",
        "small.significand >> gap[:5]",
    ),
    "the carry is lost": (SquareSum, "Mux(added[-1], added[1:], added)", "added"),
    "a sum of 0 has an exponent": (SquareSum, "~state.significand[-1] | ", ""),
    "an odd exponent": (RootOfRatio, "odd.eq((difference ^ wide) & 1)", "odd.eq(0)"),
    "no sticky bit": (RootOfRatio, "short[:2].any() | sticky | left.any()", "0"),
    "nothing before": (RootOfRatio, "self.a.significand[-1] & ~self.b.significand[-1]", "0"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    source, before, after = BUGS[bug]
    text = inspect.getsource(source)
    assert text.count(before) == 1
    scope = dict(vars(hdl.activity))
    exec(text.replace(before, after), scope)
    changed = scope[source.__name__]
    rng = np.random.default_rng(7)
    if source is SquareSum:
        parts = beats_of_all_kinds(rng, 30, 3)
        assert sums(changed, 3, parts, rng) != expected_sums(parts)
    else:
        rows = pairs(rng, 20)
        assert roots(changed, rows) != [model.activity(model.SquareSum(*a), model.SquareSum(*b)) for a, b in rows]


@pytest.mark.parametrize("lanes", [0, 33])
def test_lanes_beyond_the_range_are_refused(lanes):
    with pytest.raises(ValueError, match=f"^lanes must be from 1 to 32, not {lanes}$"):
        SquareSum(lanes)
