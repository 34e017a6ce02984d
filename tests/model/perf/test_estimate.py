"""Estimates: ratios that hold by construction, bounds of compute and bandwidth, products of a request, mixes, sweeps."""

import dataclasses
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.accelerator import AcceleratorConfig, Mode
from model.perf.constants import KINDS, constant, constants
from model.perf.estimate import cost, estimate
from model.perf.hardware import DATAPATHS, PAPER, PRECISIONS, REFERENCE, Hardware
from model.perf.language_model import LanguageModel, read_model
from model.perf.sweep import point
from model.perf.workload import Gemm, Mix, decode, prefill, read_mix

TRACE = Path(__file__).parents[1] / "smollm2_trace.csv.gz"
AUTOEMATIC, NVFP4 = DATAPATHS["autoematic"], DATAPATHS["nvfp4"]
FAST = dataclasses.replace(PAPER, bandwidth_gb=1e12)
SMALL = Hardware(AcceleratorConfig(rows=4, columns=4))
TINY = LanguageModel("tiny", 3, 256, 512, 8, 2, 32, 3, 512)
SPARSE = LanguageModel("sparse", 4, 256, 512, 8, 2, 32, 1, 512, 16, 2, 128, 64)


def gemm(m, n, k, **more):
    return Gemm("product", *(np.array([float(x)]) for x in (m, n, k, 1)), 1, **more)


def seconds(hardware, datapath, precision, product):
    return float(cost(hardware, datapath, precision, product).seconds[0])


@pytest.mark.parametrize("size", [(4096, 8192, 8192), (256, 4096, 4096), (1, 28672, 8192)])
def test_two_bits_compute_twice_as_fast_as_four(size):
    ratio = seconds(FAST, AUTOEMATIC, 4, gemm(*size)) / seconds(FAST, AUTOEMATIC, 2, gemm(*size))
    assert ratio == pytest.approx(2, rel=0.005)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.49, 1.0])
def test_a_longer_k_costs_one_and_the_refined_share(share):
    hardware, product = dataclasses.replace(PAPER, refined_share=share), gemm(1024, 8192, 8192)
    refined, plain = (cost(hardware, NVFP4, bits, product) for bits in (6, 4))
    assert float(refined.cycles[0] / plain.cycles[0]) == pytest.approx(1 + share, rel=0.002)
    assert float(refined.vectors[0] / plain.vectors[0]) == pytest.approx(1 + share, rel=0.002)
    assert float(refined.energy[0, 0] / plain.energy[0, 0]) == pytest.approx(1 + share, rel=0.002)
    # Native refinement takes no more cycles than four bits.
    native, four = (cost(hardware, AUTOEMATIC, bits, product) for bits in (6, 4))
    assert native.cycles[0] == four.cycles[0] == plain.cycles[0]


def test_rtl_counts_the_same_ratio_for_a_longer_k():
    config = AcceleratorConfig(rows=4, columns=4, data_width=128)
    hardware = Hardware(config, schedule="rtl", refined_share=1.0)
    product = gemm(64, 576, 576)
    ratio = seconds(hardware, NVFP4, 6, product) / seconds(hardware, AUTOEMATIC, 6, product)
    # docs/driver.md, measured: 1.97 for the projection o.
    assert ratio == pytest.approx(1.97, rel=0.01)


def test_energy_of_a_mac_is_what_was_measured():
    product = gemm(1024, 4096, 4096)
    for bits, measured in ((2, 32.18), (4, 65.79), (6, 75.66)):
        spent = cost(FAST, AUTOEMATIC, bits, product)
        assert 1e15 * float(spent.energy[0, 0] / spent.macs[0]) == pytest.approx(measured, rel=0.001)
    spent = cost(FAST, DATAPATHS["autofp2"], 2, product)
    assert 1e15 * float(spent.energy[0, 0] / spent.macs[0]) == pytest.approx(27.94, rel=0.001)


HARDWARE = st.builds(
    Hardware,
    st.builds(
        AcceleratorConfig, rows=st.integers(1, 16), columns=st.integers(1, 16), data_width=st.sampled_from([128, 256])
    ),
    schedule=st.just("array"),
    clock_mhz=st.floats(10, 3000),
    bandwidth_gb=st.floats(0.1, 5000),
    overlap=st.booleans(),
    refined_share=st.floats(0, 1),
    accelerators=st.integers(1, 20),
)


@settings(deadline=None, max_examples=100)
@given(
    HARDWARE,
    st.sampled_from(list(DATAPATHS.values())),
    st.sampled_from(PRECISIONS),
    st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(1, 2000), st.integers(1, 40)),
    st.booleans(),
)
def test_nothing_is_faster_than_elements_and_memory_allow(hardware, datapath, precision, size, rtl):
    if rtl:
        hardware = dataclasses.replace(hardware, schedule="rtl", overlap=False)
    spent = cost(hardware, datapath, precision, Gemm("product", *(np.array([float(x)]) for x in size), 3))
    mode = hardware.execution(datapath, precision).mode
    assert float(spent.macs[0] / spent.seconds[0]) <= hardware.peak(mode)
    assert float(spent.vectors[0]) <= float(spent.cycles[0]) * hardware.elements
    # A product of few bytes ends with the last word, wherever a row begins in it.
    assert float(spent.memory[0]) <= hardware.bandwidth * float(spent.seconds[0]) * (1 + 1e-12)
    assert (spent.energy >= 0).all()


def by_hand(model, tokens, keys, logits):
    """MACs of a pass, layer by layer; ``keys`` are those that each token meets, summed over tokens."""
    attention = 2 * keys * model.heads * model.head_size
    weights = (
        model.layers * tokens * model.attention_weights + model.dense_layers * tokens * 3 * model.width * model.hidden
    )
    sparse = model.layers - model.dense_layers
    each = (
        3 * model.width * (model.experts_per_token * model.expert_hidden + model.shared_hidden)
        + model.width * model.experts
    )
    return weights + sparse * tokens * each + model.layers * attention + logits * model.width * model.vocabulary


@pytest.mark.parametrize("model", [TINY, SPARSE])
def test_products_have_the_macs_of_the_model(model):
    # Blocks of 512 queries meet the keys up to the block's last.
    keys = 512 * 512 + 512 * 1024 + 76 * 1100
    found = sum(float(each.macs.sum()) for each in prefill(model, 1100, 3))
    assert found == pytest.approx(by_hand(model, 3300, 3 * keys, 3), rel=0.001)
    steps = decode(model, np.array([10.0, 11.0]), 1)
    assert sum(float(each.macs[1]) for each in steps) == pytest.approx(by_hand(model, 1, 11, 1))


def test_experts_are_met_as_often_as_chance_says():
    model = read_model("minimax-m2")
    count = {each.name: float(each.count[0]) for each in decode(model, np.array([5.0]), 8)}["expert gate_up"]
    rng = np.random.default_rng(1)
    met = np.mean([len(np.unique(np.concatenate([rng.permutation(256)[:8] for _ in range(8)]))) for _ in range(300)])
    assert count == pytest.approx(met, rel=0.01)


def test_a_request_adds_up_and_a_trace_is_its_steps():
    mix = Mix.of("0/50/50", "50/50/0")
    whole = estimate(TINY, REFERENCE, AUTOEMATIC, mix, 600, 5, 2)
    assert float(whole.decode.steps.sum()) == pytest.approx(float(whole.decode.total.seconds))
    assert float(whole.prefill.steps.sum()) == pytest.approx(float(whole.prefill.total.seconds))
    pure = [
        estimate(TINY, REFERENCE, AUTOEMATIC, Mix.of(text), 600, 5, 2) for text in ("100/0/0", "0/100/0", "0/0/100")
    ]
    parts = [float(each.decode.total.seconds) for each in pure]
    assert float(whole.decode.total.seconds) == pytest.approx((parts[0] + parts[1]) / 2)
    assert float(whole.prefill.total.seconds) == pytest.approx(
        sum(float(x.prefill.total.seconds) for x in pure[1:]) / 2
    )
    steps = np.array([[1.0, 0, 0], [0, 0, 1.0]])
    traced = estimate(TINY, REFERENCE, AUTOEMATIC, Mix(mix.prefill, steps), 600, 5, 2)
    assert traced.decode.steps == pytest.approx(
        [pure[0 if step % 2 == 0 else 2].decode.steps[step] for step in range(5)]
    )
    assert whole.as_json()["seconds"] == pytest.approx(float(whole.total.seconds))


def test_both_schedules_agree_where_the_loader_keeps_up():
    config = AcceleratorConfig(rows=4, columns=4, data_width=128)
    product = gemm(128, 1024, 1024)
    rtl, ideal = (cost(Hardware(config, schedule=name), AUTOEMATIC, 4, product) for name in ("rtl", "array"))
    assert float(rtl.cycles[0] / ideal.cycles[0]) == pytest.approx(1, abs=0.02)


def test_accelerators_share_products_or_their_weights():
    def run(accelerators, n, count):
        hardware = dataclasses.replace(SMALL, accelerators=accelerators)
        return cost(hardware, AUTOEMATIC, 4, Gemm("x", *(np.array([float(x)]) for x in (8, n, 1024, count)), 1))

    one = run(1, 256, 1)
    for accelerators, n, count in ((4, 1024, 1), (4, 512, 2), (4, 256, 4), (2, 512, 1), (7, 512, 3)):
        many = run(accelerators, n, count)
        assert many.cycles == one.cycles
        assert many.seconds == one.seconds
        assert many.vectors == one.vectors * n * count / 256
    # Five products on four accelerators: two, one behind the other, on one of them.
    assert run(4, 256, 5).cycles == 2 * one.cycles
    # Each reads the activations, all together the weights once.
    assert float(run(4, 1024, 1).memory[0]) == pytest.approx(4 * float(one.memory[0]))
    # Elements that have no part wait.
    assert float(run(4, 256, 1).energy[1, 0]) > float(one.energy[1, 0])


def test_memory_that_is_shared_is_a_bound():
    scarce = dataclasses.replace(SMALL, accelerators=64, bandwidth_gb=100.0)
    spent = cost(scarce, AUTOEMATIC, 4, gemm(8, 64 * 256, 1024))
    assert float(spent.memory[0] / spent.seconds[0]) == pytest.approx(1e11)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sizes_between_predicted_ones_lie_on_lines(monkeypatch, precision):
    contexts = np.arange(1, 12000, 37.0)
    values = Gemm("values", *np.broadcast_arrays([8.0], [128.0], contexts, [1.0]), 1, cached="k")
    monkeypatch.setattr("model.perf.estimate.MOST_SIZES", 10**6)
    each = cost(REFERENCE, AUTOEMATIC, precision, values)
    monkeypatch.undo()
    some = cost(REFERENCE, AUTOEMATIC, precision, values)
    assert len(np.unique(some.seconds)) > 40
    assert some.seconds == pytest.approx(each.seconds, rel=0.02)
    assert float(some.seconds.sum()) == pytest.approx(float(each.seconds.sum()), rel=0.001)


def test_a_smaller_last_block_is_predicted_for_itself():
    # 512 queries that meet 512 keys, then 88 that meet 600.
    scores = next(each for each in prefill(TINY, 600, 1) if each.name == "scores")
    spent = cost(REFERENCE, AUTOEMATIC, 4, scores)
    alone = [
        cost(REFERENCE, AUTOEMATIC, 4, gemm(float(m), 256 * math.ceil(n / 256), float(k)))
        for m, n, k in zip(scores.m, scores.n, scores.k, strict=True)
    ]
    times = [float(each.seconds[0]) * count * TINY.layers for each, count in zip(alone, scores.count, strict=True)]
    assert len(times) == 2
    assert spent.seconds == pytest.approx(times, rel=0.001)


@pytest.mark.parametrize("name", list(DATAPATHS))
def test_every_datapath_goes_through_the_rtl_schedule_too(name):
    found = estimate(TINY, REFERENCE, DATAPATHS[name], Mix.of("20/40/40"), 64, 3)
    ideal = estimate(TINY, FAST, DATAPATHS[name], Mix.of("20/40/40"), 64, 3)
    assert float(found.total.seconds) > float(ideal.total.seconds)


def test_without_refinement_hardware_k_is_longer():
    none = Hardware(dataclasses.replace(REFERENCE.config, refinement="none"))
    assert none.execution(AUTOEMATIC, 6).mode == Mode.NVFP4
    assert none.execution(AUTOEMATIC, 6).length == 2
    inplace = Hardware(dataclasses.replace(REFERENCE.config, refinement="inplace"))
    assert inplace.area(AUTOEMATIC)["logic"] > REFERENCE.area(AUTOEMATIC)["logic"] > none.area(AUTOEMATIC)["logic"]
    assert none.area(AUTOEMATIC)["memory"] == REFERENCE.area(NVFP4)["memory"] < REFERENCE.area(AUTOEMATIC)["memory"]


def test_constants_say_where_they_come_from():
    assert len(constants()) > 20
    assert {each["kind"] for each in constants().values()} == set(KINDS)
    assert all(each["source"] and constant(name) >= 0 for name, each in constants().items())


def test_mixes(tmp_path):
    mix = read_mix(TRACE)
    assert mix.prefill == pytest.approx([14 / 30, 2 / 30, 14 / 30])
    assert mix.decode.shape == (384, 3)
    # A trace without precisions goes through the policy, which decides the same.
    lines = [line.split(",") for line in gzip.decompress(TRACE.read_bytes()).decode().splitlines()]
    place = lines[0].index("precision")
    path = tmp_path / "plain.csv"
    path.write_text("\n".join(",".join(line[:place] + line[place + 1 :]) for line in lines))
    assert (read_mix(path).decode == mix.decode).all()
    samples = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    for row in samples:
        row |= {"step": int(row["step"]), "layer": int(row["layer"]), "L_A": float(row["L_A"])}
        row["G_E"] = float(row["G_E"]) if row["G_E"] else None
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"samples": samples}))
    assert (read_mix(path).decode == mix.decode).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mix.of("50/50"), "shares must be three percentages that sum up to 100, as 15/45/40, not '50/50'"),
        (lambda: Mix.of("a/b/c"), "shares must be three percentages that sum up to 100, as 15/45/40, not 'a/b/c'"),
        (
            lambda: Mix.of("-10/60/50"),
            "shares must be three percentages that sum up to 100, as 15/45/40, not '-10/60/50'",
        ),
        (
            lambda: Mix.of("nan/50/50"),
            "shares must be three percentages that sum up to 100, as 15/45/40, not 'nan/50/50'",
        ),
        (lambda: Hardware(clock_mhz=0), "clock_mhz must be from 1e-06 to 1e+15, not 0"),
        (lambda: Hardware(bandwidth_gb=float("inf")), "bandwidth_gb must be from 1e-06 to 1e+15, not inf"),
        (lambda: Hardware(schedule="best"), "schedule must be one of array, rtl, not 'best'"),
        (lambda: Hardware(refined_share=2), "refined_share must be from 0 to 1, not 2"),
        (
            lambda: Hardware(schedule="array", latency=3),
            "latency must be 0 with schedule array, which never waits, not 3",
        ),
        (lambda: Hardware(latency=-1), "latency must be from 0 to 1048576, not -1"),
        (
            lambda: Hardware(schedule="rtl", overlap=True),
            "overlap must be False with schedule rtl, which overlaps as the hardware does",
        ),
        (lambda: REFERENCE.execution(NVFP4, 8), "precision must be one of 2, 4, 6, not 8"),
        (
            lambda: estimate(TINY, REFERENCE, NVFP4, Mix.of("0/100/0"), batch=0),
            "batch must be from 1 to 1048576, not 0",
        ),
        (
            lambda: estimate(TINY, REFERENCE, NVFP4, Mix.of("0/100/0"), output=10**12),
            "output tokens must be from 1 to 1048576, not 1000000000000",
        ),
        (
            lambda: estimate(TINY, REFERENCE, NVFP4, Mix.of("0/100/0"), 10**4, batch=10**6),
            "prompt × batch must be at most 16777215 tokens, not 10000000000",
        ),
        (
            lambda: point({"decode_shares": 5}),
            "shares must be three percentages that sum up to 100, as 15/45/40, not '5'",
        ),
        (lambda: point({"clock_mhz": "fast"}), "clock_mhz must be a number, not 'fast'"),
        (lambda: point({"accelerators": 1.5}), "accelerators must be an integer, not 1.5"),
        (lambda: point({"overlap": 3}), "overlap must be True or False, not 3"),
        (lambda: point({"datapath": "fp6"}), "datapath must be one of autoematic, nvfp4, autofp2, uniform, not 'fp6'"),
        (lambda: point({"prompt": 2.5}), "prompt must be an integer, not 2.5"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert str(caught.value) == message


def test_a_trace_that_does_not_fit(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("step,phase,layer,L_A,G_E,precision\n0,prefill,0,1,,8\n")
    with pytest.raises(ValueError, match=r"^precision of TRACE must be one of 2, 4, 6 in each sample, not '8'$"):
        read_mix(path)
    path.write_text("step,phase,layer,L_A,G_E,precision\n0,prefill,0,1,,6\n")
    with pytest.raises(ValueError, match=r"^TRACE must have a step of decode$"):
        read_mix(path)
    # A line without its precision does not send all the others through the policy.
    whole = "step,phase,layer,L_A,G_E,precision\n0,prefill,0,1,,6\n0,prefill,1,1,,6\n1,decode,0,1,1,2\n"
    path.write_text(whole + "1,decode,1,1,1")
    with pytest.raises(ValueError, match=r"^precision of TRACE must be one of 2, 4, 6 in each sample, not 'None'$"):
        read_mix(path)
    path.write_text(whole)
    with pytest.raises(ValueError, match=r"^TRACE must have 2 layers in each step, not 1 in step 1$"):
        read_mix(path)


def test_points_of_sweeps():
    small = {"config": "smollm2-135m", "prompt": 64, "output": 4, "schedule": "array"}
    base, wide = point(small), point(small | {"columns": 32, "refinement": "inplace"})
    assert wide["seconds"] < base["seconds"]
    assert wide["area_ge"] > base["area_ge"]
    with pytest.raises(TypeError, match=r"^parameter must be one of config, datapath, .*, not 'colour'$"):
        point(small | {"colour": 1})


@pytest.mark.parametrize(("size", "measured"), [(2, 466287), (4, 817051), (8, 1961357)])
def test_areas_of_smaller_accelerators_are_those_measured(size, measured):
    # Hierarchical, post-processing included; the model's vector MAC is the flat one, 3 % smaller.
    logic = Hardware(AcceleratorConfig(rows=size, columns=size)).area(AUTOEMATIC)["logic"]
    assert logic == pytest.approx(measured, rel=0.02)
    three = Hardware(AcceleratorConfig(rows=size, columns=size), accelerators=3).area(AUTOEMATIC)
    one = Hardware(AcceleratorConfig(rows=size, columns=size)).area(AUTOEMATIC)
    assert three["logic"] == pytest.approx(3 * logic)
    assert three["memory"] == pytest.approx(3 * one["memory"])
