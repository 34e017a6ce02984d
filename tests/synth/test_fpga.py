"""FPGA flow: what is read from nextpnr's report, wrong arguments, tools that fail, and the files that a board's build begins with."""

import json
import os
from pathlib import Path

import pytest

import synth.fpga
from model.uart_pe import UartPeConfig
from synth.fpga import FpgaError, build, divisor_of, main, read_report, run_script, table

REPORT = (Path(__file__).parent / "nextpnr_report.json").read_text()
"""As nextpnr-ecp5 0.11 wrote it for a ULX3S with an 85F, without the critical paths."""


def test_a_recorded_report_is_read():
    report = read_report(REPORT, 25e6)
    assert report.used == {"luts": 8142, "ffs": 3049, "dsps": 8, "block_rams": 37}
    assert report.available == {"luts": 83640, "ffs": 83640, "dsps": 156, "block_rams": 208}
    assert (report.fmax_mhz, report.clock_mhz) == (42.83, 25.0)
    lines = table(report).splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["luts", "8142"], ["ffs", "3049"]]
    assert lines[-1].split() == ["fmax", "42.83", "MHz,", "clock", "of", "the", "board", "25", "MHz"]


def test_the_slowest_clock_counts():
    changed = json.loads(REPORT)
    changed["fmax"] |= {"slow": {"achieved": 3.0, "constraint": 1}, "fast": {"achieved": 300.0, "constraint": 1}}
    assert read_report(json.dumps(changed), 25e6).fmax_mhz == 3.0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"utilization": {}, "fmax": {}}', REPORT.replace("MULT18X18D", "DSP")]
)
def test_what_is_no_report_is_refused(text):
    with pytest.raises(ValueError, match=r"^report must be nextpnr's JSON"):
        read_report(text, 25e6)


def test_bits_last_whole_cycles():
    assert [divisor_of(25e6, baud) for baud in (115_200, 1_000_000, 6_250_000)] == [217, 25, 4]
    for baud in (0, -1, 3_000_000, 26_000_000):
        with pytest.raises(
            ValueError, match=rf"^baud must be within 2 % of 2.5e\+07 Hz by a whole number, not {baud}$"
        ):
            divisor_of(25e6, baud)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--board", "de10"], "board must be one of ulx3s-12f, ulx3s-25f, ulx3s-45f, ulx3s-85f, not 'de10'"),
        (["--baud", "3000000"], "baud must be within 2 %"),
        (["--baud", "12500000"], "divisor must be at least 4, not 2"),
        (["--set", "vectors=3"], "vectors must be a power of two from 2 to 32768, not 3"),
        (
            ["--set", "divisor=30"],
            "--set must not name divisor, which --baud sets",
        ),
        (["--seed", "-1"], "--seed must not be negative, not -1"),
        (["--set", "rows=3"], "parameter of uart_pe must be one of "),
    ],
)
def test_wrong_arguments_give_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"synth.fpga: {message}")
    assert len(error.splitlines()) == 1


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(synth.fpga.importlib.util, "find_spec", lambda name: None)
    assert main([]) == 2
    assert capsys.readouterr().err == "synth.fpga: amaranth-boards was not found: this needs pip install -e '.[fpga]'\n"


def with_tools(monkeypatch, tmp_path, script):
    """Put scripts in place of the tools."""
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(synth.fpga, "find_tool", lambda name: str(tool))
    for name in synth.fpga.TOOLS:
        monkeypatch.setenv(name, str(tool))


SMALL = UartPeConfig(weight_entries=4, activation_entries=4, accumulators=4, vectors=4)


def test_a_build_connects_the_board_and_reads_the_report(monkeypatch, tmp_path):
    with_tools(monkeypatch, tmp_path, f"cat > report.json <<'end'\n{REPORT}end\ntouch top.json top.config top.bit")
    folder, lines = tmp_path / "build", []
    report = build("ulx3s-85f", SMALL, folder, 3, lines.append)
    assert report.fmax_mhz == 42.83
    assert [line.partition(" after")[0] for line in lines] == ["synthesised", "placed and routed", "packed"]
    places = (folder / "top.lpf").read_text()
    # Clock, serial port and LED are where the board's maker says.
    for port, site in (("clk25_0__io", "G2"), ("uart_0__rx__io", "M1"), ("uart_0__tx__io", "L4"), ("led_0__io", "B2")):
        assert f'LOCATE COMP "{port}" SITE "{site}";' in places
    assert 'FREQUENCY PORT "clk25_0__io" 25000000' in places
    assert "--85k --package CABGA381" in (folder / "build_top.sh").read_text().replace("caBGA", "CABGA")
    assert "--report report.json --seed 3" in (folder / "build_top.sh").read_text()


def test_a_tool_that_fails_gives_one_line(tmp_path):
    (tmp_path / "build_top.sh").write_text("echo working; echo 'ERROR: no place for this'; touch top.json; exit 1\n")
    lines = []
    with pytest.raises(FpgaError, match=r"^no top.config: ERROR: no place for this; the rest is in .*build.log$"):
        run_script(tmp_path, os.environ, lines.append)
    assert [line.partition(" after")[0] for line in lines] == ["synthesised"]
