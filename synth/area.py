"""``python -m synth.area``: area of any Verilog file, module by module."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from synth.liberty import GE, LibertyError
from synth.yosys import RECIPES, TOOLS, Area, SynthesisError, measure

__all__ = ["main", "table"]


def table(area: Area) -> str:
    """Return one line a module: instances, own area, area with all below it, its registers, share of all instances."""
    lines = [f"{'module':40} {'n':>4} {'own':>10} {'total':>10} {'registers':>10} {'share %':>8}"]
    counts = area.instances()
    for name, module in area.modules.items():
        share = 100 * counts[name] * module.total / area.total if area.total else 0.0
        own, total, registers = module.area, module.total, module.total_sequential
        lines.append(f"{name:40} {counts[name]:4} {own:10.2f} {total:10.2f} {registers:10.2f} {share:8.2f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m synth.area", description=__doc__)
    parser.add_argument("file", type=Path, help="Verilog file")
    parser.add_argument("--top", required=True, help="name of the top module")
    parser.add_argument(
        "--liberty", type=Path, default=GE, help="Liberty file, gzip or not (default: our gate equivalents)"
    )
    parser.add_argument("--tool", choices=TOOLS, help="which Yosys (default: the first that is installed)")
    parser.add_argument("--recipe", choices=RECIPES, default="area", help="ABC script (default: area)")
    parser.add_argument("--full-adders", action="store_true", help="use the library's full-adder cells")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--flat", action="store_true", help="flatten first (default)")
    shape.add_argument("--hier", action="store_true", help="keep the hierarchy: one line per module")
    options = parser.parse_args(arguments)
    try:
        area = measure(
            options.file.read_text(encoding="utf-8"),
            options.top,
            liberty=options.liberty,
            hierarchical=options.hier,
            recipe=options.recipe,
            full_adders=options.full_adders,
            tool=options.tool,
        )
    except (OSError, LibertyError, SynthesisError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(area))
    return 0


if __name__ == "__main__":
    sys.exit(main())
