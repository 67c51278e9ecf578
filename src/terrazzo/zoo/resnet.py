"""Residual networks: the 18-layer one of basic blocks and the 50-layer one of bottlenecks."""

from __future__ import annotations

from torch import Tensor, nn


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """A residual block: ``shape`` lists (width, kernel) of its convolutions."""

    def __init__(self, inputs: int, shape: list[tuple[int, int]], stride: int) -> None:
        super().__init__()
        strided = next(i for i, (_, kernel) in enumerate(shape) if kernel == 3)
        layers: list[nn.Module] = []
        width = inputs
        for position, (outputs, kernel) in enumerate(shape):
            step = stride if position == strided else 1
            layers += [*_conv_norm(width, outputs, kernel, step), nn.ReLU(inplace=True)]
            width = outputs
        self.body = nn.Sequential(*layers[:-1])
        changes = stride != 1 or width != inputs
        self.skip = _conv_norm(inputs, width, 1, stride) if changes else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.skip(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Stem, four stages that halve the resolution, global pool, classifier."""

    def __init__(self, depths: tuple[int, ...], *, bottleneck: bool, classes: int = 1000) -> None:
        super().__init__()
        stem = [*_conv_norm(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        self.stem = nn.Sequential(*stem)
        width, stages = 64, []
        for stage, depth in enumerate(depths):
            narrow = 64 << stage
            shape = [(narrow, 1), (narrow, 3), (narrow * 4, 1)] if bottleneck else [(narrow, 3)] * 2
            blocks = []
            for position in range(depth):
                stride = 2 if stage and not position else 1
                blocks.append(Block(width, shape, stride))
                width = shape[-1][0]
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.stages(self.stem(x))).flatten(1))  # type: ignore[no-any-return]


def resnet18(classes: int = 1000) -> ResNet:
    return ResNet((2, 2, 2, 2), bottleneck=False, classes=classes)


def resnet50(classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 6, 3), bottleneck=True, classes=classes)
