"""The job of a chaos round: a small CNN in float64, with validation, on data that all can read."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAMPLES, EVERY = 3, 14, 3
SHAPE = (4, 3, 31, 27)
State = dict[str, Tensor]


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


class Job:
    """One training, struck or not."""

    def __init__(self, *, layout: str = "auto", folder: Path | None = None) -> None:
        import terrazzo as tz

        example = (torch.zeros(SHAPE, dtype=torch.float64),)
        self.net = net = tz.parallelize(model(), example, layout=layout, seed=7)
        self.me = net.links.device
        self.optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        saving: dict[str, Any] = {}
        if folder is not None:
            where = folder / "checkpoints" / str(self.me)
            saving = {"every": EVERY, "copies": 99, "checkpoints": where}
        self.run = tz.Run(
            net, self.optimizer, self.scheduler, loader=loader(), neighbours=2, spare_every=3,
            **saving,
        )  # fmt: skip
        self.states: dict[int, State] = {}
        """After every step, where they are wanted."""

    def strike(self, told: str, folder: Path) -> None:
        from chaos_faults import Strike, strike_from_inside

        links, scribe = self.net.links, self.run.scribe
        targets = {
            "links": links, "control": links.control, "optimizer": self.optimizer, "net": self.net,
            "spares": self.run.spares, "shelf": scribe and scribe.shelf,
        }  # fmt: skip
        for row in json.loads(told):
            if row["device"] == self.me and row["place"]:
                strike_from_inside(Strike(**row), targets, folder)

    def train(self, *, pause_s: float = 0.0, begun: Any = None, keep: bool = False) -> None:
        net = self.net
        for _ in self.run.epochs(EPOCHS):
            for x, y in self.run.feed():
                if begun is not None:
                    begun()
                    begun = None
                loss = F.cross_entropy(net(x.double() / 255 - 0.5), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                if keep:
                    self.states[self.run.steps + 1] = self.state()
                time.sleep(pause_s)
            net.eval()
            with torch.no_grad():
                net(torch.zeros(2, *SHAPE[1:], dtype=torch.float64))
            net.train()
        if self.run.scribe is not None:
            self.run.scribe.finish()

    def state(self) -> State:
        return {name: t.detach().clone().contiguous() for name, t in self.net.state_dict().items()}


def undisturbed() -> dict[int, State]:
    """The weights after every step, on one device."""
    job = Job()
    job.train(keep=True)
    return job.states


def live(out: Path, told: str, layout: str) -> None:
    """One device of a round."""
    import terrazzo as tz

    torch.set_num_threads(1)
    tz.init(timeout_s=40)
    job = Job(layout=layout, folder=out)

    def begun() -> None:  # the first batch is here, and with it the first copy of cut weights
        job.strike(told, out)
        (out / f"{job.me}.begun").touch()

    job.train(pause_s=0.0 if json.loads(told) else 0.4, begun=begun)
    save_file(job.state(), out / f"{job.me}.safetensors.part")
    (out / f"{job.me}.safetensors.part").rename(out / f"{job.me}.safetensors")


def forked(environment: dict[str, str], out: Path, told: str, layout: str) -> None:
    """The same in a process that was forked: with an environment and an output of its own."""
    os.environ.update(environment)
    log = os.open(out / f"{environment['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from terrazzo.members import health

    health.LEAST_SILENT_S = 10.0  # here all devices share a few cores, and may have to wait
    live(out, told, layout)


if __name__ == "__main__":
    live(Path(sys.argv[1]), os.environ["CHAOS"], os.environ["CHAOS_LAYOUT"])
