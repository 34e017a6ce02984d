"""``python -m sim.gemm``: matrix products on the simulated tile engine: tiling, padding, loading, and the sums back as NumPy arrays (docs/tile_engine.md)."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import array, autofp2, autofp6, block_scaled
from model.autofp6 import Refined
from model.block_scaled import BlockScaled
from model.llm import PROJECTIONS, layer_tensors, load
from model.pe import OFFSET_BYTES, Operands
from model.tile_engine import EngineConfig
from model.vmac import GROUP, SUBGROUP, SUBGROUPS
from sim.design import config_of, generated
from sim.harness import BulkHarness
from sim.runner import SimulationError
from sim.tiles import MODES, command_word, entry_words

__all__ = ["Gemm", "GemmError", "GemmResult", "Product", "layer_products", "main", "operands_of", "stored_products"]

RESET_ROWS = 2
MARGIN = 16
"""Idle cycles after the predicted end of a tile, before the next is given."""


class GemmError(RuntimeError):
    """The hardware did not do what it must: a tile was not taken, a sum is missing, or something is left over."""


@dataclasses.dataclass(frozen=True)
class GemmResult:
    """A product.

    Attributes
    ----------
    sums : ndarray of int64 [M, N]
        In units of 2⁻²² T_W·T_A, in AutoFP2 mode of ``2**(window_shift - 22)``.
    cycles : int
        From the first load to the last sum.
    tiles : int
        Tiles that were run.
    status : int
        Status bits of the tile engine at the end.
    """

    sums: NDArray[np.int64]
    cycles: int
    tiles: int
    status: int


def operands_of(tensor: BlockScaled | Refined, lanes: int = 32) -> Operands:
    """Return rows of an NVFP4 tensor, refined or not, as they are stored: leading axes (rows, KV), K padded with zeros to whole vectors.

    Parameters
    ----------
    tensor : BlockScaled or Refined
        Two axes, rows and K.
    lanes : int

    Raises
    ------
    ValueError
        A block has more refined subgroups than an entry has offset bytes.
    """
    base = tensor.base if isinstance(tensor, Refined) else tensor
    rows, padded = base.codes.shape
    extra = -padded % lanes
    steps, blocks = (padded + extra) // lanes, lanes // GROUP

    def whole(values: NDArray[Any], per_vector: int) -> NDArray[Any]:
        values = np.broadcast_to(values, (rows, values.shape[-1]))
        return np.pad(values, ((0, 0), (0, steps * per_vector - values.shape[-1])))

    codes = whole(base.codes, lanes).reshape(rows, steps, lanes)
    scales = whole(base.scales, blocks).reshape(rows, steps, blocks)
    masks = np.zeros((rows, steps, blocks), np.uint8)
    offsets = np.zeros((rows, steps, blocks, OFFSET_BYTES), np.uint8)
    if isinstance(tensor, Refined):
        chosen = whole(tensor.mask, blocks * SUBGROUPS).reshape(rows, steps, blocks, SUBGROUPS)
        if int(chosen.sum(axis=-1).max(initial=0)) > OFFSET_BYTES:
            raise ValueError(
                f"tensor must have at most {OFFSET_BYTES} refined subgroups in a group, not {int(chosen.sum(axis=-1).max())}"
            )
        masks = (chosen << np.arange(SUBGROUPS)).sum(axis=-1).astype(np.uint8)
        fields = whole(tensor.offsets, lanes).reshape(rows, steps, blocks, SUBGROUPS, SUBGROUP).astype(np.int64) & 3
        octets = (fields << 2 * np.arange(SUBGROUP)).sum(axis=-1).astype(np.uint8)
        rank = np.cumsum(chosen, axis=-1) - 1
        for place in range(OFFSET_BYTES):
            offsets[..., place] = np.where(chosen & (rank == place), octets, 0).sum(axis=-1)
    return Operands(codes, scales, masks, offsets)


@dataclasses.dataclass
class _Block:
    """Rows of one operand, spread over the banks: for each bank Operands with leading axes (KV, rows), and the rows that are real."""

    banks: list[Operands]
    rows: list[NDArray[np.intp]]


def _spread(stored: Operands, first: int, banks: int, per_bank: int) -> _Block:
    """Take rows from ``first`` on, so many for each bank; rows beyond the end are zeros."""
    total = len(stored.codes)
    result = _Block([], [])
    for bank in range(banks):
        wanted = np.arange(first + bank * per_bank, first + (bank + 1) * per_bank)
        real = wanted < total
        index = np.where(real, wanted, 0)

        def take(values: NDArray[np.uint8], index: NDArray[np.intp] = index, real: NDArray[np.bool_] = real) -> Any:
            picked = values[index] * real.reshape(-1, *[1] * (values.ndim - 1))
            return np.ascontiguousarray(np.swapaxes(picked, 0, 1).astype(np.uint8))

        result.banks.append(Operands(take(stored.codes), take(stored.scales), take(stored.masks), take(stored.offsets)))
        result.rows.append(wanted)
    return result


class Gemm:
    """Runs products ``a · wᵀ`` on a simulated tile engine.

    Products of any M and N are cut into tiles, edges padded with zeros; K must fit the banks. Operands of a tile are loaded while the
    one before it computes.

    Parameters
    ----------
    simulator : str
        ``"verilator"`` or ``"icarus"``.
    **parameters
        Of the block ``tile_engine``.
    """

    def __init__(self, simulator: str = "verilator", **parameters: Any) -> None:
        self.config: EngineConfig = config_of("tile_engine", **parameters)
        design = generated("tile_engine", **parameters)
        self._widths = {port["name"]: port["width"] for port in design.sidecar["ports"]}
        self._harness = BulkHarness({"tile_engine.v": design.verilog}, design.sidecar, simulator)

    def tile_sizes(self, m: int, n: int, kv: int, mode: str) -> tuple[int, int]:
        """Return rows of activations and rows of weights per bank and tile, for a product of these sizes.

        Raises
        ------
        ValueError
            A K-vector of one row does not fit the banks twice.
        """
        config = self.config
        deepest = min(config.activation_depth, config.weight_depth) // 2
        if kv > min(deepest, config.max_kv):
            raise ValueError(f"K must be at most {min(deepest, config.max_kv) * config.lanes}, not {kv * config.lanes}")
        together = 1 if mode != MODES[0] else 2
        rows = _even_share(m, config.rows, min(config.max_m, config.activation_depth // 2 // kv))
        most = min(config.max_words // rows, config.weight_depth // 2 // kv * (2 // together))
        return rows, together * _even_share(n // together, config.columns, most)

    def run(self, a: Operands, w: Operands, mode: str) -> GemmResult:
        """Multiply.

        Parameters
        ----------
        a : Operands
            Activations, leading axes (M, KV), as from :func:`operands_of`.
        w : Operands
            Weights, leading axes (N, KV).
        mode : {"AutoFP2", "NVFP4", "AutoFP6"}
            In AutoFP2 mode N must be even.

        Raises
        ------
        ValueError
            Wrong sizes or mode.
        GemmError
            The hardware failed.
        """
        config = self.config
        if mode not in MODES or (mode == MODES[2] and config.refinement == "none"):
            raise ValueError(f"mode must be one of those of the configuration, not {mode!r}")
        (m, kv), n = a.codes.shape[:2], len(w.codes)
        if w.codes.shape[1] != kv:
            raise ValueError(f"a and w must have the same number of K-vectors, not {kv} and {w.codes.shape[1]}")
        nvfp4 = mode != MODES[0]
        if not nvfp4 and n % 2:
            raise ValueError(f"w must have an even number of rows in AutoFP2 mode, not {n}")
        rows, w_rows = self.tile_sizes(m, n, kv, mode)
        vectors = w_rows if nvfp4 else w_rows // 2
        command = command_word(config.pe, rows, vectors, kv, nvfp4, mode == MODES[2])
        duration = array.cycles(config.array, [(rows, vectors, kv)])[0] + MARGIN

        inputs = _Rows(self._widths)
        inputs.idle(RESET_ROWS, reset=True)
        plan = []
        end = inputs.length
        a_loaded, offered = -1, []
        for number, (i, j) in enumerate(_blocks(m, n, config.rows * rows, config.columns * w_rows)):
            half = number % 2
            # Both halves of the row banks hold the same activations until the next ones are needed.
            a_block = _spread(a, i, config.rows, rows)
            w_block = _spread(w, j, config.columns, w_rows)
            a_base = (i // (config.rows * rows)) % 2 * (config.activation_depth // 2)
            w_base = half * (config.weight_depth // 2)
            if a_loaded != i:
                for bank, operands in enumerate(a_block.banks):
                    addresses = a_base + np.arange(kv * rows)
                    inputs.load(self._load_words(operands, addresses, bank, weight=False))
                a_loaded = i
            pairs = (w_rows + 1) // 2
            for bank, operands in enumerate(w_block.banks):
                place = np.arange(kv * w_rows)
                row = place % w_rows
                addresses = w_base + place // w_rows * pairs + row // 2
                inputs.load(self._load_words(operands, addresses, bank, weight=True, odd=row % 2))
            inputs.idle(max(end - inputs.length, 0))
            offered.append(inputs.length)
            inputs.tile(command, a_base, w_base, kv, config)
            end = inputs.length + duration
            plan.append((a_block, w_block))
        inputs.idle(end - inputs.length)
        outputs = self._harness.run(inputs.columns())
        if not outputs["tile__ready"][offered].all():
            raise GemmError(f"tile {int(np.argmin(outputs['tile__ready'][offered]))} was not taken")
        if outputs["busy"][-1]:
            raise GemmError("the engine is busy at the end")
        return self._collect(outputs, plan, m, n, rows, vectors, nvfp4)

    def _load_words(
        self,
        operands: Operands,
        addresses: NDArray[np.intp],
        bank: int,
        *,
        weight: bool,
        odd: NDArray[np.intp] | None = None,
    ) -> list[int]:
        config = self.config
        entry_bits = (4 * GROUP + 8 + (20 if config.refinement != "none" else 0)) * config.vmac.blocks
        address_bits = max(config.activation_depth, config.weight_depth).bit_length() - 1
        index_bits = (max(config.rows, config.columns) - 1).bit_length()
        odds = odd if odd is not None else np.zeros(len(addresses), np.intp)
        words = entry_words(config.pe, operands, weights=False)
        return [
            word
            | int(address) << entry_bits
            | int(parity) << entry_bits + address_bits
            | bank << entry_bits + address_bits + 1
            | int(weight) << entry_bits + address_bits + 1 + index_bits
            for word, address, parity in zip(words, addresses, odds, strict=True)
        ]

    def _collect(
        self, outputs: dict[str, NDArray[Any]], plan: list[Any], m: int, n: int, rows: int, vectors: int, nvfp4: bool
    ) -> GemmResult:
        config = self.config
        sums = np.zeros((m, n), np.int64)
        written = np.zeros((m, n), bool)
        last = 0
        for c in range(config.columns):
            valid = outputs[f"result__{c}__valid"].astype(bool)
            words = np.ascontiguousarray(outputs[f"result__{c}__payload"][valid][:, :8]).view("<u8").reshape(-1)
            expected = len(plan) * config.rows * rows * vectors
            if len(words) != expected:
                raise GemmError(f"column {c} gave {len(words)} sums, not {expected}")
            last = max(last, int(np.flatnonzero(valid)[-1]))
            tiles = words.reshape(len(plan), config.rows, vectors, rows)
            for (a_block, w_block), tile in zip(plan, tiles, strict=True):
                w_rows = w_block.rows[c]
                for r in range(config.rows):
                    a_rows = a_block.rows[r]
                    if nvfp4:
                        values = tile[r].view(np.int64)
                    else:
                        halves = np.ascontiguousarray(tile[r]).view("<i4").reshape(vectors, rows, 2)
                        values = np.moveaxis(halves, 2, 1).reshape(2 * vectors, rows).astype(np.int64)
                    keep_n, keep_m = w_rows < n, a_rows < m
                    place = np.ix_(a_rows[keep_m], w_rows[keep_n])
                    sums[place] = values[keep_n][:, keep_m].T
                    written[place] = True
        if not written.all():
            raise GemmError(f"{int((~written).sum())} of {written.size} sums did not come")
        return GemmResult(sums, last - RESET_ROWS, len(plan), int(outputs["status"][-1]))


def _even_share(total: int, banks: int, most: int) -> int:
    """Return how many to give each bank at a time, at most so many, so that the last round is as full as the others."""
    rounds = -(-total // (banks * most))
    return -(-total // (banks * rounds))


def _blocks(m: int, n: int, rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """First rows of the tiles of an array, weights inside."""
    for i in range(0, m, rows):
        for j in range(0, n, columns):
            yield i, j


class _Rows:
    """Input rows of the harness, appended cycle by cycle."""

    def __init__(self, widths: dict[str, int]) -> None:
        self._widths = widths
        self._loads: list[tuple[int, int]] = []
        self._tiles: list[tuple[int, int]] = []
        self._reset = 0
        self.length = 0

    def idle(self, count: int, *, reset: bool = False) -> None:
        self.length += count
        if reset:
            self._reset = self.length

    def load(self, words: list[int]) -> None:
        self._loads += [(self.length + n, word) for n, word in enumerate(words)]
        self.length += len(words)

    def tile(self, command: int, a_base: int, w_base: int, kv: int, config: EngineConfig) -> None:
        width = self._widths["tile__payload"] - config.max_kv.bit_length()
        bits = width - (config.activation_depth * config.weight_depth).bit_length() + 1
        word = command | a_base << bits | w_base << bits + config.activation_depth.bit_length() - 1 | kv << width
        self._tiles.append((self.length, word))
        self.length += 1

    def columns(self) -> dict[str, NDArray[Any]]:
        columns: dict[str, NDArray[Any]] = {
            "rst": (np.arange(self.length) < self._reset).astype(np.uint8),
            "clear": np.zeros(self.length, np.uint8),
        }
        for name, words in (("load", self._loads), ("tile", self._tiles)):
            width = self._widths[f"{name}__payload"]
            size = -(-width // 8)
            valid = np.zeros(self.length, np.uint8)
            payload = np.zeros((self.length, size), np.uint8)
            places = [place for place, _ in words]
            valid[places] = 1
            text = b"".join(word.to_bytes(size, "little") for _, word in words)
            payload[places] = np.frombuffer(text, np.uint8).reshape(len(words), size)
            columns[f"{name}__valid"] = valid
            columns[f"{name}__payload"] = payload if width > 64 else _wide(payload)
        for name in self._widths:
            if name.startswith("result__") and name.endswith("__ready"):
                columns[name] = np.ones(self.length, np.uint8)
        return columns


def _wide(octets: NDArray[np.uint8]) -> NDArray[np.uint64]:
    wide = np.zeros((len(octets), 8), np.uint8)
    wide[:, : octets.shape[1]] = octets
    return wide.view("<u8").reshape(-1)


@dataclasses.dataclass(frozen=True)
class Product:
    """Operands of one product in one mode, and what it must be.

    Attributes
    ----------
    mode : str
    a, w : Operands
        Activations and weights as they are stored.
    exact : ndarray of float64 [M, N]
        Product of the dequantised tensors, without tensor scales.
    unit : float
        What 1 in the sums is worth.
    allowed : float
        Largest difference in units: 0, in AutoFP2 mode half a unit per K-vector.
    """

    mode: str
    a: Operands
    w: Operands
    exact: NDArray[np.float64]
    unit: float
    allowed: float


def layer_products(
    config: EngineConfig, w: NDArray[np.float32], x: NDArray[np.float32], density: float = 0.2
) -> Iterator[Product]:
    """Quantise weights [N, K] and activations [M, K] for every mode of a configuration.

    ``density`` is the share of weight subgroups that AutoFP6 refines.
    """
    weights = block_scaled.quantize(w)
    if config.refinement == "none":
        yield from stored_products(config, weights, x)
        return
    slots = config.slots_per_block if config.refinement == "slots" else SUBGROUPS
    mask = autofp6.select_weights(autofp6.subgroup_errors(w, weights), density, min(slots, OFFSET_BYTES))
    yield from stored_products(config, autofp6.refine(w, weights, mask, step=config.step), x)


def stored_products(
    config: EngineConfig, w: BlockScaled | Refined, x: NDArray[np.float32], modes: Sequence[str] = MODES
) -> Iterator[Product]:
    """Quantise activations [M, K] for weights that are quantised already, for every mode of a configuration.

    Weights that are not refined give no product in AutoFP6 mode.
    """

    def plain(tensor: BlockScaled) -> BlockScaled:
        return dataclasses.replace(tensor, tensor_scale=np.float32(1))

    weights = w.base if isinstance(w, Refined) else w
    lanes = config.lanes
    steps = -(-weights.codes.shape[1] // lanes)
    for mode in modes:
        shared = 2 if mode == MODES[0] and config.scaling == "pair" else 1
        base = block_scaled.quantize(x, shared_groups=shared)
        a: BlockScaled | Refined = base
        b: BlockScaled | Refined = weights
        exact_a, exact_b = block_scaled.dequantize(plain(base)), block_scaled.dequantize(plain(weights))
        unit, allowed = 2.0**-22, 0.0
        if mode == MODES[0]:
            exact_b = autofp2.dequantize(plain(weights), config.scaling, c=1)
            unit, allowed = unit * 2.0**config.window_shift, 0.5 * steps
        elif mode == MODES[2]:
            if not isinstance(w, Refined) or config.refinement == "none":
                continue
            slots = config.slots_per_block if config.refinement == "slots" else SUBGROUPS
            chosen = autofp6.select_activations(autofp6.subgroup_errors(x, base), w.mask, 0.0, min(slots, OFFSET_BYTES))
            b, a = w, autofp6.refine(x, base, chosen, step=config.step)
            exact_b = autofp6.dequantize(dataclasses.replace(w, base=plain(weights)))
            exact_a = autofp6.dequantize(dataclasses.replace(a, base=plain(base)))
        exact = exact_a.astype(np.float64) @ exact_b.astype(np.float64).T
        yield Product(mode, operands_of(a, lanes), operands_of(b, lanes), exact, unit, allowed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if every product is right, 1 if not, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m sim.gemm",
        description="Projections of SmolLM2-135M on the simulated tile engine, in every mode.",
    )
    add = parser.add_argument
    add("--layer", type=int, default=11, help="decoder layer (default: 11, where activations spike)")
    add("--projections", nargs="+", default=list(PROJECTIONS), choices=PROJECTIONS, help="matrices (default: all four)")
    add("--tokens", type=int, default=64, help="tokens (default: 64)")
    add("--rows", type=int, default=2, help="rows of the array (default: 2)")
    add("--columns", type=int, default=2, help="columns of the array (default: 2)")
    options = parser.parse_args(arguments)
    try:
        if options.tokens < 1:
            raise ValueError(f"--tokens must be at least 1, not {options.tokens}")
        EngineConfig(rows=options.rows, columns=options.columns)
        model = load()
        model.weight(options.layer, options.projections[0])
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"sim.gemm: {error}", file=sys.stderr)
        return 2
    try:
        gemm = Gemm(rows=options.rows, columns=options.columns)
    except (SimulationError, OSError) as error:
        print(f"sim.gemm: {error}", file=sys.stderr)
        return 1
    elements = options.rows * options.columns
    failed = False
    print(
        f"{'matrix':8} {'M':>5} {'N':>5} {'K':>5} {'mode':8} {'tiles':>5} {'cycles':>9} {'use %':>6} {'worst':>6} {'s':>6}"
    )
    for name in options.projections:
        w, x = layer_tensors(model, options.layer, name)
        x = x[: options.tokens]
        for product in layer_products(gemm.config, w, x):
            started = time.monotonic()
            result = gemm.run(product.a, product.w, product.mode)
            worst = float(np.abs(result.sums - product.exact / product.unit).max())
            right = worst <= product.allowed and not result.status
            failed |= not right
            vectors = result.sums.size * product.a.codes.shape[1] // (2 if product.mode == MODES[0] else 1)
            print(
                f"{name:8} {len(x):>5} {len(w):>5} {w.shape[1]:>5} {product.mode:8} {result.tiles:>5} {result.cycles:>9} "
                f"{100 * vectors / result.cycles / elements:>6.1f} {worst:>6.2f} {time.monotonic() - started:>6.1f} "
                f"{'ok' if right else 'WRONG'}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
