"""Rota: which device reads which samples of a batch, from who has them and who needs them.

All devices know the same few facts (the order of the samples, who has which, which rows of a batch
each computes with), so each works out by itself who reads what: nobody is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from terrazzo.feed.draws import mix

Rows = tuple[tuple[int, ...], ...]
"""For each device the rows of a batch that it reads."""


@lru_cache(maxsize=2)
def arranged(count: int, seed: int, epoch: int) -> Tensor:
    """The samples of an epoch, shuffled; this one and the next are asked for again and again."""
    draw = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(count, generator=draw)


@dataclass(frozen=True)
class Order:
    """All that the batches of a data set follow from."""

    samples: int
    batch: int
    drop_last: bool
    shuffle: bool
    seed: int

    def __str__(self) -> str:
        last = ", less the last smaller one" if self.drop_last else ""
        how = f"shuffled by seed {self.seed}" if self.shuffle else "in order"
        return f"{self.samples} samples in batches of {self.batch}{last}, {how}"

    @property
    def batches(self) -> int:
        whole, rest = divmod(self.samples, self.batch)
        return whole + (rest > 0 and not self.drop_last)

    def indices(self, epoch: int, position: int) -> list[int]:
        """The samples of one batch."""
        begin, end = position * self.batch, min((position + 1) * self.batch, self.samples)
        if not self.shuffle:
            return list(range(begin, end))
        found: list[int] = arranged(self.samples, self.seed, epoch)[begin:end].tolist()
        return found


@dataclass(frozen=True, eq=False)
class Rota:
    """For one set of devices."""

    order: Order
    has: Tensor
    """Whether a device has a sample: a row for each device."""
    needs: tuple[tuple[int, int], ...] = ()
    """The rows of a full batch that each device computes with; empty: not known."""
    each: bool = False
    """Whether a device reads all that it needs and has itself; otherwise one reads for all."""

    def missing(self) -> list[int]:
        """Samples that no device has."""
        found: list[int] = (~self.has.any(0)).nonzero().flatten().tolist()
        return found

    def rows(self, indices: Sequence[int]) -> Rows:
        """Who reads these samples; every row is read by somebody."""
        has = self.has[:, list(indices)]
        wanted = has & self._needed(len(indices))
        found: list[list[int]] = [[] for _ in has]
        for row in range(len(indices)):
            near, able = wanted[:, row].tolist(), has[:, row].tolist()
            readers = [device for device, is_near in enumerate(near) if is_near]
            if not self.each or not readers:
                among = readers or [device for device, is_able in enumerate(able) if is_able]
                readers = [min(among, key=lambda device: (len(found[device]), device))]
            for device in readers:
                found[device].append(row)
        return tuple(tuple(rows) for rows in found)

    def _needed(self, count: int) -> Tensor:
        found = torch.zeros(len(self.has), count, dtype=torch.bool)
        if count == self.order.batch:  # a smaller one is cut otherwise, and comes once
            for device, (low, high) in enumerate(self.needs):
                found[device, low:high] = True
        return found


def givers(rows: Rows, count: int) -> list[list[int]]:
    """For each row who gives it to each device: itself, if it has read it, or one who has."""
    read = [set(one) for one in rows]
    found = []
    for row in range(count):
        readers = [device for device, own in enumerate(read) if row in own]
        found.append([d if row in own else readers[d % len(readers)] for d, own in enumerate(read)])
    return found
