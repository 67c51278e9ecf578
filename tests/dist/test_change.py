"""Changing plans in a run: weights, gradients and optimisers' state move; the numbers go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import run_on
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.errors import Disagreement, PlanError, UsageError
from terrazzo.runtime.cut import CutParameter, plain

PLANS = {
    1: ["whole", "tiles:1x1", "whole"],
    2: ["tiles:2x1", "channels:2", "samples:2", "channels:1,3", "whole"],
    3: ["channels:1,2,1", "tiles:3x1", "channels:2,1,1", "samples:2,1,1", "channels:0,1,3"],
    4: ["samples:2+channels:2", "tiles:2x2", "channels:4", "samples:2+tiles:2x1", "whole",
        "channels:2+samples:2"],
}  # fmt: skip

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
}


def model() -> nn.Module:
    """No bias before a norm: its gradient is noise around zero, which Adam makes large."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.0), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    ).double()  # fmt: skip


def batch(step: int, side: int = 12) -> Tensor:
    torch.manual_seed(100 + step)
    return torch.randn(4, 3, side, side, dtype=torch.float64)


def gap(expected: dict[str, Tensor], state: dict[str, Tensor]) -> float:
    assert list(expected) == list(state)
    return max(
        float((right.double() - state[name].double()).norm() / (right.double().norm() + 1e-9))
        for name, right in expected.items()
    )


def trained(layouts: list[str], name: str) -> tuple[float, list[int], bool, bool]:
    """Two steps by each plan, and backward of one more before the change: gradients move too."""
    one, x = model(), batch(0)
    net = tz.parallelize(model(), (x,), layout=layouts[0], groups="each", seed=0)
    objects = [id(p) for p in net.parameters()]
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (one, net)]
    cut, losses = [len(net.homes)], [[], []]
    for turn, layout in enumerate([*layouts[1:], layouts[0]]):
        for each, optimizer, kept in zip((one, net), optimizers, losses, strict=True):
            for step in range(2):
                loss = each(batch(10 * turn + step)).square().mean()
                kept.append(loss)  # keeps the graph, with accumulators of the old shapes
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            each(batch(10 * turn + 2)).square().mean().backward()
        plan = tz.plan(net, (x,), layout=layout, groups=2 if turn % 2 else "each")
        net.change_plan(plan, optimizers[1])
        cut.append(len(net.homes))
        same_plan = net.plan == plan
        for each, optimizer in zip((one, net), optimizers, strict=True):
            each(batch(10 * turn + 3)).square().mean().backward()  # on top of what there was
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    far = max(abs(float(a) / float(b) - 1) for a, b in zip(*losses, strict=True))
    far = max(far, gap(one.state_dict(), net.state_dict()))
    same = objects == [id(p) for p in net.parameters()]
    return far, cut, same, same_plan


@pytest.mark.parametrize("devices", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_exactly(name: str, devices: int) -> None:
    for far, cut, same, same_plan in run_on(devices, trained, PLANS[devices], name):
        assert far < 1e-10
        assert same and same_plan
        assert devices == 1 or (0 in cut and max(cut) >= 6), cut
