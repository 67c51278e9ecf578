"""Lift: batches from the memory of a computer onto its GPU, in the way that is measured faster.

The plain way is ``tensor.to("cuda")``. The other one copies into page-locked memory first, of
which there are two buffers for each tensor, and from there on a stream of its own: the copy runs
while the GPU is still at the step before. It pays where steps are short; both are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from terrazzo.feed.choice import GAIN, LEAST, SKIPPED, Choice
from terrazzo.runtime.part import Part

PLAIN, PINNED = "plain", "pinned"
TRIED = SKIPPED + 1 + LEAST
"""Batches of each way before it is decided."""


class Buffer:
    """Page-locked memory for one tensor, and when the last copy from it was over."""

    def __init__(self, like: Tensor) -> None:
        self.host = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def bring(self, tensor: Tensor, device: torch.device, stream: torch.cuda.Stream) -> Tensor:
        """A copy on the GPU, which later work of the current stream waits for by itself."""
        self.copied.synchronize()
        self.host.copy_(tensor)
        with torch.cuda.stream(stream):
            found = self.host.to(device, non_blocking=True)
            self.copied.record(stream)
        now = torch.cuda.current_stream(device)
        now.wait_event(self.copied)
        found.record_stream(now)
        return found


class Lift:
    """Brings the batches of one feed onto a device."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self.choice = Choice()
        self._given = 0
        self._buffers: dict[tuple[Any, ...], Buffer] = {}
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @property
    def way(self) -> str:
        """How the next batch is brought."""
        if self._stream is None or self._given < TRIED:
            return PLAIN
        if self._given < 2 * TRIED:
            return PINNED
        plain_s, pinned_s = self.choice.step_s(PLAIN), self.choice.step_s(PINNED)
        assert plain_s is not None
        assert pinned_s is not None
        return PINNED if pinned_s < (1 - GAIN) * plain_s else PLAIN

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        before = PLAIN
        for batch in batches:
            way = self.way
            if self._given in (0, TRIED):
                self.choice.begin()
            self.choice.step(before)  # which the step that is over was
            yield self._brought(batch, way)
            before, self._given = way, self._given + 1

    def _brought(self, batch: Any, way: str) -> Any:
        leaves, tree = pytree.tree_flatten(batch)
        return pytree.tree_unflatten(
            [self._one(leaf, at, way) for at, leaf in enumerate(leaves)], tree
        )

    def _one(self, leaf: Any, place: int, way: str) -> Any:
        if isinstance(leaf, Part):
            device = self.device
            return leaf._with(self._moved(leaf.tensor, place, way), lambda part: part.to(device))
        return self._moved(leaf, place, way) if isinstance(leaf, Tensor) else leaf

    def _moved(self, tensor: Tensor, place: int, way: str) -> Tensor:
        if way == PLAIN or not tensor.is_cpu or not tensor.numel():
            return tensor.to(self.device)
        assert self._stream is not None
        key = (place, self._given % 2, tensor.shape, tensor.dtype)
        buffer = self._buffers.get(key)
        if buffer is None:
            if len(self._buffers) >= 64:  # of a feed whose batches never look the same
                self._buffers.clear()
            buffer = self._buffers[key] = Buffer(tensor)
        return buffer.bring(tensor, self.device, self._stream)
