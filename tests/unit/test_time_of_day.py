"""Deadlines hang on steady clocks: the time of day may jump, and only dates what is written."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "terrazzo"
DATES = {
    "runtime/recorder.py",  # when a span was
    "cluster/agent/vitals.py",  # when a device was looked at
    "cluster/agent/look.py",  # compared with the starter's: that is what the check is for
    "cluster/connections.py",
}
OF_DAY = {"time", "time_ns", "now", "utcnow", "today", "CLOCK_REALTIME"}


def reads_of(text: str) -> set[str]:
    """The names of clocks that tell the time of day, as far as a file reads them."""
    return {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime", "date")
        and node.attr in OF_DAY
    }


@pytest.mark.parametrize("package", ["members", "runtime", "cluster"])
def test_nothing_is_decided_by_the_time_of_day(package: str) -> None:
    read = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / package).rglob("*.py")
        if reads_of(path.read_text(encoding="utf-8"))
    }
    assert read <= DATES


def test_a_reading_is_found() -> None:
    assert reads_of("import time\nlate = time.time() > end\n") == {"time"}
    assert not reads_of("import time\nlate = time.monotonic() > end\n")
