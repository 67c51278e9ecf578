"""A rehearsal: a script's own training loop, fed under the condition of a trial for some steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from terrazzo.feed import draws
from terrazzo.feed.arbiter import Memory
from terrazzo.feed.cores import allowed_cores
from terrazzo.feed.native import rows_of
from terrazzo.feed.passage import DRAWS
from terrazzo.feed.seeded import SeededSampler
from terrazzo.feed.stays import copies_reason, goes_its_own_way, stays_reason
from terrazzo.feed.tuner import MOST_WORKERS
from terrazzo.feed.watch import Watch
from terrazzo.records import document
from terrazzo.records.trial import COLD, FILE, SYNTHETIC, USUAL, WARM, Trial, TrialFacts
from terrazzo.runtime.links import Links

SKIPPED = 1
"""Steps whose processor time is not counted: the first one warms up."""
STREAM_DRAWS = (
    "samples draw random numbers there, one after the other. With workers=1 another process reads "
    "ahead, and its draws are made of the seed"
)


class TrialOver(SystemExit):
    """The steps of a trial are done: the script ends here, and nothing is wrong."""

    def __init__(self) -> None:
        super().__init__(0)


class Rehearsal:
    """Counts steps over all epochs of a script, and ends it when there are enough."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self.trial, self.folder = trial, folder
        self.watch = Watch(evicts=trial.mode in (COLD, USUAL), own=folder)
        self.done = 0
        self._began_cpu_s = time.process_time()
        self._facts: dict[str, int] = {"samples": 0, "batch": 0, "batch_bytes": 0}
        self._loader: Iterable[Any] | None = None
        self._is_made = False
        self._draws = False

    def loader(self, loader: Iterable[Any], *, is_made: bool = False) -> Iterable[Any]:
        """What a script's loader becomes for this trial.

        ``is_made``: the script gave a data set, and its loader was made here.
        """
        self._is_made = is_made
        self._look_at(loader)
        self.watch.begin()
        if self.trial.mode == USUAL and isinstance(loader, DataLoader):
            return loader
        again = repeated(loader, self.trial.steps + 1)
        if self.trial.mode == SYNTHETIC:
            batch = next(iter(again))
            self._measure(batch)
            return Same(batch, self.trial.steps + 1)
        if self.trial.mode == WARM:
            self._go_through(again)
        return again

    def _go_through(self, batches: Iterable[Any]) -> None:
        """Brings files into memory, and sees whether making samples draws random numbers."""
        before: draws.States | None = None  # to begin, a loader draws a number itself
        for _ in batches:
            after = draws.states()
            self._draws |= before is not None and not draws.same(before, after)
            before = after

    def counted(self, batches: Iterable[Any], *, reads: bool) -> Iterator[Any]:
        """Hands batches on until there were enough of them; then the script ends."""
        for batch in batches:
            if self.done == SKIPPED:
                self._began_cpu_s = time.process_time()
            self.done += 1
            yield batch
            if self.done > self.trial.steps:
                if reads:
                    self._tell()
                raise TrialOver
        if reads:  # the script may end here by itself
            self._tell()

    def _look_at(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        if isinstance(loader, DataLoader):
            with suppress(TypeError, NotImplementedError):
                self._facts["samples"] = len(loader.dataset)  # type: ignore[arg-type]

    def _measure(self, batch: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        if tensors:
            self._facts["batch"] = rows_of(batch)
            self._facts["batch_bytes"] = sum(t.numel() * t.element_size() for t in tensors)

    def workers(self) -> tuple[int, str]:
        """How many could make the same batches, and why none could."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return 0, f"batches come from {type(loader).__name__} as it is"
        if self._is_made and isinstance(loader.dataset, IterableDataset):
            copies = copies_reason((loader.dataset, loader.collate_fn))
            reason = STREAM_DRAWS if self._draws else copies
            return (0, reason) if reason else (1, "")
        if goes_its_own_way(loader) or not loader.num_workers:
            reason = stays_reason(loader)
            if reason:
                return 0, reason
        if not self._draws or isinstance(loader.sampler, SeededSampler):
            return MOST_WORKERS, ""
        return loader.num_workers, "" if loader.num_workers else DRAWS

    @property
    def _own_workers(self) -> int:
        loader = self._loader
        is_own = isinstance(loader, DataLoader) and goes_its_own_way(loader)
        return loader.num_workers if is_own else 0  # type: ignore[union-attr]

    def _tell(self) -> None:
        steps = max(self.done - SKIPPED, 1)
        most_workers, stays = self.workers()
        facts = TrialFacts(
            mode=self.trial.mode,
            steps=steps,
            cpu_s=(time.process_time() - self._began_cpu_s) / steps,
            cores=allowed_cores(),
            free_bytes=Memory.here().available_bytes,
            folder=self.watch.folder,
            most_workers=most_workers,
            stays=stays,
            own_workers=self._own_workers,
            **self._facts,
        )
        document.write(self.folder / FILE, facts.to_json())


def counted(links: Links, batches: Iterable[Any], *, reader: int) -> Iterator[Any]:
    """Batches as they come, or as many of them as a trial wants; ``reader`` tells of it."""
    rehearsal: Rehearsal | None = links.rehearsal
    if rehearsal is None:
        return iter(batches)
    return rehearsal.counted(batches, reads=links.members[links.device] == reader)


class Same:
    """One batch, again and again."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch, self.count)


def repeated(loader: Iterable[Any], count: int) -> Iterable[Any]:
    """The first ``count`` batches of a loader, the same ones each time, without workers."""
    if not isinstance(loader, DataLoader):
        return First(loader, count)
    if isinstance(loader.dataset, IterableDataset):
        return First(_alone(loader), count)
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    indices = list(itertools.islice(_round(sampler), count))
    options: dict[str, Any] = {"collate_fn": loader.collate_fn, "generator": loader.generator}
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=indices, **options)
    return DataLoader(loader.dataset, batch_sampler=indices, **options)


def _alone(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader of an iterable data set without workers, if it is a plain one."""
    if type(loader) is not DataLoader or not loader.num_workers:
        return loader
    return DataLoader(
        loader.dataset, loader.batch_size, collate_fn=loader.collate_fn,
        drop_last=loader.drop_last, generator=loader.generator,
    )  # fmt: skip


def _round(source: Iterable[Any]) -> Iterator[Any]:
    """From the beginning again at the end; an empty source ends at once."""
    while True:
        empty = True
        for item in source:
            empty = False
            yield item
        if empty:
            return


class First:
    """The first items of anything that can be gone through again."""

    def __init__(self, source: Iterable[Any], count: int) -> None:
        self.source, self.count = source, count
        self.num_workers: int = getattr(source, "num_workers", 0)
        """Of a loader that goes its own way, in every trial."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(_round(self.source), self.count)
