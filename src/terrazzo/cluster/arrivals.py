"""Arrivals: devices that were written into a cluster's file after its run had begun.

They come one at a time, in the order of the file; one that does not answer is waited for, and those
behind it with it.
"""

from __future__ import annotations

import time
from pathlib import Path

from terrazzo.records.cluster import Cluster, ClusterDevice

LOOK_S = 1.0


class Arrivals:
    """Looks into the file whenever that has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = {device.name for device in Cluster.load(path).devices}
        self._seen, self._look_s = self._state(), 0.0
        self._coming: list[ClusterDevice] = []

    def next(self) -> ClusterDevice | None:
        """The device whose turn it is; UsageError, once, where the file can't be read."""
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            state = self._state()
            if state != self._seen:
                self._seen = state
                self._take(Cluster.load(self._path))
        return self._coming[0] if self._coming else None

    def came(self) -> None:
        """It takes part now."""
        self._coming.pop(0)

    def _take(self, cluster: Cluster) -> None:
        new = [device for device in cluster.devices if device.name not in self._names]
        self._coming += new
        self._names |= {device.name for device in new}

    def _state(self) -> tuple[int, int]:
        """Another one when the file was written again."""
        try:
            found = self._path.stat()
        except OSError:  # it is being replaced
            return 0, 0
        return found.st_mtime_ns, found.st_ino
