"""A meter: one source of power or energy readings, and what part of a device it covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Protocol

from terrazzo.errors import MeterError

BOARD, CPU, GPU = "board", "cpu", "gpu"
"""What a meter covers: all of a device, or a part of it."""
PART_WORDS = {BOARD: "board", CPU: "processor", GPU: "GPU"}
MOST_W = 3000.0
"""No device that Terrazzo runs on draws more; a reading beyond is nonsense."""
MOVES_S = 20.0
"""Noise moves the last digit of most sensors sooner than this."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a meter says at one moment: watts, or joules counted since some moment in the past."""

    watts: float | None = None
    joules: float | None = None


class Meter(Protocol):
    """One source."""

    @property
    def name(self) -> str:
        """The source and the rails that are summed."""

    @property
    def covers(self) -> str:
        """``board``, ``cpu`` or ``gpu``."""

    @property
    def is_measured(self) -> bool:
        """False: the readings are an estimate."""

    @property
    def interval_s(self) -> float:
        """How often it is worth reading."""

    @property
    def error(self) -> float:
        """How far off all of its readings may be, relatively: what no repetition shows."""

    @property
    def moves_s(self) -> float:
        """A sensor at work shows another number within so many seconds; else it may hang."""

    @property
    def window_s(self) -> float:
        """The shortest time of which it can tell the power."""

    def read(self) -> Reading:
        """A reading; MeterError where there is none."""


def number(path: Path) -> float:
    """The number in a file of sysfs; MeterError says what is wrong with it, and what to do."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except PermissionError as error:
        raise MeterError(f"{path} may not be read: {how_to_read(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise MeterError(f"{path} cannot be read: {error}") from error
    try:
        return float(text)
    except ValueError:
        raise MeterError(f"{path} holds {text[:40]!r}, which is no number") from None


def how_to_read(path: Path) -> str:
    """What gives an ordinary user the right to read a file."""
    if "powercap" in path.parts:
        return (
            "since 2020 kernels show energy counters to root alone; a udev rule with "
            'RUN+="/bin/chmod a+r" on energy_uj lets all read them, or run with CAP_DAC_READ_SEARCH'
        )
    return "add yourself to its group (ls -l shows it), or run with CAP_DAC_READ_SEARCH"


def part_words(covers: Iterable[str]) -> str:
    """``processor and GPU``."""
    return " and ".join(PART_WORDS[part] for part in covers)


def sensible(watts: float, name: str) -> float:
    """Watts that a device can draw; anything else is refused."""
    if not isfinite(watts) or not 0 <= watts <= MOST_W:
        raise MeterError(
            f"{name} says {watts:g} W; between 0 and {MOST_W:g} W is possible: reading left out"
        )
    return watts


def text_of(path: Path) -> str:
    """A short text of sysfs; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8").rstrip("\0\n ").strip()
    except (OSError, UnicodeDecodeError):
        return ""
