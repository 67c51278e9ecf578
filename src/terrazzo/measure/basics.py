"""Basics: what a device costs besides its operators: calls, copies, fresh memory, updates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from terrazzo.measure.accelerator import CPU
from terrazzo.measure.stopwatch import Stopwatch
from terrazzo.runtime.allocator import trim

CHAIN = 20
COPIED = 1 << 20
UPDATED = 1 << 18
FRESH, FRESH_BLOCKS = 1 << 20, 16
"""Bytes of a block, and blocks."""
LARGER = 32
"""So many times as much is copied and updated on a GPU: with less, only launches would be seen."""
PAUSE_S, BURST_S, PAUSES = 0.2, 0.1, 3
"""How long a device waits, how long is looked at what it then makes up for, and how often."""


def calls_s(watch: Stopwatch) -> tuple[float, float]:
    """An operator on next to nothing: forward with autograd watching, and backward."""
    x = torch.zeros(4, device=watch.torch_device, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(CHAIN):
            y = y + 1.0
        return y

    result, gradient = forward(), torch.ones_like(x)
    ahead_s = watch.seconds(forward)
    back_s = watch.seconds(lambda: torch.autograd.grad(result, [x], gradient, retain_graph=True))
    return ahead_s / CHAIN, back_s / CHAIN


def copy_bytes_per_s(watch: Stopwatch) -> float:
    """Bytes of a tensor copied in a (raw) second."""
    source = torch.zeros(COPIED * _larger(watch), device=watch.torch_device)
    target = torch.zeros_like(source)
    return source.nbytes / watch.seconds(lambda: target.copy_(source))


def fresh_s_per_byte() -> float:
    """Raw seconds that a byte takes more where its memory is taken from the system and given back.

    In blocks as strips have them, from the C library: it decides how large the pages are.
    """
    trim()
    begin_s = time.thread_time()
    blocks = [torch.empty(FRESH // 4).zero_() for _ in range(FRESH_BLOCKS)]
    taken_s = time.thread_time() - begin_s
    begin_s = time.thread_time()
    for block in blocks:
        block.zero_()
    again_s = time.thread_time() - begin_s
    begin_s = time.thread_time()
    del blocks, block
    trim()
    returned_s = time.thread_time() - begin_s
    return max(0.0, taken_s - again_s + returned_s) / (FRESH * FRESH_BLOCKS)


def update_s_per_element(watch: Stopwatch, *, elements: int = UPDATED) -> Mapping[str, float]:
    """An optimiser's step on one tensor of weights, by element."""
    found, elements = {}, elements * _larger(watch)
    for name in ("sgd", "momentum", "adam"):
        weight = nn.Parameter(torch.zeros(elements, device=watch.torch_device))
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer = _optimizer(name, [weight])
        found[name] = watch.seconds(optimizer.step) / elements
    return found


def _larger(watch: Stopwatch) -> int:
    return 1 if watch.torch_device.type == CPU.type else LARGER


def saved_s(seconds_per_cpu_s: float) -> float:
    """Seconds of computing that a device does at once after it has waited for a while.

    Under a quota a device that waits keeps a turn or two for later; a core of its own keeps none.
    Waits up to so long cost such a device nothing.
    """
    left, right, found = torch.zeros(64, 64), torch.zeros(64, 64), []
    for _ in range(PAUSES):
        time.sleep(PAUSE_S)
        begin_s, cpu_s = time.perf_counter(), time.thread_time()
        while (elapsed_s := time.perf_counter() - begin_s) < BURST_S:
            left @ right
        found.append((time.thread_time() - cpu_s) * seconds_per_cpu_s - elapsed_s)
    return min(max(0.0, statistics.median(found)), PAUSE_S)


def _optimizer(name: str, weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(weights, lr=1e-6)
    return torch.optim.SGD(weights, lr=1e-6, momentum=0.9 if name == "momentum" else 0.0)
