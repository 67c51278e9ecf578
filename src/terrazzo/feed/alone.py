"""Alone: one way through a source where there is nobody to hand batches to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from terrazzo.feed.chance import draw_as, drawn_from
from terrazzo.feed.source import Source
from terrazzo.feed.sources import Plain
from terrazzo.feed.stays import goes_its_own_way


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
        """The epoch begins as it began then; what was read of it is read again and left out.

        Then all generators stand where they stood when the state was saved, whoever has drawn from
        them: reading and the loop may share them.
        """
        self.position, self._chance = where["position"], where["chance"]
        if self._chance is None:
            return
        own = drawn_from(None)
        self.source.draw_as(self._chance)
        if self._has_seeds:
            self._batches = self.source.begin(self.position)
        else:
            self._batches = self.source.begin(0)
            for _ in islice(self._batches, self.position):
                pass
        draw_as(own, None)

    @property
    def _has_seeds(self) -> bool:
        """Whether samples draw from nothing that is shared, so that none need be read again."""
        source = self.source
        if not isinstance(source, Source) or goes_its_own_way(source.loader):
            return False
        return source.options.seed is not None

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            self._chance = self.source.chance()
            self._batches = iter(self.source)
        for batch in self._batches:
            self.position += 1
            yield batch
