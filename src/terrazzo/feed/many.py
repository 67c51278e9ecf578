"""Many: what a feed does for each batch where many devices read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import floor
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from terrazzo.feed.batch import Batch, Fed, Slice
from terrazzo.feed.rows import Gathering
from terrazzo.feed.spread import FAILED, SPREAD, Put, Read
from terrazzo.geometry import Box
from terrazzo.runtime.part import Part

if TYPE_CHECKING:
    from terrazzo.feed.feed import Feed

FOLLOWS = 0.5
"""Added to the mark of a batch, a whole number: the next one looks the same, and may be sent."""


class Posted(NamedTuple):
    """A batch that travels while the one before it is computed with."""

    number: int
    epoch: int
    """Of the connections."""
    boxes: list[tuple[Box, ...]]
    gathering: Gathering

    def land(self) -> list[Tensor]:
        return self.gathering.land()


class Many:
    """Of one feed."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.spread, self.links = feed, feed.spread, feed.links
        self.posted: Posted | None = None
        self._later: tuple[int, int, Read | Exception] | None = None
        """A batch that was read before its time, with its number and that of the connections."""

    def arrange(self) -> None:
        """Who reads, at the beginning and when members have changed; all devices ask at once."""
        feed, spread = self.feed, self.spread
        if spread.arranged_in == self.links.epoch:
            return
        feed.choice.among(self.links.members)
        chance = feed.reading.chance
        stands = feed.meet(spread.stand())
        spread.arrange(stands, None if chance is None else chance["epoch"], feed.place)
        if spread.rota is not None:
            feed.reading.batches = feed.reading.read = feed.reading.later = None
            feed.reading.chance = {"epoch": spread.epoch, SPREAD: True}

    def restart(self) -> None:
        """What was read ahead is not wanted any more."""
        self._later = None
        self.spread.restart()

    def next(self) -> Fed:
        """The next batch, of which this device may have read some samples."""
        feed, spread, links = self.feed, self.spread, self.links
        if feed.position >= spread.batches:
            feed.meet()
            return feed.fed({"end": True}, [], None)
        read, later = self._read(feed.position), self._look(feed.position + 1)
        guests = feed.guests() if links.device == feed.place else []
        mark = FAILED if guests else spread.mark(read)
        follows = isinstance(later, Read) and spread.mark(later) == mark >= 0
        marks = feed.meet(mark + FOLLOWS if follows else mark)
        put = spread.agree(read, feed.position, [floor(one) for one in marks], guests)
        if put.guests:
            feed.regroup(list(put.guests))
        assert isinstance(read, Read)
        fed = self._fed(read, put)
        if all(one % 1 == FOLLOWS for one in marks):
            assert isinstance(later, Read)
            self._post(later, spread.alike(feed.position + 1))
        return fed

    def _fed(self, read: Read, put: Put) -> Fed:
        feed, links = self.feed, self.links
        begin, boxes = time.perf_counter(), self._boxes(put)
        found = self._landed(boxes)
        is_ahead = found is not None
        if found is None:
            found = self.spread.collect(read, put, dict(enumerate(boxes))).land()
        whole = feed.kept([], links.epoch)
        parts: list[Any] = []
        for place, (tensor, box) in enumerate(zip(found, boxes, strict=False)):
            origin = None if whole is None else Slice(whole, place, tensor)
            shape = (put.size, *put.form.columns[place].shape)
            parts.append(Part(tensor, box[links.device], shape, origin=origin))
        wholes = found[feed.inputs :]
        feed.delivered(begin, sum(tensor.nbytes for tensor in found), is_ahead=is_ahead)
        header = {} if whole is None else self.spread.header(put)
        return Fed(header, wholes, put.form.build([*parts, *wholes], put.texts))

    def _boxes(self, put: Put) -> list[tuple[Box, ...]]:
        columns = put.form.columns[: self.feed.inputs]
        return self.feed.boxes([(put.size, *column.shape) for column in columns])

    # ---- ahead -----------------------------------------------------------------------------

    def _read(self, position: int) -> Read | Exception:
        """This device's rows of a batch, or what is to be told of them."""
        later, self._later = self._later, None
        if later is not None and later[:2] == (position, self.links.epoch):
            return later[2]
        try:
            return self.spread.read(position)
        except Exception as error:
            return error

    def _look(self, position: int) -> Read | Exception | None:
        """The batch after the one that is handed out, where it is to be sent ahead.

        A device that has no data does as the others want.
        """
        wants = self.spread.source is None or self.feed.choice.is_ahead
        if not wants or position >= self.spread.batches:
            return None
        found = self._read(position)
        self._later = position, self.links.epoch, found
        return found

    def _post(self, read: Read, put: Put) -> None:
        """Sends a batch on its way; it is waited for when it is asked for."""
        boxes, number = self._boxes(put), self.feed.position + 1
        gathering = self.spread.collect(read, put, dict(enumerate(boxes)), ahead=True)
        self.posted = Posted(number, self.links.epoch, boxes, gathering)

    def _landed(self, boxes: list[tuple[Box, ...]]) -> list[Tensor] | None:
        """This batch, if it has been sent, and all devices still have their connections."""
        posted, self.posted = self.posted, None
        if posted is None or posted.epoch != self.links.epoch:
            return None
        found = posted.land()
        is_this = posted.number == self.feed.position and posted.boxes == boxes
        return found if is_this else None  # otherwise the plan has changed since

    def read_again(self, batch: Batch, place: int, boxes: Sequence[Box]) -> Tensor:
        """A device's box of a batch that was handed out before; all devices call this at once."""
        self.arrange()
        read: Read | Exception
        try:
            read = self.spread.read_again(batch.number)
        except Exception as error:
            read = error
        put = self.spread.agree(read, batch.number)
        assert not isinstance(read, Exception)
        return self.spread.collect(read, put, {place: boxes}, only=place).land()[0]
