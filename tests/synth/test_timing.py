"""Delays worked out by hand, the same by OpenSTA where it is, and what the command prints."""

import json
import re

import pytest

from synth import opensta, timing
from synth.liberty import LibertyError
from synth.libraries import find, prepare
from synth.nldm import Table, timed_cells
from synth.sta import analyse
from synth.stat import SynthesisError
from synth.timing import main, time_design
from synth.yosys import synthesise
from tests.synth.timed_library import library

CHAIN = """\
module top(input clk, a, b, output reg q, output y);
  reg first, second;
  always @(posedge clk) begin first <= a; second <= b; q <= ~(first & second); end
  assign y = ~q;
endmodule
"""


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "timed.lib"
    path.write_text(library())
    return find([str(path)])


def test_tables_interpolate_and_extrapolate():
    import numpy as np

    found = Table([0, 10], [1, 2, 4], np.array([[0, 1, 5], [10, 11, 15]]))
    assert [found(0, 1), found(5, 1.5), found(10, 3), found(20, 1), found(0, 5), found(0, 0)] == [0, 5.5, 13, 20, 7, -1]
    assert Table([0], [0], np.array([[3]]))(7, 9) == 3
    assert found.maximum(Table([0, 10], [1, 2, 4], np.full((2, 3), 4))).values == [[4, 4, 5], [10, 11, 15]]


def test_a_path_by_hand(files):
    """Clock to Q of a rising edge with a load of 1: 21, slew 2.5; NAND2 to D, falling: 8.25 + 2, slew 3; set-up 4 + 1.5."""
    result = time_design(CHAIN, "top", files, recipe="area", use_opensta=False)
    path = next(each for each in result.timing.paths if each.end == "q")
    assert path.start in ("first", "second")
    assert [(step.edge, round(step.arrival, 3)) for step in path.steps] == [("rise", 21), ("fall", 31.25)]
    assert (round(path.delay, 3), path.setup) == (36.75, 5.5)
    # A falling output is one slower: 20 + 1 + load 1, then the inverter's rising edge without load, 5 + 0.25.
    out = next(each for each in result.timing.paths if each.end == "y")
    assert (out.start, round(out.delay, 3)) == ("q", 27.25)
    assert result.period == result.timing.period == path.delay
    assert {each.end for each in result.timing.paths} == {"first", "second", "q", "y"}


@pytest.mark.parametrize(("time", "load", "factor"), [("n", "f", 1000), ("p", "p", 1)])
def test_units_of_the_library_become_picoseconds_and_femtofarads(time, load, factor):
    cells = timed_cells(library(time, load), ["INV"])
    scale = {"f": 1, "p": 1000}[load]
    assert cells["INV"].capacitances == {"A": (scale, scale)}
    [rise, fall] = cells["INV"].arcs
    assert (rise.source_edge, rise.target_edge, rise.delay(0, 2 * scale)) == ("fall", "rise", 7 * factor)
    assert (fall.source_edge, fall.target_edge, fall.delay(10 * factor, 0)) == ("rise", "fall", 7 * factor)


ADD = """\
module top(input clk, input [2:0] a, b, c, d, e, f, input [7:0] p, output reg [7:0] s, output reg [3:0] x);
  reg [2:0] i, j, k, l, m, n;
  always @(posedge clk) begin
    i <= a; j <= b; k <= c; l <= d; m <= e; n <= f;
    s <= i + j + k + l + m + n + p; x <= i ^ j ^ (k & l);
  end
endmodule
"""


@pytest.mark.skipif(not opensta.available(), reason="needs OpenSTA")
@pytest.mark.parametrize("recipe", ["area", "speed"])
def test_opensta_finds_the_same_period(recipe, files):
    result = time_design(ADD, "top", files, recipe=recipe)
    assert result.engine == "OpenSTA"
    assert result.period == pytest.approx(result.timing.period, rel=1e-5)
    assert result.period > 100


def test_full_adders_are_on_the_paths_and_a_second_run_is_the_same(files):
    first, second = (time_design(ADD, "top", files, use_opensta=False).as_json() for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert first["engine"] == "own analysis"
    assert "FA" in {step["cell"] for step in first["paths"][0]["steps"]}
    assert {"s", "x", "i", "n"} <= {path["end"] for path in first["paths"]}


def test_memories_start_and_end_paths(files):
    design = """\
module top(input clk, we, input [3:0] wa, ra, input d, output y);
  reg store [0:15]; reg q, r;
  always @(posedge clk) begin r <= d; if (we) store[wa] <= ~r; q <= store[ra]; end
  assign y = ~q;
endmodule
"""
    paths = time_design(design, "top", files, recipe="area", use_opensta=False).timing.paths
    # Without clock-to-output time: an inverter of no load.
    assert [(round(path.delay, 2), len(path.steps)) for path in paths if path.end == "y"] == [(6, 2)]
    assert any(path.start == "r" and path.delay > 26 for path in paths)


def test_a_loop_and_an_unknown_cell_are_refused(files):
    netlist = synthesise(CHAIN, "top", liberty=files, names=True)
    cells = timed_cells(netlist.prepared.text, netlist.prepared.library.cells)
    data = json.loads(netlist.json)
    gate = next(c for c in data["modules"]["top"]["cells"].values() if c["type"] == "NAND2")
    gate["connections"]["A"] = gate["connections"]["Y"]
    with pytest.raises(SynthesisError, match=r"^logic must not feed itself; a loop goes through \S+$"):
        analyse(json.dumps(data), "top", cells)
    del cells["NAND2"]
    with pytest.raises(SynthesisError, match=r"^every cell must be in the library for timing; NAND2 is not$"):
        analyse(netlist.json, "top", cells)


def test_a_library_without_delays_is_one_line(tmp_path, capsys):
    (tmp_path / "top.v").write_text(CHAIN)
    arguments = [str(tmp_path / "top.v"), "--top", "top", "--quiet"]
    assert main(arguments) == 1
    assert capsys.readouterr().err == (
        "error: a Liberty file must have delays of its cells for timing, this one has none\n"
    )
    with pytest.raises(LibertyError, match=r"^a Liberty file must have time_unit and capacitive_load_unit for timing$"):
        timed_cells(re.sub("time_unit.*?;", "", library()), ["INV"])
    assert main([*arguments, "--periods", "0"]) == 1
    assert capsys.readouterr().err == "error: --periods must be positive, not 0\n"


def test_the_command_sweeps_periods_and_says_whose_figures_they_are(tmp_path, files, capsys, monkeypatch):
    monkeypatch.setattr(timing.opensta, "available", lambda: False)
    (tmp_path / "top.v").write_text(CHAIN)
    out = tmp_path / "out.json"
    arguments = ["--liberty", str(files.paths[0]), "--periods", "30", "40", "--recipe", "area", "--json", str(out)]
    assert main([str(tmp_path / "top.v"), "--top", "top", "--quiet", *arguments]) == 0
    data = json.loads(out.read_text())
    assert [(each["target_ps"], each["met"], each["period_ps"]) for each in data["results"]] == [
        (30, False, 36.75),
        (40, True, 36.75),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "top, timed.lib, area recipe; before layout, by own analysis"
    assert [line.split()[0::6] for line in lines[3:5]] == [["30", "no"], ["40", "yes"]]
    assert main([str(tmp_path / "top.v"), "--top", "top", "--opensta"]) == 1
    assert capsys.readouterr().err == "error: --opensta needs sta on the path\n"


def test_what_opensta_does_not_read_is_taken_out():
    assert opensta.readable_verilog("output signed [3:0] y; input signed a;") == "output [3:0] y; input a;"
    text = 'x; default_wire_load : "big"; default_wire_load_mode : top; y'
    assert opensta.readable_library(text) == "x;   y"
    assert prepare(find([])).text
