"""Line: a connection for short messages between two devices: JSON, each with its length before it.

Nothing but plain data is ever read from one, and no message is longer than it may be.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import time
from typing import Any

HEAD = struct.Struct("<I")
CLOSED = "connection closed"
NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
LONGEST_BYTES = 1 << 20
MOST_WAITING_BYTES = 4 << 20
"""What may wait for a device that takes nothing before it counts as lost."""


class LineError(OSError):
    """The other end is gone, or does not keep to the form."""


def exactly(connection: socket.socket, count: int, *, or_say: str) -> bytes:
    """So many bytes of a connection that is waited for; OSError where it ends before.

    The timeout of the connection is for all of them: they may come one by one.
    """
    limit_s, began, data = connection.gettimeout(), time.monotonic(), b""
    try:
        while len(data) < count:
            if limit_s is not None and data:
                connection.settimeout(max(began + limit_s - time.monotonic(), 1e-3))
            part = connection.recv(count - len(data))
            if not part:
                raise OSError(or_say)
            data += part
    finally:
        connection.settimeout(limit_s)
    return data


def read(data: bytes) -> Any:
    """A message; LineError where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LineError("a message that is no JSON") from error


class Line:
    """One end. Neither sending nor receiving ever waits."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._leaving = bytearray()
        self._come = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def is_behind(self) -> bool:
        """Whether something is left to send."""
        return bool(self._leaving)

    def say(self, message: Any) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        self._leaving += HEAD.pack(len(data)) + data
        self.push()

    def push(self) -> None:
        """Sends as much as the system takes."""
        try:
            while self._leaving:
                del self._leaving[: self.socket.send(self._leaving)]
        except NOT_NOW:
            if len(self._leaving) > MOST_WAITING_BYTES:
                raise LineError("it takes no messages") from None

    def hear(self) -> list[Any]:
        """The messages that are complete; the end is told when nothing is left before it.

        An end that left while something was on its way to it shows as an error.
        """
        ended: OSError | None = None
        try:
            while True:
                part = self.socket.recv(1 << 16)
                if not part:
                    ended = LineError(CLOSED)
                    break
                self._come += part
                if len(self._come) > 2 * LONGEST_BYTES:
                    break
        except NOT_NOW:
            pass
        except OSError as error:
            ended = error
        found = []
        while len(self._come) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._come)
            if length > LONGEST_BYTES:
                raise LineError(f"a message of {length} bytes, more than {LONGEST_BYTES}")
            if len(self._come) < HEAD.size + length:
                break
            data = bytes(self._come[HEAD.size : HEAD.size + length])
            del self._come[: HEAD.size + length]
            found.append(read(data))
        if ended is not None and not found:
            raise ended
        return found

    def close(self) -> None:
        self.socket.close()
