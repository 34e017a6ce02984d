# amaranth: UnusedElaboratable=no
"""The NVFP4-only vector MAC: products, scales, carries and timing by hand; random vectors against the model."""

import numpy as np
import pytest

from hdl.vmac_nvfp4 import ProductBlock, VmacNvfp4
from model.vmac_nvfp4 import Nvfp4Config, vmac_nvfp4
from tests.hdl.simulate import evaluate, run_vectors, signed

DOUBLED = [0, 1, 2, 3, 4, 6, 8, 12]
"""Twice the magnitude of each E2M1 code."""
ONE, TWO, LARGEST, SMALLEST, NAN = 0x38, 0x40, 0x7E, 0x01, 0x7F
ONES = ONE << 8 | ONE
UNIT = 1 << 18  # of a sixteenth whose two scales are 1: 8·8 << 12


def word(values, width):
    return sum(int(value) << width * k for k, value in enumerate(values))


def vector(a, w, **others):
    """Set codes of activations and weights by lane; other lanes hold zeros. Scales are 1 unless given."""
    return {
        "valid_i": 1,
        "a": sum(code << 4 * lane for lane, code in a.items()),
        "w": sum(code << 4 * lane for lane, code in w.items()),
        "a_scale": ONES,
        "w_scale": ONES,
        "psum_i": 0,
        "rst": 0,
        **others,
    }


def run(config, rows):
    """Run rows through the baseline."""
    return run_vectors(VmacNvfp4(config), rows)


def test_every_product_of_two_codes_is_exact():
    """In turn in each lane, beside lanes whose weight or activation is a zero."""
    rows, expected = [], []
    for a in range(16):
        for w in range(16):
            lane = (a + w) % 16
            rows.append(
                {
                    "a": word([a if k == lane else 8 * (k % 2) for k in range(16)], 4),
                    "w": word([w if k == lane else 15 for k in range(16)], 4),
                }
            )
            expected.append(DOUBLED[a & 7] * DOUBLED[w & 7] * (-1 if (a ^ w) & 8 else 1))
    rows += [{"a": word([7] * 16, 4), "w": word([code] * 16, 4)} for code in (7, 15)]
    expected += [16 * 144, -16 * 144]
    assert [signed(dot, 13) for (dot,) in evaluate(ProductBlock(), rows, ["dot"])] == expected
    assert len(expected) == 258


DELAY = 3
"""Cycles from a vector to its partial sum, in both pipelines."""


def test_vectors_worked_by_hand_come_out_in_order_and_a_reset_drops_those_in_flight():
    lane, both = ({0: 3}, {0: 5}), ({0: 3, 16: 11}, {0: 5, 16: 5})  # 1.5 · 3, and with its negative in block 1
    cases = [
        (vector(*lane, psum_i=5), 72 * UNIT + 5),
        (vector(*both, psum_i=3), 3),
        (vector(*both, w_scale=TWO << 8 | ONE), (72 - 144) * UNIT & 2**64 - 1),
        (vector(*both, a_scale=ONE << 8 | TWO), 72 * UNIT),
        (vector(*lane, valid_i=0), None),
        (vector(*lane, w_scale=LARGEST, a_scale=LARGEST), 72 * 196 << 28),
        (vector(*lane, w_scale=SMALLEST, a_scale=SMALLEST), 72),
        (vector(*lane, w_scale=0, a_scale=LARGEST, psum_i=9), 9),
        (vector(*lane, w_scale=SMALLEST, a_scale=SMALLEST, psum_i=0xFFFFFFFF), 0xFFFFFFFF + 72),
        (vector(*lane, w_scale=SMALLEST, a_scale=SMALLEST, psum_i=2**64 - 1), 71),
        (vector(*lane, valid_i=0, w_scale=NAN), None),
        (vector(*lane, w_scale=ONE << 8 | NAN), 72 * 120 << 20),
    ]
    dropped = [vector(*lane)] * 3 + [vector(*lane, rst=1)]
    after = [(vector(*lane, psum_i=n), 72 * UNIT + n) for n in (1, 2)]
    found = run(Nvfp4Config(), [row for row, _ in cases] + dropped + [row for row, _ in after])
    reset = len(cases) + len(dropped) - 1
    valid, psum, status = zip(*found, strict=True)
    # A vector is out DELAY rows after its own, so the last of the cases comes just before the reset.
    expected = [total for _, total in cases] + [None] * len(dropped) + [total for _, total in after]
    assert valid == tuple([0] * DELAY + [int(total is not None) for total in expected])
    compared = [(psum[n + DELAY], total) for n, total in enumerate(expected) if total is not None]
    assert [total for total, _ in compared] == [total for _, total in compared]
    assert len(compared) == 12
    # The NaN scale of the vector that is not valid raises nothing; the next one's is kept until the reset.
    assert status == (0,) * 11 + (1,) * (reset - 11) + (0,) * (len(found) - reset)


@pytest.mark.parametrize("pipeline", ["compact", "fast"])
def test_random_vectors_give_the_sums_of_the_model(pipeline, seed):
    rng, count, config = np.random.default_rng(seed), 200, Nvfp4Config(pipeline=pipeline)
    a, w = rng.integers(0, 16, (2, count, 32), dtype=np.uint8)
    a_scale, w_scale = rng.integers(0, 0x7F, (2, count, 2), dtype=np.uint8)
    psum = rng.integers(0, 2**64, count, dtype=np.uint64)
    w_scale[-1] = 0x80 | ONE
    expected, status = vmac_nvfp4(config, a, w, a_scale, w_scale, psum)
    rows = [
        {
            "valid_i": 1,
            "a": word(a[n], 4),
            "w": word(w[n], 4),
            "a_scale": word(a_scale[n], 8),
            "w_scale": word(w_scale[n], 8),
            "psum_i": int(psum[n]),
            "rst": 0,
        }
        for n in range(count)
    ]
    found = run(config, rows)
    assert [valid for valid, _, _ in found] == [0] * DELAY + [1] * count
    assert [total for _, total, _ in found[DELAY:]] == expected.tolist()
    assert [raised for _, _, raised in found] == [0] * (count - 1) + [1] * (DELAY + 1)
    assert status.tolist() == [0] * (count - 1) + [1]


@pytest.mark.parametrize(
    ("lanes", "error", "message"),
    [
        (48, ValueError, "lanes must be a positive multiple of 32, not 48"),
        (0, ValueError, "lanes must be a positive multiple of 32, not 0"),
        ("32", TypeError, "lanes must be an integer, not '32'"),
    ],
)
def test_bad_lanes_are_named(lanes, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        VmacNvfp4(Nvfp4Config(lanes=lanes))
