"""The DMA engines' cocotb bench on both simulators, and on engines that are wrong."""

import pytest

import hdl.dma
from hdl.dma import ReadDma, WriteDma
from hdl.lib.verilog import to_verilog
from model.dma import DmaConfig
from sim.bench_common import bench_environment
from sim.runner import SimulationError, available_simulators, build_cocotb, run_cocotb

ENGINES = {"read_dma": ReadDma, "write_dma": WriteDma}
SMALL = {"data_width": 32, "address_width": 22, "max_burst": 4, "outstanding": 2, "id_width": 3}
SECOND = "icarus" if "icarus" in available_simulators() else "verilator"


def run(name, parameters, simulator, seed, requests, only=None):
    dut = ENGINES[name](DmaConfig(**parameters))
    ports = ["clk", "rst", *("__".join(path) for path, _, _ in dut.signature.flatten(dut))]
    build = build_cocotb({f"{name}.v": to_verilog(dut, name)}, name, ports, simulator)
    sidecar = {"ports": [{"name": port, "direction": ""} for port in ports]}
    environment = bench_environment(name, parameters, sidecar, requests)
    return run_cocotb(build, "sim.bench_dma", seed, environment, 300, f"{name}-{simulator}", only)


@pytest.mark.parametrize("name", ENGINES)
def test_bench(name, seed):
    assert "2 cocotb tests, 0 failed" in run(name, {"data_width": 256}, "verilator", seed, 300)


@pytest.mark.parametrize("name", ENGINES)
def test_bench_of_a_small_engine(name, seed):
    assert "1 cocotb tests, 0 failed" in run(name, SMALL, SECOND, seed, 150, "random_requests")


def crossing(monkeypatch):
    monkeypatch.setattr(DmaConfig, "block_beats", 2048)


def turned_too_far(monkeypatch):
    right = hdl.dma._rotated
    monkeypatch.setattr(hdl.dma, "_rotated", lambda m, word, amount: right(m, word, amount + 1))


def masks_off_by_one(monkeypatch):
    right = hdl.dma._above
    monkeypatch.setattr(hdl.dma, "_above", lambda m, value, name: right(m, value + (name == "behind"), name)[:3])


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("bug", [crossing, turned_too_far, masks_off_by_one], ids=lambda bug: bug.__name__)
def test_bench_notices_a_wrong_engine(bug, name, seed, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(SimulationError, match=r"cocotb tests, [1-9] failed"):
        run(name, SMALL, SECOND, seed, 40, "random_requests")
