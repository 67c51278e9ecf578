"""A device that becomes slow: all notice at the same step, plan anew, and the numbers go on."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from devices import run_on
from plain import assert_close, batches, state, train, twin
from quick_links import SHAPE, model, profile

import terrazzo as tz
from terrazzo.planner import Wishes
from terrazzo.runtime.pace import WARM_UP, WINDOW
from terrazzo.runtime.steps import ComputeStep

TIMES = 8.0
"""How many times as long the slow device takes, forward and backward together."""


@contextlib.contextmanager
def lagging(device: int) -> Iterator[None]:
    """On one device every forward step of computing takes many times as long.

    It sleeps: a loop would take the cores of the others, and make those slow as well.
    """
    if torch.distributed.get_rank() != device:
        yield
        return
    usual = ComputeStep.forward

    def slow(self: ComputeStep, run: Any) -> None:
        begin = time.perf_counter()
        usual(self, run)
        time.sleep((TIMES - 1) * 4 * (time.perf_counter() - begin))

    ComputeStep.forward = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        ComputeStep.forward = usual  # type: ignore[method-assign]


def slowed(device: int) -> tuple[str, str, str, list[int]]:
    """Trains beside plain PyTorch; gives both plans, what was said, and when plans changed."""
    plain, data = model(), batches(WINDOW + WARM_UP + 8, SHAPE)
    # Trying other plans would come first.
    with mock.patch.object(Wishes, "rivals", return_value=()):
        net = tz.parallelize(twin(plain), (data[0][0],), profile=profile(3))
    before, changed = str(net.plan), []
    optimizers = [torch.optim.Adam(each.parameters(), 1e-3) for each in (plain, net)]

    def after(step: int) -> None:
        if net.keep_pace(optimizers[1]):
            changed.append(step)

    said = io.StringIO()
    with contextlib.redirect_stderr(said), lagging(device):
        losses = [train(plain, optimizers[0], data), train(net, optimizers[1], data, after=after)]
    assert max(abs(a / b - 1) for a, b in zip(*losses, strict=True)) < 1e-10
    assert_close(state(net), state(plain))
    return before, str(net.plan), said.getvalue(), changed


def test_a_slow_device_is_named_and_gets_less() -> None:
    answers = run_on(3, slowed, 2, timeout_s=240)
    assert len({(before, after) for before, after, _, _ in answers}) == 1
    before, after, said, changed = answers[0]
    assert before != after
    assert changed and all(other[3] == changed for other in answers)
    assert "device 2 computes at 0." in said and "of its planned rate" in said
    assert "planned anew" in said and "temperature" not in said
    assert answers[1][2] == answers[2][2] == ""  # one device speaks for all


def unheeded() -> str:
    """The same without asking for another plan, and without any prediction."""
    data = batches(2 * WINDOW + WARM_UP + 5, SHAPE)
    net = tz.parallelize(model(), (data[0][0],), layout="tiles:3x1")
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        train(net, optimizer, data[: WINDOW + WARM_UP + 2])
        with lagging(1):
            train(net, optimizer, data[WINDOW + WARM_UP + 2 :])
    return said.getvalue()


def test_without_a_plan_anew_it_is_said_what_to_do() -> None:
    first, *others = run_on(3, unheeded, timeout_s=240)
    assert "device 1 computes at 0." in first and "of the rate of its first steps" in first
    assert "look at its temperature" in first
    assert others == ["", ""]
