"""Puts a netlist into an order that follows from its structure alone.

Technology mapping depends on the order in which it meets cells, and that on internal names and on the Yosys build: worth half a percent of
area. After this module, one structure gives one result.
"""

import json
from collections.abc import Iterable
from typing import Any

__all__ = ["canonical", "registers"]

Json = dict[str, Any]


def canonical(netlist: str, *, names: bool = False) -> str:
    """Return a Yosys JSON netlist with cells in the order in which its outputs need them, and cells and wires renamed.

    Ports keep names and order. Wires, attributes and modules of library cells go.

    Parameters
    ----------
    netlist : str
        As from ``write_json``; every cell with port directions.
    names : bool
        Keep public wires and source locations of cells.
    """
    modules = json.loads(netlist)["modules"]
    kept = {
        name: _module(module, names)
        for name, module in sorted(modules.items())
        if not {"blackbox", "whitebox"} & module["attributes"].keys()
    }
    return json.dumps({"modules": kept})


def registers(netlist: str, top: str) -> dict[str, str]:
    """Return the names of the bits that flip-flops hold, by cell, of a canonical netlist with names."""
    module = json.loads(netlist)["modules"][top]
    names: dict[int | str, str] = {}
    # Ports have their own names, and the wires that only hold initial values have none.
    wires = {name: wire for name, wire in module["netnames"].items() if "init" not in wire["attributes"]}
    for name, wire in {**module["ports"], **wires}.items():
        for k, bit in enumerate(wire["bits"]):
            names.setdefault(bit, f"{name}[{k}]" if len(wire["bits"]) > 1 else name)
    outputs = {
        name: cell["connections"]["Q"][0] for name, cell in module["cells"].items() if "Q" in cell["connections"]
    }
    return {name: names[bit] for name, bit in outputs.items() if bit in names}


def _module(module: Json, names: bool) -> Json:
    cells: Json = module["cells"]
    drivers: dict[int, str] = {}
    for name, cell in cells.items():
        for port, bits in cell["connections"].items():
            if cell["port_directions"][port] != "input":
                drivers.update((bit, name) for bit in bits if isinstance(bit, int))

    order: list[str] = []
    seen: set[str] = set()

    def need(bits: list[int | str]) -> None:
        """Append what drives ``bits``, each cell after its inputs, except around a loop."""
        stack: list[tuple[str, bool]] = []

        def push(bits: list[int | str]) -> None:
            stack.extend((drivers[bit], False) for bit in reversed(bits) if isinstance(bit, int) and bit in drivers)

        push(bits)
        while stack:
            name, ready = stack.pop()
            if ready:
                order.append(name)
            elif name not in seen:
                seen.add(name)
                stack.append((name, True))
                push(_bits(cells[name], "input"))

    for port in module["ports"].values():
        if port["direction"] != "input":
            need(port["bits"])
    # What no output needs, such as a submodule without outputs.
    for name in sorted(cells):
        need(_bits(cells[name], "output"))
        if name not in seen:
            seen.add(name)
            need(_bits(cells[name], "input"))
            order.append(name)

    numbers: dict[int, int] = {}

    def renamed(bits: list[int | str]) -> list[int | str]:
        # Yosys starts at 2, which leaves 0 and 1 to the constants.
        return [numbers.setdefault(bit, len(numbers) + 2) if isinstance(bit, int) else bit for bit in bits]

    ports = {name: port | {"bits": renamed(port["bits"])} for name, port in module["ports"].items()}
    kept = [*ports, *(name for name, wire in module["netnames"].items() if names and not wire["hide_name"])]
    cell_stem, init_stem = _stem("c", kept), _stem("i", kept)
    new_cells: Json = {}
    for index, name in enumerate(order):
        cell = cells[name]
        new_cells[f"{cell_stem}{index}"] = {
            "hide_name": 0,
            "type": cell["type"],
            "parameters": cell["parameters"],
            "attributes": {"src": cell["attributes"]["src"]} if names and "src" in cell["attributes"] else {},
            "port_directions": dict(sorted(cell["port_directions"].items())),
            "connections": {port: renamed(bits) for port, bits in sorted(cell["connections"].items())},
        }
    wires: Json = {}
    for name, wire in sorted(module["netnames"].items()):
        known = all(isinstance(bit, str) or bit in numbers for bit in wire["bits"])
        if names and known and not wire["hide_name"]:
            wires[name] = {"hide_name": 0, "bits": renamed(wire["bits"]), "attributes": {}}
        # Initial values belong to wires.
        for bit, value in zip(wire["bits"], reversed(wire["attributes"].get("init", "")), strict=False):
            if bit in numbers and value in "01":
                number = numbers[bit]
                wires[f"{init_stem}{number}"] = {"hide_name": 0, "bits": [number], "attributes": {"init": value}}
    attributes = {name: value for name, value in module["attributes"].items() if name == "top"}
    return {"attributes": attributes, "ports": ports, "cells": new_cells, "netnames": dict(sorted(wires.items()))}


def _stem(letter: str, taken: Iterable[str]) -> str:
    """Return a letter with as many underscores that, with a number behind it, it is no name that is taken."""
    numbered = {name.rstrip("0123456789") for name in taken if name[-1:].isdecimal()}
    stem = letter
    while stem in numbered:
        stem += "_"
    return stem


def _bits(cell: Json, direction: str) -> list[int | str]:
    directions = cell["port_directions"]
    return [bit for port, bits in sorted(cell["connections"].items()) if directions[port] == direction for bit in bits]
