"""The machines that devices live on: one small interface, and processes of this machine.

Emulated devices (``terrazzo.lab``) and those reached by SSH (``cluster.sshhosts``) implement the
same interface, so launching is one code path.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from terrazzo.cluster.process import DeviceProcess, Process
from terrazzo.errors import LaunchError, UsageError

LOCAL_ADDRESS = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

# Left behind by an enclosing torchrun, these would send the workers to its store, not ours.
FOREIGN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


class Hosts(Protocol):
    """One computer for each device, numbered from 0."""

    @property
    def names(self) -> tuple[str, ...]:
        """What people call the devices."""

    def address(self, device: int) -> str:
        """Where the other devices reach it."""

    def port(self) -> AbstractContextManager[int]:
        """A port on the first device that is free while the block runs."""

    def environment(self, device: int, *, port: int, base: Mapping[str, str]) -> dict[str, str]:
        """What a process on the device finds: torchrun's variables, over ``base``."""

    def run(
        self, command: Sequence[str], *, device: int, environment: Mapping[str, str]
    ) -> Process:
        """Starts a command on the device."""

    def copy(self, source: Path, *, device: int, destination: Path) -> None:
        """Brings a file or folder of this machine to the device."""

    def fetch(self, source: Path, *, device: int, destination: Path) -> None:
        """Brings a file of the device to this machine."""

    def kill(self, device: int) -> None:
        """Ends, at once, everything that was started on the device."""

    def can_return(self, device: int, members: Path) -> bool:
        """Whether a lost device, started now, would find the others; this never waits.

        ``members`` is the file in which they write where they are, where devices share files.
        """


def rendezvous(device: int, devices: int, *, at: tuple[str, int]) -> dict[str, str]:
    """What torchrun would set for a device that is a computer of its own."""
    return {
        "RANK": str(device),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(devices),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": at[0],
        "MASTER_PORT": str(at[1]),
    }


@dataclass(frozen=True, slots=True)
class LocalHosts:
    """Devices that are processes on this machine and talk over its loopback interface."""

    devices: int
    started: list[DeviceProcess] = field(default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise LaunchError(f"cannot start {self.devices} devices; give at least 1")

    @classmethod
    def parse(cls, text: str) -> LocalHosts:
        """Reads the value of ``--on``."""
        if not (text.isascii() and text.isdigit()) or int(text) < 1:
            raise UsageError(
                f"--on {text} is not supported here; give a number of local processes, such as "
                "--on 4"
            )
        return cls(int(text))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"device{index}" for index in range(self.devices))

    def environment(self, device: int, *, port: int, base: Mapping[str, str]) -> dict[str, str]:
        """What torchrun would set, and what keeps local processes out of each other's way.

        ``base`` wins over the defaults for threads, interface and buffering, never over the
        rendezvous.
        """
        own = {key: value for key, value in base.items() if not key.startswith(FOREIGN_PREFIXES)}
        own.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // self.devices)))
        own.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        own.setdefault("PYTHONUNBUFFERED", "1")  # lines appear when they are printed
        together = {"LOCAL_RANK": str(device), "LOCAL_WORLD_SIZE": str(self.devices)}
        return own | rendezvous(device, self.devices, at=(self.address(0), port)) | together

    def address(self, device: int) -> str:
        return LOCAL_ADDRESS

    def port(self) -> AbstractContextManager[int]:
        return reserved_port()

    def run(
        self, command: Sequence[str], *, device: int, environment: Mapping[str, str]
    ) -> DeviceProcess:
        name = self.names[device]
        process = DeviceProcess(command, device=device, name=name, environment=environment)
        self.started.append(process)
        return process

    def copy(self, source: Path, *, device: int, destination: Path) -> None:
        copy_here(source, destination)

    def fetch(self, source: Path, *, device: int, destination: Path) -> None:
        copy_here(source, destination)

    def kill(self, device: int) -> None:
        for process in self.started:
            if process.device == device and process.poll() is None:
                process.signal(signal.SIGKILL)

    def can_return(self, device: int, members: Path) -> bool:
        return members.exists()


def copy_here(source: Path, destination: Path) -> None:
    """Copies where devices share this machine's files; onto itself it is no copy at all."""
    if source.resolve() == destination.resolve():
        return
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, destination, dirs_exist_ok=True)
        else:
            shutil.copy2(source, destination)
    except OSError as error:
        raise LaunchError(f"cannot copy {source} to {destination}: {error}") from error


def available_cores() -> int:
    """The cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that nobody else is given while the block runs.

    The socket is bound but never listens. With SO_REUSEADDR on both sides the first device's
    store may still listen on that port, while the kernel hands it out to no one who asks for any
    free port. Closing it before the devices start would leave a gap for others to step into.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((LOCAL_ADDRESS, 0))
        except OSError as error:
            raise LaunchError(f"no free port on {LOCAL_ADDRESS}: {error}") from error
        yield int(holder.getsockname()[1])
