"""``python -m synth.export``: a block with constraints and memory wrappers for OpenROAD-flow-scripts and LibreLane (docs/export.md)."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdl.build import BLOCKS, Generated, generate, parse_parameters, settings_of
from model.command import command, write_files
from synth.macros import Split, split, summary, wrapper

__all__ = ["PLATFORMS", "Constraints", "Platform", "export", "main", "sdc"]

SMALLEST = 2048
"""Memories of fewer bits stay registers by default: a macro would be larger."""


@dataclass(frozen=True)
class Platform:
    """What the flows call a process.

    Attributes
    ----------
    pdk : str or None
        LibreLane's name; None if it has none.
    units_per_ns : int
        Time units of its Liberty files in a nanosecond, which SDC uses.
    """

    pdk: str | None
    units_per_ns: int = 1


PLATFORMS = {
    "sky130hd": Platform("sky130A"),
    "ihp-sg13g2": Platform("ihp-sg13g2"),
    "gf180": Platform("gf180mcuD"),
    "nangate45": Platform(None),
    "asap7": Platform(None, 1000),
    "gt2n": Platform(None, 1000),
}
"""Platforms of OpenROAD-flow-scripts."""


@dataclass(frozen=True)
class Constraints:
    """Timing and floor plan.

    Attributes
    ----------
    clock : float
        MHz.
    io_share : float
        Share of the clock period that inputs and outputs spend outside, 0 to 1.
    utilization : int
        Percent of the core that cells take, 1 to 100.

    Raises
    ------
    ValueError
        A value is outside its range.
    """

    clock: float = 100.0
    io_share: float = 0.2
    utilization: int = 40

    def __post_init__(self) -> None:
        if not 0 < self.clock <= 1e5:
            raise ValueError(f"clock must be above 0 and at most 100000 MHz, not {self.clock:g}")
        if not 0 <= self.io_share < 1:
            raise ValueError(f"io_share must be at least 0 and below 1, not {self.io_share:g}")
        if not 1 <= self.utilization <= 100:
            raise ValueError(f"utilization must be from 1 to 100 percent, not {self.utilization}")

    @property
    def period_ns(self) -> float:
        """Clock period, to a femtosecond."""
        return round(1000 / self.clock, 6)


def sdc(top: str, clocked: bool, constraints: Constraints, units_per_ns: int) -> str:
    """Return the constraints of a block as SDC; one without a clock port gets a virtual clock."""
    period = f"{round(constraints.period_ns * units_per_ns, 6):.10g}"
    port = " [get_ports clk]" if clocked else ""
    inputs = "[lsearch -inline -all -not -exact [all_inputs] [get_ports clk]]" if clocked else "[all_inputs]"
    unit = "ps" if units_per_ns == 1000 else "ns"
    return f"""\
# {top} at {constraints.clock:g} MHz; times in {unit}
current_design {top}
set period {period}
set outside [expr {{$period * {constraints.io_share:g}}}]
create_clock -name clk -period $period{port}
set_input_delay $outside -clock clk {inputs}
set_output_delay $outside -clock clk [all_outputs]
"""


def _orfs(top: str, platform: str, constraints: Constraints, files: Sequence[str], largest: int) -> str:
    sources = " \\\n    ".join(f"$(HERE){name}" for name in files)
    memory = (
        f"# While memories have no macros, this allows {largest} bits of one in registers.\n"
        f"export SYNTH_MEMORY_MAX_BITS = {largest}\n"
        "# With macros: their views, and none of the files rtl/memory_*.v above that they replace.\n"
        "# export ADDITIONAL_LEFS =\n# export ADDITIONAL_LIBS =\n# export ADDITIONAL_GDS =\n"
    )
    return f"""\
HERE := $(dir $(lastword $(MAKEFILE_LIST)))
export PLATFORM = {platform}
export DESIGN_NAME = {top}
export VERILOG_FILES = {sources}
export SDC_FILE = $(HERE)constraints.sdc
export CORE_UTILIZATION = {constraints.utilization}
export PLACE_DENSITY_LB_ADDON = 0.10
export TNS_END_PERCENT = 100
{memory if largest else ""}"""


def _librelane(top: str, clocked: bool, constraints: Constraints, files: Sequence[str]) -> dict[str, Any]:
    clock = {"CLOCK_PORT": "clk"} if clocked else {}
    return {
        "meta": {"version": 2, "flow": "Classic"},
        "DESIGN_NAME": top,
        "VERILOG_FILES": [f"dir::{name}" for name in files],
        **clock,
        "CLOCK_PERIOD": constraints.period_ns,
        "PNR_SDC_FILE": "dir::constraints.sdc",
        "SIGNOFF_SDC_FILE": "dir::constraints.sdc",
        "FP_CORE_UTIL": constraints.utilization,
    }


def _readme(top: str, platform: str, parts: Split) -> str:
    pdk = PLATFORMS[platform].pdk
    librelane = (
        f"librelane --pdk {pdk} config.json" if pdk else f"LibreLane has no {platform}; config.json is left out."
    )
    lines = [
        f"# {top}: hand-off\n",
        "OpenROAD-flow-scripts, in its folder `flow`:\n",
        "```sh\nmake DESIGN_CONFIG=/path/to/this/folder/config.mk\n```\n",
        f"LibreLane:\n\n```sh\n{librelane}\n```\n" if pdk else f"{librelane}\n",
        "`export.json` has the parameters of the block, its ports and its memories.\n",
    ]
    if parts.memories:
        rows = "".join(
            f"| `rtl/{name}.v` | {each.depth} | {each.width} | {each.bits} |\n"
            for name, each in parts.wrappers().items()
        )
        lines += [
            "## Memories\n",
            "Each shape of memory is a module of its own, a model in registers until a macro takes its place: replace the body of the "
            "module by an instance of the macro, and add the macro's views to the configuration.\n",
            f"| file | words | bits of a word | bits |\n|---|---|---|---|\n{rows}",
            "All have one clock, a port that writes and a port that reads a cycle later; while `r_en` is low, `r_data` must stay. A word "
            "that is read while it is written may be anything: the design never uses it, and the model gives wrong data there in "
            "simulation, so that a test would notice. Contents at power-up may be anything, too.\n",
        ]
    return "\n".join(lines)


def export(
    block: str, platform: str, constraints: Constraints, smallest: int = SMALLEST, **parameters: Any
) -> dict[str, str]:
    """Return the files of a hand-off, text by path.

    Parameters
    ----------
    block : str
        A key of `hdl.build.BLOCKS`.
    platform : str
        A key of :data:`PLATFORMS`.
    constraints : Constraints
    smallest : int
        Memories of at least so many bits become modules of their own; the others stay registers.
    **parameters
        Of the block.

    Raises
    ------
    ValueError, TypeError
        A parameter is unknown or outside its range.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform must be one of {', '.join(PLATFORMS)}, not {platform!r}")
    if smallest < 0:
        raise ValueError(f"smallest must be at least 0 bits, not {smallest}")
    generated = generate(block, **parameters)
    parts = split(generated.verilog, smallest)
    rtl = {f"rtl/{block}.v": parts.verilog}
    rtl |= {f"rtl/{name}.v": wrapper(memory) for name, memory in parts.wrappers().items()}
    clocked = any(port["name"] == "clk" for port in generated.sidecar["ports"])
    largest = max((memory.bits for memory in (*parts.memories, *parts.kept)), default=0)
    files = {
        **rtl,
        "constraints.sdc": sdc(block, clocked, constraints, PLATFORMS[platform].units_per_ns),
        "config.mk": _orfs(block, platform, constraints, list(rtl), largest),
        "export.json": _description(generated, platform, constraints, parts),
        "README.md": _readme(block, platform, parts),
    }
    if PLATFORMS[platform].pdk:
        config = _librelane(block, clocked, constraints, list(rtl))
        files["config.json"] = json.dumps(config, indent=2) + "\n"
    return files


def _description(generated: Generated, platform: str, constraints: Constraints, parts: Split) -> str:
    data = {
        **generated.sidecar,
        "platform": platform,
        "constraints": dataclasses.asdict(constraints),
        "memories": summary(parts.memories),
        "memories_in_registers": summary(parts.kept),
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m synth.export", description=(__doc__ or "").partition(": ")[2])
    add = parser.add_argument
    add("block", help=", ".join(BLOCKS))
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="parameters of the block")
    add("--platform", default="sky130hd", help=f"{', '.join(PLATFORMS)} (default: %(default)s)")
    add("--clock", type=float, default=Constraints.clock, metavar="MHZ", help="(default: %(default)g)")
    add(
        "--io-share",
        type=float,
        default=Constraints.io_share,
        metavar="SHARE",
        help="of the period, outside (default: %(default)g)",
    )
    add(
        "--utilization",
        type=int,
        default=Constraints.utilization,
        metavar="PERCENT",
        help="of the core (default: %(default)s)",
    )
    add(
        "--smallest",
        type=int,
        default=SMALLEST,
        metavar="BITS",
        help="smallest memory with a module of its own (default: %(default)s)",
    )
    add("-o", "--output", type=Path, default=Path("build/export"), metavar="DIR", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.block not in BLOCKS:
        raise ValueError(f"block must be one of {', '.join(BLOCKS)}, not {options.block!r}")
    block = BLOCKS[options.block]
    settings = settings_of(options.set, [block])
    constraints = Constraints(options.clock, options.io_share, options.utilization)
    parameters = parse_parameters(block, settings)
    files = export(options.block, options.platform, constraints, options.smallest, **parameters)
    write_files({options.output / name: text for name, text in files.items()})
    print("\n".join(str(options.output / name) for name in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
