"""What happens to a device in a round of chaos: where, what, and for how long.

A strike waits inside the device for the n-th use of a method. Some then happen from inside; in the
lab the device stops there and asks for what can only be done from outside: its power, its cable,
its memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from strike import strike

PLACES = {
    "start": ("links", "gather combine", 1, 4),
    "batch": ("links", "broadcast_bytes", 1, 16),
    "forward": ("links", "depart", 1, 24),
    "notes": ("links", "gather combine", 1, 90),
    "backward": ("calls", "_open_backward", 1, 12),
    "commit": ("control", "finish", 1, 36),
    "optimiser": ("optimizer", "step", 1, 6),
    "validation": ("net", "eval", 1, 3),
    "checkpoint": ("shelf", "_write", 1, 3),
    "copy": ("spares", "keep", 1, 5),
    "change": ("net", "change_plan", 1, 9),
    "recovery": ("control", "next_view", 1, 1),
    "return": ("spares", "restore", 1, 1),
    "joining": ("run", "give", 1, 1),
}
"""Whose method is struck, and how often it may have been used before."""
INSIDE_OF = {"validation": 5, "change": 9, "backward": 7}
"""Struck at one of so many messages that follow, not at the call itself."""
ONLY_CUT = ("copy", "return")
LOST = ("kill", "pause", "hang", "cut", "fill")
"""After these the others may go on without the device."""
ONLY_AFTER = {"recovery": (*LOST, "break"), "return": LOST, "joining": ("kill", "fill")}
"""Places that there are only when something else has happened to another device."""
OUTSIDE = ("kill", "pause", "cut", "slow", "fill")
"""What is done to a device from outside, in the lab."""
ASKED_S = 30.0
"""So long a device waits for what it asks for: then whoever does it is broken."""
JUMPS_S, MORE_BYTES = (1_000_000, -7_200, 300, -90_000, -300, 5_000), 64 << 20
NOW_S = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""The clock that strikes and steps are noted by: no jump changes it, and all devices have it."""


@dataclass(frozen=True)
class Strike:
    """What happens to which device, at the n-th use of a method; ``lasts_s``: until it ends."""

    kind: str
    device: int
    place: str = ""
    at: int = 0
    lasts_s: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.lasts_s:g} s" if self.lasts_s else ""
        return f"{self.kind} {self.device} {self.place} {self.at}{lasting}"


def asked(folder: Path, device: int) -> Path:
    """Left by a device that waits to be struck from outside."""
    return folder / f"{device}.asks"


def mark(folder: Path, device: int) -> Path:
    """Left by whoever struck it, with the time."""
    return folder / f"{device}.struck"


def note(folder: Path, device: int, when_s: float) -> None:
    beside = folder / f"{device}.strikes"
    beside.write_text(repr(when_s), encoding="ascii")
    beside.rename(mark(folder, device))


def lie_in_wait(one: Strike, targets: dict[str, Any], folder: Path, *, in_lab: bool) -> None:
    """Lets what is meant for this device happen at its place."""

    def act() -> None:
        if in_lab and one.kind in OUTSIDE:
            _ask(folder, one.device)
            if one.kind == "fill":
                bytearray(b"x") * MORE_BYTES  # its memory is full now
            return
        note(folder, one.device, NOW_S())
        KINDS[one.kind](one, targets, folder / "checkpoints" / str(one.device))

    whose, method, *_ = PLACES[one.place]
    target = targets.get(whose)
    if target is None:
        return
    if one.place in INSIDE_OF:
        after = 1 + one.at * 2 % INSIDE_OF[one.place]
        later = partial(strike, targets["links"], "gather combine", act, at=after)
        strike(target, method, later, at=1 if one.place == "change" else one.at)
    else:
        strike(target, method, act, at=one.at)


def _ask(folder: Path, device: int) -> None:
    asked(folder, device).touch()
    end_s = time.monotonic() + ASKED_S
    while not mark(folder, device).exists():
        if time.monotonic() > end_s:
            raise TimeoutError(f"nobody struck device {device} within {ASKED_S:g} s")
        time.sleep(0.002)


def _kill(one: Strike, targets: dict[str, Any], folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _pause(one: Strike, targets: dict[str, Any], folder: Path) -> None:
    me = os.getpid()
    if os.fork() == 0:  # somebody must wake it up
        time.sleep(one.lasts_s)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)


def _hang(one: Strike, targets: dict[str, Any], folder: Path) -> None:
    time.sleep(3600)


def _break(one: Strike, targets: dict[str, Any], folder: Path) -> None:
    """Its connections break, and it can make new ones."""
    targets["links"].hang_up()


def _clock(one: Strike, targets: dict[str, Any], folder: Path) -> None:
    """The time of day jumps, as when a board without a clock has found a time server."""
    ctypes.CDLL(None).jump_by(ctypes.c_long(JUMPS_S[one.at % len(JUMPS_S)]))


def _disk(one: Strike, targets: dict[str, Any], folder: Path) -> None:
    """Nothing fits any more where its checkpoints are."""
    with (folder / "stranger").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            pass


KINDS = {
    "kill": _kill, "pause": _pause, "hang": _hang, "break": _break, "clock": _clock, "disk": _disk,
}  # fmt: skip
