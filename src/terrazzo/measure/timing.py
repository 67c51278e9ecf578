"""Timing: a trial run with the kernels of the runtime, forward and each way backward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod

import torch
from torch import Tensor

from terrazzo.geometry import Box
from terrazzo.measure.stopwatch import Stopwatch
from terrazzo.measure.trials import Trial
from terrazzo.records.profile import Timing
from terrazzo.runtime.kernels import Site
from terrazzo.runtime.operators import OVERWRITING, Operator, local_operator

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_KEPT_BYTES = 32 << 20
PERIOD = 65521
JOINT = ("batch_norm", "group_norm", "instance_norm", "layer_norm", "normalize")
"""Operators whose gradients come out of one call."""


def keep_memory() -> None:
    """Lets the C library keep what is freed, as it comes to do by itself within a few steps.

    A loop over one call would otherwise give its result back to the system each time and pay for
    fresh pages, which a training step does only for blocks of more than 32 MiB. Only glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    mallopt(TRIM_THRESHOLD, 2**31 - 1)


def time_trial(trial: Trial, watch: Stopwatch) -> Timing:
    """Raw seconds of one trial."""
    tensors = [
        _tensor(read.box.shape, dtype)
        for read, dtype in zip(trial.local.reads, trial.dtypes, strict=True)
    ]
    held = [read.box for read in trial.local.reads]
    operator = local_operator(trial.local, held, shape=trial.shape, box=trial.box)
    kind = trial.local.op.split(".")[1]
    if kind == "moments":
        return _time_moments(trial, operator, tensors[0], watch)
    made: list[Tensor] = []
    forward_s = _time_forward(operator, tensors, watch, made)
    result = made[-1] if made else _main(operator(tensors, _site))
    if not result.requires_grad:
        return Timing(trial.load, forward_s)
    gradient = torch.ones_like(result)

    def backward(inputs: list[Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(
            result, inputs, gradient, retain_graph=True, allow_unused=True
        )

    parameters = [tensors[place] for place in trial.weights]
    maps = [tensor for place, tensor in enumerate(tensors) if place not in trial.weights]
    if kind in JOINT or not trial.load.is_product:
        return Timing(trial.load, forward_s, watch.seconds(backward([*maps, *parameters])))
    input_s = watch.seconds(backward(maps)) if maps else None
    weight_s = watch.seconds(backward(parameters)) if parameters else None
    return Timing(trial.load, forward_s, input_s, weight_s)


def _time_forward(
    operator: Operator, tensors: list[Tensor], watch: Stopwatch, made: list[Tensor]
) -> float:
    """Leaves its last result in ``made``: on a slow device another call would be dear.

    An activation overwrites its input, as it does in a step wherever nobody else reads it.
    """
    if operator.op not in OVERWRITING or operator.prepare:

        def call() -> None:
            made.clear()  # before the next one is made, so that it gets the same memory
            made.append(_main(operator(tensors, _site)))

        return watch.seconds(call)
    own = [tensor.detach() for tensor in tensors]
    writing = Operator(operator.op, operator.args, shape=operator.shape, box=operator.box)
    writing.overwrite()
    with torch.no_grad():
        return watch.seconds(lambda: writing(own, _site))


def _time_moments(trial: Trial, operator: Operator, x: Tensor, watch: Stopwatch) -> Timing:
    """Statistics: their gradient is added to a map in place, as the runtime does it."""
    x = x.detach()
    forward_s = watch.seconds(lambda: operator([x], _site))
    grad, shape = torch.zeros_like(x), (1, -1, 1, 1)
    slope, level = (torch.full((x.shape[1],), 1e-9, dtype=x.dtype).view(shape) for _ in range(2))
    backward_s = watch.seconds(lambda: grad.addcmul_(x, slope).add_(level))
    return Timing(trial.load, forward_s, backward_s)


def stretched(timing: Timing, factor: float) -> Timing:
    """Raw seconds as seconds of the device."""

    def longer(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * factor

    return replace(
        timing,
        forward_s=timing.forward_s * factor,
        backward_input_s=longer(timing.backward_input_s),
        backward_weight_s=longer(timing.backward_weight_s),
    )


def smaller(one: Timing, other: Timing) -> Timing:
    """Of two timings of one load the smaller figure in each direction."""

    def least(a: float | None, b: float | None) -> float | None:
        return a if b is None else b if a is None else min(a, b)

    return replace(
        one,
        forward_s=min(one.forward_s, other.forward_s),
        backward_input_s=least(one.backward_input_s, other.backward_input_s),
        backward_weight_s=least(one.backward_weight_s, other.backward_weight_s),
    )


def _tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Random numbers, or a max pool would guess right where the next maximum is.

    They repeat, because drawing so many would take longer than computing with them, and are
    positive: variances are among what is read.
    """
    count, block = prod(shape), _drawn()
    numbers = block.repeat(-(-count // len(block)))[:count].view(shape)
    return numbers.to(getattr(torch, dtype)).detach().requires_grad_()


@cache
def _drawn() -> Tensor:
    return torch.rand(PERIOD, generator=torch.Generator().manual_seed(0)) + 0.5


def _main(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _site(shape: tuple[int, ...], box: Box) -> Site:
    return Site(shape, box, 0, 0, torch.device("cpu"))
