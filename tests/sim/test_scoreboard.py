"""The scoreboard passes a right block and notices each way of being wrong, without a simulator: the outputs are made up here."""

import dataclasses

import numpy as np
import pytest

from model.weight_encoder import encode
from sim.design import config_of
from sim.harness import pack_fields
from sim.scoreboard import Tally, check_encoder, check_vectors, encoder_columns, reference
from sim.stimuli import FREE_PAIRS, EncoderShape, VectorShape, encoder_stimulus, vector_stimulus

LATENCY, DELAY = 4, 3
BLOCKS = [("vmac", {}), ("vmac", {"refinement": "inplace"}), ("vmac_nvfp4", {}), ("vmac_autofp2", {"scaling": "group"})]


def perfect_outputs(shape, config, s):
    """What a right block would put out, written down the slow way: row by row."""
    rows = len(s) + LATENCY
    if shape.weight_bits == 5:
        s = dataclasses.replace(s, w=np.where(np.isin(s.w, FREE_PAIRS), 0b11100, s.w).astype(np.uint8))
    out = {name: np.zeros(rows, np.uint64) for name in ("valid_o", "psum_o", "status")}
    out.update({f"{name}__x": np.zeros(rows, bool) for name in ("valid_o", "psum_o", "status")})
    status, in_flight = 0, []
    for row in range(rows):
        out["status"][row] = status
        if in_flight and in_flight[0] + LATENCY == row:
            in_flight.pop(0)
            out["valid_o"][row] = 1
        if row >= len(s):
            pass
        elif s.rst[row]:
            in_flight, status = [], 0
        elif s.valid[row] and s.rst[: row + 1].any():
            in_flight.append(row)
        source = row - DELAY
        if source in in_flight:
            fed = out["psum_o"][row] if s.chain[source] else s.psum[source]
            psum, bits = reference(shape, config, s, np.array([source]), np.array([fed], np.uint64))
            out["psum_o"][source + LATENCY] = psum[0]
            status |= int(bits[0])
    return out


@pytest.fixture(scope="module", params=BLOCKS, ids=lambda block: "-".join([block[0], *map(str, block[1].values())]))
def run(request):
    block, parameters = request.param
    config = config_of(block, **parameters)
    shape = VectorShape.of(block, config)
    s = vector_stimulus(shape, 1500, np.random.default_rng(11)).settled(LATENCY, DELAY)
    return shape, config, s, perfect_outputs(shape, config, s)


def check(run, **changes):
    shape, config, s, outputs = run
    return check_vectors(shape, config, s, {**outputs, **changes}, LATENCY, DELAY)


def changed(run, name, row, value):
    column = run[3][name].copy()
    column[row] = value
    return {name: column}


def compared_rows(run):
    shape, _, s, _ = run
    free = np.isin(s.w, FREE_PAIRS).any(1) if shape.weight_bits == 5 else np.zeros(len(s), bool)
    return np.flatnonzero(s.alive(LATENCY) & ~free) + LATENCY


def test_a_right_block_passes(run):
    tally = check(run)
    assert tally.faults == []
    assert tally.total == len(compared_rows(run)) > 300


def test_a_wrong_sum_in_any_compared_row_is_noticed(run):
    for row in compared_rows(run)[::37]:
        tally = check(run, **changed(run, "psum_o", row, int(run[3]["psum_o"][row]) ^ 1 << 40))
        assert tally.mismatches
        assert f"row {row}: psum_o" in " ".join(tally.messages)


def test_a_result_too_early_too_late_or_missing_is_noticed(run):
    valid = run[3]["valid_o"]
    assert check(run, valid_o=np.roll(valid, 1)).mismatches
    assert check(run, valid_o=np.roll(valid, -1)).mismatches
    dead = check(run, valid_o=np.zeros_like(valid))
    assert dead.mismatches
    assert dead.total == 0
    row = compared_rows(run)[5]
    assert check(run, **changed(run, "valid_o", row, 0)).mismatches == 1


def test_status_must_rise_stay_and_fall(run):
    status = run[3]["status"]
    raised = np.flatnonzero(status)
    assert len(raised)
    assert check(run, status=np.zeros_like(status)).mismatches
    assert check(run, status=status | np.uint64(1)).mismatches
    # A vector whose pairs are nobody's may or may not raise a bit, so not every single drop can be held against the block.
    drops = raised[::20]
    noticed = [check(run, **changed(run, "status", row, 0)).mismatches == 1 for row in drops]
    assert np.mean(noticed) > 0.9


def test_unknown_outputs_are_noticed(run):
    row = compared_rows(run)[3]
    for name in ("valid_o", "psum_o", "status"):
        tally = check(run, **changed(run, f"{name}__x", row, True))
        assert tally.unknown == 1
        assert tally.faults


def test_rows_are_demanded(run):
    shape, config, s, outputs = run
    short = {name: column[:-1] for name, column in outputs.items()}
    with pytest.raises(ValueError, match=r"^outputs must have at least 1504 rows, not 1503$"):
        check_vectors(shape, config, s, short, LATENCY, DELAY)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("latency", [0, 1])
def test_encoder(grouped, latency):
    shape = EncoderShape(32, grouped, latency == 1)
    inputs = encoder_stimulus(shape, 400, np.random.default_rng(4))
    rows = [inputs[name] for name in ("row_even", "row_odd", "scale_even", "scale_odd")]
    pairs, scales = encode(inputs["mode_nvfp4"].astype(bool), *rows, scaling="group" if grouped else "pair")
    pad = ((latency, 0), (0, 0))
    w = np.pad(pack_fields(pairs, 5), pad)
    scale = np.pad(pack_fields(scales, 8), pad)
    outputs = {"w": w, "w_scale": scale, "w__x": np.zeros(len(w), bool), "w_scale__x": np.zeros(len(w), bool)}
    assert check_encoder(shape, inputs, outputs, latency).faults == []
    for name in ("w", "w_scale"):
        wrong = outputs[name].copy()
        wrong[latency + 7, 1] ^= 1
        assert check_encoder(shape, inputs, {**outputs, name: wrong}, latency).mismatches == 1
        assert check_encoder(shape, inputs, {**outputs, f"{name}__x": ~outputs["w__x"]}, latency).unknown == 400
    columns = encoder_columns(inputs, shape, latency)
    assert ("rst" in columns) == shape.clocked
    assert {len(column) for column in columns.values()} == {400 + latency}


def test_tallies_add_up_and_reject_empty_runs():
    one = Tally({"NVFP4": 3}, {"NVFP4": 3}, 3)
    two = Tally({"NVFP4": 1, "AutoFP2": 2}, {"NVFP4": 1, "AutoFP2": 2}, 1)
    both = one + two
    assert both.compared == {"NVFP4": 4, "AutoFP2": 2}
    assert both.faults == []
    assert "nothing was compared in some mode: {}" in Tally().faults
    assert Tally({"NVFP4": 2}, {"NVFP4": 1}, 2).faults == ["compared {'NVFP4': 1}, expected {'NVFP4': 2}"]
    assert Tally({"NVFP4": 4}, {"NVFP4": 4}, 2).faults == ["only 2 of 4 results are non-zero"]
    assert "nothing was compared in some mode: {'NVFP4': 0}" in Tally({"NVFP4": 0}, {"NVFP4": 0}).faults
