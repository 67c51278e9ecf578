"""Windows of 3x3 by four products where there were six, after Shmuel Winograd.

Two rows of a result under windows of three rows read four rows, and take six products of rows.
Four will do: of sums and differences of the rows that are read with those of the window, added up
to the two rows again. Each product is a convolution by windows of 1x3, so the library does the work
as before, a third less of it.

    reads     a - c     b + c           c - b           b - d
    windows   u         (u + v + w)/2   (u - v + w)/2   w
    products  p         q               r               s
    results   p + q + r and q - r - s

The gradient of the windows is the same read backwards. Only halves and sums occur, and fewer are
added up: rounding is no worse than that of plain convolutions, and mostly better. Columns are left
alone: their sums would go across vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from terrazzo.runtime.convolutions.narrow import is_narrow, rows, strips

Four = tuple[Tensor, Tensor, Tensor, Tensor]

FORWARD, WEIGHTS = (16, 208), (8, 150)
"""What sums of maps take by channel, and sums and orders of windows, as parts of three products of
a pixel: measured on the lab's boards. Gradients of windows are dearer, and sums weigh less."""


def suits(x: Tensor, weight: Tensor, *, stride: Any, dilation: Any, groups: int) -> bool:
    """Whether these are such windows, on such a processor, in plain float32."""
    return (
        x.dim() == 4
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and weight.shape[2:] == (3, 3)
        and groups == 1
        and all(one == 1 for one in (*stride, *dilation))
        and x.stride(3) == 1
        and is_narrow()
        and not torch.is_autocast_enabled("cpu")
    )


def pays(shape: Sequence[int], weight: Tensor, costs: tuple[int, int]) -> bool:
    """Whether four products and what is added take less than six, for a result of this shape."""
    images, _, height, width = shape
    by_channel, by_window = costs
    pixels, paired = images * height * width, images * 2 * _pairs(height) * width
    added = by_channel * (1 / weight.shape[0] + 1 / weight.shape[1]) * paired + by_window
    return 3 * pixels > 2 * paired + added


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
    """``aten.conv2d``; no gradient flows through it."""
    height, width = x.shape[2] + 2 * padding[0] - 2, x.shape[3] + 2 * padding[1] - 2
    result = x.new_empty(x.shape[0], weight.shape[0], height, width)
    windows = _windows(weight)
    for begin, end in _strips(x, weight, height):
        reads = _reads(rows(x, begin - padding[0], end + 2 - padding[0]))
        biases = (None, bias, None, None)
        p, q, r, s = (
            torch.conv2d(read, window, one, padding=(0, padding[1]))
            for read, window, one in zip(reads, windows, biases, strict=True)
        )
        torch.add(q + r, p, out=result[:, :, begin:end:2])
        odd = result[:, :, begin + 1 : end : 2]
        count = odd.shape[2]
        torch.sub(q.sub_(r)[:, :, :count], s[:, :, :count], out=odd)
    return result


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    """The gradient of the windows."""
    like = weight[:, :, :1]
    total: list[Tensor] = []
    for begin, end in _strips(x, weight, grad.shape[2]):
        reads = _reads(rows(x, begin - padding[0], end + 2 - padding[0]))
        given = rows(grad, begin, end)
        even, odd = given[:, :, 0::2], given[:, :, 1::2]
        parts = [
            torch.ops.aten.convolution_backward.default(
                one, read, like, None, (1, 1), (0, padding[1]), (1, 1), False, (0, 0), 1,
                [False, True, False],
            )[1]
            for one, read in zip((even, even + odd, even - odd, odd), reads, strict=True)
        ]  # fmt: skip
        total = [a.add_(b) for a, b in zip(total, parts, strict=True)] if total else parts
    p, q, r, s = total
    half = (q + r).mul_(0.5)
    return torch.cat([p.add_(half), q.sub_(r).mul_(0.5), half - s], 2)


def _pairs(height: int) -> int:
    return (height + 1) // 2


def _strips(x: Tensor, weight: Tensor, height: int) -> Iterator[tuple[int, int]]:
    """From which row of the result to which, by pairs."""
    pairs, channels = _pairs(height), sum(weight.shape[:2])
    made_bytes = 4 * channels * pairs * x.shape[0] * x.shape[3] * x.element_size()
    count = strips(made_bytes, pairs)
    return pairwise(2 * (pairs * cut // count) for cut in range(count + 1))


def _reads(x: Tensor) -> Four:
    a, b, c, d = x[:, :, 0:-2:2], x[:, :, 1:-2:2], x[:, :, 2::2], x[:, :, 3::2]
    return a - c, b + c, c - b, b - d


def _windows(weight: Tensor) -> Four:
    u, v, w = weight[:, :, :1], weight[:, :, 1:2] * 0.5, weight[:, :, 2:]
    outer = (u + w).mul_(0.5)
    return u, outer + v, outer - v, w
