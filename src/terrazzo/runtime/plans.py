"""Where a net gets its plans: the runtime knows no planner, it is handed one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from terrazzo.records import Graph, Plan
from terrazzo.runtime.pace import Foreseen


class Plans(Protocol):
    """Where a net gets its plans."""

    def __call__(self, graph: Graph) -> Plan: ...

    def adopt(self, graph: Graph, plan: Plan, *, by_script: bool = True) -> None:
        """From now on this plan; for other graphs of the model one like it. ``by_script``:
        whoever wrote it has chosen, and nothing else is tried."""

    def again(self, slowness: Sequence[float]) -> Plan | None:
        """Another plan, for devices that compute so many times as long; None: this one stays."""

    def follow(self, kept: Sequence[int | None]) -> None:
        """Plans anew for other devices: the numbers before of those that are left."""

    def outgrown(self) -> int:
        """How many parameters are trained that were frozen when the plan was made; told once."""

    @property
    def contenders(self) -> Sequence[Plan]:
        """The plan that is and those that promise about as much, as long as nobody has chosen among
        them; the same on all devices. None where there is nothing to choose."""

    @property
    def foreseen(self) -> Foreseen | None:
        """What was predicted of the plan."""
