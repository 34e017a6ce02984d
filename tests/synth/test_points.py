"""The engine of the sweeps: order, resuming after any interruption, clusters, failures, best trades."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from synth.points import SweepError, grid, named, pareto, run, sources
from tests.synth.sweep_points import counted, picky, square

ROOT = Path(__file__).resolve().parents[2]
POINTS = grid({"i": range(30)})


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "log"
    monkeypatch.setenv("LOG", str(path))
    path.touch()
    return path


def calls(log):
    return [tuple(map(int, line.split())) for line in log.read_text().splitlines()]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# Points


def test_grid_is_every_combination_in_order():
    assert grid({"a": [1, 2], "b": ["x", "y"]}) == [
        *({"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"})
    ]
    assert grid({}) == [{}]


@pytest.mark.parametrize(("values", "text"), [([], ""), ([3, 3], "3, 3")])
def test_an_axis_has_different_values(values, text):
    with pytest.raises(ValueError, match=rf"^axis lanes must have one or more different values, not {text}$"):
        grid({"lanes": values})


def test_functions_are_found_by_name():
    assert named("tests.synth.sweep_points:square") is square


@pytest.mark.parametrize("name", ["", "tests.synth.sweep_points", "tests.synth.sweep_points:none", "no.such:thing"])
def test_a_name_without_a_function_is_an_error(name):
    with pytest.raises(ValueError, match=rf"^function must be module:function, not '{name}': "):
        named(name)


# Runs


def test_rows_are_in_the_order_of_the_points_and_kept(tmp_path, log):
    progress = []
    rows = run(counted, POINTS[:4], tmp_path / "sweep", progress=lambda *counts: progress.append(counts))
    assert rows == [{"i": i, "square": i * i, "half": i / 2, "even": i % 2 == 0} for i in range(4)]
    assert progress == [(k, 0, 4) for k in range(5)]
    assert run(counted, POINTS[2:6], tmp_path / "sweep") == [
        {"i": i, "square": i * i, "half": i / 2, "even": i % 2 == 0} for i in range(2, 6)
    ]
    assert [i for i, _ in calls(log)] == list(range(6))


def test_kept_rows_are_for_the_same_function_and_context_only(tmp_path, log):
    run(counted, POINTS[:2], tmp_path, context=lambda point: {"version": 1})
    run(counted, POINTS[:2], tmp_path, context=lambda point: {"version": 1 + point["i"]})
    # Point 0 has the same context in both.
    assert [i for i, _ in calls(log)] == [0, 1, 1]
    assert run(square, grid({"i": [0, 1], "kind": ["a"]}), tmp_path)[1] == {
        **{"i": 1, "kind": "a", "square": 1, "name": "a 1"}
    }


def test_kept_rows_are_for_the_same_source_text_only(tmp_path, log, monkeypatch):
    run(counted, POINTS[:2], tmp_path)
    text = sources("tests.synth.sweep_points")
    monkeypatch.setattr("synth.points.sources", lambda module: f"{text} and more")
    run(counted, POINTS[:2], tmp_path)
    assert len(calls(log)) == 4


def test_a_worker_with_other_source_text_is_refused(tmp_path, log, monkeypatch):
    texts = iter(["here", "there"])
    monkeypatch.setattr("synth.points.sources", lambda module: next(texts))
    with pytest.raises(SweepError, match=r"^a worker must have the same source text as the command$"):
        run(counted, POINTS[:1], tmp_path)
    assert calls(log) == []


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_last_line_that_was_cut_is_done_again(cut, tmp_path, log):
    whole = run(counted, POINTS[:3], tmp_path)
    path = tmp_path / "points.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert run(counted, POINTS[:5], tmp_path)[:3] == whole
    # Without its line feed alone the line is whole.
    assert Counter(i for i, _ in calls(log)) == {0: 1, 1: 1, 2: 1 if cut == 1 else 2, 3: 1, 4: 1}
    assert run(counted, POINTS[:5], tmp_path)[:3] == whole
    assert len(calls(log)) == (5 if cut == 1 else 6)


def test_lines_that_are_no_points_are_left_alone(tmp_path, log):
    path = tmp_path / "points.jsonl"
    foreign = b'\xff\x00\n[]\n3\n{"key": [1], "row": {}}\n{"key": "x", "row": 2}\n'
    path.write_bytes(foreign)
    whole = run(counted, POINTS[:2], tmp_path)
    assert path.read_bytes().startswith(foreign)
    assert run(counted, POINTS[:2], tmp_path) == whole
    assert len(calls(log)) == 2


def test_a_killed_run_goes_on_where_it_was(tmp_path, log):
    def start(folder, **environment):
        command = [sys.executable, "-m", "tests.synth.sweep_points", str(folder), str(len(POINTS))]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)

    killed = start(tmp_path / "killed", SECONDS="0.2")
    kept = tmp_path / "killed/points.jsonl"
    deadline = time.monotonic() + 60
    while not kept.exists() or kept.read_bytes().count(b"\n") < 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=60)
    lines = kept.read_bytes().count(b"\n")
    assert 8 <= lines < len(POINTS)
    workers = {pid for _, pid in calls(log)}
    # The second may have been slow to start.
    assert len(workers) in (1, 2)
    while any(map(alive, workers)):
        assert time.monotonic() < deadline, "workers must end with the command"
        time.sleep(0.01)
    before = len(calls(log))
    resumed = run(counted, POINTS, tmp_path / "killed")
    assert len(calls(log)) - before == len(POINTS) - lines
    assert resumed == run(counted, POINTS, tmp_path / "whole")
    assert len(resumed) == len(POINTS) >= 24


def test_points_that_a_function_refuses_have_the_reason(tmp_path):
    points = grid({"i": [0, 1, 3]})
    assert run(picky, points, tmp_path) == [
        *({"i": 0, "square": 0}, {"i": 1, "refused": "i must not be 1"}, {"i": 3, "square": 9})
    ]


def test_other_failures_end_the_run_when_everything_else_is_done(tmp_path):
    points = grid({"i": [2, 0, 3]})
    with pytest.raises(SweepError, match=r"^1 of 3 points failed, first i=2: KeyError: 'two'$"):
        run(picky, points, tmp_path)
    kept = [json.loads(line)["row"] for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    assert kept == [{"i": 0, "square": 0}, {"i": 3, "square": 9}]


@pytest.mark.parametrize(
    ("points", "jobs", "message"),
    [(POINTS[:1] * 2, 1, "points must differ from each other"), (POINTS, 0, "jobs must be positive, not 0")],
)
def test_wrong_arguments(points, jobs, message, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}$"):
        run(counted, points, tmp_path, jobs=jobs)


# Clusters


@pytest.mark.filterwarnings("default")
def test_a_cluster_gives_the_same_rows(tmp_path, log):
    distributed = pytest.importorskip("distributed")
    points = grid({"i": range(12), "kind": ["a", "b"]})
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        rows = run(square, points, tmp_path / "cluster", scheduler=cluster.scheduler_address)
        run(counted, POINTS, tmp_path / "cluster", scheduler=cluster.scheduler_address)
    assert len(rows) == 24
    assert rows == run(square, points, tmp_path / "here")
    assert sorted(i for i, _ in calls(log)) == list(range(30))
    assert os.getpid() not in {pid for _, pid in calls(log)}


@pytest.mark.filterwarnings("default")
def test_a_scheduler_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("synth.points._CONNECT", "0.2s")
    with pytest.raises(
        SweepError, match=r"^scheduler must be the address of a Dask scheduler, not 'tcp://127.0.0.1:9': [^\n]*$"
    ):
        run(counted, POINTS, tmp_path, scheduler="tcp://127.0.0.1:9")


# Best trades

TRADES = [
    {"area": 3, "error": 1.0},
    {"area": 1, "error": 3.0},
    {"area": 2, "error": 3.0},
    {"area": 2, "error": 2.0},
    {"area": 4, "error": 1.0},
    {"area": 2, "error": 2.0},
    {"area": 5, "error": None},
    {"refused": "no"},
]


def test_front_is_what_nothing_beats():
    assert pareto(TRADES, "area", "error") == [TRADES[1], TRADES[3], TRADES[5], TRADES[0]]


def test_front_with_larger_better():
    rows = [{"area": a, "speed": s} for a, s in ((1, 1), (2, 3), (3, 2), (4, 4))]
    assert pareto(rows, "area", "speed", ["speed"]) == [rows[0], rows[1], rows[3]]
    assert pareto(rows, "speed", "area", ["speed"]) == [rows[0], rows[1], rows[3]]
