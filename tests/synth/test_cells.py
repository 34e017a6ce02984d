"""Verilog models of library cells, and reading whole groups of a Liberty file."""

import pytest

from synth.cells import parse, register_of, verilog_model, verilog_models
from synth.liberty import GE, LibertyError, load, truth_table
from synth.liberty_tree import cell_groups, library_group

LIBRARY = """
library ("small") { /* a brace in a comment: } */
  capacitive_load_unit (1, "pf");
  nom_voltage : 0.7 ;
  power_lut_template (two) { variable_1 : input_transition_time; index_1 ("1, 2"); }
  cell ("FA") { area : 5;
    pin (A) { direction : input; } pin (B) { direction : input; } pin (CI) { direction : input; }
    pin (SN) { direction : output; function : "(A ^ B ^ CI)'"; }
    pin (CON) { direction : output; function : "!((A B) + (CI (A + B)))";
      internal_power () { related_pin : "A"; when : "B !CI"
        rise_power (two) { values ("1, \\
                                    2"); } } }
  }
  cell (DFFSRN) { area : 7;
    ff ("IQ", "IQ_N") { clocked_on : "!CK_N"; next_state : "(D E) + (IQ E')"; clear : "!R_N"; preset : "S"; clear_preset_var1 : H; }
    pin (CK_N) { direction : input; clock : true; }
    pin (D) { direction : input; } pin (E) { direction : input; } pin (R_N) { direction : input; } pin (S) { direction : input; }
    pin (Q) { direction : output; function : "IQ"; }
    pin (QN) { direction : output; function : "IQ_N"; }
  }
  cell (LATCH) { area : 4; latch ("IQ", "IQN") { enable : "G"; data_in : "D"; } pin (Q) { direction : output; function : "IQ"; } }
  cell (TBUF) { area : 2; pin (A) { direction : input; } pin (Z) { direction : output; function : "A"; three_state : "E"; } }
}
"""


def test_groups_have_names_attributes_and_tables():
    library = library_group(LIBRARY)
    assert (library.name, library.attributes["nom_voltage"]) == ("small", "0.7")
    assert library.attributes["capacitive_load_unit"] == '1, "pf"'
    assert library.first("power_lut_template").attributes["index_1"] == '"1, 2"'
    adder = cell_groups(LIBRARY, ["FA"])["FA"]
    power = list(adder.all("pin"))[-1].first("internal_power")
    assert power.attributes == {"related_pin": "A", "when": "B !CI"}
    assert "2" in power.first("rise_power").attributes["values"]
    with pytest.raises(LibertyError, match="NAND2 is not"):
        cell_groups(LIBRARY, ["FA", "NAND2"])
    with pytest.raises(LibertyError, match="must have a library"):
        library_group("")


def test_functions_of_every_own_cell_have_the_right_truth_tables():
    text = GE.read_text()
    compared = 0
    for cell in load(text).cells.values():
        for function in cell.outputs.values() if not cell.sequential else ():
            size = 1 << len(cell.inputs)
            values = {"0": 0, "1": (1 << size) - 1} | {
                name: sum((row >> k & 1) << row for row in range(size)) for k, name in enumerate(cell.inputs)
            }
            assert parse(function).of(values) & values["1"] == truth_table(function, cell.inputs)
            compared += 1
    assert compared > 15


@pytest.mark.parametrize(
    ("function", "verilog"),
    [
        ("A", "A"),
        ("A B + C", "((A & B) | C)"),
        ("!A ^ B' & 1", "(((~A) ^ (~B)) & 1'b1)"),
        ("(A + B)'", "(~(A | B))"),
        ("A | B * C", "(A | (B & C))"),
    ],
)
def test_precedence(function, verilog):
    assert parse(function).verilog == verilog
    assert parse(function).pins == set("ABC") & set(function)


@pytest.mark.parametrize("function", ["", "A +", "(A", "A)", "A ? B"])
def test_what_is_no_function_is_refused(function):
    with pytest.raises(LibertyError, match="a function must be Boolean"):
        parse(function)


def test_flip_flops_have_their_edge_enable_clear_and_preset():
    cell = cell_groups(LIBRARY, ["DFFSRN"])["DFFSRN"]
    register = register_of(cell)
    assert (register.clock, register.rising, register.preset_wins) == ("CK_N", False, True)
    lines = [line.strip() for line in verilog_model(cell).splitlines()]
    assert lines[4:9] == [
        "wire clear__ = (~R_N);",
        "always @(negedge CK_N or posedge preset__ or posedge clear__)",
        "if (preset__) IQ <= 1'b1; else",
        "if (clear__) IQ <= 1'b0; else",
        "IQ <= ((D & E) | (IQ & (~E)));",
    ]
    assert "assign QN = IQ_N;" in lines


@pytest.mark.parametrize(("name", "reason"), [("LATCH", "has a latch group"), ("TBUF", "TBUF.Z has none")])
def test_latches_and_buses_drivers_are_refused(name, reason):
    with pytest.raises(LibertyError, match=reason):
        verilog_model(cell_groups(LIBRARY, [name])[name])


def test_every_own_cell_has_a_model():
    cells = cell_groups(GE.read_text(), load(GE.read_text()).cells)
    assert verilog_models(cells).count("endmodule") == len(cells) > 18
