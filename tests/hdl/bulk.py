"""Words of streams as rows of bytes."""

import numpy as np


def packed(fields, widths):
    """Return rows of bytes: integer columns (N,) or (N, k) of fields of so many bits, the first lowest."""
    columns = []
    for field, width in zip(fields, widths, strict=True):
        columns += [(column, width) for column in np.asarray(field).reshape(len(field), -1).T]
    bits = np.concatenate(
        [
            np.unpackbits(
                np.ascontiguousarray(column).astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little"
            )[:, :width]
            for column, width in columns
        ],
        axis=1,
    )
    return np.packbits(bits, axis=1, bitorder="little")


def unpacked(octets, shape):
    """Undo `packed`: a list of (count, width) gives arrays (N, count) of uint64, or of uint8 up to 8 bits."""
    bits = np.unpackbits(np.ascontiguousarray(octets), axis=1, bitorder="little")
    at, fields = 0, []
    for count, width in shape:
        part = bits[:, at : at + count * width].reshape(len(bits), count, width)
        if width <= 8:
            fields.append(sum((part[..., k] << np.uint8(k) for k in range(width)), np.zeros((), np.uint8)))
        else:
            wide = np.zeros((len(bits), count, 64), np.uint8)
            wide[:, :, :width] = part
            fields.append(np.packbits(wide, axis=2, bitorder="little").view("<u8").reshape(len(bits), count))
        at += count * width
    return fields
