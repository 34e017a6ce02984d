"""Memories apart from logic: an array that is written stays a cell, counted in bits, instead of becoming flip-flops."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Memory", "extract", "stubs"]

Json = dict[str, Any]

_CELL = "$mem_v2"
_OUTPUT = "RD_DATA"


@dataclass(frozen=True)
class Memory:
    """A memory array, the same for all its instances.

    Attributes
    ----------
    name : str
        Its module in the netlist.
    width, depth : int
        Bits of a word, words.
    reads, writes : int
        Ports.
    clocked : bool
        All read ports are synchronous, and their registers belong to the array.
    ports : dict of str to int
        Widths of the ports of the module.
    """

    name: str
    width: int
    depth: int
    reads: int
    writes: int
    clocked: bool
    ports: dict[str, int]

    @property
    def bits(self) -> int:
        """Bits that it holds."""
        return self.width * self.depth


def _value(parameter: str | int) -> int:
    return parameter if isinstance(parameter, int) else int(parameter, 2)


def extract(netlist: str) -> tuple[str, dict[str, Memory]]:
    """Return a Yosys JSON netlist with instances in place of memories that are written, and the memories by the name of their modules.

    Parameters
    ----------
    netlist : str
        As from ``write_json`` after ``memory -nomap``. Memories that are only read are logic and stay.
    """
    design = json.loads(netlist)
    memories: dict[str, Memory] = {}
    for module in design["modules"].values():
        for cell in module["cells"].values():
            if cell["type"] == _CELL and _value(cell["parameters"]["WR_PORTS"]):
                memory = _memory(cell)
                memories[memory.name] = memory
                cell.update(type=memory.name, parameters={}, attributes={})
                cell["connections"] = {port: cell["connections"][port] for port in memory.ports}
                cell["port_directions"] = {port: cell["port_directions"][port] for port in memory.ports}
    return json.dumps(design), dict(sorted(memories.items()))


def _memory(cell: Json) -> Memory:
    needed = ("WIDTH", "SIZE", "RD_PORTS", "WR_PORTS", "RD_CLK_ENABLE")
    width, depth, reads, writes, clocks = (_value(cell["parameters"][name]) for name in needed)
    clocked = clocks == (1 << reads) - 1
    ports = {port: len(bits) for port, bits in sorted(cell["connections"].items()) if bits}
    name = f"memory_{depth}x{width}_{reads}r{writes}w" + ("" if clocked else "_unclocked")
    return Memory(name, width, depth, reads, writes, clocked, ports)


def stubs(memories: Mapping[str, Memory]) -> str:
    """Return Verilog modules without content, for reading a netlist with memories."""
    lines = []
    for memory in memories.values():
        ports = ", ".join(
            f"{'output' if port == _OUTPUT else 'input'} [{width - 1}:0] {port}" for port, width in memory.ports.items()
        )
        lines.append(f"(* blackbox *) module {memory.name}({ports}); endmodule\n")
    return "".join(lines)
