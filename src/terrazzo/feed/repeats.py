"""Repeats: the batches that were read since a run could last go back, to be handed out again."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

MOST_BYTES = 64 << 20
"""More than that is read again instead."""

Read = tuple[dict[str, Any], list[Tensor], Any]


class Repeats:
    """On the device that reads."""

    def __init__(self) -> None:
        self._begin = 0
        self._batches: list[Read] | None = None
        self._again: deque[Read] = deque()

    def add(self, batch: Read) -> None:
        """One that was read just now."""
        if self._batches is not None:
            self._batches.append(batch)
            size = sum(tensor.nbytes for _, tensors, _ in self._batches for tensor in tensors)
            if size > MOST_BYTES:
                self._batches = None

    def next(self) -> Read | None:
        """One that comes again, if any is left."""
        return self._again.popleft() if self._again else None

    def since(self, position: int) -> list[Read] | None:
        """What was read from a position on; None, where some of it is not here any more."""
        if self._batches is None or position < self._begin:
            return None
        return self._batches[position - self._begin :]

    def rewind(self, again: list[Read], position: int) -> None:
        self._batches, self._begin, self._again = again, position, deque(again)

    def forget(self, position: int, *, is_read: bool) -> None:
        """Nobody goes back to before a position; from there on batches are kept.

        ``is_read``: the one at that position was read already.
        """
        kept = self.since(position)
        if kept is None and not is_read and not self._again:
            kept = []
        self._batches, self._begin = kept, position

    def lose(self) -> None:
        """The data is read anew."""
        self._batches = None
        self._again.clear()
