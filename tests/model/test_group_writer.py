"""Bytes of a tile's groups: a row worked by hand, and tensors that come back from tiles side by side."""

from dataclasses import replace

import numpy as np
import pytest

from model.group_writer import GroupTile, writes
from model.memory import unpack_masks, unpack_nibbles, unpack_offsets
from model.quantiser import Groups

TILE = GroupTile(
    codes=1000,
    scales=2000,
    masks=3000,
    offsets=4001,
    codes_stride=100,
    scales_stride=10,
    masks_stride=3,
    offsets_stride=50,
    rows=2,
    outputs=20,
)


def groups_of(masks, seed=0):
    generator = np.random.default_rng(seed)
    masks = np.asarray(masks, np.uint8)
    count = len(masks)
    chosen = np.repeat(masks[:, None] >> np.arange(4) & 1, 4, axis=1)
    return Groups(
        generator.integers(0, 16, (count, 16), np.uint8),
        generator.integers(0, 127, count, np.uint8),
        masks,
        (generator.integers(-2, 2, (count, 16)) * chosen).astype(np.int8),
        np.zeros(count, bool),
        np.zeros(count, bool),
        np.zeros((count, 4), np.int64),
    )


def test_a_row_worked_by_hand():
    groups = groups_of([0b0000, 0b0010])
    groups.codes[:] = [np.arange(16), 15 - np.arange(16)]
    groups.scales[:] = [0x38, 0x41]
    groups.offsets[1, 4:8] = [1, -1, 0, -2]
    found, pointers = writes(replace(TILE, rows=1), groups)
    assert found == [
        (1000, bytes.fromhex("1032547698badcfeefcdab8967452301")),
        (2000, b"\x38\x41"),
        (3000, b"\x20"),
        (4001, bytes([0b10_00_11_01])),
    ]
    assert pointers.tolist() == [1]


def test_offsets_go_on_where_the_tile_before_ended():
    tile = replace(TILE, outputs=32)
    found, pointers = writes(tile, groups_of([15, 1, 0, 0]))
    assert [(address, len(octets)) for address, octets in found] == [
        *[(1000, 16), (2000, 2), (3000, 1), (4001, 5)],
        *[(1100, 16), (2010, 2), (3003, 1)],
    ]
    assert pointers.tolist() == [5, 0]
    found, pointers = writes(replace(tile, first=False), groups_of([0, 2, 0, 8]), pointers)
    assert [address for address, _ in found[3::4]] == [4001 + 5, 4051]
    assert pointers.tolist() == [6, 1]
    assert writes(tile, groups_of([0, 2, 0, 8]), pointers)[1].tolist() == [1, 1]


def test_without_refinement_there_are_codes_and_scales_only():
    found, pointers = writes(replace(TILE, refine=False), groups_of([15] * 4))
    assert [address for address, _ in found] == [1000, 2000, 1100, 2010]
    assert pointers.tolist() == [0, 0]


@pytest.mark.parametrize("cut", [{"rows": 0}, {"outputs": 0}])
def test_nothing_is_written_of_nothing(cut):
    assert writes(replace(TILE, **cut), groups_of([]))[0] == []


def test_an_operand_comes_back_from_the_bytes(seed):
    rows, widths = 3, [32, 96, 40]
    generator = np.random.default_rng(seed)
    per_row = sum(-(-width // 32) * 2 for width in widths)
    memory = np.zeros(4000, np.uint8)
    tile = GroupTile(0, 1000, 2000, 3000, 200, 20, 10, 60, rows, 0)
    whole, pointers = [], None
    for width in widths:
        tile = replace(tile, outputs=width, first=pointers is None)
        groups = groups_of(generator.integers(0, 16, rows * 2 * tile.pairs), seed)
        whole.append((groups, tile.pairs))
        found, pointers = writes(tile, groups, pointers)
        for address, octets in found:
            memory[address : address + len(octets)] = np.frombuffer(octets, np.uint8)
        tile = replace(
            tile, codes=tile.codes + 16 * tile.pairs, scales=tile.scales + 2 * tile.pairs, masks=tile.masks + tile.pairs
        )

    def joined(name, k):
        return np.concatenate([getattr(g, name).reshape(rows, 2 * pairs, -1)[k] for g, pairs in whole])

    for k in range(rows):
        codes = unpack_nibbles(memory[200 * k :][: per_row * 8])
        mask = unpack_masks(memory[2000 + 10 * k :][: per_row // 2])
        offsets = unpack_offsets(memory[3000 + 60 * k :][: mask.sum()], mask)
        assert codes.tolist() == joined("codes", k).reshape(-1).tolist()
        assert memory[1000 + 20 * k :][:per_row].tolist() == joined("scales", k).reshape(-1).tolist()
        assert offsets.tolist() == joined("offsets", k).reshape(-1).tolist()
        assert pointers[k] == mask.sum() > 0


def test_groups_and_pointers_must_fit_the_tile():
    with pytest.raises(ValueError, match=r"^groups must be 2 rows of 2, not 3 groups$"):
        writes(TILE, groups_of([0] * 3))
    with pytest.raises(ValueError, match=r"^groups must be 0 rows of 0, not 3 groups$"):
        writes(replace(TILE, outputs=0), groups_of([0] * 3))
    later = replace(TILE, first=False)
    with pytest.raises(ValueError, match=r"^pointers must have shape \(2,\), not None$"):
        writes(later, groups_of([0] * 4))
    with pytest.raises(ValueError, match=r"^pointers must have shape \(2,\), not \(3,\)$"):
        writes(later, groups_of([0] * 4), np.zeros(3, np.int64))
