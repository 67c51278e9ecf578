"""Source: the batches of a loader, the same ones in the same order, made ahead where that pays.

It begins as the loader would, in the training process, and watches how long steps wait. Where that
is too long, workers make batches ahead, the beginning of the next epoch among them, and a part of
the samples stays in memory, whoever makes the batches. Whatever could change a number is not done:
a data set that draws random numbers in the training process goes on there, and one with workers
keeps their draws.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from terrazzo.errors import DataError
from terrazzo.feed.arbiter import Memory, room_bytes
from terrazzo.feed.chains import Chains, Item
from terrazzo.feed.chance import draw_as, drawn_from
from terrazzo.feed.choice import MEASURED, Choice
from terrazzo.feed.held import Held
from terrazzo.feed.larder import Larder
from terrazzo.feed.likeness import likeness
from terrazzo.feed.maker import Maker
from terrazzo.feed.native import native
from terrazzo.feed.order import foresee, sight
from terrazzo.feed.passage import Passage
from terrazzo.feed.pool import Arrival, Pool
from terrazzo.feed.seeded import SeededSampler
from terrazzo.feed.sharing import Offers
from terrazzo.feed.stages import Clock
from terrazzo.feed.stays import copies_reason, goes_its_own_way, stays_reason
from terrazzo.feed.stock import ANY_BYTES, Stock
from terrazzo.feed.stream import Stream
from terrazzo.feed.tally import Tally, say
from terrazzo.feed.task import Recipe, Task
from terrazzo.feed.tuner import MOST_WORKERS, Change, Limits, Settings, Tuner
from terrazzo.runtime.recorder import Recorder

BATCHES_SHARE = 0.25
"""Of the memory that is free, batches ahead may take so much."""
MOST_WRONG = 2
"""After so many epochs in a row that began otherwise than foreseen, nothing is foreseen."""


@dataclass(frozen=True)
class Options:
    """What a user may ask for; None: it is found out."""

    workers: int | None = None
    ahead: int | None = None
    cache_bytes: int | None = None
    skip: bool = False
    seed: int | None = None
    """Of samples that have seeds of their own; None: they draw as under a DataLoader."""


class Source:
    """One loader for all its epochs."""

    def __init__(
        self,
        loader: DataLoader[Any],
        options: Options,
        *,
        recorder: Callable[[], Recorder | None] = lambda: None,
        trains: Callable[[], bool] = lambda: True,
        offers: Offers | None = None,
        stock: Stock | None = None,
    ) -> None:
        """``offers``: what memory other devices have for samples; ``stock``: what a net holds."""
        self.loader, self.options = loader, options
        stock = Stock() if stock is None else stock
        self.recorder, self.trains = recorder, trains
        self.epoch = 0
        self.mine: Tensor | None = None
        """Which samples this device has; None: all."""
        self.reading = MEASURED
        """Which devices read, where all have the data."""
        self.choice = Choice()
        self.recipe = Recipe(
            loader.dataset,
            loader.collate_fn,
            collates=loader.batch_sampler is not None,
            skip=options.skip,
            seed=options.seed,
            stamps=stock.stamps_of(loader.dataset),
            is_copied=not loader.num_workers,
        )
        self.reason = stays_reason(loader)
        """Why batches stay where the loader makes them; empty: they need not."""
        if self.reason and options.workers and options.workers != loader.num_workers:
            say(f"workers={options.workers} cannot make batches of this loader: {self.reason}")
        self.inline = Maker(self.recipe)
        self.pool: Pool | None = None
        self.larder = Larder(
            self.recipe,
            asked_bytes=options.cache_bytes,
            offers=offers,
            stock=stock,
        )
        self.tuner = self._tuner()
        self.stream: Stream | None = None
        if self._is_stream:
            self.stream = Stream(loader, ahead=options.ahead, stamps=self.recipe.stamps)
        self.tally = Tally()
        self.batch_bytes = 0
        self._like = likeness(loader.dataset)
        self._items: dict[int, Item] = {}
        self._tickets = 0
        self._foreseen: deque[Item] = deque()
        self._foreseen_base = self._foreseen_epoch = 0
        self._foresaw = -1
        self._wrong = 0
        self.is_active = False
        """Whether an epoch of it is under way."""

    def _tuner(self) -> Tuner:
        asked, count = self.options.workers, self.loader.num_workers
        most = MOST_WORKERS if asked is None else asked
        least = 1 if count and self.options.seed is None else 0  # whose draws are a worker's
        most = max(most, least)
        first = least if asked is None else max(asked, least)
        ahead = self.options.ahead or 2 * first
        farthest = min(self.options.ahead or 4 * max(most, 1), sight(self.loader))
        if self.reason:
            first = most = 0
        settings = Settings(first, min(ahead, farthest))
        return Tuner(settings, Limits(most, farthest), fixed=asked is not None)

    @property
    def _is_stream(self) -> bool:
        """Whether it is iterable and came without a loader, and nobody said who is to read it."""
        is_own = self.options.seed is not None and self.options.workers is None
        return is_own and isinstance(self.loader.dataset, IterableDataset)

    @property
    def number(self) -> int:
        """Of the epoch that comes next."""
        sampler = self.loader.sampler
        return sampler.epoch if isinstance(sampler, SeededSampler) else self.epoch

    def chance(self) -> dict[str, Any]:
        """All that the next epoch depends on, for another device or a later day."""
        return {**drawn_from(self.loader), "epoch": self.number}

    def draw_as(self, told: dict[str, Any]) -> None:
        draw_as(told, self.loader)
        self.epoch = told.get("epoch", self.epoch)
        if isinstance(self.loader.sampler, SeededSampler):
            self.loader.sampler.epoch = self.epoch

    def __iter__(self) -> Iterator[Any]:
        return self.begin(0)

    def begin(self, position: int) -> Iterator[Any]:
        """An epoch from there on; what comes before is made, too, for what it may draw."""
        if goes_its_own_way(self.loader) or (self.reason and self.loader.num_workers):
            self.larder.tell_useless(self.reason or "its loader goes its own way")
            return islice(self._natively(), position, None)
        if self.recipe.seed is None:
            return islice(Passage(self).run(), position, None)
        return Passage(self, skip=position).run()

    def _natively(self) -> Iterator[Any]:
        """As the loader does it, with its own workers."""
        self.epoch += 1
        clock, stamps = Clock(self.recorder()), self.recipe.stamps
        number = self.epoch - 1

        def read(loader: Iterable[Any]) -> Iterator[Any]:
            return native(loader, clock, epoch=number, blame=self._blame, stamps=stamps)

        stream = self.stream
        found = read(self.loader) if stream is None else stream.epoch(read, self._write)
        return self.larder.watched(found)

    def _blame(self, number: int, file: str, error: Exception) -> DataError:
        """Of a batch that the loader makes itself; its workers tell a traceback, reason last."""
        if isinstance(error, DataError):  # it says itself which file, and what to do
            return DataError(f"batch {number} of {type(self.loader.dataset).__name__}: {error}")
        told = str(error).strip().splitlines()[-1:] or [""]
        kind = type(error).__name__
        what = told[0] if told[0].startswith(kind) else f"{kind}: {told[0]}"
        where = f" (file {file})" if file else ""
        no_skip = f'. bad="skip" is not possible here: {self.reason}' if self.options.skip else ""
        return DataError(
            f"batch {number} of {type(self.loader.dataset).__name__}{where} could not be read: "
            f"{what}{no_skip}"
        )

    # ---- workers -------------------------------------------------------------------------

    def staff(self) -> Pool | None:
        """As many workers as the tuner wants; None: none."""
        wanted = self.tuner.settings.workers
        there = 0 if self.pool is None else self.pool.workers
        if there < wanted and not self.loader.num_workers:  # what was opened meanwhile is copied
            reason = stays_reason(self.loader)
            if reason:
                self.retire(reason)
                return None
        if self.pool is None:
            if not wanted:
                return None
            self._open()
        assert self.pool is not None
        if self.pool.workers != wanted:
            self.pool.resize(wanted)
        return self.pool if wanted else None

    def _open(self) -> None:
        self.hold()
        self.larder.look()
        held = self.held
        self._like = likeness(self.loader.dataset)
        if held is None:
            self.pool = Pool(self.recipe, None)
        else:
            self.pool = Pool(self.recipe, held.arena, lambda task: held.shelved(task.indices))
        weakref.finalize(self, self.pool.close)

    def rest(self) -> None:
        """Another source of the same data has begun: workers of this one would only wait."""
        if self.pool is not None and not self.is_active:
            self.drop(self._foreseen)
            self._foreseen.clear()
            self.pool.resize(0)

    # ---- what is held ----------------------------------------------------------------------

    @property
    def held(self) -> Held | None:
        return self.larder.held

    def hold(self) -> None:
        """From now on samples are held, if they can be, in whichever process they are made."""
        if self.held is not None or not self.larder.can_be:
            return
        held, dataset = self.larder.open(), self.loader.dataset
        if self.reason and copies_reason((dataset, self.loader.collate_fn)):
            held.only_encoded()
        self.inline.hold(held.arena)
        self._like = likeness(dataset)

    # ---- tickets ---------------------------------------------------------------------------

    def give(self, item: Item, chains: Chains, epoch: int) -> None:
        """To a worker, if there are any."""
        pool = self.staff()
        if pool is None:
            return
        self.take_back(item)
        self._tickets += 1
        item.ticket, item.made, item.is_sure = self._tickets, None, False
        chains.begin(item)
        self._items[item.ticket] = item
        pool.give(item.ticket, self.task(item, chains, epoch))

    def task(self, item: Item, chains: Chains, epoch: int) -> Task:
        states = chains.states(item)
        return Task(item.indices, stream=chains.stream(item), states=states, epoch=epoch)

    def receive(self, timeout_s: float | None) -> None:
        """Takes over what workers have made, and waits for something if there is nothing."""
        if self.pool is None:
            return
        for arrival in self.pool.take(timeout_s):
            self._route(arrival)

    def _route(self, arrival: Arrival) -> None:
        item = self._items.pop(arrival.ticket, None)
        self.larder.note(arrival.made)
        if item is None or item.ticket != arrival.ticket:
            self.tally.waste(arrival.made)
            return
        item.made, item.worker = arrival.made, arrival.worker
        item.copied_s = arrival.copied_s

    def take_back(self, item: Item) -> None:
        """What a worker has made or will make of it is not wanted."""
        if item.ticket is not None:
            self._items.pop(item.ticket, None)
        if item.made is not None:
            self.tally.waste(item.made)
        item.ticket, item.made = None, None

    def drop(self, items: Iterable[Item]) -> None:
        """Nobody wants them any more."""
        for item in items:
            self.take_back(item)

    def retire(self, reason: str) -> None:
        """From now on batches are made in the training process; files may still be held there."""
        is_new = self.pool is not None or self.tuner.limits.workers > 0
        self.reason = reason
        self.tuner = self._tuner()
        if self.pool is not None:
            self.pool.resize(0)
            self.pool.clear()
        if self.held is not None:
            self.held.only_encoded()
        self._items.clear()
        self._foreseen.clear()
        if is_new:
            say(f"batches are made in the training process: {reason}")

    def renew(self) -> None:
        """The data set has changed: nothing that was made of it counts."""
        self._items.clear()
        self._foreseen.clear()
        workers = 0 if self.pool is None else self.pool.workers
        if self.pool is not None:
            self.pool.close()
        self.larder.renew()
        if self.pool is not None:
            self.pool.resize(workers)

    def has_changed(self) -> bool:
        if self.reason or (self.pool is None and self.held is None):
            return False
        now = likeness(self.loader.dataset)
        before, self._like = self._like, now
        return now != before

    # ---- the next epoch ------------------------------------------------------------------

    def prefetch_next(self, room: int) -> None:
        """Makes the first batches of the next epoch, if it will draw what it would draw now."""
        if not self.trains() or self._wrong >= MOST_WRONG:
            return
        if self._foresaw != self.epoch:
            self._foresaw = self.epoch
            found = foresee(self.loader, self.tuner.settings.ahead)
            self._foreseen_base = 0 if found is None else found.base
            self._foreseen_epoch = self.number
            batches = [] if found is None else found.batches
            self._foreseen = deque(Item(indices, at) for at, indices in enumerate(batches))
        streams = 0 if self.recipe.seed is not None else self.loader.num_workers
        chains = Chains(self._foreseen_base, streams)
        for item in islice(self._foreseen, max(room, 0)):
            if item.ticket is None and (not streams or item.position < streams):
                self.give(item, chains, self.number)

    def foreseen(self, indices: Any, *, base: int, epoch: int) -> Item | None:
        """What was made of these indices before the epoch began."""
        if not self._foreseen:
            return None
        streams = self.loader.num_workers and self.recipe.seed is None
        first = self._foreseen.popleft()
        is_right = base == self._foreseen_base if streams else epoch == self._foreseen_epoch
        if first.indices == indices and is_right:
            self._wrong = 0
            return first
        self._wrong += 1
        self.drop([first, *self._foreseen])
        self._foreseen.clear()
        return None

    # ---- memory, and what was done ---------------------------------------------------------

    def bound(self) -> None:
        """Lets the tuner try only what memory is there for."""
        if self.pool is None or self.options.workers is not None:
            return
        free = room_bytes(
            Memory.here(), held_bytes=self.larder.stock.held_bytes, asked_bytes=ANY_BYTES
        )
        now, each = self.tuner.settings, self.pool.worker_bytes + 2 * self.batch_bytes
        most = min(self.tuner.limits.workers, self.pool.workers + free // max(each, 1))
        farther = int(BATCHES_SHARE * free) // max(self.batch_bytes, 1)
        self.tuner.bound(Limits(most, min(self.tuner.limits.ahead, now.ahead + farther)))

    def tell(self, change: Change | None) -> None:
        if change is None:
            return
        self.bound()
        self.staff()
        self._write(change, self.tuner)

    def _write(self, change: Change, tuner: Tuner) -> None:
        recorder = self.recorder()
        if recorder is not None:
            self.tally.record(recorder, change, self.held)
        if not tuner.is_trying:
            say(self.tally.sentence(tuner, self.held, change))

    def tell_late(self, waited_s: float) -> None:
        """A worker may hang: in a lock that was copied with it, or on storage that is gone."""
        at = [] if self.pool is None else self.pool.at
        where = ", ".join(f"worker {worker} is at sample {sample}" for worker, sample in at)
        name = type(self.loader.dataset).__name__
        say(f"training has waited {waited_s:.0f} s for a batch of {name}: {where}")
