"""Pending: what is under way between devices, and what happens when it does not arrive."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from terrazzo.runtime.staging import Staging, from_host
from terrazzo.runtime.wire import End

if TYPE_CHECKING:
    from terrazzo.runtime.links import Links


class Guard:
    """While a device is busy with others. A class, because it is entered a hundred times a step."""

    __slots__ = ("_begin_s", "_links", "_peer")

    def __init__(self, links: Links, peer: int | None) -> None:
        self._links, self._peer = links, peer

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()
        self._links.waits = True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._links.waits = False
        self._links.counters.away_s += time.perf_counter() - self._begin_s
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise self._links.lost(error, getattr(error, "peer", self._peer)) from error


@dataclass
class Voyage:
    """Boxes on their way."""

    links: Links
    staging: Staging
    ends: Sequence[End] = ()
    works: Sequence[tuple[int, Any]] = ()

    def land(self) -> None:
        """Waits until all that was to arrive is there, and all that was sent has left."""
        if self.ends:
            with self.links._guard():
                self.links._wire.end(self.ends)
        for peer, work in self.works:
            with self.links._guard(peer):
                work.wait(self.links.limit)
        self.staging.land()


@dataclass
class Pending:
    """A sum under way."""

    links: Links
    work: Any
    tensor: Tensor
    host: Tensor

    def wait(self) -> Tensor:
        with self.links._guard():
            self.work.wait()
        return from_host(self.tensor, self.host)
