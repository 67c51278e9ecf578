"""What happened when: one line per span of work on one device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import isfinite, nan
from pathlib import Path

EVERY_CALL = "TERRAZZO_EVERY_CALL"
"""The variable that says until which call all spans are written."""
KINDS = ("compute", "exchange", "sum", "agree", "feed", "stage", "note")


@dataclass(frozen=True, slots=True)
class Event:
    """A span of time on a device, in seconds of that device's clock since the epoch.

    ``call`` counts the calls of net; ``phase`` is forward, backward or feed (whose spans
    ``records.stage`` explains). ``bytes`` is the payload sent. A note carries measurements (memory,
    say) or what a script logged in ``values`` and has no length; what JSON has no word for (NaN, an
    infinity) comes back as NaN. A span says there to which ``group`` of the plan it belongs, and of
    an exchange or a sum how many seconds were the device's own work.
    """

    device: int
    call: int
    phase: str
    kind: str
    name: str
    begin_s: float
    end_s: float
    bytes: int = 0
    values: tuple[tuple[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def group(self) -> int | None:
        """The group of the plan that a span belongs to; None: to none."""
        return next((int(value) for name, value in self.values if name == "group"), None)

    @property
    def worked_s(self) -> float:
        """Seconds of a span in which the device worked by itself."""
        if self.kind == "compute":
            return self.seconds
        told = next((value for name, value in self.values if name == "worked_s"), 0.0)
        return min(told, self.seconds)

    def to_line(self) -> str:
        """One line of JSON."""
        where = line_start(self.device, self.call, self.phase)
        row = line(where, self.kind, self.name, self.begin_s, self.end_s, self.bytes)
        if not self.values:
            return row
        told = {name: value if isfinite(value) else None for name, value in self.values}
        return f"{row[:-1]}, {json.dumps(told)}]"

    @classmethod
    def from_line(cls, line: str) -> Event:
        device, call, phase, kind, name, begin_s, end_s, sent, *rest = json.loads(line)
        told = rest[0].items() if rest else ()
        values = tuple((key, nan if value is None else value) for key, value in told)
        return cls(device, call, phase, kind, name, begin_s, end_s, sent, values)


def line_start(device: int, call: int, phase: str) -> str:
    """What all lines of one phase of a call begin with."""
    return f'[{device}, {call}, "{phase}", '


def line(
    start: str, kind: str, name: str, begin_s: float, end_s: float, size: int, told: str = ""
) -> str:
    """An event as JSON, put together by hand: thousands are written while devices train.

    ``told`` are its values, as the inside of a JSON object.
    """
    rest = f", {{{told}}}" if told else ""
    return f'{start}"{kind}", {_quoted(name)}, {begin_s:.6f}, {end_s:.6f}, {size}{rest}]'


@cache
def _quoted(name: str) -> str:
    return json.dumps(name)


def read_events(folder: Path) -> Iterator[Event]:
    """All events of a run folder; a line cut short by a crash is passed over."""
    for path in sorted(folder.glob("events-*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    yield Event.from_line(line)
                except ValueError:
                    continue
