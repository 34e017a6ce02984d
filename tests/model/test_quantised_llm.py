"""Fake quantisation against plain products of separately quantised operands; formats by layer; decoding step by step."""

import dataclasses

import numpy as np
import pytest

from model import autofp2, autofp6, block_scaled, llm
from model.formats import E2M3
from model.quantised_llm import LEVELS, Format, QuantisedLlama, Settings, WeightStore, quantise_activations
from model.tokenizer import BytePairs

CONFIG = llm.LlamaConfig(
    layers=3, width=64, hidden=96, heads=4, kv_heads=2, head_size=16, vocabulary=50, context=64, rope_base=1e4,
    norm_epsilon=1e-5,
)  # fmt: skip
TOKENS = np.arange(40) * 7 % 50
QUANTISED = [form for form in Format if form is not Format.REFERENCE]


@pytest.fixture(scope="module")
def tiny():
    rng = np.random.default_rng(5)
    weights = {"norm": np.ones(64)} | {name: rng.normal(size=(50, 64)) for name in ("embedding", "head")}
    for layer in range(CONFIG.layers):
        weights |= {f"{layer}.{norm}": rng.uniform(0.5, 1.5, 64) for norm in ("attention_norm", "ffn_norm")}
        weights |= {f"{layer}.{name}": 0.1 * rng.standard_t(4, shape) for name, shape in CONFIG.shapes.items()}
    return llm.Llama(CONFIG, {k: v.astype(np.float32) for k, v in weights.items()}, BytePairs([], []))


def expected_weights(w, form):
    base = block_scaled.quantize(w)
    if form is Format.AUTOFP2:
        return autofp2.dequantize(base, "pair"), None
    if form is Format.FP6G:
        return block_scaled.dequantize(block_scaled.quantize(w, E2M3)), None
    if form is Format.AUTOFP6:
        mask = autofp6.select_weights(autofp6.subgroup_gains(w, base), 0.2, 2)
        return autofp6.dequantize(autofp6.refine(w, base, mask)), mask
    return block_scaled.dequantize(base), None


def expected_activations(x, form, mask=None, shared=1):
    if form is Format.FP6G:
        return block_scaled.dequantize(block_scaled.quantize(x, E2M3))
    base = block_scaled.quantize(x, shared_groups=shared)
    if form is not Format.AUTOFP6:
        return block_scaled.dequantize(base)
    mask = np.zeros(x.shape[-1] // 4, bool) if mask is None else mask
    errors = autofp6.subgroup_errors(x, base)
    chosen = autofp6.select_activations(errors, mask, 4 * 0.003 * float((x.astype(np.float64) ** 2).mean()), 2)
    return autofp6.dequantize(autofp6.refine(x, base, chosen))


# ---- the pieces ----


def test_levels():
    assert LEVELS == {2: Format.AUTOFP2, 4: Format.NVFP4, 6: Format.AUTOFP6}


@pytest.mark.parametrize("form", QUANTISED, ids=lambda form: form.value)
def test_projections_multiply_quantised_operands(tiny, form):
    inputs, outputs = {}, {}

    class Watched(QuantisedLlama):
        def project(self, layer, name, x):
            outputs[layer, name] = super().project(layer, name, x)
            inputs[layer, name] = x
            return outputs[layer, name]

    Watched(tiny).run(TOKENS, form)
    assert len(inputs) == 12
    for (layer, name), x in inputs.items():
        w, mask = expected_weights(tiny.weight(layer, name), form)
        a = expected_activations(x, form, mask, 2 if form is Format.AUTOFP2 else 1)
        assert not np.array_equal(a, x)
        np.testing.assert_allclose(outputs[layer, name], a @ w.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", QUANTISED, ids=lambda form: form.value)
def test_the_cache_holds_quantised_keys_and_values(tiny, form):
    given = {}

    class Watched(QuantisedLlama):
        def stored(self, layer, keys, values):
            given[layer] = keys, values
            return super().stored(layer, keys, values)

    cache = llm.Cache()
    Watched(tiny).run(TOKENS, form, cache=cache)
    for layer, (keys, values) in given.items():
        for exact, kept in ((keys, cache.keys[layer]), (values, cache.values[layer])):
            assert kept.shape == (2, 40, 16)
            # One tensor scale for all heads and tokens; W2A4 keeps them in NVFP4.
            np.testing.assert_array_equal(kept, expected_activations(exact, form))


def test_reference_is_the_model_itself(tiny):
    model = QuantisedLlama(tiny)
    np.testing.assert_array_equal(model.run(TOKENS, Format.REFERENCE), tiny.hidden(TOKENS))
    model.run(TOKENS, Format.NVFP4)
    np.testing.assert_array_equal(model.hidden(TOKENS), tiny.hidden(TOKENS))


def test_a_finer_format_is_nearer_to_the_reference(tiny):
    model, exact = QuantisedLlama(tiny), tiny.hidden(TOKENS)
    errors = [
        float(np.square(model.run(TOKENS, form) - exact).sum())
        for form in (Format.AUTOFP2, Format.NVFP4, Format.AUTOFP6, Format.FP6G)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] > 0


def test_activations_are_refined_in_slots_that_the_weight_leaves():
    x = np.random.default_rng(1).normal(size=(5, 32)).astype(np.float32)
    mask = np.array([1, 1, 0, 0, 0, 0, 0, 1], bool)
    plain = block_scaled.dequantize(block_scaled.quantize(x))
    refined = quantise_activations(x, Format.AUTOFP6, Settings(threshold=0), mask)
    changed = (refined != plain).reshape(5, 8, 4).any(axis=2)
    assert not changed[:, :4].any()
    assert not changed[:, 7].any()
    assert (changed[:, 4:].sum(axis=1) == 1).all()
    assert (quantise_activations(x, Format.AUTOFP6, Settings(threshold=1e9), mask) == plain).all()


def test_scale_and_mean_square_of_each_row_or_of_all():
    x = np.random.default_rng(2).normal(size=(3, 2, 16)).astype(np.float32) * np.array([1, 1e-3, 30])[:, None, None]
    x = x.astype(np.float32)
    for form in QUANTISED:
        by_row = quantise_activations(x, form, Settings(), scales="row")
        alone = [quantise_activations(row[None], form, Settings())[0] for row in x]
        np.testing.assert_array_equal(by_row, alone)
        assert not np.array_equal(by_row, quantise_activations(x, form, Settings()))


def test_settings_reach_weights_and_activations(tiny):
    w = tiny.weight(0, "qkv")
    base = block_scaled.quantize(w)
    assert WeightStore(tiny, Settings(density=0.5)).mask(0, "qkv").mean() == 0.5
    group = WeightStore(tiny, Settings(scaling="group")).values(0, "qkv", Format.AUTOFP2)
    np.testing.assert_array_equal(group, autofp2.dequantize(base, "group"))
    finer = Settings(step="exponent", density=1, slots=4)
    np.testing.assert_array_equal(
        WeightStore(tiny, finer).values(0, "qkv", Format.AUTOFP6),
        autofp6.dequantize(autofp6.refine(w, base, step="exponent")),
    )


def test_weights_are_quantised_once_and_can_be_forgotten(tiny):
    store = WeightStore(tiny)
    first = store.values(1, "o", Format.NVFP4)
    other = store.values(1, "o", Format.FP6G)
    assert store.values(1, "o", Format.NVFP4) is first
    assert store.values(1, "o", Format.REFERENCE) is tiny.weight(1, "o")
    store.forget(Format.NVFP4)
    assert store.values(1, "o", Format.NVFP4) is not first
    assert store.values(1, "o", Format.FP6G) is other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 5}, "slots must be from 1 to 4, not 5"),
        ({"density": 0.6}, "density must be from 0 to 0.5 with 2 slots, not 0.6"),
        ({"threshold": -1.0}, "threshold must be at least 0, not -1.0"),
        ({"threshold": float("nan")}, "threshold must be at least 0, not nan"),
        ({"step": "other"}, "step must be one of fixed, exponent, not 'other'"),
        ({"scaling": "other"}, "scaling must be one of pair, group, not 'other'"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Settings(**change)


def test_scales_are_checked(tiny):
    with pytest.raises(ValueError, match=r"^scales must be one of tensor, row, not 'column'$"):
        QuantisedLlama(tiny).run(TOKENS, Format.NVFP4, scales="column")


# ---- layers and steps ----


def test_control_chooses_each_layer_and_sees_the_residual_stream(tiny):
    chosen = [Format.AUTOFP6, Format.AUTOFP2, Format.NVFP4]
    seen = []

    def control(layer, before, after):
        seen.append((before, after))
        return [*chosen[1:], Format.FP6G][layer]

    hidden = QuantisedLlama(tiny).run(TOKENS, chosen[0], control)
    # The same from models of one layer each, fed with the stream of the layer before.
    stream = tiny.weights["embedding"][TOKENS]
    for layer, form in enumerate(chosen):
        one = {name.replace(f"{layer}.", "0."): w for name, w in tiny.weights.items() if name.startswith(f"{layer}.")}
        one |= {"embedding": stream, "head": stream, "norm": tiny.weights["norm"]}
        config = dataclasses.replace(CONFIG, layers=1, vocabulary=40)
        alone = QuantisedLlama(llm.Llama(config, one, tiny.tokenizer))
        out = []
        last = alone.run(np.arange(40), form, lambda _, before, after, out=out: out.append(after) or Format.NVFP4)
        before, after = seen[layer]
        np.testing.assert_array_equal(before, stream)
        np.testing.assert_array_equal(after, out[0])
        stream = after
    np.testing.assert_array_equal(hidden, last)


@pytest.mark.parametrize("form", Format, ids=lambda form: form.value)
def test_tokens_with_a_scale_each_equal_decoding_one_by_one(tiny, form):
    model = QuantisedLlama(tiny)
    together, apart = llm.Cache(), llm.Cache()
    for cache in (together, apart):
        model.run(TOKENS[:20], form, cache=cache)
    batch = model.run(TOKENS[20:], form, cache=together, scales="row")
    steps = [model.run(TOKENS[i : i + 1], form, cache=apart, scales="row")[0] for i in range(20, 40)]
    # Sums in another order move few values to another code, but what follows such a value differs: most states are equal.
    close = np.isclose(batch, steps, rtol=1e-4, atol=1e-5).mean(axis=1) > 0.99
    assert close.mean() >= 0.5
    for kept, other in ((together.keys[0], apart.keys[0]), (together.values[0], apart.values[0])):
        assert kept.shape == other.shape == (2, 40, 16)
        assert np.isclose(kept, other, rtol=1e-4, atol=1e-5).mean() > 0.9
