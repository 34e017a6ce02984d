"""Bytes of a tile's outputs: a tile worked by hand, order and cuts in all formats."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from model.array import ArrayConfig
from model.output import OutputTile, writes

CONFIG = ArrayConfig(rows=2, columns=3)
TILE = OutputTile(address=1001, stride=500, rows=4, outputs=6, mode_nvfp4=True, fp32=False)


def sums(n=2, m=2):
    """Sum number ``1000·row + vector``, as 32 bits in both halves with the upper one negated."""
    c, r, j, i = np.indices((3, 2, n, m))
    even = 1000 * (r * m + i) + 3 * j + c
    return (even.astype(np.uint64)) | (-even).astype(np.uint64) << np.uint64(32)


def test_integers_of_64_bits_by_row_then_vector():
    low = sums() & np.uint64(0xFFFFFFFF)
    found = writes(CONFIG, TILE, low)
    assert [address for address, _ in found] == [1001, 1501, 2001, 2501]
    assert [struct.unpack("<6q", row) for _, row in found] == [tuple(1000 * k + v for v in range(6)) for k in range(4)]
    assert [row for _, row in writes(CONFIG, TILE, -low)][2] == struct.pack("<6q", *(-2000 - v for v in range(6)))


def test_pairs_of_32_bits_are_neighbours():
    found = writes(CONFIG, replace(TILE, mode_nvfp4=False, outputs=12), sums())
    expected = [tuple(sign * (1000 * k + v) for v in range(6) for sign in (1, -1)) for k in range(4)]
    assert [struct.unpack("<12i", row) for _, row in found] == expected


@pytest.mark.parametrize("mode_nvfp4", [True, False])
def test_numbers_are_scaled(mode_nvfp4):
    psum = sums() & np.uint64(0xFFFFFFFF) if mode_nvfp4 else sums()
    tile = replace(TILE, fp32=True, mode_nvfp4=mode_nvfp4, outputs=5, rows=3, scale=0xBF000000)
    found = writes(CONFIG, tile, psum)
    signs = (1,) if mode_nvfp4 else (1, -1)
    for k, (_, row) in enumerate(found):
        assert struct.unpack("<5f", row) == tuple(-0.5 * s * (1000 * k + v) for v in range(6) for s in signs)[:5]
    assert len(found) == 3


@pytest.mark.parametrize(("mode_nvfp4", "fp32", "size"), [(True, False, 8), (True, True, 4), (False, False, 4)])
def test_only_what_is_asked_for_is_written(mode_nvfp4, fp32, size):
    tile = replace(TILE, rows=1, outputs=1, mode_nvfp4=mode_nvfp4, fp32=fp32)
    ((address, row),) = writes(CONFIG, tile, sums(5, 3))
    assert (address, len(row), tile.output_bytes) == (1001, size, size)


def test_more_than_there_is_is_refused():
    with pytest.raises(ValueError, match=r"^rows must be from 1 to 4, not 5$"):
        writes(CONFIG, replace(TILE, rows=5), sums())
    with pytest.raises(ValueError, match=r"^outputs must be from 1 to 6, not 0$"):
        writes(CONFIG, replace(TILE, outputs=0), sums())
    with pytest.raises(ValueError, match=r"^outputs must be from 1 to 12, not 13$"):
        writes(CONFIG, replace(TILE, outputs=13, mode_nvfp4=False), sums())
    with pytest.raises(ValueError, match=r"^psum must be of 3 columns and 2 rows, not 3 and 1$"):
        writes(CONFIG, TILE, sums()[:, :1])
