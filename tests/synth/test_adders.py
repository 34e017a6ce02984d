"""Full adders with inverted outputs: whatever adders are turned, the sum stays, and inverters go."""

import json
import random
from graphlib import TopologicalSorter

import pytest

from synth import adders
from synth.liberty import load, truth_table
from synth.libraries import find
from synth.yosys import synthesise
from tests.synth.timed_library import library

LIBRARY = load(library())
SUM = "module top(input [2:0] a, b, c, d, e, output [5:0] y); assign y = a + b + c + d + e; endmodule\n"
VECTORS = 1 << 15
ALL = (1 << VECTORS) - 1
# Input k of fifteen over all vectors, a bit each: k low, k high, and so on.
PATTERNS = [ALL // ((1 << (1 << k)) + 1) << (1 << k) for k in range(15)]


def outputs(design, cells):
    """Bits of y over all inputs, each as a number with a bit for every vector."""
    module = design["modules"]["top"]
    bits = [bit for port in "abcde" for bit in module["ports"][port]["bits"]]
    values = {"0": 0, "1": ALL} | dict(zip(bits, PATTERNS, strict=True))
    used = module["cells"]
    drivers = {
        c["connections"][p][0]: n for n, c in used.items() for p in cells[c["type"]].outputs if c["connections"].get(p)
    }
    graph = {
        n: {drivers[b] for p in cells[c["type"]].inputs for b in c["connections"][p] if b in drivers}
        for n, c in used.items()
    }
    for name in TopologicalSorter(graph).static_order():
        kind, connections = cells[used[name]["type"]], used[name]["connections"]
        given = [values[connections[pin][0]] for pin in kind.inputs]
        for pin, function in kind.outputs.items():
            if connections.get(pin):
                table = truth_table(function, kind.inputs)
                rows = (row for row in range(1 << len(given)) if table >> row & 1)
                values[connections[pin][0]] = sum_of_products(rows, given)
    return [values[bit] for bit in module["ports"]["y"]["bits"]]


def sum_of_products(rows, given):
    result = 0
    for row in rows:
        term = ALL
        for k, value in enumerate(given):
            term &= value if row >> k & 1 else ALL ^ value
        result |= term
    return result


def expected():
    """The sums by counting, one vector after the other."""
    sums = [sum(v >> 3 * k & 7 for k in range(5)) for v in range(VECTORS)]
    return [int("".join(str(s >> bit & 1) for s in reversed(sums)), 2) for bit in range(6)]


@pytest.fixture(scope="module")
def wanted():
    return expected()


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "timed.lib"
    path.write_text(library())
    return find([str(path)])


@pytest.mark.parametrize("sides", ["chosen", "none", "all", "random"])
def test_any_adders_can_be_turned(sides, files, wanted, monkeypatch):
    rng = random.Random(1)
    choose = {"none": lambda: False, "all": lambda: True, "random": lambda: rng.random() < 0.5}.get(sides)
    if choose:
        monkeypatch.setattr(adders, "_two_sides", lambda neighbours: {name: choose() for name in neighbours})
    netlist = synthesise(SUM, "top", liberty=files)
    counts = netlist.area.modules["top"].cells
    assert counts["FA"] >= 5
    design = json.loads(netlist.json)
    # Numbers of so many digits are not for messages.
    assert (outputs(design, LIBRARY.cells) == wanted) is True
    pins = next(c for c in design["modules"]["top"]["cells"].values() if c["type"] == "FA")["connections"]
    pins["SN"], pins["CON"] = pins["CON"], pins["SN"]
    assert (outputs(design, LIBRARY.cells) == wanted) is False


def test_turning_leaves_fewer_inverters(files, monkeypatch):
    turned = synthesise(SUM, "top", liberty=files).area
    monkeypatch.setattr(adders, "_two_sides", lambda neighbours: dict.fromkeys(neighbours, False))
    plain = synthesise(SUM, "top", liberty=files).area
    assert turned.modules["top"].cells["FA"] == plain.modules["top"].cells["FA"]
    assert turned.modules["top"].cells.get("INV", 0) < plain.modules["top"].cells["INV"]
    assert turned.total < plain.total


def test_adders_with_plain_outputs_are_left_alone():
    adder = LIBRARY.full_adder
    assert (adder.sum_inverted, adder.carry_inverted) == (True, True)
    half = adders.lib.FullAdder(adder.cell, "SN", False, "CON", True)
    assert adders.turn_adders("whatever", half) == "whatever"
