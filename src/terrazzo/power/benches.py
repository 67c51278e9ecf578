"""A bench: where the tuner measures modes, under a training that goes on.

Modes are changed through a switch and energy is read through meters. On a simulated board only the
counting of steps and the passing of time are others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from terrazzo.errors import PowerError
from terrazzo.meters.sampler import Sampler
from terrazzo.power.formulas import Knobs
from terrazzo.power.panel import Switch
from terrazzo.records.event import Event
from terrazzo.records.modes import Measured, Mode

MEASURE_S, PARTS = 6.0, 3
"""A mode is measured for so long, in parts of a step at the least."""
WARM_UP, SETTLE = 0.33, 10.0
"""Of that time: what goes by before, and what it takes until a board is as warm as it gets."""
LOOK_S = 0.1
STUCK_S = 300.0
"""Without a step for so long, training is taken to hang."""


@dataclass
class Spent:
    """What measuring has taken: training went on in it, only not always in the best mode."""

    seconds: float = 0.0
    joules: float = 0.0
    steps: float = 0.0

    def more(self, chosen: Measured) -> tuple[float, float]:
        """Seconds and joules beyond what the same steps take in the chosen mode."""
        return (
            self.seconds - self.steps * chosen.step_s,
            self.joules - self.steps * chosen.step_j,
        )


@dataclass
class StepBench:
    """Measures modes by counting steps; ``steps`` tells how many were made, and when the last."""

    switch: Switch
    sampler: Sampler
    steps: Callable[[], tuple[float, float]]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep
    is_running: Callable[[], bool] = lambda: True
    measure_s: float = MEASURE_S
    spent: Spent = field(default_factory=Spent)
    touched: bool = False
    """Whether modes were changed yet: until then a governor is measured as it is."""
    _spreads: list[tuple[float, float]] = field(default_factory=list, repr=False)

    @property
    def knobs(self) -> Knobs:
        return self.switch.knobs

    def held(self, knob: str) -> float:
        """Where a knob stands."""
        return self.switch.read()[knob]

    def measure(self, mode: Mode, *, settled: bool) -> Measured:
        start, begun = self.steps(), self.sampler.sample()
        if self.touched or mode != self.switch.read():
            self.touched = True
            self.switch.apply(mode)
        self._wait(WARM_UP * self.measure_s, 1)
        if settled:
            self._wait(SETTLE * self.measure_s, 1)
        row = self._window(mode, self.measure_s)
        end, ended = self.steps(), self.sampler.sample()
        self.spent.seconds += ended.time_s - begun.time_s
        self.spent.joules += ended.joules - begun.joules
        self.spent.steps += end[0] - start[0]
        return row

    def _window(self, mode: Mode, seconds: float) -> Measured:
        """From the end of one step to the end of another, in parts that tell how sure it is."""
        doubtful_s = self.sampler.doubtful_s
        marks = [(*self.steps(), self.sampler.begin())]
        for _ in range(PARTS):
            self._wait(seconds / PARTS, 1)
            marks.append((*self.steps(), self.sampler.sample()))
        peak_w = self.sampler.peak_w
        times, watts = [], []
        for (n0, t0, one), (n1, t1, two) in (*pairwise(marks), (marks[0], marks[-1])):
            times.append((t1 - t0) / (n1 - n0))
            watts.append((two.joules - one.joules) / (two.time_s - one.time_s))
        if min(watts) <= 0 or self.sampler.doubtful_s > doubtful_s:
            raise PowerError(
                f"the meter says {min(watts):.3g} W while training runs in {mode.text}: "
                + ("; ".join(self.sampler.doubts) or "look at terrazzo power show")
            )
        *time_parts, step_s = times
        *watt_parts, power_w = watts
        self._spreads.append((_spread(time_parts), _spread(watt_parts)))
        return Measured(
            mode, step_s, power_w, time_doubt=self._doubt(0), power_doubt=self._doubt(1),
            peak_w=peak_w,
        )  # fmt: skip

    def _doubt(self, place: int) -> float:
        """Of the last window. Its few parts may agree by chance, so it is never thought to be surer
        than windows have been so far."""
        several = [spreads[place] for spreads in self._spreads]
        return max(several[-1], sqrt(fmean(one**2 for one in several)))

    def _wait(self, seconds: float, steps: int) -> None:
        begun_s, (first, _) = self.clock(), self.steps()
        while self.clock() - begun_s < seconds or self.steps()[0] < first + steps:
            if not self.is_running():
                raise PowerError(
                    f"training ended after {self.steps()[0]:.0f} steps, before enough modes were "
                    "measured: train for longer, or measure fewer modes, or each for less time"
                )
            if self.clock() - begun_s > seconds + STUCK_S:
                raise PowerError(
                    f"training made {self.steps()[0] - first:.0f} steps in "
                    f"{self.clock() - begun_s:.0f} s, {steps} are needed to measure a mode: does "
                    "it call a net of tz.parallelize?"
                )
            self.pause(LOOK_S)
            self.sampler.sample()


def _spread(parts: Sequence[float]) -> float:
    """The relative standard deviation of the mean of some."""
    return stdev(parts) / fmean(parts) / sqrt(len(parts))


class StepFile:
    """Steps that a run has recorded: their count, and when the last one ended."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events-0.jsonl"
        self._read_bytes = 0
        self._last = (0.0, 0.0)

    def __call__(self) -> tuple[float, float]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
        except FileNotFoundError:
            return self._last
        whole = new.rpartition(b"\n")[0]
        self._read_bytes += len(whole) + (1 if whole else 0)
        for line in whole.splitlines():
            if b'"traffic"' in line:
                note = Event.from_line(line.decode("utf-8"))
                if note.name == "traffic":
                    self._last = (dict(note.values)["steps"], note.begin_s)
        return self._last
