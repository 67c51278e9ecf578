"""Slack: threads that wake up only to look whether they are to end may do so late.

gloo's thread asks a hundred times a second, message or not. On a device with a thirtieth of a fast
core that is two per cent of all it can do. Linux lets a thread say how late its timers may be, and
a new thread takes that over from the one that makes it; what arrives wakes it up as before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

SET_TIMERSLACK, GET_TIMERSLACK = 29, 30
"""Linux' names for what ``prctl`` sets and gives, in nanoseconds."""
SLACK_S = 0.1
"""So long the end of such a thread may have to be waited for."""


@contextmanager
def late_timers() -> Iterator[None]:
    """For threads that are made inside of it; where the system knows none of this, nothing."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError):
        yield
        return
    before = prctl(GET_TIMERSLACK, 0, 0, 0, 0)
    if before > 0:
        prctl(SET_TIMERSLACK, ctypes.c_ulong(int(SLACK_S * 1e9)), 0, 0, 0)
    try:
        yield
    finally:
        if before > 0:
            prctl(SET_TIMERSLACK, ctypes.c_ulong(before), 0, 0, 0)
