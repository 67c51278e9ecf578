"""A model of one convolution and whatever a function does with its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

X = torch.randn(2, 3, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Does(nn.Module):
    """A convolution, then whatever a function does with the result."""

    def __init__(self, act: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.act = act
        self.double()

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        return self.act(self, self.conv(x), *rest, **named)


def autocast_region(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.layer(x.float())
    return y.double() + x
