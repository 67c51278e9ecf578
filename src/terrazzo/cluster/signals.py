"""Signals meant to end this process: noted, so that the devices can be ended first."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """Those that have come while the block runs."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)

    def deliver(self) -> None:
        """Lets the first signal have the effect it would have had without us."""
        if self.seen:
            signal.raise_signal(self.seen[0])
