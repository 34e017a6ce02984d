"""Digits and packed pairs against the paper's table 8 and figure 10."""

import numpy as np
import pytest

from model.formats import E2M1
from model.packed_pair import NVFP4_PAIRS, nvfp4_digits, pack, unpack

DIGITS = range(-2, 3)
TABLE_8 = {0: (0, 0), 0.5: (1, -2), 1: (0, 1), 1.5: (1, -1), 2: (0, 2), 3: (2, -2), 4: (2, -1), 6: (2, 1)}


def test_every_code_has_the_digits_of_table_8():
    q0, q1 = nvfp4_digits(np.arange(16))
    for code in range(16):
        value = float(E2M1.decode(code))
        sign = -1 if code & 8 else 1
        assert (q0[code], q1[code]) == tuple(sign * digit for digit in TABLE_8[abs(value)])
        assert 5 * int(q0[code]) + 2 * int(q1[code]) == 2 * value


def test_every_code_has_the_digits_of_equation_6():
    q0, q1 = nvfp4_digits(np.arange(16))
    for code in range(16):
        s, e1, e0, m = (code >> 3) & 1, (code >> 2) & 1, (code >> 1) & 1, code & 1
        v0, v1 = m | (e1 & e0), e1 | e0 | m
        x0, x1 = e1 & (e0 | m), (1 - e0) & (e1 | m)
        s0, s1 = s, s ^ m ^ (e1 & e0)
        assert q0[code] == (v0 and (-1) ** s0 * 2**x0)
        assert q1[code] == (v1 and (-1) ** s1 * 2**x1)


def test_every_pair_of_digits_survives_packing():
    pairs = np.array([(q1, q0) for q1 in DIGITS for q0 in DIGITS])
    packed = pack(pairs[:, 1], pairs[:, 0])
    q0, q1 = unpack(packed)
    assert (q0 == pairs[:, 1]).all()
    assert (q1 == pairs[:, 0]).all()
    assert len(set(packed.tolist())) == 25


@pytest.mark.parametrize(
    ("q1", "q0", "bits"),
    [(-2, 1, "01100"), (0, 0, "11100"), (0, -1, "11010"), (2, 0, "10101")],
    ids=lambda value: str(value),
)
def test_packed_examples_of_the_format(q1, q0, bits):
    assert f"{int(pack(q0, q1)):05b}" == bits


def test_f0_is_ignored_where_both_digits_are_zero():
    q0, q1 = unpack(np.array([0b11100, 0b11101, 0b11110, 0b11111]))
    assert not q0.any()
    assert not q1.any()


def test_escape_with_f1_zero_is_never_written():
    written = set(pack(*map(np.ravel, np.meshgrid(DIGITS, DIGITS))).tolist())
    assert not written & {0b10000, 0b10001, 0b10010, 0b10011}


def test_fifteen_pairs_stand_for_nvfp4_weights():
    assert len(NVFP4_PAIRS) == 15


def test_bad_values_are_named():
    with pytest.raises(ValueError, match=r"^codes must be from 0 to 15, not 16$"):
        nvfp4_digits([16])
    with pytest.raises(ValueError, match=r"^q1 must hold digits from -2 to 2, not 3$"):
        pack([0], [3])
    with pytest.raises(ValueError, match=r"^pairs must be from 0 to 31, not 32$"):
        unpack([32])
