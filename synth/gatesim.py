"""``python -m synth.gatesim``: netlists mapped to a library, simulated and compared with the golden model, bit for bit."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.command import Progress, check_outputs, command, positive, write_files, write_json
from sim.design import generated
from sim.regress import Bench
from sim.runner import seed_from_environment
from sim.scoreboard import Tally
from sim.stimuli import ILLEGAL, MODES
from synth.area import add_library
from synth.libraries import find
from synth.netlist import FlatNetlist, mapped
from synth.yosys import RECIPES

__all__ = ["BLOCKS", "VECTORS", "Result", "check", "main", "table"]

BLOCKS = ("vmac", "vmac_nvfp4", "vmac_autofp2", "weight_encoder")
DEFAULT = ("vmac", "weight_encoder")
VECTORS = 100_000
"""Vectors of each mode by default."""


@dataclass(frozen=True)
class Result:
    """What a netlist did.

    Attributes
    ----------
    block, library : str
    cells : dict of str to int
        How many of each library cell it has.
    vectors : int
        How many of each mode were asked for.
    tally : Tally
    """

    block: str
    library: str
    cells: dict[str, int]
    vectors: int
    tally: Tally

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; empty if the netlist is the block."""
        short = {
            mode: count
            for mode, count in self.tally.compared.items()
            if count < self.vectors and mode != MODES[ILLEGAL]
        }
        few = [f"fewer than {self.vectors} vectors compared: {short}"] if short else []
        return [*self.tally.faults, *few]

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON-like data."""
        return {
            "block": self.block,
            "library": self.library,
            "cells": self.cells,
            "compared": self.tally.compared,
            "mismatches": self.tally.mismatches,
            "faults": self.faults,
        }


def check(
    block: str,
    library: str,
    netlist: FlatNetlist,
    vectors: int = VECTORS,
    seed: int = 1,
    progress: Callable[[Tally], None] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Result:
    """Run the regression on a netlist.

    Parameters
    ----------
    block : str
        One of `BLOCKS`.
    library : str
        Name of the library, for the report.
    netlist : FlatNetlist
    vectors : int
        At least so many in each mode.
    seed : int
    progress : callable, optional
        Called with the tally after each portion.
    parameters : mapping, optional
        Parameters of the block that differ from its defaults.

    Raises
    ------
    SimulationError
        The netlist does not compile or run.
    """
    text = netlist.verilog() + netlist.models
    bench = Bench(block, parameters or {}, verilog=text, optimise="-O0")
    tally = bench.run(vectors, [seed], bench.coverage(), progress)
    kinds = [instance.kind for instance in netlist.instances]
    cells = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    return Result(block, library, cells, vectors, tally)


def table(results: Sequence[Result]) -> str:
    """Return a line per netlist."""
    lines = [f"{'block':16} {'library':40} {'cells':>6} {'AutoFP2':>9} {'NVFP4':>9} {'AutoFP6':>9} {'differ':>7}"]
    for result in results:
        counts = [str(result.tally.compared.get(mode, "–")) for mode in MODES if mode != MODES[ILLEGAL]]
        shown = " ".join(f"{count:>9}" for count in counts)
        cells = sum(result.cells.values())
        lines.append(f"{result.block:16} {result.library:40} {cells:>6} {shown} {result.tally.mismatches:>7}")
    return "\n".join(lines)


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if every netlist equals the model, 1 if not or on an error."""
    parser = argparse.ArgumentParser(prog="python -m synth.gatesim", description=(__doc__ or "").partition(": ")[2])
    add = parser.add_argument
    add("blocks", nargs="*", metavar="BLOCK", help=f"some of {', '.join(BLOCKS)} (default: {' and '.join(DEFAULT)})")
    add("--vectors", type=int, default=VECTORS, help=f"vectors of each mode (default: {VECTORS})")
    add("--seed", type=int, help="seed (default: SEED from the environment, else 1)")
    add("--hier", action="store_true", help="keep the hierarchy while mapping")
    add("--recipe", choices=RECIPES, default="area", help="ABC script (default: area)")
    add("--verilog", type=Path, metavar="FOLDER", help="leave netlists with their cell models here")
    add("--json", type=Path, metavar="FILE", help="write the results here as well")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    add_library(parser)
    options = parser.parse_args(arguments)
    say, results = Progress(options.quiet), []
    for block in options.blocks:
        if block not in BLOCKS:
            raise ValueError(f"BLOCK must be one of {', '.join(BLOCKS)}, not {block!r}")
    positive(options, "vectors")
    seed = seed_from_environment() if options.seed is None else options.seed
    if seed < 0:
        raise ValueError(f"--seed must not be negative, not {seed}")
    netlists = {block: options.verilog and options.verilog / f"{block}.v" for block in options.blocks or DEFAULT}
    check_outputs(*netlists.values(), options.json)
    files = find(options.liberty)
    for block, path in netlists.items():
        netlist = mapped(
            generated(block).verilog,
            block,
            liberty=files,
            hierarchical=options.hier,
            recipe=options.recipe,
            full_adders=options.full_adders,
            tool=options.tool,
        )
        say(f"{block}: {len(netlist.instances)} cells of {files.name}")
        if path:
            write_files({path: netlist.verilog() + netlist.models})

        def done(tally: Tally, block: str = block) -> None:
            say(f"{block}: {tally.total} vectors")

        results.append(check(block, files.name, netlist, options.vectors, seed, done))
        for fault in results[-1].faults:
            print(f"{block}: {fault}", flush=True)
    write_json(options.json, [result.as_json() for result in results])
    print(table(results))
    return 1 if any(result.faults for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
