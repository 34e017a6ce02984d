"""Coverage counts what it says, and the declared bins are those of the contract."""

import dataclasses

import numpy as np
import pytest

from sim.coverage import (
    STALL_CLASSES,
    Coverage,
    CoverPoint,
    encoder_coverage,
    masks,
    sample_resets,
    sample_vectors,
    stall_class,
    vector_coverage,
)
from sim.design import config_of
from sim.stimuli import AUTOFP2, NVFP4, EncoderShape, VectorShape, vector_stimulus


def test_counts_holes_and_sums():
    point = CoverPoint.cross("p", {"x": "ab", "y": (1, 2)}, np.array([[1, 1], [1, 0]], bool))
    one, two = Coverage([point]), Coverage([point])
    one.sample("p", np.array([0, 0]), np.array([1, 1]))
    one.sample("p", np.array([1]), np.array([1]))
    assert one.counts["p"].tolist() == [[0, 2], [0, 1]]
    assert one.missing("p") == ["a × 1", "b × 1"]
    assert one.summary() == {"p": {"bins": 3, "hit": 1}}
    two.sample("p", np.array([0]), np.arange(2))
    one.merge(two)
    assert one.missing("p") == ["b × 1"]
    assert one.share == 2 / 3


def test_stalls():
    rst = np.array([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], bool)
    valid = np.array([0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1], bool)
    assert [STALL_CLASSES[k] for k in stall_class(rst, valid)[valid]] == [
        "after reset",
        "back to back",
        "gap 1",
        "gap 2 or 3",
        "gap 4 and more",
        "after reset",
    ]


def test_masks_of_records():
    shape = VectorShape.of("vmac", config_of("vmac"))
    record = [(1 << 11 | 0 << 9 | 1 << 8), (2 << 9 | 1 << 8), (3 << 9), (1 << 11 | 3 << 9 | 1 << 8)]
    weight, activation = masks(shape, np.array([record], np.uint64))
    assert weight.tolist() == [[4, 0]]
    assert activation.tolist() == [[1, 8]]


@pytest.mark.parametrize(
    ("parameters", "pairs"),
    [({}, 33), ({"slots_per_block": 1}, 9), ({"slots_per_block": 4}, 81), ({"refinement": "inplace"}, 256)],
    ids=str,
)
def test_declared_masks(parameters, pairs):
    shape = VectorShape.of("vmac", config_of("vmac", **parameters))
    declared = vector_coverage(shape, 4).points["masks"].declared
    assert declared.sum() == 2 * pairs
    assert declared[0, 0, 0]
    assert declared[0, 4, 0]


def test_blocks_declare_what_they_have():
    assert "masks" not in vector_coverage(VectorShape.of("vmac_nvfp4", config_of("vmac_nvfp4")), 4).points
    autofp2 = vector_coverage(VectorShape.of("vmac_autofp2", config_of("vmac_autofp2")), 4)
    assert autofp2.points["saturation"].declared.size == 6
    assert dict(autofp2.points["vector"].axes)["mode"] == ("AutoFP2",)
    encoder = encoder_coverage(EncoderShape(32, True, False))
    assert encoder.points["digits"].declared.sum() == 16


def test_only_given_rows_count():
    shape = VectorShape.of("vmac", config_of("vmac"))
    s = vector_stimulus(shape, 400, np.random.default_rng(8)).settled(4, 3)
    rows = np.flatnonzero(s.alive(4))[:50]
    coverage = vector_coverage(shape, 4)
    before, after = np.zeros(50, np.uint64), np.arange(50, dtype=np.uint64)
    sample_vectors(coverage, shape, s, rows, before, after)
    assert coverage.counts["vector"].sum() == 50
    assert coverage.counts["operands"].sum() == 50 * 32
    assert coverage.counts["sum"].sum() == 50
    assert coverage.counts["offsets"].sum() % 4 == 0


def test_only_the_sole_scale_that_is_no_number_counts():
    shape = VectorShape.of("vmac", config_of("vmac"))
    s = vector_stimulus(shape, 40, np.random.default_rng(8))
    row = np.arange(40)
    a_scale, w_scale = np.zeros((2, 40, 2), np.uint8)
    a_scale[3, 1] = a_scale[13, 1] = a_scale[14, 0] = 0x7F
    a_scale[23, 1], w_scale[24, 1] = 0x80, 0x81
    w_scale[33, 0], a_scale[35, 0] = 0xFF, 0xFF
    mode = np.full(40, NVFP4)
    mode[23] = AUTOFP2
    s = dataclasses.replace(
        s,
        rst=row % 10 == 0,
        valid=row != 35,
        mode=mode,
        a_scale=a_scale,
        w_scale=w_scale,
        refine=np.zeros_like(s.refine),
    )
    coverage = vector_coverage(shape, 4)
    rows = np.flatnonzero(s.alive(4))
    sample_vectors(coverage, shape, s, rows, np.zeros(len(rows), np.uint64), np.ones(len(rows), np.uint64))
    counts = coverage.counts["nan"]
    assert counts[NVFP4, 3].tolist() == [1, 0]
    assert counts[NVFP4, 1].tolist() == [0, 1]
    assert counts.sum() == 2


@pytest.mark.parametrize(
    ("block", "parameters", "bins"),
    [
        ("vmac", {}, 2 * (3 + 4 + 3 + 4)),
        ("vmac", {"refinement": "none", "scaling": "group"}, 2 * (6 + 4)),
        ("vmac_nvfp4", {}, 2 * 4),
        ("vmac_autofp2", {"lanes": 64}, 2 * (4 + 2)),
    ],
    ids=str,
)
def test_every_scale_byte_that_counts_must_be_the_sole_cause(block, parameters, bins):
    point = vector_coverage(VectorShape.of(block, config_of(block, **parameters)), 4).points["nan"]
    assert point.declared.sum() == bins


def test_resets_count_vectors_in_flight():
    shape = VectorShape.of("vmac", config_of("vmac"))
    s = vector_stimulus(shape, 20, np.random.default_rng(8))
    s = dataclasses.replace(s, rst=np.isin(np.arange(20), [0, 10, 12]), valid=np.arange(20) > 7)
    coverage = vector_coverage(shape, 4)
    sample_resets(coverage, s, 4)
    assert coverage.counts["reset"].tolist() == [1, 0, 0, 1, 1]
