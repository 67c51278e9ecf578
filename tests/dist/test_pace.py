"""A device that becomes slow: all notice at the same step, plan anew, and the numbers go on."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from typing import Any

import torch
from devices import run_on
from plain import assert_close, batches, state, train, twin
from torch import nn

import terrazzo as tz
from terrazzo.planner.guess import Figures, guessed
from terrazzo.records.profile import Profile
from terrazzo.runtime.pace import WARM_UP, WINDOW
from terrazzo.runtime.steps import ComputeStep

SHAPE = (6, 3, 64, 64)
TIMES = 8.0
"""How many times as long the slow device takes, forward and backward together."""


def model() -> nn.Sequential:
    """No bias before a norm: its gradient is noise around zero, which Adam makes large."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 5),
    ).double()  # fmt: skip


def profile(devices: int) -> Profile:
    """Slow processors and very fast links: everything is spread, by speed."""
    return guessed([Figures(f"d{i}", 1e8, 1 << 30, 1e9, 1e-6) for i in range(devices)])


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
