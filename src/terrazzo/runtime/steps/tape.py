"""Tape: the operators of a Compute in order, each with its gradient, without autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terrazzo.records import Node
from terrazzo.runtime.convolutions.late import can_wait
from terrazzo.runtime.derivatives import Derivative, Pool, derivative
from terrazzo.runtime.operators import Operator
from terrazzo.runtime.steps.step import Run
from terrazzo.schedule import Apply

Slices = tuple[Any, ...]
Returns = tuple[tuple[Slices | None, Slices | None], ...]
"""By input: where in what was given the slice lay that was read, and where it lies in its padded
copy."""


@dataclass(frozen=True, slots=True)
class Line:
    """One operator; without ``gradient`` nothing flows back through it."""

    title: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: Operator | None
    gradient: Derivative | None
    returns: Returns
    drops: tuple[str, ...]


class Tape:
    """``lines`` run in order, and back. What is kept between is a list of the same length."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = tuple(lines)
        self.keeps = frozenset(name for line in lines for name in _kept(line))
        """What is read again on the way back."""

    def forward(self, run: Run, local: dict[str, Tensor]) -> list[Any]:
        """Adds results to ``local``, and drops what nobody needs any more."""
        links = run.links
        kept: list[Any] = []
        for line in self.lines:
            call, gradient = line.call, line.gradient
            if call is None:
                local[line.outputs[0]] = run.empty(line.outputs[0])
                kept.append(None)
            else:
                links.where = line.title
                tensors: Sequence[Tensor] = [local[name] for name in line.inputs]
                if gradient is None:
                    _put(local, line.outputs, call(tensors, run.site))
                    kept.append(None)
                else:
                    kept.append(_apply(line, call, gradient, tensors, local))
                del tensors
            for name in line.drops:
                del local[name]
        return kept

    def backward(
        self, run: Run, kept: list[Any], grads: dict[str, Tensor], own: set[str]
    ) -> tuple[dict[str, Tensor], set[str]]:
        """From gradients of what left to gradients of what entered; ``own``, before and after, are
        those of them in memory of our own, which may be overwritten."""
        for line in reversed(self.lines):
            saved = kept.pop()
            gradient, call = line.gradient, line.call
            if gradient is None or call is None:
                continue
            grad = grads.pop(line.outputs[0], None)
            if grad is None:
                continue
            shape, shapes, needed = saved
            is_own = line.outputs[0] in own
            own.discard(line.outputs[0])
            if shape is not None:
                grad, is_own = _laid(grad, shape, call.crop), True
            if isinstance(gradient, Pool) and not shapes:
                flow = _so_far(run, grads, own, name=line.inputs[0])
                if flow is not None and gradient.add(flow, grad, needed):
                    continue
            found = gradient.backward(run, grad, needed, own=is_own)
            for position, (name, part) in enumerate(zip(line.inputs, found, strict=False)):
                if part is None:
                    continue
                if shapes:
                    part = _returned(part, shapes[position], line.returns[position])
                before = grads.get(name)
                grads[name] = part if before is None else before + part
                if gradient.fresh or before is not None:
                    own.add(name)
        return grads, own


def _kept(line: Line) -> tuple[str, ...]:
    if line.gradient is None:
        return ()
    results = line.outputs[:1] if line.gradient.keeps_result else ()
    return (*line.inputs[: line.gradient.keeps], *results)


def _apply(
    line: Line,
    call: Operator,
    gradient: Derivative,
    tensors: Sequence[Tensor],
    local: dict[str, Tensor],
) -> tuple[torch.Size | None, Sequence[torch.Size], Any]:
    shapes = [tensor.shape for tensor in tensors] if call.prepare else ()
    result, needed = gradient.forward(call.ready(tensors))
    if not isinstance(result, Tensor):
        result, *others = result
        _put(local, line.outputs[1:], others)
    cropped = call.cropped(result)
    local[line.outputs[0]] = cropped
    return None if cropped is result else result.shape, shapes, needed


def _so_far(run: Run, grads: dict[str, Tensor], own: set[str], *, name: str) -> Tensor | None:
    """The gradient that an array has already, if it lies in memory of our own."""
    if name in grads:
        return grads[name] if name in own else None
    return run.grads[name] if name in run.exclusive else None


def _put(local: dict[str, Tensor], outputs: Sequence[str], result: Any) -> None:
    results = (result,) if isinstance(result, Tensor) else result
    for name, tensor in zip(outputs, results, strict=False):
        if name:
            local[name] = tensor


def _laid(part: Tensor, shape: torch.Size, place: Slices) -> Tensor:
    """A part where it belongs in a whole of zeros."""
    whole = part.new_zeros(shape)
    whole[place] = part
    return whole


def _returned(
    part: Tensor, shape: torch.Size, places: tuple[Slices | None, Slices | None]
) -> Tensor:
    """The gradient of a tensor from that of the slice of it that was read, padded."""
    slices, inner = places
    if inner is not None:
        part = part[inner]
    return part if slices is None else _laid(part, shape, slices)


def tape(
    applies: Sequence[tuple[Apply, Node, Operator | None, tuple[str, ...]]],
    carriers: frozenset[str],
    may_wait: Callable[[tuple[str, ...]], bool],
    shown: frozenset[str],
) -> Tape | None:
    """Of operators with their nodes and what goes after them; None where autograd has to help."""
    lines = []
    for apply, node, call, drops in applies:
        gradient = None
        if call is not None and any(name in carriers for name in apply.outputs):
            wanted = [name in carriers for name in apply.inputs]
            names = apply.inputs[1:]
            waits = apply.locals is not None and can_wait(call) and may_wait(names)
            late = names if waits and any(wanted[1:2]) else ()
            is_shown = not shown.isdisjoint(apply.outputs)
            gradient = derivative(call, wanted=wanted, late=late, shown=is_shown)
            if gradient is None:
                return None
        returns = () if call is None else tuple(_place(*how) for how in call.prepare)
        lines.append(Line(node.title, apply.inputs, apply.outputs, call, gradient, returns, drops))
    return Tape(lines)


def _place(
    slices: Slices | None, pad: tuple[int, ...] | None
) -> tuple[Slices | None, Slices | None]:
    if pad is None:
        return slices, None
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    inner = tuple(slice(low, -high or None) for low, high in reversed(pairs))
    return slices, (..., *inner)
