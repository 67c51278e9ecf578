"""The panel: all knobs of a device, set together in the right order, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol

from terrazzo.errors import KnobError, PowerError
from terrazzo.meters.meter import text_of
from terrazzo.power.accelerator import GpuClock, GpuLimit, MemoryClock
from terrazzo.power.cpu import Cores, CpuClock
from terrazzo.power.knob import Files, Knob
from terrazzo.power.lockedclock import LockedClock
from terrazzo.power.sysfs import Sysfs
from terrazzo.records.modes import Mode, value_text


class Switch(Protocol):
    """Something that can be put into a mode: the panel itself, or a helper that may."""

    @property
    def knobs(self) -> Mapping[str, tuple[float, ...]]:
        """By name, what each can be set to."""

    def read(self) -> Mode:
        """The mode that the device is in."""

    def apply(self, mode: Mode) -> None:
        """Puts the device into a mode, or leaves it as it was and raises KnobError."""


@dataclass(frozen=True)
class Panel:
    """Knobs in the order in which they are set. Cores come first when more are switched on, and
    last when some go off, so that every clock that is needed has its files."""

    parts: tuple[Knob, ...]
    sysfs: Sysfs = field(default_factory=Sysfs)

    @classmethod
    def find(cls, sysfs: Sysfs) -> Panel:
        found: list[Knob] = [*Cores.find(sysfs), *CpuClock.find(sysfs)]
        found += [*GpuClock.find(sysfs), *MemoryClock.find(sysfs)]
        if str(sysfs.root) == "/":
            known = {knob.name for knob in found}
            found += [knob for knob in LockedClock.find() if knob.name not in known]
            found += GpuLimit.find()
        return cls(tuple(found), sysfs)

    @property
    def knobs(self) -> dict[str, tuple[float, ...]]:
        return {knob.name: knob.values for knob in self.parts}

    @property
    def governors(self) -> dict[str, str]:
        return {knob.name: knob.governor for knob in self.parts if knob.governor}

    def read(self) -> Mode:
        return Mode(tuple((knob.name, knob.read()) for knob in self.parts))

    def apply(self, mode: Mode) -> None:
        check(mode, self.knobs)
        before = self.state()
        wanted = dict(mode.values)
        try:
            for knob in self._ordered(wanted):
                name = knob.name
                knob.set(wanted[name])
        except PowerError as error:
            if isinstance(error, KnobError):
                error.knob = name
            with suppress(PowerError):  # the first refusal is the one to tell
                self.restore(before)
            raise

    def _ordered(self, wanted: Mapping[str, float]) -> Sequence[Knob]:
        parts = [knob for knob in self.parts if knob.name in wanted]
        cores = [knob for knob in parts if knob.name == "cores"]
        if cores and wanted["cores"] < cores[0].read():
            parts = [knob for knob in parts if knob not in cores] + cores
        return parts

    def capped_for_heat(self) -> str:
        """What the kernel holds below its limit now because it is hot, in words; or nothing.

        A limit that is read meanwhile is the kernel's passing one, and must not be put back as the
        owner's.
        """
        for path in sorted(self.sysfs.path("sys/class/thermal").glob("cooling_device*/type")):
            kind, state = text_of(path), text_of(path.parent / "cur_state")
            if ("cpufreq" in kind or "devfreq" in kind) and state.isdigit() and int(state):
                return f"{kind} is at step {state} of cooling now, 0 is none"
        return ""

    def state(self) -> Files:
        return [file for knob in self.parts for file in knob.state()]

    def completed(self, files: Files) -> Files:
        """With the clocks of cores that are off: their files show only while those are on."""
        cores = [knob for knob in self.parts if knob.name == "cores"]
        known = {name for name, _ in files}
        found = list(files)
        for knob in cores:
            before = knob.state()
            if knob.read() == knob.values[-1]:
                continue
            try:
                with suppress(KnobError):  # one that stays off hides nothing that could change
                    knob.set(knob.values[-1])
                found += [file for file in self.state() if file[0] not in known]
            finally:
                knob.restore(before)
        return found

    def restore(self, files: Files) -> None:
        """Puts everything back. Cores are first all switched on, for the files of their clocks."""
        problems = []
        cores = [knob for knob in self.parts if knob.name == "cores"]
        for knob in cores:
            with suppress(KnobError):
                knob.set(knob.values[-1])
        for knob in (*(knob for knob in self.parts if knob not in cores), *cores):
            try:
                knob.restore(files)
            except (PowerError, ValueError) as error:  # one that is lost must not keep the others
                problems.append(str(error))
        if problems:
            raise KnobError(f"not all could be put back: {'; '.join(problems)}")


def check(mode: Mode, knobs: Mapping[str, tuple[float, ...]]) -> None:
    """Refuses what a device does not have: names and values."""
    for name, value in mode.values:
        if name not in knobs:
            raise KnobError(f"there is no knob {name} here; there are {', '.join(knobs) or 'none'}")
        if value not in knobs[name]:
            known = ", ".join(f"{one:g}" for one in knobs[name])
            raise KnobError(f"{value_text(name, value)} is not possible; {name} takes {known}")


def all_modes(knobs: Mapping[str, Sequence[float]]) -> list[Mode]:
    """Every combination."""
    names = tuple(knobs)
    combinations = product(*(knobs[name] for name in names))
    return [Mode(tuple(zip(names, values, strict=True))) for values in combinations]
