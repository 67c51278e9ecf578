"""Staging: what lies on a GPU passes through host memory on its way to other devices.

gloo sends from the memory of a computer, not from that of its GPU. A tensor there is copied into
pinned memory first, and what arrives is copied up afterwards. torch keeps pinned memory for the
next time, and does not give it away before a copy from it is over. Tensors of a CPU stand for
themselves, so nothing here costs them anything.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor is out of gloo's reach."""
    return not tensor.is_cpu


def room(tensor: Tensor) -> Tensor:
    """Host memory for as much as a tensor holds; the tensor itself if it lies there."""
    if not is_away(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def to_host(tensor: Tensor) -> Tensor:
    """A copy that can be sent at once; the tensor itself if it is on the host."""
    if not is_away(tensor):
        return tensor
    staging = Staging()
    copy = staging.outgoing(tensor)
    staging.settle()
    return copy


def from_host(tensor: Tensor, arrived: Tensor) -> Tensor:
    """Brings what arrived, in host memory, to the tensor it is for."""
    return tensor if arrived is tensor else tensor.copy_(arrived, non_blocking=True)


class Staging:
    """The tensors of one exchange: all copies start, then one wait for all of them."""

    def __init__(self) -> None:
        self._source: torch.device | None = None
        self._arriving: list[tuple[Tensor, Tensor]] = []

    def outgoing(self, tensor: Tensor) -> Tensor:
        """What to send in place of a tensor, once ``settle`` has returned."""
        if not is_away(tensor):
            return tensor
        self._source = tensor.device
        return room(tensor).copy_(tensor, non_blocking=True)

    def incoming(self, tensor: Tensor) -> Tensor:
        """Where to receive what is meant for a tensor; ``land`` brings it there."""
        buffer = room(tensor)
        if buffer is not tensor:
            self._arriving.append((tensor, buffer))
        return buffer

    def settle(self) -> None:
        """Waits until what is to be sent has left the GPU."""
        if self._source is not None and self._source.type == "cuda":
            torch.cuda.current_stream(self._source).synchronize()

    def land(self) -> None:
        """What arrived goes up; later work on the GPU waits for it by itself."""
        for tensor, buffer in self._arriving:
            from_host(tensor, buffer)
