# amaranth: UnusedElaboratable=no
"""Activation functions in hardware: bit for bit the model; `test_ppu` has many more numbers."""

import inspect

import numpy as np
import pytest

import hdl.activation
from hdl.activation import Activation
from model.activation import Function, apply
from tests.hdl.test_fp32 import through


def numbers(rng, count):
    """Patterns of all sizes, most of them where something happens, and the ends."""
    ends = [
        0,
        1,
        0x7FFFFF,
        0x800000,
        0x7F7FFFFF,
        0x7F800000,
        0x7FC00000,
        0x7F800001,
        0x42FFFFFF,
        0x43000000,
        0x417FFFFF,
        0x41800000,
    ]
    knots = np.concatenate([np.arange(0, 17, 1 / 8), [127.99999, 103.5, 88.0]]).astype(np.float32).view(np.uint32)
    knots = np.concatenate([knots, knots + 1, np.maximum(knots, 1) - 1])
    near = rng.uniform(0, rng.choice([1.0, 4.0, 16.0, 130.0], count)).astype(np.float32).view(np.uint32)
    wide = rng.integers(0, 2**31, count // 4, np.uint32)
    bits = np.concatenate([np.array(ends, np.uint32), knots, near, wide])
    return np.concatenate([bits, bits | 1 << 31])


@pytest.mark.parametrize("function", Function)
def test_few_numbers_with_stalls(function, seed):
    rng = np.random.default_rng(seed)
    bits = rng.permutation(numbers(rng, 300))[:400]
    columns = [bits, np.full(len(bits), function)]
    assert through(Activation(), ["value", "function"], columns, 0.1, rng) == apply(bits, function).tolist()


BUGS = {
    "cut instead of rounded": ("(shifted >> 1) + shifted[0]", "shifted >> 1", Function.SILU),
    "a piece too early": ("Const(1 + k, 3)", "Const(k, 3)", Function.GELU),
    "nothing is far": ("far.eq(x.scale() > highest)", "far.eq(0)", Function.SILU),
    "GELU far out": ("far | (gelu & above)", "far", Function.GELU),
    "large weights": ("with m.If(share[POWER_POINT])", "with m.If(0)", Function.SILU),
    "subnormal weights": ("significand[1:] >> drop", "0", Function.GELU),
    "NaN below zero": ("x.sign & number", "x.sign", Function.SILU),
    "ReLU of NaN": (
        "self.function == Function.RELU) & x.sign & number",
        "self.function == Function.RELU) & x.sign",
        Function.RELU,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_bugs_are_caught(bug):
    before, after, function = BUGS[bug]
    text = inspect.getsource(Activation)
    assert text.count(before) >= 1
    scope = dict(vars(hdl.activation))
    exec(text.replace(before, after), scope)
    rng = np.random.default_rng(7)
    bits = rng.permutation(numbers(rng, 300))[:600]
    bits = np.concatenate([bits, [0xFFC00001, 0xC1A00000, 0xC2B00000, 0xC1600000]]).astype(np.uint32)
    columns = [bits, np.full(len(bits), function)]
    assert through(scope["Activation"](), ["value", "function"], columns, 0, rng) != apply(bits, function).tolist()
