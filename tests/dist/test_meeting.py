"""Groups that begin with a norm: edges and statistics are under way together, and exact."""

from __future__ import annotations

import pytest
import torch
from devices import run_on
from plain import assert_close, batches, gradients, state, train, twin
from torch import nn

import terrazzo as tz
from terrazzo.schedule import Arrive


def model(norm: str) -> nn.Sequential:
    """Odd sizes, a pool over unread rows, a strided convolution, a norm that two others read."""
    torch.manual_seed(0)
    make = {"batch": nn.BatchNorm2d, "group": lambda c: nn.GroupNorm(2, c)}[norm]
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), make(6), nn.LeakyReLU(0.1), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), make(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, padding=1), make(8), nn.SiLU(),
        nn.Conv2d(8, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    ).double()  # fmt: skip


def trained(norm: str, layout: str, groups: list[str], frozen: bool) -> int:
    plain, data = model(norm), batches(3, (2, 3, 37, 45))
    if frozen:
        plain[0].requires_grad_(False)
    net = tz.parallelize(twin(plain), (data[0][0],), layout=layout, groups=groups)
    for one in (plain, net):
        train(one, torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9), data)
    assert_close(state(net), state(plain))
    x, other = (data[0][0].clone().requires_grad_() for _ in range(2))
    net(x).square().sum().backward()
    plain(other).square().sum().backward()
    assert_close({"x": x.grad, **gradients(net)}, {"x": other.grad, **gradients(plain)})
    return sum(isinstance(step, Arrive) for step in net.program.steps)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("layout", ["tiles:2x2", "tiles:4x1"])
def test_edges_and_statistics_travel_together(norm: str, layout: str) -> None:
    assert set(run_on(4, trained, norm, layout, ["0", "4", "7"], False)) == {3}


def test_edges_of_what_was_pooled_ahead_of_its_norm() -> None:
    ends = ["max_pool2d.early", "4", "7"]
    assert set(run_on(4, trained, "batch", "tiles:2x2", ends, False)) == {3}


def test_with_frozen_weights_below() -> None:
    assert set(run_on(3, trained, "batch", "tiles:3x1", ["0", "7"], True)) == {2}


def test_not_where_a_device_owns_what_it_has_to_be_sent() -> None:
    """From samples to tiles the statistics are of other elements than those that are here."""
    assert set(run_on(2, relaid)) == {0}


def relaid() -> int:
    plain, data = model("batch"), batches(2, (2, 3, 37, 45))
    x = data[0][0]
    first, rest = (
        tz.plan(twin(plain), (x,), layout=layout, groups=["0"]).groups[place]
        for place, layout in enumerate(("samples", "tiles:2x1"))
    )
    like = tz.plan(twin(plain), (x,), layout="samples", groups=["0"])
    plan = type(like)(like.graph, like.devices, (first, rest))
    net = tz.parallelize(twin(plain), (x,), plan=plan)
    for one in (plain, net):
        train(one, torch.optim.SGD(one.parameters(), lr=0.05), data)
    assert_close(state(net), state(plain))
    return sum(isinstance(step, Arrive) for step in net.program.steps)
