"""AutoFP packages: quantised weights of a model in a safetensors file (docs/package.md)."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from model.autofp6 import OFFSET_BITS, Refined, Step, dequantize
from model.block_scaled import GROUP, PAD, BlockScaled
from model.checkpoint import Checkpoint, LlamaConfig
from model.memory import pack_masks, pack_nibbles, pack_offsets, unpack_masks, unpack_nibbles, unpack_offsets
from model.safetensors_file import SafetensorsFile, SafetensorsWriter
from model.tokenizer import Tokenizer, of_text
from model.vmac import SUBGROUP, SUBGROUPS, check_choice

__all__ = ["VERSION", "Entry", "Package", "Plain", "Writer", "is_package", "pack_rows", "read_model", "reseal"]

FORMAT, VERSION = "autofp-package", "1"
"""What the metadata of a package says; readers refuse other versions."""

_OWN = ("format", "version", "step", "bits", "slots", "matrices", "checksums", "config", "tokenizer", "checksum")
_DIGEST = re.compile(rb'"checksum":"([0-9a-f]{64})"')
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_UNKNOWN = "0" * 64
"""Stands in for a checksum until it is known."""
_LARGEST = float(np.finfo(np.float32).max) / (8 * 448)
"""Largest T that leaves every element finite."""


@dataclass(frozen=True)
class Entry:
    """A matrix of a package before its contents are known.

    Attributes
    ----------
    name : str
        As :class:`model.llm.Llama` names it, ``"{layer}.{qkv|o|gate_up|down}"``.
    shape : (int, int)
        N output rows and K.
    refined : int
        Refined subgroups of a row, the same for all of them.
    """

    name: str
    shape: tuple[int, int]
    refined: int

    def tensors(self, bits: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return element type and shape of the tensors that make the matrix, by their names."""
        rows, padded = self.shape[0], -(-self.shape[1] // PAD) * PAD
        return {
            f"{self.name}.tensor_scale": ("F32", ()),
            f"{self.name}.codes": ("U8", (rows, padded // 2)),
            f"{self.name}.scales": ("F8_E4M3", (rows, padded // GROUP)),
            f"{self.name}.mask": ("U8", (padded // PAD,)),
            f"{self.name}.offsets": ("U8", (rows, self.refined * bits * SUBGROUP // 8)),
        }


@dataclass(frozen=True)
class Plain:
    """A tensor that is kept as float32, such as an embedding or the gain of a norm."""

    name: str
    shape: tuple[int, ...]


def _check_parameters(step: str, bits: int, slots: int) -> None:
    check_choice("step", step, ("fixed", "exponent"))
    if bits not in (2, 4):
        raise ValueError(f"bits must be 2 or 4, not {bits!r}")
    if not 1 <= slots <= SUBGROUPS:
        raise ValueError(f"slots must be from 1 to {SUBGROUPS}, not {slots}")


def _digest(header: bytes) -> str:
    """Return the checksum of a header, in which it stands itself as zeros."""
    found = _DIGEST.findall(header)
    if len(found) != 1:
        raise ValueError("the header must have one checksum")
    return hashlib.sha256(header.replace(found[0], _UNKNOWN.encode(), 1)).hexdigest()


def reseal(data: bytes) -> bytes:
    """Return the bytes of a package with checksums that fit what it holds, as far as it is one; for tests of what lies behind them."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:end])
        metadata = header["__metadata__"]
        tensors = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        sums = {n: hashlib.sha256(data[end:][first:last]).hexdigest() for n, (first, last) in tensors.items()}
        text = json.dumps(header | {"__metadata__": metadata | {"checksums": json.dumps(sums), "checksum": _UNKNOWN}})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return data
    compact = text.replace('"checksum": ', '"checksum":').encode()
    whole = len(compact).to_bytes(8, "little") + compact
    return whole.replace(_UNKNOWN.encode(), _digest(whole).encode(), 1) + data[end:]


class Writer:
    """Writes a package matrix by matrix, in any order; a context manager.

    Nothing is left behind if the block ends with an error, or before everything was added.

    Parameters
    ----------
    path : str or Path
    entries : sequence of Entry or Plain
        Everything that will be added.
    step : {"fixed", "exponent"}
    bits : int
        Width of offsets, 2 or 4.
    slots : int
        Most refined subgroups of a group, 1 to 4.
    metadata : mapping of str to str
        How the package was made, under names of the caller's choice.
    config : LlamaConfig, optional
        Architecture of the model; without it the package holds matrices only.
    tokenizer : Tokenizer, optional

    Raises
    ------
    ValueError
        A parameter is outside its range, a name is taken or has other characters than letters, digits, ``_`` and ``.`` between them.

    Examples
    --------
    ``with Writer(path, [Entry("0.o", (576, 576), 29)]) as writer: writer.add("0.o", refined)``
    """

    def __init__(
        self,
        path: str | Path,
        entries: Sequence[Entry | Plain],
        *,
        step: Step = "fixed",
        bits: int = OFFSET_BITS,
        slots: int = 2,
        metadata: Mapping[str, str] | None = None,
        config: LlamaConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        _check_parameters(step, bits, slots)
        taken = [name for name in metadata or {} if name in _OWN]
        if taken:
            raise ValueError(f"metadata must have names of its own, not {taken[0]!r}")
        self._step, self._bits, self._slots = step, bits, slots
        self._entries = {entry.name: entry for entry in entries}
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for entry in entries:
            if not _NAME.fullmatch(entry.name):
                raise ValueError(f"name of an entry must be words with dots between them, not {entry.name!r}")
            if isinstance(entry, Entry):
                most = slots * -(-entry.shape[1] // PAD) * PAD // GROUP
                if not 0 <= entry.refined <= most:
                    raise ValueError(f"refined of {entry.name} must be from 0 to {most}, not {entry.refined}")
            new = entry.tensors(bits) if isinstance(entry, Entry) else {entry.name: ("F32", tuple(entry.shape))}
            if tensors.keys() & new.keys():
                raise ValueError(f"entries must have different names, not {entry.name!r} twice")
            tensors |= new
        matrices = {entry.name: list(entry.shape) for entry in entries if isinstance(entry, Entry)}
        self._checksums = dict.fromkeys(tensors, _UNKNOWN)
        own = {"format": FORMAT, "version": VERSION, "step": step, "bits": str(bits), "slots": str(slots)}
        own |= {"config": json.dumps(dataclasses.asdict(config))} if config is not None else {}
        own |= {"tokenizer": tokenizer.text()} if tokenizer is not None else {}
        own |= {"matrices": json.dumps(matrices), "checksums": json.dumps(self._checksums), "checksum": _UNKNOWN}
        self._file = SafetensorsWriter(Path(path), tensors, dict(metadata or {}) | own)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.metadata["checksums"] = json.dumps(self._checksums)
        self._file.metadata["checksum"] = _digest(self._file.header())
        self._file.__exit__(kind, error, trace)

    def add(self, name: str, tensor: Refined) -> None:
        """Write a matrix.

        Raises
        ------
        ValueError
            It is not what its entry or the package says, or was added before.
        """
        entry = self._entries.get(name)
        if not isinstance(entry, Entry):
            raise ValueError(f"name must be that of a matrix of the package, not {name!r}")
        base, count = tensor.base, int(tensor.mask.sum())
        for what, given, wanted in (
            ("shape", (*base.codes.shape[:-1], base.length), entry.shape),
            ("bits", tensor.bits, self._bits),
            ("step", tensor.step, self._step),
            ("shape of the mask", tensor.mask.shape, (base.codes.shape[-1] // SUBGROUP,)),
            ("refined", count, entry.refined),
        ):
            if given != wanted:
                raise ValueError(f"{what} of {name} must be {wanted}, not {given}")
        _check_mask(name, tensor.mask, self._slots)
        self._write(f"{name}.tensor_scale", np.array(base.tensor_scale, "<f4"))
        self._write(f"{name}.codes", pack_nibbles(base.codes))
        self._write(f"{name}.scales", base.scales)
        self._write(f"{name}.mask", pack_masks(tensor.mask))
        self._write(f"{name}.offsets", pack_rows(tensor.offsets, tensor.mask, self._bits))

    def add_plain(self, name: str, array: NDArray[np.float32]) -> None:
        """Write a tensor as it is; raises like :meth:`add`, also if it is not finite."""
        if not isinstance(self._entries.get(name), Plain):
            raise ValueError(f"name must be that of a plain tensor of the package, not {name!r}")
        if not np.isfinite(array).all():
            raise ValueError(f"tensor {name} must be finite")
        self._write(name, array)

    def _write(self, name: str, array: NDArray) -> None:
        self._checksums[name] = hashlib.sha256(self._file.write(name, array)).hexdigest()


def _check_mask(name: str, mask: NDArray[np.bool_], slots: int) -> None:
    most = int(mask.reshape(-1, SUBGROUPS).sum(axis=1).max(initial=0))
    if most > slots:
        raise ValueError(f"mask of {name} must have at most {slots} subgroups in a group, not {most}")


def pack_rows(offsets: NDArray[np.int8], mask: NDArray[np.bool_], bits: int) -> NDArray[np.uint8]:
    """Pack the offsets (N, Kp) of the subgroups that the mask of all rows marks; a subgroup takes ``bits / 2`` bytes."""
    rows = len(offsets)
    chosen = offsets.reshape(rows, -1, SUBGROUP)[:, mask].reshape(-1)
    if bits == OFFSET_BITS:
        return pack_offsets(chosen, np.ones(len(chosen) // SUBGROUP, bool)).reshape(rows, -1)
    return pack_nibbles(chosen.astype(np.uint8) & np.uint8(15)).reshape(rows, -1)


def _unpack_rows(packed: NDArray[np.uint8], mask: NDArray[np.bool_], bits: int) -> NDArray[np.int8]:
    rows, flat = len(packed), packed.reshape(-1)
    offsets = np.zeros((rows, len(mask), SUBGROUP), np.int8)
    nibbles = bits != OFFSET_BITS
    chosen = (unpack_nibbles(flat).view(np.int8) ^ 8) - 8 if nibbles else unpack_offsets(flat, np.ones(len(flat), bool))
    offsets[:, mask] = chosen.reshape(rows, -1, SUBGROUP)
    return offsets.reshape(rows, -1)


class Package:
    """A package whose tensors are read, and compared with their checksums, when they are asked for.

    Parameters
    ----------
    path : str or Path

    Attributes
    ----------
    path : Path
    entries : dict of str to Entry
        The matrices.
    plain_shapes : dict of str to tuple of int
        The tensors that are kept as float32.
    step : {"fixed", "exponent"}
    bits, slots : int
    config : LlamaConfig or None
    metadata : dict of str to str
        What the file says about itself; also how it was made.
    checksums : dict of str to str
        SHA-256 of the bytes of each tensor.

    Raises
    ------
    FileNotFoundError, ModuleNotFoundError
        There is no such file, or the package ``safetensors`` is missing.
    ValueError
        The file is damaged, or no package of this version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"path must be a package, not {self.path}")
        self._file = SafetensorsFile(self.path)
        self.metadata = self._file.metadata
        try:
            self._open()
        except ValueError as error:
            raise ValueError(f"path must be a sound package, not {self.path}: {error}") from None

    def _open(self) -> None:
        given = tuple(self.metadata.get(key) for key in ("format", "version"))
        if given != (FORMAT, VERSION):
            raise ValueError(f"format and version must be {FORMAT} {VERSION}, not {given[0]} {given[1]}")
        if self.metadata.get("checksum") != _digest(self._file.header):
            raise ValueError("the header does not fit its checksum")
        step, bits, slots = (self.metadata.get(key, "") for key in ("step", "bits", "slots"))
        if not (bits.isascii() and bits.isdigit() and slots.isascii() and slots.isdigit()):
            raise ValueError(f"bits and slots must be numbers, not {bits!r:.20} and {slots!r:.20}")
        self.step: Step = "exponent" if step == "exponent" else "fixed"
        self.bits, self.slots = int(bits[:9]), int(slots[:9])
        _check_parameters(step, self.bits, self.slots)
        self.checksums: dict[str, str] = self._object("checksums", lambda value: isinstance(value, str))
        self.config: LlamaConfig | None = None
        if "config" in self.metadata:
            self.config = self._config()
        self.entries: dict[str, Entry] = {}
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, shape in self._object("matrices", _is_shape).items():
            row = self._file.shapes.get(f"{name}.offsets", (0,))[-1]
            self.entries[name] = Entry(name, tuple(shape), row * 8 // (self.bits * SUBGROUP))
            tensors |= self.entries[name].tensors(self.bits)
        held = {name: (self._file.types[name], shape) for name, shape in self._file.shapes.items()}
        for name, wanted in tensors.items():
            if held.get(name) != wanted:
                raise ValueError(f"type and shape of tensor {name} must be {wanted}, not {held.get(name)}")
        for name in (*self.entries, *held):
            if not _NAME.fullmatch(name):
                raise ValueError(f"names must be words with dots between them, not {name!r}")
        self.plain_shapes = {name: shape for name, (_, shape) in held.items() if name not in tensors}
        for name in self.plain_shapes:
            if held[name][0] != "F32":
                raise ValueError(f"type of tensor {name} must be F32, not {held[name][0]}")
        if self.checksums.keys() != held.keys():
            raise ValueError("checksums of the metadata must name all tensors")

    def _config(self) -> LlamaConfig:
        content = self._object("config", lambda value: type(value) in (int, float))
        kinds = {field.name: (int,) if field.type is int else (int, float) for field in dataclasses.fields(LlamaConfig)}
        if content.keys() != kinds.keys() or any(type(content[name]) not in kind for name, kind in kinds.items()):
            raise ValueError(f"config of the metadata must have {', '.join(kinds)}, each of its type")
        return LlamaConfig(**content)

    def _object(self, key: str, right: Callable[[Any], bool]) -> dict[str, Any]:
        try:
            content = json.loads(self.metadata.get(key, "null"))
        except RecursionError as error:
            raise ValueError(f"{key} of the metadata must be an object, not nested so deep: {error}") from None
        if not isinstance(content, dict) or not all(right(value) for value in content.values()):
            raise ValueError(f"{key} of the metadata must be an object of the right values")
        return content

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it is in the package.

        Raises
        ------
        ValueError
            What is there makes none.
        """
        text = self.metadata.get("tokenizer")
        try:
            return None if text is None else of_text(text)
        except ValueError as error:
            raise ValueError(f"path must be a sound package, not {self.path}: {error}") from None

    @property
    def names(self) -> list[str]:
        """Names of the matrices."""
        return list(self.entries)

    def read(self, name: str) -> Refined:
        """Return a matrix.

        Raises
        ------
        KeyError
            There is no such matrix.
        ValueError
            Its bytes do not fit their checksums, or make no tensor.
        """
        entry = self.entries[name]
        parts = {
            part: self._tensor(f"{name}.{part}") for part in ("codes", "scales", "tensor_scale", "mask", "offsets")
        }
        try:
            mask = unpack_masks(parts["mask"])
            if int(mask.sum()) != entry.refined:
                raise ValueError(f"mask must mark {entry.refined} subgroups, not {int(mask.sum())}")
            _check_mask(name, mask, self.slots)
            if not float(parts["tensor_scale"]) <= _LARGEST:
                raise ValueError(f"tensor_scale must be at most {_LARGEST:.3e}, not {float(parts['tensor_scale']):.3e}")
            base = BlockScaled(
                unpack_nibbles(parts["codes"]), parts["scales"], np.float32(parts["tensor_scale"]), entry.shape[1]
            )
            offsets = _unpack_rows(parts["offsets"], mask, self.bits)
            return Refined(base, mask, offsets, self.bits, self.step)
        except ValueError as error:
            raise ValueError(f"matrix {name} of {self.path} is wrong: {error}") from None

    def plain(self, name: str) -> NDArray[np.float32]:
        """Return a tensor that is kept as it is; raises like :meth:`read`."""
        if name not in self.plain_shapes:
            raise KeyError(name)
        array = self._tensor(name)
        if not np.isfinite(array).all():
            raise ValueError(f"tensor {name} of {self.path} must be finite")
        return array

    def verify(self) -> Iterator[str]:
        """Read everything, and yield the name of each matrix and plain tensor when it has been found sound; raises like :meth:`read`."""
        for name in self.entries:
            self.read(name)
            yield name
        for name in self.plain_shapes:
            self.plain(name)
            yield name

    def _tensor(self, name: str) -> NDArray:
        array = self._file.read(name)
        if hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest() != self.checksums[name]:
            raise ValueError(f"tensor {name} of {self.path} does not fit its checksum")
        return array


def is_package(path: Path) -> bool:
    """Return whether a file begins as a package does, and a GGUF file does not: with a length, and an object of JSON."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def read_model(path: str | Path) -> Checkpoint:
    """Return the model in a package, refined weights turned into float32.

    Raises
    ------
    ValueError
        The package is damaged, or has matrices only, or no tokenizer.
    """
    package = Package(path)
    if package.config is None or (tokenizer := package.tokenizer) is None:
        lacks = "configuration" if package.config is None else "tokenizer"
        raise ValueError(f"path must be a package of a whole model, not {package.path}, which has no {lacks}")
    weights = {name: package.plain(name) for name in package.plain_shapes}
    weights |= {name: dequantize(package.read(name)) for name in package.names}
    if "embedding" in weights:
        weights.setdefault("head", weights["embedding"])
    return Checkpoint(package.config, weights, tokenizer)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)
