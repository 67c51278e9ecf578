"""Letters: texts and bytes from device to device, and how much was sent in all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Counters:
    """Payload so far: boxes sent to peers, and the sizes of what was summed or gathered."""

    sent_bytes: int = 0
    summed_bytes: int = 0
    away_s: float = 0.0
    """Seconds of this device in messages and in waiting for them; the rest is its own work."""

    @property
    def total_bytes(self) -> int:
        return self.sent_bytes + self.summed_bytes


class Letters(ABC):
    """What links can send beside tensors of known size."""

    device: int
    devices: int

    @abstractmethod
    def gather(self, tensor: Tensor, *, counted: bool = True) -> Tensor: ...

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor: ...

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """A byte string from one device; the others pass None."""
        if self.devices == 1:
            assert data is not None
            return data
        size = self.broadcast(torch.tensor([len(data or b"")]), source)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return bytes(self.broadcast(buffer, source).numpy().tobytes()) if int(size) else b""

    def gather_text(self, text: str) -> list[str]:
        """A short text from each device; it may be empty."""
        data = text.encode()
        sizes = self.gather(torch.tensor([len(data)]), counted=False)
        buffer = torch.zeros(max(1, int(sizes.max())), dtype=torch.uint8)
        if data:
            buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.gather(buffer, counted=False)
        return [
            row[: int(size)].numpy().tobytes().decode()
            for row, size in zip(rows, sizes, strict=True)
        ]
