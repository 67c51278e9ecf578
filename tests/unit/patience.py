"""Patience: until something comes to be so, however busy this machine is."""

from __future__ import annotations

import time
from collections.abc import Callable


def soon(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
