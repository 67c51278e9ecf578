"""Basics: what a device costs besides its operators: calls, copies, fresh memory, updates."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from terrazzo.measure.stopwatch import Stopwatch

CHAIN = 20
COPIED = 1 << 20
UPDATED = 1 << 18
FRESH_BYTES = 8 << 20


def calls_s(watch: Stopwatch) -> tuple[float, float]:
    """An operator on next to nothing: forward with autograd watching, and backward."""
    x = torch.zeros(4, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(CHAIN):
            y = y + 1.0
        return y

    result, gradient = forward(), torch.ones(4)
    ahead_s = watch.seconds(forward)
    back_s = watch.seconds(lambda: torch.autograd.grad(result, [x], gradient, retain_graph=True))
    return ahead_s / CHAIN, back_s / CHAIN


def copy_bytes_per_s(watch: Stopwatch) -> float:
    """Bytes of a tensor copied in a (raw) second."""
    source, target = torch.zeros(COPIED), torch.zeros(COPIED)
    return 4 * COPIED / watch.seconds(lambda: target.copy_(source))


def fresh_s_per_byte() -> float:
    """Raw seconds until a byte of memory from the system is there, with all others of its page."""
    with mmap.mmap(-1, FRESH_BYTES) as memory:
        begin_s = time.thread_time()
        for page in range(0, FRESH_BYTES, mmap.PAGESIZE):
            memory[page] = 1
        touched_s = time.thread_time() - begin_s
        begin_s = time.thread_time()
        for page in range(0, FRESH_BYTES, mmap.PAGESIZE):
            memory[page] = 2
        again_s = time.thread_time() - begin_s
    return max(0.0, touched_s - again_s) / FRESH_BYTES


def update_s_per_element(watch: Stopwatch, *, elements: int = UPDATED) -> Mapping[str, float]:
    """An optimiser's step on one tensor of weights, by element."""
    found = {}
    for name in ("sgd", "momentum", "adam"):
        weight = nn.Parameter(torch.zeros(elements))
        weight.grad = torch.full((elements,), 1e-3)
        optimizer = _optimizer(name, [weight])
        found[name] = watch.seconds(optimizer.step) / elements
    return found


def _optimizer(name: str, weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(weights, lr=1e-6)
    return torch.optim.SGD(weights, lr=1e-6, momentum=0.9 if name == "momentum" else 0.0)
