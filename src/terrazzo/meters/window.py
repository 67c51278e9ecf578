"""Energy over time: readings of one meter added up, with what was wrong with them.

Counters are subtracted. Powers are integrated by trapezoids. A reading that fails leaves a gap,
which is filled with the last good power and told of; a sensor that gives the very same number for
long is told of too, because sensors hang.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from terrazzo.errors import MeterError
from terrazzo.meters.meter import MOST_W, Meter

GAP_S = 2.0
"""Without a reading for longer than this, energy is told to be doubtful."""
FROZEN_READINGS = 40
COUNTED_S = 0.5
"""Counters move in steps: their power is taken over no less time."""


@dataclass(frozen=True, slots=True)
class Energy:
    """What a window of time took."""

    seconds: float
    joules: float
    peak_w: float
    is_measured: bool
    sources: tuple[str, ...]
    doubts: tuple[str, ...] = ()

    @property
    def mean_w(self) -> float:
        return self.joules / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Account:
    """The joules of one meter since its first reading."""

    meter: Meter
    joules: float = 0.0
    watts: float = 0.0
    """Since the reading before."""
    gap_s: float = 0.0
    frozen_s: float = 0.0
    refused: int = 0
    problem: str = ""
    _at_s: float | None = field(default=None, repr=False)
    _counted_j: float | None = field(default=None, repr=False)
    _unknown_s: float = field(default=0.0, repr=False)
    _filled_j: float = field(default=0.0, repr=False)
    _same: int = field(default=0, repr=False)
    _same_since_s: float = field(default=0.0, repr=False)
    _last: float | None = field(default=None, repr=False)
    _recent: list[tuple[float, float]] = field(default_factory=list, repr=False)

    def take(self, now_s: float) -> None:
        """Another reading, at this moment."""
        before_s, self._at_s = self._at_s, now_s
        gone_s = 0.0 if before_s is None else max(now_s - before_s, 0.0)
        try:
            reading = self.meter.read()
        except (MeterError, OSError, ValueError) as error:  # a driver nobody thought of too
            self.refused, self.problem = self.refused + 1, str(error)
            self._missed(gone_s)
            return
        if reading.joules is not None:
            self._count(reading.joules, gone_s)
            self._average(reading.joules, now_s)
            self._watch(reading.joules, now_s)
        elif reading.watts is not None:
            before_w = self.watts if before_s is not None else reading.watts
            self.joules += gone_s * (before_w + reading.watts) / 2
            self.watts = reading.watts
            self._watch(reading.watts, now_s)

    def _missed(self, gone_s: float) -> None:
        self.gap_s += gone_s
        self._unknown_s += gone_s
        self._filled_j += self.watts * gone_s
        self.joules += self.watts * gone_s

    def _count(self, joules: float, gone_s: float) -> None:
        """A counter knows also what went on while it could not be read."""
        before_j, self._counted_j = self._counted_j, joules
        seconds, filled_j = gone_s + self._unknown_s, self._filled_j
        self._unknown_s = self._filled_j = 0.0
        if before_j is None or seconds <= 0:
            return
        more_j = joules - before_j
        # Counters move in steps, and two readings may lie close to each other.
        if not 0 <= more_j <= MOST_W * max(seconds, 1.0):
            # It began anew, or jumped: what it says of this time is lost, what follows is not.
            self.refused += 1
            self.problem = f"{self.meter.name} jumped by {more_j:g} J in {seconds:.2f} s"
            self.gap_s += gone_s
            self.joules += self.watts * gone_s
            self._recent.clear()
            return
        self.joules += more_j - filled_j
        self.gap_s -= seconds - gone_s

    def _average(self, joules: float, now_s: float) -> None:
        """The power of a counter, over some readings: between two that lie close to each other may
        be a whole step of it, or nothing."""
        recent = self._recent
        recent.append((now_s, joules))
        while len(recent) > 2 and now_s - recent[1][0] >= COUNTED_S:
            recent.pop(0)
        since_s, since_j = recent[0]
        if now_s > since_s:
            self.watts = (joules - since_j) / (now_s - since_s)

    def _watch(self, value: float, now_s: float) -> None:
        """Counts readings that are the same to the last digit."""
        if value != self._last or not self.meter.is_measured:
            self._last, self._same, self._same_since_s = value, 0, now_s
            return
        self._same += 1
        same_s = now_s - self._same_since_s
        if self._same >= FROZEN_READINGS and same_s >= self.meter.moves_s:
            self.frozen_s = max(self.frozen_s, same_s)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What makes the joules doubtful, in words."""
        found = []
        if self.gap_s > GAP_S:
            found.append(
                f"{self.meter.name} gave no reading for {self.gap_s:.0f} s ({self.problem}); its "
                "last power was taken for that time"
            )
        if self.frozen_s:
            found.append(
                f"{self.meter.name} gave the very same reading for {self.frozen_s:.0f} s: it may "
                "hang"
            )
        return tuple(found)
