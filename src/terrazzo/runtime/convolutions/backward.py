"""Gradients of convolutions.

On narrow processors libraries are best at convolutions, and write all windows out for a gradient.
So the gradient of the input is made as a convolution with turned weights where windows step by one,
and that of the weights is summed up over strips of rows. Elsewhere both are torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from terrazzo.graph.rules.windows import pair
from terrazzo.runtime.convolutions import winograd
from terrazzo.runtime.convolutions.forward import by_winograd, conv2d
from terrazzo.runtime.convolutions.narrow import STRIP_BYTES, is_narrow, rows, strips

ONCE = (1, 1)


def gradients(arguments: Sequence[Any], wanted: Sequence[bool]) -> Sequence[Tensor | None]:
    """``aten.convolution_backward``; None what is not wanted."""
    grad, x, weight, bias_shape, *windows = arguments
    stride, padding, dilation = map(pair, windows[:3])
    arguments = (grad, x, weight, bias_shape, stride, padding, dilation, *windows[3:])
    around = _turned_padding(*arguments) if wanted[0] else None
    found: list[Tensor | None] = [None, None, None]
    if around is not None:
        found[0] = conv2d(grad, weight.flip(2, 3).transpose(0, 1), padding=around)
    left = [wanted[0] and around is None, *wanted[1:]]
    if left[1] and _weights_by_winograd(*arguments):
        found[1] = winograd.weight_gradient(grad, x, weight, padding)
        found[2] = grad.sum((0, 2, 3)) if left[2] else None
        left[1:] = [False, False]
    elif left[1] and (count := _strips(*arguments)) > 1:
        found[1:] = _by_strips(arguments, left[1:], count)
        left[1:] = [False, False]
    if any(left):
        rest = torch.ops.aten.convolution_backward.default(*arguments, left)
        found = [
            one if asked else other for one, other, asked in zip(rest, found, left, strict=True)
        ]
    return found


def _turned_padding(
    grad: Tensor, x: Tensor, weight: Tensor, bias_shape: Any, *how: Any
) -> tuple[int, ...] | None:
    """The padding of the convolution that an input's gradient is; None if torch's own is to be
    taken: turning the weights pays where the map is larger than they are, or products are saved."""
    stride, padding, dilation, transposed, _, groups = how
    size = weight.shape[2:]
    if x.dim() != 4 or x.device.type != "cpu" or transposed or groups != 1 or max(size) == 1:
        return None
    if not is_narrow():
        return None
    if any(one != 1 for one in (*stride, *dilation)):
        return None
    around = tuple(extent - 1 - pad for extent, pad in zip(size, padding, strict=True))
    if min(around) < 0:
        return None
    is_small = weight.numel() < x.numel()
    return around if is_small or by_winograd(grad, weight, ONCE, around, ONCE, 1) else None


def _weights_by_winograd(
    grad: Tensor, x: Tensor, weight: Tensor, bias_shape: Any, *how: Any
) -> bool:
    stride, padding, dilation, transposed, _, groups = how
    return (
        not transposed
        and winograd.suits(x, weight, stride=stride, dilation=dilation, groups=groups)
        and max(padding) <= 2
        and grad.dtype == x.dtype
        and winograd.pays(grad.shape, weight, winograd.WEIGHTS)
    )


def _strips(grad: Tensor, x: Tensor, weight: Tensor, bias_shape: Any, *how: Any) -> int:
    """In how many strips of rows the gradient of the weights is made."""
    _, padding, dilation, transposed, *_ = how
    reach = [gap * (extent - 1) + 1 for gap, extent in zip(dilation, weight.shape[2:], strict=True)]
    if x.dim() != 4 or x.device.type != "cpu" or transposed or max(reach) == 1:
        return 1
    windows_bytes = weight[0].numel() * grad.shape[2] * grad.shape[3] * grad.element_size()
    if windows_bytes <= STRIP_BYTES or padding[0] >= reach[0] or not is_narrow():
        return 1
    return strips(windows_bytes, grad.shape[2])


def _by_strips(
    arguments: Sequence[Any], wanted: Sequence[bool], count: int
) -> Sequence[Tensor | None]:
    """The gradients of weights and bias, summed up over strips of the result's rows."""
    grad, x, weight, bias_shape, stride, padding, dilation, *rest = arguments
    height = grad.shape[2]
    reach = dilation[0] * (weight.shape[2] - 1) + 1
    found: list[Tensor | None] = [None, None]
    for begin, end in pairwise(height * cut // count for cut in range(count + 1)):
        top, bottom = begin * stride[0] - padding[0], (end - 1) * stride[0] - padding[0] + reach
        parts = torch.ops.aten.convolution_backward.default(
            grad[:, :, begin:end], rows(x, top, bottom), weight, bias_shape, stride,
            (0, padding[1]), dilation, *rest, [False, *wanted],
        )[1:]  # fmt: skip
        found = [
            part if total is None else total.add_(part)
            for total, part in zip(found, parts, strict=True)
        ]
    return found
