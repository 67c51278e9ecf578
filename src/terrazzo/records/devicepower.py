"""What the devices of a cluster draw in the modes that a plan may put them into.

A CSV file, one row for each mode of a device, or of all devices of a kind:

    device,mode,slowness,busy_w,idle_w
    pi5,all cores at 2.4 GHz,1.0,8.4,3.1
    pi5,all cores at 1.8 GHz,1.28,5.2,2.6

``slowness`` is how many times as long computing takes as in the mode that the device was profiled
in. ``device`` is a device's name, a kind (pi5 for pi5-0, pi5-1, ...) or * for all others.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from terrazzo.errors import UsageError

COLUMNS = ("device", "mode", "slowness", "busy_w", "idle_w")


@dataclass(frozen=True, slots=True)
class PlanMode:
    """One mode of one device: how much slower, and watts while it computes and while it waits."""

    title: str
    slowness: float
    busy_w: float
    idle_w: float


def load_modes(path: Path, names: Sequence[str]) -> tuple[tuple[PlanMode, ...], ...]:
    """For each device its modes, the fastest first."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"power table {path} cannot be read: {error}") from error
    if not rows or set(COLUMNS) - set(rows[0]):
        raise UsageError(f"power table {path} needs the columns {', '.join(COLUMNS)}")
    found: dict[str, list[PlanMode]] = {}
    for number, row in enumerate(rows, start=2):
        try:
            slowness, busy_w, idle_w = (float(row[name]) for name in COLUMNS[2:])
        except (TypeError, ValueError):
            raise UsageError(f"line {number} of {path} lacks a number: {dict(row)}") from None
        numbers = (slowness, busy_w, idle_w)
        if not all(isfinite(n) and n > 0 for n in numbers) or idle_w > busy_w:
            raise UsageError(
                f"line {number} of {path}: slowness {slowness:g}, busy {busy_w:g} W, idle "
                f"{idle_w:g} W; all must be positive, and idle not above busy"
            )
        found.setdefault(row["device"].strip(), []).append(PlanMode(row["mode"], *numbers))
    return tuple(_modes_of(name, found, path) for name in names)


def _modes_of(name: str, found: dict[str, list[PlanMode]], path: Path) -> tuple[PlanMode, ...]:
    kind = name.rpartition("-")[0]
    modes = found.get(name) or found.get(kind) or found.get("*")
    if not modes:
        raise UsageError(f"power table {path} says nothing of {name}: add rows for it, or for *")
    return tuple(sorted(modes, key=lambda mode: mode.slowness))
