"""Stimuli keep the contract of the ports, and reach what they are for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.packed_pair import NVFP4_PAIRS
from sim.coverage import masks, sample_vectors, vector_coverage
from sim.design import config_of
from sim.stimuli import (
    AUTOFP2,
    AUTOFP6,
    FREE_PAIRS,
    ILLEGAL,
    MODES,
    NVFP4,
    RESET_ROWS,
    EncoderShape,
    VectorShape,
    encoder_stimulus,
    scale_class,
    slot_table,
    vector_stimulus,
)


def shape_of(block="vmac", **parameters):
    return VectorShape.of(block, config_of(block, **parameters))


@pytest.mark.parametrize(("slots", "fillings"), [(1, 1 + 4 * 2), (2, 1 + 6 * 2 + 6 * 4), (4, 3**4)])
def test_slot_table(slots, fillings):
    """Two slots: slot 0 holds 0 to 2 and slot 1 holds 1 to 3; one record may be in either where both allow it."""
    table = slot_table(slots)
    assert len(table) == fillings
    assert len({tuple(row) for row in table}) == fillings
    valid, subgroup = table >> np.uint64(8) & np.uint64(1), (table >> np.uint64(9) & np.uint64(3)).astype(int)
    for slot in range(slots):
        used = subgroup[valid[:, slot] == 1, slot]
        assert set(used) == set(range(slot, 5 - slots + slot))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([("slots", n) for n in range(1, 5)] + [("inplace", 2)]))
def test_vectors_keep_the_contract(seed, refinements):
    refinement, slots = refinements
    shape = shape_of(refinement=refinement, slots_per_block=slots)
    s = vector_stimulus(shape, 500, np.random.default_rng(seed))
    assert s.rst[:RESET_ROWS].all()
    assert set(np.unique(s.mode)) <= set(shape.modes)
    nvfp4 = s.mode & 1 == 1
    allowed = np.concatenate([NVFP4_PAIRS, FREE_PAIRS, [0b11101, 0b11110, 0b11111]])
    assert np.isin(s.w[nvfp4], allowed).all()
    refined = s.refine[s.mode == AUTOFP6]
    weight, activation = masks(shape, refined)
    if refinement == "slots":
        assert not (weight & activation).any()
        count = np.array([bin(n).count("1") for n in range(16)])
        assert (count[weight] + count[activation] <= slots).all()
    config_of("vmac", refinement=refinement, slots_per_block=slots)


def test_the_same_seed_gives_the_same_stimuli():
    one, two, other = (vector_stimulus(shape_of(), 300, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in vars(one))
    assert not np.array_equal(one.a, other.a)


def test_everything_occurs():
    s = vector_stimulus(shape_of(), 20000, np.random.default_rng(1))
    assert set(np.unique(s.mode)) == {AUTOFP2, NVFP4, ILLEGAL, AUTOFP6}
    assert set(np.unique(scale_class(s.a_scale))) == set(range(6))
    assert set(np.unique(s.a)) == set(range(16))
    assert set(np.unique(s.w)) == set(range(32))
    changes = (s.mode[1:] != s.mode[:-1]) & s.valid[1:] & s.valid[:-1]
    assert changes.mean() > 0.1
    assert 0 < s.chain.mean() < 1
    assert 20 < s.rst.sum() < 5000
    psum = s.psum.view(np.int64)
    assert (psum < 0).any()
    assert (psum == 0).any()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("block", "parameters"),
    [("vmac", {}), ("vmac", {"refinement": "none", "scaling": "group"}), ("vmac_nvfp4", {}), ("vmac_autofp2", {})],
    ids=str,
)
def test_each_scale_byte_is_the_only_cause_of_some_status(block, parameters, seed):
    """As many rows as 5000 vectors per mode take: each byte alone, as 0x7F and signed, in each mode that it counts in."""
    shape = shape_of(block, **parameters)
    s = vector_stimulus(shape, 30000, np.random.default_rng(seed))
    coverage = vector_coverage(shape, 4)
    rows = np.flatnonzero(s.alive(4))
    sample_vectors(coverage, shape, s, rows, s.psum[rows], s.psum[rows])
    assert coverage.missing("nan") == []


def test_reset_drops_what_is_in_flight():
    shape = shape_of()
    s = vector_stimulus(shape, 3000, np.random.default_rng(3))
    alive = s.alive(4)
    for row in np.flatnonzero(s.rst):
        assert not alive[max(row - 3, 0) : row + 1].any()
    assert not (alive & ~s.valid).any()
    settled = s.settled(4, 3)
    taken = np.flatnonzero(settled.chain)
    assert len(taken)
    assert alive[taken - 1].all()


def test_shapes_of_the_blocks():
    assert [MODES[m] for m in shape_of().modes] == ["AutoFP2", "NVFP4", "illegal", "AutoFP6"]
    assert shape_of(refinement="none").modes == (AUTOFP2, NVFP4)
    assert shape_of("vmac_nvfp4").weight_bits == 4
    assert shape_of("vmac_autofp2", scaling="group").w_scales == 4
    assert shape_of(refinement="inplace").record_bits == 40


def test_rows_must_outlast_reset():
    with pytest.raises(ValueError, match=r"^rows must be more than 3, not 3$"):
        vector_stimulus(shape_of(), 3, np.random.default_rng(0))


def test_encoder_inputs_come_close_to_the_thresholds():
    inputs = encoder_stimulus(EncoderShape(32, False, False), 5000, np.random.default_rng(2))
    first, second = (inputs["scale_even"][:, k].astype(int) & 0x7F for k in (0, 1))
    assert (np.abs(first - second) < 37).mean() > 0.5
    assert (inputs["scale_even"] >= 0x80).any()
    assert {name: c.shape for name, c in inputs.items()} == {
        "mode_nvfp4": (5000,),
        **{f"row_{row}": (5000, 32) for row in ("even", "odd")},
        **{f"scale_{row}": (5000, 2) for row in ("even", "odd")},
    }
