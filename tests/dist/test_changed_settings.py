"""What is changed in a model between two calls: a net computes with it, as plain PyTorch would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import batches, twin
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.errors import UsageError

X, _ = batches(1)[0]


class Tunable(nn.Module):
    """What a graph takes in and no layer of torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self._alpha, self.scales, self.act = 0.5, [1.0, 2.0], F.relu
        self.warmth = torch.tensor(3.0, dtype=torch.float64)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv(x) * self._alpha)
        return sum((x * scale for scale in self.scales), x) / self.warmth


def tuned(model: Any) -> Iterator[None]:
    """One thing after the other is changed."""
    model._alpha = 0.25
    yield
    model.scales.append(3.0)
    yield
    model.scales = [0.5]
    yield
    model.act = F.gelu
    yield
    model.warmth = torch.tensor(5.0, dtype=torch.float64)
    yield
    model.warmth.fill_(7.0)
    yield


def tuned_behind_the_net() -> list[float]:
    torch.manual_seed(0)
    model = Tunable()
    plain, net = twin(model), tz.parallelize(model, (X,))
    net(X)
    gaps = []
    for _ in zip(tuned(model), tuned(plain), strict=True):
        gaps.append(float((net(X) - plain(X)).detach().norm()))
    model.warmth = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(UsageError, match="asks for a gradient and is no parameter"):
        net(X)
    return gaps


def test_whatever_is_changed_after_wrapping_takes_effect() -> None:
    for gaps in run_on(2, tuned_behind_the_net):
        assert gaps == pytest.approx([0] * 6, abs=1e-10)
