"""One structure, one text: names and order of the input leave no trace, function and ports stay."""

import json
import random

import pytest

from synth.canonical import canonical
from synth.yosys import measure, run_yosys, work_folder

DESIGN = """\
module leaf(input [1:0] x, output y);
  assign y = ^x;
endmodule
module top(input clk, input [3:0] b, input [3:0] a, output [4:0] sum, output reg [3:0] q, output parity);
  wire inner;
  reg [2:0] state = 3'b01x;
  leaf one(.x(a[1:0]), .y(inner));
  leaf two(.x({inner, b[0]}), .y(parity));
  assign sum = a + b;
  always @(posedge clk) begin
    state <= {state[1:0], state[2] ^ parity};
    q <= q + {1'b0, state};
  end
endmodule
"""


@pytest.fixture(scope="module")
def gates():
    """Gates of DESIGN, hierarchical, as Yosys writes them."""
    with work_folder("gates") as folder:
        (folder / "design.v").write_text(DESIGN)
        run_yosys("read_verilog design.v\nsynth -noabc -top top\nwrite_json gates.json\n", folder)
        return (folder / "gates.json").read_text()


def cell(kind, **pins):
    directions = {pin: "output" if pin in ("Y", "Q") else "input" for pin in pins}
    connections = {pin: [bit] for pin, bit in pins.items()}
    return {
        "hide_name": 1,
        "type": kind,
        "parameters": {},
        "attributes": {"src": f"design.v:{len(pins)}"},
        "port_directions": directions,
        "connections": connections,
    }


def netlist(ports, cells, wires=None):
    ports = {
        name: {"direction": "output" if name[0] in "yz" else "input", "bits": bits} for name, bits in ports.items()
    }
    return json.dumps({"modules": {"top": {"attributes": {}, "ports": ports, "cells": cells, "netnames": wires or {}}}})


def wire(*bits, **attributes):
    return {"hide_name": 0, "bits": list(bits), "attributes": attributes}


def only(text):
    return json.loads(text)["modules"]["top"]


def shuffled(items, generator):
    items = list(items)
    generator.shuffle(items)
    return dict(items)


def disguised(text, seed):
    """The same netlist with other names of cells and wires, other numbers of nets, all in another order."""
    generator = random.Random(seed)
    modules = json.loads(text)["modules"]
    for module in modules.values():
        bits = {bit for port in module["ports"].values() for bit in port["bits"]}
        bits |= {bit for c in module["cells"].values() for pins in c["connections"].values() for bit in pins}
        bits |= {bit for wire in module["netnames"].values() for bit in wire["bits"]}
        old = sorted(bit for bit in bits if isinstance(bit, int))
        new = dict(zip(old, generator.sample(range(2, 9 * len(old) + 2), len(old)), strict=True))

        def renumber(pins, new=new):
            return [new.get(bit, bit) for bit in pins]

        for port in module["ports"].values():
            port["bits"] = renumber(port["bits"])
        for each in module["cells"].values():
            each["connections"] = shuffled(
                ((pin, renumber(pins)) for pin, pins in each["connections"].items()), generator
            )
            each["port_directions"] = shuffled(each["port_directions"].items(), generator)
            each["attributes"] = {"src": f"other.v:{generator.random()}"}
        for each in module["netnames"].values():
            each["bits"] = renumber(each["bits"])
        for kind in ("cells", "netnames"):
            names = {name: f"{generator.choice('$abc')}{generator.getrandbits(40)}" for name in module[kind]}
            module[kind] = shuffled(((names[name], value) for name, value in module[kind].items()), generator)
    return json.dumps({"modules": shuffled(modules.items(), generator)})


@pytest.mark.parametrize("seed", range(20))
def test_names_numbers_and_order_leave_no_trace(gates, seed):
    other = disguised(gates, seed)
    assert other != gates
    assert canonical(other) == canonical(gates)


def test_it_is_its_own_canonical_form(gates):
    assert canonical(canonical(gates)) == canonical(gates)


def test_another_structure_gives_another_text():
    ports = {"a": [2], "b": [3], "y": [4]}
    texts = [
        canonical(netlist(ports, {"g": cell("$_AND_", A=2, B=3, Y=4)})),
        canonical(netlist(ports, {"g": cell("$_AND_", A=3, B=2, Y=4)})),
        canonical(netlist(ports, {"g": cell("$_OR_", A=2, B=3, Y=4)})),
        canonical(netlist(ports, {"g": cell("$_AND_", A=2, B="1", Y=4)})),
    ]
    assert len(set(texts)) == 4


def test_ports_keep_names_order_directions_and_widths(gates):
    before, after = json.loads(gates)["modules"], json.loads(canonical(gates))["modules"]
    assert set(after) == {"leaf", "top"}
    for name, module in after.items():
        ports = [(port, value["direction"], len(value["bits"])) for port, value in module["ports"].items()]
        assert ports == [
            (port, value["direction"], len(value["bits"])) for port, value in before[name]["ports"].items()
        ]


def test_only_cells_are_left_of_the_names(gates):
    before, after = json.loads(gates)["modules"]["top"], only(canonical(gates))
    assert sorted(c["type"] for c in after["cells"].values()) == sorted(c["type"] for c in before["cells"].values())
    assert list(after["cells"]) == [f"c{index}" for index in range(len(after["cells"]))]
    assert all(c["attributes"] == {} for c in after["cells"].values())
    assert {name[0] for name in after["netnames"]} == {"i"}


def test_a_cell_stands_after_those_that_it_needs():
    cells = {
        "last": cell("$_AND_", A=5, B=2, Y=4),
        "first": cell("$_NOT_", A=3, Y=6),
        "middle": cell("$_XOR_", A=6, B=2, Y=5),
    }
    result = only(canonical(netlist({"a": [2], "b": [3], "y": [4]}, cells)))
    assert [c["type"] for c in result["cells"].values()] == ["$_NOT_", "$_XOR_", "$_AND_"]


def test_loops_do_not_hang():
    # Two crossed gates, a gate that feeds itself, and a register that feeds itself, which no output needs.
    cells = {
        "r": cell("$_NOR_", A=2, B=5, Y=4),
        "s": cell("$_NOR_", A=3, B=4, Y=5),
        "self": cell("$_NOT_", A=6, Y=6),
        "register": cell("$_DFF_P_", C=2, D=7, Q=7),
    }
    result = only(canonical(netlist({"a": [2], "b": [3], "y": [4], "z": [5]}, cells)))
    assert sorted(c["type"] for c in result["cells"].values()) == ["$_DFF_P_", "$_NOR_", "$_NOR_", "$_NOT_"]


def test_a_long_chain_needs_no_deep_stack():
    length = 20_000
    cells = {f"n{k}": cell("$_NOT_", A=k + 2, Y=k + 3) for k in range(length)}
    result = only(canonical(netlist({"a": [2], "y": [length + 2]}, cells)))
    assert len(result["cells"]) == length


def test_initial_values_stay_with_their_registers():
    cells = {f"r{k}": cell("$_DFF_P_", C=2, D=3, Q=k + 4) for k in range(4)}
    wires = {"state": wire(4, 5, 6, 7, init="x011"), "clock": wire(2)}
    result = only(canonical(netlist({"clk": [2], "d": [3], "y": [7, 6, 5, 4]}, cells, wires)))
    initial = {w["bits"][0]: w["attributes"]["init"] for w in result["netnames"].values()}
    first, second, third, fourth = reversed(result["ports"]["y"]["bits"])
    assert initial == {first: "1", second: "1", third: "0"}
    assert fourth not in initial


def test_names_are_kept_on_request():
    cells = {"g": cell("$_AND_", A=2, B=3, Y=4), "h": cell("$_DFF_P_", C=2, D=4, Q=5)}
    wires = {
        "inner": wire(4),
        "state": wire(5, init="1"),
        "hidden": wire(4) | {"hide_name": 1},
        "unknown": wire(99),
    }
    text = netlist({"clk": [2], "b": [3], "y": [5]}, cells, wires)
    result = only(canonical(text, names=True))
    assert set(result["netnames"]) == {"inner", "state", f"i{result['ports']['y']['bits'][0]}"}
    assert [c["attributes"] for c in result["cells"].values()] == [{"src": "design.v:3"}, {"src": "design.v:3"}]


def test_models_of_library_cells_go():
    modules = json.loads(netlist({"a": [2], "y": [2]}, {}))["modules"]
    for mark in ("blackbox", "whitebox"):
        modules[mark] = modules["top"] | {"attributes": {mark: "1"}}
    assert set(json.loads(canonical(json.dumps({"modules": modules})))["modules"]) == {"top"}


@pytest.mark.parametrize("names", [False, True])
def test_function_is_unchanged(gates, names, build_folder):
    """Outputs agree in every cycle from the initial state on, for any input."""
    (build_folder / "gold.json").write_text(gates)
    (build_folder / "gate.json").write_text(canonical(gates, names=names))
    sides = []
    for side in ("gold", "gate"):
        sides += [f"read_json {side}.json", "hierarchy -top top", "flatten", "opt_clean", f"rename top {side}"]
        sides += ["delete leaf", f"design -stash {side}"]
    script = [
        *sides,
        "design -copy-from gold -as gold gold",
        "design -copy-from gate -as gate gate",
        "miter -equiv -flatten -make_assert gold gate miter",
        "hierarchy -top miter",
        # Both sides start from zero where no initial value is given.
        "setundef -init -zero",
        "sat -verify -seq 1 -tempinduct -maxsteps 8 -prove-asserts miter",
    ]
    run_yosys("\n".join(script) + "\n", build_folder)


@pytest.mark.parametrize("name", ["c0", "c1", "i5", "i_5", "c_0"])
def test_a_port_may_be_called_like_a_new_cell_or_wire(name):
    """Port c0 once stopped Yosys, and port i5, when net 5 was a register with an initial value, was joined to it."""
    design = f"module top(input clk, d, {name}, output reg q = 0, output z);\n"
    design += f"  always @(posedge clk) q <= d;\n  assign z = {name} ^ q;\nendmodule\n"
    assert measure(design, "top").modules["top"].cells == {"DFF": 1, "XOR2": 1}


def test_a_kept_wire_may_be_called_like_a_new_cell_or_wire():
    cells = {"g": cell("$_NOT_", A=3, Y=5), "r": cell("$_DFF_P_", C=2, D=5, Q=4)}
    wires = {"c0": wire(5), "c_1": wire(5), "i4": wire(5), "state": wire(4, init="1")}
    result = only(canonical(netlist({"clk": [2], "a": [3], "y": [4]}, cells, wires), names=True))
    assert not result["cells"].keys() & (result["netnames"].keys() | result["ports"].keys())
    assert set(result["netnames"]) == {"c0", "c_1", "i4", "i_4", "state"}
    assert result["netnames"]["i4"]["attributes"] == {}
