"""Wire: a plain connection to every other device, for messages that somebody waits for.

gloo announces a message, is asked for it and then sends it, and wakes a thread for each of the
three, again for every packet that comes in. On a small device that took a quarter of all processor
time of a step. Here a message is sent at once, because the plan says who sends what in which order,
and this thread itself waits for it, woken up when a good part of it is there.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrazzo.members import hello
from terrazzo.members.copies import in_copies
from terrazzo.runtime.end import HEADER, End, WireError
from terrazzo.schedule.sums import HUB_FROM

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Address = tuple[socket.AddressFamily, str]
Parcel = tuple[int, Tensor]
"""The other device, and what to send to it or to receive from it."""

SWITCH_BYTES, LEAST_BYTES = 384 << 10, 32 << 10
"""What all others together may have on the way to a device: as much as a cheap switch holds for a
port. It drops what is more, and the last packet of a message that is dropped is missed only after
a fifth of a second."""
LASTING_BYTES = 1 << 14
"""Memory for messages up to this length is kept for the next one like it: statistics and notes."""


def window_bytes(devices: int) -> int:
    """What may be on the way over one connection, or wait there until somebody looks."""
    return max(LEAST_BYTES, SWITCH_BYTES // max(1, devices - 1))


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
        self._turn = 0
        window = window_bytes(len(members))
        self._ends = {
            peer: End(peer, found[peer], window, timeout_s=self.timeout_s) for peer in sorted(found)
        }
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
        room = self._room(tensor)
        room.own.copy_(tensor)
        ends, own = self.ends, room.rows[self.device]
        left = [end.send_row(own) for end in ends]  # to all of them, whatever happens at one
        quiet = all(left)
        self._take_rows(ends, room.rows, quiet=quiet, meanwhile=meanwhile)
        return room.parts if passing else room.parts.clone()

    def combine(
        self,
        tensor: Tensor,
        combined: Callable[[Tensor], Tensor],
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """What ``combined`` makes of each device's tensor, stacked: of equal shape, alike on all.

        Of many devices one makes it for all, each in its turn. A device then sends and receives two
        messages instead of two for every other device, and all but one have nothing to add up. The
        answer may lie in memory that the next one uses.
        """
        if len(self.members) < HUB_FROM:
            return combined(self.gather(tensor, meanwhile=meanwhile, passing=True))
        room = self._room(tensor)
        room.own.copy_(tensor)
        hub = self.members[self._turn % len(self.members)]
        self._turn += 1
        if hub == self.device:
            quiet = all(end.is_idle for end in self.ends)
            self._take_rows(self.ends, room.rows, quiet=quiet, meanwhile=meanwhile)
            room.own.copy_(combined(room.parts))
            own = room.rows[self.device]
            self.end([end for end in self.ends if not end.send_row(own)])
        else:
            end = self._ends[hub]
            quiet = end.send_row(room.rows[self.device])
            self._take_rows((end,), room.rows, quiet=quiet, meanwhile=meanwhile)
        return room.each[hub]

    def _room(self, tensor: Tensor) -> _Room:
        key = (tensor.shape, tensor.dtype)
        room = self._rooms.get(key)
        if room is None:
            room = _Room(tensor, len(self.members), self.device)
            if tensor.nbytes <= LASTING_BYTES:
                self._rooms[key] = room
        return room

    def _take_rows(
        self,
        ends: Sequence[End],
        rows: Sequence[memoryview],
        *,
        quiet: bool,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        """Waits for a row from each of these; ``quiet``: nothing else is under way there."""
        if not quiet:
            for end in ends:
                end.expect_row(rows[end.peer])
        if meanwhile is not None:
            meanwhile()
        # One after the other: what comes meanwhile from those behind wakes nobody up.
        self.end([e for e in ends if not self._read(e, rows[e.peer])] if quiet else ends)

    def _read(self, end: End, row: memoryview) -> bool:
        """Waits for a row; False if only a part of it is there, and the rest expected."""
        whole = end.read_row(row)
        if whole is None:
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
        self.each = self.parts.unbind()
        self.own = self.each[device]
        whole = memoryview(data)
        self.rows = [whole[place * size : (place + 1) * size] for place in range(devices)]


def _call(where: str, device: int, timeout_s: float) -> socket.socket:
    """Connects to a device that listens, and says who calls."""
    host, port, token = where.split()
    connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    hello.call(connection, secret=token.encode(), device=device)
    return connection
