"""The clock of a feed: what every stage of a batch took, for the tuner and for the record.

Names and fields are those of ``records.stage``. Workers measure with the same clock as the training
process, hand over what a batch took with the batch, and the training process writes it down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from terrazzo.records.stage import BESIDE, IN_LOOP, INLINE, PHASE
from terrazzo.runtime.recorder import Recorder


class Took(NamedTuple):
    """One stage of one batch; times are of time.perf_counter, which processes of a device share."""

    stage: str
    begin: float
    end: float
    worked_s: float
    bytes: int = 0
    samples: int = 0
    held: int = 0
    peer: int = 0


@dataclass
class Clock:
    """Adds up what stages took, and records every span where a run is recorded."""

    recorder: Recorder | None
    worked_s: dict[str, float] = field(default_factory=dict)
    """Per stage, since the epoch began."""

    def note(
        self, took: Took, *, epoch: int, batch: int, worker: int = INLINE, beside: bool
    ) -> None:
        """``beside``: it ran beside training, or inside of a wait, and is no time of the loop."""
        self.worked_s[took.stage] = self.worked_s.get(took.stage, 0.0) + took.worked_s
        if self.recorder is None:
            return
        told = f'"epoch": {epoch}, "batch": {batch}, "worker": {worker}'
        for name in ("samples", "held", "peer"):
            if count := getattr(took, name):
                told += f', "{name}": {count}'
        if took.worked_s != took.end - took.begin:
            told += f', "worked_s": {took.worked_s:.6f}'
        self.recorder.stage(
            PHASE,
            BESIDE if beside else IN_LOOP,
            took.stage,
            (took.begin, took.end),
            size_bytes=took.bytes,
            told=told,
        )
