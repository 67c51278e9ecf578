"""Pending: what is under way between devices, and what happens when it does not arrive."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from terrazzo.runtime.courier import Job
from terrazzo.runtime.end import End
from terrazzo.runtime.staging import Staging, from_host

if TYPE_CHECKING:
    from terrazzo.runtime.links import Links

LOOK, ASLEEP_S = timedelta(seconds=0.5), 1.0
"""How often a long wait is looked at, and how long after hanging up gloo must have noticed."""


def finish(links: Links, work: Any) -> None:
    """Waits for something that all devices do together by gloo.

    It fails when its connections are hung up. What gloo has begun in just that moment does not: it
    sleeps until its time limit, some minutes. Then it is left to itself.
    """
    while True:
        try:
            work.wait(LOOK)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # it may have ended well in between, and says now how it did
                return
        hung_up_s = links.hung_up_s
        if hung_up_s is not None and time.monotonic() - hung_up_s > ASLEEP_S:
            links.abandon()
            raise RuntimeError("the connections were closed as it began")


class Guard:
    """While a device is busy with others. A class, because it is entered a hundred times a step.

    One may be inside of another: a wait for others in which something is sent to them.
    """

    __slots__ = ("_begin_s", "_links", "_waited")

    def __init__(self, links: Links) -> None:
        self._links = links

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()
        self._waited, self._links.waits = self._links.waits, True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._links.waits = self._waited
        self._links.counters.away_s += time.perf_counter() - self._begin_s
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise self._links.lost(error, getattr(error, "peer", None)) from error


@dataclass
class Voyage:
    """Boxes on their way."""

    links: Links
    staging: Staging
    ends: Sequence[End] = ()
    carried: Job | None = None

    def land(self) -> None:
        """Waits until all that was to arrive is there, and all that was sent has left."""
        if self.ends:
            with self.links._guard():
                self.links._wire.end(self.ends)
        if self.carried is not None:
            with self.links._guard():
                self.carried.wait(self.links.timeout_s)
        self.staging.land()


@dataclass
class Pending:
    """A sum under way."""

    links: Links
    job: Job
    tensor: Tensor
    host: Tensor

    def wait(self) -> Tensor:
        with self.links._guard():
            self.job.wait(self.links.timeout_s)
        return from_host(self.tensor, self.host)
