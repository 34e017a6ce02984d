"""Predicted cycles: never below what elements and bus allow, and what is expected where that can be worked out by hand."""

import dataclasses
from math import ceil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.accelerator import AcceleratorConfig, Format, Mode
from model.accelerator_cycles import Processing, Product, predict, predict_chain
from model.accelerator_flow import Repeats


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


def followed(monkeypatch, *case):
    """Return a prediction that leaves nothing out, and how many segments it took."""
    flows = []
    with monkeypatch.context() as patch:
        patch.setattr(Repeats, "skip", lambda self, *_, **__: flows.append(self._flow) or 0)
        return predict(*case), len(flows[-1].segments)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=products(), size=st.tuples(*2 * [st.integers(1, 300)]), latency=st.sampled_from([0, 20, 200]), data=st.data()
)
def test_what_repeats_itself_takes_the_cycles_of_being_followed(monkeypatch, case, size, latency, data):
    config, p = case
    p = dataclasses.replace(p, m=size[0], n=size[1])
    if data.draw(st.booleans()):
        flags = {name: data.draw(st.booleans()) for name in ("residual", "numbers", "report", "refine")}
        config = dataclasses.replace(config, ppu=True)
        p = dataclasses.replace(p, format=Format.FP32, post=Processing(**flags))
    assert predict(config, p, latency, latency) == followed(monkeypatch, config, p, latency, latency)[0]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("sizes", "tiles"), [((700, 3000, 512), (8, 8, 16)), ((2000, 300, 512), (16, 4, 8)), ((8, 9000, 2048), (2, 8, 5))]
)
def test_most_of_a_large_product_is_not_followed(monkeypatch, mode, sizes, tiles):
    config, flows = AcceleratorConfig(), []
    p = Product(mode, Format.RAW, *sizes, *tiles, 1.6, 1.6)
    whole, segments = followed(monkeypatch, config, p)
    usual = Repeats.skip
    monkeypatch.setattr(
        Repeats, "skip", lambda self, *given, **more: flows.append(self._flow) or usual(self, *given, **more)
    )
    assert predict(config, p) == whole
    assert len(flows[-1].segments) < segments / 4


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


POSTS = st.builds(Processing, *[st.booleans()] * 4, refine=st.booleans(), report=st.booleans(), refined=st.floats(0, 4))


@settings(deadline=None, max_examples=60)
@given(products(), POSTS, st.integers(0, 100))
def test_no_prediction_beats_the_bus_when_more_is_read_and_written(case, post, latency):
    config, p = case
    config = dataclasses.replace(config, ppu=True)
    width = config.columns * p.tile_n * (2 if p.mode == Mode.AUTOFP2 else 1)
    post = dataclasses.replace(post, groups=post.groups and (width % 32 == 0 or width >= p.n))
    p = dataclasses.replace(p, format=Format.FP32, post=post)
    cycles = predict(config, p, latency, latency)
    panels = ceil(p.m / (config.rows * p.tile_m))
    operands = (p.m + panels * p.n) * p.k // 32 * 18
    beside = 4 * p.m * p.n * (post.residual + post.previous)
    assert cycles >= (operands + beside) * 8 / config.data_width
    assert cycles >= p.m * p.n * (4 * post.numbers + 9 / 16 * post.groups) * 8 / config.data_width
    assert cycles >= predict(config, dataclasses.replace(p, post=Processing()))


@pytest.mark.parametrize(
    ("ppu", "changes", "message"),
    [
        (False, {}, "ppu must be True for products with post or policy, not False"),
        (True, {"format": Format.RAW}, "format must be FP32 for products with post, not RAW"),
        (True, {"tile_n": 12}, "tile_n must make tiles of a multiple of 32 outputs with groups, not 12, of 48"),
    ],
)
def test_what_no_post_block_may_have_is_not_predicted(ppu, changes, message):
    product = Product(Mode.NVFP4, Format.FP32, 4, 64, 64, 1, 8, 1, post=Processing(groups=True))
    assert predict(AcceleratorConfig(ppu=True), product) > 0
    with pytest.raises(ValueError, match=f"^{message}$"):
        predict(AcceleratorConfig(ppu=ppu), dataclasses.replace(product, **changes))


@pytest.mark.parametrize("mode", [Mode.NVFP4, Mode.AUTOFP2])
def test_sums_wait_for_post_processing_only_if_k_is_short(mode):
    """16 rows of elements: a tile of 128 sums of an element leaves in 2048 cycles, twice that in AutoFP2 mode, whatever K is."""
    config = AcceleratorConfig(rows=16, columns=2, data_width=512, ppu=True)
    n = 1024 if mode else 2048
    leaves = 2048 if mode else 4096
    for kv in (8, 16, 32, 64):
        p = Product(mode, Format.FP32, 128, n, 32 * kv, 8, 16, 8, post=Processing(groups=True))
        tiles = 32
        each = max(128 * kv, leaves)
        assert tiles * each <= predict(config, p) <= 1.01 * tiles * each + 7000


def test_chains_wait_for_the_product_before():
    config = AcceleratorConfig(ppu=True)
    post = Processing(residual=True, previous=True, numbers=True, report=True, observe=True)
    p = Product(Mode.NVFP4, Format.FP32, 4, 64, 64, 1, 16, 2, post=post)
    alone = predict(config, p)
    assert predict_chain(config, [p]) == alone
    two = predict_chain(config, [p, p])
    assert alone < two < 2 * alone
    # The policy unit takes 213 cycles for an activity, and the record is written meanwhile.
    picked = dataclasses.replace(p, policy=True)
    assert two + 190 < predict_chain(config, [p, picked]) < two + 220
    unseen = dataclasses.replace(p, post=dataclasses.replace(post, observe=False))
    assert predict_chain(config, [unseen, picked]) == two + 2


def test_refined_subgroups_of_each_vector_are_those_of_a_row():
    config = AcceleratorConfig(data_width=512)
    product = Product(Mode.AUTOFP6, Format.RAW, 8, 64, 128, 1, 4, 4, (1.0,) * 4, (0.0,) * 4)
    # Nothing refined has no offsets to fetch or to wait for.
    assert predict(config, product) < predict(config, dataclasses.replace(product, w_refined=(2.0,) * 4))
    with pytest.raises(ValueError, match=r"^refined subgroups must be given for 4 vectors of a row, not for 3$"):
        predict(config, dataclasses.replace(product, w_refined=(1.0,) * 3))
