"""``python -m model.perf``: a language model on the accelerator: latency, traffic and energy (docs/performance-model.md)."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from model.command import Progress, check_outputs, command, write_files
from model.perf.calibration import calibration
from model.perf.constants import constants
from model.perf.estimate import Estimate, check, estimate
from model.perf.hardware import DATAPATHS, PAPER, PRECISIONS, REFERENCE, SCHEDULES, Hardware
from model.perf.language_model import LanguageModel, packaged, read_model
from model.perf.paper import figures
from model.perf.pictures import energy_bars, latency_bars, roofline, timeline
from model.perf.sweep import KNOBS, hardware_of
from model.perf.workload import Mix, read_mix
from model.pictures import bars, blank, drawn

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
_PICTURES = ("latency", "energy", "roofline", "timeline")

Found = tuple[dict[str, Any], dict[str, Any]]
"""What a command has for ``estimate.json``, and pictures by name."""


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
    "array_seconds": "never waiting, s",
    "speed": "times NVFP4-only's speed",
}


def _hardware(options: argparse.Namespace) -> Hardware:
    given = {name: getattr(options, name) for name in _NUMBERS if getattr(options, name) is not None}
    return hardware_of(
        given | {"schedule": options.schedule, "overlap": options.overlap, "refinement": options.refinement}
    )


def _request(options: argparse.Namespace, hardware: Hardware, model: LanguageModel, mix: Mix) -> Found:
    chosen = [DATAPATHS[name] for name in dict.fromkeys(options.datapaths)]
    sizes = options.prompt, options.output_tokens, options.batch
    progress = Progress(options.quiet or options.schedule == "array")
    for datapath in chosen:
        check(model, hardware, datapath, mix, *sizes)
    found: list[Estimate] = []
    for number, datapath in enumerate(chosen, 1):
        found.append(estimate(model, hardware, datapath, mix, *sizes))
        progress(f"{number} of {len(chosen)} datapaths")
    rows = [each.as_json() for each in found]
    if options.schedule == "rtl":
        never = replace(hardware, schedule="array", latency=0, overlap=True)
        for row, datapath in zip(rows, chosen, strict=True):
            row["array_seconds"] = float(estimate(model, never, datapath, mix, *sizes).total.seconds)
    base = next((row for row, each in zip(rows, chosen, strict=True) if each.name == "nvfp4"), None)
    if base is not None:
        for row in rows:
            row["speed"] = base["seconds"] / row["seconds"]
    columns = {name: head for name, head in _COLUMNS.items() if name in rows[0]}
    lines = [["datapath", *columns.values()]]
    lines += ([row["datapath"], *(f"{row[name]:.4g}" for name in columns)] for row in rows)
    weights = {"all": model.weights(), "token": model.weights(active=True)}
    print(
        f"{model.name}: {_count(weights['all'])} weights of layers and head, {_count(weights['token'])} of them for a token"
    )
    shares = {"prefill": mix.prefill.tolist(), "decode": mix.steps(options.output_tokens).mean(axis=0).tolist()}
    for phase, values in shares.items():
        print(f"{phase}: {' / '.join(f'{100 * share:.1f}' for share in values)} % of layers at 2 / 4 / 6 bits")
    print(_table(lines))
    pictures = {}
    if options.output is not None and not options.no_picture:
        layer = timeline(model, hardware, chosen, options.prompt, options.batch, options.timeline)
        figures = latency_bars(found), energy_bars(found), roofline(found), layer
        pictures = dict(zip(_PICTURES, figures, strict=True))
    settings = asdict(hardware)
    settings = {"prompt": sizes[0], "output": sizes[1], "batch": sizes[2], **settings.pop("config"), **settings}
    about = {"model": model.name, "dimensions": asdict(model), "weights": weights, "settings": settings}
    return about | {"shares": shares, "constants": constants(), "rows": rows}, pictures


def _count(weights: int) -> str:
    return f"{weights / 1e9:.4g} · 10⁹" if weights >= 1e9 else f"{weights / 1e6:.4g} · 10⁶"


def _paper(options: argparse.Namespace) -> Found:
    progress = Progress(options.quiet)
    found = figures(REFERENCE if options.schedule == "rtl" else PAPER, lambda name: progress(f"{name} done"))
    heads = ("what", "paper", "ours", "without memory", "difference")
    for name, rows in found["tables"].items():
        print(f"{name}:")
        lines = [["" if row[head] is None else str(row[head]) for head in heads] for row in rows]
        print(_table([heads, *lines]), end="\n\n")
    print(*found["explanations"], sep="\n\n")
    pictures = {}
    if options.output is not None and not options.no_picture:
        for name, rows in found["tables"].items():
            values = {
                row["what"]: {
                    key: value for key in ("paper", "ours", "without memory") if isinstance(value := row[key], float)
                }
                for row in rows
                if isinstance(row["paper"], float)
            }
            pictures[name.replace(" ", "-")] = bars(values, name, "ratio", 1.0)
    return found, pictures


def _calibration() -> Found:
    rows = calibration()
    heads = ("elements", "product", "mode", "counted", "model", "difference")
    print(_table([heads, *([str(row[head]) for head in heads] for row in rows)]))
    worst = max(rows, key=lambda row: abs(row["difference"]))
    print(
        f"{len(rows)} products, off by at most {100 * abs(worst['difference']):.2f} %: {worst['product']}, {worst['mode']}"
    )
    return {"rows": rows}, {}


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
    given = [name for name, value in vars(options).items() if value is not None and value is not False]
    heeded = {"paper": _EVERYWHERE | {"schedule"}, "calibration": _EVERYWHERE}.get(options.config, set(given))
    if options.schedule == "array":
        heeded -= {"data_width"}
    if options.trace is not None:
        heeded -= {"shares", "decode_shares"}
    if options.output is None or options.no_picture:
        heeded -= {"timeline"}
    for name in given:
        if name not in heeded:
            where = options.config
            if options.config not in ("paper", "calibration"):
                reasons = {"data_width": "schedule array", "timeline": "no pictures"}
                where = reasons.get(name, "a trace, which has its shares")
            raise ValueError(f"--{name.replace('_', '-')} must be left out with {where}")
    if options.config not in ("paper", "calibration"):
        for name, value in _DEFAULTS.items():
            if getattr(options, name) is None:
                setattr(options, name, value)


@command(prefix="model.perf", status=2, interrupted="interrupted, nothing was written")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 on bad input."""
    options = _parser().parse_args(arguments)
    _complete(options)
    folder = options.output
    if folder is not None:
        check_outputs(folder / "estimate.json")
        if not options.no_picture and options.config != "calibration":
            blank(1, 1)
            check_outputs(*(folder / f"{name}.svg" for name in _PICTURES if options.config != "paper"))
    if options.config == "paper":
        found, pictures = _paper(options)
    elif options.config == "calibration":
        found, pictures = _calibration()
    else:
        mix = Mix.of(options.shares, options.decode_shares) if options.trace is None else read_mix(options.trace)
        found, pictures = _request(options, _hardware(options), read_model(options.config), mix)
    if folder is not None:
        files = {folder / f"{name}.svg": drawn(figure) for name, figure in pictures.items()}
        text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
        write_files({folder / "estimate.json": text, **files})
    return 0


if __name__ == "__main__":
    sys.exit(main())
