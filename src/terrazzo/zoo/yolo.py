"""YOLOv2: Darknet-19, a pass-through from finer maps, and boxes predicted from five anchors.

    picture ─▶ fine (17 operators, 1/16) ─▶ pool ─▶ coarse (1/32) ─▶ neck ─┐
                        └─▶ skip ─▶ every 2x2 square becomes 4 channels ───┴─▶ cat ─▶ head

Each convolution carries BatchNorm and a leaky ReLU; only the last one is bare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from terrazzo.zoo.boxes import Anchors, decode
from terrazzo.zoo.yolo_loss import YoloLoss

__all__ = [
    "ANCHORS_SMALL",
    "ANCHORS_VOC",
    "Darknet",
    "DarknetClassifier",
    "Yolo",
    "YoloLoss",
    "darknet_small",
    "decode",
    "yolov2",
    "yolov2_front",
    "yolov2_front_bare",
    "yolov2_small",
]

ANCHORS_VOC: Anchors = (
    (1.3221, 1.73145),
    (3.19275, 4.00944),
    (5.05587, 8.09892),
    (9.47112, 4.84053),
    (11.2364, 10.0071),
)
ANCHORS_SMALL: Anchors = ((1.1, 1.1), (1.5, 2.3), (2.3, 1.5), (2.5, 2.5), (3.7, 3.7))

FULL = (1, 1, 3, 3, 5, 5)
"""Convolutions in each stage of Darknet-19; a stage halves the resolution and doubles the width."""
SMALL = (1, 1, 3, 3, 3)
SMALL_WIDTH = 8


class ConvNorm(nn.Sequential):
    """A convolution that keeps the size, BatchNorm, leaky ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.1, inplace=True),
        )


def _stage(inputs: int, width: int, depth: int) -> Iterator[nn.Module]:
    """3x3 convolutions at full width, with 1x1 ones at half width between them."""
    for position in range(depth):
        outputs, kernel = (width // 2, 1) if position % 2 else (width, 3)
        yield ConvNorm(inputs, outputs, kernel)
        inputs = outputs


def _stages(width: int, depths: Sequence[int]) -> Iterator[nn.Module]:
    inputs = 3
    for number, depth in enumerate(depths):
        if number:
            yield nn.MaxPool2d(2)
        yield from _stage(inputs, width << number, depth)
        inputs = width << number


class Darknet(nn.Module):
    """The backbone: gives its last maps but one, which are finer, and its last ones."""

    def __init__(self, width: int, depths: Sequence[int]) -> None:
        super().__init__()
        self.fine = nn.Sequential(*_stages(width, depths[:-1]))
        self.fine_width = width << (len(depths) - 2)
        self.coarse_width = 2 * self.fine_width
        last = _stage(self.fine_width, self.coarse_width, depths[-1])
        self.coarse = nn.Sequential(nn.MaxPool2d(2), *last)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(x)
        return fine, self.coarse(fine)


class DarknetClassifier(nn.Module):
    """The backbone under a classifier: what a detector's backbone is trained as first."""

    def __init__(self, backbone: Darknet, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Conv2d(backbone.coarse_width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        _, coarse = self.backbone(x)
        scores: Tensor = self.head(coarse).mean((2, 3))
        return scores


class Yolo(nn.Module):
    """The detector; sides of its input are multiples of ``stride``."""

    def __init__(self, backbone: Darknet, *, skip: int, anchors: Anchors, classes: int) -> None:
        super().__init__()
        self.anchors, self.classes = tuple(anchors), classes
        self.stride = 2 ** sum(isinstance(m, nn.MaxPool2d) for m in backbone.modules())
        width = backbone.coarse_width
        self.backbone = backbone
        self.neck = nn.Sequential(ConvNorm(width, width, 3), ConvNorm(width, width, 3))
        self.skip = nn.Sequential(ConvNorm(backbone.fine_width, skip, 1), nn.PixelUnshuffle(2))
        last = nn.Conv2d(width, len(anchors) * (5 + classes), 1)
        self.head = nn.Sequential(ConvNorm(width + 4 * skip, width, 3), last)
        # Nearly all slots are empty; a network that starts there need not learn it first.
        with torch.no_grad():
            assert last.bias is not None
            last.bias.view(len(anchors), -1)[:, 4] = -4.0

    def forward(self, x: Tensor) -> Tensor:
        fine, coarse = self.backbone(x)
        prediction: Tensor = self.head(torch.cat([self.skip(fine), self.neck(coarse)], 1))
        return prediction


def yolov2(classes: int = 20) -> Yolo:
    """The published network for inputs of 416x416 and other multiples of 32."""
    return Yolo(Darknet(32, FULL), skip=64, anchors=ANCHORS_VOC, classes=classes)


def yolov2_front() -> nn.Sequential:
    """The first 17 operators of YOLOv2: 13 convolutions and 4 max pools."""
    return Darknet(32, FULL).fine


def yolov2_front_bare() -> nn.Sequential:
    """The same with a bias in place of each norm, as after folding norms into convolutions."""
    front = yolov2_front()
    for layer in front:
        if isinstance(layer, ConvNorm):
            convolution = layer[0]
            assert isinstance(convolution, nn.Conv2d)
            layer[0] = nn.Conv2d(
                convolution.in_channels,
                convolution.out_channels,
                convolution.kernel_size[0],
                padding=convolution.kernel_size[0] // 2,
            )
            layer[1] = nn.Identity()
    return front


def yolov2_small(classes: int = 3) -> Yolo:
    """The same family for pictures of 96x96 to 160x160 (multiples of 16) on one slow core."""
    backbone = Darknet(SMALL_WIDTH, SMALL)
    return Yolo(backbone, skip=2 * SMALL_WIDTH, anchors=ANCHORS_SMALL, classes=classes)


def darknet_small(classes: int = 3) -> DarknetClassifier:
    """A classifier on the backbone of ``yolov2_small``."""
    return DarknetClassifier(Darknet(SMALL_WIDTH, SMALL), classes)
