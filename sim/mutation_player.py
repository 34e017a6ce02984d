"""What the stream players of `sim.mutation_pe` and `sim.mutation_dma` share: the tally of a stimulus that is run again and again."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.scoreboard import Tally

__all__ = ["judged"]


def judged(
    stimulus: Any, outputs: Mapping[str, NDArray[Any]], expected: Mapping[str, int], judge: Callable[[], str]
) -> Tally:
    """Return the tally of a stimulus, and remember outputs that were right: the same again are right again.

    Parameters
    ----------
    stimulus : object
        Its attribute ``passed`` is None, or outputs that were right.
    outputs : mapping of str to ndarray
    expected : mapping of str to int
        What is compared, by kind, if all is right.
    judge : callable
        Says what is wrong with the outputs, or nothing.
    """
    before = stimulus.passed
    if before is None or not all(np.array_equal(before[name], value) for name, value in outputs.items()):
        message = judge()
        if message:
            return Tally(expected=dict(expected), mismatches=1, messages=[message])
        if before is None:
            stimulus.passed = outputs
    return Tally(expected=dict(expected), compared=dict(expected))
