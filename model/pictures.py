"""Pictures beside tables: bars, in groups or in pieces, and files that are the same bytes each time."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.command import CommandError, check_outputs, write_files

__all__ = ["COLOURS", "PictureError", "bars", "blank", "check_picture", "drawn", "stacks", "write_picture"]

COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#999933",
    "#bbbbbb",
    "#882255",
    "#44aa99",
)


class PictureError(CommandError):
    """A picture cannot be drawn; the message says why."""


def blank(width: float, height: float) -> Any:
    """Return an empty figure of so many inches.

    Raises
    ------
    PictureError
        matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise PictureError("pictures need the package matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def check_picture(path: Path | None) -> None:
    """Say before the work whether a picture can be written.

    Raises
    ------
    PictureError
        The name ends neither in ``.svg`` nor in ``.png``, or matplotlib is missing.
    OSError
        The file cannot be written.
    """
    if path is not None:
        if path.suffix not in (".svg", ".png"):
            raise PictureError(f"picture must end in .svg or .png, not {path.name}")
        blank(1, 1)
        check_outputs(path)


def drawn(figure: Any, suffix: str = ".svg") -> bytes:
    """Return the bytes of a figure as ``.svg`` or ``.png``, without date and version."""
    import matplotlib

    out = io.BytesIO()
    svg = suffix == ".svg"
    with matplotlib.rc_context({"svg.hashsalt": "autoematic", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None} if svg else {"Software": None}
        figure.savefig(out, format=suffix[1:], dpi=110, metadata=metadata)
    data = out.getvalue()
    # Lines of the SVG's paths end in a space.
    return b"\n".join(line.rstrip() for line in data.splitlines()) + b"\n" if svg else data


def write_picture(path: Path, figure: Any) -> None:
    """Write a figure as ``.svg`` or ``.png``, by the name of the file; see :func:`drawn`."""
    write_files({path: drawn(figure, path.suffix)})


def bars(values: Mapping[str, Mapping[str, float]], title: str, label: str, line: float | None = None) -> Any:
    """Draw horizontal bars, a group a row, with their values.

    Parameters
    ----------
    values : mapping of str to mapping of str to float
        Values by series, by row; a row may lack a series.
    title, label : str
        ``label`` is the axis's.
    line : float, optional
        A value to mark.
    """
    series = list(dict.fromkeys(name for row in values.values() for name in row))
    figure = blank(9.0, 1.2 + (0.26 * len(series) + 0.16) * len(values))
    axes = figure.subplots()
    thick = 0.86 / max(len(series), 1)
    for index, name in enumerate(series):
        places = [k + (index - (len(series) - 1) / 2) * thick for k, row in enumerate(values.values()) if name in row]
        lengths = [row[name] for row in values.values() if name in row]
        drawn = axes.barh(places, lengths, thick * 0.92, label=name, color=COLOURS[index % len(COLOURS)])
        axes.bar_label(drawn, fmt="{:.4g}", padding=3, fontsize=8)
    axes.set_yticks(range(len(values)), list(values))
    axes.margins(x=0.1)
    # A margin that is a share of the height grows with the rows.
    axes.set(title=title, xlabel=label, ylim=(len(values) - 0.4, -0.6))
    if line is not None:
        axes.axvline(line, color="black", linewidth=0.8, linestyle="--", zorder=0)
    if len(series) > 1:
        figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def stacks(values: Mapping[str, Mapping[str, float]], title: str, label: str) -> Any:
    """Draw horizontal bars, a row each, whose pieces follow each other, with their sums.

    Parameters
    ----------
    values : mapping of str to mapping of str to float
        Values by piece, by row; not negative.
    title, label : str
        ``label`` is the axis's.
    """
    pieces = list(dict.fromkeys(name for row in values.values() for name in row))
    figure = blank(9.0, 1.4 + 0.36 * len(values))
    axes = figure.subplots()
    ends = [0.0] * len(values)
    for index, name in enumerate(pieces):
        lengths = [row.get(name, 0.0) for row in values.values()]
        drawn = axes.barh(range(len(values)), lengths, 0.7, ends, label=name, color=COLOURS[index % len(COLOURS)])
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.bar_label(drawn, [f"{end:.4g}" for end in ends], padding=3, fontsize=8)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(title=title, xlabel=label)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure
