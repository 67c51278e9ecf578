"""Choice: whether one device reads for all or each for itself, by what steps take both ways.

Where every device has the data, reading for itself saves the way over the network and costs every
device its part of decoding, or all of it, where pictures are cut into tiles. At the border of two
epochs all tell what they have measured, and come to the same answer by themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from terrazzo.feed.rows import Form

READER, EACH, MEASURED = "reader", "each", "measured"
AHEAD = " ahead"
"""After a way: a batch travels while the one before it is computed with."""
LEAST, MOST = 8, 64
"""Steps that are enough to judge by, and those that are remembered."""
SKIPPED = 2
"""The first steps of an epoch, when workers start, do not count."""
WORTH = 0.02
"""Sending a batch must take so much of a step before it is tried to send it ahead."""
GAIN = 0.015
"""Steps must be shorter by more than that."""


class Choice:
    """What one device has measured of one data set; all devices have one."""

    def __init__(self) -> None:
        self.members: tuple[int, ...] = ()
        self._steps_s: dict[str, deque[float]] = {}
        self._sent_s: dict[str, deque[float]] = {}
        self.way = READER
        """Who reads now: one for all, or many."""
        self.refused = False
        """Whether reading by each was found to take too long before it was tried."""
        self.form: Form | None = None
        """What samples look like."""
        self._at, self._seen = 0.0, 0

    def among(self, members: tuple[int, ...]) -> None:
        """What was measured among others says nothing."""
        if members != self.members:
            self.members, self.refused = members, False
            self._steps_s, self._sent_s = {}, {}

    def begin(self) -> None:
        """A way through the data begins."""
        self._seen = 0

    def step(self, way: str) -> None:
        """A batch is handed out."""
        now = time.perf_counter()
        self._seen += 1
        if self._seen > SKIPPED + 1:
            self._steps_s.setdefault(way, deque(maxlen=MOST)).append(now - self._at)
        self._at = now

    def sent(self, way: str, seconds: float) -> None:
        """All devices have what they need of a batch, which took so long."""
        self._sent_s.setdefault(way, deque(maxlen=MOST)).append(seconds)

    def sent_s(self, way: str) -> float:
        return median(self._sent_s.get(way, (0.0,)))

    def step_s(self, way: str) -> float | None:
        """The usual step of a way; None: too few were seen."""
        steps = self._steps_s.get(way, ())
        return median(steps) if len(steps) >= LEAST else None

    @property
    def is_ahead(self) -> bool:
        """Whether batches are sent ahead: once that was tried, if it pays."""
        usual_s, ahead_s = self.step_s(self.way), self.step_s(self.way + AHEAD)
        if usual_s is None:
            return False
        if ahead_s is None:
            return self.sent_s(self.way) > WORTH * usual_s
        return ahead_s < (1 - GAIN) * usual_s

    def told(self) -> dict[str, Any]:
        """For the other devices."""
        return {"refused": self.refused, READER: self._best_s(READER), EACH: self._best_s(EACH)}

    def _best_s(self, way: str) -> float | None:
        known = [s for one in (way, way + AHEAD) if (s := self.step_s(one)) is not None]
        return min(known, default=None)


def chosen(told: Sequence[Mapping[str, Any]]) -> str | None:
    """The way for the next epoch; None: reading by each was not tried yet, and may pay."""
    if any(one["refused"] or one.get(READER) is None for one in told):
        return READER
    if any(one.get(EACH) is None for one in told):
        return None
    return EACH if slowest_s(told, EACH) < (1 - GAIN) * slowest_s(told, READER) else READER


def slowest_s(told: Sequence[Mapping[str, Any]], way: str) -> float:
    return max(float(one[way]) for one in told)


def is_worth_trying(probes: Sequence[Mapping[str, float]]) -> bool:
    """Whether all make their own samples sooner than one makes all and sends them.

    ``probes``: seconds of making one batch, its own part on each device and all of it on the one
    that reads, and of sending it.
    """
    whole_s = max(one["whole_s"] + one["sent_s"] for one in probes)
    return max(one["own_s"] for one in probes) < whole_s
