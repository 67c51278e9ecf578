"""PNG files of RGB pictures, written and read with nothing but zlib."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from terrazzo.errors import UsageError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
Pixels = NDArray[np.uint8]


def encode(pixels: Pixels) -> bytes:
    """A picture of shape (height, width, 3)."""
    height, width, channels = pixels.shape
    if channels != 3:
        raise UsageError(f"a picture has 3 channels, this one has {channels}")
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row opens with filter 0: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packed = zlib.compress(rows.tobytes(), 9)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def decode(data: bytes) -> Pixels:
    """What ``encode`` wrote; other kinds of PNG are refused."""
    header, body = b"", b""
    try:
        if not data.startswith(SIGNATURE):
            raise ValueError("no signature")
        position = len(SIGNATURE)
        while position < len(data):
            (length,) = struct.unpack(">I", data[position : position + 4])
            kind = data[position + 4 : position + 8]
            content = data[position + 8 : position + 8 + length]
            header = content if kind == b"IHDR" else header
            body += content if kind == b"IDAT" else b""
            position += 12 + length
        width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", header)
        rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + 3 * width)
        if (depth, colour) != (8, 2) or rows[:, 0].any():
            raise ValueError("another kind")
    except (ValueError, struct.error, zlib.error) as error:
        raise UsageError(f"this is no PNG of ours: {error}") from error
    return rows[:, 1:].reshape(height, width, 3)


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)
