"""The loss of a one-stage detector, on targets padded to a fixed number of boxes.

Each true box belongs to one slot: the cell that holds its centre and the anchor whose shape is
nearest. There the prediction learns the box and its class, and to be as sure as it overlaps.
Elsewhere it learns to see nothing, except where it overlaps a true box well: that is no mistake.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrazzo.errors import UsageError
from terrazzo.zoo.boxes import Anchors, boxes_of, overlaps, split_prediction


class YoloLoss(nn.Module):
    """Called with a prediction and targets (N, boxes, 5): class, cx, cy, w, h; class -1: none.

    Gives the sum over boxes, divided by the number of pictures. Of two boxes in one slot the first
    counts. Every step is a fixed sequence of tensor operations, in the precision of the prediction.
    """

    def __init__(
        self,
        anchors: Anchors,
        *,
        place: float = 2.0,
        sure: float = 2.0,
        empty: float = 0.5,
        ignore: float = 0.6,
    ) -> None:
        super().__init__()
        self.anchors = tuple(anchors)
        self.place, self.sure, self.empty, self.ignore = place, sure, empty, ignore

    def forward(self, prediction: Tensor, targets: Tensor) -> Tensor:
        if targets.dim() != 3 or targets.shape[-1] != 5 or len(targets) != len(prediction):
            raise UsageError(
                f"targets of shape {list(targets.shape)} for {len(prediction)} pictures: give "
                "(N, boxes, 5) of class, cx, cy, w, h, padded with class -1"
            )
        split = split_prediction(prediction, self.anchors)
        grid = (prediction.shape[2], prediction.shape[3])
        targets = targets.to(prediction)
        slots, taken, sides = self._assign(targets, grid)
        boxes = boxes_of(split.detach(), self.anchors, grid)
        at_slot = split.gather(1, slots[..., None].expand(-1, -1, split.shape[-1]))
        placed = self._placed(at_slot, targets, grid, sides)
        named = F.cross_entropy(
            at_slot[..., 5:].transpose(1, 2), targets[..., 0].long().clamp(min=0), reduction="none"
        )
        owned = boxes.gather(1, slots[..., None].expand(-1, -1, 4))
        fit = overlaps(owned, targets[..., 1:])
        sure = F.binary_cross_entropy_with_logits(at_slot[..., 4], fit, reduction="none")
        at_boxes = self.place * placed + self.sure * sure + named
        weight = self._emptiness(boxes, targets, slots, taken)
        empty = F.softplus(split[..., 4]) * weight
        return ((at_boxes * taken).sum() + self.empty * empty.sum()) / len(prediction)

    def _assign(self, targets: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """For each true box its slot, whether it counts, and the sides of its anchor."""
        rows, columns = grid
        cells = torch.tensor([columns, rows], dtype=targets.dtype, device=targets.device)
        anchors = torch.tensor(self.anchors, dtype=targets.dtype, device=targets.device)
        present = targets[..., 0] >= 0
        extents = targets[..., None, 3:] * cells
        shared = torch.minimum(extents, anchors).prod(-1)
        union = extents.prod(-1) + anchors.prod(-1) - shared
        best = (shared / union).argmax(-1)
        cell = (targets[..., 1:3] * cells).floor().long()
        column = cell[..., 0].clamp(0, columns - 1)
        row = cell[..., 1].clamp(0, rows - 1)
        slots = best * (rows * columns) + row * columns + column
        same = (slots[:, :, None] == slots[:, None, :]) & present[:, None, :]
        earlier = same.tril(diagonal=-1).any(-1)
        return slots, (present & ~earlier).to(targets.dtype), anchors[best]

    def _placed(
        self, at_slot: Tensor, targets: Tensor, grid: tuple[int, int], sides: Tensor
    ) -> Tensor:
        """How far a predicted box is from the true one; small boxes weigh up to twice."""
        rows, columns = grid
        cells = torch.tensor([columns, rows], dtype=targets.dtype, device=targets.device)
        position = targets[..., 1:3] * cells
        within = position - position.floor()
        # Absent boxes have no size; any positive one keeps their logarithm finite.
        extents = torch.where(targets[..., 3:] > 0, targets[..., 3:] * cells, sides)
        off = (at_slot[..., :2].sigmoid() - within).square().sum(-1)
        off = off + (at_slot[..., 2:4] - (extents / sides).log()).square().sum(-1)
        return off * (2 - targets[..., 3:].prod(-1))

    def _emptiness(self, boxes: Tensor, targets: Tensor, slots: Tensor, taken: Tensor) -> Tensor:
        """1 where nothing should be seen, 0 in slots of true boxes and where one is well met."""
        present = targets[..., 0] >= 0
        met = overlaps(boxes[:, :, None], targets[:, None, :, 1:]) * present[:, None]
        empty = (met.amax(-1) < self.ignore).to(boxes.dtype)
        owned = torch.zeros_like(empty).scatter_add(1, slots, taken)
        return empty * (1 - owned)
