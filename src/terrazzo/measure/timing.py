"""Timing: a trial run with the kernels of the runtime, forward and each way backward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from terrazzo.geometry import Box
from terrazzo.measure.accelerator import CPU, cache_bytes, give_back
from terrazzo.measure.stopwatch import Stopwatch
from terrazzo.measure.trials import Trial
from terrazzo.records.profile import Timing
from terrazzo.runtime.allocator import trim
from terrazzo.runtime.derivatives import Derivative, derivative
from terrazzo.runtime.kernels import Site
from terrazzo.runtime.operators import OVERWRITING, Operator, local_operator

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_KEPT_BYTES = 32 << 20
CACHE_BYTES, MOST_SEATS = 16 << 20, 12
LONG_FLOPS = 2 * 10**8
PERIOD = 65521
ELEMENT_BYTES, ALIGNED = 4, 16
JOINT = ("batch_norm", "group_norm", "instance_norm", "layer_norm", "normalize")
"""Operators whose gradients come out of one call."""


def keep_memory() -> None:
    """Lets the C library keep what is freed, as it comes to do by itself within a few steps.

    A loop over one call would otherwise give its result back to the system each time and pay for
    fresh pages, which a training step does only for blocks of more than 32 MiB. Only glibc.
    """
    _keep(2**31 - 1)


def free_memory() -> None:
    """Gives back what measuring has left, and keeps no more than training itself comes to do."""
    _keep(2 * LARGEST_KEPT_BYTES)
    trim()


def free_accelerator(torch_device: torch.device) -> None:
    """The same on a GPU, numbers to compute with among it; nothing for a CPU."""
    if torch_device.type != CPU.type:
        _numbers.cache_clear()
        give_back(torch_device)


def _keep(free_bytes: int) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
    mallopt(TRIM_THRESHOLD, free_bytes)


def time_trial(trial: Trial, watch: Stopwatch) -> Timing:
    """Raw seconds of one trial."""
    held = [read.box for read in trial.local.reads]
    operator = local_operator(trial.local, held, shape=trial.shape, box=trial.box)
    kind = trial.local.op.split(".")[1]
    seats = _Seats(trial, operator, watch.torch_device)
    if kind == "moments":
        return _time_moments(trial, seats, watch)
    forward_s = _time_forward(seats, watch)
    seats.fill()
    if not seats.flows:
        return Timing(trial.load, forward_s)
    parameters = list(trial.weights)
    maps = [place for place in range(len(trial.local.reads)) if place not in trial.weights]
    if kind in JOINT or not trial.load.is_product:
        return Timing(trial.load, forward_s, watch.seconds(seats.backward([*maps, *parameters])))
    input_s = watch.seconds(seats.backward(maps)) if maps else None
    weight_s = watch.seconds(seats.backward(parameters)) if parameters else None
    return Timing(trial.load, forward_s, input_s, weight_s)


class _Seats:
    """One trial laid out several times, taken in turn: no call finds its data in a cache.

    In a training step everything else passes between two calls of an operator. Only a long call
    has one seat, because it fills the caches by itself; on a GPU no call is long. As in a step,
    autograd has no part in an operator whose gradient is written out (``runtime/derivatives.py``).
    """

    def __init__(self, trial: Trial, operator: Operator, torch_device: torch.device) -> None:
        self.operator, self._numbers = operator, _numbers(torch_device)
        load = trial.load
        size = max(1, ELEMENT_BYTES * (load.reads + load.writes + load.weights))
        is_long = load.flops > LONG_FLOPS and torch_device.type == CPU.type
        count = 1 if is_long else max(1, min(MOST_SEATS, self._numbers.count_bytes // size))
        shapes = [read.box.shape for read in trial.local.reads]
        self.tensors = [
            [
                self._numbers.take(shape, dtype)
                for shape, dtype in zip(shapes, trial.dtypes, strict=True)
            ]
            for _ in range(count)
        ]
        self.results: list[tuple[Tensor, Any]] = []
        """Each with what was kept of it for the way back, if anything."""
        self._turn = 0
        self._on_cpu = torch_device.type == CPU.type
        self._written = self._derivative(range(len(shapes)))
        if self._written is not None:
            self.tensors = [[tensor.detach() for tensor in seat] for seat in self.tensors]

    def _derivative(self, places: Sequence[int]) -> Derivative | None:
        """The operator with gradients of some of its inputs, where a step does without autograd."""
        if not self._on_cpu:
            return None
        wanted = [place in places for place in range(len(self.tensors[0]))]
        return derivative(self.operator, wanted=wanted, late=())

    def next(self) -> int:
        self._turn = (self._turn + 1) % len(self.tensors)
        return self._turn

    def forward(self) -> None:
        """One call; as many results are kept as there are seats, for the memory they lie in."""
        seat = self.next()
        if len(self.results) == len(self.tensors):
            del self.results[0]
        # What it reads was just made by another operator, weights lay unused since the last step.
        tensors = [self.tensors[0][0], *self.tensors[seat][1:]]
        self.results.append(self._result(tensors))

    def fill(self) -> None:
        """A result for each seat, from its own tensors."""
        if len(self.tensors) > 1 or not self.results:
            self.results = [self._result(tensors) for tensors in self.tensors]
        self.gradient = torch.ones_like(self.results[0][0])

    def _watch(self, places: Sequence[int]) -> None:
        """Results whose gradient flows to these alone: a node of ours makes all that could flow."""
        for seat in self.tensors:
            for place, tensor in enumerate(seat):
                tensor.requires_grad_(place in places)
        self.results = [self._result(tensors) for tensors in self.tensors]

    @property
    def flows(self) -> bool:
        """Whether there is a way back."""
        return self._written is not None or self.results[0][0].requires_grad

    def _result(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any]:
        if self._written is None:
            result, kept = self.operator(tensors, self.site), None
        else:
            result, kept = self._written.forward(self.operator.ready(tensors))
        return (result if isinstance(result, Tensor) else result[0]), kept

    def site(self, shape: tuple[int, ...], box: Box) -> Site:
        return Site(shape, box, 0, 0, self._numbers.torch_device)

    def backward(self, places: Sequence[int]) -> Callable[[], object]:
        """The gradient of some of the tensors, as a call."""
        written = self._derivative(places)
        if written is None:
            self._watch(places)

        def call() -> object:
            seat = self.next()
            if written is not None:
                kept = self.results[seat][1]
                # Not in place, as in a step: numbers that shrink with every call take longer.
                return written.backward(None, self.gradient, kept, own=False)  # type: ignore[arg-type]
            inputs = [self.tensors[seat][place] for place in places]
            return torch.autograd.grad(
                self.results[seat][0], inputs, self.gradient, retain_graph=True, allow_unused=True
            )

        return call


def _time_forward(seats: _Seats, watch: Stopwatch) -> float:
    """An activation overwrites its input, as it does in a step wherever nobody else reads it."""
    operator = seats.operator
    if operator.op not in OVERWRITING or operator.prepare:
        return watch.seconds(seats.forward)
    own = [tensor.detach().clone() for tensor in seats.tensors[0]]
    writing = Operator(operator.op, operator.args, shape=operator.shape, box=operator.box)
    writing.overwrite()
    with torch.no_grad():
        return watch.seconds(lambda: writing(own, seats.site))


def _time_moments(trial: Trial, seats: _Seats, watch: Stopwatch) -> Timing:
    """Statistics: their gradient is added to a map in place, as the runtime does it."""
    maps = [tensors[0].detach() for tensors in seats.tensors]
    forward_s = watch.seconds(lambda: seats.operator([maps[0]], seats.site))
    grad = torch.zeros_like(maps[0])
    numbers = torch.full((maps[0].shape[1],), 1e-9, dtype=grad.dtype, device=grad.device)
    each = numbers.view(1, -1, 1, 1)
    backward_s = watch.seconds(lambda: grad.addcmul_(maps[seats.next()], each).add_(each))
    return Timing(trial.load, forward_s, backward_s)


def smaller(one: Timing, other: Timing) -> Timing:
    """Of two timings of one load the smaller figure in each direction."""
    return _of_two(one, other, min)


def between(one: Timing, other: Timing) -> Timing:
    """The mean of two timings of one load."""
    return _of_two(one, other, lambda a, b: (a + b) / 2)


def _of_two(one: Timing, other: Timing, choose: Callable[[float, float], float]) -> Timing:
    def chosen(a: float | None, b: float | None) -> float | None:
        return a if b is None else b if a is None else choose(a, b)

    return replace(
        one,
        forward_s=choose(one.forward_s, other.forward_s),
        backward_input_s=chosen(one.backward_input_s, other.backward_input_s),
        backward_weight_s=chosen(one.backward_weight_s, other.backward_weight_s),
    )


class _Numbers:
    """Random numbers, or a max pool would guess right where the next maximum is.

    They repeat, because drawing so many would take longer than computing with them, and are
    positive: variances are among what is read. Tensors lie in them one after the other.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.count_bytes = max(CACHE_BYTES, 2 * cache_bytes(torch_device))
        block = torch.rand(PERIOD, generator=torch.Generator().manual_seed(0)) + 0.5
        self._all = block.to(torch_device).repeat(self.count_bytes // ELEMENT_BYTES // PERIOD + 1)
        self._next = 0

    def take(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        count = prod(shape)
        if self._next + count > len(self._all):
            self._next = 0
        if count > len(self._all):
            numbers = self._all.repeat(-(-count // len(self._all)))[:count]
        else:
            numbers = self._all[self._next : self._next + count]
            self._next += -(-count // ALIGNED) * ALIGNED
        return numbers.view(shape).to(getattr(torch, dtype)).detach().requires_grad_()


@cache
def _numbers(torch_device: torch.device) -> _Numbers:
    return _Numbers(torch_device)
