"""Tile engine: global buffer, weight encoders and array; where operands lie in the banks (paper, section 6.1; docs/tile_engine.md)."""

from dataclasses import dataclass

import numpy as np

from model.array import ArrayConfig, ArrayTile
from model.pe import Operands
from model.vmac import check_integer
from model.weight_encoder import WeightEncoderConfig, encode

__all__ = ["EngineConfig", "RowOperands", "array_tile", "packed_weights"]


@dataclass(frozen=True)
class EngineConfig(ArrayConfig):
    """Parameters of a tile engine: those of its array, and the depth of the banks of its global buffer.

    Attributes
    ----------
    activation_depth : int
        Vectors that the bank of a row holds, a power of two from 2 on.
    weight_depth : int
        Pairs of vectors, of an even and an odd weight row, that the bank of a column holds, a power of two from 2 on.

    Raises
    ------
    TypeError, ValueError
        A parameter is of the wrong kind or outside its range.
    """

    activation_depth: int = 2048
    weight_depth: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("activation_depth", "weight_depth"):
            value = getattr(self, name)
            check_integer(name, value)
            if value < 2 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from 2 on, not {value}")

    @property
    def array(self) -> ArrayConfig:
        """Parameters of the array."""
        return ArrayConfig(**{name: getattr(self, name) for name in ArrayConfig.__dataclass_fields__})

    @property
    def encoder(self) -> WeightEncoderConfig:
        """Parameters of the weight encoder of a column."""
        return WeightEncoderConfig(lanes=self.lanes, scaling=self.scaling)


@dataclass(frozen=True)
class RowOperands:
    """Rows of one operand as they are stored, NVFP4 with refinement records; leading axes (KV, rows).

    Attributes
    ----------
    operands : Operands
        ``codes`` are E2M1 codes, ``scales`` a byte per block, for weights as for activations.
    """

    operands: Operands

    @property
    def rows(self) -> int:
        """Rows."""
        return self.operands.codes.shape[1]


def packed_weights(config: EngineConfig, mode_nvfp4: bool, weights: RowOperands) -> Operands:
    """Return the weight vectors that elements get: rows as they are, or in AutoFP2 mode pairs of rows, both as packed pairs.

    Parameters
    ----------
    config : EngineConfig
    mode_nvfp4 : bool
    weights : RowOperands
        In AutoFP2 mode an even number of rows.

    Returns
    -------
    Operands
        Leading axes (KV, N).

    Raises
    ------
    ValueError
        An odd number of rows in AutoFP2 mode.
    """
    stored = weights.operands
    if mode_nvfp4:
        even = odd = stored
    elif weights.rows % 2:
        raise ValueError(f"weights must have an even number of rows in AutoFP2 mode, not {weights.rows}")
    else:
        even, odd = stored[:, 0::2], stored[:, 1::2]
    shape = even.codes.shape[:2]
    count = shape[0] * shape[1]
    w, scales = encode(
        np.full(count, mode_nvfp4),
        even.codes.reshape(count, -1),
        odd.codes.reshape(count, -1),
        even.scales.reshape(count, -1),
        odd.scales.reshape(count, -1),
        config.scaling,
    )
    return Operands(w.reshape(*shape, -1), scales.reshape(*shape, -1), even.masks, even.offsets)


def array_tile(
    config: EngineConfig,
    mode_nvfp4: bool,
    refine_en: bool,
    weights: list[RowOperands],
    activations: list[RowOperands],
) -> ArrayTile:
    """Return what the array gets for rows of weights per column and rows of activations per row."""
    return ArrayTile(
        mode_nvfp4,
        refine_en,
        [packed_weights(config, mode_nvfp4, rows) for rows in weights],
        [rows.operands for rows in activations],
    )
