"""``python -m model.policy``: recorded L_A and G_E through the precision policy; a table and a picture (docs/policy.md)."""

import argparse
import csv
import dataclasses
import gzip
import io
import json
import math
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.command import command, write_files
from model.policy import LARGEST, PHASES, FixedPolicy, Phase, Policy, PolicyConfig

__all__ = ["PolicyRow", "TraceSample", "main", "picture", "read_trace", "replay"]


@dataclass(frozen=True)
class TraceSample:
    """A line of a recorded trace.

    Attributes
    ----------
    step : int
        Number of the step; lines of a step stand together.
    phase : {"prefill", "decode"}
    layer : int
        From 0 on, without a gap.
    activity : float
        L_A.
    entropy : float or None
        G_E of the step before; None in prefill.
    """

    step: int
    phase: Phase
    layer: int
    activity: float
    entropy: float | None


@dataclass(frozen=True)
class PolicyRow:
    """A sample with what the policy made of it.

    Attributes
    ----------
    sample : TraceSample
    precision : int
        Bits that this layer runs at.
    metric, mean, sigma : float or None
        Of this layer, and what it was compared with; None where there is none.
    """

    sample: TraceSample
    precision: int
    metric: float | None
    mean: float | None
    sigma: float | None

    def fields(self) -> dict[str, Any]:
        """Return the columns of the output."""
        s = self.sample
        given = {"step": s.step, "phase": s.phase, "layer": s.layer, "L_A": s.activity, "G_E": s.entropy}
        return given | {"metric": self.metric, "mean": self.mean, "sigma": self.sigma, "precision": self.precision}


PARTS = 12
"""Prefills and runs of decode steps that a picture shows."""

_COLUMNS = ("step", "phase", "layer", "L_A", "G_E")


def _number(text: object, kind: Callable[[Any], Any]) -> Any:
    """Return a number from a cell of a CSV file or a JSON value, or None if it is no such number."""
    if isinstance(text, str):
        try:
            return kind(text) if text.isascii() and "_" not in text else None
        except ValueError:
            return None
    fits = int if kind is int else int | float
    if not isinstance(text, fits) or isinstance(text, bool):
        return None
    try:
        return kind(text)
    except OverflowError:
        return None


def _sample_of(cells: Mapping[str, object]) -> TraceSample:
    missing = [name for name in _COLUMNS if cells.get(name) is None and name != "G_E"]
    if missing or "G_E" not in cells:
        raise ValueError(f"there must be a value of {missing[0] if missing else 'G_E'}")
    phase = cells["phase"]
    if phase not in PHASES:
        raise ValueError(f"phase must be one of {', '.join(PHASES)}, not {phase!r}")
    whole = {}
    for name in ("step", "layer"):
        whole[name] = _number(cells[name], int)
        if whole[name] is None or whole[name] < 0:
            raise ValueError(f"{name} must be an integer from 0 on, not {cells[name]!r}")
    activity = _number(cells["L_A"], float)
    if activity is None or not 0 <= activity <= LARGEST:
        raise ValueError(f"L_A must be a finite number from 0 on, not {cells['L_A']!r}")
    entropy = None
    if phase == "decode":
        entropy = _number(cells["G_E"], float)
        if entropy is None or not 0 <= entropy <= 1:
            raise ValueError(f"G_E must be a number from 0 to 1 in decode, not {cells['G_E']!r}")
    return TraceSample(whole["step"], "decode" if phase == "decode" else "prefill", whole["layer"], activity, entropy)


def read_trace(path: Path) -> list[TraceSample]:
    """Read a trace; docs/policy.md describes both forms.

    Parameters
    ----------
    path : Path
        CSV with a header, or JSON if the name ends in ``.json``; either packed by gzip if ``.gz`` follows.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is no trace; says in which line or sample, and why.
    """
    packed = path.suffix.lower() == ".gz"
    try:
        octets = path.read_bytes()
        text = (gzip.decompress(octets) if packed else octets).decode("utf-8-sig")
        if (path.with_suffix("") if packed else path).suffix.lower() == ".json":
            place, given = "sample", json.loads(text)
            listed = given.get("samples") if isinstance(given, dict) else given
            if not isinstance(listed, list) or not all(isinstance(cells, dict) for cells in listed):
                raise ValueError("TRACE must be a list of objects, or an object with such a list as samples")
            numbered: Iterable[tuple[int, Mapping[str, object]]] = enumerate(listed)
        else:
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
            absent = [name for name in _COLUMNS if name not in (reader.fieldnames or [])]
            if absent:
                raise ValueError(f"TRACE must have the columns {', '.join(_COLUMNS)}, and lacks {', '.join(absent)}")
            place, numbered = "line", [(reader.line_num, cells) for cells in reader]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"TRACE must be what gzip packed if its name ends in .gz: {error}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, csv.Error) as error:
        raise ValueError(f"TRACE must be CSV or JSON in UTF-8: {error}") from None
    samples: list[TraceSample] = []
    ended: set[int] = set()
    for number, cells in numbered:
        try:
            sample = _sample_of(cells)
            last = samples[-1] if samples else None
            same = last is not None and sample.step == last.step
            if last is not None and not same:
                ended.add(last.step)
            expected = last.layer + 1 if last is not None and same else 0
            if sample.step in ended:
                raise ValueError(f"the lines of step {sample.step} must stand together")
            if sample.layer != expected:
                raise ValueError(f"layer must be {expected}, not {sample.layer}")
            if same and last is not None and (sample.phase, sample.entropy) != (last.phase, last.entropy):
                raise ValueError("phase and G_E must be the same throughout a step")
        except ValueError as error:
            raise ValueError(f"{place} {number}: {error}") from None
        samples.append(sample)
    if not samples:
        raise ValueError("TRACE must have at least one sample")
    return samples


def replay(samples: Iterable[TraceSample], policy: Policy) -> list[PolicyRow]:
    """Run a recorded trace of one request through a policy.

    Parameters
    ----------
    samples : iterable of TraceSample
        As `read_trace` gives them.
    policy : Policy
        A new one.
    """
    rows = []
    for sample in samples:
        if sample.layer == 0:
            policy.reset_step(sample.phase, sample.entropy)
        precision = policy.precision
        policy.observe(sample.layer, sample.activity)
        seen = [None if math.isnan(x) else x for x in (policy.metric, policy.mean, policy.sigma)]
        rows.append(PolicyRow(sample, precision, *seen))
    return rows


def _csv_text(rows: Sequence[PolicyRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0].fields()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.fields() for row in rows)
    return text.getvalue()


def _json_text(rows: Sequence[PolicyRow], policy: Policy) -> str:
    head = {"config": dataclasses.asdict(policy.config)}
    if isinstance(policy, FixedPolicy):
        head["format"] = dataclasses.asdict(policy.form)
    lines = ",\n".join(f"    {json.dumps(row.fields())}" for row in rows)
    return f'{json.dumps(head, indent=2)[:-2]},\n  "samples": [\n{lines}\n  ]\n}}\n'


def _grid(rows: Sequence[PolicyRow], value: Callable[[PolicyRow], float | None]) -> Any:
    """Arrange values as an array of layers by steps, NaN where a step has no such layer."""
    steps = {step: k for k, step in enumerate(dict.fromkeys(row.sample.step for row in rows))}
    grid = np.full((max(row.sample.layer for row in rows) + 1, len(steps)), np.nan)
    for row in rows:
        found = value(row)
        grid[row.sample.layer, steps[row.sample.step]] = np.nan if found is None else found
    return grid


def picture(rows: Sequence[PolicyRow], levels: Sequence[int]) -> str:
    """Return an SVG of metric and precision: lines over the layers for each prefill, maps of layers by steps for decode.

    Raises
    ------
    ModuleNotFoundError
        matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the picture needs the package matplotlib: pip install matplotlib, or --no-picture"
        ) from None
    parts: list[tuple[str, list[PolicyRow]]] = []
    for row in rows:
        sample = row.sample
        last = parts[-1][1][-1].sample if parts else None
        if last is None or last.phase != sample.phase or (last.phase == "prefill" and last.step != sample.step):
            parts.append((sample.phase, []))
        parts[-1][1].append(row)
    # A picture of a long conversation shows its beginning.
    del parts[PARTS:]
    with matplotlib.rc_context({"svg.hashsalt": "policy", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 3.2 * len(parts)), layout="constrained")
        for (phase, part), axes in zip(parts, figure.subplots(len(parts), 2, squeeze=False), strict=True):
            _draw(figure, axes, phase, part, levels)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _draw(figure: Any, axes: Any, phase: str, part: Sequence[PolicyRow], levels: Sequence[int]) -> None:
    left, right = axes
    first, last = part[0].sample.step, part[-1].sample.step
    name = f"{phase}, step {first}" if first == last else f"{phase}, steps {first} to {last}"
    left.set_title(f"metric: {name}")
    right.set_title(f"precision in bits: {name}")
    metric, precision = _grid(part, lambda row: row.metric), _grid(part, lambda row: row.precision)
    if first == last:
        layers = np.arange(len(metric))
        left.plot(layers, metric[:, 0], marker=".", label="metric")
        left.plot(layers, _grid(part, lambda row: row.mean)[:, 0], linestyle="--", label="mean of the layers before")
        left.legend()
        right.step(layers, precision[:, 0], where="mid")
        right.set_yticks(list(levels))
        right.set_ylim(levels[0] - 1, levels[-1] + 1)
        for each in axes:
            each.set_xlabel("layer")
        return
    for each, grid, ticks in ((left, metric, None), (right, precision, list(levels))):
        limits = {} if ticks is None else {"vmin": levels[0], "vmax": levels[-1]}
        image = each.imshow(grid, aspect="auto", origin="lower", interpolation="nearest", **limits)
        figure.colorbar(image, ax=each, ticks=ticks)
        each.set_xlabel("step, counted from the first of these")
        each.set_ylabel("layer")


def _summary(rows: Sequence[PolicyRow]) -> str:
    lines = []
    for phase in PHASES:
        counts = Counter(row.precision for row in rows if row.sample.phase == phase)
        if counts:
            total = sum(counts.values())
            shares = ", ".join(f"{level} bits {counts[level] / total:.1%}" for level in sorted(counts))
            average = sum(level * count for level, count in counts.items()) / total
            lines.append(f"{phase}: {total} layers, {shares}, mean {average:.2f} bits")
    return "\n".join(lines)


def _write(files: Mapping[Path, str]) -> None:
    """Write all files or none."""
    for path in files:
        if path.is_dir():
            raise ValueError(f"--output must name a file, not the folder {path}")
    write_files(files)


def _levels(text: str) -> tuple[int, ...]:
    found = [_number(word.strip(), int) for word in text.split(",")]
    if None in found:
        raise ValueError(f"levels must be integers with commas between, not {text!r}")
    return tuple(found)


_HELP: dict[str, tuple[Callable[[str], Any], str]] = {
    "levels": (str, "precisions in bits, ascending, with commas between"),
    "prefill_level": (int, "precision of a prefill up to its spike (default: the highest)"),
    "decode_level": (int, "precision that a decode step begins with"),
    "n_p": (int, "layers that change the precision in prefill"),
    "alpha": (int, "layers that lower it at high entropy, raise it at low"),
    "beta": (int, "layers that raise it at high entropy, lower it at low"),
    "tau": (float, "entropy from which on it is high"),
    "activity_weight": (float, "share of L_A in the metric of decode"),
    "sigma_factor": (float, "standard deviations above the mean that make a spike"),
    "band": (float, "standard deviations around the mean that are neither side"),
    "first_samples": (int, "earlier samples without which nothing is decided"),
}


def _run(options: argparse.Namespace) -> None:
    given = {name: getattr(options, name) for name in _HELP if getattr(options, name) is not None}
    if "levels" in given:
        given["levels"] = _levels(given["levels"])
    config = PolicyConfig(**given)
    policy = FixedPolicy(config) if options.fixed else Policy(config)
    out: Path | None = options.output
    if out is not None:
        if out.suffix.lower() not in (".csv", ".json"):
            raise ValueError(f"--output must end in .csv or .json, not {out}")
        if not out.parent.is_dir():
            raise ValueError(f"--output must lie in an existing folder, not {out.parent}")
        if out.resolve() == options.trace.resolve():
            raise ValueError(f"--output must be another file than TRACE, not {out}")
    rows = replay(read_trace(options.trace), policy)
    if out is None:
        sys.stdout.write(_csv_text(rows))
        return
    files = {out: _json_text(rows, policy) if out.suffix.lower() == ".json" else _csv_text(rows)}
    if not options.no_picture:
        files[out.with_suffix(".svg")] = picture(rows, config.levels)
    _write(files)
    print(_summary(rows))
    print("wrote " + ", ".join(map(str, files)))


@command(prefix="model.policy", status=2, interrupted="interrupted, nothing was written")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m model.policy",
        description="Replay recorded L_A and G_E through the precision policy: the precision of every layer, and a picture.",
    )
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="CSV, or JSON if the name ends in .json; either may have .gz behind it",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT",
        help="CSV or JSON; the picture stands beside it (default: CSV to the screen)",
    )
    parser.add_argument("--no-picture", action="store_true", help="write no picture; needs NumPy only")
    parser.add_argument("--fixed", action="store_true", help="decide in fixed point, as the hardware does")
    defaults = {field.name: field.default for field in dataclasses.fields(PolicyConfig)}
    for name, (kind, text) in _HELP.items():
        default = defaults[name]
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        note = "" if default is None else f" (default: {shown})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text + note)
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"model.policy: {error}", file=sys.stderr)
        return 2
    return 0
