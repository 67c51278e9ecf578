"""Arrivals: exchanges that end later, so that statistics travel together with boxes.

A group that begins with a norm needs two things from the others: the edges of the map it reads,
and their part of the statistics. Taken one after the other these are two meetings, and at each of
them everybody waits for the last. But statistics are taken of what a device owns, and that is here
before anything arrives. So the exchange is only begun, the statistics are gathered, and the
exchange ends when the edges are read:

    forward     Exchange: edges leave | Combine: statistics    | Arrive: edges are there
    backward    Arrive: edges' gradients leave | Spread, Combine: theirs | Exchange: they are there

The way back is the same in reverse: gradients of statistics flow to owned elements only, and never
to an edge that is on its way already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from terrazzo.geometry import Box
from terrazzo.schedule.program import Arrive, Combine, Exchange, Step

Kept = dict[str, dict[int, Box]]
"""By array, what each device has of it without a message."""


def meet_once(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same steps; exchanges that statistics can travel with end later."""
    steps = _statistics_first(steps)
    found: list[Step] = []
    arrivals: dict[int, Arrive] = {}
    for index, step in enumerate(steps):
        if index in arrivals:
            found.append(arrivals.pop(index))
        end = _end(steps, index) if isinstance(step, Exchange) else None
        if end is not None and isinstance(step, Exchange):
            step = replace(step, ends_later=True)
            arrivals[end] = Arrive(step.writes, step.group)
        found.append(step)
    return tuple(found)


def _statistics_first(steps: Sequence[Step]) -> list[Step]:
    """Statistics of what an exchange brings stand right behind it: ahead of a pool that went before
    its norm."""
    found: list[Step] = []
    for step in steps:
        at = len(found)
        if isinstance(step, Combine):
            while at and not set(found[at - 1].writes).intersection(step.reads):
                at -= 1
            if not at or not isinstance(found[at - 1], Exchange):
                at = len(found)
        found.insert(at, step)
    return found


def _end(steps: Sequence[Step], begin: int) -> int | None:
    """Where the edges of an exchange are read first; None if no statistics are taken before."""
    exchange = steps[begin]
    assert isinstance(exchange, Exchange)
    if any(move.adds for move in exchange.moves):
        return None
    kept: Kept = {
        move.target: {t.source: t.box for t in move.transfers if t.source == t.destination}
        for move in exchange.moves
    }
    meets = False
    for index in range(begin + 1, len(steps)):
        step = steps[index]
        if isinstance(step, Combine) and _reads_only_kept(step, kept):
            meets = meets or step.reduction.combine == "moments"
        elif isinstance(step, Exchange) or any(name in kept for name in step.reads):
            return index if meets else None
    return None


def _reads_only_kept(step: Combine, kept: Kept) -> bool:
    if step.reduction.combine != "moments":
        return not any(name in kept for name in step.reads)
    own = kept.get(step.inputs[0])
    return own is None or all(
        part is None or (device in own and own[device].contains(part.reads[0].box))
        for device, part in enumerate(step.parts)
    )
