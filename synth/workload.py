"""Streams of vectors for energy: tiles of real or random tensors, in the order in which a processing element runs them."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import block_scaled
from model.llm import layer_tensors, load
from model.weight_encoder import encode
from sim.real_input import refinements
from sim.scoreboard import reference
from sim.stimuli import AUTOFP2, AUTOFP6, MODES, Stimulus, VectorShape

__all__ = ["TENSORS", "Stream", "check_sizes", "quiet", "random_tensors", "real_tensors", "stream"]

TENSORS = ("real", "random")
RESET_ROWS = 3
LAYER, PROJECTION = 11, "gate_up"
TILE_TOKENS, TILE_ROWS = 16, 8
"""Tile of the default processing element: activations and weights that its accumulators have room for."""

Float = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Stream:
    """A run of one mode through a vector MAC.

    Attributes
    ----------
    mode : str
    stimulus : Stimulus
    first, cycles : int
        The rows that count: behind reset and the filling of the pipeline.
    macs : int
        Multiplications of a weight with an activation in a cycle.
    """

    mode: str
    stimulus: Stimulus
    first: int
    cycles: int
    macs: int


def real_tensors(rows: int, tokens: int, depth: int) -> tuple[Float, Float]:
    """Return rows of SmolLM2-135M's weights [rows, depth] and inputs of the same projection [tokens, depth], spread over both.

    Raises
    ------
    ValueError
        The projection, or the text that was run, does not have so many.
    """
    w, x = layer_tensors(load(), LAYER, PROJECTION)
    for name, size, most in (("rows", rows, len(w)), ("tokens", tokens, len(x)), ("depth", depth, w.shape[1])):
        if size > most:
            raise ValueError(f"--{name} must be at most {most} for real tensors, not {size}")
    chosen = (np.linspace(0, len(array) - 1, count).astype(int) for array, count in ((w, rows), (x, tokens)))
    of_w, of_x = chosen
    return w[of_w, :depth], x[of_x, :depth]


def check_sizes(rows: int, tokens: int, depth: int, lanes: int, autofp2: bool) -> None:
    """Check that tensors [rows, depth] and [tokens, depth] are whole tiles.

    Raises
    ------
    ValueError
        A size is no multiple of 8 rows (in AutoFP2 mode pairs of rows), 16 tokens, or the lanes.
    """
    units = {
        "rows": (rows, TILE_ROWS * (2 if autofp2 else 1)),
        "tokens": (tokens, TILE_TOKENS),
        "depth": (depth, lanes),
    }
    for name, (size, unit) in units.items():
        if size < 1 or size % unit:
            raise ValueError(f"--{name} must be a positive multiple of {unit}, not {size}")


def random_tensors(rows: int, tokens: int, depth: int, seed: int = 1) -> tuple[Float, Float]:
    """Return normally distributed tensors of the same shapes."""
    rng = np.random.default_rng(seed)
    w, x = (rng.standard_normal((count, depth)).astype(np.float32) for count in (rows, tokens))
    return w, x


def stream(
    block: str, config: Any, mode: int, w: Float, x: Float, latency: int, *, zero_weights: bool = False
) -> Stream:
    """Quantise two tensors and make the vectors of ``x · wᵀ`` in a mode.

    Tiles of 16 tokens and 8 rows, or pairs of rows; in a tile, for each vector of K, for each row, for each token, as in
    docs/pe.md. The partial sums that go in are those of the golden model.

    Parameters
    ----------
    block : str
    config
        Of the block.
    mode : int
        Index into `sim.stimuli.MODES`.
    w, x : ndarray of float32 [N, K], [M, K]
        K is a multiple of the lanes, N of 8, or 16 in AutoFP2, M of 16.
    latency : int
    zero_weights : bool
        Replace every weight by zero, but not the scales.

    Raises
    ------
    ValueError
        Another shape.
    """
    shape = VectorShape.of(block, config)
    lanes, blocks, split = shape.lanes, shape.blocks, 2 if mode == AUTOFP2 else 1
    check_sizes(len(w), len(x), w.shape[1], lanes, mode == AUTOFP2)
    rows, tokens, steps = len(w) // split, len(x), w.shape[1] // lanes
    weights = block_scaled.quantize(w)
    shared = 2 if mode == AUTOFP2 and not shape.grouped else 1
    base = block_scaled.quantize(x, shared_groups=shared)
    if zero_weights:
        weights = dataclasses.replace(weights, codes=np.zeros_like(weights.codes))
    codes = weights.codes.reshape(rows, split, steps, lanes)
    scales = weights.scales.reshape(rows, split, steps, blocks)
    if shape.weight_bits == 4:
        of_w, w_scales = codes[:, 0], scales[:, 0]
    else:
        even, odd, even_scale, odd_scale = (
            part[:, k % split].reshape(rows * steps, -1) for part in (codes, scales) for k in (0, 1)
        )
        whole = np.full(rows * steps, mode != AUTOFP2)
        pairs, of_scales = encode(whole, even, odd, even_scale, odd_scale, "group" if shape.grouped else "pair")
        of_w, w_scales = pairs.reshape(rows, steps, -1), of_scales.reshape(rows, steps, -1)
    records = np.zeros((1, 1, 1, getattr(config, "records", 0)), np.uint64)
    if mode == AUTOFP6:
        records, *_ = refinements(config, w, weights, x, base)
    order = [(rows // TILE_ROWS), tokens // TILE_TOKENS, steps, TILE_ROWS, TILE_TOKENS]
    tile_n, tile_m, step, n, m = (index.reshape(-1) for index in np.indices(order))
    row, token = tile_n * TILE_ROWS + n, tile_m * TILE_TOKENS + m
    count = len(row)

    def head(values: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([np.zeros((RESET_ROWS, *values.shape[1:]), values.dtype), values])

    records = np.broadcast_to(records, (tokens, rows, steps, records.shape[-1]))
    stimulus = Stimulus(
        rst=np.arange(RESET_ROWS + count) < RESET_ROWS,
        valid=head(np.ones(count, bool)),
        mode=head(np.full(count, mode, np.uint8)),
        a=head(base.codes.reshape(tokens, steps, lanes)[token, step]),
        w=head(of_w[row, step]),
        a_scale=head(base.scales.reshape(tokens, steps, blocks)[token, step]),
        w_scale=head(w_scales[row, step]),
        refine=head(records[token, row, step]),
        psum=np.zeros(RESET_ROWS + count, np.uint64),
        chain=np.zeros(RESET_ROWS + count, bool),
    )
    sums = np.zeros((tokens, rows), np.uint64)
    for k in range(steps):
        at = np.flatnonzero(step == k)
        fed = sums[token[at], row[at]]
        stimulus.psum[RESET_ROWS + at] = fed
        sums[token[at], row[at]], _ = reference(shape, config, stimulus, RESET_ROWS + at, fed)
    first = RESET_ROWS + latency + 1
    return Stream(MODES[mode], stimulus, first, (len(stimulus) - first) // 64 * 64, lanes * split)


def quiet(busy: Stream, latency: int, rows: int = 128) -> Stream:
    """Return a run in which the first vector of another stays on the inputs, not valid: only the clock goes on."""
    index = np.where(np.arange(RESET_ROWS + rows) < RESET_ROWS, np.arange(RESET_ROWS + rows), RESET_ROWS)
    arrays = {key.name: getattr(busy.stimulus, key.name)[index] for key in dataclasses.fields(Stimulus)}
    arrays["valid"] = np.arange(RESET_ROWS + rows) == RESET_ROWS
    first = RESET_ROWS + 2 * latency + 1
    return Stream("idle", Stimulus(**arrays), first, (rows + RESET_ROWS - first) // 64 * 64, 0)
