"""Trays: memory through which workers hand batches over, shared since before they began.

The usual way, one file for each tensor whose number is fetched from the worker, makes the training
loop wait until the worker is scheduled once more, 8 ms where cores are busy. Here a worker writes
its batch into a tray that was chosen with the task, and there its tensors lie: nothing is copied in
the loop. A tray is used again when the last tensor in it is gone, so that a batch may be kept for
any time. Who keeps very many gets copies, lest workers run out of trays.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from terrazzo.feed.form import parts_of, thaw, thaw_there

TRAY_BYTES = 256 << 20
"""The most that fits; memory is only taken for what is used of it."""
TRAYS = 64
SPARE = 16
"""So many are not lent to batches."""
KEPT = 16
"""Where more are in use, the memory of one that comes back is given back to the system."""


class Served(NamedTuple):
    """What stands for a batch that lies in a tray."""

    tray: int
    size: int


class Trays:
    """All trays of a pool; the training process says who uses which."""

    def __init__(self) -> None:
        file = os.memfd_create("terrazzo-trays")
        os.ftruncate(file, TRAYS * TRAY_BYTES)
        self._memory = mmap.mmap(file, TRAYS * TRAY_BYTES)
        os.close(file)  # the memory lives until the last batch in it is gone
        self._free = list(reversed(range(TRAYS)))
        self._process = os.getpid()

    def take(self) -> int | None:
        """One that is free, the last one used first; None: there is none."""
        return self._free.pop() if self._free else None

    def put_back(self, tray: int | None) -> None:
        if tray is None or os.getpid() != self._process:  # a copy of a batch dies with a worker
            return
        if TRAYS - len(self._free) > KEPT:
            with suppress(OSError):  # a system that cannot keeps it
                self._memory.madvise(mmap.MADV_REMOVE, tray * TRAY_BYTES, TRAY_BYTES)
        self._free.append(tray)

    def serve(self, batch: Any, tray: int | None) -> Any:
        """In a worker: what to send instead of the batch, or the batch if it does not fit."""
        if tray is None:
            return batch
        parts = parts_of(batch)
        size = sum(len(part) for part in parts)
        if size > TRAY_BYTES:
            return batch
        at = tray * TRAY_BYTES
        for part in parts:
            self._memory[at : at + len(part)] = part
            at += len(part)
        return Served(tray, size)

    def clear(self, sent: Any, tray: int | None) -> Any:
        """In the training process: the batch. Its tray is put back when nothing of it is left."""
        if not isinstance(sent, Served):
            self.put_back(tray)
            return sent
        data = np.frombuffer(self._memory, np.uint8, sent.size, sent.tray * TRAY_BYTES)
        is_lent = len(self._free) >= SPARE
        try:
            return thaw_there(data) if is_lent else thaw(data.data)
        finally:
            weakref.finalize(data, self.put_back, tray).atexit = False  # type: ignore[misc]
