"""U-Net: down four times, up four times, each level handed across."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from terrazzo.errors import UsageError

LEVELS = 4


class DoubleConv(nn.Sequential):
    """Twice a 3x3 convolution, BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for width in (inputs, outputs):
            conv = nn.Conv2d(width, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        super().__init__(*layers)


def _enlarge(width: int, up: str) -> nn.Module:
    """Twice the size, half the channels."""
    if up == "transposed":
        return nn.ConvTranspose2d(width, width // 2, 2, 2)
    if up == "bilinear":
        smooth = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        return nn.Sequential(smooth, nn.Conv2d(width, width // 2, 1))
    raise UsageError(f'up={up!r}: say "transposed" or "bilinear"')


class UNet(nn.Module):
    """Sides of the input are multiples of 16."""

    def __init__(self, *, base: int, up: str, classes: int) -> None:
        super().__init__()
        widths = [base << level for level in range(LEVELS + 1)]
        pairs = list(pairwise(widths))
        self.first = DoubleConv(3, base)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(DoubleConv(narrow, wide) for narrow, wide in pairs)
        self.enlarge = nn.ModuleList(_enlarge(wide, up) for _, wide in reversed(pairs))
        self.up = nn.ModuleList(DoubleConv(wide, narrow) for narrow, wide in reversed(pairs))
        self.head = nn.Conv2d(base, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.first(x)]
        for down in self.down:
            levels.append(down(self.pool(levels[-1])))
        x = levels.pop()
        for enlarge, up in zip(self.enlarge, self.up, strict=True):
            x = up(torch.cat([levels.pop(), enlarge(x)], 1))
        scores: Tensor = self.head(x)
        return scores


def unet(base: int = 32, up: str = "transposed", *, classes: int = 4) -> UNet:
    """``base`` is the width at full size; ``up`` is "transposed" or "bilinear"."""
    return UNet(base=base, up=up, classes=classes)
