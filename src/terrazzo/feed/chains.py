"""Chains: what the workers of a DataLoader would have drawn, whoever makes their batches.

Batch ``p`` belongs to stream ``p % count`` and begins with the generators as batch ``p - count``
left them. Most data sets draw nothing, so batches are begun as if the one before had not; one that
drew after another that drew is made again, and from then on each waits for the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from terrazzo.feed.draws import States, Stream
from terrazzo.feed.task import Made


@dataclass
class Item:
    """One batch of an epoch, on its way."""

    indices: Any
    position: int
    ticket: int | None = None
    """Under which a worker makes it; None: nobody does yet."""
    version: int = 0
    """How many batches before it in its stream had drawn when it was given away."""
    worker: int = -1
    made: Made | None = None
    copied_s: float = 0.0
    is_sure: bool = False
    """Whether what was made is what a DataLoader would have made."""


@dataclass
class Chains:
    """The streams of one epoch."""

    base: int
    count: int
    draws: bool = False
    """Whether any batch has drawn so far."""
    _tails: dict[int, States] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)
    _sure: dict[int, int] = field(default_factory=dict)
    """Per stream the last position of which all is known."""

    def stream(self, item: Item) -> Stream | None:
        return Stream(self.base, item.position % self.count, self.count) if self.count else None

    def states(self, item: Item) -> States | None:
        return self._tails.get(item.position % self.count) if self.count else None

    def may_begin(self, item: Item) -> bool:
        """Whether it is known how its stream begins, or nothing speaks against a guess."""
        if not self.count or not self.draws or item.position < self.count:
            return True
        number = item.position % self.count
        return self._sure.get(number, number - self.count) == item.position - self.count

    def begin(self, item: Item) -> None:
        item.version = self._versions.get(item.position % self.count, 0) if self.count else 0

    def settle(self, items: list[Item]) -> list[Item]:
        """Looks at what has arrived, in order; gives those that must be made again."""
        again = []
        for item in items:
            if item.is_sure or item.made is None:
                continue
            if not self.count:
                item.is_sure = True
                continue
            number = item.position % self.count
            if self._sure.get(number, number - self.count) != item.position - self.count:
                continue
            drew = item.made.states is not None
            if drew and item.version != self._versions.get(number, 0):
                again.append(item)
                continue
            self._sure[number] = item.position
            item.is_sure = True
            if item.made.states is not None:
                self.draws = True
                self._tails[number] = item.made.states
                self._versions[number] = self._versions.get(number, 0) + 1
        return again
