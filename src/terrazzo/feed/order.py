"""Order: the indices of an epoch, drawn from a loader's generators when the loader would draw them.

Looking ahead must not change anything that a script can see. The samplers of torch draw all they
need at the first batch of an epoch, so the rest can be known early. The next epoch can even be
foreseen: its draws are tried and taken back. When it really begins, what it draws is compared with
what was foreseen, batch by batch. A sampler of a script's own may do anything, and is only asked
ahead where the loader has workers, for which a DataLoader looks ahead itself.
"""

from __future__ import annotations

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

from terrazzo.feed.seeded import SeededSampler

KNOWN = (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, SeededSampler)
FAR = 1 << 30


class Epoch:
    """The batches of one way through the data, as lists of indices."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.indices: Iterator[Any] = iter(index_sampler(loader))
        self.base = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
        """What the seeds of workers are made of; drawn also where there are none."""


class Foreseen(NamedTuple):
    base: int
    batches: list[Any]


def index_sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


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
        return Foreseen(epoch.base, list(islice(epoch.indices, count)))
    finally:
        for owner, state in kept:
            owner.set_state(state)
        if isinstance(loader.sampler, SeededSampler):
            loader.sampler.epoch = number
