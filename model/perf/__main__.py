"""``python -m model.perf``: a language model on the accelerator: latency, traffic and energy (docs/performance-model.md)."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.perf.calibration import calibration
from model.perf.constants import constants
from model.perf.estimate import Estimate, estimate
from model.perf.hardware import DATAPATHS, PAPER, PRECISIONS, REFERENCE, SCHEDULES
from model.perf.language_model import LanguageModel, packaged, read_model
from model.perf.paper import figures
from model.perf.pictures import energy_bars, latency_bars, roofline, timeline
from model.perf.sweep import KNOBS, hardware_of
from model.perf.workload import Mix, read_mix
from model.pictures import PictureError, bars, write_picture

_NUMBERS: dict[str, tuple[type, str]] = {
    "accelerators": (int, "accelerators that share the memory"),
    "rows": (int, "rows of elements"),
    "columns": (int, "columns of elements"),
    "activation_depth": (int, "vectors of the bank of a row"),
    "weight_depth": (int, "pairs of vectors of the bank of a column"),
    "activation_entries": (int, "vectors of an element's activation buffer"),
    "accumulators": (int, "sums of an element"),
    "clock_mhz": (float, "megahertz"),
    "bandwidth_gb": (float, "10⁹ bytes per second of memory"),
    "data_width": (int, "bits of a bus, with schedule rtl"),
    "latency": (int, "cycles that memory takes to answer, with schedule rtl"),
    "refined_share": (float, "share of the groups that an extended K has twice"),
}
_DEFAULTS: dict[str, Any] = {
    "prompt": KNOBS["prompt"],
    "output_tokens": KNOBS["output"],
    "batch": KNOBS["batch"],
    "shares": KNOBS["shares"],
    "datapaths": list(DATAPATHS),
    "refinement": "slots",
    "schedule": "rtl",
    "overlap": False,
    "timeline": 6,
}
"""What a request has if nothing else is said; the paper's figures have their own."""
_EVERYWHERE = {"config", "output", "no_picture", "quiet"}


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("| " + " | ".join(cells) + " |")
        if not number:
            lines.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


_COLUMNS = {
    "seconds": "latency, s",
    "prefill_seconds": "prefill, s",
    "decode_seconds": "decode, s",
    "tokens_per_second": "tokens / s",
    "chip_joules": "chip, J",
    "joules": "with memory, J",
    "memory_bytes": "memory, bytes",
    "use": "use of elements",
    "area_ge": "area, GE",
}


def _request(options: argparse.Namespace, model: LanguageModel, mix: Mix) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in _NUMBERS if getattr(options, name) is not None}
    hardware = hardware_of(
        given | {"schedule": options.schedule, "overlap": options.overlap, "refinement": options.refinement}
    )
    chosen = [DATAPATHS[name] for name in options.datapaths]
    sizes = options.prompt, options.output_tokens, options.batch
    found: list[Estimate] = []
    for number, datapath in enumerate(chosen, 1):
        found.append(estimate(model, hardware, datapath, mix, *sizes))
        if not options.quiet and options.schedule == "rtl":
            print(f"{number} of {len(chosen)} datapaths", file=sys.stderr, flush=True)
    rows = [each.as_json() for each in found]
    if options.schedule == "rtl":
        never = replace(hardware, schedule="array", latency=0, overlap=True)
        for row, datapath in zip(rows, chosen, strict=True):
            row["array_seconds"] = float(estimate(model, never, datapath, mix, *sizes).total.seconds)
    columns = _COLUMNS if options.schedule == "array" else _COLUMNS | {"array_seconds": "never waiting, s"}
    base = next((row for row, each in zip(rows, chosen, strict=True) if each.name == "nvfp4"), None)
    heads = ["datapath", *columns.values(), *(["times NVFP4-only's speed"] if base else [])]
    lines = [heads]
    for row in rows:
        more = [f"{base['seconds'] / row['seconds']:.3f}"] if base else []
        lines.append([row["datapath"], *(f"{row[name]:.4g}" for name in columns), *more])
    print(
        f"{model.name}: {model.weights() / 1e9:.3g} · 10⁹ weights, {model.weights(active=True) / 1e9:.3g} · 10⁹ for a token"
    )
    for phase in ("prefill", "decode"):
        print(f"{phase}: {' / '.join(f'{100 * share:.1f}' for share in mix.mean(phase))} % of layers at 2 / 4 / 6 bits")
    print(_table(lines))
    if options.output is not None and not options.no_picture:
        _write_pictures(
            options.output,
            {
                "latency": latency_bars(found),
                "energy": energy_bars(found),
                "roofline": roofline(found),
                "timeline": timeline(model, hardware, chosen, options.prompt, options.batch, options.timeline),
            },
        )
    settings = {"prompt": options.prompt, "output": options.output_tokens, "batch": options.batch, **given}
    settings |= {"schedule": options.schedule, "overlap": options.overlap, "refinement": options.refinement}
    shares = {phase: mix.mean(phase) for phase in ("prefill", "decode")}
    return {"model": model.name, "settings": settings, "shares": shares, "constants": constants(), "rows": rows}


def _write_pictures(folder: Path, pictures: dict[str, Any]) -> None:
    for name, figure in pictures.items():
        write_picture(folder / f"{name}.svg", figure)


def _paper(options: argparse.Namespace) -> dict[str, Any]:
    hardware = REFERENCE if options.schedule == "rtl" else PAPER

    def done(name: str) -> None:
        if not options.quiet and hardware is REFERENCE:
            print(f"{name} done", file=sys.stderr, flush=True)

    found = figures(hardware, done)
    heads = ("what", "paper", "ours", "without memory", "difference")
    for name, rows in found["tables"].items():
        print(f"{name}:")
        lines = [["" if row[head] is None else str(row[head]) for head in heads] for row in rows]
        print(_table([heads, *lines]), end="\n\n")
    print(*found["explanations"], sep="\n\n")
    if options.output is not None and not options.no_picture:
        pictures = {}
        for name, rows in found["tables"].items():
            values = {
                row["what"]: {
                    key: value for key in ("paper", "ours", "without memory") if isinstance(value := row[key], float)
                }
                for row in rows
                if isinstance(row["paper"], float)
            }
            pictures[name.replace(" ", "-")] = bars(values, name, "ratio", 1.0)
        _write_pictures(options.output, pictures)
    return found


def _calibration() -> dict[str, Any]:
    rows = calibration()
    heads = ("elements", "product", "mode", "counted", "model", "difference")
    print(_table([heads, *([str(row[head]) for head in heads] for row in rows)]))
    worst = max(rows, key=lambda row: abs(row["difference"]))
    print(
        f"{len(rows)} products, off by at most {100 * abs(worst['difference']):.2f} %: {worst['product']}, {worst['mode']}"
    )
    return {"rows": rows}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m model.perf",
        description="Latency, traffic and energy of a language model on the accelerator and on single-format ones.",
    )
    add = parser.add_argument
    names = ", ".join(packaged())
    add(
        "config",
        metavar="CONFIG",
        help=f"a config.json of Hugging Face or a folder with one, one of {names}; paper: the paper's figures beside ours; "
        "calibration: cycles beside those of RTL simulation",
    )
    usual = _DEFAULTS
    add("--prompt", type=int, help=f"tokens of a prompt (default: {usual['prompt']})")
    add("--output-tokens", type=int, help=f"decode steps (default: {usual['output_tokens']})")
    add("--batch", type=int, help=f"sequences at a time (default: {usual['batch']})")
    add("--shares", help=f"percent of the layers at 2, 4 and 6 bits (default: {usual['shares']})")
    add("--decode-shares", metavar="SHARES", help="those of decode (default: as --shares)")
    add("--trace", type=Path, metavar="FILE", help="shares from a trace of model.trace or model.policy instead")
    add("--datapaths", nargs="+", choices=list(DATAPATHS), help="(default: all)")
    add("--refinement", choices=("slots", "inplace", "none"), help="(default: slots)")
    add(
        "--schedule",
        choices=SCHEDULES,
        help="rtl: as generated, loader included; array: elements never wait (default: rtl; of the paper's figures array)",
    )
    add(
        "--overlap",
        action="store_true",
        default=None,
        help="memory brings operands while elements compute, with schedule array",
    )
    for name, (kind, text) in _NUMBERS.items():
        add(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    add(
        "--timeline",
        type=int,
        choices=PRECISIONS,
        metavar="BITS",
        help="layer of the time line (default: 6)",
    )
    add("-o", "--output", type=Path, metavar="DIR", help="write estimate.json and pictures here")
    add("--no-picture", action="store_true", help="write no pictures; needs NumPy only")
    add("--quiet", action="store_true", help="no progress on the standard error stream")
    return parser


def _complete(options: argparse.Namespace) -> None:
    """Give options their defaults; raise ValueError for one that does not do anything."""
    given = [name for name, value in vars(options).items() if value not in (None, False)]
    heeded = {"paper": _EVERYWHERE | {"schedule"}, "calibration": _EVERYWHERE}.get(options.config, set(given))
    if options.schedule == "array":
        heeded -= {"data_width"}
    if options.trace:
        heeded -= {"shares", "decode_shares"}
    for name in given:
        if name not in heeded:
            where = options.config
            if options.config not in ("paper", "calibration"):
                where = "schedule array" if name == "data_width" else "a trace, which has its shares"
            raise ValueError(f"--{name.replace('_', '-')} must be left out with {where}")
    if options.config not in ("paper", "calibration"):
        for name, value in _DEFAULTS.items():
            if getattr(options, name) is None:
                setattr(options, name, value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 on bad input."""
    options = _parser().parse_args(arguments)
    try:
        _complete(options)
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
        if options.config == "paper":
            found = _paper(options)
        elif options.config == "calibration":
            found = _calibration()
        else:
            mix = read_mix(options.trace) if options.trace else Mix.of(options.shares, options.decode_shares)
            found = _request(options, read_model(options.config), mix)
        if options.output is not None:
            text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
            (options.output / "estimate.json").write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError, TypeError, PictureError) as error:
        print(f"model.perf: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
