"""Ledger: a few whole numbers for each sample of a set, in one array where samples are numbered.

A set may have millions of samples on a board with little memory, so what is known of each must be
small: 8 bytes for each number. Samples that are named otherwise go into a dictionary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

WORD_BYTES = 8


class Ledger:
    """Rows of ``width`` numbers below 2**64; a row of zeros is none."""

    def __init__(self, samples: int, width: int) -> None:
        self.samples, self.width = samples, width
        self._count = 0
        self._rows: array[int] | None = None
        self._others: dict[Any, tuple[int, ...]] = {}

    def get(self, index: Any) -> tuple[int, ...] | None:
        if not self._is_numbered(index):
            return self._others.get(index)
        if self._rows is None:
            return None
        row = tuple(self._rows[index * self.width : (index + 1) * self.width])
        return row if any(row) else None

    def put(self, index: Any, row: tuple[int, ...]) -> None:
        if not self._is_numbered(index):
            self._others[index] = row
            return
        if self._rows is None:
            self._rows = array("Q", bytes(WORD_BYTES * self.width * self.samples))
        self._count += (any(row)) - (index in self)
        self._rows[index * self.width : (index + 1) * self.width] = array("Q", row)

    def drop(self, index: Any) -> None:
        if not self._is_numbered(index):
            self._others.pop(index, None)
        elif index in self:
            self.put(index, (0,) * self.width)

    def clear(self) -> None:
        self._rows, self._count = None, 0
        self._others.clear()

    def _is_numbered(self, index: Any) -> bool:
        return type(index) is int and 0 <= index < self.samples

    def __contains__(self, index: Any) -> bool:
        return self.get(index) is not None

    def __len__(self) -> int:
        return self._count + len(self._others)

    def __iter__(self) -> Iterator[Any]:
        if self._count:
            yield from (index for index in range(self.samples) if index in self)
        yield from list(self._others)
