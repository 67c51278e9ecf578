"""Weight gradients: parts of each device summed in buckets, in the background."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from terrazzo.runtime.links import Links
from terrazzo.runtime.pending import Pending
from terrazzo.schedule.sums import Circle, Waiting


class Buckets:
    """Collects parts as the backward pass makes them; a full bucket starts its sum at once.

    ``totals`` says how much the circles will collect. Every circle has its own bucket, so that what
    fills one depends only on what its members share; None stands for all devices.
    """

    def __init__(self, links: Links, totals: Mapping[Circle, int]) -> None:
        self.links, self._waiting = links, Waiting(totals)
        self._everybody = tuple(range(links.devices))
        self._open: dict[Circle | None, list[tuple[str, Tensor]]] = {}
        self._done: dict[str, Tensor] = {}
        self._flying: list[tuple[list[tuple[str, torch.Size]], Pending]] = []

    def add(self, name: str, part: Tensor, circle: Circle | None = None) -> None:
        alone = self.links.devices == 1 if circle is None else len(circle) < 2
        if alone:
            before = self._done.get(name)
            self._done[name] = part if before is None else before + part
            return
        bucket = self._open.setdefault(circle, [])
        if bucket and bucket[0][1].dtype != part.dtype:
            self._close(circle)
            bucket = self._open.setdefault(circle, [])
        bucket.append((name, part))
        if self._waiting.add(circle or self._everybody, part.numel() * part.element_size()):
            self._close(circle)

    def _close(self, circle: Circle | None) -> None:
        parts = self._open.pop(circle)
        self._waiting.start(circle or self._everybody)
        flat = torch.cat([part.reshape(-1) for _, part in parts])
        shapes = [(name, part.shape) for name, part in parts]
        self._flying.append((shapes, self.links.sum_later(flat, circle)))

    def finish(self) -> dict[str, Tensor]:
        """The summed gradients by name, once all have arrived."""
        for circle in list(self._open):
            self._close(circle)
        found = self._done
        for shapes, pending in self._flying:
            pieces = torch.split(pending.wait(), [shape.numel() for _, shape in shapes])
            for (name, shape), piece in zip(shapes, pieces, strict=True):
                total = piece.view(shape)
                found[name] = found[name] + total if name in found else total
        return found
