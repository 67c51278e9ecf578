"""The attendant: the helper of a process that may change modes itself, but could be killed.

It has no more rights than who starts it, and serves the knobs of a device that root runs a training
on, or those in a folder laid out like a device's.

    python -m terrazzo.power.attendant [FOLDER]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from terrazzo.power.assistant import HELPER, Assistant
from terrazzo.power.helper import work
from terrazzo.power.keeper import STATE, Keeper
from terrazzo.power.panel import Panel
from terrazzo.power.sysfs import Sysfs

HERE = Path("/")


def kept_in(root: Path) -> Path:
    """Where the state of a device is kept while it is changed."""
    return STATE if root == HERE else root / "state.json"


def attended(root: Path = HERE) -> Assistant:
    """Who changes the modes of this device for a training: it outlives whatever ends that."""
    if root == HERE and os.geteuid() != 0:
        return Assistant(("sudo", "-n", *HELPER), apart=True)
    return Assistant((sys.executable, "-m", "terrazzo.power.attendant", str(root)), apart=True)


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    return work(Panel.find(Sysfs(root)), Keeper(kept_in(root)))


if __name__ == "__main__":
    sys.exit(main())
