"""Rivals: plans so close to the best by prediction that only steps can tell which is faster."""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.planner.limits import within
from terrazzo.planner.search import Found, Tried
from terrazzo.records import Graph
from terrazzo.schedule import lower
from terrazzo.schedule.memory import footprint
from terrazzo.schedule.training import EVERYTHING, Training

NEAR = 0.08
"""Of the best time: predictions of two plans are seldom further apart from what they take."""
MOST = 4
MORE = 1.1
"""Times the memory of the best: what a rival may take wherever its devices are nearly full."""
ROOMY = 0.75
"""Of what a device has: so much may be taken by any, though predicted memory is not exact."""


def rivals(
    graph: Graph,
    found: Found,
    rooms: Sequence[int] | None,
    *,
    training: Training = EVERYTHING,
) -> tuple[Tried, ...]:
    """The plans that are worth a try beside the best, most promising first.

    ``rooms`` is what a step may take on each device. A rival is only tried, so it must not be what
    a device breaks down under.
    """
    best = found.best
    bound_s = (1 + NEAR) * best.prediction.step_s
    near = [one for one in found.rejected if one.prediction.step_s <= bound_s]
    needs = _needs(graph, best, training)
    bounds = rooms and [
        int(max(MORE * need, ROOMY * room)) for need, room in zip(needs, rooms, strict=True)
    ]
    chosen: list[Tried] = []
    for one in near:
        if len(chosen) == MOST:
            break
        if bounds is None or within(_needs(graph, one, training), bounds):
            chosen.append(one)
    return tuple(chosen)


def _needs(graph: Graph, one: Tried, training: Training) -> Sequence[int]:
    program = lower(graph, one.plan)
    return one.prediction.memory_bytes or [
        footprint(program, device, training=training).total_bytes
        for device in range(one.plan.devices)
    ]
