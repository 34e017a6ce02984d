"""Array of processing elements: configuration, results and cycles (paper, section 6.1; docs/array.md)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model import pe
from model.pe import Operands, PeConfig, Tile, check_words, run_tile
from model.vmac import check_integer

__all__ = ["ArrayConfig", "ArrayResult", "ArrayTile", "cycles", "run"]


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
        return PeConfig(**{name: getattr(self, name) for name in PeConfig.__dataclass_fields__})


@dataclass(frozen=True)
class ArrayTile:
    """One command of an array and its operands.

    Attributes
    ----------
    mode_nvfp4, refine_en : bool
    weights : sequence of Operands, one per column
        Leading axes (KV, N), as in :class:`model.pe.Tile`.
    activations : sequence of Operands, one per row
        Leading axes (KV, M).
    """

    mode_nvfp4: bool
    refine_en: bool
    weights: Sequence[Operands]
    activations: Sequence[Operands]


@dataclass(frozen=True)
class ArrayResult:
    """Sums, uint64 of shape (columns, rows, N, M) in the order in which they leave each column, and the status bits raised."""

    psum: NDArray[np.uint64]
    status: int


def run(config: ArrayConfig, tile: ArrayTile) -> ArrayResult:
    """Compute the tiles of all elements.

    Raises
    ------
    ValueError
        There is not one operand per bus, or a tile is refused by :func:`model.pe.run_tile`.
    """
    for name, operands, buses, count in (
        ("weights", tile.weights, "columns", config.columns),
        ("activations", tile.activations, "rows", config.rows),
    ):
        if len(operands) != count:
            raise ValueError(f"{name} must be as many as {buses}, {count}, not {len(operands)}")
    results = [
        [run_tile(config.pe, Tile(tile.mode_nvfp4, tile.refine_en, w, a)) for a in tile.activations]
        for w in tile.weights
    ]
    status = 0
    for element in (element for column in results for element in column):
        status |= element.status
    return ArrayResult(np.array([[element.psum for element in column] for column in results]), status)


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
        issued = max(issued, freed) + words + max(words, config.read_after_write) * (kv - 1)
        entered.append(max(issued + config.deposit, entered[-1] if entered else 0) + config.rows * words)
    return [cycle + 1 for cycle in entered]
