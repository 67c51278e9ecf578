"""What a device can measure: every source is asked for a reading, and the best set is chosen.

A meter of the whole board is taken alone. Otherwise processor and GPU are added up. What neither
covers is estimated, and the whole is then called an estimate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import MeterError
from terrazzo.meters import ina3221, nvml, pmic, rapl, supply
from terrazzo.meters.busy import family_busy_s
from terrazzo.meters.estimator import Calibration, Estimator
from terrazzo.meters.external import External
from terrazzo.meters.meter import BOARD, CPU, GPU, Meter


@dataclass(frozen=True)
class Found:
    """All meters that gave a reading, those to add up, and why others did not."""

    all: tuple[Meter, ...]
    used: tuple[Meter, ...]
    problems: tuple[str, ...]

    @property
    def is_measured(self) -> bool:
        return all(meter.is_measured for meter in self.used)


def find(
    root: Path = Path("/"),
    *,
    calibration: Calibration,
    external: Path | None = None,
    clock: Callable[[], float] | None = None,
    busy_s: Callable[[], float] | None = None,
    share: float = 1.0,
) -> Found:
    """The meters of the device whose files lie under ``root``.

    ``share`` is this process's part of the idle device, where several share it; ``busy_s`` tells
    how long processors were at work, for this process and its own where nothing else is given.
    """
    meters: list[Meter] = []
    problems: list[str] = []
    if external is not None:
        meter = External(external, clock or time.time)  # its lines are dated by that one
        try:
            meter.read()
            meters.append(meter)
        except MeterError as error:
            problems.append(str(error))
    for source in (ina3221.probe, pmic.probe, supply.probe, rapl.probe):
        try:
            meters += source(root)
        except MeterError as error:
            problems.append(str(error))
    if root == Path("/"):
        meters += nvml.probe()
    steady = clock or time.monotonic
    estimator = Estimator(calibration, busy_s=busy_s or family_busy_s(), clock=steady, share=share)
    return Found(tuple(meters), tuple(_used(meters, estimator)), tuple(problems))


def _used(meters: list[Meter], estimator: Estimator) -> list[Meter]:
    whole = [meter for meter in meters if meter.covers == BOARD]
    if whole:
        return whole[:1]
    parts = [meter for meter in meters if meter.covers in (CPU, GPU)]
    if not any(meter.covers == CPU for meter in parts):
        parts.append(estimator)
    return parts
