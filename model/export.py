"""``python -m model.export``: a package as memory image of the accelerator, or as NVFP4 checkpoint for other tools (docs/package.md)."""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from model.autofp6 import OFFSET_BITS, Refined
from model.block_scaled import GROUP, BlockScaled
from model.checkpoint import PROJECTIONS, LlamaConfig, folder_names
from model.command import command
from model.memory import pack_masks, pack_nibbles
from model.nvfp4_layouts import LAYOUTS, WEIGHTS_ONLY, Layout
from model.package import Package, pack_rows
from model.safetensors_file import SafetensorsWriter
from model.tokenizer import HuggingFace

__all__ = ["FORMATS", "IMAGE_VERSION", "export", "folder_config", "image_arrays", "main", "read_index"]

Progress = Callable[[str], None]

IMAGE_VERSION = 1
FORMATS = ("image", *LAYOUTS)

_ALIGNMENT, _ROW = 64, 16
"""Arrays begin at multiples of the first, rows of an array of the second, both in bytes: what the accelerator's reads need."""
_NORMS = ("attention_norm", "ffn_norm")


def export(package: Package, form: str, out: str | Path, *, progress: Progress = lambda _: None) -> None:
    """Write a package in another form, into a new folder that is there only when it is complete.

    Parameters
    ----------
    package : Package
    form : {"image", "modelopt", "compressed-tensors"}
        The memory image, ``image.bin`` and ``index.json``; or a folder as Hugging Face lays it out, with the ``tokenizer.json`` that the
        package was made with, if there was one. The latter two hold the NVFP4 part: no other tool knows offsets.
    out : str or Path
        Must not exist.
    progress : callable
        Called with the name of each matrix before it is written.

    Raises
    ------
    FileExistsError, FileNotFoundError
        ``out`` exists, or the folder that it is to be in does not.
    ValueError
        ``form`` is unknown, the package is damaged, or it has something that the form cannot hold.
    """
    if form not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {form!r}")
    with _new_folder(Path(out)) as folder:
        if form == "image":
            _image(package, folder, progress)
        else:
            _checkpoint(package, LAYOUTS[form], folder, progress)


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    if path.exists():
        raise FileExistsError(f"out must not exist yet, not {path}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"out must be in a folder that exists, not {path}")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        yield part
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# ---- Memory image ----


def image_arrays(tensor: Refined) -> dict[str, NDArray[np.uint8]]:
    """Return the arrays of a matrix as the accelerator reads them, rows of bytes; the mask is one row.

    Raises
    ------
    ValueError
        Offsets do not have the two bits of the hardware.
    """
    if tensor.bits != OFFSET_BITS:
        raise ValueError(f"bits must be {OFFSET_BITS} in an image, as in hardware, not {tensor.bits}")
    return {
        "codes": pack_nibbles(tensor.base.codes),
        "scales": tensor.base.scales,
        "tensor_scale": np.array([tensor.base.tensor_scale], "<f4").view(np.uint8)[None],
        "masks": pack_masks(tensor.mask)[None],
        "offsets": pack_rows(tensor.offsets, tensor.mask, tensor.bits),
    }


def read_index(folder: str | Path) -> dict[str, Any]:
    """Return the index of an image, which is compared with its bytes.

    Raises
    ------
    FileNotFoundError
        A file is missing.
    ValueError
        They do not fit each other, or are of another version.
    """
    index, octets = Path(folder) / "index.json", Path(folder) / "image.bin"
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        given = tuple(content[key] for key in ("format", "version", "size", "sha256"))
        for matrix in content["matrices"].values():
            for part in ("codes", "scales", "tensor_scale", "masks", "offsets"):
                offset, stride, size = (matrix["arrays"][part][key] for key in ("offset", "stride", "bytes"))
                rows = range(offset, offset + max(matrix["n"] * stride, size))
                if min(offset, stride, size, content["size"] - rows.stop) < 0:
                    raise ValueError("an array must lie inside the image")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"index.json must be that of an image, not {index}") from None
    with octets.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if given != (found := ("autofp-image", IMAGE_VERSION, octets.stat().st_size, digest)):
        raise ValueError(f"format, version, size and checksum of {octets} must be {given}, not {found}")
    return content


def _image(package: Package, folder: Path, progress: Progress) -> None:
    matrices: dict[str, Any] = {}
    digest = hashlib.sha256()
    with (folder / "image.bin").open("wb") as file:
        for name in package.names:
            progress(name)
            tensor = package.read(name)
            arrays = {part: _place(file, digest, rows) for part, rows in image_arrays(tensor).items()}
            # The mask of all rows is stored once.
            arrays["masks"]["stride"] = 0
            n, k = package.entries[name].shape
            matrices[name] = {"n": n, "k": k, "refined": package.entries[name].refined, "arrays": arrays}
        size = file.tell()
    index = {"format": "autofp-image", "version": IMAGE_VERSION, "size": size, "sha256": digest.hexdigest()}
    _write_json(folder / "index.json", index | {"step": package.step, "slots": package.slots, "matrices": matrices})


def _place(file: BinaryIO, digest: Any, rows: NDArray[np.uint8]) -> dict[str, int]:
    """Append rows of bytes; return their offset in the file, the distance from row to row, and the bytes of a row that count."""
    count, size = rows.shape
    stride = max(-(-size // _ROW), 1) * _ROW
    whole = np.zeros(-(-count * stride // _ALIGNMENT) * _ALIGNMENT, np.uint8)
    whole[: count * stride].reshape(count, stride)[:, :size] = rows
    place = {"offset": file.tell(), "stride": stride, "bytes": size}
    digest.update(whole)
    file.write(whole.tobytes())
    return place


# ---- Checkpoints of other tools ----


def _checkpoint(package: Package, layout: Layout, folder: Path, progress: Progress) -> None:
    config = package.config
    if config is None:
        raise ValueError("the package must hold a whole model, not matrices only")
    plain = _plain_names(config, package)
    modules: dict[str, list[tuple[str, slice]]] = {}
    tensors = {name: ("F32", package.plain_shapes[ours]) for ours, name in plain.items()}
    for layer in range(config.layers):
        for name in PROJECTIONS:
            ours = f"{layer}.{name}"
            if ours not in package.entries or package.entries[ours].shape != config.shapes[name]:
                raise ValueError(f"the package must have matrix {ours} of shape {config.shapes[name]}")
            modules[ours] = list(zip(folder_names(layer, name), _row_slices(config, name), strict=True))
            for module, rows in modules[ours]:
                tensors |= layout.tensors(module, rows.stop - rows.start, config.shapes[name][1])
    with SafetensorsWriter(folder / "model.safetensors", tensors, {"format": "pt"}) as file:
        for ours, name in plain.items():
            file.write(name, package.plain(ours))
        for ours, parts in modules.items():
            progress(ours)
            base = package.read(ours).base
            for module, rows in parts:
                part = BlockScaled(base.codes[rows], base.scales[rows], base.tensor_scale, base.length)
                for name, array in layout.arrays(module, part).items():
                    file.write(name, array)
    content = folder_config(config, tied="head" not in package.plain_shapes)
    section = layout.configuration(["lm_head"])
    _write_json(folder / "config.json", content | {"quantization_config": section})
    if isinstance(package.tokenizer, HuggingFace):
        (folder / "tokenizer.json").write_text(package.metadata["tokenizer"], encoding="utf-8")
    if layout.name == "modelopt":
        details = {"quant_algo": WEIGHTS_ONLY, "group_size": GROUP, "exclude_modules": section["ignore"]}
        details |= {"kv_cache_quant_algo": None}
        _write_json(folder / "hf_quant_config.json", {"producer": section["producer"], "quantization": details})


def _plain_names(config: LlamaConfig, package: Package) -> dict[str, str]:
    """Return what other tools call the tensors that stay as they are, by our names."""
    names = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    if "head" in package.plain_shapes:
        names["head"] = "lm_head.weight"
    for layer in range(config.layers):
        names |= {f"{layer}.{norm}": f"{folder_names(layer, norm)[0]}.weight" for norm in _NORMS}
    table = (config.vocabulary, config.width)
    for name in names:
        wanted = table if name in ("embedding", "head") else (config.width,)
        if package.plain_shapes.get(name) != wanted:
            raise ValueError(f"the package must have tensor {name} of shape {wanted}")
    return names


def _row_slices(config: LlamaConfig, name: str) -> list[slice]:
    ends = np.cumsum(config.fused_rows[name]).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def folder_config(config: LlamaConfig, tied: bool) -> dict[str, Any]:
    """Return what ``config.json`` says of a model without quantisation."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }


@command(prefix="model.export", status=2, interrupted="interrupted, nothing was written")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 if nothing could be written."""
    parser = argparse.ArgumentParser(prog="python -m model.export", description="A package in another form.")
    parser.add_argument("package", type=Path, help="package, as python -m model.quantize writes it")
    parser.add_argument("--format", required=True, choices=FORMATS, help="memory image, or checkpoint of another tool")
    parser.add_argument("-o", "--out", type=Path, required=True, help="new folder")
    options = parser.parse_args(arguments)
    terminal = sys.stderr.isatty()

    def show(name: str) -> None:
        if terminal:
            print(f"\r\x1b[K{name}", end="", file=sys.stderr, flush=True)

    try:
        package = Package(options.package)
        export(package, options.format, options.out, progress=show)
    except (ValueError, OSError, ImportError) as error:
        show("")
        print(f"model.export: {error}", file=sys.stderr)
        return 2
    show("")
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.out}: {len(package.names)} matrices, {size} bytes as {options.format}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
