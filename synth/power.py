"""Energy of a netlist from what every net did in every cycle and from the power data of its library; docs/energy.md has the equations."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synth.cells import Expression, Register, parse, register_of
from synth.liberty import LibertyError
from synth.liberty_tree import Group
from synth.netlist import FlatNetlist

__all__ = ["KINDS", "Energy", "Table", "Units", "Waveforms", "energy"]

KINDS = ("leakage", "clock", "internal", "switching")
"""What energy is spent on: ``clock`` is the clock pins' internal energy and the charge of their capacitance."""

_PREFIX = {"m": 1e-3, "u": 1e-6, "n": 1e-9, "p": 1e-12, "f": 1e-15, "a": 1e-18, "": 1.0}
_SLEW, _LOAD = ("input_net_transition", "input_transition_time"), ("total_output_net_capacitance",)

Bits = NDArray[np.uint64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Units:
    """Units of a library, and its supply.

    Attributes
    ----------
    voltage : float
        In volts.
    capacitance, leakage : float
        Its units in farads and watts.
    """

    voltage: float
    capacitance: float
    leakage: float

    @property
    def energy(self) -> float:
        """Unit of internal energy in joules: that of capacitance, times a square volt."""
        return self.capacitance

    @classmethod
    def of(cls, library: Group) -> "Units":
        """Read them.

        Raises
        ------
        LibertyError
            One is missing or unknown.
        """
        attributes = library.attributes
        try:
            number, unit = (part.strip().strip('"').lower() for part in attributes["capacitive_load_unit"].split(","))
            leakage = attributes.get("leakage_power_unit", "1nW")
            digits = leakage.rstrip("afnpumkW")
            return cls(
                float(attributes["nom_voltage"]),
                float(number) * _PREFIX[unit.removesuffix("f") if unit != "f" else ""],
                float(digits or 1) * _PREFIX[leakage[len(digits) :].removesuffix("W")],
            )
        except (KeyError, ValueError) as error:
            raise LibertyError(
                f"a Liberty file must state voltage and units for energy; {error} is missing or unknown"
            ) from None


@dataclass(frozen=True)
class Table:
    """Energy over input transition and load, in the library's units."""

    slews: Floats
    loads: Floats
    values: Floats

    @classmethod
    def of(cls, group: Group, library: Group) -> "Table":
        """Read a ``rise_power`` or ``fall_power`` group."""
        template = next((one for one in library.all("power_lut_template") if one.name == group.name), Group(""))
        axes: dict[str, Floats] = {}
        order = []
        for k in (1, 2):
            index = group.attributes.get(f"index_{k}", template.attributes.get(f"index_{k}"))
            if index is not None and group.name != "scalar":
                # Without a template: transition first, as everybody has it.
                variable = template.attributes.get(f"variable_{k}", (_SLEW[0], _LOAD[0])[k - 1])
                order.append("slew" if variable in _SLEW else "load")
                axes[order[-1]] = _numbers(index)
        if "index_3" in group.attributes:
            raise LibertyError(f"power tables must have up to two indices; {group.name} has three")
        values = _numbers(group.attributes["values"]).reshape([len(axes[axis]) for axis in order] or [1])
        if order == ["load", "slew"]:
            values = values.T
        zero = np.zeros(1)
        slews, loads = axes.get("slew", zero), axes.get("load", zero)
        return cls(slews, loads, values.reshape(len(slews), len(loads)))

    def at(self, slew: float, load: Floats) -> Floats:
        """Return the energy for one input transition and any loads, linear between the points and beyond them."""
        row = _interpolated(self.slews, self.values, np.array([slew]))[0]
        return _interpolated(self.loads, row, load)


def _numbers(text: str) -> Floats:
    return np.array([float(word) for word in text.replace('"', " ").replace("\\", " ").replace(",", " ").split()])


def _interpolated(points: Floats, values: Floats, wanted: Floats) -> Floats:
    if len(points) == 1:
        return np.repeat(values[:1], len(wanted), axis=0)
    low = np.clip(np.searchsorted(points, wanted) - 1, 0, len(points) - 2)
    share = (wanted - points[low]) / (points[low + 1] - points[low])
    share = share.reshape(-1, *[1] * (values.ndim - 1))
    return np.asarray(values[low] * (1 - share) + values[low + 1] * share)


@dataclass(frozen=True)
class Waveforms:
    """Values of all nets in successive cycles, a bit per cycle, the first lowest.

    Attributes
    ----------
    row : dict of int to int
        Row of each net in the arrays.
    now, before : ndarray of uint64 [nets, words]
        Values in each of the cycles, and in the cycle before it.
    cycles : int
        64 times the words.
    """

    row: dict[int, int]
    now: Bits
    before: Bits
    cycles: int

    @classmethod
    def of(cls, netlist: FlatNetlist, outputs: Mapping[str, NDArray[Any]], start: int, cycles: int) -> "Waveforms":
        """Take the probes of a netlist out of a simulation's outputs, from row ``start`` on, which must not be the first."""
        if start < 1 or cycles < 1 or cycles % 64:
            raise ValueError(f"start must be positive and cycles a multiple of 64, not {start} and {cycles}")
        nets = netlist.nets
        octets = [
            np.ascontiguousarray(outputs[name][start - 1 : start + cycles], "<u8")
            for name in netlist.probes
            if name in outputs
        ]
        if min(map(len, octets)) != cycles + 1:
            raise ValueError(f"cycles must be at most {min(map(len, octets)) - 1}, not {cycles}")
        packed: list[list[Bits]] = [[], []]
        for words in octets:
            bits = np.unpackbits(words.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
            for k in (0, 1):
                one = np.packbits(bits[k : cycles + k].T, axis=1, bitorder="little")
                packed[k].append(np.ascontiguousarray(one).view("<u8"))
        before, now = (np.concatenate(part)[: len(nets)] for part in packed)
        return cls(dict(zip(nets, range(len(now)), strict=False)), now, before, cycles)

    def toggles(self) -> NDArray[np.int64]:
        """Return how often each net changed."""
        return _count(self.now ^ self.before)


def _count(bits: Bits) -> NDArray[np.int64]:
    return np.bitwise_count(bits).sum(axis=-1, dtype=np.int64)


@dataclass(frozen=True)
class Energy:
    """Energy of a netlist per cycle, in joules; leakage as power, in watts.

    Attributes
    ----------
    spent : dict of (str, str) to float
        By part and one of `KINDS`; leakage is in watts.
    cycles : int
    nets : int
        All of them have their activity from the simulation.
    """

    spent: dict[tuple[str, str], float]
    cycles: int
    nets: int

    def per_cycle(self, frequency: float, part: str | None = None) -> dict[str, float]:
        """Return joules per cycle by `KINDS` at a clock of ``frequency`` hertz, of a part or of everything."""
        found = {
            kind: sum(v for (where, k), v in self.spent.items() if k == kind and part in (None, where))
            for kind in KINDS
        }
        return found | {"leakage": found["leakage"] / frequency}

    @property
    def parts(self) -> list[str]:
        """The parts, in order."""
        return sorted({part for part, _ in self.spent})


def energy(
    netlist: FlatNetlist,
    waves: Waveforms,
    library: Group,
    *,
    part_of: Mapping[str, str] | None = None,
    slew: float | None = None,
    wire: float = 0.0,
) -> Energy:
    """Add up what all cells of a netlist spend.

    Parameters
    ----------
    netlist : FlatNetlist
    waves : Waveforms
    library : Group
        From `synth.liberty_tree.library_group`.
    part_of : mapping, optional
        Part of each instance by name, instead of its own.
    slew : float, optional
        Transition time of every pin, in the library's unit; by default the point a third up the cell's tables.
    wire : float
        Capacitance of the wire to each input pin, in the library's unit.

    Raises
    ------
    LibertyError
        The library does not state its units, or the clock goes to a gate.
    ValueError
        A net has no waveform.
    """
    silent = [net for net in netlist.nets if net not in waves.row]
    if silent:
        raise ValueError(f"every net must have a waveform, {len(silent)} of {len(netlist.nets)} have none")
    units = Units.of(library)
    loads: dict[int | str, float] = defaultdict(float)
    for instance in netlist.instances:
        for name, capacitance in _capacitances(netlist.cells[instance.kind]).items():
            loads[instance.pins.get(name, "0")] += capacitance + wire
    spent: dict[tuple[str, str], float] = defaultdict(float)
    by_kind = defaultdict(list)
    for instance in netlist.instances:
        by_kind[instance.kind].append(instance)
    constants = {"0": np.zeros_like(waves.now[:1]), "1": np.full_like(waves.now[:1], ~np.uint64(0))}
    clocks = {bit for port, (_, bits) in netlist.ports.items() if port == "clk" for bit in bits}
    for kind, instances in by_kind.items():
        cell = netlist.cells[kind]
        register = register_of(cell)
        now: dict[str, Bits] = dict(constants)
        before: dict[str, Bits] = dict(constants)
        load: dict[str, Floats] = {}
        for pin in cell.all("pin"):
            bits = [instance.pins.get(pin.name, "0") for instance in instances]
            load[pin.name] = np.array([loads[bit] for bit in bits])
            for at, source in ((now, waves.now), (before, waves.before)):
                rows = [source[waves.row[bit]] if isinstance(bit, int) else constants[bit][0] for bit in bits]
                at[pin.name] = np.stack(rows)
            if any(bit in clocks for bit in bits) and (register is None or pin.name != register.clock):
                raise LibertyError(f"the clock must go to flip-flops alone; it goes to {kind}")
        found = _Cells(cell, register, now, before, load, waves.cycles, library, slew).spent()
        for pin_name, capacitance in _capacitances(cell).items():
            clocked = register is not None and pin_name == register.clock
            changes = 2.0 * waves.cycles if clocked else _count(now[pin_name] ^ before[pin_name])
            found["clock" if clocked else "switching"] += 0.5 * (capacitance + wire) * units.voltage**2 * changes
        parts = [part_of[instance.name] if part_of else instance.part for instance in instances]
        for use, amounts in found.items():
            scale = units.leakage if use == "leakage" else units.energy / waves.cycles
            for part, value in zip(parts, amounts, strict=True):
                spent[part, use] += float(value) * scale
    return Energy(dict(spent), waves.cycles, len(netlist.nets))


def _capacitances(cell: Group) -> dict[str, float]:
    """Return the capacitances of the input pins of a cell."""
    found = {}
    for pin in cell.all("pin"):
        if pin.attributes.get("direction") == "input":
            ends = [float(pin.attributes.get(f"{edge}_capacitance", 0)) for edge in ("rise", "fall")]
            found[pin.name] = float(pin.attributes.get("capacitance", sum(ends) / 2))
    return found


@dataclass
class _Cells:
    """All cells of one kind; values are arrays [cells, words], and ``0`` and ``1`` are among the names."""

    cell: Group
    register: Register | None
    now: dict[str, Bits]
    before: dict[str, Bits]
    load: dict[str, Floats]
    cycles: int
    library: Group
    slew: float | None

    def spent(self) -> dict[str, NDArray[Any]]:
        """Leakage power, and internal energy in the library's units over all cycles, of each cell."""
        count = len(next(iter(self.load.values())))
        total = {use: np.zeros(count) for use in KINDS}
        total["leakage"] = total["leakage"] + self._leakage()
        clock = self.register.clock if self.register else None
        for pin in self.cell.all("pin"):
            groups = defaultdict(list)
            for group in pin.all("internal_power"):
                groups[group.attributes.get("related_pg_pin", "")].append(group)
            for entries in groups.values():
                if pin.attributes.get("direction") == "output":
                    total["internal"] += self._output(pin.name, entries)
                else:
                    total["clock" if pin.name == clock else "internal"] += self._input(pin.name, entries)
        return total

    def _holds(self, expression: Expression, values: Mapping[str, Bits]) -> Iterator[Bits]:
        """Yield where a condition holds while the clock is high, and while it is low."""
        clock = self.register.clock if self.register else None
        for level in ("1", "0"):
            yield expression.of({**values, clock: values[level]} if clock else values)

    def _leakage(self) -> Floats | float:
        """Return the mean leakage of each cell in the library's unit, over the states that it was in."""
        groups = [one for one in self.cell.all("leakage_power") if float(one.attributes["value"])]
        whole = float(self.cell.attributes.get("cell_leakage_power", 0))
        plain = [float(one.attributes["value"]) for one in groups if "when" not in one.attributes]
        cases = [
            (float(one.attributes["value"]), parse(one.attributes["when"]))
            for one in groups
            if "when" in one.attributes
        ]
        if not cases:
            return sum(plain) or whole
        return sum(
            value * _count(held) / (2 * self.cycles) for value, when in cases for held in self._holds(when, self.now)
        )

    def _at(self, group: Group, edge: str, load: Floats) -> Floats:
        table = group.first(f"{edge}_power") or group.first("power")
        if table is None:
            return np.zeros_like(load)
        read = Table.of(table, self.library)
        slew = read.slews[len(read.slews) // 3] if self.slew is None else self.slew
        return read.at(float(slew), load)

    def _edges(self, pin: str) -> tuple[tuple[str, Bits], tuple[str, Bits]]:
        now, before = self.now[pin], self.before[pin]
        return ("rise", now & ~before), ("fall", before & ~now)

    def _output(self, pin: str, entries: list[Group]) -> Floats:
        """Energy of an output's changes: the mean over the related pins that changed with it, in the state behind the change."""
        changed = self.now[pin] ^ self.before[pin]
        weights = []
        for entry in entries:
            related = [name.strip('"') for name in entry.attributes.get("related_pin", "").split()]
            clocked = self.register is not None and self.register.clock in related
            cause = changed if clocked or not related else np.zeros_like(changed)
            for name in [] if clocked else related:
                cause = cause | (changed & (self.now[name] ^ self.before[name]))
            when = entry.attributes.get("when")
            held = [cause & level for level in self._holds(parse(when), self.now)] if when else [cause, cause]
            weights.append(sum(_count(one) for one in held) / 2)
        weight = np.stack(np.broadcast_arrays(*weights)).astype(float)
        silent = weight.sum(axis=0) == 0
        weight[:, silent] = 1
        weight /= weight.sum(axis=0)
        total = np.zeros(len(self.load[pin]))
        for edge, happened in self._edges(pin):
            each = sum(w * self._at(entry, edge, self.load[pin]) for w, entry in zip(weight, entries, strict=True))
            total += each * _count(happened)
        return total

    def _input(self, pin: str, entries: list[Group]) -> Floats:
        """Energy of an input's changes that do not change an output; entries with a condition count where it holds, one without elsewhere."""
        clocked = self.register is not None and pin == self.register.clock
        total = np.zeros(len(self.load[pin]))
        whens = [parse(entry.attributes["when"]) if "when" in entry.attributes else None for entry in entries]
        for edge, happened in self._edges(pin):
            if clocked:
                happened = np.broadcast_to(self.now["1"], self.now[pin].shape)
            states = []
            for level in (0, 1):
                rest = happened
                masks = []
                for when in whens:
                    if when is not None:
                        held = happened & list(self._holds(when, self.now))[level]
                        if self.register is None:
                            held = held & list(self._holds(when, self.before))[level]
                        rest = rest & ~held
                        masks.append(held)
                    else:
                        masks.append(rest)
                # One without a condition stands for what no other covers, wherever it is in the list.
                states.append([rest if when is None else mask for when, mask in zip(whens, masks, strict=True)])
            for entry, *held in zip(entries, *states, strict=True):
                total += self._at(entry, edge, np.zeros_like(total)) * sum(_count(one) for one in held) / 2
        return total
