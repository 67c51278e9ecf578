"""The follower: changes modes with the phases of a training that somebody else runs.

A phase that has not been seen before is measured in a few modes, those that were best for the
training so far, as far as its visits last. Then the cheapest modes for all known phases are chosen,
with what a change was measured to take; where changing does not pay, one mode stays for all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.errors import KnobError, PowerError
from terrazzo.meters.sampler import Sampler
from terrazzo.power.explorer import as_measured
from terrazzo.power.panel import Switch
from terrazzo.power.phases import Change, Phase, Schedule, schedule
from terrazzo.power.selector import Goal, pareto
from terrazzo.records.modes import Measured, Mode
from terrazzo.records.seat import COMPUTE, EVALUATION

PHASE = "phase: "
"""How notes of phases begin; the same word as in seating."""

MOST_MODES = 4
"""Modes that are tried in a new phase."""
WARM_UP, LEAST = 0.33, 4
"""Of a measurement's time: what goes by before; and the steps or calls it needs."""
LOOK_S = 0.1
PATIENCE_S = 60.0
"""Without the steps that a measurement needs for so long, it is given up."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Where a training is: its phase, which visit of it, and steps or calls so far, until when."""

    phase: str
    visit: int
    count: float
    at_s: float


class PhaseFile:
    """Phases, steps and calls that a run has recorded."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events-0.jsonl"
        self._read_bytes = 0
        self._seen = Seen(COMPUTE, 0, 0.0, 0.0)

    def __call__(self) -> Seen:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
        except FileNotFoundError:
            return self._seen
        whole = new.rpartition(b"\n")[0]
        self._read_bytes += len(whole) + (1 if whole else 0)
        for line in whole.splitlines():
            if b'"phase: ' in line or b'"traffic"' in line:
                self._add(json.loads(line))
        return self._seen

    def _add(self, row: list[object]) -> None:
        """A step of training, or a phase, which in evaluation is told with every call."""
        name, at_s, seen = str(row[4]), float(str(row[5])), self._seen
        phase = name.removeprefix(PHASE) if name.startswith(PHASE) else seen.phase
        counts = phase == EVALUATION or not name.startswith(PHASE)
        visit = seen.visit + (phase != seen.phase)
        self._seen = Seen(phase, visit, seen.count + counts, at_s if counts else seen.at_s)


@dataclass
class Follower:
    """Follows one training; ``look`` is called again and again, and lets a little time pass."""

    switch: Switch
    sampler: Sampler
    seen: Callable[[], Seen]
    goal: Goal
    rows: dict[str, dict[Mode, Measured]]
    """What was measured already, by phase and mode."""
    mode: Mode
    """The one that was chosen, and that the device is in."""
    measure_s: float
    say: Callable[[Schedule], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    schedule: Schedule | None = None
    visits: dict[str, list[float]] = field(default_factory=dict)
    """Steps or calls of each visit of a phase."""
    took_s: list[float] = field(default_factory=list)
    """What changes took."""

    def __post_init__(self) -> None:
        self._now, self._in = self.seen(), self.mode
        self._first = self._now.count
        self._refused: set[Mode] = set()
        known = [row for rows in self.rows.values() for row in rows.values()]
        front = sorted(pareto([as_measured(row) for row in known]), key=lambda o: o.step_s)
        count = min(len(front), MOST_MODES)
        picked = [front[round(n * (len(front) - 1) / max(count - 1, 1))].mode for n in range(count)]
        self.candidates = tuple(dict.fromkeys([self.mode, *picked]))

    def look(self) -> None:
        now = self.seen()
        if now.visit != self._now.visit:
            self._visited(now)
        self._now = now
        missing = [m for m in self.candidates if m not in self._known(now.phase)]
        missing = [mode for mode in missing if mode not in self._refused]
        if missing:
            self._measure(missing[0])
            if len(missing) == 1:
                self._choose()
        self._shift(self._wanted(self._now.phase))
        self.pause(LOOK_S)

    def _known(self, phase: str) -> dict[Mode, Measured]:
        return self.rows.setdefault(phase, {})

    def _wanted(self, phase: str) -> Mode:
        if self.schedule is None:
            return self.mode
        return next((o.mode for name, o in self.schedule.modes if name == phase), self.mode)

    def _visited(self, now: Seen) -> None:
        """A visit has ended, of so many steps; what phases are worth may look different now."""
        self.visits.setdefault(self._now.phase, []).append(self._now.count - self._first)
        self._first = now.count
        self._choose()

    def _shift(self, mode: Mode) -> bool:
        if mode == self._in:
            return True
        begun_s = self.clock()
        try:
            self.switch.apply(mode)
        except KnobError:
            self._refused.add(mode)
            return False
        self.took_s.append(self.clock() - begun_s)
        self._in = mode
        return True

    def _measure(self, mode: Mode) -> None:
        """As long as the visit lasts; one that ends too soon says nothing."""
        if not self._shift(mode) or not self._pass(WARM_UP * self.measure_s, 1):
            return
        begun, start = self.sampler.begin(), self._now
        if not self._pass(self.measure_s, LEAST):
            return
        taken, end = self.sampler.end(begun), self._now
        step_s = (end.at_s - start.at_s) / (end.count - start.count)
        if taken.mean_w > 0 and step_s > 0:
            self._known(start.phase)[mode] = Measured(mode, step_s, taken.mean_w, start.phase)

    def _pass(self, seconds: float, count: float) -> bool:
        """Lets time and steps pass within a visit; False: it has ended."""
        begun_s, start = self.clock(), self._now
        while self.clock() - begun_s < seconds or self._now.count < start.count + count:
            self.pause(LOOK_S)
            self.sampler.sample()
            now = self.seen()
            if now.visit != start.visit:
                self._visited(now)
                self._now = now
                return False
            if self.clock() - begun_s > seconds + PATIENCE_S:
                return False
            self._now = now
        return True

    def _choose(self) -> None:
        """The cheapest modes for the phases that were measured in all modes."""
        phases = []
        for name, rows in self.rows.items():
            options = [as_measured(rows[mode]) for mode in self.candidates if mode in rows]
            steps = self.visits.get(name) or [max(self._now.count - self._first, 1.0)]
            if options and len(options) + len(self._refused) >= len(self.candidates):
                phases.append(Phase(name, max(sum(steps) / len(steps), 1.0), options))
        if len(phases) < 2:
            return
        before = self.schedule
        with suppress(PowerError):  # no modes keep the limits in all phases: as it is, then
            # They come again and again: back to the first costs a change too.
            self.schedule = schedule([*phases, phases[0]], self.goal, self.change)
        modes = None if before is None else dict(before.modes)
        if self.schedule is not None and modes != dict(self.schedule.modes):
            self.say(self.schedule)

    @property
    def change(self) -> Change:
        """As measured; what is drawn meanwhile is what the chosen mode draws."""
        if not self.took_s:
            return Change()
        took_s = sum(self.took_s) / len(self.took_s)
        rows = [row for rows in self.rows.values() for row in rows.values()]
        return Change(took_s, took_s * max(row.power_w for row in rows))
