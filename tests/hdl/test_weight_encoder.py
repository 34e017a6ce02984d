# amaranth: UnusedElaboratable=no
"""The weight encoder: table 8, the thresholds of pair scales and the order of scales by hand; random rows against the model."""

import numpy as np
import pytest

from hdl.weight_encoder import PairScale, WeightEncoder
from model.weight_encoder import WeightEncoderConfig, encode
from tests.hdl.simulate import evaluate

# {E, F1, F0} with |Q| as code: +1 00, +2 01, -1 10, -2 11; {Q0, Q1} of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and of their negatives.
TABLE_8 = [
    *(0b1_11_00, 0b0_11_00, 0b1_01_00, 0b0_10_00, 0b1_01_01, 0b0_11_01, 0b0_10_01, 0b0_00_01),
    *(0b1_11_00, 0b0_01_10, 0b1_01_10, 0b0_00_10, 0b1_01_11, 0b0_01_11, 0b0_00_11, 0b0_10_11),
]
ONE = 0x38


def word(values, width):
    return sum(int(value) << width * k for k, value in enumerate(values))


def split(number, width, count):
    return [number >> width * k & (1 << width) - 1 for k in range(count)]


def row(mode_nvfp4, even, odd, scale_even, scale_odd):
    return {
        "mode_nvfp4": int(mode_nvfp4),
        "row_even": word(even, 4),
        "row_odd": word(odd, 4),
        "scale_even": word(scale_even, 8),
        "scale_odd": word(scale_odd, 8),
    }


def encoded(config, rows):
    found = evaluate(
        WeightEncoder(config), rows, ["w", "w_scale"], clocked=config.registered, latency=int(config.registered)
    )
    return [(split(w, 5, config.lanes), split(scale, 8, config.w_scale_bytes)) for w, scale in found]


def test_rows_worked_by_hand():
    codes = list(range(16)) * 2
    rows = [
        row(1, codes, [7] * 32, (ONE, 0x40), (0x7E, 0x7F)),
        # Equal scales: digits 0 0 1 1 1 1 2 2 with the code's sign.
        row(0, codes, [0] * 32, (ONE, ONE), (0x40, 0x40)),
        row(0, [0] * 32, codes, (ONE, ONE), (0x40, 0x40)),
        # 0.5 beside 1: from 2 on a code is worth the pair scale, and none is worth 3.5 of it.
        row(0, codes, [0] * 32, (0x30, ONE), (0x01, 0x7E)),
        row(0, [2, *[0] * 31], [14, *[0] * 31], (ONE, ONE), (ONE, ONE)),
    ]
    alone = [0b1_11_00] * 2 + [0b1_10_00] * 4 + [0b1_10_01] * 2 + [0b1_11_00] * 2 + [0b1_10_10] * 4 + [0b1_10_11] * 2
    small = [0b1_11_00] * 4 + [0b1_10_00] * 4 + [0b1_11_00] * 4 + [0b1_10_10] * 4
    lone_odd = [pair ^ 0b0_11_00 if pair != 0b1_11_00 else pair for pair in alone]
    assert encoded(WeightEncoderConfig(), rows) == [
        (TABLE_8 * 2, [ONE, 0x40]),
        (alone * 2, [ONE, 0x40]),
        (lone_odd * 2, [ONE, 0x40]),
        (small + alone, [ONE, 0x7E]),
        ([0b0_11_00, *[0b1_11_00] * 31], [ONE, ONE]),
    ]


@pytest.mark.parametrize(
    ("small", "last_zero", "reaches_two"),
    [
        (0x38, 1, 0b11),  # 1: the plain remap
        (0x37, 2, 0b11),  # 15/16: 1 falls short, 4 is 3.75
        (0x36, 2, 0b11),  # 14/16: 4 is 3.5 exactly
        (0x35, 2, 0b10),  # 13/16: 4 is 3.25, 6 is 4.875
        (0x33, 2, 0b10),  # 11/16: 1.5 is 1.03
        (0x32, 3, 0b10),  # 10/16: 1.5 is 0.94, 6 is 3.75
        (0x31, 3, 0b00),  # 9/16: 6 is 3.375
        (0x30, 3, 0b00),  # 1/2: 2 is 1 exactly
        (0x2F, 4, 0b00),  # 15/32: 2 is 0.94, 3 is 1.41
        (0x2B, 4, 0b00),  # 11/32: 3 is 1.03
        (0x2A, 5, 0b00),  # 10/32: 3 is 0.94
        (0x28, 5, 0b00),  # 1/4: 4 is 1 exactly
        (0x27, 6, 0b00),  # 15/64: 4 is 0.94
        (0x23, 6, 0b00),  # 11/64: 6 is 1.03
        (0x22, 7, 0b00),  # 10/64: nothing is worth the pair scale
        (0x01, 7, 0b00),
        (0x00, 7, 0b00),
    ],
)
def test_digits_start_at_the_thresholds_of_the_pair_scale(small, last_zero, reaches_two):
    """Beside a scale of 1, in either order."""
    rows = [{"scales": ONE << 8 | small}, {"scales": small << 8 | ONE}]
    first, second = evaluate(PairScale(), rows, ["pair", "last_zero", "reaches_two"])
    assert first == (ONE, 1 << 3 | last_zero, 0b11 << 2 | reaches_two)
    assert second == (ONE, last_zero << 3 | 1, reaches_two << 2 | 0b11)


def test_the_pair_scale_is_the_larger_byte_and_keeps_a_bad_one_visible():
    cases = {
        (0x00, 0x00): 0x00,
        (0x00, 0x01): 0x01,
        (0x7E, 0x08): 0x7E,
        (0x07, 0x08): 0x08,
        (0x7F, 0x7E): 0x7F,
        (0x81, 0x38): 0xB8,
        (0x38, 0xFF): 0xFF,
    }
    rows = [{"scales": second << 8 | first} for first, second in cases]
    assert evaluate(PairScale(), rows, ["pair"]) == [(pair,) for pair in cases.values()]


def test_group_scaling_keeps_every_scale_even_rows_first_and_none_of_the_odd_row_in_nvfp4_mode():
    codes, scales = [7] * 32, ((0x11, 0x22), (0x33, 0x44))
    rows = [row(mode, codes, [10] * 32, *scales) for mode in (0, 1)]
    assert encoded(WeightEncoderConfig(scaling="group"), rows) == [
        ([0b0_10_01] * 32, [0x11, 0x22, 0x33, 0x44]),
        ([TABLE_8[7]] * 32, [0x11, 0x22, 0, 0]),
    ]


@pytest.mark.parametrize(
    "config", [WeightEncoderConfig(registered=True), WeightEncoderConfig(scaling="group")], ids=["registered", "group"]
)
def test_random_rows_are_encoded_as_in_the_model(config, seed):
    rng = np.random.default_rng(seed)
    mode = rng.integers(0, 4, 200) == 0
    even, odd = rng.integers(0, 16, (2, 200, 32), dtype=np.uint8)
    # Scales of a pair lie at most four binades apart, from zero to the largest.
    base = rng.integers(0, 0x7F, (2, 200, 1))
    scales = np.clip(base + rng.integers(-32, 33, (2, 200, 2)), 0, 0x7E).astype(np.uint8)
    w, w_scale = encode(mode, even, odd, *scales, config.scaling)
    rows = [row(*vector) for vector in zip(mode, even, odd, *scales, strict=True)]
    assert encoded(config, rows) == list(zip(w.tolist(), w_scale.tolist(), strict=True))
    assert 20 < mode.sum() < 100
    assert len(np.unique(w)) == 25  # 16 of two digits, 8 of one, 1 of none


def test_latency_says_whether_the_outputs_are_registers():
    assert [WeightEncoder(WeightEncoderConfig(registered=flag)).latency for flag in (False, True)] == [0, 1]
    rows = [row(1, [code] * 32, [0] * 32, (code, code), (0, 0)) for code in (1, 2, 3)]
    config = WeightEncoderConfig(registered=True)
    found = evaluate(WeightEncoder(config), rows, ["w_scale"], clocked=True, latency=1)
    assert found == [(0x0101,), (0x0202,), (0x0303,)]


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"lanes": 24}, ValueError, "lanes must be a positive multiple of 32, not 24"),
        ({"lanes": 32.0}, TypeError, "lanes must be an integer, not 32.0"),
        ({"scaling": "row"}, ValueError, "scaling must be one of pair, group, not 'row'"),
        ({"registered": 1}, TypeError, "registered must be true or false, not 1"),
    ],
)
def test_bad_parameters_are_named(parameters, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        WeightEncoder(WeightEncoderConfig(**parameters))
