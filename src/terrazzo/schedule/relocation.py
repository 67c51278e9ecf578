"""Relocation: which boxes of a weight travel when it comes to live elsewhere."""

from __future__ import annotations

from dataclasses import replace

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
