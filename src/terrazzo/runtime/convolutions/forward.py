"""Convolutions themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrazzo.graph.rules.windows import pair
from terrazzo.runtime.convolutions import winograd
from terrazzo.runtime.convolutions.pointwise import gaps_of


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
) -> Tensor:
    """``aten.conv2d``, for who sees to gradients himself."""
    stride, padding, dilation = pair(stride), pair(padding), pair(dilation)
    if by_winograd(x, weight, stride, padding, dilation, groups):
        return winograd.conv2d(x, weight, bias, padding)
    gaps = gaps_of(x, weight, dilation)
    return torch.conv2d(x, weight, bias, stride, padding, gaps, groups)


def by_winograd(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    """Whether a convolution goes that way."""
    if not winograd.suits(x, weight, stride=stride, dilation=dilation, groups=groups):
        return False
    if max(padding) > 2:
        return False
    height, width = (extent + 2 * pad - 2 for extent, pad in zip(x.shape[2:], padding, strict=True))
    return winograd.pays((x.shape[0], weight.shape[0], height, width), weight, winograd.FORWARD)
