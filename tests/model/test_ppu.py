"""Post-processing unit as a whole: against float64 and the software quantiser, jobs in pieces, what it refuses, its command."""

import dataclasses

import numpy as np
import pytest

import model.checkpoint
from model import block_scaled, ppu
from model.activation import Function, reference
from model.ppu import CLIPPED, NONFINITE, Job, PpuConfig, Sums, main, run
from model.signals import layer_activity

CONFIG = PpuConfig(lanes=4)


def patterns(values):
    return np.asarray(values, np.float32).view(np.uint32)


def pattern(value):
    return int(patterns([value])[0])


@pytest.mark.parametrize("function", Function)
def test_a_layer_s_outputs_are_those_of_float64_and_of_the_software_quantiser(function, seed):
    rng = np.random.default_rng(seed)
    sums = rng.integers(-(2**24), 2**24, (6, 80))
    residual = rng.standard_normal((6, 80)).astype(np.float32)
    t = np.float32(2.0**-9)
    job = Job(function, scale=pattern(2.0**-22), residual=True, numbers=True, group_scale=pattern(1 / t))
    result = run(CONFIG, job, sums, residual=residual.view(np.uint32))
    numbers = result.numbers.view(np.float32)
    exact = reference(sums * 2.0**-22, function) + residual.astype(np.float64)
    np.testing.assert_allclose(numbers, exact, rtol=0, atol=2.0**-8 * 4)
    soft = block_scaled.quantize(numbers, tensor_scale=float(t))
    np.testing.assert_array_equal(result.groups.codes.reshape(6, 96), soft.codes)
    np.testing.assert_array_equal(result.groups.scales.reshape(6, 6), soft.scales)
    assert (soft.codes & 7 != 0).mean() > 0.5
    assert result.report is None


def test_factor_of_a_linear_job_may_be_all_in_one_scale():
    sums = np.arange(-2000, 2000, 125)[None]
    one = run(CONFIG, Job(scale=pattern(2.0**-5)), sums)
    two = run(CONFIG, Job(scale=pattern(2.0**-9), group_scale=pattern(16.0)), sums)
    np.testing.assert_array_equal(one.groups.codes, two.groups.codes)
    np.testing.assert_array_equal(one.groups.scales, two.groups.scales)


def test_minus_zero_goes_through_without_a_residual():
    x = patterns([[-0.0, 6.0, 0.0, -6.0]])
    result = run(CONFIG, Job(integers=False, numbers=True), x)
    np.testing.assert_array_equal(result.numbers, x)
    assert result.groups.codes[0, :4].tolist() == [8, 7, 0, 15]
    added = run(CONFIG, Job(integers=False, residual=True, numbers=True), x, residual=np.zeros((1, 4), np.uint32))
    assert added.numbers[0, 0] == 0


def test_status_names_what_was_in_groups():
    assert run(CONFIG, Job(integers=False), patterns([[np.inf, 1.0]])).status == NONFINITE | CLIPPED
    assert run(CONFIG, Job(integers=False), patterns([[2900.0]])).status == CLIPPED
    assert run(CONFIG, Job(integers=False, groups=False, numbers=True), patterns([[np.nan]])).status == 0


def test_sums_of_a_layer_do_not_depend_on_jobs_if_rows_stay_whole(seed):
    rng = np.random.default_rng(seed)
    after = rng.standard_normal((6, 24)).astype(np.float32)
    before = (after + 0.1 * rng.standard_normal((6, 24))).astype(np.float32)
    job = Job(integers=False, measure=True, report=True)
    whole = run(CONFIG, job, after.view(np.uint32), previous=before.view(np.uint32)).report
    sums = Sums()
    for part, rest in ((slice(0, 2), {"report": False}), (slice(2, 6), {"begin": False})):
        pieces = run(
            CONFIG,
            dataclasses.replace(job, **rest),
            after[part].view(np.uint32),
            previous=before[part].view(np.uint32),
            sums=sums,
        )
    assert pieces.report == whole
    values = [float(np.array(bits, np.uint32).view(np.float32)) for bits in dataclasses.astuple(whole)]
    assert values[0] == pytest.approx(layer_activity(before, after), rel=3e-4)
    assert values[3] == pytest.approx(float(np.square(after, dtype=np.float64).sum()), rel=3e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lanes": 0}, "lanes must be from 1 to 32, not 0"),
        ({"lanes": 33}, "lanes must be from 1 to 32, not 33"),
        ({"slots_per_block": 5}, "slots_per_block must be from 1 to 4, not 5"),
        ({"step": "big"}, "step must be one of fixed, exponent, not 'big'"),
    ],
)
def test_bad_parameters_are_named(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        PpuConfig(**settings)


def test_streams_that_do_not_fit_the_job_are_named():
    x = np.zeros((2, 40), np.int64)
    bits = np.zeros((2, 40), np.uint32)
    with pytest.raises(ValueError, match=r"^values must have shape \(rows, K\), not \(40,\)$"):
        run(CONFIG, Job(), x[0])
    with pytest.raises(ValueError, match=r"^residual must come with this job$"):
        run(CONFIG, Job(residual=True), x)
    with pytest.raises(ValueError, match=r"^previous must not come with this job$"):
        run(CONFIG, Job(), x, previous=bits)
    with pytest.raises(ValueError, match=r"^residual must have shape \(2, 40\), not \(1, 40\)$"):
        run(CONFIG, Job(residual=True), x, residual=bits[:1])
    with pytest.raises(ValueError, match=r"^weight_masks must have shape \(4,\), not \(3,\)$"):
        run(CONFIG, Job(refine=True), x, weight_masks=np.zeros(3, np.uint8))


def test_command_prints_the_errors(capsys):
    assert main(["--step", "2000003", "--layers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| SILU", "| GELU"]
    assert all(0.1 < float(line.split(" | ")[-1].strip(" |")) < 0.5 for line in lines[2:])
    with pytest.raises(SystemExit):
        main(["--step", "0"])
    assert "--step must be at least 1, not 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--dense", "0"])
    assert "--dense must be at least 1, not 0" in capsys.readouterr().err


def test_patterns_are_all_finite_ones_in_the_steps_that_are_asked_for():
    given = np.concatenate(list(ppu._patterns(1 << 21, 1 << 19)))
    assert np.isfinite(given.view(np.float32)).all()
    for sign in (0, 1 << 31):
        own = np.sort(given[given & 1 << 31 == sign] ^ sign).astype(np.int64)
        dense = (own >= 0x3B800000) & (own < 0x43000000)
        assert set(np.diff(own[dense])) == {1 << 19}
        assert set(np.diff(own[own < 0x3B800000])) == set(np.diff(own[own >= 0x43000000])) == {1 << 21}
        assert (own[0], own[-1]) == (0, 0x7F800000 - (1 << 21))


def test_command_compares_with_the_software(capsys, monkeypatch):
    monkeypatch.setattr(ppu, "_function_errors", lambda step, dense: [])
    assert main(["--tokens", "20", "--layers", "1"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 ")]
    assert [row[0] for row in rows] == ["1 qkv", "1 o", "1 gate_up", "1 down"]
    # Scales, codes, and choices with eight fraction bits.
    assert all(float(row[2]) == 0 and float(row[3]) < 1e-4 and float(row[7]) < 3e-3 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must be from 1 to 557, not 0"),
        (["--tokens", "558"], "--tokens must be from 1 to 557, not 558"),
        (["--layers", "29", "30"], "--layers must be from 0 to 29, not 30"),
        (["--layers", "-1"], "--layers must be from 0 to 29, not -1"),
    ],
)
def test_wrong_arguments_are_refused_with_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"model.ppu: {message}\n")


def test_a_missing_model_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(model.checkpoint, "_WHEEL", "llm-of-nobody")
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("model.ppu: ")
    assert err.count("\n") == 1
