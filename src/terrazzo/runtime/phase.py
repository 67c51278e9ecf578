"""The phase a training is in on this device, as the spans of its steps tell.

    evaluation    calls of net in evaluation mode
    input         the loop waits for its next batch, most of the time
    waiting       the device waits for the others, most of the time
    compute       all else

A phase of training is told from a window of some steps: single ones say little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from terrazzo.records.seat import COMPUTE, EVALUATION, INPUT, WAITING

WINDOW_S, WINDOW_STEPS = 1.0, 4
MOST = 0.5
"""Of a window's time: what gives a phase its name."""
READING = "reading the next batch"
"""What an agreement is about in which devices wait for the one that reads."""


class PhaseWatch:
    """Is told of spans, and tells of phases: ``enter`` of a new one, ``go_on`` after each step."""

    def __init__(
        self,
        enter: Callable[[str], None],
        go_on: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._enter, self._go_on, self._clock = enter, go_on, clock
        self.phase = COMPUTE
        self._training = COMPUTE
        self._begin()

    def _begin(self) -> None:
        self._begun_s, self._steps = self._clock(), 0
        self._fed_s = self._away_s = 0.0

    def call(self, trains: bool) -> None:
        """A call of net begins."""
        if trains == (self.phase != EVALUATION):
            if not trains:
                self._go_on()
            return
        self._begin()  # what came between is no part of a window
        self._to(self._training if trains else EVALUATION)

    def fed(self, seconds: float) -> None:
        """The loop has waited for its batch, or for handing it out."""
        self._fed_s += seconds

    def span(self, kind: str, name: str, seconds: float, away_s: float) -> None:
        if name == READING:
            self._fed_s += seconds
        elif kind != "compute":
            self._away_s += seconds if kind == "agree" else away_s

    def step(self) -> None:
        """A backward pass has ended."""
        self._steps += 1
        took_s = self._clock() - self._begun_s
        if took_s >= WINDOW_S and self._steps >= WINDOW_STEPS:
            fed, away = self._fed_s / took_s, self._away_s / took_s
            self._training = INPUT if fed > MOST else WAITING if away > MOST else COMPUTE
            self._begin()
            if self._training != self.phase:
                self._to(self._training)
                return
        self._go_on()

    def _to(self, phase: str) -> None:
        self.phase = phase
        self._enter(phase)
