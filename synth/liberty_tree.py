"""Whole groups of a Liberty file: those of a few cells, because a file may hold hundreds of megabytes of tables that nobody asks for."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from synth.liberty import LibertyError

__all__ = ["Group", "cell_groups", "library_group"]

_TOKEN = re.compile(
    r"""/\*.*?\*/|//[^\n]*|\\\r?\n
    |(?P<key>[\w$]+)\s*:\s*(?P<value>"[^"]*"|[^;{}"\n]+?)\s*(?:;|(?=\n)|(?=\}))
    |(?P<name>[\w$]+)\s*\((?P<arguments>(?:"[^"]*"|[^()"])*)\)\s*(?P<then>[{;]?)
    |(?P<close>\})""",
    re.DOTALL | re.VERBOSE,
)
_CELL = re.compile(r'\bcell\s*\(\s*"?([^\s"()]+)"?\s*\)\s*\{')
_BRACE = re.compile(r'"[^"]*"|/\*.*?\*/|[{}]', re.DOTALL)


@dataclass
class Group:
    """A group of a Liberty file.

    Attributes
    ----------
    kind : str
        Such as ``"pin"``.
    names : tuple of str
        What stands in its parentheses.
    attributes : dict of str to str
        Simple attributes, and complex ones with their arguments as they stand there.
    groups : list of Group
        Groups inside, in order.
    """

    kind: str
    names: tuple[str, ...] = ()
    attributes: dict[str, str] = field(default_factory=dict)
    groups: list["Group"] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first name, empty without any."""
        return self.names[0] if self.names else ""

    def all(self, *kinds: str) -> Iterator["Group"]:
        """Yield the groups inside of these kinds."""
        return (group for group in self.groups if group.kind in kinds)

    def first(self, kind: str) -> "Group | None":
        """Return the first group inside of this kind, or None."""
        return next(self.all(kind), None)


def _parsed(text: str) -> Group:
    root = Group("")
    stack = [root]
    for token in _TOKEN.finditer(text):
        if token["close"]:
            if len(stack) > 1:
                stack.pop()
        elif token["key"]:
            stack[-1].attributes[token["key"]] = token["value"].strip().strip('"').strip()
        elif token["name"] and token["then"] == "{":
            names = tuple(name.strip().strip('"') for name in token["arguments"].split(",") if name.strip())
            stack.append(Group(token["name"], names))
            stack[-2].groups.append(stack[-1])
        elif token["name"]:
            stack[-1].attributes[token["name"]] = token["arguments"].strip()
    return root


def _end(text: str, start: int) -> int:
    """Return the place behind the brace that closes the group whose inside starts at ``start``."""
    depth = 1
    for token in _BRACE.finditer(text, start):
        depth += (token[0] == "{") - (token[0] == "}")
        if depth == 0:
            return token.end()
    raise LibertyError("every group of a Liberty file must be closed; the last one is not")


def cell_groups(text: str, names: Iterable[str]) -> dict[str, Group]:
    """Return the groups of these cells.

    Raises
    ------
    LibertyError
        A cell is not there.
    """
    wanted = set(names)
    found = {}
    for start in _CELL.finditer(text):
        if start[1] in wanted:
            found[start[1]] = _parsed(text[start.start() : _end(text, start.end())]).groups[0]
    missing = sorted(wanted - found.keys())
    if missing:
        raise LibertyError(f"every cell of the netlist must be in the Liberty file; {missing[0]} is not")
    return {name: found[name] for name in sorted(found)}


def library_group(text: str) -> Group:
    """Return the library's own attributes and groups, such as units and templates, as far as they stand before the first cell.

    Raises
    ------
    LibertyError
        There is no library.
    """
    first = _CELL.search(text)
    root = _parsed(text[: first.start()] if first else text)
    library = root.first("library")
    if library is None:
        raise LibertyError("a Liberty file must have a library; this one has none")
    return library
