"""Weight preparation: which subgroups to refine, and refinement-aware GPTQ (paper, appendix E; docs/weights.md)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from model import autofp6, block_scaled
from model.autofp6 import OFFSET_BITS, Refined, Step
from model.block_scaled import GROUP, PAD, BlockScaled, chunks
from model.vmac import SUBGROUP, SUBGROUPS, check_choice

__all__ = ["RULES", "Calibrated", "Condition", "Options", "budget", "calibrate", "factor", "gains", "gram", "loss"]

Float = NDArray[np.float32]
Rule = Literal["nmse", "hessian", "gptq"]

RULES: tuple[Rule, ...] = ("nmse", "hessian", "gptq")
"""Ways to prepare a matrix: subgroups by plain or by Hessian-weighted error, rounded to nearest; or algorithm 1."""

_BLOCK = 8 * GROUP
"""Columns that are worked on at a time: compensation reaches those of a block group by group, and those behind it at once."""

MOST_DAMPING = 1e6
"""Beyond this all Hessians are the identity, and numbers of 32 bits do not hold U."""


@dataclass(frozen=True)
class Options:
    """Parameters of weight preparation.

    Attributes
    ----------
    density : float
        Share ρ of subgroups that are refined, at most ``slots / 4``.
    rule : {"gptq", "hessian", "nmse"}
    damping : float
        What is added to the Hessian's diagonal, as a share of its mean; from 0 to 10⁶.
    slots : int
        Most refined subgroups in a group of 16, 1 to 4.
    step : {"fixed", "exponent"}
    bits : int
        Width of offsets.

    Raises
    ------
    ValueError
        A parameter is outside its range.
    """

    density: float = 0.2
    rule: Rule = "gptq"
    damping: float = 0.1
    slots: int = 2
    step: Step = "fixed"
    bits: int = OFFSET_BITS

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, RULES)
        if not 1 <= self.slots <= SUBGROUPS:
            raise ValueError(f"slots must be from 1 to {SUBGROUPS}, not {self.slots}")
        most = self.slots / SUBGROUPS
        if not 0 <= self.density <= most:
            raise ValueError(f"density must be from 0 to {most} with {self.slots} slots, not {self.density}")
        if not 0 <= self.damping <= MOST_DAMPING:
            raise ValueError(f"damping must be from 0 to {MOST_DAMPING:g}, not {self.damping}")
        autofp6.offset_step(np.zeros(0, np.uint8), self.bits, self.step)


@dataclass(frozen=True)
class Condition:
    """What a Hessian was like.

    Attributes
    ----------
    dead : int
        Inputs that were always zero.
    damping : float
        What was added to the diagonal, as a share of its mean.
    raised : bool
        The damping that was asked for was not enough to factor the Hessian.
    """

    dead: int
    damping: float
    raised: bool


@dataclass(frozen=True)
class Calibrated:
    """A prepared matrix.

    Attributes
    ----------
    weights : Refined
        Codes (N, Kp); one mask for all rows.
    condition : Condition or None
        None if no Hessian was factored.
    """

    weights: Refined
    condition: Condition | None


def budget(density: float, length: int) -> int:
    """Return how many subgroups of a matrix with ``length`` inputs are refined, ``round(ρ·K/4)``."""
    return round(density * length / SUBGROUP)


def gram(x: Float, total: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return the Hessian ``XᵀX`` of inputs (tokens, K), shape (K, K); those of several texts add up, in place if ``total`` is given.

    Raises
    ------
    ValueError
        An input is NaN or infinite.
    """
    if not np.isfinite(x).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(x))[0])
        raise ValueError(f"x must be finite, not {x[index]} at index {index}")
    if total is None:
        total = np.zeros((x.shape[1], x.shape[1]))
    for start in range(0, len(total), _BLOCK):
        block = slice(start, start + _BLOCK)
        total[block, start:] += x[:, block].T @ x[:, start:]
        total[start:, block] = total[block, start:].T
    return total


def loss(difference: Float, hessian: NDArray[np.float64]) -> float:
    """Return ``‖ΔW·Xᵀ‖²`` of a change of weights (N, K), from the Hessian of X."""
    product = difference @ hessian.astype(np.float32)
    return float(np.einsum("nk,nk->", product, difference, dtype=np.float64))


def _diagonal(hessian: NDArray[np.float64]) -> NDArray[np.float64]:
    """Check a Hessian and return its diagonal."""
    if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1]:
        raise ValueError(f"hessian must be square, not of shape {hessian.shape}")
    if not np.isfinite(hessian).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(hessian))[0])
        raise ValueError(f"hessian must be finite, not {hessian[index]} at index {index}")
    diagonal = hessian.diagonal()
    if diagonal.min() < 0:
        raise ValueError(f"hessian must have no negative diagonal, not {diagonal.min()} at {diagonal.argmin()}")
    return diagonal


def factor(
    hessian: NDArray[np.float64], damping: float = 0.1, *, overwrite: bool = False
) -> tuple[NDArray[np.float64], Condition]:
    """Return the upper Cholesky factor U of the damped inverse Hessian, ``UᵀU = (H + λI)⁻¹`` up to a positive factor.

    λ is ``damping`` times the mean of the diagonal, and ten times as much, again and again, as long as a pivot is lost in rounding
    errors. A Hessian of zeros counts as the identity.

    Parameters
    ----------
    hessian : ndarray, shape (K, K)
        Symmetric, without negative numbers on the diagonal.
    damping : float
    overwrite : bool
        U takes the place of the Hessian, so that nothing else of its size is in memory.

    Returns
    -------
    U : ndarray of float64, shape (K, K)
    condition : Condition

    Raises
    ------
    ValueError
        The Hessian is not finite, not square, or its diagonal has a negative number.
    """
    diagonal = _diagonal(hessian).copy()
    upper = hessian if overwrite else hessian.copy()
    # With the largest first, that numbers neither overflow nor vanish.
    largest = diagonal.max()
    if largest > 0:
        upper /= largest
    scaled = upper.diagonal().copy()
    mean = float(scaled.mean()) if largest > 0 else 1.0
    used = damping
    while True:
        damped = scaled + used * mean
        np.fill_diagonal(upper, damped)
        if _factor_in_place(upper, len(upper) * np.finfo(np.float64).eps * float(damped.max())):
            break
        # What is above the diagonal is lost, but below there is the same.
        for start in range(0, len(upper), _BLOCK):
            block = slice(start, start + _BLOCK)
            upper[:start, block] = upper[block, :start].T
            upper[block, block] = np.tril(upper[block, block]) + np.tril(upper[block, block], -1).T
        used = max(10 * used, 1e-10)
    _invert_in_place(upper)
    return upper, Condition(int((diagonal == 0).sum()), used, used != damping)


def _blocks_upwards(size: int) -> Iterator[slice]:
    for start in reversed(range(0, size, _BLOCK)):
        yield slice(start, min(start + _BLOCK, size))


def _factor_in_place(a: NDArray[np.float64], smallest: float) -> bool:
    """Put V with ``V·Vᵀ = A`` on and above the diagonal of A; returns whether the squares of V's diagonal are larger than ``smallest``."""
    for block in _blocks_upwards(len(a)):
        start, end = block.start, block.stop
        row = a[block, end:]
        pivot = np.triu(a[block, block]) - np.triu(row @ row.T)
        pivot += np.triu(pivot, 1).T
        try:
            # The other way round, NumPy's lower factor is an upper one.
            v = np.linalg.cholesky(pivot[::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError:
            return False
        if not np.square(v.diagonal()).min() > smallest:
            return False
        a[block, block] = np.tril(a[block, block], -1) + v
        a[:start, block] = (a[:start, block] - a[:start, end:] @ row.T) @ np.linalg.inv(v).T
    return True


def _invert_in_place(v: NDArray[np.float64]) -> None:
    """Replace an upper triangular V by its inverse; zeros come below the diagonal, whatever was there."""
    for block in _blocks_upwards(len(v)):
        inverse = np.triu(np.linalg.inv(np.triu(v[block, block])))
        v[block, block.stop :] = -inverse @ (v[block, block.stop :] @ v[block.stop :, block.stop :])
        v[block, block] = inverse
        v[block, : block.start] = 0


def _rounded(w: Float, scale: np.float32, options: Options) -> Refined:
    """Quantise and refine groups of 16 that stand in a row, shape (1, 16 · groups)."""
    row = np.ascontiguousarray(w).reshape(1, -1)
    base = block_scaled.quantize(row, tensor_scale=float(scale))
    return autofp6.refine(row, base, bits=options.bits, step=options.step)


def _two_values(rounded: Refined, shape: tuple[int, int]) -> tuple[Float, Float]:
    """Return what NVFP4 and what refined elements decode to."""
    return block_scaled.dequantize(rounded.base).reshape(shape), autofp6.dequantize(rounded).reshape(shape)


def _squares(difference: Float) -> NDArray[np.float64]:
    return np.einsum("nk,nk->k", difference, difference, dtype=np.float64)


def _padded(w: Float) -> Float:
    return np.pad(w, ((0, 0), (0, -w.shape[1] % PAD)))


def gains(w: Float, options: Options, importance: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return by how much refining each subgroup lowers the error summed over all rows, shape (Kp / 4,); -inf beyond K.

    Parameters
    ----------
    w : ndarray of float32, shape (N, K)
    options : Options
    importance : ndarray, shape (K,), optional
        Weight of each column, the Hessian's diagonal; 1 by default.
    """
    scale = block_scaled.tensor_scale_of(np.abs(w).max())
    total = np.zeros(w.shape[1] + -w.shape[1] % PAD)
    for rows in chunks(*w.shape):
        part = _padded(w[rows])
        plain, refined = _two_values(_rounded(part, scale, options), part.shape)
        total += _squares(part - plain) - _squares(part - refined)
    if importance is not None:
        total[: len(importance)] *= importance
    gain = total.reshape(-1, SUBGROUP).sum(axis=1)
    gain[-(-w.shape[1] // SUBGROUP) :] = -np.inf
    return gain


def calibrate(
    w: Float,
    options: Options | None = None,
    hessian: NDArray[np.float64] | None = None,
    *,
    overwrite: bool = False,
) -> Calibrated:
    """Prepare a weight matrix.

    Parameters
    ----------
    w : ndarray of float32, shape (N, K)
    options : Options, optional
    hessian : ndarray of float64, shape (K, K)
        ``XᵀX`` of the inputs; not needed by the rule ``nmse``.
    overwrite : bool
        The Hessian is not needed any more, and its memory may be used.

    Returns
    -------
    Calibrated
        Exactly ``round(ρ·K/4)`` refined subgroups.

    Raises
    ------
    ValueError
        A weight is NaN or infinite, the Hessian is missing or does not fit, or as :func:`factor`.
    """
    options = options or Options()
    if w.ndim != 2 or not w.size:
        raise ValueError(f"w must be a matrix with at least one element, not of shape {w.shape}")
    if not np.isfinite(w).all():
        index = tuple(int(i) for i in np.argwhere(~np.isfinite(w))[0])
        raise ValueError(f"w must be finite, not {w[index]} at index {index}")
    if options.rule == "nmse":
        mask = autofp6.select_best(gains(w, options), budget(options.density, w.shape[1]), options.slots)
        return Calibrated(_nearest(w, mask, options), None)
    if hessian is None or hessian.shape != (w.shape[1], w.shape[1]):
        given = None if hessian is None else hessian.shape
        raise ValueError(f"hessian must have shape {(w.shape[1], w.shape[1])} for rule {options.rule}, not {given}")
    diagonal = _diagonal(hessian)
    importance = diagonal / (diagonal.max() or 1)
    mask = autofp6.select_best(gains(w, options, importance), budget(options.density, w.shape[1]), options.slots)
    if options.rule == "hessian":
        return Calibrated(_nearest(w, mask, options), None)
    upper, condition = factor(hessian, options.damping, overwrite=overwrite)
    return Calibrated(_compensated(w, upper, importance, mask, options), condition)


def _nearest(w: Float, mask: NDArray[np.bool_], options: Options) -> Refined:
    return autofp6.refine(w, block_scaled.quantize(w), mask, bits=options.bits, step=options.step)


def _compensated(
    w: Float,
    upper: NDArray[np.float64],
    importance: NDArray[np.float64],
    allocation: NDArray[np.bool_],
    options: Options,
) -> Refined:
    """Round group after group and let the columns that follow make up for the error (algorithm 1, lines 13 to 23)."""
    rows, length = w.shape
    scale = block_scaled.tensor_scale_of(np.abs(w).max())
    counts = allocation.reshape(-1, SUBGROUPS).sum(axis=1)
    rest = w.astype(np.float32)
    padded = length + -length % PAD
    codes, offsets = np.zeros((rows, padded), np.uint8), np.zeros((rows, padded), np.int8)
    scales, mask = np.zeros((rows, padded // GROUP), np.uint8), np.zeros(padded // SUBGROUP, bool)
    for block in range(0, length, _BLOCK):
        end = min(block + _BLOCK, length)
        coefficients = upper[block:end].astype(np.float32)
        errors = np.zeros((rows, end - block), np.float32)
        for start in range(block, end, GROUP):
            stop = min(start + GROUP, end)
            group = np.zeros((rows, GROUP), np.float32)
            group[:, : stop - start] = rest[:, start:stop]
            rounded = _rounded(group, scale, options)
            plain, refined = _two_values(rounded, group.shape)
            gain = _squares(group - plain) - _squares(group - refined)
            gain[: stop - start] *= importance[start:stop]
            by_subgroup = gain.reshape(-1, SUBGROUP).sum(axis=1)
            by_subgroup[-(-(stop - start) // SUBGROUP) :] = -np.inf
            chosen = autofp6.select_best(by_subgroup, int(counts[start // GROUP]), options.slots)
            columns = np.repeat(chosen, SUBGROUP)
            whole = slice(start, start + GROUP)
            codes[:, whole] = rounded.base.codes.reshape(-1)[: group.size].reshape(group.shape)
            scales[:, start // GROUP] = rounded.base.scales.reshape(-1)[:rows]
            offsets[:, whole] = rounded.offsets.reshape(-1)[: group.size].reshape(group.shape) * columns
            mask[start // SUBGROUP : start // SUBGROUP + SUBGROUPS] = chosen
            difference = (group - np.where(columns, refined, plain))[:, : stop - start]
            inside = slice(start - block, stop - block)
            errors[:, inside] = difference @ np.linalg.inv(upper[start:stop, start:stop])
            rest[:, stop:end] -= errors[:, inside] @ coefficients[inside, stop:end]
        rest[:, end:] -= errors @ coefficients[:, end:]
    return Refined(BlockScaled(codes, scales, scale, length), mask, offsets, options.bits, options.step)
