"""Sums of weight gradients: who adds up with whom, and how much at a time.

A sum over a ring takes as many rounds of messages as there are devices, whatever its size: many
small sums wait for rounds. But what is summed last starts only when the backward pass is over, and
nothing hides it. So a sum starts when as much waits for it as is still to come: sums become
smaller towards the end, and there are few of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from terrazzo.geometry import Box
from terrazzo.schedule.homes import sharers
from terrazzo.schedule.program import Program, Spread

LEAST_BYTES, MOST_BYTES = 1 << 18, 4 << 20
"""A sum is no smaller, unless it is the last one, and starts from there on at any rate."""

SMALL_BYTES = 1 << 15
"""Up to this, sending to everybody takes less time than the rounds of a ring."""
HUB_FROM = 4
"""From so many devices on, one of them makes a small sum for all: with fewer there is nothing to
save, and a second message to wait for."""

Circle = tuple[int, ...]
"""Devices whose parts of a gradient add up."""


def small_sum_messages(devices: int) -> float:
    """What a device sends and receives for a small sum, on the average of their turns."""
    others = devices - 1
    return 2.0 * others if devices < HUB_FROM else 4.0 * others / devices


def summed_bytes(program: Program, live: Set[str]) -> dict[Circle, int]:
    """What the circles of a program add up in one backward pass, of weights that are trained."""
    totals: dict[Circle, int] = {}
    for step in program.steps:
        if not isinstance(step, Spread) or step.target not in live:
            continue
        array = program.arrays[step.source]
        value = program.graph.values[array.value]
        if value.kind != "parameter":
            continue
        whole = Box.whole(value.shape)
        boxes = array.boxes or (whole,) * program.devices
        for circle in dict.fromkeys(sharers(boxes)):
            if len(circle) > 1:
                share = boxes[circle[0]].size / max(whole.size, 1)
                totals[circle] = totals.get(circle, 0) + round(value.bytes * share)
    return totals


class Waiting:
    """Bytes of gradients that wait for a sum, by circle, in one backward pass."""

    def __init__(self, totals: Mapping[Circle, int]) -> None:
        self._to_come = dict(totals)
        self.bytes: dict[Circle, int] = {}

    def add(self, circle: Circle, size: int) -> bool:
        """True when there is enough for a sum, which then is to be started."""
        self.bytes[circle] = self.bytes.get(circle, 0) + size
        self._to_come[circle] = self._to_come.get(circle, 0) - size
        enough = min(MOST_BYTES, max(LEAST_BYTES, self._to_come[circle]))
        return self.bytes[circle] >= enough

    def start(self, circle: Circle) -> int:
        return self.bytes.pop(circle, 0)
