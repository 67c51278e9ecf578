"""The tuner: measures a few modes, foretells the rest, and settles on one that was measured.

    spread out ── fit ── most promising ── fit ── ... ── choose ── measure the choice for longer

A short measurement does not see a board become warm: leakage grows, and some throttle. So the
choice is measured again until it has settled; if it then breaks what must hold, it counts as what
it was measured to be, and the next choice is made.

Under a limit of power the lowest modes come first, and those that are foretold to break it are not
tried at all: the supply may be what the limit is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from terrazzo.errors import KnobError, PowerError
from terrazzo.power.explorer import as_measured, next_mode, options_of, ranks, spread_out
from terrazzo.power.formulas import Grid, Knobs
from terrazzo.power.panel import all_modes
from terrazzo.power.predictor import LEAST, Foretold, Predictor
from terrazzo.power.selector import Choice, Goal, Option, choose, fastest, holds
from terrazzo.records.modes import Measured, Mode

FIRST, MOST = 12, 50
LOW = 4
"""Under a limit of power the first few are the lowest of so many times as many."""
SLOW = 20.0
"""Times the fastest seen so far: such a mode is not worth the time that measuring it takes."""
REFUSALS = 5
"""After so many modes in a row that the device would not take, no other is tried."""
TWICE = 2
"""So often a knob may refuse, without ever having moved, before it is left alone."""
SETTLES, FASTEST = 6, 3
"""Choices that are measured for longer, at most; and modes that seem to be the fastest."""
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
    left_alone: tuple[str, ...] = ()
    """Knobs that would not move: they are in no mode."""
    disturbed: tuple[Measured, ...] = ()
    """Measurements that are not believed: something else must have slowed the device down."""


def tune(
    bench: Bench,
    goal: Goal,
    *,
    most: int = MOST,
    also: Sequence[Mode] = (),
    reference: Predictor | None = None,
    say: Callable[[str], None] = lambda _: None,
    later: Callable[[Goal], Goal] = lambda goal: goal,
    go_on: Callable[[Sequence[Measured]], bool] = lambda _: True,
) -> Tuning:
    """``also`` are modes to be measured in any case: the state as it was, then presets.

    ``later`` is what a goal has become once measuring has taken its time; ``go_on`` says whether
    there is time for more.
    """
    modes = thinned(bench.knobs)
    search = _Search(bench, goal, modes, reference=reference, say=say)
    first = min(FIRST, most) if reference is None else min(FIRST // 2 + 1, most)
    spread = spread_out(modes, bench.knobs, max(first - len(also), LEAST))
    rest = list(dict.fromkeys([*also[1:], *spread]))
    if goal.max_power_w is not None:
        many = spread_out(modes, bench.knobs, LOW * first)
        rest = [*_rising(many, bench.knobs)[:LEAST], *_rising(rest, bench.knobs)]
    for mode in dict.fromkeys([*also[:1], *rest]):
        if search.is_stuck:
            break
        search.consider(mode)
    while len(search.rows) < most and not search.is_stuck and go_on(search.rows):
        found = search.promising()
        if found is None:
            break
        search.measure(found)
    return search.settle(later)


def _rising(modes: Sequence[Mode], knobs: Knobs) -> list[Mode]:
    """From those that are likely to draw least to those that draw most."""
    order = np.argsort(ranks(modes, knobs).sum(1), kind="stable")
    return [modes[place] for place in order]


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
        self.knobs: Knobs = bench.knobs
        self._grid, self._all = Grid.of(modes), set(modes)
        self.reference, self.say = reference, say
        self.rows: list[Measured] = []
        self.refused: dict[Mode, str] = {}
        self.in_a_row = 0
        self.settled: set[Mode] = set()
        self.left_alone: list[str] = []
        self._blamed: Counter[str] = Counter()

    @property
    def is_stuck(self) -> bool:
        return self.in_a_row >= REFUSALS

    # ---- measuring -----------------------------------------------------------------------

    def consider(self, mode: Mode) -> None:
        """Measures one of the first modes, unless it is known, or would break a limit of power, or
        take so long that nobody would choose it."""
        asked = mode.without(self.left_alone)
        if asked in self.refused or any(row.mode == asked for row in self.rows):
            return
        if len(self.rows) >= LEAST:
            told, most_w = self._predictor().at([asked]), self.goal.max_power_w
            step_s, power_w = float(told.step_s[0]), float(told.power_w[0])
            if step_s > SLOW * min(row.step_s for row in self.rows):
                self.say(f"not tried {asked.text}: about {step_s:.3g} s a step")
                return
            if most_w is not None and power_w > most_w:
                self.say(f"not tried {asked.text}: about {power_w:.3g} W")
                return
        self.measure(asked)

    def measure(self, mode: Mode, *, settled: bool = False) -> None:
        try:
            row = self.bench.measure(mode, settled=settled)
        except KnobError as error:
            self._refuse(mode, error)
            return
        self.in_a_row = 0
        if settled:
            self.settled.add(mode)
            self.rows = [other for other in self.rows if other.mode != mode]
        self.rows.append(row)
        count = f"{len(self.rows)}: " if not settled else "settled: "
        self.say(f"{count}{mode.text}: {row.step_s:.4g} s a step, {row.power_w:.3g} W")

    def _refuse(self, mode: Mode, error: KnobError) -> None:
        self.refused[mode] = f"{mode.text}: {error}"
        self.in_a_row += 1
        self.say(f"left out {self.refused[mode]}")
        knob = error.knob
        if knob not in mode.knobs or len(mode.knobs) == 1:
            return
        self._blamed[knob] += 1
        moved = len({row.mode[knob] for row in self.rows}) > 1
        if self._blamed[knob] >= TWICE and not moved:
            self._leave_alone(knob, str(error))

    def _leave_alone(self, knob: str, reason: str) -> None:
        """From now on modes are of the other knobs."""
        self.left_alone.append(knob)
        self.knobs = {name: values for name, values in self.knobs.items() if name != knob}
        modes = thinned(self.knobs)
        self._grid, self._all = Grid.of(modes), set(modes)
        self.rows = [replace(row, mode=row.mode.without([knob])) for row in self.rows]
        self.settled = {mode.without([knob]) for mode in self.settled}
        self.refused, self.reference = {}, None  # both speak of modes with this knob
        self.in_a_row = 0
        self.say(f"{knob} does not move and is left alone: {reason}")

    # ---- choosing ------------------------------------------------------------------------

    def _told(self) -> list[Option]:
        """All modes that the device takes; those measured in any case."""
        told = self._predictor().at(self._grid)
        options = options_of(told, self.rows)
        rest = [as_measured(row) for row in self.rows if row.mode not in self._all]
        return [option for option in options if option.mode not in self.refused] + rest

    def _predictor(self) -> Predictor:
        return Predictor(self.rows, self.knobs, reference=self.reference)

    def promising(self) -> Mode | None:
        told = self._predictor().at(self._grid)
        measured = [as_measured(row) for row in self.rows]
        quick = fastest([*measured, _fastest_told(told)])
        fine = [self.goal.value(o) for o in measured if holds(o, self.goal, quick)]
        known = {row.mode for row in self.rows} | set(self.refused) | self._hopeless()
        return next_mode(told, self.goal, best=min(fine, default=None), known=known)

    def _hopeless(self) -> set[Mode]:
        """Modes with a value that was refused twice and never taken: a core that stays off, say."""
        taken = {pair for row in self.rows for pair in row.mode.values}
        counts = Counter(pair for mode in self.refused for pair in mode.values)
        bad = {pair for pair, count in counts.items() if count >= TWICE} - taken
        return {mode for mode in self._all if not bad.isdisjoint(mode.values)} if bad else set()

    def settle(self, later: Callable[[Goal], Goal]) -> Tuning:
        """The choice, once it has been measured warm and still is the choice."""
        if len(self.rows) < LEAST:
            raise PowerError(
                f"{len(self.rows)} modes could be measured, at least {LEAST} are needed: "
                + "; ".join(self.refused.values())
            )
        self._settle_fastest()
        first = self.goal
        for _ in range(SETTLES):
            self.goal = later(first)
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
            self.rows,
            choice,
            options,
            refused=tuple(self.refused.values()),
            left_alone=tuple(self.left_alone),
            disturbed=self._predictor().left_out,
        )

    def _settle_fastest(self) -> None:
        """A slowdown is against the fastest mode: as it was measured, not as it is foretold.

        Under a limit of power that may be one that must not be tried.
        """
        if self.goal.max_slowdown is None or self.goal.max_power_w is not None:
            return
        for _ in range(FASTEST):
            quick = fastest(self._told()).mode
            if quick in self.settled:
                return
            self.measure(quick, settled=True)


def _fastest_told(told: Foretold) -> Option:
    place = int(np.argmin(told.step_s))
    return Option(
        told.modes[place],
        float(told.step_s[place]),
        float(told.power_w[place]),
        float(told.time_doubt[place]),
        float(told.power_doubt[place]),
    )
