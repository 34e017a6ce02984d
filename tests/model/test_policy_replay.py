"""Replay: both forms of a trace, both of the table, the picture, and bad input of every kind."""

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import model.policy_replay
from model.policy import FixedPolicy, Policy
from model.policy_replay import main, picture, read_trace, replay

TRACE = Path(__file__).parents[1] / "data/policy_smollm2.csv"
HEAD = "step,phase,layer,L_A,G_E\n"
PREFILL = [9, 0.25, 0.75, 0.25, 0.75, 2, 0.1, 0.1, 0.1, 0.1]
DECODE = [9, 0.25, 0.75, 0.25, 0.75, 2.0, 3.0, 0.5]


def lines(steps=(("prefill", "", PREFILL), ("decode", "0.5", DECODE), ("decode", "0.05", DECODE))):
    return HEAD + "".join(
        f"{step},{phase},{layer},{x},{entropy}\n"
        for step, (phase, entropy, numbers) in enumerate(steps)
        for layer, x in enumerate(numbers)
    )


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(lines())
    return path


def as_json(path, wrapped=False):
    samples = []
    for row in csv.DictReader(io.StringIO(lines())):
        entropy = float(row["G_E"]) if row["G_E"] else None
        whole = {name: int(row[name]) for name in ("step", "layer")}
        samples.append({**whole, "phase": row["phase"], "L_A": float(row["L_A"]), "G_E": entropy, "more": [1]})
    path.write_text(json.dumps({"samples": samples} if wrapped else samples))
    return path


def test_table_on_the_screen(trace, capsys):
    assert main([str(trace)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(row["precision"]) for row in rows if row["step"] == "0"] == [6] * 8 + [4, 4]
    assert [int(row["precision"]) for row in rows if row["step"] == "1"] == [4] * 7 + [6]
    assert [row["metric"] for row in rows[:2]] == ["", "0.25"]
    assert float(rows[12]["metric"]) == pytest.approx(0.7 * 0.75 + 0.3 * 0.5)
    assert (rows[13]["mean"], rows[11]["mean"], rows[11]["sigma"]) == (rows[13]["mean"], "", "")
    assert list(rows[0]) == ["step", "phase", "layer", "L_A", "G_E", "metric", "mean", "sigma", "precision"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_json_gives_the_same_samples_as_csv(trace, tmp_path, wrapped):
    assert read_trace(as_json(tmp_path / "trace.json", wrapped)) == read_trace(trace)


def test_other_columns_byte_order_marks_and_line_ends_do_not_matter(trace, tmp_path):
    other = tmp_path / "other.csv"
    text = "".join(f"x,{line}\r\n" for line in trace.read_text().splitlines())
    other.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_trace(other) == read_trace(trace)


def test_packed_traces_are_read_as_they_are(trace, tmp_path, capsys):
    for path in (trace, as_json(tmp_path / "trace.json", True)):
        packed = tmp_path / f"{path.name}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert read_trace(packed) == read_trace(trace)
    for octets in (packed.read_bytes()[:-9], trace.read_bytes(), packed.read_bytes()[:40] + bytes(9)):
        packed.write_bytes(octets)
        assert main([str(packed)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("model.policy: TRACE must be what gzip packed if its name ends in .gz: ")
        assert said.count("\n") == 1


def test_files_are_the_same_table_in_both_forms_with_a_picture_beside(trace, tmp_path, capsys):
    for name, *more in (("out.csv", "--no-picture"), ("out.json",)):
        assert main([str(trace), "-o", str(tmp_path / name), "--levels", "2,4,6,8", "--fixed", *more]) == 0
    said = capsys.readouterr().out
    assert "decode: 16 layers, 2 bits 31.2%, 4 bits 62.5%, 6 bits 6.2%, mean 3.50 bits" in said
    assert said.endswith(f"wrote {tmp_path / 'out.json'}, {tmp_path / 'out.svg'}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"trace.csv", "out.csv", "out.json", "out.svg"}
    data = json.loads((tmp_path / "out.json").read_text())
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert [[str("" if x is None else x) for x in sample.values()] for sample in data["samples"]] == [
        list(row.values()) for row in rows
    ]
    assert data["config"]["levels"] == [2, 4, 6, 8]
    assert data["format"]["fraction_bits"] == 20
    assert max(sample["precision"] for sample in data["samples"]) == 8
    svg = (tmp_path / "out.svg").read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "precision in bits: decode, steps 1 to 2" in svg
    for text in (svg, (tmp_path / "out.json").read_text(), (tmp_path / "out.csv").read_text()):
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        assert "\r" not in text
    # An output is a trace as well.
    assert read_trace(tmp_path / "out.json") == read_trace(tmp_path / "out.csv") == read_trace(trace)


def test_picture_is_the_same_every_time_and_holds_every_kind_of_step(tmp_path, monkeypatch):
    monkeypatch.setattr(model.policy_replay, "PARTS", 3)
    path = tmp_path / "trace.csv"
    path.write_text(
        lines(
            [("decode", "0.5", DECODE), ("prefill", "", [1.0]), *[("decode", "1", [1])] * 2, ("prefill", "", PREFILL)]
        )
    )
    rows = replay(read_trace(path), Policy())
    one = picture(rows, (2, 4, 6))
    assert one == picture(rows, (2, 4, 6))
    assert all(word in one for word in ("decode, step 0", "prefill, step 1", "decode, steps 2 to 3"))
    assert "prefill, step 4" not in one


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (["--prefill-level", "4"], "4"),
        (["--decode-level", "2"], "6"),
        (["--first-samples", "1", "--sigma-factor", "0.5", "--n-p", "1"], "6"),
    ],
)
def test_parameters_are_honoured(trace, capsys, options, first):
    assert main([str(trace)]) == 0
    usual = capsys.readouterr().out
    assert main([str(trace), *options]) == 0
    changed = capsys.readouterr().out
    assert changed != usual
    assert changed.splitlines()[1].rpartition(",")[2] == first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "TRACE must have the columns step, phase, layer, L_A, G_E, and lacks step, phase, layer, L_A, G_E"),
        (HEAD, "TRACE must have at least one sample"),
        ("step,phase,layer,L_A\n", "TRACE must have the columns step, phase, layer, L_A, G_E, and lacks G_E"),
        (HEAD + "0,prefill,0,nan,\n", "line 2: L_A must be a finite number from 0 on, not 'nan'"),
        (HEAD + "0,prefill,0,inf,\n", "line 2: L_A must be a finite number from 0 on, not 'inf'"),
        (HEAD + "0,prefill,0,-1,\n", "line 2: L_A must be a finite number from 0 on, not '-1'"),
        (HEAD + "0,prefill,0,1e39,\n", "line 2: L_A must be a finite number from 0 on, not '1e39'"),
        (HEAD + "0,prefill,0,1_0,\n", "line 2: L_A must be a finite number from 0 on, not '1_0'"),
        (HEAD + "0,prefill,0,,\n", "line 2: L_A must be a finite number from 0 on, not ''"),
        (HEAD + "0,prefill\n", "line 2: there must be a value of layer"),
        (HEAD + "0,train,0,1,\n", "line 2: phase must be one of prefill, decode, not 'train'"),
        (HEAD + "0,prefill,1,1,\n", "line 2: layer must be 0, not 1"),
        (HEAD + "0,prefill,0,1,\n0,prefill,2,1,\n", "line 3: layer must be 1, not 2"),
        (HEAD + "0.5,prefill,0,1,\n", "line 2: step must be an integer from 0 on, not '0.5'"),
        (HEAD + "0,prefill,-1,1,\n", "line 2: layer must be an integer from 0 on, not '-1'"),
        (HEAD + "0,decode,0,1,\n", "line 2: G_E must be a number from 0 to 1 in decode, not ''"),
        (HEAD + "0,decode,0,1,1.01\n", "line 2: G_E must be a number from 0 to 1 in decode, not '1.01'"),
        (
            HEAD + "0,decode,0,1,0.5\n0,decode,1,1,0.6\n",
            "line 3: phase and G_E must be the same throughout a step",
        ),
        (HEAD + "0,prefill,0,1,\n1,prefill,0,1,\n0,prefill,0,1,\n", "line 4: the lines of step 0 must stand together"),
    ],
)
def test_bad_traces_give_one_clear_line_and_no_file(tmp_path, capsys, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    assert main([str(path), "-o", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err == f"model.policy: {message}\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "TRACE must be a list of objects, or an object with such a list as samples"),
        ("[1]", "TRACE must be a list of objects, or an object with such a list as samples"),
        ("[", "TRACE must be CSV or JSON in UTF-8: Expecting value: line 1 column 2 (char 1)"),
        ("[" * 100_000, "TRACE must be CSV or JSON in UTF-8: maximum recursion depth exceeded"),
        ("[{}]", "sample 0: there must be a value of step"),
        (
            '[{"step": 0, "phase": "prefill", "layer": 0, "L_A": NaN, "G_E": null}]',
            "sample 0: L_A must be a finite number from 0 on, not nan",
        ),
        (
            '[{"step": true, "phase": "prefill", "layer": 0, "L_A": 1, "G_E": null}]',
            "sample 0: step must be an integer from 0 on, not True",
        ),
        (
            f'[{{"step": 0, "phase": "prefill", "layer": 0, "L_A": 1{"0" * 400}, "G_E": null}}]',
            "sample 0: L_A must be a finite number from 0 on, not 1000",
        ),
        (
            '[{"step": 0, "phase": ["prefill"], "layer": 0, "L_A": 1, "G_E": null}]',
            "sample 0: phase must be one of prefill, decode, not ['prefill']",
        ),
    ],
)
def test_bad_json_gives_one_clear_line(tmp_path, capsys, text, message):
    path = tmp_path / "trace.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"model.policy: {message}")
    assert said.count("\n") == 1


def test_files_that_cannot_be_read_or_written(trace, tmp_path, capsys):
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    folder = tmp_path / "folder.csv"
    folder.mkdir()
    cases = [
        ([str(tmp_path / "absent.csv")], "No such file"),
        ([str(binary)], "TRACE must be CSV or JSON in UTF-8"),
        ([str(folder)], "Is a directory"),
        ([str(trace), "-o", str(tmp_path / "out.txt")], "--output must end in .csv or .json, not"),
        ([str(trace), "-o", str(tmp_path / "absent/out.csv")], "--output must lie in an existing folder, not"),
        ([str(trace), "-o", str(trace)], "--output must be another file than TRACE, not"),
        ([str(trace), "-o", str(folder)], "--output must name a file, not the folder"),
        ([str(trace), "--levels", "4,2"], "levels must be positive and ascending, not 4, 2"),
        ([str(trace), "--levels", "4;6"], "levels must be integers with commas between, not '4;6'"),
        ([str(trace), "--fixed", "--band", "0.3"], "band must be a multiple of 1/8"),
    ]
    there = sorted(tmp_path.iterdir())
    for arguments, message in cases:
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == there


def test_without_matplotlib_a_picture_is_refused_and_nothing_written(trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out.csv"
    assert main([str(trace), "-o", str(out)]) == 2
    assert "pip install matplotlib, or --no-picture" in capsys.readouterr().err
    assert not out.exists()
    assert main([str(trace), "-o", str(out), "--no-picture"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "trace.csv"]


def test_nothing_is_replaced_if_the_second_file_cannot_be_written(trace, tmp_path, capsys):
    out = tmp_path / "out.csv"
    out.write_text("before")
    (tmp_path / "out.svg").mkdir()
    assert main([str(trace), "-o", str(out)]) == 2
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.svg", "trace.csv"]


@pytest.mark.parametrize("kind", [Policy, FixedPolicy])
def test_recorded_trace_uses_every_level_in_both_phases(kind):
    rows = replay(read_trace(TRACE), kind())
    for phase in ("prefill", "decode"):
        assert {row.precision for row in rows if row.sample.phase == phase} == {2, 4, 6}
