"""A medium: the disk and file system under a path, as far as the kernel tells."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True, slots=True)
class Medium:
    """A disk by its name in the kernel; an empty one is no disk of this machine's own."""

    disk: str
    file_system: str

    @property
    def is_memory(self) -> bool:
        return self.file_system in IN_MEMORY

    @property
    def title(self) -> str:
        if self.is_memory:
            return f"memory ({self.file_system})"
        return f"disk {self.disk} ({self.file_system})" if self.disk else self.file_system


def medium_of(path: Path) -> Medium:
    number = path.stat().st_dev
    disk = ""
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    with suppress(OSError):
        entry = entry.resolve(strict=True)
        if (entry / "partition").exists():
            entry = entry.parent
        disk = entry.name
    return Medium(disk, _file_system(path))


def _file_system(path: Path) -> str:
    """By the longest place in the table of mounts that holds the path."""
    where, best, found = path.resolve(), -1, "unknown file system"
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, place, kind, *_ = line.split(" ")
            mount = Path(place.replace("\\040", " "))
            if (mount == where or mount in where.parents) and len(mount.parts) > best:
                best, found = len(mount.parts), kind
    return found
