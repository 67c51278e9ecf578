"""Trial: the plans of a contest, how long the steps by them took, and what device 0 says of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from terrazzo.records import Plan
from terrazzo.records.graph import fingerprint
from terrazzo.records.units import count_text, seconds_text
from terrazzo.runtime.contest import Contest

PATIENCE = 30
"""Steps in a row that don't count, or after which no other plan could be gone on with: enough."""

Count = tuple[int, int, str]
"""Calls of a net, those that ended in a backward pass, and the graph of the latest."""


class Trial:
    """On every device; device 0 alone has a clock, and the others do what it says."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans = tuple(plans)
        self.subject = fingerprint(*(plan.to_json() for plan in self.plans))
        self.current, self.is_over = 0, False
        self._contest = Contest(len(self.plans))
        self._begin: tuple[float, Count] | None = None
        """When the present step began, and the calls up to then."""
        self._usual: tuple[int, int] | None = None
        """Calls of the step before; only steps alike are held against each other."""
        self._graph = ""
        """Of the first step that counted: others are of another size."""
        self._idle = 0
        self._refusal = ""

    def begin(self, count: Count) -> None:
        """A step begins."""
        self._begin = (time.perf_counter(), count)

    def lap(self, count: Count) -> None:
        """On device 0: a step has ended."""
        self._idle += 1
        if self._begin is None or self._contest.current != self.current:
            return
        begin_s, (calls, commits, _) = self._begin
        made = (count[0] - calls, count[1] - commits)
        alike, self._usual = made == self._usual, made
        self._graph = self._graph or (count[2] if made[1] else "")
        if alike and made[1] and count[2] == self._graph:
            self._contest.lap(time.perf_counter() - begin_s)
            self._idle = 0

    @property
    def wants_change(self) -> bool:
        """On device 0: whether the next step should be by another plan."""
        return self._contest.current != self.current

    def word(self, *, is_free: bool) -> float:
        """What device 0 tells: the number of the next plan, below zero if it is the last word.

        ``is_free``: no call waits for its backward pass, so that plans can be changed.
        """
        if self._idle >= PATIENCE:
            return float(-1 - self.current)
        if self.wants_change and not is_free:
            return float(self.current)
        number = self._contest.current
        return float(-1 - number if self._contest.is_over else number)

    def heard(self, told: float) -> None:
        """What device 0 has told."""
        self.is_over = told < 0
        self.current = int(-1 - told if self.is_over else told)

    def refuse(self, error: Exception, *, stay: int) -> None:
        """Plans can't be changed in this script: the one that is stays."""
        self.current, self.is_over, self._refusal = stay, True, str(error)

    def words(self) -> str:
        """How it ended, on device 0."""
        if self._refusal:
            return f"no other plans are tried: {self._refusal}"
        if not self._contest.is_over:
            return f"no other plans are tried any more: no {PATIENCE} steps are alike"
        seconds, laps = self._contest.seconds, self._contest.laps
        tried = f"{count_text(len(self.plans), 'plan')} tried in {count_text(laps, 'step')}"
        if not self.current:
            return f"{tried}: the first stays, {seconds_text(seconds[0])} a step"
        now, first = seconds_text(seconds[self.current]), seconds_text(seconds[0])
        return f"{tried}: number {self.current + 1} goes on, {now} a step; the first takes {first}"
