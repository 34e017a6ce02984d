"""The command: tables, JSON, pictures, bad input; the paper's figures."""

import json
import sys
from xml.etree import ElementTree

import pytest

import model.perf.paper
from model.perf.__main__ import main
from model.perf.paper import FIGURE_13, FIGURE_15, figures
from synth.sweep import main as sweep

SMALL = ["smollm2-135m", "--prompt", "64", "--output-tokens", "4"]


def test_a_request_in_table_json_and_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main([*SMALL, "-o", str(tmp_path / "a"), "--rows", "8", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert "AutoEMatic" in out
    assert "times NVFP4-only's speed" in out
    found = json.loads((tmp_path / "a/estimate.json").read_text())
    assert [row["datapath"] for row in found["rows"]] == [
        "AutoEMatic",
        "NVFP4-only",
        "AutoFP2-only",
        "AutoFP6 in every layer",
    ]
    assert found["settings"]["rows"] == 8
    assert found["settings"]["batch"] == 2
    assert found["settings"]["clock_mhz"] == 1000
    assert found["dimensions"]["layers"] == 30
    assert found["weights"] == {"all": 134479872, "token": 134479872}
    assert [row["speed"] for row in found["rows"]] == [
        found["rows"][1]["seconds"] / row["seconds"] for row in found["rows"]
    ]
    assert found["rows"][1]["seconds"] > found["rows"][0]["seconds"] > 0
    assert set(found["rows"][0]["phases"]["decode"]) == {"qkv", "scores", "values", "o", "gate_up", "down", "head"}
    assert main([*SMALL, "-o", str(tmp_path / "b"), "--rows", "8", "--batch", "2"]) == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["energy.svg", "estimate.json", "latency.svg", "roofline.svg", "timeline.svg"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert ElementTree.parse(tmp_path / "a/timeline.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere"],
            "CONFIG must be a config.json or one of llama-3-70b, minimax-m2, qwen3-8b, smollm2-135m, not 'nowhere'",
        ),
        (
            [*SMALL, "--shares", "1/2/3"],
            "shares must be three percentages that sum up to 100, as 15/45/40, not '1/2/3'",
        ),
        ([*SMALL, "--rows", "0"], "rows must be at least 1, not 0"),
        (
            ["smollm2-135m", "--prompt", "130000", "--datapaths", "nvfp4"],
            "K of values must be at most 131072 for these banks, not 260096, 2 times the product's: NVFP4-only",
        ),
        (
            ["smollm2-135m", "--prompt", "200000", "--schedule", "array"],
            "K of values must be at most 131072 for these banks, not 200000: AutoEMatic",
        ),
        ([*SMALL, "--overlap"], "overlap must be False with schedule rtl, which overlaps as the hardware does"),
        ([*SMALL, "--schedule", "array", "--data-width", "64"], "--data-width must be left out with schedule array"),
        (["paper", "--prompt", "0"], "--prompt must be left out with paper"),
        ([*SMALL, "--timeline", "4"], "--timeline must be left out with no pictures"),
        ([*SMALL, "--output-tokens", "0"], "output tokens must be from 1 to 1048576, not 0"),
        (
            ["smollm2-135m", "--prompt", "70000", "--datapaths", "autoematic", "nvfp4"],
            "K of values must be at most 131072 for these banks, not 140032, 2 times the product's: NVFP4-only",
        ),
        (["calibration", "--schedule", "rtl"], "--schedule must be left out with calibration"),
        (
            [*SMALL, "--trace", "x", "--shares", "0/100/0"],
            "--shares must be left out with a trace, which has its shares",
        ),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert main([*arguments, "--no-picture"]) == 2
    captured = capsys.readouterr()
    assert captured.err.strip().startswith("model.perf: ")
    assert len(captured.err.splitlines()) == 1
    if "rows" not in message:
        assert captured.err == f"model.perf: {message}\n"


def test_what_cannot_be_written_is_said_before_the_work(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("model.perf.__main__.estimate", lambda *_: pytest.fail("worked before it looked"))
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "estimate.json").mkdir(parents=True)
    for folder, message in (
        ("file", f"output must be in a folder, which {tmp_path}/file cannot be"),
        ("taken", f"output must be a file, not the folder {tmp_path}/taken/estimate.json"),
    ):
        assert main([*SMALL, "-o", str(tmp_path / folder)]) == 2
        assert capsys.readouterr().err == f"model.perf: {message}\n"
    # A module that is None is missing.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*SMALL, "-o", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == "model.perf: pictures need the package matplotlib: pip install matplotlib\n"
    assert list((tmp_path / "new").iterdir()) == []


def test_an_interrupted_request_leaves_nothing(monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("model.perf.__main__.estimate", interrupted)
    assert main([*SMALL, "-o", str(tmp_path / "new"), "--no-picture"]) == 130
    assert capsys.readouterr().err == "model.perf: interrupted, nothing was written\n"
    assert list((tmp_path / "new").iterdir()) == []


def test_the_papers_figures_stand_beside_ours(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(model.perf.paper, "OUTPUT", 64)
    monkeypatch.setattr(model.perf.paper, "PROMPT", 1024)
    model.perf.paper._run.cache_clear()
    assert main(["paper", "-o", str(tmp_path)]) == 0
    model.perf.paper._run.cache_clear()
    assert "figure 33:" in capsys.readouterr().out
    found = json.loads((tmp_path / "estimate.json").read_text())
    rows = {name: {row["what"]: row for row in table} for name, table in found["tables"].items()}
    assert len(rows["figure 13"]) == 36
    assert len(rows["figure 15"]) == 8 * len(FIGURE_15)
    for model_name, title in (("llama-3-70b", "DS-Llama-70B"), ("qwen3-8b", "Qwen3-8B")):
        for batch, paper in FIGURE_13[model_name].items():
            assert rows["figure 13"][f"{title}, batch {batch}: latency"]["paper"] == paper["latency"]
    for mix in ("15/45/40", "0/60/40", "0/100/0", "20/80/0"):
        energy = rows["figure 15"][f"{mix}, batch 8: energy of busy vector MACs"]
        assert energy["ours"] == pytest.approx(energy["paper"], abs=0.08)
    same = rows["figure 15"]["0/100/0, batch 1: performance by the paper's area"]
    assert same["ours"] == pytest.approx(1 / 1.011, abs=1e-4)
    # With the same work there is no more speed than the mix allows.
    for batch in (1, 8):
        assert 1 < rows["figure 33"][f"MiniMax-M2.7, batch {batch}: prefill, times faster"]["ours"] < 1 / 0.85
    assert (tmp_path / "figure-13.svg").exists()
    assert all(text.partition(":")[0] for text in found["explanations"])


def test_explanations_have_their_numbers(monkeypatch):
    monkeypatch.setattr(model.perf.paper, "_figure_13", lambda _: [])
    monkeypatch.setattr(model.perf.paper, "_figure_15", lambda _: [])
    monkeypatch.setattr(model.perf.paper, "_figure_33", lambda _: [])
    monkeypatch.setattr(model.perf.paper, "_density", lambda _: [])
    text = " ".join(figures()["explanations"])
    for number in ("1.51", "1.29", "2.27", "3.8 times", "1.18"):
        assert number in text


def test_a_sweep_runs_through_the_engine_of_synthesis(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    vary = ["config=smollm2-135m", "prompt=64", "output=4", "columns=4,8", "datapath=autoematic,nvfp4"]
    arguments = [
        "--function",
        "model.perf.sweep:point",
        "--vary",
        *vary,
        "--pareto",
        "area_ge",
        "seconds",
        "--by",
        "datapath",
    ]
    assert sweep([*arguments, "--jobs", "1", "--format", "json", "--quiet", "-o", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("4 points, 0 refused")
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert rows[0]["seconds"] > rows[2]["seconds"] > 0
    # The key says what was varied, not what came out.
    assert (
        "1  8, autoematic" in (tmp_path / "pareto.svg").read_text()
        or "1  4, autoematic" in (tmp_path / "pareto.svg").read_text()
    )
