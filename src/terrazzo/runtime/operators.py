"""One node, ready to run on this device: what to slice, pad, call and crop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from terrazzo.geometry import Box, Span
from terrazzo.graph.rules import Local
from terrazzo.records import Argument, Dtype, Ref
from terrazzo.runtime.kernels import DRAWS, Site, device_argument, kernel
from terrazzo.runtime.norms import NORMS

Draw = Callable[[tuple[int, ...], Box], Site]
"""Makes the site of an operator: net knows seed and step, the operator its shape and box."""


OVERWRITING = {
    "aten.relu.default": "aten.relu_.default",
    "aten.leaky_relu.default": "aten.leaky_relu_.default",
}
"""Activations whose gradient can be had from their result."""


class Operator:
    """A call with its arguments in place; tensors are put in when it runs."""

    def __init__(
        self,
        op: str,
        args: Sequence[Argument],
        *,
        prepare: Sequence[tuple[tuple[slice, ...] | None, tuple[int, ...] | None]] = (),
        crop: tuple[Span, ...] | None = None,
        fill: float = 0.0,
        shape: tuple[int, ...] = (),
        box: Box | None = None,
    ) -> None:
        self.op, self.args = op, tuple(_constant(argument) for argument in args)
        self.prepare, self.fill = prepare, fill
        self.crop = tuple(slice(low, high) for low, high in crop or ())
        self.keeps = tuple(high if low == 0 else -1 for low, high in crop or ())
        self.shape, self.box = shape, box or Box.whole(shape)
        self.draws = op in DRAWS
        self.device_at = device_argument(op)
        self.call: Callable[..., Any] = _function(op)
        self.may_overwrite = False
        """Whether nobody reads its first input again, nor a gradient."""
        self._slots = [i for i, argument in enumerate(self.args) if isinstance(argument, Ref)]
        self._nested = any(isinstance(a, tuple) and _refers(a) for a in self.args)
        """Whether a tensor stands inside of a list, as in cat."""

    def overwrite(self) -> None:
        """Makes the call reuse its input's memory, where the operator has such a form."""
        self.may_overwrite = not self.prepare
        slope = self.args[1] if self.op == "aten.leaky_relu.default" else 0
        if not self.prepare and self.op in OVERWRITING and slope >= 0:
            self.call = kernel(OVERWRITING[self.op])

    def ready(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors as the call takes them: sliced to what it reads, padded at the border."""
        if not self.prepare:
            return tensors
        return [
            _prepared(tensor, slices, pad, self.fill)
            for tensor, (slices, pad) in zip(tensors, self.prepare, strict=True)
        ]

    def __call__(self, tensors: Sequence[Tensor], draw: Draw) -> Any:
        args = self._filled(self.ready(tensors))
        site = (draw(self.shape, self.box),) if self.draws else ()
        if self.device_at is not None:  # a graph does not say where: it serves CPU and GPU
            args[self.device_at] = draw(self.shape, self.box).device
        return self.cropped(self.call(*site, *args))

    def _filled(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments with tensors where references stood."""
        if self._nested:
            filled: list[Any] = _filled(self.args, iter(tensors))
            return filled
        arguments: list[Any] = [*self.args]
        for slot, tensor in zip(self._slots, tensors, strict=False):  # a bias may be left out
            arguments[slot] = tensor
        return arguments

    def cropped(self, result: Any) -> Any:
        """The part of a result that was asked for; a slice of everything is not free."""
        return result[self.crop] if self.crop and result.shape != self.keeps else result


def _function(op: str) -> Callable[..., Any]:
    if op in DRAWS:
        return DRAWS[op]
    return NORMS[op] if op in NORMS else kernel(op)


def whole_operator(op: str, args: Sequence[Argument], shape: tuple[int, ...]) -> Operator:
    """A node as exported."""
    return Operator(op, args, shape=shape)


def local_operator(
    local: Local, held: Sequence[Box], *, shape: tuple[int, ...], box: Box
) -> Operator:
    """A node on one box, reading from tensors that hold the boxes ``held``."""
    prepare = tuple(
        (
            None if read.box == have else read.box.within(have).slices(),
            _padding(read.pad),
        )
        for read, have in zip(local.reads, held, strict=True)
    )
    if all(slices is None and pad is None for slices, pad in prepare):
        prepare = ()
    return Operator(
        local.op,
        local.args,
        prepare=prepare,
        crop=local.crop,
        fill=local.fill,
        shape=shape,
        box=box,
    )


def _padding(pads: Sequence[Span]) -> tuple[int, ...] | None:
    """Padding in the order torch wants: last dimension first; None when there is none."""
    if not any(amount for pad in pads for amount in pad):
        return None
    first = next(dim for dim, pad in enumerate(pads) if any(pad))
    return tuple(amount for pad in reversed(pads[first:]) for amount in pad)


def _prepared(
    tensor: Tensor, slices: tuple[slice, ...] | None, pad: tuple[int, ...] | None, fill: float
) -> Tensor:
    if slices is not None:
        tensor = tensor[slices]
    return tensor if pad is None else F.pad(tensor, pad, value=fill)


def _constant(argument: Argument) -> Any:
    """An argument with dtypes made real and references left as markers."""
    if isinstance(argument, Dtype):
        return getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return tuple(_constant(part) for part in argument)
    return argument


def _refers(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(_refers(part) for part in argument)
    return isinstance(argument, Ref)


def _filled(argument: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(argument, Ref):
        return next(tensors)
    if isinstance(argument, tuple):
        return [_filled(part, tensors) for part in argument]
    return argument
