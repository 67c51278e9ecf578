"""Frames: how the starter and a device talk over the two pipes of an SSH connection.

A frame is a letter, the length of its body, and the body. What a login script prints before the
first frame is passed over: frames begin after a mark.
"""

from __future__ import annotations

import json
import struct
import threading
from typing import Any, BinaryIO

MARK = b"\x00terrazzo frames 1\n"
HEADER = struct.Struct(">cI")
MOST_BYTES = 8 << 20
MOST_NOISE = 1 << 20

JSON, DATA, ERROR = b"J", b"D", b"X"
OUT, ERR, RECORD, VITALS, MEMBERS, ENDED = b"O", b"R", b"F", b"V", b"M", b"E"
SIGNAL, BEAT = b"S", b"B"
KINDS = (JSON, DATA, ERROR, OUT, ERR, RECORD, VITALS, MEMBERS, ENDED, SIGNAL, BEAT)


class FrameError(Exception):
    """What came is no frame, or too long for one."""


class Refused(Exception):
    """The other end could not do what it was asked for, and says why."""


class Frames:
    """Both directions; several threads may send, one receives."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink = source, sink
        self._lock = threading.Lock()

    def greet(self) -> None:
        with self._lock:
            self._sink.write(MARK)
            self._sink.flush()

    def find_mark(self) -> bytes:
        """Reads until the frames begin; gives what came before. EOFError: they never did."""
        noise = bytearray()
        while not noise.endswith(MARK):
            byte = self._source.read(1)
            if not byte:
                raise EOFError(bytes(noise).decode("utf-8", "replace"))
            noise += byte
            if len(noise) > MOST_NOISE:
                raise FrameError("a login script prints without end")
        return bytes(noise[: -len(MARK)])

    def send(self, kind: bytes, body: bytes = b"") -> None:
        if len(body) > MOST_BYTES:
            raise FrameError(f"a frame of {len(body)} bytes, {MOST_BYTES} at most")
        with self._lock:
            self._sink.write(HEADER.pack(kind, len(body)) + body)
            self._sink.flush()

    def tell(self, value: Any, kind: bytes = JSON) -> None:
        self.send(kind, json.dumps(value).encode())

    def receive(self) -> tuple[bytes, bytes]:
        """One frame; EOFError where the other end is gone."""
        kind, length = HEADER.unpack(self._exactly(HEADER.size))
        if kind not in KINDS or length > MOST_BYTES:
            raise FrameError(f"no frame: kind {kind!r}, {length} bytes")
        return kind, self._exactly(length)

    def hear(self) -> Any:
        """The next frame as a JSON value; a refusal becomes an exception."""
        kind, body = self.receive()
        if kind == ERROR:
            raise Refused(str(json.loads(body)))
        if kind != JSON:
            raise FrameError(f"a frame of kind {kind!r} where a value was due")
        return json.loads(body)

    def _exactly(self, count: int) -> bytes:
        body = self._source.read(count) if count else b""
        if len(body) < count:
            raise EOFError
        return body
