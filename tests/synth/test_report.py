"""The report: figures that follow from areas by hand, goals beside them, the same numbers in JSON, errors of one line."""

import json
import math
import threading
from types import SimpleNamespace

import pytest

from synth import report as module
from synth.liberty import GE, load, plain_text
from synth.report import DESIGNS, Design, Figure, Report, main, report, table
from synth.yosys import Area, Module, SynthesisError

YOSYS = "Yosys 0.70"


def area(top, *modules, **own):
    """An area from own areas and registers, ``name=(own, registers)`` for the top, modules below it as given."""
    (name, (total, registers)), *_ = own.items() or [(top, (0, 0))]
    below = {each.name: each for each in modules}
    children = dict.fromkeys(below, 1)
    whole = total + sum(each.total for each in modules)
    flip_flops = registers + sum(each.total_sequential for each in modules)
    return Area(top, {top: Module(name, {"DFF": 10}, children, total, registers, whole, flip_flops), **below}, YOSYS)


def leaf(name, total, registers=0.0):
    return Module(name, {}, {}, total, registers, total, registers)


@pytest.fixture
def small():
    flat = {
        "vmac_nvfp4": area("vmac_nvfp4", vmac_nvfp4=(100.25, 40)),
        "vmac": area("vmac", vmac=(135.5, 50.125)),
        "weight_encoder scaling=group": area("weight_encoder", weight_encoder=(7, 0)),
    }
    trees = {
        "vmac_nvfp4": area("vmac_nvfp4", leaf("vmac_nvfp4_products", 60.123456, 0), vmac_nvfp4=(40, 40)),
        "vmac": area("vmac", leaf("vmac_dot", 80, 0), leaf("vmac_sum", 20, 10), vmac=(40, 40)),
        "weight_encoder scaling=group": area("weight_encoder", weight_encoder=(8, 0)),
    }
    figures = [
        Figure("ratio", "", 1.35162, 1.37, "flat"),
        Figure("share", "%", 9.004, 9, "just above"),
        Figure("limit", "area", 200, 200, "just reached"),
        Figure("nothing to reach", "transistors per MAC", 1234.56789, None, "for comparison"),
    ]
    return Report("ge.lib", 1.0, YOSYS, flat, trees, figures)


def figure_rows(text):
    """Name, unit, measured, goal, met and note of every figure in a table."""
    lines = text.splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith("figure ")), len(lines))
    cuts = [(0, 52), (53, 73), (74, 84), (85, 95), (96, 100), (102, None)]
    return [[line[a:b].strip() for a, b in cuts] for line in lines[start + 1 :]]


# Goals


@pytest.mark.parametrize(
    ("measured", "goal", "met"), [(1.37, 1.37, True), (1.3699, 1.37, True), (1.3701, 1.37, False), (5, None, None)]
)
def test_a_goal_is_an_upper_limit(measured, goal, met):
    assert Figure("ratio", "", measured, goal, "").met is met


def test_table_has_goals_beside_measured_figures(small):
    assert figure_rows(table(small)) == [
        ["ratio", "", "1.3516", "1.37", "yes", "flat"],
        ["share", "%", "9.00", "9", "no", "just above"],
        ["limit", "area", "200", "200", "yes", "just reached"],
        ["nothing to reach", "transistors per MAC", "1235", "-", "", "for comparison"],
    ]


def test_table_has_blocks_and_ratios(small):
    lines = table(small).splitlines()
    assert lines[0] == "ge.lib, gate equivalents; Yosys 0.70"
    assert [line.split() for line in lines[3:6]] == [
        ["vmac_nvfp4", "100.25", "40.00", "60.25", "100.12", "1.000"],
        ["vmac", "135.50", "50.12", "85.38", "140.00", "1.352"],
        ["weight_encoder", "scaling=group", "7.00", "0.00", "7.00", "8.00", "0.070"],
    ]


def test_table_has_modules_whose_shares_add_up(small):
    lines = table(small).splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("modules of vmac "))
    rows = [line.split() for line in lines[start + 1 : start + 4]]
    assert rows == [
        ["vmac", "1", "40.00", "40.00", "40.00", "28.57"],
        ["vmac_dot", "1", "80.00", "0.00", "80.00", "57.14"],
        ["vmac_sum", "1", "20.00", "10.00", "20.00", "14.29"],
    ]
    assert sum(float(row[-1]) for row in rows) == pytest.approx(100, abs=0.02)


def test_other_libraries_have_their_own_unit_and_no_baseline_no_ratio(small):
    other = Report("sky130.lib", 3.75, YOSYS, {"vmac": small.flat["vmac"]}, {"vmac": small.hierarchical["vmac"]}, [])
    lines = table(other).splitlines()
    assert lines[0] == "sky130.lib, library units; Yosys 0.70"
    assert lines[3].split()[-1] == "-"
    assert figure_rows(table(other)) == []


def test_json_has_the_figures_of_the_table(small):
    data = json.loads(json.dumps(small.as_json()))
    assert (data["library"], data["nand2_area"], data["yosys"]) == ("ge.lib", 1.0, YOSYS)
    rows = figure_rows(table(small))
    assert len(rows) == len(data["figures"])
    for row, figure in zip(rows, data["figures"], strict=True):
        assert [row[0], row[1], row[5]] == [figure["figure"], figure["unit"], figure["note"]]
        digits = len(row[2].partition(".")[2])
        assert row[2] == f"{figure['measured']:.{digits}f}"
        assert row[3] == ("-" if figure["goal"] is None else f"{figure['goal']:g}")
        assert row[4] == {True: "yes", False: "no", None: ""}[figure["met"]]


def test_json_has_blocks_parameters_and_modules(small):
    nvfp4, vmac, encoder = small.as_json()["blocks"]
    assert nvfp4["flat"] == {"total": 100.25, "registers": 40, "combinational": 60.25}
    assert nvfp4["hierarchical"]["total"] == 100.1235
    assert (encoder["name"], encoder["block"]) == ("weight_encoder scaling=group", "weight_encoder")
    assert encoder["parameters"] == {"scaling": "group"}
    assert [each["module"] for each in vmac["hierarchical"]["modules"]] == ["vmac", "vmac_dot", "vmac_sum"]
    assert vmac["hierarchical"]["modules"][2] == {
        **{"module": "vmac_sum", "instances": 1, "own": 20, "own_registers": 10, "total": 20}
    }


def test_rows_have_names_of_their_own():
    assert len(DESIGNS) == 13
    assert all(design.name == name for name, design in DESIGNS.items())
    assert Design("vmac", {"step": "exponent", "lanes": 64}).name == "vmac step=exponent lanes=64"


# Figures from areas, by hand

TREES = {
    "vmac_nvfp4": area("vmac_nvfp4", leaf("vmac_nvfp4_products", 60), vmac_nvfp4=(40, 0)),
    "vmac": area(
        "vmac",
        leaf("vmac_refinement", 20),
        leaf("vmac_refinement1", 20),
        leaf("vmac_accumulator", 40),
        leaf("vmac_reduction", 20),
        vmac=(100, 0),
    ),
}
FLAT = {"vmac_nvfp4": 100, "vmac": 140, "vmac refinement=none": 119, "weight_encoder": 14}
PLAIN = {"vmac_nvfp4": 110, "vmac": 150}
BARE = {("vmac_nvfp4", "area"): 90, ("vmac", "area"): 120, ("vmac_nvfp4", "plain"): 95, ("vmac", "plain"): 130}
TRANSISTORS = {"vmac_nvfp4": 1000, "vmac": 1500, "vmac_nvfp4_products": 160}


@pytest.fixture
def measured(monkeypatch):
    """Replace synthesis by the areas above; returns the calls."""
    calls = []
    lock = threading.Lock()

    def generate(block, **parameters):
        ports = [{"name": "a", "width": 128}]
        return SimpleNamespace(verilog=Design(block, parameters).name, sidecar={"ports": ports})

    def measure(verilog, top, *, liberty, tool, hierarchical=False, recipe="area", edits=()):
        with lock:
            calls.append((verilog, top, hierarchical, recipe, tuple(edits)))
        if hierarchical:
            return TREES.get(verilog) or area(top)
        if top == "vmac_refinement":
            return area(top, **{top: (10 if edits else 20, 0)})
        if top == "vmac_accumulator":
            return area(top, **{top: (34 if any("exact" in edit for edit in edits) else 40, 0)})
        if edits:
            return area(top, **{top: (BARE[verilog, recipe], 0)})
        return area(top, **{top: ((FLAT if recipe == "area" else PLAIN)[verilog], 56.7)})

    monkeypatch.setattr(module, "generate", generate)
    monkeypatch.setattr(module, "_held_bits", lambda: 4)
    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "transistors", lambda verilog, top, **options: TRANSISTORS[top])
    return calls


EXPECTED = {
    ("AutoEMatic / NVFP4-only", "flat, area recipe; moonshot 1.30"): (1.4, 1.37, False),
    ("NVFP4-only", "flat, area recipe, without status; goal: prototype + 2 %"): (90, 10_090, True),
    ("AutoEMatic", "flat, area recipe, without status; goal: prototype"): (120, 13_644, True),
    ("AutoEMatic / NVFP4-only", "flat, area recipe, without status; moonshot 1.30"): (120 / 90, 1.37, True),
    ("AutoEMatic / NVFP4-only", "flat, plain recipe; moonshot 1.30"): (150 / 110, 1.37, True),
    ("NVFP4-only", "flat, plain recipe, without status; goal: prototype + 2 %"): (95, 10_090, True),
    ("AutoEMatic", "flat, plain recipe, without status; goal: prototype"): (130, 13_644, True),
    ("AutoEMatic / NVFP4-only", "flat, plain recipe, without status; moonshot 1.30"): (130 / 95, 1.37, True),
    # 40 of 200 times 10 / 20; then 40 and four registers of 5.67.
    ("refinement, lanes and control", "hierarchical; without R tree and registers"): (10, 9, False),
    ("refinement, with record registers and R tree", "hierarchical"): (31.34, 16, False),
    ("refinement, by ablation", "flat, slots against none; paper 12.3 (definition not stated)"): (15, 19, True),
    # 20 and 40 - 34 of 200.
    (
        "mode-dependent reduction with accumulator muxes",
        "hierarchical; muxes: accumulator against one that only sums exactly, neither with clamps; paper 6.7",
    ): (13, 4.5, False),
    ("ratio in transistors", "moonshot 1.35"): (1.5, 1.5, True),
    ("NVFP4-only", "with scaling and accumulation"): (31.25, 1_780, True),
    ("NVFP4-only dot product", "16 lanes and tree; best open peers 1203 (NVFP4) and 1054 (E2M1)"): (10, 1_054, True),
    ("vmac refinement=none, against vmac", "flat"): (-15, None, None),
}


def test_figures_follow_from_areas(measured):
    result = report(list(FLAT), jobs=2, quiet=True)
    assert list(result.flat) == [name for name in DESIGNS if name in FLAT]
    figures = {(figure.name, figure.note): figure for figure in result.figures}
    assert len(figures) == len(result.figures)
    for key, (value, goal, met) in EXPECTED.items():
        assert figures[key].measured == pytest.approx(value), key
        assert (figures[key].goal, figures[key].met) == (goal, met), key
    others = {name: figure.measured for (name, note), figure in figures.items() if (name, note) not in EXPECTED}
    assert others == {"NVFP4-only": 1000, "AutoEMatic": 1500, "weight encoder / vMAC": pytest.approx(10)}


def test_status_and_clamps_are_tied_off_where_the_figure_says_so(measured):
    report(["vmac", "vmac_nvfp4"], quiet=True)
    bare = {(top, recipe): edits for _, top, _, recipe, edits in measured if edits and top in TRANSISTORS}
    assert set(bare) == {(top, recipe) for top in ("vmac", "vmac_nvfp4") for recipe in ("area", "plain")}
    for (top, _), edits in bare.items():
        zero = {"vmac": "3'b000", "vmac_nvfp4": "1'b0"}[top]
        assert edits[0] == f"cd {top}"
        assert f"connect -unset status\nconnect -set status {zero}" in edits
        assert "connect -unset valid_o\nconnect -set valid_o 1'b0" in edits


def test_goals_in_area_are_for_our_own_library_only(measured, tmp_path, monkeypatch):
    path = tmp_path / "other.lib"
    path.write_bytes(GE.read_bytes())
    figures = report(["vmac", "vmac_nvfp4"], liberty=path, quiet=True).figures
    areas = [figure for figure in figures if "recipe" in figure.note]
    assert len(areas) == 8
    assert {figure.goal for figure in areas} == {None}
    # Our own library by another path is still our own.
    monkeypatch.chdir(GE.parent)
    relative = report(["vmac", "vmac_nvfp4"], liberty=GE.relative_to(GE.parent), quiet=True).figures
    assert [figure.goal for figure in relative] == [
        figure.goal for figure in report(["vmac", "vmac_nvfp4"], quiet=True).figures
    ]
    assert None not in {figure.goal for figure in relative if "recipe" in figure.note}


def test_one_row_alone_has_no_figures(measured):
    result = report(["vmac"], quiet=True)
    assert result.figures == []
    assert sorted(hierarchical for _, _, hierarchical, _, _ in measured) == [False, True]


def test_a_figure_without_its_module_is_an_error(measured, monkeypatch):
    monkeypatch.setitem(TREES, "vmac", area("vmac", leaf("vmac_refinement", 20), vmac=(1, 1)))
    with pytest.raises(
        SynthesisError, match=r"^modules refinement and accumulator must be in vmac: vmac, vmac_refinement$"
    ):
        report(["vmac", "vmac_nvfp4"], quiet=True)


def test_a_baseline_without_its_dot_product_is_an_error(measured, monkeypatch):
    monkeypatch.setitem(TREES, "vmac_nvfp4", area("vmac_nvfp4", vmac_nvfp4=(1, 1)))
    with pytest.raises(SynthesisError, match=r"^module products must be in vmac_nvfp4: vmac_nvfp4$"):
        report(["vmac", "vmac_nvfp4"], quiet=True)


def test_progress_goes_to_the_standard_error_stream(measured, capsys):
    report(["vmac"])
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == ["vmac, flat: 0 s", "vmac, hierarchical: 0 s"]


# With Yosys, on a few gates under the names of the real blocks

BASELINE = """\
module vmac_nvfp4_products(input a, b, output y);
  assign y = ~(a & b);
endmodule
module vmac_nvfp4(input clk, valid_i, input [3:0] a, output reg valid_o, output status, output reg psum_o);
  wire y;
  vmac_nvfp4_products products(a[0], a[1], y);
  always @(posedge clk) begin valid_o <= valid_i; psum_o <= y; end
  assign status = a[2] ^ a[3];
endmodule
"""
VMAC = """\
module vmac_refinement(input x, y, u, v, output r);
  wire slot0_term = ~(x & y);
  wire slot0_sign = u ^ v;
  assign r = slot0_term ^ slot0_sign;
endmodule
module vmac_reduction(input x, y, output z);
  assign z = ~(x & y);
endmodule
module vmac_accumulator_saturate(input total, over, output clamped, saturated);
  assign clamped = total | over, saturated = over;
endmodule
module vmac_accumulator(input clk, exact, p, over, output reg s, output saturated);
  wire clamped;
  wire total = ~(exact & p);
  vmac_accumulator_saturate saturate(total, over, clamped, saturated);
  always @(posedge clk) s <= clamped;
endmodule
module vmac(input clk, valid_i, input [3:0] a, refine, output reg valid_o, output [2:0] status, output psum_o);
  wire r, z, saturated;
  vmac_refinement refinement(a[0], a[1], refine[0], refine[1], r);
  vmac_reduction reduction(r, a[2], z);
  vmac_accumulator accumulator(clk, a[3], z, refine[2], psum_o, saturated);
  assign status = {saturated, 2'b00};
  always @(posedge clk) valid_o <= valid_i;
endmodule
"""
DFF = 5.67


@pytest.fixture
def few_gates(monkeypatch):
    def generate(block, **parameters):
        ports = [{"name": "a", "width": 4}]
        return SimpleNamespace(verilog={"vmac": VMAC, "vmac_nvfp4": BASELINE}[block], sidecar={"ports": ports})

    monkeypatch.setattr(module, "generate", generate)
    monkeypatch.setattr(module, "_held_bits", lambda: 4)


def test_the_whole_report_on_a_few_gates(few_gates):
    result = report(["vmac_nvfp4", "vmac"], jobs=2, quiet=True)
    assert result.nand2_area == load(plain_text(GE)).nand2_area == 1
    assert result.flat["vmac_nvfp4"].total == pytest.approx(2 * DFF + 1 + 2)
    tree = result.hierarchical["vmac"]
    refinement = tree.modules["vmac_refinement"].total
    # Two registers, refinement, reduction, accumulator, clamp.
    assert tree.total == pytest.approx(2 * DFF + refinement + 1 + 1 + 1.33)
    figures = {(figure.name, figure.note.partition(";")[0]): figure.measured for figure in result.figures}
    for recipe in ("area", "plain"):
        nvfp4 = figures["NVFP4-only", f"flat, {recipe} recipe, without status"]
        vmac = figures["AutoEMatic", f"flat, {recipe} recipe, without status"]
        assert nvfp4 == pytest.approx(DFF + 1)
        # No clamp, no valid bit, and gates that may be others than in the tree, but not many.
        assert DFF + 5 < vmac < DFF + 9
        assert figures["AutoEMatic / NVFP4-only", f"flat, {recipe} recipe, without status"] == vmac / nvfp4
    assert figures["refinement, lanes and control", "hierarchical"] == pytest.approx(100 * 3 / tree.total)
    assert figures["refinement, with record registers and R tree", "hierarchical"] == pytest.approx(
        100 * (refinement + 4 * DFF) / tree.total
    )
    # With one mode, the NAND becomes an inverter.
    assert figures["mode-dependent reduction with accumulator muxes", "hierarchical"] == pytest.approx(
        100 * (1 + 1 - 0.67) / tree.total
    )
    # Two registers of 16, a NAND of 4, and an exclusive or.
    assert figures["NVFP4-only", "abc -g cmos2, stat -tech cmos"] >= 2 * 16 + 4 + 8
    assert figures["NVFP4-only dot product", "16 lanes and tree"] == 4 / 16
    assert all(math.isfinite(figure.measured) for figure in result.figures)


# The command


def test_two_runs_write_the_same_bytes_and_the_table_agrees(few_gates, tmp_path, capsys):
    paths = [tmp_path / "not yet there" / name for name in ("one.json", "two.json")]
    outputs = []
    for path in paths:
        assert main(["--only", "vmac_nvfp4", "--quiet", "--jobs", "1", "--json", str(path)]) == 0
        outputs.append(capsys.readouterr())
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert outputs[0] == outputs[1]
    assert outputs[0].err == ""
    text = paths[0].read_bytes()
    assert text.endswith(b"}\n")
    assert b"\r" not in text
    (block,) = json.loads(text)["blocks"]
    flat, tree = block["flat"], block["hierarchical"]
    row = f"{flat['total']:.2f} {flat['registers']:.2f} {flat['combinational']:.2f} {tree['total']:.2f} 1.000"
    assert outputs[0].out.splitlines()[3].split() == ["vmac_nvfp4", *row.split()]


def test_command_lists_rows(capsys):
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(DESIGNS)


def test_command_writes_the_whole_report(measured, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["--only", *FLAT, "--json", str(path), "--quiet"]) == 0
    rows = figure_rows(capsys.readouterr().out)
    figures = json.loads(path.read_text())["figures"]
    assert [(row[0], row[4]) for row in rows] == [
        (figure["figure"], {True: "yes", False: "no", None: ""}[figure["met"]]) for figure in figures
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "vmac", "vmac lanes=7"], "design must be one of 'vmac_nvfp4', 'vmac_autofp2', "),
        (["--jobs", "0"], "--jobs must be positive, not 0"),
        (["--jobs", "-2"], "--jobs must be positive, not -2"),
        (["--liberty", "absent.lib"], "Liberty must be a file or one of ge, "),
        (["--json", f"{GE}/report.json"], "output must be in a folder, which "),
        (["--only", "vmac", "--quiet", "--json", str(GE.parent)], "output must be a file, not the folder "),
    ],
)
def test_errors_are_one_line(measured, arguments, message, capsys):
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_design_that_does_not_exist_is_named(measured, capsys):
    assert main(["--only", "vmac lanes=7"]) == 1
    assert capsys.readouterr().err.endswith(", not 'vmac lanes=7'\n")
    assert measured == []


def test_a_place_that_cannot_be_written_is_found_before_the_work(measured):
    assert main(["--json", f"{GE}/report.json", "--quiet"]) == 1
    assert measured == []
