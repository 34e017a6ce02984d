"""The comparison: ratios that follow from areas by hand, the paper beside them, differences from a baseline, the committed one."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from synth import compare as module
from synth.compare import DESIGNS, OPTIONS, QUICK, changes, density, main, markdown, options, ratios
from synth.figure12 import accelerator_rows, vmac_parts, vmac_rows
from synth.stat import Area
from synth.stat import Module as Part

ROOT = Path(__file__).resolve().parents[2]
BASELINE = ROOT / "synth/baseline.json"

AREA = {name: 100.0 + 10 * k for k, name in enumerate(DESIGNS)} | {"vmac_nvfp4": 100.0, "vmac": 140.0}
PLACES = {"vmac_digits": 50.0, "vmac_refinement": 10.0, "vmac_refinement1": 10.0, "vmac_reduction": 5.0}


def part(name, area, children=(), registers=0.0):
    total = area + sum(child.total for child in children)
    return Part(name, {}, {child.name: 1 for child in children}, area, registers, total, registers)


def tree(top, own):
    children = [part(name, area) for name, area in PLACES.items()] if top == "vmac" else []
    return Area(top, {top: part(top, own, children, 7.0), **{child.name: child for child in children}}, "Yosys")


@pytest.fixture
def measured(monkeypatch):
    """Replace synthesis and SmolLM2 by the numbers above; returns the designs that were measured."""
    calls = []

    def generate(block, **parameters):
        words = [f"{key}={value}" for key, value in parameters.items()]
        return SimpleNamespace(verilog=" ".join([block, *words]), sidecar={})

    def measure(verilog, top, *, liberty, hierarchical=False, tool=None):
        calls.append((verilog, hierarchical))
        return tree(top, 65.0) if hierarchical else Area(top, {top: part(top, AREA[verilog], (), 7.0)}, "Yosys")

    def accuracy_point(point):
        return {"nmse": 1 / (point["slots"] or 0.5) + point["layer"], "nmse_weights": 0.5}

    accuracy_point.__module__, accuracy_point.__qualname__ = "synth.compare", "accuracy_point"
    monkeypatch.setattr(module, "generate", generate)
    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "accuracy_point", accuracy_point)
    return calls


def compare(folder, *arguments):
    return main(["-o", str(folder), "--jobs", "1", "--quiet", *arguments])


# Tables by hand


def test_ratios_by_definition_and_by_ablation():
    rows = {row["ratio"]: (row["ours"], row["paper"]) for row in ratios(AREA)}
    assert rows["vMAC / NVFP4-only"] == (1.4, 1.2)
    none = AREA["vmac refinement=none"]
    assert rows["by ablation: vMAC without refinement / NVFP4-only"] == (round(none / 100, 4), None)
    assert rows["by ablation: vMAC / vMAC without refinement"] == (round(140 / none, 4), None)
    assert rows["weight encoder / vMAC"] == (round(AREA["weight_encoder"] / 140, 4), 0.11)
    assert rows["vMAC and 1/16 encoder / NVFP4-only"][0] == round(1.4 + AREA["weight_encoder"] / 1600, 4)


def test_density_is_two_operations_per_mac_clock_and_area():
    rows = density({"vmac": 200.0, "vmac_nvfp4": 100.0, "vmac_autofp2": 80.0}, 500)
    # 64 operations in 2 ns on 100 square micrometres: 0.32 operations per picosecond on 1e-4 square millimetres.
    assert [(row["design"], row["tops_per_mm2"], row["ratio_to_nvfp4_only"]) for row in rows] == [
        *(("vmac", 160, 0.5), ("vmac", 320, 1), ("vmac_nvfp4", 320, 1), ("vmac_autofp2", 800, 2.5))
    ]


def test_options_have_the_errors_of_what_they_run():
    keys = ("format", "slots", "per_operand", "step", "scaling", "nmse")
    accuracy = [
        dict(zip(keys, values, strict=True))
        for values in (
            ("NVFP4", None, None, None, None, 0.1),
            ("AutoFP2", None, None, None, "pair", 0.4),
            ("AutoFP2", None, None, None, "group", 0.3),
            ("AutoFP6", 1, 1, "fixed", None, 0.06),
            ("AutoFP6", 2, 2, "fixed", None, 0.05),
            ("AutoFP6", 4, 2, "exponent", None, 0.03),
            ("AutoFP6", 4, 4, "exponent", None, 0.02),
        )
    ]
    rows = {row["design"]: row for row in options(AREA, accuracy)}
    assert list(rows) == list(OPTIONS)
    assert rows["vmac"]["against_default"] == 0
    assert rows["vmac"]["ratio_to_nvfp4_only"] == 1.4
    wanted = {
        "vmac": (0.4, 0.1, 0.05, 0.05),
        "vmac slots_per_block=1": (0.4, 0.1, 0.06, 0.06),
        # Without refinement, layers that ask for it run in NVFP4.
        "vmac refinement=none": (0.4, 0.1, 0.1, 0.1),
        # In place, each of a group's four subgroups can be refined.
        "vmac refinement=inplace step=exponent": (0.4, 0.1, 0.03, 0.02),
        "vmac slots_per_block=4 step=exponent": (0.4, 0.1, 0.03, 0.02),
        "vmac scaling=group": (0.3, 0.1, 0.05, 0.05),
        "vmac slots_per_block=3": (0.4, 0.1, None, None),
    }
    names = ("autofp2", "nvfp4", "autofp6", "autofp6_if_operands_bring_4")
    for design, errors in wanted.items():
        assert tuple(rows[design][f"nmse_{form}"] for form in names) == errors, design


def test_parts_of_a_vmac_add_up():
    area = tree("vmac", 65.0)
    parts = vmac_parts(area)
    assert parts == {
        "part: registers and control": 65,
        "part: multiply and trees": 50,
        "part: refinement lanes and tree": 20,
        "part: mode-dependent reduction": 5,
    }
    measured = [
        {"design": name, "library": "ge", "shape": "hierarchical", "area": 140.0, **parts} for name in ("vmac", "other")
    ]
    rows = vmac_rows(measured, "ge", "vmac", "other")
    assert sum(row["area"] for row in rows) == area.total
    shares = {row["part"]: (row["share"], row["paper"], row["area of other"]) for row in rows}
    assert shares["refinement lanes and tree"] == (round(20 / 140, 4), 0.123, 20)
    assert shares["registers and control"] == (round(65 / 140, 4), None, 65)


def test_parts_of_an_accelerator_beside_the_papers():
    row = {
        **{"design": "accelerator", "library": "x", "shape": "accelerator", "area": 400.0, "gate_equivalents": 200.0},
        **{"part: vector MACs": 300.0, "part: weight encoders": 100.0, "bits: buses and banks": 1000},
    }
    rows = accelerator_rows([row], "x")
    # A bit is 1.5 gate equivalents, and one of those is 2 of the library's units.
    assert [(each["part"], each["area"], each["bits"]) for each in rows] == [
        *(("memory of buses and banks", 3000, 1000), ("vector MACs", 300, None), ("weight encoders", 100, None))
    ]
    assert sum(each["share"] for each in rows) == pytest.approx(1, abs=1e-3)
    assert [each["paper_to_vmacs"] for each in rows] == [20.833, 1, 0.111]


def test_markdown_has_a_line_a_row():
    rows = [{"name": "a", "area": 13432.4, "share": 0.123456}, {"name": "b", "more": 3}]
    assert markdown(rows).splitlines() == [
        "| name | area | share | more |",
        "| --- | --- | --- | --- |",
        "| a | 13 432 | 0.1235 |  |",
        "| b |  |  | 3 |",
    ]


def test_changes_are_against_the_same_design():
    def row(design, area, shape="flat"):
        return {"design": design, "library": "ge", "shape": shape, "area": area}

    now, before = [row("a", 110.0), row("b", 5.0), row("a", 7.0, "hierarchical")], [row("a", 100.0), row("c", 3.0)]
    found = [
        (each["design"], each["shape"], each["before"], each["now"], each["change"]) for each in changes(now, before)
    ]
    assert found == [
        ("a", "flat", 100.0, 110.0, 0.1),
        ("b", "flat", None, 5.0, None),
        ("a", "hierarchical", None, 7.0, None),
        ("c", "flat", 3.0, None, None),
    ]


# The command


def test_the_whole_report(measured, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        assert compare(tmp_path / name) == 0
    one, two = tmp_path / "one", tmp_path / "two"
    names = {path.name for path in one.iterdir()}
    pictures = {f"{name}.{kind}" for name in ("figure_12_b", "ratios", "trades") for kind in ("svg", "png")}
    assert names == {"points.jsonl", "compare.json", "compare.md"} | pictures
    assert [name for name in names if (one / name).read_bytes() != (two / name).read_bytes()] == []
    data = json.loads((one / "compare.json").read_text())
    assert {row["design"] for row in data["areas"] if row["shape"] == "flat"} == set(DESIGNS)
    assert len(measured) == 2 * (len(DESIGNS) + len(QUICK))
    assert capsys.readouterr().out == 2 * (one / "compare.md").read_text()
    # Gate equivalents are no area, so there is no density.
    assert data["density"] == []
    front = data["best trades"]
    assert [row["area"] for row in front] == sorted(row["area"] for row in front)
    assert len(front) > 1
    assert str(tmp_path) not in (one / "compare.json").read_text()


def test_growth_beyond_the_share_fails(measured, tmp_path, capsys, monkeypatch):
    path = tmp_path / "baseline.json"
    assert compare(tmp_path / "one", "--quick", "--json", str(path)) == 0
    check = ["--quick", "--baseline", str(path), "--check"]
    assert compare(tmp_path / "one", *check, "0") == 0
    monkeypatch.setitem(PLACES, "vmac_digits", 53.0)
    assert compare(tmp_path / "two", *check, "0.03") == 0
    capsys.readouterr()
    assert compare(tmp_path / "two", *check, "0.02") == 1
    output = capsys.readouterr()
    assert "| vmac | ge | hierarchical | 140 | 143 | 0.02143 |" in output.out
    (line,) = output.err.splitlines()
    wanted = "error: area of vmac (ge, hierarchical) must grow by at most 2.00% without a new baseline, not 2.14%: 140.0 to 143.0"
    assert line == wanted
    # Smaller is no failure.
    monkeypatch.setitem(PLACES, "vmac_digits", 10.0)
    assert compare(tmp_path / "three", *check, "0") == 0


def test_a_design_that_the_baseline_lacks_fails(measured, tmp_path, capsys):
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"areas": []}))
    assert compare(tmp_path, "--quick", "--baseline", str(path), "--check", "1") == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"error: {name} (ge, hierarchical) must be in the baseline, which lacks it" for name in QUICK]


def test_the_committed_baseline_holds(tmp_path, capsys):
    """A block that grew on purpose needs a new one: ``python -m synth.compare --quick --json synth/baseline.json``."""
    status = compare(tmp_path, "--quick", "--baseline", str(BASELINE), "--check", "0.01")
    output = capsys.readouterr()
    assert (status, output.err) == (0, "")
    assert len(output.out.splitlines()) == 2 + len(QUICK)


@pytest.mark.parametrize("area", [0, -1, float("nan"), float("inf"), None, "large"])
def test_a_baseline_that_any_growth_would_pass_is_refused(area, measured, tmp_path, capsys):
    path = tmp_path / "baseline.json"
    rows = json.loads(BASELINE.read_text())["areas"]
    path.write_text(json.dumps({"areas": [*rows[1:], rows[0] | {"area": area}]}))
    assert compare(tmp_path, "--quick", "--baseline", str(path), "--check", "1") == 1
    assert capsys.readouterr().err == f"error: --baseline must be what --json or an earlier run wrote, not {path}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--check", "0.1"], "--check must be given with --baseline"),
        (["--baseline", "absent.json"], "[Errno 2] No such file or directory: 'absent.json'"),
        (["--baseline", str(ROOT / "README.md")], "--baseline must be what --json or an earlier run wrote, not "),
        (["--liberty", "absent.lib"], "Liberty must be a file or one of ge, "),
        (["--jobs", "0"], "--jobs must be positive, not 0"),
        (["--clock", "-1"], "--clock must be positive, not -1"),
        (["--check", "nan", "--baseline", str(BASELINE)], "--check must be a share of at least 0, not nan"),
    ],
)
def test_errors_are_one_line(arguments, message, measured, tmp_path, capsys):
    assert compare(tmp_path, *arguments) == 1
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"error: {message}")
