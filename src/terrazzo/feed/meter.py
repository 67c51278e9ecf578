"""Meter: how long a sample waited for storage, and how much was read for it.

Where files are watched, reading them is fetching; of the rest, the time in which this thread
neither computed nor waited for a core was waiting for storage.
"""

from __future__ import annotations

import os
import time

from terrazzo.feed.files import Files

CLOCKS, COUNTERS = "/proc/thread-self/schedstat", "/proc/thread-self/io"
OWN_BYTES = 1024
"""What reading the counters themselves may add to them."""


class Meter:
    """How long was waited for storage since it was made, and how much was read."""

    def __init__(self, files: Files | None) -> None:
        self.files = files
        self.fetch_s, self.read_bytes = 0.0, 0
        self._begin = self._now()
        if files is not None:
            files.read_s = files.cpu_s = 0.0
            files.read_bytes = 0

    def _now(self) -> tuple[float, float, float, int]:
        return time.perf_counter(), time.thread_time(), _waited_s(), _read_bytes()

    def stop(self) -> None:
        wall_s, cpu_s, ready_s, read_bytes = (
            b - a for a, b in zip(self._begin, self._now(), strict=True)
        )
        seen_s = seen_cpu_s = 0.0
        seen_bytes = 0
        if self.files is not None:
            seen_s, seen_cpu_s = self.files.read_s, self.files.cpu_s
            seen_bytes = self.files.read_bytes
        idle_s = (wall_s - seen_s) - (cpu_s - seen_cpu_s) - ready_s
        self.fetch_s = seen_s + max(idle_s, 0.0)
        # The first samples of a worker also load libraries, which is no reading of samples.
        unseen = int(read_bytes) - seen_bytes > max(OWN_BYTES, seen_bytes)
        self.read_bytes = int(read_bytes) if unseen else seen_bytes


class NoMeter:
    """All is preparing."""

    fetch_s, read_bytes = 0.0, 0

    def stop(self) -> None:
        pass


def _waited_s() -> float:
    """Seconds for which this thread was ready and had no core."""
    words = _read(CLOCKS).split()
    return int(words[1]) * 1e-9 if len(words) > 1 else 0.0


def _read_bytes() -> int:
    """Bytes that this thread has read from files, whether or not the system had them in memory."""
    words = _read(COUNTERS).split(maxsplit=2)
    return int(words[1]) if len(words) > 1 else 0


def _read(path: str) -> bytes:
    """Not by ``open``, which may be the one that watches."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)
