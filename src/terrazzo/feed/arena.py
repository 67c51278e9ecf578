"""Arena: memory that all workers of a device share, filled once and given back from its end.

What is held is never replaced, so room is handed out in one direction. Giving back lowers a limit
that all processes see, and then tells the system that the pages beyond it are not needed. Who was
just reading there looks at the limit after it has copied, and takes what it copied for lost.

    | length | sample | sample |   ...   | sample |      free      |  given back  |
                                                  used             limit           room
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

HEAD = struct.Struct("<QQ")
"""The limit and what is used of it, at the beginning."""
ALIGN_BYTES = 64


class Arena:
    """Made before workers are forked; every process of the device has the same one."""

    def __init__(self, room_bytes: int) -> None:
        """``room_bytes`` are only promised: memory is taken when it is written to."""
        page = mmap.PAGESIZE
        self.room_bytes = -(-(room_bytes + page) // page) * page
        self._file = os.memfd_create("terrazzo-held")
        os.ftruncate(self._file, self.room_bytes)
        self._memory = mmap.mmap(self._file, self.room_bytes)
        self._write(self.room_bytes, page)

    def _write(self, limit: int, used: int) -> None:
        HEAD.pack_into(self._memory, 0, limit, used)

    @contextmanager
    def _locked(self) -> Iterator[tuple[int, int]]:
        """A lock that the system takes from a process that dies."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield self._head
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    @property
    def _head(self) -> tuple[int, int]:
        limit, used = HEAD.unpack_from(self._memory, 0)
        return limit, used

    @property
    def limit_bytes(self) -> int:
        return self._head[0] - mmap.PAGESIZE

    @property
    def limit_end(self) -> int:
        """What lies beyond this place is lost."""
        return self._head[0]

    @property
    def used_bytes(self) -> int:
        return self._head[1] - mmap.PAGESIZE

    def put(self, data: bytes | memoryview) -> int | None:
        """Keeps it and gives its place, or None: there is no room, also for one too large."""
        with self._locked() as (limit, used):
            if used + len(data) > limit:
                return None
            self._write(limit, used + -(-len(data) // ALIGN_BYTES) * ALIGN_BYTES)
        try:
            self._memory[used : used + len(data)] = data
        except ValueError:
            return None
        return used

    def get(self, place: int, size: int) -> bytes | None:
        """None: it was given back."""
        if place + size > self._head[0]:
            return None
        found = self._memory[place : place + size]
        return found if place + size <= self._head[0] else None

    def give_back(self, keep_bytes: int) -> int:
        """Keeps only so much; gives the place from which on all is lost. Memory is free at once."""
        page = mmap.PAGESIZE
        with self._locked() as (limit, used):
            new = min(max(page + keep_bytes // page * page, page), limit)
            self._write(new, min(used, new))
        if new < self.room_bytes:  # also what a slow writer put beyond an older limit
            self._memory.madvise(mmap.MADV_REMOVE, new, self.room_bytes - new)
        return new

    def allow(self, limit_bytes: int) -> None:
        """Lets it grow again, up to what it was made for."""
        with self._locked() as (_, used):
            self._write(max(min(mmap.PAGESIZE + limit_bytes, self.room_bytes), used), used)

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)
