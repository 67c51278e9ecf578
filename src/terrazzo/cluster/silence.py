"""Silence: some devices may go on without those that are lost, and nobody has said that they do.

Half of the devices stop at once where the other half has the tie-breaker, since that may go on. If
it is paused, it does so as soon as it is let; if that never happens, somebody must end the run.
"""

from __future__ import annotations

import re
import time

GO_ON = re.compile(r"terrazzo: .*: (\d+) devices? goe?s? on$")
"""What the first of those who are left says when members have changed."""
LONGEST_S = 60.0


class Silence:
    """Whether those who may go on do so, as far as the starter hears."""

    def __init__(self, devices: int) -> None:
        self._members = devices
        """As many as went on the last time."""
        self._since_s: float | None = None

    @property
    def reigns(self) -> bool:
        """Whether it is not known that anybody goes on."""
        return self._since_s is not None

    @property
    def is_too_long(self) -> bool:
        return self._since_s is not None and time.monotonic() - self._since_s > LONGEST_S

    def begin(self, others: int) -> None:
        """A device has too few left to go on; so many ``others`` run, who may have gone on."""
        if self._members > others and self._since_s is None:
            self._since_s = time.monotonic()

    def hear(self, line: str) -> None:
        """One that runs has said something."""
        if told := GO_ON.match(line):
            self._members, self._since_s = int(told[1]), None
        elif self._since_s is not None:
            self._since_s = time.monotonic()
