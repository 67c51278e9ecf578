"""An external meter: a USB or wall meter whose readings something writes into a file, line by line.

The protocol is one line for each reading, with the seconds since the epoch and watts:

    1769950000.25 6.31

Only the end of the file is read, so it may grow for days. A named pipe will not do: a reader that
comes later would find it empty.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from terrazzo.errors import MeterError
from terrazzo.meters.meter import BOARD, Reading, sensible

LATE_S = 10.0
"""A reading older than this says nothing of now."""
TAIL_BYTES = 256


@dataclass(frozen=True, slots=True)
class External:
    """The last line of a file."""

    path: Path
    clock: Callable[[], float] = time.time
    covers: str = BOARD
    is_measured: bool = True
    interval_s: float = 0.25
    error: float = 0.03
    moves_s: float = inf  # its lines are dated: one that hangs is late
    window_s: float = 2.0

    @property
    def name(self) -> str:
        return f"external meter {self.path.name}"

    def read(self) -> Reading:
        when_s, watts = self._last()
        late_s = abs(self.clock() - when_s)  # of the future is no better: milliseconds, say
        if late_s > LATE_S:
            raise MeterError(
                f"the last line of {self.path} is {late_s:.0f} s off, at most {LATE_S:g} s is "
                "taken: is the meter still connected, and are both clocks right?"
            )
        return Reading(watts=sensible(watts, self.name))

    def _last(self) -> tuple[float, float]:
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                # What follows the last line's end is still being written.
                lines = file.read().rpartition(b"\n")[0].splitlines()
        except OSError as error:
            raise MeterError(f"external meter {self.path} cannot be read: {error}") from error
        try:
            when, watts = lines[-1].split()
            return float(when), float(watts)
        except (IndexError, ValueError):
            seen = lines[-1][:40].decode("ascii", "replace") if lines else "no line"
            raise MeterError(
                f"{self.path} ends with {seen!r}; a line is the seconds since the epoch and watts, "
                'such as "1769950000.25 6.31"'
            ) from None
