"""Steps of a run: the spans of one call of net on all devices, and where their time went.

A device that comes early to an exchange or a sum waits for the last one. That part of its span is
waiting, not work:

    device 0   compute ▕████████▏exchange ▕░░░░░░██▏
    device 1   compute ▕██████████████▏exchange ▕██▏
                                       last comes here

What it computes while messages are on their way is work, too, and counted as computing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from terrazzo.records.event import Event

TOGETHER = ("exchange", "sum", "agree", "feed")
"""Kinds of spans that need the other devices."""
CATEGORIES = ("compute", "exchange", "sum", "agree", "feed", "waiting", "other")


@dataclass(frozen=True)
class Step:
    """One call of net, forward and backward, up to the next call."""

    call: int
    devices: int
    spans: tuple[Event, ...]
    next_begin_s: Mapping[int, float]

    @cached_property
    def is_whole(self) -> bool:
        """Whether every device recorded both passes: a cut-off run may end in the middle."""
        seen = {(span.device, span.phase) for span in self.spans}
        return all(
            (device, phase) in seen
            for device in range(self.devices)
            for phase in ("forward", "backward")
        )

    @cached_property
    def begin_s(self) -> float:
        return min(span.begin_s for span in self.spans)

    @cached_property
    def end_s(self) -> float:
        return max(max(span.end_s for span in self.spans), *self.next_begin_s.values(), 0.0)

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @cached_property
    def waiting_s(self) -> dict[Event, float]:
        """Of each span that needs other devices, how long it waited for the last to arrive."""
        if self.devices == 1:
            return {}
        met: dict[tuple[object, ...], list[Event]] = defaultdict(list)
        seen: Counter[tuple[object, ...]] = Counter()
        for span in self.spans:
            if span.kind in TOGETHER:
                key = (span.phase, span.kind, span.name)
                mine = (span.device, *key)
                met[(*key, seen[mine])].append(span)
                seen[mine] += 1
        found: dict[Event, float] = {}
        for spans in met.values():
            if len(spans) == self.devices:
                last_s = max(span.begin_s for span in spans)
                found |= {
                    span: max(min(last_s - span.begin_s, span.seconds) - span.worked_s, 0.0)
                    for span in spans
                }
        return found

    def split(self, device: int) -> dict[str, float]:
        """Seconds per category on one device; they add up to its time in this step."""
        found = dict.fromkeys(CATEGORIES, 0.0)
        own = [span for span in self.spans if span.device == device]
        if not own:
            return found
        for span in own:
            waited = self.waiting_s.get(span, 0.0)
            found["compute"] += span.worked_s
            found["waiting"] += waited
            if span.kind != "compute":
                found[span.kind] += span.seconds - span.worked_s - waited
        begin = min(span.begin_s for span in own)
        end = max(max(span.end_s for span in own), self.next_begin_s.get(device, 0.0))
        found["other"] = max(end - begin - sum(found.values()), 0.0)
        return found


def steps_of(events: Iterable[Event], devices: int) -> tuple[Step, ...]:
    """The steps of a run in order; calls without any span are left out."""
    calls: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in CATEGORIES and event.device < devices and event.call > 0:
            calls[event.call].append(event)
    steps = []
    for call in sorted(calls):
        begins: dict[int, float] = {}
        for span in calls.get(call + 1, ()):
            begins[span.device] = min(begins.get(span.device, span.begin_s), span.begin_s)
        spans = tuple(sorted(calls[call], key=lambda span: (span.device, span.begin_s)))
        steps.append(Step(call, devices, spans, begins))
    return tuple(steps)


def mean_split(steps: Iterable[Step], device: int) -> dict[str, float]:
    """Seconds per category in an average step."""
    rows = [step.split(device) for step in steps]
    return {kind: sum(row[kind] for row in rows) / max(len(rows), 1) for kind in CATEGORIES}
