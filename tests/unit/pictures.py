"""Data sets for the tests of feeding: plain ones, random ones, and files that can be spoilt."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

SIZE = 37


class Numbers(Dataset[tuple[Tensor, int]]):
    """Sample ``i`` is full of ``i``, plus what it draws, if it draws."""

    def __init__(self, *, draws: bool = False, count: int = SIZE) -> None:
        self.draws, self.count, self.scale = draws, count, 1.0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.full((2, 3), index * self.scale)
        if self.draws and index % 3:
            x = x + torch.rand(2, 3) + random.random() + float(np.random.rand())
        return x, index


class Files(Dataset[tuple[Tensor, int]]):
    """Sample ``i`` is the bytes of file ``i``; each is as long as its number says."""

    def __init__(self, folder: Path, count: int = 24, size: int = 4096) -> None:
        self.folder, self.count = folder, count
        folder.mkdir(exist_ok=True)
        for index in range(count):
            self.path(index).write_bytes(bytes([index]) * (size + 64 * index))

    def path(self, index: int) -> Path:
        return self.folder / f"{index:03}.bin"

    def __len__(self) -> int:
        return self.count

    @property
    def total_bytes(self) -> int:
        return sum(self.path(index).stat().st_size for index in range(self.count))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        data = self.path(index).read_bytes()
        if data[0] != index:
            raise ValueError(f"{self.path(index).name} is no picture of {index}")
        return torch.frombuffer(bytearray(data[:64]), dtype=torch.uint8), index


class Deadly(Numbers):
    """One of its samples ends the process that reads it, unless that is the one that trains."""

    def __init__(self, sample: int) -> None:
        super().__init__()
        self.sample, self.owner = sample, os.getpid()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.sample and os.getpid() != self.owner:
            os._exit(3)
        return super().__getitem__(index)


def flat(batches: Any) -> list[list[Any]]:
    """What can be compared with ``==``, to the bit."""
    return [[part.tolist() if isinstance(part, Tensor) else part for part in b] for b in batches]
