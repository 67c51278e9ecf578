"""Spread: what devices hold alike, used by boxes; the parts of its gradient are summed."""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.runtime.steps.step import Run
from terrazzo.schedule import Spread
from terrazzo.schedule.sums import Circle


class SpreadStep:
    """``circle`` are the devices that hold the same box of it; None: all of them."""

    def __init__(self, step: Spread, *, parameter: bool, circle: Circle | None = None) -> None:
        self.step, self.parameter, self.circle = step, parameter, circle

    def forward(self, run: Run) -> None:
        run.held[self.step.target] = run.held[self.step.source]

    def backward(self, run: Run) -> None:
        if self.step.target not in run.live:
            return
        if not self.parameter:
            run.add(self.step.source, self._summed(run))
        elif run.later:
            run.later.append(lambda: self._fill(run))
        else:
            self._fill(run)

    def _fill(self, run: Run) -> None:
        assert run.buckets is not None
        run.buckets.add(self.step.source, run.gradient(self.step.target), self.circle)

    def _summed(self, run: Run) -> Tensor:
        """The sum over devices; half precision is summed in float32."""
        own = self.step.target in run.exclusive
        part = run.gradient(self.step.target)
        if part.dtype in (torch.float32, torch.float64):
            part = part.contiguous() if own else part.contiguous().clone()
            return run.links.sum(part, meanwhile=run.catch_up)
        return run.links.sum(part.float(), meanwhile=run.catch_up).to(part.dtype)
