"""Memory of a device: the process before it held a model, and the most it held in training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from terrazzo.records.event import Event


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident sizes of one device; an ``idle_bytes`` of 0 means that it was not measured.

    ``setup_bytes`` is the peak until the first step (exporting the model needs memory of its
    own), ``peak_bytes`` the peak from then on.
    """

    device: int
    idle_bytes: float = 0.0
    setup_bytes: float = 0.0
    peak_bytes: float = 0.0

    @property
    def own_bytes(self) -> float:
        """What training takes beyond the idle process."""
        return max(self.peak_bytes - self.idle_bytes, 0.0)


def memory_of(events: Iterable[Event], devices: int) -> tuple[Memory, ...]:
    """From the notes of a run; devices that noted nothing are left out."""
    peaks: dict[tuple[int, str], float] = {}
    for event in events:
        if event.kind == "note" and event.name in ("idle", "setup", "memory"):
            size = max((value for _, value in event.values), default=0.0)
            key = event.device, event.name
            peaks[key] = max(peaks.get(key, 0.0), size)
    return tuple(
        Memory(
            device,
            idle_bytes=peaks.get((device, "idle"), 0.0),
            setup_bytes=peaks.get((device, "setup"), 0.0),
            peak_bytes=peaks[device, "memory"],
        )
        for device in range(devices)
        if (device, "memory") in peaks
    )
