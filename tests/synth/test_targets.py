"""Flows beside their goals: which rows there are, and what counts as met."""

import json
import types

import pytest

from synth import targets
from synth.libraries import PRESETS
from synth.stat import Area, Module
from synth.targets import CLOCKS, GOALS, Clock, Row, clock_table, libraries, main, measure_clocks, measure_flows, table

AREAS = {"vmac_nvfp4": 100.0, "vmac": 134.0}


@pytest.fixture
def measured(monkeypatch):
    """Replace synthesis; status logic is an eighth of each design. Returns what was asked for."""
    calls = []

    class Bench:
        def __init__(self, files, *options):
            self.files = files

        def area(self, name, *, hierarchical=False, recipe="area", edits=()):
            calls.append((self.files.name, name, recipe, bool(edits)))
            total = AREAS[name] * (1 if edits else 1.125)
            return lambda: Area(name, {name: Module(name, {}, {}, total, 0, total, 0)}, "Yosys")

        def transistors(self, name, edits=()):
            return lambda: int(1000 * AREAS[name])

        def run(self, tasks):
            return {name: task() for name, task in tasks.items()}

    monkeypatch.setattr(targets, "Bench", Bench)
    monkeypatch.setattr(targets, "without_status", lambda name, tree: [f"tie {tree.top}"])
    return calls


def test_every_flow_is_measured_with_and_without_status_logic(measured):
    rows = measure_flows(libraries(["ge", "transistors"]), recipe="plain")
    assert [(row.flow, row.full_adders, row.status, row.nvfp4, row.vmac) for row in rows] == [
        ("ge", False, False, 100, 134),
        ("ge", False, True, 112.5, 150.75),
        ("transistors", False, False, 100_000, 134_000),
        ("transistors", False, True, 100_000, 134_000),
    ]
    assert {call[2:] for call in measured} == {("area", False), ("plain", False), ("plain", True)}


@pytest.mark.parametrize(
    ("areas", "met"),
    [
        ((531.2, 702.7), {"nvfp4": True, "vmac": True, "ratio": True, "moonshot": False}),
        ((531.3, 702.8), {"nvfp4": False, "vmac": False, "ratio": True, "moonshot": False}),
        ((500, 640.0), {"nvfp4": True, "vmac": True, "ratio": True, "moonshot": True}),
        ((500, 670.1), {"nvfp4": True, "vmac": True, "ratio": False, "moonshot": False}),
    ],
)
def test_goals_are_upper_limits(areas, met):
    assert Row("asap7", True, False, *areas).verdicts() == met
    with_status = Row("asap7", True, True, *areas).verdicts()
    assert with_status == {name: met[name] for name in ("ratio", "moonshot")}
    assert Row("sky130hd", True, False, *areas).verdicts() == {}


def test_the_table_marks_what_is_met_and_names_what_is_missing(measured, tmp_path, capsys, monkeypatch):
    for variable in ("PDK_ROOT", "ORFS"):
        monkeypatch.delenv(variable, raising=False)
    out = tmp_path / "out.json"
    assert main(["--quiet", "--library", "ge", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        "| ge | without | 100.0 | **≤ 10089.8** | 134.0 | **≤ 13644.0** | 1.340 | **≤ 1.37** | ≤ 1.30 |"
    )
    assert lines[3] == "| ge | with | 112.5 |  | 150.8 |  | 1.340 | **≤ 1.37** | ≤ 1.30 |"
    assert lines[-1] == "Not measured, for want of the library: asap7, ihp-sg13g2, gt2n, transistors"
    data = json.loads(out.read_text())
    assert data["not_measured"] == ["asap7", "ihp-sg13g2", "gt2n", "transistors"]
    assert data["rows"][0]["met"] == {"nvfp4": True, "vmac": True, "ratio": True, "moonshot": False}
    assert data["rows"][0]["goal"] == {"nvfp4": 10089.84, "vmac": 13644, "ratio": 1.37, "moonshot": 1.30}


def test_the_clock_is_that_of_each_pipeline_with_the_ratio_in_the_same(measured, monkeypatch):
    files = libraries(["ge"])["ge"]
    asked = []

    def time_design(verilog, top, library, *, tool):
        asked.append((verilog, top, library))
        return types.SimpleNamespace(period=1000.0 if "fast" in verilog else 1000.1, engine="OpenSTA")

    def area(verilog, top, *, liberty, recipe, tool):
        return types.SimpleNamespace(total=AREAS[top] + (10 if "fast" in verilog else 0))

    made = lambda block, pipeline: types.SimpleNamespace(verilog=f"{block} {pipeline}")  # noqa: E731
    for name, fake in (("time_design", time_design), ("measure", area), ("generate", made)):
        monkeypatch.setattr(targets, name, fake)
    assert measure_clocks({"ge": files, "transistors": None, "asap7": None}) == []
    rows = measure_clocks({"asap7": files, "ge": files})
    assert asked == [("pe compact", "pe", files), ("pe fast", "pe", files)]
    assert rows == [
        Clock("asap7", "compact", 1000.1, "OpenSTA", 100.0, 134.0),
        Clock("asap7", "fast", 1000.0, "OpenSTA", 110.0, 144.0),
    ]
    assert [(row.met, row.as_json()["ratio"], row.as_json()["clock_mhz"]) for row in rows] == [
        (False, 1.34, 999.9),
        (True, 1.3091, 1000.0),
    ]
    assert clock_table(rows).splitlines()[2:] == [
        "| asap7 | compact | 1000 | ≤ 1000 | 1000 | OpenSTA | 100.0 | 134.0 | 1.340 |",
        "| asap7 | fast | 1000 | **≤ 1000** | 1000 | OpenSTA | 110.0 | 144.0 | 1.309 |",
    ]
    assert set(CLOCKS) <= set(GOALS)


def test_names_stand_for_files_or_presets(tmp_path, monkeypatch, capsys):
    for variable in ("PDK_ROOT", "ORFS"):
        monkeypatch.delenv(variable, raising=False)
    assert [name for name in libraries([]) if name not in PRESETS] == ["ge", "transistors"]
    path = tmp_path / "a.lib"
    path.write_text("")
    assert libraries([f"asap7={path}"])["asap7"].paths == (path,)
    assert main(["--library", "ge", f"ge={path}"]) == 1
    assert capsys.readouterr().err == "error: --library must name each flow once, not 'ge' twice\n"
    assert main(["--library", "asap7"]) == 1
    assert capsys.readouterr().err.startswith("error: asap7 must be installed; it is in none of: $ORFS/flow/")
    assert main(["--jobs", "0"]) == 1
    assert capsys.readouterr().err == "error: --jobs must be positive, not 0\n"
    assert set(GOALS) - set(PRESETS) == {"ge", "transistors"}
    assert table([]).count("\n") == 1
