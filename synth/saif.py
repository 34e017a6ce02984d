"""Hand-off of activity to OpenSTA: netlist, SAIF of every pin, and a script, which is run if there is a version that reads SAIF."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np

from model.command import CommandError
from synth.netlist import FlatNetlist
from synth.power import Waveforms

__all__ = ["VERSION", "PowerToolError", "find_opensta", "hand_off", "opensta_power", "saif"]

VERSION = 3
"""First major version of OpenSTA with the command ``read_saif`` in its releases."""
TIMEOUT = 600.0


class PowerToolError(CommandError):
    """OpenSTA failed, or its report has no total."""


def saif(netlist: FlatNetlist, waves: Waveforms, period: int) -> str:
    """Return the activity of the ports and of all pins of all cells as SAIF 2.0, without a date.

    Parameters
    ----------
    netlist : FlatNetlist
    waves : Waveforms
    period : int
        Of the clock, in picoseconds.
    """
    ones = np.bitwise_count(waves.now).sum(axis=1, dtype=np.int64)
    toggles = waves.toggles()
    clocks = {bit for port, (_, bits) in netlist.ports.items() if port == "clk" for bit in bits}
    whole = waves.cycles * period

    def line(pin: str, bit: int | str) -> str:
        if bit in clocks:
            high, changes = whole // 2, 2 * waves.cycles
        elif isinstance(bit, int):
            high, changes = int(ones[waves.row[bit]]) * period, int(toggles[waves.row[bit]])
        else:
            high, changes = whole * (bit == "1"), 0
        return f"({pin} (T0 {whole - high}) (T1 {high}) (TX 0) (TC {changes}) (IG 0))"

    lines = ["(SAIFILE", '(SAIFVERSION "2.0")', '(DIRECTION "backward")', "(DIVIDER / )", "(TIMESCALE 1 ps)"]
    lines += [f"(DURATION {whole})", f"(INSTANCE {netlist.top}", "(NET"]
    for port, (_, bits) in netlist.ports.items():
        names = [port] if len(bits) == 1 else [f"{port}\\[{k}\\]" for k in range(len(bits))]
        lines += [line(name, bit) for name, bit in zip(names, bits, strict=True)]
    lines.append(")")
    for instance in netlist.instances:
        pins = " ".join(line(pin, bit) for pin, bit in instance.pins.items())
        lines.append(f"(INSTANCE {instance.name} (NET {pins}))")
    return "\n".join([*lines, ")", ")", ""])


def hand_off(
    folder: Path, netlist: FlatNetlist, library: str, runs: dict[str, Waveforms], megahertz: float
) -> list[Path]:
    """Write library, netlist, and SAIF and a script ``NAME.tcl`` for each run; returns the scripts.

    Parameters
    ----------
    folder : Path
    netlist : FlatNetlist
    library : str
        Text of the Liberty file.
    runs : dict of str to Waveforms
        By name.
    megahertz : float
        Of the clock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    period = round(1e6 / megahertz)
    files = {"cells.lib": library, f"{netlist.top}.v": netlist.verilog()}
    for name, waves in runs.items():
        files[f"{name}.saif"] = saif(netlist, waves, period)
        # Periods are in the library's unit unless the script says otherwise.
        files[f"{name}.tcl"] = "\n".join(
            [
                "read_liberty cells.lib",
                f"read_verilog {netlist.top}.v",
                f"link_design {netlist.top}",
                "set_cmd_units -time ps -power W",
                f"create_clock -name clk -period {period} [get_ports clk]",
                f"read_saif -scope {netlist.top} {name}.saif",
                "report_power -digits 6",
                "exit",
                "",
            ]
        )
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8", newline="\n")
    return [folder / f"{name}.tcl" for name in runs]


def find_opensta() -> str | None:
    """Return the path of an OpenSTA that reads SAIF, or None."""
    path = shutil.which("sta")
    if path is None:
        return None
    done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"(\d+)\.\d+", done.stdout + done.stderr)
    return path if found and int(found[1]) >= VERSION else None


def opensta_power(tool: str, script: Path) -> float:
    """Run a script of `hand_off` and return the total power, in watts.

    Raises
    ------
    PowerToolError
        OpenSTA failed, or its report has no total.
    """
    try:
        done = subprocess.run(
            [tool, "-no_splash", "-exit", script.name],
            cwd=script.parent,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PowerToolError(f"{tool} did not end within {TIMEOUT:.0f} s") from None
    found = re.search(r"^Total\s+\S+\s+\S+\s+\S+\s+(\S+)", done.stdout, re.MULTILINE)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Error")]
    if done.returncode or errors or not found:
        raise PowerToolError(
            f"{tool} on {script.name}: {errors[0] if errors else f'no total, status {done.returncode}'}"
        )
    return float(found[1])
