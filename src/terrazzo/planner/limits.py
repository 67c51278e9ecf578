"""Memory limits of devices: which plans fit, what makes others fit, and the smallest there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from terrazzo.errors import PlanError
from terrazzo.planner.cost import predict
from terrazzo.planner.fitting import fit, smallest_plan
from terrazzo.records import Group, Layout
from terrazzo.schedule import lower

if TYPE_CHECKING:
    from terrazzo.planner.search import Bench, Tried

FITTED = 4
"""Plans that are given passes so that they fit into a limit: the fastest of those too large."""
SLOWER = 1.5
"""How much longer than the fastest the plan with the least memory may take."""
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
    if not kept:
        raise min(refused.values(), key=lambda error: getattr(error, "missing_bytes", 0))
    return Fits(kept, tuple(f"{name}: {error}" for name, error in refused.items()))


def smallest(bench: Bench, tried: Sequence[Tried]) -> list[Tried]:
    """The plans with passes that need least, of those not much slower than the fastest."""
    fastest_s = min(t.prediction.step_s for t in tried)
    starts = dict.fromkeys((*sorted(tried, key=_seconds)[:FITTED], *sorted(tried, key=_bytes)[:2]))
    found = list(tried)
    for one in starts:
        for plan in smallest_plan(bench.graph, one.plan):
            found.append(bench.try_(f"{one.name}, with passes", plan))
    return [t for t in found if t.prediction.step_s <= SLOWER * fastest_s]


def _seconds(tried: Tried) -> float:
    return tried.prediction.step_s


def _bytes(tried: Tried) -> int:
    return max(tried.prediction.memory_bytes)


def _fitted(bench: Bench, one: Tried, limits: Sequence[int]) -> Tried:
    """The plan with passes, so that it fits together with the optimiser's state."""
    plain = predict(lower(bench.graph, one.plan), bench.prices, optimizer="sgd").memory_bytes
    states = map(int.__sub__, one.prediction.memory_bytes, plain)
    rooms = [limit - state for limit, state in zip(limits, states, strict=True)]
    plan = fit(bench.graph, one.plan, rooms, names=bench.prices.names)
    return bench.try_(f"{one.name}, with passes", plan)


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
