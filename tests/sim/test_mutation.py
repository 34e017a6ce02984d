"""The regression catches injected bugs, one netlist at a time or many in one."""

import re

import pytest

from sim.design import generated
from sim.mutation import check_mutants, check_netlist
from sim.runner import SimulationError, available_simulators

WRAPPER = """\
module {block}({ports});
  input [7:0] mutsel;
  {declarations}
  wire [63:0] sum;
  wire [2:0] bits;
  wire valid;
  assign psum_o = mutsel == 1 ? sum ^ 64'h8000000000000000 : mutsel == 2 ? sum + (&sum[7:0]) : sum;
  assign status = mutsel == 3 ? bits & 3'd3 : mutsel == 4 ? bits | {{2'd0, &psum_i[9:0]}} : bits;
  assign valid_o = mutsel == 5 ? valid & ~(&psum_i[9:0]) : valid;
  right inner({connections});
endmodule
"""


@pytest.fixture(scope="module")
def wrapped():
    """A vMAC with five faults behind mutsel, some of them rare, and a sixth number that does nothing."""
    design = generated("vmac")
    ports = design.sidecar["ports"]
    renamed = {"psum_o": "sum", "status": "bits", "valid_o": "valid"}
    text = WRAPPER.format(
        block="vmac",
        ports=", ".join([*(p["name"] for p in ports), "mutsel"]),
        declarations="\n  ".join(f"{p['direction']} [{p['width'] - 1}:0] {p['name']};" for p in ports),
        connections=", ".join(f".{p['name']}({renamed.get(p['name'], p['name'])})" for p in ports),
    )
    return re.sub(r"\bmodule vmac\(", "module right(", design.verilog) + text


def test_many_mutants_share_one_build(wrapped, seed):
    caught = check_mutants("vmac", wrapped, range(1, 7), 8, seed=seed)
    assert caught == {1: True, 2: True, 3: True, 4: True, 5: True, 6: False}


def test_mutants_are_numbers_that_fit():
    with pytest.raises(ValueError, match=r"^mutants must be from 1 to 7, not 8$"):
        check_mutants("vmac", "", [8], 3)


@pytest.mark.parametrize("block", ["vmac_nvfp4", "weight_encoder"])
def test_a_netlist_by_itself(block, seed):
    text = generated(block).verilog
    simulator = available_simulators()[-1]
    assert not check_netlist(block, text, vectors=500, simulator=simulator, seed=seed)
    mutated, count = re.subn(r" & ", " | ", text, count=1)
    assert count == 1
    assert check_netlist(block, mutated, vectors=1000, simulator=simulator, seed=seed)


def test_a_netlist_that_does_not_compile():
    with pytest.raises(SimulationError):
        check_netlist("vmac_nvfp4", "module vmac_nvfp4(; endmodule\n")


def test_a_wrong_starting_point_is_refused(wrapped):
    broken = wrapped.replace("mutsel == 1 ?", "mutsel == 0 ?")
    with pytest.raises(ValueError, match=r"^verilog must agree with the model of vmac with mutsel = 0$"):
        check_mutants("vmac", broken, [2], 8)
