"""A run while it goes on: what its devices last recorded, from a folder that grows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from terrazzo.records.event import Event
from terrazzo.records.units import bytes_text, loss_text, seconds_text

HOT_C = 80.0
MOST_BYTES = 4 << 20
"""Read at once of a file that grows: what comes faster is caught up with later."""
KINDS = ("compute", "exchange", "sum", "agree", "feed")


@dataclass
class LiveDevice:
    """One device's latest step, numbers and vitals."""

    name: str
    step: int = 0
    step_s: float | None = None
    split_s: Mapping[str, float] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    peak_bytes: float = 0.0
    resident_bytes: float = 0.0
    temperature_c: float | None = None
    throttled: bool = False
    is_lost: bool = False
    _call: int = 0
    _began_s: float = 0.0
    _sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def take(self, event: Event) -> None:
        """One more line of its events."""
        if event.kind == "note":
            self._note(event.name, dict(event.values))
            return
        if event.kind not in KINDS or event.call < self._call:
            return
        if event.call > self._call:
            self._finish(event)
        self._sums["compute"] += event.worked_s
        if event.kind != "compute":
            self._sums[event.kind] += event.seconds - event.worked_s

    def _finish(self, first: Event) -> None:
        """The first span of a call ends the one before."""
        if self._call:
            self.step, self.split_s = self._call, self._sums
            calls = first.call - self._call
            self.step_s = (first.begin_s - self._began_s) / calls
        self._call, self._began_s, self._sums = first.call, first.begin_s, defaultdict(float)

    def _note(self, name: str, values: dict[str, float]) -> None:
        if name == "log":
            self.numbers |= {key: value for key, value in values.items() if key != "step"}
        elif name == "memory":
            self.peak_bytes = max(self.peak_bytes, values.get("peak_bytes", 0.0))

    def feel(self, vitals: dict[str, Any]) -> None:
        """One more line of its vitals."""
        warm = vitals["temperature_c"]
        self.temperature_c = None if warm is None else float(warm)
        self.throttled = bool(vitals["throttled"])
        self.resident_bytes = float(vitals["resident_bytes"])


class LiveRun:
    """All devices of a run; ``update`` reads what is new."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self.devices: list[LiveDevice] = []
        self._events: list[_Growing] = []
        self._vitals: list[_Growing] = []
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """One more device."""
        number = len(self.devices)
        self._events.append(_Growing(self._folder / f"events-{number}.jsonl"))
        self._vitals.append(_Growing(self._folder / f"vitals-{number}.jsonl"))
        self.devices.append(LiveDevice(name))

    def update(self) -> None:
        for device, events, vitals in zip(self.devices, self._events, self._vitals, strict=True):
            for line in events.lines():
                try:
                    device.take(Event.from_line(line))
                except (ValueError, TypeError):
                    continue
            for line in vitals.lines():
                try:
                    device.feel(json.loads(line))
                except (ValueError, TypeError, KeyError):
                    continue

    @property
    def tells_something(self) -> bool:
        """Not of a script that records nothing, on devices that tell nothing."""
        return any(device.step or device.resident_bytes for device in self.devices)

    @property
    def loss(self) -> str:
        """The numbers a script logs, on whichever device writes them down."""
        told = [device for device in self.devices if device.numbers]
        latest = max(told, key=lambda device: device.step, default=None)  # others may be lost
        found = {} if latest is None else latest.numbers
        shown = [f"{name} {loss_text(value)}" for name, value in list(found.items())[:4]]
        return ", ".join(shown)

    def table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=self.loss or None)
        for heading in ("device", "step", "a step", "where its time goes", "memory", "heat"):
            table.add_column(heading, overflow="ellipsis", no_wrap=True)
        for device in self.devices:
            table.add_row(
                device.name,
                str(device.step or ""),
                seconds_text(device.step_s) if device.step_s else "",
                "lost" if device.is_lost else split_text(device.split_s),
                bytes_text(device.resident_bytes or device.peak_bytes),
                heat_text(device),
            )
        return table


class _Growing:
    """A file that others write to: whole new lines, each once."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def lines(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(MOST_BYTES)
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        self._at += end
        yield from data[:end].decode("utf-8", "replace").splitlines()


def split_text(split_s: Mapping[str, float]) -> str:
    """``compute 71% exchange 20% sum 9%``."""
    total = sum(split_s.values())
    if not total:
        return ""
    shares = [(kind, split_s.get(kind, 0.0) / total) for kind in KINDS]
    return " ".join(f"{kind} {share:.0%}" for kind, share in shares if share >= 0.005)


def heat_text(device: LiveDevice) -> Text:
    if device.temperature_c is None and not device.throttled:
        return Text("")
    words = "" if device.temperature_c is None else f"{device.temperature_c:.0f} °C"
    if device.throttled:
        return Text(f"{words} THROTTLED".strip(), style="bold red")
    return Text(words, style="yellow" if (device.temperature_c or 0.0) >= HOT_C else "")
