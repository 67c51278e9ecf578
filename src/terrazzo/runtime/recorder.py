"""The recorder: writes the spans of a run to one file per device."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from terrazzo.records.event import Event

EVERY_CALL_UNTIL = 100
THEN_ONE_IN = 20
"""Spans of the first calls are all written, later ones of one call in twenty: a week of training
must not fill a card."""


class Recorder:
    """Keeps spans in memory and writes them when a call of net is over.

    A disk that fills up ends the recording, with a word about it, and not the training.
    """

    def __init__(self, folder: Path, device: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._full = False
        self.device, self.call, self.phase = device, 0, "forward"
        self._file = (folder / f"events-{device}.jsonl").open("a", encoding="utf-8")
        self._lines: list[str] = []
        # Spans are timed by a clock that never jumps, and dated by one that all devices share.
        self._epoch = time.time() - time.perf_counter()

    def span(self, kind: str, name: str, begin: float, sent_bytes: int = 0) -> None:
        """A span that began at ``begin`` (of time.perf_counter) and ends now."""
        if self.call > EVERY_CALL_UNTIL and self.call % THEN_ONE_IN:
            return
        end = time.perf_counter()
        event = Event(
            self.device, self.call, self.phase, kind, name,
            begin + self._epoch, end + self._epoch, sent_bytes,
        )  # fmt: skip
        self._lines.append(event.to_line())

    def note(self, name: str, **values: float) -> None:
        now = time.time()
        event = Event(
            self.device, self.call, self.phase, "note", name, now, now, 0, tuple(values.items())
        )
        self._lines.append(event.to_line())

    def memory(self) -> None:
        """The largest resident size of this process so far."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.note("memory", peak_bytes=float(peak))

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if not lines or self._full:
            return
        try:
            self._file.write("\n".join(lines) + "\n")
            self._file.flush()
        except OSError as error:
            self._full = True
            text = f"terrazzo: recording stopped on device {self.device}: {error}; training goes on"
            print(text, file=sys.stderr)
