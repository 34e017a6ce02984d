"""A recorded trace through descriptors of the accelerator: modes, activities and outputs, faults that are noticed, and the command line."""

import dataclasses
import json
import re

import numpy as np
import pytest

import sim.driver
import sim.replay
from model.accelerator import Mode
from model.policy import FixedPolicy
from model.policy_replay import read_trace
from sim.axi_memory import Timing
from sim.driver import Accelerator
from sim.product import AcceleratorError, Gemm, NumbersOf, Step
from sim.random_products import SMALL_MEMORY
from sim.replay import PARAMETERS, TRACE, Row, compare, main, planned, summary

STEPS, FEW = 25, 4
HEAD = "step,phase,layer,L_A,G_E\n"


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(memory=SMALL_MEMORY, **PARAMETERS)


def samples(steps):
    return [sample for sample in read_trace(TRACE) if sample.step < steps]


@pytest.fixture(scope="module")
def trace(accelerator):
    return planned(accelerator.config, samples(STEPS))


@pytest.fixture(scope="module")
def few(trace):
    """The first steps of the trace."""
    count = 30 * FEW
    steps = {place: step for place, step in trace.steps.items() if place < count}
    return dataclasses.replace(trace, samples=trace.samples[:count], products=trace.products[:count], steps=steps)


def run(accelerator, trace, **changes):
    return accelerator.run(trace.products, **{"step": trace.steps, **changes})


def test_layers_of_a_recorded_trace_run_in_the_modes_of_the_recorded_signals(accelerator, trace):
    rows, compared = compare(accelerator.config, trace, run(accelerator, trace))
    figures = summary(rows, compared)
    assert (figures["steps"], figures["decisions"], figures["different"]) == (STEPS, 30 * STEPS, 0)
    # Numbers of 30 layers and groups of 29, of 4 tokens and then of 1.
    assert compared == 59 * 32 * (4 + STEPS - 1)
    assert figures["samples"] == 29 * STEPS
    assert figures["same_integer"] > 0.8 * figures["samples"]
    assert figures["largest_difference_of_integers"] <= 8
    assert figures["largest_relative_difference"] < 2**-16
    prefill, decode = ([row for row in rows if row.phase == phase] for phase in ("prefill", "decode"))
    assert len(prefill) == 30
    for part in (prefill, decode):
        assert {row.mode for row in part} == {"AutoFP2", "NVFP4", "AutoFP6"}
    # The spike of layer 11 ends the prefill's 6 bits two layers below the mean later.
    assert np.argmax([row.activity for row in prefill[1:]]) == 10
    assert [row.precision for row in prefill[:15]] == [6] * 14 + [4]


def test_stalls_and_latency_change_nothing_but_cycles(accelerator, few, ran):
    slow, quick = (
        compare(accelerator.config, few, batch)[0] for batch in (run(accelerator, few, timing=Timing(7, 9, 60)), ran)
    )
    assert [dataclasses.replace(row, cycles=0) for row in quick] == [dataclasses.replace(row, cycles=0) for row in slow]
    assert all(one.cycles < other.cycles for one, other in zip(quick, slow, strict=True))


@pytest.fixture(scope="module")
def ran(accelerator, few):
    return run(accelerator, few)


def with_post(trace, place, **changes):
    product = trace.products[place]
    products = list(trace.products)
    products[place] = dataclasses.replace(product, post=dataclasses.replace(product.post, **changes))
    return dataclasses.replace(trace, products=products)


def with_step(trace, place, **changes):
    steps = {**trace.steps, place: dataclasses.replace(trace.steps[place], **changes)}
    return dataclasses.replace(trace, steps=steps)


WORDS = sim.driver._step_words

FAULTS = {
    "the first layer's activity is not given: all others have a wrong number": lambda t: with_post(
        t, 30, observe=False
    ),
    "the last layer's activity is not given": lambda t: with_post(t, 29 + 30, observe=False),
    "an entropy is that of another step": lambda t: with_step(t, 60, entropy=0.01),
    "a prefill is begun as decode": lambda t: with_step(t, 0, phase="decode", entropy=0.5),
    "a step is begun twice": lambda t: dataclasses.replace(t, steps={**t.steps, 75: t.steps[60]}),
    "a layer has the factor of another": lambda t: dataclasses.replace(
        t,
        products=[*t.products[:40], dataclasses.replace(t.products[40], scale=t.products[41].scale), *t.products[41:]],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_trace_in_hardware_are_noticed(name, accelerator, few):
    with pytest.raises(AcceleratorError, match=r"ran in mode|reports|outputs of \d+ differ"):
        compare(accelerator.config, few, run(accelerator, FAULTS[name](few)))


def other_words(name):
    """Return what writes the registers of a step in a wrong way."""

    def forgetful(step, first):
        return WORDS(step, True)

    def exchanged(step, first):
        config = dataclasses.replace(step.config, alpha=step.config.beta, beta=step.config.alpha)
        return WORDS(dataclasses.replace(step, config=config), first)

    def late(step, first):
        return WORDS(dataclasses.replace(step, config=dataclasses.replace(step.config, n_p=3)), first)

    return {"statistics are forgotten": forgetful, "alpha is beta": exchanged, "n_p is one more": late}[name]


@pytest.mark.parametrize("name", ["statistics are forgotten", "alpha is beta", "n_p is one more"])
def test_faults_of_the_policy_are_noticed(name, accelerator, few, monkeypatch):
    monkeypatch.setattr(sim.driver, "_step_words", other_words(name))
    batch = run(accelerator, few)
    with pytest.raises(AcceleratorError, match=r"ran in mode|reports|outputs of \d+ differ"):
        compare(accelerator.config, few, batch)


def test_decisions_that_are_not_those_of_the_recorded_signals_are_counted(accelerator, few, ran):
    higher = [
        dataclasses.replace(sample, activity=3 * sample.activity) if sample.layer % 7 == 5 else sample
        for sample in few.samples
    ]
    rows, compared = compare(accelerator.config, dataclasses.replace(few, samples=higher), ran)
    figures = summary(rows, compared)
    assert figures["different"] == sum(not row.same for row in rows) > 10
    assert figures["largest_difference_of_integers"] > 1000


@pytest.mark.parametrize("mode", Mode)
def test_factors_give_any_activity_to_the_resolution_of_the_unit(mode, accelerator, seed):
    config = accelerator.config
    policy = {Mode.AUTOFP2: (2,), Mode.NVFP4: (4,), Mode.AUTOFP6: (6,)}[mode]
    rng = np.random.default_rng(seed)
    lines = [(0, 0.0), *((layer, float(rng.lognormal(-1, 2))) for layer in range(1, 12))]
    given = [dataclasses.replace(samples(2)[31], layer=layer, activity=activity) for layer, activity in lines]
    seen = []

    class Watched(FixedPolicy):
        def observe_bits(self, layer, bits):
            seen.append(float(np.uint32(bits).view(np.float32)))
            return super().observe_bits(layer, bits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.replay, "FixedPolicy", Watched)
        made = planned(config, given, sim.replay.PolicyConfig(levels=policy, decode_level=policy[0]))
    assert seen == pytest.approx([activity for _, activity in lines], rel=2**-16, abs=2**-20)
    assert {product.mode for product in made.products} == {mode}


def test_steps_and_sources_that_make_no_sense_are_refused(accelerator, few):
    products = few.products[:2]
    plain = Gemm(products[0].a, products[0].w, Mode.NVFP4, "fp32")
    raw = dataclasses.replace(plain, out="raw")
    post = dataclasses.replace(products[1].post, residual=NumbersOf(0), previous=None, report=False, observe=False)
    second = Gemm(products[0].a, products[0].w, Mode.NVFP4, "fp32", 1.0, post=post, fence=True)
    other = dataclasses.replace(second, post=dataclasses.replace(post, residual=NumbersOf(1)))
    steps = {0: Step(), 1: Step(config=sim.replay.PolicyConfig(n_p=3))}
    for given, step, message in (
        ([plain, plain], {2: Step()}, "step must begin at one of the 2 products, not at 2"),
        ([plain, plain], steps, "config must be the same in all steps of a request, not another from product 1 on"),
        ([plain, other], None, "residual must be the numbers of an earlier product, not of 1"),
        (
            [plain, dataclasses.replace(second, fence=False)],
            None,
            "residual must be behind a fence if an earlier product writes it",
        ),
        ([raw, second], None, "residual must be FP32 numbers of shape (4, 32), which product 0 does not write"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            accelerator.run(given, step=step)
    image = accelerator.image()
    descriptor, output, _ = accelerator.place(image, plain)
    with pytest.raises(ValueError, match=r"^rounds must be 1 with several steps, not 2$"):
        accelerator.play(image, [descriptor] * 2, [output], 1000, rounds=2, step={0: Step(), 1: Step()})


def test_the_command_replays_a_trace_and_writes_its_table(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["--steps", "2", "--stalls", "20", "--json", str(out)]) == 0
    said, table = capsys.readouterr().out, json.loads(out.read_text())
    assert re.search(r"^decisions +60\ndifferent +0$", said, re.MULTILINE)
    assert (table["decisions"], table["different"], len(table["rows"])) == (60, 0, 60)
    assert list(table["rows"][0]) == [field.name for field in dataclasses.fields(Row)]


def test_the_command_fails_if_a_decision_is_another_one(monkeypatch):
    right = sim.replay.decide
    monkeypatch.setattr(
        sim.replay, "decide", lambda *a: [*right(*a)[:-1], dataclasses.replace(right(*a)[-1], precision=6)]
    )
    assert main(["--steps", "1"]) == 1


def test_the_command_fails_in_one_line_if_the_hardware_does(monkeypatch, capsys):
    monkeypatch.setattr(sim.driver, "_step_words", other_words("n_p is one more"))
    assert main(["--steps", "1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("sim.replay: product ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (HEAD + "0,prefill,0,1,\n", ["--steps", "0"], "--steps must be at least 1, not 0"),
        (
            HEAD + "0,prefill,0,1,\n",
            ["--json", "no/where.json"],
            "--json must be in a folder that exists, not no/where.json",
        ),
        (HEAD + "0,prefill,0,1,\n", ["--stalls", "256"], "stalls must be from 0 to 255, not 256 of ar"),
        (HEAD + "0,prefill,1,1,\n", [], "line 2: layer must be 0, not 1"),
        (
            HEAD + "0,prefill,0,1e15,\n",
            [],
            "L_A must leave numbers below 2^40, not 1000000000000000.0 in step 0, layer 0",
        ),
        (
            HEAD + "".join(f"{step},decode,0,1,0\n" for step in range(65536)),
            [],
            "TRACE must have at most 65535 layers for one queue, not 65536",
        ),
    ],
)
def test_wrong_arguments_give_one_line(text, options, message, tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    assert main(["--trace", str(path), *options]) == 2
    assert capsys.readouterr().err == f"sim.replay: {message}\n"


def test_a_trace_that_is_not_there_gives_one_line(tmp_path, capsys):
    assert main(["--trace", str(tmp_path / "none.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
