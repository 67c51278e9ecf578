"""Pace: how fast devices compute from step to step, against what was planned.

With the note before a forward call every device tells how long it has computed in the step before.
So all devices judge by the same numbers, and come to the same verdict at the same call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from terrazzo.schedule.pace import Row, Stray, beside_others, middle, strays

WINDOW, LONGEST_WINDOW = 20, 640
WARM_UP = 3
"""Steps after a plan is new that do not count: caches are cold."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Seconds that each device is predicted to compute in a step of a graph; None: not known."""

    graph: str
    compute_s: Row | None


class Pace:
    """The last steps of all devices, and the verdict on them."""

    def __init__(self) -> None:
        self.foreseen: Foreseen | None = None
        self.strays: tuple[Stray, ...] = ()
        """As told last; empty while all devices keep the pace."""
        self.is_kept = False
        """Whether the script asks for another plan when devices stray."""
        self._window = WINDOW
        self._worked_s = 0.0
        self._restart(None)

    def _restart(self, foreseen: Foreseen | None) -> None:
        self.foreseen, self.strays, self._skip = foreseen, (), WARM_UP
        self._rows: deque[Row] = deque(maxlen=self._window)
        self._calm: Row | None = None
        """Seconds of each device in the first steps of the plan, if nobody strayed in those."""
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
        """How many times as long as was thought each device takes; those that do not stray, once.

        Devices that wait for a slow one have time to rest, and compute faster than they would
        without it. So a stray is measured by itself, before and after, where that is known.
        """
        assert self._expected is not None
        found = {one.device: 1 / one.rate for one in self.strays}
        if self._calm is not None:
            now, beside = middle(self._rows), beside_others(self._calm, self._expected)
            for device in found:
                found[device] = now[device] / self._calm[device] * (beside[device] or 1.0)
        return tuple(found.get(device, 1.0) for device in range(len(self._expected)))

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
            self._expected = middle(self._rows)
            self._rows.clear()
            return False
        found = strays(self._rows, self._expected)
        if not found and self._calm is None:
            self._calm = middle(self._rows)
        news = [one.device for one in found] != [one.device for one in self.strays]
        self.strays = found
        return news and bool(found)

    def words(self, called: Callable[[int], str]) -> str:
        """The verdict in a line; ``called`` gives what people call the device of a place."""
        slow = [one for one in self.strays if one.is_slow] or list(self.strays)
        measure = "its planned rate" if self.is_planned else "the rate of its first steps"
        told = ", ".join(
            f"{called(one.device)} computes at {one.rate:.2f} of {measure}" for one in slow
        )
        return f"{told}, beside the others, in the last {self.steps} steps"
