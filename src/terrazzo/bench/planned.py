"""Planned: Terrazzo's own choice in a race, made from a profile taken just before."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
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
from terrazzo.planner.search import Found, Tried
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
    rivals: tuple[Planned, ...] = ()
    """Those that promise about as much, and are tried as well."""

    @property
    def choices(self) -> tuple[Planned, ...]:
        return (self, *self.rivals)


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
        self._found: dict[str, Found] = {}

    def plan(self, layout: str, groups: str = "auto") -> Planned:
        """The best plan in a layout ("auto": in any) and its rivals, or its layouts with other
        groups."""
        wishes = Wishes(layout=layout, profile=self.profile)
        if layout not in self._found:
            self._found[layout] = wishes.search(self.graph, self.devices)
        found = self._found[layout]
        if groups == "auto":
            rivals = wishes.rivals(self.graph, found)
            others = (self._kept(t, layout, f"rival {n}") for n, t in enumerate(rivals, 1))
            return replace(self._kept(found.best, layout), rivals=tuple(others))
        plan = regrouped(self.graph, found.best.plan, groups)
        name = f"its layouts in {count_text(len(plan.groups), 'group')}"
        predicted = predict(lower(self.graph, plan), self.profile)
        return self._kept(Tried(name, plan, predicted), layout, groups)

    def _kept(self, tried: Tried, *asked: str) -> Planned:
        path, prediction = self.folder / self._file("plan", *asked), tried.prediction
        if not prediction.memory_bytes:
            prediction = predict(lower(self.graph, tried.plan), self.profile)
        tried.plan.save(path)
        told = f"{tried.name}; {seconds_text(prediction.step_s)} predicted"
        return Planned(path, told, prediction)

    def _file(self, what: str, *asked: str) -> str:
        case = self.case
        said = [re.sub("[: ]", "-", word) for word in asked if word != "auto"]
        words = [what, case.model, str(case.side), str(case.batch), "on", case.on, *said]
        return "-".join(words) + ".json"
