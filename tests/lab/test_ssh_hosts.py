"""Devices behind real SSH servers: started by one command, ended together, every trouble named."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from sshd import SshDevices, missing
from waiting import is_running, wait_until

from terrazzo.cli.main import main
from terrazzo.records import Group, Layout, Plan
from terrazzo.records.modes import Mode
from terrazzo.records.seat import Seat

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing()), reason=f"SSH hosts were NOT tested: {missing()}"),
]
until = partial(wait_until, limit_s=60.0)

WAITING = """
import os, pathlib, time
desk = pathlib.Path(os.environ["DESK"])
(desk / f"{os.getpid()}.pid").touch()
if os.fork() == 0:  # a stray that leaves its group and its session
    os.setsid()
    (desk / f"{os.getpid()}.pid").touch()
time.sleep(600)
"""


SYSTEM, ORDINARY = "/usr/bin/python3", 4242


def usable(python: str) -> bool:
    """Whether there is a Python that users other than root can run, and new enough."""
    code = "import sys; sys.exit(sys.version_info < (3, 10))"
    return (
        Path(python).exists() and not subprocess.run([python, "-c", code], check=False).returncode
    )


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def refused(capfd: pytest.CaptureFixture[str], cluster: Path, *arguments: str) -> str:
    """What is said by a run that must not start: one line of error, after the usual."""
    Path("train.py").write_text("print('this must not run')")
    assert main(["run", "--on", str(cluster), "--no-record", *arguments, "train.py"]) == 2
    out, err = capfd.readouterr()
    assert "must not run" not in out
    lines = [line for line in err.splitlines() if line.startswith("terrazzo: error:")]
    assert len(lines) == 1, err
    assert err.splitlines()[-1] == lines[0]
    return lines[0]


class TestRun:
    def test_a_script_runs_where_its_code_was_brought(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (project / "helper.py").write_text("WORD = 'helped'")
        (project / "train.py").write_text(
            "import json, os, socket, sys, helper, terrazzo\n"
            "print(socket.gethostname(), os.environ['RANK'], os.environ['MASTER_ADDR'],"
            " os.environ['GLOO_SOCKET_IFNAME'], helper.WORD, *sys.argv[1:])\n"
            "print(terrazzo.__file__, os.getcwd(), os.environ.get('SECRET'), file=sys.stderr)\n"
            "seat = json.loads(os.environ['TERRAZZO_PLAN'])['seats'][int(os.environ['RANK'])]\n"
            'sys.stdout.write(f\'{seat["device"]} {seat["mode"]}, no line end\')'
        )
        modes = [Mode.of({"cores": 2.0 + device}) for device in range(2)]
        seats = tuple(Seat(f"roomy-{device}", mode) for device, mode in enumerate(modes))
        Plan("", 2, (Group("", Layout()),), seats).save("plan.json")
        (devices.home(1) / ".bashrc").write_text("echo a login script that talks\n")
        os.environ["SECRET"] = "of the starter"
        try:
            options = ["--on", str(devices.cluster()), "--plan", "plan.json"]
            status = main(["run", *options, "train.py", "--epochs", "3"])
        finally:
            del os.environ["SECRET"]
        out, err = capfd.readouterr()
        assert status == 0, err
        rows = [f"roomy-{n} | roomy-{n} {n} 10.77.0.1 eth0 helped --epochs 3" for n in range(2)]
        assert sorted(out.splitlines()) == sorted(
            rows + [f"roomy-{n} | roomy-{n} {{'cores': {2.0 + n}}}, no line end" for n in range(2)]
        )
        for device in range(2):
            home = devices.home(device)
            (line,) = [row for row in err.splitlines() if row.startswith(f"roomy-{device} |")]
            assert f"{home}/.terrazzo/terrazzo/" in line
            assert f"{home}/.terrazzo/code/project-" in line
            assert line.endswith("None"), "the starter's environment went along"

    def test_only_what_changed_is_sent_again_and_what_is_gone_goes(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def run() -> str:
            assert main(["run", "--on", str(devices.cluster()), "--no-record", "train.py"]) == 0
            return capfd.readouterr().err

        (project / "train.py").write_text("import os; print(sorted(os.listdir()))")
        (project / "old.py").write_text("")
        run()
        assert "all devices have it already" in run()
        (project / "old.py").unlink()
        (project / "train.py").write_text("import os; assert not os.path.exists('old.py')")
        assert "1 to roomy-0, 1 to roomy-1" in run()

    def test_records_and_vitals_come_back(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (project / "train.py").write_text(
            "import os, pathlib, sys\n"
            "place, rank = pathlib.Path(os.environ['TERRAZZO_RUN']), os.environ['RANK']\n"
            "(place / f'events-{rank}.jsonl').write_text('line\\n' * 50000)\n"
            "(place / 'plan.json').write_text(rank)\n"
            "if rank == '1' and 'large' in sys.argv:\n"
            "    with (place / 'weights.bin').open('wb') as file: file.truncate(65 << 20)\n"
        )
        folder = project / "recorded"
        cluster = devices.cluster()
        assert main(["run", "--on", str(cluster), "--run-dir", str(folder), "train.py"]) == 0
        for device in range(2):
            assert (folder / f"events-{device}.jsonl").read_text() == "line\n" * 50000
            assert "available_bytes" in (folder / f"vitals-{device}.jsonl").read_text()
            left = devices.home(device) / ".terrazzo" / "runs"
            assert list(left.iterdir()) == [], "collected, and still there"
        other = next(folder.glob("device-*/plan.json"))
        assert sorted([(folder / "plan.json").read_text(), other.read_text()]) == ["0", "1"]
        assert '"status": "done"' in (folder / "run.json").read_text()
        more = [str(cluster), "--run-dir", str(project / "more"), "train.py", "large"]
        assert main(["run", "--on", *more]) == 0
        kept = devices.home(1) / ".terrazzo" / "runs" / "more"
        assert f"kept on roomy-1 in {kept}: weights.bin" in capfd.readouterr().err
        assert (kept / "weights.bin").stat().st_size == 65 << 20
        shutil.rmtree(kept)


class TestEnd:
    def test_one_device_fails_and_is_named(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (project / "train.py").write_text(
            "import os, time\n"
            "if os.environ['RANK'] == '1': raise SystemExit('no such layer')\n"
            "time.sleep(600)"
        )
        cluster = str(devices.cluster())
        assert main(["run", "--on", cluster, "--no-record", "--grace", "0.2", "train.py"]) == 1
        err = capfd.readouterr().err
        assert "roomy-1 failed with exit status 1" in err
        assert "no such layer" in err

    def test_a_signal_is_told_from_a_status(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (project / "train.py").write_text("import os; os.kill(os.getpid(), 11)")
        assert main(["run", "--on", str(devices.cluster()), "--no-record", "train.py"]) == 139
        assert "signal 11 (SIGSEGV)" in capfd.readouterr().err

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_with_the_starter_everything_ends(
        self, devices: SshDevices, project: Path, number: int
    ) -> None:
        sockets = Path(tempfile.gettempdir())
        starter, processes = self.started(devices, project)
        starter.send_signal(number)
        _, err = starter.communicate(timeout=60)
        assert until(lambda: not any(map(is_running, processes)))
        if number == signal.SIGINT:
            assert starter.returncode == 130
            assert "stopped by Ctrl-C" in err
        else:  # nobody could clear up; the next start does
            assert list(sockets.glob(f"tz-ssh-{starter.pid}-*"))
            (project / "train.py").write_text("")
            assert main(["run", "--on", str(devices.cluster()), "--no-record", "train.py"]) == 0
        assert not list(sockets.glob(f"tz-ssh-{starter.pid}-*"))

    def test_a_cut_cable_ends_both_sides(self, devices: SshDevices, project: Path) -> None:
        starter, processes = self.started(devices, project, "lost_after_s = 3")
        devices.hosts.network.cut(1)
        try:
            _, err = starter.communicate(timeout=60)
            assert until(lambda: not any(map(is_running, processes)))
        finally:
            devices.hosts.network.mend(1)
        assert starter.returncode != 0
        assert "the SSH connection to roomy-1 was lost" in err

    def started(
        self, devices: SshDevices, project: Path, *top: str
    ) -> tuple[subprocess.Popen[str], list[int]]:
        """A run of a script that never ends, once all its processes are there."""
        (project / "train.py").write_text(WAITING)
        desk = project / "desk"
        desk.mkdir()
        cluster = devices.cluster(top=[*top, "[environment]", f'DESK = "{desk}"'])
        command = [sys.executable, "-m", "terrazzo.cli", "run", "--on", str(cluster), "--grace"]
        starter = subprocess.Popen(
            [*command, "0.2", "--no-record", "train.py"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert until(lambda: len(list(desk.glob("*.pid"))) == 4), starter.poll()
        return starter, [int(path.stem) for path in desk.glob("*.pid")]


class TestOrdinaryUser:
    """Without root on the devices, and with one home for all of them."""

    @pytest.fixture
    def home(self, devices: SshDevices, project: Path) -> Iterator[Path]:
        """Accounts with one more user, which only the servers of these devices see."""
        place = Path(tempfile.mkdtemp(prefix="terrazzo-user-"))
        place.chmod(0o755)  # tests' own folders are closed to others
        accounts, home = place / "accounts", place / "home"
        accounts.mkdir()
        home.mkdir()
        os.chown(home, ORDINARY, ORDINARY)
        shutil.copy(devices.folder / "authorized_keys", place)
        more = {
            "passwd": f"ordinary:x:{ORDINARY}:{ORDINARY}::{home}:/bin/sh\n",
            "group": f"ordinary:x:{ORDINARY}:\n",
            "shadow": "ordinary:*:19000:0:99999:7:::\n",
        }
        for name, line in more.items():
            path = accounts / name
            path.touch(mode=0o600)
            path.write_text(Path("/etc", name).read_text() + line)
            path.chmod(0o600 if name == "shadow" else 0o644)
        config = devices.folder / "config"
        kept = config.read_text()
        config.write_text(kept.replace("User root", "User ordinary"))
        try:
            for device in range(2):
                devices.stop(device)
                devices.start(device, accounts)
            devices.wait()
            yield home
        finally:
            config.write_text(kept)
            for device in range(2):
                devices.stop(device)
                devices.start(device)
            devices.wait()
            shutil.rmtree(place)

    @pytest.mark.skipif(not usable(SYSTEM), reason="an ordinary user was NOT tested: no python3")
    def test_a_script_runs_and_encryption_is_refused(
        self, devices: SshDevices, project: Path, home: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("torch", "numpy", "rich", "safetensors"):
            info = home / "packages" / f"{name}-3.0.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Name: {name}\nVersion: 3.0\n")
        python = home / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={home}/packages exec {SYSTEM} "$@"\n')
        python.chmod(0o755)
        (project / "train.py").write_text(
            "import os; at = os.environ['TERRAZZO_CREDENTIALS']\n"
            "print(os.getuid(), oct(os.stat(at).st_mode & 0o777), 'KEY' in open(at).read())"
        )
        own = [f'python = "{python}"']
        cluster = devices.cluster(roomy_0=own, roomy_1=own)
        assert main(["run", "--on", str(cluster), "--no-record", "train.py"]) == 0
        out = capfd.readouterr().out.splitlines()
        assert sorted(out) == [f"roomy-{n} | {ORDINARY} 0o600 True" for n in range(2)]
        cluster = devices.cluster(top=["encrypt = true"], roomy_0=own, roomy_1=own)
        if shutil.which("sudo") is None and shutil.which("wg"):
            assert "roomy-0 has neither root nor sudo" in refused(capfd, cluster)


class TestRefused:
    def test_a_device_that_is_off(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        devices.stop(1)
        try:
            said = refused(capfd, devices.cluster())
        finally:
            devices.start(1)
            devices.wait()
        assert "roomy-1 cannot be reached" in said

    def test_a_key_that_is_not_accepted(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        keys = devices.folder / "authorized_keys"
        kept = keys.read_text()
        keys.write_text((devices.folder / "host-0.pub").read_text())
        try:
            said = refused(capfd, devices.cluster())
        finally:
            keys.write_text(kept)
        assert "roomy-0 cannot be reached" in said
        assert "Permission denied" in said
        assert "ssh-copy-id roomy-0" in said

    @pytest.mark.parametrize("known", ["", "another"])
    def test_a_host_key_that_nobody_vouched_for(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str], known: str
    ) -> None:
        path = devices.folder / "known_hosts"
        kept = path.read_text()
        own = kept.splitlines()[0]
        path.write_text(f"{own}\n" + (f"roomy-1 {own.split(' ', 1)[1]}\n" if known else ""))
        try:
            said = refused(capfd, devices.cluster())
        finally:
            path.write_text(kept)
        assert "roomy-1 cannot be reached" in said
        assert ("ssh-keygen -R roomy-1" if known else "Its key is not known here") in said

    def test_an_interface_that_is_not_there(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        said = refused(capfd, devices.cluster(roomy_1=['interface = "wlan7"']))
        assert "roomy-1 has no interface wlan7. Write one of those it has: " in said
        assert "eth0 (10.77.0.2)" in said

    def test_another_version_of_torch(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        other = project / "other"
        (other / "torch-2.8.0.dist-info").mkdir(parents=True)
        (other / "torch-2.8.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.8.0\n")
        python = project / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={other} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        said = refused(capfd, devices.cluster(roomy_1=[f'python = "{python}"']))
        assert "roomy-1 has torch 2.8.0, roomy-0 has 2." in said

    def test_no_python(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        said = refused(capfd, devices.cluster(roomy_0=['python = "~/none/python"']))
        assert "roomy-0 has no Python as ~/none/python" in said
        said = refused(capfd, devices.cluster(roomy_1=['python = "/bin/true"']))
        assert "roomy-1: /bin/true ended without a word: is it Python" in said

    def test_a_full_disk(
        self, devices: SshDevices, project: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        small = devices.cluster(roomy_1=[f'workdir = "{devices.small}"'])
        said = refused(capfd, small)
        assert f"roomy-1: No space left on device: {devices.small}" in said
        shutil.rmtree(devices.small / "terrazzo")
        (devices.small / "filling").write_bytes(bytes(30 << 20))
        said = refused(capfd, small)
        assert "roomy-1 has" in said
        assert "64.0 MiB are needed" in said
