"""The Liberty reader, our own library, and what a library must have."""

import gzip
import re

import pytest

from synth.liberty import GE, LibertyError, load, mapping_text, memory_macros, plain_text, truth_table
from synth.yosys import measure

AREAS = {
    **{"INV": 0.67, "BUF": 1, "NAND2": 1, "NOR2": 1, "AND2": 1.33, "OR2": 1.33},
    **{"NAND3": 1.33, "NOR3": 1.33, "NAND4": 1.67, "NOR4": 1.67},
    **{"AOI21": 1.33, "OAI21": 1.33, "AOI22": 1.67, "OAI22": 1.67, "XOR2": 2, "XNOR2": 2, "MUX2": 2.33},
    **{"DFF": 5.67, "DFFR": 6.67, "DFFE": 8},
}
LIBRARY = load(plain_text(GE))
COMBINATIONAL = [name for name, cell in LIBRARY.cells.items() if not cell.sequential and name != "BUF"]


def cell(name, area, function):
    pins = sorted(set(re.findall(r"[A-Z]\w*", function)))
    inputs = "".join(f"pin ({pin}) {{ direction : input; }}\n" for pin in pins)
    return f'cell ({name}) {{ area : {area}; {inputs} pin (Y) {{ direction : output; function : "{function}"; }} }}\n'


FLIP_FLOP = """\
cell (FF) {
  area : 5;
  ff (IQ, IQN) { next_state : "D"; clocked_on : "CK"; }
  pin (CK) { direction : input; clock : true; } pin (D) { direction : input; }
  pin (Q) { direction : output; function : "IQ"; }
}
"""


def library(*cells):
    return f"library (test) {{\n{''.join(cells)}}}\n"


def test_ge_lib_has_the_stated_areas():
    assert {name: cell.area for name, cell in LIBRARY.cells.items()} == AREAS
    assert LIBRARY.nand2_area == 1
    assert {name for name, cell in LIBRARY.cells.items() if cell.flip_flop} == {"DFF", "DFFR", "DFFE"}
    LIBRARY.check("ge.lib")


@pytest.fixture(scope="module")
def cell_areas():
    """Areas that mapping gives to one module per function of a cell."""
    modules, instances = [], []
    for name in COMBINATIONAL:
        pins = LIBRARY.cells[name].inputs
        function = LIBRARY.cells[name].outputs["Y"].replace("!", "~")
        ports = "".join(f"input {pin}, " for pin in pins)
        modules.append(f"module only_{name}({ports}output Y); assign Y = {function}; endmodule\n")
        number = len(instances)
        wires = ", ".join(f".{pin}(i[{k}])" for k, pin in enumerate(pins))
        instances.append(f"only_{name} u{number}({wires}, .Y(o[{number}]));\n")
    top = f"module top(input [3:0] i, output [{len(instances) - 1}:0] o);\n{''.join(instances)}endmodule\n"
    return measure("".join(modules) + top, "top", hierarchical=True).modules


@pytest.mark.parametrize("name", COMBINATIONAL)
def test_every_function_maps_to_its_cell(cell_areas, name):
    assert cell_areas[f"only_{name}"].cells == {name: 1}
    assert cell_areas[f"only_{name}"].total == AREAS[name]


@pytest.mark.parametrize(
    ("statement", "cells"),
    [
        ("always @(posedge clk) q <= d;", {"DFF": 1}),
        ("always @(posedge clk, negedge r) if (!r) q <= 0; else q <= d;", {"DFFR": 1}),
        ("always @(posedge clk) if (r) q <= d;", {"DFFE": 1}),
        # A synchronous reset is a gate before D.
        ("always @(posedge clk) if (!r) q <= 0; else q <= d;", {"AND2": 1, "DFF": 1}),
    ],
)
def test_flip_flops_map_to_their_cells(statement, cells):
    area = measure(f"module top(input clk, r, d, output reg q); {statement} endmodule\n", "top")
    assert area.modules["top"].cells == cells
    assert area.total == pytest.approx(sum(AREAS[name] * number for name, number in cells.items()))


@pytest.mark.parametrize(
    ("function", "inputs", "table"),
    [
        ("A", "A", 0b10),
        ("(!A)", "A", 0b01),
        ("A'", "A", 0b01),
        ("!(A&B)", "AB", 0b0111),
        ("A B", "AB", 0b1000),
        ("A*B + C", "ABC", 0b11111000),
        ("A | B & C", "ABC", 0b11101010),
        ("A^B^C", "ABC", 0b10010110),
        ("(A B)' C'", "ABC", 0b00000111),
        ("1", "A", 0b11),
        ("IQ", "D", None),
        ("(A", "A", None),
    ],
)
def test_truth_table(function, inputs, table):
    assert truth_table(function, list(inputs)) == table


BUFFER, INVERTER = cell("B", 1, "A"), cell("I", 1, "!A")


@pytest.mark.parametrize(
    ("cells", "missing"),
    [
        ([INVERTER, FLIP_FLOP], "buffer"),
        ([BUFFER, FLIP_FLOP], "inverter"),
        ([BUFFER, INVERTER], "flip-flop"),
        ([BUFFER.replace("{ area", "{ dont_use : true; area"), INVERTER], "buffer, flip-flop"),
    ],
)
def test_missing_cells_are_named(cells, missing, tmp_path):
    path = tmp_path / "some.lib"
    path.write_text(library(*cells))
    message = f"Liberty file must have a buffer, an inverter and a flip-flop; some.lib lacks: {missing}"
    with pytest.raises(LibertyError, match=f"^{re.escape(message)}$"):
        measure("module top(input a, output y); assign y = !a; endmodule\n", "top", liberty=path)


def test_text_that_is_no_library_is_refused(tmp_path):
    with pytest.raises(LibertyError, match=r"^a Liberty file must have cells, this one has none$"):
        load("library (nothing) { }")
    with pytest.raises(LibertyError, match=r"^every cell of a Liberty file must have an area; B has none$"):
        load(library(BUFFER.replace("area : 1;", "")))
    absent = tmp_path / "absent.lib"
    with pytest.raises(LibertyError, match=f"^Liberty file must be readable, {re.escape(str(absent))} is not: "):
        plain_text(absent)
    broken = tmp_path / "broken.lib.gz"
    broken.write_bytes(gzip.compress(b"library (x) { }" * 100)[:-9])
    with pytest.raises(LibertyError, match=r"^Liberty file must be readable, "):
        plain_text(broken)


def test_braces_in_strings_and_comments_do_not_count():
    text = library('/* cell (X) { */ comment : "} cell (Y) {";\n', BUFFER)
    assert set(load(text).cells) == {"B"}


def test_quoted_names_and_areas_are_read():
    text = library('cell ("B") { area : "1.50"; pin ("A") { direction : "input"; } }\n')
    found = load(text)
    assert (found.cells["B"].area, found.cells["B"].inputs) == (1.5, ("A",))
    assert load(mapping_text(text, found)).cells["B"].area == 100


def test_areas_for_mapping_are_distinct_exact_and_in_order():
    mapping = load(mapping_text(plain_text(GE), LIBRARY))
    areas = {name: cell.area for name, cell in mapping.cells.items()}
    assert len(set(areas.values())) == len(AREAS)
    assert all(area == round(4 * area) / 4 for area in areas.values())
    for a, first in AREAS.items():
        assert areas[a] == pytest.approx(first * 100 / 0.67, rel=0.01)
        for b, second in AREAS.items():
            assert first >= second or areas[a] < areas[b]


ADDER = """\
cell (FA) {{
  area : {area};
  pin (P) {{ direction : input; }} pin (Q) {{ direction : input; }} pin (R) {{ direction : input; }}
  pin (S) {{ direction : output; function : "{sum}"; }}
  pin (C) {{ direction : output; function : "{carry}"; }}
}}
"""


@pytest.mark.parametrize("sum_inverted", [False, True])
@pytest.mark.parametrize("carry_inverted", [False, True])
def test_full_adder_is_found(sum_inverted, carry_inverted):
    total, carry = "P^Q^R", "(P&Q)|(P&R)|(Q&R)"
    adder = load(
        library(
            ADDER.format(
                area=5,
                sum=f"!({total})" if sum_inverted else total,
                carry=f"!({carry})" if carry_inverted else carry,
            )
        )
    ).full_adder
    assert (adder.cell.name, adder.sum_pin, adder.carry_pin) == ("FA", "S", "C")
    assert (adder.sum_inverted, adder.carry_inverted) == (sum_inverted, carry_inverted)
    assert LIBRARY.full_adder is None


@pytest.mark.parametrize(
    ("width", "bits", "area"), [("8", "80", "1"), ("0", "4", "1"), ("8.5", "4", "1"), ("8", "4", "nan")]
)
def test_a_memory_without_a_size_is_refused(width, bits, area, tmp_path):
    path = tmp_path / "ram.lib"
    sizes = f"memory () {{ address_width : {bits}; word_width : {width}; }}"
    path.write_text(f"library (x) {{ cell (m) {{ area : {area}; {sizes} }} }}")
    message = f"those of m in ram.lib are {width}, {bits} and {area}"
    with pytest.raises(LibertyError, match=f"^word_width, .* must be sizes; {re.escape(message)}$"):
        memory_macros(path)
