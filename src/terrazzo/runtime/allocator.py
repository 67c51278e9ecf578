"""The C library's allocator: giving free memory back before a process outgrows what it needs.

Maps come and go by the megabyte. glibc keeps what they leave, in pieces that may not fit the next
map, so a process grows past what its tensors need, by a third and more. Giving everything back all
the time costs page faults again and again. So where memory is short, free pages are returned only
when the process is about to become larger than its largest moment has to be, which is known before
(``schedule/memory.py``). Other C libraries are left alone.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from terrazzo.schedule.ledger import HEAP_BYTES, IDLE

LEAST_BYTES = 4 << 20
"""Less free memory is not worth a look."""
LARGE_BYTES = 3 << 20
"""From this size on, blocks get pages of their own where memory is short: few, and never idle."""
END_BYTES = 64 << 20
"""And what may lie free at the end of the heap there: a step looks after it. glibc would return
it and take it again from strip to strip."""
KEPT_BYTES = 1 << 30
"""Where it is not: what glibc may keep."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of the C library for what ``mallopt`` sets."""
STATM = "/proc/self/statm"


class _Info(ctypes.Structure):
    """What glibc's ``mallinfo2`` answers."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
        )
    )


class Heap:
    """This process's memory: what is in use, and what lies idle."""

    def __init__(self, library: Any) -> None:
        self._trim, self._info = library.malloc_trim, library.mallinfo2
        self._info.restype = _Info
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._statm = os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)
        self.trims = 0
        """How often free pages were returned."""
        self.other_bytes = 0
        """Private memory that is not the allocator's: the interpreter, libraries, stacks."""
        self.trim()

    def in_use_bytes(self) -> int:
        info = self._info()
        return int(info.uordblks + info.hblkhd)

    def resident_bytes(self) -> int:
        """Private memory of this process, without files."""
        _, resident, shared = os.pread(self._statm, 96, 0).split()[:3]
        return (int(resident) - int(shared)) * self._page

    def be_tidy(self) -> None:
        """Large blocks apart from the heap, from now on: they leave no holes in it."""
        _tune(largest_bytes=LARGE_BYTES, kept_bytes=END_BYTES)

    def trim(self) -> None:
        """Returns all free pages to the system."""
        self._trim(0)
        self.trims += 1
        self.other_bytes = self.resident_bytes() - self.in_use_bytes()


class Room:
    """What one step may take on top of what is there when it begins."""

    def __init__(self, heap: Heap, step_bytes: int) -> None:
        self.heap, self.most_bytes = heap, int((1 + IDLE) * step_bytes)
        self._before_bytes = 0
        heap.be_tidy()

    def begin(self) -> Room:
        self._before_bytes = self.heap.in_use_bytes()
        return self

    def ease(self, more_bytes: int = 0) -> None:
        """Between two pieces of work: returns free pages if the process has grown too large, or
        would with ``more_bytes``, which come in blocks of their own and fit into no hole."""
        heap = self.heap
        bound = heap.other_bytes + self._before_bytes + self.most_bytes
        if heap.resident_bytes() + more_bytes > bound:
            idle = heap.resident_bytes() - heap.other_bytes - heap.in_use_bytes()
            if idle > LEAST_BYTES:
                heap.trim()


@cache
def keep_memory() -> None:
    """Where memory is not short: what a step has freed is there for the next one.

    glibc otherwise returns the end of its heap to the system between steps, and the next step takes
    it again page by page.
    """
    _tune(largest_bytes=HEAP_BYTES, kept_bytes=KEPT_BYTES)


def _tune(*, largest_bytes: int, kept_bytes: int) -> None:
    """The largest block that comes from the heap, and how much may lie free at its end."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    if mallopt(M_MMAP_THRESHOLD, largest_bytes):
        mallopt(M_TRIM_THRESHOLD, kept_bytes)


@cache
def heap() -> Heap | None:
    """The heap of this process, where its C library can be asked."""
    try:
        return Heap(ctypes.CDLL(None))
    except (AttributeError, OSError):
        return None


def trim() -> None:
    """Returns free pages to the system; costs next to nothing beside a pass over a map."""
    found = heap()
    if found is not None:
        found.trim()
