"""Encoder model: it is the composition of digits, pair rule and packing, and what it makes the vMAC reads back."""

import numpy as np
import pytest

from model.autofp2 import digits
from model.block_scaled import quantize
from model.formats import E2M1
from model.packed_pair import unpack
from model.weight_encoder import WeightEncoderConfig, encode


def test_nvfp4_mode_gives_twice_the_weight_and_passes_the_scales(seed):
    rng = np.random.default_rng(seed)
    rows, scales = rng.integers(0, 16, (2, 500, 32), dtype=np.uint8), rng.integers(0, 127, (2, 500, 2), dtype=np.uint8)
    w, w_scale = encode(np.ones(500, bool), *rows, *scales)
    q0, q1 = unpack(w)
    assert (5 * q0.astype(int) + 2 * q1 == 2 * E2M1.decode(rows[0])).all()
    assert (w_scale == scales[0]).all()


@pytest.mark.parametrize("scaling", ["pair", "group"])
def test_autofp2_mode_pairs_the_digits_of_two_rows(scaling, seed):
    x = np.random.default_rng(seed).normal(size=(2, 64)).astype(np.float32) * [[1], [3]]
    tensor = quantize(x)
    d, scales = digits(tensor, scaling)
    w, w_scale = encode(np.zeros(2, bool), *tensor.codes.reshape(2, 2, 32), *tensor.scales.reshape(2, 2, 2), scaling)
    q0, q1 = unpack(w)
    assert (q0.reshape(-1) == d[0]).all()
    assert (q1.reshape(-1) == d[1]).all()
    if scaling == "pair":
        assert (w_scale == np.stack([scales[0, ::2], scales[1, ::2]], axis=1)).all()
    else:
        assert (w_scale == np.concatenate(scales.reshape(2, 2, 2), axis=1)).all()


def test_case_minus_zero_gives_two_zero_digits():
    codes = np.full((2, 32), 8, np.uint8)
    w, _ = encode(np.array([True, False]), codes, codes, *np.zeros((2, 2, 2), np.uint8))
    assert (w == 0b11100).all()


def test_bad_input_is_named():
    row, scale = np.zeros((1, 32), np.uint8), np.zeros((1, 2), np.uint8)
    with pytest.raises(ValueError, match=r"^row_odd must have shape \(1, 32\), not \(1, 16\)$"):
        encode(np.zeros(1, bool), row, row[:, :16], scale, scale)
    with pytest.raises(ValueError, match=r"^lanes must be a positive multiple of 32, not 17$"):
        encode(np.zeros(1, bool), row[:, :17], row[:, :17], scale, scale)
    with pytest.raises(TypeError, match=r"^registered must be true or false, not 1$"):
        WeightEncoderConfig(registered=1)


@pytest.mark.parametrize("scaling", ["pair", "group"])
def test_wide_vectors_are_their_segments(scaling, seed):
    """64 lanes are two vectors of 32 lanes side by side; with group scaling the rows' scales are kept apart."""
    rng = np.random.default_rng(seed)
    rows, scales = rng.integers(0, 16, (2, 40, 64), dtype=np.uint8), rng.integers(0, 127, (2, 40, 4), dtype=np.uint8)
    mode = rng.random(40) < 0.5
    w, w_scale = encode(mode, *rows, *scales, scaling)
    halves = [
        encode(mode, *rows[:, :, 32 * i : 32 * i + 32], *scales[:, :, 2 * i : 2 * i + 2], scaling) for i in range(2)
    ]
    assert (w == np.concatenate([half[0] for half in halves], axis=1)).all()
    split = [half[1].reshape(40, -1, 2) for half in halves]
    assert (w_scale == np.concatenate(split, axis=2 if scaling == "group" else 1).reshape(40, -1)).all()
    assert (w_scale[mode, :4] == scales[0][mode]).all()
    if scaling == "group":
        assert not w_scale[mode, 4:].any()
        assert (w_scale[~mode] == np.concatenate(scales, axis=1)[~mode]).all()
    else:
        expected = scales.reshape(2, 40, 2, 2).max(axis=3).transpose(1, 2, 0).reshape(40, 4)
        assert (w_scale[~mode] == expected[~mode]).all()
