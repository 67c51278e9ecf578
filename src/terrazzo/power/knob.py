"""A knob: one thing of a device that can be set to one of several values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Files = list[tuple[str, str]]
"""Names of files and what they hold, in the order in which they are to be written back."""


class Knob(Protocol):
    """One knob."""

    @property
    def name(self) -> str:
        """As modes call it: cores, cpu_hz, gpu_hz, mem_hz, gpu_limit_w."""

    @property
    def values(self) -> tuple[float, ...]:
        """What it can be set to, in rising order."""

    def read(self) -> float:
        """Where it stands, or for a governed clock the most it may go to."""

    def set(self, value: float) -> None:
        """Sets it, and makes sure; KnobError where it refuses."""

    def state(self) -> Files:
        """All that ``set`` may change."""

    def restore(self, files: Files) -> None:
        """Puts those of these files back that are this knob's."""

    @property
    def governor(self) -> str:
        """Who moves it within its limits; empty: nobody."""


def nearest(value: float, values: Sequence[float]) -> float:
    """The highest that is not above, or the lowest there is."""
    return max((one for one in values if one <= value * (1 + 1e-9)), default=values[0])
