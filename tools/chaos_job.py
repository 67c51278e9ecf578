"""The job of a chaos round: a small CNN in float64, with validation, on data that all can read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAMPLES = 3, 14


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    ).double()  # fmt: skip


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(5)
    pictures = torch.randint(0, 255, (SAMPLES, 3, 31, 27), generator=draw, dtype=torch.uint8)
    labels = torch.randint(5, (SAMPLES,), generator=draw)
    own = torch.Generator().manual_seed(6)
    return DataLoader(TensorDataset(pictures, labels), batch_size=4, shuffle=True, generator=own)


def train(net: nn.Module, run: Any, optimizer: Any, scheduler: Any, *, pause_s: float) -> None:
    import time

    for _ in run.epochs(EPOCHS):
        for x, y in run.feed():
            loss = F.cross_entropy(net(x.double() / 255 - 0.5), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            time.sleep(pause_s)
        net.eval()
        with torch.no_grad():
            net(torch.zeros(2, 3, 31, 27, dtype=torch.float64))
        net.train()


def job(*, pause_s: float = 0.0, folder: Path | None = None) -> tuple[Any, dict[str, Tensor]]:
    import terrazzo as tz

    net = tz.parallelize(model(), (torch.zeros(4, 3, 31, 27, dtype=torch.float64),), seed=7)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    run = tz.Run(net, optimizer, scheduler, loader=loader())
    if folder is not None:
        from chaos import Strike, strike_from_inside

        told = [Strike(**row) for row in json.loads(os.environ["CHAOS"])]
        strike_from_inside(told, net.links, optimizer)
        (folder / f"{net.links.device}.begun").touch()
    train(net, run, optimizer, scheduler, pause_s=pause_s)
    state = {name: t.detach().clone().contiguous() for name, t in net.state_dict().items()}
    return net.links, state


def undisturbed() -> dict[str, Tensor]:
    """The same on one device."""
    return job()[1]


if __name__ == "__main__":
    import terrazzo as tz

    torch.set_num_threads(1)
    me, out = tz.init(timeout_s=40), Path(sys.argv[1])
    outside = os.environ["CHAOS"] == "[]"
    _, found = job(pause_s=0.4 if outside else 0.0, folder=out)
    save_file(found, out / f"{me}.safetensors.part")
    (out / f"{me}.safetensors.part").rename(out / f"{me}.safetensors")
