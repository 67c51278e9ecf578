"""Bringing batches to a device that is no GPU leaves them as they are."""

from __future__ import annotations

import torch

from terrazzo.feed.lift import PLAIN, TRIED, Lift
from terrazzo.geometry import Box
from terrazzo.runtime.part import Part


def test_nothing_is_staged_without_a_gpu() -> None:
    lift = Lift("cpu")
    box = Box(((0, 1), (0, 3)))
    for number, batch in enumerate(lift.batches([[torch.ones(2), "name", 3]] * (2 * TRIED + 1))):
        assert torch.equal(batch[0], torch.ones(2))
        assert batch[1:] == ["name", 3]
        assert lift.way == PLAIN, number
    ((part,),) = lift.batches([[Part(torch.zeros(1, 3), box, (2, 3))]])
    assert part.box == box
    assert tuple(part.shape) == (2, 3)
