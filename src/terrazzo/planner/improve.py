"""Improving a plan: small changes, each simulated as a whole, kept while they help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from terrazzo.planner.borders import ends
from terrazzo.planner.explicit import group_title
from terrazzo.records import Graph, Group, Layout, Plan

if TYPE_CHECKING:
    from terrazzo.planner.search import Tried

Try = Callable[[str, Plan], "Tried"]
Changes = Callable[["Tried"], Iterator[Plan]]

FINER = 12
"""Equal shares are multiplied by this before one of them is changed."""
WORTH = 0.998
"""A change that gains less is noise."""


def improved(
    start: Tried,
    try_: Try,
    changes: Changes,
    *,
    limits: Sequence[int] | None = None,
    evaluations: int = 20,
) -> Tried:
    """Takes every change that helps, in turns, until none does or enough were tried."""
    best, left, moved = start, evaluations, True
    seen = {start.plan}
    while moved and left > 0:
        moved = False
        for change in changes(best):
            if left <= 0:
                break
            if change in seen:
                continue
            seen.add(change)
            left -= 1
            found = try_(start.name, change)
            fits = limits is None or all(map(int.__le__, found.prediction.memory_bytes, limits))
            if fits and found.prediction.step_s < WORTH * best.prediction.step_s:
                best, moved = found, True
                break
    return best


def anything(layouts: Sequence[Layout]) -> Changes:
    """Other shares, other layouts and fewer borders, the most promising first."""

    def changes(tried: Tried) -> Iterator[Plan]:
        yield from _shifted(tried)
        yield from _neighbours(tried.plan)
        yield from merged(tried.plan)
        for layout in layouts:
            for place, group in enumerate(tried.plan.groups):
                if group.layout != layout:
                    yield _changed(tried.plan, place, replace(group, layout=layout))

    return changes


def only_borders(graph: Graph) -> Changes:
    """One border less, or one more where groups may end."""
    places = ends(graph)

    def changes(tried: Tried) -> Iterator[Plan]:
        yield from merged(tried.plan)
        yield from _split(tried.plan, graph, places)

    return changes


def _split(plan: Plan, graph: Graph, places: Sequence[int]) -> Iterator[Plan]:
    first = 0
    for number, group in enumerate(plan.groups):
        last = graph.producer[group.last]
        for place in places:
            if first <= place < last:
                title = group_title(graph, first, place)
                one = replace(group, last=graph.nodes[place].output, title=title)
                other = replace(group, title=group_title(graph, place + 1, last))
                groups = (*plan.groups[:number], one, other, *plan.groups[number + 1 :])
                yield replace(plan, groups=groups)
        first = last + 1


def _changed(plan: Plan, place: int, group: Group) -> Plan:
    return replace(plan, groups=(*plan.groups[:place], group, *plan.groups[place + 1 :]))


def merged(plan: Plan) -> Iterator[Plan]:
    """Two groups in one layout as one."""
    for place in range(len(plan.groups) - 1):
        one, other = plan.groups[place : place + 2]
        if one.layout == other.layout and not one.layout.is_whole:
            both = joined(one, other)
            yield replace(plan, groups=(*plan.groups[:place], both, *plan.groups[place + 2 :]))


def joined(one: Group, other: Group) -> Group:
    """Two groups that follow each other as one."""
    return replace(
        other, title=f"{one.title.partition('..')[0]}..{other.title.rpartition('..')[2]}"
    )


def _neighbours(plan: Plan) -> Iterator[Plan]:
    """A group in the layout of the one before or after it."""
    for place, group in enumerate(plan.groups):
        for other in (place - 1, place + 1):
            if 0 <= other < len(plan.groups) and plan.groups[other].layout != group.layout:
                yield _changed(plan, place, replace(group, layout=plan.groups[other].layout))


def _shifted(tried: Tried) -> Iterator[Plan]:
    """Shares taken from those who compute longest and given to those who wait, by layout."""
    plan, found = tried.plan, tried.prediction
    for layout in dict.fromkeys(group.layout for group in plan.groups):
        busy = [0.0] * plan.devices
        for group, cost in zip(plan.groups, found.groups, strict=True):
            if group.layout == layout:
                busy = [b + c for b, c in zip(busy, cost.compute_s, strict=True)]
        for better in _balanced(layout, busy):
            groups = (
                replace(group, layout=better) if group.layout == layout else group
                for group in plan.groups
            )
            yield replace(plan, groups=tuple(groups))


def _balanced(layout: Layout, busy: list[float]) -> Iterator[Layout]:
    """One axis at a time: every share scaled by how long its devices were busy."""
    inner = layout.devices
    for place, (axis, shares) in enumerate(layout.cuts):
        inner //= len(shares)
        if len(shares) == 1 or axis in "nc":
            continue
        spent = [0.0] * len(shares)
        for device, seconds in enumerate(busy):
            at = device // inner % len(shares)
            spent[at] = max(spent[at], seconds)
        used = [s for s, share in zip(spent, shares, strict=True) if share]
        if not used or max(used) < 1.03 * min(used):
            continue
        mean = sum(used) / len(used)
        scale = FINER if max(shares) < FINER else 1
        better = tuple(
            max(1, round(share * scale * mean / s)) if share and s else share * scale
            for share, s in zip(shares, spent, strict=True)
        )
        cuts = (*layout.cuts[:place], (axis, better), *layout.cuts[place + 1 :])
        yield Layout(cuts)
