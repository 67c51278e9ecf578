"""Terrazzo: per-layer halos (``each``), full fusion (``one``), or layout, groups or plan given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import terrazzo as tz
from terrazzo.bench.cases import Case
from terrazzo.bench.fed import fed
from terrazzo.bench.peers.peer import NEXT, Trainer, Work
from terrazzo.bench.task import WithLoss, gradients_of, images_of, loss_of, optimizer_of
from terrazzo.errors import PlanError, UsageError
from terrazzo.runtime.cut import plain
from terrazzo.runtime.net import Net


class Terrazzo:
    claims_exact = True
    alone = False
    compiles = False

    def __init__(self, name: str) -> None:
        self.name = name
        kind, _, rest = name.partition(" ")
        self.plans = [Path(part) for part in rest.split(NEXT)] if kind == "plan" else []
        self.layout, self.groups = "auto", kind
        if kind == "terrazzo":
            words = rest.split()
            if not 1 <= len(words) <= 2:
                raise UsageError(
                    f'--terrazzo "{rest}" is not understood: give a layout, and groups after a '
                    'space, such as "tiles:2x1 4"'
                )
            self.layout, self.groups = words[0], words[1] if len(words) == 2 else "auto"
        asks_layouts = kind == "terrazzo" and self.layout == "auto"
        self._planned = not self.plans and (asks_layouts or self.groups == "auto")

    @property
    def open_layout(self) -> str | None:
        """The layout that the planner finds groups for; "auto": it finds the layouts, too."""
        return self.layout if self._planned else None

    def can(self, case: Case, devices: int) -> str | None:
        if not self.plans:
            return None
        planned = tz.Plan.load(self.plans[0]).devices
        return None if planned == devices else f"the plan is for {planned} devices"

    def build(self, work: Work) -> Trainer:
        return TerrazzoTrainer(self, work)


class TerrazzoTrainer(Trainer):
    """By several plans, each is a choice: ``net.keep_pace`` tries them in a user's first steps."""

    has_a_slope = False

    def __init__(self, peer: Terrazzo, work: Work) -> None:
        task = work.task()
        self.work, self.model = work, task.model
        self.loss: Callable[[Any], Tensor]
        whole = WithLoss(task.model)
        self.plans = [tz.Plan.load(path) for path in peer.plans]
        self.choices = range(max(1, len(self.plans)))
        if not self.plans:
            net = tz.parallelize(whole, (task.images,), layout=peer.layout, groups=peer.groups)
            self.loss, self.prefix = net, "model."
        else:
            net = self._planned(whole, task.images)
        self.net, self.fed = net, fed(net, task.images)
        self.optimizer = optimizer_of(task.model.parameters())

    def use(self, choice: int) -> None:
        if self.net.plan != self.plans[choice]:
            self.net.change_plan(self.plans[choice], self.optimizer)
            self.fed = fed(self.net, images_of(self.work.case))

    def _planned(self, whole: WithLoss, images: Tensor) -> Net:
        """By a plan for the model with its loss, or for the bare model: the loss stays outside."""
        plan = self.plans[0]
        try:
            net = tz.parallelize(whole, (images,), plan)
            self.loss, self.prefix = net, "model."
        except PlanError:
            net = tz.parallelize(self.model, (images,), plan)
            self.loss, self.prefix = (lambda images: loss_of(net(images))), ""
        return net

    def step(self) -> None:
        torch.autograd.backward(self.loss(self.fed))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        found = gradients_of(self.model)
        for name, home in self.net.homes.items():
            own = name.removeprefix(self.prefix)
            found[own] = home.gather(plain(found[own]))
        return found if self.work.device == 0 else {}
