"""Spread: a way through data that several devices read, each the samples that are its own.

Data may lie in parts, each on a device of its own, or all of it on every device. Who reads a sample
is worked out by all (``rota``); a device makes a small batch of what it reads, with the seeds that
samples have wherever they are made, and rows go to the devices that need boxes of them (``rows``).
Nothing of a batch is kept for those who lose it: after the loss of a device it is read again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terrazzo.errors import DataError, RunError, UsageError
from terrazzo.feed import draws
from terrazzo.feed.batch import describe
from terrazzo.feed.choice import EACH, READER, Choice, chosen, is_worth_trying, slowest_s
from terrazzo.feed.parts import heard, is_by_row, told
from terrazzo.feed.rota import Order, Rota, Rows
from terrazzo.feed.rows import Form, Gathering, Piece, taken_apart
from terrazzo.feed.seeded import SeededSampler, order_of
from terrazzo.feed.source import Source
from terrazzo.feed.sources import Plain
from terrazzo.feed.tally import say
from terrazzo.feed.task import Task
from terrazzo.geometry import Box
from terrazzo.records.units import seconds_text
from terrazzo.runtime.net import Net

NOTHING, COULD, PART, GOES_ON, STAYS = range(5)
"""What a device says before the first batch: that it does as the others do, that it has all of the
data, a part of it, that it is in the middle of reading by many, or by one."""
SPREAD = "spread"
"""In the place of a run: that many devices read."""
UNKNOWN, FAILED = -1.0, -2.0
"""In place of the form of a batch: nothing is known of it, or something is to be told."""


class Read(NamedTuple):
    """What this device has read of a batch."""

    form: Form | None
    tensors: list[Tensor]
    texts: list[list[str]]

    @property
    def mark(self) -> float:
        """A number for the form, the same on all devices that have read the same kind of rows."""
        if self.form is None or self.form.has_texts:
            return UNKNOWN
        return float(int(hashlib.sha256(self.form.to_json().encode()).hexdigest()[:12], 16))


class Put(NamedTuple):
    """A batch put together: boxes of the inputs, and the rest of it."""

    form: Form
    rows: Rows
    size: int
    texts: list[list[str]]
    guests: Sequence[int] = ()
    """Who is to be let in before it is handed out."""


class Spread:
    """On one device, for one way through the data; without a rota, one device reads for all."""

    def __init__(self, source: Source | Plain | None, net: Net, inputs: int) -> None:
        fits = isinstance(source, Source) and is_by_row(source) and net.links.rehearsal is None
        self.source = source if fits and isinstance(source, Source) else None
        self.net, self.links, self.inputs = net, net.links, inputs
        self.rota: Rota | None = None
        self.epoch = 0
        self.arranged_in: int | None = None
        """The view of members that this was last worked out for."""
        self.form: Form | None = None
        self._batches: Iterator[Any] | None = None
        self._at = 0

    @property
    def choice(self) -> Choice | None:
        return None if self.source is None else self.source.choice

    @property
    def has_part(self) -> bool:
        return self.source is not None and self.source.mine is not None

    # ---- who reads -------------------------------------------------------------------------

    def stand(self) -> int:
        """What this device says before it is worked out who reads."""
        if self.arranged_in is not None:
            return STAYS if self.rota is None else PART if self.has_part else GOES_ON
        if self.has_part:
            return PART
        could = self.source is not None and self.source.larder.offers is None
        return COULD if could and self.source and self.source.reading != READER else NOTHING

    def arrange(self, stands: Sequence[float], epoch: int | None, reader: int) -> None:
        """All devices at once; ``epoch`` is that of the way, where it has begun before."""
        is_new = self.arranged_in is None
        self.arranged_in, self._batches = self.links.epoch, None
        goes_on, parts = GOES_ON in stands, PART in stands
        all_could = all(stand == COULD for stand in stands)
        if STAYS in stands or not (goes_on or parts or all_could):
            self._follow(None)
            return
        letters = [json.loads(text) for text in self.links.gather_text(self._letter(epoch))]
        rota = self._rota(letters, each=not parts)
        begun = [one["epoch"] for one in letters if one["begun"]]
        self.epoch = begun[0] if begun else max(one["epoch"] or 0 for one in letters)
        way = EACH
        if is_new and not (goes_on or parts):
            way = self._chosen(letters, rota, reader)
        if self.source is not None:
            self.source.draw_as({"epoch": self.epoch})
        self._follow(rota if way == EACH else None)

    def _letter(self, epoch: int | None) -> str:
        source = self.source
        if self.choice is not None:
            self._look()
        order = None if source is None else order_of(source.loader)
        return json.dumps(
            {
                "order": None if order is None else astuple(order),
                "mine": "" if source is None else told(source.mine),
                "epoch": epoch if source is None or epoch is not None else source.number,
                "begun": epoch is not None,
                "form": None if self.form is None else self.form.to_json(),
                "asks": None if source is None else source.reading,
                "choice": None if self.choice is None else self.choice.told(),
            }
        )

    def _look(self) -> None:
        """Finds out what samples look like, once; if that fails, the first batch tells why."""
        assert self.source is not None
        assert self.choice is not None
        mine, order = self.source.mine, order_of(self.source.loader)
        first = 0 if mine is None else int(mine.int().argmax()) if mine.any() else None
        if self.choice.form is None and first is not None and order is not None and order.samples:
            with suppress(Exception):
                self.choice.form = taken_apart(self._make([first]), 1)[0]
        self.form = self.form or self.choice.form

    def _rota(self, letters: Sequence[Mapping[str, Any]], *, each: bool) -> Rota:
        orders = {d: Order(*one["order"]) for d, one in enumerate(letters) if one["order"]}
        first, order = next(iter(orders.items()))
        for device, other in orders.items():
            if other != order:
                raise UsageError(
                    f"devices {first} and {device} feed different data: {order}; {other}. Give "
                    "all the same data set, of the full length, with the same options; mine= says "
                    "which samples a device has"
                )
        has = torch.stack([heard(one["mine"], order.samples) for one in letters])
        forms = [Form.from_json(one["form"]) for one in letters if one["form"]]
        self.form = forms[0] if forms else None
        rota = Rota(order, has, self._needs(order), each=each)
        if missing := rota.missing():
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise DataError(
                f"no device has {len(missing)} of {order.samples} samples ({shown}): mine= of "
                f"{self.links.devices} devices together must name them all"
            )
        return rota

    def _needs(self, order: Order) -> tuple[tuple[int, int], ...]:
        """The rows of a full batch that each device computes with, if rows are known by now."""
        if self.form is None or order.batch > order.samples:
            return ()
        columns = self.form.columns[: self.inputs]
        boxes = self.net.boxes([(order.batch, *column.shape) for column in columns])
        found = []
        for device in range(self.links.devices):
            spans = [of[device].spans[0] for of in boxes if not of[device].is_empty]
            found.append(
                (min((s[0] for s in spans), default=0), max((s[1] for s in spans), default=0))
            )
        return tuple(found)

    def _chosen(self, letters: Sequence[Mapping[str, Any]], rota: Rota, reader: int) -> str:
        """One device reads for all, or each for itself; all come to the same answer."""
        assert self.source is not None
        assert self.choice is not None
        if all(one["asks"] == EACH for one in letters):
            return EACH
        tolds = [one["choice"] for one in letters]
        found = chosen(tolds)
        if found is not None:
            if found == EACH and self.links.device == 0:
                each, one = (seconds_text(slowest_s(tolds, way)) for way in (EACH, READER))
                say(
                    f"each device reads what it needs itself: steps of {each}, where one reads for "
                    f"all {one}"
                )
            return found
        probe = self._probe(rota, reads=self.links.device == reader)
        probes = [json.loads(text) for text in self.links.gather_text(json.dumps(probe))]
        if is_worth_trying(probes):
            return EACH
        self.choice.refused = True
        return READER

    def _probe(self, rota: Rota, *, reads: bool) -> dict[str, float]:
        """Seconds of making a batch here: this device's part, and all of it where it reads."""
        assert self.choice is not None
        last = max(rota.order.batches - 1, 0)
        indices = rota.order.indices(self.epoch, 0)
        mine = rota.rows(indices)[self.links.device]
        own_s = self._timed([indices[row] for row in mine])
        whole_s = self._timed(rota.order.indices(self.epoch, min(1, last))) if reads else 0.0
        sent_s = self.choice.sent_s(READER) if reads else 0.0
        return {"own_s": own_s, "whole_s": whole_s, "sent_s": sent_s}

    def _timed(self, indices: list[int]) -> float:
        begin = time.perf_counter()
        try:
            if indices:
                self._make(indices)
        except Exception:  # a batch that comes tells why
            return inf
        return time.perf_counter() - begin

    def _follow(self, rota: Rota | None) -> None:
        """From now on this device reads what the rota says, or all that it is asked for."""
        self.rota, device = rota, self.links.device
        if self.source is not None:
            sampler = self.source.loader.sampler
            assert isinstance(sampler, SeededSampler)
            sampler.share = None if rota is None else lambda indices: rota.rows(indices)[device]

    # ---- reading ---------------------------------------------------------------------------

    @property
    def batches(self) -> int:
        """Of the whole way."""
        assert self.rota is not None
        return self.rota.order.batches

    def restart(self) -> None:
        """What was read ahead is not wanted any more."""
        self._batches = None

    def end(self) -> None:
        """The way is over: the next one is another epoch."""
        if self._batches is not None:
            next(self._batches, None)  # which ends it there, too
        if self.source is not None:
            self.source.draw_as({"epoch": self.epoch + 1})

    def _rows(self, position: int) -> tuple[list[int], Rows]:
        assert self.rota is not None
        indices = self.rota.order.indices(self.epoch, position)
        return indices, self.rota.rows(indices)

    def read(self, position: int) -> Read:
        """This device's rows of a batch."""
        rows = self._rows(position)[1][self.links.device]
        if not rows:
            self._at = position + 1
            return Read(None, [], [])
        assert self.source is not None
        if self._batches is None or self._at != position:
            before = [bool(self._rows(p)[1][self.links.device]) for p in range(position)]
            self.source.draw_as({"epoch": self.epoch})
            self._batches = self.source.begin(sum(before))
        batch = next(self._batches)
        self._at = position + 1
        return Read(*taken_apart(batch, len(rows)))

    def read_again(self, position: int) -> Read:
        """The same, of a batch that was handed out before, beside those that are read ahead."""
        indices, rows = self._rows(position)
        mine = [indices[row] for row in rows[self.links.device]]
        return Read(*taken_apart(self._make(mine), len(mine))) if mine else Read(None, [], [])

    def _make(self, indices: list[int]) -> Any:
        """In this process, and no generator of the script is drawn from."""
        assert self.source is not None
        kept = draws.states()
        try:
            with self.source.inline.watching():
                made = self.source.inline.make(Task(indices, epoch=self.epoch))
        finally:
            draws.restore(kept)
        if made.error is not None:
            raise made.error
        return made.batch

    # ---- putting together ------------------------------------------------------------------

    def mark(self, read: Read | Exception) -> float:
        """What this device says of its rows, before they are sent."""
        if isinstance(read, Exception):
            return FAILED
        if read.form is None and self.form is not None and not self.form.has_texts:
            return Read(self.form, [], []).mark
        return read.mark

    def agree(
        self,
        read: Read | Exception,
        position: int,
        marks: Sequence[float] = (UNKNOWN,),
        guests: Sequence[int] = (),
    ) -> Put:
        """What the batch looks like, after everybody's marks; what failed anywhere fails here."""
        if isinstance(read, Read) and marks[0] >= 0 and len(set(marks)) == 1:
            self.form = read.form or self.form
            return self.alike(position)
        indices, rows = self._rows(position)
        count = len(indices)
        letter: dict[str, Any] = {"join": list(guests)}
        if isinstance(read, Read):
            letter |= {"form": read.form and read.form.to_json(), "texts": read.texts}
        else:
            letter["error"] = f"{type(read).__name__}: {read}"
        letters = [json.loads(text) for text in self.links.gather_text(json.dumps(letter))]
        if isinstance(read, Exception):
            raise read
        for device, one in enumerate(letters):
            if "error" in one:
                member = self.links.members[device]
                raise RunError(f"device {member} could not read its samples: {one['error']}")
        self.form = _one_form(letters)
        texts = [
            _by_row([one["texts"][at] if one["texts"] else [] for one in letters], rows, count)
            for at in range(sum(kind is None for kind in self.form.kinds))
        ]
        joins = [guest for one in letters for guest in one["join"]]
        return Put(self.form, rows, count, texts, joins)

    def alike(self, position: int) -> Put:
        """A batch of the form that is known."""
        indices, rows = self._rows(position)
        assert self.form is not None
        return Put(self.form, rows, len(indices), [])

    def collect(
        self,
        read: Read,
        put: Put,
        boxes: Mapping[int, Sequence[Box]],
        *,
        only: int | None = None,
        ahead: bool = False,
    ) -> Gathering:
        """This device's boxes of some columns and all of the others; ``only``: of one alone."""
        pieces = []
        for at, column in enumerate(put.form.columns):
            if only not in (None, at):
                continue
            whole = (Box.whole((put.size, *column.shape)),) * self.links.devices
            own = read.tensors[at] if read.tensors else None
            pieces.append(Piece(column, own, boxes.get(at, whole)))
        return Gathering(self.links, pieces, put.rows, put.size, ahead=ahead)

    def header(self, put: Put) -> dict[str, Any]:
        """What those who missed the batch must know of it."""
        tensors = [
            torch.empty((put.size, *column.shape), dtype=column.dtype, device="meta")
            for column in put.form.columns
        ]
        return describe(put.form.build(tensors, put.texts))[0]


def _one_form(letters: Sequence[Mapping[str, Any]]) -> Form:
    found = {one["form"]: device for device, one in enumerate(letters) if one["form"]}
    if len(found) > 1:
        told = "; ".join(
            f"device {device}: {[list(c.shape) for c in Form.from_json(text).columns]}"
            for text, device in found.items()
        )
        raise DataError(
            f"samples of one batch have different shapes ({told}): let the data set bring them to "
            "one size"
        )
    return Form.from_json(next(iter(found)))


def _by_row(columns: Sequence[Sequence[str]], rows: Rows, count: int) -> list[str]:
    """The texts of all devices in the order of the batch."""
    found = [""] * count
    for texts, read in zip(columns, rows, strict=True):
        for row, text in zip(read, texts, strict=True):
            found[row] = text
    return found
