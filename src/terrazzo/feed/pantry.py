"""Pantry: memory in which a device keeps samples for the one that reads, and gives them back.

It is a process of its own beside the training, so that handing out samples takes nothing from a
step but bandwidth. It understands nothing of what it keeps: who puts something there adds a mark
that only the reader can make, and looks at it when the bytes come back.

    caller -> pantry   b"P", key, size, mark, bytes       keep this
    pantry -> caller   b"Y" or b"N"                       done, or no room
    caller -> pantry   b"G", key                          have you got this?
    pantry -> caller   b"Y", size, mark, bytes, or b"N"
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from typing import NamedTuple

from terrazzo.feed.arena import Arena
from terrazzo.feed.process import die_with_parent, fork
from terrazzo.members import hello
from terrazzo.members.line import exactly

MARK_BYTES = 16
ASK = struct.Struct("<cQ")
SIZE = struct.Struct(f"<I{MARK_BYTES}s")
YES, NO, PUT, GET = b"Y", b"N", b"P", b"G"
MOST_BYTES = 64 << 20
MOST_CALLERS = 32
IDLE_S = 3600.0
GONE = "hung up"


class Address(NamedTuple):
    """Where a pantry is, and what proves that it is the one."""

    device: int
    host: str
    port: int
    token: str
    room_bytes: int


class Pantry:
    """Made by a device that has memory to spare; ``address`` is for the one that reads."""

    def __init__(
        self, room_bytes: int, *, device: int, address: tuple[socket.AddressFamily, str]
    ) -> None:
        self.arena = Arena(room_bytes)
        token = secrets.token_hex(16)
        listener = socket.socket(address[0], socket.SOCK_STREAM)
        listener.bind((address[1], 0))
        listener.listen(MOST_CALLERS)
        self.address = Address(
            device, address[1], listener.getsockname()[1], token, self.arena.limit_bytes
        )
        self._process = fork(_serve, listener, self.arena, token, name="terrazzo-pantry")
        listener.close()

    def give_back(self, keep_bytes: int) -> None:
        self.arena.give_back(keep_bytes)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.arena.close()


def _serve(listener: socket.socket, arena: Arena, token: str) -> None:
    die_with_parent()
    shelf = _Shelf(arena)
    room = threading.BoundedSemaphore(MOST_CALLERS)
    while True:
        connection, _ = listener.accept()
        if not room.acquire(blocking=False):
            connection.close()
            continue

        def host(caller: socket.socket) -> None:
            try:
                with caller, contextlib.suppress(OSError):
                    hello.hear(caller, secret=token.encode(), timeout_s=hello.PATIENCE_S)
                    caller.settimeout(IDLE_S)
                    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    while shelf.answer(caller):
                        pass
            finally:
                room.release()

        threading.Thread(target=host, args=(connection,), daemon=True).start()


class _Shelf:
    """What lies where."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._places: dict[int, tuple[int, int, bytes]] = {}

    def answer(self, caller: socket.socket) -> bool:
        """One request; False: it was none."""
        asked, key = ASK.unpack(exactly(caller, ASK.size, or_say=GONE))
        if asked == GET:
            self._give(caller, key)
            return True
        if asked != PUT:
            return False
        size, mark = SIZE.unpack(exactly(caller, SIZE.size, or_say=GONE))
        if size > MOST_BYTES:
            return False
        data = read(caller, size)
        place = self._arena.put(memoryview(data))
        if place is not None:
            self._places[key] = (place, size, mark)
        caller.sendall(NO if place is None else YES)
        return True

    def _give(self, caller: socket.socket, key: int) -> None:
        place, size, mark = self._places.get(key, (0, 0, b""))
        data = self._arena.get(place, size) if size else None
        if data is None:
            self._places.pop(key, None)
            caller.sendall(NO)
            return
        caller.sendall(YES + SIZE.pack(size, mark))
        caller.sendall(data)


def read(connection: socket.socket, size: int, *, until: float | None = None) -> bytearray:
    """So many bytes, into one piece of memory; before a moment of perf_counter, if there is one."""
    found = bytearray(size)
    view = memoryview(found)
    while view:
        if until is not None:
            connection.settimeout(max(until - time.perf_counter(), 1e-3))
        count = connection.recv_into(view)
        if not count or (until is not None and time.perf_counter() > until):
            raise OSError(GONE)
        view = view[count:]
    return found
