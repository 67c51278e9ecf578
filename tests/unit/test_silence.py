"""Devices that may go on without others, and do not: the starter ends what nobody else would."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from terrazzo.cluster import LaunchResult, launch, silence
from terrazzo.cluster.printer import Printer
from terrazzo.cluster.silence import Silence

pytestmark = pytest.mark.timeout(90)

WATCHED = "terrazzo: 3 devices; when some are lost more than half go on, or half with device 0"
WENT_ON = "terrazzo: device 2 was silent for 5.0 s: 2 devices go on"
BEGIN = f"""
import os, pathlib, sys, time
desk, me = pathlib.Path(os.environ["DESK"]), int(os.environ["RANK"])
def say(text): print(text, file=sys.stderr, flush=True)
def wait_for(name):
    while not (desk / name).exists(): time.sleep(0.01)
if me == 0: say({WATCHED!r})
wait_for("watched")
"""


class Noting(Printer):
    """Tells devices what the starter has heard."""

    def __init__(self, desk: Path) -> None:
        super().__init__(["device0", "device1", "device2"])
        self._desk = desk

    def line(self, device: int, text: str, *, is_error: bool = False) -> None:
        super().line(device, text, is_error=is_error)
        name = {WATCHED: "watched", WENT_ON: "went on"}.get(text)
        if name:
            (self._desk / name).touch()


def test_who_says_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Devices 0 and 1 are paused; the third has too few left, and is not started again."""
    monkeypatch.setattr(silence, "LONGEST_S", 0.5)
    code = BEGIN + (
        "if me == 2: (desk / f'started-{os.getpid()}').touch(); sys.exit(76)\n"
        "os.kill(os.getpid(), 19)"
    )
    result = started(code, tmp_path)
    assert set(result.statuses[:2]) <= {-signal.SIGTERM, -signal.SIGKILL}
    assert result.statuses[2] == 76
    assert result.failure is not None and result.failure.device == 2
    assert len(list(tmp_path.glob("started-*"))) == 1
    said = capfd.readouterr().err
    assert "device2 ended, since it has too few others left; 2 others may go on" in said
    told = "device0, device1 may, but say nothing (paused?). The run is ended"
    assert said.count(told) == said.count("may go on") == 1, said


def test_who_goes_on_is_not_ended_and_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(silence, "LONGEST_S", 0.5)
    code = BEGIN + (
        "if me == 2 and 'TERRAZZO_JOIN' in os.environ: (desk / 'back').touch(); sys.exit()\n"
        f"if me == 0: say({WENT_ON!r})\n"
        "wait_for('went on')\n"
        "if me == 2: sys.exit(76)\n"
        "wait_for('back'); time.sleep(1.0)"
    )
    result = started(code, tmp_path)
    assert result.ok and result.statuses == (0, 0, 0)
    assert "device2 is started again, to join them" in capfd.readouterr().err


def started(code: str, desk: Path) -> LaunchResult:
    (desk / "members").touch()
    return launch(
        [sys.executable, "-S", "-c", code], 3, env={"DESK": str(desk)}, sink=Noting(desk),
        survive=True, members=desk / "members", restarts=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "others", "reigns"),
    [
        ("", 2, True),
        ("terrazzo: device 1 (pi-2) was silent for 5.0 s: 2 devices go on", 2, False),
        ("terrazzo: device 3 has joined: 4 devices go on", 2, True),
        ("terrazzo: device 1 was lost: 1 device goes on", 1, False),
        ("a script says that 2 devices go on", 2, True),
    ],
)
def test_who_went_on_before_is_known(line: str, others: int, reigns: bool) -> None:
    """They notice a loss when the one that is lost does, and may be the first to say so."""
    heard = Silence(4)
    heard.hear(line)
    heard.begin(others)
    assert heard.reigns == reigns


def test_whoever_speaks_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(silence.time, "monotonic", lambda: now_s)
    heard = Silence(4)
    heard.begin(2)
    now_s += silence.LONGEST_S - 1
    heard.hear("epoch 3")
    now_s += 2
    assert heard.reigns and not heard.is_too_long
    now_s += silence.LONGEST_S
    assert heard.is_too_long
    heard.hear("terrazzo: device 2 was lost: 2 devices go on")
    assert not heard.reigns and not heard.is_too_long
