"""Threads whose timers may be late."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest

from terrazzo.runtime.slack import GET_TIMERSLACK, SLACK_S, late_timers


def slack_ns() -> int:
    return int(ctypes.CDLL(None).prctl(GET_TIMERSLACK, 0, 0, 0, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it: it was NOT tested")
def test_threads_made_inside_may_be_late_and_nobody_else() -> None:
    before, found = slack_ns(), []
    with late_timers():
        inside = threading.Thread(target=lambda: found.append(slack_ns()))
        inside.start()
        inside.join()
    assert found == [int(SLACK_S * 1e9)] and slack_ns() == before


def test_where_the_system_has_none_of_it_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with late_timers():
        pass
