"""NVFP4 and FP6g against a plain loop over equations 2 and 3, and the public cases."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from model.block_scaled import BlockScaled, dequantize, effective_scales, quantize
from model.formats import CHUNK, E2M1, E2M3

F32 = np.float32


def by_the_book(x, element, name):
    """Return codes, scales and T by one float32 operation after another, with ml_dtypes for every rounding."""
    kind = {"E2M1": ml_dtypes.float4_e2m1fn, "E2M3": ml_dtypes.float6_e2m3fn}[name]
    top = F32(element.max)
    amax = F32(np.abs(x).max())
    t = F32(amax / F32(top * F32(448))) if amax > 0 else F32(1)
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((x.shape[0], x.shape[1] // 16), np.uint8)
    for row in range(x.shape[0]):
        for j in range(x.shape[1] // 16):
            group = x[row, 16 * j : 16 * j + 16]
            ratio = F32(F32(np.abs(group).max()) / F32(top * t))
            b = np.array([min(ratio, F32(448))], F32).astype(ml_dtypes.float8_e4m3fn)
            scales[row, j] = b.view(np.uint8)[0]
            if scales[row, j]:
                values = np.clip(group / F32(t * b.astype(F32)[0]), -top, top).astype(F32)
                codes[row, 16 * j : 16 * j + 16] = values.astype(kind).view(np.uint8)
    return codes, scales, t


@pytest.mark.parametrize("element", [E2M1, E2M3], ids=lambda element: element.name)
@pytest.mark.parametrize("kind", ["gaussian", "laplace", "outliers", "rows of all sizes"])
def test_quantize_follows_the_equations(element, kind, seed):
    rng = np.random.default_rng(seed)
    x = {
        "gaussian": rng.normal(size=(48, 96)),
        "laplace": rng.laplace(size=(48, 96)),
        "outliers": rng.normal(size=(48, 96)) * np.where(rng.random((48, 96)) < 0.01, 1000, 1),
        "rows of all sizes": rng.normal(size=(48, 96)) * 2.0 ** rng.integers(-20, 3, (48, 1)),
    }[kind].astype(F32)
    tensor = quantize(x, element)
    codes, scales, t = by_the_book(x, element, element.name)
    assert tensor.tensor_scale == t
    assert (tensor.scales == scales).all()
    assert (tensor.codes == codes).all()
    assert (codes != 0).mean() > 0.2


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(F32, (2, 32), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_quantize_follows_the_equations_for_any_floats(x):
    tensor = quantize(x)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        codes, scales, t = by_the_book(x, E2M1, "E2M1")
    if t > 0:
        assert (tensor.scales == scales).all()
        steps = np.repeat(effective_scales(tensor), 16, axis=1)
        assert (tensor.codes == codes)[steps > 0].all()


@pytest.mark.parametrize("k", [1, 15, 16, 17, 32, 33, 100])
def test_any_length_is_padded_and_cropped(k):
    x = np.linspace(-3, 3, 2 * k, dtype=F32).reshape(2, k)
    tensor = quantize(x)
    assert tensor.codes.shape == (2, -(-k // 32) * 32)
    assert tensor.length == k
    assert dequantize(tensor).shape == (2, k)
    assert (tensor.codes[:, k:] == 0).all()


def test_case_scale_above_464_saturates_instead_of_becoming_nan():
    for ratio in (464, 465, 480):
        tensor = quantize(np.full(32, 6 * ratio, F32), tensor_scale=1.0)
        assert tensor.scales.tolist() == [0x7E, 0x7E]
        assert (dequantize(tensor) == 6 * 448).all()


def test_case_zero_group_has_scale_zero():
    x = np.zeros(32, F32)
    x[3] = 1
    tensor = quantize(x)
    assert tensor.scales[1] == 0
    assert (tensor.codes[16:] == 0).all()
    assert not (tensor.scales == 0x7F).any()


def test_case_lower_clamp_does_not_hide_zero_groups():
    x = np.zeros(32, F32)
    x[0] = 2688
    tensor = quantize(x)
    assert (tensor.tensor_scale, tensor.scales.tolist(), int(tensor.codes[0])) == (1, [0x7E, 0], 7)
    assert (dequantize(tensor) == x).all()


def test_case_tensor_scale_is_amax_over_2688():
    tensor = quantize(np.array([1.5], F32))
    assert tensor.tensor_scale == F32(1.5) / F32(2688)
    assert dequantize(tensor).tolist() == [1.5]
    reciprocal = BlockScaled(tensor.codes, tensor.scales, F32(2688 / 1.5), tensor.length)
    assert dequantize(reciprocal)[0] > 1e6


def test_case_fused_matrices_need_their_own_tensor_scale_or_new_scales(seed):
    """Two matrices with T = 4.83e-5 and 3.85e-5 put under one T."""
    x = np.random.default_rng(seed).normal(size=(2, 512)).astype(F32)
    x *= (2688 * np.array([4.83e-5, 3.85e-5]) / np.abs(x).max(axis=1))[:, None].astype(F32)
    first, second = quantize(x[0]), quantize(x[1])
    assert np.isclose([first.tensor_scale, second.tensor_scale], [4.83e-5, 3.85e-5], rtol=1e-5).all()
    power = np.square(x[1]).mean()

    def error(tensor):
        return np.square(dequantize(tensor) - x[1]).mean() / power

    assert error(second) < 0.012
    assert error(quantize(x[1], tensor_scale=float(first.tensor_scale))) < 0.012
    assert error(BlockScaled(second.codes, second.scales, first.tensor_scale, second.length)) > 0.05


def test_case_random_data_gives_more_codes_than_zeros(seed):
    for element in (E2M1, E2M3):
        codes = quantize(np.random.default_rng(seed).normal(size=(64, 256)), element).codes
        assert (codes & (element.sign_mask - 1) != 0).mean() > 0.5


def test_pieces_of_a_large_matrix_are_those_of_its_rows(seed):
    x = np.random.default_rng(seed).normal(size=(5, 3 * CHUNK // 2 + 48)).astype(F32)
    whole = quantize(x)
    for row in range(5):
        alone = quantize(x[row], tensor_scale=float(whole.tensor_scale))
        assert (alone.codes == whole.codes[row]).all()
        assert (alone.scales == whole.scales[row]).all()
    assert (quantize(np.asfortranarray(x)).codes == whole.codes).all()
    assert (quantize(x.reshape(5, 3, -1)).codes.reshape(5, -1)[:, :64] == whole.codes[:, :64]).all()


def test_values_beyond_a_given_tensor_scale_saturate_however_large():
    for value in (1e5, 1e30, 3e38):
        tensor = quantize(np.array([value, -value, 0, 1e-3], F32), tensor_scale=1e-9)
        assert dequantize(tensor)[:2].tolist() == [F32(1e-9) * F32(448) * 6, -F32(1e-9) * F32(448) * 6]


def test_tensor_of_subnormals_stays_finite():
    x = np.full(32, 1e-45, F32)
    tensor = quantize(x)
    assert tensor.tensor_scale > 0
    assert np.isfinite(dequantize(tensor)).all()


@pytest.mark.parametrize("amax", [1e-35, 1e-37, 1e-40])
def test_tensor_scale_may_be_subnormal(amax, seed):
    x = np.random.default_rng(seed).uniform(-amax, amax, (4, 64)).astype(F32)
    tensor = quantize(x)
    codes, scales, t = by_the_book(x, E2M1, "E2M1")
    assert 0 < t < np.finfo(F32).smallest_normal
    assert tensor.tensor_scale == t
    assert (tensor.scales == scales).all()
    assert (tensor.codes == codes).all()


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_case_nan_scale_byte_is_rejected(byte):
    good = quantize(np.ones(32, F32))
    with pytest.raises(ValueError, match=rf"^scales must be from 0x00 to 0x7e, not {byte:#04x} at index \(1,\)$"):
        BlockScaled(good.codes, np.array([0, byte], np.uint8), good.tensor_scale, 32)


@pytest.mark.parametrize("k", [8, 17])
def test_case_codes_of_a_wrong_k_are_named(k):
    with pytest.raises(ValueError, match=rf"^codes must have a multiple of 32 elements along K, not {k}$"):
        BlockScaled(np.zeros(k, np.uint8), np.zeros(1, np.uint8), F32(1), k)


def test_all_zero_tensor():
    tensor = quantize(np.zeros((2, 32), F32))
    assert tensor.tensor_scale == 1
    assert not tensor.scales.any()
    assert not tensor.codes.any()


def test_group_whose_scale_rounds_to_zero_decodes_to_zeros():
    x = np.full(32, 1e-9, F32)
    x[:16] = 1
    tensor = quantize(x)
    assert tensor.scales[1] == 0
    assert not tensor.codes[16:].any()


def test_minus_zero_keeps_its_sign_like_ml_dtypes():
    x = np.full(32, -1e-6, F32)
    x[0] = 1
    assert quantize(x).codes[1] == 8


def test_shared_scale_of_32_elements(seed):
    x = np.random.default_rng(seed).normal(size=(8, 64)).astype(F32)
    tensor = quantize(x, shared_groups=2)
    assert (tensor.scales[:, 0::2] == tensor.scales[:, 1::2]).all()
    own = quantize(x)
    assert (tensor.scales[:, 0::2] == np.maximum(own.scales[:, 0::2], own.scales[:, 1::2])).all()


@pytest.mark.parametrize("element", [E2M1, E2M3], ids=lambda element: element.name)
def test_error_is_at_most_half_a_step_unless_saturated(element, seed):
    x = np.random.default_rng(seed).normal(size=(64, 256)).astype(F32)
    tensor = quantize(x, element)
    steps = np.repeat(effective_scales(tensor), 16, axis=1)
    inside = np.abs(x) <= element.max * steps
    largest = np.diff(element.magnitudes).max()
    assert (np.abs(dequantize(tensor) - x)[inside] <= (0.5001 * largest * steps)[inside]).all()


def test_bad_input_is_named():
    x = np.zeros((2, 32), F32)
    x[1, 5] = np.nan
    with pytest.raises(ValueError, match=r"^x must be finite, not nan at index \(1, 5\)$"):
        quantize(x)
    with pytest.raises(ValueError, match=r"^x must have at least one element along its last axis, not shape \(2, 0\)$"):
        quantize(np.zeros((2, 0), F32))
    with pytest.raises(ValueError, match=r"^shared_groups must be 1 or 2, not 3$"):
        quantize(np.zeros(32, F32), shared_groups=3)
    with pytest.raises(ValueError, match=r"^tensor_scale must be positive and finite, not 0$"):
        quantize(np.zeros(32, F32), tensor_scale=0)
    good = quantize(np.ones(32, F32))
    with pytest.raises(ValueError, match=r"^scales must have shape \(2,\), not \(1,\)$"):
        BlockScaled(good.codes, good.scales[:1], good.tensor_scale, 32)
    with pytest.raises(ValueError, match=r"^length must be from 1 to 32, not 33$"):
        BlockScaled(good.codes, good.scales, good.tensor_scale, 33)
