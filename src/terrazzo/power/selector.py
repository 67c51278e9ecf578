"""The selector: which of several modes to use, as pure functions of what is known of them.

Modes that differ by less than what is known of them are not ranked: they are named together, and
one of them is taken for a reason that does not pretend to know better (it was measured, or else it
draws the least).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, hypot, log
from statistics import NormalDist

from terrazzo.errors import PowerError, UsageError
from terrazzo.records.modes import Mode
from terrazzo.records.power import watts_text
from terrazzo.records.units import seconds_text

ENERGY, TIME, EDP = OBJECTIVES = ("energy", "time", "edp")
CONFIDENCE = 0.98


@dataclass(frozen=True, slots=True)
class Option:
    """A mode with the time and power of a step; doubts are relative standard deviations."""

    mode: Mode
    step_s: float
    power_w: float
    time_doubt: float
    power_doubt: float
    is_measured: bool = False
    peak_w: float = 0.0
    """The most that was seen; 0: not known."""

    @property
    def step_j(self) -> float:
        return self.step_s * self.power_w


@dataclass(frozen=True, slots=True)
class Goal:
    """What shall be least, and what must hold with so much confidence."""

    objective: str = ENERGY
    max_power_w: float | None = None
    max_slowdown: float | None = None
    """Against the fastest mode there is."""
    max_step_s: float | None = None
    """From a deadline."""
    confidence: float = CONFIDENCE

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UsageError(f"objective {self.objective}: say {', '.join(OBJECTIVES)}")
        if self.max_slowdown is not None and self.max_slowdown < 1:
            raise UsageError(
                f"a slowdown of {self.max_slowdown:g} is faster than the fastest: say 1.2, for a "
                "step that takes at most a fifth longer"
            )
        if not 0.5 <= self.confidence < 1:
            raise UsageError(f"a confidence of {self.confidence:g}: say from 0.5 to 0.999")

    @property
    def sigmas(self) -> float:
        return NormalDist().inv_cdf(self.confidence)

    def value(self, option: Option) -> float:
        """What shall be least."""
        values = {
            ENERGY: option.step_j,
            TIME: option.step_s,
            EDP: option.step_j * option.step_s,
        }
        return values[self.objective]

    def doubt(self, option: Option) -> float:
        """Of the value, relatively."""
        return {
            ENERGY: hypot(option.time_doubt, option.power_doubt),
            TIME: option.time_doubt,
            EDP: hypot(2 * option.time_doubt, option.power_doubt),
        }[self.objective]


@dataclass(frozen=True, slots=True)
class Choice:
    """The mode to use, and those that can't be told from it."""

    best: Option
    alike: tuple[Option, ...]
    feasible: int

    @property
    def words(self) -> str:
        if not self.alike:
            return "no other mode comes as near as the measurements can tell"
        return (
            f"{len(self.alike)} other modes can't be told from it within the error of "
            "measurement: they are not ranked"
        )


def choose(options: Sequence[Option], goal: Goal) -> Choice:
    """The best mode that holds what must hold; PowerError where none does."""
    quick = fastest(options)
    fine = [option for option in options if holds(option, goal, quick)]
    if not fine:
        raise PowerError(_refusal(options, goal))
    lowest = min(fine, key=goal.value)
    near = [option for option in fine if not differs(option, lowest, goal)]
    best = min(
        near, key=lambda o: (not o.is_measured, goal.value(o) if o.is_measured else o.power_w)
    )
    alike = sorted((o for o in near if o is not best), key=goal.value)
    return Choice(best, tuple(alike), len(fine))


def fastest(options: Iterable[Option]) -> Option:
    return min(options, key=lambda option: option.step_s)


def differs(one: Option, other: Option, goal: Goal) -> bool:
    """Whether one is better than the other by more than is doubtful."""
    apart = abs(log(goal.value(one) / goal.value(other)))
    return apart > hypot(goal.doubt(one), goal.doubt(other))


def holds(option: Option, goal: Goal, quick: Option) -> bool:
    """Whether what must hold does, also if the truth is as far off as may be.

    Slowness is against the ``quick`` one, which may be faster than is known.
    """
    longest_s = option.step_s * exp(goal.sigmas * option.time_doubt)
    apart = exp(goal.sigmas * hypot(option.time_doubt, quick.time_doubt))
    return (
        (
            goal.max_power_w is None
            or option.power_w * exp(goal.sigmas * option.power_doubt) <= goal.max_power_w
        )
        and (goal.max_step_s is None or longest_s <= goal.max_step_s)
        and (
            goal.max_slowdown is None
            or option.mode == quick.mode
            or option.step_s * apart <= goal.max_slowdown * quick.step_s
        )
    )


def _refusal(options: Sequence[Option], goal: Goal) -> str:
    least = min(options, key=lambda option: option.power_w)
    quick = fastest(options)
    wishes = []
    if goal.max_power_w is not None:
        wishes.append(
            f"at most {watts_text(goal.max_power_w)} on average (the least is "
            f"{watts_text(least.power_w)} ± {least.power_doubt:.0%}, in {least.mode.text})"
        )
    if goal.max_step_s is not None:
        wishes.append(
            f"at most {seconds_text(goal.max_step_s)} a step (the fastest takes "
            f"{seconds_text(quick.step_s)} ± {quick.time_doubt:.0%}, in {quick.mode.text})"
        )
    if goal.max_slowdown is not None:
        wishes.append(f"a step at most {goal.max_slowdown:g} times as long as the fastest")
    return (
        f"no mode keeps {' and '.join(wishes)} with {goal.confidence:.0%} confidence: ask for less"
    )


def pareto(options: Iterable[Option]) -> list[Option]:
    """Those for which no other is both faster and takes less energy, fastest first."""
    found: list[Option] = []
    for option in sorted(options, key=lambda o: (o.step_s, o.step_j)):
        if not found or option.step_j < found[-1].step_j:
            found.append(option)
    return found
