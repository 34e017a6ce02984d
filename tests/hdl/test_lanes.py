"""Blocks of sixteen lanes: two digit dot products, by hand, exhaustive for one lane, and against the model."""

import numpy as np

from hdl.lanes import GROUP, DigitBlock
from model.packed_pair import pack, unpack
from model.vmac import base_sums
from tests.hdl.simulate import evaluate, signed

DOUBLED = [0, 1, 2, 3, 4, 6, 8, 12]
"""Twice the magnitude of each E2M1 code."""
ZERO_PAIR = 0b11100


def row(a, w):
    return {
        "a": sum(int(code) << 4 * k for k, code in enumerate(a)),
        "w": sum(int(pair) << 5 * k for k, pair in enumerate(w)),
    }


def sums(rows):
    return [tuple(signed(total, 10) for total in found) for found in evaluate(DigitBlock(), rows, ["even", "odd"])]


def test_every_code_times_every_pair_in_a_lane_while_zero_pairs_hide_the_others():
    rows, expected = [], []
    for pair in [pair for pair in range(32) if pair >> 2 != 0b100]:
        q0, q1 = (int(digit) for digit in unpack(pair))
        for code in range(16):
            lane = (pair + code) % GROUP
            rows.append(row([code if k == lane else 15 for k in range(GROUP)], [ZERO_PAIR] * GROUP))
            rows[-1]["w"] ^= (ZERO_PAIR ^ pair) << 5 * lane
            doubled = -DOUBLED[code & 7] if code & 8 else DOUBLED[code & 7]
            expected.append((doubled * q0, doubled * q1))
    assert sums(rows) == expected
    assert len(expected) == 28 * 16


def test_sixteen_equal_lanes_add_up_and_a_pair_of_zeros_is_zero_whatever_its_last_bits():
    cases = {
        (0b0111, 0b00101): (384, 384),  # 6 and {2, 2}
        (0b1111, 0b00101): (-384, -384),
        (0b0111, 0b01101): (384, -384),  # {Q1, Q0} = {-2, 2}
        (0b0011, 0b01100): (48, -96),  # 1.5 and {-2, 1}
        (0b0111, 0b11010): (-192, 0),  # Q1 is zero, Q0 = -1
        (0b0111, 0b10101): (0, 384),  # Q0 is zero, Q1 = 2
        (0b1000, 0b00101): (0, 0),  # minus zero
        **{(0b0111, ZERO_PAIR | f0): (0, 0) for f0 in range(4)},
    }
    assert sums([row([code] * GROUP, [pair] * GROUP) for code, pair in cases]) == list(cases.values())


def test_random_blocks_sum_as_in_the_model(seed):
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 16, (200, GROUP), dtype=np.uint8)
    w = pack(*rng.integers(-2, 3, (2, 200, GROUP)))
    even, odd = base_sums(a, w)
    found = sums([row(*pair) for pair in zip(a, w, strict=True)])
    assert found == [(int(e), int(o)) for e, o in zip(even[:, 0], odd[:, 0], strict=True)]
    assert len(set(found)) > 100
