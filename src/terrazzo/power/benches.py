"""Benches: where the tuner measures modes. One trains for real, one is a simulated board.

Both change modes through a switch and read energy through meters; they differ in how steps are
counted and in whose time passes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.errors import PowerError
from terrazzo.meters.sampler import Sampler
from terrazzo.power.formulas import Knobs
from terrazzo.power.panel import Switch
from terrazzo.records.modes import Measured, Mode

MEASURE_S, LEAST_STEPS = 6.0, 3
"""A mode is measured for so long, and for so many steps."""
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
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep
    is_running: Callable[[], bool] = lambda: True
    measure_s: float = MEASURE_S
    spent: Spent = field(default_factory=Spent)
    touched: bool = False
    """Whether modes were changed yet: until then a governor is measured as it is."""

    @property
    def knobs(self) -> Knobs:
        return self.switch.knobs

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
        """From the end of one step to the end of another."""
        first, at_s = self.steps()
        begun = self.sampler.begin()
        self._wait(seconds, LEAST_STEPS)
        last, until_s = self.steps()
        taken = self.sampler.end(begun)
        if taken.mean_w <= 0:
            raise PowerError(
                f"the meter says {taken.mean_w:g} W while training runs in {mode.text}: "
                + ("; ".join(taken.doubts) or "look at terrazzo power show")
            )
        return Measured(mode, (until_s - at_s) / (last - first), taken.mean_w)

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
                row = json.loads(line)
                self._last = (float(row[8]["steps"]), float(row[5]))
        return self._last
