"""Lift: batches from the memory of a computer onto its GPU, in the way that is measured faster.

The plain way is ``tensor.to("cuda")``. The other one copies into page-locked memory first, of
which there are two buffers for each tensor, and from there on a stream of its own: the copy runs
while the GPU is still at the step before. It pays where steps are short; both are tried.

A script may queue work for a GPU much faster than that does it. It is let run ahead by two steps:
then the time from batch to batch is that of a step, and not of queueing it, and batches that wait
for their turn do not fill the memory of the GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from terrazzo.feed.choice import GAIN, LEAST, SKIPPED, Choice
from terrazzo.feed.copying import Copying, Mark
from terrazzo.runtime.net import Net
from terrazzo.runtime.part import Part
from terrazzo.runtime.recorder import Recorder

PLAIN, PINNED = "plain", "pinned"
TRIED = SKIPPED + 1 + LEAST
"""Batches of each way before it is decided, in epochs of more than three."""
RUN_AHEAD = 2
MOST_BUFFERS = 64
"""Of a feed whose batches never look the same; then all are made anew."""


class Buffer:
    """Page-locked memory for one tensor, and when the last copy from it was over."""

    def __init__(self, like: Tensor) -> None:
        self.host = torch.empty_like(like, pin_memory=True)
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


class Trip(NamedTuple):
    """The way of a batch onto a GPU: when that was ready for it, and when it was there."""

    batch: int
    ready: Mark
    arrived: Mark

    @property
    def late_s(self) -> float | None:
        """How long the GPU did nothing but wait for it; None: that is not known."""
        return self.ready.until_s(self.arrived)


class Lift:
    """Brings the batches of all epochs of a loop onto a device."""

    def __init__(
        self,
        device: str | torch.device,
        *,
        recorder: Callable[[], Recorder | None] = lambda: None,
    ) -> None:
        self.device, self.recorder = torch.device(device), recorder
        self.choice = Choice()
        self.epoch = 0
        self._given = {PLAIN: 0, PINNED: 0}
        self._buffers: dict[tuple[Any, ...], Buffer] = {}
        self._queued: deque[tuple[Mark, Trip | None]] = deque()
        self._trip: Trip | None = None
        """Of the batch that was handed out last, if it may still be under way."""
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @property
    def way(self) -> str:
        """How the next batch is brought."""
        plain_s, pinned_s = self.choice.step_s(PLAIN), self.choice.step_s(PINNED)
        if self._stream is None or plain_s is None:
            return PLAIN
        return PINNED if pinned_s is None or pinned_s < (1 - GAIN) * plain_s else PLAIN

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        copying = Copying(self.recorder(), epoch=self.epoch)
        self.epoch += 1
        before = self.way
        self.choice.begin()
        for number, batch in enumerate(batches):
            way = self.way
            self.choice.step(before)  # the step that is over was fed so
            if way != before:
                self.choice.begin()
            yield self._timed(batch, way, number, copying)
            self._let_catch_up(copying)
            before = way
            self._given[way] += 1

    def _timed(self, batch: Any, way: str, number: int, copying: Copying) -> Any:
        """A batch on the device, or on its way there; what that takes of the loop is told."""
        self._trip = None
        if not copying.is_asked:
            return self._brought(batch, way)
        begin, size_bytes = time.perf_counter(), self._far_bytes(batch)
        if self._stream is None:
            brought = self._brought(batch, way)
            copying.in_loop(begin, batch=number, size_bytes=size_bytes)
            return brought
        now = torch.cuda.current_stream(self.device)
        ready = Mark(now)
        brought = self._brought(batch, way)
        trip = Trip(number, ready, Mark(now if way == PLAIN else self._stream))
        if way == PLAIN:
            trip.arrived.wait()  # as each copy has waited already
            copying.in_loop(begin, batch=number, size_bytes=size_bytes, copied_s=trip.late_s)
        else:
            copying.in_loop(begin, batch=number, size_bytes=size_bytes)
            self._trip = trip
        return brought

    def _far_bytes(self, batch: Any) -> int:
        """What of a batch is not on the device yet."""
        leaves = pytree.tree_leaves(batch)
        tensors = [leaf.tensor if isinstance(leaf, Part) else leaf for leaf in leaves]
        return sum(
            tensor.nbytes
            for tensor in tensors
            if isinstance(tensor, Tensor) and tensor.device.type != self.device.type
        )

    def _let_catch_up(self, copying: Copying) -> None:
        """The work of a step has been queued: waits for the one before the one before it."""
        if self._stream is None:
            return
        self._queued.append((Mark(torch.cuda.current_stream(self.device)), self._trip))
        if len(self._queued) > RUN_AHEAD:
            done, earlier = self._queued.popleft()
            begin = time.perf_counter()
            done.wait()
            if earlier is not None and copying.is_asked:
                copying.in_loop(begin, batch=earlier.batch, copied_s=earlier.late_s or 0.0)

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
        if way == PLAIN or not _is_plain(tensor):
            return tensor.to(self.device)
        assert self._stream is not None
        turn = self._given[PINNED] % 2
        key = (place, turn, tensor.shape, tensor.stride(), tensor.dtype)
        buffer = self._buffers.get(key)
        if buffer is None:
            if len(self._buffers) >= MOST_BUFFERS:
                self._buffers.clear()
            buffer = self._buffers[key] = Buffer(tensor)
        return buffer.bring(tensor, self.device, self._stream)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a copy of its elements is all that there is to it."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.requires_grad:
        return False
    return tensor.is_cpu and tensor.numel() > 0


def lift_of(net: Net, device: str | torch.device) -> Lift:
    """The one for the loops of a net; those that train and those that test have steps of their own
    lengths."""
    lifts: dict[tuple[torch.device, bool], Lift] = net.__dict__.setdefault("_lifts", {})
    key = (torch.device(device), net.training)
    if key not in lifts:
        lifts[key] = Lift(device, recorder=lambda: net.links.recorder)
    return lifts[key]
