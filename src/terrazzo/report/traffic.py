"""Traffic of a run: the payload that each device sends in one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from terrazzo.records.event import Event
from terrazzo.report.steps import Step

KINDS = {"sent_bytes": "exchange", "summed_bytes": "sum"}


def sent_bytes(
    events: Iterable[Event], steps: Sequence[Step], devices: int
) -> dict[int, dict[str, float]]:
    """Per device and kind, on average over steps.

    Counters noted after each step are exact; spans alone miss what is sent in the background.
    """
    noted = _from_notes(events, devices)
    return noted if all(noted.values()) else _from_spans(steps, devices)


def _from_notes(events: Iterable[Event], devices: int) -> dict[int, dict[str, float]]:
    counters: dict[int, list[dict[str, float]]] = {device: [] for device in range(devices)}
    for event in events:
        if event.kind == "note" and event.name == "traffic" and event.device in counters:
            counters[event.device].append(dict(event.values))
    found: dict[int, dict[str, float]] = {}
    for device, rows in counters.items():
        found[device] = {}
        for name, kind in KINDS.items():
            if len(rows) > 1:
                spent = rows[-1].get(name, 0.0) - rows[0].get(name, 0.0)
                found[device][kind] = spent / (rows[-1]["steps"] - rows[0]["steps"])
    return found


def _from_spans(steps: Sequence[Step], devices: int) -> dict[int, dict[str, float]]:
    found = {device: defaultdict[str, float](float) for device in range(devices)}
    for step in steps:
        for span in step.spans:
            if span.bytes:
                found[span.device][span.kind] += span.bytes / len(steps)
    return {device: dict(kinds) for device, kinds in found.items()}
