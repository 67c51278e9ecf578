"""Busy seconds: how long processors were at work, for a machine or for this process and its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from terrazzo.meters.meter import text_of

PROC = Path("/proc")


def machine_busy_s(root: Path) -> Callable[[], float]:
    """Processor seconds of the whole machine, from /proc/stat."""
    ticks = os.sysconf("SC_CLK_TCK")

    def busy_s() -> float:
        words = text_of(root / "proc/stat").partition("\n")[0].split()[1:]
        numbers = [float(word) for word in words] or [0.0] * 8
        idle = numbers[3] + numbers[4]
        return (sum(numbers[:8]) - idle) / ticks

    return busy_s


def family_busy_s() -> Callable[[], float]:
    """Processor seconds of this process and of all that it started: those who load data, say."""
    ticks, most_s = os.sysconf("SC_CLK_TCK"), 0.0

    def busy_s() -> float:
        nonlocal most_s
        own = os.times()
        seconds = own.user + own.system + own.children_user + own.children_system
        seconds += sum(_ticks(process) for process in _offspring(os.getpid())) / ticks
        most_s = max(most_s, seconds)  # who ends without being waited for takes its time along
        return most_s

    return busy_s


def _offspring(process: int) -> Iterator[int]:
    """Children, their children and so on, as far as the kernel shows them."""
    for file in (PROC / str(process) / "task").glob("*/children"):
        for word in text_of(file).split():
            yield int(word)
            yield from _offspring(int(word))


def _ticks(process: int) -> float:
    """Of a process, and of the children that it has waited for."""
    words = text_of(PROC / str(process) / "stat").rpartition(")")[2].split()
    return sum(float(word) for word in words[11:15])
