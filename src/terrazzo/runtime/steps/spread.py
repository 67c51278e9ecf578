"""Spread: what devices hold alike, used by boxes; the parts of its gradient are summed."""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.runtime.gradients import Circle
from terrazzo.runtime.links import Links
from terrazzo.runtime.steps.step import Run
from terrazzo.schedule import Spread


class SpreadStep:
    """``circle`` are the devices that hold the same box of it; None: all of them."""

    def __init__(self, step: Spread, *, parameter: bool, circle: Circle = None) -> None:
        self.step, self.parameter, self.circle = step, parameter, circle

    def forward(self, run: Run) -> None:
        run.held[self.step.target] = run.held[self.step.source]

    def backward(self, run: Run) -> None:
        if self.step.target not in run.live:
            return
        part = run.gradient(self.step.target)
        if self.parameter:
            assert run.buckets is not None
            run.buckets.add(self.step.source, part, self.circle)
        else:
            run.add(self.step.source, summed(part, run.links))


def summed(part: Tensor, links: Links) -> Tensor:
    """The sum over devices; half precision is summed in float32."""
    if part.dtype in (torch.float32, torch.float64):
        return links.sum(part.contiguous().clone())
    return links.sum(part.float()).to(part.dtype)
