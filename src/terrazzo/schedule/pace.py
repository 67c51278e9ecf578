"""Who keeps the pace of a plan: seconds that devices computed, beside those that were planned.

A device is judged beside the others: predictions may be wrong for all alike, and a plan is as good
as its balance. It strays when it is slower (or faster) than planned by a quarter in most of the
steps; one slow step, or a few, mean nothing. What a device does with next to nothing to compute
says little about what it would do with more: it is not judged by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

MOST = 0.75
"""The part of the steps in which a device must stray for it to count."""
LIMIT = 1.25
LEAST_S = 5e-3
"""Steps shorter than this say more about the operating system than about a device."""
BUSY = 0.5
"""A device is judged when it was to compute, or computes, this part of what the busiest does."""

Row = tuple[float, ...]
"""Seconds that each device has computed in one step."""


@dataclass(frozen=True, slots=True)
class Stray:
    """A device that computes at another rate than planned, beside the others."""

    device: int
    rate: float
    """Of what was planned: 0.6 is slower, 1.6 faster."""

    @property
    def is_slow(self) -> bool:
        return self.rate < 1.0


def middle(rows: Iterable[Row]) -> Row:
    """The median of each device."""
    return tuple(median(column) for column in zip(*rows, strict=True))


def usual(row: Sequence[float], expected: Sequence[float]) -> float:
    """How many times as long as expected busy devices took; of the middle two, the lower."""
    least = BUSY * max(expected)
    return median_low([s / e for s, e in zip(row, expected, strict=True) if e >= least])


def beside_others(row: Sequence[float], expected: Sequence[float]) -> list[float | None]:
    """How many times as long as expected each device took, over what is usual among them.

    None stands for a device that is not busy.
    """
    common, least = usual(row, expected), BUSY * max(expected)
    return [
        s / e / common if e and max(e, s / common) >= least else None
        for s, e in zip(row, expected, strict=True)
    ]


def strays(rows: Sequence[Row], expected: Sequence[float]) -> tuple[Stray, ...]:
    """The devices that have strayed in most of these steps."""
    if max(middle(rows)) < LEAST_S:
        return ()
    table = [beside_others(row, expected) for row in rows]
    found = []
    for device in range(len(expected)):
        judged = [times for row in table if (times := row[device]) is not None]
        slow = sum(times > LIMIT for times in judged)
        fast = sum(times < 1 / LIMIT for times in judged)
        if max(slow, fast) >= MOST * len(rows):
            found.append(Stray(device, 1 / median(judged)))
    return tuple(found)


def slowness(rows: Sequence[Row], expected: Sequence[float]) -> Row:
    """How many times as long as expected each device takes; one that is not busy, as is usual."""
    seconds = middle(rows)
    common = usual(seconds, expected)
    return tuple(
        common if times is None else times * common for times in beside_others(seconds, expected)
    )
