"""What the cocotb benches share: settings from the environment, clocking, and goals of functional coverage."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cocotb.clock import Clock
from cocotb_coverage.coverage import CoverCross, CoverPoint, coverage_db, coverage_section

__all__ = [
    "PERIOD_NS",
    "SETTINGS",
    "bench_environment",
    "bench_settings",
    "cover",
    "coverage_goals_met",
    "pins",
    "start_clock",
]

PERIOD_NS = 10
SETTINGS = "AUTOEMATIC_BENCH"


def bench_environment(
    block: str, parameters: Mapping[str, Any], sidecar: Mapping[str, Any], rows: int, report: Path | None = None
) -> dict[str, str]:
    """Return the environment that tells a bench what it drives.

    Parameters
    ----------
    block : str
        Name of the block.
    parameters : mapping
        Its parameters.
    sidecar : mapping
        Its description, for latency and ports.
    rows : int
        Clock cycles of random stimuli, or tiles.
    report : Path, optional
        Where a bench that counts by itself writes what it compared and covered.
    """
    settings = {
        "block": block,
        "parameters": dict(parameters),
        "latency": sidecar.get("latency", 0),
        "psum_delay": sidecar.get("psum_delay", 0),
        "ports": {port["name"]: port["direction"] for port in sidecar["ports"]},
        "rows": rows,
        "report": None if report is None else str(report),
    }
    return {SETTINGS: json.dumps(settings)}


def bench_settings() -> dict[str, Any]:
    """Return what `bench_environment` wrote.

    Raises
    ------
    KeyError
        The bench was started without it.
    """
    return json.loads(os.environ[SETTINGS])


def start_clock(dut: Any) -> None:
    """Start the clock: rising edges at 5, 15, … ns. Inputs change after a rising edge, and everything is sampled at the falling one."""
    Clock(dut.clk, PERIOD_NS, unit="ns").start(start_high=False)


def pins(dut: Any, names: Sequence[str]) -> dict[str, int]:
    """Return the values of pins as integers.

    Raises
    ------
    AssertionError
        A pin has unknown bits.
    """
    # Reading the digits is ten times faster than asking a value whether it is resolvable.
    values = {}
    for name in names:
        digits = str(getattr(dut, name).value)
        assert digits.strip("01") == "", f"{name} is {digits}"
        values[name] = int(digits, 2)
    return values


def cover(prefix: str, axes: Mapping[str, Sequence[Any]], crosses: Sequence[Sequence[str]]) -> Callable[..., None]:
    """Declare cover points and crosses below ``prefix`` and return the function that samples them.

    Parameters
    ----------
    prefix : str
        Name of the group in the coverage database.
    axes : mapping of str to sequence
        Bins of each cover point; the returned function takes the axes' values as keyword arguments.
    crosses : sequence of sequences of str
        Which axes to cross.
    """
    items = [
        CoverPoint(f"{prefix}.{axis}", xf=lambda values, axis=axis: values[axis], bins=list(bins))
        for axis, bins in axes.items()
    ]
    items += [
        CoverCross(f"{prefix}.{'_x_'.join(names)}", items=[f"{prefix}.{name}" for name in names]) for names in crosses
    ]

    @coverage_section(*items)
    def sample(values: dict[str, Any]) -> None:
        """Sample one transaction; the decorators do it."""

    return lambda **values: sample(values)


def coverage_goals_met(prefix: str, log: Callable[..., None]) -> None:
    """Log the coverage of every point below ``prefix`` and demand all of its bins.

    Raises
    ------
    AssertionError
        Bins were missed; the message names the first few.
    """
    for name, item in sorted(coverage_db.items()):
        if not name.startswith(prefix + "."):
            continue
        log("%s: %d of %d bins", name, item.coverage, item.size)
        missed = [bins for bins, hits in item.detailed_coverage.items() if not hits]
        assert not missed, f"{name} misses {len(missed)} bins, such as {missed[:3]}"
