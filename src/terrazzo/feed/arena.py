"""Arena: memory that all workers of a device share, filled once and given back from its end.

What is held is never replaced, so room is handed out in one direction. Giving back lowers a limit
that all processes see, and then tells the system that the pages beyond it are not needed. What was
given back may be used again later, so every sample ends with a stamp that no other one has, and its
place says which: who finds another stamp there after it has copied takes what it copied for lost.

    | head | sample, stamp | sample, stamp |   ...   |      free      |  given back  |
                                                     used             limit           room
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from terrazzo.feed.draws import mix

HEAD = struct.Struct("<QQQ")
STAMP = struct.Struct("<Q")
ALIGN_BYTES = 64
OFFSET_BITS = 44
"""Of a place these say where it lies; the bits above are its number."""


class Head(NamedTuple):
    """What stands at the beginning."""

    limit: int
    used: int
    puts: int
    """How many samples were ever put here."""


class Arena:
    """Made before workers are forked; every process of the device has the same one."""

    def __init__(self, room_bytes: int) -> None:
        """``room_bytes`` are only promised: memory is taken when it is written to."""
        page = mmap.PAGESIZE
        self.room_bytes = -(-(room_bytes + page) // page) * page
        self._file = os.memfd_create("terrazzo-held")
        os.ftruncate(self._file, self.room_bytes)
        self._memory = mmap.mmap(self._file, self.room_bytes)
        self._salt = secrets.randbits(62)
        self._threads = threading.Lock()  # for the lock of a file is one of processes
        self._process = os.getpid()
        self._is_closed = self._was_cut = False
        self._write(Head(self.room_bytes, page, 0))

    def _write(self, head: Head) -> None:
        HEAD.pack_into(self._memory, 0, *head)

    @contextmanager
    def _locked(self) -> Iterator[Head]:
        """A lock that the system takes from a process that dies."""
        if self._process != os.getpid():  # another thread may have had it when this was forked
            self._threads, self._process = threading.Lock(), os.getpid()
        with self._threads:
            if self._is_closed:
                raise ValueError("the arena is closed")
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield self._head
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    @property
    def _head(self) -> Head:
        return Head(*HEAD.unpack_from(self._memory, 0))

    @property
    def limit_bytes(self) -> int:
        return self._head.limit - mmap.PAGESIZE

    @property
    def used_bytes(self) -> int:
        return self._head.used - mmap.PAGESIZE

    @property
    def free_bytes(self) -> int:
        head = self._head
        return max(head.limit - head.used - STAMP.size, 0)

    def put(self, data: bytes | memoryview) -> int | None:
        """Keeps it and gives its place, or None: there is no room, also for one too large."""
        size = len(data) + STAMP.size
        with self._locked() as head:
            at = head.used
            if at + size > head.limit:
                return None
            puts = head.puts + 1
            self._write(Head(head.limit, at + -(-size // ALIGN_BYTES) * ALIGN_BYTES, puts))
            self._memory[at : at + len(data)] = data  # locked, or it might be given back meanwhile
            STAMP.pack_into(self._memory, at + len(data), mix(self._salt, puts))
        return puts << OFFSET_BITS | at

    def get(self, place: int, size: int) -> bytes | None:
        """None: it was given back."""
        if not self.has(place, size):
            return None
        at = place & ((1 << OFFSET_BITS) - 1)
        found = self._memory[at : at + size]
        return found if self.has(place, size) else None

    def has(self, place: int, size: int) -> bool:
        """Whether that is still there; its end is given back first."""
        puts, at = place >> OFFSET_BITS, place & ((1 << OFFSET_BITS) - 1)
        if at + size + STAMP.size > self._head.limit:
            return False
        stamp: int = STAMP.unpack_from(self._memory, at + size)[0]
        return stamp == mix(self._salt, puts)

    def give_back(self, keep_bytes: int, *, is_cut: bool = False) -> None:
        """Keeps only so much. Memory is free at once."""
        page = mmap.PAGESIZE
        with self._locked() as head:
            self._was_cut |= is_cut
            new = min(max(page + keep_bytes // page * page, page), head.limit)
            self._write(Head(new, min(head.used, new), head.puts))
            if new < self.room_bytes:
                self._memory.madvise(mmap.MADV_REMOVE, new, self.room_bytes - new)

    def cut(self, size_bytes: int) -> int:
        """Gives so much of what is used back, whatever else is going on; how much that was."""
        with suppress(ValueError):  # it was closed meanwhile
            before = self.used_bytes
            keep = max(before - size_bytes, 0)
            if before:
                self.give_back(keep, is_cut=True)
            return before - keep
        return 0

    @property
    def was_cut(self) -> bool:
        """Whether something was cut off since this was last asked."""
        with self._locked():
            found, self._was_cut = self._was_cut, False
        return found

    def empty(self) -> None:
        """What is in it is lost; it may be filled again."""
        limit = self.limit_bytes
        self.give_back(0)
        self.allow(limit)

    def allow(self, limit_bytes: int) -> None:
        """Lets it grow so far, up to what it was made for; what is in it stays."""
        with self._locked() as head:
            limit = max(min(mmap.PAGESIZE + limit_bytes, self.room_bytes), head.used)
            self._write(head._replace(limit=limit))

    def close(self) -> None:
        with self._locked():
            self._is_closed = True
            self._memory.close()
        os.close(self._file)
