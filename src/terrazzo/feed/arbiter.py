"""Arbiter: how much memory samples may take, after the model and with the rest of the device.

Model, held samples and batches ahead share one budget: what the device or its container has. What
the model once needed at its peak it will need again in the next step, so that much is kept free,
and a reserve beyond. The reserve is never touched on purpose: what is over it is given back before
the next step begins.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from terrazzo.runtime.ceiling import ROOT, ceiling_bytes, memory_folders

RESERVE = 0.05
LEAST_RESERVE_BYTES = 64 << 20
MEMORY_EVERY_S = 0.5
"""Memory is looked at so often, at most."""
BOUNDS_S = 10.0
"""So long it is taken as known which control groups have limits."""
FIELDS = (
    ("memory.max", "memory.current", "inactive_file", "active_file"),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "total_active_file",
    ),
)
"""Of control groups of version 2 and 1: limit, use, and what of that are files."""


@dataclass(frozen=True)
class Memory:
    """What a device has, now."""

    ceiling_bytes: int
    available_bytes: int
    """What could be taken without anybody having to give something up; files in memory can be
    dropped at any time."""
    resident_bytes: int
    peak_bytes: int
    """Of the process that trains."""

    @classmethod
    def here(cls) -> Memory:
        resident, peak = _own_bytes()
        return cls(ceiling_bytes(), Left()(), resident, peak)


def reserve_bytes(ceiling: int) -> int:
    """What is never touched on purpose, on a device that has so much in all."""
    return max(int(RESERVE * ceiling), LEAST_RESERVE_BYTES)


def room_bytes(memory: Memory, *, held_bytes: int, asked_bytes: int | None) -> int:
    """How much may be held: what is held already, and what is free beyond the model's next step.

    ``asked_bytes`` bounds it further; None: half of what is free, for others want some, too.
    """
    reserve = reserve_bytes(memory.ceiling_bytes)
    next_step = max(memory.peak_bytes - memory.resident_bytes, 0)
    free = memory.available_bytes - reserve - next_step
    if asked_bytes is None:
        return max((held_bytes + free) // 2 if free > 0 else held_bytes + free, 0)
    return max(min(asked_bytes, held_bytes + free), 0)


def _own_bytes() -> tuple[int, int]:
    """Resident now and at most, of this process."""
    found = _table(Path("/proc/self/status"))
    return found.get("VmRSS", 0), found.get("VmHWM", 0)


def _machine_bytes() -> int:
    return _table(Path("/proc/meminfo")).get("MemAvailable", 0)


def _table(path: Path) -> dict[str, int]:
    """Lines of "Name:   12 kB"."""
    found = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


@dataclass(frozen=True)
class Bound:
    """A control group with a limit."""

    limit_bytes: int
    use: Path
    stat: Path
    files: tuple[str, ...]

    @property
    def left_bytes(self) -> int:
        used = _number(self.use)
        if used is None:
            return self.limit_bytes
        stat = _stat(self.stat)
        return self.limit_bytes - used + sum(stat.get(name, 0) for name in self.files)


def bounds(root: Path = ROOT) -> list[Bound]:
    """All control groups that bound this process."""
    found = []
    for folder in memory_folders(root):
        for limit, use, *files in FIELDS:
            most = _number(folder / limit)
            if most is not None and (folder / use).exists():
                found.append(Bound(most, folder / use, folder / "memory.stat", tuple(files)))
    return found


class Left:
    """How much memory could be taken now; made once by who asks often."""

    def __init__(self) -> None:
        self._bounds: list[Bound] = []
        self._known_until = 0.0

    def __call__(self) -> int:
        now = time.monotonic()
        if now > self._known_until:
            self._bounds, self._known_until = bounds(), now + BOUNDS_S
        return min([_machine_bytes(), *(bound.left_bytes for bound in self._bounds)])


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _stat(path: Path) -> dict[str, int]:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
