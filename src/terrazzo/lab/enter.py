"""Becomes the given command inside an emulated device.

Run by path as ``python -I -S enter.py NAMESPACE NAME HOSTS GROUP_FILE... -- COMMAND...``, so
nothing of the package is imported. NAMESPACE is a file of /proc; NAME becomes the host's name, and
HOSTS what it finds as /etc/hosts (both may be empty); GROUP_FILEs take this process's number.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

NEW_NETWORK, NEW_HOST_NAME, NEW_MOUNTS = 0x40000000, 0x04000000, 0x00020000
BIND, RECURSIVE, SLAVE = 0x1000, 0x4000, 0x80000


def enter(namespace: str, name: str, hosts: str, group_files: Sequence[str]) -> None:
    """Moves this process: first into the network, then into what limits it."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = os.open(namespace, os.O_RDONLY)
    if libc.setns(number, NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
    os.close(number)
    if name and libc.unshare(NEW_HOST_NAME) == 0:
        libc.sethostname(name.encode("ascii"), len(name))
    # Slave: mounts of this machine show up in the device, those of the device nowhere else.
    if hosts and libc.unshare(NEW_MOUNTS) == 0:
        libc.mount(None, b"/", None, RECURSIVE | SLAVE, None)
        libc.mount(os.fsencode(hosts), b"/etc/hosts", None, BIND, None)
    for path in group_files:
        number = os.open(path, os.O_WRONLY)
        os.write(number, b"0")  # whoever writes it
        os.close(number)


def main() -> None:
    place, command = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    try:
        enter(place[0], place[1], place[2], place[3:])
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]} in the device: {error}")


if __name__ == "__main__":
    main()
