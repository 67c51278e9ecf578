"""Shelf: memory of batches that nobody holds any more, for the next ones.

A batch of some megabytes in new memory costs the loop a fault for each page, which takes longer
than to copy it. So what a batch lay in is taken again once the last tensor that sees it is gone.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

LEAST_BYTES = 1 << 18
"""Smaller ones lie in memory that the system keeps mapped anyway."""
MOST = 4
"""So many pieces of each size are kept."""
MOST_SIZES = 4


class Shelf:
    """In one process."""

    def __init__(self) -> None:
        self._free: dict[int, deque[bytearray]] = {}

    def take(self, size: int) -> Tensor:
        """So many bytes, with anything in them."""
        if size < LEAST_BYTES:
            return torch.empty(size, dtype=torch.uint8)
        free = self._free.get(size)
        if free is None:
            if len(self._free) >= MOST_SIZES:  # of batches that never look the same
                del self._free[next(iter(self._free))]
            free = self._free[size] = deque(maxlen=MOST)
        memory = free.pop() if free else bytearray(size)
        seen = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(seen, free.append, memory)  # a tensor's memory holds what it was made of
        return torch.from_numpy(seen)
