"""The sweep command: areas of real blocks, tables in three formats, pictures, one line for every error."""

import csv
import json
from types import SimpleNamespace

import pytest

from hdl.build import BLOCKS
from synth.liberty import GE
from synth.sweep import area_point, columns, main, write_table
from tests.synth import timed_library

FUNCTION = ["--function", "tests.synth.sweep_points:square", "--vary", "i=2,1,3", "kind=a,b", "--jobs", "1"]


def sweep(folder, *arguments):
    return main([*arguments, "-o", str(folder)])


def test_tables_have_the_same_rows_and_bytes(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("one", "two"):
        assert sweep(tmp_path / name, *FUNCTION, "--format", "csv", "json", "parquet", "--pareto", "i", "square") == 0
        assert capsys.readouterr().out == f"6 points, 0 refused, in {tmp_path / name}\n"
    one, two = tmp_path / "one", tmp_path / "two"
    names = {path.name for path in one.iterdir()}
    assert names == {
        *("points.jsonl", "sweep.csv", "sweep.json", "sweep.parquet", "pareto.csv", "pareto.svg", "pareto.png")
    }
    assert [name for name in names if (one / name).read_bytes() != (two / name).read_bytes()] == []
    rows = [{"i": i, "kind": kind, "square": i * i, "name": f"{kind} {i}"} for i in (2, 1, 3) for kind in ("a", "b")]
    assert json.loads((one / "sweep.json").read_text()) == {"function": FUNCTION[1], "rows": rows}
    assert parquet.read_table(one / "sweep.parquet").to_pylist() == rows
    with (one / "sweep.csv").open() as file:
        assert list(csv.DictReader(file)) == [{name: str(value) for name, value in row.items()} for row in rows]
    # Whatever is kept of the first run, the tables of the second are the same.
    assert sweep(one, *FUNCTION, "--format", "csv") == 0
    assert (one / "sweep.csv").read_bytes() == (two / "sweep.csv").read_bytes()


def test_values_are_numbers_where_they_are_in_json(tmp_path):
    function = "tests.synth.sweep_points:picky"
    assert sweep(tmp_path, "--function", function, "--vary", "i=1,0.5", "name=x,true", "--jobs", "1") == 0
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [(row["i"], row["name"]) for row in rows] == [(1, "x"), (1, True), (0.5, "x"), (0.5, True)]
    assert [row.get("refused") for row in rows] == ["i must not be 1", "i must not be 1", None, None]
    assert (tmp_path / "sweep.csv").read_text() == (
        "i,name,refused,square\n1,x,i must not be 1,\n1,true,i must not be 1,\n0.5,x,,0.25\n0.5,true,,0.25\n"
    )


def test_columns_are_in_the_order_in_which_they_come():
    assert columns([{"a": 1, "c": 2}, {"a": 1, "b": 3}]) == ["a", "c", "b"]


def test_a_table_has_a_known_format(tmp_path):
    with pytest.raises(ValueError, match=r"^table must end in \.csv, \.json, \.parquet, not rows\.xls$"):
        write_table([], tmp_path / "rows.xls")


def test_refused_points_are_not_in_the_picture(tmp_path):
    function = ["--function", "tests.synth.sweep_points:picky", "--vary", "i=1,3,4", "--jobs", "1"]
    assert sweep(tmp_path, *function, "--pareto", "i", "square") == 0
    with (tmp_path / "pareto.csv").open() as file:
        assert [row["i"] for row in csv.DictReader(file)] == ["3"]


def test_fronts_are_one_a_group(tmp_path):
    assert sweep(tmp_path, *FUNCTION, "--pareto", "i", "square", "--larger", "square", "--by", "kind") == 0
    with (tmp_path / "pareto.csv").open() as file:
        rows = [(row["kind"], row["i"]) for row in csv.DictReader(file)]
    assert rows == [(kind, i) for kind in ("a", "b") for i in ("1", "2", "3")]
    assert "kind" not in (tmp_path / "pareto.svg").read_text().partition("<svg")[0]


# Areas


def test_areas_of_a_block(tmp_path, capsys, monkeypatch):
    def generate(block, *, lanes):
        BLOCKS[block].config(lanes=lanes)
        return SimpleNamespace(verilog=f"module {block}(input [{lanes}:0] i, output o); assign o = ~&i[1:0]; endmodule")

    monkeypatch.setattr("synth.sweep.generate", generate)
    copy = tmp_path / "other name.lib"
    copy.write_bytes(GE.read_bytes())
    arguments = ["weight_encoder", "--vary", "lanes=32,33", "--liberty", str(GE), str(copy), "--jobs", "1"]
    assert sweep(tmp_path / "areas", *arguments) == 0
    assert capsys.readouterr().out.startswith("4 points, 2 refused, in ")
    data = json.loads((tmp_path / "areas/sweep.json").read_text())
    assert data["block"] == "weight_encoder"
    one, refused, two, _ = data["rows"]
    assert refused == {
        **{"library": "ge", "recipe": "area", "lanes": 33},
        "refused": "lanes must be a positive multiple of 32, not 33",
    }
    point = {"library": "ge", "recipe": "area", "lanes": 32}
    assert one == {**point, "area": 1, "registers": 0, "combinational": 1, "gate_equivalents": 1, "memory_bits": 0}
    assert two == one | {"library": "other name"}


def test_clocks_are_an_axis_that_sizes_cells(tmp_path, monkeypatch):
    """As in test_timing: 31.25 ps from a clock edge to D and 5.5 ps of set-up are 36.75 ps, which 27 GHz leaves and 28 GHz does not."""
    chain = (
        "module vmac(input clk, a, b, output reg q); reg first, second; "
        "always @(posedge clk) begin first <= a; second <= b; q <= ~(first & second); end endmodule"
    )
    monkeypatch.setattr("synth.sweep.generate", lambda block, **parameters: SimpleNamespace(verilog=chain))
    library = tmp_path / "timed.lib"
    library.write_text(timed_library.library())
    arguments = ["vmac", "--liberty", str(library), "--clock", "27000", "28000", "--recipe", "area", "--jobs", "1"]
    assert sweep(tmp_path / "clocks", *arguments) == 0
    rows = json.loads((tmp_path / "clocks/sweep.json").read_text())["rows"]
    assert [(row["clock_mhz"], row["period_ps"], row["met"]) for row in rows] == [
        (27000, 36.75, True),
        (28000, 36.75, False),
    ]


def test_clocks_reach_the_recipe(monkeypatch):
    seen = []

    def synthesise(verilog, top, **options):
        seen.append((options["recipe"], options["period"], options["names"]))
        raise ValueError("enough")

    monkeypatch.setattr("synth.sweep.synthesise", synthesise)
    monkeypatch.setattr("synth.sweep.generate", lambda block, **parameters: SimpleNamespace(verilog=""))
    for clock in ({}, {"clock_mhz": 500.0}):
        with pytest.raises(ValueError, match="enough"):
            area_point({"library": "ge", "recipe": "speed", **clock}, block="vmac", libraries={"ge": "ge"})
    assert seen == [("speed", None, False), ("speed", 2000.0, True)]


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "block must be one of vmac, "),
        (["vmax"], "block must be one of vmac, "),
        (["vmac", "--vary", "lane=32"], "parameter of vmac must be one of lanes, "),
        (["vmac", "--vary", "lanes=x"], "lanes must be an integer of at most 18 digits, not 'x'"),
        (["vmac", "--vary", "lanes"], "--vary must be NAME=VALUE,VALUE…, not 'lanes'"),
        (["vmac", "--vary", "lanes=32", "lanes=64"], "--vary must name a parameter once, not 'lanes' twice"),
        (["vmac", "--vary", "lanes=32,32"], "axis lanes must have one or more different values, not 32, 32"),
        (["vmac", "--liberty", "absent.lib"], "Liberty must be a file or one of ge, "),
        (["vmac", "--liberty", str(GE), str(GE)], "--liberty must have libraries of different names, not ge twice"),
        (["vmac", "--clock", "0"], "--clock must be positive, not 0"),
        (["vmac", "--clock", "nan"], "--clock must be positive, not nan"),
        (["vmac", "--clock", "500"], "--clock must have libraries with delays, and ge has none"),
        ([*FUNCTION, "--clock", "500"], "--function must be given without --clock"),
        (["vmac", *FUNCTION], "--function must be given without a block, not with 'vmac'"),
        (["--function", "math"], "function must be module:function, not 'math': "),
        ([*FUNCTION, "--jobs", "0"], "--jobs must be positive, not 0"),
        ([*FUNCTION, "--pareto", "i", "area"], "column must be one of i, kind, square, name, not 'area'"),
        ([*FUNCTION, "--pareto", "i", "name"], "columns i and name must have numbers in one row at least, not in none"),
        (
            ["--function", "tests.synth.sweep_points:picky", "--vary", "i=2,3", "--jobs", "1"],
            "1 of 2 points failed, first i=2: KeyError: 'two'",
        ),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path, capsys):
    assert sweep(tmp_path, *arguments, "--quiet") == 1
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert sweep(tmp_path / "file", *FUNCTION, "--quiet") == 1
    assert capsys.readouterr().err.startswith("error: output must be in a folder, which ")


def test_progress_is_a_line_per_tenth(tmp_path, capsys):
    function = "tests.synth.sweep_points:square"
    values = ",".join(map(str, range(50)))
    assert sweep(tmp_path, "--function", function, "--vary", f"i={values}", "kind=a", "--jobs", "1") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("0 of 50 points, 0 kept from before, ")
    assert lines[-1].startswith("50 of 50 points, 0 kept from before, ")
    assert len(lines) == 11


def test_an_interruption_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("synth.sweep.run", stop)
    assert sweep(tmp_path, *FUNCTION) == 130
    assert capsys.readouterr().err == "error: interrupted; the same command goes on from here\n"
