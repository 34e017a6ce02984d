# amaranth: UnusedElaboratable=no
"""The AutoFP2-only vector MAC: rows, window, saturation and timing by hand; random vectors against the model."""

import numpy as np
import pytest

from hdl.vmac_autofp2 import VmacAutoFp2
from model.packed_pair import pack
from model.vmac_autofp2 import NAN_SCALE, SATURATED, AutoFp2Config, vmac_autofp2
from tests.hdl.simulate import run_vectors

ZERO_PAIR, EVEN, ODD, BOTH = 0b1_11_00, 0b1_10_00, 0b1_01_00, 0b0_11_00
"""No digit, Q0 = 1, Q1 = 1, and Q0 = 1 with Q1 = -2."""
ONE, TWO, NAN = 0x38, 0x40, 0x7F
MAX, MIN, MASK = 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF


def word(values, width):
    return sum(int(value) << width * k for k, value in enumerate(values))


def vector(a, w, **others):
    """Set activation codes and pairs by lane; other lanes hold zeros. Scales are 1 unless given."""
    return {
        "valid_i": 1,
        "a": sum(code << 4 * lane for lane, code in a.items()),
        "w": sum(w.get(lane, ZERO_PAIR) << 5 * lane for lane in range(32)),
        "a_scale": ONE << 8 | ONE,
        "w_scale": word([ONE] * 4, 8),
        "psum_i": 0,
        "rst": 0,
        **others,
    }


def run(config, rows):
    """Run rows through the baseline, with as many weight scales as it takes."""
    rows = [{**row, "w_scale": row["w_scale"] & (1 << 8 * config.w_scale_bytes) - 1} for row in rows]
    return run_vectors(VmacAutoFp2(config), rows)


# A digit of 1 and an activation x give 16·x sixteenths, and 64 sixteenths are a unit: x / 4 units with scales of 1.
# name: (vector, psum_o, status)
CASES = {
    "0.5 units": (vector({0: 4}, {0: EVEN}, psum_i=5 << 32 | 7), 5 << 32 | 8, 0),
    "-0.5 units": (vector({0: 12}, {0: EVEN}, psum_i=5 << 32 | 7), 5 << 32 | 7, 0),
    "0.375 units": (vector({0: 3}, {0: EVEN}), 0, 0),
    "1.5 units": (vector({0: 7}, {0: ODD}), 2 << 32, 0),
    "-1.5 units": (vector({0: 15}, {0: ODD}), MASK << 32, 0),
    "both rows": (vector({0: 4}, {0: BOTH}), MASK << 32 | 1, 0),
    "both blocks": (vector({0: 4, 31: 4}, {0: BOTH, 31: BOTH}), MASK - 1 << 32 | 1, 0),
    "scale of the odd row": (vector({0: 4}, {0: BOTH}, w_scale=TWO << 8 | ONE), MASK - 1 << 32 | 1, 0),
    "scale of the even row": (vector({0: 6}, {0: BOTH}, w_scale=ONE << 8 | TWO), MASK - 1 << 32 | 2, 0),
    "no vector": (vector({0: 6}, {0: EVEN}, valid_i=0, psum_i=MAX, w_scale=NAN), None, 0),
    "scale that is not used": (vector({0: 6}, {0: EVEN}, a_scale=NAN << 8 | ONE), 1, 0),
    "even half nearly full": (vector({0: 6}, {0: EVEN}, psum_i=MAX - 1), MAX, 0),
    "no carry between halves": (vector({0: 6}, {0: EVEN}, psum_i=3 << 32 | MASK), 3 << 32, 0),
    "even half full": (vector({0: 6}, {0: EVEN}, psum_i=3 << 32 | MAX), 3 << 32 | MAX, SATURATED),
    "odd half empty": (vector({0: 14}, {0: ODD}, psum_i=MIN << 32 | 3), MIN << 32 | 3, SATURATED),
    "NaN of the odd row": (vector({0: 6}, {0: EVEN}, w_scale=NAN << 8 | ONE), 1, NAN_SCALE),
    "sign of a scale": (vector({0: 6}, {0: EVEN}, a_scale=ONE << 8 | 0x80 | ONE), 1, NAN_SCALE),
}
SPACE = 8


@pytest.fixture(scope="module")
def worked():
    """Psum and status of each case, run one at a time, with a reset between."""
    rows = []
    for given, _, _ in CASES.values():
        idle = {**given, "valid_i": 0}
        rows += [given, *[idle] * (SPACE - 2), {**idle, "rst": 1}]
    found = run(AutoFp2Config(), rows)
    return {name: found[SPACE * n : SPACE * n + SPACE] for n, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_case_worked_by_hand(name, worked):
    """The sum is there with valid_o, latency cycles after its vector and in no other; status stays until the reset."""
    given, psum, status = CASES[name]
    cycles, latency = worked[name], 4
    assert [valid for valid, _, _ in cycles] == [int(n == latency - 1 and given["valid_i"]) for n in range(SPACE)]
    if psum is not None:
        assert cycles[latency - 1][1] == psum
    assert {raised for _, _, raised in cycles[latency - 1 : -1]} == {status}
    assert cycles[-1][2] == 0


def test_group_scaling_gives_each_block_its_scales_and_a_reset_drops_vectors_in_flight():
    """Even row: 2 in each block; scales 1 and 2 of the weights, 1 and 0.5 of the activations; odd row: -4 each, 2 and 1."""
    scales = {"w_scale": word([ONE, TWO, TWO, ONE], 8), "a_scale": 0x30 << 8 | ONE}
    rows = [vector({0: 4, 16: 4}, {0: BOTH, 16: BOTH}, psum_i=n, **scales) for n in range(6)]
    rows[3] |= {"rst": 1, "w_scale": 0}
    rows[4] |= {"a_scale": NAN << 8 | ONE}
    valid, psum, status = zip(*run(AutoFp2Config(scaling="group"), rows), strict=True)
    assert valid == (0, 0, 0, 0, 0, 0, 0, 1, 1)
    # Even: 0.5 + 0.5 units; odd: -2 - 0.5, and half of a unit rounds up.
    assert psum[8] == (-2 & MASK) << 32 | 6
    # 0x7F is 15·2⁵: 2 · 2 · 480 / 4 and -4 · 480 / 4 units.
    assert psum[7] == (-482 & MASK) << 32 | 4 + 481
    assert status == (0,) * 4 + (NAN_SCALE,) * 5


@pytest.mark.parametrize(("pipeline", "delay"), [("compact", 3), ("fast", 4)])
def test_random_vectors_give_the_sums_of_the_model(pipeline, delay, seed):
    rng, count, config = np.random.default_rng(seed), 200, AutoFp2Config(pipeline=pipeline)
    a = rng.integers(0, 16, (count, 32), dtype=np.uint8)
    w = pack(*rng.integers(-2, 3, (2, count, 32)))
    a_scale, w_scale = rng.integers(0, 0x7F, (2, count, 2), dtype=np.uint8)
    psum = rng.integers(0, 2**64, count, dtype=np.uint64)
    # Every fourth sum starts near a limit of both halves.
    psum[::4] = psum[::4] & np.uint64(0x8000000F_8000000F) ^ np.uint64(0x7FFFFFF0_7FFFFFF0)
    expected, status = vmac_autofp2(config, a, w, a_scale, w_scale, psum)
    rows = [
        {
            "valid_i": 1,
            "a": word(a[n], 4),
            "w": word(w[n], 5),
            "a_scale": word(a_scale[n], 8),
            "w_scale": word(w_scale[n], 8),
            "psum_i": int(psum[n]),
            "rst": 0,
        }
        for n in range(count)
    ]
    found = run(config, rows)
    assert [valid for valid, _, _ in found] == [0] * delay + [1] * count
    assert [total for _, total, _ in found[delay:]] == expected.tolist()
    assert [raised for _, _, raised in found[delay:]] == np.bitwise_or.accumulate(status).tolist()
    assert found[-1][2] == SATURATED


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"lanes": 16}, ValueError, "lanes must be a positive multiple of 32, not 16"),
        ({"scaling": "row"}, ValueError, "scaling must be one of pair, group, not 'row'"),
        ({"window_shift": 60}, ValueError, "window_shift must be from 18 to 49, not 60"),
        ({"window_shift": 24.0}, TypeError, "window_shift must be an integer, not 24.0"),
    ],
)
def test_bad_parameters_are_named(parameters, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        VmacAutoFp2(AutoFp2Config(**parameters))
