"""What happens to a device in a round of chaos, from inside of it: where, and what."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from strike import strike

PLACES = {
    "batch": ("links", "broadcast_bytes", 1, 20),
    "forward": ("links", "depart", 1, 40),
    "notes": ("links", "gather", 1, 90),
    "backward": ("links", "sum_later", 1, 12),
    "commit": ("control", "finish", 1, 40),
    "optimiser": ("optimizer", "step", 1, 10),
    "validation": ("net", "eval", 1, 3),
    "checkpoint": ("shelf", "_write", 1, 3),
    "copy": ("spares", "keep", 1, 5),
    "recovery": ("control", "next_view", 1, 1),
    "return": ("spares", "restore", 1, 1),
}
"""Whose method is struck, and how often it may have been used before."""
ONLY_CUT = ("copy", "return")
ONLY_SECOND = ("recovery", "return")
LOST = ("kill", "pause", "hang", "cut", "fill")
"""After these the others go on without the device."""
RESUME_S, CLOCK_S = 30.0, 1e6


@dataclass(frozen=True)
class Strike:
    """What happens to which device: inside, at the n-th use of a method, or after some seconds."""

    kind: str
    device: int
    place: str = ""
    at: int = 0
    after_s: float = 0.0


def strike_from_inside(one: Strike, targets: dict[str, Any], folder: Path) -> None:
    """Lets what is meant for this device happen at its place; leaves a mark that it did."""

    def act() -> None:
        (folder / f"{one.device}.struck").touch()
        KINDS[one.kind](targets, folder / "checkpoints" / str(one.device))

    whose, method, *_ = PLACES[one.place]
    if one.place == "validation":  # somewhere inside of it
        later = partial(strike, targets["links"], "gather", act, at=1 + one.at * 2 % 5)
        strike(targets["net"], "eval", later, at=one.at)
    elif targets[whose] is not None:
        strike(targets[whose], method, act, at=one.at)


def _kill(targets: dict[str, Any], folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _pause(targets: dict[str, Any], folder: Path) -> None:
    me = os.getpid()
    if os.fork() == 0:  # somebody must wake it up
        time.sleep(RESUME_S)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)


def _hang(targets: dict[str, Any], folder: Path) -> None:
    time.sleep(3600)


def _break(targets: dict[str, Any], folder: Path) -> None:
    """Its connections break, and it can make new ones."""
    targets["links"].hang_up()


def _clock(targets: dict[str, Any], folder: Path) -> None:
    """The time of day jumps, as when a board without a clock has found a time server."""
    usual: Callable[[], float] = time.time
    time.time = lambda: usual() + CLOCK_S


def _disk(targets: dict[str, Any], folder: Path) -> None:
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
