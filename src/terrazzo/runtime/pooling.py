"""Max pooling on a CPU, several times as fast as torch's own for maps in torch's usual order.

torch walks over windows one by one. Here whole columns are compared with whole columns, then whole
rows with whole rows, and the place of each maximum in its window is noted on the way: a byte. Of
equal elements the first one wins, row by row, as in torch, and gets the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from terrazzo.graph.pooling import by_rows
from terrazzo.graph.rules.windows import pair

CACHED = 1 << 19
"""Elements that are pooled at a time, so that what is passed over repeatedly stays in a cache."""

Pair = tuple[int, int]
Windows = tuple[Pair, Pair]
"""Their size, and their stride."""
Around = tuple[Pair, Pair]
"""Rows before and after a map, and columns."""


def max_pool2d(
    x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: Any = False
) -> Tensor:
    """``aten.max_pool2d``, by rows where that is faster."""
    windows = windows_of(kernel, stride, dilation, ceil)
    if windows is None or not _is_plain(x):
        size, step = pair(kernel), pair(stride or kernel)
        return F.max_pool2d(x, size, step, pair(padding), pair(dilation), bool(ceil))
    by: Any = _ByRows
    found: Tensor = by.apply(x.contiguous(), None, windows, sides(padding))
    return found


def turning_max_pool2d(
    x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: Any, weight: Tensor
) -> Tensor:
    """Of every window what is largest times the sign of its channel's weight; no gradient flows to
    that. ``padding`` may differ from side to side."""
    windows, around = windows_of(kernel, stride, dilation, ceil), sides(padding)
    by: Any = _ByRows if windows is not None and _is_plain(x) else _ByPlaces
    windows = windows or (pair(kernel), pair(stride or kernel))
    found: Tensor = by.apply(x.contiguous(), weight.detach(), windows, around)
    return found


def _is_plain(x: Tensor) -> bool:
    """Whether it can be pooled by rows; a strip of a map lies in pieces, and is copied together."""
    if x.device.type != "cpu" or not x.is_floating_point() or x.dim() < 3 or not x.numel():
        return False
    return x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last)


def sides(padding: Any) -> Around:
    """Rows before and after a map, and columns."""
    rows, columns = (padding, padding) if isinstance(padding, int) else (padding[0], padding[-1])
    return pair(rows), pair(columns)


def windows_of(kernel: Any, stride: Any, dilation: Any, ceil: Any) -> Windows | None:
    """Size and stride of windows that can be pooled by rows; None for others."""
    return (pair(kernel), pair(stride or kernel)) if by_rows(kernel, dilation, ceil) else None


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, windows: Windows, around: Around
    ) -> Tensor:
        numbered = ctx.needs_input_grad[0]
        result, numbers = pooled(x, windows, around, weight=weight, numbered=numbered)
        if numbers is not None:
            ctx.save_for_backward(numbers)
            ctx.how = x.shape, windows, around
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (numbers,), (shape, windows, around) = ctx.saved_tensors, ctx.how
        return pooled_flow(grad, numbers, shape, windows, around), None, None, None


class _ByPlaces(torch.autograd.Function):
    """By places that torch's own pool finds, and with its gradient: on a GPU, or wide windows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, windows: Windows, around: Around) -> Tensor:
        turned = _bordered(x * weight.sign().to(x.dtype).view(-1, 1, 1), around)
        _, places = F.max_pool2d(turned, *windows, return_indices=True)
        ctx.save_for_backward(places)
        ctx.how = x.shape, windows, around
        return _at(places, _bordered(x, around))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,), (shape, windows, around) = ctx.saved_tensors, ctx.how
        pooled_from = grad.new_empty(_outer(shape, around))  # looked at for its shape alone
        found = torch.ops.aten.max_pool2d_with_indices_backward(
            grad, pooled_from, *windows, (0, 0), (1, 1), False, places
        )
        return found[_inner(around)] if any(map(any, around)) else found, None, None, None


def pooled(
    x: Tensor, windows: Windows, around: Around, *, weight: Tensor | None = None, numbered: bool
) -> tuple[Tensor, Tensor | None]:
    """The maxima of all windows and, if ``numbered``, which element of its window each one is.

    Channels whose ``weight`` is negative are turned round, of those where it is zero the first
    elements are taken; mostly there are few.
    """
    result, numbers = _pooled(_bordered(x, around), windows, numbered=numbered)
    if weight is None or bool((weight > 0).all()):
        return result, numbers
    falling, level = weight < 0, weight == 0
    if falling.any():
        turned = _bordered(x[:, falling].neg_(), around)
        least, found = _pooled(turned, windows, numbered=numbered)
        result[:, falling] = least.neg_()
        if numbers is not None and found is not None:
            numbers[:, falling] = found
    if level.any():
        part = x[:, level]
        _, found = _pooled(_bordered(torch.zeros_like(part), around), windows, numbered=True)
        assert found is not None
        part = _bordered(part, around)
        result[:, level] = _at(_places(found, part.shape[-1], windows), part)
        if numbers is not None:
            numbers[:, level] = found
    return result, numbers


def _bordered(x: Tensor, around: Around) -> Tensor:
    """With so many rows and columns around it that never win."""
    if not any(map(any, around)):
        return x
    return F.pad(x, (*around[1], *around[0]), value=float("-inf"))


def _at(places: Tensor, x: Tensor) -> Tensor:
    """What stands at these places of each map."""
    return x.flatten(-2).gather(-1, places.flatten(-2)).view(places.shape)


def _pooled(x: Tensor, windows: Windows, *, numbered: bool) -> tuple[Tensor, Tensor | None]:
    kernel, stride = windows
    height, width = (
        (extent - size) // step + 1
        for extent, size, step in zip(x.shape[-2:], kernel, stride, strict=True)
    )
    result = x.new_empty(*x.shape[:-2], height, width)
    numbers = torch.zeros(result.shape, dtype=torch.uint8) if numbered else None
    maps, tops = _maps(x), _maps(result)
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
    grad: Tensor, numbers: Tensor, shape: torch.Size, windows: Windows, around: Around
) -> Tensor:
    """The gradient of what was pooled, which had this shape."""
    found = torch.empty(_outer(shape, around), dtype=grad.dtype)
    flows = _maps(found)
    grads, places = _maps(grad.contiguous()), _maps(numbers)
    for span in _spans(flows):
        _scatter(grads[span], places[span], windows, flows[span])
    return found[_inner(around)] if any(map(any, around)) else found


def add_pooled_flow(
    flow: Tensor, grad: Tensor, numbers: Tensor, windows: Windows, around: Around
) -> None:
    """Adds it to the gradient that there is already; through a few maps that stay in a cache, where
    adding all at once would read and write all once more."""
    grads, places, flows = _maps(grad.contiguous()), _maps(numbers), _maps(flow)
    outer, inner = _outer(flow.shape[-2:], around), _inner(around)
    spans = list(_spans(places, elements=outer[0] * outer[1]))
    found = torch.empty((spans[0].stop if spans else 0, *outer), dtype=grad.dtype)
    for span in spans:
        part = found[: len(grads[span])]
        _scatter(grads[span], places[span], windows, part)
        flows[span] += part[inner]


def _outer(shape: Sequence[int], around: Around) -> tuple[int, ...]:
    """The shape of a map with what lies around it."""
    *maps, height, width = shape
    return (*maps, height + sum(around[0]), width + sum(around[1]))


def _inner(around: Around) -> tuple[Any, ...]:
    """Where the map lies in it."""
    return (..., *(slice(low, -high or None) for low, high in around))


def _maps(tensor: Tensor) -> Tensor:
    return tensor.view(-1, *tensor.shape[-2:])


def _scatter(grads: Tensor, numbers: Tensor, windows: Windows, flows: Tensor) -> None:
    torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
        grads, flows, *windows, (0, 0), (1, 1), False,
        _places(numbers, flows.shape[-1], windows), grad_input=flows,
    )  # fmt: skip


def _spans(maps: Tensor, elements: int = 0) -> Iterator[slice]:
    """As many maps at a time, of so many elements each, as stay in a cache."""
    if not len(maps):
        return
    step = max(1, CACHED // (elements or maps[0].numel()))
    for low in range(0, len(maps), step):
        yield slice(low, low + step)


def _places(number: Tensor, line: int, windows: Windows) -> Tensor:
    """Where in its map, whose rows are so long, each maximum is."""
    (height, width), ((high, wide), stride) = number.shape[-2:], windows
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
