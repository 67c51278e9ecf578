"""Removing a lab: its processes, its groups, its file. Doing it again is no harm.

The network needs nothing: namespaces without names go with the processes that held them.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from terrazzo.errors import LabError
from terrazzo.lab import state
from terrazzo.lab.groups import Groups

ENDING_S = 10.0


def remove_lab(lab: str, groups: Groups, folder: Path = state.FOLDER) -> None:
    """Ends every process in the lab's devices and removes what the lab made."""
    end_processes(lab, groups)
    groups.remove(lab)
    state.forget(lab, folder)


def end_processes(lab: str, groups: Groups) -> None:
    limit_s = time.monotonic() + ENDING_S
    while left := groups.processes(lab):
        groups.thaw(lab)
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > limit_s:
            raise LabError(
                f"processes {left} of lab {lab} did not end within {ENDING_S:g} s of SIGKILL; they "
                "may hang in the kernel: run terrazzo lab clean again later"
            )
        time.sleep(0.01)


def remove_dead(groups: Groups, folder: Path = state.FOLDER) -> list[str]:
    """Removes what labs left whose maker is dead; the names of those found."""
    dead = sorted(lab for lab in groups.labs() | state.names(folder) if not state.is_alive(lab))
    for lab in dead:
        remove_lab(lab, groups, folder)
    return dead
