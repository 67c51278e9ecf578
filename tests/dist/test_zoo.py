"""The promise on every model of the zoo, and no hiding: nearly all of the work runs split."""

from __future__ import annotations

import pytest
import torch
from devices import run_on

import terrazzo as tz
from terrazzo import zoo
from terrazzo.zoo.yolo import ANCHORS_VOC, FULL, Darknet, Yolo

CASES = {
    "convnext": (3, (2, 3, 96, 64)),
    "darknet-small": (3, (2, 3, 64, 48)),
    "densenet": (3, (2, 3, 97, 65)),
    "mobilenetv2": (3, (2, 3, 96, 64)),
    "mobilenetv2-se": (2, (2, 3, 128, 96)),
    "resnet18": (2, (2, 3, 97, 65)),
    "resnet50": (2, (2, 3, 97, 65)),
    "unet32": (3, (2, 3, 48, 32)),
    "unet32-bilinear": (2, (2, 3, 48, 32)),
    "vgg": (3, (2, 3, 97, 65)),
    "yolov2": (2, (1, 3, 96, 64)),
    "yolov2-front": (3, (1, 3, 97, 65)),
    "yolov2-front-bare": (2, (1, 3, 97, 65)),
    "yolov2-small": (2, (2, 3, 96, 64)),
}


# Fifty million weights take longer than all layers that use them, so these have fewer channels.
NARROW = {"yolov2": lambda: Yolo(Darknet(4, FULL), skip=8, anchors=ANCHORS_VOC, classes=20)}


def promise(name: str, shape: tuple[int, ...]) -> tuple[bool, str, float, float]:
    torch.manual_seed(0)
    model = NARROW[name]() if name in NARROW else zoo.build(name)
    report = tz.check(model, (torch.randn(shape),), groups="each")
    return report.ok, str(report), report.split_flops, report.split_bytes


def test_every_model_has_a_case() -> None:
    assert set(CASES) == set(zoo.NAMES)


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: CASES[name][0]))
def test_same_numbers(name: str) -> None:
    devices, shape = CASES[name]
    for ok, text, split_flops, split_bytes in run_on(devices, promise, name, shape):
        assert ok, text
        assert split_flops >= 0.95, text
        assert split_bytes >= 0.95, text
