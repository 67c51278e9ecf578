"""The energy of a run: what a device's meters say, as notes beside its spans.

A note holds the joules since recording began, so any two of them give the energy between. Inside
calls whose spans are written all samples are; of other calls only the last one, when it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from terrazzo.errors import UsageError
from terrazzo.meters.busy import family_busy_s
from terrazzo.meters.estimator import GUESSED_ERROR, Calibration, Estimator, kept
from terrazzo.meters.meter import BOARD
from terrazzo.meters.probe import find
from terrazzo.meters.sampler import Sample, Sampler
from terrazzo.records.event import Event
from terrazzo.records.power import METER_FILE, POWER, calibration_path, emulated

GROWN = 2.0
"""A doubt is told again when it has grown to so many times what was told."""


class EnergyLog:
    """Samples of one device, as lines for its recorder."""

    def __init__(self, sampler: Sampler, device: int) -> None:
        self.sampler, self.device = sampler, device
        self._doubtful_s = 0.0
        self._busy = family_busy_s()

    def head(self) -> list[str]:
        """Which meters these are, and whether they measure."""
        measured, whole = float(self.sampler.is_measured), float(BOARD in self.sampler.covers)
        return [
            self._line(f"meter: {source}", self.sampler.clock(), measured=measured, whole=whole)
            for source in self.sampler.sources
        ]

    def lines(self, call: int, *, all_of_them: bool = True) -> list[str]:
        """The samples since the last lines, or only the last one: its joules hold the others.

        No meter is read for this: training does not wait for one.
        """
        samples = self.sampler.drain()
        kept = samples if all_of_them else samples[-1:]
        busy_s = self._busy() if kept else 0.0
        return [self._sample(sample, call, busy_s) for sample in kept] + self._doubts(GROWN)

    def last(self, call: int) -> list[str]:
        """The state as a run ends."""
        self.sampler.sample()
        return self.lines(call) + self._doubts(1.0)

    def _sample(self, sample: Sample, call: int, busy_s: float) -> str:
        return self._line(
            "energy", sample.time_s, call=call, joules=sample.joules, watts=sample.watts,
            busy_s=busy_s,
        )  # fmt: skip

    def _doubts(self, grown: float) -> list[str]:
        """What is doubtful, where that is new or has grown so much since it was told last."""
        seconds = self.sampler.doubtful_s
        if seconds <= self._doubtful_s * grown:
            return []
        self._doubtful_s = seconds
        return [
            self._line(f"doubt: {doubt}", self.sampler.clock(), doubtful_s=seconds)
            for doubt in self.sampler.doubts
        ]

    def _line(self, name: str, at_s: float, call: int = 0, **values: float) -> str:
        told = tuple((key, round(value, 4)) for key, value in values.items())
        return Event(self.device, call, "forward", "note", name, at_s, at_s, 0, told).to_line()


def open_log(environment: Mapping[str, str], device: int) -> EnergyLog | None:
    """The meters of this device at work; None where energy is switched off, or can't be told.

    Devices that are processes of one machine share its meters: each counts an equal part.
    """
    asked = environment.get(POWER, "auto")
    if asked == "off":
        return None
    try:
        sampler = _sampler(environment, asked)
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # a file system or a driver that nobody thought of
        print(f"terrazzo: energy is not told: {error}; training goes on", file=sys.stderr)
        return None
    return EnergyLog(sampler.start(), device)


def _sampler(environment: Mapping[str, str], asked: str) -> Sampler:
    figures = emulated(asked)
    if figures is not None:
        told = Calibration(*figures, GUESSED_ERROR, "the preset of an emulated device")
        return Sampler([Estimator(told, of="an emulated board, ")])
    sharing = max(int(environment.get("LOCAL_WORLD_SIZE", "1")), 1)
    try:
        told = kept(calibration_path(environment), Path("/"))
    except UsageError as error:
        print(f"terrazzo: {error}; a guess takes its place", file=sys.stderr)
        told = Calibration.guess(Path("/"))
    named = environment.get(METER_FILE)
    external = Path(named) if named else None
    found = find(calibration=told, external=external, share=1 / sharing)
    if external is not None and found.problems:
        print(f"terrazzo: {found.problems[0]}", file=sys.stderr)
    return Sampler(found.used, sharing=sharing)
