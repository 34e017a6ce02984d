"""Hand-off to OpenSTA: activity of every pin, and how its answer is read."""

import os
import re

import numpy as np
import pytest

from synth.liberty_tree import cell_groups
from synth.netlist import FlatNetlist, Instance
from synth.power import Waveforms
from synth.saif import PowerToolError, find_opensta, hand_off, opensta_power, saif
from tests.synth.test_power import TEXT

CYCLES = 128


@pytest.fixture
def run():
    """An inverter of one of two inputs, and its waveforms."""
    ports = {"clk": ("input", [2]), "a": ("input", [3, 4]), "y": ("output", [5])}
    netlist = FlatNetlist("top", ports, [Instance("u0", "INV", {"A": 4, "Y": 5}, "")], cell_groups(TEXT, ["INV"]))
    a = np.random.default_rng(1).integers(0, 2, CYCLES + 1).astype(np.uint64)
    # Nets 2 to 5, a bit each.
    return netlist, Waveforms.of(netlist, {"probe0": a << np.uint64(2) | (1 - a) << np.uint64(3)}, 1, CYCLES), a


def test_durations_and_toggles_are_those_of_the_waveforms(run):
    netlist, waves, a = run
    text = saif(netlist, waves, 500)
    found = {
        name: tuple(map(int, rest))
        for name, *rest in re.findall(r"\(([\w\\\[\]]+) \(T0 (\d+)\) \(T1 (\d+)\) .*?\(TC (\d+)\)", text)
    }
    whole, high, changes = 500 * CYCLES, 500 * int(a[1:].sum()), int((a[1:] != a[:-1]).sum())
    assert changes > 20
    assert found == {
        "clk": (whole // 2, whole // 2, 2 * CYCLES),
        r"a\[0\]": (whole, 0, 0),
        r"a\[1\]": (whole - high, high, changes),
        "y": (high, whole - high, changes),
        "A": (whole - high, high, changes),
        "Y": (high, whole - high, changes),
    }
    assert f"(DURATION {whole})" in text
    assert text.count("(") == text.count(")")
    assert "(INSTANCE top" in text
    assert "(INSTANCE u0 (NET (A " in text


def stand_in(folder, version, report, status=0):
    """A program in place of OpenSTA that checks that the files of the script are there."""
    folder.mkdir(exist_ok=True)
    tool = folder / "sta"
    lines = ["#!/bin/sh", f'[ "$1" = -version ] && echo {version} && exit 0']
    lines += ["for file in cells.lib top.v run.saif; do grep -q $file $3 || exit 9; [ -s $file ] || exit 9; done"]
    tool.write_text("\n".join([*lines, f"cat <<'END'\n{report}\nEND", f"exit {status}", ""]))
    tool.chmod(0o755)
    return tool


REPORT = """\
Group                  Internal  Switching    Leakage      Total
                          Power      Power      Power      Power (Watts)
Sequential             1.00e-03   1.00e-03   1.00e-06   2.00e-03  50.0%
Total                  2.00e-03   1.50e-03   2.00e-06   3.50e-03 100.0%"""


def test_only_versions_that_read_saif_are_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_opensta() is None
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    for version, asked in (("2.0.17", False), ("3.1.0", True), ("10.0", True)):
        tool = stand_in(tmp_path, version, REPORT)
        assert find_opensta() == (str(tool) if asked else None)


def test_the_total_is_read_and_failures_are_told(run, tmp_path):
    netlist, waves, _ = run
    (script,) = hand_off(tmp_path / "out", netlist, TEXT, {"run": waves}, 2000.0)
    assert "create_clock -name clk -period 500 " in script.read_text()
    assert "read_saif -scope top run.saif" in script.read_text()
    assert opensta_power(str(stand_in(tmp_path, "3.1.0", REPORT)), script) == 3.5e-3
    for report, status, reason in (
        ("Error: run.tcl, 4 no such cell", 0, "Error: run.tcl, 4 no such cell"),
        (REPORT, 1, "no total, status 1"),
        ("Total", 0, "no total, status 0"),
    ):
        with pytest.raises(PowerToolError, match=reason):
            opensta_power(str(stand_in(tmp_path, "3.1.0", report, status)), script)
