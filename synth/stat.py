"""What a mapped design is made of: area of cells, module by module, and bits of memory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from model.command import CommandError
from synth import liberty as lib
from synth.memories import Memory

__all__ = ["Area", "Module", "SynthesisError", "read_stat"]


class SynthesisError(CommandError):
    """Synthesis failed, or its result cannot be measured; the message says why."""


@dataclass(frozen=True)
class Module:
    """Area of one module of a mapped design.

    Attributes
    ----------
    name : str
    cells : dict
        Its own library cells: name to count.
    children : dict
        Modules that it instantiates: name to count.
    area, sequential : float
        Area of its own cells, and the flip-flops' part of it.
    total, total_sequential : float
        The same with everything below it.
    memories : dict
        Its own memories: name to count.
    """

    name: str
    cells: dict[str, int]
    children: dict[str, int]
    area: float
    sequential: float
    total: float
    total_sequential: float
    memories: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Area:
    """Area of a mapped design, in the library's unit, without memories.

    Attributes
    ----------
    top : str
    modules : dict
        By name, the top first.
    yosys : str
        Version.
    memories : dict
        Memory arrays by name; each module has its counts of them.
    """

    top: str
    modules: dict[str, Module]
    yosys: str
    memories: dict[str, Memory] = field(default_factory=dict)

    @property
    def memory_counts(self) -> dict[str, int]:
        """How often each memory occurs in the design, by name."""
        counts = dict.fromkeys(self.memories, 0)
        for module, times in self.instances().items():
            for name, number in self.modules[module].memories.items():
                counts[name] += times * number
        return counts

    @property
    def bits(self) -> int:
        """Bits of all memories."""
        return sum(number * self.memories[name].bits for name, number in self.memory_counts.items())

    @property
    def total(self) -> float:
        """Area of the whole design."""
        return self.modules[self.top].total

    @property
    def sequential(self) -> float:
        """Area of its flip-flops."""
        return self.modules[self.top].total_sequential

    @property
    def combinational(self) -> float:
        """Area of everything else."""
        return self.total - self.sequential

    def instances(self) -> dict[str, int]:
        """How often each module occurs in the design, by name."""
        counts = dict.fromkeys(self.modules, 0)

        def visit(name: str, times: int) -> None:
            counts[name] += times
            for child, number in self.modules[name].children.items():
                visit(child, times * number)

        visit(self.top, 1)
        return counts


def read_stat(text: str, top: str, library: lib.Library, memories: Mapping[str, Memory] | None = None) -> Area:
    """Turn the JSON of Yosys' ``stat`` into areas.

    Areas are counted cells times the library's areas: ``stat``'s own differ
    between versions for a module with children.

    Raises
    ------
    SynthesisError
        A cell is neither in the library nor a module, or a module is called like a cell.
    """
    known = dict(memories or {})
    report = json.loads(text)
    counts = {name.removeprefix("\\"): module["num_cells_by_type"] for name, module in report["modules"].items()}
    for name in counts:
        if name in library.cells:
            raise SynthesisError(f"every module must be called other than the library's cells; {name} is not")
    modules: dict[str, Module] = {}

    def visit(name: str) -> Module:
        if name in modules:
            return modules[name]
        cells = {kind.removeprefix("\\"): number for kind, number in sorted(counts[name].items())}
        own = {kind: number for kind, number in cells.items() if kind in library.cells}
        arrays = {kind: number for kind, number in cells.items() if kind in known}
        children = {kind: number for kind, number in cells.items() if kind not in library.cells and kind not in known}
        for kind in children:
            if kind not in counts:
                raise SynthesisError(f"every cell must be in the library after mapping; {kind} in module {name} is not")
        below = {child: visit(child) for child in children}
        area = sum(number * library.cells[kind].area for kind, number in own.items())
        registers = sum(
            number * library.cells[kind].area for kind, number in own.items() if library.cells[kind].sequential
        )
        modules[name] = Module(
            name,
            own,
            children,
            area,
            registers,
            area + sum(number * below[child].total for child, number in children.items()),
            registers + sum(number * below[child].total_sequential for child, number in children.items()),
            arrays,
        )
        return modules[name]

    visit(top)
    version = report["creator"].partition(" (")[0]
    return Area(top, {top: modules.pop(top), **dict(sorted(modules.items()))}, version, known)
