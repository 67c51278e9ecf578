"""Listening for signs of life: the starter is gone when its pipe ends, or when it stays silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from terrazzo.cluster.agent.frames import BEAT, FrameError, Frames

TICK_S = 0.1


class Silence:
    """Waits for the starter's end; frames that are no sign of life go to ``heard``."""

    def __init__(
        self,
        frames: Frames,
        lost_after_s: float,
        *,
        heard: Callable[[bytes, bytes], None] | None = None,
    ) -> None:
        self._frames, self._lost_after_s, self._heard = frames, lost_after_s, heard
        self._heard_s = time.monotonic()
        self._gone = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait(self) -> None:
        """Until nobody is there any more; needs no lock that a stuck connection may hold."""
        while not self._gone.wait(TICK_S):
            if time.monotonic() - self._heard_s > self._lost_after_s:
                return

    def _listen(self) -> None:
        with suppress(EOFError, OSError, ValueError, FrameError):
            while True:
                kind, body = self._frames.receive()
                self._heard_s = time.monotonic()
                if kind != BEAT:
                    if self._heard is None:
                        break
                    self._heard(kind, body)
        self._gone.set()
