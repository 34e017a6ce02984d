"""Does the regression notice that a block was changed? Runs it on another implementation of the block, such as a mutated netlist."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.mutation_dma import EnginePlayer
from sim.regress import Bench
from sim.runner import SimulationError, find_cocotb, seed_from_environment

if TYPE_CHECKING:
    from sim.mutation_pe import ElementPlayer

__all__ = ["BLOCKS", "check_mutants", "check_netlist"]

BLOCKS = ("vmac", "vmac_nvfp4", "vmac_autofp2", "weight_encoder", "pe", "read_dma", "write_dma")
"""Blocks that the bulk regression drives, or the stream player."""

SELECT = "mutsel"
QUICK_ROWS = 1024
VECTORS = 20_000


@dataclasses.dataclass
class _Stimuli:
    """Stimuli in growing portions, drawn once for all mutants."""

    bench: "Bench | ElementPlayer | EnginePlayer"
    vectors: int
    seed: int
    portions: list[tuple[Any, np.ndarray]] = dataclasses.field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[Any, np.ndarray]]:
        rows, total, number = QUICK_ROWS, 0, 0
        while total < self.vectors:
            if number == len(self.portions):
                self.portions.append(self.bench.stimuli(rows, np.random.default_rng([self.seed, number])))
            yield self.portions[number]
            total, rows, number = total + rows, rows * 4, number + 1


def _bench(
    block: str,
    parameters: Mapping[str, Any],
    simulator: str,
    verilog: str,
    plusargs: Mapping[str, int],
    optimise: str,
) -> "Bench | ElementPlayer | EnginePlayer":
    if block == "pe":
        # Its bench is one of cocotb, which other blocks do not need.
        find_cocotb()
        from sim.mutation_pe import ElementPlayer

        return ElementPlayer(parameters, verilog, simulator, optimise, plusargs)
    if block in ("read_dma", "write_dma"):
        return EnginePlayer(block, parameters, verilog, simulator, optimise, plusargs)
    return Bench(block, parameters, simulator, verilog, plusargs, optimise=optimise)


def _differs(
    bench: "Bench | ElementPlayer | EnginePlayer", stimuli: _Stimuli, plusargs: Mapping[str, int], timeout: float
) -> bool:
    for stimulus, data in stimuli:
        try:
            outputs = bench.harness.run_packed(data, plusargs, timeout)
        except SimulationError:
            # It compiled, so a simulation that never settles or ends is the mutation's doing.
            return True
        tally = bench.check(stimulus, outputs)
        if tally.mismatches or tally.unknown or tally.compared != tally.expected:
            return True
    return False


def check_netlist(
    block: str,
    verilog: str,
    vectors: int = VECTORS,
    parameters: Mapping[str, Any] | None = None,
    simulator: str = "verilator",
    seed: int | None = None,
    optimise: str = "-O0",
    timeout: float = 60.0,
) -> bool:
    """Run the regression on an implementation of a block and say whether it disagrees with the golden model.

    Parameters
    ----------
    block : str
        One of `BLOCKS`.
    verilog : str
        Text with a module of the block's name and ports, and all that it instantiates.
    vectors : int
        Rows to simulate, in portions of 1024, 4096, … or a few more; the first portion that disagrees ends the run.
    parameters : mapping, optional
        Parameters of the block that differ from its defaults.
    simulator : str
        ``"verilator"`` or ``"icarus"``. Verilator needs about 15 s for a flat gate-level vMAC and then 10 ms per thousand rows;
        Icarus a second, and then 5 s per thousand rows.
    seed : int, optional
        ``SEED`` from the environment, or 1, by default.
    optimise : str
        Flag of the C++ compiler; more than ``-O0`` does not pay here.
    timeout : float
        Wall-clock limit of a portion in seconds.

    Returns
    -------
    bool
        True if any result, status bit or ``valid_o`` differs, or the simulation never ends: the change was caught.

    Raises
    ------
    SimulationError
        The text does not compile.
    """
    bench = _bench(block, parameters or {}, simulator, verilog, {}, optimise)
    seed = seed_from_environment() if seed is None else seed
    return _differs(bench, _Stimuli(bench, vectors, seed), {}, timeout)


def check_mutants(
    block: str,
    verilog: str,
    mutants: Iterable[int],
    width: int,
    vectors: int = VECTORS,
    parameters: Mapping[str, Any] | None = None,
    simulator: str = "verilator",
    seed: int | None = None,
    optimise: str = "-O0",
    timeout: float = 60.0,
) -> dict[int, bool]:
    """Run the regression on many mutations that share one netlist, compiled once.

    The netlist has one more input, ``mutsel``, as Yosys' ``mutate -ctrl mutsel WIDTH NUMBER`` makes it: 0 is the block itself, any other
    number switches that mutation on.

    Parameters
    ----------
    block, verilog, vectors, parameters, simulator, seed, optimise, timeout
        As for `check_netlist`.
    mutants : iterable of int
        Values of ``mutsel`` to try, without 0.
    width : int
        Bits of ``mutsel``, up to 32.

    Returns
    -------
    dict of int to bool
        Whether the regression caught each mutant. Survivors are False.

    Raises
    ------
    SimulationError
        The text does not compile.
    ValueError
        The netlist disagrees with the model even with ``mutsel = 0``, or a number does not fit ``width`` bits.
    """
    chosen = list(mutants)
    for number in chosen:
        if not 0 < number < 1 << width:
            raise ValueError(f"mutants must be from 1 to {(1 << width) - 1}, not {number}")
    bench = _bench(block, parameters or {}, simulator, verilog, {SELECT: width}, optimise)
    stimuli = _Stimuli(bench, vectors, seed_from_environment() if seed is None else seed)
    if _differs(bench, stimuli, {SELECT: 0}, timeout):
        raise ValueError(f"verilog must agree with the model of {block} with {SELECT} = 0")
    return {number: _differs(bench, stimuli, {SELECT: number}, timeout) for number in chosen}
