"""``python -m model.fuzz``: damaged files for every reader, which must refuse them with one clear line (docs/package.md)."""

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import autofp6, block_scaled, checkpoint
from model.autofp6 import Refined
from model.export import export, folder_config
from model.package import Entry, Package, Plain, Writer, reseal
from model.safetensors_file import SafetensorsWriter

__all__ = ["KINDS", "FuzzError", "Outcome", "Sample", "campaign", "main", "mutate", "samples"]

CONFIG = checkpoint.LlamaConfig(1, 32, 64, 2, 1, 16, 12, 16, 10000.0, 2.0**-17)
"""A model whose files are small."""

SECONDS = 10
"""A reader that takes longer than this hangs."""

_NUMBERS = (0, 1, 2, 3, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
_SNIPPETS = (
    *(
        b"null",
        b"true",
        b"-1",
        b"1e999",
        b"NaN",
        b"0.5",
        b"[]",
        b"{}",
        b'""',
        b'"../x"',
        b"18446744073709551616",
        b"\\u0000",
    ),
    *(
        b"[" * 2000,
        b'{"a":' * 300,
        b"../",
        b"/",
        b"..",
        b"\xff\xfe",
        b",",
        b'"',
        b"}",
        b"F64",
        b"F8_E4M3",
        b"BF16",
        b"U8",
        b"I64",
    ),
)

Arrays = dict[str, NDArray[np.float32]]


class FuzzError(RuntimeError):
    """A reader did not do with a damaged file what it must."""


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
    """

    path: Path
    read: Callable[[], Arrays]
    header: int
    sealed: bool = False
    frame: bool = True


@dataclasses.dataclass
class Outcome:
    """What became of the damaged files of one kind.

    Attributes
    ----------
    kind : str
    cases : int
    refused : int
        With a ValueError or OSError of one line.
    same : int
        Accepted with all the values of the sound file.
    other : int
        Accepted as another sound file, which without a checksum it is: finite values of the right shapes.
    seconds : float
        Longest time for one file.
    """

    kind: str
    cases: int = 0
    refused: int = 0
    same: int = 0
    other: int = 0
    seconds: float = 0.0


# ---- Sound files ----


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
    arrays = {name: autofp6.dequantize(package.read(name)) for name in package.names}
    return arrays | {name: package.plain(name) for name in package.plain_shapes}


def _read_checkpoint(path: Path) -> Arrays:
    return dict(checkpoint.read(path).weights)


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
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))


def samples(folder: Path) -> dict[str, Sample]:
    """Write a sound file for every reader, the same each time, and return them by kind."""
    rng = np.random.default_rng(1)
    matrices, plain = _matrices(rng), _plain(rng)
    entries = [Entry(name, (len(t.base.codes), t.base.length), int(t.mask.sum())) for name, t in matrices.items()]
    path = folder / "package.safetensors"
    with Writer(path, [*entries, *(Plain(name, a.shape) for name, a in plain.items())], config=CONFIG) as writer:
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
    index = sharded / "model.safetensors.index.json"
    found["index"] = sample(index, _read_checkpoint, sharded, frame=False)
    return found


KINDS = ("package", "safetensors", "modelopt", "compressed-tensors", "gguf", "config.json", "index")

# ---- Damage ----


def mutate(rng: np.random.Generator, data: bytes, header: int) -> tuple[bytes, str]:
    """Damage bytes; return them and how it was done.

    Parameters
    ----------
    rng : numpy.random.Generator
    data : bytes
    header : int
        Half of the damage begins in so many first bytes.
    """
    out = bytearray(data)
    size = header if rng.integers(2) else len(out)
    at = int(rng.integers(size))
    run = min(int(2 ** rng.uniform(0, 7)), len(out) - at)
    how = str(rng.choice(["flip", "number", "fill", "cut", "repeat", "remove", "swap", "snippet", "longer", "header"]))
    if how == "flip":
        for place in {at, *(int(p) for p in rng.integers(size, size=int(rng.integers(3))))}:
            out[place] ^= 1 << int(rng.integers(8))
    elif how == "number":
        width = int(rng.choice([1, 2, 4, 8]))
        number = (int(rng.choice(len(_NUMBERS))), int(rng.integers(-1, 2)))
        out[at : at + width] = ((_NUMBERS[number[0]] + number[1]) % (1 << 8 * width)).to_bytes(width, "little")
    elif how == "fill":
        out[at : at + run] = bytes([int(rng.choice([0, 0x7F, 0x80, 0xFF, 0x20]))]) * run
    elif how == "cut":
        del out[at:]
    elif how == "repeat":
        out[at:at] = out[at : at + run]
    elif how == "remove":
        del out[at : at + run]
    elif how == "swap":
        other = int(rng.integers(size))
        first, second = out[at : at + run], out[other : other + run]
        out[at : at + len(second)] = second
        out[other : other + len(first)] = first
    elif how == "snippet":
        text = _SNIPPETS[int(rng.integers(len(_SNIPPETS)))]
        out[at : at + int(rng.integers(len(text) + 1))] = text
    elif how == "longer":
        out += rng.integers(0, 256, run, dtype=np.uint8).tobytes()
    else:
        how, out = "header", bytearray(_rewritten(rng, data, header))
    return bytes(out), how


def _rewritten(rng: np.random.Generator, data: bytes, header: int) -> bytes:
    """Change one word or number of a header; the length before that of a safetensors file fits again."""
    start = 0 if data[:1] in (b"{", b"G") else 8
    text = data[start:header]
    words = _tokens(text)
    if not words:
        return data[:-1]
    first, last = words[int(rng.integers(len(words)))]
    other_first, other_last = words[int(rng.integers(len(words)))]
    choice = int(rng.integers(3))
    if choice == 0:
        new = text[other_first:other_last]
    elif choice == 1:
        new = _SNIPPETS[int(rng.integers(len(_SNIPPETS)))]
    else:
        new = str(_NUMBERS[int(rng.integers(len(_NUMBERS)))]).encode()
    text = text[:first] + new + text[last:]
    length = len(text).to_bytes(8, "little") if start else b""
    return length + text + data[header:]


def _tokens(text: bytes) -> list[tuple[int, int]]:
    """Return where words and numbers of JSON text begin and end."""
    inside, start, found = False, 0, []
    for at, byte in enumerate(text):
        is_word = chr(byte).isalnum() or byte in b"_-.+"
        if is_word and not inside:
            start = at
        elif inside and not is_word:
            found.append((start, at))
        inside = is_word
    return found


# ---- Campaign ----


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise FuzzError if a block takes longer, where the system has alarms."""

    def late(*_: Any) -> None:
        raise FuzzError(f"it takes more than {seconds} s")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _judge(sample: Sample, sound: Arrays, how: str, resealed: bool) -> str:
    """Read a damaged file; return what became of it, or raise FuzzError."""
    try:
        with _limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = sample.read()
    except (ValueError, OSError) as error:
        text = str(error)
        if not text or "\n" in text or len(text) > 10_000:
            raise FuzzError(f"the message must be one line, not {text!r:.300}") from None
        return "refused"
    except FuzzError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise FuzzError(f"{type(error).__name__}: {error}") from error
    if sample.sealed and not resealed:
        raise FuzzError("it is accepted, though every byte is under a checksum")
    for name, array in found.items():
        if array.dtype != np.float32 or not np.isfinite(array).all():
            raise FuzzError(f"{name} is accepted with values that are not finite")
        if not resealed and array.shape != sound[name].shape:
            raise FuzzError(f"{name} is accepted with shape {array.shape}, not {sound[name].shape}")
    same = found.keys() == sound.keys() and all(np.array_equal(found[name], sound[name]) for name in sound)
    if not same and not resealed and found.keys() != sound.keys():
        raise FuzzError(f"it is accepted with {sorted(found.keys() ^ sound.keys())[:3]} more or less")
    if not same and sample.frame and how in ("cut", "longer"):
        raise FuzzError(f"it is accepted with other values, though its size is wrong ({how})")
    return "same" if same else "other"


def campaign(
    folder: Path, kind: str, numbers: Sequence[int], seed: int, *, progress: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Damage one kind of file many times, and see what its reader does.

    Parameters
    ----------
    folder : Path
        An empty one.
    kind : str
        One of `KINDS`.
    numbers : sequence of int
        Of the cases; each with the seed gives the same damage again.
    seed : int
    progress : callable
        Called with kind and number of each case.

    Raises
    ------
    FuzzError
        A reader crashed, hung, or accepted what it must not; the message has kind, seed and number.
    """
    sample = samples(folder)[kind]
    sound, data = sample.read(), sample.path.read_bytes()
    outcome = Outcome(kind)
    for number in numbers:
        progress(f"{kind} {number}")
        rng = np.random.default_rng((seed, KINDS.index(kind), number))
        damaged, how = mutate(rng, data, sample.header)
        # A package that somebody made wrong on purpose, or by a wrong program: its checksums are right.
        resealed = sample.sealed and bool(rng.integers(2))
        damaged = reseal(damaged) if resealed else damaged
        if damaged == data:
            continue
        sample.path.write_bytes(damaged)
        started = time.monotonic()
        try:
            what = _judge(sample, sound, how, resealed)
        except FuzzError as error:
            raise FuzzError(f"{kind}, seed {seed}, case {number} ({how}): {error}") from error
        outcome.seconds = max(outcome.seconds, time.monotonic() - started)
        outcome.cases += 1
        setattr(outcome, what, getattr(outcome, what) + 1)
    sample.path.write_bytes(data)
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if every reader did right, 1 if not, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m model.fuzz", description="Damaged packages and checkpoints, which readers must refuse."
    )
    add = parser.add_argument
    add("--count", type=int, default=2000, help="files of each kind (default: 2000)")
    add("--seed", type=int, default=1, help="of the damage (default: 1)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of files (default: all)")
    add("--case", type=int, help="this case alone")
    add("--json", type=Path, metavar="FILE", help="write the table as JSON as well")
    options = parser.parse_args(arguments)
    if options.count < 1:
        print(f"model.fuzz: --count must be at least 1, not {options.count}", file=sys.stderr)
        return 2
    numbers = range(options.count) if options.case is None else [options.case]
    terminal = sys.stderr.isatty()

    def show(text: str) -> None:
        if terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    print(f"seed {options.seed}\n{'kind':20} {'cases':>7} {'refused':>8} {'same':>7} {'other':>7} {'slowest s':>10}")
    rows = []
    for kind in options.kinds:
        try:
            with tempfile.TemporaryDirectory() as folder:
                row = campaign(Path(folder), kind, numbers, options.seed, progress=show)
        except (FuzzError, OSError, ImportError) as error:
            show("")
            print(f"model.fuzz: {error}", file=sys.stderr)
            return 1
        show("")
        print(
            f"{kind:20} {row.cases:>7} {row.refused:>8} {row.same:>7} {row.other:>7} {row.seconds:>10.3f}", flush=True
        )
        rows.append(dataclasses.asdict(row))
    if options.json:
        options.json.write_text(json.dumps({"seed": options.seed, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
