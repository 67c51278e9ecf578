"""MobileNetV2, plain and with squeeze-and-excite in every block."""

from __future__ import annotations

from torch import Tensor, nn

STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, width, blocks, stride of the first block."""


class ConvNorm(nn.Sequential):
    """A convolution, BatchNorm, ReLU6."""

    def __init__(
        self, inputs: int, outputs: int, *, kernel: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class SqueezeExcite(nn.Module):
    """Scales each channel by what the whole map says about it."""

    def __init__(self, width: int, *, squeeze: int = 4) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Sequential(
            nn.Conv2d(width, width // squeeze, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width // squeeze, width, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = x * self.gate(self.pool(x))
        return scaled


class InvertedResidual(nn.Module):
    """Widen, filter each channel alone, narrow; added to the input where shapes allow."""

    def __init__(
        self, inputs: int, outputs: int, *, stride: int, expansion: int, excite: bool
    ) -> None:
        super().__init__()
        wide = inputs * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [ConvNorm(inputs, wide)]
        layers.append(ConvNorm(wide, wide, kernel=3, stride=stride, groups=wide))
        if excite:
            layers.append(SqueezeExcite(wide))
        layers += [nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.body = nn.Sequential(*layers)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return x + result if self.is_residual else result


class MobileNetV2(nn.Module):
    def __init__(self, *, classes: int, excite: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvNorm(3, 32, kernel=3, stride=2)]
        inputs = 32
        for expansion, width, blocks, first in STAGES:
            for position in range(blocks):
                stride = 1 if position else first
                layers.append(
                    InvertedResidual(
                        inputs, width, stride=stride, expansion=expansion, excite=excite
                    )
                )
                inputs = width
        layers.append(ConvNorm(inputs, 1280))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(self.features(x)).flatten(1))
        return scores


def mobilenet_v2(classes: int = 1000) -> MobileNetV2:
    return MobileNetV2(classes=classes, excite=False)


def mobilenet_v2_se(classes: int = 1000) -> MobileNetV2:
    return MobileNetV2(classes=classes, excite=True)
