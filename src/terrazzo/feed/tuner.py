"""Tuner: how many workers, and how far ahead, from what steps took so far.

It climbs by one. Where a batch is made more slowly than a step uses it up, one more worker is
tried; where workers are fast enough and steps still wait, one more batch ahead. A trial is judged
by the whole step, waiting and training together: on a device without an accelerator workers take
cores from training, and shorter waits can be longer steps. What does not pay is taken back, and not
tried again for a while, twice as long each time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, median

from terrazzo.records.units import count_text, seconds_text

MOST_WORKERS = 8
"""More are not tried unless a user says so."""
ENOUGH = 0.02
"""A smaller share of a step spent waiting is left alone."""
GAIN = 0.015
"""A trial must shorten steps by this share, and by more than they vary."""
BLOCKS, AT_MOST = 4, 12
"""Blocks of steps that a judgement needs; if it is not clear then, more are looked at, up to so
many. Batches of several workers come in bursts, so a block has a step for each of them; and of
blocks the median counts, for something else may have been going on in one."""
LEAST_BLOCK = 4
SETTLING = 3
"""Steps after a change that are not counted."""
PATIENCE = 4
"""Windows until something that did not pay is tried again, at first."""


@dataclass(frozen=True)
class Settings:
    """Without workers the training process makes batches itself, when it needs them."""

    workers: int = 0
    ahead: int = 0
    """Batches that are made or ready before they are needed."""


@dataclass(frozen=True)
class Limits:
    workers: int
    ahead: int


@dataclass(frozen=True)
class Mean:
    """A mean step of a window."""

    step_s: float
    wait_s: float
    error_s: float
    """By which the mean may be off."""


@dataclass(frozen=True)
class Change:
    """What the tuner did, and what it saw before."""

    settings: Settings
    before: Mean
    why: str


class Tuner:
    """Fed with every step; gives a change now and then."""

    def __init__(self, settings: Settings, limits: Limits, *, fixed: bool = False) -> None:
        """``fixed``: it only measures."""
        self.settings, self.limits, self.fixed = settings, limits, fixed
        self.first: Mean | None = None
        """How it was in the beginning."""
        self.latest: Mean | None = None
        self._rows: list[tuple[float, float, float]] = []
        self._skip = SETTLING
        self._best: tuple[Settings, Mean] | None = None
        """What is gone back to if the trial under way does not pay."""
        self._failed: dict[Settings, tuple[int, int]] = {}
        """Windows until it may be tried again, and how long that was."""

    @property
    def is_trying(self) -> bool:
        return self._best is not None

    def step(self, *, wait_s: float, train_s: float, make_s: float) -> Change | None:
        """One step: it waited, then trained; its batch took ``make_s`` to be made."""
        if self._skip:
            self._skip -= 1
            return None
        self._rows.append((wait_s + train_s, wait_s, make_s))
        count = len(self._rows)
        if count % (BLOCKS * self._block):
            return None
        mean = self._mean()
        self.first = self.first or mean
        self.latest = mean
        return self._judge(mean) if self._best else self._look(mean)

    @property
    def _block(self) -> int:
        return max(LEAST_BLOCK, self.settings.workers)

    def bound(self, limits: Limits) -> None:
        """From now on no more than that; a trial of more is broken off."""
        self.limits = limits
        now = self.settings
        if now.workers > limits.workers or now.ahead > limits.ahead:
            self._best = None
            fits = Settings(min(now.workers, limits.workers), min(now.ahead, limits.ahead))
            self._change(fits, self.latest or Mean(0.0, 0.0, 0.0), "memory is short")

    def _mean(self) -> Mean:
        size = self._block
        blocks = [self._rows[at : at + size] for at in range(0, len(self._rows), size)]
        steps = [fmean(step for step, _, _ in block) for block in blocks]
        middle = median(steps)
        spread = 1.5 * median(abs(step - middle) for step in steps)  # as a standard deviation
        waits = median(fmean(wait for _, wait, _ in block) for block in blocks)
        return Mean(middle, waits, spread / sqrt(len(steps)))

    def _judge(self, mean: Mean) -> Change | None:
        """A trial has been looked at for some steps."""
        assert self._best is not None
        settings, before = self._best
        gained = before.step_s - mean.step_s
        doubt = sqrt(before.error_s**2 + mean.error_s**2)
        is_last = len(self._rows) >= AT_MOST * self._block
        if gained > max(GAIN * before.step_s, 0.0 if is_last else doubt):
            self._failed.clear()
            self._best = None
            return self._look(mean) or Change(self.settings, mean, "steps take longer with less")
        if abs(gained) < 2 * doubt and not is_last:
            return None
        _, last = self._failed.get(self.settings, (0, PATIENCE // 2))
        self._failed[self.settings] = (2 * last, 2 * last)
        self._best = None
        back = f"{describe(self.settings)} did not pay: {_pair(before, mean)}"
        return self._change(settings, before, back)

    def _look(self, mean: Mean) -> Change | None:
        """No trial is under way: is one worth it?"""
        self._failed = {tried: (left - 1, last) for tried, (left, last) in self._failed.items()}
        if not self.fixed and mean.wait_s > ENOUGH * mean.step_s:
            make_s = fmean(make for _, _, make in self._rows)
            for tried in self._candidates(make_s, mean):
                if self._failed.get(tried, (0, 0))[0] <= 0:
                    self._best = (self.settings, mean)
                    return self._change(tried, mean, f"steps wait {mean.wait_s / mean.step_s:.0%}")
        self._rows.clear()
        return None

    def _candidates(self, make_s: float, mean: Mean) -> list[Settings]:
        """What could be raised by one, the worst stage first."""
        now, limits = self.settings, self.limits
        found = []
        if now.workers < limits.workers:
            more = now.workers + 1
            found.append(Settings(more, min(max(now.ahead + 2, 2 * more), limits.ahead)))
        if now.workers and now.ahead < limits.ahead:
            farther = replace(now, ahead=now.ahead + max(now.workers // 2, 1))
            slow = make_s > 0.8 * now.workers * mean.step_s
            found.insert(1 if slow else 0, farther)
        return found

    def _change(self, settings: Settings, before: Mean, why: str) -> Change:
        self.settings = settings
        self._rows.clear()
        self._skip = SETTLING + settings.ahead
        return Change(settings, before, why)


def describe(settings: Settings) -> str:
    if not settings.workers:
        return "no workers"
    noun = "batch" if settings.ahead == 1 else "batches"
    return f"{count_text(settings.workers, 'worker')}, {settings.ahead} {noun} ahead"


def _pair(before: Mean, mean: Mean) -> str:
    return f"{seconds_text(before.step_s)} before, {seconds_text(mean.step_s)} with it"
