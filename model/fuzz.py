"""``python -m model.fuzz``: damaged files for every reader, which must refuse them with one clear line (docs/package.md)."""

import argparse
import contextlib
import dataclasses
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.command import command, write_json
from model.fuzz_samples import KINDS, Arrays, Sample, samples
from model.package import reseal

__all__ = ["KINDS", "FuzzError", "Outcome", "Sample", "campaign", "main", "mutate", "samples"]

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


class FuzzError(RuntimeError):
    """A reader did not do with a damaged file what it must."""


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
        if sample.shapes and not resealed and array.shape != sound[name].shape:
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
        outcome.seconds = max(outcome.seconds, taken := time.monotonic() - started)
        # The alarm is not heard inside of other languages' code, and may be taken for an error of theirs.
        if taken > SECONDS + 1:
            raise FuzzError(f"{kind}, seed {seed}, case {number} ({how}): it takes {taken:.0f} s")
        outcome.cases += 1
        setattr(outcome, what, getattr(outcome, what) + 1)
    sample.path.write_bytes(data)
    return outcome


@command(prefix="model.fuzz", status=2)
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
    for name, least in (("count", 1), ("seed", 0), ("case", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            print(f"model.fuzz: --{name} must be at least {least}, not {value}", file=sys.stderr)
            return 2
    if options.json is not None and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        print(f"model.fuzz: --json must name a file in an existing folder, not {options.json}", file=sys.stderr)
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
    write_json(options.json, {"seed": options.seed, "rows": rows}, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
