"""SSH connections: the system's own ``ssh``, with the user's keys, agent, config and known hosts.

One connection to each device is opened at the start and shared by everything that follows. It is
tied to this process: when this one dies, even by ``kill -9``, so does the connection, and the
device notices. Host keys are checked as ssh always does; nothing here turns that off.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from terrazzo.cluster.process import LEASH
from terrazzo.errors import HostError, LaunchError
from terrazzo.records.cluster import LOST_AFTER_S, ClusterDevice

CONNECT_S = 10
ALIVE_COUNT = 3
POLL_S = 0.02
STOP_S = 3.0
OPTIONS = {
    "BatchMode": "yes",  # nobody is there to type a password
    "ConnectTimeout": str(CONNECT_S),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "LogLevel": "ERROR",
}


@dataclass(frozen=True, slots=True)
class Ssh:
    """How one device is reached."""

    device: ClusterDevice
    socket: Path
    """Where this process and its children find the shared connection."""
    config: str = ""
    lost_after_s: float = LOST_AFTER_S

    def words(self, *more: str) -> list[str]:
        """The ssh command up to the host."""
        found = ["ssh", "-T"]
        if self.config:
            found += ["-F", self.config]
        for key, value in OPTIONS.items():
            found += ["-o", f"{key}={value}"]
        found += ["-o", f"ServerAliveInterval={max(1, round(self.lost_after_s / ALIVE_COUNT))}"]
        found += ["-o", f"ControlPath={self.socket}"]
        if self.device.user:
            found += ["-l", self.device.user]
        if self.device.port:
            found += ["-p", str(self.device.port)]
        return [*found, *more, "--", self.device.host]

    def sharing(self, remote: str) -> list[str]:
        """A command on the device, over the connection that is open; never over a new one."""
        return [*self.words("-o", "ControlMaster=no", "-o", "ProxyCommand=false"), remote]

    def typed(self, remote: str = "") -> str:
        """What a person would type."""
        words = ["ssh"]
        if self.config:
            words += ["-F", self.config]
        if self.device.port:
            words += ["-p", str(self.device.port)]
        user = f"{self.device.user}@" if self.device.user else ""
        return shlex.join([*words, user + self.device.host, *([remote] if remote else [])])

    def explain(self, said: str) -> HostError:
        """What ssh said, and what to do about it."""
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        gist = lines[-1].rstrip(".") if lines else "ssh ended without a word"
        for part, remedy in REMEDIES:
            hit = next((line for line in lines if part in line), None)
            if hit is not None:
                gist = hit.strip("@ .!")  # the loudest warning stands in a frame
                return HostError(
                    f"{self.device.title} cannot be reached: {_printable(gist)}. "
                    + remedy.format(ssh=self.typed(), host=self.device.host)
                )
        return HostError(
            f"{self.device.title} cannot be reached: {_printable(gist)}. Try: {self.typed()}"
        )


REMEDIES = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "If the device was set up anew, remove its old key: "
     "ssh-keygen -R {host}; if not, somebody may stand in between"),
    ("Host key verification failed", "Its key is not known here: compare it once by hand with: "
     "{ssh} (or pair: terrazzo cluster pair {host})"),
    ("Permission denied", "Your key is not accepted there: ssh-copy-id {host} (or pair: terrazzo "
     "cluster pair {host}), and see that ssh-add -l lists it"),
    ("Could not resolve", "Is the name right, and the device on? Write its address as host"),
    ("timed out", "Is it switched on and on this network? Try: ping {host}"),
    ("No route to host", "Is it switched on and on this network? Try: ping {host}"),
    ("Network is unreachable", "Is this machine on the network? Try: ping {host}"),
    ("Connection refused", "It is there, but no SSH server answers; on it: sudo systemctl "
     "enable --now ssh"),
    ("Connection closed", "Its SSH server hung up: look at its log, journalctl -u ssh"),
)  # fmt: skip


class Connection:
    """One shared connection, open from ``open`` to ``close``."""

    def __init__(self, ssh: Ssh) -> None:
        self.ssh = ssh
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid())]
        command = [*leash, *ssh.words("-N", "-o", "ControlMaster=yes", "-o", "ControlPersist=no")]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Until it is open; HostError where it will not be."""
        end_s = time.monotonic() + 3 * CONNECT_S
        while not self.ssh.socket.exists():
            if self._process.poll() is not None:
                raise self.ssh.explain(self.said())
            if time.monotonic() > end_s:
                self.close()
                raise self.ssh.explain(f"no connection within {3 * CONNECT_S} s: timed out")
            time.sleep(POLL_S)

    @property
    def is_open(self) -> bool:
        return self._process.poll() is None

    def said(self) -> str:
        """What ssh printed until its end."""
        assert self._process.stderr is not None
        with suppress(OSError, ValueError):
            return bytes(self._process.stderr.read(65536)).decode("utf-8", "replace")
        return ""

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self.ssh.socket.unlink(missing_ok=True)


def require_ssh() -> None:
    if shutil.which("ssh") is None:
        raise LaunchError("there is no ssh on this machine: install OpenSSH (openssh-client)")


def shell_word(path: str) -> str:
    """A path for the device's shell; its ~ stays the home there."""
    home, slash, rest = path.partition("/")
    if home == "~":
        return f'"$HOME"{slash}{shlex.quote(rest) if rest else ""}'
    return shlex.quote(path)


def one_line(errors: Sequence[HostError]) -> HostError:
    """The first of several, and how many more there are."""
    more = f" (and {len(errors) - 1} more: see terrazzo cluster check)" if len(errors) > 1 else ""
    return HostError(f"{errors[0]}{more}")


def _printable(text: str) -> str:
    """What another machine says may hold escape codes for a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)[:300]
