"""The device that reads the data is lost, or another while batches are handed out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expendable import die, fates, strike
from plain import assert_close, cnn, state
from test_recovery import Found, told
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import terrazzo as tz

pytestmark = pytest.mark.timeout(240)

EPOCHS = 2


def loader() -> DataLoader[Any]:
    """Shuffled, by torch's own generator; the last batch is a smaller one."""
    draw = torch.Generator().manual_seed(5)
    pictures = torch.randint(0, 255, (11, 3, 23, 17), generator=draw, dtype=torch.uint8)
    return DataLoader(
        TensorDataset(pictures, torch.randint(5, (11,), generator=draw)), batch_size=3, shuffle=True
    )


def loop(model: nn.Module, batches: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(EPOCHS):
        for x, y in batches():
            loss = F.cross_entropy(model(x.double() / 255 - 0.5), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def fed(device: int, method: str, at: int, *, readers: tuple[int, ...] = (0, 1, 2)) -> Found:
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (torch.zeros(3, 3, 23, 17, dtype=torch.float64),))
    me, links = net.links.device, net.links
    torch.manual_seed(3 + me)
    data = loader() if me in readers else None
    if me == device:
        strike(links.control if method == "finish" else links, method, die, at=at)
    return told(net, loop(net, lambda: tz.feed(data, net)))


def only_one_reads(device: int, method: str, at: int) -> Found:
    return fed(device, method, at, readers=(0,))


def same(found: list[Any], members: tuple[int, ...]) -> None:
    plain = cnn()
    torch.manual_seed(3)
    losses = loop(plain, loader)
    done = [fate for fate in found if fate.kind == "done"]
    assert len(done) == len(members), found
    for fate in done:
        assert fate.what["members"] == members
        assert fate.what["losses"] == pytest.approx(losses, rel=1e-10)
        got = {name: torch.as_tensor(tensor) for name, tensor in fate.what["state"].items()}
        assert_close(got, state(plain))
    assert len({fate.what["bits"] for fate in done}) == 1


PLACES = {
    "first-batch": ("broadcast_bytes", 7),
    "handing-out": ("depart", 12),
    "having-handed-out": ("finish", 7),
    "forward": ("gather combine", 33),
    "backward": ("sum_later", 3),
}


@pytest.mark.parametrize("place", list(PLACES))
def test_another_reads_on_from_the_same_place(place: str) -> None:
    same(fates(3, fed, 0, *PLACES[place]), (1, 2))


@pytest.mark.parametrize("place", ["handing-out", "having-handed-out", "backward"])
def test_who_does_not_read_is_lost(place: str) -> None:
    same(fates(3, fed, 1, *PLACES[place]), (0, 2))


def test_nobody_else_has_the_data() -> None:
    for fate in fates(3, only_one_reads, 0, "depart", 12)[1:]:
        assert (fate.kind, fate.what) == ("raised", "PeerLost")
        assert "no other device has a loader" in fate.message
