"""A model for two emulated devices: small, with the operators that go wrong most easily."""

from __future__ import annotations

from torch import nn


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, 2, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
