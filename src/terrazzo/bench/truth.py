"""The truth of a case: plain PyTorch's gradients in float64, and how far float32 lies from them.

One run in float32 is one draw of a chaotic quantity: an activation near zero, or a tie in a pool,
falls to one side or the other with the last bit of a sum. So the noise is the largest distance of
several runs of plain PyTorch, which differ in nothing but rounding.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.bench import gradients
from terrazzo.bench.cases import Case
from terrazzo.bench.task import SEED, Task, gradients_of, loss_of

OTHER_KERNELS = "without oneDNN"
LEAST_RUNS = 4
NUDGES = 3
"""Runs whose images are moved by one unit in the last place: one at least, more if time allows."""
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Truth:
    """Gradients in float64, and how far those in float32 may lie from them by rounding alone."""

    gradients: dict[str, Tensor]
    noises: dict[str, float]
    """By what was done differently."""

    @property
    def noise(self) -> float:
        return max(self.noises.values())

    @classmethod
    def of(cls, case: Case) -> Truth:
        """Plain PyTorch, here, with all this machine's speed and memory."""
        began_s = time.monotonic()
        single = Task.make(case)
        double = Task(copy.deepcopy(single.model).double(), single.images.double())
        exact = _gradients(double)
        del double
        noises = {}
        for name, task in _variants(single):
            with _other_kernels() if name == OTHER_KERNELS else nullcontext():
                noises[name] = gradients.worst_gap(_gradients(task), exact)
            if len(noises) >= LEAST_RUNS and time.monotonic() - began_s > PATIENCE_S:
                break
        return cls(exact, noises)


class Truths:
    """Those found so far: the same step on other devices has the same."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int, int], Truth] = {}

    def of(self, case: Case) -> Truth:
        subject = (case.model, case.side, case.batch)
        if subject not in self._found:
            self._found = {subject: Truth.of(case)}  # the last one only: gradients are large
        return self._found[subject]


def _variants(task: Task) -> Iterator[tuple[str, Task]]:
    """The same step with other roundings; statistics of BatchNorm do not pass from one to it."""
    yield "as it is", _copied(task)
    yield OTHER_KERNELS, _copied(task)
    other = torch.channels_last
    model = copy.deepcopy(task.model).to(memory_format=other)  # type: ignore[call-overload]
    yield "channels last", Task(model, task.images.to(memory_format=other))
    source = torch.Generator().manual_seed(SEED)
    for number in range(NUDGES):
        up = torch.rand(task.images.shape, generator=source) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf)
        yield f"nudged {number + 1}", Task(_copied(task).model, task.images.nextafter(towards))


@contextmanager
def _other_kernels() -> Iterator[None]:
    """Not by torch's own ``flags``, which sets more than this and warns of it."""
    kernels = torch.backends.mkldnn
    was = kernels.enabled
    setattr(kernels, "enabled", False)  # noqa: B010 - torch's types know it as no plain value
    try:
        yield
    finally:
        setattr(kernels, "enabled", was)  # noqa: B010


def _copied(task: Task) -> Task:
    return Task(copy.deepcopy(task.model), task.images)


def _gradients(task: Task) -> dict[str, Tensor]:
    torch.autograd.backward(loss_of(task.model(task.images)))
    return gradients_of(task.model)
