"""A seat: which device has a place in a plan, and the power mode it is to be in there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrazzo.records.modes import Mode

INPUT, COMPUTE, EVALUATION, WAITING = PHASES = ("input", "compute", "evaluation", "waiting")
"""Phases of a training: it waits for its data, computes, is evaluated, waits for other devices."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A device by its name; without a mode it stays as it is."""

    device: str
    mode: Mode | None = None
    phases: tuple[tuple[str, Mode], ...] = ()
    """Modes of phases of training that have one of their own."""

    @property
    def text(self) -> str:
        """``pi5-0: 4 cores, CPU 1.8 GHz; evaluation: 2 cores, CPU 1.5 GHz``."""
        words = [self.mode.text if self.mode else "as it is"]
        words += [f"{phase}: {mode.text}" for phase, mode in self.phases]
        return f"{self.device}: {'; '.join(words)}"

    def to_body(self) -> dict[str, Any]:
        """As a part of a plan's JSON."""
        return {
            "device": self.device,
            "mode": None if self.mode is None else dict(self.mode.values),
            "phases": {phase: dict(mode.values) for phase, mode in self.phases},
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Seat:
        mode, phases = body["mode"], body.get("phases", {})
        return cls(
            device=str(body["device"]),
            mode=None if mode is None else Mode.of(mode),
            phases=tuple((str(phase), Mode.of(values)) for phase, values in phases.items()),
        )
