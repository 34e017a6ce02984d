"""Sound files, small ones of every kind that is read, for `model.fuzz` to damage."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import autofp6, block_scaled, checkpoint
from model.autofp6 import Refined
from model.export import export, folder_config
from model.package import Entry, Package, Plain, Writer
from model.safetensors_file import SafetensorsWriter
from model.tokenizer import BytePairs, HuggingFace

__all__ = ["CONFIG", "KINDS", "Arrays", "Sample", "samples"]

CONFIG = checkpoint.LlamaConfig(1, 32, 64, 2, 1, 16, 12, 16, 10000.0, 2.0**-17)
"""A model whose files are small."""

KINDS = ("package", "safetensors", "modelopt", "compressed-tensors", "gguf", "config.json", "index", "tokenizer.json")

Arrays = dict[str, NDArray[np.float32]]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sound file, and how it is read.

    Attributes
    ----------
    path : Path
        What is damaged.
    read : callable
        Reads it, or the folder that it is in, and returns all arrays by name.
    header : int
        Bytes that say what the others mean; half of the damage is done to them.
    sealed : bool
        Every byte is under a checksum, so nothing but the sound file may be accepted.
    frame : bool
        The file has a size that its header says, so more or less bytes may not change what is read.
    shapes : bool
        They are not the file's to choose.
    """

    path: Path
    read: Callable[[], Arrays]
    header: int
    sealed: bool = False
    frame: bool = True
    shapes: bool = True


def _matrices(rng: np.random.Generator) -> dict[str, Refined]:
    found = {}
    for name, shape in CONFIG.shapes.items():
        x = rng.normal(size=shape).astype(np.float32)
        base = block_scaled.quantize(x)
        found[f"0.{name}"] = autofp6.refine(x, base, autofp6.select_weights(autofp6.subgroup_gains(x, base), 0.25))
    return found


def _plain(rng: np.random.Generator) -> Arrays:
    table, width = (CONFIG.vocabulary, CONFIG.width), (CONFIG.width,)
    shapes = {"embedding": table, "head": table, "norm": width, "0.attention_norm": width, "0.ffn_norm": width}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def _read_package(path: Path) -> Arrays:
    package = Package(path)
    if package.tokenizer is not None:
        package.tokenizer.decode([0, 3])
    arrays = {name: autofp6.dequantize(package.read(name)) for name in package.names}
    return arrays | {name: package.plain(name) for name in package.plain_shapes}


def _read_checkpoint(path: Path) -> Arrays:
    return dict(checkpoint.read(path).weights)


def _read_tokenizer(path: Path) -> Arrays:
    with _silent():
        tokenizer = HuggingFace(path)
        ids = tokenizer.encode("abcdefgh hgfe<e>dcba")
        text = tokenizer.decode(ids)
    return {"ids": ids.astype(np.float32), "text": np.array([ord(letter) for letter in text], np.float32)}


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hide what the package ``tokenizers`` says by itself, past Python, when it finds a fault of its own."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _write_gguf(path: Path, weights: Mapping[str, NDArray[np.float32]]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.layers)
    writer.add_context_length(CONFIG.context)
    writer.add_embedding_length(CONFIG.width)
    writer.add_feed_forward_length(CONFIG.hidden)
    writer.add_head_count(CONFIG.heads)
    writer.add_head_count_kv(CONFIG.kv_heads)
    writer.add_layer_norm_rms_eps(CONFIG.norm_epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{i}" for i in range(CONFIG.vocabulary)])
    writer.add_token_types([1] * CONFIG.vocabulary)
    writer.add_token_merges(["t 0", "t 1"])
    types = gguf.GGMLQuantizationType
    for number, (name, array) in enumerate(weights.items()):
        kind = (types.F32, types.F16, types.Q8_0)[number % 3] if array.ndim == 2 else types.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _parts(weights: Arrays, name: Callable[[int, str], list[str]], top: Mapping[str, str]) -> Arrays:
    """Return weights by the names that they have in a checkpoint, fused ones as their parts."""
    arrays = {theirs: weights[ours] for ours, theirs in top.items()}
    for ours in ("attention_norm", "ffn_norm", *CONFIG.shapes):
        names = name(0, ours)
        ends = np.cumsum(CONFIG.fused_rows.get(ours, (CONFIG.width,)))[:-1].tolist()
        arrays |= {f"{n}.weight": np.array(a) for n, a in zip(names, np.split(weights[f"0.{ours}"], ends), strict=True)}
    return arrays


def _gguf_names(layer: int, name: str) -> list[str]:
    names = {"qkv": "attn_q attn_k attn_v", "o": "attn_output", "gate_up": "ffn_gate ffn_up", "down": "ffn_down"}
    return [f"blk.{layer}.{part}" for part in names.get(name, name.replace("attention", "attn")).split()]


def _write_folder(folder: Path, shards: Sequence[Arrays], kind: str = "F32", **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    places = {}
    for number, arrays in enumerate(shards):
        path = folder / (f"model-{number}.safetensors" if len(shards) > 1 else "model.safetensors")
        with SafetensorsWriter(path, {name: (kind, array.shape) for name, array in arrays.items()}) as file:
            for name, array in arrays.items():
                file.write(name, array.astype("<f2" if kind == "F16" else "<f4"))
                places[name] = path.name
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    _complete(folder)
    (folder / "config.json").write_text(json.dumps(folder_config(CONFIG, tied=False) | changes))


def _complete(folder: Path) -> None:
    letters = "abcdefgh"
    model = {"type": "BPE", "vocab": {c: i for i, c in enumerate([*letters, "ab", "cd", "abcd"])}, "unk_token": "a"}
    model["merges"] = [["a", "b"], ["c", "d"], ["ab", "cd"]]
    added = {"id": 11, "content": "<e>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content = {"version": "1.0", "truncation": truncation, "added_tokens": [added | {"special": True}], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def samples(folder: Path) -> dict[str, Sample]:
    """Write a sound file for every reader, the same each time, and return them by kind."""
    rng = np.random.default_rng(1)
    matrices, plain = _matrices(rng), _plain(rng)
    entries: list[Entry | Plain] = [
        Entry(name, (len(t.base.codes), t.base.length), int(t.mask.sum())) for name, t in matrices.items()
    ]
    path = folder / "package.safetensors"
    pairs = BytePairs(["a", "b", "ab", "<e>"], ["a b"], [3])
    entries += [Plain(name, array.shape) for name, array in plain.items()]
    with Writer(path, entries, config=CONFIG, tokenizer=pairs) as writer:
        for name, tensor in matrices.items():
            writer.add(name, tensor)
        for name, array in plain.items():
            writer.add_plain(name, array)
    weights = plain | {name: autofp6.dequantize(tensor) for name, tensor in matrices.items()}
    top = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    arrays = _parts(weights, checkpoint.folder_names, top)
    _write_folder(folder / "dense", [arrays], "F16")
    half = len(arrays) // 2
    shards = [dict(list(arrays.items())[:half]), dict(list(arrays.items())[half:])]
    _write_folder(folder / "sharded", shards)
    gguf_top = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
    _write_gguf(folder / "model.gguf", _parts(weights, _gguf_names, gguf_top))

    def sample(path: Path, read: Callable[[Path], Arrays], of: Path | None = None, **how: Any) -> Sample:
        data = path.read_bytes()
        if path.suffix == ".json":
            header = len(data)
        elif path.suffix == ".gguf":
            # What names and shapes need; tensors are behind.
            header = data.rindex(b".weight") + 40
        else:
            header = 8 + int.from_bytes(data[:8], "little")
        return Sample(path, lambda: read(of or path), header, **how)

    found = {"package": sample(path, _read_package, sealed=True)}
    dense, sharded = folder / "dense", folder / "sharded"
    found["safetensors"] = sample(dense / "model.safetensors", _read_checkpoint, dense)
    for layout in ("modelopt", "compressed-tensors"):
        export(Package(path), layout, folder / layout)
        _complete(folder / layout)
        found[layout] = sample(folder / layout / "model.safetensors", _read_checkpoint, folder / layout)
    found["gguf"] = sample(folder / "model.gguf", _read_checkpoint)
    found["config.json"] = sample(folder / "modelopt/config.json", _read_checkpoint, folder / "modelopt", frame=False)
    found["tokenizer.json"] = sample(dense / "tokenizer.json", _read_tokenizer, frame=False, shapes=False)
    index = sharded / "model.safetensors.index.json"
    found["index"] = sample(index, _read_checkpoint, sharded, frame=False)
    return found
