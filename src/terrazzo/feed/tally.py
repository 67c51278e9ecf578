"""Tally: what a feed did, counted for the record and said in a sentence."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from terrazzo.feed.cores import allowed_cores
from terrazzo.feed.held import Held
from terrazzo.feed.stages import Clock
from terrazzo.feed.task import Made
from terrazzo.feed.tuner import Change, Mean, Tuner, describe
from terrazzo.records.stage import EPOCH, FETCH, TUNED
from terrazzo.records.units import bytes_text, count_text, seconds_text
from terrazzo.runtime.recorder import Recorder

SAID = 5
"""So many bad samples are named; the rest are counted."""


class Tally:
    """Counts of the epoch that is under way, and what was said already."""

    def __init__(self) -> None:
        self.epoch = Counter[str]()
        self._named: set[str] = set()
        """Bad samples."""
        self._skipped = 0
        """In the last epoch that told of any: the same number is not told again."""
        self._cores = allowed_cores()

    def add(self, made: Made) -> None:
        fetched = next((took for took in made.took if took.stage == FETCH), None)
        if fetched is not None:
            self.epoch.update(
                samples=fetched.samples,
                read_bytes=fetched.bytes,
                held=fetched.held,
                peer=fetched.peer,
            )

    def waste(self, made: Made) -> None:
        """It was made for nobody, but what it read was read."""
        self.epoch["read_bytes"] += sum(took.bytes for took in made.took)

    def skip(self, bad: Sequence[str]) -> None:
        """Bad samples that were left out, as the user asked for; each is named once."""
        for text in bad:
            self.epoch["skipped"] += 1
            if text not in self._named and len(self._named) < SAID:
                self._named.add(text)
                rest = "; further ones are only counted" if len(self._named) == SAID else ""
                say(f"left out: {text}{rest}")

    def end(self, recorder: Recorder | None, clock: Clock, number: int, batches: int) -> None:
        """The end of an epoch."""
        counts = {
            name: float(self.epoch[name])
            for name in ("samples", "read_bytes", "held", "peer", "skipped")
        }
        spent = {f"{stage}_s": seconds for stage, seconds in clock.worked_s.items()}
        if recorder is not None:
            recorder.note(EPOCH, epoch=float(number), batches=float(batches), **counts, **spent)
        if self.epoch["skipped"] != self._skipped:
            self._skipped = self.epoch["skipped"]
            say(f"epoch {number}: {count_text(self._skipped, 'bad sample')} left out")
        self.epoch.clear()

    def record(self, recorder: Recorder, change: Change, held: Held | None) -> None:
        recorder.note(
            TUNED,
            workers=float(change.settings.workers),
            depth=float(change.settings.ahead),
            held_bytes=float(0 if held is None else held.held_bytes),
            cores=self._cores,
            stall_s=change.before.wait_s,
            step_s=change.before.step_s,
        )

    def sentence(self, tuner: Tuner, held: Held | None, change: Change) -> str:
        parts = [describe(tuner.settings)]
        if held is not None and held.places:
            parts.append(f"{bytes_text(held.held_bytes)} held {held.form}")
        first = tuner.first or change.before
        since = "" if first == change.before else f"; at first {_told(first)}"
        return f"{', '.join(parts)}: steps of {_told(change.before)}{since} ({change.why})"


def _told(mean: Mean) -> str:
    return f"{seconds_text(mean.step_s)}, {mean.wait_s / mean.step_s:.1%} waiting"


def say(text: str) -> None:
    print(f"terrazzo: feed: {text}", file=sys.stderr, flush=True)
