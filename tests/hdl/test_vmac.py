# amaranth: UnusedElaboratable=no
"""The vector MAC: modes, refinement, scales, window and status by hand; its timing; random vectors against the model."""

import re

import numpy as np
import pytest

from hdl.vmac import ModeReduction, Vmac
from model.packed_pair import nvfp4_digits, pack
from model.vmac import ILLEGAL, NAN_SCALE, SATURATED, Vectors, VmacConfig, vmac
from tests.hdl.simulate import evaluate, run_vectors, signed

ZERO_PAIR = 0b11100
THREE = 0b0_11_01  # 3: Q0 = 2, Q1 = -2
DIGITS = 0b0_11_00  # Q0 = 1, Q1 = -2
ONE, TWO, LARGEST, SMALLEST, NAN = 0x38, 0x40, 0x7E, 0x01, 0x7F
ONES = ONE << 8 | ONE
UNIT = 1 << 18  # of an O whose two scales are 1: 8·8 << 12
D_IS_MINUS_1 = 0x103  # slot 0 refines the weights of subgroup 0, d0 = -1
MAX, MIN, MASK = 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF


def vector(mode, a, w, **others):
    """Set activation codes and pairs by lane; every other lane holds zeros. Scales are 1 unless given."""
    return {
        "valid_i": 1,
        "mode_nvfp4": mode[0],
        "refine_en": mode[1],
        "a": sum(code << 4 * lane for lane, code in a.items()),
        "w": sum(w.get(lane, ZERO_PAIR) << 5 * lane for lane in range(32)),
        "a_scale": ONES,
        "w_scale": ONES,
        "refine": 0,
        "psum_i": 0,
        "rst": 0,
        **others,
    }


def run(config, rows):
    """Run rows through a vMAC; one without refinement has no inputs for it."""
    if config.refinement == "none":
        rows = [{name: value for name, value in row.items() if not name.startswith("refine")} for row in rows]
    return run_vectors(Vmac(config), rows)


AUTOFP2, ILLEGAL_MODE, NVFP4, AUTOFP6 = (0, 0), (0, 1), (1, 0), (1, 1)
LANE = ({0: 3}, {0: THREE})  # 1.5 · 3, P = 18
BOTH = ({0: 3, 16: 11}, {0: THREE, 16: THREE})  # the same in block 0, its negative in block 1
ROWS = ({0: 3}, {0: DIGITS})  # even row 1.5, odd row -3; O = 24 and -48


def windowed(code, pair=0b1_10_00, **others):
    """AutoFP2 with one lane, Q0 = 1 and no odd digit: O = 16 · the activation."""
    return vector(AUTOFP2, {0: code}, {0: pair}, **others)


# name: (vector, psum_o, status)
CASES = {
    "nvfp4": (vector(NVFP4, *LANE, psum_i=5), 72 * UNIT + 5, 0),
    "nvfp4 ignores records": (vector(NVFP4, *LANE, refine=D_IS_MINUS_1), 72 * UNIT, 0),
    "refined weight": (vector(AUTOFP6, *LANE, refine=D_IS_MINUS_1, psum_i=5), 69 * UNIT + 5, 0),
    "refined activation": (vector(AUTOFP6, *LANE, refine=D_IS_MINUS_1 | 0x800), 66 * UNIT, 0),
    "invalid record": (vector(AUTOFP6, *LANE, refine=0x003), 72 * UNIT, 0),
    "block 1 refined": (vector(AUTOFP6, *BOTH, refine=D_IS_MINUS_1 << 24), (72 - 69) * UNIT, 0),
    "blocks cancel": (vector(NVFP4, *BOTH, psum_i=3), 3, 0),
    "blocks have scales": (vector(NVFP4, *BOTH, w_scale=TWO << 8 | ONE), (72 - 144) * UNIT & 2**64 - 1, 0),
    "blocks have activation scales": (vector(NVFP4, *BOTH, a_scale=ONE << 8 | TWO), 72 * UNIT, 0),
    "largest scales": (vector(NVFP4, *LANE, w_scale=LARGEST, a_scale=LARGEST), 72 * 196 << 28, 0),
    "smallest scales": (vector(NVFP4, *LANE, w_scale=SMALLEST, a_scale=SMALLEST), 72, 0),
    "scale of zero": (vector(NVFP4, *LANE, w_scale=0, a_scale=LARGEST, psum_i=9), 9, 0),
    "carry": (vector(NVFP4, *LANE, w_scale=SMALLEST, a_scale=SMALLEST, psum_i=MASK), MASK + 72, 0),
    "wrap": (vector(NVFP4, *LANE, w_scale=SMALLEST, a_scale=SMALLEST, psum_i=2**64 - 1), 71, 0),
    "NaN reads as its bits": (vector(NVFP4, *LANE, w_scale=ONE << 8 | NAN), 72 * 120 << 20, NAN_SCALE),
    "sign of a scale": (vector(NVFP4, *LANE, a_scale=ONE << 8 | 0x80 | ONE), 72 * UNIT, NAN_SCALE),
    "NaN of block 1": (vector(NVFP4, *LANE, a_scale=NAN << 8 | ONE), 72 * UNIT, NAN_SCALE),
    "no vector": (vector(NVFP4, *LANE, a_scale=NAN, valid_i=0), None, 0),
    "no vector, illegal": (vector(ILLEGAL_MODE, *LANE, valid_i=0), None, 0),
    # 24·2¹⁸ is 0.375 units of 2²⁴, -48·2¹⁹ is -1.5 units
    "rows": (vector(AUTOFP2, *ROWS, w_scale=TWO << 8 | ONE, psum_i=5 << 32 | 7), 4 << 32 | 7, 0),
    "rows over both blocks": (vector(AUTOFP2, {0: 4, 31: 4}, {0: DIGITS, 31: DIGITS}), MASK - 1 << 32 | 1, 0),
    "illegal runs as AutoFP2": (
        vector(ILLEGAL_MODE, *ROWS, w_scale=TWO << 8 | ONE, refine=D_IS_MINUS_1, psum_i=5 << 32),
        4 << 32,
        ILLEGAL,
    ),
    "one activation scale": (vector(AUTOFP2, *ROWS, w_scale=TWO << 8 | ONE, a_scale=NAN << 8 | ONE), MASK << 32, 0),
    "NaN of the odd row": (vector(AUTOFP2, {}, {}, w_scale=NAN << 8 | ONE, psum_i=6), 6, NAN_SCALE),
    "0.5 units": (windowed(4), 1, 0),  # an activation of 2 gives O = 32, half of 64
    "-0.5 units": (windowed(12), 0, 0),
    "0.375 units": (windowed(3), 0, 0),
    "-0.75 units": (windowed(13), MASK, 0),
    "1.5 units": (windowed(7), 2, 0),
    "-1.5 units": (windowed(15), MASK, 0),
    "even half full": (windowed(6, psum_i=9 << 32 | MAX), 9 << 32 | MAX, SATURATED),
    "even half not quite full": (windowed(6, psum_i=MAX - 1), MAX, 0),
    "even half empty": (windowed(14, psum_i=9 << 32 | MIN), 9 << 32 | MIN, SATURATED),
    "even half carries nothing": (windowed(6, psum_i=9 << 32 | MASK), 9 << 32, 0),
    "odd half full": (vector(AUTOFP2, {0: 6}, {0: 0b1_01_00}, psum_i=MAX << 32 | 8), MAX << 32 | 8, SATURATED),
    "odd half empty": (vector(AUTOFP2, {0: 6}, {0: 0b1_01_10}, psum_i=MIN << 32 | 8), MIN << 32 | 8, SATURATED),
}
SPACE = 8
LATENCY, PSUM_DELAY = 4, 3


IN_FLIGHT = [
    *(vector(NVFP4, *LANE, psum_i=n, w_scale=NAN << 8 | ONE) for n in range(3)),
    vector(NVFP4, *LANE, rst=1),
    *(vector(NVFP4, *LANE, psum_i=n, valid_i=int(n != 12)) for n in (10, 11, 12, 13)),
]
"""Three vectors, a fourth with the reset, then three with a gap."""


@pytest.fixture(scope="module")
def worked():
    """What came out during each case, run one at a time with a reset between, and during IN_FLIGHT."""
    rows = []
    for given, _, _ in CASES.values():
        idle = {**given, "valid_i": 0}
        rows += [given, *[idle] * (SPACE - 2), {**idle, "rst": 1}]
    found = run(VmacConfig(), rows + IN_FLIGHT)
    return {name: found[SPACE * n : SPACE * n + SPACE] for n, name in enumerate(CASES)} | {None: found[len(rows) :]}


@pytest.mark.parametrize("name", CASES)
def test_case_worked_by_hand(name, worked):
    """The sum is there with valid_o, latency cycles after its vector and in no other; status stays until the reset."""
    given, psum, status = CASES[name]
    cycles = worked[name]
    assert [valid for valid, _, _ in cycles] == [int(n == LATENCY - 1 and given["valid_i"]) for n in range(SPACE)]
    if psum is not None:
        assert cycles[LATENCY - 1][1] == psum
    assert {raised for _, _, raised in cycles[LATENCY - 1 : -1]} == {status}
    assert cycles[-1][2] == 0


def test_a_reset_drops_vectors_in_flight_and_no_others(worked):
    valid, psum, status = zip(*worked[None], strict=True)
    assert valid == (0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1)
    assert [psum[n] for n in (7, 8, 10)] == [72 * UNIT + n for n in (10, 11, 13)]
    assert status == (NAN_SCALE,) * 3 + (0,) * 8


def draw(rng, config, count):
    mode, enable = rng.integers(0, 2, (2, count)) == 1
    weights = pack(*nvfp4_digits(rng.integers(0, 16, (count, config.lanes))))
    digits = pack(*rng.integers(-2, 3, (2, count, config.lanes)))
    if config.refinement == "slots":
        slot = np.tile(np.arange(config.slots_per_block), config.blocks)
        subgroup = slot + rng.integers(0, 5 - config.slots_per_block, (count, config.records))
        refine = rng.integers(0, 512, subgroup.shape) | subgroup << 9 | rng.integers(0, 2, subgroup.shape) << 11
    else:
        refine = rng.integers(0, 1 << 40, (count, config.records))
    return Vectors(
        mode_nvfp4=mode,
        refine_en=enable,
        a=rng.integers(0, 16, (count, config.lanes), dtype=np.uint8),
        w=np.where(mode[:, None], weights, digits),
        a_scale=rng.integers(0, 0x7F, (count, config.blocks), dtype=np.uint8),
        w_scale=rng.integers(0, 0x7F, (count, config.w_scale_bytes), dtype=np.uint8),
        refine=refine.astype(np.uint64),
        psum=rng.integers(0, 2**64, count, dtype=np.uint64),
    )


def word(values, width):
    return sum(int(value) << width * k for k, value in enumerate(values))


@pytest.mark.parametrize(
    ("config", "delay"),
    [
        (VmacConfig(), 3),
        (VmacConfig(refinement="inplace", scaling="group", window_shift=27), 3),
        (VmacConfig(pipeline="fast"), 4),
        (VmacConfig(refinement="inplace", step="exponent", scaling="group", pipeline="fast"), 4),
        (VmacConfig(slots_per_block=1, pipeline="fast"), 4),
    ],
    ids=["default", "inplace-group-27", "fast", "inplace-exponent-group-fast", "slots-1-fast"],
)
def test_random_vectors_of_all_modes_in_a_row_give_the_sums_of_the_model(config, delay, seed):
    count = 200
    v = draw(np.random.default_rng(seed), config, count)
    # Every fourth sum starts near a limit of both halves.
    v.psum[::4] = v.psum[::4] & np.uint64(0x8000000F_8000000F) ^ np.uint64(0x7FFFFFF0_7FFFFFF0)
    expected = vmac(config, v)
    rows = [
        {
            "valid_i": 1,
            "mode_nvfp4": int(v.mode_nvfp4[n]),
            "refine_en": int(v.refine_en[n]),
            "a": word(v.a[n], 4),
            "w": word(v.w[n], 5),
            "a_scale": word(v.a_scale[n], 8),
            "w_scale": word(v.w_scale[n], 8),
            "refine": word(v.refine[n], config.record_bits),
            "psum_i": int(v.psum[n]),
            "rst": 0,
        }
        for n in range(count)
    ]
    found = run(config, rows)
    assert [valid for valid, _, _ in found] == [0] * delay + [1] * count
    assert [psum for _, psum, _ in found[delay:]] == expected.psum.tolist()
    assert found[-1][2] == np.bitwise_or.reduce(expected.status) == ILLEGAL | SATURATED


@pytest.mark.parametrize("grouped", [False, True], ids=["pair", "group"])
def test_trees_are_combined_by_mode(grouped):
    """A, B, C, D = 384, -383, -100, 7 and R0, R1 = -3, 6; AutoFP2 gives the even row in half units."""
    trees = {"a": 384, "b": -383 & 0x3FF, "c": -100 & 0x3FF, "d": 7}
    rows = [
        {**trees, "mode_nvfp4": 1, "r0": -3 & 0xFF, "r1": 6},
        {**trees, "mode_nvfp4": 0, "r0": 0, "r1": 0},
    ]
    found = evaluate(ModeReduction(8, 15, group_scaling=grouped), rows, ["o0", "o1"])
    assert [[signed(value, 15) for value in pair] for pair in found] == [
        [4 * (5 * 384 - 2 * 383) - 3, 4 * (-5 * 100 + 2 * 7) + 6],
        [4 * 384, 8 * 7] if grouped else [4 * (384 - 100), 8 * (-383 + 7)],
    ]


def test_ports_of_refinement_exist_only_with_it():
    names = {
        config.refinement: set(Vmac(config).signature.members)
        for config in (VmacConfig(), VmacConfig(refinement="none"))
    }
    assert names["slots"] - names["none"] == {"refine", "refine_en"}
    assert names["none"] == {
        "mode_nvfp4",
        "valid_i",
        "a",
        "w",
        "a_scale",
        "w_scale",
        "psum_i",
        "valid_o",
        "psum_o",
        "status",
    }


def test_latency_and_the_delay_of_the_partial_sum_are_stated():
    for pipeline, expected in (("compact", (LATENCY, PSUM_DELAY)), ("fast", (5, 4))):
        vmac = Vmac(VmacConfig(pipeline=pipeline))
        assert (vmac.latency, vmac.psum_delay) == expected


@pytest.mark.parametrize("late", [-1, 1])
def test_a_sum_a_cycle_early_or_late_is_noticed(late, monkeypatch):
    monkeypatch.setattr(VmacConfig, "latency", property(lambda self: 5 + late))
    with pytest.raises(AssertionError):
        test_random_vectors_of_all_modes_in_a_row_give_the_sums_of_the_model(VmacConfig(pipeline="fast"), 4, 1)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"pipeline": "slow"}, ValueError, "pipeline must be one of compact, fast, not 'slow'"),
        ({"lanes": 48}, ValueError, "lanes must be a positive multiple of 32, not 48"),
        ({"lanes": True}, TypeError, "lanes must be an integer, not True"),
        ({"refinement": "all"}, ValueError, "refinement must be one of slots, inplace, none, not 'all'"),
        ({"slots_per_block": 5}, ValueError, "slots_per_block must be from 1 to 4, not 5"),
        ({"step": "half"}, ValueError, "step must be one of fixed, exponent, not 'half'"),
        ({"scaling": "row"}, ValueError, "scaling must be one of pair, group, not 'row'"),
        ({"window_shift": 4}, ValueError, "window_shift must be from 19 to 50, not 4"),
    ],
)
def test_bad_parameters_are_named(parameters, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Vmac(VmacConfig(**parameters))
