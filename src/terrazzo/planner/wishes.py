"""What a user asks of a plan, for any graph of the model."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.errors import UsageError
from terrazzo.planner.explicit import Groups, plan_graph
from terrazzo.planner.fitting import fit
from terrazzo.records import Graph, Layout, Plan
from terrazzo.records.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Wishes:
    """Layout, groups, passes and memory as given to ``tz.plan`` and ``tz.parallelize``."""

    layout: str | Layout = "auto"
    groups: Groups = "auto"
    passes: int = 0
    memory: str | int | None = None

    def __post_init__(self) -> None:
        if self.passes < 0:
            raise UsageError(f"passes={self.passes}: say 0 for none, or how many strips")
        if self.memory is not None and (self.passes or self.groups != "auto"):
            raise UsageError(
                "memory= chooses groups and passes by itself: leave groups= and passes= out"
            )
        if self.memory is not None:
            parse_bytes(self.memory)

    def plan(self, graph: Graph, devices: int) -> Plan:
        plan = plan_graph(
            graph, devices, layout=self.layout, groups=self.groups, passes=self.passes
        )
        return plan if self.memory is None else fit(graph, plan, parse_bytes(self.memory))
