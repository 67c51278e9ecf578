"""The architectures of everyday life, small enough for tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from blocks import SqueezeExcite


def conv_norm(inner: int, outer: int, kernel: int = 3, *, stride: int = 1) -> nn.Sequential:
    """Convolution, norm, activation: what most networks are made of."""
    return nn.Sequential(
        nn.Conv2d(inner, outer, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outer),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(inner, outer, stride=stride)
        self.second = nn.Sequential(nn.Conv2d(outer, outer, 3, 1, 1), nn.BatchNorm2d(outer))
        plain = stride == 1 and inner == outer
        self.skip = nn.Identity() if plain else nn.Conv2d(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.skip(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        conv_norm(3, 8, 7, stride=2), nn.MaxPool2d(3, 2, 1), Residual(8, 8, 1), Residual(8, 12, 2),
        Residual(12, 12, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


class UNet(nn.Module):
    """Down twice and up again; sizes that do not divide are met by padding or resizing."""

    def __init__(self, *, bilinear: bool) -> None:
        super().__init__()
        self.bilinear = bilinear
        self.down = nn.ModuleList([conv_norm(3, 6), conv_norm(6, 8), conv_norm(8, 10)])
        self.up = nn.ModuleList(
            nn.Identity() if bilinear else nn.ConvTranspose2d(c, c, 2, 2) for c in (10, 8)
        )
        self.join = nn.ModuleList([conv_norm(18, 8), conv_norm(14, 6)])
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for layer in self.down:
            x = layer(F.max_pool2d(x, 2) if maps else x)
            maps.append(x)
        for up, join, skip in zip(self.up, self.join, reversed(maps[:-1]), strict=True):
            if self.bilinear:
                x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=True)
            else:
                x = up(x)
                x = F.pad(x, (0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2]))
            x = join(torch.cat([skip, x], 1))
        return self.head(x)


class Dense(nn.Module):
    def __init__(self, inner: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(inner + i * growth), nn.ReLU(),
                          nn.Conv2d(inner + i * growth, growth, 3, padding=1))
            for i in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        maps = [x]
        for layer in self.layers:
            maps.append(layer(torch.cat(maps, 1)))
        return torch.cat(maps, 1)


def densenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), Dense(6, 3, 4), conv_norm(18, 8, 1), nn.AvgPool2d(2),
        Dense(8, 2, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


class Inverted(nn.Module):
    """Expand, depthwise, squeeze-excite, project."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        wide = 3 * inner
        self.expand = nn.Sequential(nn.Conv2d(inner, wide, 1), nn.BatchNorm2d(wide), nn.Hardswish())
        self.depth = nn.Conv2d(wide, wide, 5, stride, 2, groups=wide)
        self.excite = SqueezeExcite(wide, linear=stride == 1)
        self.project = nn.Sequential(nn.Conv2d(wide, outer, 1), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.excite(F.relu6(self.depth(self.expand(x)))))
        return y + x if y.shape == x.shape else y


def mobilenet() -> nn.Module:
    return nn.Sequential(
        conv_norm(3, 6, stride=2), Inverted(6, 6, 1), Inverted(6, 8, 2), Inverted(8, 8, 1),
        nn.Conv2d(8, 20, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(20, 10), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(10, 5),
    )  # fmt: skip


class Next(nn.Module):
    """Depthwise 7x7, then a small perceptron on channels, scaled and sometimes dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.depth(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * self.scale
        return x + y * x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.8).div_(0.8)


class ChannelNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 4), ChannelNorm(8), Next(8), Next(8), ChannelNorm(8),
        nn.Conv2d(8, 12, 2, 2), Next(12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(12),
        nn.Linear(12, 5),
    )  # fmt: skip


def vgg() -> nn.Module:
    return nn.Sequential(
        conv_norm(3, 8), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 12, 3, padding=1),
        nn.AdaptiveAvgPool2d((3, 3)), nn.Flatten(), nn.Linear(108, 16), nn.ReLU(), nn.Dropout(),
        nn.Linear(16, 5),
    )  # fmt: skip


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "resnet": resnet,
    "unet transposed": lambda: UNet(bilinear=False),
    "unet bilinear": lambda: UNet(bilinear=True),
    "densenet": densenet,
    "mobilenet": mobilenet,
    "convnext": convnext,
    "vgg": vgg,
}
