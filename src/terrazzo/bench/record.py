"""The record of races: a row for each peer, and what makes the numbers worth quoting."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from terrazzo.bench.cases import Case
from terrazzo.records import document

KIND, VERSION = "race", 1
TOLERANCE = 1e-4
"""Relative, of one step in float32, where plain PyTorch itself comes closer to float64."""

NOISE_TIMES = 3.0
"""How much farther from float64 than plain PyTorch's own float32 still is another order of sums.
Deep models amplify rounding: an activation near zero, or a tie in a pool, falls to the other side.
Statistics of a part of the batch lie a hundred times farther off."""


@dataclass(frozen=True, slots=True)
class Row:
    """One peer in one race. ``problem`` says why it is not in it; it is not beaten then."""

    peer: str
    claims_exact: bool
    problem: str = ""
    step_s: tuple[float, ...] = ()
    choice: str = ""
    idle_bytes: tuple[int, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    sent_bytes: tuple[float, ...] | None = None
    gap: float | None = None
    """The largest relative difference of a gradient from plain PyTorch's in float64."""
    noise: float = 0.0
    """The same of plain PyTorch in float32."""
    predicted_s: float | None = None
    """What the planner said a step would take, before any was."""
    predicted_bytes: tuple[int, ...] = ()
    """And what each device would need beyond its idle process."""

    @property
    def done(self) -> bool:
        return not self.problem and bool(self.step_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def spread(self) -> float:
        """Slowest less fastest step, of the median."""
        return (max(self.step_s) - min(self.step_s)) / self.median_s

    @property
    def exact(self) -> bool | None:
        return None if self.gap is None else self.gap <= max(TOLERANCE, NOISE_TIMES * self.noise)

    @property
    def broke_promise(self) -> bool:
        return self.claims_exact and self.exact is False

    @property
    def most_bytes(self) -> int:
        """Of the device that needs most."""
        return max(self.peak_bytes, default=0)

    @property
    def most_own_bytes(self) -> int:
        """The same beyond the process as it was before it held a model."""
        pairs = zip(self.peak_bytes, self.idle_bytes, strict=True)
        return max((max(0, peak - idle) for peak, idle in pairs), default=0)


@dataclass(frozen=True, slots=True)
class Race:
    """All peers in one case."""

    case: Case
    devices: int
    strength: float
    """All devices' compute rate over the one's that runs alone."""
    rows: tuple[Row, ...]
    emulated: bool

    @property
    def baseline(self) -> Row | None:
        """The faster of those who train on one device; none if no one could."""
        from terrazzo.bench.peers import BASELINES

        done = [row for row in self.rows if row.peer in BASELINES and row.done]
        return min(done, key=lambda row: row.median_s, default=None)

    def speedup(self, row: Row) -> float | None:
        base = self.baseline
        return base.median_s / row.median_s if base is not None and row.done else None

    def efficiency(self, row: Row) -> float | None:
        """The speedup, of what all devices' arithmetic together would allow."""
        from terrazzo.bench.peers import BASELINES, ONE_CORE

        speedup, one = self.speedup(row), (*BASELINES, ONE_CORE)
        return None if speedup is None or row.peer in one else speedup / self.strength

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {**asdict(row), "speedup": self.speedup(row), "efficiency": self.efficiency(row)}
            | ({"median_s": row.median_s, "spread": row.spread} if row.done else {})
            | {"steps": len(row.step_s), "exact": row.exact, "most_own_bytes": row.most_own_bytes}
            | {"gap": row.gap if row.gap is not None and math.isfinite(row.gap) else None}
            for row in self.rows
        ]
        base = self.baseline
        return {
            "case": self.case.to_dict(),
            "devices": self.devices,
            "strength": self.strength,
            "emulated": self.emulated,
            "baseline": base.peer if base else None,
            "rows": rows,
        }


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where numbers come from."""

    command: str
    commit: str
    machine: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        machine = self.machine
        return (
            f"{self.command}; commit {self.commit or 'unknown'}; {machine['processor']}, "
            f"{machine['cores']} cores, torch {machine['torch']}"
        )


def to_json(races: Sequence[Race], provenance: Provenance, **more: Any) -> str:
    """``more`` stands beside the races."""
    body = {**asdict(provenance), "races": [race.to_dict() for race in races], **more}
    return document.dump(KIND, VERSION, body)
