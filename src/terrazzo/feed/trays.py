"""Trays: memory through which workers hand batches over, shared since before they began.

The usual way, one file for each tensor whose number is fetched from the worker, makes the training
loop wait until the worker is scheduled once more, 8 ms where cores are busy. Here a worker writes
its batch into a tray that was chosen with the task, and the loop copies it out.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

from terrazzo.feed.form import parts_of, thaw
from terrazzo.feed.shelf import Shelf

TRAY_BYTES = 256 << 20
"""The most that fits; memory is only taken for what is used of it."""
TRAYS = 64


class Served(NamedTuple):
    """What stands for a batch that lies in a tray."""

    tray: int
    size: int


class Trays:
    """All trays of a pool; the training process says who uses which."""

    def __init__(self) -> None:
        self._file = os.memfd_create("terrazzo-trays")
        os.ftruncate(self._file, TRAYS * TRAY_BYTES)
        self._memory = mmap.mmap(self._file, TRAYS * TRAY_BYTES)
        self._free = list(reversed(range(TRAYS)))
        self._shelf = Shelf()

    def take(self) -> int | None:
        """One that is free, the last one used first; None: there is none."""
        return self._free.pop() if self._free else None

    def put_back(self, tray: int | None) -> None:
        if tray is not None:
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

    def clear(self, sent: Any) -> Any:
        """In the training process: the batch, in memory of its own."""
        if not isinstance(sent, Served):
            return sent
        at = sent.tray * TRAY_BYTES
        with memoryview(self._memory) as whole, whole[at : at + sent.size] as part:
            return thaw(part, self._shelf)

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)
