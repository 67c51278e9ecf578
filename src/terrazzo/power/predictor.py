"""The predictor: time and power of every mode of a device, from a few that were measured.

Formulas carry what is known of clocks and voltages; a smooth function of the knobs carries what the
formulas miss. How far both together err on points that they were not shown is how much an answer is
doubted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from terrazzo.errors import PowerError
from terrazzo.power.formulas import POWERS, Formula, Grid, Knobs, folds, power_parts, time_parts
from terrazzo.power.least_squares import Array
from terrazzo.power.residual import Residual
from terrazzo.records.modes import Measured, Mode

LEAST = 4
"""Modes without which nothing is foretold."""
TIME_NOISE, POWER_NOISE = 0.005, 0.005
"""What a measurement of some seconds errs by at the least, relatively."""
OUTLIER = 3.5
"""Deviations by which a measured time lies above all others around it before it is left out."""
FEW = 20
"""With a reference and fewer modes than this, its powers are trusted more than formulas."""
LEAST_DOUBT = 0.01
SLOPE = 0.25
"""How much of a doubt in time is one in power: a device that waits longer draws less."""


@dataclass(frozen=True)
class Foretold:
    """Modes with their times and powers; doubts are relative standard deviations."""

    modes: tuple[Mode, ...]
    step_s: Array
    time_doubt: Array
    power_w: Array
    power_doubt: Array

    @property
    def step_j(self) -> Array:
        found: Array = self.step_s * self.power_w
        return found


class Predictor:
    """Fitted to measurements of one workload on one device.

    ``reference`` is a predictor of the same kind of device, for another workload: what it says of
    a mode becomes one more part of the formulas, and fewer measurements suffice.
    """

    def __init__(
        self, rows: Sequence[Measured], knobs: Knobs, *, reference: Predictor | None = None
    ) -> None:
        if len(rows) < LEAST:
            raise PowerError(
                f"{len(rows)} measured modes say too little of the others: measure at least {LEAST}"
            )
        self.rows = tuple(rows)
        self.knobs: Mapping[str, Sequence[float]] = {
            name: values for name, values in knobs.items() if values[-1] > values[0]
        }
        self._reference = reference
        step_s = np.array([row.step_s for row in rows])
        power_w = np.array([row.power_w for row in rows])
        self._usual_s = float(np.median(step_s))
        grid = Grid.of([row.mode for row in rows])
        points, parts = grid.places(self.knobs), self._time_parts(grid)
        self._time = Smooth(parts, step_s, points, noise=TIME_NOISE, one_sided=True)
        smooth_s, _ = self._time.at(parts, points)
        parts = self._power_parts(grid, smooth_s)
        self._power = Smooth(parts, power_w, points, noise=POWER_NOISE, powers=(1.0,))

    def at(self, modes: Sequence[Mode] | Grid) -> Foretold:
        """What is to be expected of these modes."""
        grid = modes if isinstance(modes, Grid) else Grid.of(modes)
        points = grid.places(self.knobs)
        step_s, time_doubt = self._time.at(self._time_parts(grid), points)
        power_w, power_doubt = self._power.at(self._power_parts(grid, step_s), points)
        power_doubt = np.hypot(power_doubt, SLOPE * time_doubt)
        return Foretold(grid.modes, step_s, time_doubt, power_w, power_doubt)

    @property
    def left_out(self) -> tuple[Measured, ...]:
        """Measurements that something else must have disturbed."""
        return tuple(row for row, kept in zip(self.rows, self._time.kept, strict=True) if not kept)

    def _time_parts(self, grid: Grid) -> Array:
        return self._with(time_parts(grid, self.knobs), grid, lambda told: told.step_s)

    def _power_parts(self, grid: Grid, step_s: Array) -> Array:
        parts = power_parts(grid, self.knobs, step_s, self._usual_s)
        if self._reference is not None and len(self.rows) < FEW:
            parts = parts[:, :2]  # what is always drawn, and what a step costs
        return self._with(parts, grid, lambda told: told.power_w)

    def _with(self, parts: Array, grid: Grid, get: Callable[[Foretold], Array]) -> Array:
        if self._reference is None:
            return parts
        return np.column_stack([parts, get(self._reference.at(grid))])


class Smooth:
    """A formula, and a smooth function for what it leaves over, both of the logarithm."""

    def __init__(
        self,
        parts: Array,
        values: Array,
        points: Array,
        *,
        noise: float,
        powers: Sequence[float] = POWERS,
        one_sided: bool = False,
    ) -> None:
        self._noise = noise
        self.kept = np.ones(len(values), dtype=bool)
        formula = Formula.best(parts, values, powers)
        self._fit(parts, values, points, formula.power)
        if one_sided and self._drop_outliers(len(values)):
            self._fit(parts, values, points, formula.power)
        self._trust = self._calibrated(parts[self.kept], values[self.kept], points[self.kept])

    def _fit(self, parts: Array, values: Array, points: Array, power: float) -> None:
        kept = self.kept
        self.formula = Formula(parts[kept], values[kept], power)
        over = np.log(values[kept] / self.formula.at(parts[kept]))
        self._residual = Residual.fit(points[kept], over, least_noise=self._noise)

    def _drop_outliers(self, count: int) -> bool:
        """A device that did something else meanwhile was slower, never faster."""
        error, deviation = self._residual.left_out()
        far = np.flatnonzero(error / deviation > OUTLIER)
        if not 0 < len(far) <= max(1, count // 8):
            return False
        self.kept[far] = False
        return True

    def _calibrated(self, parts: Array, values: Array, points: Array) -> float:
        """By how much to stretch deviations, so that they hold for points that were left out."""
        missed = []
        for out in folds(len(values)):
            if (~out).sum() < LEAST or not out.any():
                continue
            formula = Formula(parts[~out], values[~out], self.formula.power)
            over = np.log(values[~out] / formula.at(parts[~out]))
            residual = self._residual.like(points[~out], over)
            mean, deviation = residual.at(points[out])
            error = np.log(values[out] / formula.at(parts[out])) - mean
            missed.append(error / np.hypot(deviation, self._noise))
        if not missed:
            return 3.0
        return max(1.0, float(np.sqrt(np.mean(np.concatenate(missed) ** 2))))

    def at(self, parts: Array, points: Array) -> tuple[Array, Array]:
        """Values and their relative doubts."""
        mean, deviation = self._residual.at(points)
        return self.formula.at(parts) * np.exp(mean), np.hypot(deviation * self._trust, LEAST_DOUBT)
