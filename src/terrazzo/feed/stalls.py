"""Stalls: of a recorded run, how much of each step was waiting for the next batch, and for what.

The spans of ``records.stage`` say it all: from one ``wait`` to the next is a step; in it the loop
waits, copies and delivers, and the rest is computing. What it waited for are the stages of that
very batch, each for its share of the work in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from terrazzo.records.event import Event
from terrazzo.records.stage import (
    COLLATE,
    COPY,
    DELIVER,
    FETCH,
    PREPARE,
    WAIT,
    StageSpan,
    stage_spans,
)

SKIPPED = 1
"""Steps at the beginning that are not counted: the first batch is always waited for."""
CLOCK_S = 1e-4
"""Times in a record are rounded."""


@dataclass(frozen=True, slots=True)
class Stalls:
    """An average step: where its time went, and what the stages of its batch took."""

    steps: int
    step_s: float
    compute_s: float
    wait_fetch_s: float
    wait_prepare_s: float
    """With collating, and with handing over where workers make batches."""
    copy_s: float
    deliver_s: float
    fetch_s: float
    prepare_s: float
    collate_s: float
    samples: float
    read_bytes: float
    held: float
    """Samples of a batch that came from memory."""
    peer: float
    workers: int
    device: int

    @property
    def wait_s(self) -> float:
        return self.wait_fetch_s + self.wait_prepare_s

    @property
    def stall_s(self) -> float:
        """All that is not computing."""
        return self.wait_s + self.copy_s + self.deliver_s

    @property
    def reads(self) -> bool:
        """Whether samples were seen to come from anywhere."""
        return self.read_bytes + self.held + self.peer > 0

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """The step by what it was spent on; they add up to it."""
        return (
            ("compute", self.compute_s),
            ("waiting for fetch" if self.reads else "waiting in the data set", self.wait_fetch_s),
            ("waiting for pre-processing", self.wait_prepare_s),
            ("copying", self.copy_s),
            ("sending to the others", self.deliver_s),
        )

    def to_body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FedStep:
    """One step of the device that reads, from one wait to the next."""

    begin_s: float
    end_s: float
    spans: tuple[StageSpan, ...]
    """In the loop and of its batch beside it."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def is_apart(self) -> bool:
        """Whether its batch was made by a worker."""
        return any(span.is_beside and span.worker >= 0 for span in self.spans)

    def spent_s(self, stage: str) -> float:
        """In the loop."""
        return sum(s.end_s - s.begin_s for s in self.spans if s.stage == stage and not s.is_beside)

    def worked_s(self, stage: str) -> float:
        return sum(span.worked_s for span in self.spans if span.stage == stage)


def fed_steps(events: Iterable[Event]) -> list[FedStep]:
    """The steps of the device that reads, where this one and the next were recorded."""
    by_device: dict[int, list[StageSpan]] = defaultdict(list)
    for span in stage_spans(events):
        by_device[span.device].append(span)
    found = [step for spans in by_device.values() for step in _steps(spans)]
    return sorted(found, key=lambda step: step.begin_s)


def _steps(spans: list[StageSpan]) -> Iterator[FedStep]:
    """Times tell epochs apart: with a loader made anew for each of them all have one number."""
    waits = sorted((span for span in spans if span.stage == WAIT), key=lambda span: span.begin_s)
    begins = [wait.begin_s for wait in waits]
    known: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, wait in enumerate(waits):
        known[wait.epoch, wait.batch].append(place)
    own: dict[int, list[StageSpan]] = defaultdict(list)
    for span in spans:
        if not span.is_beside:
            place = bisect_right(begins, span.begin_s) - 1
        else:
            same = known[span.epoch, span.batch]
            later = bisect_left(same, span.end_s - CLOCK_S, key=lambda at: waits[at].end_s)
            place = same[later] if later < len(same) else -1
        own[place].append(span)
    for place, (wait, after) in enumerate(pairwise(waits)):
        if (after.epoch, after.batch) == (wait.epoch, wait.batch + 1):
            yield FedStep(wait.begin_s, after.begin_s, tuple(own[place]))


def stalls_of(
    steps: Sequence[FedStep], *, skip: int = SKIPPED, quickest: float = 1.0
) -> Stalls | None:
    """The average of recorded steps; None: nothing was recorded.

    ``quickest`` is the part of them that counts, by time: what else runs on a device only adds.
    """
    counted = list(steps[skip:]) or list(steps)
    if not counted:
        return None
    counted.sort(key=lambda step: step.seconds)
    counted = counted[: max(1, round(quickest * len(counted)))]
    counted.sort(key=lambda step: step.begin_s)
    rows = [_row(step) for step in counted]
    means = {name: fmean(row[name] for row in rows) for name in rows[0]}
    last = counted[-1].spans
    recent = [s for step in counted[-len(counted) // 2 :] for s in step.spans]
    workers = len({s.worker for s in recent if s.worker >= 0})
    return Stalls(steps=len(counted), workers=workers, device=last[0].device, **means)


def _row(step: FedStep) -> dict[str, float]:
    fetch_s, prepare_s, collate_s = (step.worked_s(s) for s in (FETCH, PREPARE, COLLATE))
    made_s = fetch_s + prepare_s + collate_s
    wait_s, copy_s, deliver_s = (step.spent_s(stage) for stage in (WAIT, COPY, DELIVER))
    share = fetch_s / made_s if made_s > 0 else 0.0
    fetched = [span for span in step.spans if span.stage == FETCH]
    return {
        "step_s": step.seconds,
        "compute_s": step.seconds - wait_s - copy_s - deliver_s,
        "wait_fetch_s": wait_s * share,
        "wait_prepare_s": wait_s * (1 - share),
        "copy_s": copy_s,
        "deliver_s": deliver_s,
        "fetch_s": fetch_s,
        "prepare_s": prepare_s,
        "collate_s": collate_s,
        "samples": float(sum(span.samples for span in fetched)),
        "read_bytes": float(sum(span.bytes for span in fetched)),
        "held": float(sum(span.held for span in fetched)),
        "peer": float(sum(span.peer for span in fetched)),
    }
