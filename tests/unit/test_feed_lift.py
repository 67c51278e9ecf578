"""Bringing batches to a device that is no GPU leaves them as they are."""

from __future__ import annotations

import torch
from torch import nn

import terrazzo as tz
from terrazzo.feed.lift import PLAIN, TRIED, Lift, lift_of
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


def test_one_lift_for_all_epochs_of_a_loop() -> None:
    net = tz.parallelize(nn.Conv2d(3, 2, 3), (torch.zeros(1, 3, 8, 8),))
    batches = [(torch.full((1, 3, 8, 8), float(n)), n) for n in range(4)]
    for _ in range(2):
        found = [(x[0, 0, 0, 0].item(), n) for x, n in tz.feed(batches, net, device="cpu")]
        assert found == [(float(n), n) for n in range(4)]
    lift = lift_of(net, "cpu")
    assert lift.choice.step_s(PLAIN) is None, "one step of each epoch counts, of two"
    run = tz.Run(net, loader=batches, feeding={"device": "cpu"})
    for _ in run.epochs(6):
        assert [n for _, n in run.feed()] == [0, 1, 2, 3]
    assert lift.choice.step_s(PLAIN) is not None
    assert lift_of(net.eval(), "cpu") is not lift
