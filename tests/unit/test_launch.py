"""Launching: lines, failures, grace, signals, and nobody left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from terrazzo.cluster import Failure, LaunchResult, LocalHosts, launch
from terrazzo.cluster.hosts import reserved_port
from terrazzo.cluster.printer import Printer
from terrazzo.errors import LaunchError, UsageError

pytestmark = pytest.mark.timeout(90)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def gather(code: str, devices: int, **options: Any) -> tuple[LaunchResult, dict[int, list[str]]]:
    """Runs code on devices and returns how it ended and what each wrote."""
    lines: dict[int, list[str]] = {device: [] for device in range(devices)}
    result = launch(
        python(code),
        devices,
        output=lambda device, line: lines[device].append(line),
        **options,
    )
    return result, lines


def is_alive(pid: int) -> bool:
    """Whether a process still runs; one that only waits to be reaped does not count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], *, limit_s: float = 25.0) -> bool:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.02)
    return False


def pids_in(folder: Path, count: int) -> list[int]:
    """The numbers that processes have written as file names, once all have."""
    assert wait_until(lambda: len(list(folder.glob("*.pid"))) >= count)
    return [int(path.stem) for path in folder.glob("*.pid")]


WRITE_PID = (
    "import os, pathlib, time; pathlib.Path(os.environ['DESK'], f'{os.getpid()}.pid').touch()"
)


HERE = """
import os, pathlib, signal, sys, time
desk, me = pathlib.Path(os.environ["DESK"]), os.environ["RANK"]

def here():  # for the others
    (desk / f"{me}-{os.getpid()}").touch()

def wait_for(*devices):
    while len([path for d in devices for path in desk.glob(f"{d}-*")]) < len(devices):
        time.sleep(0.01)

def runs(process):
    return pathlib.Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] != "Z"

def wait_for_end(*devices):
    wait_for(*devices)
    processes = [path.name.split("-")[1] for d in devices for path in desk.glob(f"{d}-*")]
    while any(map(runs, processes)):
        time.sleep(0.01)
"""


class Telling(Printer):
    """Lets devices know when the starter has said something."""

    def __init__(self, names: Sequence[str], desk: Path) -> None:
        super().__init__(names)
        self._desk = desk

    def notice(self, text: str) -> None:
        super().notice(text)
        (self._desk / "told-").touch()


class TestEnvironment:
    def test_each_device_gets_torchruns_variables(self) -> None:
        keys = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
        result, lines = gather(f"import os; print(*[os.environ[k] for k in {keys}])", 3)
        assert result == LaunchResult(statuses=(0, 0, 0), failure=None)
        assert result.exit_status == 0
        assert lines == {rank: [f"{rank} {rank} 3 3 127.0.0.1"] for rank in range(3)}

    def test_all_devices_agree_on_a_port(self) -> None:
        _, lines = gather("import os; print(os.environ['MASTER_PORT'])", 2)
        assert lines[0] == lines[1]
        assert 1024 <= int(lines[0][0]) < 65536

    def test_threads_are_shared_out_unless_the_user_chose(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        cores = len(os.sched_getaffinity(0))
        code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['GLOO_SOCKET_IFNAME'])"
        assert gather(code, 2)[1][0] == [f"{max(1, cores // 2)} lo"]
        assert gather(code, 2, env={"OMP_NUM_THREADS": "7"})[1][1] == ["7 lo"]

    def test_per_device_env_wins_over_env(self) -> None:
        _, lines = gather(
            "import os; print(os.environ['COLOUR'], os.environ['SHAPE'])",
            2,
            env={"COLOUR": "grey", "SHAPE": "round"},
            per_device_env=[{}, {"COLOUR": "green"}],
        )
        assert lines == {0: ["grey round"], 1: ["green round"]}

    def test_an_enclosing_torchrun_leaves_no_trace(self) -> None:
        code = "import os; print('TORCHELASTIC_USE_AGENT_STORE' in os.environ, os.environ['RANK'])"
        outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5"}
        assert gather(code, 1, env=outer)[1][0] == ["False 0"]


class TestPort:
    def test_a_store_may_listen_on_the_reserved_port(self) -> None:
        with reserved_port() as port, socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("0.0.0.0", port))
            store.listen()

    def test_others_are_not_given_it(self) -> None:
        with (
            reserved_port() as port,
            socket.socket() as stranger,
            pytest.raises(OSError, match="in use"),
        ):
            stranger.bind(("127.0.0.1", port))


class TestLines:
    def test_printed_lines_carry_the_devices_name(self, capfd: pytest.CaptureFixture[str]) -> None:
        code = (
            "import os, sys; print('hello', os.environ['RANK']); print('trouble', file=sys.stderr)"
        )
        launch(python(code), 2)
        out, err = capfd.readouterr()
        assert sorted(out.splitlines()) == ["device0 | hello 0", "device1 | hello 1"]
        assert sorted(err.splitlines()) == ["device0 | trouble", "device1 | trouble"]

    def test_no_line_is_lost(self) -> None:
        code = "import os\nfor i in range(20000): print(i)\nos.write(1, b'the end')\nos._exit(0)"
        _, lines = gather(code.replace("print(i)", "os.write(1, b'%d\\n' % i)"), 2)
        assert lines[0] == lines[1] == [*map(str, range(20000)), "the end"]

    def test_odd_bytes_and_progress_bars(self) -> None:
        code = (
            "import os; os.write(1, b'10%\\r20%\\r30%\\r\\n'); os.write(1, b'caf\\xc3\\xa9 \\xff')"
        )
        assert gather(code, 1)[1][0] == ["30%", "café �"]

    def test_lines_appear_while_the_device_runs(self, tmp_path: Path) -> None:
        # The device waits for a file that is written only when its first line has been seen.
        seen = tmp_path / "seen"
        code = (
            "import pathlib, time; print('ready')\n"
            f"while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.01)"
        )
        assert launch(python(code), 1, output=lambda *_: seen.touch()).ok


class TestFailure:
    def test_the_failing_device_is_named_with_its_last_lines(self) -> None:
        code = (
            "import os, sys\n"
            "if os.environ['RANK'] == '1': print('no more memory', file=sys.stderr); sys.exit(3)"
        )
        result, _ = gather(code, 3)
        assert result.failure == Failure(1, "device1", 3, ("no more memory",))
        assert result.statuses == (0, 3, 0)
        assert result.exit_status == 3
        assert "device1 failed with exit status 3" in str(result.failure)
        assert "no more memory" in str(result.failure)

    def test_a_signal_is_named(self) -> None:
        code = "import os; os.environ['RANK'] == '0' and os.kill(os.getpid(), 11)"
        result, _ = gather(code, 2)
        assert result.exit_status == 128 + 11
        assert "device0 failed with signal 11 (SIGSEGV)" in str(result.failure)

    def test_others_may_finish_within_the_grace(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        code = f"{HERE}if me == '0': sys.exit(4)\nwait_for('told'); sys.exit('lost my peer')"
        sink = Telling(["device0", "device1"], tmp_path)
        result = launch(python(code), 2, env={"DESK": str(tmp_path)}, grace_s=20.0, sink=sink)
        assert result.failure is not None
        assert result.failure.device == 0
        assert result.statuses == (4, 1)
        assert "device1 | lost my peer" in capfd.readouterr().err

    def test_who_says_that_another_failed_is_not_the_cause(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """A device that has failed stays a moment, and others may be gone before it."""
        code = (
            f"{HERE}here()\n"
            "if me == '1': wait_for_end(0, 2); sys.exit('bad pixel')\n"
            "sys.exit('terrazzo: PeerLost: device 1 failed: bad pixel')"
        )
        result = launch(python(code), 3, env={"DESK": str(tmp_path)}, grace_s=20.0)
        assert result.failure is not None
        assert (result.failure.device, result.failure.last_lines) == (1, ("bad pixel",))
        told = [line for line in capfd.readouterr().err.splitlines() if "failed with" in line]
        assert [line.split(";")[0] for line in told] == [
            "terrazzo | device1 failed with exit status 1"
        ]

    def test_without_another_cause_one_who_followed_is_named(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """All have lost too many others, say; and one that is told to end is no cause either."""
        code = (
            "import os, sys, time\n"
            "if os.environ['RANK'] == '1': time.sleep(60)\n"
            "sys.exit('terrazzo: PeerLost: 2 of 3 devices are gone')"
        )
        result = launch(python(code), 2, grace_s=0.3)
        assert result.failure is not None and result.failure.device == 0
        assert result.statuses == (1, -signal.SIGTERM)
        assert "device0 failed with exit status 1" in capfd.readouterr().err

    def test_after_the_grace_others_are_terminated(self) -> None:
        code = (
            "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(4)\nelse: time.sleep(60)"
        )
        result, _ = gather(code, 3, grace_s=0.2)
        assert result.statuses == (4, -signal.SIGTERM, -signal.SIGTERM)
        assert result.exit_status == 4

    def test_who_ignores_that_is_killed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules["terrazzo.cluster.launch"], "STOP_S", 0.3)
        code = (
            f"{HERE}signal.signal(signal.SIGTERM, signal.SIG_IGN); here()\n"
            "if me == '1': wait_for(0); sys.exit(5)\n"
            "time.sleep(60)"
        )
        result, _ = gather(code, 2, grace_s=0.1, env={"DESK": str(tmp_path)})
        assert result.statuses == (-signal.SIGKILL, 5)

    def test_the_notice_comes_at_once(self, capfd: pytest.CaptureFixture[str]) -> None:
        """While the other one runs, which ends only when its time to end is over."""
        code = (
            "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(4)\nelse: time.sleep(60)"
        )
        launch(python(code), 2, grace_s=0.5)
        assert (
            "terrazzo | device0 failed with exit status 4; the other device has 0.5 s to end"
            in capfd.readouterr().err
        )


class TestRefusals:
    def test_no_such_program(self) -> None:
        with pytest.raises(LaunchError, match="cannot start no-such-program"):
            launch(["no-such-program"], 2)

    def test_no_command(self) -> None:
        with pytest.raises(LaunchError, match="empty"):
            launch([], 2)

    def test_no_devices(self) -> None:
        with pytest.raises(LaunchError, match="at least 1"):
            launch(python("pass"), 0)

    def test_environments_for_other_devices(self) -> None:
        with pytest.raises(LaunchError, match="1 entries for 2 devices"):
            launch(python("pass"), 2, per_device_env=[{}])

    @pytest.mark.parametrize("text", ["0", "-1", "6xpi3", "cluster.toml", "", "²"])
    def test_places_of_later_versions(self, text: str) -> None:
        with pytest.raises(UsageError, match="such as --on 4"):
            LocalHosts.parse(text)


class TestNobodyIsLeftBehind:
    def test_what_a_device_started_ends_with_it(self, tmp_path: Path) -> None:
        # The grandchild holds the pipe open, which must not hold up the launcher for long either.
        grandchild = f"{WRITE_PID}; time.sleep(60)"
        code = (
            "import os, pathlib, subprocess, sys, time\n"
            f"subprocess.Popen([sys.executable, '-S', '-c', {grandchild!r}])\n"
            "while not list(pathlib.Path(os.environ['DESK']).glob('*')): time.sleep(0.01)"
        )
        result, _ = gather(code, 1, env={"DESK": str(tmp_path)})
        assert result.ok
        (pid,) = pids_in(tmp_path, 1)
        assert wait_until(lambda: not is_alive(pid))

    def test_an_output_function_that_raises_ends_the_devices(self, tmp_path: Path) -> None:
        def refuse(device: int, line: str) -> None:
            raise ValueError(line)

        code = f"{WRITE_PID}; print('hello'); time.sleep(60)"
        with pytest.raises(ValueError, match="hello"):
            launch(python(code), 1, env={"DESK": str(tmp_path)}, output=refuse)
        assert not any(is_alive(pid) for pid in pids_in(tmp_path, 1))

    @pytest.mark.parametrize(
        ("number", "status"),
        [(signal.SIGINT, 77), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
    )
    def test_a_signal_to_the_launcher_ends_all(
        self, tmp_path: Path, number: int, status: int
    ) -> None:
        child = f"{WRITE_PID}; time.sleep(60)"
        code = (
            "import sys; from terrazzo.cluster import launch\n"
            f"try: launch([sys.executable, '-S', '-c', {child!r}], 3)\n"
            "except KeyboardInterrupt: sys.exit(77)"
        )
        launcher = subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "DESK": str(tmp_path)}
        )
        pids = pids_in(tmp_path, 3)
        launcher.send_signal(number)
        assert launcher.wait(25) == status
        assert wait_until(lambda: not any(map(is_alive, pids)))

    def test_a_second_ctrl_c_does_not_wait(self, tmp_path: Path) -> None:
        ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
        child = f"{ignore}; {WRITE_PID}; time.sleep(60)"
        code = (
            "import sys; from terrazzo.cluster import launch\n"
            "sys.modules[launch.__module__].STOP_S = 60\n"
            f"try: launch([sys.executable, '-S', '-c', {child!r}], 2)\n"
            "except KeyboardInterrupt: sys.exit(77)"
        )
        launcher = subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "DESK": str(tmp_path)},
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        pids = pids_in(tmp_path, 2)
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr is not None  # two that come at once would be one
        assert "Ctrl-C: stopping device0, device1" in launcher.stderr.readline()
        assert all(map(is_alive, pids))
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=25)
        assert launcher.returncode == 77
        assert wait_until(lambda: not any(map(is_alive, pids)))
