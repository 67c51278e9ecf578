"""OpenSSH servers inside lab devices, with keys of their own, and a cluster file that leads there.

The test itself lives outside of the devices' network, so its ssh goes in through the switch: each
connection is made by a small command that runs there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from terrazzo.lab import LabHosts
from terrazzo.lab.hosts import ENTER

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
RELAY = """
import os, socket, sys, threading
one = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
one.settimeout(None)
def up():
    while data := os.read(0, 65536):
        one.sendall(data)
    one.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := one.recv(65536):
    os.write(1, data)
"""
PORT = 22


def missing() -> str:
    """What this machine lacks for SSH servers of our own."""
    if not Path(SSHD).exists():
        return "no sshd: apt install openssh-server"
    return "" if shutil.which("ssh") else "no ssh client"


@dataclass
class SshDevices:
    """Devices with SSH servers, and a folder that holds what a user's ~/.ssh would."""

    hosts: LabHosts
    folder: Path
    servers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def small(self) -> Path:
        """A disk of 80 MiB with room for 40 files."""
        return self.folder / "small"

    def home(self, device: int) -> Path:
        return self.folder / f"home-{device}"

    def start(self, device: int, accounts: Path | None = None) -> None:
        """A server of the device's own, in its network, its limits and its name.

        ``accounts`` is a folder with files that it alone finds in /etc; beside it lie the keys that
        are accepted.
        """
        keys = (accounts.parent if accounts else self.folder) / "authorized_keys"
        config = self.folder / f"sshd-{device}.conf"
        config.write_text(
            f"Port {PORT}\nListenAddress {self.hosts.address(device)}\n"
            f"HostKey {self.folder / f'host-{device}'}\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {keys}\nStrictModes no\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 64\n"
            + ("" if accounts else f"SetEnv HOME={self.home(device)} PYTHONDONTWRITEBYTECODE=1\n")
        )
        inside = [sys.executable, "-I", "-S", str(ENTER), *self.hosts.place(device), "--"]
        command = [SSHD, "-D", "-e", "-f", str(config)]
        if accounts is not None:
            binds = [f"mount --bind {path} /etc/{path.name}" for path in accounts.iterdir()]
            script = " && ".join([*binds, f"exec {' '.join(command)}"])
            command = ["unshare", "-m", "--propagation", "slave", "sh", "-c", script]
        log = (self.folder / f"sshd-{device}.log").open("wb")
        with log:
            self.servers[device] = subprocess.Popen([*inside, *command], stdout=log, stderr=log)

    def wait(self) -> None:
        """Until all answer."""
        for device in self.servers:
            end_s = time.monotonic() + 20
            while self.ssh(device, "true").returncode:
                assert time.monotonic() < end_s, (self.folder / f"sshd-{device}.log").read_text()
                time.sleep(0.05)

    def ssh(self, device: int, command: str) -> subprocess.CompletedProcess[str]:
        words = ["ssh", "-F", str(self.folder / "config"), self.hosts.names[device], command]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    def stop(self, device: int) -> None:
        server = self.servers.pop(device)
        server.kill()
        server.wait()

    def cluster(
        self, top: Sequence[str] = (), *, only: Sequence[str] = (), **devices: Sequence[str]
    ) -> Path:
        """A cluster.toml for all devices, or some; more lines for the top, and for devices."""
        lines = ["version = 1", f'python = "{sys.executable}"', 'ssh_config = "config"', *top]
        for name in only or self.hosts.names:
            more = devices.get(name.replace("-", "_"), ())
            lines += ["", "[[device]]", f'host = "{name}"', *more]
        path = self.folder / "cluster.toml"
        path.write_text("\n".join([*lines, ""]))
        return path


@contextmanager
def ssh_devices(hosts: LabHosts, folder: Path) -> Iterator[SshDevices]:
    """Servers in all devices of a lab, with a key that they accept and known host keys."""
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd drops its rights
    devices = SshDevices(hosts, folder)
    _keygen(devices.key)
    shutil.copy(devices.key.with_suffix(".pub"), folder / "authorized_keys")
    (folder / "relay.py").write_text(RELAY)
    switch = f"/proc/{os.getpid()}/fd/{hosts.network.switch}"
    enter = f"{sys.executable} -I -S {ENTER} {switch} '' '' -- {sys.executable} -I -S"
    known, config = [], []
    for device, name in enumerate(hosts.names):
        devices.home(device).mkdir()
        _keygen(folder / f"host-{device}")
        public = (folder / f"host-{device}.pub").read_text().split()
        known.append(f"{name} {public[0]} {public[1]}\n")
        relay = f"{enter} {folder / 'relay.py'} {hosts.address(device)} %p"
        config.append(f"Host {name}\n  ProxyCommand {relay}\n  HostKeyAlias {name}\n")
    (folder / "known_hosts").write_text("".join(known))
    config.append(
        f"Host *\n  User root\n  Port {PORT}\n  IdentityFile {devices.key}\n  IdentitiesOnly yes\n"
        f"  IdentityAgent none\n  UserKnownHostsFile {folder / 'known_hosts'}\n"
        f"  GlobalKnownHostsFile none\n  BatchMode yes\n"
    )
    (folder / "config").write_text("".join(config))
    with ExitStack() as cleanup:
        _mount_small(devices.small, cleanup)
        for device in range(len(hosts.names)):
            devices.start(device)
        cleanup.callback(lambda: [devices.stop(device) for device in list(devices.servers)])
        devices.wait()
        yield devices


def _mount_small(place: Path, cleanup: ExitStack) -> None:
    """Before devices start: what is mounted later, they may not see."""
    place.mkdir()
    options = "size=80m,nr_inodes=40"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    subprocess.run(command, check=True)
    cleanup.callback(lambda: subprocess.run(["umount", "-l", str(place)], check=True))


def _keygen(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
