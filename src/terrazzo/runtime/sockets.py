"""The sockets that gloo opened: hanging up wakes everybody who waits for this device.

torch.distributed can only drop a connection when its last user lets go of it, and a stack of
frames that an error is passing through does not. A socket can be shut down at any time: whatever
waits on it, here or at the other end, fails at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FOLDER = "/dev/fd"  # on Linux and macOS
COUNTS = struct.Struct("@120xQQ")
"""Of Linux' tcp_info: how many bytes the other end has acknowledged, and how many have come."""


class Connection(NamedTuple):
    """An open socket; the inode tells it from a later file with the same number."""

    number: int
    inode: int


def connections() -> frozenset[Connection]:
    """The connected TCP sockets of this process."""
    found = set()
    for path in Path(FOLDER).iterdir() if Path(FOLDER).is_dir() else ():
        number = int(path.name)
        with contextlib.suppress(OSError), _duplicate(number) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                found.add(Connection(number, os.fstat(number).st_ino))
    return frozenset(found)


def identities(numbers: Iterable[int]) -> frozenset[Connection]:
    """Sockets by the numbers of their files, as far as these are open."""
    found = set()
    for number in numbers:
        with contextlib.suppress(OSError):
            found.add(Connection(number, os.fstat(number).st_ino))
    return frozenset(found)


def own_address(known: Iterable[Connection]) -> tuple[socket.AddressFamily, str]:
    """This end of a connection: its kind of address, and the address."""
    for connection in known:
        with _duplicate(connection.number) as one:
            return socket.AddressFamily(one.family), one.getsockname()[0]
    raise OSError("no connection to another device is open")


def carried_bytes(known: Iterable[Connection]) -> int | None:
    """What these have carried so far, both ways; None where the system does not count it."""
    total = 0
    for connection in known if sys.platform == "linux" else ():
        with contextlib.suppress(OSError, struct.error), _duplicate(connection.number) as one:
            told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, COUNTS.size)
            total += sum(COUNTS.unpack(told))
    return total if sys.platform == "linux" else None


def hang_up(known: Iterable[Connection]) -> None:
    """Shuts these down, as far as they are still what they were."""
    for connection in known:
        with contextlib.suppress(OSError):
            if os.fstat(connection.number).st_ino == connection.inode:
                with _duplicate(connection.number) as one:
                    one.shutdown(socket.SHUT_RDWR)


def _duplicate(number: int) -> socket.socket:
    """A second handle, so that closing it leaves the first alone; OSError if it is no socket."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
