"""Rivals: plans so close to the best by prediction that only steps can tell which is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.planner.limits import within
from terrazzo.planner.search import Found, Tried
from terrazzo.records import Graph
from terrazzo.schedule import lower
from terrazzo.schedule.memory import footprints
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
    a device breaks down under, nor ask more of a script than the best does: with cut weights, some
    things are to be done by all devices, and a lost one takes parts along.
    """
    bound_s = (1 + NEAR) * found.best.prediction.step_s
    near = [one for one in found.rejected if one.prediction.step_s <= bound_s]
    if not near:
        return ()
    best = _Look.at(graph, found.best, training)
    bounds = [int(MORE * need) for need in best.needs]
    if rooms is not None:
        pairs = zip(bounds, rooms, strict=True)
        bounds = [min(room, max(bound, int(ROOMY * room))) for bound, room in pairs]
    chosen: list[Tried] = []
    for one in near:
        look = _Look.at(graph, one, training)
        if within(look.needs, bounds) and (best.cuts_weights or not look.cuts_weights):
            chosen.append(one)
        if len(chosen) == MOST:
            break
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class _Look:
    """What matters of a plan besides its time."""

    needs: Sequence[int]
    cuts_weights: bool

    @classmethod
    def at(cls, graph: Graph, one: Tried, training: Training) -> _Look:
        program = lower(graph, one.plan)
        needs = one.prediction.memory_bytes or [
            foot.total_bytes for foot in footprints(program, training=training)
        ]
        return cls(needs, bool(program.homes))
