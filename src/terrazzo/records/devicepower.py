"""What the devices of a cluster draw in the modes that a plan may put them into.

A table is what ``terrazzo power tune --save`` has written on a device (``records.modes``), of all
devices or of those that are named with it: ``pi5=rows.csv``. Or it is written by hand, one row for
each mode of a device, or of all devices of a kind; further columns are knobs to be set:

    device,mode,slowness,busy_w,idle_w,cores,cpu_hz
    pi5,all cores at 2.4 GHz,1.0,8.4,3.1,4,2.4e9
    pi5,all cores at 1.8 GHz,1.28,5.2,2.6,4,1.8e9

``slowness`` is how many times as long computing takes as in the mode that the device was profiled
in. ``device`` is a device's name, a kind (pi5 for pi5-0, pi5-1, ...) or * for all others.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from terrazzo.errors import UsageError
from terrazzo.records.modes import SIMULATED, Measured, Mode, ModeTable
from terrazzo.records.power import IDLE_PART
from terrazzo.records.seat import COMPUTE

COLUMNS = ("device", "mode", "slowness", "busy_w", "idle_w")
ALL = "*"
MOST_MODES = 12
"""Of a device's measured ones: every one more is tried in every plan."""
WORTH = 0.02
"""What another mode has to save in a phase, relatively."""


@dataclass(frozen=True, slots=True)
class PlanMode:
    """One mode of one device: how much slower, and watts while it computes and while it waits."""

    title: str
    slowness: float
    busy_w: float
    idle_w: float
    mode: Mode | None = None
    """The knobs that put a device into it; None: they are not known."""
    phases: tuple[tuple[str, Mode], ...] = ()
    """Modes of other phases that take less energy in them."""


def load_modes(paths: Sequence[str], names: Sequence[str]) -> tuple[tuple[PlanMode, ...], ...]:
    """For each device its modes, the fastest first, from tables ``FILE`` or ``DEVICE=FILE``."""
    found: dict[str, list[PlanMode]] = {}
    for text in paths:
        device, path = _whose(text)
        for key, modes in _table(path, device).items():
            found.setdefault(key, []).extend(modes)
    return tuple(_modes_of(name, found, ", ".join(paths)) for name in names)


def _whose(text: str) -> tuple[str, Path]:
    device, _, name = ("", "", text) if Path(text).is_file() else text.rpartition("=")
    return device, Path(name)


def _table(path: Path, device: str) -> dict[str, list[PlanMode]]:
    """The modes of a table by device; ``device`` is whose they are where it says none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"power table {path} cannot be read: {error}") from error
    head = [cell.strip().lower() for cell in lines[0]] if lines else []
    if not set(COLUMNS) & set(head):
        return {device or ALL: _measured(ModeTable.load(path).phases())}
    if len(lines) < 2 or set(COLUMNS) - set(head):
        raise UsageError(
            f"power table {path} needs the columns {', '.join(COLUMNS)}, or to be one that "
            "terrazzo power tune --save has written"
        )
    found: dict[str, list[PlanMode]] = {}
    for number, cells in enumerate(lines[1:], start=2):
        if any(cell.strip() for cell in cells):
            row = dict(zip(head, (cell.strip() for cell in cells), strict=False))
            key = device or row.get("device", "")
            found.setdefault(key, []).append(_row(row, f"line {number} of {path}"))
    return found


def _row(row: Mapping[str, str], where: str) -> PlanMode:
    knobs = {name: text for name, text in row.items() if name not in COLUMNS and text}
    try:
        slowness, busy_w, idle_w = numbers = [float(row[name]) for name in COLUMNS[2:]]
        mode = Mode.of({name: float(text) for name, text in knobs.items()})
    except (KeyError, ValueError):
        raise UsageError(f"{where} lacks a number: {dict(row)}") from None
    if not all(isfinite(n) and n > 0 for n in numbers) or idle_w > busy_w:
        raise UsageError(
            f"{where}: slowness {slowness:g}, busy {busy_w:g} W, idle {idle_w:g} W; all must be "
            "positive, and idle not above busy"
        )
    return PlanMode(row["mode"], slowness, busy_w, idle_w, mode if knobs else None)


def _measured(tables: Mapping[str, ModeTable]) -> list[PlanMode]:
    """Modes as they were tuned: those that none beats in both time and power.

    A device is taken to have been profiled in its fastest mode.
    """
    main = COMPUTE if COMPUTE in tables else next(iter(tables))
    rows = tables[main].rows
    front = [
        row
        for row in rows
        if not any(
            other.step_s <= row.step_s
            and other.power_w <= row.power_w
            and (other.step_s, other.power_w) != (row.step_s, row.power_w)
            for other in rows
        )
    ]
    front.sort(key=lambda row: row.step_s)
    count = min(len(front), MOST_MODES)
    kept = [front[round(n * (len(front) - 1) / max(count - 1, 1))] for n in range(count)]
    others = {name: table.rows for name, table in tables.items() if name != main}
    fastest_s, mark = front[0].step_s, f" ({SIMULATED})" if tables[main].is_simulated else ""
    return [
        PlanMode(
            row.mode.text + mark,
            row.step_s / fastest_s,
            row.power_w,
            IDLE_PART * row.power_w,
            mode=row.mode,
            phases=tuple(_cheaper(row.mode, others)),
        )
        for row in kept
    ]


def _cheaper(mode: Mode, phases: Mapping[str, Sequence[Measured]]) -> Iterator[tuple[str, Mode]]:
    """Phases in which another mode takes less energy, by more than is doubtful."""
    for name, rows in phases.items():
        best = min(rows, key=lambda row: row.step_j)
        here = next((row for row in rows if row.mode == mode), None)
        if here is not None and best.step_j < (1 - WORTH) * here.step_j:
            yield name, best.mode


def _modes_of(name: str, found: Mapping[str, list[PlanMode]], where: str) -> tuple[PlanMode, ...]:
    kind = name.rpartition("-")[0]
    modes = found.get(name) or found.get(kind) or found.get(ALL)
    if not modes:
        raise UsageError(f"power table {where} says nothing of {name}: add rows for it, or for *")
    return tuple(sorted(modes, key=lambda mode: mode.slowness))
