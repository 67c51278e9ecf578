"""Average precision: how well found boxes meet the true ones, over all thresholds of score."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from terrazzo.zoo.boxes import overlaps


def mean_average_precision(
    found: Sequence[Tensor], targets: Sequence[Tensor], *, classes: int, overlap: float = 0.5
) -> float:
    """The mean over the classes that occur in ``targets``; 0 if none does.

    ``found`` is what ``decode`` gave for each picture, ``targets`` the true boxes (boxes, 5) of
    each, with class -1 for none.
    """
    each = [_average_precision(found, targets, label, overlap) for label in range(classes)]
    known = [precision for precision in each if precision is not None]
    return sum(known) / len(known) if known else 0.0


def _average_precision(
    found: Sequence[Tensor], targets: Sequence[Tensor], label: int, overlap: float
) -> float | None:
    """The area under the curve of precision over recall, made to fall steadily."""
    hits: list[tuple[float, bool]] = []
    total = 0
    for rows, truth in zip(found, targets, strict=True):
        rows, truth = rows[rows[:, 0] == label], truth[truth[:, 0] == label]
        total += len(truth)
        hits += zip(rows[:, 1].tolist(), _hits(rows, truth, overlap), strict=True)
    if not total:
        return None
    hits.sort(key=lambda hit: -hit[0])
    right = torch.tensor([hit for _, hit in hits], dtype=torch.float64).cumsum(0)
    precision = right / torch.arange(1, len(hits) + 1)
    best_from_here = precision.flip(0).cummax(0).values.flip(0)
    gained = right.diff(prepend=right.new_zeros(1)) / total
    return float((gained * best_from_here).sum())


def _hits(rows: Tensor, truth: Tensor, overlap: float) -> list[bool]:
    """For each found box, best first, whether it meets a true one that no better one has met."""
    fits = overlaps(rows[:, None, 2:], truth[None, :, 1:].to(rows))
    taken: set[int] = set()
    hits = []
    for fit in fits.tolist():
        best = max(range(len(fit)), key=fit.__getitem__, default=-1)
        is_hit = best >= 0 and fit[best] >= overlap and best not in taken
        taken |= {best} if is_hit else set()
        hits.append(is_hit)
    return hits
