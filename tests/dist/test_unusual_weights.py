"""Weights that are computed, read in two ways, or cut in one graph and whole in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import run_on
from plain import assert_close, state, twin
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import terrazzo as tz

SIDE = 12


class Standardised(nn.Conv2d):
    """Its weight is computed before it is used."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, None if self.bias is None else self.bias * 2, padding=1)


def computed() -> nn.Module:
    return nn.Sequential(
        Standardised(3, 4, 3), nn.GELU(), parametrizations.weight_norm(nn.Conv2d(4, 4, 3)),
        nn.ReLU(), Standardised(4, 3, 3, bias=False), Standardised(3, 2, 3),
    )  # fmt: skip


class Twice(nn.Module):
    """One weight, of which one convolution reads all and the other, on some devices, a part."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = self.conv(x)
        return F.gelu(self.conv(x * 0.5)), one[:, :1] * one[:, 3:]


class Position(nn.Module):
    """A parameter that is added, or stretched first where pictures are larger."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.position = nn.Parameter(torch.randn(1, 8, SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        x, position = self.conv(x), self.position
        if x.shape[-1] != SIDE:
            position = F.interpolate(position, size=x.shape[-2:], mode="bilinear")
        return x + position


class Straddling(nn.Module):
    """Groups that a cut goes through, last in its group of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x)))


class SharedNorm(nn.Module):
    """One norm for maps that are spread and for vectors, which are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(x)).tanh(), 2)
        return self.norm(self.norm(x).mean((2, 3), keepdim=True) * 3)


def without_bias() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, bias=False), nn.GELU(), nn.Conv2d(4, 2, 1)
    )


def classifier() -> nn.Module:
    """A norm of vectors is cut in evaluation, and whole in training."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8),
        nn.BatchNorm1d(8), nn.Linear(8, 2),
    ).eval()  # fmt: skip


def as_plain(make: Callable[[], nn.Module], sides: Sequence[int], options: dict[str, Any]) -> None:
    """A step at each size of pictures, in training."""
    torch.manual_seed(5)
    plain = make().double()
    net = tz.parallelize(twin(plain), (torch.zeros(2, 3, SIDE, SIDE).double(),), **options)
    for model in (plain, net):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        draw = torch.Generator().manual_seed(6)
        for side in sides:
            x = torch.randn(2, 3, side, side, generator=draw, dtype=torch.float64)
            found = model(x)
            results = found if isinstance(found, tuple) else (found,)
            optimizer.zero_grad()
            sum(one.square().mean() for one in results).backward()
            optimizer.step()
    assert_close(state(net), state(plain))


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "tiles:2x1"},
        {"layout": "samples"},
        {"layout": "channels"},
        {"layout": "tiles:2x1", "groups": "one"},
        {"layout": "tiles:1x2", "groups": "one", "passes": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [computed, Twice, without_bias, Straddling, SharedNorm])
def test_in_every_layout(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    run_on(2, as_plain, make, (SIDE,), options)


@pytest.mark.parametrize("options", [{}, {"groups": "one", "passes": 2}], ids=str)
@pytest.mark.parametrize("make", [computed, Twice, without_bias, Straddling, SharedNorm])
def test_alone(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    as_plain(make, (SIDE,), options)


@pytest.mark.parametrize("groups", ["one", "each"])
def test_groups_that_a_cut_goes_through(groups: str) -> None:
    given = {"layout": "channels:2", "groups": groups, "passes": 2}
    run_on(2, as_plain, Straddling, (SIDE,), given)
    run_on(2, as_plain, Twice, (SIDE,), {"layout": "channels:2", "groups": groups})


@pytest.mark.parametrize(("make", "sides"), [(Position, (16, SIDE, 16)), (classifier, (SIDE,))])
@pytest.mark.parametrize("devices", [2, 3])
def test_cut_in_one_graph_and_whole_in_another(
    make: Callable[[], nn.Module], sides: tuple[int, ...], devices: int
) -> None:
    run_on(devices, as_plain, make, sides, {"layout": "channels"})
