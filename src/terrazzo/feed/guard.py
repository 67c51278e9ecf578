"""Guard: gives held samples back in the middle of a step, when memory runs out there.

Before each step it is looked at how much memory the steps so far have taken at most. A step that
takes much more than all before it, the first one with larger pictures say, would end the process:
what is held lies in memory that the system cannot take back by itself. So a thread looks how much
is left, the sooner again the less there is, and gives back while the step goes on to take.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from terrazzo.feed.arbiter import Left, reserve_bytes
from terrazzo.feed.arena import Arena
from terrazzo.runtime.ceiling import ceiling_bytes

FASTEST_BYTES_PER_S = 8e9
"""No step takes memory faster than that."""
SOONEST_S, LATEST_S = 0.005, 1.0
LOW = 0.9
"""Of the reserve; less must not be left, though the last step may have taken some of it."""


class Guard:
    """Watches over what lies in some arenas for as long as there are any."""

    def __init__(self, left: Callable[[], int] | None = None) -> None:
        """``left``: tells how many bytes are."""
        self._left = left or Left()
        self._arenas: list[weakref.ref[Arena]] = []
        self._lock = threading.Lock()
        self._is_awake = False

    def watch(self, arena: Arena) -> None:
        with self._lock:
            self._arenas.append(weakref.ref(arena))
            if not self._is_awake:
                self._is_awake = True
                threading.Thread(target=self._stay, name="terrazzo-guard", daemon=True).start()

    def _stay(self) -> None:
        in_a_row, reserve = 0, reserve_bytes(ceiling_bytes())
        while True:
            left = self._left()
            is_low = left < LOW * reserve
            if is_low:  # twice as much as the last time, if that was not enough
                self.give_back((2 * reserve - left) << min(in_a_row, 8))
            in_a_row = in_a_row + 1 if is_low else 0
            with self._lock:
                self._arenas = [one for one in self._arenas if one() is not None]
                self._is_awake = bool(self._arenas)
                if not self._is_awake:
                    return
            time.sleep(min(max(left / FASTEST_BYTES_PER_S, SOONEST_S), LATEST_S))

    def give_back(self, size_bytes: int) -> None:
        """So much of the arenas, those that came last first."""
        for one in reversed(self._arenas):
            arena = one()
            if arena is None or size_bytes <= 0:
                continue
            size_bytes -= arena.cut(size_bytes)
