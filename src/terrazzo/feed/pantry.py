"""Pantry: memory in which a device keeps samples for the one that reads, and gives them back.

It is a process of its own beside the training, so that handing out samples takes nothing from a
step but bandwidth. It understands nothing of what it keeps: who puts something there adds a mark
that only the reader can make, and looks at it when the bytes come back. Every set of samples has a
shelf, a number that its reader has drawn, so that equal numbers of samples do not meet.

    caller -> pantry   b"P", shelf, sample, size, mark    is there room for this?
    pantry -> caller   b"Y", b"N" or b"H"                 send it, no room, or it lies there already
    caller -> pantry   bytes
    pantry -> caller   b"Y" or b"N"                       done, or no room any more
    caller -> pantry   b"G", shelf, sample                have you got this?
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
from terrazzo.feed.process import fork
from terrazzo.members import hello
from terrazzo.members.line import exactly

MARK_BYTES = 16
ASK = struct.Struct("<cQQ")
SIZE = struct.Struct(f"<I{MARK_BYTES}s")
YES, NO, HAVE, PUT, GET = b"Y", b"N", b"H", b"P", b"G"
MOST_BYTES = 64 << 20
MOST_CALLERS = 32
MOST_STRANGERS = 32
"""Callers who have not yet proved that they belong to this run; they take no place from others."""
PROMPT_S = 60.0
"""So long a sample may take once it was announced."""
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

    def empty(self) -> None:
        """Nobody is left who could use what lies here."""
        self.arena.empty()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.arena.close()


def _serve(listener: socket.socket, arena: Arena, token: str) -> None:
    shelves = _Shelves(arena)
    strangers = threading.BoundedSemaphore(MOST_STRANGERS)
    room = threading.BoundedSemaphore(MOST_CALLERS)

    def host(caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            try:
                hello.hear(caller, secret=token.encode(), timeout_s=hello.PATIENCE_S)
            finally:
                strangers.release()
            if not room.acquire(blocking=False):
                return
            try:
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while shelves.answer(caller):
                    pass
            finally:
                room.release()

    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # who called has gone already, or this process has too many files open
            time.sleep(0.1)
            continue
        if strangers.acquire(blocking=False):
            threading.Thread(target=host, args=(connection,), daemon=True).start()
        else:
            connection.close()


class _Shelves:
    """What lies where."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._places: dict[tuple[int, int], tuple[int, int, bytes]] = {}
        self._lock = threading.Lock()
        self._coming_bytes = 0
        """Of samples that are being received, outside of the arena; they count as if inside."""

    def answer(self, caller: socket.socket) -> bool:
        """One request; False: it was none."""
        caller.settimeout(IDLE_S)
        asked, shelf, sample = ASK.unpack(exactly(caller, ASK.size, or_say=GONE))
        caller.settimeout(PROMPT_S)
        if asked == GET:
            self._give(caller, (shelf, sample))
            return True
        if asked != PUT:
            return False
        size, mark = SIZE.unpack(exactly(caller, SIZE.size, or_say=GONE))
        if size > MOST_BYTES:
            return False
        self._take(caller, (shelf, sample), size, mark)
        return True

    def _take(self, caller: socket.socket, key: tuple[int, int], size: int, mark: bytes) -> None:
        known = self._places.get(key)
        if known is not None and known[1:] == (size, mark) and self._arena.has(known[0], size):
            caller.sendall(HAVE)
            return
        with self._lock:
            fits = self._coming_bytes + size <= self._arena.free_bytes
            self._coming_bytes += size if fits else 0
        if not fits:
            caller.sendall(NO)
            return
        try:
            caller.sendall(YES)
            data = read(caller, size, until=time.perf_counter() + PROMPT_S)
            caller.settimeout(PROMPT_S)
            place = self._arena.put(memoryview(data))
        finally:
            with self._lock:
                self._coming_bytes -= size
        if place is not None:
            self._places[key] = (place, size, mark)
        else:
            self._forget_lost()
        caller.sendall(NO if place is None else YES)

    def _forget_lost(self) -> None:
        """What was given back is known no more, though nobody has asked for it."""
        self._places = {
            key: row for key, row in self._places.items() if self._arena.has(row[0], row[1])
        }

    def _give(self, caller: socket.socket, key: tuple[int, int]) -> None:
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
