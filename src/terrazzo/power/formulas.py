"""The physics in a prediction: parts of time and of power, each with the clock that it scales with.

Time is a soft maximum of parts that run side by side:

    time^p = Σ a (1/clock)^p          p = 1: one after the other; large: the slowest alone counts

with a part for each clock (arithmetic, memory, the core that launches kernels), for all cores
together, for the cores beside the first, and one that no knob changes. Power is a sum: what is
always drawn, what a clock costs by ticking (c and c·V², so f and f³) for every core that is on, and
what work costs: joules of a step, at voltages that rise with a clock, over the time of a step.

Knobs of unknown names are taken for clocks. That covers limits of power too, if less well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from terrazzo.power.least_squares import Array, not_negative
from terrazzo.records.modes import Mode

CORES, CPU = "cores", "cpu_hz"
POWERS = (1.0, 2.0, 3.0, 4.0, 6.0, 10.0)
FOLDS = 5

Knobs = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Grid:
    """Modes, and each knob's values in them as a column: there are thousands of modes."""

    modes: tuple[Mode, ...]
    columns: Mapping[str, Array]

    @classmethod
    def of(cls, modes: Sequence[Mode]) -> Grid:
        knobs = modes[0].knobs if modes else ()
        columns = {name: np.array([max(mode[name], 1e-9) for mode in modes]) for name in knobs}
        return cls(tuple(modes), columns)

    @property
    def ones(self) -> Array:
        found: Array = np.ones(len(self.modes))
        return found

    def shares(self, knobs: Knobs) -> dict[str, Array]:
        """Of each knob's highest value."""
        return {name: self.columns[name] / values[-1] for name, values in knobs.items()}

    def places(self, knobs: Knobs) -> Array:
        """Modes as points in a cube: the logarithm of each knob, from 0 to 1."""
        columns = []
        for name, values in knobs.items():
            low, high = np.log(max(values[0], 1e-9)), np.log(max(values[-1], 1e-9))
            columns.append((np.log(self.columns[name]) - low) / (high - low or 1.0))
        found: Array = np.stack(columns, axis=1)
        return found


def time_parts(grid: Grid, knobs: Knobs) -> Array:
    """Columns: what a part of a step takes, relative to the highest mode."""
    shares = grid.shares(knobs)
    columns = [1 / share for name, share in shares.items() if name != CORES]
    if CORES in shares:
        clock = shares.get(CPU, grid.ones)
        most = knobs[CORES][-1]
        beside = np.maximum(shares[CORES] * most - 1, 1.0) / max(most - 1, 1.0)
        columns += [1 / (shares[CORES] * clock), 1 / (beside * clock)]
    columns.append(grid.ones)
    found: Array = np.stack(columns, axis=1)
    return found


def power_parts(grid: Grid, knobs: Knobs, step_s: Array, usual_s: float) -> Array:
    """Columns of power, by the time that steps take in these modes."""
    shares, often = grid.shares(knobs), usual_s / step_s
    columns = [grid.ones, often]
    for name, share in shares.items():
        if name == CORES:
            columns.append(share)
            continue
        many = shares[CORES] if name == CPU and CORES in shares else grid.ones
        columns += [many * share, many * share**3, share**2 * often]
    found: Array = np.stack(columns, axis=1)
    return found


class Formula:
    """A soft maximum of parts, fitted to relative errors."""

    def __init__(self, parts: Array, values: Array, power: float) -> None:
        self.power = power
        relative = parts**power / (values**power)[:, None]
        self.prices = not_negative(relative, np.ones(len(values)))

    def at(self, parts: Array) -> Array:
        found: Array = np.maximum(parts**self.power @ self.prices, 1e-300) ** (1 / self.power)
        return found

    @classmethod
    def best(cls, parts: Array, values: Array, powers: Sequence[float] = POWERS) -> Formula:
        """With the softness that foretells best what it was not fitted to."""
        if len(powers) == 1 or len(values) < 2 * FOLDS:
            return cls(parts, values, powers[0])

        def error(power: float) -> float:
            missed = [
                np.abs(np.log(values[out] / cls(parts[~out], values[~out], power).at(parts[out])))
                for out in folds(len(values))
            ]
            return float(np.median(np.concatenate(missed)))

        return cls(parts, values, min(powers, key=error))


def folds(count: int) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """So many points, a part of them left out at a time."""
    number = np.arange(count) % FOLDS
    return [number == fold for fold in range(FOLDS)]
