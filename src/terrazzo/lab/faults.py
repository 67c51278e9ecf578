"""Faults: what goes wrong on real clusters, done on purpose, at a chosen time or step.

cut       the cable is pulled; restore puts it back
slow      the link gets another rate, both ways; restore gives it its own again
kill      every process in the device ends, as when its power fails
pause     the device stands still, holding its connections; resume lets it go on
fill      a stranger in the device takes its memory, but for what is left free; restore ends it
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import LabError, UsageError
from terrazzo.lab.running import RunningLab
from terrazzo.records.event import read_events

CUT, SLOW, KILL, PAUSE, RESUME, FILL, RESTORE = KINDS = (
    "cut", "slow", "kill", "pause", "resume", "fill", "restore",
)  # fmt: skip
ENTER = Path(__file__).with_name("enter.py")
FILLER = Path(__file__).with_name("filler.py")
LOOK_S = 0.05
LEFT_FREE_BYTES = 16 << 20
ENDED_FIRST = "1000"


@dataclass(frozen=True, slots=True)
class Fault:
    """What shall happen to which device, and when: at once, after a time, or at a step.

    ``value`` is payload bits a second for slow, and bytes left free for fill.
    """

    kind: str
    device: int
    value: float | None = None
    after_s: float = 0.0
    at_step: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"no fault {self.kind}; there are {', '.join(KINDS)}")
        if self.kind == SLOW and not (self.value and self.value > 0):
            raise UsageError("slow needs a rate above 0: --mbit 10, say")
        if self.after_s < 0 or (self.at_step is not None and self.at_step < 1):
            raise UsageError("a fault comes after 0 s or later, at step 1 or later")


def carry_out(fault: Fault, lab: RunningLab) -> None:
    """Does it now."""
    if fault.kind == CUT:
        lab.network.cut(fault.device)
    elif fault.kind == SLOW:
        lab.network.slow(fault.device, fault.value or 0.0)
    elif fault.kind == KILL:
        lab.kill(fault.device)
    elif fault.kind in (PAUSE, RESUME):
        _freeze(lab, fault.device, fault.kind == PAUSE)
    elif fault.kind == FILL:
        free = LEFT_FREE_BYTES if fault.value is None else int(fault.value)
        _fill(lab, fault.device, free)
    else:
        restore(lab, fault.device)


def restore(lab: RunningLab, device: int) -> None:
    """Takes back what can be taken back; a killed process stays dead."""
    lab.network.mend(device)
    if lab.groups.can_freeze:
        lab.group(device).freeze(False)
    fillers = _fillers(lab, device)
    if fillers:
        _prefer(lab, device, ended_first=False)
    for process in fillers:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def wait_for(
    fault: Fault, *, run_folder: Path | None, goes_on: Callable[[], bool] = lambda: True
) -> bool:
    """Waits until the fault is due; False if what ``goes_on`` looks at has ended before."""
    if fault.at_step is not None and run_folder is None:
        raise UsageError(
            "this lab records no run, so its steps are not known: use --after SECONDS, or start "
            "it without --no-record"
        )
    due_s = time.monotonic() + fault.after_s
    while goes_on():
        if fault.at_step is None:
            if time.monotonic() >= due_s:
                return True
        elif run_folder is not None and step_of(run_folder) >= fault.at_step:
            return True
        time.sleep(LOOK_S)
    return False


def step_of(run_folder: Path) -> int:
    """The latest call of net that any device has finished and recorded."""
    return max((event.call for event in read_events(run_folder)), default=0)


def _freeze(lab: RunningLab, device: int, frozen: bool) -> None:
    if not lab.groups.can_freeze:
        raise LabError("this kernel offers no freezer controller: devices cannot be paused here")
    lab.group(device).freeze(frozen)


def _fill(lab: RunningLab, device: int, left_free_bytes: int) -> None:
    """Starts the filler in the device and waits until it holds what it shall, or was ended."""
    usage = lab.usage(device)
    used_bytes = usage.memory_bytes - usage.cache_bytes  # what is cached makes room
    wanted = usage.limit_bytes - used_bytes - left_free_bytes
    namespace = f"/proc/{os.getpid()}/fd/{lab.network.devices[device]}"
    place = [namespace, "", "", *map(str, lab.group(device).joining)]
    python = [sys.executable, "-I", "-S"]
    with subprocess.Popen(
        [*python, str(ENTER), *place, "--", *python, str(FILLER), str(max(0, wanted))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # it goes with the device, not with who started it
    ) as filler:
        assert filler.stdout is not None
        filler.stdout.readline()
        filler.returncode = 0  # left running on purpose
    _prefer(lab, device, ended_first=True)


def _prefer(lab: RunningLab, device: int, *, ended_first: bool) -> None:
    """Who the kernel ends when memory is full: those who were there before the filler.

    The filler asks to be spared, which the kernel does not grant to everybody; to be ended first
    may be asked for by anybody.
    """
    fillers = _fillers(lab, device)
    for process in lab.group(device).processes():
        if process not in fillers:
            with suppress(OSError):
                path = Path(f"/proc/{process}/oom_score_adj")
                path.write_text(ENDED_FIRST if ended_first else "0", encoding="ascii")


def _fillers(lab: RunningLab, device: int) -> list[int]:
    mark = str(FILLER).encode()
    found = []
    for process in lab.group(device).processes():
        with suppress(OSError):
            if mark in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0"):
                found.append(process)
    return found
