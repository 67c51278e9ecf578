"""Curves: the numbers that a script logged, by name and step."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan

from terrazzo.records.event import Event


def curves_of(events: Iterable[Event]) -> dict[str, dict[int, float]]:
    """In the order in which names first came; a step logged again, by a run that went on, counts
    as it was last."""
    found: dict[str, dict[int, float]] = {}
    for event in events:
        if event.kind != "note" or event.name != "log":
            continue
        numbers = dict(event.values)
        step = numbers.pop("step", float("nan"))
        for name, value in numbers.items():
            if not isnan(step):
                found.setdefault(name, {})[int(step)] = value
    return found
