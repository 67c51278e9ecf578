"""Order: the indices of an epoch, drawn from a loader's generators when the loader would draw them.

Looking ahead must not change anything that a script can see. The samplers of torch draw all they
need at the first batch of an epoch, so the rest can be known early. The next epoch can even be
foreseen: its draws are tried and taken back. When it really begins, what it draws is compared with
what was foreseen, batch by batch. A sampler of a script's own may do anything, and is only asked
ahead where the loader has workers, for which a DataLoader looks ahead itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from terrazzo.feed.seeded import SeededSampler, Shared

KNOWN = (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, SeededSampler)
FAR = 1 << 30


class Epoch:
    """The batches of one way through the data, as lists of indices."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._indices: Iterator[Any] = iter(_shared(loader))
        self.base = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        """What the seeds of workers are made of; drawn also where there are none."""
        self.has_ended = False
        self._free = free_batches(loader)
        self._ahead = loader.num_workers * (loader.prefetch_factor or 2)
        self._asked = 0
        self._known: deque[Any] = deque()

    def serve(self, batch: int) -> None:
        """The loop wants this one next: asks all that a DataLoader would have asked by now."""
        if self._free < FAR:
            self._ask(self._ahead + batch + 1)

    def next(self, batch: int) -> Any:
        """The next indices; None: there are none, or they must not be asked for yet.

        ``batch`` is the one that the loop wants.
        """
        if not self._known:
            self._ask(min(self._asked + 1, max(self._free, self._ahead + batch + 1)))
        return self._known.popleft() if self._known else None

    def _ask(self, count: int) -> None:
        while self._asked < count and not self.has_ended:
            found = next(self._indices, None)
            self._asked += 1
            if found is None:
                self.has_ended = True
            else:
                self._known.append(found)

    @property
    def is_used_up(self) -> bool:
        return self.has_ended and not self._known


class Foreseen(NamedTuple):
    base: int
    batches: list[Any]


def index_sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _shared(loader: DataLoader[Any]) -> Any:
    """The indices of what is read here."""
    batches, sampler = index_sampler(loader), loader.sampler
    share = sampler.share if isinstance(sampler, SeededSampler) else None
    return batches if share is None else Shared(batches, share)


def is_known(loader: DataLoader[Any]) -> bool:
    """Whether asking ahead changes nothing that a script can see."""
    batches = index_sampler(loader)
    sampler = batches
    if loader.batch_sampler is not None:
        if type(batches) is not BatchSampler:
            return False
        sampler = batches.sampler
    if type(sampler) is RandomSampler:  # by a generator that others may use, it draws bit by bit
        once = not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
        return once or sampler.generator is None
    return type(sampler) in KNOWN


def sight(loader: DataLoader[Any]) -> int:
    """How many batches may be asked for ahead."""
    if is_known(loader):
        return FAR
    return loader.num_workers * (loader.prefetch_factor or 2)


def free_batches(loader: DataLoader[Any]) -> int:
    """So many may be asked for at any time; later ones only when a DataLoader would ask."""
    if not is_known(loader):
        return 0
    sampler = loader.sampler
    if type(sampler) is RandomSampler and sampler.generator is not None:
        return len(index_sampler(loader)) - 1  # at its end it draws once more
    return FAR


def foresee(loader: DataLoader[Any], count: int) -> Foreseen | None:
    """The first batches of the next epoch, if nobody draws before it begins."""
    if not is_known(loader):
        return None
    owners = [torch.default_generator, loader.generator]
    owners.append(getattr(loader.sampler, "generator", None))
    kept = [(owner, owner.get_state()) for owner in owners if isinstance(owner, torch.Generator)]
    number = loader.sampler.epoch if isinstance(loader.sampler, SeededSampler) else 0
    try:
        epoch = Epoch(loader)
        return Foreseen(epoch.base, list(islice(iter(lambda: epoch.next(FAR), None), count)))
    finally:
        for owner, state in kept:
            owner.set_state(state)
        if isinstance(loader.sampler, SeededSampler):
            loader.sampler.epoch = number
