"""One device reads; each gets its box of the input, and all get the targets.

Tensors keep their dtype on the wire: uint8 pictures travel as uint8. Where the loss of a device is
survived, the device that reads keeps a batch until it is used up; when it is lost itself, another
that has the loader reads on from the same place.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from terrazzo.errors import ModelError, PeerLost, RunError, UsageError
from terrazzo.feed.batch import END, Batch, Slice, describe, outlines, rebuild, scatter
from terrazzo.feed.chance import draw_as, draw_but, drawn_from, moved
from terrazzo.feed.rehearsal import counted
from terrazzo.feed.repeats import Repeats
from terrazzo.feed.sharing import Offer
from terrazzo.feed.source import Source
from terrazzo.feed.sources import Plain, offer_of, source_of
from terrazzo.feed.stages import Clock, Took
from terrazzo.geometry import Box
from terrazzo.members.control import Interrupted
from terrazzo.records.stage import DELIVER
from terrazzo.runtime.agreement import FEED, NOTHING, Note, compare
from terrazzo.runtime.net import Net
from terrazzo.runtime.part import Part
from terrazzo.runtime.recovery import Give, give_tensors, perform, take_tensors


def feed(
    loader: Any,
    net: Net,
    *,
    inputs: int = 1,
    reader: int | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Iterates over a loader on device ``reader`` and hands every batch to all devices.

    Left open, the one that ``tz.init`` named reads, which is device 0 by default.

    The first ``inputs`` tensors of a batch go into net and arrive as the part a device needs; all
    others arrive whole. Other devices may pass None for the loader; one that has it too can take
    over when the reader is lost.

    ``loader`` is a DataLoader, whose batches stay the same to the bit, any other iterable, or a
    data set; ``options`` are those of ``feed.sources.source_of`` (docs/feed.md).
    """
    if net.links.devices == 1 and net.links.recovery is None:
        if loader is None:
            raise UsageError("tz.feed got no loader, and there is no other device to read")
        yield from counted(net.links, source_of(loader, net, **options), reader=0)
        return
    source = None if loader is None else source_of(loader, net, **options)
    reads = net.links.reader if reader is None else reader
    way = Feed(source, net, inputs=inputs, reader=reads)
    way.offers(options.get("cache"))
    yield from counted(net.links, way, reader=reads)


class Host(Protocol):
    """Who does something before a batch is handed out, on all devices together (a Run)."""

    def before_batch(self, feed: Feed) -> None: ...

    def after_last(self, feed: Feed) -> None: ...

    def before_joining(self, feed: Feed) -> None: ...

    @property
    def admits(self) -> bool:
        """Whether devices that come later can be let in."""


class Fed(NamedTuple):
    """A batch as one device has it: None at the end of the data."""

    header: dict[str, Any]
    wholes: list[Tensor]
    batch: Any


class Feed:
    """One way through a loader."""

    def __init__(
        self,
        source: Source | Plain | None,
        net: Net,
        *,
        inputs: int,
        reader: int,
        host: Host | None = None,
    ) -> None:
        """With a ``host``, devices that come later may join before the next batch."""
        self.source, self.net, self.inputs = source, net, inputs
        self.host = host
        self.links = net.links
        self.reader = reader
        """By the number that it started with."""
        self.position = 0
        """How many batches all devices have."""
        self._batches: Iterator[Any] | None = None
        self._read: tuple[dict[str, Any], list[Tensor], Any] | None = None
        self._chance: dict[str, Any] | None = None
        self.draws: set[str] = set()
        """Generators that all share and that reading draws from; the loop draws from the rest."""
        self._offer: Offer | None = None
        self._repeats = Repeats()
        self._live: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()
        if self.links.members[self.links.device] == reader and source is None:
            raise UsageError(f"device {reader} reads the data, but its loader is None")

    def offers(self, cache: str | int | None) -> None:
        """This device holds samples for the reader, if it is another."""
        if self.links.devices > 1 and self.links.members[self.links.device] != self.reader:
            self._offer = offer_of(self.net, cache)

    def __iter__(self) -> Iterator[Any]:
        while True:
            if self._offer is not None:
                self._offer.mind_memory()
            fed: Fed = perform(self.links, self._next, take=self._take, give=self._give)
            self._read = None
            if "end" in fed.header:
                self._end_as_reader(fed.header)
                return
            self.position += 1
            yield fed.batch

    def _end_as_reader(self, header: Mapping[str, Any]) -> None:
        """Whoever reads the next time goes on with the random numbers of the one who read now."""
        if "after" not in header or self.links.members[self.links.device] == self.reader:
            return
        if self.source is None:
            draw_as(header["after"], None)
        else:
            self.source.draw_as(header["after"])

    @property
    def place(self) -> int:
        """The number of the reader among those who are here."""
        return self.links.members.index(self.reader)

    def where(self) -> dict[str, Any]:
        """How far this way through the data is, for going on elsewhere."""
        return {"position": self.position, "reader": self.reader, "chance": self._chance}

    def go_on_from(self, where: Mapping[str, Any]) -> None:
        self.position, self.reader = where["position"], where["reader"]
        self._chance = where["chance"]
        if self.links.members[self.links.device] == self.reader:
            self._catch_up()

    def go_back_to(self, position: int) -> None:
        """Batches from there on come again; who reads has them still, or reads them again."""
        again = self._repeats.since(position)
        self.position, self._read = position, None
        if self._batches is None:
            return
        if again is None:
            self._catch_up()
        else:
            self._repeats.rewind(again, position)

    def keep_from_here(self) -> None:
        """Nobody will go back to before the next batch."""
        self._repeats.forget(self.position, is_read=self._read is not None)

    # ---- reading -------------------------------------------------------------------------

    def find_reader(self) -> None:
        """Where the one that read is lost, another takes over; all devices ask at once."""
        if self.reader in self.links.members:
            return
        able = self.links.gather(torch.tensor([float(self.source is not None)]), counted=False)
        places = [place for place, flag in enumerate(able.flatten().tolist()) if flag]
        if not places:
            raise PeerLost(
                f"device {self.reader}, which read the data, is gone, and no other device has a "
                "loader: give all devices theirs, tz.feed(loader, net), to go on after its loss"
            )
        self.reader = self.links.members[places[0]]
        if self.links.device == places[0]:
            if self._offer is not None:  # whom it was for is gone
                self._offer.close()
                self._offer = None
            self._catch_up()

    def _catch_up(self) -> None:
        """Reads up to where the one before was; batches still in use are kept."""
        assert self.source is not None
        own = drawn_from(None)
        if self._chance is not None:
            self.source.draw_as(self._chance)
        elif self.position == 0 and not self._live:  # the one before was lost before it began
            self._chance = self.source.chance()
        before = drawn_from(None)
        first = min([self.position, *(number for number in self._live)])
        self._batches, self._read = self.source.begin(first), None
        self._repeats.lose()
        for number in range(first, self.position):
            batch = next(self._batches, END)
            used = self._live.get(number)
            if used is not None:
                used.tensors = describe(batch)[1][: self.inputs]
        if self._chance is not None:
            self._read = self._from(self._batches)
            self.draws |= moved(before)
            draw_but(own, self.draws)
            if "after" in self._read[0]:  # at the end: what the loop has drawn counts, too
                self._read[0]["after"] = self.source.chance()
        used = self._live.get(self.position)  # given to some before the reader was lost
        if used is not None:
            self._read = self._read or self._from(self._batches)
            used.tensors = self._read[1][: self.inputs]

    def _fetch(self) -> tuple[dict[str, Any], list[Tensor], Any]:
        """The next batch; the same again until all have it."""
        if self._read is None:
            assert self.source is not None
            if self._batches is None:
                if self.links.recovery is not None or self.host is not None:
                    self._chance = self.source.chance()
                self._batches = iter(self.source)
            again = self._repeats.next()
            if again is None:
                before = drawn_from(None) if self.links.recovery is not None else {}
                again = self._from(self._batches)
                self.draws |= moved(before) if before else set()
                self._repeats.add(again)
            self._read = again
        return self._read

    def _from(self, batches: Iterator[Any]) -> tuple[dict[str, Any], list[Tensor], Any]:
        """One more of the source, as it is told; at the end also what comes after."""
        batch = next(batches, END)
        found = (*describe(batch), batch)
        if batch is END and self.links.recovery is not None and self.source is not None:
            found[0]["after"] = self.source.chance()
        return found

    # ---- handing out ---------------------------------------------------------------------

    def _next(self) -> Fed:
        if self.host is not None:
            self.host.before_batch(self)
        self.find_reader()
        links = self.links
        if links.device != self.place:
            return self._receive()
        try:
            header, tensors, batch = self._fetch()
        except Exception as error:
            self._meet()
            text = f"{type(error).__name__}: {error}"
            links.broadcast_bytes(json.dumps({"error": text}).encode(), self.place)
            raise
        self._meet()
        letter = dict(header)
        if guests := self._guests():
            links.broadcast_bytes(json.dumps({"join": guests}).encode(), self.place)
            self._regroup(guests)
        if self.position == 0 and self._chance is not None:
            letter["chance"] = self._chance
        links.broadcast_bytes(json.dumps(letter).encode(), self.place)
        return self._fed(header, tensors, batch)

    def _receive(self) -> Fed:
        self._meet()
        header = json.loads(self.links.broadcast_bytes(None, self.place))
        if "join" in header:
            self._regroup(header["join"])
        self._chance = header.pop("chance", self._chance)
        if "error" in header:
            raise RunError(f"device {self.reader}, which reads the data, failed: {header['error']}")
        return self._fed(header, [] if "end" in header else outlines(header), None)

    def _guests(self) -> list[int]:
        """Who is to be let in now: one at a time, because the next must have a line to it."""
        control = self.links.control
        if self.host is None or control is None or not self.host.admits:
            return []
        return sorted(control.guests)[:1]

    def _regroup(self, guests: list[int]) -> NoReturn:
        """Somebody wants to join: before this batch is as good a place as any."""
        assert self.links.control is not None
        assert self.host is not None
        self.host.before_joining(self)
        self.links.control.admit(guests)
        raise Interrupted("a device joins")

    def _meet(self) -> None:
        links = self.links
        links.where = "waiting for the next batch"
        note = Note(FEED, self.position, f"{self.reader:012x}", NOTHING)
        compare(links, note, explain=f"waiting for a batch from device {self.reader}")

    def _fed(self, header: dict[str, Any], tensors: list[Tensor], batch: Any) -> Fed:
        """Sends every device its part; ``tensors`` are real on the reader only."""
        if "end" in header:
            if self.host is not None:
                self.host.after_last(self)
            return Fed(header, [], None)
        begin = time.perf_counter()
        given = tensors[: self.inputs]
        boxes = self._boxes([tuple(tensor.shape) for tensor in given])
        whole = self._batch(given if self.links.device == self.place else [], self.links.epoch)
        parts: list[Any] = [
            self._part(whole, place, tensor, where)
            for place, (tensor, where) in enumerate(zip(given, boxes, strict=True))
        ]
        wholes = []
        for tensor in tensors[self.inputs :]:
            full = tensor.contiguous()
            if full.is_meta:
                full = torch.empty(tensor.shape, dtype=tensor.dtype)
            wholes.append(self.links.broadcast(full, self.place))
        self._delivered(begin, sum(tensor.nbytes for tensor in tensors))
        return Fed(header, wholes, rebuild(header, [*parts, *wholes], batch))

    def _delivered(self, begin: float, size_bytes: int) -> None:
        end, epoch = time.perf_counter(), (self._chance or {}).get("epoch", 0)
        took = Took(DELIVER, begin, end, end - begin, size_bytes)
        Clock(self.links.recorder).note(took, epoch=epoch, batch=self.position, beside=False)

    def _boxes(self, shapes: list[tuple[int, ...]]) -> list[tuple[Box, ...]]:
        try:
            return self.net.boxes(shapes)
        except ModelError as error:
            raise ModelError(
                f"{error} tz.feed took the first of the tensors in a batch for the input of net, "
                f"here {', '.join(str(list(shape)) for shape in shapes)}: inputs come first in a "
                "batch, and inputs=2 says that there are two."
            ) from error

    def _batch(self, tensors: list[Tensor], epoch: int) -> Batch | None:
        """Kept where it may have to be spread again."""
        if self.links.recovery is None:
            return None
        batch = self._live[self.position] = Batch(self, self.position, epoch)
        batch.tensors = tensors
        return batch

    def _part(
        self, batch: Batch | None, place: int, tensor: Tensor, boxes: tuple[Box, ...]
    ) -> Part:
        links = self.links
        whole = tensor if links.device == self.place else None
        piece = scatter(links, whole, boxes, reader=self.place, dtype=tensor.dtype)
        origin = None if batch is None else Slice(batch, place, tensor)
        return Part(piece, boxes[links.device], tuple(tensor.shape), origin=origin)

    # ---- those who missed the end ----------------------------------------------------------

    def _give(self, fed: Fed) -> Give:
        letter = [fed.header, self._chance]
        return lambda source: give_tensors(self.links, fed.wholes, source, letter)

    def _take(self, source: int) -> Fed:
        """Targets come from who has them; the input comes when net is called."""
        wholes, (header, self._chance) = take_tensors(self.links, source)
        if "end" in header:
            return Fed(header, [], None)
        mine = (
            self._read
            if self._read is not None and self.links.members[self.links.device] == self.reader
            else None
        )
        tensors = outlines(header)[: self.inputs] if mine is None else mine[1][: self.inputs]
        batch = self._batch([] if mine is None else tensors, -1)
        assert batch is not None
        parts: list[Any] = []
        for place, tensor in enumerate(tensors):
            nothing = Box(tuple((0, 0) for _ in tensor.shape))
            empty = torch.empty(nothing.shape, dtype=tensor.dtype)
            origin = Slice(batch, place, tensor)
            parts.append(Part(empty, nothing, tuple(tensor.shape), origin=origin))
        return Fed(header, wholes, rebuild(header, [*parts, *wholes], None))
