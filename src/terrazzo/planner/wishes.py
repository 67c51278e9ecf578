"""What a user asks of a plan, for any graph of the model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from terrazzo.errors import PlanError, UsageError
from terrazzo.planner.explicit import Groups, plan_graph
from terrazzo.planner.fitting import fit
from terrazzo.planner.search import MEMORY, TIME, Found, search
from terrazzo.records import Graph, Layout, Plan
from terrazzo.records.profile import Profile
from terrazzo.records.units import parse_bytes

IDLE_BYTES = 230 << 20
"""A process with torch loaded and its connections made, before the first step."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Layout, groups, passes and memory as given to ``tz.plan`` and ``tz.parallelize``.

    With a profile, a plan whose layout and groups are left open is searched for. Without one, open
    means the grid of tiles with the shortest borders, exchanging at every operator.
    """

    layout: str | Layout = "auto"
    groups: Groups = "auto"
    passes: int = 0
    memory: str | int | None = None
    objective: str = TIME
    profile: Profile | None = None

    def __post_init__(self) -> None:
        if self.passes < 0:
            raise UsageError(f"passes={self.passes}: say 0 for none, or how many strips")
        if self.memory is not None and (self.passes or self.groups != "auto"):
            raise UsageError(
                "memory= chooses groups and passes by itself: leave groups= and passes= out"
            )
        if self.memory is not None:
            parse_bytes(self.memory)
        if self.objective not in (TIME, MEMORY):
            raise UsageError(f'objective={self.objective!r}: say "{TIME}" or "{MEMORY}"')

    @property
    def is_open(self) -> bool:
        """Whether layout and groups are left to the planner."""
        return self.layout == "auto" and self.groups == "auto" and not self.passes

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory)

    def plan(self, graph: Graph, devices: int) -> Plan:
        if self.profile is not None and self.is_open:
            return self.search(graph, devices).best.plan
        plan = plan_graph(
            graph, devices, layout=self.layout, groups=self.groups, passes=self.passes
        )
        return plan if self.memory_bytes is None else fit(graph, plan, self.memory_bytes)

    def search(self, graph: Graph, devices: int) -> Found:
        """The best plan by the profile, and what else was looked at."""
        assert self.profile is not None
        if len(self.profile.devices) != devices:
            raise PlanError(
                f"the profile is of {len(self.profile.devices)} devices, the plan is for "
                f"{devices}: measure these with terrazzo cluster profile, or plan for those"
            )
        found = search(
            graph, self.profile, memory_bytes=self.memory_bytes, objective=self.objective
        )
        room = room_bytes(self.profile)
        if self.memory is None and room and max(found.best.prediction.memory_bytes) > room:
            with suppress(PlanError):  # nothing fits: the best plan stands, and is seen not to fit
                return search(graph, self.profile, memory_bytes=room, objective=self.objective)
        return found


def room_bytes(profile: Profile) -> int:
    """What a step may take on the smallest device beside the idle process; 0: not known."""
    known = [device.memory_bytes for device in profile.devices if device.memory_bytes]
    return max(0, min(known) - IDLE_BYTES) if known else 0
