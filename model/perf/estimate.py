"""Latency, traffic and energy of a language model on an accelerator (docs/performance-model.md)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.accelerator import Mode
from model.perf.constants import constant
from model.perf.gemm_cycles import Tiled, array_cycles, rtl_cycles
from model.perf.hardware import PRECISIONS, Datapath, Hardware
from model.perf.language_model import LanguageModel
from model.perf.workload import Gemm, Mix, decode, prefill

__all__ = ["ENERGIES", "Cost", "Estimate", "Phase", "check", "cost", "estimate"]

Float = NDArray[np.float64]

ENERGIES = ("vector MACs", "idle", "element buffers", "global buffer", "memory")
"""What energy goes to. The first two are measured on the gates; the others are bytes by assumed constants."""

LARGEST = 2**20
"""Of tokens and sequences: more is a slip of the keyboard, and would take as long to notice."""
MOST_TOKENS = 2**24 - 1
"""Of all prompts together: rows of a product that a descriptor has a number for."""
MOST_SIZES = 17
"""Sizes of a kind of product whose cycles are predicted in ``rtl``."""


@dataclass(frozen=True)
class Cost:
    """What products cost, all layers together; arrays with a value for each step or block.

    Attributes
    ----------
    seconds : ndarray
    cycles : ndarray
        That an accelerator computes, in ``rtl`` also those in which it waits for operands.
    memory, buffer : ndarray
        Bytes from and to memory; from and to the global buffer.
    vectors, macs : ndarray
        Vector operations with operands other than padding; MACs that the model asks for.
    energy : ndarray [5, …]
        Joules, as :data:`ENERGIES`.
    """

    seconds: Float
    cycles: Float
    memory: Float
    buffer: Float
    vectors: Float
    macs: Float
    energy: Float

    def total(self, shares: Float) -> "Cost":
        """Return the sums over steps or blocks, weighted."""
        return Cost(*((getattr(self, name) * shares).sum(axis=-1) for name in self.__dataclass_fields__))

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def as_json(self) -> dict[str, Any]:
        """Return the sums as numbers."""
        names = [name for name in self.__dataclass_fields__ if name != "energy"]
        return {name: float(getattr(self, name)) for name in names} | {
            "energy": dict(zip(ENERGIES, map(float, self.energy), strict=True))
        }


def cost(hardware: Hardware, datapath: Datapath, precision: int, gemm: Gemm) -> Cost:
    """Return what products cost on a datapath if their layer asks for some precision.

    Raises
    ------
    ValueError
        A size does not fit the banks.
    """
    config = hardware.config
    run = hardware.execution(datapath, 4 if gemm.fixed and not datapath.uniform else precision)
    refined = run.mode == Mode.AUTOFP6
    steps = np.ceil(gemm.k / config.lanes)
    longer = np.ceil(steps * run.length - 1e-9)
    stored = constant("bytes_per_vector") * run.stored
    if refined:
        stored += constant("mask_bytes_per_vector") + constant("refined_per_vector")
    across, rounds = _divided(hardware, gemm.count)
    part = replace(gemm, n=np.ceil(gemm.n / across))
    if hardware.schedule == "rtl":
        tiled = _rtl(hardware, run.mode, part, longer)
    else:
        reading = stored * steps / longer / hardware.bandwidth * hardware.clock
        tiled = array_cycles(config, run.mode, gemm.m, part.n, longer, reading)
    paired = run.mode == Mode.AUTOFP2
    vectors = gemm.count * gemm.m * (gemm.n / 2 if paired else gemm.n) * longer
    operands = gemm.count * (across * gemm.m + tiled.panels * gemm.n) * steps * stored
    memory = operands + gemm.count * gemm.m * gemm.n * constant("output_bytes")
    entry = constant("bank_bits_per_vector" if datapath.refines else "unrefined_bits_per_vector") / 8
    rows = config.rows * tiled.tile_m + config.columns * tiled.tile_n * (2 if paired else 1)
    buffer = operands + gemm.count * across * tiled.tiles * rows * longer * entry
    computing, bringing = rounds * tiled.cycles / hardware.clock, memory / hardware.bandwidth
    seconds = _together(hardware, computing, bringing)
    idle = np.maximum(seconds * hardware.clock * hardware.elements - vectors, 0)
    energy = 1e-15 * np.array(
        [
            vectors * run.energy,
            idle * hardware.idle(datapath),
            vectors * constant("pe_bytes_per_vector") * constant("pe_buffer_fj_per_byte"),
            buffer * constant("global_buffer_fj_per_byte"),
            memory * constant("dram_fj_per_byte"),
        ]
    )
    return Cost(
        seconds * gemm.layers,
        rounds * tiled.cycles * gemm.layers,
        memory * gemm.layers,
        buffer * gemm.layers,
        vectors * gemm.layers,
        gemm.macs,
        energy * gemm.layers,
    )


def _divided(hardware: Hardware, count: Float) -> tuple[Float, Float]:
    """Return how many accelerators share a product, each with a part of its weights' rows, and how many products follow each other on one."""
    if hardware.accelerators == 1:
        return np.ones_like(count), count
    across = np.maximum(hardware.accelerators // np.ceil(count), 1)
    return across, np.ceil(count / (hardware.accelerators // across))


def _together(hardware: Hardware, computing: Float, bringing: Float) -> Float:
    """Return the seconds of products from those of the array and those of memory."""
    if hardware.schedule == "rtl" or hardware.overlap:
        return np.maximum(computing, bringing)
    return computing + bringing


def _paged(hardware: Hardware, gemm: Gemm, longer: Float) -> tuple[Float, Float]:
    """Return rows of weights and K-vectors; in ``rtl`` keys and values come in whole pages, so that few sizes are different."""
    page, lanes = constant("page"), hardware.config.lanes
    n, kv = gemm.n, longer
    if hardware.schedule == "rtl" and gemm.cached == "n":
        n = np.ceil(n / page) * page
    if hardware.schedule == "rtl" and gemm.cached == "k":
        kv = np.ceil(kv * lanes / page) * page / lanes
    return n, np.ceil(kv)


def _rtl(hardware: Hardware, mode: Mode, gemm: Gemm, longer: Float) -> Tiled:
    """Cycles of the accelerator as it is generated. Of many sizes some are predicted; the others lie on lines between them."""
    sizes = np.stack(np.broadcast_arrays(gemm.m, *_paged(hardware, gemm, longer)), axis=-1).astype(np.int64)
    found = np.empty((sizes.size // 3, 5))
    for rows in np.unique(sizes[..., 0]):
        # Of sizes with the same rows one grows.
        same = np.flatnonzero(sizes[..., 0] == rows)
        different = np.unique(sizes.reshape(-1, 3)[same], axis=0)
        count = len(different)
        chosen = different[np.unique(np.linspace(0, count - 1, min(count, MOST_SIZES)).round().astype(np.int64))]
        columns = np.array([_tiled(hardware, mode, *size) for size in chosen.tolist()]).T
        work = chosen.prod(axis=1).astype(np.float64)
        for number, column in enumerate(columns):
            found[same, number] = np.interp(sizes.reshape(-1, 3)[same].prod(axis=1), work, column)
    return Tiled(*found.T.reshape(5, *sizes.shape[:-1]))


def _tiled(hardware: Hardware, mode: Mode, m: int, n: int, kv: int) -> tuple[float, ...]:
    """Return what :class:`Tiled` holds of a product."""
    cycles, tiles = rtl_cycles(hardware.config, mode, m, n, kv * hardware.config.lanes, hardware.latency)
    panels = -(-m // (hardware.config.rows * tiles.tile_m))
    return cycles, panels, tiles.tile_m, tiles.tile_n, tiles.tiles


def _refuse(hardware: Hardware, datapath: Datapath, gemms: Sequence[Gemm], shares: Float) -> None:
    """Raise ValueError if a K does not fit the banks."""
    lanes = hardware.config.lanes
    longest = min(hardware.config.activation_depth, hardware.config.max_kv)
    for gemm in gemms:
        for precision in (bits for index, bits in enumerate(PRECISIONS) if shares[:, index].any()):
            run = hardware.execution(datapath, 4 if gemm.fixed and not datapath.uniform else precision)
            steps = np.ceil(np.ceil(gemm.k / lanes) * run.length - 1e-9)
            kv = int(_paged(hardware, gemm, steps)[1].max())
            if kv > longest:
                extended = "" if run.length == 1 else f", {run.length:g} times the product's"
                raise ValueError(
                    f"K of {gemm.name} must be at most {longest * lanes} for these banks, not {kv * lanes}{extended}: {datapath.title}"
                )


@dataclass(frozen=True)
class Phase:
    """A prefill, or all decode steps together.

    Attributes
    ----------
    name : {"prefill", "decode"}
    gemms : dict of str to Cost
        By product.
    total : Cost
    steps : ndarray
        Seconds of each decode step; of a prefill its own.
    """

    name: str
    gemms: dict[str, Cost]
    total: Cost
    steps: Float


@dataclass(frozen=True)
class Estimate:
    """A request on a datapath.

    Attributes
    ----------
    datapath : Datapath
    hardware : Hardware
    prefill, decode : Phase
    tokens : int
        That decode makes, all sequences together.
    """

    datapath: Datapath
    hardware: Hardware
    prefill: Phase
    decode: Phase
    tokens: int

    @property
    def total(self) -> Cost:
        """Both phases."""
        return self.prefill.total + self.decode.total

    @property
    def chip_energy(self) -> float:
        """Joules without those of memory."""
        return float(self.total.energy[:-1].sum())

    def as_json(self) -> dict[str, Any]:
        """Return figures as JSON's values: seconds, bytes, joules, gate equivalents, shares."""
        total, area = self.total, self.hardware.area(self.datapath)
        return {
            "datapath": self.datapath.title,
            "seconds": float(total.seconds),
            "prefill_seconds": float(self.prefill.total.seconds),
            "decode_seconds": float(self.decode.total.seconds),
            "tokens_per_second": self.tokens / float(self.decode.total.seconds),
            "chip_joules": self.chip_energy,
            "joules": float(total.energy.sum()),
            "memory_bytes": float(total.memory),
            "buffer_bytes": float(total.buffer),
            "use": float(total.vectors / (total.seconds * self.hardware.clock * self.hardware.elements)),
            "tera_operations_per_second": 2e-12 * float(total.macs / total.seconds),
            "logic_ge": area["logic"],
            "area_ge": area["logic"] + area["memory"],
            "operations_per_second_and_ge": 2 * float(total.macs / total.seconds) / sum(area.values()),
            "phases": {
                phase.name: {name: each.as_json() for name, each in phase.gemms.items()}
                for phase in (self.prefill, self.decode)
            },
        }


def _phase(
    name: str, hardware: Hardware, datapath: Datapath, gemms: Sequence[Gemm], shares: Float, steps: int
) -> Phase:
    """Add up a phase; ``shares`` are (1 or steps, 3), and products of a prefill may have any number of blocks."""
    sums: dict[str, Cost] = {}
    times = np.zeros(steps)
    for gemm in gemms:
        parts = []
        for index, precision in enumerate(PRECISIONS):
            weight = shares[:, index]
            if weight.any():
                each = cost(hardware, datapath, precision, gemm)
                parts.append(each.total(weight))
                spent = each.seconds * weight
                times += spent if steps > 1 else spent.sum()
        sums[gemm.name] = parts[0] if len(parts) == 1 else sum(parts[1:], parts[0])
    costs = list(sums.values())
    return Phase(name, sums, sum(costs[1:], costs[0]), times)


def check(
    model: LanguageModel, hardware: Hardware, datapath: Datapath, mix: Mix, prompt: int, output: int, batch: int
) -> None:
    """Raise ValueError, at once, if :func:`estimate` of the same would."""
    _phases(model, hardware, datapath, mix, prompt, output, batch)


def _phases(
    model: LanguageModel, hardware: Hardware, datapath: Datapath, mix: Mix, prompt: int, output: int, batch: int
) -> list[tuple[str, list[Gemm], Float, int]]:
    """Return name, products, shares and steps of both phases; raise ValueError if they cannot run."""
    for name, value in (("prompt", prompt), ("output tokens", output), ("batch", batch)):
        if not 1 <= value <= LARGEST:
            raise ValueError(f"{name} must be from 1 to {LARGEST}, not {value}")
    if prompt * batch > MOST_TOKENS:
        raise ValueError(f"prompt × batch must be at most {MOST_TOKENS} tokens, not {prompt * batch}")
    phases = [
        ("prefill", prefill(model, prompt, batch), mix.prefill[None], 1),
        ("decode", decode(model, prompt + 1.0 + np.arange(output), batch), mix.steps(output), output),
    ]
    for _, gemms, shares, _ in phases:
        _refuse(hardware, datapath, gemms, shares)
    return phases


def estimate(
    model: LanguageModel,
    hardware: Hardware,
    datapath: Datapath,
    mix: Mix,
    prompt: int = 1024,
    output: int = 256,
    batch: int = 1,
) -> Estimate:
    """Return what a request of ``batch`` sequences takes: a prefill of ``prompt`` tokens each, and ``output`` decode steps.

    Raises
    ------
    ValueError
        A number is out of its range, or a size does not fit the banks.

    Examples
    --------
    >>> from model.perf.hardware import DATAPATHS, REFERENCE
    >>> from model.perf.language_model import read_model
    >>> found = estimate(read_model("smollm2-135m"), REFERENCE, DATAPATHS["autoematic"], Mix.of("0/100/0"), 512, 16)
    >>> found.tokens
    16
    """
    phases = _phases(model, hardware, datapath, mix, prompt, output, batch)
    first, then = (_phase(name, hardware, datapath, gemms, shares, steps) for name, gemms, shares, steps in phases)
    return Estimate(datapath, hardware, first, then, output * batch)
