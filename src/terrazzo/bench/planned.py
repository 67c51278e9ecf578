"""Planned: Terrazzo's own choice in a race, made from a profile taken just before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from terrazzo.bench.cases import Case
from terrazzo.bench.task import Task, WithLoss
from terrazzo.cluster import Hosts
from terrazzo.errors import PlanError
from terrazzo.graph.export import export
from terrazzo.lab.measuring import measure
from terrazzo.planner import Wishes
from terrazzo.planner.prediction import Prediction
from terrazzo.records.units import seconds_text

MOST_S, SHARE = 20.0, 0.1
"""Seconds that operators are timed for, and at most which part of a race."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan in a file, and what was said of it."""

    path: Path
    text: str
    prediction: Prediction


class Drawing:
    """Plans for a case: the devices are measured once, with the model of the case."""

    def __init__(self, case: Case, hosts: Hosts, folder: Path, *, race_s: float) -> None:
        if case.processes > 1:
            raise PlanError("a device of several processes is not planned for")
        task = Task.make(case)
        self.case, self.devices, self.folder = case, len(hosts.names), folder.resolve()
        self.graph = export(WithLoss(task.model), (task.images,)).graph
        budget_s = max(1.0, min(MOST_S, SHARE * race_s))
        self.profile = measure(hosts, self.graph, key={}, budget_s=budget_s, tell=lambda text: None)

    def plan(self, layout: str) -> Planned:
        found = Wishes(layout=layout, profile=self.profile).search(self.graph, self.devices).best
        case, kind = self.case, "" if layout == "auto" else f"-{layout.replace(':', '-')}"
        name = f"plan-{case.model}-{case.side}-{case.batch}-on-{case.on}{kind}.json"
        found.plan.save(self.folder / name)
        said = f"{found.name}; {seconds_text(found.prediction.step_s)} predicted"
        return Planned(self.folder / name, said, found.prediction)
