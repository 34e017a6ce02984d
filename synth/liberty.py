"""What the area flow needs to know of a Liberty file: its cells, their areas, and which of them it cannot do without."""

import gzip
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GE", "Cell", "Library", "LibertyError", "load", "plain_text"]

GE = Path(__file__).with_name("ge.lib")
"""Our own library, in gate equivalents: the area of a NAND2 is 1."""

_TOKEN = re.compile(
    r"""/\*.*?\*/|"(?:[^"\\]|\\.)*"      # comments and strings, so that a brace in them does not count
    |(?P<open>(?P<group>\w+)\s*\((?P<name>[^(){};]*)\)\s*\{)
    |(?P<close>\})
    |\b(?P<key>area|function|dont_use|next_state)\s*:\s*(?P<value>"(?:[^"\\]|\\.)*"|[^;\s]+)""",
    re.DOTALL | re.VERBOSE,
)


class LibertyError(ValueError):
    """A Liberty file that cannot be used; the message says why."""


@dataclass(frozen=True)
class Cell:
    """One cell of a library.

    Attributes
    ----------
    name : str
    area : float
        In the library's unit.
    sequential : bool
        A flip-flop or a latch.
    flip_flop : bool
    functions : tuple of str
        Functions of the output pins, as written.
    usable : bool
        Not marked ``dont_use``.
    """

    name: str
    area: float
    sequential: bool
    flip_flop: bool
    functions: tuple[str, ...]
    usable: bool

    @property
    def kind(self) -> str:
        """``"buffer"``, ``"inverter"``, ``"flip-flop"`` or ``"other"``."""
        if self.flip_flop:
            return "flip-flop"
        if len(self.functions) == 1:
            text = re.sub(r"[\s()]", "", self.functions[0])
            if re.fullmatch(r"\w+", text):
                return "buffer" if not text.isdigit() else "other"
            if re.fullmatch(r"!\w+|\w+'", text):
                return "inverter"
        return "other"


@dataclass(frozen=True)
class Library:
    """Cells of one or several Liberty files, by name."""

    cells: dict[str, Cell]

    def check(self, source: str) -> None:
        """Raise if the library lacks a cell that mapping cannot do without.

        Raises
        ------
        LibertyError
            Names what is missing: buffer, inverter or flip-flop.
        """
        present = {cell.kind for cell in self.cells.values() if cell.usable}
        missing = [kind for kind in ("buffer", "inverter", "flip-flop") if kind not in present]
        if missing:
            raise LibertyError(
                f"Liberty file must have a buffer, an inverter and a flip-flop; {source} lacks: {', '.join(missing)}"
            )

    @property
    def nand2_area(self) -> float | None:
        """Area of the smallest two-input NAND, or None if there is none."""
        nand = re.compile(r"!(\w+)&(\w+)|!(\w+)\|!(\w+)|!(\w+)\*(\w+)")
        areas = [
            cell.area
            for cell in self.cells.values()
            if cell.usable and len(cell.functions) == 1 and nand.fullmatch(_canonical(cell.functions[0]))
        ]
        return min(areas, default=None)


def _canonical(function: str) -> str:
    text = re.sub(r"(\w+)'", r"!\1", re.sub(r"\s*([&|*+])\s*", r"\1", function.strip()))
    return re.sub(r"[()]|(?<=[&|*+!]) | $", "", text).replace("*", "&").replace("+", "|")


def plain_text(path: Path) -> str:
    """Return the text of a Liberty file, gzip or not.

    Raises
    ------
    LibertyError
        The file cannot be read.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise LibertyError(f"Liberty file must be readable: {path}: {error}") from None
    return content.decode("utf-8", errors="replace")


def load(text: str) -> Library:
    """Read the cells of a Liberty text.

    Raises
    ------
    LibertyError
        The text has no cells, or a cell has no area.
    """
    cells: dict[str, Cell] = {}
    path: list[str] = []
    name, area, sequential, flip_flop, usable = "", None, False, False, True
    functions: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["open"]:
            path.append(token["group"])
            if token["group"] == "cell" and len(path) == 2:
                name, area, sequential, flip_flop, usable = token["name"].strip().strip('"'), None, False, False, True
                functions = []
            elif len(path) == 3 and token["group"] in ("ff", "ff_bank", "latch", "latch_bank"):
                sequential = True
                flip_flop |= token["group"].startswith("ff")
        elif token["close"]:
            if path == ["library", "cell"]:
                if area is None:
                    raise LibertyError(f"every cell of a Liberty file must have an area; {name} has none")
                cells[name] = Cell(name, area, sequential, flip_flop, tuple(functions), usable)
            if path:
                path.pop()
        elif token["key"]:
            value = token["value"].strip('"')
            if token["key"] == "function" and path == ["library", "cell", "pin"]:
                functions.append(value)
            elif path == ["library", "cell"]:
                if token["key"] == "area":
                    area = float(value)
                elif token["key"] == "dont_use":
                    usable = value.lower() != "true"
    if not cells:
        raise LibertyError("a Liberty file must have cells; this one has none")
    return Library(cells)
