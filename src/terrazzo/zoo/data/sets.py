"""The sets as torch Datasets: a picture is decoded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from terrazzo.errors import UsageError
from terrazzo.zoo.data import codec, store
from terrazzo.zoo.data.make import MOST_SHAPES

Sample = tuple[Tensor, Any]
Transform = Callable[[Tensor, Any], Sample]
"""From a picture and its target to another picture and its target."""


class PictureSet(Dataset[Sample]):
    """What the three have in common: a folder, an optional transform, uint8 pictures (3, H, W)."""

    task = ""

    def __init__(self, folder: Path | str, transform: Transform | None = None) -> None:
        self.folder, self.transform = Path(folder), transform
        self.recipe, self.entries = store.read(self.folder)
        if self.recipe.task != self.task:
            raise UsageError(
                f"{folder} holds {self.recipe}, a {type(self).__name__} reads {self.task} pictures"
            )

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Sample:
        entry = self.entries[index]
        picture = codec.read_picture(self.folder / entry["picture"])
        target = self._target(entry)
        return self.transform(picture, target) if self.transform else (picture, target)

    def _target(self, entry: store.Entry) -> Any:
        raise NotImplementedError


class DetectionSet(PictureSet):
    """(uint8 (3, H, W), float32 (6, 5)): class, cx, cy, w, h in [0, 1]; class -1: no box."""

    task = "detection"
    max_boxes = MOST_SHAPES

    def _target(self, entry: store.Entry) -> Tensor:
        targets = torch.zeros(self.max_boxes, 5)
        targets[:, 0] = -1
        for row, (label, left, top, right, bottom) in zip(targets, entry["boxes"], strict=False):
            box = torch.tensor([left + right, top + bottom, 2 * (right - left), 2 * (bottom - top)])
            row[0], row[1:] = label, box / (2 * self.recipe.size)
        return targets


class SegmentationSet(PictureSet):
    """(uint8 (3, H, W), uint8 (H, W)): 0 is ground, 1 + class a shape."""

    task = "segmentation"

    def _target(self, entry: store.Entry) -> Tensor:
        return codec.read_mask(self.folder / entry["mask"])


class ClassificationSet(PictureSet):
    """(uint8 (3, H, W), class)."""

    task = "classification"

    def _target(self, entry: store.Entry) -> int:
        return int(entry["label"])
