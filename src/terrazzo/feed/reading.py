"""Reading: the batches of a source on the one device that reads for all, each until all have it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from terrazzo.feed import draws
from terrazzo.feed.batch import END, Batch, describe
from terrazzo.feed.chance import draw_but, drawn_from
from terrazzo.feed.order import FAR, free_batches
from terrazzo.feed.repeats import Read, Repeats
from terrazzo.feed.source import Source
from terrazzo.feed.sources import Plain
from terrazzo.runtime.links import Links


class Reading:
    """One way through a source; devices that do not read know where it began."""

    def __init__(
        self, source: Source | Plain | None, links: Links, *, inputs: int, tells: bool
    ) -> None:
        """``tells``: somebody will want to know where it began."""
        self.source, self.links, self.inputs, self.tells = source, links, inputs, tells
        self.batches: Iterator[Any] | None = None
        self.read: Read | None = None
        """The batch that is being handed out."""
        self.later: Read | Exception | None = None
        """The one after it, if it was looked at before its time."""
        self.chance: dict[str, Any] | None = None
        """Where the generators stood when it began."""
        self.draws: set[str] = set()
        """Generators that all share and that reading draws from; the loop draws from the rest."""
        self.repeats = Repeats()
        self.live: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()
        """Batches that are still in use, by number."""

    def catch_up(self, position: int) -> None:
        """Reads up to where the one before was; batches still in use are kept."""
        assert self.source is not None
        own = drawn_from(None)
        if self.chance is not None:
            self.source.draw_as(self.chance)
        elif self.tells and position == 0 and not self.live:  # the one before had not begun
            self.chance = self.source.chance()
        before = draws.states()
        first = min([position, *(number for number in self.live)])
        self.batches, self.read, self.later = self.source.begin(first), None, None
        self.repeats.lose()
        for number in range(first, position):
            batch = next(self.batches, END)
            used = self.live.get(number)
            if used is not None:
                used.tensors = describe(batch)[1][: self.inputs]
        if self.chance is not None:
            self.read = self._from(self.batches)
            self.draws |= draws.moved(before)
            draw_but(own, self.draws)
            if "after" in self.read[0]:  # at the end: what the loop has drawn counts, too
                self.read[0]["after"] = self.source.chance()
        used = self.live.get(position)  # given to some before the reader was lost
        if used is not None:
            self.read = self.read or self._from(self.batches)
            used.tensors = self.read[1][: self.inputs]

    def fetch(self, position: int) -> Read:
        """The next batch; the same again until all have it."""
        assert self.source is not None
        if self.batches is None and self.chance is not None:
            self.catch_up(position)
        if self.read is None:
            if self.batches is None:
                if self.tells:
                    self.chance = self.source.chance()
                self.batches = iter(self.source)
            found, self.later = self.later or self._one(), None
            if isinstance(found, Exception):
                raise found
            if "after" in found[0]:
                found[0]["after"] = self.source.chance()
            self.read = found
        return self.read

    def _one(self) -> Read:
        assert self.batches is not None
        again = self.repeats.next()
        if again is None:
            before = draws.states() if self.links.recovery is not None else None
            again = self._from(self.batches)
            self.draws |= set() if before is None else draws.moved(before)
            self.repeats.add(again)
        return again

    def look(self) -> Read | None:
        """The batch after the one that is handed out; None: there is none, or it comes later."""
        if self.later is None:
            try:
                self.later = self._one()
            except Exception as error:  # told when it is its turn
                self.later = error
        return self.later if isinstance(self.later, tuple) else None

    @property
    def may_look(self) -> bool:
        """Whether reading before its time changes nothing that a script can see."""
        source = self.source
        if not isinstance(source, Source) or source.reason:
            return False
        return source.options.seed is not None or (
            source.loader.num_workers > 0 and free_batches(source.loader) >= FAR
        )

    def _from(self, batches: Iterator[Any]) -> Read:
        """One more of the source, as it is told; at the end also what comes after."""
        batch = next(batches, END)
        found = (*describe(batch), batch)
        if batch is END and self.links.recovery is not None and self.source is not None:
            found[0]["after"] = self.source.chance()
        return found

    def go_back_to(self, position: int) -> None:
        """Batches from there on come again; who reads has them still, or reads them again."""
        again = self.repeats.since(position)
        self.read = self.later = None
        if self.batches is None:
            return
        if again is None:
            self.catch_up(position)
        else:
            self.repeats.rewind(again, position)
