"""A small VGG: plain convolutions without BatchNorm, then maps flattened into a classifier."""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS = (16, 32, 64, 128)


class VGG(nn.Module):
    def __init__(self, widths: tuple[int, ...], *, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for width in widths:
            for source in (inputs, width):
                layers += [nn.Conv2d(source, width, 3, padding=1), nn.ReLU(inplace=True)]
            layers.append(nn.MaxPool2d(2))
            inputs = width
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(3)
        self.head = nn.Sequential(
            nn.Linear(9 * inputs, 128),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(128, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(self.features(x)).flatten(1))
        return scores


def vgg_small(classes: int = 100) -> VGG:
    return VGG(WIDTHS, classes=classes)
