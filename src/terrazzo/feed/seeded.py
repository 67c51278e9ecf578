"""Seeded: a data set without a loader, in an order that is made of a seed and the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from terrazzo.errors import UsageError
from terrazzo.feed.draws import mix


class SeededSampler(Sampler[int]):
    """Every way through it is the next epoch, shuffled by its number or in the order of the set."""

    def __init__(self, data_source: Any, *, seed: int, shuffle: bool) -> None:
        self.data_source, self.seed, self.shuffle = data_source, seed, shuffle
        self.epoch = 0
        """The epoch that begins next."""

    def __iter__(self) -> Iterator[int]:
        number, self.epoch = self.epoch, self.epoch + 1
        count = len(self.data_source)
        if not self.shuffle:
            yield from range(count)
            return
        draw = torch.Generator().manual_seed(mix(self.seed, number))
        yield from torch.randperm(count, generator=draw).tolist()

    def __len__(self) -> int:
        return len(self.data_source)


def seeded_loader(
    dataset: Any,
    *,
    seed: int,
    batch_size: int | None,
    shuffle: bool,
    sampler: Iterable[Any] | None,
    collate: Callable[[Any], Any] | None,
    drop_last: bool,
) -> DataLoader[Any]:
    """A loader of no workers, whose draws touch no generator of the script."""
    if batch_size is None:
        raise UsageError(
            f"tz.feed got a data set ({type(dataset).__name__}) and not a loader: say how many "
            "samples a batch has, tz.feed(dataset, net, batch_size=8)"
        )
    own = torch.Generator().manual_seed(mix(seed))
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise UsageError("an iterable data set has its own order: leave out sampler=")
        return DataLoader(
            dataset, batch_size, collate_fn=collate, drop_last=drop_last, generator=own
        )
    order = SeededSampler(dataset, seed=seed, shuffle=shuffle) if sampler is None else sampler
    return DataLoader(
        dataset,
        batch_size,
        sampler=order,
        collate_fn=collate,
        drop_last=drop_last,
        generator=own,
    )
