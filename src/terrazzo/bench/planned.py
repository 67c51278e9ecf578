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

MOST_S, SHARE = 20.0, 0.06
"""Seconds that operators are timed for, and at most which part of a race."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan in a file, and what was said of it."""

    path: Path
    text: str
    prediction: Prediction


def make_plan(case: Case, hosts: Hosts, folder: Path, *, race_s: float) -> Planned:
    """Measures these devices with the model of a case, and plans for them."""
    if case.processes > 1:
        raise PlanError("a device of several processes is not planned for")
    task = Task.make(case)
    graph = export(WithLoss(task.model), (task.images,)).graph
    budget_s = max(1.0, min(MOST_S, SHARE * race_s))
    profile = measure(hosts, graph, key={}, budget_s=budget_s, tell=lambda text: None)
    found = Wishes(profile=profile).search(graph, len(hosts.names)).best
    path = folder.resolve() / f"plan-{case.model}-{case.side}-{case.batch}-on-{case.on}.json"
    found.plan.save(path)
    said = f"{found.name}; {seconds_text(found.prediction.step_s)} predicted"
    return Planned(path, said, found.prediction)
