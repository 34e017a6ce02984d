"""Array of processing elements: configuration, results and cycles (paper, section 6.1; docs/array.md)."""

from collections.abc import Sequence
from dataclasses import dataclass

from model import pe
from model.pe import DEPOSIT, READ_AFTER_WRITE, PeConfig, check_words
from model.vmac import check_integer

__all__ = ["ArrayConfig", "cycles"]


@dataclass(frozen=True)
class ArrayConfig(PeConfig):
    """Parameters of an array: those of its elements, and its size.

    Attributes
    ----------
    rows, columns : int
        Elements in each direction, from 1 on. The paper's accelerator has 16 × 16.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong kind or outside its range.
    """

    rows: int = 4
    columns: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rows", "columns"):
            value = getattr(self, name)
            check_integer(name, value)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

    @property
    def pe(self) -> PeConfig:
        """Parameters of an element."""
        return PeConfig(
            self.lanes,
            self.refinement,
            self.slots_per_block,
            self.step,
            self.scaling,
            self.window_shift,
            self.weight_entries,
            self.activation_entries,
            self.accumulators,
        )


def cycles(config: ArrayConfig, tiles: Sequence[tuple[int, int, int]]) -> list[int]:
    """Predict the cycle in which each tile's last result leaves, if no stream ever waits; exact unless M·N is 1.

    All elements work in step; the drain chains are the difference to one element: ``rows`` times as many results per column.

    Parameters
    ----------
    config : ArrayConfig
    tiles : sequence of (M, N, KV)
        Tiles of one element, see :func:`model.pe.cycles`.

    Returns
    -------
    list of int

    Raises
    ------
    ValueError
        A tile's M·N is 0 or above the accumulators of a bank.

    Examples
    --------
    >>> cycles(ArrayConfig(rows=16, columns=16), [(16, 8, 32), (16, 8, 32)])
    [6151, 10247]
    """
    if config.rows == 1:
        return pe.cycles(config.pe, tiles)
    entered: list[int] = []
    issued = 0
    for number, (m, n, kv) in enumerate(tiles):
        words = check_words(config, m, n)
        # The last row's last result leaves its bank when it enters the chain, one cycle per link before it enters the first link.
        freed = entered[number - 2] - (config.rows - 2) + 1 if number > 1 else 0
        issued = max(issued, freed) + words + max(words, READ_AFTER_WRITE) * (kv - 1)
        entered.append(max(issued + DEPOSIT, entered[-1] if entered else 0) + config.rows * words)
    return [cycle + 1 for cycle in entered]
