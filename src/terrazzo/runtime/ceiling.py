"""The ceiling: how much memory this process may take at most, on this board or in its container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from terrazzo.records.machine import memory_bytes

SMALL_BYTES = 2 << 30
"""Devices with less cannot spare the hundred MiB that exporting a model would leave behind."""
ROOT = Path("/sys/fs/cgroup")


def ceiling_bytes(root: Path = ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """The memory of the machine, or the least limit of the control groups this process is in."""
    return min([memory_bytes(), *_limits(root, membership)])


def _limits(root: Path, membership: Path) -> Iterator[int]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            text = _read(place / name)
            if text.isdigit():
                yield int(text)
            if place == top:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # groups of another namespace, or none
        return ""
