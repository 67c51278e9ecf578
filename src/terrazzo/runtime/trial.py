"""Trial: the plans of a contest, how long the steps by them took, and what device 0 says of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from terrazzo.records import Plan
from terrazzo.records.graph import fingerprint
from terrazzo.records.units import count_text, seconds_text
from terrazzo.runtime.contest import Contest


class Trial:
    """On every device; device 0 alone has a clock, and the others do what it says."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        self.subject = fingerprint(*(plan.to_json() for plan in self.plans))
        self.current, self.is_over = 0, False
        self._contest = Contest(len(self.plans))
        self._begin: tuple[float, int] | None = None
        """When the present step began, and the calls of the net up to then."""
        self._calls: int | None = None
        """How many calls a step has; one with others (an evaluation) is no lap."""

    def begin(self, calls: int) -> None:
        """A step begins."""
        self._begin = (time.perf_counter(), calls)

    def lap(self, calls: int, *, by: Plan, is_free: bool) -> None:
        """On device 0: a step has ended. ``is_free``: no call waits for its backward pass, so that
        another plan could be gone on with."""
        if self._begin is None or not is_free:
            return
        begin_s, before = self._begin
        made = calls - before
        self._calls = self._calls or made
        if made == self._calls and by == self.plans[self.current]:
            self._contest.lap(time.perf_counter() - begin_s)

    @property
    def told(self) -> float:
        """What device 0 tells: the number of the next plan, below zero if it is the last word."""
        number = self._contest.current
        return float(-1 - number if self._contest.is_over else number)

    def heard(self, told: float) -> None:
        """What device 0 has told."""
        self.is_over = told < 0
        self.current = int(-1 - told if self.is_over else told)

    def end_with(self, plan: int) -> None:
        self.current, self.is_over = plan, True

    def words(self) -> str:
        """How it ended, on device 0."""
        seconds, laps = self._contest.seconds, self._contest.laps
        tried = f"{count_text(len(self.plans), 'plan')} tried in {count_text(laps, 'step')}"
        if not self.current:
            return f"{tried}: the first stays, {seconds_text(seconds[0])} a step"
        now, first = seconds_text(seconds[self.current]), seconds_text(seconds[0])
        return f"{tried}: number {self.current + 1} goes on, {now} a step; the first takes {first}"
