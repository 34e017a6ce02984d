"""Tensors of safetensors files, one at a time."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["SafetensorsFile"]

# Formats that NumPy lacks are read as the bytes they are; bfloat16 is widened.
_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2",
    "I64": "<i8", "U64": "<u8", "I32": "<i4", "U32": "<u4", "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1",
    "BOOL": "?", "F8_E4M3": "u1", "F8_E5M2": "u1",
}  # fmt: skip


class SafetensorsFile:
    """A safetensors file, whose tensors are read when they are asked for.

    The package ``safetensors`` checks the header: names, shapes, and that the tensors cover the file without gaps.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    path : Path
    shapes : dict of str to tuple of int
        By name of the tensor.
    types : dict of str to str
        Element types by the names of the format: ``"F32"``, ``"BF16"``, ``"U8"``, ...
    metadata : dict of str to str

    Raises
    ------
    ModuleNotFoundError
        The package ``safetensors`` is missing; the message is the pip command.
    ValueError
        The file is damaged or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError:
            raise ModuleNotFoundError("reading this checkpoint needs a package: pip install safetensors") from None
        self.path = path
        try:
            with safe_open(path, framework="numpy") as file:
                self.metadata: dict[str, str] = dict(file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise ValueError(f"path must be a safetensors file, not {path}: {error}") from None
        with path.open("rb") as raw:
            size = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(size))
        header.pop("__metadata__", None)
        self._start = 8 + size
        self._offsets = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        self.types: dict[str, str] = {name: entry["dtype"] for name, entry in header.items()}

    def read(self, name: str) -> NDArray:
        """Return a tensor; bfloat16 as float32, 8-bit floating point as the bytes of its codes.

        Raises
        ------
        KeyError
            There is no such tensor.
        ValueError
            Its elements are of a type that is not read.
        """
        kind = self.types[name]
        if kind not in _TYPES:
            raise ValueError(f"type of tensor {name!r} must be one of {', '.join(_TYPES)}, not {kind} ({self.path})")
        first, end = self._offsets[name]
        with self.path.open("rb") as raw:
            raw.seek(self._start + first)
            data = raw.read(end - first)
        array = np.frombuffer(data, dtype=_TYPES[kind]).reshape(self.shapes[name])
        if kind == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array
