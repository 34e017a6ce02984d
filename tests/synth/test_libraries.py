"""Several Liberty files as one, presets, and which cells a flow may take."""

import re

import pytest

from synth.liberty import GE, LibertyError, load, plain_text
from synth.libraries import PRESETS, LibertyFiles, find, merged, prepare, without
from synth.yosys import measure

UNITS = 'time_unit : "1ns";\n  capacitive_load_unit (1, pf);\n'


def split(tmp_path):
    """Our own library in three files, the second with a timing table and its template."""
    text = plain_text(GE)
    cells = re.findall(r"  cell \(\w+\) \{.*?\n  \}\n", text, re.DOTALL)
    assert len(cells) == 20
    table = 'timing () { cell_rise (t) { values ("1, 2"); } } /* } */'
    parts = [cells[:7], [cells[7].replace("area", f"{table} area"), *cells[8:16]], cells[16:]]
    paths = []
    for k, part in enumerate(parts):
        template = "lu_table_template (t) { variable_1 : x; }\n" if k == 1 else ""
        paths.append(tmp_path / f"part {k}.lib")
        paths[-1].write_text(f"library (p{k}) {{\n  {UNITS}{template}{''.join(part)}}}\n")
    return paths


def test_files_add_up_to_one_library(tmp_path):
    paths = split(tmp_path)
    files = find([str(path) for path in paths])
    assert files == LibertyFiles("part 0.lib + part 1.lib + part 2.lib", tuple(paths))
    prepared = prepare(files)
    assert prepared.library == load(plain_text(GE))
    assert prepared.text.index("lu_table_template") < prepared.text.index("cell_rise")
    assert "cell_rise" not in prepared.cells
    design = "module top(input clk, a, b, output reg q); always @(posedge clk) q <= ~(a & b); endmodule\n"
    assert measure(design, "top", liberty=files) == measure(design, "top")


def test_a_cell_in_two_files_or_other_units_are_refused():
    one, two = (f"library (x) {{ {UNITS} cell ({name}) {{ area : 1; }} }}" for name in "AB")
    with pytest.raises(LibertyError, match=r"^every cell must be in one Liberty file only; A is in x and y$"):
        merged({"x": one, "y": one})
    with pytest.raises(LibertyError, match=r"^Liberty files must have the same time_unit; x and y differ$"):
        merged({"x": one, "y": two.replace("1ns", "1ps")})
    assert set(load(merged({"x": one, "y": two.replace('"1ns"', "1ns")})).cells) == {"A", "B"}


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "osu018"])
def test_presets_are_found_where_their_users_keep_them(name, tmp_path):
    for number, (variable, pattern) in enumerate(PRESETS[name].places):
        root = tmp_path / str(number)
        versions = [re.sub(r"\*+", version, pattern.removesuffix("*")) for version in ("1", "2")]
        for version in versions:
            (root / version).parent.mkdir(parents=True, exist_ok=True)
            (root / version).write_text("")
        found = find([name], {variable: str(root)})
        assert (found.name, found.dont_use) == (name, PRESETS[name].dont_use)
        assert set(found.paths) <= {root / version for version in versions}
        assert found.paths


def test_a_preset_that_is_not_installed_says_where_it_was_sought():
    with pytest.raises(
        LibertyError,
        match=r"^asap7 must be installed; it is in none of: \$ORFS/flow/platforms/asap7/.*; not set: ORFS$",
    ):
        find(["asap7"], {})
    with pytest.raises(LibertyError, match=r"lib\*$"):
        find(["asap7"], {"ORFS": "/nowhere"})


def test_a_preset_stands_alone():
    with pytest.raises(LibertyError, match=r"^ge must be the only library here, not one of .*, ge$"):
        find([str(GE), "ge"])


def test_cells_that_nobody_wants_are_not_there():
    text = without(plain_text(GE), "cell", lambda name: name.startswith("XN"))
    assert set(load(plain_text(GE)).cells) - set(load(text).cells) == {"XNOR2"}
    prepared = prepare(LibertyFiles("ge", (GE,), ("XN*", "MUX?")))
    assert set(load(plain_text(GE)).cells) - set(prepared.library.cells) == {"XNOR2", "MUX2"}
    assert "XNOR2" not in prepared.mapping


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_a_file_that_ends_too_early_is_refused(cut, tmp_path):
    path = tmp_path / "cut.lib"
    text = plain_text(GE)
    path.write_text(text[: int(cut * len(text))])
    with pytest.raises(
        LibertyError, match=r"^cut.lib: every brace of a Liberty file must be closed; this one ends inside a "
    ):
        prepare(path)


INVERTING = """\
cell (DFFN) {{ area : {0};
  ff (IQ, IQN) {{ next_state : "{1}"; clocked_on : "CK"; }}
  pin (CK) {{ direction : input; clock : true; }} pin (D) {{ direction : input; }}
  pin (Q) {{ direction : output; function : "{2}"; }} }}
"""


@pytest.mark.parametrize(
    ("size", "state", "output", "costly"),
    [
        (4.99, "!D", "IQ", ["DFF"]),
        (4.99, "D", "IQN", ["DFF"]),
        (5.01, "!D", "IQ", []),
        (4.99, "D", "IQ", []),
        (4.99, "!D", "IQN", []),
    ],
)
def test_an_inverting_flip_flop_is_taken_if_it_is_smaller_with_its_inverter(size, state, output, costly, tmp_path):
    path = tmp_path / "x.lib"
    text = plain_text(GE).rstrip().removesuffix("}")
    path.write_text(text + INVERTING.format(size, state, output) + "}\n")
    assert prepare(path).library.costly_flip_flops == costly
    design = "module top(input clk, d, output reg q); always @(posedge clk) q <= d; endmodule\n"
    cells = measure(design, "top", liberty=path).modules["top"].cells
    if costly:
        assert cells == {"DFFN": 1, "INV": 1}
