"""The recorder: writes the spans of a run to one file per device."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from terrazzo.records.event import Event


class Recorder:
    """Keeps spans in memory and writes them when a call of net is over."""

    def __init__(self, folder: Path, device: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.device, self.call, self.phase = device, 0, "forward"
        self._file = (folder / f"events-{device}.jsonl").open("a", encoding="utf-8")
        self._lines: list[str] = []
        # Spans are timed by a clock that never jumps, and dated by one that all devices share.
        self._epoch = time.time() - time.perf_counter()

    def span(self, kind: str, name: str, begin: float, sent_bytes: int = 0) -> None:
        """A span that began at ``begin`` (of time.perf_counter) and ends now."""
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
        if self._lines:
            self._file.write("\n".join(self._lines) + "\n")
            self._file.flush()
            self._lines.clear()
