"""The machines that devices live on; in this version, processes of this one."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from terrazzo.errors import LaunchError, UsageError

LOCAL_ADDRESS = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

# Left behind by an enclosing torchrun, these would send the workers to its store, not ours.
FOREIGN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


@dataclass(frozen=True, slots=True)
class LocalHosts:
    """Devices that are processes on this machine and talk over its loopback interface."""

    devices: int

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise LaunchError(f"cannot start {self.devices} devices; give at least 1")

    @classmethod
    def parse(cls, text: str) -> LocalHosts:
        """Reads the value of ``--on``."""
        if not (text.isascii() and text.isdigit()) or int(text) < 1:
            raise UsageError(
                f"--on {text} is not supported; this version starts local processes: give their "
                "number, such as --on 4"
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
        return own | {
            "RANK": str(device),
            "LOCAL_RANK": str(device),
            "WORLD_SIZE": str(self.devices),
            "LOCAL_WORLD_SIZE": str(self.devices),
            "MASTER_ADDR": LOCAL_ADDRESS,
            "MASTER_PORT": str(port),
        }


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
