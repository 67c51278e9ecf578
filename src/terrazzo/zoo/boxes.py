"""Boxes on a picture: overlaps, the grid of a one-stage detector, and what to keep of it.

A box is (centre x, centre y, width, height) as fractions of the picture. A prediction of shape
(N, A·(5 + classes), H, W) holds, for each of A anchors and each cell: the centre within the cell
(before a sigmoid), the logarithm of width and height over the anchor's, the logit of "something is
here", and the logits of the classes. Anchors are (width, height) in cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.errors import UsageError

Anchors = Sequence[tuple[float, float]]

LARGEST_LOG = 8.0
"""An untrained network may ask for a box e^8 anchors wide; beyond that only infinity waits."""


def split_prediction(prediction: Tensor, anchors: Anchors) -> Tensor:
    """(N, A·(5 + classes), H, W) as (N, A·H·W, 5 + classes), anchor by anchor, row by row."""
    count, channels = len(anchors), prediction.shape[1]
    if prediction.dim() != 4 or channels % count or channels // count < 6:
        raise UsageError(
            f"a prediction of shape {list(prediction.shape)} does not fit {count} anchors: it has "
            "(N, anchors · (5 + classes), H, W) with at least one class"
        )
    pictures, _, rows, columns = prediction.shape
    split = prediction.reshape(pictures, count, -1, rows, columns)
    return split.permute(0, 1, 3, 4, 2).flatten(1, 3)


def boxes_of(split: Tensor, anchors: Anchors, grid: tuple[int, int]) -> Tensor:
    """The boxes (N, A·H·W, 4) that a split prediction on a grid (H, W) means."""
    rows, columns = grid
    shape = (len(anchors), rows, columns)
    x = torch.arange(columns).expand(shape).flatten()
    y = torch.arange(rows).view(-1, 1).expand(shape).flatten()
    corners = torch.stack([x, y], dim=-1).to(split)
    sides = torch.tensor(anchors, dtype=torch.float64).repeat_interleave(rows * columns, dim=0)
    centres = split[..., :2].sigmoid() + corners
    extents = split[..., 2:4].clamp(max=LARGEST_LOG).exp() * sides.to(split)
    return torch.cat([centres, extents], -1) / torch.tensor([columns, rows] * 2).to(split)


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of boxes (..., 4) that broadcast against each other."""
    low = torch.maximum(first[..., :2] - first[..., 2:] / 2, second[..., :2] - second[..., 2:] / 2)
    high = torch.minimum(first[..., :2] + first[..., 2:] / 2, second[..., :2] + second[..., 2:] / 2)
    shared = (high - low).clamp(min=0).prod(-1)
    union = first[..., 2:].prod(-1) + second[..., 2:].prod(-1) - shared
    return shared / union.clamp(min=torch.finfo(union.dtype).tiny)


def decode(
    prediction: Tensor,
    anchors: Anchors,
    *,
    threshold: float = 0.3,
    overlap: float = 0.45,
    limit: int = 100,
) -> list[Tensor]:
    """What a prediction shows: for each picture (found, 6) of class, score, cx, cy, w, h.

    Best first. A box scores "something is here" times its best class; those under ``threshold``
    are left out, and so is a box that overlaps a better one of its class by more than ``overlap``.
    At most the best ``limit`` boxes are looked at.
    """
    with torch.no_grad():
        split = split_prediction(prediction, anchors)
        grid = (prediction.shape[2], prediction.shape[3])
        boxes = boxes_of(split, anchors, grid)
        best, classes = split[..., 5:].softmax(-1).max(-1)
        scores = split[..., 4].sigmoid() * best
        rows = torch.cat([classes.to(boxes.dtype)[..., None], scores[..., None], boxes], -1)
        return [_strongest(each, threshold, overlap, limit) for each in rows]


def _strongest(rows: Tensor, threshold: float, overlap: float, limit: int) -> Tensor:
    """Non-maximum suppression within each class."""
    rows = rows[rows[:, 1] >= threshold]
    rows = rows[rows[:, 1].argsort(descending=True, stable=True)][:limit]
    same = rows[:, None, 0] == rows[None, :, 0]
    clash = same & (overlaps(rows[:, None, 2:], rows[None, :, 2:]) > overlap)
    keep = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for position in range(1, len(rows)):
        keep[position] = not bool((clash[position, :position] & keep[:position]).any())
    return rows[keep]
