"""Wire: a plain connection to every other device, for messages that somebody waits for.

gloo announces a message, is asked for it and then sends it, and wakes a thread for each of the
three, again for every packet that comes in. On a small device that took a quarter of all processor
time of a step. Here a message is sent at once, because the plan says who sends what in which order,
and this thread itself waits for it, woken up when a good part of it is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrazzo.members import hello
from terrazzo.members.copies import in_copies

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Address = tuple[socket.AddressFamily, str]
Parcel = tuple[int, Tensor]
"""The other device, and what to send to it or to receive from it."""

HEADER = struct.Struct("<QQ")
"""The number of the message on its connection, and its length."""

SEND_BYTES = 1 << 20
"""What the system may hold of a connection that is still to be sent, as far as it allows."""
SWITCH_BYTES, LEAST_BYTES = 384 << 10, 32 << 10
"""What all others together may have on the way to a device: as much as a cheap switch holds for a
port. It drops what is more, and the last packet of a message that is dropped is missed only after
a fifth of a second."""
WAKE_BYTES = 1 << 16
"""Of a long message, as much is waited for before this thread is woken up."""
SHORT_BYTES = 1 << 12


def window_bytes(devices: int) -> int:
    """What may be on the way over one connection, or wait there until somebody looks."""
    return max(LEAST_BYTES, SWITCH_BYTES // max(1, devices - 1))


class WireError(RuntimeError):
    """The connection to a device failed."""

    def __init__(self, peer: int | None, what: str) -> None:
        super().__init__(what)
        self.peer = peer


def too_late(peer: int | None, timeout_s: float) -> WireError:
    return WireError(peer, f"Timed out waiting {timeout_s:g} s for a message")


class Wire:
    """``members`` are the devices that it connects, each with each; all of them make theirs at one
    time. ``address`` is where the others can reach this one."""

    def __init__(
        self,
        store: Store,
        device: int,
        members: Sequence[int],
        *,
        address: Address,
        timeout_s: float,
        meeting_s: float | None = None,
    ) -> None:
        """``meeting_s`` bounds the wait for each other, ``timeout_s`` every later one."""
        self.timeout_s, timeout_s = timeout_s, meeting_s or timeout_s
        with contextlib.closing(socket.socket(address[0], socket.SOCK_STREAM)) as listener:
            listener.bind((address[1], 0))
            listener.listen(hello.MOST_CALLERS)
            token, port = secrets.token_hex(16), listener.getsockname()[1]
            store.set(f"terrazzo/wire/{device}", f"{address[1]} {port} {token}")
            found = {
                peer: _call(store.get(f"terrazzo/wire/{peer}").decode(), device, timeout_s)
                for peer in members
                if peer < device
            }
            later = [peer for peer in members if peer > device]
            found |= hello.answer(
                listener, secret=token.encode(), expected=later, timeout_s=timeout_s
            )
        self.device, self.members = device, tuple(members)
        self._rooms: dict[tuple[torch.Size, torch.dtype], _Room] = {}
        window = window_bytes(len(members))
        self._ends = {peer: End(peer, found[peer], window) for peer in sorted(found)}
        in_copies(self.close)

    @property
    def ends(self) -> Sequence[End]:
        return tuple(self._ends.values())

    def gather(
        self,
        tensor: Tensor,
        *,
        meanwhile: Callable[[], None] | None = None,
        passing: bool = False,
    ) -> Tensor:
        """A tensor of equal shape from each device, stacked; in between, something else.

        Only on a wire between all devices, whose rows are numbered as they are. ``passing``: it is
        read at once, and may lie in memory that the next gather uses.
        """
        key = (tensor.shape, tensor.dtype)
        room = self._rooms.get(key) or _Room(tensor, len(self.members), self.device)
        if tensor.nbytes <= SHORT_BYTES:
            self._rooms[key] = room
        room.own.copy_(tensor)
        ends, rows = self._ends.values(), room.rows
        own, quiet = rows[self.device], True
        for end in ends:
            quiet = end.send_row(own) and quiet
        if not quiet:
            for end in ends:
                end.expect_row(rows[end.peer])
        if meanwhile is not None:
            meanwhile()
        # One after the other: what comes meanwhile from those behind wakes nobody up.
        self.end([e for e in ends if not self._read(e, rows[e.peer])] if quiet else ends)
        return room.parts if passing else room.parts.clone()

    def _read(self, end: End, row: memoryview) -> bool:
        """Waits for a row; False if only a part of it is there, and the rest expected."""
        while (whole := end.read_row(row)) is None:
            if not end.wait(self.timeout_s):
                raise too_late(end.peer, self.timeout_s)
        return whole

    def begin(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Sequence[End]:
        """Sends what the system takes at once; ``end`` waits for the rest.

        Both sides name parcels in one order. What is begun later on the same connections waits for
        this, too.
        """
        busy: dict[int, End] = {}
        for peer, tensor in sends:
            end = busy[peer] = self._ends[peer]
            end.send(tensor)
        for peer, tensor in receives:
            end = busy[peer] = self._ends[peer]
            end.expect(tensor)
        for end in busy.values():
            end.push()
        return list(busy.values())

    def end(self, begun: Iterable[End]) -> None:
        """Until everything has left and everything has arrived."""
        waiting = [end for end in begun if not end.pull()]
        if not waiting:
            return
        by_number = {end.number: end for end in waiting}
        poll = select.poll()
        for end in waiting:
            poll.register(end.number, end.wants())
        while by_number:
            events = poll.poll(self.timeout_s * 1000)
            if not events:
                raise too_late(next(iter(by_number.values())).peer, self.timeout_s)
            for number, _ in events:
                end = by_number[number]
                end.push()
                if end.pull():
                    poll.unregister(number)
                    del by_number[number]
                else:
                    poll.modify(number, end.wants())

    def close(self) -> None:
        for end in self._ends.values():
            end.socket.close()


class _Room:
    """Memory for one gather: a row for each device, as it is sent, with its header before it."""

    def __init__(self, like: Tensor, devices: int, device: int) -> None:
        size = HEADER.size + like.nbytes
        data = bytearray(devices * size)
        rows = torch.frombuffer(data, dtype=torch.uint8).view(devices, size)[:, HEADER.size :]
        self.parts = rows.view(like.dtype).view(devices, *like.shape)
        self.own = self.parts[device]
        whole = memoryview(data)
        self.rows = [whole[place * size : (place + 1) * size] for place in range(devices)]


class End:
    """This end of one connection: what is still to be sent, and what is still to come."""

    def __init__(self, peer: int, connection: socket.socket, window: int) -> None:
        self.peer, self.socket, self.number = peer, connection, connection.fileno()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._sent = self.received = 0
        self._leaving: deque[memoryview] = deque()
        self._coming: deque[tuple[memoryview, memoryview, int]] = deque()
        self._wake_bytes, self._most_wake_bytes = 1, min(WAKE_BYTES, window // 2)
        self._poll = select.poll()
        self._poll.register(self.number, select.POLLIN)

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
                count = self.socket.send(row)
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
        """Takes a row where nothing else is expected: True; False if only a part of it came, and
        the rest is expected now; None if nothing has come yet."""
        try:
            count = self.socket.recv_into(row)
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

    def wait(self, timeout_s: float) -> bool:
        """Until a row begins to come, or time is over."""
        self._wake(1)
        return bool(self._poll.poll(timeout_s * 1000))

    def expect(self, tensor: Tensor) -> None:
        body = _bytes_of(tensor)
        self._coming.append((memoryview(bytearray(HEADER.size)), body, 0))

    def push(self) -> None:
        """Sends as much as the system takes."""
        leaving = self._leaving
        try:
            while leaving:
                count = self.socket.sendmsg([*leaving])
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
                count = self.socket.recvmsg_into(missing)[0]
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


def _call(where: str, device: int, timeout_s: float) -> socket.socket:
    """Connects to a device that listens, and says who calls."""
    host, port, token = where.split()
    connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    hello.call(connection, secret=token.encode(), device=device)
    return connection
