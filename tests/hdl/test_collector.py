"""The collector's entries and the merging of records, for every pair of masks, against the model."""

import numpy as np
import pytest
from amaranth.hdl import Shape

from hdl.collector import RecordMerger, activation_entry, weight_entry
from model.pe import merge_records
from model.vmac import VmacConfig
from tests.hdl.simulate import evaluate

CONFIGURATIONS = [VmacConfig(slots_per_block=slots) for slots in (1, 2, 3, 4)] + [VmacConfig(refinement="inplace")]
IDS = ["slots-1", "slots-2", "slots-3", "slots-4", "inplace"]


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=IDS)
def test_every_pair_of_masks_is_merged_like_the_model(config, seed):
    """With four draws of the offset bytes each; one block of the two in a vector is looked at."""
    rng = np.random.default_rng(seed)
    w, a = (masks.ravel().astype(np.uint8) for masks in np.meshgrid(np.arange(16), np.arange(16)))
    compared = 0
    for _ in range(4):
        offsets = rng.integers(0, 256, (2, 256, 1, 2), dtype=np.uint8)
        words = [
            {
                name: int(masks[i]) | int(octets[i, 0, 0]) << 4 | int(octets[i, 0, 1]) << 12
                for name, masks, octets in (("weight", w, offsets[0]), ("activation", a, offsets[1]))
            }
            for i in range(256)
        ]
        refine, overlap, dropped = merge_records(config, w[:, None], offsets[0], a[:, None], offsets[1])
        found = evaluate(RecordMerger(config), words, ["record", "overlap", "dropped"])
        for i, (record, overlapped, lost) in enumerate(found):
            expected = sum(int(word) << 12 * slot for slot, word in enumerate(refine[i]))
            assert record == expected, f"masks {w[i]:04b} and {a[i]:04b}"
            assert (overlapped, lost) == (overlap[i], dropped[i]), f"masks {w[i]:04b} and {a[i]:04b}"
            compared += 1
    assert compared == 4 * 256


def test_entries_are_as_wide_as_documented():
    widths = {
        (weight_entry, VmacConfig()): 160 + 16 + 2 * 20,
        (activation_entry, VmacConfig()): 128 + 16 + 2 * 20,
        (weight_entry, VmacConfig(scaling="group")): 160 + 32 + 2 * 20,
        (weight_entry, VmacConfig(refinement="none")): 160 + 16,
        (activation_entry, VmacConfig(refinement="none")): 128 + 16,
        (activation_entry, VmacConfig(lanes=64)): 256 + 32 + 4 * 20,
    }
    for (entry, config), width in widths.items():
        assert Shape.cast(entry(config)).width == width


def test_fields_of_an_entry_are_where_documented():
    entry = weight_entry(VmacConfig())
    raw = 0b10101 << 5 | 0x7E << 168 | (0b1010 | 0x12 << 4 | 0x34 << 12) << 196
    value = entry.from_bits(raw)
    assert value.codes[1].as_bits() == 0b10101
    assert value.scales[1].as_bits() == 0x7E
    assert value.records[1].mask == 0b1010
    assert [value.records[1].offsets[i] for i in range(2)] == [0x12, 0x34]
