"""Faults in gates: each is real and the one that it says it is, the proof agrees with trying every input, and counts add up."""

import json
import re
from itertools import product
from types import SimpleNamespace

import pytest

from synth import mutate as module
from synth.canonical import canonical
from synth.mutate import GOAL, Mutant, Netlist, Result, campaign, main, mutated, prove, table
from synth.yosys import run_yosys, work_folder

# a & b & c cannot change what a & b decides, so most faults in it are none.
TINY = """\
module tiny(input a, b, c, d, output y, z);
  wire dead = a & b & c;
  wire live = a & b;
  assign y = live | dead;
  assign z = c ^ d;
endmodule
"""
CLOCKED = """\
module tiny(input clk, a, b, c, output y);
  reg [1:0] state;
  always @(posedge clk) state <= {state[0] & a, b ^ c};
  assign y = state[1];
endmodule
"""

GATES = {
    "$_NOT_": lambda A: not A,
    "$_AND_": lambda A, B: A and B,
    "$_NAND_": lambda A, B: not (A and B),
    "$_OR_": lambda A, B: A or B,
    "$_NOR_": lambda A, B: not (A or B),
    "$_XOR_": lambda A, B: A != B,
    "$_XNOR_": lambda A, B: A == B,
    "$_ANDNOT_": lambda A, B: A and not B,
    "$_ORNOT_": lambda A, B: A or not B,
    "$_MUX_": lambda A, B, S: B if S else A,
}


FAULTS = {"stuck at 0": lambda value: False, "stuck at 1": lambda value: True, "inverted": lambda value: not value}


def evaluate(netlist, inputs, mutant=None):
    """Outputs of a combinational netlist for the given inputs, numbers by port; a mutant puts its fault on its pin."""
    drivers = {
        bits[0]: name
        for name, cell in netlist["cells"].items()
        for pin, bits in cell["connections"].items()
        if cell["port_directions"][pin] == "output"
    }
    values = {"0": False, "1": True}
    for name, port in netlist["ports"].items():
        if port["direction"] == "input":
            values |= {bit: bool(inputs[name] >> k & 1) for k, bit in enumerate(port["bits"])}

    def value(bit):
        if bit not in values:
            name = drivers[bit]
            cell = netlist["cells"][name]
            pins = {pin: value(bits[0]) for pin, bits in cell["connections"].items() if pin != "Y"}
            here = mutant is not None and mutant.cell == name
            if here and mutant.pin in pins:
                pins[mutant.pin] = FAULTS[mutant.fault](pins[mutant.pin])
            result = bool(GATES[cell["type"]](**pins))
            values[bit] = FAULTS[mutant.fault](result) if here and mutant.pin == "Y" else result
        return values[bit]

    return {
        name: sum(value(bit) << k for k, bit in enumerate(port["bits"]))
        for name, port in netlist["ports"].items()
        if port["direction"] == "output"
    }


def every_output(netlist, mutant=None, **fixed):
    """Outputs for all values of a, b, c and d."""
    return [
        evaluate(netlist, dict(zip("abcd", values, strict=True)) | fixed, mutant)
        for values in product((0, 1), repeat=4)
    ]


def gates_of(verilog, *commands):
    """Gates of a module ``tiny``, after more commands."""
    with work_folder("gates") as folder:
        (folder / "design.v").write_text(verilog)
        script = ["read_verilog design.v", "synth -flatten -noabc -top tiny", *commands, "write_json gates.json"]
        run_yosys("\n".join(script) + "\n", folder)
        return (folder / "gates.json").read_text()


@pytest.fixture
def blocks(monkeypatch):
    """Make a block of the Verilog above."""

    def use(verilog):
        monkeypatch.setattr(
            module, "generate", lambda block, sources, **parameters: SimpleNamespace(verilog=verilog, sidecar={})
        )

    use(TINY)
    return use


@pytest.fixture
def regression(monkeypatch):
    """A regression that tries every input of TINY; returns the arguments it was called with."""
    calls = []

    def check_mutants(block, verilog, mutants, width, vectors, parameters, *, seed):
        calls.append((block, list(mutants), width, vectors, parameters, seed))
        netlist = json.loads(gates_of(verilog))["modules"]["tiny"]
        right = every_output(netlist, mutsel=0)
        return {number: every_output(netlist, mutsel=number) != right for number in mutants}

    monkeypatch.setattr(module, "check_mutants", check_mutants)
    return calls


# Faults


def test_mutants_are_what_they_say_and_zero_is_the_block_itself(blocks):
    netlist = mutated("tiny", 12, seed=3)
    assert [mutant.number for mutant in netlist.mutants] == list(range(1, 13))
    assert netlist.width == 4
    sound = json.loads(netlist.gates)["modules"]["tiny"]
    right = every_output(sound)
    assert right == every_output(json.loads(gates_of(TINY))["modules"]["tiny"])
    switched = json.loads(gates_of(netlist.verilog))["modules"]["tiny"]
    assert every_output(switched, mutsel=0) == right
    for mutant in netlist.mutants:
        assert every_output(switched, mutsel=mutant.number) == every_output(sound, mutant), mutant
    # Numbers beyond the last mutant are the block itself as well.
    assert every_output(switched, mutsel=13) == right


def test_mutants_differ_from_the_block_and_each_other(blocks):
    netlist = mutated("tiny", 12, seed=3)
    assert len({mutant.command for mutant in netlist.mutants}) == 12
    switched = json.loads(gates_of(netlist.verilog))["modules"]["tiny"]
    right = every_output(switched, mutsel=0)
    different = [mutant for mutant in netlist.mutants if every_output(switched, mutsel=mutant.number) != right]
    assert len(different) > 4


def test_mutants_say_where_they_are(blocks):
    netlist = mutated("tiny", 12, seed=3)
    cells = json.loads(netlist.gates)["modules"]["tiny"]["cells"]
    for mutant in netlist.mutants:
        assert mutant.kind == cells[mutant.cell]["type"]
        assert mutant.pin in cells[mutant.cell]["connections"]
        assert mutant.fault in FAULTS
        assert mutant.caught is None
        assert "-ctrl " not in mutant.command
    assert {mutant.signal for mutant in netlist.mutants} <= {*"abcdyz", "live", "dead", ""}
    assert any(mutant.signal for mutant in netlist.mutants)
    assert any(source.startswith("tiny.v:") for mutant in netlist.mutants for source in mutant.sources)


def test_the_seed_alone_decides(blocks):
    first, again, other = (mutated("tiny", 8, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert [mutant.command for mutant in first.mutants] != [mutant.command for mutant in other.mutants]
    assert first.gates == other.gates


def test_clocks_are_left_alone(blocks):
    blocks(CLOCKED)
    netlist = mutated("tiny", 12)
    kinds = {mutant.kind for mutant in netlist.mutants}
    assert any("DFF" in kind for kind in kinds)
    assert all(mutant.pin != "C" for mutant in netlist.mutants)
    assert all(mutant.signal != "clk" for mutant in netlist.mutants)


def test_no_more_mutants_than_places(blocks):
    with pytest.raises(ValueError, match=r"^count must be at most \d+ for tiny, not 1000$") as caught:
        mutated("tiny", 1000)
    most = int(str(caught.value).split()[5])
    assert len(mutated("tiny", most).mutants) == most
    with pytest.raises(ValueError, match=f"^count must be at most {most} for tiny, not {most + 1}$"):
        mutated("tiny", most + 1)


@pytest.mark.parametrize("name", ["c0", "i4", "mutant"])
def test_names_of_the_source_do_not_get_in_the_way(blocks, name):
    blocks(TINY.replace("dead", name))
    assert {mutant.signal for mutant in mutated("tiny", 12, seed=3).mutants} <= {*"abcdyz", "live", name, ""}


# Proofs


def fault(netlist, cell, pin, mode):
    """A mutant of a given cell and pin."""
    command = f"mutate -mode {mode} -module tiny -cell {cell} -port {pin} -portbit 0"
    kind = json.loads(netlist.gates)["modules"]["tiny"]["cells"][cell]["type"]
    meaning = {"const0": "stuck at 0", "const1": "stuck at 1", "inv": "inverted"}[mode]
    return Mutant(1, command, meaning, cell, kind, pin, "", ())


def netlist_of(verilog):
    return Netlist("tiny", canonical(gates_of(verilog), names=True), "", 1, [])


def test_the_proof_agrees_with_trying_every_input():
    netlist = netlist_of(TINY)
    cells = json.loads(netlist.gates)["modules"]["tiny"]["cells"]
    sound = json.loads(netlist.gates)["modules"]["tiny"]
    right = every_output(sound)
    answers = []
    for cell, mode in product(cells, ("const0", "inv")):
        mutant = fault(netlist, cell, "Y", mode)
        same = every_output(sound, mutant) == right
        answer = prove(netlist, mutant)
        assert (answer == "equivalent, proven") == same, mutant
        assert same or answer.startswith("differs at "), mutant
        answers.append(same)
    assert True in answers
    assert False in answers


def cell_that_drives(netlist, name):
    tiny = json.loads(netlist.gates)["modules"]["tiny"]
    bits = (tiny["ports"] | tiny["netnames"])[name]["bits"]
    (cell,) = (each for each, value in tiny["cells"].items() if bits == value["connections"].get("Y"))
    return cell


@pytest.mark.parametrize(("mode", "same"), [("const0", True), ("const1", False), ("inv", False)])
def test_a_dead_part_is_found_equivalent(mode, same):
    netlist = netlist_of(TINY)
    answer = prove(netlist, fault(netlist, cell_that_drives(netlist, "dead"), "Y", mode))
    assert (answer == "equivalent, proven") is same


def test_a_difference_comes_with_a_place_and_an_example():
    netlist = netlist_of(TINY)
    answer = prove(netlist, fault(netlist, cell_that_drives(netlist, "z"), "Y", "const0"))
    assert answer in {
        "differs at z, for example if c = 0x1, the rest 0",
        "differs at z, for example if d = 0x1, the rest 0",
    }


def test_registers_are_cut_so_that_a_wrong_next_state_is_a_difference():
    netlist = netlist_of(CLOCKED)
    tiny = json.loads(netlist.gates)["modules"]["tiny"]
    (xor,) = (name for name, cell in tiny["cells"].items() if cell["type"] == "$_XOR_")
    answer = prove(netlist, fault(netlist, xor, "Y", "inv"))
    assert answer.startswith("differs at register state[0], for example if ")
    (conjunction,) = (name for name, cell in tiny["cells"].items() if cell["type"] == "$_AND_")
    answer = prove(netlist, fault(netlist, conjunction, "Y", "const0"))
    assert answer == "differs at register y, for example if a = 0x1, register state[0] = 0x1, the rest 0"


ENABLED = """\
module tiny(input clk, rst, a, b, output reg y, z);
  wire wanted = a & b;
  always @(posedge clk) if (rst) y <= 1; else if (a) y <= wanted;
  always @(posedge clk) if (b) begin if (rst) z <= 0; else z <= a | b; end
endmodule
"""


def test_what_a_register_does_not_take_is_no_difference():
    netlist = netlist_of(ENABLED)
    cells = json.loads(netlist.gates)["modules"]["tiny"]["cells"]
    kinds = sorted(cell["type"] for cell in cells.values() if "DFF" in cell["type"])
    assert kinds == ["$_SDFFCE_PP0P_", "$_SDFFE_PP1P_"]
    answers = {}
    for cell, value in cells.items():
        for pin in value["connections"]:
            if "DFF" not in value["type"]:
                answers[value["type"], pin] = prove(netlist, fault(netlist, cell, pin, "const1"))
    # y takes a & b only if a is 1, and z takes a | b only if b is 1.
    gates = {kind for kind, _ in answers}
    assert gates == {"$_AND_", "$_OR_"}
    for kind in gates:
        assert sorted(answer.partition(" at")[0] for (gate, pin), answer in answers.items() if gate == kind) == [
            *["differs"] * (2 if kind == "$_AND_" else 0),
            *["equivalent, proven"] * (1 if kind == "$_AND_" else 3),
        ]


@pytest.mark.parametrize("kind", ["$_DFF_PP0_", "$_DFFSR_PPP_", "$_ALDFF_PP_"])
def test_registers_that_nobody_uses_here_are_refused(kind):
    with pytest.raises(ValueError, match=r"^kind must be a flip-flop without asynchronous reset, not "):
        module._next_state(kind, {pin: [2] for pin in "CDQRSE"})


@pytest.mark.parametrize(
    ("kind", "reset", "enable", "expected"),
    [
        *[("$_DFF_P_", 0, 0, "D"), ("$_DFFE_PN_", 0, 0, "D"), ("$_DFFE_PN_", 0, 1, "Q"), ("$_DFFE_PP_", 0, 1, "D")],
        *[("$_SDFF_PP1_", 1, 0, "1"), ("$_SDFF_PN0_", 1, 0, "D"), ("$_SDFF_PN0_", 0, 0, "0")],
        *[("$_SDFFE_PP1N_", 1, 1, "1"), ("$_SDFFE_PP1N_", 0, 1, "Q"), ("$_SDFFE_PP1N_", 0, 0, "D")],
        *[("$_SDFFCE_PP0P_", 1, 0, "Q"), ("$_SDFFCE_PP0P_", 1, 1, "0"), ("$_SDFFCE_PP0P_", 0, 1, "D")],
    ],
)
def test_next_state_of_every_register(kind, reset, enable, expected):
    state = "D"
    for select, zero, one in module._next_state(kind, {"D": ["D"], "Q": ["Q"], "R": [reset], "E": [enable]}):
        state = (one if select[0] else zero) or state
    assert "".join(state) == expected


def test_memories_and_modules_apart_have_no_faults_and_are_cut_off(monkeypatch):
    verilog = """\
module tiny(input clk, we, input [1:0] wa, ra, input [3:0] d, output reg [3:0] q, output [3:0] y);
  reg [3:0] store [0:3];
  always @(posedge clk) if (we) store[wa] <= d;
  always @(posedge clk) q <= store[ra ^ wa];
  inside i(.a(d & q), .y(y));
endmodule
module inside(input [3:0] a, output [3:0] y);
  assign y = a + 4'd3;
endmodule
"""
    monkeypatch.setattr(module, "generate", lambda block, sources: SimpleNamespace(verilog=verilog, sidecar={}))
    monkeypatch.setitem(module.APART, "tiny", "inside")
    monkeypatch.setattr(module, "_WHOLE", ("$mem", "inside"))
    netlist = mutated("tiny", 8)
    cells = json.loads(netlist.gates)["modules"]["tiny"]["cells"]
    assert {cell["type"] for cell in cells.values()} == {"$_AND_", "$_XOR_", "$mem_v2", "inside"}
    assert {mutant.kind for mutant in netlist.mutants} <= {"$_AND_", "$_XOR_"}
    assert netlist.verilog.count("module inside(") == 1
    answers = [prove(netlist, mutant) for mutant in netlist.mutants]
    assert all(re.match(r"differs at .*pin (a of inside|RD_ADDR of \$mem_v2) ", answer) for answer in answers), answers


def test_a_proof_without_an_answer_says_so(monkeypatch):
    def run(script, folder, tool, *, step):
        if step != "prove":
            return run_yosys(script, folder, tool, step=step)
        return (folder / "sat.txt").write_text("Interrupted SAT solver: TIMEOUT!\n")

    monkeypatch.setattr(module, "run_yosys", run)
    netlist = netlist_of(TINY)
    answer = prove(netlist, fault(netlist, cell_that_drives(netlist, "z"), "Y", "const0"))
    assert answer == f"not decided within {module.PROOF_SECONDS} s"


# Campaigns


def test_caught_and_equivalent_add_up(blocks, regression):
    result = campaign("tiny", 16, seed=4, vectors=100, quiet=True)
    assert regression == [("tiny", list(range(1, 17)), 5, 100, None, 4)]
    caught = [mutant for mutant in result.mutants if mutant.caught]
    equivalent = [mutant for mutant in result.mutants if mutant.explanation == "equivalent, proven"]
    # The regression tries everything, so nothing is left over.
    assert len(caught) + len(equivalent) == 16
    assert result.survivors == equivalent
    assert len(equivalent) >= 1
    assert len(caught) >= 1
    assert all(mutant.explanation == "" for mutant in caught)
    assert result.share == pytest.approx(len(caught) / 16)
    data = result.as_json()
    assert (data["mutants"], data["caught"]) == (16, len(caught))
    assert [each["number"] for each in data["survivors"]] == [mutant.number for mutant in equivalent]
    row = table([result]).splitlines()[1].split()
    assert row == ["tiny", "16", str(len(caught)), f"{100 * len(caught) / 16:.2f}", str(len(equivalent)), "0"]


def test_a_regression_that_is_blind_leaves_survivors(blocks, monkeypatch):
    monkeypatch.setattr(
        module, "check_mutants", lambda block, verilog, mutants, *rest, seed: dict.fromkeys(mutants, False)
    )
    result = campaign("tiny", 6, seed=4, quiet=True)
    assert result.survivors == result.mutants
    assert result.share == 0
    proven = sum(mutant.explanation == "equivalent, proven" for mutant in result.mutants)
    assert proven + sum(mutant.explanation.startswith("differs at ") for mutant in result.mutants) == 6
    assert table([result]).splitlines()[1].split() == ["tiny", "6", "0", "0.00", str(proven), str(6 - proven)]


def example(block="tiny", caught=19, survivors=1, explanation="equivalent, proven"):
    one = Mutant(7, "mutate", "stuck at 0", "c3", "$_AND_", "A", "sum[2]", ("hdl/vmac.py:10", "x.py:2"))
    mutants = [Mutant(number, "", "inverted", "c1", "$_OR_", "Y", "", (), True) for number in range(caught)]
    return Result(
        block,
        {"lanes": 64},
        9,
        100,
        mutants + [Mutant(**vars(one) | {"caught": False, "explanation": explanation})] * survivors,
    )


def test_table_explains_every_survivor():
    lines = table([example(), example("other", 2, 0)]).splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["tiny", "20", "19", "95.00", "1", "0"],
        ["other", "2", "2", "100.00", "0", "0"],
    ]
    assert lines[3:] == [
        "",
        "survivors of tiny",
        "   7  $_AND_ c3.A sum[2]: stuck at 0; hdl/vmac.py:10, x.py:2",
        "      equivalent, proven",
    ]


def test_json_has_what_the_table_has():
    assert json.loads(json.dumps(example().as_json())) == {
        **{"block": "tiny", "parameters": {"lanes": 64}, "seed": 9, "vectors": 100},
        **{"mutants": 20, "caught": 19, "share": 0.95, "goal": GOAL},
        "survivors": [
            {
                **{"number": 7, "fault": "stuck at 0", "cell": "c3", "type": "$_AND_", "pin": "A"},
                **{"signal": "sum[2]", "sources": ["hdl/vmac.py:10", "x.py:2"], "explanation": "equivalent, proven"},
            }
        ],
    }


# The command


@pytest.mark.parametrize(("caught", "survivors", "status"), [(19, 1, 0), (18, 1, 1), (1, 0, 0), (0, 1, 1)])
def test_command_succeeds_from_the_goal_on(caught, survivors, status, monkeypatch, tmp_path, capsys):
    given = []

    def fake(block, *arguments, **options):
        given.append((block, arguments, options))
        return example(block, caught, survivors)

    monkeypatch.setattr(module, "campaign", fake)
    path = tmp_path / "new" / "mutants.json"
    arguments = ["vmac", "weight_encoder", "--count", "5", "--seed", "3", "--vectors", "64", "--quiet"]
    assert main([*arguments, "--json", str(path)]) == status
    assert given == [(block, (5, 3, 64), {"tool": None, "quiet": True}) for block in ("vmac", "weight_encoder")]
    results = [example(block, caught, survivors) for block in ("vmac", "weight_encoder")]
    assert capsys.readouterr().out == table(results) + "\n"
    assert json.loads(path.read_text()) == [result.as_json() for result in results]
    assert path.read_text().endswith("]\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "0"], "--count must be positive, not 0"),
        (["--count", "-3"], "--count must be positive, not -3"),
        (["--vectors", "0"], "--vectors must be positive, not 0"),
        (["--seed", "-1"], "seed must not be negative, not -1"),
        (["--json", f"{__file__}/mutants.json"], f"output must be in a folder, which {__file__} cannot be"),
    ],
)
def test_bad_options_are_one_line(arguments, message, blocks, regression, capsys):
    assert main(["weight_encoder", "--quiet", *arguments]) == 1
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"error: {message}\n")
    assert regression == []


def test_a_block_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["vmac9"])
    assert caught.value.code == 2
    assert "vmac9" in capsys.readouterr().err
