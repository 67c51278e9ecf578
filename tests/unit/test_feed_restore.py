"""A run that goes on in the middle of an epoch sees what it would have seen, on one device."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import terrazzo as tz

sys.path.insert(0, str(Path(__file__).parent))
from pictures import SIZE, Numbers, flat

EPOCHS = 2


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Numbers(draws=True)[index] for index in range(22))


def loader(kind: str) -> Any:
    if kind == "a data set":
        return Numbers(draws=True)
    if kind == "a stream, read ahead":
        return Streamed()
    if kind == "iterable":
        return DataLoader(Streamed(), 4)
    workers = 2 if "workers" in kind else 0
    return DataLoader(Numbers(draws="draw" in kind), 4, shuffle=True, num_workers=workers)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@pytest.fixture(scope="module")
def net() -> tz.Net:
    return tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(2, 3, SIZE, SIZE),))


def begun(net: tz.Net, kind: str, options: dict[str, Any]) -> tz.Run:
    seed(0)
    has_loader = not kind.startswith("a ")
    feeding = options if has_loader else {**options, "batch_size": 4}
    if kind == "a stream, read ahead":
        feeding["workers"] = 1
    return tz.Run(net, loader=loader(kind), feeding=feeding)


def seen(run: tz.Run, found: list[Any]) -> Iterator[int]:
    """Steps, in each of which the loop draws from all that a loader may draw from, too."""
    number = 0
    for _ in run.epochs(EPOCHS):
        for batch in run.feed():
            found += flat([batch])
            found.append((torch.rand(()).item(), random.random(), np.random.rand()))
            number += 1
            yield number


@pytest.mark.parametrize("options", [{}, {"workers": 1, "cache": "1MiB"}])
@pytest.mark.parametrize(
    "kind",
    [
        "shuffled",
        "shuffled, samples draw",
        "samples draw in workers",
        "iterable",
        "a data set",
        "a stream, read ahead",
    ],
)
def test_what_comes_after_is_what_would_have_come(
    net: tz.Net, kind: str, options: dict[str, Any]
) -> None:
    right: list[Any] = []
    steps = len(list(seen(begun(net, kind, options), right)))
    for stop in (2, steps // 2 + 2):
        run = begun(net, kind, options)
        before: list[Any] = []
        for number in seen(run, before):
            if number == stop:
                state = run.state_dict()
                break
        other = begun(net, kind, options)
        seed(1)
        other.load_state_dict(state)
        after: list[Any] = []
        assert len(list(seen(other, after))) == steps - stop
        assert before + after == right
