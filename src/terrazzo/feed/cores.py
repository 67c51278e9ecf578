"""Cores: how many this process may use, counting a quota that its group has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def allowed_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """At most as many as it may run on; a part of one under a quota."""
    if hasattr(os, "sched_getaffinity"):
        here = float(len(os.sched_getaffinity(0)))
    else:
        here = float(os.cpu_count() or 1)
    return min((here, *_quotas(root)))


def _quotas(root: Path) -> Iterator[float]:
    """Of the group of this process and of all groups above it, in both versions."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / "cpu" if controllers else root
            folder = top / place.lstrip("/")
            for level in (folder, *folder.parents):
                yield from _quota(level)
                if level == top:
                    break


def _quota(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
        if int(quota) > 0:
            yield int(quota) / int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
