"""``python -m synth.energy``: energy per MAC of the vector MACs, mode by mode and part by part, from gate-level simulation; docs/energy.md."""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.command import Progress, check_outputs, command, positive, write_json
from model.pictures import check_picture, stacks, write_picture
from sim.design import config_of, generated
from sim.harness import BulkHarness
from sim.runner import SimulationError
from sim.scoreboard import check_vectors
from sim.stimuli import AUTOFP2, AUTOFP6, NVFP4, VectorShape
from synth.area import add_library
from synth.cells import inputs_of, outputs_of, register_of
from synth.liberty import LibertyError
from synth.liberty_tree import library_group
from synth.libraries import LibertyFiles, find, prepare
from synth.netlist import PROBE_BITS, FlatNetlist, mapped
from synth.power import KINDS, Energy, Units, Waveforms, energy
from synth.saif import find_opensta, hand_off, opensta_power
from synth.workload import TENSORS, Stream, check_sizes, quiet, random_tensors, real_tensors, stream
from synth.yosys import RECIPES, work_folder

__all__ = ["BLOCKS", "Result", "Settings", "main", "measured", "parts_of", "simulated", "table"]

BLOCKS = {"vmac": (AUTOFP2, NVFP4, AUTOFP6), "vmac_nvfp4": (NVFP4,), "vmac_autofp2": (AUTOFP2,)}
"""Designs that are compared, and their modes."""

PARTS = {
    "digits": "lanes and trees",
    "gate": "refinement records",
    "refinement": "refinement lanes",
    "reduction": "reduction",
    "scaler": "scaling",
    "accumulator": "accumulation",
}
INPUTS, REST = "input registers", "other"
REFINEMENT = ("refinement records", "refinement lanes")
ZERO = "zero weights"

NOTE = "activity of every net from simulation; zero delay, so no glitches; no wires beyond --wire, no clock tree"


@dataclass(frozen=True)
class Settings:
    """What a measurement depends on.

    Attributes
    ----------
    liberty : LibertyFiles
    recipe : str
    full_adders : bool
    clock : float
        In megahertz; only leakage depends on it.
    slew : float or None
    wire : float
        As for `synth.power.energy`.
    rows, tokens, depth : int
        Size of the tensors: N, M and K.
    tool : str or None
    hand_off : Path or None
        Folder for netlists, SAIF and scripts.
    """

    liberty: LibertyFiles
    recipe: str = "area"
    full_adders: bool = True
    clock: float = 1000.0
    slew: float | None = None
    wire: float = 0.0
    rows: int = 32
    tokens: int = 16
    depth: int = 576
    tool: str | None = None
    hand_off: Path | None = None


@dataclass(frozen=True)
class Result:
    """Energy of one design in one mode, on one pair of tensors.

    Attributes
    ----------
    block, mode, tensors : str
    macs : int
        Per cycle; 0 for an idle block.
    vectors : int
        Vectors of the simulation that were compared with the golden model.
    cells : int
    spent : Energy
    parts : tuple of Energy
        Of a netlist whose hierarchy was kept for mapping, for its parts; or empty.
    opensta : float or None
        OpenSTA's joules per cycle for the same netlist and activity, if there is a version that reads SAIF.
    """

    block: str
    mode: str
    tensors: str
    macs: int
    vectors: int
    cells: int
    spent: Energy
    parts: tuple[Energy, ...]
    opensta: float | None

    def as_json(self, clock: float) -> dict[str, Any]:
        """Return the result as JSON-like data, in femtojoules."""

        def femto(found: Mapping[str, float]) -> dict[str, float]:
            return {kind: round(1e15 * joules, 4) for kind, joules in found.items()} | {
                "total": round(1e15 * sum(found.values()), 4)
            }

        whole = femto(self.spent.per_cycle(1e6 * clock))
        return {
            "block": self.block,
            "mode": self.mode,
            "tensors": self.tensors,
            "macs_per_cycle": self.macs,
            "vectors_compared": self.vectors,
            "cycles": self.spent.cycles,
            "cells": self.cells,
            "nets": self.spent.nets,
            "fj_per_mac": round(whole["total"] / self.macs, 4) if self.macs else None,
            "fj_per_cycle": whole,
            "opensta_fj_per_cycle": None if self.opensta is None else round(1e15 * self.opensta, 4),
            "parts_fj_per_cycle": {
                part: femto(spent.per_cycle(1e6 * clock, part)) for spent in self.parts for part in spent.parts
            },
        }


def simulated(block: str, netlist: FlatNetlist, run: Stream) -> tuple[Waveforms, int]:
    """Run a netlist of a vector MAC, compare it with the golden model, and return all waveforms and the number of results compared.

    Raises
    ------
    SimulationError
        The netlist disagrees with the model, or the simulation failed.
    """
    design, config = generated(block), config_of(block)
    probes = [{"name": name, "direction": "output", "width": PROBE_BITS} for name in netlist.probes]
    sidecar = design.sidecar | {"ports": [*design.sidecar["ports"], *probes]}
    text = netlist.verilog(probes=True) + netlist.models
    harness = BulkHarness({"block.v": text}, sidecar, feedback={"psum_i": "psum_o"}, optimise="-O0")
    latency, delay = sidecar["latency"], sidecar["psum_delay"]
    shape = VectorShape.of(block, config)
    outputs = harness.run(run.stimulus.columns(shape, delay, latency))
    tally = check_vectors(shape, config, run.stimulus, outputs, latency, delay)
    due = int(run.stimulus.alive(latency).sum())
    if tally.mismatches or tally.unknown or tally.total != due:
        raise SimulationError(
            f"netlist of {block} must agree with the model: {tally.total} of {due} compared; {'; '.join(tally.messages)}"
        )
    return Waveforms.of(netlist, outputs, run.first, run.cycles), tally.total


def parts_of(netlist: FlatNetlist) -> dict[str, str]:
    """Return the part of the vector MAC that each cell belongs to, by name.

    Cells of a module belong to it. A register of the top belongs to the module that feeds it, or to the input registers.
    """
    outputs = {kind: outputs_of(cell) for kind, cell in netlist.cells.items()}
    drivers = {
        bit: instance
        for instance in netlist.instances
        for pin, bit in instance.pins.items()
        if pin in outputs[instance.kind]
    }
    inputs = {bit for direction, bits in netlist.ports.values() if direction == "input" for bit in bits}

    def named(module: str) -> str:
        return next((text for stem, text in PARTS.items() if module.startswith(f"{netlist.top}_{stem}")), REST)

    found = {}
    for instance in netlist.instances:
        part = named(instance.part) if instance.part else REST
        if not instance.part and netlist.cells[instance.kind].first("ff") is not None:
            register = register_of(netlist.cells[instance.kind])
            data = register.next_state.pins if register else set()
            bit = instance.pins["D" if "D" in data else min(data)]
            while bit in drivers and not drivers[bit].part and len(inputs_of(netlist.cells[drivers[bit].kind])) == 1:
                bit = drivers[bit].pins[inputs_of(netlist.cells[drivers[bit].kind])[0]]
            driver = drivers.get(bit)
            part = INPUTS if bit in inputs else named(driver.part) if driver is not None and driver.part else REST
        found[instance.name] = part
    return found


def measured(
    settings: Settings,
    blocks: Sequence[str] = tuple(BLOCKS),
    tensors: Sequence[str] = TENSORS,
    say: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Measure designs in all their modes.

    For the vector MAC itself also by part, idle, and with zero weights.

    Raises
    ------
    synth.liberty.LibertyError
        The library cannot be used or has no power data.
    SynthesisError, SimulationError
        A tool failed, or a netlist disagrees with the model.
    """
    text = prepare(settings.liberty).text
    if "internal_power" not in text:
        raise LibertyError(f"energy needs a Liberty file with internal_power; {settings.liberty.name} has none")
    library = library_group(text)
    Units.of(library)
    size = (settings.rows, settings.tokens, settings.depth)
    for block in blocks:
        check_sizes(*size, config_of(block).lanes, AUTOFP2 in BLOCKS[block])
    operands = {name: real_tensors(*size) if name == "real" else random_tensors(*size) for name in tensors}
    results = []
    for block in blocks:
        runs = _runs(block, operands)
        netlists = []
        for hierarchical in (False, True)[: 1 + (block == "vmac")]:
            netlists.append(_netlist(settings, block, hierarchical))
            kept = ", hierarchy kept" if hierarchical else ""
            say(f"{block}: {len(netlists[-1].instances)} cells{kept}")
        for name, run in runs:
            found, compared, opensta = list[Energy](), 0, None
            for k, netlist in enumerate(netlists):
                waves, count = simulated(block, netlist, run)
                parts = parts_of(netlist) if k else None
                found.append(energy(netlist, waves, library, part_of=parts, slew=settings.slew, wire=settings.wire))
                compared += count
                if k == 0:
                    opensta = _opensta(settings, f"{run.mode}-{name}".replace(" ", "-"), netlist, text, waves)
            cells, whole = len(netlists[0].instances), found[0]
            results.append(Result(block, run.mode, name, run.macs, compared, cells, whole, tuple(found[1:]), opensta))
            say(f"{block}, {run.mode}, {name}: {compared} vectors equal to the model")
    return results


def _netlist(settings: Settings, block: str, hierarchical: bool) -> FlatNetlist:
    return mapped(
        generated(block).verilog,
        block,
        liberty=settings.liberty,
        hierarchical=hierarchical,
        recipe=settings.recipe,
        full_adders=settings.full_adders,
        tool=settings.tool,
    )


def _runs(block: str, operands: Mapping[str, tuple[Any, Any]]) -> list[tuple[str, Stream]]:
    """Return the runs of a block, with the names of their tensors."""
    config, latency = config_of(block), generated(block).sidecar["latency"]
    runs = [
        (name, stream(block, config, mode, *pair, latency)) for name, pair in operands.items() for mode in BLOCKS[block]
    ]
    if block == "vmac":
        first = next(iter(operands.values()))
        runs.append((ZERO, stream(block, config, NVFP4, *first, latency, zero_weights=True)))
        runs.append(("constant", quiet(runs[0][1], latency)))
    return runs


def _opensta(settings: Settings, name: str, netlist: FlatNetlist, text: str, waves: Waveforms) -> float | None:
    """Leave a run for OpenSTA if that is asked for; return its joules per cycle if it is there."""
    tool = find_opensta()
    if tool is None and settings.hand_off is None:
        return None
    kept = nullcontext(settings.hand_off / netlist.top) if settings.hand_off else work_folder(netlist.top)
    with kept as folder:
        (script,) = hand_off(folder, netlist, text, {name: waves}, settings.clock)
        return opensta_power(tool, script) / (1e6 * settings.clock) if tool else None


def table(results: Sequence[Result], settings: Settings) -> str:
    """Return the results as Markdown: energy per MAC, then by part."""
    rows = [result.as_json(settings.clock) for result in results]
    kinds = " | ".join(KINDS)
    lines = [
        f"| block | mode | tensors | fJ per MAC | fJ per cycle | {kinds} | vectors compared | nets |",
        "|---|---|---|---|---|" + "---|" * (len(KINDS) + 2),
    ]
    for row in rows:
        cycle = row["fj_per_cycle"]
        each = "–" if row["fj_per_mac"] is None else f"{row['fj_per_mac']:.2f}"
        spent = " | ".join(f"{cycle[kind]:.1f}" for kind in KINDS)
        lines.append(
            f"| `{row['block']}` | {row['mode']} | {row['tensors']} | {each} | {cycle['total']:.1f} | {spent} "
            f"| {row['vectors_compared']} | {row['nets']} |"
        )
    checked = [row for row in rows if row["opensta_fj_per_cycle"] is not None]
    if checked:
        lines += ["", "| block | mode | tensors | OpenSTA, fJ per cycle | here |", "|---|---|---|---|---|"]
    for row in checked:
        there, here = row["opensta_fj_per_cycle"], row["fj_per_cycle"]["total"]
        lines.append(f"| `{row['block']}` | {row['mode']} | {row['tensors']} | {there:.1f} | {here:.1f} |")
    parted = [row for row in rows if row["parts_fj_per_cycle"]]
    if parted:
        heads = [f"{row['mode']}, {row['tensors']}" for row in parted]
        lines += ["", f"| fJ per cycle: activity + clock and leakage | {' | '.join(heads)} |"]
        lines.append("|---|" + "---|" * len(heads))
        for part in sorted({part for row in parted for part in row["parts_fj_per_cycle"]}):
            found = [row["parts_fj_per_cycle"][part] for row in parted]
            pairs = [f"{f['internal'] + f['switching']:.1f} + {f['clock'] + f['leakage']:.1f}" for f in found]
            lines.append(f"| {part} | {' | '.join(pairs)} |")
    return "\n".join(lines)


def _picture(path: Path, results: Sequence[Result], settings: Settings) -> None:
    rows = [result.as_json(settings.clock) for result in results]
    each = {
        f"{row['block']}, {row['mode']}, {row['tensors']}": {
            k: row["fj_per_cycle"][k] / row["macs_per_cycle"] for k in KINDS
        }
        for row in rows
        if row["macs_per_cycle"]
    }
    write_picture(path, stacks(each, f"Energy per MAC, {settings.liberty.name.partition('.')[0]}", "fJ"))


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m synth.energy", description=(__doc__ or "").partition(": ")[2])
    add = parser.add_argument
    add("--blocks", nargs="+", default=list(BLOCKS), choices=BLOCKS, help="designs (default: all three)")
    add(
        "--tensors",
        nargs="+",
        default=list(TENSORS),
        choices=TENSORS,
        help="real: SmolLM2-135M; random: normal (default: both)",
    )
    add("--clock", type=float, default=Settings.clock, help="megahertz, for leakage per cycle (default: 1000)")
    add(
        "--slew",
        type=float,
        help="transition time of all pins, in the library's unit (default: a third up the cell's tables)",
    )
    add("--wire", type=float, default=0.0, help="wire capacitance per input pin, in the library's unit (default: 0)")
    add("--rows", type=int, default=Settings.rows, help="rows of the weights (default: 32)")
    add("--tokens", type=int, default=Settings.tokens, help="rows of the activations (default: 16)")
    add("--depth", type=int, default=Settings.depth, help="K (default: 576)")
    add("--recipe", choices=RECIPES, default="area", help="ABC script (default: area)")
    add("--hand-off", type=Path, metavar="FOLDER", help="leave netlists, SAIF and scripts for OpenSTA here")
    add("--json", type=Path, metavar="FILE", help="write the results here as well")
    add("--picture", type=Path, metavar="FILE", help="draw the energy per MAC, as .svg or .png")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    add_library(parser)
    options = parser.parse_args(arguments)
    positive(options, "clock", "rows", "tokens", "depth")
    for name in ("slew", "wire"):
        if not 0 <= (getattr(options, name) or 0) < math.inf:
            raise ValueError(f"--{name} must be at least 0 and finite, not {getattr(options, name):g}")
    check_outputs(options.json, options.hand_off and options.hand_off / "mapped.v")
    check_picture(options.picture)
    settings = Settings(
        find(options.liberty),
        options.recipe,
        options.full_adders,
        options.clock,
        options.slew,
        options.wire,
        options.rows,
        options.tokens,
        options.depth,
        options.tool,
        options.hand_off,
    )
    results = measured(settings, options.blocks, options.tensors, Progress(options.quiet))
    data = {
        "library": settings.liberty.name,
        "clock_mhz": settings.clock,
        "slew": settings.slew,
        "wire": settings.wire,
        "tensors": {"rows": settings.rows, "tokens": settings.tokens, "depth": settings.depth},
        "note": NOTE,
        "results": [result.as_json(settings.clock) for result in results],
    }
    write_json(options.json, data)
    if options.picture:
        _picture(options.picture, results, settings)
    print(table(results, settings))
    print(f"\n{NOTE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
