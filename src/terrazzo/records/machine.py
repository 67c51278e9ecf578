"""The machine that a run was started on, as far as it tells without any extra package."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

SMALL_BYTES = 2 << 30
"""A device with less memory is small: what a process can do without is left out there (optimisers
do not load torch's compiler, one that trains alone exports its model in a process of its own)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that a published number must carry."""

    system: str
    processor: str
    cores: int
    memory_bytes: int
    python: str
    torch: str
    terrazzo: str

    @classmethod
    def here(cls) -> Machine:
        return cls(
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            processor=_processor(),
            cores=_cores(),
            memory_bytes=memory_bytes(),
            python=platform.python_version(),
            torch=_version("torch"),
            terrazzo=_version("terrazzo"),
        )


def _cores() -> int:
    """The cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    """x86 says "model name"; boards say what they are in their device tree."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return " ".join(value.split())
        board = Path("/proc/device-tree/model").read_text(encoding="utf-8")
        return board.rstrip("\0").strip()
    except (OSError, UnicodeDecodeError):
        return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """All of it; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
