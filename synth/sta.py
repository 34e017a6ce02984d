"""Static timing of a flat mapped netlist: latest arrivals along every path, by the tables of its Liberty file.

The clock is ideal, inputs arrive at 0 with no slew, outputs have no load, wires none either: timing before layout, of one corner. Memories give
their data at the clock edge and need no set-up time.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from synth.memories import Memory
from synth.nldm import EDGES, Arc, TimedCell
from synth.stat import SynthesisError

__all__ = ["Path", "Step", "Timing", "analyse"]

Edge = tuple[int, str]
"""A net and its edge."""


@dataclass(frozen=True)
class Step:
    """A point of a path: net, its edge, the cell that drives it, and the arrival, picoseconds."""

    net: str
    edge: str
    cell: str
    arrival: float


@dataclass(frozen=True)
class Path:
    """The slowest path to an end.

    Attributes
    ----------
    start, end : str
        Register, memory or port, by its name in the design.
    delay : float
        Picoseconds, with clock-to-output and set-up times.
    setup : float
    steps : tuple of Step
    """

    start: str
    end: str
    delay: float
    setup: float
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Timing:
    """Slowest path to each register (all bits of a signal as one), memory and output, the slowest first."""

    paths: tuple[Path, ...]

    @property
    def period(self) -> float:
        """Shortest period of the clock, picoseconds."""
        return self.paths[0].delay if self.paths else 0.0


class _Netlist:
    """Nets, drivers and loads of a flat netlist."""

    def __init__(self, module: Mapping[str, Any], cells: Mapping[str, TimedCell], registers: Mapping[str, str]):
        self.module = module
        self.cells = cells
        self.names: dict[int, str] = {}
        wires = sorted(module["netnames"].items(), key=lambda item: (item[1]["hide_name"], item[0]))
        for name, wire in wires:
            for k, bit in enumerate(wire["bits"]):
                self.names.setdefault(bit, f"{name}[{k}]" if len(wire["bits"]) > 1 else name)
        self.registers = registers
        self.load: dict[Edge, float] = defaultdict(float)
        for cell in module["cells"].values():
            known = cells.get(cell["type"])
            for pin, capacitances in known.capacitances.items() if known else ():
                for bit in cell["connections"].get(pin, []):
                    for edge, capacitance in zip(EDGES, capacitances, strict=True):
                        self.load[bit, edge] += capacitance

    def arcs(self, name: str, kind: str) -> Iterator[tuple[Arc, int, int]]:
        """Yield the arcs of a cell of one kind whose pins are connected, with the nets."""
        cell = self.module["cells"][name]
        known = self.cells.get(cell["type"])
        for arc in known.arcs if known else ():
            source, target = (cell["connections"].get(pin, []) for pin in (arc.source, arc.target))
            if arc.kind == kind and source and target:
                yield arc, source[0], target[0]


def analyse(
    netlist: str,
    top: str,
    cells: Mapping[str, TimedCell],
    *,
    registers: Mapping[str, str] | None = None,
    memories: Mapping[str, Memory] | None = None,
) -> Timing:
    """Return the slowest paths of a netlist.

    Parameters
    ----------
    netlist : str
        Yosys JSON, flat.
    top : str
    cells : mapping
        As from :func:`synth.nldm.timed_cells`.
    registers : mapping, optional
        Names of the signals that flip-flops hold, by cell.
    memories : mapping, optional
        Memories by the name of their module.

    Raises
    ------
    SynthesisError
        Logic feeds itself, or a cell is unknown.
    """
    design = _Netlist(json.loads(netlist)["modules"][top], cells, registers or {})
    memories = memories or {}
    names = design.module["cells"]
    for cell in names.values():
        if cell["type"] not in cells and cell["type"] not in memories:
            raise SynthesisError(f"every cell must be in the library for timing; {cell['type']} is not")
    arrival: dict[Edge, float] = {}
    slew: dict[Edge, float] = {}
    before: dict[Edge, tuple[Edge | None, str]] = {}

    def reach(edge: Edge, time: float, transition: float, source: Edge | None, cell: str) -> None:
        if time > arrival.get(edge, -1.0):
            arrival[edge], before[edge] = time, (source, cell)
        slew[edge] = max(slew.get(edge, 0.0), transition)

    def start(bit: int | str, name: str) -> None:
        if isinstance(bit, int):
            for edge in EDGES:
                reach((bit, edge), 0.0, 0.0, None, name)

    for name, port in design.module["ports"].items():
        for bit in port["bits"] if port["direction"] == "input" else ():
            start(bit, name)
    for name, cell in names.items():
        if cell["type"] in memories:
            for bit in cell["connections"].get("RD_DATA", []):
                start(bit, name)
        for arc, _, target in design.arcs(name, "clock"):
            edge = (target, arc.target_edge)
            load = design.load[edge]
            reach(edge, arc.delay(0, load), arc.slew(0, load) if arc.slew else 0.0, None, name)
    for name in _ordered(design):
        for arc, source, target in design.arcs(name, "delay"):
            came, edge = (source, arc.source_edge), (target, arc.target_edge)
            if came in arrival:
                load, transition = design.load[edge], slew[came]
                time = arrival[came] + arc.delay(transition, load)
                reach(edge, time, arc.slew(transition, load) if arc.slew else 0.0, came, name)

    best: dict[str, tuple[float, float, Edge]] = {}

    def end(name: str, edge: Edge, setup: float) -> None:
        if edge in arrival and arrival[edge] + setup > best.get(name, (-1.0,))[0]:
            best[name] = (arrival[edge] + setup, setup, edge)

    for name, port in design.module["ports"].items():
        for bit in port["bits"] if port["direction"] == "output" else ():
            for which in EDGES:
                end(name, (bit, which), 0.0)
    for name, cell in names.items():
        signal = _signal(design.registers.get(name, name))
        for arc, _, data in design.arcs(name, "setup"):
            edge = (data, arc.target_edge)
            end(signal, edge, arc.delay(slew.get(edge, 0.0), 0))
        if cell["type"] in memories:
            inputs = (bits for port, bits in cell["connections"].items() if cell["port_directions"][port] == "input")
            for bit in (bit for bits in inputs for bit in bits if isinstance(bit, int)):
                for which in EDGES:
                    end(name, (bit, which), 0.0)

    def path(name: str, delay: float, setup: float, last: Edge) -> Path:
        steps: list[Step] = []
        edge: Edge | None = last
        while edge is not None:
            source, cell = before[edge]
            steps.append(
                Step(design.names[edge[0]], edge[1], names[cell]["type"] if cell in names else "", arrival[edge])
            )
            edge = source
        return Path(_signal(design.registers.get(cell, cell)), name, delay, setup, tuple(reversed(steps)))

    found = [path(name, *rest) for name, rest in best.items()]
    return Timing(tuple(sorted(found, key=lambda each: (-each.delay, each.end))))


def _signal(name: str) -> str:
    """Return the name of a signal without the index of a bit."""
    return (name.rpartition("[")[0] if name.endswith("]") else name).lstrip("\\")


def _ordered(design: _Netlist) -> Iterator[str]:
    """Yield the cells, each after those that drive it; paths end at flip-flops and memories."""
    drivers: dict[int, str] = {}
    for name in design.module["cells"]:
        drivers.update((target, name) for _, _, target in design.arcs(name, "delay"))
    graph = {
        name: {drivers[source] for _, source, _ in design.arcs(name, "delay") if source in drivers}
        for name in design.module["cells"]
    }
    try:
        yield from TopologicalSorter(graph).static_order()
    except CycleError as error:
        loop = ", ".join(sorted(set(error.args[1]))[:4])
        raise SynthesisError(f"logic must not feed itself; a loop goes through {loop}") from None
