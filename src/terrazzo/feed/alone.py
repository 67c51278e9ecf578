"""Alone: one way through a source where there is nobody to hand batches to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from terrazzo.feed.chance import draw_but, drawn_from, moved
from terrazzo.feed.source import Source
from terrazzo.feed.sources import Plain


class Alone:
    """One way through a source on the only device there is."""

    reader = 0

    def __init__(self, source: Source | Plain) -> None:
        self.source, self.position = source, 0
        self._chance: dict[str, Any] | None = None
        self._batches: Iterator[Any] | None = None

    def where(self) -> dict[str, Any]:
        return {"position": self.position, "reader": 0, "chance": self._chance}

    def go_on_from(self, where: Mapping[str, Any]) -> None:
        self.position, self._chance = where["position"], where["chance"]
        own = drawn_from(None)
        if self._chance is not None:
            self.source.draw_as(self._chance)
        before = drawn_from(None)
        batches = self.source.begin(self.position)
        first = list(islice(batches, 1))  # only now reading has drawn from what it draws from
        self._batches = chain(first, batches)
        draw_but(own, moved(before))

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            self._chance = self.source.chance()
            self._batches = iter(self.source)
        for batch in self._batches:
            self.position += 1
            yield batch
