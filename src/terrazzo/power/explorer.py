"""The explorer: which mode to measure next.

The first few are spread over all modes. After them, the next is
the one from which the choice could gain most: where the value may be much better than the best
known so far, and what must hold may well hold. When nothing is left to gain, measuring ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from terrazzo.power.formulas import Knobs
from terrazzo.power.least_squares import Array
from terrazzo.power.predictor import Foretold
from terrazzo.power.selector import EDP, ENERGY, TIME, Goal, Option
from terrazzo.records.modes import Measured, Mode

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
"""One for each knob; nothing has more of them."""
LOWEST, HIGH, EVERY = 1 / 12, 0.4, 3
WORTH = 0.003
"""The relative gain below which another measurement is not worth its time."""
LEAST_HOPE = 0.01
"""Of finding a mode that holds, while there is none."""
LEAST_DOUBT = 0.01
"""Of a measurement, however well its parts agree: another day it is another number."""


def ranks(modes: Sequence[Mode], knobs: Knobs) -> Array:
    """Where the values of modes stand among those of each knob, from 0 to 1."""
    found: Array = np.stack(
        [
            np.searchsorted(values, [mode[name] for mode in modes]) / max(len(values) - 1, 1)
            for name, values in knobs.items()
        ],
        axis=1,
    )
    return found


def spread_out(modes: Sequence[Mode], knobs: Knobs, count: int) -> list[Mode]:
    """The highest mode, and others spread evenly over all.

    Modes as far from each other as can be would all be corners, and corners don't tell whether
    power rises with a clock or with its cube. So points of a Halton sequence are taken, which fill
    a cube evenly however many there are, and every third time the farthest mode from all others.
    The lowest modes are left out: steps take very long there, and they are hardly ever chosen.
    """
    places = ranks(modes, knobs)
    chosen = [int(np.argmax(places.sum(1)))]
    free = np.ones(len(modes), dtype=bool)
    free[chosen[0]] = False
    nearest = ((places - places[chosen[0]]) ** 2).sum(1)
    for number in range(1, min(count, len(modes))):
        if number % EVERY == 0:
            place = int(np.argmax(np.where(free & (places.mean(1) >= HIGH), nearest, -1.0)))
        else:
            point = [LOWEST + (1 - LOWEST) * _halton(number, base) for base in PRIMES[: len(knobs)]]
            apart = ((places - np.array(point)) ** 2).sum(1)
            place = int(np.argmin(np.where(free, apart, np.inf)))
        chosen.append(place)
        free[place] = False
        nearest = np.minimum(nearest, ((places - places[place]) ** 2).sum(1))
    return [modes[place] for place in chosen]


def _halton(number: int, base: int) -> float:
    """The digits of a number, mirrored at the point."""
    found, part = 0.0, 1.0
    while number:
        part /= base
        found += part * (number % base)
        number //= base
    return found


def options_of(told: Foretold, rows: Sequence[Measured]) -> list[Option]:
    """Every mode as the selector sees it: as measured where it was, else as foretold."""
    known = {row.mode: row for row in rows}
    numbers = np.stack([told.step_s, told.power_w, told.time_doubt, told.power_doubt], axis=1)
    return [
        as_measured(known[mode]) if mode in known else Option(mode, *figures)
        for mode, figures in zip(told.modes, numbers.tolist(), strict=True)
    ]


def as_measured(row: Measured) -> Option:
    return Option(
        row.mode,
        row.step_s,
        row.power_w,
        max(row.time_doubt, LEAST_DOUBT),
        max(row.power_doubt, LEAST_DOUBT),
        is_measured=True,
        peak_w=row.peak_w,
    )


def next_mode(
    told: Foretold, goal: Goal, *, best: float | None, known: Collection[Mode]
) -> Mode | None:
    """The most promising mode; ``best`` is the least value measured so far that holds.

    None: nothing promises enough.
    """
    hope = _hope(told, goal)
    gain = hope if best is None else hope * _gain(told, goal, best)
    open_ = [place for place, mode in enumerate(told.modes) if mode not in known]
    place = max(open_, key=lambda one: float(gain[one]), default=None)
    if place is None or gain[place] < (LEAST_HOPE if best is None else WORTH):
        return None
    return told.modes[place]


def _gain(told: Foretold, goal: Goal, best: float) -> Array:
    """By how much a mode's value is to be hoped to lie below the best, relatively."""
    times = {TIME: 1.0, ENERGY: 1.0, EDP: 2.0}[goal.objective]
    powers = 0.0 if goal.objective == TIME else 1.0
    better = np.log(best) - times * np.log(told.step_s) - powers * np.log(told.power_w)
    doubt = np.hypot(times * told.time_doubt, powers * told.power_doubt)
    score = better / doubt
    bell = np.exp(-(score**2) / 2) / np.sqrt(2 * np.pi)
    return np.asarray(better * _below(score) + doubt * bell, np.float64)


def _hope(told: Foretold, goal: Goal) -> Array:
    """How likely a mode is to be found to hold what must hold."""
    slowest = None if goal.max_slowdown is None else goal.max_slowdown * float(told.step_s.min())
    found: Array = np.ones(len(told.modes))
    for limit, value, doubt in (
        (goal.max_power_w, told.power_w, told.power_doubt),
        (goal.max_step_s, told.step_s, told.time_doubt),
        (slowest, told.step_s, told.time_doubt),
    ):
        if limit is not None:
            found = found * _below(np.log(limit / value) / doubt)
    return found


def _below(score: Array) -> Array:
    """The normal distribution, to four digits."""
    near = np.clip(score, -8, 8)
    found: Array = 1 / (1 + np.exp(-near * (1.5976 + 0.070566 * near**2)))
    return found
