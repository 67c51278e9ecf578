"""Cutting an extent into shares, and a tensor into a grid of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, product

from terrazzo.geometry.box import Box, Span


def cut(extent: int, shares: Sequence[int]) -> tuple[Span, ...]:
    """Spans proportional to the shares, disjoint and covering [0, extent).

    Borders are rounded to the nearest integer, so one row of shares cuts every map of a network
    at corresponding places. A span may be empty: shares of zero, or more shares than elements.
    """
    total = sum(shares)
    borders = [0, *((2 * extent * part + total) // (2 * total) for part in accumulate(shares))]
    return tuple(pairwise(borders))


def grid(shape: Sequence[int], cuts: Sequence[tuple[int, Sequence[int]]]) -> tuple[Box, ...]:
    """One box per cell of a grid: each (dim, shares) cuts that dimension, the first outermost."""
    boxes = []
    for spans in product(*(cut(shape[dim], shares) for dim, shares in cuts)):
        box = Box.whole(shape)
        for (dim, _), span in zip(cuts, spans, strict=True):
            box = box.replace(dim, span)
        boxes.append(box)
    return tuple(boxes)
