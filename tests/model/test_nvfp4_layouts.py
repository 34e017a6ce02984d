"""NVFP4 checkpoints of other tools, made here from their published definitions, give the dense values of those definitions."""

import json

import ml_dtypes
import numpy as np
import pytest

from model import checkpoint, llm
from model.block_scaled import quantize
from model.nvfp4_layouts import COMPRESSED_TENSORS, LAYOUTS, MODELOPT
from tests.tiny_llama import folder_tensors, save_codes, tiny_tensors, write_folder

SIZES = {"layers": 1, "width": 48, "hidden": 80, "heads": 4, "kv_heads": 2, "size": 16, "tokens": 30}
E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
CONFIGURATIONS = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
}


def foreign(layout, module, w):
    """Quantise as the tools do, with numbers of `ml_dtypes`; return their tensors, and the dense matrix as they dequantise it."""
    amax = np.abs(w).max()
    groups = w.reshape(len(w), -1, 16)
    if layout == "modelopt":
        outer = np.float32(amax / (6.0 * 448.0))
        scales = (np.abs(groups).max(axis=2) / (6 * outer)).clip(max=448).astype(E4M3)
        steps = scales.astype(np.float32) * outer
    else:
        outer = np.float32(448.0 * 6.0 / amax)
        scales = (outer * np.abs(groups).max(axis=2) / 6).clip(max=448).astype(E4M3)
        steps = scales.astype(np.float32) / outer
    codes = (groups / steps[..., None]).astype(E2M1)
    bits = codes.view(np.uint8).reshape(w.shape) & 15
    packed = bits[:, 0::2] | bits[:, 1::2] << 4
    dense = (codes.astype(np.float32) * steps[..., None]).reshape(w.shape)
    names = {"modelopt": ("weight", "weight_scale_2"), "compressed-tensors": ("weight_packed", "weight_global_scale")}
    first, last = names[layout]
    shape = () if layout == "modelopt" else (1,)
    parts = {first: packed, "weight_scale": scales, last: np.full(shape, outer, np.float32)}
    # What a tool adds for activations.
    parts["input_scale" if layout == "modelopt" else "input_global_scale"] = np.full(shape, 0.5, np.float32)
    return {f"{module}.{part}": value for part, value in parts.items()}, dense


def foreign_folder(folder, layout, changes=None, **config):
    tensors, dense = {}, {}
    for name, tensor in folder_tensors(tiny_tensors(sizes=SIZES), SIZES["size"]).items():
        if name.endswith("_proj.weight"):
            parts, dense[name] = foreign(layout, name.removesuffix(".weight"), tensor)
            tensors |= parts
        else:
            tensors[name] = dense[name] = tensor
    tensors |= changes or {}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_folder(folder, {}, sizes=SIZES, **({"quantization_config": CONFIGURATIONS[layout]} | config))
    save_codes(folder / "model.safetensors", tensors)
    return folder, dense


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_of_another_tool_are_read_as_it_dequantises_them(tmp_path, layout):
    folder, dense = foreign_folder(tmp_path / "tiny", layout)
    found = llm.load(folder)
    plain = llm.load(write_folder(tmp_path / "plain", dense, sizes=SIZES))
    assert found.weights.keys() == plain.weights.keys()
    for name, weight in found.weights.items():
        np.testing.assert_array_equal(weight, plain.weights[name])
        assert np.count_nonzero(weight) > weight.size / 2
    np.testing.assert_array_equal(found.forward([3, 1, 4]), plain.forward([3, 1, 4]))


def test_the_two_conventions_hold_the_same_matrix_and_are_not_mixed_up(tmp_path):
    # amax = 2688/1792 = 1.5: T = 1.5/2688, of which the other tool stores the reciprocal, 1792.
    w = np.linspace(-1.5, 1.5, 16, dtype=np.float32)[None]
    (a, dense_a), (b, dense_b) = foreign("modelopt", "m", w), foreign("compressed-tensors", "m", w)
    np.testing.assert_allclose(a["m.weight_scale_2"], 1.5 / 2688, rtol=1e-6)
    assert b["m.weight_global_scale"] == 1792
    np.testing.assert_array_equal(a["m.weight"], b["m.weight_packed"])
    np.testing.assert_allclose(dense_a, dense_b, rtol=1e-6)
    assert np.abs(dense_a).max() == pytest.approx(1.5)
    for layout, config in (("modelopt", "compressed-tensors"), ("compressed-tensors", "modelopt")):
        folder, _ = foreign_folder(tmp_path / layout, layout, quantization_config=CONFIGURATIONS[config])
        with pytest.raises(ValueError, match=rf"^tensors must be laid out as {config} does, not model\.layers\.0\."):
            checkpoint.open(folder)
        folder, _ = foreign_folder(tmp_path / f"{layout} none", layout, quantization_config=None)
        with pytest.raises(
            ValueError, match=r"^type of tensor model\.layers\.0\.\S+ must be F32, F16 or BF16, not (U8|F8_E4M3)$"
        ):
            checkpoint.open(folder)


def test_older_exports_say_what_they_are_in_a_file_of_its_own(tmp_path):
    folder, dense = foreign_folder(tmp_path / "tiny", "modelopt", quantization_config=None)
    section = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(section))
    name = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(checkpoint.open(folder).weights["0.down"], dense[name])
    (folder / "hf_quant_config.json").write_text(json.dumps(section | {"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ValueError, match=r"^quantization_config of config\.json must be NVFP4 of modelopt or"):
        checkpoint.open(folder)


NAME = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scale", np.full(1, np.nan, np.float32), "must be positive and finite, not nan"),
        ("scale", np.zeros(1, np.float32), "must be positive and finite, not 0.0"),
        ("scale", -np.ones(1, np.float32), "must be positive and finite, not -1.0"),
        ("scale", np.ones(2, np.float32), r"must be \('F32', \(1?,?\)\), not \('F32', \(2,\)\)"),
        ("weight_scale", np.full((48, 5), 0x7F, np.uint8).view(E4M3), "must be from 0x00 to 0x7e"),
        ("weight_scale", np.full((48, 5), 0x80, np.uint8).view(E4M3), "must be from 0x00 to 0x7e"),
        ("weight_scale", np.zeros((48, 5), np.uint8), r"must be \('F8_E4M3', \(48, 5\)\), not \('U8', \(48, 5\)\)"),
        ("weight_scale", np.zeros((48, 3), E4M3), r"must be \('F8_E4M3', \(48, 5\)\), not \('F8_E4M3', \(48, 3\)\)"),
        ("weight_scale", None, "must have tensor"),
        ("codes", None, "must have tensor"),
        ("codes", np.zeros((48, 36), np.uint8), "K of model.layers.0.mlp.down_proj must be a multiple of 16"),
        ("codes", np.zeros((48, 40, 1), np.uint8), "must have two axes"),
    ],
)
def test_wrong_parts_are_refused(tmp_path, layout, part, value, message):
    change = {f"{NAME}.{getattr(layout, part, part)}": value}
    folder, _ = foreign_folder(tmp_path / "tiny", layout.name, change)
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.read(folder)
    assert NAME in str(caught.value)


@pytest.mark.parametrize("layout", [MODELOPT, COMPRESSED_TENSORS], ids=lambda layout: layout.name)
def test_a_scale_without_reciprocal_and_a_k_without_groups_are_refused(layout):
    tiny = quantize(np.full((1, 32), 1e-38, np.float32))
    if layout.divides:
        with pytest.raises(ValueError, match=r"^tensor_scale of m must have a finite reciprocal, not "):
            layout.arrays("m", tiny)
    with pytest.raises(ValueError, match=r"^K of m must be a multiple of 16 in this format, not 20$"):
        layout.tensors("m", 1, 20)
    section = layout.configuration(["lm_head"])
    assert json.loads(json.dumps(section)) == section
    assert section["ignore"] == ["lm_head"]
