"""Tensors of safetensors files, read and written one at a time."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["SafetensorsFile", "SafetensorsWriter"]

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
    header : bytes
        All that stands before the data: the length of the JSON text, 8 bytes, and the text.

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
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"path must be a safetensors file, not {path}: {error}") from None
        with path.open("rb") as raw:
            length = raw.read(8)
            self.header = length + raw.read(int.from_bytes(length, "little"))
        header = json.loads(self.header[8:], object_pairs_hook=self._unique)
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._start = len(self.header)
        self._offsets = {name: tuple(entry["data_offsets"]) for name, entry in header.items()}
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        self.types: dict[str, str] = {name: entry["dtype"] for name, entry in header.items()}

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Of two entries with one name the parsers keep the last, without a word.
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = min(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"path must be a safetensors file with different names, not {self.path}: {twice!r} is there twice"
            )
        return found

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
        if len(data) != end - first:
            raise ValueError(
                f"tensor {name!r} must have {end - first} bytes, not {len(data)}: {self.path} became shorter"
            )
        array = np.frombuffer(data, dtype=_TYPES[kind]).reshape(self.shapes[name])
        if kind == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array


class SafetensorsWriter:
    """Writes a safetensors file tensor by tensor, in any order; a context manager.

    All goes to a temporary file in the same folder, which takes the place of ``path`` when the block ends and every tensor was written;
    otherwise nothing is left behind.

    Parameters
    ----------
    path : Path
    tensors : mapping of str to (str, tuple of int)
        Element type by its name in the format and shape of every tensor.
    metadata : mapping of str to str

    Attributes
    ----------
    metadata : dict of str to str
        Values may be replaced by others of the same length until the block ends.

    Raises
    ------
    ValueError
        A type is unknown.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
    ) -> None:
        for name, (kind, _) in tensors.items():
            if kind not in _TYPES:
                raise ValueError(f"type of tensor {name!r} must be one of {', '.join(_TYPES)}, not {kind}")
        self.path, self.metadata = path, dict(metadata or {})
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._missing = dict(tensors)
        self._entries: dict[str, dict[str, Any]] = {}
        at = 0
        # Wide elements first, so that all stand at multiples of their size.
        for name, (kind, shape) in sorted(tensors.items(), key=lambda item: -np.dtype(_TYPES[item[1][0]]).itemsize):
            end = at + math.prod(shape) * np.dtype(_TYPES[kind]).itemsize
            self._entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
            at = end
        self._file: BinaryIO

    def header(self) -> bytes:
        """Return what stands before the data: the length of the JSON text, 8 bytes, and the text."""
        content = {"__metadata__": self.metadata} if self.metadata else {}
        text = json.dumps(content | self._entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def __enter__(self) -> Self:
        try:
            self._file = self._part.open("xb")
        except OSError as error:
            raise OSError(f"path must be in a folder that can be written, not {self.path}: {error.strerror}") from None
        header = self.header()
        self._start = len(header)
        self._file.write(header)
        return self

    def write(self, name: str, array: NDArray) -> memoryview:
        """Write a tensor and return its bytes; 8-bit floating point is given as the bytes of its codes.

        Raises
        ------
        ValueError
            There is no such tensor, it was written before, or its shape or type is another.
        """
        if name not in self._missing:
            raise ValueError(f"name must be one of the tensors that are still to be written, not {name!r}")
        kind, shape = self._missing[name]
        if array.shape != shape or array.dtype != np.dtype(_TYPES[kind]):
            raise ValueError(
                f"tensor {name!r} must be {np.dtype(_TYPES[kind])} of shape {shape}, not {array.dtype} of {array.shape}"
            )
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._file.seek(self._start + self._entries[name]["data_offsets"][0])
        self._file.write(data)
        del self._missing[name]
        return data

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            # What is still in a buffer may not fit the disk.
            try:
                self._file.close()
            finally:
                self._part.unlink(missing_ok=True)

    def _finish(self) -> None:
        if self._missing:
            raise ValueError(f"every tensor must be written, but {min(self._missing)!r} was not")
        header = self.header()
        if len(header) != self._start:
            raise ValueError("metadata must keep its length")
        self._file.seek(0)
        self._file.write(header)
        self._file.close()
        self._part.replace(self.path)
