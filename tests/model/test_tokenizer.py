"""Tokenizers: ids of llama.cpp, the package ``tokenizers`` on the same vocabulary, round trips, errors."""

import json

import gguf
import pytest
import tokenizers

from model import llm
from model.sample_text import LONG_TEXT, TEXT
from model.tokenizer import BytePairs, HuggingFace, of_text


@pytest.fixture(scope="module")
def smollm2():
    return llm.load()


# Ids that llama.cpp's tokenizer gives for the same checkpoint.
KNOWN_IDS = {
    "Once upon a time": [6403, 1980, 253, 655],
    "To be, or not to be, that is the": [2068, 325, 28, 355, 441, 288, 325, 28, 338, 314, 260],
    "Twinkle, twinkle, little": [21476, 31047, 28, 760, 31047, 28, 1838],
    "naïve café ²½Ⅷ\u00a0 日本": [3546, 46494, 37366, 216, 19133, 16738, 173, 223, 117, 15442, 17097, 241, 115, 40993],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "": [],
}


@pytest.mark.parametrize("text", KNOWN_IDS)
def test_tokenizer_gives_known_ids(smollm2, text):
    assert smollm2.tokenizer.encode(text).tolist() == KNOWN_IDS[text]
    assert smollm2.tokenizer.decode(KNOWN_IDS[text]) == text


ROUND_TRIPS = [
    TEXT,
    "  two  spaces \t tab\n\n\nlines  \n",
    "naïve café – “quotes” 日本語 ²½ Ⅷ \u00a0\u2003\x85",
    "def f(x):\n\treturn x['a'] + 3.14159e-10  # it's we'll I'LL 'd",
    "😀",
]


@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_tokenizer_round_trip(smollm2, text):
    ids = smollm2.tokenizer.encode(text)
    assert smollm2.tokenizer.decode(ids) == text
    assert 0 < len(ids) <= len(text.encode())


def test_digits_are_single_tokens_and_spaces_stay_before_words(smollm2):
    pieces = [smollm2.tokenizer.decode([i]) for i in smollm2.tokenizer.encode("in 1984  and I'll")]
    assert pieces == ["in", " ", "1", "9", "8", "4", " ", " and", " I", "'ll"]


def test_missing_byte_is_an_error():
    tokenizer = BytePairs(["a", "b", "ab"], ["a b"])
    assert tokenizer.encode("abba").tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match=r"^text must be made of bytes that the vocabulary has, not 'abc'$"):
        tokenizer.encode("abc")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """SmolLM2's vocabulary in the package ``tokenizers``, through a tokenizer.json."""
    fields = gguf.GGUFReader(llm.checkpoint_path()).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    control = [tokens[i] for i, kind in enumerate(fields["tokenizer.ggml.token_type"].contents()) if kind == 3]
    built = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    built.add_special_tokens(control)
    built.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    built.decoder = tokenizers.decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    built.save(str(path))
    return HuggingFace(path)


@pytest.mark.parametrize("text", [LONG_TEXT, *ROUND_TRIPS, *KNOWN_IDS])
def test_both_tokenizers_give_the_same_ids(smollm2, library, text):
    ids = library.encode(text)
    assert ids.tolist() == smollm2.tokenizer.encode(text).tolist()
    assert library.decode(ids) == text


def test_files_that_are_no_tokenizer_are_errors(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match=r"^path must be a tokenizer\.json, not .*tokenizer\.json: "):
        HuggingFace(tmp_path / "tokenizer.json")


def test_truncation_and_faults_of_a_tokenizer_json(tmp_path):
    path = tmp_path / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 1}
    padding = {"direction": "Right", "pad_id": 0, "pad_token": "b", "pad_to_multiple_of": None, "pad_type_id": 0}
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "c"}
    content = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model, "truncation": cut}
    path.write_text(json.dumps(content | {"padding": padding | {"strategy": {"Fixed": 8}}}))
    tokenizer = HuggingFace(path)
    assert tokenizer.encode("a b b a b").tolist() == [0, 1, 1, 0, 1]
    with pytest.raises(ValueError, match=r"^text must be one that tokenizer.json can encode: WordLevel error"):
        tokenizer.encode("a d")


def test_a_tokenizer_is_made_again_of_its_text(smollm2, tmp_path):
    again = of_text(smollm2.tokenizer.text())
    assert (again.encode(TEXT) == smollm2.tokenizer.encode(TEXT)).all()
    assert again.encode("<|im_end|>").tolist() == smollm2.tokenizer.encode("<|im_end|>").tolist()
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"}
    (tmp_path / "t").write_text(json.dumps({"version": "1.0", "model": model}))
    text = HuggingFace(tmp_path / "t").text()
    assert of_text(text).text() == text
    assert of_text(text).encode("c").tolist() == [1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "tokenizer must be JSON: maximum recursion depth"),
        ("[]", "path must be a tokenizer.json, not a text: "),
        ('{"type": "byte-pairs", "tokens": [1]}', "tokens of the tokenizer must be a list of str"),
        ('{"type": "byte-pairs", "tokens": [], "merges": []}', "special of the tokenizer must be a list of int"),
        (
            '{"type": "byte-pairs", "tokens": ["a"], "merges": [], "special": [1]}',
            "special of the tokenizer must be ids",
        ),
    ],
)
def test_texts_that_make_no_tokenizer_are_refused(content, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        of_text(content)


def test_a_fault_inside_of_the_package_is_one_line():
    PanicException = type("PanicException", (BaseException,), {})

    class Faulty:
        def encode(self, text, **_):
            raise text

    tokenizer = HuggingFace.__new__(HuggingFace)
    tokenizer._tokenizer = Faulty()
    with pytest.raises(ValueError, match=r"^text must be one that tokenizer.json can encode: out of range$"):
        tokenizer.encode(PanicException("out of range\nmore"))
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode(KeyboardInterrupt())
