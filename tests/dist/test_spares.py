"""Weights cut by channels survive a loss: their copies come back, and steps are repeated."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expendable import Fate, die, fates
from plain import assert_close, cnn, state
from strike import strike
from test_recovery import Found, told
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import terrazzo as tz

pytestmark = pytest.mark.timeout(240)

EPOCHS = 2
SHAPE = (3, 3, 23, 17)


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(5)
    pictures = torch.randint(0, 255, (17, *SHAPE[1:]), generator=draw, dtype=torch.uint8)
    data = TensorDataset(pictures, torch.randint(5, (17,), generator=draw))
    order = torch.Generator().manual_seed(11)
    return DataLoader(data, batch_size=3, shuffle=True, generator=order)


def step(model: nn.Module, x: Any, y: torch.Tensor, used: Any) -> None:
    optimizer, scheduler = used
    loss = F.cross_entropy(model(x.double() / 255 - 0.5), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()


def parts(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


def validate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        seen = model(torch.ones(SHAPE, dtype=torch.float64)).square().sum().item()
    model.train()
    return float(seen)


def quiet() -> tuple[nn.Module, list[float]]:
    model = cnn(bias=False)
    used, data, seen = parts(model), loader(), []
    for _ in range(EPOCHS):
        for x, y in data:
            step(model, x, y, used)
        seen.append(validate(model))
    return model, seen


PLACES = {
    "forward": ("links", "gather combine", 52),
    "backward": ("links", "sum_later", 5),
    "norm": ("links", "gather combine", 60),
    "commit": ("control", "finish", 20),
    "optimiser": ("optimizer", "step", 5),
    "batch": ("links", "broadcast_bytes", 6),
    "copy": ("spares", "_settle", 3),
    "validation": ("net", "_prepared", 14),
}


def spared(lost: int, place: str, layout: str = "channels") -> Found:
    tz.init(recover=True)
    net = tz.parallelize(cnn(bias=False), (torch.zeros(SHAPE, dtype=torch.float64),), layout=layout)
    assert net.homes
    used = parts(net)
    run = tz.Run(net, *used, loader=loader(), spare_every=3)
    if net.links.device == lost:
        name, method, at = PLACES[place]
        links = net.links
        targets = {"links": links, "control": links.control, "optimizer": used[0], "net": net}
        strike({**targets, "spares": run.spares}[name], method, die, at=at)
    seen, steps = [], 0
    for _ in run.epochs(EPOCHS):
        for x, y in run.feed():
            step(net, x, y, used)
            steps += 1
        seen.append(validate(net))
    return told(net, seen) | {"steps": (steps, run.steps), "cut": len(net.homes)}


def same(found: list[Fate], members: tuple[int, ...]) -> list[Found]:
    model, seen = quiet()
    done = [fate.what for fate in found if fate.kind == "done"]
    assert len(done) == len(members), found
    for one in done:
        assert one["members"] == members
        assert one["cut"], "those who are left cut weights too"
        assert one["losses"] == pytest.approx(seen, rel=1e-10)
        assert one["steps"][1] == 12
        got = {name: torch.as_tensor(tensor) for name, tensor in one["state"].items()}
        assert_close(got, state(model))
    assert len({one["bits"] for one in done}) == 1
    return done


@pytest.mark.parametrize("place", list(PLACES))
def test_a_lost_part_comes_back_from_its_copy(place: str) -> None:
    lost = list(PLACES).index(place) % 3
    found = fates(3, spared, lost, place)
    assert found[lost].kind == "gone"
    done = same(found, tuple(d for d in range(3) if d != lost))
    assert 12 <= done[0]["steps"][0] <= 12 + 4, "no more than the steps since the copy are repeated"


def two_lost(first: int, second: int, neighbours: int) -> Found:
    tz.init(recover=True)
    net = tz.parallelize(
        cnn(bias=False), (torch.zeros(SHAPE, dtype=torch.float64),), layout="channels:1,2,1,2,1"
    )
    used = parts(net)
    run = tz.Run(net, *used, loader=loader(), spare_every=2, neighbours=neighbours)
    seen, steps, me = [], 0, net.links.device
    for _ in run.epochs(EPOCHS):
        for x, y in run.feed():
            if run.steps == 5 and me in (first, second):
                die()
            step(net, x, y, used)
            steps += 1
        seen.append(validate(net))
    return told(net, seen) | {"steps": (steps, run.steps), "cut": len(net.homes)}


def test_two_are_lost_at_once() -> None:
    same(fates(5, two_lost, 0, 1, 2), (2, 3, 4))


def test_a_part_and_its_only_copy_are_lost() -> None:
    for fate in fates(5, two_lost, 2, 3, 1):
        assert fate.kind == "gone" or fate.what == "PeerLost", fate
        assert fate.kind == "gone" or "device 2, which held a part of it" in fate.message


def lost_in_validation() -> Found:
    """Device 1, and then device 2, which had kept its copy, before the next batch."""
    tz.init(recover=True)
    net = tz.parallelize(
        cnn(bias=False), (torch.zeros(SHAPE, dtype=torch.float64),), layout="channels"
    )
    used = parts(net)
    run = tz.Run(net, *used, loader=loader(), spare_every=3)
    seen, steps, me = [], 0, net.links.device
    for epoch in run.epochs(EPOCHS):
        for x, y in run.feed():
            step(net, x, y, used)
            steps += 1
        for device in (1, 2):
            if epoch == 0 and me == device:
                die()
            found = validate(net)
        seen.append(found)
    return told(net, seen) | {"steps": (steps, run.steps), "cut": len(net.homes)}


def test_who_brought_back_a_part_is_lost_in_the_same_validation() -> None:
    same(fates(4, lost_in_validation), (0, 3))


def joined(call: str) -> Found:
    """A third device comes in the second epoch; one that was there from the start dies then."""
    net = tz.parallelize(
        cnn(bias=False), (torch.zeros(SHAPE, dtype=torch.float64),), layout="channels"
    )
    used = parts(net)
    run = tz.Run(net, *used, loader=loader(), spare_every=3)
    links, seen, steps = net.links, [], 0
    is_new = links.later is not None
    if is_new:
        wait_until(Path(call).exists)
    for _ in run.epochs(EPOCHS):
        for x, y in run.feed():
            if run.steps == 2 and not is_new:
                Path(call).touch()
                wait_until(lambda: links.control.guests)
            if run.steps == 8 and links.members[links.device] == 1:
                die()
            step(net, x, y, used)
            steps += 1
        seen.append(validate(net))
    return told(net, seen) | {"steps": (steps, run.steps), "cut": len(net.homes)}


def wait_until(there: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 40
    while not there() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_device_joins_where_weights_are_cut(tmp_path: Path) -> None:
    found = fates(2, joined, str(tmp_path / "call"), joining=tmp_path / "members", timeout_s=60)
    assert [fate.kind for fate in found] == ["done", "gone", "done"], found
    done = same([*found], found[0].what["members"])
    assert len(done[0]["members"]) == 2
