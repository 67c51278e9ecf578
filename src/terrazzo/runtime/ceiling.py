"""The ceiling: how much memory this process may take at most, on this board or in its container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from terrazzo.records.machine import SMALL_BYTES, memory_bytes

ROOT = Path("/sys/fs/cgroup")


def ceiling_bytes(root: Path = ROOT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """The memory of the machine, or the least limit of the control groups this process is in."""
    return min([memory_bytes(), *_limits(root, membership)])


def is_small() -> bool:
    """Whether this process has to do with little."""
    return ceiling_bytes() < SMALL_BYTES


def _limits(root: Path, membership: Path) -> Iterator[int]:
    for folder in memory_folders(root, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit():
                yield int(text)


def memory_folders(
    root: Path = ROOT, membership: Path = Path("/proc/self/cgroup")
) -> Iterator[Path]:
    """The control groups that bound this process's memory, the innermost first."""
    for line in _read(membership).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "memory" if kinds else root
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):
            yield place
            if place == top:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # groups of another namespace, or none
        return ""
