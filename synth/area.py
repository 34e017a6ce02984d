"""``python -m synth.area``: area of a block or of any Verilog file, module by module; docs/area.md says how to read it."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hdl.build import BLOCKS, generate, parse_parameters, settings_of
from model.command import check_outputs, command, write_json
from synth.liberty import memory_macros
from synth.libraries import PRESETS, LibertyFiles, find, prepare
from synth.stat import Area
from synth.yosys import RECIPES, TOOLS, measure

__all__ = ["add_design", "add_library", "as_json", "design_of", "main", "table"]


def table(area: Area, nand2: float | None = None) -> str:
    """Return one line a module: instances, own area, area with all below it, its registers, share of all instances.

    Parameters
    ----------
    area : Area
    nand2 : float, optional
        Area of a NAND2; unless it is 1, a column has the total in it.
    """
    nand2 = None if nand2 == 1 else nand2
    unit = f" {'NAND2':>9}" if nand2 else ""
    lines = [f"{'module':40} {'n':>4} {'own':>10} {'total':>10} {'registers':>10} {'share %':>8}{unit}"]
    counts = area.instances()
    for name, module in area.modules.items():
        share = 100 * counts[name] * module.total / area.total if area.total else 0.0
        own, total, registers = module.area, module.total, module.total_sequential
        gates = f" {total / nand2:9.0f}" if nand2 else ""
        lines.append(f"{name:40} {counts[name]:4} {own:10.2f} {total:10.2f} {registers:10.2f} {share:8.2f}{gates}")
    return "\n".join(lines)


def memory_table(area: Area, areas: dict[str, float]) -> str:
    """Return one line a kind of memory: instances, bits, and its area where there is one."""
    lines = [f"{'memory':40} {'n':>4} {'bits':>10} {'area':>10}"]
    for name, number in area.memory_counts.items():
        size = f"{number * areas[name]:10.2f}" if name in areas else f"{'-':>10}"
        lines.append(f"{name:40} {number:4} {number * area.memories[name].bits:10} {size}")
    return "\n".join(lines)


def as_json(area: Area, files: LibertyFiles, nand2: float | None, memories: dict[str, float]) -> dict[str, Any]:
    """Return the tables as JSON-like data."""
    counts = area.instances()
    return {
        "library": files.name,
        "nand2_area": nand2,
        "yosys": area.yosys,
        "total": round(area.total, 4),
        "registers": round(area.sequential, 4),
        "combinational": round(area.combinational, 4),
        "memory_bits": area.bits,
        "memory_area": round(sum(n * memories[m] for m, n in area.memory_counts.items()), 4) if memories else None,
        "modules": [
            {
                "module": module.name,
                "instances": counts[module.name],
                "own": round(module.area, 4),
                "own_registers": round(module.sequential, 4),
                "total": round(module.total, 4),
                "total_registers": round(module.total_sequential, 4),
            }
            for module in area.modules.values()
        ],
        "memories": [
            {
                "memory": name,
                "instances": number,
                "words": area.memories[name].depth,
                "width": area.memories[name].width,
                "area": round(memories[name], 4) if name in memories else None,
            }
            for name, number in area.memory_counts.items()
        ],
    }


def memory_areas(area: Area, bit_area: float | None, macros: Sequence[Path]) -> dict[str, float]:
    """Return the area of one instance of each memory: bits times a stated area, or the smallest tiling by macros of a Liberty file."""
    if bit_area is not None:
        return {name: memory.bits * bit_area for name, memory in area.memories.items()}
    known = [macro for path in macros for macro in memory_macros(path)]
    return {
        name: min(-(-memory.width // width) * -(-memory.depth // words) * size for width, words, size in known)
        for name, memory in area.memories.items()
        if known
    }


def add_design(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is measured."""
    parser.add_argument("design", help="name of a block (python -m hdl.build --list), or a Verilog file")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="parameters of the block"
    )
    parser.add_argument("--top", help="name of the top module; needed with a file")


def design_of(options: argparse.Namespace) -> tuple[str, str]:
    """Return Verilog and name of the top module that options of :func:`add_design` choose."""
    if options.design in BLOCKS:
        block = BLOCKS[options.design]
        parameters = parse_parameters(block, settings_of(options.set, [block]))
        return generate(options.design, **parameters).verilog, options.top or options.design
    if options.set:
        raise ValueError(f"--set must follow the name of a block, not {options.design}")
    path = Path(options.design)
    if not path.exists():
        raise ValueError(f"design must be one of {', '.join(BLOCKS)}, or a Verilog file, not {options.design}")
    if not options.top:
        raise ValueError(f"--top must name the top module of {options.design}")
    try:
        return path.read_text(encoding="utf-8"), options.top
    except UnicodeDecodeError:
        raise ValueError(f"Verilog must be UTF-8, and {path} is not") from None


def add_library(parser: argparse.ArgumentParser) -> None:
    """Add the options that say with which library and tool."""
    add = parser.add_argument
    known = ", ".join(["ge", *PRESETS])
    add("--liberty", nargs="+", default=[], metavar="FILE", help=f"Liberty files, gzip or not, or one of {known}")
    add("--tool", choices=TOOLS, help="which Yosys (default: the first that is installed)")
    adders = argparse.BooleanOptionalAction
    add("--full-adders", action=adders, default=True, help="use the library's full-adder cells (default)")


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m synth.area", description=(__doc__ or "").partition(": ")[2])
    add_design(parser)
    add_library(parser)
    add = parser.add_argument
    add("--recipe", choices=RECIPES, default="area", help="ABC script (default: area)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--flat", action="store_true", help="flatten first (default)")
    shape.add_argument("--hier", action="store_true", help="keep the hierarchy: one line per module")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--bit-area", type=float, metavar="AREA", help="area of a bit of memory, in the library's unit")
    memory.add_argument("--memory-liberty", type=Path, nargs="+", default=[], metavar="FILE", help="memory macros")
    add("--json", type=Path, metavar="FILE", help="write the tables here as well")
    options = parser.parse_args(arguments)
    if options.bit_area is not None and not 0 <= options.bit_area < math.inf:
        raise ValueError(f"--bit-area must be at least 0 and finite, not {options.bit_area:g}")
    check_outputs(options.json)
    files = find(options.liberty)
    nand2 = prepare(files).library.nand2_area
    verilog, top = design_of(options)
    area = measure(
        verilog,
        top,
        liberty=files,
        hierarchical=options.hier,
        recipe=options.recipe,
        full_adders=options.full_adders,
        tool=options.tool,
    )
    sizes = memory_areas(area, options.bit_area, options.memory_liberty)
    write_json(options.json, as_json(area, files, nand2, sizes))
    print(table(area, nand2))
    if area.memories:
        print("\n" + memory_table(area, sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
