"""Power modes: values of a device's knobs, and what was measured in them.

A table of measurements is a CSV file that anybody can make, one row for each mode:

    cores,cpu_hz,gpu_hz,time_s,power_w
    4,1.2e9,6.1e8,0.231,11.4

Every column that is not time (``time_s``, ``time_ms``), power (``power_w``, ``power_mw``) or
``phase`` is a knob.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from terrazzo.errors import UsageError
from terrazzo.records import document

TIMES = {"time_s": 1.0, "time": 1.0, "step_s": 1.0, "seconds": 1.0, "time_ms": 1e-3}
POWERS = {"power_w": 1.0, "power": 1.0, "watts": 1.0, "power_mw": 1e-3}
PHASE = "phase"
APART = 0.1
"""Rows of one mode that differ by more, relatively, contradict each other."""
LEAST_ROWS = 3
WORDS = {"cores": "cores", "cpu_hz": "CPU", "gpu_hz": "GPU", "mem_hz": "memory",
         "gpu_limit_w": "GPU limit"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mode:
    """A value for each knob, in the order of the knobs."""

    values: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Mode:
        return cls(tuple((name, float(value)) for name, value in values.items()))

    def __getitem__(self, knob: str) -> float:
        return next(value for name, value in self.values if name == knob)

    @property
    def knobs(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.values)

    @property
    def text(self) -> str:
        """``4 cores, CPU 1.34 GHz, GPU 612 MHz``."""
        return ", ".join(value_text(name, value) for name, value in self.values)


def value_text(knob: str, value: float) -> str:
    word = WORDS.get(knob, knob)
    if knob == "cores":
        return f"{value:.0f} core{'' if value == 1 else 's'}"
    if knob.endswith("_hz"):
        return f"{word} {value / 1e9:.3g} GHz" if value >= 1e9 else f"{word} {value / 1e6:.0f} MHz"
    if knob.endswith("_w"):
        return f"{word} {value:g} W"
    return f"{word} {value:g}"


@dataclass(frozen=True, slots=True)
class Measured:
    """A mode, and what a training step took in it."""

    mode: Mode
    step_s: float
    power_w: float
    phase: str = ""

    @property
    def step_j(self) -> float:
        return self.step_s * self.power_w


@dataclass(frozen=True, slots=True)
class ModeTable:
    """Measurements of modes over the same knobs, and what was wrong with the file they are from."""

    knobs: tuple[str, ...]
    rows: tuple[Measured, ...]
    remarks: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> ModeTable:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                lines = list(csv.reader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"table {path} cannot be read: {error}") from error
        return table_of(lines, str(path))

    def save(self, path: Path) -> None:
        phases = any(row.phase for row in self.rows)
        head = [*self.knobs, "time_s", "power_w", *([PHASE] if phases else [])]
        lines = [",".join(head)]
        for row in self.rows:
            cells = [f"{row.mode[knob]:.10g}" for knob in self.knobs]
            cells += [f"{row.step_s:.6g}", f"{row.power_w:.6g}"]
            lines.append(",".join([*cells, *([row.phase] if phases else [])]))
        try:
            document.write(path, "\n".join([*lines, ""]))
        except OSError as error:
            raise UsageError(f"table {path} cannot be written: {error}") from error

    def phases(self) -> dict[str, ModeTable]:
        """By phase, in the order in which they first come."""
        names = dict.fromkeys(row.phase for row in self.rows)
        return {
            name: ModeTable(self.knobs, tuple(r for r in self.rows if r.phase == name))
            for name in names
        }


def table_of(lines: Sequence[Sequence[str]], where: str) -> ModeTable:
    """Rows of text as measurements. Rows that can't be used are left out, with a remark."""
    head = [cell.strip().lower() for cell in lines[0]] if lines else []
    times = [cell for cell in head if cell in TIMES]
    powers = [cell for cell in head if cell in POWERS]
    knobs = tuple(cell for cell in head if cell not in (*times, *powers, PHASE))
    if len(times) != 1 or len(powers) != 1 or not knobs or len(set(head)) != len(head):
        raise UsageError(
            f"table {where} has columns {', '.join(head) or 'none'}; needed are the knobs, one of "
            f"{', '.join(TIMES)} and one of {', '.join(POWERS)}"
        )
    found: list[tuple[int, Measured]] = []
    remarks = []
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in cells):
            continue
        try:
            found.append((number, _row(dict(zip(head, cells, strict=True)), knobs)))
        except ValueError as error:
            remarks.append(f"line {number} of {where} is left out: {_why(error, cells, head)}")
    rows, contradictions = _merged(found, where)
    if len(rows) < LEAST_ROWS:
        raise UsageError(
            f"table {where} has {len(rows)} usable modes, at least {LEAST_ROWS} are needed"
            + (f"; {remarks[0]}" if remarks else "")
        )
    return ModeTable(knobs, tuple(rows), (*remarks, *contradictions))


def _row(cells: Mapping[str, str], knobs: Iterable[str]) -> Measured:
    numbers = {}
    for name, text in cells.items():
        if name == PHASE:
            continue
        value = float(text)
        if not isfinite(value) or value < 0 or (value == 0 and name in (*TIMES, *POWERS)):
            raise ValueError(f"{name} is {text.strip()}")
        numbers[name] = value
    seconds = next(numbers[name] * scale for name, scale in TIMES.items() if name in numbers)
    watts = next(numbers[name] * scale for name, scale in POWERS.items() if name in numbers)
    mode = Mode(tuple((knob, numbers[knob]) for knob in knobs))
    return Measured(mode, seconds, watts, cells.get(PHASE, "").strip())


def _why(error: ValueError, cells: Sequence[str], head: Sequence[str]) -> str:
    if len(cells) != len(head):
        return f"it has {len(cells)} cells, the first line has {len(head)}"
    empty = [name for name, cell in zip(head, cells, strict=True) if not cell.strip()]
    return f"{empty[0]} is missing" if empty else str(error)


def _merged(rows: Sequence[tuple[int, Measured]], where: str) -> tuple[list[Measured], list[str]]:
    """One row for each mode: the mean of those that agree."""
    same: dict[tuple[str, Mode], list[tuple[int, Measured]]] = {}
    for number, row in rows:
        same.setdefault((row.phase, row.mode), []).append((number, row))
    found, remarks = [], []
    for (phase, mode), several in same.items():
        step_s = [row.step_s for _, row in several]
        power_w = [row.power_w for _, row in several]
        if any(max(values) / min(values) - 1 > APART for values in (step_s, power_w)):
            lines = ", ".join(str(number) for number, _ in several)
            remarks.append(
                f"lines {lines} of {where} are one mode ({mode.text}) with times from "
                f"{min(step_s):.3g} to {max(step_s):.3g} s and powers from {min(power_w):.3g} to "
                f"{max(power_w):.3g} W: they contradict each other and are left out"
            )
            continue
        found.append(Measured(mode, sum(step_s) / len(several), sum(power_w) / len(several), phase))
    return found, remarks
