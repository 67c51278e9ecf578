"""Health: who was heard from when, and how long a silence or a standstill may last.

A device that is silent for several times the longest pause it has made so far is taken for lost.
One that is heard, but neither waits for others nor gets on while everybody waits, is taken for
stuck after several times the longest time that anybody has ever needed. After as long a time in
which all wait and nothing comes, they connect anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

BEAT_S = 1.0
LEAST_SILENT_S, MOST_SILENT_S, PAUSES = 4.0, 20.0, 4
WARM_UP = 3
"""Operations after which a device is at its usual work: before, it loads and exports."""
LEAST_STUCK_S, STRETCHES, KNOWN_AFTER = 20.0, 10, 20


class Health:
    """One other device, as this one hears it."""

    def __init__(self, now_s: float) -> None:
        self.heard_s = self.moved_s = now_s
        self.entered, self.waits, self.flows = -1, True, True
        self.moves = 0
        self.longest_s = 0.0
        """The longest time between two moves."""
        self._gaps: deque[float] = deque([BEAT_S], maxlen=64)

    @property
    def silent_s(self) -> float:
        """How long it may be silent."""
        if self.entered < WARM_UP:
            return MOST_SILENT_S
        return min(max(LEAST_SILENT_S, PAUSES * max(self._gaps)), MOST_SILENT_S)

    def hear(self, now_s: float) -> None:
        self._gaps.append(now_s - self.heard_s)
        self.heard_s = now_s

    def beat(self, now_s: float, *, entered: int, waits: bool, flows: bool = True) -> None:
        """It tells which operation it has entered, whether it waits for others there, and whether
        what it waits for is on its way."""
        if entered != self.entered:
            self.moves += 1
            self.longest_s = max(self.longest_s, now_s - self.moved_s)
        if waits or entered != self.entered:
            self.moved_s = now_s
        self.entered, self.waits, self.flows = entered, waits, flows

    def forgive(self, late_s: float) -> None:
        """This device itself stood still: the other may have spoken all the time."""
        self.heard_s += late_s
        self.moved_s += late_s

    def is_silent(self, now_s: float) -> bool:
        return now_s - self.heard_s > self.silent_s


def stuck_after_s(known: Iterable[Health], limit_s: float) -> float:
    """How long a device may do nothing that others can see."""
    all_ = list(known)
    if not all_ or min(health.moves for health in all_) < KNOWN_AFTER:
        return limit_s
    return min(limit_s, max(LEAST_STUCK_S, STRETCHES * max(h.longest_s for h in all_)))


class Standstill:
    """All wait for each other, nobody gets on, and next to nothing is on its way.

    That is no device's fault: what one has sent has not reached another, which beats all the same.
    """

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._seen: tuple[int, ...] = ()

    def lasts_s(self, now_s: float, entered: tuple[int, ...], *, still: bool) -> float:
        """How long it has lasted; ``entered`` are the operations that devices are in."""
        if not still or entered != self._seen:
            self._since_s, self._seen = now_s, entered
        return now_s - self._since_s
