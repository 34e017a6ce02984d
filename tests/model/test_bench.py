"""The speed command on small inputs; speeds themselves are not judged here."""

import json

import pytest

from model import bench

SMALL = ["--size", "64", "--vectors", "100", "--repeats", "1"]


def test_command_prints_a_table_and_json(capsys):
    code = bench.main(SMALL)
    table, text = capsys.readouterr().out.split("\n{", 1)
    report = json.loads("{" + text)
    assert code == (0 if report["met"] else 1)
    assert report["met"] == (report["ratio"] >= bench.GOAL)
    for speed in report["speeds"]:
        assert speed["name"] in table
        assert speed["per_second"] == pytest.approx(speed["count"] / speed["seconds"])
    by_name = {speed["name"]: speed for speed in report["speeds"]}
    assert by_name["NVFP4"]["count"] == 64 * 64
    assert by_name["vMAC, 32 lanes, modes mixed"]["count"] == 100
    assert report["ratio"] == by_name["NVFP4, then AutoFP6 of every subgroup"]["ratio"]


def test_json_goes_to_a_file_and_ends_in_one_newline(tmp_path, capsys):
    bench.main([*SMALL, "--json", str(tmp_path / "speed.json")])
    content = (tmp_path / "speed.json").read_text()
    assert content.endswith("}\n")
    assert json.loads(content)["size"] == 64
    assert "{" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["size", "vectors", "repeats"])
def test_bad_number_is_named(name, capsys):
    assert bench.main([f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"model.bench: {name} must be positive, not 0\n"
