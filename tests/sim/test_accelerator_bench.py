"""The accelerator's cocotb bench, on both simulators, and on hardware that is wrong."""

import re

import pytest

import hdl.accelerator
from hdl.build import generate
from sim.bench_common import bench_environment
from sim.design import generated
from sim.runner import SimulationError, available_simulators, build_cocotb, run_cocotb

SMALL = {
    **{"rows": 1, "columns": 2, "activation_depth": 16, "weight_depth": 8, "accumulators": 16, "weight_entries": 2},
    **{"activation_entries": 4, "data_width": 64, "address_width": 32, "max_burst": 8, "outstanding": 2},
}
SECOND = "icarus" if "icarus" in available_simulators() else "verilator"


def run(design, simulator, seed, products, only=None):
    ports = [port["name"] for port in design.sidecar["ports"]]
    build = build_cocotb({"accelerator.v": design.verilog}, "accelerator", ports, simulator)
    environment = bench_environment("accelerator", SMALL, design.sidecar, products)
    return run_cocotb(build, "sim.bench_accelerator", seed, environment, 400, f"accelerator-{simulator}", only)


def test_bench(seed):
    log = run(generated("accelerator", **SMALL), "verilator", seed, 24)
    assert "5 cocotb tests, 0 failed" in log
    assert re.search(r"24 products, [1-9]\d+ outputs", log)


def test_bench_on_the_second_simulator(seed):
    log = run(generated("accelerator", **SMALL), SECOND, seed, 2, "reset_values|random_products")
    assert "2 cocotb tests, 0 failed" in log


def test_bench_notices_wrong_hardware(seed, monkeypatch):
    monkeypatch.setattr(hdl.accelerator, "MAGIC", hdl.accelerator.MAGIC ^ 1)
    with pytest.raises(SimulationError, match=r"1 cocotb tests, 1 failed"):
        run(generate("accelerator", **SMALL), SECOND, seed, 2, "reset_values")
