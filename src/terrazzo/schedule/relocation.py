"""Relocation: which boxes of a weight travel when it comes to live elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from terrazzo.geometry import Box, Transfer, transfers
from terrazzo.schedule.homes import owners
from terrazzo.schedule.tiling import Boxes


def everywhere(shape: tuple[int, ...], devices: int) -> Boxes:
    """A weight that nobody cuts: whole on every device."""
    return (Box.whole(shape),) * devices


def relocation(before: Boxes, after: Boxes) -> tuple[Transfer, ...]:
    """What each device needs of a weight, from itself where it has it, else from the first holder.

    ``before`` is as weights live: every two boxes are equal or apart, and all cover the whole.
    """
    return tuple(
        replace(transfer, source=transfer.destination)
        if before[transfer.destination].contains(transfer.box)
        else transfer
        for transfer in transfers(owners(before), after)
    )


class Rescue(NamedTuple):
    """A box of a weight on its way from a copy of what some member held."""

    source: int
    destination: int
    member: int
    have: Box
    """All that this member held."""
    box: Box


def rescue(
    boxes: Boxes, members: Sequence[int], holders: Sequence[Collection[int]], after: Boxes
) -> tuple[Rescue, ...]:
    """What each device needs of a weight, from itself where it can, else from the first it can.

    ``boxes`` were those of ``members``; ``holders`` tells for each device of now whose parts it
    has, its own or copies.
    """
    found = []
    for member, have in zip(members, owners(boxes), strict=True):
        # Those with equal parts hold the same numbers, so any of them will do.
        alike = [m for m, box in zip(members, boxes, strict=True) if box == have]
        sources = [(place, m) for m in alike for place, held in enumerate(holders) if m in held]
        for destination, need in enumerate(after):
            box = have.intersect(need)
            if box.is_empty:
                continue
            if not sources:
                raise LookupError(member)
            own = [source for source in sources if source[0] == destination]
            source, whose = (own or sources)[0]
            found.append(Rescue(source, destination, whose, have, box))
    return tuple(found)
