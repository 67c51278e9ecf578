"""Power modes: values of a device's knobs, and what was measured in them.

A table of measurements is a CSV file that anybody can make, one row for each mode:

    cores,cpu_hz,gpu_hz,time_s,power_w
    4,1.2e9,6.1e8,0.231,11.4

Every column that is not time (``time_s``, ``time_ms``), power (``power_w``, ``power_mw``) or one of
these is a knob: ``phase`` and ``steps`` (of which kind a row's steps are, and how many of them a
training makes), ``source`` (what gave the row), ``time_doubt`` and ``power_doubt`` (its relative
standard deviations).
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import mean, pstdev

from terrazzo.errors import UsageError
from terrazzo.records import document

TIMES = {"time_s": 1.0, "time": 1.0, "step_s": 1.0, "seconds": 1.0, "time_ms": 1e-3}
POWERS = {"power_w": 1.0, "power": 1.0, "watts": 1.0, "power_mw": 1e-3}
PHASE, STEPS, SOURCE = WORDY = ("phase", "steps", "source")
TIME_DOUBT, POWER_DOUBT = DOUBTS = ("time_doubt", "power_doubt")
SIMULATED = "simulated"
UNSAID_DOUBT = 0.02
"""Of a row that does not say how sure it is."""
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

    def without(self, knobs: Collection[str]) -> Mode:
        return Mode(tuple(pair for pair in self.values if pair[0] not in knobs))

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
    time_doubt: float = 0.0
    """By how much the parts of the measurement disagree, relatively; power_doubt alike."""
    power_doubt: float = 0.0
    peak_w: float = 0.0
    """The most that was seen meanwhile; 0: not known."""

    @property
    def step_j(self) -> float:
        return self.step_s * self.power_w


@dataclass(frozen=True, slots=True)
class ModeTable:
    """Measurements of modes over the same knobs, and what was wrong with the file they are from."""

    knobs: tuple[str, ...]
    rows: tuple[Measured, ...]
    remarks: tuple[str, ...] = ()
    source: str = ""
    """What gave the rows, where that was told: ``simulated orin-like``."""
    steps: tuple[tuple[str, float], ...] = ()
    """How many steps a phase has, of those phases that say it."""

    @property
    def is_simulated(self) -> bool:
        return SIMULATED in self.source

    @classmethod
    def load(cls, path: Path) -> ModeTable:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                lines = list(csv.reader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"table {path} cannot be read: {error}") from error
        return table_of(lines, str(path))

    def save(self, path: Path) -> None:
        steps = dict(self.steps)
        more = [PHASE] * any(row.phase for row in self.rows) + [STEPS] * bool(steps)
        more += [SOURCE] * bool(self.source) + list(DOUBTS)
        lines = [",".join([*self.knobs, "time_s", "power_w", *more])]
        for row in self.rows:
            cells = [f"{row.mode[knob]:.10g}" for knob in self.knobs]
            cells += [f"{row.step_s:.6g}", f"{row.power_w:.6g}"]
            told = {
                PHASE: row.phase,
                STEPS: f"{steps[row.phase]:.0f}" if row.phase in steps else "",
                SOURCE: self.source,
                TIME_DOUBT: f"{row.time_doubt:.6g}",
                POWER_DOUBT: f"{row.power_doubt:.6g}",
            }
            lines.append(",".join([*cells, *(told[name] for name in more)]))
        try:
            document.write(path, "\n".join([*lines, ""]))
        except OSError as error:
            raise UsageError(f"table {path} cannot be written: {error}") from error

    def phases(self) -> dict[str, ModeTable]:
        """By phase, in the order in which they first come."""
        names = dict.fromkeys(row.phase for row in self.rows)
        return {
            name: replace(self, rows=tuple(r for r in self.rows if r.phase == name))
            for name in names
        }


def table_of(lines: Sequence[Sequence[str]], where: str) -> ModeTable:
    """Rows of text as measurements. Rows that can't be used are left out, with a remark."""
    head = [cell.strip().lower() for cell in lines[0]] if lines else []
    times = [cell for cell in head if cell in TIMES]
    powers = [cell for cell in head if cell in POWERS]
    knobs = tuple(cell for cell in head if cell not in (*times, *powers, *WORDY, *DOUBTS))
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
    source = ", ".join(sorted(set(_column(lines, head, SOURCE).values()) - {""}))
    if SIMULATED in source:
        remarks.append(f"rows of {where} are {source}: they say nothing about a real board")
    steps = _steps(lines, head, where)
    return ModeTable(knobs, tuple(rows), (*remarks, *contradictions), source, steps)


def _column(lines: Sequence[Sequence[str]], head: Sequence[str], name: str) -> dict[int, str]:
    """The cells of a column by their line."""
    if name not in head:
        return {}
    place = head.index(name)
    return {
        number: cells[place].strip()
        for number, cells in enumerate(lines[1:], start=2)
        if len(cells) == len(head)
    }


def _steps(
    lines: Sequence[Sequence[str]], head: Sequence[str], where: str
) -> tuple[tuple[str, float], ...]:
    """How many steps each phase has; its rows have to agree on it."""
    names, found = _column(lines, head, PHASE), dict[str, str]()
    for number, text in _column(lines, head, STEPS).items():
        phase = names.get(number, "")
        if not text or found.setdefault(phase, text) == text:
            continue
        raise UsageError(
            f"line {number} of {where} says that phase {phase or 'all'} has {text} steps, a line "
            f"before said {found[phase]}: write the same number into all rows of a phase"
        )
    wrong = [text for text in found.values() if not text.replace(".", "", 1).isdigit()]
    if wrong or any(float(text) <= 0 for text in found.values()):
        raise UsageError(f"column steps of {where} holds {wrong or 0}: a positive number is needed")
    return tuple((phase, float(text)) for phase, text in found.items())


def _row(cells: Mapping[str, str], knobs: Iterable[str]) -> Measured:
    numbers = {}
    for name, text in cells.items():
        if name in WORDY or (name in DOUBTS and not text.strip()):
            continue
        value = float(text)
        if not isfinite(value) or value < 0 or (value == 0 and name in (*TIMES, *POWERS)):
            raise ValueError(f"{name} is {text.strip()}")
        numbers[name] = value
    seconds = next(numbers[name] * scale for name, scale in TIMES.items() if name in numbers)
    watts = next(numbers[name] * scale for name, scale in POWERS.items() if name in numbers)
    mode = Mode(tuple((knob, numbers[knob]) for knob in knobs))
    doubts = {name: numbers.get(name, UNSAID_DOUBT) for name in DOUBTS}
    return Measured(mode, seconds, watts, cells.get(PHASE, "").strip(), **doubts)


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
        found.append(
            Measured(
                mode, mean(step_s), mean(power_w), phase,
                time_doubt=max(_apart(step_s), *(row.time_doubt for _, row in several)),
                power_doubt=max(_apart(power_w), *(row.power_doubt for _, row in several)),
            )
        )  # fmt: skip
    return found, remarks


def _apart(values: Sequence[float]) -> float:
    """How far values of one thing lie around their mean, relatively."""
    return pstdev(values) / mean(values)
