"""The outcome of a plan: what was predicted of a step, beside what the steps of a run took.

Computing is a device's own work, also that which it does while messages are on their way. Moving is
the rest of exchanges and sums: messages, and waiting for the last device to arrive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from terrazzo.report.reading import Reading
from terrazzo.report.steps import Step
from terrazzo.schedule.pace import slowness


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds of a step, predicted and measured."""

    predicted_s: float
    measured_s: float

    @property
    def times(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else None


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """One group, or all of them: computing and moving on each device."""

    title: str
    compute: tuple[Figure, ...]
    moving: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step, every device and every group; medians over so many steps."""

    step: Figure
    total: GroupOutcome
    sums: tuple[Figure, ...]
    """Waiting at the end of a backward pass for sums of weight gradients."""
    groups: tuple[GroupOutcome, ...]
    steps: int

    @property
    def slowness(self) -> tuple[float, ...]:
        """How many times as long as predicted each device computes."""
        figures = self.total.compute
        measured, predicted = zip(*((f.measured_s, f.predicted_s) for f in figures), strict=True)
        return slowness([measured], predicted)


def outcome(reading: Reading) -> Outcome | None:
    """Of the plan that a run ended with; None where nothing was predicted or measured."""
    prediction, devices = reading.prediction, reading.devices
    steps = [step for step in reading.planned_steps if step.is_whole]
    grouped = any(span.group is not None for step in steps for span in step.spans)
    if prediction is None or len(prediction.compute_s) != devices or not grouped:
        return None
    rows = [_measured(step) for step in steps]
    groups = range(len(prediction.groups))

    def usual(kind: str, device: int, *numbers: int) -> float:
        return median(sum(row.get((kind, g, device), 0.0) for g in numbers) for row in rows)

    def gathered(kind: str, predicted: Sequence[float], numbers: Sequence[int]) -> list[Figure]:
        return [Figure(s, usual(kind, device, *numbers)) for device, s in enumerate(predicted)]

    found = tuple(
        GroupOutcome(
            cost.title,
            tuple(gathered("compute", cost.compute_s, [number])),
            tuple(gathered("moving", _added(cost.exchange_s, cost.waiting_s), [number])),
        )
        for number, cost in enumerate(prediction.groups)
    )
    moving = [sum(group.moving[device].predicted_s for group in found) for device in range(devices)]
    return Outcome(
        Figure(prediction.step_s, median(step.seconds for step in steps)),
        GroupOutcome(
            "all",
            tuple(gathered("compute", prediction.net_compute_s, groups)),
            tuple(gathered("moving", moving, groups)),
        ),
        tuple(gathered("moving", prediction.sums_s, [-1])),
        found,
        len(steps),
    )


def _measured(step: Step) -> Mapping[tuple[str, int, int], float]:
    """Seconds by what they went into, group (-1: sums at the end) and device."""
    found: dict[tuple[str, int, int], float] = defaultdict(float)
    for span in step.spans:
        if span.kind not in ("compute", "exchange", "sum"):
            continue
        group = -1 if span.group is None else span.group
        found["compute", group, span.device] += span.worked_s
        found["moving", group, span.device] += span.seconds - span.worked_s
    return found


def _added(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]
