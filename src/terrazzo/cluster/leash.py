"""Becomes the given command, tied to the launcher: when the launcher dies, it dies too.

Run by path as ``python -I -S leash.py LAUNCHER_PID COMMAND...``, so nothing of the package is
imported. Asking the kernel from inside the new process, not between fork and exec of a launcher
that has threads, can't deadlock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it died before the kernel was asked
            sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
