"""Cores that are on, and the clock of those that are.

Cores that share a clock form a policy; the files of a policy are there while one of its cores is
on. The first core can't be switched off. A limit is never moved past the other one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from terrazzo.errors import KnobError
from terrazzo.power.knob import Files, nearest
from terrazzo.power.sysfs import Sysfs

CPU = "sys/devices/system/cpu"
STEPS = 8
"""Clocks to choose from where the driver names only the lowest and the highest."""


@dataclass(frozen=True, slots=True)
class Cores:
    """How many cores are on."""

    sysfs: Sysfs
    files: tuple[str, ...]
    name: str = "cores"
    governor: str = ""

    @classmethod
    def find(cls, sysfs: Sysfs) -> list[Cores]:
        paths = sysfs.path(CPU).glob("cpu[0-9]*/online")
        numbers = sorted(int(path.parent.name[3:]) for path in paths)
        files = tuple(f"{CPU}/cpu{number}/online" for number in numbers if number)
        return [cls(sysfs, files)] if files else []

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(float(count) for count in range(1, len(self.files) + 2))

    def read(self) -> float:
        return 1.0 + sum(self.sysfs.read(name) == "1" for name in self.files)

    def set(self, value: float) -> None:
        """The first ones: those of whole groups are on or off together as far as can be."""
        for place, name in enumerate(self.files, start=1):
            if place < value:
                self.sysfs.write(name, "1")
        for place, name in enumerate(self.files, start=1):
            if place >= value:
                self.sysfs.write(name, "0")

    def state(self) -> Files:
        return [(name, self.sysfs.read(name)) for name in self.files]

    def restore(self, files: Files) -> None:
        for name, text in files:
            if name in self.files:
                self.sysfs.write(name, text)


@dataclass(frozen=True, slots=True)
class Limits:
    """The two limits of a clock in one folder."""

    sysfs: Sysfs
    low: str
    high: str

    def set(self, low: str, high: str) -> None:
        """In the order in which they do not cross."""
        order = [(self.high, high), (self.low, low)]
        if float(high) < float(self.sysfs.read(self.high)):
            order.reverse()
        for name, text in order:
            self.sysfs.write(name, text)

    def state(self) -> Files:
        return [(name, self.sysfs.read(name)) for name in (self.low, self.high)]

    def restore(self, files: Files) -> None:
        saved = dict(files)
        if self.low in saved and self.high in saved:
            self.set(saved[self.low], saved[self.high])


@dataclass(frozen=True, slots=True)
class CpuClock:
    """The clock of all cores: every policy gets its nearest."""

    sysfs: Sysfs
    values: tuple[float, ...]
    name: str = "cpu_hz"

    @classmethod
    def find(cls, sysfs: Sysfs) -> list[CpuClock]:
        tables = [_table(sysfs, folder) for folder in _policies(sysfs)]
        tables = [table for table in tables if len(table) > 1]
        return [cls(sysfs, max(tables, key=len))] if tables else []

    @property
    def governor(self) -> str:
        names = {self.sysfs.read(f"{f}/scaling_governor") for f in _policies(self.sysfs)}
        return ", ".join(sorted(names))

    def read(self) -> float:
        folders = _policies(self.sysfs)
        return max(float(self.sysfs.read(f"{folder}/scaling_max_freq")) for folder in folders) * 1e3

    def set(self, value: float) -> None:
        for folder in _policies(self.sysfs):
            text = f"{nearest(value, _table(self.sysfs, folder)) / 1e3:.0f}"
            self._limits(folder).set(text, text)

    def _limits(self, folder: str) -> Limits:
        return Limits(self.sysfs, f"{folder}/scaling_min_freq", f"{folder}/scaling_max_freq")

    def state(self) -> Files:
        return [file for f in _policies(self.sysfs) for file in self._limits(f).state()]

    def restore(self, files: Files) -> None:
        """Policies whose cores are off now have no files; they come back as they were."""
        for folder in _policies(self.sysfs):
            self._limits(folder).restore(files)


def _policies(sysfs: Sysfs) -> list[str]:
    paths = sysfs.path(f"{CPU}/cpufreq").glob("policy[0-9]*")
    return [f"{CPU}/cpufreq/{path.name}" for path in sorted(paths)]


def _table(sysfs: Sysfs, folder: str) -> tuple[float, ...]:
    named = sysfs.numbers(f"{folder}/scaling_available_frequencies")
    if named:
        return tuple(sorted(khz * 1e3 for khz in named))
    try:
        low, high = (float(sysfs.read(f"{folder}/cpuinfo_{end}_freq")) for end in ("min", "max"))
    except (KnobError, ValueError):
        return ()
    return tuple(float(round(khz)) * 1e3 for khz in np.linspace(low, high, STEPS))
