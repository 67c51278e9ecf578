"""Source: the batches of a loader, the same ones in the same order, made ahead where that pays.

It begins as the loader would, in the training process, and watches how long steps wait. Where that
is too long, workers make batches ahead, the beginning of the next epoch among them, and a part of
the samples stays in memory. Whatever could change a number is not done: a data set that draws
random numbers in the training process goes on there, and one with workers keeps their draws.
"""

from __future__ import annotations

import secrets
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from terrazzo.feed.arbiter import Memory, room_bytes
from terrazzo.feed.arena import Arena
from terrazzo.feed.chains import Chains, Item
from terrazzo.feed.chance import draw_as, drawn_from
from terrazzo.feed.choice import MEASURED, Choice
from terrazzo.feed.held import Held
from terrazzo.feed.likeness import likeness
from terrazzo.feed.maker import Maker, Recipe, Task
from terrazzo.feed.order import foresee, sight
from terrazzo.feed.passage import Passage
from terrazzo.feed.pool import Arrival, Pool
from terrazzo.feed.seeded import SeededSampler
from terrazzo.feed.sharing import Offers
from terrazzo.feed.stages import Clock, Took
from terrazzo.feed.stays import goes_its_own_way, stays_reason
from terrazzo.feed.tally import Tally
from terrazzo.feed.tuner import Change, Limits, Settings, Tuner
from terrazzo.records.stage import HELD, WAIT
from terrazzo.runtime.recorder import Recorder

MOST_WORKERS = 8
MEMORY_EVERY_S = 0.5
MARGIN_BYTES = 8 << 20
"""So much more than is missing is given back: what grows will grow on."""
ANY_BYTES = 1 << 62
BATCHES_SHARE = 0.25
"""Of the memory that is free, batches ahead may take so much."""


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
    ) -> None:
        """``offers``: what memory other devices have for samples."""
        self.loader, self.options = loader, options
        self.recorder, self.trains, self.offers = recorder, trains, offers
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
            key=secrets.token_bytes(32),
        )
        self.reason = stays_reason(loader)
        """Why batches stay where the loader makes them; empty: they need not."""
        self.inline = Maker(self.recipe)
        self.pool: Pool | None = None
        self.held: Held | None = None
        self.tuner = self._tuner()
        self.tally = Tally()
        self.batch_bytes = 0
        self._like = likeness(loader.dataset)
        self._items: dict[int, Item] = {}
        self._tickets = 0
        self._foreseen: deque[Item] = deque()
        self._foreseen_base = self._foreseen_epoch = 0
        self._foresaw = -1
        self._checked = 0.0
        self._is_short = False

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
            return islice(self._natively(), position, None)
        if self.recipe.seed is None:
            return islice(Passage(self).run(), position, None)
        return Passage(self, skip=position).run()

    def _natively(self) -> Iterator[Any]:
        """As the loader does it, with its own workers; only the waiting is told."""
        clock = Clock(self.recorder())
        self.epoch += 1
        begin = time.perf_counter()
        for number, batch in enumerate(self.loader):
            end = time.perf_counter()
            clock.note(
                Took(WAIT, begin, end, end - begin),
                epoch=self.epoch - 1, batch=number, beside=False,
            )  # fmt: skip
            yield batch
            begin = time.perf_counter()

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
        arena = None
        asked = self.options.cache_bytes
        by_sample = self.recipe.by_sample
        if asked != 0 and by_sample and hasattr(self.loader.dataset, "__len__"):
            memory = Memory.here()
            room = room_bytes(memory, held_bytes=0, asked_bytes=asked)
            if room > 0:
                arena = Arena(memory.ceiling_bytes if asked is None else asked)
                arena.give_back(room)
                self.held = Held(
                    arena,
                    seed=self.options.seed or 0,
                    samples=len(self.loader.dataset),
                    device=0 if self.offers is None else self.offers.device,
                )
                if self.offers is not None:
                    self.offers.wait()
                self.share()
                weakref.finalize(self, arena.close)
        self._like = likeness(self.loader.dataset)
        self.pool = Pool(self.recipe, arena)
        weakref.finalize(self, self.pool.close)

    def share(self) -> None:
        """Looks who holds samples for this device; some may be gone, or have come."""
        if self.held is not None and self.offers is not None:
            self.held.share(self.offers())

    def give(self, item: Item, chains: Chains, epoch: int) -> None:
        """To a worker, if there are any."""
        pool = self.staff()
        if pool is None:
            return
        self._tickets += 1
        item.ticket, item.made, item.is_sure = self._tickets, None, False
        chains.begin(item)
        self._items[item.ticket] = item
        pool.give(item.ticket, self.task(item, chains, epoch))

    def task(self, item: Item, chains: Chains, epoch: int) -> Task:
        states = chains.states(item)
        task = Task(item.indices, stream=chains.stream(item), states=states, epoch=epoch)
        if self.held is None:
            return task
        places = self.held.places
        return replace(
            task,
            held={index: places[index] for index in item.indices if index in places},
            keep=self.held.wanted(item.indices),
            away=self.held.away(item.indices),
            give=self.held.to_give(item.indices),
        )

    def receive(self, timeout_s: float | None) -> None:
        """Takes over what workers have made, and waits for something if there is nothing."""
        if self.pool is None:
            return
        for arrival in self.pool.take(timeout_s):
            self._route(arrival)

    def _route(self, arrival: Arrival) -> None:
        item = self._items.pop(arrival.ticket, None)
        if self.held is not None:
            self.held.note(arrival.made)
        if item is not None and item.ticket == arrival.ticket:
            item.made, item.worker = arrival.made, arrival.worker
            item.copied_s = arrival.copied_s

    def drop(self, items: deque[Item]) -> None:
        """Nobody wants them any more."""
        for item in items:
            if item.ticket is not None:
                self._items.pop(item.ticket, None)
                item.ticket, item.made = None, None

    def retire(self, reason: str) -> None:
        """From now on batches are made in the training process."""
        self.reason = reason
        self.tuner = self._tuner()
        if self.pool is not None:
            self.pool.resize(0)
            self.pool.clear()
        if self.held is not None:
            self.held.arena.give_back(0)
            self.held = None
        self._items.clear()
        self._foreseen.clear()
        self.say(f"batches are made in the training process: {reason}")

    def renew(self) -> None:
        """The data set has changed: nothing that was made or is held of it counts."""
        self._items.clear()
        self._foreseen.clear()
        if self.held is not None:
            self.held.forget()
        if self.pool is not None:
            self.pool.clear()

    def has_changed(self) -> bool:
        if self.pool is None:
            return False
        now = likeness(self.loader.dataset)
        before, self._like = self._like, now
        return now != before

    # ---- the next epoch ------------------------------------------------------------------

    def prefetch_next(self, room: int) -> None:
        """Makes the first batches of the next epoch, if it will draw what it would draw now."""
        if not self.trains():
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
            return first
        self.drop(deque([first]))
        self.drop(self._foreseen)
        self._foreseen.clear()
        return None

    # ---- memory, and what was done ---------------------------------------------------------

    def mind_memory(self) -> None:
        """Gives memory back before the next step needs it."""
        now = time.monotonic()
        if self.held is None or now - self._checked < MEMORY_EVERY_S:
            return
        self._checked = now
        self.share()
        held = self.held
        room = room_bytes(
            Memory.here(), held_bytes=held.held_bytes, asked_bytes=self.options.cache_bytes
        )
        if room < held.held_bytes:
            held.give_back(max(room - MARGIN_BYTES, 0))
            recorder = self.recorder()
            if recorder is not None:
                recorder.note(HELD, held_bytes=float(held.held_bytes))
            if not self._is_short:
                self.say("memory is short: held samples are given back as the model needs it")
            self._is_short = True
        elif room > held.arena.limit_bytes:
            held.arena.allow(room)

    def bound(self) -> None:
        """Lets the tuner try only what memory is there for."""
        if self.pool is None or self.options.workers is not None:
            return
        held = 0 if self.held is None else self.held.held_bytes
        free = room_bytes(Memory.here(), held_bytes=held, asked_bytes=ANY_BYTES)
        now, each = self.tuner.settings, self.pool.worker_bytes + 2 * self.batch_bytes
        most = min(self.tuner.limits.workers, self.pool.workers + free // max(each, 1))
        farther = int(BATCHES_SHARE * free) // max(self.batch_bytes, 1)
        self.tuner.bound(Limits(most, min(self.tuner.limits.ahead, now.ahead + farther)))

    def tell(self, change: Change | None) -> None:
        recorder = self.recorder()
        if change is None:
            return
        self.bound()
        self.staff()
        if recorder is not None:
            self.tally.record(recorder, change, self.held)
        if not self.tuner.is_trying:
            self.say(self.tally.sentence(self.tuner, self.held, change))

    def say(self, text: str) -> None:
        print(f"terrazzo: feed: {text}", file=sys.stderr, flush=True)
