"""The regression's command line, and campaigns that can be interrupted."""

import json
import math

import pytest

from sim import regress as command
from sim.regress import CASES, campaign, main, regress


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Builds stay shared; campaigns and reports go elsewhere."""
    monkeypatch.setattr(command, "build_root", lambda: tmp_path)
    return tmp_path


def test_campaign_continues_where_it_stopped(own_cache, seed, capsys):
    case = CASES["vmac_nvfp4"]
    first = campaign(case, 4000, seed, jobs=1, chunk=2000)
    assert first.faults == []
    journal = next((own_cache / "campaign").glob("*.jsonl"))
    lines = journal.read_text().splitlines()
    done = first.tally.total
    assert done >= 4000
    # As if it had been killed while writing.
    journal.write_text("\n".join(lines) + '\n{"chunk": 9')
    capsys.readouterr()
    again = campaign(case, 4000, seed, jobs=1, chunk=2000)
    assert again.tally.total == done
    assert f"{done} vectors are done already" in capsys.readouterr().out


def test_campaign_chunks_differ_and_do_not_depend_on_the_number_of_processes(own_cache, seed):
    case = CASES["vmac_nvfp4"]
    campaign(case, 4000, seed, jobs=2, chunk=1000, quiet=True)
    entries = [json.loads(line) for line in next((own_cache / "campaign").glob("*.jsonl")).read_text().splitlines()]
    by_chunk = {entry["chunk"]: entry["tally"]["nonzero"] for entry in entries}
    # The last chunk of the other process may be unfinished when there are enough.
    assert len(by_chunk) == len(entries)
    assert set(by_chunk) <= set(range(len(by_chunk) + 1))
    assert len(set(by_chunk.values())) > 1


def test_report_says_what_was_asked_and_what_was_missing(seed):
    report = regress(CASES["vmac_nvfp4"], vectors=300, seed=seed)
    assert report.faults == []
    data = report.as_json()
    assert data["compared"] == data["expected"]
    assert data["seed"] == seed
    assert data["simulator"].startswith("verilator")
    assert data["coverage"]["operands"]["bins"] == 32 * 16 * 16
    # With as many vectors as the case declares, the missing bins would be a fault.
    report.vectors = math.inf
    assert any("fewer than inf vectors" in fault for fault in report.faults)
    assert any("coverage is" in fault for fault in report.faults)


def test_command_line(own_cache, capsys, monkeypatch):
    monkeypatch.delenv("SEED", raising=False)
    target = own_cache / "report.json"
    assert main(["vmac_nvfp4", "weight_encoder-pair", "--vectors", "300", "--seed", "4", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "SEED=4" in out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("pass")] == [
        "vmac_nvfp4",
        "weight_encoder-pair",
    ]
    reports = json.loads(target.read_text())
    assert [report["case"] for report in reports] == ["vmac_nvfp4", "weight_encoder-pair"]
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CASES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "CASE must be one of vmac-slots"),
        (["--vectors", "0"], "--vectors must be positive, not 0"),
        (["--jobs", "0"], "--jobs must be positive, not 0"),
        (["--simulator", "ghdl"], "simulator must be one of verilator, icarus, not 'ghdl'"),
        (["--campaign", "--simulator", "icarus"], "--campaign runs on verilator, not icarus"),
        (["--campaign", "--waves"], "--campaign records no waveforms: leave --waves and WAVES out"),
        (["--seed", "-1"], "--seed must be a non-negative integer, not -1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("sim.regress: ")
    assert message in error
    assert error.count("\n") == 1


def test_report_that_cannot_be_written_is_refused_before_the_work(own_cache, capsys):
    own_cache.joinpath("file").touch()
    assert main(["vmac_nvfp4", "--json", str(own_cache / "file" / "x.json")]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("sim.regress: --json must be a file in a folder that can be made, not ")
    assert main(["vmac_nvfp4", "--json", str(own_cache)]) == 2
    assert "SEED" not in shown.out + capsys.readouterr().out
