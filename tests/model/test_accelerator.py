"""Accelerator model: parameters, descriptors byte by byte, what the check says of them, records and registers."""

import dataclasses
import json
import random
import struct
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.accelerator import (
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    MEANINGS,
    PITCH,
    POST,
    POST_ARRAYS,
    POST_BYTES,
    PPU_REGISTERS,
    REGISTERS,
    AcceleratorConfig,
    Descriptor,
    ErrorCode,
    Format,
    Mode,
    Operand,
    PostBlock,
    Record,
    check,
    check_post,
    descriptor_of,
    policy_words,
    registers_of,
)
from model.policy import PolicyConfig
from model.registers import emit, to_json
from model.tile_engine import EngineConfig

CONFIG = AcceleratorConfig()
SMALL = AcceleratorConfig(refinement="none", accumulators=16, activation_depth=32, weight_depth=16, address_width=20)
CONFIGS = {
    "default": CONFIG,
    "small": SMALL,
    "64 lanes": AcceleratorConfig(lanes=64, refinement="inplace", address_width=64),
}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"lanes": 96, "data_width": 256}, "lanes of an accelerator must be a power of two, not 96"),
        ({"lanes": 48}, "lanes must be a positive multiple of 32, not 48"),
        ({"data_width": 32}, "data_width must be at least 64 for 32 lanes, not 32"),
        ({"lanes": 128, "data_width": 128}, "data_width must be at least 256 for 128 lanes, not 128"),
        ({"data_width": 96}, "data_width must be a power of two from 32 to 1024, not 96"),
        ({"data_width": 2048}, "data_width must be a power of two from 32 to 1024, not 2048"),
        ({"address_width": 12}, "address_width must be from 13 to 64, not 12"),
        ({"address_width": 65}, "address_width must be from 13 to 64, not 65"),
        ({"id_width": 0}, "id_width must be from 1 to 32, not 0"),
        ({"max_burst": 3}, "max_burst must be a power of two from 1 to 256, not 3"),
        ({"outstanding": 65}, "outstanding must be from 1 to 64, not 65"),
        ({"rows": 256}, "rows of an accelerator must be at most 255, not 256"),
        ({"columns": 256}, "columns of an accelerator must be at most 255, not 256"),
        ({"rows": 0}, "rows must be at least 1, not 0"),
        ({"weight_depth": 3}, "weight_depth must be a power of two from 2 on, not 3"),
        ({"activation_depth": 1}, "activation_depth must be a power of two from 2 on, not 1"),
        ({"accumulators": 2}, "accumulators must be a power of two from 4 on, not 2"),
    ],
)
def test_a_wrong_parameter_is_named_with_its_rule_and_value(parameters, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        AcceleratorConfig(**parameters)


@pytest.mark.parametrize("name", ["data_width", "address_width", "max_burst", "rows", "weight_depth"])
@pytest.mark.parametrize("value", ["64", 64.0, True])
def test_a_parameter_of_the_wrong_kind_is_named(name, value):
    with pytest.raises(TypeError, match=f"^{name} must be an integer, not {value!r}$"):
        AcceleratorConfig(**{name: value})


def test_limits_themselves_are_taken():
    for parameters in (
        {"data_width": 64},
        {"data_width": 1024, "lanes": 512},
        {"address_width": 13},
        {"address_width": 64},
        {"rows": 255, "columns": 255},
    ):
        assert dataclasses.asdict(AcceleratorConfig(**parameters)).items() >= parameters.items()


def test_parameters_reach_the_engine_and_the_bus():
    config = AcceleratorConfig(
        rows=3, columns=5, weight_depth=64, data_width=256, address_width=48, id_width=2, max_burst=4, outstanding=3
    )
    assert config.engine == EngineConfig(rows=3, columns=5, activation_depth=4096, weight_depth=64)
    assert dataclasses.astuple(config.dma) == (256, 48, 2, 4, 3)


# Where every field stands: name, first byte, bytes.
FIELDS = [
    ("m", 4, 4),
    ("n", 8, 4),
    ("k", 12, 4),
    ("tile_m", 16, 2),
    ("tile_n", 18, 2),
    ("segment", 20, 2),
    ("out_scale", 24, 4),
    ("a.codes", 32, 8),
    ("a.scales", 40, 8),
    ("a.masks", 48, 8),
    ("a.offsets", 56, 8),
    ("w.codes", 64, 8),
    ("w.scales", 72, 8),
    ("w.masks", 80, 8),
    ("w.offsets", 88, 8),
    ("out", 96, 8),
    ("a.codes_stride", 104, 4),
    ("a.scales_stride", 108, 4),
    ("a.masks_stride", 112, 4),
    ("a.offsets_stride", 116, 4),
    ("w.codes_stride", 120, 4),
    ("w.scales_stride", 124, 4),
    ("w.masks_stride", 128, 4),
    ("w.offsets_stride", 132, 4),
    ("out_stride", 136, 4),
]
OFFSETS = {name: (offset, size) for name, offset, size in FIELDS}
ZERO = Descriptor(0, 0, 0, 0, 0, 0, 0, 0, Operand(0, 0), Operand(0, 0), 0, 0, 0)


def changed(descriptor, **values):
    """Return the descriptor with fields changed; ``a__codes`` is a field of an operand."""
    for name, value in values.items():
        operand, _, field = name.rpartition("__")
        if operand:
            descriptor = dataclasses.replace(
                descriptor, **{operand: dataclasses.replace(getattr(descriptor, operand), **{field: value})}
            )
        else:
            descriptor = dataclasses.replace(descriptor, **{field: value})
    return descriptor


@pytest.mark.parametrize(("name", "offset", "size"), FIELDS)
def test_a_field_stands_in_its_place_little_endian_and_nowhere_else(name, offset, size):
    value = int.from_bytes(range(0xA1, 0xA1 + size), "big")
    octets = changed(ZERO, **{name.replace(".", "__"): value}).pack()
    assert len(octets) == DESCRIPTOR_BYTES == 192
    assert octets == bytes(offset) + value.to_bytes(size, "little") + bytes(192 - offset - size)
    with pytest.raises(struct.error):
        changed(ZERO, **{name.replace(".", "__"): 1 << 8 * (size if name != "segment" else 4)}).pack()


def test_mode_and_format_share_the_first_byte():
    assert changed(ZERO, mode=2, format=1).pack() == bytes([0x12]) + bytes(191)
    assert changed(ZERO, mode=1).pack() == bytes([0x01]) + bytes(191)
    assert changed(ZERO, fence=True).pack() == bytes(140) + b"\2" + bytes(51)


def good(config, **values):
    """Return a descriptor without a fault."""
    a, w = (Operand(*(base + 64 * i for i in range(4)), 16, 32, 48, 64) for base in (1024, 2048))
    return changed(Descriptor(1, 1, 5, 7, config.lanes, 1, 1, 1, a, w, 4096, 32), **values)


def code(config, **values):
    return check(config, good(config, **values).pack())


def flipped(octets, byte, bit):
    return octets[:byte] + bytes([octets[byte] ^ 1 << bit]) + octets[byte + 1 :]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_good_descriptor_passes_in_every_mode_and_format(name):
    config = CONFIGS[name]
    for mode in (0, 1, 2):
        expected = ErrorCode.MODE if mode == 2 and config.refinement == "none" else ErrorCode.OK
        assert {code(config, mode=mode, format=kind) for kind in (0, 1)} == {expected}


CASES = {
    ErrorCode.MODE: [{"mode": 3}],
    ErrorCode.FORMAT: [{"format": 2}, {"format": 3}],
    ErrorCode.SCALE: [{"out_scale": scale} for scale in (0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001)],
    ErrorCode.SIZE_ZERO: [{"m": 0}, {"n": 0}, {"k": 0}],
    ErrorCode.SIZE_LIMIT: [{"m": 1 << 24}, {"n": 1 << 24}, {"m": (1 << 32) - 1}, {"k": 1 << 18}, {"k": (1 << 32) - 1}],
    ErrorCode.K_MULTIPLE: [{"k": 1}, {"k": 16}, {"k": 33}, {"k": 95}],
    ErrorCode.TILE: [{"tile_m": 0}, {"tile_n": 0}, {"segment": 0}, {"tile_m": 65}, {"tile_n": 129}, {"segment": 513}],
    ErrorCode.ALIGNMENT: [{name.replace(".", "__"): 8} for name, offset, _ in FIELDS if offset >= 32],
    ErrorCode.ADDRESS: [{name.replace(".", "__"): 1 << 40} for name, offset, _ in FIELDS if 32 <= offset < 104],
}


@pytest.mark.parametrize(
    ("expected", "values"), [(key, values) for key, cases in CASES.items() for values in cases], ids=str
)
def test_a_single_fault_gives_its_code(expected, values):
    assert code(CONFIG, **values) == expected


def test_every_bit_without_a_meaning_is_reserved():
    fence = 8 * 140 + 1
    used = {8 * offset + bit for _, offset, size in FIELDS for bit in range(8 * size)} | {0, 1, 4, 5, fence}
    octets = good(CONFIG).pack()
    spare = [bit for bit in range(8 * 192) if bit not in used]
    assert len(spare) == 28 + 16 + 32 + 13 * 32 - 1
    assert check(CONFIG, flipped(octets, 140, 1)) == ErrorCode.OK
    for bit in spare:
        assert check(CONFIG, flipped(octets, bit // 8, bit % 8)) == ErrorCode.RESERVED


def test_without_refinement_there_is_no_autofp6():
    assert code(SMALL, mode=2) == ErrorCode.MODE
    assert code(CONFIG, mode=2) == ErrorCode.OK


def test_the_scale_counts_in_fp32_alone_and_any_finite_one_will_do():
    assert code(CONFIG, format=0, out_scale=0x7F800000) == ErrorCode.OK
    for scale in (0, 1, 0x7F7FFFFF, 0xFF7FFFFF, 0x80000000):
        assert code(CONFIG, out_scale=scale) == ErrorCode.OK


FAULTS = {
    ErrorCode.MODE: {"mode": 3},
    ErrorCode.FORMAT: {"format": 2},
    ErrorCode.SCALE: {"out_scale": 0x7F800000},
    ErrorCode.SIZE_ZERO: {"n": 0},
    ErrorCode.SIZE_LIMIT: {"m": 1 << 24},
    ErrorCode.K_MULTIPLE: {"k": 33},
    ErrorCode.TILE: {"tile_m": 0},
    ErrorCode.ALIGNMENT: {"w__scales": 8},
    ErrorCode.ADDRESS: {"out": 1 << 40},
}


@given(st.sets(st.sampled_from(sorted(FAULTS)), min_size=1), st.booleans())
@settings(max_examples=300, deadline=None)
def test_of_several_faults_the_lowest_code_is_reported(faults, reserved):
    values = {key: value for fault in faults for key, value in FAULTS[fault].items()}
    octets = good(CONFIG, **values).pack()
    expected = ErrorCode.RESERVED if reserved else min(faults)
    assert check(CONFIG, flipped(octets, 28, 3) if reserved else octets) == expected


@given(st.sampled_from(sorted(CONFIGS)), st.data())
@settings(max_examples=600, deadline=None)
def test_sizes_of_tiles_pass_if_and_only_if_they_fit(name, data):
    config = CONFIGS[name]
    mode = data.draw(st.sampled_from([0, 1]))
    lanes, words = config.lanes, config.accumulators // 2
    most = min(config.activation_entries, words)
    # Sizes at a limit that others leave, and one more or less.
    tile_m = data.draw(st.sampled_from([1, 2, 3, most // 2, most - 1, most, most + 1]))
    near = st.sampled_from([-1, 0, 1])
    tile_n = max(words // tile_m + data.draw(near), 1) if data.draw(st.booleans()) else data.draw(st.integers(1, 9))
    kv = max(config.activation_depth // tile_m + data.draw(near), 1) if data.draw(st.booleans()) else 1
    kv = min(kv, config.max_kv)
    per_place = tile_n if mode == 0 else -(-tile_n // 2)
    segment = max(config.weight_depth // 2 // per_place + data.draw(near), 1)
    fits = (
        tile_m <= most
        and tile_m * tile_n <= words
        and tile_m * kv <= config.activation_depth
        and per_place * segment <= config.weight_depth // 2
    )
    got = code(config, mode=mode, k=kv * lanes, tile_m=tile_m, tile_n=tile_n, segment=segment)
    assert got == (ErrorCode.OK if fits else ErrorCode.TILE)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_largest_sizes_pass_and_one_more_does_not(name):
    config = CONFIGS[name]
    top = (1 << 24) - 1
    assert code(config, m=top, n=top) == ErrorCode.OK
    assert code(config, m=top + 1) == code(config, n=top + 1) == ErrorCode.SIZE_LIMIT
    # K is limited by sums first; one K-vector more than that is refused however the banks are.
    longest = min(config.vmac.max_k, 2**18 - 1) // config.lanes * config.lanes
    assert code(config, k=longest) in (ErrorCode.TILE, ErrorCode.OK)
    assert code(config, k=longest + config.lanes) == ErrorCode.SIZE_LIMIT
    last = (1 << config.address_width) - 16
    assert code(config, out=last, a__codes=last, w__offsets=last) == ErrorCode.OK
    if config.address_width < 64:
        assert code(config, out=last + 16) == ErrorCode.ADDRESS
    assert code(config, out_stride=(1 << 32) - 16, a__codes_stride=(1 << 32) - 16) == ErrorCode.OK


def test_k_may_be_as_long_as_a_bank_holds():
    config = dataclasses.replace(CONFIG, activation_depth=8192)
    assert code(config, k=32 * 8191) == ErrorCode.OK
    assert code(config, k=32 * 8192) == ErrorCode.SIZE_LIMIT


PPU = AcceleratorConfig(ppu=True)


def test_fields_of_post_processing_stand_where_the_tables_say():
    """Descriptor and block byte by byte, by the positions of the C header."""
    rng = random.Random(1)

    def at(octets, member):
        return int.from_bytes(octets, "little") >> member.position & (1 << member.width) - 1

    places = {member.name: rng.getrandbits(member.width) for member in POST.members}
    octets = PostBlock(**places).pack()
    assert len(octets) == POST_BYTES == 128
    assert {member.name: at(octets, member) for member in POST.members} == places
    members = {member.name: member for member in descriptor_of(PPU).members}
    octets = changed(ZERO, post=0x123450, policy=True, out_scale_low=0x40000000).pack()
    found = {name: at(octets, member) for name, member in members.items()}
    assert {name: value for name, value in found.items() if value} == {
        **{"post": 1, "post_address": 0x123450, "policy": 1, "out_scale_low": 0x40000000},
    }
    assert descriptor_of(CONFIG) is DESCRIPTOR
    assert not {"post", "policy", "post_address", "out_scale_low"} & {member.name for member in DESCRIPTOR.members}


def test_flags_of_post_processing_are_reserved_without_a_unit():
    for values in ({"post": 0}, {"policy": True}, {"out_scale_low": 1}):
        assert code(CONFIG, **values) == ErrorCode.RESERVED
    assert code(PPU, post=0) == ErrorCode.OK
    assert code(PPU, out_scale_low=1) == ErrorCode.RESERVED


def test_the_mode_that_the_policy_picks_is_the_one_that_is_checked():
    descriptor = good(PPU, policy=True, tile_n=64, segment=8, out_scale_low=0x40000000).pack()
    assert [check(PPU, descriptor, precision) for precision in (None, 2, 4, 6)] == [
        ErrorCode.POLICY,
        ErrorCode.TILE,
        ErrorCode.OK,
        ErrorCode.OK,
    ]
    infinite = good(PPU, policy=True, out_scale_low=0x7F800000).pack()
    assert [check(PPU, infinite, precision) for precision in (2, 4)] == [ErrorCode.SCALE, ErrorCode.OK]
    plain = dataclasses.replace(PPU, refinement="none")
    assert [check(plain, infinite, precision) for precision in (4, 6)] == [ErrorCode.OK, ErrorCode.MODE]


POSTS = {
    ErrorCode.POST_RESERVED: [{"function": 4}, {"function": 15}],
    ErrorCode.POST_FLAGS: [{"groups": False}, {"groups": False, "numbers": True, "shared": True}, {"observe": True}],
    ErrorCode.POST_SCALE: [{"group_scale": 0x7F800000}, {"threshold": 0xFFC00000}],
    ErrorCode.POST_ALIGNMENT: [{name: 8} for name in (*POST_ARRAYS, "next_mask", "codes_stride")],
    ErrorCode.POST_ADDRESS: [{name: 1 << 40} for name in (*POST_ARRAYS, "next_mask")],
}


@pytest.mark.parametrize(
    ("expected", "values"), [(key, values) for key, cases in POSTS.items() for values in cases], ids=str
)
def test_a_single_fault_of_a_block_gives_its_code(expected, values):
    octets = good(PPU, post=16, tile_n=2).pack()
    assert check_post(PPU, octets, PostBlock(groups=True).pack()) == ErrorCode.OK
    assert check_post(PPU, octets, PostBlock(**{"groups": True, **values}).pack()) == expected


@pytest.mark.parametrize(
    ("mode", "tile_n", "n", "fits"), [(1, 8, 99, 1), (1, 4, 99, 0), (0, 4, 99, 1), (0, 3, 24, 1), (0, 3, 25, 0)]
)
def test_tiles_of_groups_end_with_a_pair_of_them(mode, tile_n, n, fits):
    octets = good(PPU, mode=mode, tile_n=tile_n, n=n, post=16).pack()
    expected = ErrorCode.OK if fits else ErrorCode.POST_TILE
    assert check_post(PPU, octets, PostBlock(groups=True).pack()) == expected
    assert check_post(PPU, octets, PostBlock(numbers=True).pack()) == ErrorCode.OK
    with pytest.raises(ValueError, match=r"^post must be 128 bytes, not 127$"):
        check_post(PPU, octets, bytes(127))


def test_registers_of_the_policy_hold_the_papers_parameters_after_reset():
    assert registers_of(PPU) is PPU_REGISTERS
    assert registers_of(CONFIG) is REGISTERS
    words = policy_words(PolicyConfig())
    assert words == {name: PPU_REGISTERS[name].reset for name in words}
    other = policy_words(PolicyConfig(levels=(2, 6), decode_level=2, tau=0.5, n_p=3))
    assert PPU_REGISTERS["policy_levels"].unpack(other["policy_levels"]) == {
        "level_0": 2,
        "level_1": 6,
        "level_2": 6,
        "level_3": 6,
    }
    assert PPU_REGISTERS["policy_rules"].unpack(other["policy_rules"])["n_p"] == 3
    # Those of every configuration stand where they are without the unit.
    assert [(r.name, r.offset) for r in PPU_REGISTERS.registers[:15]] == [
        (r.name, r.offset) for r in REGISTERS.registers
    ]


@pytest.mark.parametrize("count", [0, 191, 193, 256])
def test_a_descriptor_has_192_bytes(count):
    with pytest.raises(ValueError, match=f"^octets must be 192, not {count}$"):
        check(CONFIG, bytes(count))


def test_a_record_is_read_field_by_field():
    octets = bytes([22, 0b1010, 0x34, 0x12, 0x78, 0x56, 0x34, 0x12, *bytes(8)])
    assert Record.unpack(octets) == Record(ErrorCode.READ_SLVERR, 10, 0x1234, 0x12345678)
    octets = bytes([0, 0b10110001, *octets[2:8], 1, 0, 0, 0x80, 2, 0, 0, 0x40])
    expected = Record(ErrorCode.OK, 0b110001, 0x1234, 0x12345678, 0x80000001, 0x40000002, Mode.AUTOFP6)
    assert Record.unpack(octets) == expected
    assert isinstance(Record.unpack(bytes(16)).code, ErrorCode)
    with pytest.raises(struct.error):
        Record.unpack(bytes(15))
    with pytest.raises(ValueError, match="16 is not a valid ErrorCode"):
        Record.unpack(bytes([16]) + bytes(15))


def test_every_code_has_a_meaning_of_its_own():
    assert set(MEANINGS) == set(ErrorCode)
    assert len(set(MEANINGS.values())) == len(ErrorCode)
    # Groups of the bus are the status of the DMA engine plus a multiple of four.
    for access, base in (("DESCRIPTOR", 16), ("READ", 20), ("WRITE", 24), ("RECORD", 28)):
        assert [ErrorCode[f"{access}_{how}"] - base for how in ("BEYOND", "SLVERR", "DECERR")] == [1, 2, 3]


def test_registers_are_words_of_their_own_within_6_bits_of_address():
    assert REGISTERS.address_width == 6
    offsets = [register.offset for register in REGISTERS.registers]
    assert offsets == [4 * i for i in range(15)]
    names = [register.name for register in REGISTERS.registers]
    assert len(set(names)) == len(names)
    for register in REGISTERS.registers:
        taken = [bit for field in register.fields for bit in range(field.position, field.position + field.width)]
        assert len(taken) == len(set(taken))
        assert max(taken) < 32


def test_what_software_relies_on_stands_where_it_was():
    fields = {
        (r.name, f.name): (r.offset, f.position, f.width, f.access) for r in REGISTERS.registers for f in r.fields
    }
    assert fields["control", "enable"] == (0x10, 0, 1, "rw")
    assert fields["control", "restart"] == (0x10, 1, 1, "w1p")
    assert fields["queue_low", "address"] == (0x18, 8, 24, "rw")
    assert fields["submitted", "count"] == (0x24, 0, 16, "rw")
    assert fields["completed", "count"] == (0x28, 0, 16, "ro")
    assert fields["error", "code"] == (0x34, 0, 8, "ro")
    assert [fields["events", name][1:] for name in ("done", "error", "empty")] == [(i, 1, "w1c") for i in range(3)]
    error = next(field for r in REGISTERS.registers if r.name == "error" for field in r.fields if field.name == "code")
    assert {e.value: e.name for e in error.enumerators} == {int(c): c.name.lower() for c in ErrorCode}


C_PROGRAM = """
#include <stdio.h>
#include "autoematic_registers.h"

static unsigned width(unsigned long long mask) { return mask > 0xFFFFFFFFull ? 8u : 4u; }

static void put(unsigned char *at, unsigned offset, unsigned shift, unsigned long long mask, unsigned long long value)
{
    unsigned i;
    for (i = 0; i < width(mask); i++) at[offset + i] |= (unsigned char)((value << shift & mask) >> 8 * i);
}

static unsigned long long get(const unsigned char *at, unsigned offset, unsigned shift, unsigned long long mask)
{
    unsigned long long word = 0;
    unsigned i;
    for (i = 0; i < width(mask); i++) word |= (unsigned long long)at[offset + i] << 8 * i;
    return (word & mask) >> shift;
}

#define PUT(name, value) put(place + AUTOEMATIC_DESCRIPTOR_START, AUTOEMATIC_DESCRIPTOR_##name##_OFFSET, \\
    AUTOEMATIC_DESCRIPTOR_##name##_SHIFT, AUTOEMATIC_DESCRIPTOR_##name##_MASK, value)
#define GET(name) get(place + AUTOEMATIC_RECORD_START, AUTOEMATIC_RECORD_##name##_OFFSET, \\
    AUTOEMATIC_RECORD_##name##_SHIFT, AUTOEMATIC_RECORD_##name##_MASK)

int main(void)
{
    static unsigned char place[AUTOEMATIC_DESCRIPTOR_PITCH];
    static const unsigned char record[] = {RECORD};
    unsigned i;
    PUTS
    for (i = 0; i < AUTOEMATIC_DESCRIPTOR_SIZE; i++) printf("%02x", place[i]);
    for (i = 0; i < AUTOEMATIC_RECORD_SIZE; i++) place[AUTOEMATIC_RECORD_START + i] = record[i];
    printf("\\n%llu %llu %llu %llu", GET(CODE), GET(NUMBER), GET(CYCLES), GET(SATURATED) | GET(NAN_SCALE) << 1 | GET(OVERLAP) << 2 | GET(DROPPED) << 3);
    printf("\\n%d %d %u\\n", AUTOEMATIC_DESCRIPTOR_MODE_AUTOFP6, AUTOEMATIC_DESCRIPTOR_FORMAT_FP32, AUTOEMATIC_DESCRIPTOR_PITCH);
    return 0;
}
"""


def test_a_c_program_writes_descriptors_and_reads_records_by_the_header(tmp_path, seed):
    rng = random.Random(seed)
    values = {member.name: rng.getrandbits(member.width) | 1 << member.width - 1 for member in DESCRIPTOR.members}
    arrays = [f"{array}{suffix}" for suffix in ("", "_stride") for array in ("codes", "scales", "masks", "offsets")]
    operands = {operand: Operand(*(values.pop(f"{operand}_{name}") for name in arrays)) for operand in "aw"}
    expected = Descriptor(**values, **operands)
    octets = rng.randbytes(16)
    octets = bytes([ErrorCode.READ_SLVERR, octets[1] & 15]) + octets[2:8] + bytes(8)
    puts = []
    for member in DESCRIPTOR.members:
        operand, _, name = member.name.partition("_")
        value = getattr(operands[operand], name) if operand in operands else values[member.name]
        puts.append(f"PUT({member.name.upper()}, {value}ull);")
    emit(REGISTERS, tmp_path)
    text = C_PROGRAM.replace("{RECORD}", f"{{{', '.join(map(str, octets))}}}").replace("PUTS", "\n    ".join(puts))
    (tmp_path / "main.c").write_text(text)
    gcc = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-o", "main", "main.c"]
    compiled = subprocess.run(gcc, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, timeout=60, check=True)
    descriptor, record, constants = done.stdout.splitlines()
    assert bytes.fromhex(descriptor) == expected.pack()
    found = Record.unpack(octets)
    assert [int(value) for value in record.split()] == [found.code, found.number, found.cycles, found.status]
    assert constants == f"{int(Mode.AUTOFP6)} {int(Format.FP32)} {PITCH}"


def test_members_of_the_descriptor_are_the_fields_of_the_page():
    table = {member.name: (member.position, member.width) for member in DESCRIPTOR.members}
    assert table.pop("mode") == (0, 2)
    assert table.pop("format") == (4, 2)
    assert table.pop("segment") == (160, 16)
    assert table.pop("fence") == (8 * 140 + 1, 1)
    listed = {name.replace(".", "_"): (8 * offset, 8 * size) for name, offset, size in FIELDS if name != "segment"}
    assert table == listed
    assert json.loads(to_json(REGISTERS))["structures"][0]["members"][2]["name"] == "m"
