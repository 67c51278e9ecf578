"""Pace: how fast devices compute from step to step, against what was planned.

With the note before a forward call every device tells how long it has computed in the step before.
So all devices judge by the same numbers, and come to the same verdict at the same call.

A device is judged beside the others: predictions may be wrong for all alike, and a plan is as good
as its balance. It strays when it is slower (or faster) than planned by a quarter in most of the
last steps; one slow step, or a few, mean nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

WINDOW = 20
MOST = 0.75
"""The part of a window's steps in which a device must stray for it to count."""
LIMIT = 1.25
WARM_UP = 3
"""Steps after a plan is new that do not count: caches are cold."""
LEAST_S = 5e-3
"""Steps shorter than this say more about the operating system than about a device."""
IDLE = 0.1
"""A device that is to compute less than this part of what the busiest computes is not judged."""
LONGEST_WINDOW = 640

Row = tuple[float, ...]
"""Seconds that each device has computed in one step."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Seconds that each device is predicted to compute in a step of a graph; None: not known."""

    graph: str
    compute_s: Row | None


@dataclass(frozen=True, slots=True)
class Stray:
    """A device that computes at another rate than planned, beside the others."""

    device: int
    rate: float
    """Of what was planned: 0.6 is slower, 1.6 faster."""

    @property
    def is_slow(self) -> bool:
        return self.rate < 1.0


def beside_others(row: Sequence[float], expected: Sequence[float]) -> list[float | None]:
    """How many times as long as expected each device took, over what is usual among them.

    None stands for a device that has next to nothing to compute.
    """
    busiest = max(expected)
    times = [s / e if e > IDLE * busiest else None for s, e in zip(row, expected, strict=True)]
    usual = median_low([one for one in times if one is not None])
    return [None if one is None else one / usual for one in times]


def strays(rows: Sequence[Row], expected: Sequence[float]) -> tuple[Stray, ...]:
    """The devices that have strayed in most of these steps."""
    if max(median(column) for column in zip(*rows, strict=True)) < LEAST_S:
        return ()
    table = [beside_others(row, expected) for row in rows]
    found = []
    for device in range(len(expected)):
        times = [row[device] for row in table]
        judged = [one for one in times if one is not None]
        slow = sum(one > LIMIT for one in judged)
        fast = sum(one < 1 / LIMIT for one in judged)
        if max(slow, fast) >= MOST * len(rows):
            found.append(Stray(device, 1 / median(judged)))
    return tuple(found)


def slowness(rows: Sequence[Row], expected: Sequence[float]) -> Row:
    """How many times as long as expected each device takes; the idle as long as is usual."""
    busiest = max(expected)
    columns = list(zip(*rows, strict=True))
    times = [
        median(column) / e if e > IDLE * busiest else None
        for column, e in zip(columns, expected, strict=True)
    ]
    usual = median_low([one for one in times if one is not None])
    return tuple(usual if one is None else one for one in times)


class Pace:
    """The last steps of all devices, and the verdict on them."""

    def __init__(self) -> None:
        self.foreseen: Foreseen | None = None
        self.strays: tuple[Stray, ...] = ()
        """As told last; empty while all devices keep the pace."""
        self._window = WINDOW
        self._worked_s = 0.0
        self._restart(None)

    def _restart(self, foreseen: Foreseen | None) -> None:
        self.foreseen, self.strays, self._skip = foreseen, (), WARM_UP
        self._rows: deque[Row] = deque(maxlen=self._window)
        self._expected = None if foreseen is None else foreseen.compute_s

    @property
    def is_planned(self) -> bool:
        """Whether steps are held against a prediction, and not against the first ones seen."""
        return self.foreseen is not None and self.foreseen.compute_s is not None

    @property
    def steps(self) -> int:
        return len(self._rows)

    @property
    def slowness(self) -> Row:
        """How many times as long as expected each device has taken in the last steps."""
        assert self._expected is not None
        return slowness(self._rows, self._expected)

    def be_patient(self) -> None:
        """After planning anew, with or without success, look twice as long before the next time."""
        self._window = min(2 * self._window, LONGEST_WINDOW)
        self._rows, self.strays = deque(maxlen=self._window), ()

    def worked(self, graph: str, seconds: float) -> None:
        """This device has computed so long in a step of a graph."""
        if self.foreseen is not None and self.foreseen.graph == graph:
            self._worked_s = seconds

    def tell(self) -> float:
        """What this device says before the next call; 0: there was no step to judge."""
        seconds, self._worked_s = self._worked_s, 0.0
        return seconds

    def hear(self, row: Sequence[float], foreseen: Foreseen | None) -> bool:
        """What all devices have said; gives whether the verdict is a new one."""
        if foreseen is not self.foreseen:
            self._restart(foreseen)
            return False
        if not all(row):
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._rows.append(tuple(row))
        if len(self._rows) < self._window:
            return False
        if self._expected is None:  # nothing was predicted: these first steps are the measure
            self._expected = tuple(median(column) for column in zip(*self._rows, strict=True))
            self._rows.clear()
            return False
        found = strays(self._rows, self._expected)
        news = [one.device for one in found] != [one.device for one in self.strays]
        self.strays = found
        return news and bool(found)

    def words(self) -> str:
        """The verdict in a line."""
        slow = [one for one in self.strays if one.is_slow] or list(self.strays)
        measure = "its planned rate" if self.is_planned else "the rate of its first steps"
        told = ", ".join(
            f"device {one.device} computes at {one.rate:.2f} of {measure}" for one in slow
        )
        return f"{told}, beside the others, in the last {self.steps} steps"
