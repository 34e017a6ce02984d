"""Signals of the precision policy: activity of a layer and entropy of a token's generation (paper, section 3.1; docs/policy.md)."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["TOP", "generation_entropy", "layer_activity"]

TOP = 10
"""Logits that the entropy is taken over."""

_FORMS = ("frobenius", "token_mean")


def layer_activity(
    before: ArrayLike,
    after: ArrayLike,
    form: Literal["frobenius", "token_mean"] = "frobenius",
    epsilon: float = 1e-6,
) -> float:
    """Return L_A, how much a layer changes the residual stream: ``‖after − before‖ / (‖before‖ + ε)`` (equation 1).

    Parameters
    ----------
    before, after : array_like, shape (..., width)
        Hidden states H of all tokens before and after the layer.
    form : {"frobenius", "token_mean"}
        Norms over all tokens together, or the mean over tokens of each token's ratio. For one token they are the same.
    epsilon : float
        Positive.

    Returns
    -------
    float
        Computed in float64.

    Raises
    ------
    ValueError
        Shapes differ or are empty, a state is no finite number, ``form`` or ``epsilon`` is out of range.

    Examples
    --------
    >>> before, after = [[3.0, 4.0], [0.0, 1.0]], [[3.0, 4.0], [0.0, 3.0]]
    >>> round(layer_activity(before, after), 4), round(layer_activity(before, after, "token_mean"), 4)
    (0.3922, 1.0)
    """
    if form not in _FORMS:
        raise ValueError(f"form must be one of {', '.join(_FORMS)}, not {form!r}")
    if not 0 < epsilon < np.inf:
        raise ValueError(f"epsilon must be positive and finite, not {epsilon}")
    h, g = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if h.shape != g.shape or not h.ndim or not h.size:
        raise ValueError(f"before and after must have one shape that is not empty, not {h.shape} and {g.shape}")
    for name, states in (("before", h), ("after", g)):
        if not np.isfinite(states).all():
            raise ValueError(f"{name} must be finite, not {states[~np.isfinite(states)][0]}")
    axis = None if form == "frobenius" else -1
    change = np.sqrt(np.square(g - h).sum(axis=axis))
    size = np.sqrt(np.square(h).sum(axis=axis))
    return float(np.mean(change / (size + epsilon)))


def generation_entropy(logits: ArrayLike, top: int = TOP) -> NDArray[np.float64]:
    """Return G_E: Shannon entropy of the softmax over the ``top`` largest logits, divided by ``ln(top)`` (appendix D.1).

    Parameters
    ----------
    logits : array_like, shape (..., vocabulary)
        A logit of −∞ is a token that cannot come.
    top : int
        At least 2, at most the vocabulary.

    Returns
    -------
    ndarray of float64, shape (...)
        From 0, a certain token, to 1, all ``top`` tokens alike.

    Raises
    ------
    ValueError
        ``top`` is out of range, a logit is NaN or +∞, or all of a token's logits are −∞.

    Examples
    --------
    >>> float(generation_entropy([5.0] * 12)), float(generation_entropy([0.0] + [-np.inf] * 11))
    (1.0, 0.0)
    """
    given = np.asarray(logits, np.float64)
    vocabulary = given.shape[-1] if given.ndim else 0
    if not 2 <= top <= vocabulary:
        raise ValueError(f"top must be from 2 to the vocabulary of {vocabulary}, not {top}")
    bad = np.isnan(given) | (given == np.inf)
    if bad.any():
        raise ValueError(f"logits must be below infinity, not {given[bad][0]}")
    largest = np.partition(given, vocabulary - top, axis=-1)[..., vocabulary - top :]
    highest = largest.max(axis=-1, keepdims=True)
    if np.isneginf(highest).any():
        raise ValueError("logits must hold a finite number for each token, not only -inf")
    shifted = largest - highest
    weights = np.exp(shifted)
    total = weights.sum(axis=-1)
    # H = ln Σw − Σ w·ln(w) / Σw, where a token of weight 0 adds nothing.
    moments = (weights * np.where(weights > 0, shifted, 0)).sum(axis=-1)
    return np.clip((np.log(total) - moments / total) / np.log(top), 0.0, 1.0)
