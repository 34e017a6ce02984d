"""The vMAC's arithmetic against plain fractions of the values that codes and scales stand for."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from model import autofp2, autofp6
from model import vmac as v
from model.block_scaled import dequantize, quantize
from model.formats import E2M1, E4M3
from model.packed_pair import NVFP4_PAIRS, nvfp4_digits, pack, unpack
from model.vmac import VmacConfig, vmac
from model.vmac_autofp2 import AutoFp2Config, vmac_autofp2
from model.vmac_nvfp4 import Nvfp4Config, vmac_nvfp4
from model.weight_encoder import encode

UNIT = Fraction(1, 2**22)
SCALE = [Fraction(float(value)) for value in E4M3.decode(np.arange(127))]
CONFIGURATIONS = [
    VmacConfig(),
    VmacConfig(step="exponent"),
    VmacConfig(refinement="inplace"),
    VmacConfig(refinement="inplace", step="exponent"),
    VmacConfig(refinement="none"),
    VmacConfig(scaling="group"),
    VmacConfig(lanes=64),
    VmacConfig(lanes=64, scaling="group", slots_per_block=3),
    VmacConfig(slots_per_block=1, window_shift=21),
    VmacConfig(slots_per_block=4),
]
IDS = ["-".join(str(value) for value in vars(c).values()) for c in CONFIGURATIONS]


def random_vectors(config, count, rng):
    nvfp4 = rng.random(count) < 0.6
    legal = NVFP4_PAIRS[rng.integers(0, 15, (count, config.lanes))]
    free = pack(*rng.integers(-2, 3, (2, count, config.lanes)))
    if config.refinement == "slots":
        places = np.array(list(combinations(range(4), config.slots_per_block)))
        subgroup = places[rng.integers(0, len(places), (count, config.blocks))].reshape(count, -1)
        refine = rng.integers(0, 512, subgroup.shape) | subgroup << 9 | rng.integers(0, 2, subgroup.shape) << 11
    else:
        refine = rng.integers(0, 2**40 if config.records else 1, (count, config.records))
    return v.Vectors(
        nvfp4,
        rng.random(count) < 0.6,
        rng.integers(0, 16, (count, config.lanes), dtype=np.uint8),
        np.where(nvfp4[:, None], legal, free).astype(np.uint8),
        rng.integers(0, 127, (count, config.blocks), dtype=np.uint8),
        rng.integers(0, 127, (count, config.w_scale_bytes), dtype=np.uint8),
        refine.astype(np.uint64),
        rng.integers(0, 2**64, count, dtype=np.uint64),
    )


def offset_values(config, vectors, n, weight, activation):
    """Return (of weight, of activation) offsets of each lane as fractions, by reading the record's bits."""
    of_w, of_a = [Fraction(0)] * config.lanes, [Fraction(0)] * config.lanes

    def put(lane, is_activation, d):
        d = (d ^ 2) - 2
        refined = activation[lane] if is_activation else weight[lane]
        binade = 0 if config.step == "fixed" or abs(refined) < 2 else 1 if abs(refined) < 4 else 2
        (of_a if is_activation else of_w)[lane] += Fraction(d * 2**binade, 8)

    for index, word in enumerate(int(word) for word in vectors.refine[n]):
        if config.refinement == "inplace":
            for i in range(16):
                on_weight, on_activation = word >> 32 + i // 4 & 1, word >> 36 + i // 4 & 1
                if on_weight or on_activation:
                    put(16 * index + i, not on_weight, word >> 2 * i & 3)
        elif word >> 8 & 1:
            first = 16 * (index // config.slots_per_block) + 4 * (word >> 9 & 3)
            for i in range(4):
                put(first + i, word >> 11 & 1, word >> 2 * i & 3)
    return of_w, of_a


def expected_psum(config, vectors, n):
    """Compute one vector's partial sum from the numbers that its codes mean."""
    a = [Fraction(float(x)) for x in E2M1.decode(vectors.a[n])]
    q0, q1 = unpack(vectors.w[n])
    a_scale, w_scale = [SCALE[b] for b in vectors.a_scale[n]], [SCALE[b] for b in vectors.w_scale[n]]
    psum = int(vectors.psum[n])
    if vectors.mode_nvfp4[n]:
        w = [Fraction(5 * int(x) + 2 * int(y), 2) for x, y in zip(q0, q1, strict=True)]
        dw = da = [Fraction(0)] * config.lanes
        if vectors.refine_en[n] and config.refinement != "none":
            dw, da = offset_values(config, vectors, n, w, a)
        total = sum(
            (
                (w[k] * a[k] + dw[k] * a[k] + w[k] * da[k]) * w_scale[k // 16] * a_scale[k // 16]
                for k in range(config.lanes)
            ),
            Fraction(0),
        )
        units = total / UNIT
        assert units.denominator == 1
        return (psum + int(units)) % 2**64
    halves = []
    for row, digits in enumerate((q0, q1)):
        total = Fraction(0)
        for k in range(config.lanes):
            block = k // 16
            if config.scaling == "group":
                scale = w_scale[row * config.blocks + block] * a_scale[block]
            else:
                scale = w_scale[block // 2 * 2 + row] * a_scale[block // 2 * 2]
            total += int(digits[k]) * a[k] * scale
        rounded = (total / UNIT / 2**config.window_shift + Fraction(1, 2)).__floor__()
        half = (psum >> 32 * row) % 2**32
        half -= 2**32 * (half >> 31)
        halves.append(min(max(half + rounded, -(2**31)), 2**31 - 1) % 2**32)
    return halves[1] << 32 | halves[0]


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=IDS)
def test_partial_sums_equal_exact_fractions_in_every_mode(config, seed):
    vectors = random_vectors(config, 400, np.random.default_rng(seed))
    result = vmac(config, vectors)
    expected = [expected_psum(config, vectors, n) for n in range(len(vectors))]
    assert result.psum.tolist() == expected
    modes = {(bool(m), bool(r)) for m, r in zip(vectors.mode_nvfp4, vectors.refine_en, strict=True)}
    assert len(modes) == 4


def single(config=None, *, nvfp4=True, refine_en=False, a=0, w=0, a_scale=0x38, w_scale=0x38, refine=0, psum=0):
    """One vector whose lane 0 holds the E2M1 codes a and w; 0x38 is a scale of one."""
    config = config or VmacConfig()
    codes, pairs = np.zeros((1, config.lanes), np.uint8), np.full((1, config.lanes), 0b11100, np.uint8)
    codes[0, 0], pairs[0, 0] = a, w
    words = np.zeros((1, config.records), np.uint64)
    words[0, 0] = refine
    return vmac(
        config,
        v.Vectors(
            np.array([nvfp4]),
            np.array([refine_en]),
            codes,
            pairs,
            np.full((1, config.blocks), a_scale, np.uint8),
            np.full((1, config.w_scale_bytes), w_scale, np.uint8),
            words,
            np.array([psum], np.uint64),
        ),
    )


def weight(value):
    return int(pack(*nvfp4_digits(E2M1.encode([value])))[0])


def test_case_check_value_of_the_paper():
    assert single(a=3, w=weight(3)).o[0, 0] == 4 * 18
    refined = single(a=3, w=weight(3), refine_en=True, refine=1 << 8 | 0b11)
    assert refined.o[0, 0] == 69
    assert Fraction(69, 16) == Fraction(3, 2) * (3 - Fraction(1, 8))


def test_case_windowed_sum_keeps_a_large_product():
    result = single(nvfp4=False, a=2, w=int(pack(1, 0)), a_scale=0x60, w_scale=0x60)
    assert int(result.psum[0]) * 2**2 == 1024


@pytest.mark.parametrize(("w", "o"), [(0.5, 4), (-0.5, -4)])
def test_case_no_early_halving(w, o):
    assert single(a=1, w=weight(w)).o[0, 0] == o


def test_case_refinement_inputs_do_nothing_without_refine_en(seed):
    rng = np.random.default_rng(seed)
    vectors = random_vectors(VmacConfig(), 300, rng)
    vectors.refine_en[:] = False
    plain = vmac(VmacConfig(), vectors)
    vectors.refine[:] = 0
    assert (vmac(VmacConfig(), vectors).psum == plain.psum).all()
    assert (plain.o % 4 == 0).all()


def test_case_minus_zero_changes_no_sum():
    for a, w in ((8, weight(6)), (7, int(pack(*nvfp4_digits([8]))[0]))):
        assert single(a=a, w=w, psum=99).psum[0] == 99


def test_status_bits_of_each_kind():
    assert single().status[0] == 0
    assert single(nvfp4=False, refine_en=True).status[0] == v.ILLEGAL
    for byte in (0x7F, 0x80, 0xFF):
        assert single(a_scale=byte).status[0] == v.NAN_SCALE
        assert single(w_scale=byte).status[0] == v.NAN_SCALE
    full = single(nvfp4=False, a=7, w=int(pack(2, 2)), a_scale=0x7E, w_scale=0x7E, psum=0x7FFFFFFF7FFFFFFF)
    assert (full.status[0], int(full.psum[0])) == (v.SATURATED, 0x7FFFFFFF7FFFFFFF)
    empty = single(nvfp4=False, a=15, w=int(pack(2, 2)), a_scale=0x7E, w_scale=0x7E, psum=0x8000000080000000)
    assert (empty.status[0], int(empty.psum[0])) == (v.SATURATED, 0x8000000080000000)


def test_unused_activation_scale_of_autofp2_is_not_reported():
    config = VmacConfig()
    zeros = np.zeros((1, 32), np.uint8)
    scales = np.array([[0x38, 0x7F]], np.uint8)
    vectors = v.Vectors(
        np.array([False]),
        np.array([False]),
        zeros,
        zeros,
        scales,
        scales * 0,
        np.zeros((1, 4), np.uint64),
        np.zeros(1, np.uint64),
    )
    assert vmac(config, vectors).status[0] == 0


@pytest.mark.parametrize(
    ("config", "limit", "bits", "aligned"),
    [
        (VmacConfig(refinement="none"), 9216, 15, 50),
        (VmacConfig(), 9408, 15, 51),
        (VmacConfig(step="exponent"), 9984, 15, 51),
        (VmacConfig(refinement="inplace"), 9600, 15, 51),
        (VmacConfig(refinement="inplace", step="exponent"), 10752, 15, 51),
    ],
    ids=lambda value: getattr(value, "refinement", str(value)),
)
def test_limits_of_o_and_of_the_aligned_value(config, limit, bits, aligned):
    assert (config.output_limit, config.output_bits, config.aligned_bits) == (limit, bits, aligned)
    assert (limit * 225) << 28 < 2 ** (aligned - 1) <= (limit * 225) << 29


def test_longest_sum_fits_and_the_next_does_not():
    """In place with the exponent step, K below 2**18 is not enough: 2**14 groups of the largest O overflow."""
    for config in CONFIGURATIONS:
        worst = config.output_limit * 14 * 14 << 28
        assert config.max_k // 16 * worst < 2**63 <= (config.max_k // 16 + 1) * worst
    assert VmacConfig().max_k >= 2**18
    assert VmacConfig(refinement="inplace", step="exponent").max_k == 260864 < 2**18


def test_largest_o_is_reached_with_the_exponent_step():
    config = VmacConfig(refinement="inplace", step="exponent")
    a, w = np.full((1, 32), 7, np.uint8), np.full((1, 32), weight(-6), np.uint8)
    word = sum(2 << 2 * i for i in range(16)) | 15 << 32
    one = np.full((1, 2), 0x38, np.uint8)
    vectors = v.Vectors(
        np.array([True]), np.array([True]), a, w, one, one, np.full((1, 2), word, np.uint64), np.zeros(1, np.uint64)
    )
    assert vmac(config, vectors).o.tolist() == [[-10752, -10752]]


def test_baselines_agree_with_the_modes_that_they_are(seed):
    rng = np.random.default_rng(seed)
    config = VmacConfig(refinement="none")
    vectors = random_vectors(config, 500, rng)
    codes = rng.integers(0, 16, (500, 32), dtype=np.uint8)
    scales = (vectors.a_scale, vectors.w_scale)
    yes, no = np.ones(500, bool), np.zeros(500, bool)
    pairs = pack(*nvfp4_digits(codes))
    whole = vmac(config, v.Vectors(yes, no, vectors.a, pairs, *scales, vectors.refine, vectors.psum))
    psum, status = vmac_nvfp4(Nvfp4Config(), vectors.a, codes, *scales, vectors.psum)
    assert (psum == whole.psum).all()
    assert not status.any()
    free = pack(*rng.integers(-2, 3, (2, 500, 32)))
    split = vmac(config, v.Vectors(no, no, vectors.a, free, *scales, vectors.refine, vectors.psum))
    psum, status = vmac_autofp2(AutoFp2Config(), vectors.a, free, *scales, vectors.psum)
    assert (psum == split.psum).all()
    assert (status == split.status >> 1).all()


def test_refined_sum_is_the_extended_k_sum_in_nvfp4_mode(seed):
    """Paper, section 4.1: [W | 4δ]·[A | A] with scale s_W/4, exact from a scale byte of 0x18 up."""
    rng = np.random.default_rng(seed)
    w, a = rng.integers(0, 16, (2, 200, 32), dtype=np.uint8)
    d = rng.integers(-2, 2, (200, 32))
    mask = rng.permuted(np.tile([1, 1, 0, 0], (200, 2, 1)), axis=2).astype(bool)
    w_scale = rng.integers(0x18, 127, (200, 2), dtype=np.uint8)
    a_scale = rng.integers(0, 127, (200, 2), dtype=np.uint8)
    quarter = E4M3.encode(E4M3.decode(w_scale) / 4)
    assert (E4M3.decode(quarter) * 4 == E4M3.decode(w_scale)).all()
    lanes = np.repeat(mask.reshape(200, 8), 4, axis=1)
    words = []
    for n in range(200):
        for block in range(2):
            for g in np.flatnonzero(mask[n, block]):
                first = 16 * block + 4 * g
                byte = sum((int(d[n, first + i]) & 3) << 2 * i for i in range(4))
                words.append(int(g) << 9 | 1 << 8 | byte)
    config = VmacConfig()
    yes, zero = np.ones(200, bool), np.zeros(200, np.uint64)
    pairs = pack(*nvfp4_digits(w))
    refined = vmac(
        config, v.Vectors(yes, yes, a, pairs, a_scale, w_scale, np.array(words, np.uint64).reshape(200, 4), zero)
    )
    none = np.zeros((200, 4), np.uint64)
    base = vmac(config, v.Vectors(yes, ~yes, a, pairs, a_scale, w_scale, none, zero))
    # 4δ = d/2 is an E2M1 value.
    extra = pack(*nvfp4_digits(E2M1.encode(np.where(lanes, d / 2, 0))))
    extended = vmac(
        config, v.Vectors(yes, ~yes, np.where(lanes, a, 0).astype(np.uint8), extra, a_scale, quarter, none, base.psum)
    )
    assert (extended.psum == refined.psum).all()
    assert (base.psum != refined.psum).mean() > 0.9


def test_case_quarter_scale_is_not_exact_below_0x18():
    scales = np.arange(1, 127, dtype=np.uint8)
    exact = E4M3.decode(E4M3.encode(E4M3.decode(scales) / 4)) * 4 == E4M3.decode(scales)
    assert not exact[scales == 0x17].any()
    assert not exact[scales == 0x01].any()
    assert exact[scales >= 0x18].all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lanes", 24, "lanes must be a positive multiple of 32, not 24"),
        ("refinement", "all", "refinement must be one of slots, inplace, none, not 'all'"),
        ("slots_per_block", 0, "slots_per_block must be from 1 to 4, not 0"),
        ("step", 1, "step must be one of fixed, exponent, not 1"),
        ("scaling", "row", "scaling must be one of pair, group, not 'row'"),
        ("window_shift", 5, "window_shift must be from 19 to 50, not 5"),
    ],
)
def test_bad_parameter_is_named(name, value, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        VmacConfig(**{name: value})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"refinement": "inplace", "slots_per_block": 3},
            "slots_per_block must be 2 unless refinement is slots, not 3",
        ),
        ({"refinement": "none", "slots_per_block": 1}, "slots_per_block must be 2 unless refinement is slots, not 1"),
        ({"refinement": "none", "step": "exponent"}, "step must be fixed if refinement is none, not 'exponent'"),
    ],
)
def test_parameter_without_effect_is_refused(parameters, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        VmacConfig(**parameters)


def test_parameter_of_wrong_kind_is_named():
    with pytest.raises(TypeError, match=r"^lanes must be an integer, not 32\.0$"):
        VmacConfig(lanes=32.0)


def test_records_that_break_the_contract_are_named():
    with pytest.raises(ValueError, match=r"^refine must hold subgroups 0 to 2 in slot 0, not 3 at vector 0, block 0$"):
        single(refine_en=True, w=weight(1), refine=1 << 8 | 3 << 9)
    with pytest.raises(
        ValueError, match=r"^w must hold NVFP4 weights where the activation is refined, not pair 0x00 at \(0, 0\)$"
    ):
        single(refine_en=True, w=0, refine=1 << 11 | 1 << 8)


def test_case_wrong_k_is_named():
    x = quantize(np.ones((1, 17), np.float32))
    assert x.codes.shape == (1, 32)
    with pytest.raises(ValueError, match=r"^a must have shape \(1, 32\), not \(1, 17\)$"):
        vmac_nvfp4(Nvfp4Config(), x.codes[:, :17], x.codes, x.scales, x.scales, np.zeros(1, np.uint64))


def test_case_check_value_as_sums_of_the_datapath():
    """P = 18, R = -3, O = 69 for A = 1.5, W = 3, d = -1."""
    zeros = np.zeros((1, 32), np.uint8)
    a, pairs = zeros.copy(), np.full((1, 32), 0b11100, np.uint8)
    a[0, 0], pairs[0, 0] = 3, weight(3)
    even, odd = v.base_sums(a, pairs)
    assert (even[0, 0], odd[0, 0]) == (6, -6)
    assert 5 * even[0, 0] + 2 * odd[0, 0] == 18
    yes, one = np.ones(1, bool), np.full((1, 2), 0x38, np.uint8)
    words = np.array([[1 << 8 | 0b11, 0, 0, 0]], np.uint64)
    vectors = v.Vectors(yes, yes, a, pairs, one, one, words, np.zeros(1, np.uint64))
    assert v.refinement_sums(VmacConfig(), vectors).tolist() == [[-3, 0]]
    assert vmac(VmacConfig(), vectors).o.tolist() == [[69, 0]]


def test_case_mode_stays_with_its_vector(seed):
    """Mode changes every cycle: each result is that of the vector on its own."""
    vectors = random_vectors(VmacConfig(), 64, np.random.default_rng(seed))
    vectors.mode_nvfp4[:] = np.arange(64) % 2 == 0
    vectors.w[:] = NVFP4_PAIRS[np.random.default_rng(seed).integers(0, 15, (64, 32))]
    together = vmac(VmacConfig(), vectors)
    for n in range(64):
        alone = vmac(VmacConfig(), vectors[n : n + 1])
        assert (alone.psum[0], alone.status[0]) == (together.psum[n], together.status[n])
        assert (alone.o == together.o[n]).all()


def test_case_scaling_is_exact_for_every_pair_of_scale_bytes():
    w, a = (array.ravel() for array in np.meshgrid(np.arange(127, dtype=np.uint8), np.arange(127, dtype=np.uint8)))
    for o in (1, -69, 9408, -10752):
        got = v.scaled(np.full(w.shape, o), w, a)
        expected = [int(o * SCALE[x] * SCALE[y] / 16 / UNIT) for x, y in zip(w, a, strict=True)]
        assert got.tolist() == expected


@pytest.mark.parametrize("nvfp4", [True, False])
def test_case_sums_do_not_depend_on_order(nvfp4, seed):
    """Integer sums: any order of the vectors ends in the same partial sum, as long as no half saturates."""
    rng = np.random.default_rng(seed)
    vectors = random_vectors(VmacConfig(), 40, rng)
    vectors.mode_nvfp4[:] = nvfp4
    vectors.w[:] = NVFP4_PAIRS[rng.integers(0, 15, (40, 32))]
    vectors.a_scale[:] &= 0x3F

    def total(order):
        psum, status = np.zeros(1, np.uint64), 0
        for n in order:
            vectors.psum[n] = psum[0]
            result = vmac(VmacConfig(), vectors[n : n + 1])
            psum, status = result.psum, status | int(result.status[0])
        assert not status & v.SATURATED
        return int(psum[0])

    assert total(range(40)) == total(rng.permutation(40)) != 0


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xBC, 0xFF])
def test_case_bad_scale_byte_is_read_without_its_sign_and_reported(byte):
    good = single(a=3, w=weight(3), a_scale=byte & 0x7F)
    bad = single(a=3, w=weight(3), a_scale=byte)
    assert bad.psum == good.psum
    assert bad.status[0] == v.NAN_SCALE
    if byte & 0x7F == 0x7F:
        assert int(bad.psum[0]) == 72 * 15 * 8 << 15 + 7 - 2


def test_case_minus_zero_with_a_scale_of_zero():
    for a, w in ((8, 8), (8, 15), (15, 8)):
        result = single(a=a, w=int(pack(*nvfp4_digits([w]))[0]), a_scale=0, w_scale=0, psum=2**64 - 1)
        assert (int(result.psum[0]), result.status[0], result.o[0, 0]) == (2**64 - 1, 0, 0)


@pytest.mark.parametrize("step", ["fixed", "exponent"])
@pytest.mark.parametrize("refinement", ["slots", "inplace"])
def test_refined_tensors_run_through_the_vmac_exactly(refinement, step, seed):
    """Quantise, select, pack, accumulate over K: the sum is the product of the dequantised tensors to the last bit."""
    rng = np.random.default_rng(seed)
    k, slots = 320, 2 if refinement == "slots" else 4
    config = VmacConfig(refinement=refinement, step=step)
    # With T = 1 every dequantised value is a float32, and every product and sum below a float64.
    x_w, x_a = rng.laplace(size=(2, k)).astype(np.float32), rng.laplace(size=(3, k)).astype(np.float32)
    w, a = quantize(x_w, tensor_scale=1.0), quantize(x_a, tensor_scale=1.0)
    mask_w = autofp6.select_weights(autofp6.subgroup_gains(x_w, w, step=step), 0.3, slots)
    mask_a = autofp6.select_activations(autofp6.subgroup_errors(x_a, a), mask_w, 1e-3, slots)
    refined_w, refined_a = autofp6.refine(x_w, w, mask_w, step=step), autofp6.refine(x_a, a, mask_a, step=step)
    assert refined_w.offsets.any()
    assert refined_a.offsets.any()
    dense_w, dense_a = autofp6.dequantize(refined_w).astype(float), autofp6.dequantize(refined_a).astype(float)
    base_w, base_a = dequantize(w).astype(float), dequantize(a).astype(float)
    expected = dense_w @ dense_a.T
    # Masks are disjoint, so the product of two offsets is exactly absent.
    assert (expected == base_w @ base_a.T + (dense_w - base_w) @ base_a.T + base_w @ (dense_a - base_a).T).all()

    yes, no = np.ones(k // 32, bool), np.zeros(k // 32, bool)
    for row, token in np.ndindex(2, 3):
        records = autofp6.refinement_records(
            config,
            mask_w.reshape(-1, 8),
            refined_w.offsets[row].reshape(-1, 32),
            mask_a[token].reshape(-1, 8),
            refined_a.offsets[token].reshape(-1, 32),
        )
        assert not records.overlap.any()
        assert not records.dropped.any()
        pairs, scales = encode(yes, *[w.codes[row].reshape(-1, 32)] * 2, *[w.scales[row].reshape(-1, 2)] * 2)
        psum = np.zeros(1, np.uint64)
        for n in range(k // 32):
            one = slice(n, n + 1)
            a_codes, a_scales = a.codes[token].reshape(-1, 32)[one], a.scales[token].reshape(-1, 2)[one]
            vectors = v.Vectors(
                yes[one], ~no[one], a_codes, pairs[one], a_scales, scales[one], records.words[one], psum
            )
            psum = vmac(config, vectors).psum
        assert int(psum.view(np.int64)[0]) * 2.0**-22 == expected[row, token]


@pytest.mark.parametrize("scaling", ["pair", "group"])
def test_two_bit_tensors_run_through_the_vmac_within_the_window(scaling, seed):
    rng = np.random.default_rng(seed)
    k, shift = 320, 24
    config = VmacConfig(scaling=scaling, window_shift=shift)
    w = quantize(rng.laplace(size=(2, k)), tensor_scale=0.001)
    a = quantize(rng.laplace(size=(1, k)), tensor_scale=0.001, shared_groups=2)
    units = np.float64(w.tensor_scale) * np.float64(a.tensor_scale)
    values, scales = autofp2.digits(w, scaling)
    steps_w = np.repeat(E4M3.decode(scales), 16, axis=1).astype(float)
    steps_a = np.repeat(E4M3.decode(a.scales), 16, axis=1).astype(float)
    exact = (values * steps_w * E2M1.decode(a.codes) * steps_a).sum(axis=1)
    off = np.zeros(k // 32, bool)
    pairs, packed_scales = encode(off, *w.codes.reshape(2, -1, 32), *w.scales.reshape(2, -1, 2), scaling)
    psum = np.zeros(1, np.uint64)
    for n in range(k // 32):
        one = slice(n, n + 1)
        a_codes, a_scales = a.codes.reshape(-1, 32)[one], a.scales.reshape(-1, 2)[one]
        none = np.zeros((1, 4), np.uint64)
        vectors = v.Vectors(off[one], off[one], a_codes, pairs[one], a_scales, packed_scales[one], none, psum)
        psum = vmac(config, vectors).psum
    halves = np.array([int(psum[0]) & 0xFFFFFFFF, int(psum[0]) >> 32], np.uint32).view(np.int32)
    window = 2.0 ** (shift - 22)
    assert (np.abs(halves * window - exact) <= k / 32 * window / 2).all()
    assert (np.abs(exact) > 100 * window).all()
    # c = 2 comes after the sum.
    assert np.allclose(
        2 * exact * units, autofp2.dequantize(w, scaling).astype(float) @ dequantize(a).astype(float)[0], rtol=1e-5
    )
