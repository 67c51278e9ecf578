"""Take: each device takes its box of an input."""

from __future__ import annotations

import torch

from terrazzo.runtime.steps.step import Run
from terrazzo.schedule import Take


class TakeStep:
    def __init__(self, step: Take) -> None:
        self.step = step

    def forward(self, run: Run) -> None:
        given, box = run.given[self.step.source], run.box(self.step.target)
        if box.is_empty:
            run.held[self.step.target] = run.empty(self.step.target)
        else:
            run.held[self.step.target] = given.tensor[box.within(given.box).slices()]

    def backward(self, run: Run) -> None:
        """Parts add up into the whole gradient; they are summed over devices at the end."""
        source, target = self.step.source, self.step.target
        if target not in run.live:
            return
        grad = run.gradient(target)
        if source not in run.input_parts:
            run.input_parts[source] = torch.zeros(
                run.box(source).shape, dtype=grad.dtype, device=grad.device
            )
        box = run.box(target)
        if not box.is_empty:
            run.input_parts[source][box.slices()] += grad
