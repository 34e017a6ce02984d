"""Pictures of areas and of trades: treemaps and scatter plots."""

from collections.abc import Mapping, Sequence
from typing import Any

from model.pictures import COLOURS, blank
from synth.points import Row

__all__ = ["Rectangle", "scatter", "squarify", "treemap"]

Rectangle = tuple[float, float, float, float]
"""Left, bottom, width, height."""

_MARKERS = "osD^vPX*<>"


def squarify(areas: Sequence[float], rectangle: Rectangle) -> list[Rectangle]:
    """Divide a rectangle into parts as near to squares as a greedy choice gets them (Bruls, Huizing and van Wijk, 2000).

    Parameters
    ----------
    areas : sequence of float
        Positive, in descending order; scaled to fill the rectangle.
    rectangle : Rectangle
    """
    left, bottom, width, height = rectangle
    scale = width * height / sum(areas) if areas else 0.0
    todo, placed = [area * scale for area in areas], list[Rectangle]()
    while todo:
        short = min(width, height)

        def worst(row: Sequence[float], short: float = short) -> float:
            return max(max(short**2 * area / sum(row) ** 2, sum(row) ** 2 / (short**2 * area)) for area in row)

        count = 1
        while count < len(todo) and worst(todo[: count + 1]) <= worst(todo[:count]):
            count += 1
        row, todo = todo[:count], todo[count:]
        thick, along = sum(row) / short, 0.0
        for area in row:
            length = area / thick
            placed.append(
                (left, bottom + along, thick, length) if width >= height else (left + along, bottom, length, thick)
            )
            along += length
        if width >= height:
            left, width = left + thick, width - thick
        else:
            bottom, height = bottom + thick, height - thick
    return placed


def _ink(colour: str) -> str:
    """Return the colour of text on a colour."""
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "white"


def treemap(parts: Mapping[str, Mapping[str, float]], title: str) -> Any:
    """Draw areas as areas: a rectangle a group, divided into its parts.

    Parameters
    ----------
    parts : mapping of str to mapping of str to float
        Areas by name, by group; those of 0 are left out.
    title : str
    """
    width, height, legend = 10.0, 6.0, 1.0
    figure = blank(width, height + legend + 0.4)
    from matplotlib.patches import Rectangle as Patch

    figure.set_layout_engine("none")
    axes = figure.add_axes((0, legend / (height + legend + 0.4), 1, height / (height + legend + 0.4)))
    groups = {name: {part: area for part, area in below.items() if area > 0} for name, below in parts.items()}
    order = sorted((name for name in groups if groups[name]), key=lambda name: -sum(groups[name].values()))
    sums = [sum(groups[name].values()) for name in order]
    colours = [COLOURS[k % len(COLOURS)] for k in range(len(order))]
    for colour, name, frame in zip(colours, order, squarify(sums, (0.0, 0.0, width, height)), strict=True):
        inside = sorted(groups[name].items(), key=lambda item: -item[1])
        for (part, area), (x, y, w, h) in zip(inside, squarify([area for _, area in inside], frame), strict=True):
            axes.add_patch(Patch((x, y), w, h, facecolor=colour, edgecolor="white", linewidth=0.8))
            lines = [part, f"{100 * area / sum(sums):.1f} %"]
            along, across, turned = (h, w, 90) if h > 1.5 * w else (w, h, 0)
            # There are 72 points in an inch; a letter is about 0.6 as wide as it is high, a line 1.3 as high.
            size = min(11.0, 72 * along / (0.65 * max(map(len, lines))), 72 * across / 2.8)
            if size >= 4.5:
                place = {"ha": "center", "va": "center", "rotation": turned, "fontsize": size, "color": _ink(colour)}
                axes.text(x + w / 2, y + h / 2, "\n".join(lines), **place)
        axes.add_patch(Patch(frame[:2], *frame[2:], facecolor="none", edgecolor="black", linewidth=1.6))
    handles = [
        Patch((0, 0), 1, 1, facecolor=colour, label=f"{name} {100 * area / sum(sums):.1f} %")
        for colour, name, area in zip(colours, order, sums, strict=True)
    ]
    axes.set(xlim=(0, width), ylim=(0, height), title=title)
    axes.axis("off")
    figure.legend(handles=handles, loc="lower center", ncols=min(len(order), 3), frameon=False, fontsize=9)
    return figure


def scatter(
    points: Mapping[str, Sequence[Row]],
    fronts: Mapping[str, Sequence[Row]],
    x: str,
    y: str,
    labels: Sequence[str] = (),
) -> Any:
    """Draw rows in a plane, with the best trades of each group on a line and numbered; a key beside it says what the numbers are.

    Parameters
    ----------
    points, fronts : mapping of str to sequence of Row
        Rows by group, all of them and the best trades.
    x, y : str
        Names of the figures.
    labels : sequence of str
        Names of the columns that the key consists of.
    """
    figure = blank(10.0, 6.0)
    from matplotlib.lines import Line2D

    axes = figure.subplots()
    numbers: dict[str, int] = {}
    for index, (name, rows) in enumerate(points.items()):
        colour, marker = COLOURS[index % len(COLOURS)], _MARKERS[index % len(_MARKERS)]
        axes.plot([r[x] for r in rows], [r[y] for r in rows], marker, color=colour, alpha=0.5, label=name or None)
        front = fronts.get(name, ())
        axes.plot([r[x] for r in front], [r[y] for r in front], color=colour, linewidth=1)
        for row in front:
            text = ", ".join(f"{row[key]}" for key in labels if row.get(key) is not None)
            number = numbers.setdefault(text, len(numbers) + 1)
            # Neighbours on a curve have their numbers on different sides.
            place = (6, 5) if number % 2 else (-10, -11)
            axes.annotate(str(number), (row[x], row[y]), textcoords="offset points", xytext=place, fontsize=8)
    axes.set(xlabel=x, ylabel=y, title=f"{y} by {x}; lines join the best trades")
    axes.margins(0.08)
    axes.grid(linewidth=0.3)
    if any(points):
        axes.legend(fontsize=8)
    if any(numbers):
        key = [Line2D([], [], linestyle="", label=f"{number}  {text}") for text, number in numbers.items()]
        figure.legend(
            handles=key, loc="outside right upper", fontsize=8, handlelength=0, handletextpad=0, frameon=False
        )
    return figure
