"""Waiting in tests for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.02)
    return False
