"""Posted: a batch that travels to the other devices while they compute with the one before it.

The device that reads says with a batch that the next one is at hand and looks the same. All then
post its messages and go on; they travel beside the step, and what is left is waited for when the
batch is asked for. When a device is lost or the plan changes meanwhile, it is simply sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from terrazzo.geometry import Box
from terrazzo.runtime.links import Links
from terrazzo.runtime.wire import Parcel

SMALL_BYTES = 1 << 16
"""Targets that are larger are not sent to each device by itself."""


class Posted:
    """One batch on its way; all devices post it at the same place of the protocol."""

    def __init__(
        self,
        links: Links,
        tensors: Sequence[Tensor],
        boxes: Sequence[tuple[Box, ...]],
        *,
        header: dict[str, Any],
        reader: int,
        number: int,
    ) -> None:
        """``tensors`` are real on the reader only; those without boxes travel whole, if small."""
        self.boxes, self.header, self.number, self.epoch = list(boxes), header, number, links.epoch
        self.pieces: list[Tensor] = []
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        mine = links.device == reader
        for at, tensor in enumerate(tensors):
            if at >= len(boxes) and not self.carries(tensors[len(boxes) :]):
                break
            whole = (Box.whole(tuple(tensor.shape)),) * links.devices
            given = boxes[at] if at < len(boxes) else whole
            for device, box in enumerate(given):
                if mine:
                    piece = tensor[box.slices()].contiguous()
                elif device == links.device:
                    piece = torch.empty(box.shape, dtype=tensor.dtype)
                else:
                    continue
                if device == links.device:
                    self.pieces.append(piece)
                if not piece.numel() or (mine and device == reader):
                    continue
                peer = device if mine else reader
                (sends if mine else receives).append((peer, piece))
        self._voyage = links.depart(sends, receives, busy=True)

    @staticmethod
    def carries(wholes: Sequence[Tensor]) -> bool:
        """Whether targets travel with the input; a mask for each pixel is sent another way."""
        return sum(tensor.nbytes for tensor in wholes) <= SMALL_BYTES

    def land(self) -> list[Tensor]:
        """This device's pieces, once they are all here."""
        self._voyage.land()
        return self.pieces
