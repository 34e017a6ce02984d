"""Byte layouts of the memory image."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.memory import pack_masks, pack_nibbles, pack_offsets, unpack_masks, unpack_nibbles, unpack_offsets


def test_case_low_nibble_first():
    assert pack_nibbles(np.array([0, 1, 2, 3], np.uint8)).tolist() == [0x10, 0x32]


def test_even_group_is_the_low_nibble_and_bit_g_is_subgroup_g():
    mask = np.array([0, 1, 1, 0, 1, 0, 0, 0], bool)
    assert pack_masks(mask).tolist() == [0b0001_0110]


def test_offsets_are_a_byte_per_refined_subgroup_element_0_lowest():
    d = np.array([0, 0, 0, 0, 1, -1, -2, 0], np.int8)
    assert pack_offsets(d, np.array([False, True])).tolist() == [0b00_10_11_01]


def test_everything_unpacks_to_what_was_packed(seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (5, 64), dtype=np.uint8)
    assert (unpack_nibbles(pack_nibbles(codes)) == codes).all()
    mask = rng.random(64) < 0.4
    assert (unpack_masks(pack_masks(mask)) == mask).all()
    d = (rng.integers(-2, 2, 256) * np.repeat(mask, 4)).astype(np.int8)
    assert (unpack_offsets(pack_offsets(d, mask), mask) == d).all()
    assert d.any()


def test_case_wrong_lengths_are_named():
    with pytest.raises(ValueError, match=r"^codes must have an even number of elements along K, not 17$"):
        pack_nibbles(np.zeros(17, np.uint8))
    with pytest.raises(ValueError, match=r"^codes must fit 4 bits, not 0x10$"):
        pack_nibbles(np.full(2, 16, np.uint8))
    with pytest.raises(ValueError, match=r"^mask must hold a multiple of 8 subgroups, not 4$"):
        pack_masks(np.zeros(4, bool))
    with pytest.raises(ValueError, match=r"^offsets must be from -2 to 1, not 0 to 2$"):
        pack_offsets(np.array([0, 0, 0, 2], np.int8), np.ones(1, bool))
    with pytest.raises(ValueError, match=r"^packed must have shape \(1,\), a byte per refined subgroup, not \(2,\)$"):
        unpack_offsets(np.zeros(2, np.uint8), np.ones(1, bool))


def test_negative_codes_are_refused():
    with pytest.raises(ValueError, match=r"^codes must fit 4 bits, not -0x1$"):
        pack_nibbles(np.array([-1, 3]))


def test_mask_of_integers_is_refused():
    mask = np.array([0, 1, 1, 0], np.uint8)
    with pytest.raises(TypeError, match=r"^mask must be bool, not uint8$"):
        pack_offsets(np.zeros(16, np.int8), mask)
    with pytest.raises(TypeError, match=r"^mask must be bool, not uint8$"):
        unpack_offsets(np.zeros(2, np.uint8), mask)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(-2, 1), min_size=4, max_size=4)), min_size=1, max_size=24)
)
def test_offsets_follow_their_mask_whatever_it_is(subgroups):
    mask = np.array([refined for refined, _ in subgroups])
    d = np.array([offsets if refined else [0] * 4 for refined, offsets in subgroups], np.int8).reshape(-1)
    packed = pack_offsets(d, mask)
    expected = [sum((x & 3) << 2 * i for i, x in enumerate(offsets)) for refined, offsets in subgroups if refined]
    assert packed.tolist() == expected
    assert (unpack_offsets(packed, mask) == d).all()
