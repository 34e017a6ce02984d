"""``python -m sim.real_input``: layers of SmolLM2-135M through encoder and vMAC hardware, in every mode, bit for bit.

Weights and the activations of the model's own forward pass are quantised with the golden model. The weight encoder's hardware makes the packed
pairs, the vMAC's hardware adds up each dot product over K through its own partial sum. Every step is compared with the golden model; the
final dot products are compared with a float64 matrix product of the dequantised tensors, which knows nothing of digits, pairs or shifts.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import autofp2, autofp6, block_scaled
from model.block_scaled import BlockScaled
from model.llm import PROJECTIONS, Llama, layer_tensors, load
from model.vmac import VmacConfig
from sim.harness import unpack_fields
from sim.regress import CASES, Bench, Case
from sim.runner import SIMULATORS, SimulationError, find_simulator
from sim.scoreboard import Tally, check_encoder, check_vectors, encoder_columns
from sim.stimuli import AUTOFP2, AUTOFP6, MODES, NVFP4, EncoderShape, Stimulus, VectorShape

__all__ = ["Outcome", "main", "refinements", "run_layer"]

RESET_ROWS = 3
WEIGHT_DENSITY = 0.2
UNIT = 2.0**-22


@dataclasses.dataclass
class Outcome:
    """What one mode did with one layer.

    Attributes
    ----------
    mode : str
    dots : int
        Dot products over the whole of K.
    tally : Tally
        Every vector against the golden model.
    exact : int
        Dot products equal to the float64 product of the dequantised tensors.
    worst : float
        Largest difference from it, in units of the accumulator.
    allowed : float
        Bound of that difference: 0 for NVFP4 and AutoFP6, half a unit per vector for AutoFP2's window.
    nmse : float
        Error against the product of the unquantised tensors, relative to its energy.
    """

    mode: str
    dots: int
    tally: Tally
    exact: int
    worst: float
    allowed: float
    nmse: float

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words; empty if everything agreed."""
        faults = list(self.tally.faults)
        if self.worst > self.allowed or (self.allowed == 0 and self.exact != self.dots):
            faults.append(f"{self.dots - self.exact} of {self.dots} dot products differ, by up to {self.worst} units")
        return faults


def _unscaled(tensor: BlockScaled) -> BlockScaled:
    """Return the tensor with T = 1, so that its float32 values are exact."""
    return dataclasses.replace(tensor, tensor_scale=np.float32(1))


def _encode(bench: Bench, mode: int, weights: BlockScaled) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Tally]:
    """Run weight rows through the encoder's hardware: pairs [R, K] and scale bytes [R, K / 32, bytes], R rows or pairs of rows."""
    shape = EncoderShape.of(bench.config)
    lanes, groups = shape.lanes, shape.lanes // 16
    step = 2 if mode == AUTOFP2 else 1
    rows = len(weights.codes) // step

    def vectors(values: NDArray[np.uint8], width: int, parity: int) -> NDArray[np.uint8]:
        return values[parity::step].reshape(-1, width)

    inputs = {
        "row_even": vectors(weights.codes, lanes, 0),
        "row_odd": vectors(weights.codes, lanes, step - 1),
        "scale_even": vectors(weights.scales, groups, 0),
        "scale_odd": vectors(weights.scales, groups, step - 1),
    }
    inputs["mode_nvfp4"] = np.full(len(inputs["row_even"]), mode & 1, np.uint8)
    outputs = bench.harness.run(encoder_columns(inputs, shape, bench.latency))
    tally = check_encoder(shape, inputs, outputs, bench.latency)
    count = len(inputs["row_even"])
    pairs = unpack_fields(outputs["w"][bench.latency :], 5, lanes).astype(np.uint8)
    octets = outputs["w_scale"][bench.latency : bench.latency + count]
    wide = octets.astype("<u8").view(np.uint8).reshape(count, 8) if octets.ndim == 1 else octets
    scales = wide[:, : bench.config.w_scale_bytes]
    return pairs.reshape(rows, -1), scales.reshape(rows, -1, bench.config.w_scale_bytes), tally


def _stream(
    bench: Bench,
    mode: int,
    pairs: NDArray[np.uint8],
    w_scales: NDArray[np.uint8],
    x: BlockScaled,
    refine: NDArray[np.uint64],
) -> tuple[NDArray[np.uint64], Tally]:
    """Compute all dot products of weight rows and tokens on the vMAC: psum_o [tokens, rows] after the last vector of K.

    Parameters
    ----------
    pairs, w_scales
        From `_encode`, rows [R, K] and [R, steps, bytes].
    x : BlockScaled
        Activations [tokens, K].
    refine : ndarray of uint64 [tokens, R, steps, records]
        Refinement records; broadcastable.
    """
    shape = VectorShape.of(bench.block, bench.config)
    lanes, blocks = shape.lanes, shape.blocks
    tokens, rows, steps = len(x.codes), len(pairs), pairs.shape[1] // lanes
    depth = bench.latency - bench.psum_delay
    dots = tokens * rows
    padded = -(-dots // depth) * depth
    # With an accumulator of several stages as many dot products take turns.
    order = np.minimum(np.arange(padded), dots - 1).reshape(-1, 1, depth)
    dot = np.broadcast_to(order, (len(order), steps, depth)).reshape(-1)
    step = np.broadcast_to(np.arange(steps)[None, :, None], (len(order), steps, depth)).reshape(-1)
    token, row = dot // rows, dot % rows

    def head(values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([np.zeros((RESET_ROWS, *values.shape[1:]), values.dtype), values])

    count = len(dot)
    stimulus = Stimulus(
        rst=np.arange(RESET_ROWS + count) < RESET_ROWS,
        valid=head(np.ones(count, bool)),
        mode=head(np.full(count, mode, np.uint8)),
        a=head(x.codes.reshape(tokens, steps, lanes)[token, step]),
        w=head(pairs.reshape(rows, steps, lanes)[row, step]),
        a_scale=head(x.scales.reshape(tokens, steps, blocks)[token, step]),
        w_scale=head(w_scales[row, step]),
        refine=head(np.broadcast_to(refine, (tokens, rows, steps, refine.shape[-1]))[token, row, step]),
        psum=np.zeros(RESET_ROWS + count, np.uint64),
        chain=head(step > 0),
    ).settled(bench.latency, bench.psum_delay)
    outputs = bench.harness.run(stimulus.columns(shape, bench.psum_delay, bench.latency))
    tally = check_vectors(shape, bench.config, stimulus, outputs, bench.latency, bench.psum_delay)
    tally = dataclasses.replace(
        tally,
        expected={name: n for name, n in tally.expected.items() if name == MODES[mode]},
        compared={name: n for name, n in tally.compared.items() if name == MODES[mode] or n},
    )
    if bool((~stimulus.chain[RESET_ROWS:] & (step > 0)).any()):
        raise ValueError("the vMAC must return a partial sum in time for the next vector of its dot product")
    last = RESET_ROWS + np.flatnonzero(step == steps - 1) + bench.latency
    return outputs["psum_o"][last][:dots].reshape(tokens, rows), tally


def refinements(
    config: VmacConfig, w: NDArray[np.float32], weights: BlockScaled, x: NDArray[np.float32], base: BlockScaled
) -> tuple[NDArray[np.uint64], autofp6.Refined, autofp6.Refined]:
    """Choose refinements of both tensors and merge them into records [tokens, rows, steps, records]."""
    slots = config.slots_per_block if config.refinement == "slots" else 4
    step = config.step
    mask = autofp6.select_weights(autofp6.subgroup_errors(w, weights), WEIGHT_DENSITY, min(slots, 2))
    refined_w = autofp6.refine(w, weights, mask, step=step)
    of_x = autofp6.select_activations(autofp6.subgroup_errors(x, base), mask, 0.0, slots)
    refined_x = autofp6.refine(x, base, of_x, step=step)
    tokens, rows, steps = len(x), len(w), base.codes.shape[1] // config.lanes
    size = (tokens, rows, steps)

    def spread(values: NDArray[Any], axis: int) -> NDArray[Any]:
        shaped = np.expand_dims(values.reshape(-1, steps, values.shape[-1] // steps), axis)
        return np.broadcast_to(shaped, (*size, shaped.shape[-1])).reshape(-1, shaped.shape[-1])

    records = autofp6.refinement_records(
        config,
        spread(mask[None], 0),
        spread(refined_w.offsets, 0),
        spread(of_x, 1),
        spread(refined_x.offsets, 1),
    )
    if records.overlap.any() or records.dropped.any():
        raise ValueError("refinements must be disjoint and fit the slots")
    return records.words.reshape(*size, -1), refined_w, refined_x


def run_layer(
    w: NDArray[np.float32], x: NDArray[np.float32], case: Case | None = None, simulator: str = "verilator"
) -> list[Outcome]:
    """Run one layer's weights and activations through the hardware in AutoFP2, NVFP4 and AutoFP6.

    Parameters
    ----------
    w : ndarray of float32 [N, K]
        Weights; N is even.
    x : ndarray of float32 [tokens, K]
        Activations.
    case : Case, optional
        Configuration of the vMAC, the default one by default.
    simulator : str
        ``"verilator"`` or ``"icarus"``.

    Returns
    -------
    list of Outcome
        One per mode that the configuration has.

    Raises
    ------
    ValueError
        Odd N, or K of weights and activations differ.
    """
    if len(w) % 2:
        raise ValueError(f"w must have an even number of rows, not {len(w)}")
    if w.shape[1] != x.shape[1]:
        raise ValueError(f"w and x must have the same K, not {w.shape[1]} and {x.shape[1]}")
    case = case or next(iter(CASES.values()))
    bench = Bench(case.block, case.parameters, simulator)
    config = bench.config
    # The accelerator's image is padded to whole vectors.
    extra = -w.shape[1] % config.lanes
    padding = ((0, 0), (0, extra))
    w, x = np.pad(w, padding), np.pad(x, padding)
    scaling = config.scaling
    encoder = Bench("weight_encoder", {"lanes": config.lanes, "scaling": scaling}, simulator)
    product = w.astype(np.float64) @ x.astype(np.float64).T
    weights = block_scaled.quantize(w)
    outcomes = []
    got: NDArray[np.float64]
    for mode in [mode for mode in (AUTOFP2, NVFP4, AUTOFP6) if mode in VectorShape.of(case.block, config).modes]:
        base = block_scaled.quantize(x, shared_groups=2 if mode == AUTOFP2 and scaling == "pair" else 1)
        pairs, w_scales, encoding = _encode(encoder, mode, weights)
        exact_w, exact_x = block_scaled.dequantize(_unscaled(weights)), block_scaled.dequantize(_unscaled(base))
        refine = np.zeros((1, 1, 1, getattr(config, "records", 0)), np.uint64)
        gain = 1.0
        if mode == AUTOFP6:
            refine, refined_w, refined_x = refinements(config, w, weights, x, base)
            exact_w = autofp6.dequantize(dataclasses.replace(refined_w, base=_unscaled(weights)))
            exact_x = autofp6.dequantize(dataclasses.replace(refined_x, base=_unscaled(base)))
        elif mode == AUTOFP2:
            exact_w = autofp2.dequantize(_unscaled(weights), scaling, c=1)
            gain = autofp2.C
        psum, tally = _stream(bench, mode, pairs, w_scales, base, refine)
        if encoding.mismatches or encoding.unknown:
            tally.note(np.arange(encoding.mismatches + encoding.unknown), "weight encoder")
        expected = exact_w.astype(np.float64) @ exact_x.astype(np.float64).T
        if mode == AUTOFP2:
            unit = UNIT * 2.0**config.window_shift
            halves = np.ascontiguousarray(psum).view(np.int32).reshape(*psum.shape, 2)
            # Rows 2r and 2r + 1 of the weights are the low and the high half.
            got = halves.reshape(len(psum), -1).T.astype(np.float64) * unit
            allowed = 0.5 * (w.shape[1] // config.lanes)
        else:
            unit, allowed = UNIT, 0.0
            got = psum.view(np.int64).T.astype(np.float64) * unit
        difference = np.abs(got - expected) / unit
        scale = float(weights.tensor_scale) * float(base.tensor_scale) * gain
        error = ((got * scale - product) ** 2).sum() / (product**2).sum()
        outcomes.append(
            Outcome(
                MODES[mode],
                got.size,
                tally,
                int((difference == 0).sum()),
                float(difference.max()),
                allowed,
                float(error),
            )
        )
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if hardware, model and matrix product agree, 1 if not, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m sim.real_input", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--layers", type=int, nargs="+", default=[11], help="decoder layers (default: 11, where activations spike)")
    add("--projections", nargs="+", default=list(PROJECTIONS), choices=PROJECTIONS, help="matrices (default: all four)")
    add("--rows", type=int, default=64, help="output rows of each matrix, spread over it (default: 64)")
    add("--tokens", type=int, default=32, help="tokens, spread over the sample text (default: 32)")
    add(
        "--case",
        default=next(iter(CASES)),
        help="vMAC configuration, see sim.regress --list (default: the default one)",
    )
    add("--simulator", default="verilator", choices=SIMULATORS, help="verilator (default) or icarus")
    options = parser.parse_args(arguments)
    try:
        if options.case not in CASES or CASES[options.case].block != "vmac":
            raise ValueError(f"--case must be a vmac case of sim.regress, not {options.case!r}")
        if options.rows < 2 or options.rows % 2 or options.tokens < 1:
            raise ValueError(f"--rows must be even and --tokens positive, not {options.rows} and {options.tokens}")
        find_simulator(options.simulator)
        model = load()
        for layer in options.layers:
            if not 0 <= layer < model.config.layers:
                raise ValueError(f"--layers must be from 0 to {model.config.layers - 1}, not {layer}")
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"sim.real_input: {error}", file=sys.stderr)
        return 2
    failed = False
    print(
        f"{'layer':>5} {'matrix':8} {'K':>5} {'mode':8} {'vectors':>8} {'dots':>6} {'exact':>6} {'worst':>6} {'NMSE':>9} {'s':>5}"
    )
    for layer in options.layers:
        for name in options.projections:
            started = time.monotonic()
            w, x = sampled_tensors(model, layer, name, options.rows, options.tokens)
            try:
                outcomes = run_layer(w, x, CASES[options.case], options.simulator)
            except (SimulationError, OSError) as error:
                print(f"sim.real_input: {error}", file=sys.stderr)
                return 1
            for outcome in outcomes:
                faults = outcome.faults
                failed |= bool(faults)
                seconds = time.monotonic() - started
                print(
                    f"{layer:>5} {name:8} {w.shape[1]:>5} {outcome.mode:8} {outcome.tally.total:>8} {outcome.dots:>6} "
                    f"{outcome.exact:>6} {outcome.worst:>6.2f} {outcome.nmse:>9.5f} {seconds:>5.1f} {'; '.join(faults) or 'ok'}"
                )
    return int(failed)


def sampled_tensors(
    model: Llama, layer: int, name: str, rows: int, tokens: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return ``rows`` rows of a projection's weights and ``tokens`` of its inputs, spread evenly over both."""
    w, x = layer_tensors(model, layer, name)
    chosen_w = np.linspace(0, len(w) - 1, min(rows, len(w) // 2 * 2)).astype(int)
    chosen_x = np.linspace(0, len(x) - 1, min(tokens, len(x))).astype(int)
    return w[chosen_w], x[chosen_x]


if __name__ == "__main__":
    sys.exit(main())
