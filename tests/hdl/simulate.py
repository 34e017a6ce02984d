"""Runs small components in Amaranth's own simulator."""

from amaranth.hdl import Module, ResetInserter, Signal, Value
from amaranth.sim import Simulator


def _raw(value):
    return Value.cast(value.as_value() if hasattr(value, "as_value") else value)


def evaluate(component, rows, outputs, *, clocked=False, latency=0):
    """Set inputs by name (raw integers) row after row; return the outputs' raw integers, ``latency`` cycles later."""
    top = Module()
    top.submodules.dut = component
    simulator = Simulator(top)
    results = []

    async def bench(ctx):
        for n in range(len(rows) + max(latency - 1, 0)):
            for name, number in rows[min(n, len(rows) - 1)].items():
                ctx.set(_raw(getattr(component, name)), number)
            await (ctx.tick() if clocked else ctx.delay(1e-9))
            if n >= latency - 1:
                results.append(tuple(ctx.get(_raw(getattr(component, name)).as_unsigned()) for name in outputs))

    simulator.add_testbench(bench)
    if clocked:
        simulator.add_clock(1e-6)
    # The bench is a finite loop, and the run ends with it.
    simulator.run()
    return results


def run_vectors(component, rows):
    """Present a row per cycle to a vMAC, its psum_i psum_delay cycles later; returns (valid_o, psum_o, status) after each cycle's edge."""
    component.rst = Signal()
    delay = component.psum_delay
    rows = rows + [{**rows[-1], "valid_i": 0, "rst": 0}] * delay
    rows = [{**row, "psum_i": rows[n - delay]["psum_i"] if n >= delay else 0} for n, row in enumerate(rows)]
    return evaluate(
        ResetInserter(component.rst)(component), rows, ["valid_o", "psum_o", "status"], clocked=True, latency=1
    )


def signed(number, width):
    """Read a raw integer as two's complement."""
    return number - (number >> (width - 1) << width)
