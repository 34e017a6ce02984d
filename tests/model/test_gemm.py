"""Whole products against the model of an element, and their conversion to FP32 against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.accelerator import Mode
from model.gemm import overcrowded, product, to_fp32
from model.pe import DROPPED, NAN_SCALE, OVERLAP, SATURATED, Operands, PeConfig, Tile, run_tile
from model.tile_engine import EngineConfig, RowOperands, packed_weights

CONFIGS = [
    {},
    {"slots_per_block": 1},
    {"slots_per_block": 3, "step": "exponent"},
    {"slots_per_block": 4, "scaling": "group"},
    {"refinement": "inplace", "step": "exponent"},
    {"refinement": "none", "window_shift": 18},
    {"lanes": 64, "scaling": "group", "window_shift": 21},
    {"lanes": 64},
]
LARGE = {"activation_entries": 64, "accumulators": 4096}


def random_operands(rng, config, rows, kv, scales, masks, codes=(0, 16)):
    blocks = config.vmac.blocks
    low, high = scales
    table = np.array([m for m in range(16) if m.bit_count() <= masks], np.uint8)
    shared = rng.random() < 0.5
    drawn = rng.choice(table, (1 if shared else rows, kv, blocks))
    return Operands(
        rng.integers(*codes, (rows, kv, config.lanes), dtype=np.uint8),
        rng.integers(low, high + 1, (rows, kv, blocks), dtype=np.uint8),
        np.broadcast_to(drawn, (rows, kv, blocks)).copy(),
        rng.integers(0, 256, (rows, kv, blocks, 2), dtype=np.uint8),
    )


def turned(operands):
    return Operands(
        *(np.swapaxes(values, 0, 1) for values in (operands.codes, operands.scales, operands.masks, operands.offsets))
    )


def of_element(config, mode, a, w):
    """Sums and status of one tile of the element's model."""
    nvfp4 = mode != Mode.AUTOFP2
    rows = len(w.codes)
    if not nvfp4 and rows % 2:
        w = Operands(*(np.concatenate([v, np.zeros_like(v[:1])]) for v in (w.codes, w.scales, w.masks, w.offsets)))
    weights = packed_weights(config, nvfp4, RowOperands(turned(w)))
    result = run_tile(config, Tile(nvfp4, mode == Mode.AUTOFP6, weights, turned(a)))
    if nvfp4:
        return result.psum.view(np.int64).T, result.status
    halves = np.ascontiguousarray(result.psum).view("<i4").reshape(*result.psum.shape, 2)
    return np.moveaxis(halves, 2, 1).reshape(-1, len(a.codes)).T.astype(np.int64)[:, :rows], result.status


SEEN = {}


@settings(max_examples=150, deadline=None)
@given(
    number=st.integers(0, len(CONFIGS) - 1),
    mode=st.sampled_from(list(Mode)),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 7)),
    scales=st.sampled_from([(0x28, 0x60), (0, 0x7E), (0x78, 0x7E), (0, 0xFF), (0x70, 0x7F)]),
    masks=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    codes=st.sampled_from([(0, 16), (0, 8), (7, 8)]),
    draw=st.integers(0, 2**32 - 1),
)
@example(5, Mode.AUTOFP2, (2, 3, 7), (0x7E, 0x7E), (0, 0), (7, 8), 1)
@example(6, Mode.AUTOFP2, (2, 3, 7), (0x7C, 0x7E), (0, 0), (0, 16), 1)
@example(0, Mode.AUTOFP2, (3, 4, 2), (0, 0xFF), (0, 0), (0, 16), 1)
@example(0, Mode.NVFP4, (3, 4, 2), (0, 0xFF), (0, 0), (0, 16), 1)
@example(0, Mode.NVFP4, (3, 4, 2), (0, 0x7E), (0, 0), (0, 16), 1)
@example(0, Mode.AUTOFP6, (3, 4, 2), (0, 0xFF), (1, 1), (0, 16), 1)
@example(0, Mode.AUTOFP6, (3, 4, 2), (0, 0x7E), (0, 2), (0, 16), 1)
@example(2, Mode.AUTOFP6, (3, 4, 2), (0, 0x7E), (4, 4), (0, 16), 1)
def check(number, mode, sizes, scales, masks, codes, draw):
    config = EngineConfig(**CONFIGS[number], **LARGE)
    if mode == Mode.AUTOFP6 and config.refinement == "none":
        mode = Mode.NVFP4
    rng = np.random.default_rng(draw)
    m, n, kv = sizes
    a, w = (
        random_operands(rng, config, rows, kv, scales, most, codes) for rows, most in zip((m, n), masks, strict=True)
    )
    sums, status = product(config, mode, a, w)
    expected, raised = of_element(config, mode, a, w)
    assert sums.dtype == np.int64
    assert sums.shape == (m, n)
    assert (sums == expected).all()
    assert status == raised
    SEEN.setdefault(mode, set()).add(status)


def test_products_are_those_of_the_element():
    SEEN.clear()
    check()
    assert set(SEEN) == set(Mode)
    for bit, modes in {SATURATED: [0], NAN_SCALE: [0, 1, 2], OVERLAP: [2], DROPPED: [2]}.items():
        assert all(any(status & bit for status in SEEN[mode]) for mode in modes), bit
    assert all(0 in SEEN[mode] for mode in Mode)


def test_sums_wrap_and_long_slices_are_exact():
    config = EngineConfig(**LARGE)
    shape = (2, 1 << 14, 32)
    full = Operands(
        np.full(shape, 7, np.uint8),
        np.full((*shape[:2], 2), 0x7F, np.uint8),
        np.zeros((*shape[:2], 2), np.uint8),
        np.zeros((*shape[:2], 2, 2), np.uint8),
    )
    sums, status = product(config, Mode.NVFP4, full, full)
    exact = 4 * 32 * (1 << 14) * (12 * 15 << 14) ** 2
    assert status == NAN_SCALE
    assert exact > 2**63
    assert (sums == (exact + 2**63) % 2**64 - 2**63).all()


def test_padding_of_weights_can_drop_records():
    config = EngineConfig()
    rng = np.random.default_rng(1)
    a, w = (random_operands(rng, config, 2, 1, (0x30, 0x40), 0) for _ in range(2))
    a.masks[:], w.masks[:] = 0b0111, 0b0100
    assert product(config, Mode.AUTOFP6, a, w)[1] == OVERLAP | DROPPED
    assert overcrowded(config, a) == DROPPED
    a.masks[:] = 0b0011
    assert overcrowded(config, a) == 0


def test_products_of_a_layer_take_seconds(seed):
    config = EngineConfig()
    rng = np.random.default_rng(seed)
    a, w = (random_operands(rng, config, rows, 18, (0x28, 0x60), 2) for rows in (64, 1536))
    for mode in Mode:
        sums, _ = product(config, mode, a, w)
        picked_a, picked_w = a[[0, 5, 63]], w[[0, 1, 1000, 1001]]
        assert (sums[np.ix_([0, 5, 63], [0, 1, 1000, 1001])] == of_element(config, mode, picked_a, picked_w)[0]).all()


def rounded(value, exponent_bits=8, fraction_bits=23):
    """Round a fraction to FP32, ties to even, by definition."""
    if value == 0:
        return 0.0
    sign, size = (-1 if value < 0 else 1), abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, 2 - (1 << exponent_bits - 1)) - fraction_bits)
    result = round(size / unit) * unit
    return sign * (float("inf") if result >= Fraction(2) ** 128 else float(result))


@settings(max_examples=400, deadline=None)
@given(
    value=st.one_of(
        st.integers(-(2**63), 2**63 - 1),
        # Next to the middle between two FP32 numbers, where rounding to float64 first would go wrong.
        st.builds(
            lambda high, shift, low: (2 * high + 1 << shift) + low,
            st.integers(2**23, 2**24 - 1),
            st.integers(2, 37),
            st.integers(-1, 1),
        ),
    ),
    scale=st.floats(width=32, allow_nan=False, allow_infinity=False),
)
def test_fp32_is_rounded_twice(value, scale):
    found = to_fp32(np.array([value], np.int64), scale)
    assert found.dtype == np.float32
    expected = Fraction(rounded(Fraction(value))) * Fraction(scale)
    assert float(found[0]) == rounded(expected)


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 1e39])
def test_scales_that_are_no_numbers_are_refused(scale):
    with pytest.raises(ValueError, match=r"^out_scale must be finite in FP32, not "):
        to_fp32(np.zeros(1, np.int64), scale)


def test_what_does_not_fit_is_refused():
    rng = np.random.default_rng(1)
    config = EngineConfig(refinement="none")
    a, w = (random_operands(rng, config, 2, kv, (0x30, 0x40), 0) for kv in (1, 2))
    with pytest.raises(ValueError, match=r"^w.codes must have shape \(2, 1, 32\), not \(2, 2, 32\)$"):
        product(config, Mode.NVFP4, a, w)
    with pytest.raises(ValueError, match=r"^mode must be one that the configuration has, not AUTOFP6$"):
        product(config, Mode.AUTOFP6, a, a)
    with pytest.raises(ValueError, match="3 is not a valid Mode"):
        product(config, 3, a, a)
    assert isinstance(config, PeConfig)
