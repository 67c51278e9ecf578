"""Weights that live in parts: training, clipping, saving, copying, as PyTorch would, or refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import run_on
from refusal import refusal
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.errors import Disagreement, UsageError
from terrazzo.runtime.cut import CutTensor, plain

LAYOUTS = {2: "channels:2", 3: "channels:1,2,1", 4: "samples:2+channels:2"}


def model() -> nn.Module:
    """No bias before a norm: its gradient is noise around zero, which Adam makes large."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    ).double()  # fmt: skip


def batch(step: int, side: int = 12) -> Tensor:
    torch.manual_seed(100 + step)
    return torch.randn(4, 3, side, side, dtype=torch.float64)


def spread(layout: str, groups: str = "each") -> tuple[nn.Module, tz.Net]:
    net = tz.parallelize(model(), (batch(0),), layout=layout, groups=groups, seed=0)
    return model(), net


def gap(plain_model: nn.Module, state: dict[str, Tensor]) -> float:
    """The largest relative difference between two sets of weights and buffers."""
    expected = plain_model.state_dict()
    assert list(expected) == list(state)
    return max(
        float(
            (expected[n].double() - state[n].double()).norm() / (expected[n].double().norm() + 1e-9)
        )
        for n in expected
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
}


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip: float | None) -> None:
    for step in range(steps):
        loss = net(batch(step)).square().mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def trained(layout: str, name: str, clip: float | None) -> tuple[float, int]:
    one, net = spread(layout)
    train(one, OPTIMIZERS[name](one.parameters()), 5, clip)
    train(net, OPTIMIZERS[name](net.parameters()), 5, clip)
    return gap(one, net.state_dict()), len(net.homes)


@pytest.mark.parametrize(
    ("name", "devices"), [*((name, 3) for name in OPTIMIZERS), ("adam", 2), ("sgd", 4)]
)
def test_optimisers_step_as_on_whole_weights(name: str, devices: int) -> None:
    for far, cut in run_on(devices, trained, LAYOUTS[devices], name, None):
        assert cut >= 6
        assert far < 1e-10


@pytest.mark.parametrize("devices", [3, 4])
def test_clipping_is_by_the_norm_of_all_weights(devices: int) -> None:
    for far, _ in run_on(devices, trained, LAYOUTS[devices], "sgd", 0.05):
        assert far < 1e-10


def other_norms(layout: str) -> list[float]:
    one, net = spread(layout)
    found = []
    for each in (one, net):
        each(batch(0)).square().mean().backward()
        for order in (1.0, 3.0, float("inf")):
            found.append(float(torch.nn.utils.clip_grad_norm_(each.parameters(), 1e9, order)))
        penalty = sum((p.square().sum() for p in each.parameters()), torch.zeros(()))
        penalty = penalty + sum(p.norm() for p in each.parameters())
        each.zero_grad()
        penalty.backward()
        found.append(float(penalty))
        found.append(float(sum(p.grad.sum() for p in each.parameters())))
    half = len(found) // 2
    return [abs(a - b) / abs(a) for a, b in zip(found[:half], found[half:], strict=True)]


def test_norms_and_penalties_are_of_the_whole() -> None:
    for gaps in run_on(3, other_norms, LAYOUTS[3]):
        assert max(gaps) < 1e-10, gaps


def saved_and_loaded(layout: str) -> tuple[float, float, bool]:
    one, net = spread(layout)
    train(one, OPTIMIZERS["sgd"](one.parameters()), 2, None)
    train(net, OPTIMIZERS["sgd"](net.parameters()), 2, None)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    fresh = model()
    fresh.load_state_dict(torch.load(file))  # without Terrazzo
    first = gap(one, fresh.state_dict())
    again = tz.parallelize(model(), (batch(0),), layout=layout, seed=0)
    again.load_state_dict(fresh.state_dict())
    copied = copy.deepcopy(again)
    same = all(
        torch.equal(a, b) for a, b in zip(copied.parameters(), fresh.parameters(), strict=True)
    )
    return first, gap(one, again.state_dict()), same and type(copied[0].weight) is nn.Parameter


@pytest.mark.parametrize("devices", [3, 4])
def test_what_is_saved_is_whole(devices: int) -> None:
    for first, second, same in run_on(devices, saved_and_loaded, LAYOUTS[devices]):
        assert first < 1e-10
        assert second < 1e-10
        assert same


def other_graphs(layout: str) -> float:
    """Sizes change, evaluation comes between, a layer is frozen and thawed."""
    one, net = spread(layout)
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (one, net)]
    gaps = []
    for step, side in enumerate((12, 16, 10, 12)):
        results = []
        for each, optimizer in zip((one, net), optimizers, strict=True):
            each[3].requires_grad_(step != 1)
            each(batch(step, side)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            each.eval()
            with torch.no_grad():
                results.append(each(batch(50 + step, side)))
            each.train()
        gaps.append(float((results[0] - results[1]).norm() / results[0].norm()))
    return max(*gaps, gap(one, net.state_dict()))


@pytest.mark.parametrize("devices", [3, 4])
def test_other_sizes_modes_and_frozen_layers(devices: int) -> None:
    for far in run_on(devices, other_graphs, LAYOUTS[devices]):
        assert far < 1e-10


def refusals(layout: str) -> list[str]:
    _, net = spread(layout)
    weight = net[0].weight
    assert isinstance(weight, CutTensor)
    net(batch(0)).sum().backward()
    attempts: list[Callable[[], Any]] = [
        lambda: weight.reshape(-1),
        lambda: weight.grad @ weight.grad,
        lambda: torch.linalg.svd(weight),
        lambda: weight.sum(1),
        lambda: weight.T,
        lambda: weight[0],
        lambda: torch._foreach_max([weight]),
        lambda: torch.ones(8, 3, 3, 3).double().lerp_(weight, 0.5),
        lambda: torch._foreach_lerp_([torch.ones(8, 3, 3, 3).double()], [weight], 0.5),
        lambda: torch._foreach_add_([weight.detach()], [torch.ones(1, 3, 3, 3).double()]),
        lambda: torch.save(net[0].weight, io.BytesIO()),
        lambda: copy.deepcopy(net[0]),
        lambda: torch.save({"w": weight.detach()}, io.BytesIO()),
    ]
    return [refusal(UsageError, attempt) for attempt in attempts]


def test_what_needs_the_missing_elements_is_refused_by_name() -> None:
    for told in run_on(2, refusals, LAYOUTS[2]):
        assert all("0.weight is cut over the devices" in text for text in told), told


def one_sided(layout: str) -> str:
    _, net = spread(layout)
    device = net.links.device
    try:
        if device == 0:
            net.state_dict()
        net(batch(0))
    except Disagreement as error:
        return str(error)
    return ""


def test_a_state_dict_asked_of_one_device_is_an_error_not_a_hang() -> None:
    for told in run_on(2, one_sided, LAYOUTS[2]):
        assert "state_dict" in told


def held(layout: str) -> tuple[int, int]:
    one, net = spread(layout)
    return (
        sum(plain(p).numel() for p in net.parameters()),
        sum(p.numel() for p in one.parameters()),
    )


def test_a_device_holds_its_part_only() -> None:
    parts = run_on(2, held, LAYOUTS[2])
    assert all(mine < 0.62 * whole for mine, whole in parts)
    assert sum(mine for mine, _ in parts) < 1.1 * parts[0][1]
