"""Frames on a line of bytes: SLIP (RFC 1055) around the bytes and their CRC-32 (docs/fpga.md). Shared by every accelerator family."""

import zlib
from enum import IntEnum

__all__ = ["CHECK_BYTES", "END", "ESC", "ESC_END", "ESC_ESC", "Decoder", "Fault", "encode"]

END, ESC, ESC_END, ESC_ESC = 0xC0, 0xDB, 0xDC, 0xDD
"""RFC 1055: the end of a frame; inside of it ``ESC ESC_END`` stands for END, and ``ESC ESC_ESC`` for ESC."""
CHECK_BYTES = 4
"""Bytes of the CRC, the lowest first."""


class Fault(IntEnum):
    """Why a frame is thrown away."""

    BROKEN = 1
    """Its CRC is wrong, ESC stands before anything but ESC_END and ESC_ESC, or it is too short."""
    TOO_LONG = 2


def encode(frame: bytes) -> bytes:
    r"""Return what goes over the line. An END in front ends whatever noise was there before.

    Examples
    --------
    >>> encode(b"1\xc0").hex(" ")
    'c0 31 db dc fd d7 e0 1c c0'
    """
    whole = frame + zlib.crc32(frame).to_bytes(CHECK_BYTES, "little")
    stuffed = whole.replace(bytes([ESC]), bytes([ESC, ESC_ESC])).replace(bytes([END]), bytes([ESC, ESC_END]))
    return bytes([END, *stuffed, END])


class Decoder:
    """Finds frames among bytes that come in.

    Parameters
    ----------
    limit : int
        Most bytes of a frame, CRC included.
    least : int
        Fewest bytes of a frame, CRC not included.
    """

    def __init__(self, limit: int, least: int = 1) -> None:
        self._limit, self._least = limit, least
        self._clear()

    def _clear(self) -> None:
        self._bytes = bytearray()
        self._begun = self._escaped = self._broken = self._long = False

    def feed(self, received: bytes) -> list[bytes | Fault]:
        """Take bytes; return the frames that end in them, without their CRC, and what is wrong with others. Empty frames are nothing."""
        found: list[bytes | Fault] = []
        for byte in received:
            if byte == END:
                if self._begun:
                    found.append(self._end())
                self._clear()
                continue
            self._begun = True
            if self._escaped:
                self._escaped = False
                self._broken |= byte not in (ESC_END, ESC_ESC)
                byte = END if byte == ESC_END else ESC
            elif byte == ESC:
                self._escaped = True
                continue
            if len(self._bytes) == self._limit:
                self._long = True
            else:
                self._bytes.append(byte)
        return found

    def _end(self) -> bytes | Fault:
        if self._long:
            return Fault.TOO_LONG
        frame, check = bytes(self._bytes[:-CHECK_BYTES]), bytes(self._bytes[-CHECK_BYTES:])
        right = len(frame) >= self._least and zlib.crc32(frame).to_bytes(CHECK_BYTES, "little") == check
        return frame if right and not self._escaped and not self._broken else Fault.BROKEN
