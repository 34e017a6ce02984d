"""cocotb bench of the counter in test_runner.py; WRONG=1 makes it expect the wrong count, HANG=1 never ends."""

import os

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, ReadOnly


@cocotb.test(timeout_time=1, timeout_unit="ms")
async def counts(dut):
    Clock(dut.clk, 10, unit="ns").start()
    dut.rst.value = 1
    await ClockCycles(dut.clk, 2)
    dut.rst.value = 0
    await ClockCycles(dut.clk, 5)
    while os.environ.get("HANG"):
        pass
    await ReadOnly()
    assert int(dut.count.value) == 5 + int(os.environ.get("WRONG", "0"))
