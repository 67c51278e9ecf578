"""Gradients of convolutions, by ways that suit processors of boards.

In vectors of 128 bits, which is what boards have, oneDNN has kernels for convolutions, but none for
their gradients: it writes all windows out, nine times the map. Windows that step by one read the
gradient of the input as a convolution with turned weights, which pays where the map is larger than
they are. That of the weights is summed up over strips of rows, so that few windows are written out
at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import ceil
from typing import Any

import torch
from torch import Tensor

WRITTEN_OUT = 8 << 20
"""Bytes of windows that are written out at a time."""
NARROW_BUILDS = ("DEFAULT", "NO AVX")
NARROW_LIMITS = ("SSE41", "AVX")
"""What torch says of processors, and what oneDNN may be limited to, without kernels for
gradients."""


def gradients(arguments: Sequence[Any], wanted: Sequence[bool]) -> Sequence[Tensor | None]:
    """``aten.convolution_backward``, by faster ways where there are any."""
    around = _turned_padding(*arguments) if wanted[0] else None
    rest = [wanted[0] and around is None, *wanted[1:]]
    found: list[Tensor | None] = [None, None, None]
    if rest[1] and (strips := _strips(*arguments)) > 1:
        found[1:] = _by_strips(arguments, rest[1:], strips)
        rest[1:] = [False, False]
    if any(rest):
        whole = torch.ops.aten.convolution_backward.default(*arguments, rest)
        found = [
            one if asked else other for one, other, asked in zip(whole, found, rest, strict=True)
        ]
    if around is not None:
        grad, _, weight, *_ = arguments
        found[0] = torch.conv2d(grad, weight.flip(2, 3).transpose(0, 1), padding=around)
    return found


@cache
def writes_windows_out() -> bool:
    """Whether gradients of convolutions have no kernels of their own on this processor."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", ""))
    return (
        limit.upper() in NARROW_LIMITS or torch.backends.cpu.get_cpu_capability() in NARROW_BUILDS
    )


def _strips(grad: Tensor, x: Tensor, weight: Tensor, bias_shape: Any, *how: Any) -> int:
    """In how many strips of rows the gradient of the weights is made."""
    _, padding, dilation, transposed, *_ = how
    reach = [gap * (extent - 1) + 1 for gap, extent in zip(dilation, weight.shape[2:], strict=True)]
    if x.dim() != 4 or x.device.type != "cpu" or transposed or max(reach) == 1:
        return 1
    if padding[0] >= reach[0]:
        return 1
    windows = weight[0].numel() * grad.shape[2] * grad.shape[3] * grad.element_size()
    if windows <= WRITTEN_OUT or not writes_windows_out():
        return 1
    return min(ceil(windows / WRITTEN_OUT), grad.shape[2])


def _by_strips(
    arguments: Sequence[Any], wanted: Sequence[bool], strips: int
) -> Sequence[Tensor | None]:
    """The gradients of weights and bias, summed up over strips of the result's rows."""
    grad, x, weight, bias_shape, stride, padding, dilation, *rest = arguments
    last = grad.shape[2], x.shape[2]
    reach = dilation[0] * (weight.shape[2] - 1) + 1
    found: list[Tensor | None] = [None, None]
    for begin, end in pairwise(last[0] * cut // strips for cut in range(strips + 1)):
        top, bottom = begin * stride[0] - padding[0], (end - 1) * stride[0] - padding[0] + reach
        read = x[:, :, max(top, 0) : min(bottom, last[1])]
        if top < 0 or bottom > last[1]:
            read = torch.constant_pad_nd(read, (0, 0, max(-top, 0), max(bottom - last[1], 0)))
        parts = torch.ops.aten.convolution_backward.default(
            grad[:, :, begin:end], read, weight, bias_shape, stride, (0, padding[1]), dilation,
            *rest, [False, *wanted],
        )[1:]  # fmt: skip
        found = [
            part if total is None else total.add_(part)
            for total, part in zip(found, parts, strict=True)
        ]
    return found


def _turned_padding(
    grad: Tensor, x: Tensor, weight: Tensor, bias_shape: Any, *how: Any
) -> list[int] | None:
    """The padding of the convolution that an input's gradient is; None if torch's own is to be
    taken."""
    stride, padding, dilation, _, _, groups = how
    size = weight.shape[2:]
    if x.dim() != 4 or x.device.type != "cpu" or groups != 1 or max(size) == 1:
        return None
    if any(one != 1 for one in (*stride, *dilation)) or weight.numel() >= x.numel():
        return None
    around = [extent - 1 - pad for extent, pad in zip(size, padding, strict=True)]
    return around if min(around) >= 0 else None
