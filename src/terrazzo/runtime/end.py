"""End: this device's end of one connection, what is still to be sent and what is still to come."""

from __future__ import annotations

import ctypes
import select
import socket
import struct
from collections import deque

from torch import Tensor

HEADER = struct.Struct("<QQ")
"""The number of the message on its connection, and its length."""

SEND_BYTES = 1 << 20
"""What the system may hold of a connection that is still to be sent, as far as it allows."""
WAKE_BYTES = 1 << 16
"""Of a long message, as much is waited for before this thread is woken up."""
SHORT_BYTES = 1 << 12
NOW = socket.MSG_DONTWAIT
"""Of a connection that may be waited on: this call takes or gives what it can, and no more."""


class WireError(RuntimeError):
    """The connection to a device failed."""

    def __init__(self, peer: int | None, what: str) -> None:
        super().__init__(what)
        self.peer = peer


class End:
    """Messages leave and come in order; nothing waits here but ``read_row``, for ``timeout_s``."""

    def __init__(
        self, peer: int, connection: socket.socket, window: int, *, timeout_s: float
    ) -> None:
        self.peer, self.socket, self.number = peer, connection, connection.fileno()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
        connection.setblocking(True)
        self._sent = self.received = 0
        self._leaving: deque[memoryview] = deque()
        self._coming: deque[tuple[memoryview, memoryview, int]] = deque()
        self._wake_bytes, self._most_wake_bytes = 1, min(WAKE_BYTES, window // 2)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to send, or to come."""
        return not self._leaving and not self._coming

    def send(self, tensor: Tensor) -> None:
        body = _bytes_of(tensor)
        self._leaving.append(memoryview(HEADER.pack(self._sent, len(body))))
        if len(body):
            self._leaving.append(body)
        self._sent += 1

    def send_row(self, row: memoryview) -> bool:
        """Sends what has room for its header before it; the memory is free again afterwards.

        Gives whether nothing is left to be sent, and nothing was expected.
        """
        HEADER.pack_into(row, 0, self._sent, len(row) - HEADER.size)
        self._sent += 1
        count = 0
        if not self._leaving:
            try:
                count = self.socket.send(row, NOW)
            except BlockingIOError:
                pass
            except OSError as error:
                raise WireError(self.peer, f"sending failed: {error.strerror or error}") from error
        if count < len(row):
            self._leaving.append(memoryview(bytes(row[count:])))
            return False
        return not self._coming

    def expect_row(self, row: memoryview) -> None:
        self._coming.append((row[: HEADER.size], row[HEADER.size :], 0))

    def read_row(self, row: memoryview) -> bool | None:
        """Waits for a row where nothing else is expected: True; False if only a part of it came,
        and the rest is expected now; None if time is over.

        One call into the system, which ends when all of it is there: where somebody waits for
        every row, to look first and then to be woken up would be three.
        """
        self._wake(1)  # a long message before it may have asked for more, and none comes behind it
        try:
            count = self.socket.recv_into(row, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            return None
        except OSError as error:
            raise WireError(self.peer, f"receiving failed: {error.strerror or error}") from error
        if not count:
            raise WireError(self.peer, "Connection closed by peer")
        if count < len(row):
            self._coming.append((row[: HEADER.size], row[HEADER.size :], count))
            return False
        self._check(row, len(row) - HEADER.size)
        return True

    def expect(self, tensor: Tensor) -> None:
        body = _bytes_of(tensor)
        self._coming.append((memoryview(bytearray(HEADER.size)), body, 0))

    def push(self) -> None:
        """Sends as much as the system takes."""
        leaving = self._leaving
        try:
            while leaving:
                count = self.socket.sendmsg([*leaving], (), NOW)
                while leaving and count >= len(leaving[0]):
                    count -= len(leaving.popleft())
                if count:
                    leaving[0] = leaving[0][count:]
        except BlockingIOError:
            return
        except OSError as error:
            raise WireError(self.peer, f"sending failed: {error.strerror or error}") from error

    def pull(self) -> bool:
        """Takes what has arrived; True when nothing is left to send or to come."""
        while self._coming:
            header, body, have = self._coming[0]
            missing = [header, body] if not have else _beyond(header, body, have)
            try:
                count = self.socket.recvmsg_into(missing, 0, NOW)[0]
            except BlockingIOError:
                return False
            except OSError as error:
                raise WireError(
                    self.peer, f"receiving failed: {error.strerror or error}"
                ) from error
            if not count:
                raise WireError(self.peer, "Connection closed by peer")
            have += count
            if have < HEADER.size + len(body):
                self._coming[0] = (header, body, have)
                return False  # all that was there: asking again would be a call for nothing
            self._coming.popleft()
            self._check(header, len(body))
        return not self._leaving

    def _check(self, header: memoryview, length: int) -> None:
        number, told = HEADER.unpack_from(header)
        if (number, told) != (self.received, length):
            raise WireError(
                self.peer,
                f"out of step: expected message {self.received} of {length} bytes, got message "
                f"{number} of {told} bytes",
            )
        self.received += 1

    def wants(self) -> int:
        """What to be woken up for; for a long message not before a good part of it is there."""
        if self._coming:
            _, body, have = self._coming[0]
            missing = HEADER.size + len(body) - have
            self._wake(1 if missing < SHORT_BYTES else min(missing, self._most_wake_bytes))
        return (select.POLLOUT if self._leaving else 0) | (select.POLLIN if self._coming else 0)

    def _wake(self, count: int) -> None:
        """To be woken up when so many bytes are there."""
        if count != self._wake_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wake_bytes = count


def _timeval(seconds: float) -> bytes:
    """As the system wants it: whole seconds, and millionths."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _beyond(header: memoryview, body: memoryview, have: int) -> list[memoryview]:
    """What is still to come of a message."""
    return [part for part in (header[have:], body[max(0, have - HEADER.size) :]) if part]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor; the view keeps the tensor alive."""
    assert tensor.is_contiguous()
    count = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * count).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
