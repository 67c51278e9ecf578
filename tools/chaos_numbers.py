"""What losses cost: from a strike to the next committed step, and steps that were made again."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chaos_case import Case
from chaos_faults import LOST
from chaos_round import Outcome

BOUND_S = 5.0
"""From a loss to the next committed step, beside that step."""
SILENT = re.compile(r"device (\d+)(?: \([^)]*\))? was silent for ([\d.]+) s")
WITHOUT = re.compile(r"chaos: (NO [A-Z ]+[A-Z])")
"""How a round says that a part of it could not be had here."""
TOLD = {
    "kill -9": ("kill",),
    "killed for memory": ("fill",),
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

    @property
    def is_slow(self) -> bool:
        """Whether the others took longer than they may, silence and hanging aside."""
        return self.kind != "hang" and self.took_s - self.silent_s > BOUND_S + self.step_s


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

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.kinds: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.without: Counter[str] = Counter()
        """What could not be done, and in how many rounds."""
        self.rounds = self.faults = self.cut = self.twice = self.joined = 0
        self.longest_s, self._begin_s = 0.0, time.monotonic()
        self.failed: dict[int, str] = {}
        self.losses: list[Loss] = []
        self._latest = -1
        """The round that the last of them was in."""
        self.rows: list[dict[str, Any]] = []

    def add(self, number: int, case: Case, found: Outcome) -> None:
        struck = [strike for strike in case.strikes if strike.device in found.struck_s]
        self.rounds += 1
        self.faults += len(struck)
        self.cut += len(struck) if case.is_cut else 0
        self.twice += len(struck) > 1
        self.joined += len(found.joined)
        self.kinds.update(strike.kind for strike in struck)
        self.places.update(strike.place for strike in struck)
        self.without.update({said for line in found.lines for said in WITHOUT.findall(line)})
        self.longest_s = max(self.longest_s, found.took_s)
        if found.wrong:
            self.failed[number] = found.wrong
        strikes = [str(strike) for strike in struck]
        told = {"devices": case.devices, "recipe": str(case.recipe), "struck": strikes}
        self.rows.append({"round": number, **told, "took_s": found.took_s, "wrong": found.wrong})
        loss = loss_of(case, found)
        if loss is not None:
            self.losses.append(loss)
            self._latest = number

    def was_slow(self, number: int) -> bool:
        """Whether the last loss was in this round, and took longer than it may."""
        return self._latest == number and self.losses[-1].is_slow

    @property
    def groups(self) -> dict[str, list[Loss]]:
        """Losses whose times belong together."""
        of = {name: [one for one in self.losses if one.kind in TOLD[name]] for name in TOLD}
        four = [one for one in of["kill -9"] if one.devices == 4]
        return {**of, "kill -9, of four devices": four}

    @property
    def again(self) -> dict[str, list[int]]:
        """Steps made again after each loss, by what weights were."""
        return {
            name: [one.again for one in self.losses if one.is_cut == is_cut]
            for name, is_cut in (("whole", False), ("cut", True))
        }

    def told(self) -> dict[str, Any]:
        """For machines; seconds."""
        groups = {name: losses for name, losses in self.groups.items() if losses}
        return {
            "seed": self.seed, "rounds": self.rounds, "faults": self.faults,
            "kinds": dict(self.kinds), "places": dict(self.places), "on_cut_weights": self.cut,
            "rounds_with_two": self.twice, "joined": self.joined, "without": dict(self.without),
            "failed": [{"round": n, "wrong": wrong} for n, wrong in sorted(self.failed.items())],
            "took_s": time.monotonic() - self._begin_s, "longest_round_s": self.longest_s,
            "to_next_committed_step_s": {
                name: _spread([one.took_s for one in losses]) for name, losses in groups.items()
            },
            "usual_step_s": _spread([one.step_s for one in self.losses if one.step_s]),
            "silent_before_given_up_s": _spread(self._silences(lambda one: one.silent_s)),
            "from_given_up_to_next_step_s": _spread(
                self._silences(lambda one: one.took_s - one.silent_s)
            ),
            "steps_made_again": {name: _spread(rows) for name, rows in self.again.items()},
        }  # fmt: skip

    def _silences(self, of: Callable[[Loss], float]) -> list[float]:
        return [of(one) for one in self.losses if one.silent_s]

    def lines(self) -> Iterable[str]:
        took_s, failed = time.monotonic() - self._begin_s, sorted(self.failed)
        yield (
            f"chaos: {self.faults} faults, {self.cut} of them on cut weights, {self.twice} rounds "
            f"with two, {self.joined} devices joined, in {self.rounds} rounds and "
            f"{took_s / 60:.1f} min, the longest {self.longest_s:.0f} s; "
            f"{len(failed)} rounds failed {failed or ''}"
        )
        yield f"chaos: kinds: {_counted(self.kinds)}"
        yield f"chaos: places: {_counted(self.places)}"
        if self.without:
            yield f"chaos: ROUNDS WITHOUT A PART: {_counted(self.without)}"
        for name, losses in self.groups.items():
            yield from _times(name, losses)
        for name, again in self.again.items():
            if again:
                median = statistics.median(again)
                yield (
                    f"chaos: steps made again after a loss, weights {name}: median {median:g}, "
                    f"worst {max(again)}, of {len(again)}; what was in flight is always made again"
                )


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"count": 0}
    return {"count": len(values), "median": statistics.median(values), "worst": max(values)}


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
