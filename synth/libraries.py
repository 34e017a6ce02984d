"""Where Liberty files are found, and several of them as one."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from synth.liberty import COMMENT, GE, LibertyError, Library, groups_of, load, mapping_text, plain_text

__all__ = ["PRESETS", "LibertyFiles", "Prepared", "Preset", "find", "merged", "prepare", "without"]


@dataclass(frozen=True)
class LibertyFiles:
    """Files that make up one library.

    Attributes
    ----------
    name : str
        For reports; never a path.
    paths : tuple of Path
    dont_use : tuple of str
        Patterns of cells that are left out, beside those which the files mark.
    """

    name: str
    paths: tuple[Path, ...]
    dont_use: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preset:
    """Where a library lies: patterns below the folders that environment variables name, and cells that its users leave out."""

    places: tuple[tuple[str, str], ...]
    dont_use: tuple[str, ...] = ()


_IHP = "sg13g2_stdcell_typ_1p20V_25C.lib*"
_SKY = "sky130_fd_sc_hd__tt_025C_1v80.lib*"

PRESETS = {
    "ihp-sg13g2": Preset(
        (
            ("PDK_ROOT", f"ihp-sg13g2/libs.ref/sg13g2_stdcell/lib/{_IHP}"),
            ("PDK_ROOT", f"ciel/ihp-sg13g2/versions/*/ihp-sg13g2/libs.ref/sg13g2_stdcell/lib/{_IHP}"),
            ("ORFS", f"flow/platforms/ihp-sg13g2/lib/{_IHP}"),
        ),
    ),
    "asap7": Preset(
        (("ORFS", "flow/platforms/asap7/lib/NLDM/asap7sc7p5t_*_RVT_TT_nldm_*.lib*"),),
        ("*x1p*", "*xp*", "SDF*", "ICG*"),
    ),
    "sky130hd": Preset(
        (
            *(("PDK_ROOT", f"{pdk}/libs.ref/sky130_fd_sc_hd/lib/{_SKY}") for pdk in ("sky130A", "sky130B")),
            ("PDK_ROOT", f"ciel/sky130/versions/*/sky130A/libs.ref/sky130_fd_sc_hd/lib/{_SKY}"),
            ("ORFS", f"flow/platforms/sky130hd/lib/{_SKY}"),
        ),
        ("*__probe*", "*__lpflow*"),
    ),
    "gt2n": Preset((("ORFS", "flow/platforms/gt2n/**/gt2_6t_w13_svt_tt_0p7v25c.lib*"),)),
    "osu018": Preset((("", "/usr/share/qflow/tech/osu018/osu018_stdcells.lib"),)),
}
"""Libraries by name; the first place that has files is taken."""


def find(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> LibertyFiles:
    """Return the library that names of files or of one preset stand for; ``ge``, or no name at all, is our own.

    Raises
    ------
    LibertyError
        A file or a preset is not there; the message has the places that were looked at.
    """
    if not names or list(names) == ["ge"]:
        return LibertyFiles(GE.name, (GE,))
    if len(names) == 1 and names[0] in PRESETS and not Path(names[0]).exists():
        return _preset(names[0], environment)
    paths = [Path(name) for name in names]
    for path in paths:
        if not path.exists():
            known = ", ".join(["ge", *PRESETS])
            if str(path) in ("ge", *PRESETS):
                raise LibertyError(f"{path} must be the only library here, not one of {', '.join(names)}")
            raise LibertyError(f"Liberty must be a file or one of {known}; {path} is neither")
    return LibertyFiles(" + ".join(path.name for path in paths), tuple(paths))


def _preset(name: str, environment: Mapping[str, str]) -> LibertyFiles:
    tried = []
    for variable, pattern in PRESETS[name].places:
        root = environment.get(variable, "") if variable else "/"
        tried.append(f"${variable}/{pattern}" if variable else pattern)
        # Of several versions the last is the newest; an archive beside its content counts once.
        found = {path.name.removesuffix(".gz"): path for path in sorted(Path(root).glob(pattern.lstrip("/")))}
        if root and found:
            return LibertyFiles(name, tuple(found.values()), PRESETS[name].dont_use)
    unset = sorted({variable for variable, _ in PRESETS[name].places if variable and not environment.get(variable)})
    hint = f"; not set: {', '.join(unset)}" if unset else ""
    raise LibertyError(f"{name} must be installed; it is in none of: {', '.join(tried)}{hint}")


@dataclass(frozen=True)
class Prepared:
    """A library as the flow needs it.

    Attributes
    ----------
    library : Library
    text : str
        All of it.
    cells : str
        Without timing and power, which only cost Yosys time.
    mapping : str
        For ABC, see :func:`synth.liberty.mapping_text`.
    """

    library: Library
    text: str
    cells: str
    mapping: str


def prepare(files: LibertyFiles | Path) -> Prepared:
    """Read a library and check that mapping to it is possible.

    Raises
    ------
    LibertyError
        The library cannot be used.
    """
    if isinstance(files, Path):
        files = LibertyFiles(files.name, (files,))
    text = merged({path.name: plain_text(path) for path in files.paths})
    return _prepared(text, files.name, files.dont_use)


@lru_cache(maxsize=4)
def _prepared(text: str, name: str, dont_use: tuple[str, ...]) -> Prepared:
    if dont_use:
        text = without(text, "cell", lambda cell: any(fnmatchcase(cell, pattern) for pattern in dont_use))
    cells = text
    for kind in ("timing", "internal_power", "leakage_power"):
        cells = without(cells, kind)
    try:
        library = load(cells)
    except LibertyError as error:
        raise LibertyError(f"{name}: {error}") from None
    library.check(name)
    return Prepared(library, text, cells, mapping_text(cells, library))


def without(text: str, kind: str, chosen: Callable[[str], bool] = lambda name: True) -> str:
    """Return a Liberty text without comments and without those groups of a kind whose names are ``chosen``."""
    pieces, end = [], 0
    text = COMMENT.sub("", text)
    for name, start, stop in groups_of(text, kind):
        if chosen(name):
            pieces.append(text[end:start])
            end = stop
    return "".join([*pieces, text[end:]])


_SHARED = ("lu_table_template", "power_lut_template", "cell")
_UNITS = ("time_unit", "voltage_unit", "current_unit", "capacitive_load_unit", "leakage_power_unit")


def _units(text: str) -> dict[str, str]:
    """Return the units that a Liberty text states, without spaces and quotes."""
    found = {}
    for unit in _UNITS:
        match = re.search(rf"\b{unit}\s*(?::\s*([^;\n]+)|\(([^)]*)\))", text)
        if match:
            found[unit] = re.sub(r'[\s"]', "", match[1] or match[2]).lower()
    return found


def _shared_groups(text: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield kind, name, start and end of what files of one library each have a part of."""
    for kind in _SHARED:
        for group in groups_of(text, kind):
            yield kind, *group


def merged(texts: Mapping[str, str]) -> str:
    """Return several Liberty texts as one: the first, with cells and table templates of the others.

    Raises
    ------
    LibertyError
        A cell occurs twice, or units differ.
    """
    if len(texts) == 1:
        return next(iter(texts.values()))
    # Places in a text hold only without its comments.
    texts = {name: COMMENT.sub("", text) for name, text in texts.items()}
    first, text = next(iter(texts.items()))
    owners: dict[tuple[str, str], str] = {}
    added: list[str] = []
    for name, each in texts.items():
        for unit, value in _units(each).items():
            if _units(text).get(unit, value) != value:
                raise LibertyError(f"Liberty files must have the same {unit}; {first} and {name} differ")
        for kind, item, start, end in _shared_groups(each):
            owner = owners.setdefault((kind, item), name)
            if kind == "cell" and owner != name:
                raise LibertyError(f"every cell must be in one Liberty file only; {item} is in {owner} and {name}")
            if owner == name != first:
                added.append(each[start:end])
    end = text.rindex("}")
    return "\n".join([text[:end].rstrip(), *_ordered(added), "}\n"])


def _ordered(groups: Iterable[str]) -> list[str]:
    """Templates before the cells that use them."""
    return sorted(groups, key=lambda group: group.startswith("cell"))
