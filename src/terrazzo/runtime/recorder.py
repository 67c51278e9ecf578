"""The recorder: writes the spans of a run, its memory and a script's numbers, a file per device."""

from __future__ import annotations

import atexit
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from terrazzo.records.event import Event, line, line_start
from terrazzo.records.stage import IN_LOOP
from terrazzo.runtime.energy import EnergyLog
from terrazzo.runtime.phase import PhaseWatch

EVERY_CALL_UNTIL = 100
THEN_ONE_IN = 20
"""Spans of the first calls are all written, later ones of one call in twenty: a week of training
must not fill a card."""
EVERY_LOG_UNTIL = 10_000
THEN_ONE_LOG_IN = 10


class Recorder:
    """Keeps spans in memory and writes them when a call of net is over.

    A disk that fills up ends the recording, with a word about it, and not the training.
    """

    def __init__(self, folder: Path, device: int, *, every_until: int = EVERY_CALL_UNTIL) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._full, self._every_until = False, every_until
        self.device, self.call, self.phase = device, 0, "forward"
        self._file = (folder / f"events-{device}.jsonl").open("a", encoding="utf-8")
        self._lines: list[str] = []
        self._logged: list[tuple[int, float, dict[str, float | Tensor]]] = []
        self._counts: Counter[str] = Counter()
        self._steps, self._ready, self._peak_bytes = 0, False, 0.0
        # Spans are timed by a clock that never jumps, and dated by one that all devices share.
        self._epoch = time.time() - time.perf_counter()
        self.note("idle", resident_bytes=resident_bytes())
        self.energy: EnergyLog | None = None
        self.watch: PhaseWatch | None = None
        """Who is told of spans to tell phases apart; None: nobody asks."""
        atexit.register(self._close)

    def with_energy(self, log: EnergyLog | None) -> Recorder:
        """From now on also what the device's meters say."""
        self.energy = log
        if log is not None:
            self._lines += log.head()
        return self

    @property
    def _sampled(self) -> bool:
        return self.call <= self._every_until or self.call % THEN_ONE_IN == 0

    def begin(self, call: int, *, trains: bool = True) -> None:
        """A forward call. The first one ends setting up, whose peak is noted and then forgotten."""
        self.call, self.phase = call, "forward"
        if self.watch is not None:
            self.watch.call(trains)
        if not self._ready:
            self._ready = True
            self.note("setup", peak_bytes=peak_bytes(), resident_bytes=resident_bytes())
            with suppress(OSError):  # Linux can forget a peak; elsewhere it includes setting up
                Path("/proc/self/clear_refs").write_text("5")
        if self.energy is not None and self._sampled:
            self._lines += self.energy.lines(call, all_of_them=False)

    def end(self, *, sent_bytes: int, summed_bytes: int) -> None:
        """The end of a backward pass, with the payload that this device has sent so far."""
        self._steps += 1
        if self._sampled:
            counters = {"sent_bytes": float(sent_bytes), "summed_bytes": float(summed_bytes)}
            self.note("traffic", steps=float(self._steps), **counters)
            if self.energy is not None:
                self._lines += self.energy.lines(self.call)
        self._memory()
        self.flush()
        if self.watch is not None:
            self.watch.step()

    def span(
        self,
        kind: str,
        name: str,
        begin: float,
        *,
        sent_bytes: int = 0,
        group: int = -1,
        away_s: float = 0.0,
    ) -> None:
        """A span that began at ``begin`` (of time.perf_counter) and ends now.

        ``away_s`` of it went into messages and waiting for them.
        """
        end, call, epoch = time.perf_counter(), self.call, self._epoch
        if self.watch is not None:
            self.watch.span(kind, name, end - begin, away_s)
        if call <= self._every_until or call % THEN_ONE_IN == 0:
            start = line_start(self.device, call, self.phase)
            told = "" if group < 0 else f'"group": {group}'
            if kind != "compute" and away_s:
                told += f'{", " if told else ""}"worked_s": {max(end - begin - away_s, 0.0):.6f}'
            self._lines.append(
                line(start, kind, name, begin + epoch, end + epoch, sent_bytes, told)
            )

    def stage(
        self,
        phase: str,
        kind: str,
        name: str,
        times: tuple[float, float],
        *,
        size_bytes: int = 0,
        told: str = "",
    ) -> None:
        """A span that began and ended at ``times`` (of time.perf_counter), in another phase."""
        if self.watch is not None and kind == IN_LOOP:
            self.watch.fed(times[1] - times[0])
        if self._sampled:
            start = line_start(self.device, self.call, phase)
            begin, end = (time_s + self._epoch for time_s in times)
            self._lines.append(line(start, kind, name, begin, end, size_bytes, told))

    def note(self, name: str, **values: float) -> None:
        now = time.time()
        event = Event(
            self.device, self.call, self.phase, "note", name, now, now, 0, tuple(values.items())
        )
        self._lines.append(event.to_line())

    def log(self, numbers: Mapping[str, float | Tensor], step: int | None) -> None:
        """Numbers of the script; a tensor is read when lines are next written, not now."""
        names = tuple(numbers)
        count = 1 + max(self._counts[name] for name in names)
        self._counts.update({name: count - self._counts[name] for name in names})
        if count > EVERY_LOG_UNTIL and count % THEN_ONE_LOG_IN:
            return
        kept = {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in numbers.items()
        }
        at: dict[str, float | Tensor] = {"step": float(count if step is None else step)}
        self._logged.append((self.call, time.time(), at | kept))

    def _memory(self) -> None:
        """The largest resident size of this process since it was ready, whenever that has grown."""
        peak = peak_bytes()
        if peak > self._peak_bytes:
            self._peak_bytes = peak
            self.note("memory", peak_bytes=peak)

    def _close(self) -> None:
        if self.energy is not None:
            self._lines += self.energy.last(self.call)
        self.flush()

    def flush(self) -> None:
        logged, self._logged = self._logged, []
        for call, now, numbers in logged:
            values = tuple((name, float(value)) for name, value in numbers.items())
            event = Event(self.device, call, "forward", "note", "log", now, now, 0, values)
            self._lines.append(event.to_line())
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


def resident_bytes() -> float:
    """The memory this process holds now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return float(pages * resource.getpagesize())
    except (OSError, ValueError):
        return peak_bytes()


def peak_bytes() -> float:
    """The most memory this process held at once, since that was last forgotten."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
