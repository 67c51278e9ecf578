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
from terrazzo.feed.maker import Made, Task
from terrazzo.feed.order import Epoch
from terrazzo.feed.stages import Clock, Took
from terrazzo.records.stage import COPY, INLINE, WAIT

if TYPE_CHECKING:
    from terrazzo.feed.source import Source


LOOK_EVERY = 16
"""So often the size of a batch is looked at."""


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

    def run(self) -> Iterator[Any]:
        source = self.source
        if source.has_changed():
            source.renew()
        self.epoch = Epoch(self.loader)
        for number in range(self.skip):
            self.epoch.next(number)
        streams = 0 if source.recipe.seed is not None else self.loader.num_workers
        self.chains = Chains(self.epoch.base, streams)
        left = time.perf_counter()
        try:
            while True:
                begin = time.perf_counter()
                item = self._next()
                if item is None:
                    break
                batch = self._batch(item, begin)
                end = time.perf_counter()
                made_s = self._account(item, (begin, end))
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
        self._finish()

    def _next(self) -> Item | None:
        source = self.source
        if not self.loader.num_workers and source.has_changed():
            source.renew()
            for item in self.items:
                item.ticket = item.made = None
        source.mind_memory()
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
        source = self.source
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
            source.receive(None)
            self._fill(0)

    def _batch(self, item: Item, begin: float) -> Any:
        source = self.source
        made = item.made
        if made is not None and made.states is not None and not self.chains.count:
            source.drop(self.items)
            source.retire(
                "samples draw random numbers there, one after the other. Give tz.feed the data set "
                "instead of a loader, and each sample has a seed of its own"
            )
            made = None
        if made is not None and made.error is not None and self._is_own_idea:
            source.drop(self.items)
            source.retire(f"a worker could not make a batch: {made.error}")
            made = None  # what fails here, too, is told
        if made is None:
            made = self._make(item)
        item.made = made
        if made.error is not None:
            raise made.error
        source.tally.skip(made.bad, source.say)
        batch = made.batch
        if self.loader.pin_memory and torch.accelerator.is_available():
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]
        return batch

    @property
    def _is_own_idea(self) -> bool:
        """Whether nobody asked for workers, so that nothing may fail because of them."""
        return not self.chains.count and self.source.options.workers is None

    def _make(self, item: Item) -> Made:
        """In this process; samples with seeds of their own leave its generators alone."""
        source = self.source
        task = Task(item.indices, epoch=self.number)
        item.worker = INLINE
        if source.recipe.seed is None:
            return source.inline.make(task)
        kept = draws.states()
        try:
            return source.inline.make(task)
        finally:
            draws.restore(kept)

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
        if source.held is not None:
            source.held.widen()
        recorder = source.recorder()
        if recorder is not None:
            source.tally.end(recorder, self.clock, self.number, self.position)
        if not source.trains() and source.pool is not None:
            source.pool.resize(0)


def size_bytes(batch: Any) -> int:
    leaves = pytree.tree_leaves(batch)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
