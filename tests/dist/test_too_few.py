"""Too few devices are left to fit in memory: what they have is saved, and goes on elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expendable import die, fates
from plain import assert_close, cnn, state
from strike import strike
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import terrazzo as tz

pytestmark = pytest.mark.timeout(240)

SHAPE = (2, 3, 160, 160)
ENOUGH_FOR_THREE = 9.4 * 2**20


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(10, *SHAPE[1:], generator=draw, dtype=torch.float64)
    order = torch.Generator().manual_seed(11)
    data = TensorDataset(x, torch.randint(5, (10,), generator=draw))
    return DataLoader(data, batch_size=SHAPE[0], shuffle=True, generator=order)


def step(model: nn.Module, optimizer: Any, x: Any, y: torch.Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def trained(folder: str, place: str, resume: bool) -> Any:
    tz.init(recover=True)
    memory = None if resume else int(ENOUGH_FOR_THREE)
    net = tz.parallelize(cnn(), (torch.zeros(SHAPE, dtype=torch.float64),), memory=memory)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    own = f"{folder}/{net.links.device}"
    run = tz.Run(net, optimizer, loader=loader(), checkpoints=own, every=99)
    begun = run.resume() if resume else 0
    for _ in run.epochs(1):
        for x, y in run.feed():
            if run.steps == 3 and net.links.device == 1 and not resume:
                strike(net.links, {"forward": "depart", "backward": "sum_later"}[place], die, at=1)
            step(net, optimizer, x, y)
    return begun, {name: tensor.numpy() for name, tensor in state(net).items()}


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_what_there_is_is_saved(place: str, tmp_path: Path) -> None:
    for fate in fates(3, trained, str(tmp_path), place, False):
        assert fate.kind == "gone" or fate.what == "PeerLost", fate
        if fate.kind != "gone":
            assert "2 devices are left, too few: a training step needs at least" in fate.message
            assert "The last checkpoint here is of step 3 in" in fate.message
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for x, y in loader():
        step(model, optimizer, x, y)
    for fate in fates(2, trained, str(tmp_path), "", True):
        begun, found = fate.what
        assert begun == 3
        assert_close({n: torch.as_tensor(t) for n, t in found.items()}, state(model))
