"""Memory of a device: the process before it held a model, and the most it held in training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from terrazzo.records.event import Event


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident sizes of one device; 0 means that it was not measured.

        idle ── imports, connections ── ready ── model, plan, what export left ── peak ── training

    ``setup_bytes`` is the peak on the way to ready: exporting a model needs memory of its own.
    """

    device: int
    idle_bytes: float = 0.0
    setup_bytes: float = 0.0
    ready_bytes: float = 0.0
    peak_bytes: float = 0.0

    @property
    def own_bytes(self) -> float:
        """All that training takes beyond the idle process."""
        return max(self.peak_bytes - self.idle_bytes, 0.0)

    @property
    def steps_bytes(self) -> float:
        """What the steps take beyond the process that is ready for them."""
        return max(self.peak_bytes - max(self.ready_bytes, self.idle_bytes), 0.0)


def memory_of(events: Iterable[Event], devices: int) -> tuple[Memory, ...]:
    """From the notes of a run; devices that noted no peak are left out."""
    found: dict[tuple[int, str, str], float] = {}
    for event in events:
        if event.kind == "note" and event.name in ("idle", "setup", "memory"):
            for what, size in event.values:
                key = event.device, event.name, what
                found[key] = max(found.get(key, 0.0), size)
    return tuple(
        Memory(
            device,
            idle_bytes=found.get((device, "idle", "resident_bytes"), 0.0),
            setup_bytes=found.get((device, "setup", "peak_bytes"), 0.0),
            ready_bytes=found.get((device, "setup", "resident_bytes"), 0.0),
            peak_bytes=found[device, "memory", "peak_bytes"],
        )
        for device in range(devices)
        if (device, "memory", "peak_bytes") in found
    )
