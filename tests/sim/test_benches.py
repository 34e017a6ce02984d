"""The cocotb benches on representative configurations; a configuration's name is the test id."""

import pytest

from model.pe import PeConfig
from sim.bench_common import bench_environment
from sim.design import generated
from sim.regress import CASES
from sim.runner import SimulationError, available_simulators, build_cocotb, run_cocotb
from sim.tiles import plan_length

ROWS = 2000
BENCHES = {"weight_encoder": ("bench_weight_encoder", 2), "pe": ("bench_pe", 8)}
"""Bench and number of its tests, for other blocks than the vector MACs."""
VERILATOR = [
    "vmac-slots",
    "vmac-slots-exponent",
    "vmac-slots-4",
    "vmac-slots-group",
    "vmac-slots-window-20",
    "vmac-inplace",
    "vmac-inplace-group-lanes-64-fast",
    "vmac-none",
    "vmac_nvfp4",
    "vmac_autofp2-pair",
    "vmac_autofp2-group-fast",
    "weight_encoder-pair",
    "weight_encoder-group",
    "weight_encoder-pair-registered",
    "pe-slots",
    "pe-slots-1-small-fast",
    "pe-none",
]
ICARUS = ["vmac-slots", "vmac-none-group", "vmac_nvfp4", "vmac_autofp2-pair", "weight_encoder-pair", "pe-inplace"]
ICARUS_TILES = 40
CAMPAIGN = {
    *(
        ("verilator", f"vmac-{name}")
        for name in ("slots-exponent", "slots-4", "slots-group", "slots-window-20", "inplace", "none")
    ),
    *(("verilator", name) for name in ("vmac_autofp2-pair", "weight_encoder-group", "pe-none")),
    *(("icarus", name) for name in ("vmac_nvfp4", "vmac_autofp2-pair")),
}
"""Configurations of which ``sim.regress`` already compares every bit, and whose ports are those of another one here."""
CHOSEN = [("verilator", name) for name in VERILATOR]
CHOSEN += [("icarus", name) for name in ICARUS if "icarus" in available_simulators()]


@pytest.mark.parametrize(
    ("simulator", "name"),
    [
        pytest.param(*chosen, id="-".join(chosen), marks=[pytest.mark.campaign] if chosen in CAMPAIGN else [])
        for chosen in CHOSEN
    ],
)
def test_bench(simulator, name, seed):
    case = CASES[name]
    design = generated(case.block, **case.parameters)
    ports = [port["name"] for port in design.sidecar["ports"]]
    build = build_cocotb({"block.v": design.verilog}, case.block, ports, simulator)
    bench, tests = BENCHES.get(case.block, ("bench_vmac", 5))
    rows = ROWS
    if case.block == "pe":
        rows = ICARUS_TILES if simulator == "icarus" else plan_length(PeConfig(**case.parameters))
    environment = bench_environment(case.block, case.parameters, design.sidecar, rows)
    log = run_cocotb(build, f"sim.{bench}", seed, environment, timeout=600, name=f"{name}-{simulator}")
    assert f"{tests} cocotb tests, 0 failed" in log


@pytest.mark.parametrize("name", ["vmac-slots", "weight_encoder-pair"])
def test_bench_notices_a_wrong_block(name, seed):
    """The same bench on a block whose result is off in one bit."""
    case = CASES[name]
    design = generated(case.block, **case.parameters)
    port = "psum_o" if case.block == "vmac" else "w"
    width = next(p["width"] for p in design.sidecar["ports"] if p["name"] == port)
    inner = design.verilog.replace(f"module {case.block}(", "module inner(", 1)
    lines = [f"module {case.block}("]
    lines += [
        ",\n".join(f"  {p['direction']} [{p['width'] - 1}:0] {p['name']}" for p in design.sidecar["ports"]) + ");"
    ]
    lines += [f"  wire [{width - 1}:0] right;", f"  assign {port} = right ^ {width}'d4;", "  inner inner("]
    names = [(p["name"], "right" if p["name"] == port else p["name"]) for p in design.sidecar["ports"]]
    lines += [",\n".join(f"    .{pin}({wire})" for pin, wire in names) + ");", "endmodule", ""]
    ports = [p["name"] for p in design.sidecar["ports"]]
    simulator = available_simulators()[-1]
    build = build_cocotb({"block.v": inner, "wrong.v": "\n".join(lines)}, case.block, ports, simulator)
    environment = bench_environment(case.block, case.parameters, design.sidecar, 50)
    bench = "bench_weight_encoder" if case.block == "weight_encoder" else "bench_vmac"
    with pytest.raises(SimulationError, match=r"cocotb tests, [1-9] failed"):
        run_cocotb(build, f"sim.{bench}", seed, environment, name="wrong")
