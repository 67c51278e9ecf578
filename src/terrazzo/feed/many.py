"""Many: what a feed does for each batch where many devices read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from terrazzo.feed.batch import Batch, Fed, Slice
from terrazzo.feed.spread import FAILED, SPREAD, Read
from terrazzo.geometry import Box
from terrazzo.runtime.part import Part

if TYPE_CHECKING:
    from terrazzo.feed.feed import Feed


class Many:
    """Of one feed."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.spread, self.links = feed, feed.spread, feed.links

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

    def next(self) -> Fed:
        """The next batch, of which this device may have read some samples."""
        feed, spread, links = self.feed, self.spread, self.links
        if feed.position >= spread.batches:
            feed.meet()
            return feed.fed({"end": True}, [], None)
        read: Read | Exception
        try:
            read = spread.read(feed.position)
        except Exception as error:
            read = error
        guests = feed.guests() if links.device == feed.place else []
        marks = feed.meet(FAILED if guests else spread.mark(read))
        put = spread.agree(read, feed.position, marks, guests)
        if put.guests:
            feed.regroup(list(put.guests))
        assert not isinstance(read, Exception)
        begin = time.perf_counter()
        shapes = [(put.size, *column.shape) for column in put.form.columns[: feed.inputs]]
        boxes = feed.boxes(shapes)
        found = spread.collect(read, put, dict(enumerate(boxes)))
        whole = feed.kept([], links.epoch)
        parts: list[Any] = []
        for place, (tensor, shape) in enumerate(zip(found, shapes, strict=False)):
            origin = None if whole is None else Slice(whole, place, tensor)
            parts.append(Part(tensor, boxes[place][links.device], shape, origin=origin))
        wholes = found[feed.inputs :]
        feed.delivered(begin, sum(tensor.nbytes for tensor in found))
        header = {} if whole is None else spread.header(put)
        return Fed(header, wholes, put.form.build([*parts, *wholes], put.texts))

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
        return self.spread.collect(read, put, {place: boxes}, only=place)[0]
