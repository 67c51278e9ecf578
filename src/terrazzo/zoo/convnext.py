"""A small network in the style of ConvNeXt: no BatchNorm, large depthwise windows, random depth."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DEPTHS = (2, 2, 4, 2)
WIDTH = 32
SCALE = 1e-2
"""What a block adds at first; ConvNeXt's own 1e-6 would hide most of a mistake in it."""
DROP = 0.1


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of maps (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = super().forward(x.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2)


class RandomDepth(nn.Module):
    """In training leaves a block out, for each picture with probability ``drop``."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop == 0:
            return x
        keep = 1 - self.drop
        mask = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device)
        return x * mask.bernoulli_(keep).div_(keep)


class Block(nn.Module):
    """A depthwise 7x7 window, then two linear layers at every pixel."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.window = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mix = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), SCALE))
        self.drop = RandomDepth(drop)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.window(x).permute(0, 2, 3, 1))
        y = (self.scale * self.mix(y)).permute(0, 3, 1, 2)
        added: Tensor = x + self.drop(y)
        return added


class ConvNeXt(nn.Module):
    def __init__(self, depths: tuple[int, ...], *, width: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6)]
        done, total = 0, sum(depths)
        for stage, depth in enumerate(depths):
            if stage:
                layers += [ChannelNorm(width, eps=1e-6), nn.Conv2d(width, 2 * width, 2, 2)]
                width *= 2
            for _ in range(depth):
                layers.append(Block(width, DROP * done / (total - 1)))
                done += 1
        self.features = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.features(x).mean((2, 3))))
        return scores


def convnext_small_style(classes: int = 100) -> ConvNeXt:
    return ConvNeXt(DEPTHS, width=WIDTH, classes=classes)
