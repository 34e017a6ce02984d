"""Delays of a Liberty file: the tables of the non-linear delay model, in picoseconds and femtofarads."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from synth.liberty import LibertyError
from synth.liberty_tree import Group, cell_groups, library_group

__all__ = ["Arc", "Table", "TimedCell", "time_unit", "timed_cells"]

EDGES = ("rise", "fall")
_KINDS = {
    "combinational": "delay",
    "combinational_rise": "delay",
    "combinational_fall": "delay",
    "rising_edge": "clock",
    "setup_rising": "setup",
}
"""Arcs that matter at a rising clock. Falling clocks, latches, asynchronous pins, hold and tri-states are not analysed."""


class Table:
    """A function of two numbers by bilinear interpolation, and extrapolation from the outermost intervals.

    Parameters
    ----------
    x, y : sequence of float
        Axes, ascending; with one entry the function is constant along that axis.
    values : array, shape (len(x), len(y))
    """

    __slots__ = ("values", "x", "y")

    def __init__(self, x: Iterable[float], y: Iterable[float], values: np.ndarray):
        self.x, self.y = list(x), list(y)
        self.values = values.tolist()

    def __call__(self, x: float, y: float) -> float:
        """Return the value at a place."""
        i, u = _place(self.x, x)
        j, v = _place(self.y, y)
        low = self.values[i]
        value = low[j] if not v else low[j] + v * (low[j + 1] - low[j])
        if u:
            high = self.values[i + 1]
            value += u * ((high[j] if not v else high[j] + v * (high[j + 1] - high[j])) - value)
        return float(value)

    def maximum(self, other: "Table") -> "Table":
        """Return the larger of two tables, entry by entry, or the one with the larger mean if their axes differ."""
        if (self.x, self.y) != (other.x, other.y):
            return max(self, other, key=lambda table: np.mean(table.values))
        return Table(self.x, self.y, np.maximum(self.values, other.values))


def _place(axis: list[float], value: float) -> tuple[int, float]:
    """Return an interval of an axis and the place in it, 0 … 1 inside."""
    if len(axis) == 1:
        return 0, 0.0
    i = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return i, (value - axis[i]) / (axis[i + 1] - axis[i])


@dataclass
class Arc:
    """From an edge of one pin to an edge of another.

    Attributes
    ----------
    kind : {"delay", "clock", "setup"}
        ``setup`` has ``delay`` only, a function of the slews of data and clock; the others are functions of input slew and load.
    source, target : str
    source_edge, target_edge : {"rise", "fall"}
        A clock's edge is "rise".
    delay, slew : Table
    """

    kind: str
    source: str
    target: str
    source_edge: str
    target_edge: str
    delay: Table
    slew: Table | None = None


@dataclass
class TimedCell:
    """Capacitances of the input pins at their two edges, femtofarads, and arcs of a cell."""

    capacitances: dict[str, tuple[float, float]] = field(default_factory=dict)
    arcs: list[Arc] = field(default_factory=list)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[-+\d.][-+\d.eE]*", text)]


@dataclass(frozen=True)
class _Units:
    """Factors to picoseconds and femtofarads, part of a transition that is measured, templates by name."""

    time: float
    capacitance: float
    templates: dict[str, Group]

    def table(self, group: Group, wanted: tuple[str, str], y_unit: float) -> Table:
        """Return a table with axes in the wanted order."""
        template = self.templates.get(group.name, Group("")).attributes
        variables = [template.get(f"variable_{k}", "") for k in (1, 2)]
        axes = [_numbers(group.attributes.get(f"index_{k}") or template.get(f"index_{k}") or "0") for k in (1, 2)]
        values = np.array(_numbers(group.attributes["values"]), float)
        if group.name == "scalar" or len(values) == 1:
            axes = [[0.0], [0.0]]
        elif len(values) == len(axes[0]):
            axes[1] = [0.0]
        values = values.reshape(len(axes[0]), len(axes[1]))
        if variables[0].endswith(wanted[1]):
            axes.reverse()
            values = values.T
        return Table([self.time * x for x in axes[0]], [y_unit * y for y in axes[1]], self.time * values)


_PREFIX = {"f": 1e-3, "p": 1.0, "n": 1e3, "u": 1e6}


def _units_of(text: str) -> _Units:
    library = library_group(text)
    time = re.fullmatch(r"([\d.]+)([fpnu])s", library.attributes.get("time_unit", ""))
    load = re.fullmatch(
        r"([\d.]+),([fpnu])f", re.sub(r"\s|\"", "", library.attributes.get("capacitive_load_unit", "").lower())
    )
    if time is None or load is None:
        raise LibertyError("a Liberty file must have time_unit and capacitive_load_unit for timing")
    templates = {template.name: template for template in library.all("lu_table_template")}
    picoseconds = float(time[1]) * _PREFIX[time[2]]
    return _Units(picoseconds, 1e3 * float(load[1]) * _PREFIX[load[2]], templates)


def time_unit(text: str) -> float:
    """Return the unit of time of a Liberty text, picoseconds."""
    return _units_of(text).time


def timed_cells(text: str, names: Iterable[str]) -> dict[str, TimedCell]:
    """Return the delays of some cells of a Liberty text without comments.

    Arcs that differ only in the state of other pins are merged into their maximum.

    Raises
    ------
    LibertyError
        There are no units, or no cell has delays.
    """
    if "cell_rise" not in text:
        raise LibertyError("a Liberty file must have delays of its cells for timing, this one has none")
    units = _units_of(text)
    return {name: _cell(group, units) for name, group in cell_groups(text, names).items()}


def _cell(group: Group, units: _Units) -> TimedCell:
    cell = TimedCell()
    merged: dict[tuple[str, ...], Arc] = {}
    for pin in group.all("pin"):
        if pin.attributes.get("direction") == "input":
            either = pin.attributes.get("capacitance", "0")
            both = [units.capacitance * float(pin.attributes.get(f"{edge}_capacitance", either)) for edge in EDGES]
            cell.capacitances[pin.name] = (both[0], both[1])
        for timing in pin.all("timing"):
            for arc in _arcs(pin.name, timing, units):
                key = (arc.kind, arc.source, arc.target, arc.source_edge, arc.target_edge)
                known = merged.get(key)
                if known is not None:
                    arc.delay = arc.delay.maximum(known.delay)
                    arc.slew = arc.slew.maximum(known.slew) if arc.slew and known.slew else arc.slew
                merged[key] = arc
    # Some libraries also describe one output by another.
    cell.arcs = [arc for arc in merged.values() if arc.source in cell.capacitances]
    return cell


def _arcs(pin: str, timing: Group, units: _Units) -> Iterator[Arc]:
    kind = _KINDS.get(timing.attributes.get("timing_type", "combinational"))
    sense = timing.attributes.get("timing_sense", "non_unate")
    for source in timing.attributes.get("related_pin", "").split():
        for edge in EDGES:
            constraint, delay, slew = map(timing.first, (f"{edge}_constraint", f"cell_{edge}", f"{edge}_transition"))
            if kind == "setup" and constraint:
                axes = ("constrained_pin_transition", "related_pin_transition")
                yield Arc("setup", source, pin, "rise", edge, units.table(constraint, axes, units.time))
            elif kind in ("delay", "clock") and delay and slew:
                axes = ("input_net_transition", "total_output_net_capacitance")
                tables = [units.table(group, axes, units.capacitance) for group in (delay, slew)]
                other = EDGES[edge == "rise"]
                senses = {"positive_unate": (edge,), "negative_unate": (other,)}.get(sense, EDGES)
                for source_edge in ("rise",) if kind == "clock" else senses:
                    yield Arc(str(kind), source, pin, source_edge, edge, *tables)
