"""The register bank's cocotb bench, on both simulators, and on banks that are wrong."""

import dataclasses

import pytest

from hdl.lib.verilog import to_verilog
from hdl.registers import RegisterBank
from model.registers import to_json
from sim.bench_common import bench_environment
from sim.runner import SimulationError, available_simulators, build_cocotb, run_cocotb
from tests.demo_registers import DEMO

ACCESSES = 3000


def run(built, simulator, seed, accesses):
    bank = RegisterBank(built)
    text = to_verilog(bank, "registers")
    ports = [{"name": name, "direction": ""} for name in ("clk", "rst", *bank.signature.members)]
    build = build_cocotb({"registers.v": text}, "registers", [port["name"] for port in ports], simulator)
    environment = bench_environment("registers", {"table": to_json(DEMO)}, {"ports": ports}, accesses)
    return run_cocotb(build, "sim.bench_registers", seed, environment, timeout=300, name=f"registers-{simulator}")


@pytest.mark.parametrize("simulator", available_simulators())
def test_bench(simulator, seed):
    assert "2 cocotb tests, 0 failed" in run(DEMO, simulator, seed, ACCESSES)


def changed(name, field, **options):
    registers = []
    for register in DEMO.registers:
        fields = tuple(
            dataclasses.replace(f, **options) if (register.name, f.name) == (name, field) else f
            for f in register.fields
        )
        registers.append(dataclasses.replace(register, fields=fields))
    return dataclasses.replace(DEMO, registers=tuple(registers))


WRONG = {
    "reset value": changed("control", "mode", reset=4),
    "one bit too high": changed("control", "mode", position=7),
    "pulse for a level": changed("mask", "events", access="w1p"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bench_notices_a_wrong_bank(wrong, seed):
    with pytest.raises(SimulationError, match=r"cocotb tests, [1-9] failed"):
        run(WRONG[wrong], "icarus" if "icarus" in available_simulators() else "verilator", seed, 200)
