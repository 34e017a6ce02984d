"""Predicted cycles: never below what elements and bus allow, and what is expected where that can be worked out by hand."""

import dataclasses
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.accelerator import AcceleratorConfig, Format, Mode
from model.accelerator_cycles import Product, predict


@st.composite
def products(draw):
    config = AcceleratorConfig(
        rows=draw(st.integers(1, 4)), columns=draw(st.integers(1, 4)), data_width=draw(st.sampled_from([64, 128, 512]))
    )
    mode = draw(st.sampled_from(Mode))
    kv = draw(st.integers(1, 64))
    tile_m = draw(st.integers(1, min(config.max_m, config.activation_depth // kv)))
    tile_n = draw(st.integers(1, min(config.max_words // tile_m, 16)))
    pairs = tile_n if mode == Mode.AUTOFP2 else ceil(tile_n / 2)
    segment = draw(st.integers(1, min(32, config.weight_depth // 2 // pairs)))
    m, n = draw(st.integers(1, 100)), draw(st.integers(1, 100))
    refined = draw(st.floats(0, 2)), draw(st.floats(0, 2))
    return config, Product(mode, draw(st.sampled_from(Format)), m, n, 32 * kv, tile_m, tile_n, segment, *refined)


@settings(deadline=None, max_examples=60)
@given(products(), st.integers(0, 200))
def test_no_prediction_beats_the_elements_or_the_bus(case, latency):
    config, p = case
    cycles = predict(config, p, latency, latency)
    kv, fp2 = p.k // 32, p.mode == Mode.AUTOFP2
    vectors = ceil(p.n / 2) if fp2 else p.n
    panels = ceil(p.m / (config.rows * p.tile_m))
    tiles = panels * ceil(vectors / (config.columns * p.tile_n))
    assert cycles >= tiles * p.tile_m * p.tile_n * kv
    assert cycles >= (p.m + panels * p.n) * kv * 18 * 8 / config.data_width


@settings(deadline=None, max_examples=60)
@given(products())
def test_latency_costs_something_and_refinement_is_not_free(case):
    config, p = case
    # The answer to the last write may come while padding is dropped.
    assert predict(config, p, 50, 50) >= predict(config, p) + 100
    if p.mode == Mode.AUTOFP6:
        assert predict(config, p) >= predict(config, dataclasses.replace(p, mode=Mode.NVFP4))


TILES = "tile_m, tile_n or segment is 0 or does not fit elements and banks"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_m": 0}, f"tile_m must be as a descriptor may have it, not 0: {TILES}"),
        ({"tile_m": 300}, f"tile_m must be as a descriptor may have it, not 300: {TILES}"),
        ({"tile_n": 70000}, "tile_n must be as a descriptor may have it, not 70000: no number for its field"),
        ({"segment": 257}, f"segment must be as a descriptor may have it, not 257: {TILES}"),
        ({"m": 0}, "m must be as a descriptor may have it, not 0: m, n or k is 0"),
        ({"n": -1}, "n must be as a descriptor may have it, not -1: no number for its field"),
        ({"n": 1.5}, "n must be as a descriptor may have it, not 1.5: no number for its field"),
        ({"k": 33}, "k must be as a descriptor may have it, not 33: k is not a multiple of the lanes"),
        ({"k": 32 * 4097}, f"k must be as a descriptor may have it, not 131104: {TILES}"),
        ({"mode": 3}, "mode must be as a descriptor may have it, not 3: there is no such mode, or no hardware for it"),
        ({"format": 2}, "format must be as a descriptor may have it, not 2: there is no such output format"),
        ({"m": 0, "n": 0}, r"product must be as a descriptor may have it, not Product\(.*\): m, n or k is 0"),
    ],
)
def test_what_no_descriptor_may_have_is_not_predicted(changes, message):
    product = Product(Mode.NVFP4, Format.RAW, 4, 4, 64, 1, 1, 1)
    assert predict(AcceleratorConfig(), product) > 0
    with pytest.raises(ValueError, match=f"^{message}$"):
        predict(AcceleratorConfig(), dataclasses.replace(product, **changes))


@pytest.mark.parametrize("mode", [Mode.NVFP4, Mode.AUTOFP2])
def test_long_products_take_the_time_of_their_vectors(mode):
    # 128 activation rows on 4 × 4 elements; the rest is the first segment's loading and the last tile's draining.
    config = AcceleratorConfig()
    p = Product(mode, Format.FP32, 128, 1024, 4096, 16, 8 if mode else 4, 16)
    vectors = 128 * 1024 // (1 if mode else 2) * 128 // 16
    assert vectors <= predict(config, p) <= 1.02 * vectors + 2000
