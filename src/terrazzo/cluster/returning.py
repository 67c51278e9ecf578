"""Returning: a device that was lost is asked now and then whether it can take part again.

Nothing here waits: connections are opened by whoever asks, whose thread they are tied to, and the
questions over them are put by threads of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from terrazzo.errors import LaunchError

FIRST_S, LONGEST_S = 0.5, 15.0
"""Between two tries; a board that boots is asked ever more seldom."""


class Returning:
    """Devices on their way back."""

    def __init__(self, reopen: Callable[[int], None], look: Callable[[int], None]) -> None:
        """``reopen`` begins to connect where that is needed; ``look`` waits for it, makes the
        device ready, and raises LaunchError where it is not."""
        self._reopen, self._look = reopen, look
        self._pool = ThreadPoolExecutor(thread_name_prefix="returning")
        self._tries: dict[int, Future[None]] = {}
        self._pause_s: dict[int, float] = {}
        self._next_s: dict[int, float] = {}
        self.trouble: dict[int, BaseException] = {}
        """Why a device was not ready when it was last asked."""

    def is_ready(self, device: int) -> bool:
        """Whether it has answered; each time that was so, the next one is asked anew."""
        one = self._tries.get(device)
        if one is None:
            if time.monotonic() >= self._next_s.get(device, 0.0):
                with suppress(LaunchError):
                    self._reopen(device)
                    self._tries[device] = self._pool.submit(self._look, device)
            return False
        if not one.done():
            return False
        del self._tries[device]
        if isinstance(error := one.exception(), LaunchError):
            self.trouble[device] = error
            pause_s = self._pause_s.get(device, FIRST_S)
            self._next_s[device] = time.monotonic() + pause_s
            self._pause_s[device] = min(LONGEST_S, 2 * pause_s)
            return False
        one.result()
        self._pause_s.pop(device, None)
        return True

    def close(self) -> None:
        """Whoever is being asked is no longer waited for: its connection is closed first."""
        self._pool.shutdown(cancel_futures=True)
