"""A small DenseNet: every layer reads all earlier ones of its block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

GROWTH = 16
BOTTLENECK = 4
DEPTHS = (4, 6, 6)


def _norm_act_conv(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), conv]


class DenseLayer(nn.Module):
    """Adds ``GROWTH`` channels to what it was given."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        wide = BOTTLENECK * GROWTH
        self.body = nn.Sequential(
            *_norm_act_conv(inputs, wide, 1), *_norm_act_conv(wide, GROWTH, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class DenseNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], *, classes: int) -> None:
        super().__init__()
        width = 2 * GROWTH
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        for block, depth in enumerate(depths):
            if block:
                layers += [*_norm_act_conv(width, width // 2, 1), nn.AvgPool2d(2)]
                width //= 2
            for _ in range(depth):
                layers.append(DenseLayer(width))
                width += GROWTH
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(self.features(x)).flatten(1))
        return scores


def densenet_small(classes: int = 100) -> DenseNet:
    return DenseNet(DEPTHS, classes=classes)
