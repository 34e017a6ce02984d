"""``python -m sim.regress``: vector MACs, weight encoder and processing element against the golden model, bit for bit.

Without arguments it does what continuous integration does: at least a million vectors per mode through the default
vMAC, fewer through every other configuration, all on Verilator. docs/simulation.md has the other uses: Icarus, single
cases, campaigns.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hdl.build import Generated
from sim.coverage import GOAL, Coverage, encoder_coverage, vector_coverage
from sim.design import config_of, generated
from sim.harness import BulkHarness
from sim.runner import (
    SimulationError,
    build_cocotb,
    build_root,
    digest,
    find_cocotb,
    find_simulator,
    run_cocotb,
    seed_from_environment,
    waves_from_environment,
)
from sim.scoreboard import Tally, check_encoder, check_vectors, encoder_columns
from sim.stimuli import ILLEGAL, MODES, EncoderShape, VectorShape, encoder_stimulus, vector_stimulus
from sim.tiles import plan_length, tile_coverage

__all__ = ["CASES", "Bench", "Case", "Report", "TileBench", "bench_of", "campaign", "main", "regress"]

CHUNK_ROWS = 1 << 16
CAMPAIGN_VECTORS = 100_000_000
CAMPAIGN_CHUNK = 1_000_000
ELEMENT_CAMPAIGN = 1_000_000
ELEMENT_CHUNK = 20_000


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration to regress.

    Attributes
    ----------
    name : str
        The test id.
    block : str
        Name of the block.
    parameters : dict
        What differs from the block's defaults.
    vectors : int
        Vectors per mode in continuous integration, or sums of processing elements; enough for every coverage bin.
    campaign, chunk : int
        Vectors, or sums, of a campaign and of a chunk of it, all modes together.
    """

    name: str
    block: str
    parameters: dict[str, Any]
    vectors: int = 100_000
    campaign: int = CAMPAIGN_VECTORS
    chunk: int = CAMPAIGN_CHUNK


def _cases() -> dict[str, Case]:
    vmacs: dict[str, dict[str, Any]] = {
        "slots": {},
        "slots-exponent": {"step": "exponent"},
        "slots-1": {"slots_per_block": 1},
        "slots-3-exponent-fast": {"slots_per_block": 3, "step": "exponent", "pipeline": "fast"},
        "slots-4": {"slots_per_block": 4},
        "slots-group": {"scaling": "group"},
        "slots-lanes-64": {"lanes": 64},
        "slots-window-20": {"window_shift": 20},
        "inplace": {"refinement": "inplace"},
        "inplace-exponent": {"refinement": "inplace", "step": "exponent"},
        "inplace-group-lanes-64-fast": {"refinement": "inplace", "scaling": "group", "lanes": 64, "pipeline": "fast"},
        "none": {"refinement": "none"},
        "none-group": {"refinement": "none", "scaling": "group"},
    }
    encoders: dict[str, dict[str, Any]] = {
        "pair": {},
        "group": {"scaling": "group"},
        "pair-lanes-64": {"lanes": 64},
        "pair-registered": {"registered": True},
    }
    cases = [Case(f"vmac-{name}", "vmac", parameters) for name, parameters in vmacs.items()]
    cases[0] = dataclasses.replace(cases[0], vectors=1_000_000)
    cases += [
        Case("vmac_nvfp4", "vmac_nvfp4", {}),
        Case("vmac_nvfp4-lanes-64-fast", "vmac_nvfp4", {"lanes": 64, "pipeline": "fast"}),
    ]
    cases += [
        Case("vmac_autofp2-pair", "vmac_autofp2", {}),
        Case("vmac_autofp2-group-fast", "vmac_autofp2", {"scaling": "group", "pipeline": "fast"}),
        Case("vmac_autofp2-lanes-64", "vmac_autofp2", {"lanes": 64}),
    ]
    cases += [Case(f"weight_encoder-{name}", "weight_encoder", parameters) for name, parameters in encoders.items()]
    elements: dict[str, dict[str, Any]] = {
        "slots": {},
        "slots-1-small-fast": {
            "slots_per_block": 1,
            "weight_entries": 2,
            "activation_entries": 4,
            "accumulators": 8,
            "pipeline": "fast",
        },
        "slots-4-group-lanes-64": {"slots_per_block": 4, "step": "exponent", "scaling": "group", "lanes": 64},
        "inplace": {"refinement": "inplace", "activation_entries": 16},
        "none": {"refinement": "none", "accumulators": 32},
    }
    # Every plan of tiles reaches every bin, and has more sums than this.
    cases += [
        Case(f"pe-{name}", "pe", parameters, 50 if "small" in name else 500, ELEMENT_CAMPAIGN, ELEMENT_CHUNK)
        for name, parameters in elements.items()
    ]
    return {case.name: case for case in cases}


CASES = _cases()
"""Every configuration that continuous integration checks, by name; the first is the default vMAC."""


@dataclasses.dataclass
class Report:
    """What a regression did.

    Attributes
    ----------
    case : Case
    simulator : str
        Name and version.
    seed : int
    tally : Tally
    coverage : Coverage
    vectors : int
        Vectors per mode that were asked for.
    seconds : float
        Wall-clock time, build included.
    """

    case: Case
    simulator: str
    seed: int
    tally: Tally
    coverage: Coverage
    vectors: int
    seconds: float

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; empty if the regression passed. Coverage counts once the case's own number of vectors is reached."""
        faults = list(self.tally.faults)
        short = {
            name: count
            for name, count in self.tally.compared.items()
            if count < self.vectors and name != MODES[ILLEGAL]
        }
        if short:
            faults.append(f"fewer than {self.vectors} vectors compared: {short}")
        if self.vectors >= self.case.vectors and self.coverage.share < GOAL:
            holes = {
                name: self.coverage.missing(name)[:3] for name in self.coverage.points if self.coverage.missing(name)
            }
            faults.append(f"coverage is {self.coverage.share:.4%}, missing for example {holes}")
        return faults

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON-like data."""
        return {
            "case": self.case.name,
            "block": self.case.block,
            "parameters": self.case.parameters,
            "simulator": self.simulator,
            "seed": self.seed,
            "compared": self.tally.compared,
            "expected": self.tally.expected,
            "nonzero": self.tally.nonzero,
            "mismatches": self.tally.mismatches,
            "unknown": self.tally.unknown,
            "coverage": self.coverage.summary(),
            "coverage_share": self.coverage.share,
            "seconds": round(self.seconds, 2),
            "faults": self.faults,
        }


class Bench:
    """A block in its bulk harness, with its stimuli, its model and its coverage.

    Parameters
    ----------
    block : str
        ``"vmac"``, ``"vmac_nvfp4"``, ``"vmac_autofp2"`` or ``"weight_encoder"``.
    parameters : mapping
        Parameters of the block.
    simulator : str
        ``"verilator"`` or ``"icarus"``.
    verilog : str, optional
        Another implementation of the block, with the same ports, to check instead of the generated one.
    plusargs : sequence of str, optional
        Input ports, of ``verilog``, that are set at the start of a simulation.
    waves : bool
        Record waveforms.
    optimise : str
        Flag of the C++ compiler.
    """

    def __init__(
        self,
        block: str,
        parameters: Mapping[str, Any],
        simulator: str = "verilator",
        verilog: str | None = None,
        plusargs: Mapping[str, int] | None = None,
        waves: bool = False,
        optimise: str = "-O1",
    ) -> None:
        design: Generated = generated(block, **parameters)
        sidecar = dict(design.sidecar)
        sidecar["ports"] = [
            *sidecar["ports"],
            *({"name": name, "direction": "input", "width": width} for name, width in (plusargs or {}).items()),
        ]
        self.block = block
        self.config = config_of(block, **parameters)
        self.latency: int = sidecar["latency"]
        self.encoder = block == "weight_encoder"
        self.psum_delay: int = sidecar.get("psum_delay", 0)
        self.harness = BulkHarness(
            {"block.v": design.verilog if verilog is None else verilog},
            sidecar,
            simulator,
            None if self.encoder else {"psum_i": "psum_o"},
            tuple(plusargs or {}),
            waves,
            optimise,
        )

    def coverage(self) -> Coverage:
        """Return empty coverage of the block."""
        if self.encoder:
            return encoder_coverage(EncoderShape.of(self.config))
        return vector_coverage(VectorShape.of(self.block, self.config), self.latency)

    def stimuli(self, rows: int, rng: np.random.Generator) -> "tuple[Any, np.ndarray]":
        """Draw stimuli: the stimulus, for `check`, and the harness's file."""
        if self.encoder:
            encoder = EncoderShape.of(self.config)
            inputs = encoder_stimulus(encoder, rows, rng)
            return inputs, self.harness.pack(encoder_columns(inputs, encoder, self.latency))
        shape = VectorShape.of(self.block, self.config)
        stimulus = vector_stimulus(shape, rows, rng).settled(self.latency, self.psum_delay)
        return stimulus, self.harness.pack(stimulus.columns(shape, self.psum_delay, self.latency))

    def check(self, stimulus: Any, outputs: Mapping[str, np.ndarray], coverage: Coverage | None = None) -> Tally:
        """Compare the harness's outputs for a stimulus of `stimuli` with the golden model."""
        if self.encoder:
            return check_encoder(EncoderShape.of(self.config), stimulus, outputs, self.latency, coverage)
        shape = VectorShape.of(self.block, self.config)
        return check_vectors(shape, self.config, stimulus, outputs, self.latency, self.psum_delay, coverage)

    def run(
        self, vectors: int, seed: Sequence[int], coverage: Coverage, progress: Callable[[Tally], None] | None = None
    ) -> Tally:
        """Check at least ``vectors`` vectors per mode, chunk by chunk; stop at the first chunk that disagrees."""
        rng = np.random.default_rng(seed)
        tally = Tally()
        while True:
            done = min((count for name, count in tally.compared.items() if name != MODES[ILLEGAL]), default=0)
            if done >= vectors:
                return tally
            rows = int(min(CHUNK_ROWS, max(512, (vectors - done) * 6)))
            stimulus, data = self.stimuli(rows, rng)
            tally += self.check(stimulus, self.harness.run_packed(data), coverage)
            if progress is not None:
                progress(tally)
            if tally.mismatches or tally.unknown:
                return tally


class TileBench:
    """A processing element in its cocotb bench, with what `Bench` has for blocks that take a vector in every cycle.

    Parameters
    ----------
    parameters : mapping
        Parameters of the processing element.
    simulator : str
        ``"verilator"`` or ``"icarus"``.
    waves : bool
        Record waveforms.
    verilog : str, optional
        Another implementation, with the same ports, to check instead of the generated one.
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        simulator: str = "verilator",
        waves: bool = False,
        verilog: str | None = None,
    ) -> None:
        design = generated("pe", **parameters)
        ports = [port["name"] for port in design.sidecar["ports"]]
        self.parameters = parameters
        self.sidecar = design.sidecar
        self.config = config_of("pe", **parameters)
        self.build = build_cocotb(
            {"block.v": design.verilog if verilog is None else verilog}, "pe", ports, simulator, waves
        )

    def coverage(self) -> Coverage:
        """Return empty coverage of the block."""
        return tile_coverage(self.config)

    def run_tiles(self, tiles: int, seed: int, coverage: Coverage, only: str | None = r"\.random_tiles$") -> Tally:
        """Run the bench with so many random tiles; a test that fails is a mismatch."""
        from sim.bench_common import bench_environment  # cocotb, which vector MACs do not need

        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            environment = bench_environment("pe", self.parameters, self.sidecar, tiles, report)
            try:
                run_cocotb(self.build, "sim.bench_pe", seed, environment, only=only)
            except SimulationError as error:
                reasons = [line.strip() for line in str(error).splitlines() if "Error: " in line]
                return Tally(mismatches=1, messages=[f"SEED={seed}: {'; '.join(reasons) or error}"])
            data = json.loads(report.read_text(encoding="utf-8"))
        for name, counts in data["counts"].items():
            coverage.counts[name] += np.array(counts)
        return Tally(**data["tally"])

    def run(
        self, vectors: int, seed: Sequence[int], coverage: Coverage, progress: Callable[[Tally], None] | None = None
    ) -> Tally:
        """Check at least ``vectors`` sums per mode, a plan of tiles at a time; stop at the first that disagrees."""
        tally = Tally()
        number = 0
        whole = plan_length(self.config)
        while min(tally.compared.values(), default=0) < vectors:
            one = int(np.random.SeedSequence([*seed, number]).generate_state(1)[0])
            # For fewer sums than a bank holds a part of the plan will do, without its coverage.
            tally += self.run_tiles(whole if vectors >= self.config.max_words else -(-whole // 4), one, coverage)
            number += 1
            if progress is not None:
                progress(tally)
            if tally.mismatches:
                break
        return tally


def bench_of(case: Case, simulator: str = "verilator", waves: bool = False) -> Bench | TileBench:
    """Return the bench of a case."""
    if case.block == "pe":
        return TileBench(case.parameters, simulator, waves)
    return Bench(case.block, case.parameters, simulator, waves=waves)


def regress(
    case: Case,
    vectors: int | None = None,
    seed: int | None = None,
    simulator: str = "verilator",
    waves: bool = False,
    progress: Callable[[Tally], None] | None = None,
) -> Report:
    """Check a configuration against the golden model.

    Parameters
    ----------
    case : Case
        One of `CASES`, or your own.
    vectors : int, optional
        Vectors per mode, the case's own number by default.
    seed : int, optional
        ``SEED`` from the environment, or 1, by default.
    simulator : str
        ``"verilator"`` or ``"icarus"``.
    waves : bool
        Record waveforms of every chunk.
    progress : callable, optional
        Called with the tally after each chunk.

    Returns
    -------
    Report
        Look at its ``faults``.
    """
    started = time.monotonic()
    vectors = case.vectors if vectors is None else vectors
    seed = seed_from_environment() if seed is None else seed
    tool = find_simulator(simulator)
    bench = bench_of(case, simulator, waves)
    coverage = bench.coverage()
    tally = bench.run(vectors, [seed], coverage, progress)
    return Report(case, f"{tool.name} {tool.version}", seed, tally, coverage, vectors, time.monotonic() - started)


@cache
def _campaign_bench(case_name: str) -> Bench | TileBench:
    return bench_of(CASES[case_name])


def _campaign_chunk(case_name: str, seed: int, chunk: int, vectors: int) -> dict[str, Any]:
    bench = _campaign_bench(case_name)
    coverage = bench.coverage()
    tally = bench.run(max(1, vectors // 3), [seed, chunk], coverage)
    hit = {name: np.packbits(counts.ravel() > 0).tobytes().hex() for name, counts in coverage.counts.items()}
    return {"chunk": chunk, "tally": dataclasses.asdict(tally), "hit": hit}


def _own_sources() -> str:
    """Hash of the stimuli, the scoreboard and the model: a campaign must not continue with other ones."""
    root = Path(__file__).resolve().parents[1]
    files = sorted([*root.glob("sim/*.py"), *root.glob("model/*.py")])
    return digest({path.name: path.read_text(encoding="utf-8") for path in files})


def campaign(case: Case, vectors: int, seed: int, jobs: int, chunk: int | None = None, quiet: bool = False) -> Report:
    """Check at least ``vectors`` vectors in total, chunk by chunk, and continue where an earlier call stopped.

    Finished chunks are kept, one JSON line each, in a file that belongs to this design, simulator, seed and set of
    stimuli.

    Parameters
    ----------
    case : Case
        One of `CASES`.
    vectors : int
        Vectors of all modes together.
    seed : int
        Chunk ``k`` is drawn from ``[seed, k]``.
    jobs : int
        Processes.
    chunk : int, optional
        Vectors of a chunk, the case's own number by default.
    quiet : bool
        Print no progress.
    """
    started = time.monotonic()
    chunk = case.chunk if chunk is None else chunk
    tool = find_simulator()
    bench = _campaign_bench(case.name)
    coverage = bench.coverage()
    design = generated(case.block, **case.parameters)
    folder = build_root() / "campaign"
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / f"{case.name}-{seed}-{digest(design.verilog, tool.version, _own_sources(), chunk)}.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True) if journal.exists() else []
    entries = {entry["chunk"]: entry for entry in (json.loads(line) for line in lines if line.endswith("\n"))}
    tally = Tally()

    def add(entry: Mapping[str, Any]) -> None:
        nonlocal tally
        tally += Tally(**entry["tally"])
        for name, text in entry["hit"].items():
            counts = coverage.counts[name]
            hit = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))[: counts.size]
            counts += hit.reshape(counts.shape)

    for entry in entries.values():
        add(entry)
    resumed = tally.total
    if not quiet and resumed:
        print(f"{journal.name}: {resumed} vectors are done already", flush=True)
    todo = (number for number in range(10**9) if number not in entries)
    with journal.open("a", encoding="utf-8") as log, ProcessPoolExecutor(jobs) as pool:
        running: set[Future[dict[str, Any]]] = set()
        while tally.total < vectors and not tally.mismatches:
            while len(running) < jobs and tally.total + len(running) * chunk < vectors:
                running.add(pool.submit(_campaign_chunk, case.name, seed, next(todo), chunk))
            finished = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
            running.discard(finished)
            entry = finished.result()
            log.write(json.dumps(entry) + "\n")
            log.flush()
            add(entry)
            if not quiet:
                rate = (tally.total - resumed) / (time.monotonic() - started)
                left = max(vectors - tally.total, 0) / max(rate, 1)
                print(
                    f"{tally.total:>12} of {vectors} vectors, {rate:,.0f} per second, {left:,.0f} s to go", flush=True
                )
        for future in running:
            future.cancel()
    return Report(
        case,
        f"{tool.name} {tool.version}",
        seed,
        tally,
        coverage,
        min(tally.compared.values(), default=0),
        time.monotonic() - started,
    )


def table(reports: Sequence[Report]) -> str:
    """Return the reports as a text table: vectors compared per mode, coverage, seed, time."""
    head = ["case", *MODES, "non-zero", "coverage", "seed", "seconds", "result"]
    body = []
    for report in reports:
        modes = [str(report.tally.compared.get(mode, "-")) for mode in MODES]
        share = f"{100 * report.tally.nonzero / max(report.tally.total, 1):.0f} %"
        covered = f"{100 * report.coverage.share:.2f} %"
        result = "pass" if not report.faults else "FAIL"
        body.append([report.case.name, *modes, share, covered, str(report.seed), f"{report.seconds:.1f}", result])
    widths = [max(len(row[k]) for row in [head, *body]) for k in range(len(head))]
    lines = []
    for row in [head, *body]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(" ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if every case passed, 1 if not, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m sim.regress", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="cases to run (default: all; with --campaign: the default vMAC)")
    add("--list", action="store_true", help="list the cases")
    add("--simulator", default="verilator", help="verilator (default) or icarus")
    add("--vectors", type=int, help="vectors per mode (default: each case's own); with --campaign, in total")
    add("--seed", type=int, help="seed (default: SEED from the environment, else 1)")
    add("--campaign", action="store_true", help=f"{CAMPAIGN_VECTORS:.0e} vectors by default, resumable, on all cores")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes of a campaign (default: all cores)")
    add("--waves", action="store_true", help="record waveforms (also WAVES=1)")
    add("--json", type=Path, metavar="FILE", help="write the reports here (default: build/sim/regress.json)")
    options = parser.parse_args(arguments)
    if options.list:
        for case in CASES.values():
            print(f"{case.name}: {case.block} {case.parameters or 'defaults'}, {case.vectors} vectors per mode")
        return 0
    unknown = [name for name in options.cases if name not in CASES]
    try:
        if unknown:
            raise ValueError(f"CASE must be one of {', '.join(CASES)}, not {unknown[0]!r}")
        if options.vectors is not None and options.vectors < 1:
            raise ValueError(f"--vectors must be positive, not {options.vectors}")
        if options.jobs < 1:
            raise ValueError(f"--jobs must be positive, not {options.jobs}")
        if options.campaign and options.simulator != "verilator":
            raise ValueError(f"--campaign runs on verilator, not {options.simulator}")
        waves = options.waves or waves_from_environment()
        if options.campaign and waves:
            raise ValueError("--campaign records no waveforms: leave --waves and WAVES out")
        if options.seed is not None and options.seed < 0:
            raise ValueError(f"--seed must be a non-negative integer, not {options.seed}")
        seed = seed_from_environment() if options.seed is None else options.seed
        tool = find_simulator(options.simulator)
        if any(CASES[name].block == "pe" for name in options.cases or (() if options.campaign else CASES)):
            find_cocotb()
        target = options.json or build_root() / "regress.json"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--json must be a file in a folder that can be made, not {target}: {error}") from error
        if target.is_dir():
            raise ValueError(f"--json must be a file, not the folder {target}")
    except (ValueError, RuntimeError) as error:
        print(f"sim.regress: {error}", file=sys.stderr)
        return 2
    print(f"{tool.name} {tool.version}, SEED={seed}", flush=True)
    chosen = [CASES[name] for name in options.cases or (list(CASES)[:1] if options.campaign else CASES)]
    reports = []
    for case in chosen:
        try:
            if options.campaign:
                reports.append(campaign(case, options.vectors or case.campaign, seed, options.jobs))
            else:
                reports.append(regress(case, options.vectors, seed, options.simulator, waves))
        except (SimulationError, OSError) as error:
            print(f"sim.regress: {case.name}: {error}", file=sys.stderr)
            return 1
        for fault in reports[-1].faults:
            print(f"{case.name}: {fault}", flush=True)
    print(table(reports))
    target.write_text(json.dumps([report.as_json() for report in reports], indent=2) + "\n", encoding="utf-8")
    print(f"written to {target}")
    return 1 if any(report.faults for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
