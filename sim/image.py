"""Memory images of the accelerator: operands, outputs, queues of descriptors (docs/driver.md)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model.accelerator import (
    ALIGNMENT,
    DESCRIPTOR_BYTES,
    PITCH,
    RECORD_BYTES,
    RECORD_OFFSET,
    AcceleratorConfig,
    Descriptor,
    Format,
    Mode,
    Operand,
    Record,
)
from model.autofp6 import Refined
from model.block_scaled import BlockScaled
from model.memory import pack_nibbles, unpack_masks, unpack_nibbles, unpack_offsets
from model.pe import OFFSET_BYTES, Operands
from model.tiling import Plan
from model.vmac import GROUP, SUBGROUPS

__all__ = ["Image", "Output", "output_bytes", "product_bytes", "shared_masks"]

PAD = 64
"""Least alignment of arrays and of their ends, in bytes: a bus may read the rest of a beat."""
_BITS = np.arange(1 << SUBGROUPS)[:, None] >> np.arange(SUBGROUPS) & 1 == 1
_COUNT = _BITS.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class Output:
    """Where a product is written.

    Attributes
    ----------
    address, stride : int
        Of the first row, and from a row to the next, in bytes.
    m, n : int
    mode : Mode
    format : Format
    plain : bool
        Outputs are written here.
    groups : Operand or None
        Where groups are written, if they are.
    refined, shared : bool
        With masks and offsets; two of them have one scale.
    """

    address: int
    stride: int
    m: int
    n: int
    mode: Mode
    format: Format
    plain: bool = True
    groups: Operand | None = None
    refined: bool = False
    shared: bool = False


def output_bytes(mode: int, kind: int) -> int:
    """Return the bytes of an element of the output: 8 for exact sums as they are, else 4."""
    return 8 if kind == Format.RAW and mode != Mode.AUTOFP2 else 4


def product_bytes(config: AcceleratorConfig, mode: Mode, kind: Format, m: int, n: int, k: int) -> int:
    """Return the most bytes that the image of one product takes, alone in its queue; k is a multiple of the lanes."""
    groups = -(-k // GROUP)
    arrays = [-(-k // 2), groups, *([-(-groups // 2), groups * OFFSET_BYTES] if mode == Mode.AUTOFP6 else [])]
    sizes = [rows * -(-size // ALIGNMENT) * ALIGNMENT for rows in (m, n) for size in arrays]
    sizes.append(m * -(-n * output_bytes(mode, kind) // ALIGNMENT) * ALIGNMENT)
    pad = max(PAD, config.data_width // 8)
    return sum(-(-size // pad) * pad for size in sizes) + 2 * PITCH


def shared_masks(operands: Operands) -> bool:
    """Return whether all rows of an operand have the same masks, which are then stored once."""
    return bool((operands.masks == operands.masks[:1]).all())


class Image:
    """Bytes of memory from a base address on, which grow as arrays are placed one behind the other.

    Parameters
    ----------
    base : int
        Address of the first byte, a multiple of 4096.
    pad : int
        Alignment of arrays and of their ends in bytes, at least 64: the bytes of a bus beat, if that is more.
    rng : numpy.random.Generator, optional
        For tests: fills what nothing was written to with random bytes, and leaves random gaps between arrays and between rows.

    Raises
    ------
    ValueError
        ``base`` or ``pad`` is not as said.

    Examples
    --------
    >>> image = Image(0x10000)
    >>> hex(image.place(b"abc")), hex(image.place(b"de")), image.read(0x10040, 2)
    ('0x10000', '0x10040', b'de')
    """

    def __init__(self, base: int = 0, pad: int = PAD, rng: np.random.Generator | None = None) -> None:
        if base < 0 or base % 4096:
            raise ValueError(f"base must be a multiple of 4096 from 0 on, not {base:#x}")
        if pad < PAD or pad % PAD:
            raise ValueError(f"pad must be a multiple of {PAD}, not {pad}")
        self.base = base
        self._pad = pad
        self._rng = rng
        self._bytes = np.zeros(0, np.uint8)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def contents(self) -> NDArray[np.uint8]:
        """All bytes; a view, good until the next allocation."""
        return self._bytes[: self._used]

    def allocate(self, size: int, alignment: int = ALIGNMENT) -> int:
        """Return the address of ``size`` fresh bytes, which end before the next array's padding.

        Raises
        ------
        ValueError
            ``alignment`` is not a power of two, or above 4096.
        """
        if alignment < 1 or alignment & (alignment - 1) or alignment > 4096:
            raise ValueError(f"alignment must be a power of two up to 4096, not {alignment}")
        if self._rng is None:
            alignment = max(alignment, self._pad)
            start = -(-self._used // alignment) * alignment
        else:
            start = -(-(self._used + int(self._rng.integers(0, 8)) * ALIGNMENT) // alignment) * alignment
        end = -(-(start + size) // self._pad) * self._pad
        if end > len(self._bytes):
            grown = np.zeros(max(end, 2 * len(self._bytes)), np.uint8)
            if self._rng is not None:
                grown[:] = self._rng.integers(0, 256, len(grown), dtype=np.uint8)
            grown[: len(self._bytes)] = self._bytes
            self._bytes = grown
        self._used = end
        return self.base + start

    def write(self, address: int, octets: bytes | NDArray[np.uint8]) -> None:
        """Write bytes that were allocated.

        Raises
        ------
        ValueError
            They reach beyond what was allocated.
        """
        start = self._offset(address, len(octets))
        self._bytes[start : start + len(octets)] = np.frombuffer(octets, np.uint8)

    def read(self, address: int, size: int) -> bytes:
        """Return bytes that were allocated; raises like :meth:`write`."""
        start = self._offset(address, size)
        return self._bytes[start : start + size].tobytes()

    def place(self, octets: bytes, alignment: int = ALIGNMENT) -> int:
        """Allocate room for bytes, write them, and return their address."""
        address = self.allocate(len(octets), alignment)
        self.write(address, octets)
        return address

    def update(self, octets: bytes | NDArray[np.uint8]) -> None:
        """Replace all bytes by what a memory holds after a run.

        Raises
        ------
        ValueError
            Not as many as there are.
        """
        if len(octets) != self._used:
            raise ValueError(f"octets must be {self._used}, not {len(octets)}")
        self._bytes[: self._used] = np.frombuffer(octets, np.uint8)

    def rows(self, rows: NDArray[np.uint8]) -> tuple[int, int]:
        """Place rows of bytes, each padded to a multiple of 16; return address and stride."""
        count, size = rows.shape
        stride = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        if self._rng is not None:
            stride += ALIGNMENT * int(self._rng.integers(0, 3))
        address = self.allocate(count * stride)
        start = address - self.base
        self._bytes[start : start + count * stride].reshape(count, stride)[:, :size] = rows
        return address, stride

    def store_operand(self, operands: Operands, refined: bool = True) -> Operand:
        """Place the arrays of an operand.

        Parameters
        ----------
        operands : Operands
            Rows as they are stored, E2M1 codes, leading axes (rows, KV), such as `sim.gemm.operands_of` makes.
        refined : bool
            Whether masks and offsets are wanted; without them their addresses are 0.

        Returns
        -------
        Operand
            Masks that are the same for all rows are stored once, with stride 0.
        """
        count = len(operands.codes)
        codes, codes_stride = self.rows(pack_nibbles(operands.codes.reshape(count, -1)))
        scales, scales_stride = self.rows(operands.scales.reshape(count, -1))
        if not refined:
            return Operand(codes, scales, codes_stride=codes_stride, scales_stride=scales_stride)
        shared = shared_masks(operands)
        # One nibble per group, like codes.
        masks, masks_stride = self.rows(
            pack_nibbles(operands.masks[: 1 if shared else count].reshape(-1, _groups(operands)))
        )
        offsets, offsets_stride = self.rows(_offset_rows(operands))
        return Operand(
            codes,
            scales,
            masks,
            offsets,
            codes_stride,
            scales_stride,
            0 if shared else masks_stride,
            offsets_stride,
        )

    def store_product(
        self, mode: Mode, kind: Format, a: Operands, w: Operands, tiles: Plan, out_scale: int
    ) -> tuple[Descriptor, Output]:
        """Place both operands of a product and room for its output.

        Parameters
        ----------
        mode : Mode
        kind : Format
        a, w : Operands
            See :meth:`store_operand`; masks and offsets are placed in AutoFP6 mode alone.
        tiles : Plan
        out_scale : int
            Bits of an FP32 number.

        Returns
        -------
        descriptor : Descriptor
            Of the product, not yet in memory.
        output : Output
        """
        m, kv, lanes = a.codes.shape
        n = len(w.codes)
        output = self.reserve_output(m, n, mode, kind)
        a_place, w_place = (self.store_operand(operands, mode == Mode.AUTOFP6) for operands in (a, w))
        sizes = (m, n, kv * lanes, tiles.tile_m, tiles.tile_n, tiles.segment)
        return Descriptor(mode, kind, *sizes, a_place, w_place, output.address, output.stride, out_scale), output

    def reserve_groups(self, m: int, n: int, lanes: int, refined: bool) -> Operand:
        """Allocate the arrays of groups that become activations of M rows and N elements; what pads them to whole vectors is 0."""
        padded, vectors = -(-n // GROUP // 2) * 2 * GROUP, -(-n // lanes) * lanes
        places = []
        for name, unit in (("codes", 2), ("scales", GROUP), ("masks", 2 * GROUP), ("offsets", GROUP // OFFSET_BYTES)):
            if not refined and name in ("masks", "offsets"):
                places.append((0, 0))
                continue
            rows = np.zeros((m, vectors // unit), np.uint8)
            if self._rng is not None:
                # What hardware writes was something else before.
                rows[:, : padded // unit] = self._rng.integers(0, 256, (m, padded // unit), dtype=np.uint8)
            places.append(self.rows(rows))
        addresses, strides = zip(*places, strict=True)
        return Operand(*addresses, *strides)

    def store_numbers(self, numbers: NDArray[np.float32]) -> tuple[int, int]:
        """Place rows of FP32 numbers; return address and stride."""
        return self.rows(np.ascontiguousarray(numbers, "<f4").view(np.uint8))

    def reserve_output(self, m: int, n: int, mode: Mode, kind: Format) -> Output:
        """Allocate the rows of an output."""
        stride = -(-n * output_bytes(mode, kind) // ALIGNMENT) * ALIGNMENT
        if self._rng is not None:
            stride += ALIGNMENT * int(self._rng.integers(0, 3))
        return Output(self.allocate(m * stride), stride, m, n, Mode(mode), Format(kind))

    def read_output(self, output: Output) -> NDArray[np.int64] | NDArray[np.float32]:
        """Return an output as an array [M, N]: int64 of raw sums, or float32."""
        size = output_bytes(output.mode, output.format)
        rows = np.frombuffer(self.read(output.address, output.m * output.stride), np.uint8)
        used = np.ascontiguousarray(rows.reshape(output.m, output.stride)[:, : output.n * size])
        if output.format == Format.FP32:
            return used.view("<f4").astype(np.float32)
        return used.view("<i8" if size == 8 else "<i4").astype(np.int64)

    def written(self, output: Output) -> NDArray[np.intp]:
        """Return the offsets of all bytes that an output is made of, from the base on; of offsets as many as there can be."""
        areas = []
        if output.plain:
            areas.append((output.address, output.stride, output.n * output_bytes(output.mode, output.format)))
        if output.groups is not None:
            pairs, place = -(-output.n // (2 * GROUP)), output.groups
            areas += [
                (place.codes, place.codes_stride, pairs * GROUP),
                (place.scales, place.scales_stride, pairs * 2),
            ]
            if output.refined:
                areas += [
                    (place.masks, place.masks_stride, pairs),
                    (place.offsets, place.offsets_stride, pairs * 2 * OFFSET_BYTES),
                ]
        found = []
        for address, stride, size in areas:
            rows = address - self.base + np.arange(output.m) * stride
            found.append((rows[:, None] + np.arange(size)).reshape(-1))
        return np.concatenate(found)

    def read_groups(self, output: Output, tensor_scale: float, step: str = "fixed") -> BlockScaled | Refined:
        """Return groups as a tensor [M, N].

        Raises
        ------
        ValueError
            There are none, or they make no tensor.
        """
        if output.groups is None:
            raise ValueError("output must have groups")
        place, pairs = output.groups, -(-output.n // (2 * GROUP))

        def rows(name: str, size: int) -> NDArray[np.uint8]:
            stride = getattr(place, f"{name}_stride")
            octets = np.frombuffer(self.read(getattr(place, name), output.m * stride), np.uint8)
            return octets.reshape(output.m, stride)[:, :size]

        codes = unpack_nibbles(rows("codes", pairs * GROUP))
        base = BlockScaled(codes, rows("scales", 2 * pairs).copy(), np.float32(tensor_scale), output.n)
        if not output.refined:
            return base
        masks = unpack_masks(rows("masks", pairs))
        octets = rows("offsets", place.offsets_stride)
        offsets = [unpack_offsets(o[: int(mask.sum())], mask) for o, mask in zip(octets, masks, strict=True)]
        return Refined(base, masks, np.array(offsets), step="exponent" if step == "exponent" else "fixed")

    def queue(self, descriptors: Sequence[Descriptor | bytes], places: int | None = None) -> int:
        """Place a queue: descriptors one behind the other, and room for their records, which is filled with ones.

        Parameters
        ----------
        descriptors : sequence of Descriptor or bytes
            192 bytes each, if they are packed already.
        places : int, optional
            Places of the ring, as many as descriptors by default.

        Returns
        -------
        int
            Its address.

        Raises
        ------
        ValueError
            No places, more than 2¹⁶, fewer than descriptors, or a descriptor of another size.
        """
        count = len(descriptors) if places is None else places
        if not max(len(descriptors), 1) <= count <= 1 << 16:
            raise ValueError(f"places must be from {max(len(descriptors), 1)} to 65536, not {count}")
        address = self.allocate(count * PITCH, PITCH)
        for place, descriptor in enumerate(descriptors):
            self.write_descriptor(address + place * PITCH, descriptor)
        return address

    def write_descriptor(self, address: int, descriptor: Descriptor | bytes) -> None:
        """Write a descriptor to its place and fill the record's bytes behind it with ones; raises like :meth:`queue`."""
        octets = descriptor.pack() if isinstance(descriptor, Descriptor) else descriptor
        if len(octets) != DESCRIPTOR_BYTES:
            raise ValueError(f"a descriptor must have {DESCRIPTOR_BYTES} bytes, not {len(octets)}")
        self.write(address, octets + b"\xff" * RECORD_BYTES)

    def record(self, queue: int, place: int) -> Record | None:
        """Return the record at a place of a queue, None if there is none yet."""
        octets = self.read(queue + place * PITCH + RECORD_OFFSET, RECORD_BYTES)
        return None if octets == b"\xff" * RECORD_BYTES else Record.unpack(octets)

    def records(self, queue: int, count: int) -> list[Record | None]:
        """Return the records of the first places of a queue."""
        return [self.record(queue, place) for place in range(count)]

    def _offset(self, address: int, size: int) -> int:
        start = address - self.base
        if not 0 <= start <= start + size <= self._used:
            raise ValueError(
                f"address must be from {self.base:#x} to {self.base + self._used - size:#x} for {size} bytes, not {address:#x}"
            )
        return start


def _groups(operands: Operands) -> int:
    return operands.masks.shape[1] * operands.masks.shape[2]


def _offset_rows(operands: Operands) -> NDArray[np.uint8]:
    """Offset bytes of each row's refined subgroups in order; those behind the second of a group, which have no byte, are 0."""
    masks = operands.masks.reshape(len(operands.masks), -1)
    offsets = operands.offsets.reshape(*masks.shape, OFFSET_BYTES)
    counts = _COUNT[masks]
    first = np.cumsum(counts, axis=1) - counts
    rows = np.zeros((len(masks), int(counts.sum(axis=1).max(initial=0))), np.uint8)
    for place in range(OFFSET_BYTES):
        row, group = np.nonzero(counts > place)
        rows[row, first[row, group] + place] = offsets[row, group, place]
    return rows
