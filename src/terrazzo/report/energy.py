"""The energy of a run: joules of a step by device and phase, from notes of joules so far.

Between two notes power is taken as even. Where notes are further apart than phases are long, the
parts of a step are therefore those of its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

import numpy as np

from terrazzo.records.event import Event
from terrazzo.report.steps import Step

FETCH, COMPUTE, EXCHANGE, IDLE, REST = PHASES = ("fetch", "compute", "exchange", "idle", "rest")
PHASE_WORDS = {
    FETCH: "fetching and handing out data",
    COMPUTE: "compute",
    EXCHANGE: "exchange, sums, agreement",
    IDLE: "idle: waiting for others",
    REST: "the rest: loss, optimiser, what is not recorded",
}
PHASE_OF = {"feed": FETCH, "compute": COMPUTE, "exchange": EXCHANGE, "sum": EXCHANGE,
            "agree": EXCHANGE}  # fmt: skip
MOST_DOUBTFUL = 0.1
"""Of the time of a run: what was filled in for longer is no measurement."""
METER, DOUBT, ENERGY = "meter: ", "doubt: ", "energy"


@dataclass(frozen=True, slots=True)
class DeviceEnergy:
    """One device over the steps that were measured."""

    device: int
    step_j: float
    mean_w: float
    peak_w: float
    phases_j: Mapping[str, float]
    """Of a step."""
    is_measured: bool
    is_whole: bool
    """Whether all of the device is in it, and not its processor or GPU alone."""
    sources: tuple[str, ...]
    doubts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunEnergy:
    """All devices; ``samples`` is how many a step trains on, 0 where that is not known."""

    devices: tuple[DeviceEnergy, ...]
    samples: int
    steps: int
    missing: tuple[int, ...]
    """Devices that told nothing, and are in no sum."""

    @property
    def step_j(self) -> float:
        return sum(device.step_j for device in self.devices)

    @property
    def sample_j(self) -> float | None:
        return self.step_j / self.samples if self.samples else None

    @property
    def is_measured(self) -> bool:
        return all(device.is_measured for device in self.devices)

    @property
    def is_whole(self) -> bool:
        return all(device.is_whole for device in self.devices)

    @property
    def mark(self) -> str:
        """The words that go with every number that nobody measured, or not of all."""
        if not self.is_measured:
            return " (estimated)"
        return "" if self.is_whole else " (processor and GPU alone)"


class _Meter:
    """Joules so far at any moment."""

    def __init__(self, notes: Sequence[tuple[float, float]]) -> None:
        ordered = sorted(notes)
        self.times = np.array([time for time, _ in ordered])
        self.joules = np.array([joules for _, joules in ordered])

    def between(self, begin_s: float, end_s: float) -> float:
        begin, end = np.interp([begin_s, end_s], self.times, self.joules)
        return float(end - begin)

    def covers(self, begin_s: float, end_s: float) -> bool:
        """Whether notes reach over most of a time; nothing is known beyond the last."""
        slack = 0.2 * (end_s - begin_s)
        return bool(self.times[0] <= begin_s + slack and self.times[-1] >= end_s - slack)


@dataclass
class _Told:
    """What the notes of one device say."""

    joules: list[tuple[float, float]] = field(default_factory=list)
    watts: list[tuple[float, float]] = field(default_factory=list)
    sources: dict[str, bool] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    """As told last, by what they begin with."""
    doubtful_s: float = 0.0
    is_whole: bool = True

    def add(self, note: Event) -> None:
        told = dict(note.values)
        if note.name == ENERGY:
            self.joules.append((note.begin_s, told["joules"]))
            self.watts.append((note.begin_s, told["watts"]))
        elif note.name.startswith(METER):
            self.sources[note.name.removeprefix(METER)] = bool(told.get("measured"))
            self.is_whole = bool(told.get("whole", 1.0))
        elif note.name.startswith(DOUBT):
            words = note.name.removeprefix(DOUBT)
            self.doubts[words.partition(" for ")[0]] = words
            self.doubtful_s = max(self.doubtful_s, told.get("doubtful_s", 0.0))

    @property
    def is_measured(self) -> bool:
        """Whether meters told it, and not for too long what they had told before."""
        told_s = self.joules[-1][0] - self.joules[0][0]
        real = bool(self.sources) and all(self.sources.values())
        return real and self.doubtful_s <= MOST_DOUBTFUL * told_s


def energy_of(
    events: Iterable[Event], steps: Sequence[Step], *, devices: int, samples: int
) -> RunEnergy | None:
    """Of the steps given; None where no device told of its energy."""
    told: dict[int, _Told] = defaultdict(_Told)
    for event in events:
        if event.kind == "note":
            told[event.device].add(event)
    found, counted = [], 0
    for device in range(devices):
        notes = told[device]
        meter = _Meter(notes.joules) if len(notes.joules) > 1 else None
        used = [s for s in steps if meter and meter.covers(s.begin_s, s.end_s)]
        if meter is not None and used:
            counted = max(counted, len(used))
            found.append(_device_energy(device, notes, meter, used))
    if not found:
        return None
    known = {row.device for row in found}
    missing = tuple(device for device in range(devices) if device not in known)
    return RunEnergy(tuple(found), samples, counted, missing)


def _device_energy(device: int, notes: _Told, meter: _Meter, steps: Sequence[Step]) -> DeviceEnergy:
    seconds = sum(step.seconds for step in steps)
    joules = sum(meter.between(step.begin_s, step.end_s) for step in steps)
    first_s, last_s = steps[0].begin_s, steps[-1].end_s
    inside = [watts for at_s, watts in notes.watts if first_s <= at_s <= last_s]
    return DeviceEnergy(
        device,
        step_j=joules / len(steps),
        mean_w=joules / seconds if seconds else 0.0,
        peak_w=max(inside, default=0.0),
        phases_j=_phases(meter, steps, device),
        is_measured=notes.is_measured,
        is_whole=notes.is_whole,
        sources=tuple(notes.sources),
        doubts=tuple(notes.doubts.values()),
    )


def _phases(meter: _Meter, steps: Sequence[Step], device: int) -> dict[str, float]:
    """Joules of a mean step by phase; they add up to all of it."""
    rows = [_step_phases(meter, step, device) for step in steps]
    return {phase: mean(row[phase] for row in rows) for phase in PHASES}


def _step_phases(meter: _Meter, step: Step, device: int) -> dict[str, float]:
    found = dict.fromkeys(PHASES, 0.0)
    for span in step.spans:
        if span.device != device or span.seconds <= 0:
            continue
        watts = meter.between(span.begin_s, span.end_s) / span.seconds
        waited_s = step.waiting_s.get(span, 0.0)
        found[COMPUTE] += watts * span.worked_s
        found[IDLE] += watts * waited_s
        if span.kind != "compute":
            rest_s = max(span.seconds - span.worked_s - waited_s, 0.0)
            found[PHASE_OF[span.kind]] += watts * rest_s
    whole = meter.between(step.begin_s, step.end_s)
    found[REST] = max(whole - sum(found.values()), 0.0)
    return found
