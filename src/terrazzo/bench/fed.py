"""What a device holds of a batch, without a feed: its part by the plan that is."""

from __future__ import annotations

from torch import Tensor

from terrazzo.runtime.net import Net
from terrazzo.runtime.part import Part


def fed(net: Net, images: Tensor) -> Part:
    """As ``tz.feed`` would leave it with this device; the rest is not kept."""
    shape = tuple(images.shape)
    (boxes,) = net.boxes([shape])
    box = boxes[net.links.device]
    return Part(images[box.slices()].clone(), box, shape)
