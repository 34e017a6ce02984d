"""Memory images: bytes of operands, outputs, queues and records."""

import dataclasses
import itertools

import numpy as np
import pytest

import sim.image
from model import autofp6, block_scaled
from model.accelerator import (
    MEANINGS,
    RECORD_OFFSET,
    AcceleratorConfig,
    Descriptor,
    ErrorCode,
    Format,
    Mode,
    Operand,
    Record,
)
from model.memory import pack_offsets, unpack_masks, unpack_nibbles
from model.pe import Operands
from model.tiling import Plan
from sim.gemm import operands_of
from sim.image import Image, Output, output_bytes, product_bytes, shared_masks


def refined(rng, rows, k, shared):
    """A random tensor with refined subgroups, at most two of a group, alike for all rows or not."""
    x = rng.standard_normal((rows, k)).astype(np.float32)
    base = block_scaled.quantize(x)
    errors = autofp6.subgroup_errors(x, base)
    free = np.zeros(errors.shape[1], bool)
    mask = autofp6.select_weights(errors, 0.3) if shared else autofp6.select_activations(errors, free, 0.01)
    return autofp6.refine(x, base, mask)


def array(image, address, stride, rows, size):
    return np.stack([np.frombuffer(image.read(address + r * stride, size), np.uint8) for r in range(rows)])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("lanes", [32, 64])
def test_operands_have_the_documented_bytes(shared, scattered, lanes, seed):
    rng = np.random.default_rng(seed)
    tensor = refined(rng, 5, 416, shared)
    image = Image(0x4000, rng=rng if scattered else None)
    image.place(b"x" * 100)
    where = image.store_operand(operands_of(tensor, lanes))
    padded = -(-416 // lanes) * lanes
    codes = unpack_nibbles(array(image, where.codes, where.codes_stride, 5, padded // 2))
    assert (codes[:, :416] == tensor.base.codes).all()
    assert not codes[:, 416:].any()
    scales = array(image, where.scales, where.scales_stride, 5, padded // 16)
    assert (scales[:, :26] == tensor.base.scales).all()
    assert not scales[:, 26:].any()
    masks = unpack_masks(array(image, where.masks, where.masks_stride, 5, padded // 32))
    expected = np.broadcast_to(tensor.mask, (5, 104))
    assert (masks[:, :104] == expected).all()
    assert not masks[:, 104:].any()
    assert (where.masks_stride == 0) == shared
    compared = 0
    for row in range(5):
        octets = pack_offsets(tensor.offsets[row], expected[row])
        found = image.read(where.offsets + row * where.offsets_stride, len(octets))
        assert found == octets.tobytes()
        compared += len(octets)
    assert compared == expected.sum() > 20
    for name, value in dataclasses.asdict(where).items():
        assert value % 16 == 0, name


def test_bytes_worked_by_hand():
    codes = np.zeros((1, 1, 32), np.uint8)
    codes[0, 0, :4] = 1, 2, 3, 15
    masks = np.array([[[0b0111, 0b1000]]], np.uint8)
    offsets = np.array([[[[0x11, 0x22], [0x33, 0x44]]]], np.uint8)
    image = Image()
    where = image.store_operand(Operands(codes, np.array([[[0x38, 0x40]]], np.uint8), masks, offsets))
    assert image.read(where.codes, 16).hex() == "21f3" + "00" * 14
    assert image.read(where.scales, 2).hex() == "3840"
    assert image.read(where.masks, 1).hex() == "87"
    # Group 0 refines three subgroups and has a byte for each, of which the third is never used.
    assert image.read(where.offsets, 4).hex() == "11220033"
    assert where == Operand(0, 64, 128, 192, 16, 16, 0, 16)
    plain = image.store_operand(Operands(codes, np.zeros((1, 1, 2), np.uint8), masks, offsets), refined=False)
    assert plain == Operand(256, 320, codes_stride=16, scales_stride=16)


def test_other_orders_of_bits_are_other_bytes(monkeypatch):
    right = test_bytes_worked_by_hand
    monkeypatch.setattr(sim.image, "pack_nibbles", lambda codes: codes[..., 1::2] | codes[..., 0::2] << 4)
    with pytest.raises(AssertionError):
        right()


def test_masks_of_all_rows_are_one_only_if_they_are_equal():
    rng = np.random.default_rng(1)
    operands = operands_of(refined(rng, 3, 64, shared=True))
    assert shared_masks(operands)
    operands.masks[2, 1, 1] ^= 1
    assert not shared_masks(operands)


def test_memory_grows_and_keeps_what_it_has():
    image = Image(0x1000)
    rng = np.random.default_rng(1)
    parts = [rng.bytes(int(size)) for size in rng.integers(0, 5000, 200)]
    places = [image.place(part, 1 << int(rng.integers(0, 13))) for part in parts]
    assert [image.read(at, len(part)) for at, part in zip(places, parts, strict=True)] == parts
    ends = sorted((at, at + len(part)) for at, part in zip(places, parts, strict=True) if part)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert len(image) % 64 == 0
    assert places[0] == 0x1000
    assert len(image.contents) == len(image)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: Image(100), "base must be a multiple of 4096 from 0 on, not 0x64"),
        (lambda: Image(pad=32), "pad must be a multiple of 64, not 32"),
        (lambda: Image().allocate(1, 24), "alignment must be a power of two up to 4096, not 24"),
        (lambda: Image(4096).write(4096, b"x"), "address must be from 0x1000 to 0xfff for 1 bytes, not 0x1000"),
        (lambda: Image(4096).read(0, 0), "address must be from 0x1000 to 0x1000 for 0 bytes, not 0x0"),
        (lambda: Image().queue([]), "places must be from 1 to 65536, not 0"),
        (lambda: Image().queue([b"1"]), "a descriptor must have 192 bytes, not 1"),
        (lambda: Image().update(b"1"), "octets must be 0, not 1"),
    ],
)
def test_what_is_wrong_is_refused(action, message):
    with pytest.raises(ValueError, match="^" + message + "$"):
        action()


@pytest.mark.parametrize("kind", Format)
@pytest.mark.parametrize("mode", Mode)
def test_outputs_are_read_as_they_lie(mode, kind, seed):
    rng = np.random.default_rng(seed)
    image = Image(rng=rng)
    output = image.reserve_output(3, 5, mode, kind)
    size = output_bytes(mode, kind)
    limit = 2 ** (8 * size - 1)
    values = rng.integers(-limit, limit, (3, 5), dtype=np.int64)
    if kind == Format.FP32:
        values = values.astype(np.float32)
    raw = values.astype({Format.FP32: "<f4", Format.RAW: f"<i{size}"}[kind])
    before = image.contents.copy()
    for row in range(3):
        image.write(output.address + row * output.stride, raw[row].tobytes())
    found = image.read_output(output)
    assert found.dtype == (np.float32 if kind == Format.FP32 else np.int64)
    assert (found == values).all()
    inside = np.zeros(len(image), bool)
    inside[image.written(output)] = True
    assert inside.sum() == 15 * size
    assert (before == image.contents)[~inside].all()
    assert output == Output(output.address, output.stride, 3, 5, mode, kind)
    assert output.stride % 16 == output.address % 16 == 0


def test_queues_hold_descriptors_and_records():
    descriptors = [Descriptor(1, 0, n, 2, 32, 1, 1, 1, Operand(0, 16), Operand(32, 48), 64, 16) for n in range(1, 4)]
    image = Image(0x2000)
    image.place(b"1")
    queue = image.queue(descriptors, places=5)
    assert queue % 256 == 0
    assert [image.read(queue + 256 * i, 192) for i in range(3)] == [d.pack() for d in descriptors]
    assert image.records(queue, 5)[:3] == [None] * 3
    image.write(queue + 256 + RECORD_OFFSET, bytes([22, 3, 1, 0, 0x10, 0x20, 0, 0]) + bytes(8))
    assert image.record(queue, 1) == Record(ErrorCode.READ_SLVERR, 3, 1, 0x2010)
    image.write_descriptor(queue + 256, descriptors[0].pack())
    assert image.records(queue, 3) == [None] * 3
    assert set(MEANINGS) == set(ErrorCode)


CONFIGS = [
    AcceleratorConfig(),
    AcceleratorConfig(rows=16, columns=16, data_width=512),
    AcceleratorConfig(rows=1, columns=3, activation_depth=8, weight_depth=4, accumulators=8, activation_entries=4),
    AcceleratorConfig(rows=2, columns=2, activation_depth=64, weight_depth=2, lanes=64),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", Format)
@pytest.mark.parametrize("mode", Mode)
def test_the_bytes_of_a_product_are_at_most_those_that_were_said(config, mode, kind, seed):
    rng = np.random.default_rng(seed)
    closest = 0.0
    for _ in range(8):
        m, n, kv = (int(size) for size in rng.integers(1, 12, 3))
        blocks = config.vmac.blocks
        a, w = (
            Operands(
                np.zeros((rows, kv, config.lanes), np.uint8),
                np.zeros((rows, kv, blocks), np.uint8),
                rng.choice(np.array([3, 5], np.uint8), (rows, kv, blocks)),
                np.zeros((rows, kv, blocks, 2), np.uint8),
            )
            for rows in (m, n)
        )
        image = Image(pad=max(64, config.data_width // 8))
        descriptor, _ = image.store_product(mode, kind, a, w, Plan(1, 1, 1, 1, 1), 0)
        image.queue([descriptor])
        most = product_bytes(config, mode, kind, m, n, kv * config.lanes)
        assert len(image) <= most
        closest = max(closest, len(image) / most)
    assert closest > 0.8
