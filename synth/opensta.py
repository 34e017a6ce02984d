"""OpenSTA, if it is there: the longest path of a mapped netlist."""

import re
import shutil
import subprocess
from pathlib import Path

from model.command import run_tool
from synth.stat import SynthesisError
from synth.yosys import work_folder

__all__ = ["available", "period", "readable_library", "readable_verilog"]

_TIMEOUT = 1200.0
_SCRIPT = """\
read_liberty cells.lib
read_verilog mapped.v
link_design {top}
create_clock -name clock -period 1000 [get_ports {clock}]
set inputs {{}}
foreach port [all_inputs] {{ if {{[get_property $port full_name] ne "{clock}"}} {{ lappend inputs $port }} }}
if {{[llength $inputs]}} {{ set_input_delay 0 -clock clock $inputs }}
set_output_delay 0 -clock clock [all_outputs]
report_checks -path_delay max -digits 6
"""


def available() -> bool:
    """Whether ``sta`` is on the path."""
    return shutil.which("sta") is not None


def readable_verilog(text: str) -> str:
    """Return a netlist without signed ports, which OpenSTA refuses."""
    return re.sub(r"\b(input|output|wire)\s+signed\b", r"\1", text)


def readable_library(text: str) -> str:
    """Return a Liberty text without default wire loads: old versions apply them, new ones do not."""
    return re.sub(r"default_wire_load\w*\s*:[^;\n]*;?", "", text)


def period(verilog: str, top: str, library: str, *, clock: str = "clk", unit: float = 1.0) -> float:
    """Return the delay of the longest path, with set-up time, picoseconds.

    Parameters
    ----------
    verilog, library : str
        Mapped netlist and Liberty text.
    top, clock : str
        Names of the module and its clock.
    unit : float
        The library's unit of time, picoseconds.

    Raises
    ------
    SynthesisError
        OpenSTA failed or found no path.
    """
    with work_folder(f"sta_{top}") as folder:
        _write(folder / "cells.lib", readable_library(library))
        _write(folder / "mapped.v", readable_verilog(verilog))
        _write(folder / "run.tcl", _SCRIPT.format(top=top, clock=clock) + "exit\n")
        with (folder / "run.log").open("w") as log:
            try:
                run_tool(["sta", "-no_splash", "-exit", "run.tcl"], _TIMEOUT, cwd=folder, stdout=log, stderr=log)
            except subprocess.TimeoutExpired:
                raise SynthesisError(
                    f"OpenSTA did not end within {_TIMEOUT:.0f} s; its files are in {folder}"
                ) from None
        printed = (folder / "run.log").read_text(encoding="utf-8", errors="replace")
        slack = re.search(r"(-?[\d.]+)\s+slack", printed)
        if slack is None:
            lines = [line for line in printed.splitlines() if "rror" in line] or ["no path"]
            raise SynthesisError(f"OpenSTA must find a path in {top}: {lines[0]}; its files are in {folder}")
        return (1000 - float(slack[1])) * unit


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
