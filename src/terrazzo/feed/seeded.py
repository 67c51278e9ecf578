"""Seeded: a data set without a loader, in an order that is made of a seed and the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from terrazzo.errors import UsageError
from terrazzo.feed.draws import mix
from terrazzo.feed.rota import Order, arranged

AHEAD = 2
"""Batches that a worker makes ahead, as under a DataLoader."""
Share = Callable[[Sequence[int]], Sequence[int]]
"""From the samples of a batch to the rows that a device reads of it."""


class SeededSampler(Sampler[int]):
    """Every way through it is the next epoch, shuffled by its number or in the order of the set."""

    def __init__(self, data_source: Any, *, seed: int, shuffle: bool) -> None:
        self.data_source, self.seed, self.shuffle = data_source, seed, shuffle
        self.epoch = 0
        """The epoch that begins next."""
        self.share: Share | None = None
        """The rows of a batch that are read here; None: all."""

    def __iter__(self) -> Iterator[int]:
        number, self.epoch = self.epoch, self.epoch + 1
        count = len(self.data_source)
        if not self.shuffle:
            yield from range(count)
            return
        yield from arranged(count, self.seed, number).tolist()

    def __len__(self) -> int:
        return len(self.data_source)


class Shared:
    """The batches of a sampler, of each the rows that are read here; of some there are none."""

    def __init__(self, batches: Iterable[list[int]], share: Share) -> None:
        self.batches, self.share = batches, share

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.batches:
            rows = self.share(indices)
            if rows:
                yield [indices[row] for row in rows]


def order_of(loader: DataLoader[Any]) -> Order | None:
    """What the batches of a loader follow from, where that is a seed; None: it is not."""
    sampler = loader.sampler
    if not isinstance(sampler, SeededSampler) or loader.batch_size is None:
        return None
    return Order(len(sampler), loader.batch_size, loader.drop_last, sampler.shuffle, sampler.seed)


def seeded_loader(
    dataset: Any,
    *,
    seed: int,
    batch_size: int | None,
    shuffle: bool,
    sampler: Iterable[Any] | None,
    collate: Callable[[Any], Any] | None,
    drop_last: bool,
    workers: int | None = None,
    ahead: int | None = None,
) -> DataLoader[Any]:
    """A loader whose own draws touch no generator of the script.

    ``workers`` and ``ahead`` are for an iterable data set, which only its loader can read ahead.
    """
    if batch_size is None:
        raise UsageError(
            f"tz.feed got a data set ({type(dataset).__name__}) and not a loader: say how many "
            "samples a batch has, tz.feed(dataset, net, batch_size=8)"
        )
    own = torch.Generator().manual_seed(mix(seed))
    if isinstance(dataset, IterableDataset):
        if sampler is not None:
            raise UsageError("an iterable data set has its own order: leave out sampler=")
        if (workers or 0) > 1:
            raise UsageError(
                f"workers={workers}, and each of them would read all of an iterable data set: say "
                "workers=1, or give a DataLoader whose data set shares the work among workers "
                "(torch.utils.data.get_worker_info)"
            )
        return DataLoader(
            dataset, batch_size, collate_fn=collate, drop_last=drop_last, generator=own,
            num_workers=workers or 0, prefetch_factor=(ahead or AHEAD) if workers else None,
        )  # fmt: skip
    order = SeededSampler(dataset, seed=seed, shuffle=shuffle) if sampler is None else sampler
    return DataLoader(
        dataset,
        batch_size,
        sampler=order,
        collate_fn=collate,
        drop_last=drop_last,
        generator=own,
    )
