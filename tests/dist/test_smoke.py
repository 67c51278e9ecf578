"""The promise on one ordinary network."""

from __future__ import annotations

import pytest
import torch
from devices import run_on
from torch import nn

import terrazzo as tz


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def scene(layout: str, groups: str) -> tuple[bool, str, float]:
    model = small()
    torch.manual_seed(1)
    report = tz.check(model, (torch.randn(2, 3, 67, 93),), layout=layout, groups=groups)
    return report.ok, str(report), report.split_flops


@pytest.mark.parametrize("groups", ["each", "one", "2"])
@pytest.mark.parametrize(
    ("devices", "layout"), [(2, "auto"), (3, "tiles:5,1,3x1"), (4, "tiles:2x2")]
)
def test_same_numbers(devices: int, layout: str, groups: str) -> None:
    for ok, text, split in run_on(devices, scene, layout, groups):
        assert ok, text
        assert split >= 0.95
