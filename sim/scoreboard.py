"""Compares what a block did, row by row, with the golden model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.packed_pair import unpack
from model.vmac import Vectors, vmac
from model.vmac_autofp2 import vmac_autofp2
from model.vmac_nvfp4 import vmac_nvfp4
from model.weight_encoder import encode
from sim.coverage import (
    ENCODER_MODES,
    Coverage,
    sample_encoder,
    sample_resets,
    sample_saturation,
    sample_vectors,
)
from sim.harness import pack_fields
from sim.stimuli import FREE_PAIRS, MODES, EncoderShape, Stimulus, VectorShape

__all__ = ["Tally", "check_encoder", "check_vectors", "encoder_columns", "reference"]

KEPT = 5


@dataclasses.dataclass
class Tally:
    """Result of comparing a block with its model; tallies of several runs add up.

    Attributes
    ----------
    expected, compared : dict of str to int
        Results that were due, and that were compared, by mode.
    nonzero : int
        Compared results that differ from what a block that adds nothing would give.
    mismatches : int
        Rows that disagree in any way.
    unknown : int
        Outputs that had an X where they must be known.
    messages : list of str
        The first few disagreements.
    """

    expected: dict[str, int] = dataclasses.field(default_factory=dict)
    compared: dict[str, int] = dataclasses.field(default_factory=dict)
    nonzero: int = 0
    mismatches: int = 0
    unknown: int = 0
    messages: list[str] = dataclasses.field(default_factory=list)

    def __add__(self, other: "Tally") -> "Tally":
        def merged(one: Mapping[str, int], two: Mapping[str, int]) -> dict[str, int]:
            return {name: one.get(name, 0) + two.get(name, 0) for name in [*one, *(n for n in two if n not in one)]}

        return Tally(
            merged(self.expected, other.expected),
            merged(self.compared, other.compared),
            self.nonzero + other.nonzero,
            self.mismatches + other.mismatches,
            self.unknown + other.unknown,
            (self.messages + other.messages)[:KEPT],
        )

    @property
    def total(self) -> int:
        """Results compared in all modes."""
        return sum(self.compared.values())

    @property
    def faults(self) -> list[str]:
        """What is wrong with the run, in words; empty if it passed."""
        faults = []
        if self.mismatches or self.unknown:
            faults.append(
                f"{self.mismatches} rows differ, {self.unknown} outputs are unknown: {'; '.join(self.messages)}"
            )
        if self.compared != self.expected:
            faults.append(f"compared {self.compared}, expected {self.expected}")
        if not self.expected or min(self.expected.values()) == 0:
            faults.append(f"nothing was compared in some mode: {self.expected}")
        if 2 * self.nonzero <= self.total:
            faults.append(f"only {self.nonzero} of {self.total} results are non-zero")
        return faults

    def note(self, rows: NDArray[np.intp], what: str, *values: tuple[str, NDArray[Any]]) -> None:
        """Record disagreeing rows with the values that disagree."""
        self.mismatches += len(rows)
        for row in rows[: max(0, KEPT - len(self.messages))]:
            shown = ", ".join(f"{name} {int(array[row]):#x}" for name, array in values)
            self.messages.append(f"row {row}: {what}: {shown}")


def reference(
    shape: VectorShape, config: Any, stimulus: Stimulus, rows: NDArray[np.intp], psum: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """Return the golden model's partial sums and status bits, in the block's own bit order, for the vectors of ``rows``."""
    a, w = stimulus.a[rows], stimulus.w[rows]
    scales = stimulus.a_scale[rows], stimulus.w_scale[rows]
    if shape.block == "vmac_nvfp4":
        return vmac_nvfp4(config, a, w, *scales, psum)
    if shape.block == "vmac_autofp2":
        return vmac_autofp2(config, a, w, *scales, psum)
    mode = stimulus.mode[rows]
    result = vmac(config, Vectors(mode & 1 == 1, mode >> 1 == 1, a, w, *scales, stimulus.refine[rows], psum))
    return result.psum, result.status


def _last(rows: int, where: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return for each row the last of ``where`` at or before it, -1 if there is none."""
    table = np.full(rows, -1, np.int64)
    table[where] = where
    return np.maximum.accumulate(table)


def _before(table: NDArray[np.int64], delay: int) -> NDArray[np.int64]:
    return np.concatenate([np.full(delay, -1, np.int64), table[: len(table) - delay]])


def check_vectors(
    shape: VectorShape,
    config: Any,
    stimulus: Stimulus,
    outputs: Mapping[str, NDArray[Any]],
    latency: int,
    psum_delay: int,
    coverage: Coverage | None = None,
) -> Tally:
    """Compare the outputs of a vector MAC with the golden model.

    A vector is due ``latency`` rows after its own, unless reset comes in between. ``valid_o`` is compared in every
    row, ``psum_o`` with every ``valid_o``. Status is sticky: in every row it must hold the bits of all vectors since
    reset that came out, and no bit that no vector since reset raises. A vector whose partial sum came from the block
    itself is checked with what the block had put out, so a chain is right if each of its steps is.

    Parameters
    ----------
    shape, config : VectorShape, model configuration
        The block.
    stimulus : Stimulus
        N rows, settled.
    outputs : mapping of str to ndarray [N + latency or more]
        ``valid_o``, ``psum_o`` and ``status`` of each row, and ``valid_o__x`` and so on, as
        `sim.harness.BulkHarness.run` gives them.
    latency, psum_delay : int
        From the sidecar.
    coverage : Coverage, optional
        Counts the compared vectors.

    Raises
    ------
    ValueError
        Too few rows of outputs.
    """
    count = len(stimulus)
    rows = len(outputs["valid_o"])
    if rows < count + latency:
        raise ValueError(f"outputs must have at least {count + latency} rows, not {rows}")
    tally = Tally()
    reset = _last(rows, np.flatnonzero(stimulus.rst))
    alive = stimulus.alive(latency)
    due = np.zeros(rows, bool)
    due[latency : latency + count] = alive
    started = _before(reset, 1) >= 0

    valid_o = outputs["valid_o"].astype(bool)
    tally.note(np.flatnonzero(started & (valid_o != due)), "valid_o", ("got", valid_o), ("expected", due))

    vectors = np.flatnonzero(alive)
    seen = vectors + latency
    fed = stimulus.psum.copy()
    chained = np.flatnonzero(stimulus.chain)
    fed[chained] = outputs["psum_o"][chained + psum_delay]
    free = np.isin(stimulus.w[vectors], FREE_PAIRS).any(axis=1)
    checked = vectors[~free] if shape.weight_bits == 5 else vectors

    psum, bits = reference(shape, config, stimulus, checked, fed[checked])
    got = outputs["psum_o"][checked + latency]
    wrong = got != psum
    expected = np.zeros(rows, np.uint64)
    expected[checked + latency] = psum
    tally.note(checked[wrong] + latency, "psum_o", ("got", outputs["psum_o"]), ("expected", expected))
    tally.nonzero = int(np.count_nonzero(psum != fed[checked]))
    for mode in shape.modes:
        tally.expected[MODES[mode]] = int(np.count_nonzero(stimulus.mode[checked] == mode))
        tally.compared[MODES[mode]] = int(
            np.count_nonzero((stimulus.mode[checked] == mode) & valid_o[checked + latency])
        )

    # Status: what must be set by now, and what may be.
    raised = np.zeros(count, np.uint8)
    raised[checked] = bits
    uncertain = np.setdiff1d(np.flatnonzero(stimulus.valid), checked)
    width = {"vmac_nvfp4": 1, "vmac_autofp2": 2}.get(shape.block, 3)
    since = _before(reset, 1)
    must, may = np.zeros(rows, np.uint8), np.zeros(rows, np.uint8)
    for bit in (1 << k for k in range(width)):
        certain = np.flatnonzero(raised & bit)
        must |= np.where(_before(_last(rows, certain), latency) > since, bit, 0).astype(np.uint8)
        may |= np.where(_before(_last(rows, np.union1d(certain, uncertain)), 1) > since, bit, 0).astype(np.uint8)
    status = outputs["status"].astype(np.uint8)
    wrong_status = started & (((status & must) != must) | ((status & ~may) != 0))
    tally.note(np.flatnonzero(wrong_status), "status", ("got", status), ("must", must), ("may", may))

    unknown = started & (outputs["valid_o__x"] | outputs["status__x"])
    unknown[seen] |= outputs["psum_o__x"][seen]
    tally.unknown = int(unknown.sum())
    if tally.unknown and len(tally.messages) < KEPT:
        tally.messages.append(f"row {int(np.flatnonzero(unknown)[0])}: an output is unknown")

    if coverage is not None:
        good = checked[~wrong]
        sample_vectors(coverage, shape, stimulus, good, fed[good], psum[~wrong])
        if "saturation" in coverage.points:
            split = np.flatnonzero(stimulus.mode[good] & 1 == 0)
            halves = np.ascontiguousarray(psum[~wrong][split]).view(np.int32).reshape(-1, 2)
            flag = 1 if shape.block == "vmac_autofp2" else 2
            clamped = (bits[~wrong][split] & flag != 0)[:, None]
            side = np.where(halves == 2**31 - 1, 1, np.where(halves == -(2**31), -1, 0))
            sample_saturation(coverage, np.where(clamped, side, 0).astype(np.int64))
        sample_resets(coverage, stimulus, latency)
    return tally


def encoder_columns(inputs: Mapping[str, NDArray[np.uint8]], shape: EncoderShape, tail: int) -> dict[str, NDArray[Any]]:
    """Return the harness's columns for inputs of `sim.stimuli.encoder_stimulus`, with ``tail`` idle rows behind them."""
    columns: dict[str, NDArray[Any]] = {"mode_nvfp4": inputs["mode_nvfp4"]}
    for row in ("even", "odd"):
        columns[f"row_{row}"] = pack_fields(inputs[f"row_{row}"], 4)
        columns[f"scale_{row}"] = pack_fields(inputs[f"scale_{row}"], 8)
    padded = {name: np.concatenate([c, np.zeros((tail, *c.shape[1:]), c.dtype)]) for name, c in columns.items()}
    if shape.clocked:
        padded["rst"] = np.zeros(len(inputs["mode_nvfp4"]) + tail, bool)
    return padded


def check_encoder(
    shape: EncoderShape,
    inputs: Mapping[str, NDArray[np.uint8]],
    outputs: Mapping[str, NDArray[Any]],
    latency: int,
    coverage: Coverage | None = None,
) -> Tally:
    """Compare the outputs of a weight encoder with the golden model.

    Parameters
    ----------
    shape : EncoderShape
        The block.
    inputs : mapping
        From `sim.stimuli.encoder_stimulus`, N rows.
    outputs : mapping
        ``w`` and ``w_scale`` as bytes [N + latency, size], or integers if they fit 64 bits, ``w__x`` and
        ``w_scale__x``.
    latency : int
        0 or 1.
    coverage : Coverage, optional
        Counts the compared rows.
    """
    tally = Tally()
    mode = inputs["mode_nvfp4"].astype(bool)
    rows = (inputs["row_even"], inputs["row_odd"], inputs["scale_even"], inputs["scale_odd"])
    pairs, scales = encode(mode, *rows, scaling="group" if shape.grouped else "pair")
    count = len(mode)
    wrong = np.zeros(count, bool)
    for name, expected in (("w", pack_fields(pairs, 5)), ("w_scale", pack_fields(scales, 8))):
        got = outputs[name][latency : latency + count]
        if got.ndim == 1:
            got = pack_fields(got.reshape(-1, 1), 64)[:, : expected.shape[1]]
        wrong |= (got != expected).any(axis=1)
    tally.note(np.flatnonzero(wrong), "w or w_scale", ("mode_nvfp4", mode))
    tally.unknown = int(np.count_nonzero((outputs["w__x"] | outputs["w_scale__x"])[latency : latency + count]))
    compared = len(outputs["w"][latency : latency + count])
    for value, name in enumerate(ENCODER_MODES):
        tally.expected[name] = int(np.count_nonzero(mode == value))
        tally.compared[name] = int(np.count_nonzero(mode[:compared] == value))
    tally.nonzero = int(np.count_nonzero((pairs != 0b11100).any(axis=1)))
    if coverage is not None:
        good = ~wrong
        sample_encoder(coverage, shape, {name: c[good] for name, c in inputs.items()}, unpack(pairs[good]))
    return tally
