"""Staging through host memory, as a GPU needs it, with CPU tensors that are said to be away."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from devices import run_on
from test_passes import Hourglass
from torch import Tensor

import terrazzo as tz
from terrazzo.runtime import staging
from terrazzo.runtime.links import Links, connect

EVERYBODY, LAST = "everybody", "last"


@contextlib.contextmanager
def away(who: str) -> Iterator[Counter[str]]:
    """Inside, tensors of these devices are out of gloo's reach; counts the copies that are made."""
    links = connect()
    real, counts = (staging.is_away, staging.room), Counter[str]()

    def room(tensor: Tensor) -> Tensor:
        found = real[1](tensor)
        counts["rooms"] += found is not tensor
        return found

    if who == EVERYBODY or links.device == links.devices - 1:
        staging.is_away, staging.room = (lambda tensor: True), room
    try:
        yield counts
    finally:
        staging.is_away, staging.room = real


def numbers(device: int, size: int) -> Tensor:
    draw = torch.Generator().manual_seed(device)
    return torch.randn(size, generator=draw, dtype=torch.float64)


def moves(links: Links, size: int) -> None:
    """Every way in which tensors go to other devices, against what must arrive."""
    own, everybody = links.device, range(links.devices)
    others = [device for device in everybody if device != own]
    inbox = {device: torch.zeros(size, dtype=torch.float64) for device in others}
    links.exchange(
        [(device, numbers(own, size)) for device in others],
        [(device, inbox[device]) for device in others],
    )
    for device, arrived in inbox.items():
        assert torch.equal(arrived, numbers(device, size))
    everything = torch.stack([numbers(device, size) for device in everybody])
    assert torch.equal(links.gather(numbers(own, size)), everything)
    total = everything.sum(0)
    given = numbers(own, size)
    assert links.sum(given) is given
    for found in (given, links.sum_later(numbers(own, size)).wait()):
        torch.testing.assert_close(found, total, rtol=1e-12, atol=1e-12)
    assert torch.equal(links.broadcast(numbers(own, size), 1), numbers(1, size))


def all_moves(who: str) -> int:
    links = connect()
    with away(who) as counts:
        for size in (1, 7, 40_000):  # summed in one round, and in a ring
            moves(links, size)
    return counts["rooms"]


@pytest.mark.parametrize("who", [EVERYBODY, LAST])
def test_everything_that_leaves_or_arrives(who: str) -> None:
    *first, last = run_on(3, all_moves, who)
    assert last > 0
    assert [count > 0 for count in first] == [who == EVERYBODY] * 2


def checked(who: str) -> tuple[bool, str]:
    torch.manual_seed(0)
    with away(who):
        report = tz.check(Hourglass(), (torch.randn(2, 3, 32, 24),), groups="3", passes=2)
    return report.ok, str(report)


@pytest.mark.parametrize("who", [EVERYBODY, LAST])
def test_a_whole_step(who: str) -> None:
    for ok, text in run_on(2, checked, who):
        assert ok, text
