"""Copying: how much of a step is bringing its batch to a device, told apart from computing there.

A GPU does what is queued one after the other. A plain copy waits for all that was queued before it:
that is computing, and only what the GPU then does is copying. A copy through page-locked memory
goes on beside the loop. Where the GPU has to wait for it, the loop finds out when it waits for the
GPU, some steps later. So the GPU notes itself when it was ready for a batch, and when it was there.

    loop  | copy |      queue a step      |  wait for the GPU   |
    GPU   ...............| ready   arrived |.....................
"""

from __future__ import annotations

import time

import torch

from terrazzo.feed.stages import Clock, Took
from terrazzo.records.stage import COPY
from terrazzo.runtime.recorder import Recorder


class Mark:
    """A place in the work of a stream, and when the GPU came there."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def until_s(self, other: Mark) -> float | None:
        """Seconds from here to there; None: one of them has not been passed yet."""
        events = (self._event, other._event)
        if not all(event.query() for event in events):  # type: ignore[no-untyped-call]
            return None
        return float(self._event.elapsed_time(other._event)) / 1e3


class Copying:
    """Writes down the copies of one epoch, batch by batch."""

    def __init__(self, recorder: Recorder | None, *, epoch: int) -> None:
        self._clock, self._epoch = Clock(recorder), epoch

    @property
    def is_asked(self) -> bool:
        """Whether anybody wants to know: events on a GPU with times take a little."""
        return self._clock.recorder is not None

    def in_loop(
        self, begin: float, *, batch: int, size_bytes: int = 0, copied_s: float | None = None
    ) -> None:
        """From ``begin`` until now the loop was busy with a copy, or waited for a GPU that was.

        ``copied_s``: no more than that of it, at its end, was copying.
        """
        end = time.perf_counter()
        worked_s = end - begin if copied_s is None else min(max(copied_s, 0.0), end - begin)
        if worked_s > 0:
            took = Took(COPY, end - worked_s, end, worked_s, size_bytes)
            self._clock.note(took, epoch=self._epoch, batch=batch, beside=False)
