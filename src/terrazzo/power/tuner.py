"""The tuner: measures a few modes, foretells the rest, and settles on one that was measured.

    spread out ── fit ── most promising ── fit ── ... ── choose ── measure the choice for longer

A short measurement does not see a board become warm: leakage grows, and some throttle. So the
choice is measured again until it has settled; if it then breaks what must hold, it counts as what
it was measured to be, and the next choice is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from terrazzo.errors import KnobError, PowerError
from terrazzo.power.explorer import as_measured, next_mode, options_of, spread_out
from terrazzo.power.formulas import Grid, Knobs
from terrazzo.power.panel import all_modes
from terrazzo.power.predictor import Predictor
from terrazzo.power.selector import Choice, Goal, Option, choose, fastest_s, holds
from terrazzo.records.modes import Measured, Mode

FIRST, MOST = 12, 50
SETTLES = 6
"""Choices that are measured for longer, at most."""
MOST_MODES = 20_000
"""Of all combinations, so many are looked at: every so-manieth value of the finest knobs."""


class Bench(Protocol):
    """Where a workload runs in a mode and is measured."""

    @property
    def knobs(self) -> Knobs:
        """By name, the values each may have."""

    def measure(self, mode: Mode, *, settled: bool) -> Measured:
        """A few steps in a mode, or with ``settled`` as many as it takes to become warm."""


@dataclass
class Tuning:
    """What was measured, what was chosen, and what is to be expected of all modes."""

    rows: list[Measured]
    choice: Choice
    options: list[Option]
    refused: tuple[str, ...] = ()
    """Modes that the device would not take, in words."""
    settled: list[Measured] = field(default_factory=list)


def tune(
    bench: Bench,
    goal: Goal,
    *,
    most: int = MOST,
    also: Sequence[Mode] = (),
    reference: Predictor | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Tuning:
    """``also`` are modes to be measured in any case: presets, the state as it was."""
    modes = thinned(bench.knobs)
    search = _Search(bench, goal, modes, reference=reference, say=say)
    first = min(FIRST, most) if reference is None else min(FIRST // 2 + 1, most)
    for mode in dict.fromkeys([*also, *spread_out(modes, bench.knobs, max(first - len(also), 4))]):
        search.measure(mode)
    while len(search.rows) < most:
        found = search.promising()
        if found is None:
            break
        search.measure(found)
    return search.settle()


def thinned(knobs: Knobs) -> list[Mode]:
    """All modes, or where there are too many an even part of them."""
    values = {name: list(several) for name, several in knobs.items()}
    while _count(values) > MOST_MODES:
        finest = max(values, key=lambda name: len(values[name]))
        values[finest] = values[finest][::-2][::-1]  # the highest stays
    return all_modes(values)


def _count(values: dict[str, list[float]]) -> int:
    total = 1
    for several in values.values():
        total *= len(several)
    return total


class _Search:
    def __init__(
        self,
        bench: Bench,
        goal: Goal,
        modes: list[Mode],
        *,
        reference: Predictor | None,
        say: Callable[[str], None],
    ) -> None:
        self.bench, self.goal = bench, goal
        self._grid, self._all = Grid.of(modes), set(modes)
        self.reference, self.say = reference, say
        self.rows: list[Measured] = []
        self.refused: dict[Mode, str] = {}
        self.settled: dict[Mode, Measured] = {}

    def measure(self, mode: Mode, *, settled: bool = False) -> None:
        try:
            row = self.bench.measure(mode, settled=settled)
        except KnobError as error:
            self.refused[mode] = f"{mode.text}: {error}"
            self.say(f"left out {self.refused[mode]}")
            return
        if settled:
            self.settled[mode] = row
            self.rows = [other for other in self.rows if other.mode != mode]
        self.rows.append(row)
        count = f"{len(self.rows)}: " if not settled else "settled: "
        self.say(f"{count}{mode.text}: {row.step_s:.4g} s, {row.power_w:.3g} W a step")

    def _told(self) -> list[Option]:
        """All modes that the device takes; those measured in any case."""
        told = self._predictor().at(self._grid)
        options = options_of(told, self.rows)
        rest = [as_measured(row) for row in self.rows if row.mode not in self._all]
        return [option for option in options if option.mode not in self.refused] + rest

    def _predictor(self) -> Predictor:
        return Predictor(self.rows, self.bench.knobs, reference=self.reference)

    def promising(self) -> Mode | None:
        told = self._predictor().at(self._grid)
        measured = [as_measured(row) for row in self.rows]
        limit_s = min(float(told.step_s.min()), fastest_s(measured))
        fine = [self.goal.value(o) for o in measured if holds(o, self.goal, limit_s)]
        known = {row.mode for row in self.rows} | set(self.refused)
        found = next_mode(told, self.goal, best=min(fine, default=None), known=known)
        return None if found is None else found.mode

    def settle(self) -> Tuning:
        """The choice, once it has been measured warm and still is the choice."""
        if not self.rows:
            raise PowerError("no mode could be measured: " + "; ".join(self.refused.values()))
        for _ in range(SETTLES):
            options = self._told()
            choice = choose(options, self.goal)
            if choice.best.mode in self.settled:
                break
            self.measure(choice.best.mode, settled=True)
        else:
            # What was measured warm, and holds, is surer than another guess.
            options = self._told()
            warm = [option for option in options if option.mode in self.settled]
            choice = choose(warm or options, self.goal)
        return Tuning(
            self.rows, choice, options, tuple(self.refused.values()), list(self.settled.values())
        )
