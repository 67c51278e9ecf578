"""Models by name, as the command line and the benchmarks ask for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from terrazzo.errors import UsageError
from terrazzo.zoo.convnext import convnext_small_style
from terrazzo.zoo.densenet import densenet_small
from terrazzo.zoo.mobilenet import mobilenet_v2, mobilenet_v2_se
from terrazzo.zoo.resnet import resnet18, resnet50
from terrazzo.zoo.unet import unet
from terrazzo.zoo.vgg import vgg_small
from terrazzo.zoo.yolo import (
    darknet_small,
    yolov2,
    yolov2_front,
    yolov2_front_bare,
    yolov2_small,
)

_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "convnext": convnext_small_style,
    "darknet-small": darknet_small,
    "densenet": densenet_small,
    "mobilenetv2": mobilenet_v2,
    "mobilenetv2-se": mobilenet_v2_se,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "unet32": partial(unet, 32),
    "unet32-bilinear": partial(unet, 32, "bilinear"),
    "vgg": vgg_small,
    "yolov2": yolov2,
    "yolov2-front": yolov2_front,
    "yolov2-front-bare": yolov2_front_bare,
    "yolov2-small": yolov2_small,
}

NAMES = tuple(_BUILDERS)


def build(name: str) -> nn.Module:
    """A fresh model, with weights from torch's random numbers."""
    if name not in _BUILDERS:
        raise UsageError(f"no model {name!r} in the zoo; there are {', '.join(NAMES)}")
    return _BUILDERS[name]()
