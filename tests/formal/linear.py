"""Sums of many terms, which a bit-level solver cannot do: adder trees by exact normal form, what feeds them lane by lane.

The netlist is Yosys' reading of the emitted Verilog: one-bit gates and word adders. Its output is a polynomial ``Σ coefficient · bit`` modulo
``2**width``. The bits of an adder's output are replaced by those of its operands where the coefficients read them as one number and that number
is exact: either what the adder drops is worth a multiple of the modulus, or its operands' intervals show that it drops nothing. What remains are
bits that no adder makes. If each depends on the inputs of one lane only, the output is a sum of lane terms, and each term can be checked for
all inputs of its lane.
"""

import json
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hdl.lib.toolchain import yosys_command

__all__ = ["Netlist", "NotLinearError", "Polynomial", "all_values"]

_SCRIPT = "read_verilog -sv <<verilog\n{text}\nverilog\nhierarchy -top {top}\nproc\nflatten\ndelete t:$scopeinfo\nopt\nsimplemap\nopt_clean\nwrite_json\n"

Bit = int | str
"""Number of a net, or a constant ``"0"`` or ``"1"``."""


class NotLinearError(Exception):
    """An adder's output is not read as one number, or may lose a carry: the output is no plain sum."""


@dataclass(frozen=True)
class Polynomial:
    """``constant + Σ coefficients[bit] · bit`` modulo ``2**width``."""

    constant: int
    coefficients: Mapping[int, int]
    width: int


@dataclass(frozen=True)
class _Cell:
    kind: str
    inputs: dict[str, list[Bit]]
    output: list[int]
    signed: bool


class Netlist:
    """Gates and adders of a combinational module.

    Parameters
    ----------
    text : str
        Verilog.
    top : str
        Name of the module.
    """

    def __init__(self, text: str, top: str):
        script = _SCRIPT.format(text=text, top=top)
        done = subprocess.run([*yosys_command(), "-q", "-"], input=script, capture_output=True, text=True, check=True)
        module = json.loads(done.stdout)["modules"][top]
        self.ports: dict[str, list[int]] = {name: port["bits"] for name, port in module["ports"].items()}
        inputs = [port["bits"] for port in module["ports"].values() if port["direction"] == "input"]
        self.inputs = {bit for bits in inputs for bit in bits}
        self._driver: dict[int, tuple[_Cell, int]] = {}
        for cell in module["cells"].values():
            parameters = cell["parameters"]
            signed = cell["type"] == "$add" and int(parameters["A_SIGNED"], 2) == int(parameters["B_SIGNED"], 2) == 1
            inputs_of = {name: bits for name, bits in cell["connections"].items() if name != "Y"}
            made = _Cell(cell["type"], inputs_of, cell["connections"]["Y"], signed)
            for place, bit in enumerate(made.output):
                self._driver[bit] = (made, place)

    @property
    def nets(self) -> list[int]:
        """Every bit that a gate or an adder drives."""
        return list(self._driver)

    def moving(self, bits: Sequence[Bit], held: Mapping[int, bool]) -> list[Bit]:
        """Return those of ``bits`` that may move when the inputs in ``held`` keep these values and all others do what they like.

        Gates are looked at one by one, with *unknown* for what moves: a bit that is not in the answer has no glitches in this netlist either.
        """
        unknown = dict.fromkeys(self.inputs, _UNKNOWN) | {bit: _Known(value) for bit, value in held.items()}
        values = self.evaluate(bits, unknown, _Known(False), _Known(True))
        return [bit for bit, value in zip(bits, values, strict=True) if value is _UNKNOWN]

    def support(self, bits: Sequence[Bit]) -> set[int]:
        """Return the input bits that ``bits`` depend on."""
        seen: set[int] = set()
        waiting = list(bits)
        while waiting:
            bit = waiting.pop()
            if isinstance(bit, str) or bit in seen:
                continue
            seen.add(bit)
            if bit not in self.inputs:
                waiting += [b for operand in self._driver[bit][0].inputs.values() for b in operand]
        return seen & self.inputs

    def evaluate(self, bits: Sequence[Bit], values: Mapping[Any, Any], zero: Any, one: Any) -> list[Any]:
        """Return ``bits`` for inputs of any type with ``& | ^ ~``: arrays of bool, or one-bit vectors of z3."""
        known: dict[Bit, Any] = {"0": zero, "1": one, **values}

        def compute(cell: _Cell) -> list[Any]:
            operands = [[known[b] for b in cell.inputs[name]] for name in sorted(cell.inputs)]
            if cell.kind in ("$add", "$mul"):
                width = len(cell.output)
                a, b = ((o + [o[-1] if cell.signed else zero] * width)[:width] for o in operands)
                if cell.kind == "$add":
                    return _ripple(a, b, zero)
                total = [zero] * width
                for shift, chosen in enumerate(b):
                    total = _ripple(total, ([zero] * shift + [x & chosen for x in a])[:width], zero)
                return total
            a, *rest = (operand[0] for operand in operands)
            gates: dict[str, Callable[[], Any]] = {
                "$_AND_": lambda: a & rest[0],
                "$_OR_": lambda: a | rest[0],
                "$_XOR_": lambda: a ^ rest[0],
                "$_XNOR_": lambda: ~(a ^ rest[0]),
                "$_NOT_": lambda: ~a,
                "$_MUX_": lambda: (rest[0] & rest[1]) | (a & ~rest[1]),
            }
            return [gates[cell.kind]()]

        waiting = list(bits)
        while waiting:
            bit = waiting[-1]
            if bit in known:
                waiting.pop()
                continue
            cell = self._driver[bit][0]  # type: ignore[index]
            missing = [b for operand in cell.inputs.values() for b in operand if b not in known]
            if missing:
                waiting += missing
            else:
                known.update(zip(cell.output, compute(cell), strict=True))
        return [known[bit] for bit in bits]

    def normal_form(self, port: str) -> Polynomial:
        """Return output ``port`` as a polynomial of bits that no adder makes.

        Raises
        ------
        NotLinearError
        """
        output = self.ports[port]
        width = len(output)
        modulus = 1 << width
        total: dict[int, int] = defaultdict(int)
        constant = self._add(total, output, 1, signed=False)
        for cell in reversed(self._adders(output)):
            coefficients = [total.pop(bit, 0) % modulus for bit in cell.output]
            if not any(coefficients):
                continue
            factor, top = coefficients[0], len(cell.output) - 1
            if any((c - (factor << i)) % modulus for i, c in enumerate(coefficients[:-1])):
                raise NotLinearError(f"{port}: the output of an adder is taken apart")
            low, high = self._interval(cell)
            unsigned = (coefficients[top] - (factor << top)) % modulus == 0
            as_signed = (coefficients[top] + (factor << top)) % modulus == 0
            wraps = (factor << (top + 1)) % modulus == 0
            if not (
                ((unsigned or as_signed) and wraps)
                or (unsigned and low >= 0 and high < 2 << top)
                or (as_signed and low >= -(1 << top) and high < 1 << top)
            ):
                raise NotLinearError(f"{port}: an adder of {top + 1} bits may lose a carry")
            for operand in cell.inputs.values():
                # An adder narrower than an operand's sign extension is no concern: the value is the operand's, modulo what wraps.
                constant += self._add(total, operand, factor, signed=cell.signed)
        kept = {bit: c % modulus for bit, c in total.items() if c % modulus}
        return Polynomial(constant % modulus, kept, width)

    def _add(self, total: dict[int, int], bits: Sequence[Bit], factor: int, *, signed: bool) -> int:
        """Add ``factor`` times the number that ``bits`` spell to ``total``; inversions become ``1 - bit``. Returns the constant part."""
        constant = 0
        for place, given in enumerate(bits):
            weight, bit = factor << place, given
            if signed and place == len(bits) - 1:
                weight = -weight
            while bit in self._driver and self._driver[bit][0].kind == "$_NOT_":
                constant += weight
                weight, bit = -weight, self._driver[bit][0].inputs["A"][0]
            if isinstance(bit, str):
                constant += weight * int(bit)
            else:
                total[bit] += weight
        return constant

    def _interval(self, cell: _Cell) -> tuple[int, int]:
        """Smallest and largest sum of an adder's operands, each taken for itself."""
        low = high = 0
        for operand in cell.inputs.values():
            base = list(operand)
            while len(base) > 1 and (base[-1] == "0" if not cell.signed else base[-1] == base[-2]):
                base.pop()
            driver = self._driver.get(base[0], (None, 0))[0]  # type: ignore[arg-type]
            negative_part = 1 << (len(base) - 1) if cell.signed and base[-1] != "0" else 0
            bounds = (-negative_part, negative_part - 1) if negative_part else (0, (1 << len(base)) - 1)
            if driver is not None and driver.kind == "$add" and driver.output == base:
                inner = self._interval(driver)
                if bounds[0] <= inner[0] and inner[1] <= bounds[1]:
                    bounds = inner
            low, high = low + bounds[0], high + bounds[1]
        return low, high

    def _adders(self, bits: list[int]) -> list[_Cell]:
        """Adders that ``bits`` are sums of, through adders and inverters alone, each after those that it takes its operands from."""
        order: list[_Cell] = []
        seen: set[int] = set()

        def visit(bit: Bit) -> None:
            if bit not in self._driver:
                return
            cell = self._driver[bit][0]
            if id(cell) in seen or cell.kind not in ("$add", "$_NOT_"):
                return
            seen.add(id(cell))
            for operand in cell.inputs.values():
                for inner in operand:
                    visit(inner)
            if cell.kind == "$add":
                order.append(cell)

        for bit in bits:
            visit(bit)
        return order


class _Known:
    """A bit in three-valued logic: known to be 0 or 1, or ``_UNKNOWN``."""

    def __init__(self, value: bool | None):
        self.value = value

    def __and__(self, other: "_Known") -> "_Known":
        if self.value is False or other.value is False:
            return _Known(False)
        return _UNKNOWN if self.value is None or other.value is None else _Known(True)

    def __or__(self, other: "_Known") -> "_Known":
        return ~(~self & ~other)

    def __xor__(self, other: "_Known") -> "_Known":
        return _UNKNOWN if self.value is None or other.value is None else _Known(self.value != other.value)

    def __invert__(self) -> "_Known":
        return _UNKNOWN if self.value is None else _Known(not self.value)


_UNKNOWN = _Known(None)


def _ripple(a: list[Any], b: list[Any], zero: Any) -> list[Any]:
    carry, total = zero, []
    for x, y in zip(a, b, strict=True):
        total.append(x ^ y ^ carry)
        carry = (x & y) | (carry & (x | y))
    return total


def all_values(bits: list[int]) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Return every assignment of ``bits``: a bool array for each, and the numbers that they spell."""
    numbers = np.arange(1 << len(bits))
    return {bit: numbers >> place & 1 == 1 for place, bit in enumerate(bits)}, numbers
