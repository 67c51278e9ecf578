"""``terrazzo cluster`` with devices behind real SSH servers: all its verbs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sshd import SshDevices, missing

from terrazzo.cli.main import main
from terrazzo.lab.hosts import ENTER
from terrazzo.records.cluster import Cluster
from terrazzo.records.profile import Profile

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing()), reason=f"SSH hosts were NOT tested: {missing()}"),
]


def check(devices: SshDevices, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(["cluster", "check", "--on", str(devices.folder / "cluster.toml")])
    return status, " ".join(capfd.readouterr().out.split())


def test_check_of_devices_that_are_ready(
    devices: SshDevices, capfd: pytest.CaptureFixture[str]
) -> None:
    devices.cluster()
    status, said = check(devices, capfd)
    assert status == 0
    assert "2 devices ready" in said
    assert "10.77.0.2" in said


def test_check_says_what_to_fix(devices: SshDevices, capfd: pytest.CaptureFixture[str]) -> None:
    devices.cluster(roomy_0=['memory = "900GiB"'], roomy_1=['interface = "lo"'])
    status, said = check(devices, capfd)
    assert status == 1
    assert "its limit says 900 GiB" in said
    assert "roomy-0 does not get to roomy-1 at 127.0.0.1: Connection refused" in said
    devices.cluster(roomy_0=['address = "10.77.0.9"'])
    status, said = check(devices, capfd)
    assert status == 1
    assert "roomy-0 does not have the address 10.77.0.9" in said
    assert "roomy-0 does not get to roomy-1 at 10.77.0.2" in said


def test_an_interface_that_is_not_there_is_one_thing_to_fix(
    devices: SshDevices, capfd: pytest.CaptureFixture[str]
) -> None:
    devices.cluster(roomy_1=['interface = "wlan7"'])
    status, said = check(devices, capfd)
    assert status == 1
    assert "fix: roomy-1 has no interface wlan7" in said
    assert "not ready: 1 thing to fix" in said, said


def test_check_of_a_device_that_is_off(
    devices: SshDevices, capfd: pytest.CaptureFixture[str]
) -> None:
    devices.cluster()
    devices.stop(0)
    try:
        status, said = check(devices, capfd)
    finally:
        devices.start(0)
        devices.wait()
    assert status == 1
    assert "roomy-0 not" in said
    assert "fix: roomy-0 cannot be reached" in said
    assert "not ready: 1 thing to fix" in said


def test_real_devices_are_measured_and_planned_for(
    devices: SshDevices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text("from torch import nn\ndef build(): return nn.Conv2d(3, 4, 3)")
    monkeypatch.chdir(tmp_path)
    asked = ["net.py:build", "--input", "1x3x16x16", "--on", str(devices.cluster())]
    assert main(["plan", *asked]) == 2
    measured = ["cluster", "profile", *asked, "--seconds", "0.5", "--save", "profile.json"]
    assert main(measured) == 0
    profile = Profile.load(tmp_path / "profile.json")
    assert [device.name for device in profile.devices] == ["roomy-0", "roomy-1"]
    assert profile.network is not None
    assert main(["plan", *asked]) == 0
    for device in range(2):
        kept = list((devices.home(device) / ".cache" / "terrazzo" / "profiles").iterdir())
        assert [path.read_text() for path in kept] == [profile.to_json() + "\n"]


def wheel(folder: Path, name: str, version: str) -> None:
    """The smallest package that pip takes."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def test_an_environment_is_made(
    devices: SshDevices, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, version in (("torch", "2.9.1"), ("numpy", "2.0"), ("rich", "14.0")):
        wheel(tmp_path, name, version)
    wheel(tmp_path, "safetensors", "0.5")
    pip = f'pip = ["--no-index", "--find-links", "{tmp_path}"]'
    cluster = devices.cluster(top=[pip])
    assert main(["cluster", "setup", "--on", str(cluster), "--torch", "2.9.1"]) == 0
    python = devices.home(1) / ".terrazzo" / "env" / "bin" / "python"
    assert f'roomy-1 is set up; write for it: python = "{python}"' in capfd.readouterr().err
    lines = [f'python = "{devices.home(n)}/.terrazzo/env/bin/python"' for n in range(2)]
    devices.cluster(roomy_0=lines[:1], roomy_1=lines[1:])
    status, said = check(devices, capfd)
    assert status == 0, said
    assert "2.9.1" in said


class TestStrangers:
    """A device that nobody knows yet: found, paired by its code, and then reached by plain SSH."""

    def test_found_paired_and_reached(self, devices: SshDevices, tmp_path: Path) -> None:
        starter, device = tmp_path / "starter", tmp_path / "device"
        (starter / ".ssh").mkdir(parents=True)
        device.mkdir()
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
        subprocess.run([*keygen, str(starter / ".ssh" / "id_ed25519")], check=True)
        keys = tmp_path / "host keys"
        keys.mkdir()
        shutil.copy(devices.folder / "host-1.pub", keys / "ssh_host_ed25519_key.pub")
        scanned = self.inside(devices, 0, starter, "discover", "--scan", "--seconds", "0.1")
        assert "10.77.0.2        an SSH server" in scanned.communicate(timeout=60)[0]
        told = self.inside(devices, 1, device, "announce", "--pair", "--host-keys", str(keys))
        heard: list[str] = []
        assert told.stderr is not None
        while not any("pairing code" in line for line in heard):
            heard.append(told.stderr.readline())
            assert heard[-1], heard
        code = heard[-1].split("pairing code: ")[1].split()[0]
        try:
            file = starter / "cluster.toml"
            found = self.inside(devices, 0, starter, "discover", "--write", str(file))
            said = found.communicate(timeout=60)
            assert found.returncode == 0, said
            assert "10.77.0.2" in [one.host for one in Cluster.load(file).devices]
            wrong = self.inside(devices, 0, starter, "pair", "10.77.0.2", "--code", "A" * 16)
            assert "is the code right" in wrong.communicate(timeout=60)[1]
            paired = self.inside(devices, 0, starter, "pair", "10.77.0.2", "--code", code)
            said = paired.communicate(timeout=60)
            assert paired.returncode == 0, said
        finally:
            told.terminate()
            told.communicate()
        allowed = (device / ".ssh" / "authorized_keys").read_text()
        public = (starter / ".ssh" / "id_ed25519.pub").read_text().split()
        assert allowed == f"{public[0]} {public[1]} terrazzo pairing\n"
        host = (devices.folder / "host-1.pub").read_text().split()
        known = (starter / ".ssh" / "known_hosts").read_text()
        assert known == f"10.77.0.2 {host[0]} {host[1]}\n"
        self.reach(devices, starter, allowed)

    def inside(
        self, devices: SshDevices, device: int, home: Path, *words: str
    ) -> subprocess.Popen[str]:
        """A command of terrazzo cluster on a device, as a user of its own."""
        enter = [sys.executable, "-I", "-S", str(ENTER), *devices.hosts.place(device), "--"]
        return subprocess.Popen(
            [*enter, sys.executable, "-u", "-m", "terrazzo.cli", "cluster", *words],
            env={**os.environ, "HOME": str(home)}, cwd=home, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def reach(self, devices: SshDevices, starter: Path, allowed: str) -> None:
        """By SSH with nothing but what the pairing brought about."""
        path = devices.folder / "authorized_keys"
        kept = path.read_text()
        path.write_text(allowed)
        enter = [sys.executable, "-I", "-S", str(ENTER), *devices.hosts.place(0), "--"]
        own = ["-F", "none", "-o", "BatchMode=yes", "-i", str(starter / ".ssh" / "id_ed25519")]
        own += ["-o", f"UserKnownHostsFile={starter / '.ssh' / 'known_hosts'}"]
        try:
            done = subprocess.run(
                [*enter, "ssh", *own, "root@10.77.0.2", "hostname"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        finally:
            path.write_text(kept)
        assert done.stdout == "roomy-1\n", done.stderr
