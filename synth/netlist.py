"""Netlists mapped to a library: made by the same flow as the areas, flattened with a note of where each cell came from, and written as Verilog."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from synth.cells import outputs_of, verilog_models
from synth.liberty_tree import Group, cell_groups
from synth.yosys import synthesise

__all__ = ["PROBE", "PROBE_BITS", "FlatNetlist", "Instance", "flattened", "mapped"]

PROBE = "probe"
PROBE_BITS = 64
"""Ports that show nets, and how many each of them shows."""

Json = dict[str, Any]
Bit = int | str


@dataclass(frozen=True)
class Instance:
    """A library cell in a netlist.

    Attributes
    ----------
    name : str
    kind : str
        Name of the library cell.
    pins : dict of str to int or str
        Net of each pin, or a constant: ``"0"`` or ``"1"``.
    part : str
        Module below the top that it came from; empty for the top itself, and in a netlist that was flat from the start.
    """

    name: str
    kind: str
    pins: dict[str, Bit]
    part: str


@dataclass(frozen=True)
class FlatNetlist:
    """A flat netlist of library cells.

    Attributes
    ----------
    top : str
    ports : dict of str to (direction, nets)
        In the order of the source, the lowest bit first.
    instances : list of Instance
    cells : dict of str to Group
        What the library says of the cells that occur.
    """

    top: str
    ports: dict[str, tuple[str, list[Bit]]]
    instances: list[Instance]
    cells: dict[str, Group]

    @property
    def nets(self) -> list[int]:
        """Every net, in ascending order."""
        used = {bit for instance in self.instances for bit in instance.pins.values()}
        used |= {bit for _, bits in self.ports.values() for bit in bits}
        return sorted(bit for bit in used if isinstance(bit, int))

    @property
    def probes(self) -> list[str]:
        """Names of the ports that show all nets, ``PROBE_BITS`` each, in the order of `nets`."""
        return [f"{PROBE}{k}" for k in range(-(-len(self.nets) // PROBE_BITS))]

    def verilog(self, *, probes: bool = False) -> str:
        """Return the netlist as a Verilog module; with ``probes`` every net is also a bit of an output.

        Net ``n`` is the wire ``n<n>``. The cells are not in it, see `models`.
        """
        nets = self.nets
        shown = {
            name: nets[PROBE_BITS * k : PROBE_BITS * (k + 1)] for k, name in enumerate(self.probes if probes else [])
        }
        lines = [f"module {self.top}({', '.join([*self.ports, *shown])});"]
        for name, (direction, bits) in self.ports.items():
            size = f"[{len(bits) - 1}:0] " if len(bits) > 1 else ""
            lines.append(f"  {direction} {size}{name};")
        lines += [f"  output [{PROBE_BITS - 1}:0] {name};" for name in shown]
        lines += [f"  wire n{net};" for net in nets]
        outputs: dict[str, list[Bit]] = {
            name: [*seen, *["0"] * (PROBE_BITS - len(seen))] for name, seen in shown.items()
        }
        for name, (direction, bits) in self.ports.items():
            if direction == "input":
                parts = [f"{name}[{k}]" for k in range(len(bits))] if len(bits) > 1 else [name]
                lines += [f"  assign n{bit} = {part};" for bit, part in zip(bits, parts, strict=True)]
            else:
                outputs[name] = bits
        for name, bits in outputs.items():
            lines.append(f"  assign {name} = {{{', '.join(map(_wire, reversed(bits)))}}};")
        for instance in self.instances:
            pins = ", ".join(f".{pin}({_wire(bit)})" for pin, bit in instance.pins.items())
            lines.append(f"  {instance.kind} {instance.name} ({pins});")
        return "\n".join([*lines, "endmodule", ""])

    @property
    def models(self) -> str:
        """The Verilog modules of the cells that occur."""
        return verilog_models(self.cells)


def _wire(bit: Bit) -> str:
    return f"n{bit}" if isinstance(bit, int) else f"1'b{bit}"


def mapped(verilog: str, top: str, **options: Any) -> FlatNetlist:
    """Map Verilog text to a library, and flatten the netlist.

    With ``hierarchical`` the hierarchy is kept while mapping, and cells know their part.

    Parameters
    ----------
    verilog, top, **options
        As for `synth.yosys.synthesise`.
    """
    result = synthesise(verilog, top, **options)
    return flattened(result.json, top, result.prepared.text)


def flattened(netlist: str, top: str, text: str) -> FlatNetlist:
    """Read a mapped netlist, Yosys JSON, and flatten it.

    Parameters
    ----------
    netlist, top : str
    text : str
        Of the Liberty file.
    """
    modules: Json = json.loads(netlist)["modules"]
    # Library cells that a techmap brought in are modules too, without contents.
    modules = {name: module for name, module in modules.items() if not _is_cell(module)}
    instances: list[Instance] = []
    count = 1 + max(_nets(modules[top]))
    joined: dict[Bit, Bit] = {}

    def source(bit: Bit) -> Bit:
        while bit in joined:
            bit = joined[bit]
        return bit

    def visit(module: Json, nets: dict[Bit, Bit], part: str) -> None:
        nonlocal count
        for cell in module["cells"].values():
            pins: dict[str, list[Bit]] = {}
            for pin, bits in cell["connections"].items():
                for bit in bits:
                    if bit not in nets:
                        nets[bit] = count
                        count += 1
                pins[pin] = [nets[bit] for bit in bits]
            if cell["type"] in modules:
                child = modules[cell["type"]]
                inner: dict[Bit, Bit] = dict(_CONSTANTS)
                for port, described in child["ports"].items():
                    for bit, outer in zip(described["bits"], pins.get(port, []), strict=False):
                        # A port may be a constant inside, or the same net as another port.
                        first, other = source(inner.setdefault(bit, outer)), source(outer)
                        if first != other:
                            joined.update({first: other} if isinstance(other, str) else {other: first})
                visit(child, inner, part or cell["type"])
            else:
                single = {pin: bits[0] for pin, bits in pins.items() if bits}
                instances.append(Instance(f"u{len(instances)}", cell["type"], single, part))

    own = modules[top]
    # Nets of the top keep their numbers.
    visit(own, dict(_CONSTANTS) | {bit: bit for bit in _nets(own)}, "")
    instances = [
        Instance(instance.name, instance.kind, {pin: source(bit) for pin, bit in instance.pins.items()}, instance.part)
        for instance in instances
    ]
    ports = {
        name: (port["direction"], [source(_CONSTANTS.get(bit, bit)) for bit in port["bits"]])
        for name, port in own["ports"].items()
    }
    cells = cell_groups(text, {instance.kind for instance in instances})
    for instance in instances:
        # Outputs that nobody reads have values too.
        for pin in outputs_of(cells[instance.kind]):
            if pin not in instance.pins:
                instance.pins[pin] = count
                count += 1
    return FlatNetlist(top, ports, instances, cells)


_CONSTANTS: dict[Bit, Bit] = {"0": "0", "1": "1", "x": "0", "z": "0"}


def _is_cell(module: Json) -> bool:
    return bool({"blackbox", "whitebox"} & module["attributes"].keys())


def _nets(module: Json) -> Iterator[int]:
    yield 1
    for cell in module["cells"].values():
        yield from (bit for bits in cell["connections"].values() for bit in bits if isinstance(bit, int))
    for port in module["ports"].values():
        yield from (bit for bit in port["bits"] if isinstance(bit, int))
