"""The job of a chaos round: a small CNN in float64, with validation, on data that all can read."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from chaos_case import Case, Recipe
from chaos_faults import NOW_S, lie_in_wait
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAMPLES, EVERY = 3, 14, 3
SHAPE = (4, 3, 31, 27)
SMOOTH = 0.8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    ).double()  # fmt: skip


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(5)
    pictures = torch.randint(0, 255, (SAMPLES, *SHAPE[1:]), generator=draw, dtype=torch.uint8)
    labels = torch.randint(5, (SAMPLES,), generator=draw)
    own = torch.Generator().manual_seed(6)
    return DataLoader(TensorDataset(pictures, labels), batch_size=4, shuffle=True, generator=own)


class Average:
    """An average of the weights, which are whole in the state of a net."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._values: dict[str, Tensor] = {}

    def update(self) -> None:
        for name, tensor in self._net.state_dict().items():
            new = tensor.detach().double()
            old = self._values.get(name, new)
            self._values[name] = SMOOTH * old + (1 - SMOOTH) * new

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._values = dict(state)


class Job:
    """One training, struck or not."""

    def __init__(self, recipe: Recipe, *, shelf: Path, every: int = EVERY) -> None:
        import terrazzo as tz

        self.recipe, self.example = recipe, (torch.zeros(SHAPE, dtype=torch.float64),)
        self.net = net = tz.parallelize(model(), self.example, layout=recipe.layout, seed=7)
        self.optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.average = Average(net) if recipe.average else None
        parts = {} if self.average is None else {"average": self.average}
        self.run = tz.Run(
            net, self.optimizer, self.scheduler, loader=loader(), neighbours=2, spare_every=3,
            every=every, copies=99, checkpoints=shelf, **parts,
        )  # fmt: skip
        random.seed(3)
        numpy.random.seed(3)

    @property
    def targets(self) -> dict[str, Any]:
        """Whose methods are struck."""
        from terrazzo.runtime.call import Call

        links, scribe = self.net.links, self.run.scribe
        return {
            "links": links, "control": links.control, "optimizer": self.optimizer, "net": self.net,
            "spares": self.run.spares, "shelf": scribe and scribe.shelf, "run": self.run,
            "calls": Call,
        }  # fmt: skip

    def train(
        self, *, begun: Callable[[], None] | None = None, done: Callable[[], None] | None = None
    ) -> None:
        for _ in self.run.epochs(EPOCHS):
            for x, y in self.run.feed():
                if begun is not None:
                    begun()
                    begun = None
                self._step(x, y)
                if done is not None:
                    done()
                if self.run.steps + 1 == self.recipe.change:
                    self._change()
                time.sleep(self.recipe.pause_s)
            self._validate()
        if self.run.scribe is not None:
            self.run.scribe.finish()

    def _step(self, x: Any, y: Tensor) -> None:
        net, recipe = self.net, self.recipe
        weight = (0.5 + random.random()) / recipe.accumulate  # drawn by the loop, as mixup does
        (weight * F.cross_entropy(net(x.double() / 255 - 0.5), y)).backward()
        if (self.run.steps + 1) % recipe.accumulate:
            return
        if recipe.clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        if self.average is not None:
            self.average.update()

    def _change(self) -> None:
        import terrazzo as tz
        from terrazzo.errors import TerrazzoError

        links = self.net.links
        while True:
            layout, members = self.recipe.change_to, links.members
            if layout == "uneven":
                layout = "channels:" + ",".join(["2", *"1" * (len(members) - 1)])
            try:
                plan = tz.plan(self.net, self.example, layout=layout)
            except TerrazzoError:
                if links.members != members:  # it was for those who were here before
                    continue
                raise
            self.net.change_plan(plan, self.optimizer)
            return

    def _validate(self) -> None:
        self.net.eval()
        with torch.no_grad():
            self.net(torch.zeros(2, *SHAPE[1:], dtype=torch.float64))
        self.net.train()

    def state(self) -> dict[str, Tensor]:
        found = dict(self.net.state_dict())
        if self.average is not None:
            found |= {f"average {name}": t for name, t in self.average.state_dict().items()}
        return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def undisturbed(told: str, shelf: Path) -> None:
    """The same on one device: what there is after every step, as checkpoints."""
    torch.set_num_threads(1)
    job = Job(Case.from_json(told).recipe.numbers, shelf=shelf, every=1)
    assert job.run.scribe is not None
    job.run.scribe.shelf.kept = 10**6
    job.train()


def live(told: str, out: Path, *, in_lab: bool, silent_s: float, timeout_s: float) -> None:
    """One device of a round."""
    import terrazzo as tz
    from terrazzo.members import health
    from terrazzo.runtime.links import connect

    torch.set_num_threads(1)
    health.LEAST_SILENT_S = silent_s
    health.MOST_SILENT_S = max(silent_s, health.MOST_SILENT_S)
    case, me = Case.from_json(told), int(os.environ["RANK"])
    tz.init(timeout_s=timeout_s, reader=case.recipe.reader)
    links = connect()
    is_new = links.later is not None
    mine = [] if is_new else [one for one in case.strikes if one.device == me]
    for one in mine:
        if one.place == "start":
            lie_in_wait(one, {"links": links}, out, in_lab=in_lab)
    job = Job(case.recipe, shelf=out / "checkpoints" / str(me))
    steps = (out / f"{me}.steps").open("a", buffering=1, encoding="ascii")

    def begun() -> None:  # the first batch is here, and with it the first copy of cut weights
        if is_new:
            (out / f"{me}.joined").touch()
        for one in mine:
            if one.place != "start":
                lie_in_wait(one, job.targets, out, in_lab=in_lab)

    def done() -> None:
        steps.write(f"{job.run.steps + 1} {links.epoch} {NOW_S()!r}\n")

    job.train(begun=begun, done=done)
    state, beside = job.state(), out / f"{me}.safetensors.part"
    save_file(state, beside)
    beside.rename(out / f"{me}.safetensors")
