"""A run as a trace that Chrome (chrome://tracing) and Perfetto open."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from terrazzo.records.event import Event


def trace_json(events: Iterable[Event], *, title: str) -> str:
    """The Trace Event Format: one process per device, times in microseconds since the first."""
    found = list(events)
    start_s = min((event.begin_s for event in found), default=0.0)
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": device, "tid": 0,
         "args": {"name": f"device {device}"}}
        for device in sorted({event.device for event in found})
    ]  # fmt: skip
    rows += [_row(event, start_s) for event in found]
    body = {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"run": title}}
    return json.dumps(body, allow_nan=False)


def _row(event: Event, start_s: float) -> dict[str, Any]:
    at: dict[str, Any] = {"pid": event.device, "tid": 0, "ts": _us(event.begin_s - start_s)}
    if event.kind == "note":
        return {"ph": "C", "name": event.name, **at, "args": _finite(event)}
    facts = {"step": event.call, "phase": event.phase, "sent_bytes": event.bytes}
    return {"ph": "X", "name": event.name, "cat": event.kind, **at, "dur": _us(event.seconds),
            "args": facts}  # fmt: skip


def _finite(event: Event) -> dict[str, float]:
    return {name: value for name, value in event.values if math.isfinite(value)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
