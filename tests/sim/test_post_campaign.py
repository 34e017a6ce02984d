"""The campaign of post-processed products: what it draws, that it notices what is wrong, and its command line."""

import dataclasses
import json

import numpy as np
import pytest

import model.post_output
import sim.post_campaign
from model.accelerator import ErrorCode, Mode
from sim.driver import Accelerator
from sim.post_campaign import CONFIGURATIONS, TOGETHER, Tally, main, run_queue
from sim.product import AcceleratorError
from sim.random_products import SMALL_MEMORY


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(memory=SMALL_MEMORY, **CONFIGURATIONS[0])


def test_queues_of_which_some_products_fail_are_those_of_the_model(accelerator, seed):
    total = Tally()
    for number in range(8):
        total.add(run_queue(accelerator, np.random.default_rng((seed, number)), TOGETHER))
    assert total.products == 8 * TOGETHER
    assert total.outputs > 5000
    failed = sum(total.codes.values())
    assert failed >= 10
    assert failed + sum(total.kinds.values()) == total.products
    assert {name.split("_")[0] for name in total.codes} >= {"READ", "WRITE", "POST"}
    assert {name.split()[0] for name in total.kinds} == {mode.name for mode in Mode}


def test_results_and_codes_that_are_not_the_models_are_noticed(accelerator, monkeypatch):
    right = model.post_output.process

    def wrong(*arguments, **named):
        made = right(*arguments, **named)
        return dataclasses.replace(made, status=made.status ^ 1)

    with monkeypatch.context() as patch:
        patch.setattr(model.post_output, "process", wrong)
        with pytest.raises(AcceleratorError, match=r"has status \d+, not \d+$"):
            run_queue(accelerator, np.random.default_rng(1), TOGETHER)
    drawn = sim.post_campaign.random_fault

    def other(*arguments):
        fault = drawn(*arguments)
        return None if fault is None else dataclasses.replace(fault, codes=frozenset({ErrorCode.RECORD_BEYOND}))

    monkeypatch.setattr(sim.post_campaign, "random_fault", other)
    with pytest.raises(AcceleratorError, match=r"^product \d+ \(.+\) ended with code \w+, not RECORD_BEYOND$"):  # noqa: PT012
        for number in range(4):
            run_queue(accelerator, np.random.default_rng(number), TOGETHER)


def test_the_command_prints_and_writes_what_was_run(tmp_path, capsys):
    file = tmp_path / "table.json"
    assert main(["25", "--seed", "3", "--configurations", "0", "--json", str(file)]) == 0
    table = json.loads(file.read_text())
    assert table["products"] == sum(table["codes"].values()) + sum(table["kinds"].values()) == 25
    assert f"25 products, {table['outputs']} outputs, all as the model says" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0"], "N must be at least 1, not 0"),
        (["5", "--seed", "-1"], "--seed must not be negative, not -1"),
        (["5", "--configurations", "4"], "--configurations must be from 0 to 3, not 4"),
        (["5", "--json", "/nowhere/x.json"], "--json must be in a folder that exists, not /nowhere/x.json"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_in_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"sim.post_campaign: {message}\n"
