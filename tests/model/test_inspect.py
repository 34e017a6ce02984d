"""What is said of a package is what it holds; of a damaged one, one line."""

import json

import numpy as np
import pytest

from model.inspect import main, picture, report
from model.package import Package
from tests.packages import write_model


@pytest.fixture
def model(tmp_path, seed):
    return write_model(tmp_path / "p.safetensors", np.random.default_rng(seed), metadata={"rule": "nmse"})


def test_the_report_counts_what_is_there(tmp_path, model, capsys):
    path, matrices, plain = model
    assert main([str(path), "--json", str(tmp_path / "r.json"), "--picture", str(tmp_path / "r.svg")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["made"] == {"rule": "nmse"}
    assert found["matrices"].keys() == matrices.keys()
    assert found["plain"].keys() == plain.keys()
    for name, tensor in matrices.items():
        row = found["matrices"][name]
        n, k = len(tensor.base.codes), tensor.base.length
        scales = [[int(b) for b in tensor.base.scales[:, : k // 16].reshape(-1)].count(byte) for byte in range(127)]
        assert row["scales"] == scales
        assert sum(scales) == n * k // 16
        assert row["lowest_scale"] == int(tensor.base.scales[:, : k // 16].min())
        assert row["highest_scale"] == int(tensor.base.scales.max()) == 126
        assert sum(row["masks"]["groups_by_refined"]) == len(tensor.mask) // 4
        assert sum(row["masks"]["refined_by_position"]) == row["refined"] == int(tensor.mask.sum()) > 0
        assert row["share"] == pytest.approx(0.25)
    # All bytes of the file but the header are accounted for.
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert found["total"]["bytes"] + found["total"]["plain_bytes"] == path.stat().st_size - header
    text = capsys.readouterr().out
    assert text.count("\n") == 5 + len(matrices) + len(plain)
    assert text.endswith(" bytes of float32: all sound\n")
    drawn = (tmp_path / "r.svg").read_text()
    assert drawn == picture(report(Package(path)))
    for kind in ("qkv", "gate_up", "places of refined subgroups"):
        assert kind in drawn


def test_bits_of_a_weight_follow_the_formula(tmp_path, model):
    path, matrices, _ = model
    rows = report(Package(path))["matrices"]
    # N = 160, K = 48: padded to 64, a scale for 16, a quarter refined, one mask for all rows, T.
    bits = (64 * 4.5 + 16 / 4 * 8) / 48 + (2 * 8 + 32) / (160 * 48)
    assert rows["0.gate_up"]["bits_per_weight"] == pytest.approx(bits)
    assert len(rows) == len(matrices) == 8


@pytest.mark.parametrize("damage", ["flipped", "shorter", "empty", "absent"])
def test_a_damaged_package_is_one_line_and_no_file(tmp_path, model, capsys, damage):
    path = model[0]
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) - 7] ^= 4
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes({"flipped": flipped, "shorter": whole[:-1], "empty": b""}[damage])
    assert main([str(path), "--json", str(tmp_path / "r.json")]) == 1
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("model.inspect: ")
    assert not (tmp_path / "r.json").exists()
