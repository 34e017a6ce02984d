"""Small formats against ml_dtypes, which nobody here wrote."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.formats import CHUNK, E2M1, E2M3, E4M3, is_nan_scale, scale_exponent, scale_significand

REFERENCE = {"E2M1": ml_dtypes.float4_e2m1fn, "E2M3": ml_dtypes.float6_e2m3fn, "E4M3": ml_dtypes.float8_e4m3fn}
FORMATS = pytest.mark.parametrize("element", [E2M1, E2M3, E4M3], ids=lambda element: element.name)


def reference_codes(element, values):
    return values.astype(REFERENCE[element.name]).view(np.uint8)


@FORMATS
def test_every_code_decodes_as_ml_dtypes(element):
    codes = np.arange(2 * element.sign_mask, dtype=np.uint8)
    values = codes.view(REFERENCE[element.name]).astype(np.float32)
    finite = np.isfinite(values)
    assert finite.sum() == 2 * (element.max_code + 1)
    decoded = element.decode(codes[finite])
    assert (decoded == values[finite]).all()
    assert (np.signbit(decoded) == np.signbit(values[finite])).all()


@FORMATS
def test_every_code_survives_decode_and_encode_with_its_sign(element):
    codes = np.concatenate([np.arange(element.max_code + 1), element.sign_mask + np.arange(element.max_code + 1)])
    assert (element.encode(element.decode(codes)) == codes).all()


@FORMATS
def test_a_million_random_floats_encode_as_ml_dtypes_after_clamping(element, seed):
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 2**32, 1_400_000, dtype=np.uint32).view(np.float32)
    near = rng.normal(scale=element.max / 3, size=700_000).astype(np.float32)
    values = np.concatenate([patterns[np.isfinite(patterns)], near])
    codes = element.encode(values)
    expected = reference_codes(element, np.clip(values, -element.max, element.max))
    assert len(values) >= 1_000_000
    assert (codes == expected).all()
    assert (codes & (element.sign_mask - 1) != 0).mean() > 0.3


@FORMATS
def test_every_midpoint_and_both_neighbours_encode_as_ml_dtypes(element):
    middle = ((element.magnitudes[:-1].astype(np.float64) + element.magnitudes[1:]) / 2).astype(np.float32)
    around = np.concatenate([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))])
    values = np.concatenate([around, -around])
    assert (element.encode(values) == reference_codes(element, values)).all()
    # Ties go to the even code.
    assert (element.encode(middle) % 2 == 0).all()


def test_case_half_away_from_zero_at_midpoints():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    assert E2M1.decode(E2M1.encode(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert E2M1.decode(E2M1.encode(-ties)).tolist() == [0, -1, -1, -2, -2, -4, -4]


def test_case_sticky_bits_are_kept():
    assert E2M1.decode(E2M1.encode([0.25000003])).tolist() == [0.5]


def test_case_scale_subnormals_decode_exactly():
    assert E4M3.decode(np.arange(1, 9)).tolist() == [*(k * 2.0**-9 for k in range(1, 8)), 2.0**-6]


def test_case_scales_with_full_exponent_field_do_not_saturate():
    assert E4M3.encode([256, 288, 416, 448, 464, 1e9]).tolist() == [0x78, 0x79, 0x7D, 0x7E, 0x7E, 0x7E]


def test_case_bad_scale_bytes_are_recognised():
    assert np.flatnonzero(is_nan_scale(np.arange(256, dtype=np.uint8))).tolist() == list(range(0x7F, 0x100))
    for byte in (0x7F, 0xFF):
        with pytest.raises(ValueError, match=rf"^codes must be finite E4M3 codes, not {byte:#04x} at index \(1,\)$"):
            E4M3.decode([0, byte])


def test_significand_and_exponent_give_the_scale_for_every_byte():
    scales = np.arange(E4M3.max_code + 1, dtype=np.uint8)
    assert (scale_significand(scales) * 2.0 ** (scale_exponent(scales) - 10) == E4M3.decode(scales)).all()
    assert scale_significand(scales).max() == 15


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_value_that_is_not_finite_is_named(bad):
    with pytest.raises(ValueError, match=rf"^x must be finite, not {bad} at index \(1, 0\)$"):
        E2M1.encode([[0, 1], [bad, bad]])


@pytest.mark.parametrize("bad", [-1, 16, 255])
def test_code_out_of_range_is_named(bad):
    with pytest.raises(ValueError, match=r"^codes must be finite E2M1 codes, not .* at index \(0,\)$"):
        E2M1.decode([bad])


def test_codes_must_be_integers():
    with pytest.raises(TypeError, match=r"^codes must be integers, not float64$"):
        E2M1.decode([0.5])


@FORMATS
def test_every_upper_half_of_a_float_encodes_as_ml_dtypes(element):
    """All signs, exponents and upper seven fraction bits, with the lower half at its ends and beside them."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    values = np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]).view(np.float32)
    values = values[np.isfinite(values)]
    expected = reference_codes(element, np.clip(values, -element.max, element.max))
    assert (element.encode(values) == expected).all()


@FORMATS
@settings(max_examples=300, deadline=None)
@given(x=st.floats(-1e4, 1e4, width=32), y=st.floats(-1e4, 1e4, width=32))
def test_encoding_is_monotonic_odd_and_nearest(element, x, y):
    low, high = sorted([x, y])
    values = element.decode(element.encode([low, high, -low]))
    assert values[0] <= values[1]
    assert values[2] == -values[0]
    every = np.concatenate([element.magnitudes, -element.magnitudes]).astype(np.float64)
    assert abs(float(values[0]) - low) == np.abs(every - low).min()


@FORMATS
def test_any_shape_stride_and_size_is_encoded_alike(element, seed):
    whole = np.random.default_rng(seed).normal(size=(3, 2 * CHUNK + 5)).astype(np.float32)
    codes = element.encode(whole)
    assert codes.shape == whole.shape
    assert (element.encode(whole[:, ::2]) == codes[:, ::2]).all()
    assert (element.encode(whole.T) == codes.T).all()
    assert element.encode(whole[1, 7]) == codes[1, 7]
    assert element.encode(whole[:, :0]).shape == (3, 0)
    for part in (codes, codes[:, ::2], codes.T, codes[0, :3], codes[:0]):
        assert (element.decode(part) == element.decode(part.astype(np.int64))).all()
