"""The estimator: processor time times calibrated watts, for boards without a sensor.

watts = idle + busy cores x watts of a busy core. What memory, links and an accelerator draw is in
neither, so an estimate is marked as one wherever it appears.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path

import numpy as np

from terrazzo.errors import UsageError
from terrazzo.meters.busy import family_busy_s
from terrazzo.meters.meter import BOARD, Reading, text_of
from terrazzo.records import document

KIND, VERSION = "calibration", 1
GUESSES = (
    ("Raspberry Pi 5", 2.8, 1.3),
    ("Raspberry Pi 4", 2.6, 0.95),
    ("Raspberry Pi 3", 1.9, 0.85),
    ("Raspberry Pi Zero 2", 0.7, 0.5),
    ("Jetson", 5.0, 1.2),
)
"""Idle watts and watts of a busy core by what the device tree says; estimates, all of them."""
OTHERWISE = ("another computer", 8.0, 4.0)
GUESSED_ERROR, LEAST_ERROR = 0.5, 0.05


@dataclass(frozen=True, slots=True)
class Calibration:
    """Watts by busy cores, where they are from, and how far off they may be, relatively."""

    idle_w: float
    core_w: float
    error: float
    source: str

    def watts(self, busy_cores: float) -> float:
        return self.idle_w + self.core_w * busy_cores

    @classmethod
    def guess(cls, root: Path) -> Calibration:
        model = text_of(root / "proc/device-tree/model")
        found = next((row for row in GUESSES if row[0] in model), OTHERWISE)
        name, idle_w, core_w = found
        return cls(idle_w, core_w, GUESSED_ERROR, f"a guess for {name}: nobody measured it here")

    @classmethod
    def fit(cls, readings: Sequence[tuple[float, float]], *, before: Calibration) -> Calibration:
        """From (busy cores, watts of a real meter); alike ones only scale what was thought before.

        The error is what the readings themselves do not explain, and never thought to be small.
        """
        if not readings or any(busy < 0 or watts <= 0 for busy, watts in readings):
            raise UsageError(
                f"a calibration needs positive watts at known work, these are {list(readings)}: "
                "give readings such as 2.7 W idle and 6.3 W with four busy cores"
            )
        busy, watts = (np.array(column, float) for column in zip(*readings, strict=True))
        if np.ptp(busy) < 0.5:
            scale = float(np.mean(watts) / before.watts(float(np.mean(busy))))
            idle_w, core_w = before.idle_w * scale, before.core_w * scale
            error = 0.25  # one point says nothing of the slope
        else:
            core_w, idle_w = (float(value) for value in np.polyfit(busy, watts, 1))
            core_w, idle_w = max(core_w, 0.0), max(idle_w, 0.0)
            left = (idle_w + core_w * busy) / watts - 1
            error = max(LEAST_ERROR, 2 * float(np.sqrt(np.mean(left**2))))
        if len(readings) == 2:
            error = max(error, 0.1)
        count = f"{len(readings)} reading{'s' if len(readings) > 1 else ''} of a meter"
        return cls(idle_w, core_w, error, count)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document.write(path, document.dump(KIND, VERSION, asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        text = path.read_text(encoding="utf-8")
        body = document.parse(text, KIND, VERSION)
        with document.reading(KIND):
            return cls(
                float(body["idle_w"]), float(body["core_w"]), float(body["error"]), body["source"]
            )


def kept(path: Path, root: Path) -> Calibration:
    """What was calibrated on this device, or a guess."""
    try:
        return Calibration.load(path)
    except FileNotFoundError:
        return Calibration.guess(root)
    except (OSError, UsageError, json.JSONDecodeError) as error:
        raise UsageError(f"calibration {path} cannot be used: {error}; remove it") from error


@dataclass
class Estimator:
    """Counts joules from processor time; ``share`` of the idle watts are this process's."""

    calibration: Calibration
    busy_s: Callable[[], float] = field(default_factory=family_busy_s)
    clock: Callable[[], float] = time.monotonic
    share: float = 1.0
    covers: str = BOARD
    is_measured: bool = False
    interval_s: float = 0.25
    moves_s: float = inf
    window_s: float = 1.0
    of: str = ""
    """What it stands for, where that is not this device."""
    _began: tuple[float, float] = field(default=(0.0, 0.0), repr=False)

    def __post_init__(self) -> None:
        self._began = (self.clock(), self.busy_s())

    @property
    def name(self) -> str:
        return f"{self.of}estimate from processor time, off by up to {self.calibration.error:.0%}"

    @property
    def error(self) -> float:
        return self.calibration.error

    def read(self) -> Reading:
        seconds = self.clock() - self._began[0]
        busy_s = self.busy_s() - self._began[1]
        told = self.calibration
        return Reading(joules=told.idle_w * self.share * seconds + told.core_w * busy_s)
