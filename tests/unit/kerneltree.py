"""A folder that mimics the kernel's hierarchy of control groups, version 2."""

from __future__ import annotations

from pathlib import Path

from terrazzo.lab.groups import make_folder
from terrazzo.lab.groups2 import Groups2

ALL = frozenset({"cpu", "memory", "io"})
FILES = {
    "cgroup.controllers": "cpu io memory",
    "cgroup.subtree_control": "cpu memory io",
    "cgroup.procs": "",
    "cgroup.freeze": "0",
    "cpu.max": "max 100000",
    "cpu.max.burst": "0",
    "cpu.weight": "10000",
    "cpu.stat": "usage_usec 2500000\nthrottled_usec 1000000",
    "memory.max": "max",
    "memory.swap.max": "1",
    "memory.current": "4096",
    "memory.peak": "8192",
    "memory.stat": "anon 1000\nactive_file 900\ninactive_file 100\nkernel 300\nsock 200",
    "memory.events": "low 0\noom 1\noom_kill 3",
    "io.max": "",
}


def fill(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)


def make(path: Path) -> None:
    make_folder(path)
    fill(path)


def tree(root: Path) -> Groups2:
    fill(root)
    return Groups2(root, ALL, make)


def empty(root: Path) -> None:
    """The kernel's files need no removing before their folder; these do."""
    for path in root.glob("terrazzo-*/**/*"):
        if path.is_file():
            path.unlink()
