"""Weight gradients: parts of each device summed in buckets, in the background."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from terrazzo.runtime.links import Links
from terrazzo.runtime.pending import Pending
from terrazzo.schedule.sums import MOST_BYTES, Circle


@dataclass
class _Bucket:
    """Parts of one dtype on their way to one circle."""

    parts: list[tuple[str, Tensor]] = field(default_factory=list)
    size: int = 0

    def take(self, name: str, part: Tensor) -> None:
        self.parts.append((name, part))
        self.size += part.numel() * part.element_size()


class Buckets:
    """Collects parts as the backward pass makes them; a full bucket starts its sum at once.

    ``limits`` says when the bucket of a circle is full. Every circle has its own, so that what
    fills one depends only on what its members share; None stands for all devices.
    """

    def __init__(self, links: Links, limits: Mapping[Circle, int]) -> None:
        self.links, self.limits = links, limits
        self._everybody = tuple(range(links.devices))
        self._open: dict[Circle | None, _Bucket] = {}
        self._done: dict[str, Tensor] = {}
        self._flying: list[tuple[list[tuple[str, torch.Size]], Pending]] = []

    def add(self, name: str, part: Tensor, circle: Circle | None = None) -> None:
        alone = self.links.devices == 1 if circle is None else len(circle) < 2
        if alone:
            before = self._done.get(name)
            self._done[name] = part if before is None else before + part
            return
        bucket = self._open.setdefault(circle, _Bucket())
        if bucket.parts and bucket.parts[0][1].dtype != part.dtype:
            self._close(circle)
            bucket = self._open.setdefault(circle, _Bucket())
        bucket.take(name, part)
        if bucket.size >= self.limits.get(circle or self._everybody, MOST_BYTES):
            self._close(circle)

    def _close(self, circle: Circle | None) -> None:
        parts = self._open.pop(circle).parts
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
