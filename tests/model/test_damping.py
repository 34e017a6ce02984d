"""Errors over damping, against the parts that they are made of."""

import json

import numpy as np
import pytest

from model import autofp6, block_scaled, checkpoint, damping, llm
from model.calibration import Options, calibrate, gram, loss
from model.damping import main, ratios
from tests.model.test_quantize import texts, tiny


def test_ratios_are_those_of_the_whole_model(seed):
    rng = np.random.default_rng(seed)
    source, chosen = tiny(rng), texts(rng)
    model = llm.Llama(source.config, source.weights, None)
    wanted = [(1, "o"), (1, "down")]
    seen, held = (llm.capture_inputs(model, part, wanted) for part in (chosen.calibration[:16], chosen.evaluation))
    found = ratios(source, [1], [0.01, 10.0], damping.Texts(chosen.calibration[:16], chosen.evaluation))
    assert [(row.name, row.damping) for row in found[::2]] == [
        (f"1.{n}", 0.01) for n in ("qkv", "o", "gate_up", "down")
    ]
    compared = 0
    for row in found:
        name = row.name.partition(".")[2]
        if (1, name) in wanted:
            w, h = source.weights[row.name], gram(held[1, name])
            made = autofp6.dequantize(calibrate(w, Options(damping=row.damping), gram(seen[1, name])).weights)
            plain = block_scaled.dequantize(block_scaled.quantize(w))
            np.testing.assert_allclose(row.ratio, loss(w - made, h) / loss(w - plain, h), rtol=1e-4)
            compared += 1
    assert compared == 4


def test_the_command_prints_a_line_for_each_damping(seed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "open", lambda path: tiny(np.random.default_rng(seed)))
    monkeypatch.setattr(damping, "read_texts", lambda source, options: texts(np.random.default_rng(seed)))
    names = ["--json", str(tmp_path / "j"), "--quiet", "--damping", "0.1", "1", "--layers"]
    assert main([*names, "0"]) == 0
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    lines = capsys.readouterr().out.splitlines()
    for line, value in zip(lines[1:3], (0.1, 1.0), strict=True):
        mean = np.mean([row["ratio"] for row in rows if row["damping"] == value])
        assert line.split()[:2] == [f"{value:g}", f"{mean:.3f}"]
    assert main([*names, "2"]) == 2
    assert capsys.readouterr().err == "model.damping: --layers must be from 0 to 1, not 2\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1"], "--tokens must be at least 2, not 1"),
        (["--json", "."], "output must be a file, not the folder ."),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"model.damping: {message}\n"
