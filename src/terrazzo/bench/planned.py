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
from terrazzo.planner.cost import predict
from terrazzo.planner.explicit import regrouped
from terrazzo.planner.prediction import Prediction
from terrazzo.planner.search import Tried
from terrazzo.records.units import count_text, seconds_text
from terrazzo.schedule import lower

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
        self.profile.save(self.folder / self._file("profile"))
        self._best: dict[str, Tried] = {}

    def plan(self, layout: str, groups: str = "auto") -> Planned:
        """The best plan in a layout ("auto": in any), or its layouts with other groups."""
        if layout not in self._best:
            wishes = Wishes(layout=layout, profile=self.profile)
            self._best[layout] = wishes.search(self.graph, self.devices).best
        best = self._best[layout]
        plan, prediction, name = best.plan, best.prediction, best.name
        if groups != "auto":
            plan = regrouped(self.graph, plan, groups)
            prediction = predict(lower(self.graph, plan), self.profile)
            name = f"its layouts in {count_text(len(plan.groups), 'group')}"
        path = self.folder / self._file("plan", layout, groups)
        plan.save(path)
        return Planned(path, f"{name}; {seconds_text(prediction.step_s)} predicted", prediction)

    def _file(self, what: str, *asked: str) -> str:
        case = self.case
        said = [word.replace(":", "-") for word in asked if word != "auto"]
        words = [what, case.model, str(case.side), str(case.batch), "on", case.on, *said]
        return "-".join(words) + ".json"
