"""Modes for phases of training: an input-bound first epoch, later ones, evaluation, waiting.

Changing modes costs time and energy itself. The cheapest sequence of modes, with every change paid
for, is found phase by phase; if it does not save more than is doubtful against one mode for all,
one mode it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot

from terrazzo.errors import PowerError, UsageError
from terrazzo.power.selector import EDP, TIME, Goal, Option, fastest, holds
from terrazzo.records.modes import Mode

CANDIDATES = 60
"""Modes of a phase that are looked at, the best ones."""


@dataclass(frozen=True, slots=True)
class Phase:
    """So many steps of one kind, and what they take in each mode."""

    name: str
    steps: float
    options: Sequence[Option]


@dataclass(frozen=True, slots=True)
class Change:
    """What going from one mode to another takes."""

    seconds: float = 0.05
    joules: float = 0.5


@dataclass(frozen=True, slots=True)
class Schedule:
    """A mode for every phase, and what all phases take together."""

    modes: tuple[tuple[str, Option], ...]
    seconds: float
    joules: float
    changes: int
    saved: float | None
    """Against one mode for all, relatively; 0 where there is one for all, None where none could."""


def schedule(phases: Sequence[Phase], goal: Goal, change: Change | None = None) -> Schedule:
    """The cheapest modes for phases in this order."""
    if goal.objective == EDP:
        raise UsageError("phases are chosen by energy or time: energy times delay does not add up")
    if not phases:
        raise UsageError("there are no phases to choose modes for")
    cost = change or Change()
    several = _each_its_own(phases, goal, cost)
    single = _one_for_all(phases, goal)
    if single is None:
        return _schedule(phases, several, cost, saved=None)
    single_value, several_value = (_total(phases, picks, goal, cost) for picks in (single, several))
    saved = 1 - several_value / single_value
    if saved <= _doubt(phases, single, several, goal) / single_value:
        return _schedule(phases, single, cost, saved=0.0)
    return _schedule(phases, several, cost, saved=saved)


def _value(option: Option, goal: Goal) -> float:
    return option.step_s if goal.objective == TIME else option.step_j


def _price(change: Change, goal: Goal) -> float:
    return change.seconds if goal.objective == TIME else change.joules


def _fine(phase: Phase, goal: Goal) -> list[Option]:
    quick = fastest(phase.options)
    found = [option for option in phase.options if holds(option, goal, quick)]
    if not found:
        raise PowerError(f"in phase {phase.name} no mode keeps what must hold: ask for less")
    return sorted(found, key=lambda option: _value(option, goal))


def _one_for_all(phases: Sequence[Phase], goal: Goal) -> list[Option] | None:
    """The best mode that holds in all phases; None: there is none."""
    tables = {
        phase.name: {option.mode: option for option in _fine(phase, goal)} for phase in phases
    }
    shared: set[Mode] = set.intersection(*(set(table) for table in tables.values()))
    if not shared:
        return None

    def total(mode: Mode) -> float:
        return sum(phase.steps * _value(tables[phase.name][mode], goal) for phase in phases)

    best = min(shared, key=total)
    return [tables[phase.name][best] for phase in phases]


def _doubt(
    phases: Sequence[Phase], single: Sequence[Option], several: Sequence[Option], goal: Goal
) -> float:
    """Of what phases that change their mode save, one standard deviation."""
    found = 0.0
    for phase, one, other in zip(phases, single, several, strict=True):
        if one.mode != other.mode:
            for option in (one, other):
                value = phase.steps * _value(option, goal)
                found = hypot(found, value * goal.doubt(option))
    return found


def _each_its_own(phases: Sequence[Phase], goal: Goal, change: Change) -> list[Option]:
    """The cheapest way through the phases; what a phase shares with its neighbours stays in."""
    rows = [_fine(phase, goal) for phase in phases]
    best_modes = {option.mode for row in rows for option in row[:CANDIDATES]}
    rows = [[option for option in row if option.mode in best_modes] for row in rows]
    price = _price(change, goal)
    costs = [phases[0].steps * _value(option, goal) for option in rows[0]]
    back: list[list[int]] = []
    for phase, before, row in zip(phases[1:], rows[:-1], rows[1:], strict=True):
        least = min(range(len(before)), key=costs.__getitem__)
        places = {option.mode: place for place, option in enumerate(before)}
        ways, origins = [], []
        for option in row:
            origin, way = least, costs[least] + price
            same = places.get(option.mode)
            if same is not None and costs[same] <= way:
                origin, way = same, costs[same]
            ways.append(way + phase.steps * _value(option, goal))
            origins.append(origin)
        costs, back = ways, [*back, origins]
    place = min(range(len(costs)), key=costs.__getitem__)
    picks = [rows[-1][place]]
    for row, origins in zip(reversed(rows[:-1]), reversed(back), strict=True):
        place = origins[place]
        picks.append(row[place])
    return picks[::-1]


def _changes(picks: Sequence[Option]) -> int:
    return sum(a.mode != b.mode for a, b in pairwise(picks))


def _total(phases: Sequence[Phase], picks: Sequence[Option], goal: Goal, change: Change) -> float:
    work = sum(p.steps * _value(o, goal) for p, o in zip(phases, picks, strict=True))
    return work + _changes(picks) * _price(change, goal)


def _schedule(
    phases: Sequence[Phase], picks: Sequence[Option], change: Change, *, saved: float | None
) -> Schedule:
    pairs = list(zip(phases, picks, strict=True))
    changes = _changes(picks)
    return Schedule(
        modes=tuple((phase.name, option) for phase, option in pairs),
        seconds=sum(phase.steps * option.step_s for phase, option in pairs)
        + changes * change.seconds,
        joules=sum(phase.steps * option.step_j for phase, option in pairs)
        + changes * change.joules,
        changes=changes,
        saved=saved,
    )
