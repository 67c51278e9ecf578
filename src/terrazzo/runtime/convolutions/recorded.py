"""Convolutions that autograd sees: one node each, whichever way they go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from terrazzo.graph.rules.windows import pair
from terrazzo.runtime.convolutions import forward
from terrazzo.runtime.convolutions.backward import gradients

ONCE = (1, 1)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: Any = ONCE,
    padding: Any = (0, 0),
    dilation: Any = ONCE,
    groups: int = 1,
) -> Tensor:
    """``aten.conv2d``."""
    how = (pair(stride), pair(padding), pair(dilation), groups)
    watched = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)
    )
    if watched and forward.by_winograd(x, weight, *how):
        result: Tensor = _Recorded.apply(x, weight, bias, how[1])  # type: ignore[no-untyped-call]
        return result
    return forward.conv2d(x, weight, bias, *how)


class _Recorded(torch.autograd.Function):
    """Windows that step by one, without gaps; torch has its own node for all others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.bias_shape = padding, None if bias is None else [*bias.shape]
        return forward.conv2d(x, weight, bias, ONCE, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        how = (ONCE, ctx.padding, ONCE, False, (0, 0), 1)
        wanted = ctx.needs_input_grad[:3]
        return (*gradients((grad.contiguous(), x, weight, ctx.bias_shape, *how), wanted), None)
