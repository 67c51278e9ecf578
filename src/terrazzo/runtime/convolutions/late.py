"""Convolutions whose weight gradients wait: the gradient others need is made first.

In the backward pass a device needs the gradient of a convolution's input to go on, and its
neighbours need their share of it. The gradient of the weights, as much work again, can be made
while messages are on their way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from terrazzo.runtime.convolutions.backward import gradients
from terrazzo.runtime.convolutions.forward import conv2d
from terrazzo.runtime.convolutions.pointwise import gaps_of
from terrazzo.runtime.operators import Operator

if TYPE_CHECKING:
    from terrazzo.runtime.steps.step import Run

OP = "aten.conv2d.default"


def can_wait(call: Operator) -> bool:
    """Whether a convolution reads all of the weights it is given, not a slice of them."""
    return all(slices is None for slices, _ in call.prepare[1:])


def convolve_late(
    run: Run, token: Tensor, tensors: Sequence[Tensor], *, call: Operator, names: Sequence[str]
) -> Tensor:
    """A convolution of a box; ``tensors`` are its input, inside of a piece of autograd, and its
    weights as they are, ``names`` the arrays of those."""
    x, weight, *bias = call.ready(tensors)
    _, _, with_bias, *how = call.args
    names = tuple(names) if with_bias is not None else tuple(names)[:1]
    third = bias[0] if with_bias is not None else None
    result: Tensor = LateConvolution.apply(  # type: ignore[no-untyped-call]
        token, x, weight, third, run, names, *how
    )
    cropped: Tensor = call.cropped(result)
    return cropped


class LateConvolution(torch.autograd.Function):
    """``aten.conv2d`` that leaves its weights' gradients to ``run.later``, by array names."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any
    ) -> Tensor:
        run, names, stride, padding, dilation, groups = how
        ctx.save_for_backward(x, weight)
        # The run keeps this node: a node that kept the run would keep both for ever when nobody
        # asks for gradients.
        ctx.run, ctx.names = weakref.ref(run), names
        ctx.how = (stride, padding, gaps_of(x, weight, dilation), False, (0, 0), groups)
        return conv2d(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        flows = flow_back(
            ctx.run(), grad, ctx.saved_tensors, how=ctx.how, names=ctx.names,
            flows=ctx.needs_input_grad[1],
        )  # fmt: skip
        return (None, flows, *[None] * (2 + 6))


def flow_back(
    run: Run,
    grad: Tensor,
    saved: Sequence[Tensor],
    *,
    how: tuple[Any, ...],
    names: tuple[str, ...],
    flows: bool,
) -> Tensor | None:
    """The gradient of a convolution's input, if it ``flows``; those of its weights go to
    ``run.later``."""
    arguments = (grad, *saved, [grad.shape[-3]], *how)
    wanted = [name in run.live for name in names]

    def weights() -> None:
        mask = [False, *wanted, *[False] * (2 - len(wanted))]
        found = gradients(arguments, mask)[1:]
        for name, part, asked in zip(names, found, wanted, strict=False):
            if asked and part is not None:
                run.add(name, part)

    run.catch_up()  # one waits at a time: sums over devices want to start early
    if any(wanted):
        run.later.append(weights)
    return gradients(arguments, [flows, False, False])[0]
