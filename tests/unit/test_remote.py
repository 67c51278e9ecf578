"""A command on a device that takes its time to begin: nothing is said before it listens."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from terrazzo.cluster import remote
from terrazzo.cluster.remote import RemoteProcess, run_request
from terrazzo.cluster.session import BOOT
from terrazzo.cluster.ssh import Ssh
from terrazzo.records.cluster import ClusterDevice

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="the ward needs Linux"),
]
BEAT_S, SLOW_S = 1.0, 2.5


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python there starts after several beats; no SSH."""
    agent = shlex.join([sys.executable, "-I", "-c", BOOT])
    command = ["sh", "-c", f"sleep {SLOW_S}; exec {agent}"]
    monkeypatch.setattr(remote, "agent_command", lambda ssh: command)


def begun(folder: Path, *command: str) -> RemoteProcess:
    request = run_request(
        command, environment={}, directory=str(folder), records="", secrets={},
        lost_after_s=4 * BEAT_S,
    )  # fmt: skip
    ssh = Ssh(ClusterDevice("pi", "pi.local"), folder / "control")
    return RemoteProcess(ssh, device=0, request=request, collected=None, heard=lambda _: None)


def ended(process: RemoteProcess) -> tuple[int | None, list[str]]:
    """How it ended, and what it or Terrazzo said on stderr."""
    late_s, said = time.monotonic() + 40, []
    while process.stderr.open and time.monotonic() < late_s:
        said += process.stderr.read()
        time.sleep(0.02)
    while process.poll() is None and time.monotonic() < late_s:
        time.sleep(0.02)
    process.close()
    return process.status, said


def test_signs_of_life_wait_until_it_listens(slow: None, tmp_path: Path) -> None:
    process = begun(tmp_path, sys.executable, "-c", "import sys; sys.stderr.write('hello')")
    assert ended(process) == (0, ["hello"])


def test_a_signal_before_it_listens_ends_the_command(slow: None, tmp_path: Path) -> None:
    process = begun(tmp_path, "sleep", "600")
    process.signal(signal.SIGTERM)
    assert ended(process) == (-signal.SIGTERM, [])
