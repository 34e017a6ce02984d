"""Tensors of GGUF files, dequantised one at a time."""

import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["GgufFile"]

Float = NDArray[np.float32]

_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type."""
_LONGEST = 1 << 24
"""Most items of an array: vocabularies have some hundred thousand."""

_AT_ONCE = 1 << 20
"""Items of a tensor that are dequantised at once, which takes several times their space."""


class GgufFile:
    """A GGUF file, whose tensors are read when they are asked for.

    The package ``gguf`` reads the header and knows how to dequantise. It trusts the counts in the header, so those are compared with the
    size of the file before.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    path : Path
    metadata : dict of str to Any
        By key; numbers, strings and lists of them.
    shapes : dict of str to tuple of int
        By name of the tensor, rows first.

    Raises
    ------
    ModuleNotFoundError
        The package ``gguf`` is missing; the message is the pip command.
    FileNotFoundError
        There is no such file.
    ValueError
        The file is damaged or no GGUF file.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ModuleNotFoundError:
            raise ModuleNotFoundError("reading a checkpoint needs the package gguf: pip install gguf") from None
        if not path.is_file():
            raise FileNotFoundError(f"path must be a GGUF file or a folder, not {path}")
        self.path = path
        try:
            with path.open("rb") as file:
                _check_header(file, path.stat().st_size)
            reader = gguf.GGUFReader(path)
            self.metadata: dict[str, Any] = {key: entry.contents() for key, entry in reader.fields.items()}
            self._tensors = {
                # Views of the whole file stay behind; what is kept is how to read a tensor again.
                t.name: (t.tensor_type, t.data.dtype, t.data.shape, t.data_offset, t.n_bytes)
                for t in reader.tensors
            }
            self._sizes = shapes = {t.name: tuple(int(size) for size in reversed(t.shape)) for t in reader.tensors}
            # NVFP4 matrices have their tensor scale beside them, and static scales of their inputs, which are not needed.
            self._scales = {f"{name.removesuffix('.scale')}.weight": name for name in shapes if name.endswith(".scale")}
            apart = {name for name in self._scales.values() if math.prod(shapes[name]) == 1}
            self.shapes = {n: shape for n, shape in shapes.items() if n not in apart and not n.endswith(".input_scale")}
            self._check_places(int(reader.data_offset), int(reader.alignment))
        except Exception as error:  # the package raises whatever goes wrong inside
            raise ValueError(f"path must be a GGUF file, not {path}: {error}") from None

    def _check_places(self, at: int, alignment: int) -> None:
        """Refuse tensors that overlap or leave gaps, as a wrong offset would make them."""
        for name, (*_, offset, size) in sorted(self._tensors.items(), key=lambda item: item[1][3]):
            if offset != at:
                raise ValueError(f"tensor {name} must begin at byte {at}, not {offset}")
            at = -(-(offset + size) // alignment) * alignment
        if not at - alignment < self.path.stat().st_size <= at:
            raise ValueError(f"the file must end with its last tensor at byte {at}, not {self.path.stat().st_size}")

    def read(self, name: str) -> Float:
        """Return a tensor as float32.

        Raises
        ------
        KeyError
            There is no such tensor.
        ValueError
            Its type is not one that can be dequantised, or a scale is not a number.
        """
        array = self._dequantised(name)
        if name in self._scales:
            with np.errstate(over="ignore", invalid="ignore"):
                array *= self._dequantised(self._scales[name]).reshape(())
        return array

    def _dequantised(self, name: str) -> Float:
        from gguf import GGMLQuantizationType, quants

        kind, dtype, shape, offset, _ = self._tensors[name]
        *rows, width = shape
        count, step = math.prod(rows), max(_AT_ONCE // width, 1)
        array = np.empty(self._sizes[name], np.float32)
        flat = array.reshape(count, -1)
        for first in range(0, count, step):
            many = min(step, count - first)
            data = np.fromfile(self.path, dtype, many * width, offset=offset + first * width * dtype.itemsize)
            # The package takes a scale that is not a number for one.
            if kind == GGMLQuantizationType.NVFP4 and (data.reshape(-1, 36)[:, :4] >= 0x7F).any():
                raise ValueError(f"scales of tensor {name} must be from 0x00 to 0x7e")
            if kind == GGMLQuantizationType.MXFP4 and (data.reshape(-1, 17)[:, 0] == 0xFF).any():
                raise ValueError(f"scales of tensor {name} must be from 0x00 to 0xfe")
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    flat[first : first + many] = quants.dequantize(data.reshape(many, width), kind)
            except NotImplementedError:
                raise ValueError(f"type of tensor {name} must be one that gguf dequantises, not {kind.name}") from None
        return array


class _Walk:
    """Steps through a header and stays inside the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def number(self, octets: int) -> int:
        data = self._file.read(octets)
        if len(data) != octets:
            raise ValueError("the header must end inside the file")
        return int.from_bytes(data, "little")

    def skip(self, octets: int) -> None:
        at = self._file.tell() + octets
        if at > self._size:
            raise ValueError(f"the header must end inside the file, not go on to byte {at} of {self._size}")
        self._file.seek(at)

    def string(self) -> None:
        self.skip(self.number(8))

    def value(self, kind: int) -> None:
        if kind == _STRING:
            self.string()
        elif kind in _SIZES:
            self.skip(_SIZES[kind])
        elif kind == _ARRAY:
            inner, count = self.number(4), self.number(8)
            if count > _LONGEST:
                raise ValueError(f"an array of the header must have at most {_LONGEST} items, not {count}")
            if inner == _STRING:
                for _ in range(count):
                    self.string()
            elif inner in _SIZES:
                self.skip(count * _SIZES[inner])
            else:
                raise ValueError(f"an array of the header must hold numbers or strings, not type {inner}")
        else:
            raise ValueError(f"a value of the header must be of a known type, not {kind}")


def _check_header(file: BinaryIO, size: int) -> None:
    """Raise ValueError unless everything that the header counts is in the file."""
    if file.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    walk = _Walk(file, size)
    if walk.number(4) not in (2, 3):
        raise ValueError("its version must be 2 or 3, little-endian")
    tensors, keys = walk.number(8), walk.number(8)
    for _ in range(keys):
        walk.string()
        walk.value(walk.number(4))
    for _ in range(tensors):
        walk.string()
        if (axes := walk.number(4)) > 4:
            raise ValueError(f"a tensor must have at most 4 axes, not {axes}")
        walk.skip(8 * axes + 4 + 8)
