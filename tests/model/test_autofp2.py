"""AutoFP2 digits against their definition in fractions."""

from fractions import Fraction

import numpy as np
import pytest

from model.autofp2 import C, dequantize, digits, pair_digits, pair_scales, remap
from model.block_scaled import quantize
from model.formats import E2M1, E2M3, E4M3


def test_remap_is_the_paper_s_boolean_rule():
    for code in range(16):
        e1, e0 = (code >> 2) & 1, (code >> 1) & 1
        magnitude = 2 * (e1 & e0) + (e1 ^ e0)
        assert remap(code) == (-magnitude if code & 8 else magnitude)


def test_pair_digits_follow_the_definition_for_every_code_and_pair_of_scales():
    """All 127 x 127 valid scale bytes and all 16 codes, against exact fractions."""
    scale = [Fraction(float(value)) for value in E4M3.decode(np.arange(127))]
    magnitude = [Fraction(float(value)) for value in E2M1.magnitudes]
    expected = np.empty((127, 127, 16), np.int8)
    for own in range(127):
        for other in range(127):
            shared = max(scale[own], scale[other])
            for code in range(16):
                q = magnitude[code & 7]
                if scale[own] == shared:
                    digit = int(remap(code & 7))
                else:
                    digit = 0 if q * scale[own] < shared else 2 if q * scale[own] >= Fraction(7, 2) * shared else 1
                expected[own, other, code] = -digit if code & 8 else digit
    own, other = np.meshgrid(np.arange(127, dtype=np.uint8), np.arange(127, dtype=np.uint8), indexing="ij")
    codes = np.tile(np.arange(16, dtype=np.uint8), (127, 127, 2))
    got = pair_digits(codes, np.stack([own, other], axis=-1))
    assert (got[..., :16] == expected).all()
    assert (got[..., 16:] == expected.transpose(1, 0, 2)).all()


def test_pair_scale_is_the_larger_and_keeps_a_bad_sign_visible():
    assert pair_scales(np.array([[0x10, 0x38], [0x80, 0x38], [0x7F, 0x01]], np.uint8)).tolist() == [
        [0x38],
        [0xB8],
        [0x7F],
    ]


def test_case_minus_zero_is_zero():
    assert remap(8) == 0
    assert not pair_digits(np.full(32, 8, np.uint8), np.array([0, 0], np.uint8)).any()


def test_case_c_is_applied_after_scaling():
    x = np.zeros(32, np.float32)
    x[0] = 6
    tensor = quantize(x, tensor_scale=1 / 240)
    assert tensor.scales[0] == 0x77
    assert dequantize(tensor, "group")[0] == np.float32(2 * C * 240) * tensor.tensor_scale


@pytest.mark.parametrize("scaling", ["pair", "group"])
def test_values_are_digits_times_scales(scaling, seed):
    x = np.random.default_rng(seed).normal(size=(4, 64)).astype(np.float32)
    tensor = quantize(x)
    d, scales = digits(tensor, scaling)
    expected = 2 * d * np.repeat(E4M3.decode(scales), 16, axis=1) * tensor.tensor_scale
    assert np.allclose(dequantize(tensor, scaling), expected, rtol=1e-6)
    assert (d != 0).mean() > 0.5


def test_bad_input_is_named():
    x = quantize(np.ones(32, np.float32), E2M3)
    with pytest.raises(ValueError, match=r"^weights must be NVFP4, not blocks of E2M3$"):
        digits(x)
    with pytest.raises(ValueError, match=r"^scaling must be pair or group, not 'row'$"):
        digits(quantize(np.ones(32, np.float32)), "row")
    with pytest.raises(ValueError, match=r"^scales must come in pairs along the last axis, not 3$"):
        pair_scales(np.zeros(3, np.uint8))
