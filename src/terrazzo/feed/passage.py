"""Passage: one epoch of a source, batch after batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data._utils.pin_memory import pin_memory

from terrazzo.feed import draws
from terrazzo.feed.chains import Chains, Item
from terrazzo.feed.order import Epoch
from terrazzo.feed.stages import Clock, Took
from terrazzo.feed.task import Made, Task
from terrazzo.records.stage import COPY, INLINE, WAIT

if TYPE_CHECKING:
    from terrazzo.feed.source import Source


LOOK_EVERY = 16
"""So often the size of a batch is looked at."""
MOST_RENEWALS = 3
"""Of workers in one epoch, because the data set was changed."""
LONG_S, LONG = 20.0, 20
"""A batch is late if it takes longer than that, and so many times as long as the last ones."""
CHANGES = "the data set changes itself as it is read"
DRAWS = (
    "samples draw random numbers there, one after the other. Give tz.feed the data set instead of "
    "a loader, and each sample has a seed of its own"
)


class Passage:
    """One epoch."""

    def __init__(self, source: Source, *, skip: int = 0) -> None:
        """``skip``: the first batches are left out, and not made."""
        self.source, self.loader = source, source.loader
        self.number = source.number
        source.epoch += 1
        self.clock = Clock(source.recorder())
        source.inline.measures = self.clock.recorder is not None
        self.items: deque[Item] = deque()
        self.position = self.skip = skip
        self.renewals = 0
        self.usual_s = 0.0
        """What making a batch takes, about the longest of the last ones."""

    def run(self) -> Iterator[Any]:
        source = self.source
        if source.options.cache_bytes:
            source.hold()
        if source.has_changed():
            source.renew()
        elif not source.tuner.settings.workers:
            source.larder.look()
        self.epoch = Epoch(self.loader)
        for number in range(self.skip):
            self.epoch.next(number)
        streams = 0 if source.recipe.seed is not None else self.loader.num_workers
        self.chains = Chains(self.epoch.base, streams)
        left = time.perf_counter()
        source.is_active = True
        try:
            while True:
                begin = time.perf_counter()
                item = self._next()
                if item is None:
                    break
                batch = self._batch(item)
                end = time.perf_counter()
                made_s = self._account(item, (begin, end))
                self.usual_s = max(made_s, 0.9 * self.usual_s)
                yield batch
                del batch, item
                now = time.perf_counter()
                change = source.tuner.step(
                    wait_s=end - begin, train_s=(begin - left) + (now - end), make_s=made_s
                )
                left = now
                source.tell(change)
        finally:
            source.drop(self.items)
            source.is_active = False
            if not source.tuner.settings.workers:
                source.larder.look_back()
        self._finish()

    def _next(self) -> Item | None:
        source = self.source
        if not self.loader.num_workers and source.has_changed():
            self.renewals += 1
            if self.renewals < MOST_RENEWALS:
                source.renew()
            else:  # to start workers for each batch takes longer than to have none
                source.retire("the script changes the data set between steps")
            source.drop(self.items)
        source.larder.mind_memory(self.clock.recorder)
        self.epoch.serve(self.position - len(self.items))
        self._fill(1)
        if not self.items:
            if source.tuner.settings.workers:
                source.prefetch_next(source.tuner.settings.ahead)
            return None
        item = self.items[0]
        if source.tuner.settings.workers:
            self._fill(source.tuner.settings.ahead)
            self._await(item)
        elif source.pool is not None:
            source.receive(0.0)  # of workers that finish what they had been given
        self.items.popleft()
        return item

    def _fill(self, count: int) -> None:
        """Asks for so many batches, and gives those to workers that can be begun."""
        source, wanted = self.source, self.position - len(self.items)
        while len(self.items) < count:
            indices = self.epoch.next(wanted)
            if indices is None:
                break
            item = source.foreseen(indices, base=self.epoch.base, epoch=self.number)
            item = item or Item(indices, self.position)
            self.items.append(item)
            self.position += 1
        if not source.tuner.settings.workers:
            return
        for item in self.items:
            if item.ticket is None and self.chains.may_begin(item):
                source.give(item, self.chains, self.number)
        if self.epoch.is_used_up:
            source.prefetch_next(count - len(self.items))

    def _await(self, item: Item) -> None:
        """Until this batch is there as a DataLoader would have made it."""
        source, began = self.source, time.perf_counter()
        patience_s = max(LONG_S, LONG * self.usual_s)
        source.receive(0.0)
        while True:
            for other in self.chains.settle(list(self.items)):
                source.give(other, self.chains, self.number)
            if item.is_sure or not source.tuner.settings.workers:
                return
            if item.ticket is None:
                if not self.chains.may_begin(item):
                    raise AssertionError("a batch waits for one that nobody makes")
                source.give(item, self.chains, self.number)
            source.receive(patience_s)
            if (waited_s := time.perf_counter() - began) > patience_s:
                source.tell_late(waited_s)
                patience_s = 2 * waited_s
            self._fill(0)

    def _batch(self, item: Item) -> Any:
        source, made = self.source, item.made
        reason = "" if made is None else self._doubt(made)
        if made is not None and reason:
            source.drop([item, *self.items])
            source.retire(reason)
            made = None  # what fails here, too, is told
        if made is None:
            made = self._make(item)
            if made.changes and not source.reason:
                source.retire(CHANGES)
        item.made = made
        if made.error is not None and made.trace:
            raise made.error from FromWorker(made.trace)
        if made.error is not None:
            raise made.error
        source.tally.skip(made.bad)
        return pinned(made.batch) if self.loader.pin_memory else made.batch

    def _doubt(self, made: Made) -> str:
        """Why what a worker has made is not used, and it should make no more; empty: it is good."""
        if self.chains.count:
            return ""
        if made.states is not None:
            return DRAWS
        if made.changes:
            return CHANGES
        if made.error is not None and self._is_own_idea:
            return f"a worker could not make a batch: {made.error}"
        return ""

    @property
    def _is_own_idea(self) -> bool:
        """Whether nobody asked for workers, so that nothing may fail because of them."""
        return not self.chains.count and self.source.options.workers is None

    def _make(self, item: Item) -> Made:
        """In this process; samples with seeds of their own leave its generators alone."""
        source = self.source
        source.take_back(item)
        item.worker = INLINE
        task = Task(item.indices, epoch=self.number, shelved=source.larder.shelved(item.indices))
        kept = draws.states() if source.recipe.seed is not None else None
        try:
            with source.inline.watching():
                made = source.inline.make(task)
        finally:
            if kept is not None:
                draws.restore(kept)
        source.larder.note(made)
        return made

    def _account(self, item: Item, times: tuple[float, float]) -> float:
        """Tells what this batch took; gives the seconds of making it."""
        begin, end = times
        source, made, number = self.source, item.made, item.position
        assert made is not None
        if number % LOOK_EVERY == 0:
            source.batch_bytes = size_bytes(made.batch)
        for took in made.took:
            self.clock.note(took, epoch=self.number, batch=number, worker=item.worker, beside=True)
        source.tally.add(made)
        middle = max(end - item.copied_s, begin)
        self.clock.note(
            Took(WAIT, begin, middle, middle - begin),
            epoch=self.number, batch=number, worker=item.worker, beside=False,
        )  # fmt: skip
        if item.copied_s:
            self.clock.note(
                Took(COPY, middle, end, end - middle, source.batch_bytes),
                epoch=self.number, batch=number, worker=item.worker, beside=False,
            )  # fmt: skip
        item.made = None
        return sum(took.worked_s for took in made.took)

    def _finish(self) -> None:
        source = self.source
        source.larder.end_epoch()
        source.tally.end(source.recorder(), self.clock, self.number, self.position)
        if not source.trains() and source.pool is not None:
            source.pool.resize(0)


class FromWorker(Exception):
    """The traceback of a worker, shown as the cause of its error."""

    def __str__(self) -> str:
        return f"in a worker:\n{self.args[0]}"


def pinned(batch: Any) -> Any:
    """Where a DataLoader would pin it."""
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None or there.type == "mps":
        return batch
    return pin_memory(batch)  # type: ignore[no-untyped-call]


def size_bytes(batch: Any) -> int:
    leaves = pytree.tree_leaves(batch)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
