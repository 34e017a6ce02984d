"""Register maps as tables, with the structures in memory that go with them: one table gives hardware, Markdown, C header and JSON (docs/registers.md)."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

__all__ = [
    "ACCESSES",
    "REGISTER_BYTES",
    "Access",
    "Enumerator",
    "Field",
    "Member",
    "Register",
    "RegisterMap",
    "Structure",
    "emit",
    "from_json",
    "to_c_header",
    "to_json",
    "to_markdown",
]

Access = Literal["ro", "rw", "w1c", "w1p"]

ACCESSES: dict[str, str] = {
    "ro": "read-only, driven by hardware",
    "rw": "read and write",
    "w1c": "set by hardware; writing 1 clears, and setting wins",
    "w1p": "writing 1 gives a pulse of one cycle; reads as 0",
}
"""Every kind of access, and what it means."""

REGISTER_BYTES = 4
_BITS = 8 * REGISTER_BYTES
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be {least} to {most}, not {value}")


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"name of {kind} must be a C identifier of lower-case words joined by single _, not {name!r}")


def _check_description(owner: str, text: object) -> None:
    if not isinstance(text, str) or not text.strip() or not text.isprintable() or "/*" in text or "*/" in text:
        raise ValueError(f"description of {owner} must be one printable line without /* or */, not {text!r}")


def _check_tuple(name: str, values: object, kind: type, least: int) -> None:
    if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
        raise TypeError(f"{name} must be a tuple of {kind.__name__}, not {values!r}")
    if len(values) < least:
        raise ValueError(f"{name} must have at least {least} {kind.__name__}, not {len(values)}")


def _check_distinct(name: str, values: Iterable[object]) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{name} must be distinct, not {value!r} twice")
        seen.add(value)


@dataclass(frozen=True)
class Enumerator:
    """A value of a field that has a name.

    Attributes
    ----------
    name : str
        Lower-case C identifier.
    value : int
        0 to 2^31 − 1, so that C's ``enum`` holds it.
    description : str
        One line.

    Raises
    ------
    TypeError, ValueError
        An attribute breaks its rule.
    """

    name: str
    value: int
    description: str

    def __post_init__(self) -> None:
        _check_name("enumerator", self.name)
        _check_integer(f"value of enumerator {self.name}", self.value, 0, 2**31 - 1)
        _check_description(f"enumerator {self.name}", self.description)


def _check_enumerators(owner: str, enumerators: tuple[Enumerator, ...], width: int) -> None:
    _check_tuple(f"enumerators of {owner}", enumerators, Enumerator, 0)
    _check_distinct(f"names of enumerators of {owner}", (e.name for e in enumerators))
    _check_distinct(f"values of enumerators of {owner}", (e.value for e in enumerators))
    for enumerator in enumerators:
        _check_integer(f"value of enumerator {enumerator.name}", enumerator.value, 0, 2**width - 1)


@dataclass(frozen=True)
class Field:
    """Bits of a register.

    Attributes
    ----------
    name : str
        Lower-case C identifier.
    position : int
        Lowest bit, 0 to 31.
    width : int
        Bits, 1 to 32 − ``position``.
    access : {"ro", "rw", "w1c", "w1p"}
        See :data:`ACCESSES`. For fields of several bits the last two apply to each bit.
    description : str
        One line.
    reset : int
        Value after reset; 0 for "ro" and "w1p", which hold nothing.
    enumerators : tuple of Enumerator
        Names of values, if they have any.

    Raises
    ------
    TypeError, ValueError
        An attribute breaks its rule.

    Examples
    --------
    >>> Field("mode", position=4, width=2, access="rw", description="mode of the next run", reset=1).mask
    48
    """

    name: str
    position: int
    width: int
    access: Access
    description: str
    reset: int = 0
    enumerators: tuple[Enumerator, ...] = ()

    def __post_init__(self) -> None:
        _check_name("field", self.name)
        _check_integer(f"position of field {self.name}", self.position, 0, _BITS - 1)
        _check_integer(f"width of field {self.name}", self.width, 1, _BITS - self.position)
        if self.access not in ACCESSES:
            raise ValueError(f"access of field {self.name} must be one of {', '.join(ACCESSES)}, not {self.access!r}")
        _check_description(f"field {self.name}", self.description)
        _check_integer(f"reset of field {self.name}", self.reset, 0, 2**self.width - 1)
        if self.reset and self.access in ("ro", "w1p"):
            raise ValueError(f"reset of field {self.name} must be 0 for {self.access}, not {self.reset}")
        _check_enumerators(f"field {self.name}", self.enumerators, self.width)

    @property
    def mask(self) -> int:
        """Ones in the field's bits of the register."""
        return (2**self.width - 1) << self.position


@dataclass(frozen=True)
class Register:
    """A word of 32 bits.

    Attributes
    ----------
    name : str
        Lower-case C identifier.
    offset : int
        Bytes from the start of the map, a multiple of 4 below 2^32.
    description : str
        One line.
    fields : tuple of Field
        At least one; bits of no field read as 0 and ignore writes.

    Raises
    ------
    TypeError, ValueError
        An attribute breaks its rule, two fields overlap or have one name.
    """

    name: str
    offset: int
    description: str
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        _check_name("register", self.name)
        _check_integer(f"offset of register {self.name}", self.offset, 0, 2**32 - REGISTER_BYTES)
        if self.offset % REGISTER_BYTES:
            raise ValueError(
                f"offset of register {self.name} must be a multiple of {REGISTER_BYTES}, not {self.offset}"
            )
        _check_description(f"register {self.name}", self.description)
        _check_tuple(f"fields of register {self.name}", self.fields, Field, 1)
        _check_distinct(f"names of fields of register {self.name}", (field.name for field in self.fields))
        for first, second in zip(self.by_position, self.by_position[1:], strict=False):
            if first.mask & second.mask:
                raise ValueError(
                    f"position of field {second.name} of register {self.name} must be above {first.name}, "
                    f"at least {first.position + first.width}, not {second.position}"
                )

    @property
    def by_position(self) -> tuple[Field, ...]:
        """Fields, lowest first."""
        return tuple(sorted(self.fields, key=lambda field: field.position))

    @property
    def reset(self) -> int:
        """Word after reset, "ro" fields as 0."""
        return sum(field.reset << field.position for field in self.fields)

    @property
    def writable(self) -> bool:
        """Whether any field is not "ro"."""
        return any(field.access != "ro" for field in self.fields)

    def __getitem__(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        names = ", ".join(field.name for field in self.fields)
        raise KeyError(f"field of register {self.name} must be one of {names}, not {name!r}")

    def pack(self, **values: int) -> int:
        """Return the word with these fields, the others 0.

        Raises
        ------
        KeyError
            There is no such field.
        TypeError, ValueError
            A value does not fit.

        Examples
        --------
        >>> low, high = (Field(n, p, 4, "rw", "half") for n, p in (("low", 0), ("high", 4)))
        >>> Register("byte", 0, "two halves", (low, high)).pack(high=3, low=1)
        49
        """
        word = 0
        for name, value in values.items():
            _check_integer(f"value of field {name}", value, 0, 2 ** self[name].width - 1)
            word |= value << self[name].position
        return word

    def unpack(self, word: int) -> dict[str, int]:
        """Return every field's value in a word of 32 bits, by name.

        Raises
        ------
        TypeError, ValueError
            ``word`` is no integer of 32 bits.
        """
        _check_integer("word", word, 0, 2**_BITS - 1)
        return {field.name: (word & field.mask) >> field.position for field in self.fields}


@dataclass(frozen=True)
class Member:
    """Bits of a structure in memory: inside a word of 32 bits, or such words as a whole, one or two.

    Attributes
    ----------
    name : str
        Lower-case C identifier.
    position : int
        Lowest bit, counted from the structure's first byte, little-endian.
    width : int
        Bits: 1 to 32 that do not cross a multiple of 32, or 64 from such a multiple on.
    description : str
        One line.
    enumerators : tuple of Enumerator
        Names of values, if they have any.

    Raises
    ------
    TypeError, ValueError
        An attribute breaks its rule.

    Examples
    --------
    >>> tile_n = Member("tile_n", 144, 16, "vectors of weights")
    >>> tile_n.offset, tile_n.shift, hex(tile_n.mask)
    (16, 16, '0xffff0000')
    """

    name: str
    position: int
    width: int
    description: str
    enumerators: tuple[Enumerator, ...] = ()

    def __post_init__(self) -> None:
        _check_name("member", self.name)
        _check_integer(f"position of member {self.name}", self.position, 0, 2**32 - 1)
        most = 2 * _BITS if self.shift == 0 else _BITS - self.shift
        _check_integer(f"width of member {self.name}", self.width, 1, most)
        if _BITS < self.width < 2 * _BITS:
            raise ValueError(f"width of member {self.name} must be {2 * _BITS} or at most {_BITS}, not {self.width}")
        _check_description(f"member {self.name}", self.description)
        _check_enumerators(f"member {self.name}", self.enumerators, self.width)

    @property
    def offset(self) -> int:
        """Byte at which the word begins that it is in."""
        return self.position // _BITS * REGISTER_BYTES

    @property
    def shift(self) -> int:
        """Lowest bit in that word."""
        return self.position % _BITS

    @property
    def mask(self) -> int:
        """Ones in the member's bits of that word."""
        return (2**self.width - 1) << self.shift


@dataclass(frozen=True)
class Structure:
    """What lies in memory for the hardware to read or write, in places one behind the other.

    Attributes
    ----------
    name : str
        Lower-case C identifier.
    start : int
        Byte of a place at which it begins, a multiple of 4.
    size : int
        Bytes, a multiple of 4.
    pitch : int
        Bytes from a place to the next.
    description : str
        One line.
    members : tuple of Member
        At least one; bits of no member are 0.

    Raises
    ------
    TypeError, ValueError
        An attribute breaks its rule, it is longer than a place, or two members overlap or have one name.
    """

    name: str
    start: int
    size: int
    pitch: int
    description: str
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        _check_name("structure", self.name)
        _check_integer(f"pitch of structure {self.name}", self.pitch, REGISTER_BYTES, 2**31 - 1)
        _check_integer(f"size of structure {self.name}", self.size, REGISTER_BYTES, self.pitch)
        _check_integer(f"start of structure {self.name}", self.start, 0, self.pitch - self.size)
        for name in ("start", "size"):
            if getattr(self, name) % REGISTER_BYTES:
                raise ValueError(
                    f"{name} of structure {self.name} must be a multiple of {REGISTER_BYTES}, not {getattr(self, name)}"
                )
        _check_description(f"structure {self.name}", self.description)
        _check_tuple(f"members of structure {self.name}", self.members, Member, 1)
        _check_distinct(f"names of members of structure {self.name}", (member.name for member in self.members))
        end = 0
        for member in self.by_position:
            if not end <= member.position <= 8 * self.size - member.width:
                raise ValueError(
                    f"position of member {member.name} of structure {self.name} must be from {end} to "
                    f"{8 * self.size - member.width}, not {member.position}"
                )
            end = member.position + member.width

    @property
    def by_position(self) -> tuple[Member, ...]:
        """Members, lowest first."""
        return tuple(sorted(self.members, key=lambda member: member.position))


@dataclass(frozen=True)
class RegisterMap:
    """The table of all registers, and of structures in memory.

    Attributes
    ----------
    name : str
        Lower-case C identifier; prefix of all C names, and name of emitted files.
    description : str
        One line.
    registers : tuple of Register
        At least one, in any order.
    structures : tuple of Structure
        What the hardware reads and writes in memory, none by default.

    Raises
    ------
    TypeError, ValueError
        An attribute breaks its rule, two registers share offset or name, or two parts would have one name in C or as signals.
    """

    name: str
    description: str
    registers: tuple[Register, ...]
    structures: tuple[Structure, ...] = ()

    def __post_init__(self) -> None:
        _check_name("register map", self.name)
        _check_description(f"register map {self.name}", self.description)
        _check_tuple(f"registers of map {self.name}", self.registers, Register, 1)
        _check_distinct(f"names of registers of map {self.name}", (register.name for register in self.registers))
        _check_distinct(f"offsets of registers of map {self.name}", (register.offset for register in self.registers))
        _check_tuple(f"structures of map {self.name}", self.structures, Structure, 0)
        names = [self._guard]
        for register in self.registers:
            names += [name for name, _ in _register_constants(self, register)]
            for field in register.fields:
                names += [name for name, _ in _field_constants(self, register, field)]
                names += [_enumerator_name(self, register, field, e) for e in field.enumerators]
        for structure in self.structures:
            names += [name for name, _ in _structure_constants(self, structure)]
            for member in structure.members:
                names += [name for name, _ in _member_constants(self, structure, member)]
                names += [_enumerator_name(self, structure, member, e) for e in member.enumerators]
        _check_distinct(f"C names of map {self.name}", names)
        signals = [
            name for register in self.registers for field in register.fields for name in _signals(register, field)
        ]
        _check_distinct(f"signals of map {self.name}", signals)

    @property
    def by_offset(self) -> tuple[Register, ...]:
        """Registers, lowest offset first."""
        return tuple(sorted(self.registers, key=lambda register: register.offset))

    @property
    def address_width(self) -> int:
        """Least bits of a byte address that reach every register, at least 2."""
        return (self.by_offset[-1].offset + REGISTER_BYTES - 1).bit_length()

    @property
    def _guard(self) -> str:
        return f"{self.name}_registers_h".upper()

    def __getitem__(self, name: str) -> Register:
        for register in self.registers:
            if register.name == name:
                return register
        names = ", ".join(register.name for register in self.registers)
        raise KeyError(f"register of map {self.name} must be one of {names}, not {name!r}")


def _signals(register: Register, field: Field) -> tuple[str, ...]:
    """Return names of the hardware signals of a field: its value, and for "w1c" what sets it."""
    name = f"{register.name}_{field.name}"
    return (name, f"{name}_set") if field.access == "w1c" else (name,)


def _register_constants(table: RegisterMap, register: Register) -> list[tuple[str, str]]:
    prefix = f"{table.name}_{register.name}".upper()
    offset = (f"{prefix}_OFFSET", f"0x{register.offset:08X}u")
    # What hardware alone decides has no value after reset.
    return [offset, (f"{prefix}_RESET", f"0x{register.reset:08X}u")] if register.writable else [offset]


def _field_constants(table: RegisterMap, register: Register, field: Field) -> list[tuple[str, str]]:
    prefix = f"{table.name}_{register.name}_{field.name}".upper()
    return [(f"{prefix}_SHIFT", f"{field.position}"), (f"{prefix}_MASK", f"0x{field.mask:08X}u")]


def _structure_constants(table: RegisterMap, structure: Structure) -> list[tuple[str, str]]:
    prefix = f"{table.name}_{structure.name}".upper()
    return [(f"{prefix}_{name.upper()}", f"{getattr(structure, name)}u") for name in ("start", "size", "pitch")]


def _member_constants(table: RegisterMap, structure: Structure, member: Member) -> list[tuple[str, str]]:
    prefix = f"{table.name}_{structure.name}_{member.name}".upper()
    mask = f"0x{member.mask:08X}u" if member.width <= _BITS else f"0x{member.mask:016X}ull"
    return [(f"{prefix}_OFFSET", f"{member.offset}u"), (f"{prefix}_SHIFT", f"{member.shift}"), (f"{prefix}_MASK", mask)]


def _enumerator_name(
    table: RegisterMap, owner: Register | Structure, field: Field | Member, enumerator: Enumerator
) -> str:
    return f"{table.name}_{owner.name}_{field.name}_{enumerator.name}".upper()


def _enum(table: RegisterMap, owner: Register | Structure, field: Field | Member) -> list[str]:
    """Return the lines of the ``enum`` of a field's values, none if they have no names."""
    if not field.enumerators:
        return []
    parts = [(f"{_enumerator_name(table, owner, field, e)} = {e.value}", e.description) for e in field.enumerators]
    last = len(parts) - 1
    lines = [f"    {part}{',' * (n < last)} /* {text} */" for n, (part, text) in enumerate(parts)]
    return [f"enum {table.name}_{owner.name}_{field.name} {{", *lines, "};"]


def to_c_header(table: RegisterMap) -> str:
    """Return a C99 header: offsets, reset values of registers that can be written, masks and shifts, one ``enum`` for each field with names for its values.

    ``(word & MASK) >> SHIFT`` is a field's value; names are ``<MAP>_<REGISTER>_<FIELD>_…``. Members of structures are ``<MAP>_<STRUCTURE>_<MEMBER>_…``;
    their word, of 32 bits or, if the mask is longer, 64, is ``OFFSET`` bytes from where the structure begins, ``START`` bytes into its place.
    """
    lines = [
        f"/* {table.name}: {table.description} */",
        "/* Generated from the register map; do not edit. */",
        f"#ifndef {table._guard}",
        f"#define {table._guard}",
    ]
    for register in table.by_offset:
        lines += ["", f"/* {register.name}: {register.description} */"]
        lines += [f"#define {name} {value}" for name, value in _register_constants(table, register)]
        for field in register.by_position:
            lines.append(f"/* {register.name}.{field.name} ({field.access}): {field.description} */")
            lines += [f"#define {name} {value}" for name, value in _field_constants(table, register, field)]
            lines += _enum(table, register, field)
    for structure in table.structures:
        lines += ["", f"/* {structure.name} (in memory): {structure.description} */"]
        lines += [f"#define {name} {value}" for name, value in _structure_constants(table, structure)]
        for member in structure.by_position:
            lines.append(f"/* {structure.name}.{member.name}: {member.description} */")
            lines += [f"#define {name} {value}" for name, value in _member_constants(table, structure, member)]
            lines += _enum(table, structure, member)
    return "\n".join([*lines, "", f"#endif /* {table._guard} */", ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def to_markdown(table: RegisterMap) -> str:
    """Return a document: a table of registers, then one of fields for each register."""
    lines = [f"# Registers of `{table.name}`", "", _cell(table.description), ""]
    lines += ["| offset | register | reset | what |", "|---|---|---|---|"]
    lines += [
        f"| 0x{register.offset:03X} | `{register.name}` | {reset} | {_cell(register.description)} |"
        for register in table.by_offset
        for reset in [f"0x{register.reset:08X}" if register.writable else "–"]
    ]
    kinds = {field.access for register in table.registers for field in register.fields}
    lines += ["", "Each register has 32 bits; bits without a field read as 0 and ignore writes.", ""]
    lines += [f"* `{access}`: {meaning}" for access, meaning in ACCESSES.items() if access in kinds]
    for register in table.by_offset:
        lines += ["", f"## `{register.name}`, 0x{register.offset:03X}", "", _cell(register.description), ""]
        lines += ["| bits | field | access | reset | what |", "|---|---|---|---|---|"]
        for field in reversed(register.by_position):
            top = field.position + field.width - 1
            bits = f"{top}:{field.position}" if field.width > 1 else f"{top}"
            names = "; ".join(f"{e.value} = `{e.name}`: {e.description}" for e in field.enumerators)
            text = _cell(f"{field.description}. {names}" if names else field.description)
            reset = "" if field.access in ("ro", "w1p") else f"0x{field.reset:X}"
            lines.append(f"| {bits} | `{field.name}` | {field.access} | {reset} | {text} |")
    for structure in table.structures:
        lines += ["", f"## `{structure.name}`, in memory", "", _cell(structure.description), ""]
        lines += [f"{structure.size} bytes from byte {structure.start} on of every {structure.pitch}, little-endian."]
        lines += ["", "| bytes | bits | member | what |", "|---|---|---|---|"]
        for member in structure.by_position:
            size = REGISTER_BYTES if member.width <= _BITS else 2 * REGISTER_BYTES
            top = member.shift + member.width - 1
            bits = f"{top}:{member.shift}" if member.width > 1 else f"{top}"
            names = "; ".join(f"{e.value} = `{e.name}`: {e.description}" for e in member.enumerators)
            text = _cell(f"{member.description}. {names}" if names else member.description)
            lines.append(f"| {member.offset}–{member.offset + size - 1} | {bits} | `{member.name}` | {text} |")
    return "\n".join([*lines, ""])


_Bits = TypeVar("_Bits", Field, Member)


def to_json(table: RegisterMap) -> str:
    """Return the table as JSON, with the attributes' names as keys; :func:`from_json` reads it."""
    return json.dumps(dataclasses.asdict(table), indent=2, ensure_ascii=False) + "\n"


def from_json(text: str) -> RegisterMap:
    """Return the table that :func:`to_json` wrote.

    Raises
    ------
    TypeError, ValueError
        The text is no JSON, a key is missing or unknown, or the table breaks a rule.
    """
    raw = _entry(RegisterMap, json.loads(text))
    registers = []
    for entry in _entries("registers", raw["registers"]):
        register = _entry(Register, entry)
        fields = tuple(_named_bits(Field, part) for part in _entries("fields", register["fields"]))
        registers.append(Register(**{**register, "fields": fields}))
    structures = []
    for entry in _entries("structures", raw["structures"]):
        structure = _entry(Structure, entry)
        members = tuple(_named_bits(Member, part) for part in _entries("members", structure["members"]))
        structures.append(Structure(**{**structure, "members": members}))
    return RegisterMap(**{**raw, "registers": tuple(registers), "structures": tuple(structures)})


def _named_bits(kind: type[_Bits], value: Any) -> _Bits:
    part = _entry(kind, value)
    values = (Enumerator(**_entry(Enumerator, e)) for e in _entries("enumerators", part["enumerators"]))
    return kind(**{**part, "enumerators": tuple(values)})


def _entry(kind: type, value: Any) -> Mapping[str, Any]:
    keys = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(value, dict) or set(value) != set(keys):
        given = ", ".join(sorted(value)) if isinstance(value, dict) else repr(value)
        raise ValueError(f"{kind.__name__} must be an object with keys {', '.join(keys)}, not {given}")
    return value


def _entries(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, not {value!r}")
    return value


def emit(table: RegisterMap, folder: Path) -> tuple[Path, Path, Path]:
    """Write ``<name>_registers.md``, ``.h`` and ``.json`` into a folder, which is made if need be, and return their paths.

    Raises
    ------
    OSError
        A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"md": to_markdown(table), "h": to_c_header(table), "json": to_json(table)}
    paths = {suffix: folder / f"{table.name}_registers.{suffix}" for suffix in texts}
    for suffix, text in texts.items():
        paths[suffix].write_text(text, encoding="utf-8", newline="\n")
    return paths["md"], paths["h"], paths["json"]
