"""Passes: less memory, the same numbers, alone and on several devices."""

from __future__ import annotations

import copy

import pytest
import torch
from devices import run_on
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.graph.export import export
from terrazzo.planner.fitting import needed


class Hourglass(nn.Module):
    """Norms, a pool, a skip, both ways up, dropout: what passes compute again."""

    keeps_export = True

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=2, dilation=2))
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)
        self.last = nn.Conv2d(18, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.second(self.first(x))
        low = self.drop(torch.relu(self.norm(self.down(skip))))
        wide = nn.functional.interpolate(low, scale_factor=2, mode="bilinear")[:, :6]
        return self.last(torch.cat([skip, self.up(low), wide], 1))


def checked(groups: str, passes: int) -> tuple[bool, str]:
    torch.manual_seed(0)
    report = tz.check(Hourglass(), (torch.randn(2, 3, 68, 46),), groups=groups, passes=passes)
    return report.ok, str(report)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(("groups", "passes"), [("each", 1), ("one", 3), ("3", 5)])
def test_same_numbers(devices: int, groups: str, passes: int) -> None:
    for ok, text in run_on(devices, checked, groups, passes):
        assert ok, text


def large_strips(size: int) -> tuple[bool, str, int]:
    """Maps large enough that they really are cut into strips."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 5, 2, 2), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 4, 3, padding=1),
    )  # fmt: skip
    x = torch.randn(1, 3, size, size)
    net = tz.parallelize(copy.deepcopy(model).double(), (x.double(),), groups=2, passes=4)
    most = max(len(strips) for step in net.program.steps for strips in getattr(step, "strips", ()))
    report = tz.check(model, (x,), groups=2, passes=4)
    return report.ok, str(report), most


def test_large_maps_are_cut_into_strips() -> None:
    ((ok, text, most),) = run_on(1, large_strips, 417)
    assert ok, text
    assert most == 4


def fitted(share: float) -> tuple[bool, str, int, int]:
    """A plan made for a part of the memory: within it by its own count, and exact."""
    torch.manual_seed(0)
    model, example = Hourglass(), (torch.randn(1, 3, 128, 128),)
    graph = export(model, example).graph
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    plain = needed(graph, tz.plan(model, example, devices=devices)).total_bytes
    plan = tz.plan(model, example, devices=devices, memory=int(plain * share))
    report = tz.check(model, example, plan)
    assert any(group.passes for group in plan.groups)
    return report.ok, str(report), needed(graph, plan).total_bytes, int(plain * share)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_memory_limit_is_kept_and_changes_no_number(devices: int) -> None:
    for ok, text, size, limit in run_on(devices, fitted, 0.9):
        assert ok, text
        assert size <= limit


def frozen_start() -> list[float]:
    """The first layers of a group are frozen: they are computed again, but not trained."""
    torch.manual_seed(0)
    plain = Hourglass().double()
    plain.drop.p = 0.0
    for parameter in [*plain.first.parameters(), *plain.second.parameters()]:
        parameter.requires_grad_(False)
    net = tz.parallelize(copy.deepcopy(plain), (torch.randn(2, 3, 32, 32).double(),),
                         groups="one", passes=2)  # fmt: skip
    gaps = []
    for size in (32, 44):
        x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(size)).double()
        for model in (plain, net):
            model.zero_grad()
            model(x).square().sum().backward()
        ours = dict(net.named_parameters())
        trained = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert set(trained) == {n for n, p in ours.items() if p.grad is not None}
        floor = 1e-3 * sum(float(grad.norm()) ** 2 for grad in trained.values()) ** 0.5
        for name, grad in trained.items():
            gap = (grad - ours[name].grad).norm()  # type: ignore[operator]
            gaps.append(float(gap / grad.norm().clamp(min=floor)))
    return gaps


@pytest.mark.parametrize("devices", [1, 2])
def test_frozen_layers_and_other_sizes(devices: int) -> None:
    for gaps in run_on(devices, frozen_start):
        assert gaps
        assert max(gaps) < 1e-10
