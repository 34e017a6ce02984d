"""``python -m model.inspect``: what a package holds, and whether it is sound (docs/package.md)."""

import argparse
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.block_scaled import GROUP, PAD
from model.checkpoint import PROJECTIONS
from model.command import command, write_files
from model.package import Entry, Package
from model.vmac import SUBGROUP, SUBGROUPS

__all__ = ["main", "picture", "report", "table"]

_OWN = ("format", "version", "step", "bits", "slots")
_LISTED = ("matrices", "checksums", "config", "tokenizer")
_SCALES = 127
"""Scale bytes that are numbers: 0x00 to 0x7e."""


def report(package: Package, *, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Read all of a package and describe it.

    Parameters
    ----------
    package : Package
    progress : callable
        Called with the name of each matrix and tensor before it is read.

    Returns
    -------
    dict
        ``package``, how it was written; ``made``, how it was made; ``tokenizer``, whether there is one; ``config`` or None; ``matrices`` and
        ``plain`` by name; ``total``.
        Histograms of scales have 127 counts, by byte.

    Raises
    ------
    ValueError
        The package is damaged.
    """
    matrices, plain = {}, {}
    for name, entry in package.entries.items():
        progress(name)
        matrices[name] = _matrix(package, entry)
    for name, shape in package.plain_shapes.items():
        progress(name)
        peak = float(np.abs(package.plain(name)).max(initial=0))
        plain[name] = {"shape": list(shape), "largest": peak, "sha256": package.checksums[name]}
    package.tokenizer  # noqa: B018 - makes it, or says what is wrong
    weights = sum(math.prod(entry.shape) for entry in package.entries.values())
    scales = np.sum([row["scales"] for row in matrices.values()], axis=0, initial=0) + np.zeros(_SCALES, int)
    made = {key: value for key, value in package.metadata.items() if key not in (*_OWN, *_LISTED, "checksum")}
    return {
        "package": {key: package.metadata[key] for key in (*_OWN, "checksum")},
        "made": made,
        "tokenizer": "tokenizer" in package.metadata,
        "config": None if package.config is None else vars(package.config),
        "matrices": matrices,
        "plain": plain,
        "total": {
            "matrices": len(matrices),
            "weights": weights,
            "bytes": sum(row["bytes"] for row in matrices.values()),
            "bits_per_weight": 8 * sum(row["bytes"] for row in matrices.values()) / max(weights, 1),
            "plain_bytes": 4 * sum(math.prod(shape) for shape in package.plain_shapes.values()),
            "scales": scales.tolist(),
        },
    }


def _matrix(package: Package, entry: Entry) -> dict[str, Any]:
    tensor = package.read(entry.name)
    n, k = entry.shape
    padded = -(-k // PAD) * PAD
    # Padded groups are zeros and say nothing.
    scales = np.bincount(tensor.base.scales[:, : -(-k // GROUP)].reshape(-1), minlength=_SCALES)
    masks = tensor.mask.reshape(-1, SUBGROUPS)
    present = np.flatnonzero(scales)
    octets = n * (padded // 2 + padded // GROUP + entry.refined * package.bits * SUBGROUP // 8) + padded // PAD + 4
    names = entry.tensors(package.bits)
    return {
        "n": n,
        "k": k,
        "refined": entry.refined,
        "share": entry.refined / (padded // SUBGROUP),
        "bytes": octets,
        "bits_per_weight": 8 * octets / (n * k),
        "tensor_scale": float(tensor.base.tensor_scale),
        "lowest_scale": int(present[0]),
        "highest_scale": int(present[-1]),
        "zero_groups": int(scales[0]),
        "scales": scales.tolist(),
        "masks": {
            "groups_by_refined": np.bincount(masks.sum(axis=1), minlength=SUBGROUPS + 1).tolist(),
            "refined_by_position": masks.sum(axis=0).tolist(),
            "zero_offsets": float(np.mean(tensor.offsets.reshape(n, -1, SUBGROUP)[:, tensor.mask] == 0))
            if entry.refined
            else 0.0,
        },
        "sha256": {name.removeprefix(f"{entry.name}."): package.checksums[name] for name in names},
    }


def table(found: dict[str, Any]) -> str:
    """Return a report as text, a line for each matrix."""
    own, total = found["package"], found["total"]
    lines = [
        f"{own['format']} {own['version']}: step {own['step']}, {own['bits']}-bit offsets, {own['slots']} slots",
        *(f"{key}: {value}" for key, value in found["made"].items()),
        f"tokenizer: {'in the package' if found['tokenizer'] else 'none'}",
        f"{'matrix':12} {'N':>6} {'K':>6} {'refined':>8} {'bits':>6} {'T':>10} {'B':>10} {'zero':>6} checksum of codes",
    ]
    for name, row in found["matrices"].items():
        span = f"0x{row['lowest_scale']:02x}-0x{row['highest_scale']:02x}"
        lines.append(
            f"{name:12} {row['n']:>6} {row['k']:>6} {100 * row['share']:>7.2f}% {row['bits_per_weight']:>6.3f} "
            f"{row['tensor_scale']:>10.3e} {span:>10} {row['zero_groups']:>6} {row['sha256']['codes'][:16]}"
        )
    lines += [f"{name:20} {row['shape']} as float32" for name, row in found["plain"].items()]
    lines.append(
        f"{total['matrices']} matrices, {total['weights']} weights in {total['bytes']} bytes, "
        f"{total['bits_per_weight']:.3f} bits each, and {total['plain_bytes']} bytes of float32: all sound"
    )
    return "\n".join(lines)


def picture(found: dict[str, Any]) -> str:
    """Draw a report as SVG: histogram of scales, how full groups are in each layer, places of refined subgroups.

    Raises
    ------
    ModuleNotFoundError
        The package ``matplotlib`` is missing; the message is the pip command.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("the picture needs the package matplotlib: pip install matplotlib") from None
    slots = int(found["package"]["slots"])
    kinds: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for name, row in found["matrices"].items():
        layer, _, kind = name.partition(".")
        kinds.setdefault(kind or name, []).append((int(layer) if layer.isdigit() else 0, row))
    order = sorted(kinds, key=lambda kind: PROJECTIONS.index(kind) if kind in PROJECTIONS else len(PROJECTIONS))
    with matplotlib.rc_context({"svg.hashsalt": "inspect", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        for place, kind in enumerate(order):
            rows = sorted(kinds[kind], key=lambda item: item[0])
            counts = np.sum([row["scales"] for _, row in rows], axis=0)
            left.stairs(100 * counts / counts.sum(), np.arange(_SCALES + 1) - 0.5, label=kind)
            groups = [row["masks"]["groups_by_refined"] for _, row in rows]
            full = [100 * sum(counts[slots:]) / sum(counts) for counts in groups]
            share = 100 * np.mean([row["share"] for _, row in rows])
            middle.plot([layer for layer, _ in rows], full, "o-", ms=3, label=f"{kind}, {share:.1f} % refined")
            positions = np.sum([row["masks"]["refined_by_position"] for _, row in rows], axis=0)
            percent = 100 * positions / max(positions.sum(), 1)
            right.bar(np.arange(SUBGROUPS) + 0.8 * place / len(order) - 0.3, percent, 0.8 / len(order), label=kind)
        present = np.flatnonzero(found["total"]["scales"])
        left.set(title="group scales", xlabel="B", ylabel="% of groups", xticks=np.arange(8, _SCALES, 16))
        left.set_xlim(present[0] - 4, present[-1] + 4)
        left.set_xticklabels([f"$2^{{{byte // 8 - 7}}}$" for byte in range(8, _SCALES, 16)])
        middle.set(title=f"groups with {slots} refined subgroups", xlabel="layer", ylabel="% of groups", ylim=(0, None))
        middle.legend(frameon=False)
        right.set(
            title="places of refined subgroups", xlabel="subgroup of a group", ylabel="% of them", xticks=range(4)
        )
        left.legend(frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


@command(prefix="model.inspect", status=2)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if the package is sound, else 1; 2 if something cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m model.inspect", description="What a package holds; every byte is compared with its checksum."
    )
    parser.add_argument("package", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw scales and masks as SVG")
    options = parser.parse_args(arguments)
    terminal = sys.stderr.isatty()

    def show(name: str) -> None:
        if terminal:
            print(f"\r\x1b[K{name}", end="", file=sys.stderr, flush=True)

    try:
        found = report(Package(options.package), progress=show)
        show("")
    except (ValueError, OSError, ImportError) as error:
        show("")
        print(f"model.inspect: {error}", file=sys.stderr)
        return 1
    try:
        drawn = picture(found) if options.picture else ""
        files = {options.json: json.dumps(found, indent=1) + "\n", options.picture: drawn}
        write_files({path: text for path, text in files.items() if path is not None})
    except (ValueError, OSError, ImportError) as error:
        print(f"model.inspect: {error}", file=sys.stderr)
        return 2
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
