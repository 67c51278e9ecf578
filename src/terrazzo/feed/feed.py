"""One device reads, or many; each gets its box of the input, and all get the targets.

Tensors keep their dtype on the wire: uint8 pictures travel as uint8. Where the loss of a device is
survived, the device that reads keeps a batch until it is used up; when it is lost itself, another
that has the loader reads on from the same place. Who reads where data lies on several devices is
told in ``spread``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from terrazzo.errors import ModelError, PeerLost, RunError, UsageError
from terrazzo.feed.batch import Batch, Fed, Host, Slice, outlines, rebuild, scatter
from terrazzo.feed.chance import draw_as
from terrazzo.feed.choice import AHEAD, EACH, READER, Choice
from terrazzo.feed.lift import lift_of
from terrazzo.feed.many import Many
from terrazzo.feed.posted import Posted
from terrazzo.feed.reading import Reading
from terrazzo.feed.rehearsal import counted
from terrazzo.feed.repeats import Read
from terrazzo.feed.sharing import Offer, count_feed
from terrazzo.feed.source import Source
from terrazzo.feed.sources import Plain, all_of, offer_of, source_of
from terrazzo.feed.spread import SPREAD, Spread
from terrazzo.feed.stages import Clock, Took
from terrazzo.geometry import Box
from terrazzo.members.control import Interrupted
from terrazzo.records.stage import DELIVER
from terrazzo.runtime.agreement import FEED, NOTHING, Note, compare
from terrazzo.runtime.net import Net
from terrazzo.runtime.part import Part
from terrazzo.runtime.recovery import Give, give_tensors, perform, take_tensors

LETTER, FOLLOWS = 2.0, 1.0
"""What the reader says with a batch: read a letter first; the next one comes while you compute."""


def feed(
    loader: Any,
    net: Net,
    *,
    inputs: int = 1,
    reader: int | None = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Iterates over a loader on device ``reader`` and hands every batch to all devices.

    Left open, the one that ``tz.init`` named reads, which is device 0 by default.

    The first ``inputs`` tensors of a batch go into net and arrive as the part a device needs; all
    others arrive whole. Other devices may pass None for the loader; one that has it too can take
    over when the reader is lost.

    With a ``device`` ("cuda") batches arrive there, in the way that is measured faster.

    ``loader`` is a DataLoader, whose batches stay the same to the bit, any other iterable, or a
    data set; ``options`` are those of ``feed.sources.source_of`` (docs/feed.md).
    """
    reads = net.links.reader if reader is None else reader
    batches: Iterable[Any]
    if net.links.devices == 1 and net.links.recovery is None:
        if loader is None:
            raise UsageError("tz.feed got no loader, and there is no other device to read")
        reads, batches = 0, all_of(source_of(loader, net, **options))
    else:
        source = None if loader is None else source_of(loader, net, **options)
        way = batches = Feed(source, net, inputs=inputs, reader=reads)
        way.offers(options.get("cache"))
    if device is not None:
        batches = lift_of(net, device).batches(batches)
    yield from counted(net.links, batches, reader=reads)


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
        tells = self.links.recovery is not None or host is not None
        self.reading = Reading(source, self.links, inputs=inputs, tells=tells)
        self.spread = Spread(source, net, inputs)
        self.many = Many(self)
        self.choice = source.choice if isinstance(source, Source) else Choice()
        self._posted: Posted | None = None
        self._offer: Offer | None = None
        self._cache: str | int | None = None
        if self.links.members[self.links.device] == reader and source is None:
            raise UsageError(f"device {reader} reads the data, but its loader is None")

    def offers(self, cache: str | int | None) -> None:
        """This device holds samples for the reader, if it is another; who that is may be open."""
        self._cache = None if self.spread.has_part else cache
        count_feed(self.net)
        if self.reader in self.links.members:
            self._offer_memory()

    def _offer_memory(self) -> None:
        if self.links.devices > 1 and self.links.members[self.links.device] != self.reader:
            self._offer = offer_of(self.net, self._cache)
            self._offer.serve(self.reader)

    @property
    def draws(self) -> set[str]:
        """Generators that all share and that reading draws from; the loop draws from the rest."""
        return self.reading.draws

    def __iter__(self) -> Iterator[Any]:
        self.choice.begin()
        try:
            while True:
                if self._offer is not None:
                    self._offer.mind_memory()
                fed: Fed = perform(self.links, self._next, take=self._take, give=self._give)
                self.reading.read = None
                if "end" in fed.header:
                    self._end_as_reader(fed.header)
                    return
                self.position += 1
                yield fed.batch
        finally:
            for posted in (self._posted, self.many.posted):
                # The loop was left: what is under way must arrive, if all are still there.
                if posted is not None and posted.epoch == self.links.epoch:
                    with suppress(RunError):
                        posted.land()

    def _end_as_reader(self, header: Mapping[str, Any]) -> None:
        """Whoever reads the next time goes on with the random numbers of the one who read now."""
        if self.spread.rota is not None:
            self.spread.end()
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
        return {"position": self.position, "reader": self.reader, "chance": self.reading.chance}

    def go_on_from(self, where: Mapping[str, Any]) -> None:
        self.position, self.reader = where["position"], where["reader"]
        self.reading.chance = where["chance"]
        many = self.spread.has_part or SPREAD in (where["chance"] or {})
        if self.links.members[self.links.device] == self.reader and not many:
            self.reading.catch_up(self.position)

    def go_back_to(self, position: int) -> None:
        """Batches from there on come again."""
        self.position = position
        self.many.restart()
        self.reading.go_back_to(position)

    def keep_from_here(self) -> None:
        """Nobody will go back to before the next batch."""
        reading = self.reading
        is_read = reading.read is not None or reading.later is not None
        reading.repeats.forget(self.position, is_read=is_read)

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
        many = self.spread.rota is not None or self.spread.has_part
        if self.links.device != places[0]:
            self._offer_memory()
        elif not many:
            if self._offer is not None:  # whom it was for is gone
                self._offer.close()
                self._offer = None
            self.reading.catch_up(self.position)

    # ---- handing out ---------------------------------------------------------------------

    def _next(self) -> Fed:
        if self.host is not None:
            self.host.before_batch(self)
        self.find_reader()
        links = self.links
        self.many.arrange()
        if self.spread.rota is not None:
            return self.many.next()
        if links.device != self.place:
            return self._receive()
        try:
            header, tensors, batch = self.reading.fetch(self.position)
        except Exception as error:
            self.meet()
            text = f"{type(error).__name__}: {error}"
            links.broadcast_bytes(json.dumps({"error": text}).encode(), self.place)
            raise
        guests, follows = self.guests(), self._follows(header)
        self.meet(LETTER if guests else FOLLOWS if follows else 0.0)
        if guests:
            links.broadcast_bytes(json.dumps({"join": guests}).encode(), self.place)
            self.regroup(guests)
        posted = self._taken()
        if posted is None:
            letter = dict(header)
            if self.position == 0 and self.reading.chance is not None:
                letter["chance"] = self.reading.chance
            links.broadcast_bytes(json.dumps(letter).encode(), self.place)
        fed = self.fed(header, tensors, batch, posted)
        if follows is not None:
            self._post(header, follows[1])
        return fed

    def _receive(self) -> Fed:
        said = self.meet()[self.place]
        posted = self._taken()
        if posted is not None and said != LETTER:
            header = posted.header
        else:
            header = json.loads(self.links.broadcast_bytes(None, self.place))
        if "join" in header:
            self.regroup(header["join"])
        self.reading.chance = header.pop("chance", self.reading.chance)
        if "error" in header:
            raise RunError(f"device {self.reader}, which reads the data, failed: {header['error']}")
        tensors = [] if "end" in header else outlines(header)
        fed = self.fed(header, tensors, None, posted)
        if said == FOLLOWS:
            self._post(header, tensors)
        return fed

    def _follows(self, header: Mapping[str, Any]) -> Read | None:
        """The next batch, where it is to be sent while this one is computed with."""
        if self.links.devices == 1 or not self.reading.may_look or not self.choice.is_ahead:
            return None
        found = None if "end" in header else self.reading.look()
        return found if found is not None and found[0] == header else None

    def _post(self, header: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Sends a batch on its way; it is waited for when it is asked for."""
        boxes = self.boxes([tuple(tensor.shape) for tensor in tensors[: self.inputs]])
        self._posted = Posted(
            self.links, tensors, boxes, header=header, reader=self.place, number=self.position + 1
        )

    def _taken(self) -> Posted | None:
        """What is under way of this batch, if all devices still have their connections."""
        posted, self._posted = self._posted, None
        is_this = posted is not None and posted.number == self.position
        return posted if is_this and posted and posted.epoch == self.links.epoch else None

    def guests(self) -> list[int]:
        """Who is to be let in now: one at a time, because the next must have a line to it."""
        control = self.links.control
        if self.host is None or control is None or not self.host.admits:
            return []
        return sorted(control.guests)[:1]

    def regroup(self, guests: list[int]) -> NoReturn:
        """Somebody wants to join: before this batch is as good a place as any."""
        assert self.links.control is not None
        assert self.host is not None
        self.host.before_joining(self)
        self.links.control.admit(guests)
        raise Interrupted("a device joins")

    def meet(self, flag: float = 0.0) -> list[float]:
        links = self.links
        links.where = "waiting for the next batch"
        note = Note(FEED, self.position, f"{self.reader:012x}", NOTHING, flag)
        return compare(links, note, explain=f"waiting for a batch from device {self.reader}")

    def fed(
        self,
        header: dict[str, Any],
        tensors: list[Tensor],
        batch: Any,
        posted: Posted | None = None,
    ) -> Fed:
        """Sends every device its part; ``tensors`` are real on the reader only."""
        if "end" in header:
            if self.host is not None:
                self.host.after_last(self)
            return Fed(header, [], None)
        begin = time.perf_counter()
        given = tensors[: self.inputs]
        boxes = self.boxes([tuple(tensor.shape) for tensor in given])
        whole = self.kept(given if self.links.device == self.place else [], self.links.epoch)
        here = [] if posted is None else posted.land()
        if posted is not None and posted.boxes != boxes:
            here = []  # the plan has changed since
        parts: list[Any] = []
        for place, (tensor, where) in enumerate(zip(given, boxes, strict=True)):
            piece = here[place] if here else self._scattered(tensor, where)
            origin = None if whole is None else Slice(whole, place, tensor)
            shape = tuple(tensor.shape)
            parts.append(Part(piece, where[self.links.device], shape, origin=origin))
        wholes = here[self.inputs :] or [self._whole(one) for one in tensors[self.inputs :]]
        self.delivered(begin, sum(tensor.nbytes for tensor in tensors), is_ahead=bool(here))
        return Fed(header, wholes, rebuild(header, [*parts, *wholes], batch))

    def _whole(self, tensor: Tensor) -> Tensor:
        full = tensor.contiguous()
        if full.is_meta:
            full = torch.empty(tensor.shape, dtype=tensor.dtype)
        return self.links.broadcast(full, self.place)

    def _scattered(self, tensor: Tensor, boxes: tuple[Box, ...]) -> Tensor:
        whole = tensor if self.links.device == self.place else None
        return scatter(self.links, whole, boxes, reader=self.place, dtype=tensor.dtype)

    def delivered(self, begin: float, size_bytes: int, *, is_ahead: bool = False) -> None:
        end, epoch = time.perf_counter(), (self.reading.chance or {}).get("epoch", 0)
        self.choice.way = way = READER if self.spread.rota is None else EACH
        if not is_ahead:
            self.choice.sent(way, end - begin)
        self.choice.step(way + AHEAD if is_ahead else way)
        took = Took(DELIVER, begin, end, end - begin, size_bytes)
        Clock(self.links.recorder).note(took, epoch=epoch, batch=self.position, beside=False)

    def boxes(self, shapes: list[tuple[int, ...]]) -> list[tuple[Box, ...]]:
        try:
            return self.net.boxes(shapes)
        except ModelError as error:
            raise ModelError(
                f"{error} tz.feed took the first of the tensors in a batch for the input of net, "
                f"here {', '.join(str(list(shape)) for shape in shapes)}: inputs come first in a "
                "batch, and inputs=2 says that there are two."
            ) from error

    def kept(self, tensors: list[Tensor], epoch: int) -> Batch | None:
        """Kept where it may have to be spread again."""
        if self.links.recovery is None:
            return None
        batch = self.reading.live[self.position] = Batch(self, self.position, epoch)
        batch.tensors = tensors
        return batch

    # ---- those who missed the end ----------------------------------------------------------

    def _give(self, fed: Fed) -> Give:
        letter = [fed.header, self.reading.chance]
        return lambda source: give_tensors(self.links, fed.wholes, source, letter)

    def _take(self, source: int) -> Fed:
        """Targets come from who has them; the input comes when net is called."""
        wholes, (header, self.reading.chance) = take_tensors(self.links, source)
        if "end" in header:
            return Fed(header, [], None)
        mine = self.reading.read
        if self.links.members[self.links.device] != self.reader:
            mine = None
        tensors = outlines(header)[: self.inputs] if mine is None else mine[1][: self.inputs]
        batch = self.kept([] if mine is None else tensors, -1)
        assert batch is not None
        parts: list[Any] = []
        for place, tensor in enumerate(tensors):
            nothing = Box(tuple((0, 0) for _ in tensor.shape))
            empty = torch.empty(nothing.shape, dtype=tensor.dtype)
            origin = Slice(batch, place, tensor)
            parts.append(Part(empty, nothing, tuple(tensor.shape), origin=origin))
        return Fed(header, wholes, rebuild(header, [*parts, *wholes], None))
