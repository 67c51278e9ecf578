"""Who sends which box to whom: the one communication primitive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from terrazzo.geometry.box import Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box on its way from one device to another (or kept, when they are the same)."""

    source: int
    destination: int
    box: Box


def transfers(owned: Sequence[Box], needed: Sequence[Box]) -> tuple[Transfer, ...]:
    """Intersects what devices own with what devices need.

    ``owned`` is a disjoint cover, so every needed element comes from exactly one device. What a
    device keeps for itself is listed too, as a transfer to itself.
    """
    found = []
    for destination, need in enumerate(needed):
        if need.is_empty:
            continue
        for source, have in enumerate(owned):
            box = have.intersect(need)
            if not box.is_empty:
                found.append(Transfer(source, destination, box))
    return tuple(found)


def adjoint(forward: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """The same boxes sent back; where they arrive they are added."""
    return tuple(Transfer(t.destination, t.source, t.box) for t in forward)
