"""Max pooling on a CPU, several times as fast as torch's own for maps in torch's usual order.

torch walks over windows one by one. Here whole columns are compared with whole columns, then whole
rows with whole rows, and the place of each maximum in its window is noted on the way: a byte. Of
equal elements the first one wins, row by row, as in torch, and gets the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

WIDEST = 3
"""Windows wider than this have too many places to compare one after the other."""

CACHED = 1 << 19
"""Elements that are pooled at a time, so that what is passed over repeatedly stays in a cache."""

Pair = tuple[int, int]


def max_pool2d(
    x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: Any = False
) -> Tensor:
    """``aten.max_pool2d``, by rows where that is faster."""
    windows = windows_of(kernel, stride, dilation, ceil)
    if windows is None or not _is_plain(x):
        size, step = pair(kernel), pair(stride or kernel)
        return F.max_pool2d(x, size, step, pair(padding), pair(dilation), bool(ceil))
    around = sides(padding)
    found: Tensor = _ByRows.apply(bordered(x, around), *windows)  # type: ignore[no-untyped-call]
    return found


def turning_max_pool2d(
    x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: Any, weight: Tensor
) -> Tensor:
    """Of every window what is largest times the sign of its channel's weight; no gradient flows to
    that. ``padding`` may differ from side to side."""
    windows, around, weight = (
        windows_of(kernel, stride, dilation, ceil),
        sides(padding),
        weight.detach(),
    )
    if windows is not None and _is_plain(x) and rises(weight):
        found: Tensor = _ByRows.apply(bordered(x, around), *windows)  # type: ignore[no-untyped-call]
        return found
    _, places = F.max_pool2d(
        bordered(turned(x.detach(), weight), around), pair(kernel), pair(stride or kernel),
        return_indices=True,
    )  # fmt: skip
    return bordered(x, around).flatten(-2).gather(-1, places.flatten(-2)).view(places.shape)


def _is_plain(x: Tensor) -> bool:
    """Whether it can be pooled by rows."""
    is_float = x.device.type == "cpu" and x.is_floating_point()
    return is_float and x.is_contiguous() and x.dim() >= 3 and x.numel() > 0


def rises(weight: Tensor) -> bool:
    """Whether no channel is turned round."""
    return bool((weight > 0).all())


def turned(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sign().to(x.dtype).view(-1, 1, 1)


def sides(padding: Any) -> tuple[Pair, Pair]:
    """Rows before and after a map, and columns."""
    rows, columns = (padding, padding) if isinstance(padding, int) else (padding[0], padding[-1])
    return pair(rows), pair(columns)


def bordered(x: Tensor, around: tuple[Pair, Pair]) -> Tensor:
    """With so many rows and columns around it that never win."""
    if not any(map(any, around)):
        return x
    return F.pad(x, (*around[1], *around[0]), value=float("-inf"))


def windows_of(kernel: Any, stride: Any, dilation: Any, ceil: Any) -> tuple[Pair, Pair] | None:
    """Size and stride of windows that can be pooled by rows; None for others."""
    size = pair(kernel)
    if ceil or max(pair(dilation)) > 1 or max(size) > WIDEST:
        return None
    return size, pair(stride or kernel)


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Pair, stride: Pair) -> Tensor:
        result, numbers = pooled(x, kernel, stride, numbered=ctx.needs_input_grad[0])
        if numbers is not None:
            ctx.save_for_backward(numbers)
            ctx.how = x.shape, kernel, stride
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return pooled_flow(grad, *ctx.saved_tensors, *ctx.how), None, None


def pooled(
    x: Tensor, kernel: Pair, stride: Pair, *, numbered: bool
) -> tuple[Tensor, Tensor | None]:
    """The maxima of all windows and, if ``numbered``, which element of its window each one is."""
    height, width = (
        (extent - size) // step + 1
        for extent, size, step in zip(x.shape[-2:], kernel, stride, strict=True)
    )
    result = x.new_empty(*x.shape[:-2], height, width)
    numbers = torch.zeros(result.shape, dtype=torch.uint8) if numbered else None
    maps, tops = (tensor.view(-1, *tensor.shape[-2:]) for tensor in (x, result))
    for span in _spans(maps):
        # Within each row first: what then wins between rows is the first of its row.
        along = (-1, kernel[1], stride[1], width)
        widest, columns = _largest(maps[span], None, along, worth=1, numbered=numbered)
        along = (-2, kernel[0], stride[0], height)
        tops[span], places = _largest(widest, columns, along, worth=kernel[1], numbered=numbered)
        if numbers is not None and places is not None:
            numbers.view(-1, height, width)[span] = places
    return result, numbers


def _largest(
    x: Tensor,
    numbers: Tensor | None,
    along: tuple[int, int, int, int],
    *,
    worth: int,
    numbered: bool,
) -> tuple[Tensor, Tensor | None]:
    """The largest elements of windows along one dimension, and which they are, the first of equals.

    ``along`` are the dimension, the size of windows, their stride and their count. An element's
    number is its own one so far (None: 0), plus ``worth`` for every place that it stands further;
    None: all are the first ones.
    """
    dim, size, step, count = along
    best = _every(x, dim, 0, step, count)
    found = None if numbers is None else _every(numbers, dim, 0, step, count)
    for place in range(1, size):
        seen = _every(x, dim, place, step, count)
        if numbered:
            later = (seen > best).view(torch.uint8)
            if numbers is None:
                later.mul_(place * worth)
                found = later if found is None else torch.maximum(found, later)
            elif found is not None:  # torch.where takes forty times as long as bytes that wrap
                number = _every(numbers, dim, place, step, count) + place * worth
                found = (number - found).mul_(later).add_(found)
        best = torch.maximum(best, seen)
    return best, found


def pooled_flow(
    grad: Tensor, numbers: Tensor, shape: torch.Size, kernel: Pair, stride: Pair
) -> Tensor:
    """The gradient of what was pooled."""
    found = torch.empty(shape, dtype=grad.dtype)
    flows = _maps(found)
    grads, places = _maps(grad.contiguous()), _maps(numbers)
    for span in _spans(flows):
        _scatter(grads[span], places[span], kernel, stride, flows[span])
    return found


def add_pooled_flow(
    flow: Tensor,
    grad: Tensor,
    numbers: Tensor,
    shape: torch.Size,
    *,
    windows: tuple[Pair, Pair],
    inner: tuple[slice, ...],
) -> None:
    """Adds it to the gradient that there is already, ``inner`` without what lay around; through a
    few maps that stay in a cache, where adding all at once would read and write all once more."""
    grads, places, flows = _maps(grad.contiguous()), _maps(numbers), _maps(flow)
    spans = list(_spans(places, elements=shape[-1] * shape[-2]))
    found = torch.empty((spans[0].stop if spans else 0, *shape[-2:]), dtype=grad.dtype)
    for span in spans:
        part = found[: len(grads[span])]
        _scatter(grads[span], places[span], *windows, part)
        flows[span] += part[..., inner[0], inner[1]]


def _maps(tensor: Tensor) -> Tensor:
    return tensor.view(-1, *tensor.shape[-2:])


def _scatter(grads: Tensor, numbers: Tensor, kernel: Pair, stride: Pair, flows: Tensor) -> None:
    torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
        grads, flows, kernel, stride, (0, 0), (1, 1), False,
        places_of(numbers, flows.shape[-1], kernel, stride), grad_input=flows,
    )  # fmt: skip


def _spans(maps: Tensor, elements: int = 0) -> Iterator[slice]:
    """As many maps at a time, of so many elements each, as stay in a cache."""
    if not len(maps):
        return
    step = max(1, CACHED // (elements or maps[0].numel()))
    for low in range(0, len(maps), step):
        yield slice(low, low + step)


def places_of(number: Tensor, line: int, kernel: Pair, stride: Pair) -> Tensor:
    """Where in its map, whose rows are so long, each maximum is."""
    (height, width), (high, wide) = number.shape[-2:], kernel
    rows = torch.zeros_like(number)
    for row in range(1, high):  # comparing bytes takes a fraction of dividing integers
        rows.add_((number >= row * wide).view(torch.uint8))
    places = number.long().add_(rows, alpha=line - wide)
    first = torch.arange(height).mul_(stride[0] * line).unsqueeze(1)
    return places.add_(first + torch.arange(width).mul_(stride[1]))


def _every(x: Tensor, dim: int, first: int, step: int, count: int) -> Tensor:
    """Every so many-th slice along a dimension."""
    span = slice(first, first + step * (count - 1) + 1, step)
    return x[..., span, :] if dim == -2 else x[..., span]


def pair(argument: Any) -> Pair:
    if isinstance(argument, int):
        return argument, argument
    return int(argument[0]), int(argument[-1])
