"""Memory limits of devices: which plans fit, what makes others fit, and the smallest there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from terrazzo.errors import PlanError
from terrazzo.planner.fitting import PASSES, fit, smallest_plan
from terrazzo.planner.improve import joined
from terrazzo.records import Group, Layout, Plan

if TYPE_CHECKING:
    from terrazzo.planner.search import Bench, Tried

FITTED = 4
"""Plans that are given passes so that they fit into a limit: the fastest of those too large."""
SLOWER = 1.5
"""How much longer than the fastest the plan with the least memory may take."""
TRIALS, LEAST_TRIALS = 600, 16
"""Nodes simulated while passes are given to single groups, and plans in any case."""
HURRIED = 3
"""Of the smallest plans, those that lose passes until they are fast enough."""
LEAST_SPARED = 1 << 16
"""Passes that spare less are held against this."""
SHIFTS = 3
"""How often shares are moved to devices with more memory."""
FINER = 24
"""Shares are multiplied by this before they are changed."""


@dataclass(frozen=True, slots=True)
class Fits:
    """Plans within the limits, and in words why others are not."""

    kept: list[Tried]
    refused: tuple[str, ...] = ()


def within(needs: Sequence[int], limits: Sequence[int] | None) -> bool:
    """Whether every device has what it needs."""
    return limits is None or all(n <= limit for n, limit in zip(needs, limits, strict=True))


def limited(bench: Bench, tried: Sequence[Tried], limits: Sequence[int] | None) -> Fits:
    """Those that fit, and the fastest others: shares moved to larger devices, or with passes."""
    if limits is None:
        return Fits(list(tried))
    if len(set(limits)) > 1:
        moved = (_shifted(bench, one, limits) for one in tried)
        tried = [*tried, *(one for one in moved if one is not None)]
    kept = [t for t in tried if within(t.prediction.memory_bytes, limits)]
    large = [t for t in tried if not within(t.prediction.memory_bytes, limits)]
    fastest_s = min((t.prediction.step_s for t in kept), default=float("inf"))
    quick = sorted((t for t in large if t.prediction.step_s < fastest_s), key=_seconds)[:FITTED]
    lean = sorted((t for t in large if t not in quick), key=_bytes)
    refused: dict[str, PlanError] = {}
    for one in [*quick, *lean]:
        if kept and one in lean:
            break  # only where nothing else fits
        try:
            kept.append(_fitted(bench, one, limits))
        except PlanError as error:
            refused[one.name] = error
    trials = max(LEAST_TRIALS, TRIALS // (len(bench.graph.nodes) * len(limits) // 4 + 1))
    for one in (*quick, *(() if kept else lean[:FITTED])):
        kept += _tightened(bench, one, limits, trials)
    if kept:
        kept += _loosened(bench, min(kept, key=_seconds), limits, trials)
    if not kept:
        raise min(refused.values(), key=lambda error: getattr(error, "missing_bytes", 0))
    return Fits(kept, tuple(f"{name}: {error}" for name, error in refused.items()))


def smallest(bench: Bench, tried: Sequence[Tried]) -> list[Tried]:
    """The plans with passes that need least, of those not much slower than the fastest."""
    most_s = SLOWER * min(t.prediction.step_s for t in tried)
    starts = dict.fromkeys((*sorted(tried, key=_seconds)[:FITTED], *sorted(tried, key=_bytes)[:2]))
    plans = {
        plan: _name(one)
        for one in starts
        for plan in smallest_plan(bench.graph, one.plan, training=bench.prices.training)
    }
    passed = [bench.try_(name, plan) for plan, name in plans.items()]
    unlike = {(_bytes(t), _seconds(t)): t for t in passed}
    found = [t for t in tried if _seconds(t) <= most_s]
    for one in sorted(unlike.values(), key=_bytes)[:HURRIED]:
        if _bytes(one) < min(map(_bytes, found)):  # in a hurry it needs more, never less
            hurried = _hurried(bench, one, most_s)
            found += [hurried] if _seconds(hurried) <= most_s else []
    return found


def _seconds(tried: Tried) -> float:
    return tried.prediction.step_s


def _bytes(tried: Tried) -> int:
    return max(tried.prediction.memory_bytes)


def _fitted(bench: Bench, one: Tried, limits: Sequence[int]) -> Tried:
    """The plan with passes, so that it fits."""
    prices = bench.prices
    plan = fit(bench.graph, one.plan, limits, names=prices.names, training=prices.training)
    return bench.try_(f"{one.name}, with passes", plan)


# ---- passes group by group ---------------------------------------------------------------------


def _with_passes(bench: Bench, one: Tried, place: int, passes: int) -> Tried:
    groups = list(one.plan.groups)
    groups[place] = replace(groups[place], passes=passes)
    return bench.try_(_name(one), replace(one.plan, groups=tuple(groups)))


def _name(one: Tried) -> str:
    return f"{one.name.partition(', with passes')[0]}, with passes"


def _excess(tried: Tried, limits: Sequence[int]) -> int:
    needs = tried.prediction.memory_bytes
    return max(need - limit for need, limit in zip(needs, limits, strict=True))


def _tightened(bench: Bench, one: Tried, limits: Sequence[int], trials: int) -> list[Tried]:
    """The plan with passes in single groups, or neighbours joined, where that spares most.

    ``fit`` gives passes to all groups and chooses borders by what that takes. Where one group has
    most of the maps, passes in it alone compute less twice. None if that is too large.
    """
    while _excess(one, limits) > 0:
        plans = list(_smaller(one.plan))
        trials -= len(plans)
        if not plans or trials < 0:
            return []
        options = [bench.try_(_name(one), plan) for plan in plans]
        best = min(options, key=lambda tried: (_excess(tried, limits), _seconds(tried)))
        if _excess(best, limits) >= _excess(one, limits):
            return []
        one = best
    return [one]


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans that keep less in one place: more passes in a group, or one group of two."""
    groups = plan.groups
    for place, group in enumerate(groups):
        before, after = groups[:place], groups[place + 1 :]
        more = next((passes for passes in PASSES[:2] if passes > group.passes), 0)
        if more:
            yield replace(plan, groups=(*before, replace(group, passes=more), *after))
        if after and after[0].layout == group.layout:
            both = replace(joined(group, after[0]), passes=max(group.passes, after[0].passes))
            yield replace(plan, groups=(*before, both, *after[1:]))


def _loosened(bench: Bench, one: Tried, limits: Sequence[int], trials: int) -> list[Tried]:
    """The plan without the passes that it does not need to fit; none if it needs all."""
    start = one
    for place, group in list(enumerate(one.plan.groups))[:trials]:
        if group.passes:
            other = _with_passes(bench, one, place, 0)
            if within(other.prediction.memory_bytes, limits) and _seconds(other) < _seconds(one):
                one = other
    return [] if one is start else [one]


def _hurried(bench: Bench, one: Tried, most_s: float) -> Tried:
    """The plan without passes where they take most time for a byte they spare, until it takes no
    longer than it may.

    How much that is changes with every group that loses them: it is looked at again before a group
    is the next one.
    """
    dear = {place: float("inf") for place, group in enumerate(one.plan.groups) if group.passes}
    while dear and _seconds(one) > most_s:
        place = max(dear, key=dear.__getitem__)
        other = _with_passes(bench, one, place, 0)
        gained_s, spared = _seconds(one) - _seconds(other), _bytes(other) - _bytes(one)
        dear[place] = gained_s / max(spared, LEAST_SPARED)
        if dear[place] >= max(dear.values()):
            del dear[place]
            one = other if gained_s > 0 else one
    return one


# ---- uneven memory -----------------------------------------------------------------------------


def _shifted(bench: Bench, one: Tried, limits: Sequence[int]) -> Tried | None:
    """The plan with less for devices that have too little memory, if that makes it fit."""
    for _ in range(SHIFTS):
        needs = one.prediction.memory_bytes
        if within(needs, limits):
            return one
        scale = [min(1.0, limit / need) for limit, need in zip(limits, needs, strict=True)]
        plan = replace(one.plan, groups=tuple(_scaled(group, scale) for group in one.plan.groups))
        if plan == one.plan:
            return None
        one = bench.try_(f"{one.name.partition(', shares')[0]}, shares by memory", plan)
    return one if within(one.prediction.memory_bytes, limits) else None


def _scaled(group: Group, scale: Sequence[float]) -> Group:
    """Every share of a cut times the worst scale of its devices."""
    inner, cuts = group.layout.devices, []
    for axis, shares in group.layout.cuts:
        inner //= len(shares)
        worst = [1.0] * len(shares)
        for device, part in enumerate(scale):
            at = device // inner % len(shares)
            worst[at] = min(worst[at], part)
        if len(shares) > 1 and min(worst) < max(worst):
            times = FINER if max(shares) < FINER else 1
            shares = tuple(
                max(1, round(share * times * part)) if share else 0
                for share, part in zip(shares, worst, strict=True)
            )
        cuts.append((axis, shares))
    return replace(group, layout=Layout(tuple(cuts)))


def spread_limit(limit: int | Sequence[int] | None, devices: int) -> tuple[int, ...] | None:
    """One limit for all devices, or one for each."""
    if limit is None:
        return None
    limits = (limit,) * devices if isinstance(limit, int) else tuple(limit)
    if len(limits) != devices:
        raise PlanError(
            f"{len(limits)} memory limits were given for {devices} devices: give one for all, or "
            "one for each"
        )
    return limits
