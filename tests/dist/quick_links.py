"""A small model, and devices with slow processors and quick links: plans spread everything."""

from __future__ import annotations

import torch
from torch import nn

from terrazzo.planner.guess import Figures, guessed
from terrazzo.records.profile import Profile

SHAPE = (6, 3, 64, 64)


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
