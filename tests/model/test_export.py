"""Packages in other forms, read back by readers that follow the published layouts."""

import hashlib
import json

import ml_dtypes
import numpy as np
import pytest

from model import autofp6, block_scaled, checkpoint
from model.export import FORMATS, export, main
from model.nvfp4_layouts import LAYOUTS
from model.package import Package
from sim.gemm import operands_of
from sim.image import Image
from tests.packages import CONFIG, refined_matrix, write_model, write_package

PARTS = {
    "qkv": [("self_attn.q_proj", 64), ("self_attn.k_proj", 32), ("self_attn.v_proj", 32)],
    "o": [("self_attn.o_proj", 48)],
    "gate_up": [("mlp.gate_proj", 80), ("mlp.up_proj", 80)],
    "down": [("mlp.down_proj", 48)],
}


TYPES = {"U8": np.uint8, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def tensors_of(path):
    """Read a safetensors file by its published layout."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__")
    return {
        name: np.frombuffer(data[slice(*(start + at for at in e["data_offsets"]))], TYPES[e["dtype"]]).reshape(
            e["shape"]
        )
        for name, e in header.items()
    }


def dense(tensors, module, layout):
    """Dequantise a module as the published definition says, with the numbers of `ml_dtypes`."""
    suffixes = {
        "modelopt": ("weight", "weight_scale_2"),
        "compressed-tensors": ("weight_packed", "weight_global_scale"),
    }
    packed, outer = (tensors[f"{module}.{suffix}"] for suffix in suffixes[layout])
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1).view(ml_dtypes.float4_e2m1fn)
    scales = tensors[f"{module}.weight_scale"]
    assert (packed.dtype, scales.dtype, outer.dtype) == (np.uint8, ml_dtypes.float8_e4m3fn, np.float32)
    scales = scales.astype(np.float32)
    steps = scales * outer if layout == "modelopt" else scales / outer
    return codes.astype(np.float32) * np.repeat(steps, 16, axis=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_other_tools_read_the_nvfp4_part(tmp_path, seed, layout, tied):
    path, matrices, plain = write_model(tmp_path / "p.safetensors", np.random.default_rng(seed), tied)
    out = tmp_path / "out"
    assert main([str(path), "--format", layout, "-o", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    section = config["quantization_config"]
    assert (section["quant_method"], section["ignore"]) == (layout, ["lm_head"])
    assert section["config_groups"]["group_0"]["weights"]["group_size"] == 16
    assert section["config_groups"]["group_0"]["input_activations"] is None
    if layout == "modelopt":
        beside = json.loads((out / "hf_quant_config.json").read_text())
        details = beside["quantization"]
        assert beside["producer"]["name"] == "modelopt"
        assert (section["quant_algo"], details["quant_algo"], details["group_size"]) == (*["W4A16_NVFP4"] * 2, 16)
    else:
        assert section["format"] == "nvfp4-pack-quantized"
        assert section["config_groups"]["group_0"]["weights"]["strategy"] == "tensor_group"
    assert config["tie_word_embeddings"] == tied
    compared = 0
    tensors = tensors_of(out / "model.safetensors")
    names = set(tensors)
    for ours, tensor in matrices.items():
        layer, name = ours.split(".")
        expected, start = block_scaled.dequantize(tensor.base), 0
        for part, rows in PARTS[name]:
            module = f"model.layers.{layer}.{part}"
            found = dense(tensors, module, layout)
            # Of a reciprocal in float32 the reciprocal is another number.
            tolerance = 0 if layout == "modelopt" else 2.0**-22
            np.testing.assert_allclose(found, expected[start : start + rows], rtol=tolerance)
            compared += np.count_nonzero(found)
            start += rows
            names -= {name for name in names if name.startswith(f"{module}.")}
        assert start == len(expected)
    np.testing.assert_array_equal(tensors["model.layers.1.input_layernorm.weight"], plain["1.attention_norm"])
    assert compared > 0.6 * sum(tensor.base.codes.size for tensor in matrices.values())
    top = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    norms = {f"model.layers.{i}.{n}_layernorm.weight" for i in range(2) for n in ("input", "post_attention")}
    assert names == top | norms
    # Our own reader needs a tokenizer beside it.
    (out / "tokenizer.json").write_text(TOKENIZER)
    found = checkpoint.open(out)
    assert found.config == CONFIG
    tolerance = 0 if layout == "modelopt" else 2.0**-22
    for name, tensor in matrices.items():
        np.testing.assert_allclose(found.weights[name], block_scaled.dequantize(tensor.base), rtol=tolerance)
    for name, array in plain.items():
        np.testing.assert_array_equal(found.weights[name], array)


TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})


def test_the_image_is_what_the_driver_places(tmp_path, seed):
    path, matrices, _ = write_model(tmp_path / "p.safetensors", np.random.default_rng(seed))
    out = tmp_path / "out"
    assert main([str(path), "--format", "image", "-o", str(out)]) == 0
    index, octets = json.loads((out / "index.json").read_text()), (out / "image.bin").read_bytes()
    assert (len(octets), hashlib.sha256(octets).hexdigest()) == (index["size"], index["sha256"])
    assert (index["step"], index["slots"]) == ("fixed", 2)
    used = np.zeros(len(octets), int)
    for name, tensor in matrices.items():
        found, rows = index["matrices"][name], len(tensor.base.codes)
        assert (found["n"], found["k"], found["refined"]) == (rows, tensor.base.length, int(tensor.mask.sum()))
        image = Image()
        operand = image.store_operand(operands_of(tensor))
        for part in ("codes", "scales", "masks", "offsets"):
            place = found["arrays"][part]
            assert place["offset"] % 64 == 0
            assert place["stride"] == getattr(operand, f"{part}_stride")
            count = 1 if part == "masks" else rows
            stride = max(place["stride"], -(-place["bytes"] // 16) * 16)
            start = getattr(operand, part) - image.base
            expected = image.contents[start : start + count * stride].tobytes()
            assert octets[place["offset"] : place["offset"] + count * stride] == expected
            used[place["offset"] : place["offset"] + count * stride] += 1
            assert any(expected)
        place = found["arrays"]["tensor_scale"]["offset"]
        assert np.frombuffer(octets[place : place + 4], "<f4")[0] == tensor.base.tensor_scale
        used[place : place + 4] += 1
    assert used.max() == 1
    assert not np.frombuffer(octets, np.uint8)[used == 0].any()


def test_numbers_made_from_the_image_are_those_of_the_package(tmp_path, seed):
    tensor = refined_matrix(np.random.default_rng(seed), 3, 40, density=0.5)
    export(Package(write_package(tmp_path / "p.safetensors", {"0.o": tensor})), "image", tmp_path / "out")
    octets = np.fromfile(tmp_path / "out/image.bin", np.uint8)
    arrays = json.loads((tmp_path / "out/index.json").read_text())["matrices"]["0.o"]["arrays"]

    def byte(part, n, at):
        return int(octets[arrays[part]["offset"] + n * arrays[part]["stride"] + at])

    expected = autofp6.dequantize(tensor)
    t = np.frombuffer(octets[arrays["tensor_scale"]["offset"] :][:4], "<f4")[0]
    for n in range(3):
        place = -1
        for k in range(40):
            refined = byte("masks", 0, k // 32) >> (k // 16 % 2 * 4 + k // 4 % 4) & 1
            place += refined and k % 4 == 0
            d = (byte("offsets", n, place) >> 2 * (k % 4) & 3 ^ 2) - 2 if refined else 0
            code = np.uint8(byte("codes", n, k // 2) >> 4 * (k % 2) & 15).view(ml_dtypes.float4_e2m1fn)
            scale = np.uint8(byte("scales", n, k // 16)).view(ml_dtypes.float8_e4m3fn)
            assert np.float32(float(code) + d / 8) * (t * np.float32(scale)) == expected[n, k]


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_left_of_what_fails(tmp_path, seed, form, capsys):
    path, _, _ = write_model(tmp_path / "p.safetensors", np.random.default_rng(seed))
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    out = tmp_path / "out"
    assert main([str(path), "--format", form, "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "does not fit its checksum" in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.safetensors"]
    out.mkdir()
    assert main([str(path), "--format", form, "-o", str(out)]) == 2
    assert capsys.readouterr().err == f"model.export: out must not exist yet, not {out}\n"
    assert list(out.iterdir()) == []


def test_what_a_form_cannot_hold_is_refused(tmp_path, seed):
    rng = np.random.default_rng(seed)
    wide = Package(write_package(tmp_path / "wide", {"0.o": refined_matrix(rng, 2, 32, bits=4)}, bits=4))
    with pytest.raises(ValueError, match=r"^bits must be 2 in an image, as in hardware, not 4$"):
        export(wide, "image", tmp_path / "out")
    with pytest.raises(ValueError, match=r"^the package must hold a whole model, not matrices only$"):
        export(wide, "modelopt", tmp_path / "out")
    part = Package(write_package(tmp_path / "part", {"0.o": refined_matrix(rng, 2, 32)}, config=CONFIG))
    with pytest.raises(ValueError, match=r"^the package must have tensor embedding of shape \(30, 48\)$"):
        export(part, "compressed-tensors", tmp_path / "out")
    with pytest.raises(ValueError, match=r"^format must be one of image, modelopt, compressed-tensors, not 'gguf'$"):
        export(part, "gguf", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"^out must be in a folder that exists, not .*/absent/out$"):
        export(part, "image", tmp_path / "absent/out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["part", "wide"]
