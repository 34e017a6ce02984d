"""What the area flow needs to know of a Liberty file: cells, areas, and the few kinds of cell that it looks for."""

import gzip
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

__all__ = [
    "COMMENT",
    "GE",
    "Cell",
    "FullAdder",
    "LibertyError",
    "Library",
    "groups_of",
    "load",
    "mapping_text",
    "memory_macros",
    "plain_text",
    "truth_table",
]

GE = Path(__file__).with_name("ge.lib")
"""Our own library, in gate equivalents: the area of a NAND2 is 1."""

_TOKEN = re.compile(
    r"""/\*.*?\*/|"(?:[^"\\]|\\.)*"      # comments and strings, so that a brace in them does not count
    |(?P<open>(?P<group>\w+)\s*\((?P<name>[^(){};]*)\)\s*\{)
    |(?P<close>\})
    |\b(?P<key>area|direction|function|dont_use|next_state|clocked_on|address_width|word_width)\s*:\s*(?P<value>"(?:[^"\\]|\\.)*"|[^;\s]+)""",
    re.DOTALL | re.VERBOSE,
)

# Truth tables over inputs (a), (a, b), (a, b, c): bit i is the value for inputs that spell i, the first input lowest.
_BUFFER, _INVERTER, _NAND2 = 0b10, 0b01, 0b0111
_SUM, _CARRY = 0b10010110, 0b11101000


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
    sequential, flip_flop : bool
        Flip-flop or latch; flip-flop.
    inputs : tuple of str
        Names of the input pins.
    outputs : dict of str to str
        Functions of the output pins that have one, by pin.
    usable : bool
        Not marked ``dont_use``.
    state : tuple of str
        Names of a flip-flop's state and its complement.
    next_state, clocked_on : str
        Functions of a flip-flop's next state and clock.
    """

    name: str
    area: float
    sequential: bool
    flip_flop: bool
    inputs: tuple[str, ...]
    outputs: dict[str, str]
    usable: bool
    state: tuple[str, ...] = ()
    next_state: str = ""
    clocked_on: str = ""

    @property
    def inverts(self) -> bool | None:
        """Whether a plain flip-flop for rising edges gives only the complement of what it takes; None for any other cell."""
        data = [pin for pin in self.inputs if pin != self.clocked_on.strip(" ()")]
        taken = truth_table(self.next_state, data) if len(data) == 1 and len(self.inputs) == 2 else None
        if not self.flip_flop or taken not in (_BUFFER, _INVERTER):
            return None
        given = {function.strip(" ()") == self.state[0] for function in self.outputs.values()}
        return (taken == _BUFFER) not in given

    def computes(self, table: int, inputs: int) -> bool:
        """Whether the cell is combinational and its only output has this truth table of this many inputs."""
        if self.sequential or len(self.inputs) != inputs or len(self.outputs) != 1:
            return False
        return truth_table(next(iter(self.outputs.values())), self.inputs) == table


@dataclass(frozen=True)
class FullAdder:
    """A full-adder cell: three inputs in any order, sum and carry, either of them possibly inverted."""

    cell: Cell
    sum_pin: str
    sum_inverted: bool
    carry_pin: str
    carry_inverted: bool


@dataclass(frozen=True)
class Library:
    """Cells of a Liberty file, by name."""

    cells: dict[str, Cell]

    def _usable(self) -> list[Cell]:
        return [cell for cell in self.cells.values() if cell.usable]

    def check(self, source: str) -> None:
        """Raise if the library lacks a cell that mapping cannot do without.

        Parameters
        ----------
        source : str
            Name of the file, for the message.

        Raises
        ------
        LibertyError
            Names what is missing: buffer, inverter or flip-flop.
        """
        found = {
            "buffer": any(cell.computes(_BUFFER, 1) for cell in self._usable()),
            "inverter": any(cell.computes(_INVERTER, 1) for cell in self._usable()),
            "flip-flop": any(cell.flip_flop for cell in self._usable()),
        }
        missing = [kind for kind, present in found.items() if not present]
        if missing:
            raise LibertyError(
                f"Liberty file must have a buffer, an inverter and a flip-flop; {source} lacks: {', '.join(missing)}"
            )

    @property
    def nand2_area(self) -> float | None:
        """Area of the smallest two-input NAND, or None if there is none."""
        return min((cell.area for cell in self._usable() if cell.computes(_NAND2, 2)), default=None)

    @property
    def inverter(self) -> Cell:
        """The smallest inverter; there is one in every library that :meth:`check` lets pass."""
        inverters = (cell for cell in self._usable() if cell.computes(_INVERTER, 1))
        return min(inverters, key=lambda cell: (cell.area, cell.name))

    @property
    def costly_flip_flops(self) -> list[str]:
        """Plain flip-flops that cost more than the smallest one that inverts and an inverter, if there is such."""
        cells = [cell for cell in self._usable() if cell.inverts is not None]
        inverter = min((cell.area for cell in self._usable() if cell.computes(_INVERTER, 1)), default=0.0)
        inverting = min((cell.area for cell in cells if cell.inverts), default=math.inf) + inverter
        plain = [cell for cell in cells if not cell.inverts]
        return sorted(cell.name for cell in plain) if min((c.area for c in plain), default=0.0) > inverting else []

    @property
    def full_adder(self) -> FullAdder | None:
        """The smallest full-adder cell, or None if there is none."""
        best: FullAdder | None = None
        for cell in self._usable():
            if cell.sequential or len(cell.inputs) != 3 or len(cell.outputs) != 2:
                continue
            tables = {pin: truth_table(function, cell.inputs) for pin, function in cell.outputs.items()}
            for (sum_pin, total), (carry_pin, carry) in permutations(tables.items(), 2):
                plain = total in (_SUM, _SUM ^ 0xFF) and carry in (_CARRY, _CARRY ^ 0xFF)
                if plain and (best is None or cell.area < best.cell.area):
                    best = FullAdder(cell, sum_pin, total != _SUM, carry_pin, carry != _CARRY)
        return best


def truth_table(function: str, inputs: Sequence[str]) -> int | None:
    """Return the truth table of a Liberty function, or None if it depends on anything but ``inputs``.

    Bit i is the value for inputs that spell i in binary, the first one lowest.

    >>> bin(truth_table("!(A & B)", ["A", "B"]))
    '0b111'
    >>> truth_table("A' + B C", ["A", "B", "C"]) == truth_table("!A | (B * C)", ["A", "B", "C"])
    True
    """
    every = (1 << (1 << len(inputs))) - 1
    values = {"0": 0, "1": every}
    for position, name in enumerate(inputs):
        values[name] = sum(1 << i for i in range(1 << len(inputs)) if i >> position & 1)
    tokens = re.findall(r"[A-Za-z_][\w\[\]]*|\S", function)

    # By descending precedence: ' and !, ^, & * or nothing, | or +.
    def factor() -> int:
        token = tokens.pop(0)
        if token == "!":
            return every ^ factor()
        if token == "(":
            value = disjunction()
            tokens.pop(0)
        else:
            value = values[token]
        while tokens and tokens[0] == "'":
            tokens.pop(0)
            value ^= every
        return value

    def exclusive() -> int:
        value = factor()
        while tokens and tokens[0] == "^":
            tokens.pop(0)
            value ^= factor()
        return value

    def conjunction() -> int:
        value = exclusive()
        while tokens and tokens[0] not in ("|", "+", ")"):
            if tokens[0] in ("&", "*"):
                tokens.pop(0)
            value &= exclusive()
        return value

    def disjunction() -> int:
        value = conjunction()
        while tokens and tokens[0] in ("|", "+"):
            tokens.pop(0)
            value |= conjunction()
        return value

    try:
        return disjunction()
    except (KeyError, IndexError):
        return None


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
    except (OSError, EOFError, zlib.error) as error:
        raise LibertyError(f"Liberty file must be readable, {path} is not: {error}") from None
    return content.decode("utf-8", errors="replace")


def _groups(text: str) -> Iterator[tuple[list[str], str, str, str, int]]:
    """Yield path of groups, name of the innermost, attribute, value and its place; attribute is ``{`` or ``}`` at a group's ends."""
    path: list[str] = []
    names: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["open"]:
            path.append(token["group"])
            names.append(token["name"].strip().strip('"'))
            yield path, names[-1], "{", "", token.end()
        elif token["close"] and path:
            yield path, names[-1], "}", "", token.end()
            path.pop()
            names.pop()
        elif token["key"] and path:
            yield path, names[-1], token["key"], token["value"].strip('"'), token.start("value")


def _number(text: str) -> float:
    """Return a number, or NaN for any other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def load(text: str) -> Library:
    """Read the cells of a Liberty text.

    Raises
    ------
    LibertyError
        The text has no cells, or a cell has no area or one that is no number of at least 0.
    """
    cells: dict[str, Cell] = {}
    attributes: dict[str, str] = {}
    storage: set[str] = set()
    inputs: list[str] = []
    outputs: dict[str, str] = {}
    state: tuple[str, ...] = ()
    for path, name, key, value, _ in _groups(text):
        if path == ["library", "cell"]:
            if key == "{":
                attributes, storage, inputs, outputs, state = {}, set(), [], {}, ()
            elif key == "}":
                if "area" not in attributes:
                    raise LibertyError(f"every cell of a Liberty file must have an area; {name} has none")
                area = _number(attributes["area"])
                if not 0 <= area < math.inf:
                    raise LibertyError(
                        f"every area of a Liberty file must be a number of at least 0; that of {name} is {attributes['area']}"
                    )
                cells[name] = Cell(
                    name,
                    area,
                    bool(storage),
                    any(kind.startswith("ff") for kind in storage),
                    tuple(inputs),
                    outputs,
                    attributes.get("dont_use", "false").lower() != "true",
                    state,
                    attributes.get("next_state", ""),
                    attributes.get("clocked_on", ""),
                )
            else:
                attributes[key] = value
        elif path == ["library", "cell", "pin"]:
            if key == "direction" and value == "input":
                inputs.append(name)
            elif key == "function":
                outputs[name] = value
        elif len(path) == 3 and path[2] in ("ff", "ff_bank", "latch", "latch_bank"):
            if key == "{":
                storage.add(path[2])
                state = tuple(part.strip(' "') for part in name.split(","))
            else:
                attributes[key] = value
        if path == ["library"] and key == "}":
            break
    else:
        if cells:
            raise LibertyError("every brace of a Liberty file must be closed; this one ends inside a group")
    if not cells:
        raise LibertyError("a Liberty file must have cells, this one has none")
    return Library(cells)


def memory_macros(path: Path) -> list[tuple[int, int, float]]:
    """Return width, words and area of every memory macro of a Liberty file, from its groups ``memory``.

    Raises
    ------
    LibertyError
        The file cannot be read or has no such cell.
    """
    macros: list[tuple[int, int, float]] = []
    values: dict[str, str] = {}
    for groups, name, key, value, _ in _groups(plain_text(path)):
        if groups == ["library", "cell"] and key == "{":
            values = {}
        elif groups == ["library", "cell"] and key == "}" and {"area", "address_width", "word_width"} <= values.keys():
            width, bits, area = (_number(values[each]) for each in ("word_width", "address_width", "area"))
            if not (width % 1 == bits % 1 == 0 and 0 < width < math.inf and 0 <= bits <= 64 and 0 <= area < math.inf):
                raise LibertyError(
                    f"word_width, address_width and area of a memory must be sizes; those of {name} in {path.name} are "
                    f"{values['word_width']}, {values['address_width']} and {values['area']}"
                )
            macros.append((int(width), 1 << int(bits), area))
        elif groups[:2] == ["library", "cell"] and (len(groups) == 2 or groups[2] == "memory"):
            values[key] = value
    if not macros:
        raise LibertyError(f"a memory Liberty must have cells with area, address_width and word_width; {path} has none")
    return macros


def mapping_text(text: str, library: Library) -> str:
    """Return a Liberty text for ABC, with areas that its mapper cannot confuse.

    ABC keeps two decimals of an area, and among equal ones takes whatever the C library's sort puts first. So the areas are given in hundredths
    of the smallest one, rounded to quarters, whose sums are exact, and no two are equal. They are for choosing cells, not for adding up.
    """
    unit = min((cell.area for cell in library.cells.values() if cell.usable and cell.area > 0), default=1.0) / 100
    quarters: dict[str, int] = {}
    last = 0
    for name, cell in sorted(library.cells.items(), key=lambda item: (item[1].area, item[0])):
        last = max(last + 1, round(4 * cell.area / unit)) if cell.area > 0 else 0
        quarters[name] = last
    pieces, end = [], 0
    for path, name, key, value, place in _groups(text):
        if path == ["library", "cell"] and key == "area":
            # The value may stand in quotes.
            place = text.index(value, place)
            pieces += [text[end:place], f"{quarters[name] / 4:.2f}"]
            end = place + len(value)
    return "".join([*pieces, text[end:]])


COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_BRACE = re.compile(r'"[^"]*"|[{}]')


def _end(text: str, start: int) -> int:
    """Return the place behind the brace that closes the one before ``start``."""
    depth = 1
    for piece in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(piece[0], 0)
        if not depth:
            return piece.end()
    raise LibertyError("every brace of a Liberty file must be closed; the file ends inside a group")


def groups_of(text: str, kind: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of all groups of a kind, which do not lie inside each other, in a text without comments."""
    place = 0
    # A literal in front makes the search some ten times faster than a word boundary does.
    group = re.compile(rf"{kind}\s*\(([^(){{}};]*)\)\s*\{{")
    while match := group.search(text, place):
        place = match.end()
        if not (text[match.start() - 1].isalnum() or text[match.start() - 1] == "_"):
            place = _end(text, place)
            yield match[1].strip().strip('"'), match.start(), place
