"""From text to token ids and back."""

import contextlib
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["BytePairs", "HuggingFace", "Tokenizer", "of_text"]


class Tokenizer(Protocol):
    """What a model needs of a tokenizer."""

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token ids of ``text``, shape (tokens,)."""

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of token ids."""

    def text(self) -> str:
        """Return JSON of which :func:`of_text` makes the tokenizer again."""


def of_text(text: str) -> "BytePairs | HuggingFace":
    """Make a tokenizer of the JSON that its :meth:`Tokenizer.text` gave, or of the contents of a ``tokenizer.json``.

    Raises
    ------
    ModuleNotFoundError
        It needs the package ``tokenizers``, which is missing.
    ValueError
        The text makes no tokenizer.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tokenizer must be JSON: {error}") from None
    if not isinstance(content, dict) or content.get("type") != _BYTE_PAIRS:
        return HuggingFace(text=text)
    found: dict[str, list[Any]] = {}
    for name, kind in (("tokens", str), ("merges", str), ("special", int)):
        items = content.get(name)
        if not isinstance(items, list) or not all(type(item) is kind for item in items):
            raise ValueError(f"{name} of the tokenizer must be a list of {kind.__name__}")
        found[name] = items
    if not all(0 <= number < len(found["tokens"]) for number in found["special"]):
        raise ValueError(f"special of the tokenizer must be ids below {len(found['tokens'])}")
    return BytePairs(**found)


_BYTE_PAIRS = "byte-pairs"


class BytePairs:
    """Byte-level BPE with the splitting rules of GPT-2, digits one by one.

    Parameters
    ----------
    tokens : sequence of str
        Spelling of each token in GPT-2's byte alphabet; the index is the id.
    merges : sequence of str
        Pairs ``"left right"`` by falling priority.
    special : iterable of int
        Ids of control tokens; their spelling in a text is read as the token.
    """

    _WORD = re.compile(
        r"'(?:[sdmt]|ll|ve|re)|[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+",
        re.ASCII,
    )

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], special: Iterable[int] = ()) -> None:
        self._tokens, self._merges = list(tokens), list(merges)
        self._special = {self._tokens[i]: i for i in special}
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._letters = _byte_alphabet()
        self._bytes = {letter: byte for byte, letter in enumerate(self._letters)}
        self._known: dict[str, list[int]] = {}
        pattern = "|".join(re.escape(token) for token in sorted(self._special, key=len, reverse=True))
        self._split = re.compile(f"({pattern})") if pattern else None

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token ids of ``text``, shape (tokens,).

        Raises
        ------
        ValueError
            The vocabulary lacks a byte of the text.
        """
        ids: list[int] = []
        for part in self._split.split(text) if self._split else [text]:
            if part in self._special:
                ids.append(self._special[part])
                continue
            # The pattern is written for ASCII; every other character is matched through a stand-in of its class.
            plain = "".join(c if c.isascii() else _stand_in(c) for c in part)
            for word in self._WORD.finditer(plain):
                ids += self._word(part[word.start() : word.end()])
        return np.array(ids, dtype=np.int64)

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        out = bytearray()
        for i in np.asarray(ids).ravel():
            token = self._tokens[int(i)]
            out += token.encode() if token in self._special else bytes(self._bytes[c] for c in token)
        return out.decode(errors="replace")

    def text(self) -> str:
        """Return JSON of which :func:`of_text` makes the tokenizer again."""
        special = list(self._special.values())
        return json.dumps({"type": _BYTE_PAIRS, "tokens": self._tokens, "merges": self._merges, "special": special})

    def _word(self, word: str) -> list[int]:
        if word not in self._known:
            parts = [self._letters[byte] for byte in word.encode()]
            while len(parts) > 1:
                ranks = [self._ranks.get(pair, len(self._ranks)) for pair in itertools.pairwise(parts)]
                best = min(ranks)
                if best == len(self._ranks):
                    break
                at = ranks.index(best)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            missing = [part for part in parts if part not in self._ids]
            if missing:
                raise ValueError(f"text must be made of bytes that the vocabulary has, not {word!r}")
            self._known[word] = [self._ids[part] for part in parts]
        return self._known[word]


def _byte_alphabet() -> list[str]:
    """Return GPT-2's letter for each byte: printable Latin-1 as itself, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 0x100
    for byte in range(256):
        letters.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return letters


def _stand_in(character: str) -> str:
    if character.isspace():
        return "\t"
    return {"L": "a", "N": "0"}.get(unicodedata.category(character)[0], "!")


class HuggingFace:
    """Any tokenizer that the package ``tokenizers`` reads; nothing is added before or after a text.

    Parameters
    ----------
    path : Path, optional
        A ``tokenizer.json``.
    text : str, optional
        Its contents, in place of a path.

    Raises
    ------
    ModuleNotFoundError
        The package ``tokenizers`` is missing; the message is the pip command.
    ValueError
        The file is no such tokenizer.
    """

    def __init__(self, path: Path | None = None, *, text: str = "") -> None:
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise ModuleNotFoundError("reading tokenizer.json needs a package: pip install tokenizers") from None
        with _errors(f"path must be a tokenizer.json, not {path or 'a text'}"):
            read = tokenizers.Tokenizer.from_file if path else tokenizers.Tokenizer.from_str
            self._tokenizer = read(str(path or text))
        # What the tokenizer was last used for may have left a longest text behind.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the token ids of ``text``, shape (tokens,).

        Raises
        ------
        ValueError
            The vocabulary lacks something of the text.
        """
        with _errors("text must be one that tokenizer.json can encode"):
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: ArrayLike) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        with _errors("ids must be some that tokenizer.json can decode"):
            return self._tokenizer.decode([int(i) for i in np.asarray(ids).ravel()], skip_special_tokens=False)

    def text(self) -> str:
        """Return the contents of a ``tokenizer.json`` that gives the same."""
        return self._tokenizer.to_str()


@contextlib.contextmanager
def _errors(message: str) -> Iterator[None]:
    """Make a ValueError of whatever the package ``tokenizers`` raises: plain exceptions, and panics, which are none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{message}: {str(error).partition(chr(10))[0]}") from None
