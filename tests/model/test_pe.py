"""The processing element's model against plain Python: records block by block, sums as fractions, cycles worked by hand."""

import re
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import ml_dtypes
import numpy as np
import pytest

from model import pe
from model.packed_pair import unpack
from model.pe import Operands, PeConfig, Tile, check_tile, cycles, merge_records, run_tile
from model.vmac import Vectors, VmacConfig, vmac

UNIT = Fraction(1, 2**22)
MASKS = [(w, a) for w in range(16) for a in range(16)]
MERGING = [
    VmacConfig(slots_per_block=1),
    VmacConfig(slots_per_block=2),
    VmacConfig(slots_per_block=3),
    VmacConfig(slots_per_block=4),
    VmacConfig(refinement="inplace"),
]
MERGING_IDS = ["slots-1", "slots-2", "slots-3", "slots-4", "inplace"]
# Table 8: the packed pair of every E2M1 code.
PAIR_OF_CODE = [0b11100, 0b01100, 0b10100, 0b01000, 0b10101, 0b01101, 0b01001, 0b00001]
PAIR_OF_CODE += [0b11100, 0b00110, 0b10110, 0b00010, 0b10111, 0b00111, 0b00011, 0b01011]


def merged_block(slots, w_mask, w_bytes, a_mask, a_bytes):
    """One block by the words of docs/pe.md: ({subgroup: (of the activation, offset byte)}, overlap, dropped)."""

    def records(mask, octets):
        subgroups = [g for g in range(4) if mask >> g & 1]
        return [(g, octets[i] if i < 2 else None) for i, g in enumerate(subgroups)]

    kept, dropped = {}, False
    weight = records(w_mask, w_bytes)
    activation = [(g, octet) for g, octet in records(a_mask, a_bytes) if not w_mask >> g & 1]
    for is_activation, chosen in ((False, weight), (True, activation)):
        for g, octet in chosen:
            if octet is None or len(kept) == slots:
                dropped = True
            else:
                kept[g] = is_activation, octet
    return kept, bool(w_mask & a_mask), dropped


def placed(slots, kept):
    """The slots' words: the earliest slots whose rule allows the subgroups in their order."""
    subgroups = sorted(kept)
    for places in combinations(range(slots), len(subgroups)):
        if all(i <= g <= 4 - slots + i for i, g in zip(places, subgroups, strict=True)):
            words = [0] * slots
            for i, g in zip(places, subgroups, strict=True):
                words[i] = kept[g][0] << 11 | g << 9 | 1 << 8 | int(kept[g][1])
            return words
    raise AssertionError(f"no place for {kept}")


def slots_of(config):
    return config.slots_per_block if config.refinement == "slots" else 4


def expected_words(config, kept):
    if config.refinement == "slots":
        return placed(config.slots_per_block, kept)
    word = 0
    for g, (is_activation, octet) in kept.items():
        word |= int(octet) << 8 * g | 1 << (36 if is_activation else 32) + g
    return [word]


def every_mask(rng, blocks):
    """Every pair of masks in every block, the other blocks at random, with random offset bytes."""
    masks = np.array(MASKS * blocks, np.uint8)
    rows = len(masks)
    w, a = (rng.integers(0, 16, (rows, blocks), dtype=np.uint8) for _ in range(2))
    block = np.repeat(np.arange(blocks), len(MASKS))
    w[np.arange(rows), block], a[np.arange(rows), block] = masks.T
    w_offsets, a_offsets = rng.integers(0, 256, (2, rows, blocks, 2), dtype=np.uint8)
    return w, w_offsets, a, a_offsets


@pytest.mark.parametrize("config", MERGING, ids=MERGING_IDS)
def test_every_pair_of_masks_is_merged_as_documented(config, seed):
    w, w_offsets, a, a_offsets = every_mask(np.random.default_rng(seed), config.blocks)
    refine, overlap, dropped = merge_records(config, w, w_offsets, a, a_offsets)
    assert refine.shape == (len(w), config.records)
    seen = set()
    for row in range(len(w)):
        blocks = [
            merged_block(slots_of(config), w[row, b], w_offsets[row, b], a[row, b], a_offsets[row, b])
            for b in range(config.blocks)
        ]
        assert refine[row].tolist() == [word for kept, _, _ in blocks for word in expected_words(config, kept)]
        assert overlap[row] == any(block[1] for block in blocks)
        assert dropped[row] == any(block[2] for block in blocks)
        seen |= {(int(w[row, b]), int(a[row, b])) for b in range(config.blocks)}
    assert len(seen) == 256


@pytest.mark.parametrize("config", MERGING[:4], ids=MERGING_IDS[:4])
def test_slots_hold_rising_subgroups_that_they_may_hold(config, seed):
    w, w_offsets, a, a_offsets = every_mask(np.random.default_rng(seed), config.blocks)
    refine, _, _ = merge_records(config, w, w_offsets, a, a_offsets)
    slots = config.slots_per_block
    filled = 0
    for row in refine.reshape(-1, slots):
        held = [(i, int(word) >> 9 & 3) for i, word in enumerate(row) if int(word) >> 8 & 1]
        assert all(i <= g <= 4 - slots + i for i, g in held)
        subgroups = [g for _, g in held]
        assert subgroups == sorted(set(subgroups))
        assert all(word == 0 for i, word in enumerate(row) if i not in dict(held))
        filled += len(held)
    assert filled > len(w)


def test_without_refinement_hardware_there_are_no_records():
    w, w_offsets, a, a_offsets = every_mask(np.random.default_rng(1), 2)
    refine, _, _ = merge_records(VmacConfig(refinement="none"), w, w_offsets, a, a_offsets)
    assert refine.shape == (512, 0)


def test_merging_worked_by_hand():
    """Slots for two: the weight's 1 and 3 hide the activation's 3, whose 0 finds no slot."""
    one_block = [np.array([[mask, 0]], np.uint8) for mask in (0b1010, 0b1001)]
    w_bytes, a_bytes = np.array([[[0x11, 0x22], [0, 0]]], np.uint8), np.array([[[0x33, 0x44], [0, 0]]], np.uint8)
    refine, overlap, dropped = merge_records(VmacConfig(), one_block[0], w_bytes, one_block[1], a_bytes)
    assert refine.tolist() == [[1 << 9 | 1 << 8 | 0x11, 3 << 9 | 1 << 8 | 0x22, 0, 0]]
    assert overlap.tolist() == [True]
    assert dropped.tolist() == [True]
    # A third slot takes it; the hidden record has used up the activation's second byte.
    refine, _, dropped = merge_records(VmacConfig(slots_per_block=3), one_block[0], w_bytes, one_block[1], a_bytes)
    assert refine[0, :3].tolist() == [1 << 11 | 1 << 8 | 0x33, 1 << 9 | 1 << 8 | 0x11, 3 << 9 | 1 << 8 | 0x22]
    assert dropped.tolist() == [False]


TILES = [
    PeConfig(),
    PeConfig(step="exponent", slots_per_block=1),
    PeConfig(slots_per_block=4, lanes=64),
    PeConfig(refinement="inplace"),
    PeConfig(scaling="group", window_shift=21),
    PeConfig(refinement="none"),
]
TILE_IDS = ["slots-2", "slots-1-exponent", "slots-4-lanes-64", "inplace", "group-window-21", "none"]


def random_tile(config, rng, nvfp4, refine_en, m, n, kv):
    """A tile and the E2M1 codes of its weights (which mean nothing in AutoFP2 mode)."""
    blocks = config.vmac.blocks
    codes = rng.integers(0, 16, (kv, n, config.lanes), dtype=np.uint8)
    pairs = np.array(PAIR_OF_CODE, np.uint8)[codes]

    def operands(vectors, count, scales):
        return Operands(
            vectors.astype(np.uint8),
            rng.integers(0x18, 0x7F, (kv, count, scales), dtype=np.uint8),
            rng.integers(0, 16, (kv, count, blocks), dtype=np.uint8),
            rng.integers(0, 256, (kv, count, blocks, 2), dtype=np.uint8),
        )

    a = rng.integers(0, 16, (kv, m, config.lanes), dtype=np.uint8)
    return Tile(nvfp4, refine_en, operands(pairs, n, config.vmac.w_scale_bytes), operands(a, m, blocks)), codes


def e2m1(codes):
    return [Fraction(float(x)) for x in codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)]


def e4m3(octets):
    return [Fraction(float(x)) for x in octets.view(ml_dtypes.float8_e4m3fn).astype(np.float32)]


def offsets_of(config, w, a, weight, activation):
    """Offsets (of weights, of activations) by lane, of a vector pair."""
    result = [Fraction(0)] * config.lanes, [Fraction(0)] * config.lanes
    status = 0
    for b in range(config.vmac.blocks):
        kept, overlap, dropped = merged_block(slots_of(config.vmac), w.masks[b], w.offsets[b], a.masks[b], a.offsets[b])
        status |= pe.OVERLAP * overlap | pe.DROPPED * dropped
        for g, (is_activation, octet) in kept.items():
            for i in range(4):
                lane = 16 * b + 4 * g + i
                d = ((int(octet) >> 2 * i & 3) ^ 2) - 2
                size = abs((activation if is_activation else weight)[lane])
                binade = 0 if config.step == "fixed" or size < 2 else 1 if size < 4 else 2
                result[is_activation][lane] = Fraction(d * 2**binade, 8)
    return *result, status


@pytest.mark.parametrize("refine_en", [False, True], ids=["nvfp4", "autofp6"])
@pytest.mark.parametrize("config", TILES, ids=TILE_IDS)
def test_nvfp4_and_autofp6_sums_are_the_exact_matrix_product(config, refine_en, seed):
    refine_en &= config.refinement != "none"
    m, n, kv = 3, 2, 3
    tile, codes = random_tile(config, np.random.default_rng(seed), True, refine_en, m, n, kv)
    result = run_tile(config, tile)
    status = 0
    for j, i in product(range(n), range(m)):
        total = Fraction(0)
        for k in range(kv):
            w, a = tile.weights[k, j], tile.activations[k, i]
            weight, activation = e2m1(codes[k, j]), e2m1(a.codes)
            dw = da = [Fraction(0)] * config.lanes
            if refine_en:
                dw, da, raised = offsets_of(config, w, a, weight, activation)
                status |= raised
            scales = zip(e4m3(w.scales), e4m3(a.scales), strict=False)
            for b, (of_w, of_a) in enumerate(scales):
                block = range(16 * b, 16 * b + 16)
                dot = sum((weight[x] + dw[x]) * activation[x] + weight[x] * da[x] for x in block)
                total += dot * of_w * of_a
        assert int(result.psum[j, i]) == total / UNIT % 2**64
    assert result.status == status


@pytest.mark.parametrize("config", TILES, ids=TILE_IDS)
def test_autofp2_sums_are_both_rows_rounded_once_per_vector(config, seed):
    m, n, kv = 2, 3, 4
    tile, _ = random_tile(config, np.random.default_rng(seed), False, False, m, n, kv)
    result = run_tile(config, tile)
    blocks = config.vmac.blocks
    for j, i in product(range(n), range(m)):
        halves = [0, 0]
        for k in range(kv):
            w, a = tile.weights[k, j], tile.activations[k, i]
            w_scale, a_scale, x = e4m3(w.scales), e4m3(a.scales), e2m1(a.codes)
            for row, digits in enumerate(unpack(w.codes)):
                total = Fraction(0)
                for lane in range(config.lanes):
                    b = lane // 16
                    grouped = config.scaling == "group"
                    of_w = w_scale[row * blocks + b if grouped else b // 2 * 2 + row]
                    total += int(digits[lane]) * x[lane] * of_w * a_scale[b if grouped else b // 2 * 2]
                halves[row] += (total / UNIT / 2**config.window_shift + Fraction(1, 2)).__floor__()
        assert int(result.psum[j, i]) == (halves[1] % 2**32) << 32 | halves[0] % 2**32
    assert result.status == 0


@pytest.mark.parametrize("config", TILES, ids=TILE_IDS)
def test_tiles_are_loops_of_vectors(config, seed):
    rng = np.random.default_rng(seed)
    vector = config.vmac
    for nvfp4, refine_en in ((False, False), (True, False), (True, config.refinement != "none")):
        tile, _ = random_tile(config, rng, nvfp4, refine_en, 3, 2, 2)
        tile.weights.scales[rng.random(tile.weights.scales.shape) < 0.05] = 0x7F
        psum, status = np.zeros((2, 3), np.uint64), 0
        for k, j, i in product(range(2), range(2), range(3)):
            w, a = tile.weights[k, [j]], tile.activations[k, [i]]
            refine, overlap, dropped = merge_records(vector, w.masks, w.offsets, a.masks, a.offsets)
            one = Vectors(
                np.array([nvfp4]),
                np.array([refine_en]),
                a.codes,
                w.codes,
                a.scales,
                w.scales,
                refine if refine_en else np.zeros_like(refine),
                psum[j, [i]],
            )
            result = vmac(vector, one)
            psum[j, i] = result.psum[0]
            status |= int(result.status[0]) >> 1
            if refine_en:
                status |= pe.OVERLAP * bool(overlap[0]) | pe.DROPPED * bool(dropped[0])
        result = run_tile(config, tile)
        assert result.psum.tolist() == psum.tolist()
        assert result.status == status


def test_masks_mean_nothing_without_refine_en(seed):
    config = PeConfig()
    tile, _ = random_tile(config, np.random.default_rng(seed), True, False, 2, 2, 2)
    bare = replace(tile, weights=replace(tile.weights, masks=np.zeros_like(tile.weights.masks)))
    assert run_tile(config, tile).psum.tolist() == run_tile(config, bare).psum.tolist()
    assert run_tile(config, tile).status == 0


def test_saturation_is_reported():
    config = PeConfig(window_shift=20)
    kv = 8
    full, limit = np.full((kv, 1, 32), 0b00101, np.uint8), np.full((kv, 1, 2), 0x7E, np.uint8)
    nothing = np.zeros((kv, 1, 2), np.uint8), np.zeros((kv, 1, 2, 2), np.uint8)
    assert [int(d[0]) for d in unpack(full[0, 0, :1])] == [2, 2]
    tile = Tile(
        False, False, Operands(full, limit, *nothing), Operands(np.full((kv, 1, 32), 7, np.uint8), limit, *nothing)
    )
    # 32 lanes of 2 · 6 under 448² are 384 · 448² · 4 units of 2⁻² each.
    assert 7 * 384 * 448**2 * 4 > 2**31 - 1
    result = run_tile(config, tile)
    assert result.psum.tolist() == [[0x7FFFFFFF_7FFFFFFF]]
    assert result.status == pe.SATURATED
    short = Tile(False, False, tile.weights[:6], tile.activations[:6])
    assert run_tile(config, short).psum.tolist() == [[(6 * 384 * 448**2 * 4) * (2**32 + 1)]]
    assert run_tile(config, short).status == 0


def exactly(message):
    return f"^{re.escape(message)}$"


def blank(config, m, n, kv, nvfp4=True, refine_en=False):
    def operands(count, scales):
        shape = kv, count
        blocks = config.vmac.blocks
        return Operands(
            np.zeros((*shape, config.lanes), np.uint8),
            np.zeros((*shape, scales), np.uint8),
            np.zeros((*shape, blocks), np.uint8),
            np.zeros((*shape, blocks, 2), np.uint8),
        )

    return Tile(nvfp4, refine_en, operands(n, config.vmac.w_scale_bytes), operands(m, config.vmac.blocks))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1), "M must be from 1 to 64, not 0"),
        ((65, 1, 1), "M must be from 1 to 64, not 65"),
        ((1, 0, 1), "N must be from 1 to 128, not 0"),
        ((1, 129, 1), "N must be from 1 to 128, not 129"),
        ((1, 1, 0), "KV must be from 1 to 8191, not 0"),
        ((1, 1, 8192), "KV must be from 1 to 8191, not 8192"),
        ((64, 3, 1), "M·N must be from 1 to 128, not 64·3"),
        ((3, 43, 1), "M·N must be from 1 to 128, not 3·43"),
    ],
)
def test_tiles_out_of_range_are_refused(sizes, message):
    config = PeConfig()
    tile = blank(config, *sizes)
    for call in (check_tile, run_tile):
        with pytest.raises(ValueError, match=exactly(message)):
            call(config, tile)


def test_refinement_must_come_with_its_mode_and_hardware():
    message = "refine_en must come with mode_nvfp4 and refinement hardware"
    for config, nvfp4 in ((PeConfig(), False), (PeConfig(refinement="none"), True)):
        with pytest.raises(ValueError, match=exactly(message)):
            check_tile(config, blank(config, 1, 1, 1, nvfp4, True))


@pytest.mark.parametrize("field", ["codes", "scales", "masks", "offsets"])
@pytest.mark.parametrize("operand", ["weights", "activations"])
def test_shapes_that_do_not_fit_are_named(operand, field):
    config = PeConfig(scaling="group")
    tile = blank(config, 2, 3, 4)
    check_tile(config, tile)
    good = getattr(getattr(tile, operand), field)
    bad = replace(tile, **{operand: replace(getattr(tile, operand), **{field: good[..., :1]})})
    message = f"{operand}.{field} must have shape {good.shape}, not {good[..., :1].shape}"
    with pytest.raises(ValueError, match=exactly(message)):
        check_tile(config, bad)


def test_operands_of_different_lengths_are_refused():
    config = PeConfig()
    tile = blank(config, 2, 3, 4)
    with pytest.raises(ValueError, match=r"^activations.codes must have shape \(4, 2, 32\), not \(3, 2, 32\)$"):
        check_tile(config, replace(tile, activations=tile.activations[:3]))


@pytest.mark.parametrize(
    ("parameters", "kind", "message"),
    [
        ({"weight_entries": 1}, ValueError, "weight_entries must be a power of two from 2 on, not 1"),
        ({"weight_entries": 12}, ValueError, "weight_entries must be a power of two from 2 on, not 12"),
        ({"activation_entries": 0}, ValueError, "activation_entries must be a power of two from 2 on, not 0"),
        ({"activation_entries": -4}, ValueError, "activation_entries must be a power of two from 2 on, not -4"),
        ({"accumulators": 2}, ValueError, "accumulators must be a power of two from 4 on, not 2"),
        ({"accumulators": 6}, ValueError, "accumulators must be a power of two from 4 on, not 6"),
        ({"accumulators": 256.0}, TypeError, "accumulators must be an integer, not 256.0"),
        ({"weight_entries": True}, TypeError, "weight_entries must be an integer, not True"),
        ({"lanes": 16}, ValueError, "lanes must be a positive multiple of 32, not 16"),
        ({"slots_per_block": 5}, ValueError, "slots_per_block must be from 1 to 4, not 5"),
    ],
)
def test_configurations_out_of_range_are_refused(parameters, kind, message):
    with pytest.raises(kind, match=exactly(message)):
        PeConfig(**parameters)


def test_limits_follow_from_the_buffers():
    config = PeConfig()
    assert (config.max_m, config.max_n, config.max_words, config.max_kv) == (64, 128, 128, (2**18 - 1) // 32)
    small = PeConfig(activation_entries=64, accumulators=32, lanes=64)
    assert (small.max_m, small.max_n, small.max_words, small.max_kv) == (16, 16, 16, (2**18 - 1) // 64)
    # With four slots and exponent steps a sum can overflow before the counters do.
    wide = PeConfig(slots_per_block=4, step="exponent")
    assert wide.vmac.max_k < 2**18
    assert wide.max_kv == wide.vmac.max_k // 32
    assert config.vmac == VmacConfig()


@pytest.mark.parametrize(
    ("tiles", "leaves"),
    [
        # Taken in cycle 0, issued in 1, stored by 7, out in 8.
        ([(1, 1, 1)], [8]),
        # A sum comes back after three cycles: issued in 1 and 4.
        ([(1, 1, 2)], [11]),
        # 1, 2, 4, 5.
        ([(2, 1, 2)], [5 + 6 + 2]),
        ([(1, 2, 2)], [5 + 6 + 2]),
        # Three sums need not wait: 1 to 6.
        ([(3, 1, 2)], [6 + 6 + 3]),
        # The second is taken with the vector of the first in cycle 1; the third when the first result has left, in 9; then 10.
        ([(1, 1, 1)] * 4, [8, 9, 17, 18]),
        # The drain is the bottleneck: a tile's sums follow the other's.
        ([(4, 4, 1), (4, 4, 1)], [16 + 6 + 16, 38 + 16]),
        # Computing is the bottleneck.
        ([(4, 4, 3), (2, 2, 3)], [48 + 6 + 16, max(60 + 6, 70) + 4]),
        ([(16, 8, 32)], [4096 + 6 + 128]),
        ([(64, 2, 32), (1, 128, 32)], [4096 + 134, 8192 + 134]),
    ],
)
def test_cycles_worked_by_hand(tiles, leaves):
    assert cycles(PeConfig(), tiles) == leaves


def test_cycles_refuse_what_no_bank_holds():
    for tile in ((0, 4, 1), (64, 3, 1)):
        with pytest.raises(ValueError, match=exactly(f"M·N must be from 1 to 128, not {tile[0]}·{tile[1]}")):
            cycles(PeConfig(), [tile])
