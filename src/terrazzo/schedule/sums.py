"""Sums of weight gradients: who adds up with whom, and how much at a time.

A sum over a ring takes as many rounds of messages as there are devices, whatever its size: many
small sums wait for rounds. One large sum starts only when the backward pass is over: nothing hides
it. So a circle's gradients are summed in about four parts, none very small and none very large.
"""

from __future__ import annotations

from terrazzo.geometry import Box
from terrazzo.schedule.homes import sharers
from terrazzo.schedule.program import Program, Spread

PARTS = 4
LEAST_BYTES, MOST_BYTES = 1 << 18, 4 << 20

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


def bucket_bytes(program: Program) -> dict[Circle, int]:
    """For every circle of a program, how much it collects before it starts a sum."""
    totals: dict[Circle, int] = {}
    for step in program.steps:
        if not isinstance(step, Spread):
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
    return {
        circle: min(MOST_BYTES, max(LEAST_BYTES, total // PARTS))
        for circle, total in totals.items()
    }
