"""Register maps: rules, and what the emitters write, read back by a C compiler and a JSON reader."""

import json
import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.registers import (
    ACCESSES,
    Enumerator,
    Field,
    Member,
    Register,
    RegisterMap,
    Structure,
    emit,
    from_json,
    to_c_header,
    to_json,
    to_markdown,
)
from tests.demo_registers import DEMO

GCC = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]


def field(name="f", position=0, width=1, access="rw", description="what", **options):
    return Field(name, position, width, access, description, **options)


def register(name="r", offset=0, fields=None):
    return Register(name, offset, "what", (field(),) if fields is None else fields)


def table(*registers, name="m"):
    return RegisterMap(name, "what", registers)


def member(name="f", position=0, width=1, **options):
    return Member(name, position, width, "what", **options)


def structure(*members, name="s", start=0, size=8, pitch=16):
    return Structure(name, start, size, pitch, "what", members or (member(),))


NAME_RULE = "must be a C identifier of lower-case words joined by single _, not"
BROKEN = {
    "upper case": (lambda: field("Mode"), f"name of field {NAME_RULE} 'Mode'"),
    "two underscores": (lambda: register("a__b"), f"name of register {NAME_RULE} 'a__b'"),
    "digit first": (lambda: table(register(), name="2d"), f"name of register map {NAME_RULE} '2d'"),
    "no name": (lambda: Enumerator("", 0, "what"), f"name of enumerator {NAME_RULE} ''"),
    "position": (lambda: field(position=32), "position of field f must be 0 to 31, not 32"),
    "width": (lambda: field(position=30, width=3), "width of field f must be 1 to 2, not 3"),
    "no width": (lambda: field(width=0), "width of field f must be 1 to 32, not 0"),
    "access": (lambda: field(access="wo"), "access of field f must be one of ro, rw, w1c, w1p, not 'wo'"),
    "two lines": (
        lambda: field(description="a\nb"),
        "description of field f must be one printable line without /* or */, not 'a\\nb'",
    ),
    "end of comment": (
        lambda: field(description="a */ b"),
        "description of field f must be one printable line without /* or */, not 'a */ b'",
    ),
    "reset": (lambda: field(width=2, reset=4), "reset of field f must be 0 to 3, not 4"),
    "reset of ro": (lambda: field(access="ro", reset=1), "reset of field f must be 0 for ro, not 1"),
    "reset of w1p": (lambda: field(access="w1p", reset=1), "reset of field f must be 0 for w1p, not 1"),
    "value": (
        lambda: field(width=2, enumerators=(Enumerator("four", 4, "what"),)),
        "value of enumerator four must be 0 to 3, not 4",
    ),
    "value for C": (
        lambda: Enumerator("e", 2**31, "what"),
        "value of enumerator e must be 0 to 2147483647, not 2147483648",
    ),
    "value twice": (
        lambda: field(width=2, enumerators=(Enumerator("a", 1, "what"), Enumerator("b", 1, "what"))),
        "values of enumerators of field f must be distinct, not 1 twice",
    ),
    "enumerator twice": (
        lambda: field(width=2, enumerators=(Enumerator("a", 1, "what"), Enumerator("a", 2, "what"))),
        "names of enumerators of field f must be distinct, not 'a' twice",
    ),
    "offset": (lambda: register(offset=6), "offset of register r must be a multiple of 4, not 6"),
    "offset too high": (
        lambda: register(offset=2**32),
        "offset of register r must be 0 to 4294967292, not 4294967296",
    ),
    "negative offset": (lambda: register(offset=-4), "offset of register r must be 0 to 4294967292, not -4"),
    "no field": (lambda: register(fields=()), "fields of register r must have at least 1 Field, not 0"),
    "overlap": (
        lambda: register(fields=(field("b", 3, 2), field("a", 1, 3))),
        "position of field b of register r must be above a, at least 4, not 3",
    ),
    "field twice": (
        lambda: register(fields=(field("a"), field("a", 1))),
        "names of fields of register r must be distinct, not 'a' twice",
    ),
    "no register": (lambda: table(), "registers of map m must have at least 1 Register, not 0"),
    "register twice": (
        lambda: table(register(), register(offset=4)),
        "names of registers of map m must be distinct, not 'r' twice",
    ),
    "offset twice": (
        lambda: table(register("a", 4), register("b", 4)),
        "offsets of registers of map m must be distinct, not 4 twice",
    ),
    "one name in C": (
        lambda: table(
            register("a", 0, (field("b", width=2, enumerators=(Enumerator("offset", 0, "what"),)),)), register("a_b", 4)
        ),
        "C names of map m must be distinct, not 'M_A_B_OFFSET' twice",
    ),
    "member across words": (lambda: member(position=24, width=9), "width of member f must be 1 to 8, not 9"),
    "odd long member": (lambda: member(width=48), "width of member f must be 64 or at most 32, not 48"),
    "value of a member": (
        lambda: member(width=2, enumerators=(Enumerator("four", 4, "what"),)),
        "value of enumerator four must be 0 to 3, not 4",
    ),
    "structure beyond its place": (lambda: structure(start=12), "start of structure s must be 0 to 8, not 12"),
    "structure longer than a place": (lambda: structure(size=20), "size of structure s must be 4 to 16, not 20"),
    "start of a structure": (lambda: structure(start=2), "start of structure s must be a multiple of 4, not 2"),
    "size of a structure": (lambda: structure(size=6), "size of structure s must be a multiple of 4, not 6"),
    "member beyond its structure": (
        lambda: structure(member(position=32, width=64)),
        "position of member f of structure s must be from 0 to 0, not 32",
    ),
    "members overlap": (
        lambda: structure(member("b", 3, 2), member("a", 1, 3)),
        "position of member b of structure s must be from 4 to 62, not 3",
    ),
    "member twice": (
        lambda: structure(member("a"), member("a", 1)),
        "names of members of structure s must be distinct, not 'a' twice",
    ),
    "structure named like a register": (
        lambda: RegisterMap("m", "what", (register("s", 0, (field("start"),)),), (structure(member("start")),)),
        "C names of map m must be distinct, not 'M_S_START_SHIFT' twice",
    ),
    "one signal": (
        lambda: table(register("a", 0, (field("b", access="w1c"), field("b_set", 1)))),
        "signals of map m must be distinct, not 'a_b_set' twice",
    ),
}
WRONG_KIND = {
    "position": (lambda: field(position="0"), "position of field f must be an integer, not '0'"),
    "width": (lambda: field(width=True), "width of field f must be an integer, not True"),
    "offset": (lambda: register(offset=4.0), "offset of register r must be an integer, not 4.0"),
    "fields": (lambda: register(fields=["f"]), "fields of register r must be a tuple of Field, not ['f']"),
    "registers": (
        lambda: RegisterMap("m", "what", ("r",)),
        "registers of map m must be a tuple of Register, not ('r',)",
    ),
    "structures": (
        lambda: RegisterMap("m", "what", (register(),), ("s",)),
        "structures of map m must be a tuple of Structure, not ('s',)",
    ),
    "members": (
        lambda: Structure("s", 0, 4, 4, "what", [member()]),
        "members of structure s must be a tuple of Member, not [Member(name='f', position=0, width=1, description='what', enumerators=())]",
    ),
    "enumerators": (
        lambda: field(enumerators=(1,)),
        "enumerators of field f must be a tuple of Enumerator, not (1,)",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_rules_name_part_rule_and_value(rule):
    make, message = BROKEN[rule]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


@pytest.mark.parametrize("kind", WRONG_KIND)
def test_wrong_kinds_name_part_and_value(kind):
    make, message = WRONG_KIND[kind]
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        make()


def test_one_field_name_in_two_registers_is_fine():
    assert table(register("a", 0), register("b", 4)).registers[1].fields[0].name == "f"


def test_look_up_pack_and_unpack():
    control = DEMO["control"]
    assert control.pack(mode=5, start=1) == 0x141
    assert control.unpack(0xFFFF_FEBE) == {"start": 0, "mode": 2, "kick": 3}
    assert (DEMO.address_width, table(register()).address_width) == (6, 2)
    assert (control.reset, control.writable, DEMO["identity"].writable) == (0x140, True, False)
    with pytest.raises(
        KeyError, match="register of map demo must be one of identity, control, status, mask, address, not 'x'"
    ):
        DEMO["x"]
    with pytest.raises(KeyError, match="field of register control must be one of start, mode, kick, not 'x'"):
        control.pack(x=1)
    with pytest.raises(ValueError, match="value of field mode must be 0 to 7, not 8"):
        control.pack(mode=8)
    with pytest.raises(ValueError, match="word must be 0 to 4294967295, not -1"):
        control.unpack(-1)


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,3}(_[a-z0-9]{1,3})?", fullmatch=True)
TEXTS = st.text("abc XYZ|/*?\\<>\"'%µ→", min_size=1, max_size=20).filter(
    lambda text: text.strip() and "/*" not in text and "*/" not in text
)


@st.composite
def fields(draw):
    result, position = [], 0
    for name in draw(st.lists(NAMES, min_size=1, max_size=5, unique=True)):
        position += draw(st.sampled_from((0, 0, 1, 5)))
        if position > 31:
            break
        width = draw(st.integers(1, 32 - position))
        access = draw(st.sampled_from(list(ACCESSES)))
        reset = draw(st.integers(0, 2**width - 1)) if access in ("rw", "w1c") else 0
        numbers = draw(st.lists(st.integers(0, min(2**width, 2**31) - 1), max_size=4, unique=True))
        labels = draw(st.lists(NAMES, min_size=len(numbers), max_size=len(numbers), unique=True))
        named = tuple(Enumerator(label, number, draw(TEXTS)) for label, number in zip(labels, numbers, strict=True))
        result.append(Field(name, position, width, access, draw(TEXTS), reset, named))
        position += width
    return tuple(draw(st.permutations(result)))


@st.composite
def structures(draw):
    start, size = (4 * draw(st.integers(least, 8)) for least in (0, 1))
    members, position = [], 0
    for name in draw(st.lists(NAMES, min_size=1, max_size=6, unique=True)):
        position += draw(st.integers(0, 20))
        room = 64 if position % 32 == 0 else 32 - position % 32
        width = draw(st.integers(1, room))
        width = 32 if 32 < width < 64 else width
        if position + width > 8 * size:
            break
        named = (Enumerator(draw(NAMES), 1, draw(TEXTS)),) if draw(st.booleans()) else ()
        members.append(Member(name, position, width, draw(TEXTS), named))
        position += width
    members = members or [Member("only", 0, 8, "what")]
    pitch = start + size + draw(st.integers(0, 9))
    return Structure(draw(NAMES), start, size, pitch, draw(TEXTS), tuple(draw(st.permutations(members))))


@st.composite
def maps(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    count = len(names)
    words = draw(st.lists(st.integers(0, 31) | st.integers(0, 2**30 - 1), min_size=count, max_size=count, unique=True))
    registers = [Register(name, 4 * word, draw(TEXTS), draw(fields())) for name, word in zip(names, words, strict=True)]
    try:
        return RegisterMap(draw(NAMES), draw(TEXTS), tuple(registers), tuple(draw(st.lists(structures(), max_size=2))))
    except ValueError as error:
        # Names may meet by chance.
        if "must be distinct" not in str(error):
            raise
        return DEMO


def constants(given):
    """Return every C name with its value, from the table alone."""
    expected = {}
    for r in given.registers:
        prefix = f"{given.name}_{r.name}".upper()
        expected[f"{prefix}_OFFSET"] = r.offset
        if any(f.access != "ro" for f in r.fields):
            expected[f"{prefix}_RESET"] = sum(f.reset * 2**f.position for f in r.fields)
        for f in r.fields:
            name = f"{prefix}_{f.name.upper()}"
            expected[f"{name}_SHIFT"] = f.position
            expected[f"{name}_MASK"] = sum(2**bit for bit in range(f.position, f.position + f.width))
            expected |= {f"{name}_{e.name.upper()}": e.value for e in f.enumerators}
    for s in given.structures:
        prefix = f"{given.name}_{s.name}".upper()
        expected |= {f"{prefix}_START": s.start, f"{prefix}_SIZE": s.size, f"{prefix}_PITCH": s.pitch}
        for f in s.members:
            name = f"{prefix}_{f.name.upper()}"
            bits = range(f.position, f.position + f.width)
            expected[f"{name}_OFFSET"] = 4 * (f.position // 32)
            expected[f"{name}_SHIFT"] = f.position % 32
            expected[f"{name}_MASK"] = sum(2 ** (bit - 32 * (f.position // 32)) for bit in bits)
            expected |= {f"{name}_{e.name.upper()}": e.value for e in f.enumerators}
    return expected


def evaluated(header, names, tags, folder):
    """Return what a C program that includes the header twice prints for each name."""
    prints = "\n".join(f'    printf("%s %lu\\n", "{name}", (unsigned long)({name}));' for name in names)
    typed = "\n".join(f"    {{ enum {tag} value; memset(&value, 0, sizeof value); (void)value; }}" for tag in tags)
    (folder / "header.h").write_text(header, encoding="utf-8")
    (folder / "main.c").write_text(
        '#include <stdio.h>\n#include <string.h>\n#include "header.h"\n#include "header.h"\n'
        f"int main(void) {{\n{typed}\n{prints}\n    return 0;\n}}\n"
    )
    compiled = subprocess.run(
        [*GCC, "-o", "main", "main.c"], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([str(folder / "main")], capture_output=True, text=True, timeout=60, check=True)
    return {name: int(value) for name, value in (line.split() for line in done.stdout.splitlines())}


@settings(max_examples=15, deadline=None)
@given(maps())
def test_a_c_program_sees_the_table(tmp_path_factory, given):
    header = to_c_header(given)
    expected = constants(given)
    assert sorted(expected) == sorted(set(re.findall(r"^(?:#define |    )(\w+) (?:=|0x|\d)", header, re.MULTILINE)))
    owners = [(r.name, r.fields) for r in given.registers] + [(s.name, s.members) for s in given.structures]
    tags = [f"{given.name}_{name}_{f.name}" for name, fields in owners for f in fields if f.enumerators]
    assert evaluated(header, expected, tags, tmp_path_factory.mktemp("c")) == expected


@settings(max_examples=50, deadline=None)
@given(maps())
def test_texts_are_deterministic_and_json_comes_back(given):
    assert from_json(to_json(given)) == given
    for text in (to_json(given), to_c_header(given), to_markdown(given)):
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
    shuffled = RegisterMap(given.name, given.description, given.registers[::-1], given.structures)
    assert to_c_header(shuffled) == to_c_header(given)
    assert to_markdown(shuffled) == to_markdown(given)


@settings(max_examples=50, deadline=None)
@given(maps())
def test_markdown_has_a_row_of_its_own_for_every_register_and_field(given):
    text = to_markdown(given)
    lines = text.splitlines()
    if given.structures:
        memory = text.index(f"\n## `{given.structures[0].name}`, in memory\n")
        lines = text[:memory].splitlines()
        placed = re.findall(r"^\| (\d+)–\d+ \| \S+ \| `(\w+)` \|", text[memory:], re.MULTILINE)
        assert placed == [(str(f.position // 32 * 4), f.name) for s in given.structures for f in s.by_position]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    assert {len(row) for row in rows} <= {4, 5}
    registers = [row for row in rows if len(row) == 4][2:]
    assert [int(row[0], 16) for row in registers] == sorted(r.offset for r in given.registers)
    listed = [row[1].strip(" `") for row in rows if len(row) == 5 and "`" in row[1]]
    expected = [f.name for r in sorted(given.registers, key=lambda r: r.offset) for f in reversed(r.by_position)]
    assert listed == expected


def test_demonstration_as_text():
    assert "| 0x004 | `control` | 0x00000140 | what to do |" in to_markdown(DEMO)
    row = "| 8:6 | `mode` | rw | 0x5 | how to run, across two bytes. 0 = `slow`: saves power; 1 = `fast`: a \\| b; 5 = `idle`: does nothing |"
    assert row in to_markdown(DEMO)
    assert "* `w1c`: set by hardware; writing 1 clears, and setting wins" in to_markdown(DEMO)
    assert "#define DEMO_CONTROL_MODE_MASK 0x000001C0u\nenum demo_control_mode {\n" in to_c_header(DEMO)
    assert json.loads(to_json(DEMO))["registers"][1]["fields"][1]["enumerators"][2]["value"] == 5


def changed(key, value):
    raw = json.loads(to_json(DEMO))
    raw["registers"][1][key] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "RegisterMap must be an object with keys name, description, registers, structures, not []"),
        (changed("extra", 1), "not description, extra, fields, name, offset"),
        (changed("fields", {}), "fields must be a list, not {}"),
        (changed("offset", 3), "offset of register control must be a multiple of 4, not 3"),
        ("{", "Expecting property name"),
    ],
    ids=["list", "extra key", "no list", "rule", "syntax"],
)
def test_bad_json_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_json(text)


def test_emit_writes_three_files(tmp_path):
    paths = emit(DEMO, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["demo_registers.md", "demo_registers.h", "demo_registers.json"]
    assert [path.read_bytes().decode() for path in paths] == [to_markdown(DEMO), to_c_header(DEMO), to_json(DEMO)]
