"""Memories as modules of their own: a whole element still behaves as its model says, whatever a macro does where it may do anything."""

import re

import pytest

from sim.design import generated
from sim.regress import TileBench
from sim.runner import available_simulators
from synth.macros import Memory, split, summary, wrapper

PARAMETERS = {"weight_entries": 4, "activation_entries": 8, "accumulators": 16}
TILES = 12


@pytest.fixture(scope="module")
def element():
    return split(generated("pe", **PARAMETERS).verilog)


def whole(parts, change=lambda text: text):
    return parts.verilog + "".join(change(wrapper(memory)) for memory in parts.wrappers().values())


def test_memories_of_an_element(element):
    assert element.kept == []
    assert [(each["module"], each["name"], each["depth"], each["width"]) for each in summary(element.memories)] == [
        ("pe", "accumulators0", 8, 64),
        ("pe", "accumulators1", 8, 64),
        ("pe_activations", "memory", 8, 184),
        ("pe_weights", "memory", 4, 216),
    ]
    # Largest first; two of one shape are one module.
    assert list(element.wrappers()) == ["memory_8x184", "memory_4x216", "memory_8x64"]
    assert not re.search(r"^  reg \[\d+:0\] \S+ \[\d+:0\];$", element.verilog, re.MULTILINE)


def test_small_memories_stay(element):
    verilog = generated("pe", **PARAMETERS).verilog
    parts = split(verilog, 1000)
    assert [each.name for each in parts.kept] == ["accumulators0", "accumulators1", "memory"]
    assert [each.wrapper for each in parts.memories] == ["memory_8x184"]
    assert split(verilog, 2000).verilog == verilog


def test_an_element_with_wrappers_equals_its_model(element, seed):
    bench = TileBench(PARAMETERS, available_simulators()[-1], verilog=whole(element))
    tally = bench.run_tiles(TILES, seed, bench.coverage())
    assert tally.faults == []
    assert min(tally.compared.values()) > 8


def test_a_macro_whose_data_do_not_stay_is_noticed(element, seed):
    def change(text):
        assert text.count("if (r_en) read <=") == 2
        return text.replace("if (r_en) read <=", "read <=")

    bench = TileBench(PARAMETERS, available_simulators()[-1], verilog=whole(element, change))
    assert bench.run_tiles(TILES, seed, bench.coverage()).mismatches == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("accumulators0[0] = 64'h0000000000000000", "accumulators0[0] = 64'h0000000000000001"),
        ("  reg [63:0] _0_;", "  reg [63:0] _0_; // another"),
    ],
)
def test_memories_of_another_kind_are_named(old, new):
    verilog = generated("pe", **PARAMETERS).verilog
    assert verilog.count(old) == 1
    with pytest.raises(ValueError, match=r"^memory must have one port of each kind .*; accumulators0 in pe differs$"):
        split(verilog.replace(old, new))


def test_wrapper_of_one_word_has_an_address():
    assert "input [0:0] w_addr;" in wrapper(Memory("top", "memory", 1, 8))


def test_contents_of_zeros_are_known_in_hexadecimal_and_decimal():
    # Words of 32 bits are written as the latter.
    verilog = generated("pe", **PARAMETERS).verilog
    decimal = verilog.replace("64'h0000000000000000;", "64'd0;")
    assert decimal != verilog
    assert split(decimal).memories == split(verilog).memories
