"""Thrift: which devices take part, in which modes, and by which plan, for the least energy.

A device draws its busy watts while it computes and its idle watts while it waits, for messages or
for a slower one. So a fast device is slowed down to where it no longer waits, and one whose idle
watts cost more than its work saves is left out. A device that is left out counts as switched off.

    fewer devices ── plan for their speeds ── slow down one after the other ── plan again

Every step is a simulation of whole plans; nothing is assumed about which kind of plan wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from terrazzo.errors import PlanError
from terrazzo.planner.alike import levelled, speed
from terrazzo.planner.cost import predict
from terrazzo.planner.feedback import slowed
from terrazzo.planner.prediction import Prediction
from terrazzo.planner.prices import Prices
from terrazzo.planner.search import ENERGY, TIME, Found, Tried
from terrazzo.records import Graph
from terrazzo.records.devicepower import PlanMode
from terrazzo.records.profile import Profile
from terrazzo.schedule import lower

ROUNDS = 3
MOST_SETS = 16
"""Sets of devices that are all planned for; a plan takes seconds to find."""
WORTH = 1e-3
"""What a change has to save, relatively."""

Search = Callable[[Profile], Found]
"""The best plan by time for the devices of a profile."""


@dataclass(frozen=True, slots=True)
class Thrifty:
    """A plan for some of the devices, in modes."""

    places: tuple[int, ...]
    """The devices that take part, by their numbers in the profile."""
    modes: tuple[PlanMode, ...]
    profile: Profile
    """Of those devices, in these modes."""
    tried: Tried
    step_j: float
    peak_w: float
    """All of them busy at once."""

    @property
    def step_s(self) -> float:
        return self.tried.prediction.step_s

    @property
    def mean_w(self) -> float:
        return self.step_j / self.step_s


def step_joules(prediction: Prediction, modes: Sequence[PlanMode]) -> float:
    """What all devices take in a step, busy or not."""
    return sum(
        mode.busy_w * min(busy_s, prediction.step_s)
        + mode.idle_w * max(prediction.step_s - busy_s, 0.0)
        for mode, busy_s in zip(modes, prediction.compute_s, strict=True)
    )


def thrifty(
    graph: Graph,
    profile: Profile,
    powers: Sequence[Sequence[PlanMode]],
    *,
    search: Search,
    objective: str = ENERGY,
    budget_w: float | None = None,
    prices: Callable[[Profile], Prices] = Prices,
) -> tuple[Thrifty, tuple[Thrifty, ...]]:
    """The best choice, and the best for every other set of devices, the fastest first."""
    bench = _Bench(graph, search, objective, budget_w, prices)
    found = [
        choice
        for places in subsets(profile, powers)
        if (choice := bench.best(profile.of(places), places, [powers[p] for p in places]))
    ]
    if not found:
        least = min(min(mode.busy_w for mode in modes) for modes in powers)
        raise PlanError(
            f"no set of devices stays within {budget_w:g} W: the thriftiest mode of one device "
            f"draws {least:g} W while it computes; raise --power-budget"
        )
    best = min(found, key=bench.value)
    rest = sorted((one for one in found if one is not best), key=lambda one: one.step_s)
    return best, tuple(rest)


def subsets(profile: Profile, powers: Sequence[Sequence[PlanMode]]) -> list[tuple[int, ...]]:
    """Sets worth a look, the largest first: so many of each kind, where there are few kinds.

    With many kinds, of each size those that compute fastest, those that do it thriftiest, and
    every device alone.
    """
    rates = [speed(device) or 1.0 for device in levelled(profile).devices]
    kinds: dict[object, list[int]] = {}
    for place, rate in enumerate(rates):
        kinds.setdefault((rate, tuple(powers[place])), []).append(place)
    if prod(len(places) + 1 for places in kinds.values()) <= MOST_SETS:
        counts = product(*(range(len(places) + 1) for places in kinds.values()))
        found = {
            tuple(sorted(p for n, ps in zip(many, kinds.values(), strict=True) for p in ps[:n]))
            for many in counts
            if any(many)
        }
    else:
        thrift = [
            rate / min(mode.busy_w * mode.slowness for mode in modes)
            for rate, modes in zip(rates, powers, strict=True)
        ]
        found = {(places[0],) for places in kinds.values()}
        for order in (rates, thrift):
            ranked = sorted(range(len(rates)), key=lambda place: (-order[place], place))
            found |= {tuple(sorted(ranked[:count])) for count in range(1, len(rates) + 1)}
    return sorted(found, key=lambda places: (-len(places), places))


@dataclass
class _Bench:
    graph: Graph
    search: Search
    objective: str
    budget_w: float | None
    prices: Callable[[Profile], Prices]

    def value(self, choice: Thrifty) -> float:
        return choice.step_s if self.objective == TIME else choice.step_j

    def fits(self, modes: Sequence[PlanMode]) -> bool:
        return self.budget_w is None or sum(mode.busy_w for mode in modes) <= self.budget_w

    def best(
        self, profile: Profile, places: tuple[int, ...], powers: Sequence[Sequence[PlanMode]]
    ) -> Thrifty | None:
        """The modes of one set of devices; None where no modes keep the budget."""
        modes = self._start(powers)
        if modes is None:
            return None
        choice = self._planned(profile, places, modes)
        for _ in range(ROUNDS):
            better = self._descend(profile, choice, powers)
            if better.modes == choice.modes:
                break
            again = self._planned(profile, places, better.modes)
            better = min(better, again, key=self.value)
            if self.value(better) >= (1 - WORTH) * self.value(choice):
                break
            choice = better
        return choice

    def _start(self, powers: Sequence[Sequence[PlanMode]]) -> tuple[PlanMode, ...] | None:
        """The fastest modes within the budget: the hungriest device is slowed down first."""
        modes = [options[0] for options in powers]
        while not self.fits(modes):
            open_ = [
                (modes[place].busy_w, place, calmer)
                for place, options in enumerate(powers)
                for calmer in options
                if calmer.busy_w < modes[place].busy_w
            ]
            if not open_:
                return None
            _, place, _ = max(open_, key=lambda one: one[0])
            calmer = [m for m in powers[place] if m.busy_w < modes[place].busy_w]
            modes[place] = min(calmer, key=lambda mode: mode.slowness)
        return tuple(modes)

    def _planned(
        self, profile: Profile, places: tuple[int, ...], modes: Sequence[PlanMode]
    ) -> Thrifty:
        slower = slowed(profile, [mode.slowness for mode in modes])
        return self._made(places, modes, slower, self.search(slower).best)

    def _made(
        self, places: tuple[int, ...], modes: Sequence[PlanMode], profile: Profile, tried: Tried
    ) -> Thrifty:
        joules = step_joules(tried.prediction, modes)
        peak_w = sum(mode.busy_w for mode in modes)
        return Thrifty(places, tuple(modes), profile, tried, joules, peak_w)

    def _descend(
        self, profile: Profile, choice: Thrifty, powers: Sequence[Sequence[PlanMode]]
    ) -> Thrifty:
        """Other modes by the same plan, one device at a time, or all that are alike together."""
        program = lower(self.graph, choice.tried.plan)
        best = choice
        alike: dict[tuple[PlanMode, ...], list[int]] = {}
        for place, options in enumerate(powers):
            alike.setdefault(tuple(options), []).append(place)
        groups = [*alike.values(), *([p] for ps in alike.values() if len(ps) > 1 for p in ps)]
        for group in groups:
            for mode in powers[group[0]]:
                modes = tuple(
                    mode if place in group else old for place, old in enumerate(best.modes)
                )
                if modes == best.modes or not self.fits(modes):
                    continue
                slower = slowed(profile, [mode.slowness for mode in modes])
                found = predict(program, self.prices(slower), memory=False)
                tried = Tried(choice.tried.name, choice.tried.plan, found)
                trial = self._made(choice.places, modes, slower, tried)
                if self.value(trial) < (1 - WORTH) * self.value(best):
                    best = trial
        return best
