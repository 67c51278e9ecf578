"""What losses cost: from a strike to the next committed step, and steps that were made again."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chaos_case import Case
from chaos_faults import LOST
from chaos_round import Outcome

SILENT = re.compile(r"device (\d+) was silent for ([\d.]+) s")
NOTICED = ("kill", "fill")
"""The connection ends with the process; of other losses only silence tells."""
TOLD = {
    "kill -9 or killed for memory": NOTICED,
    "pause or cut": ("pause", "cut"),
    "hang": ("hang",),
}


@dataclass(frozen=True)
class Loss:
    """One device was lost, alone, and the others went on."""

    kind: str
    devices: int
    is_cut: bool
    took_s: float
    """From the strike to the first step that the others committed in a new view."""
    step_s: float
    """A usual step before."""
    again: int
    """Steps that had been committed and were made again."""
    silent_s: float
    """How long it had been silent when the others gave it up, where that was why."""


def loss_of(case: Case, found: Outcome) -> Loss | None:
    """None where more than one thing happened, or nobody was lost."""
    if len(found.struck_s) != 1 or found.wrong:
        return None
    (device, struck_s), *_ = found.struck_s.items()
    strike = next(one for one in case.strikes if one.device == device)
    rows = {d: steps for d, steps in found.steps.items() if d != device}
    before = [row for steps in rows.values() for row in steps if row[2] <= struck_s]
    epoch = max((row[1] for row in before), default=0)
    after = [row for steps in rows.values() for row in steps if row[1] > epoch]
    if strike.kind not in LOST or not after:
        return None
    gaps = [b[2] - a[2] for steps in rows.values() for a, b in pairwise(steps) if b[1] <= epoch]
    silences = [
        float(seconds)
        for line in found.lines
        for who, seconds in SILENT.findall(line)
        if int(who) == device
    ]
    return Loss(
        strike.kind, case.devices, case.is_cut,
        took_s=min(row[2] for row in after) - struck_s,
        step_s=statistics.median(gaps) if gaps else 0.0,
        again=max(_again(steps, epoch) for steps in rows.values()),
        silent_s=max(silences, default=0.0),
    )  # fmt: skip


def _again(steps: list[tuple[int, int, float]], epoch: int) -> int:
    made = max((step for step, when, _ in steps if when <= epoch), default=0)
    return max(0, made + 1 - min((step for step, when, _ in steps if when > epoch), default=made))


class Tally:
    """All rounds together."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.rounds = self.faults = self.cut = self.twice = self.joined = 0
        self.longest_s, self._begin_s = 0.0, time.monotonic()
        self.failed: list[int] = []
        self.losses: list[Loss] = []

    def add(self, number: int, case: Case, found: Outcome) -> None:
        struck = [strike for strike in case.strikes if strike.device in found.struck_s]
        self.rounds += 1
        self.faults += len(struck)
        self.cut += len(struck) if case.is_cut else 0
        self.twice += len(struck) > 1
        self.joined += len(found.joined)
        self.kinds.update(strike.kind for strike in struck)
        self.places.update(strike.place for strike in struck)
        self.longest_s = max(self.longest_s, found.took_s)
        self.failed += [number] if found.wrong else []
        loss = loss_of(case, found)
        self.losses += [loss] if loss is not None else []

    def lines(self) -> Iterable[str]:
        took_s = time.monotonic() - self._begin_s
        yield (
            f"chaos: {self.faults} faults, {self.cut} of them on cut weights, {self.twice} rounds "
            f"with two, {self.joined} devices joined, in {self.rounds} rounds and "
            f"{took_s / 60:.1f} min, the longest {self.longest_s:.0f} s; "
            f"{len(self.failed)} rounds failed {self.failed or ''}"
        )
        yield f"chaos: kinds: {_counted(self.kinds)}"
        yield f"chaos: places: {_counted(self.places)}"
        for name, kinds in TOLD.items():
            yield from _times(name, [one for one in self.losses if one.kind in kinds])
        four = [one for one in self.losses if one.devices == 4]
        yield from _times("kill -9, of four devices", [one for one in four if one.kind == "kill"])
        for is_cut, name in ((False, "whole"), (True, "cut")):
            again = [one.again for one in self.losses if one.is_cut == is_cut]
            if again:
                median = statistics.median(again)
                yield (
                    f"chaos: steps made again after a loss, weights {name}: median {median:g}, "
                    f"worst {max(again)}, of {len(again)}; what was in flight is always made again"
                )


def _times(name: str, losses: Sequence[Loss]) -> Iterable[str]:
    if not losses:
        return
    took = [one.took_s for one in losses]
    steps = [one.step_s for one in losses if one.step_s]
    silent = [one.silent_s for one in losses if one.silent_s]
    told = f"median {statistics.median(took):.2f} s, worst {max(took):.2f} s, of {len(took)}"
    if steps:
        told += f"; a usual step {statistics.median(steps):.2f} s"
    if silent:
        median = statistics.median(silent)
        told += f"; given up after {median:.1f} s of silence, worst {max(silent):.1f} s"
    yield f"chaos: from the strike to the next committed step, {name}: {told}"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"
