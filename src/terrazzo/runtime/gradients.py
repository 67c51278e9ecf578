"""Weight gradients: parts of each device summed in buckets, in the background."""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.runtime.links import Links, Pending

BUCKET_BYTES = 1 << 20


class Buckets:
    """Collects parts as the backward pass makes them; a full bucket starts its sum at once."""

    def __init__(self, links: Links, *, limit_bytes: int = BUCKET_BYTES) -> None:
        self.links, self.limit_bytes = links, limit_bytes
        self._open: list[tuple[str, Tensor]] = []
        self._open_bytes = 0
        self._done: dict[str, Tensor] = {}
        self._flying: list[tuple[list[tuple[str, torch.Size]], Pending]] = []

    def add(self, name: str, part: Tensor) -> None:
        if self.links.devices == 1:
            before = self._done.get(name)
            self._done[name] = part if before is None else before + part
            return
        if self._open and self._open[0][1].dtype != part.dtype:
            self._close()
        self._open.append((name, part))
        self._open_bytes += part.numel() * part.element_size()
        if self._open_bytes >= self.limit_bytes:
            self._close()

    def _close(self) -> None:
        if self._open:
            flat = torch.cat([part.reshape(-1) for _, part in self._open])
            shapes = [(name, part.shape) for name, part in self._open]
            self._flying.append((shapes, self.links.sum_later(flat)))
            self._open, self._open_bytes = [], 0

    def finish(self) -> dict[str, Tensor]:
        """The summed gradients by name, once all have arrived."""
        self._close()
        found = self._done
        for shapes, pending in self._flying:
            pieces = torch.split(pending.wait(), [shape.numel() for _, shape in shapes])
            for (name, shape), piece in zip(shapes, pieces, strict=True):
                total = piece.view(shape)
                found[name] = found[name] + total if name in found else total
        return found
