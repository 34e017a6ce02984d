"""Tiles of products: they fit, cover all, and are the fastest that were compared."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.accelerator import AcceleratorConfig, Descriptor, ErrorCode, Format, Mode, Operand, check
from model.accelerator_cycles import Processing, Product, predict
from model.tiling import REFINED, _least, plan, plans

FEW = 400
"""Segments of a product that are predicted in a blink; the predictions of many take a minute, and go through the same lines."""

CONFIGS = [
    AcceleratorConfig(),
    AcceleratorConfig(rows=16, columns=16, data_width=512),
    AcceleratorConfig(rows=1, columns=3, activation_depth=8, weight_depth=4, accumulators=8, activation_entries=4),
    AcceleratorConfig(rows=2, columns=2, activation_depth=64, weight_depth=2, lanes=64),
]


@settings(max_examples=100, deadline=None)
@given(
    config=st.sampled_from(CONFIGS),
    mode=st.sampled_from(list(Mode)),
    m=st.integers(1, 300),
    n=st.integers(1, 300),
    data=st.data(),
)
def test_every_plan_fits_and_covers(config, mode, m, n, data):
    kv = data.draw(st.integers(1, config.activation_depth))
    found = list(plans(config, mode, m, n, kv * config.lanes))
    assert found
    vectors = -(-n // 2) if mode == Mode.AUTOFP2 else n
    place = Operand(0, 0)
    sizes = (m, n, kv * config.lanes)

    def predicted(p, refined=0.0):
        tiles = p.tile_m, p.tile_n, p.segment
        return predict(config, Product(mode, Format.RAW, *sizes, *tiles, refined, refined))

    for p in found:
        descriptor = Descriptor(mode, 0, *sizes, p.tile_m, p.tile_n, p.segment, place, place, 0, 0)
        assert check(config, descriptor.pack()) == ErrorCode.OK
        tiles = -(-m // (config.rows * p.tile_m)) * -(-vectors // (config.columns * p.tile_n))
        assert p.tiles == tiles
        # What plans are left out by is no more than any prediction.
        if p.tiles * -(-kv // p.segment) <= FEW:
            assert _least(config, mode, m, sizes[2], p) <= predicted(p)
    # What was chosen is predicted to be at least as fast as what the estimate alone would have chosen.
    first = min(found, key=lambda p: (p.cycles, p.tiles, -p.tile_m))
    if first.tiles * -(-kv // first.segment) <= FEW:
        best = plan(config, mode, *sizes)
        assert (best.tile_m, best.tile_n, best.tiles) in {(p.tile_m, p.tile_n, p.tiles) for p in found}
        descriptor = Descriptor(mode, 0, *sizes, best.tile_m, best.tile_n, best.segment, place, place, 0, 0)
        assert check(config, descriptor.pack()) == ErrorCode.OK
        assert best == first or predicted(best, REFINED) <= predicted(first, REFINED)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 32), "m must be at least 1, not 0"),
        ((1, 1, 48), "k must be a multiple of 32 lanes, not 48"),
        ((1, 1, 131104), "k must be at most 131072 for these banks, not 131104"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        plan(AcceleratorConfig(), Mode.NVFP4, *sizes)


def test_no_tile_is_larger_than_the_product():
    for m, n in ((1, 1), (3, 5), (64, 2)):
        best = plan(AcceleratorConfig(), Mode.NVFP4, m, n, 64)
        assert best.tile_m <= -(-m // 4)
        assert best.tile_n <= -(-n // 4)


@pytest.mark.parametrize("mode", Mode)
def test_tiles_suit_what_is_done_with_outputs(mode):
    config, sizes = AcceleratorConfig(ppu=True), (128, 128, 512)

    def cycles(found, post):
        tiles = found.tile_m, found.tile_n, found.segment
        return predict(config, Product(mode, Format.FP32, *sizes, *tiles, 1.6, 1.6, post))

    beside = Processing(residual=True, previous=True, numbers=True)
    suits, usual = plan(config, mode, *sizes, post=beside), plan(config, mode, *sizes)
    assert cycles(suits, beside) < 0.97 * cycles(usual, beside)
    grouped = plan(config, mode, *sizes, post=Processing(groups=True))
    assert grouped.tile_n * config.columns * (2 if mode == Mode.AUTOFP2 else 1) % 32 == 0
