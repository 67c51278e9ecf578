"""Devices that die or fall silent while others go on: the numbers are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expendable import Fate, fates
from plain import assert_close, batches, bits, cnn, state, train
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.runtime.links import connect

pytestmark = pytest.mark.timeout(120)

STEPS = 6
DATA = batches(STEPS)
X, Y = DATA[0]
Found = dict[str, Any]


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def strike(target: Any, method: str, act: Callable[[], None], *, at: int) -> None:
    """Lets something happen at the n-th use of a method."""
    usual, count = getattr(target, method), 0

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            act()
        return usual(*args, **kwargs)

    setattr(target, method, struck)


def expected() -> dict[str, Tensor]:
    plain = cnn()
    train(plain, torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9), DATA)
    return state(plain)


def told(net: nn.Module, losses: list[float]) -> Found:
    links = net.links
    return {
        "state": {name: tensor.numpy() for name, tensor in state(net).items()}, "bits": bits(net), "losses": losses,
        "members": links.members, "calls": (net.calls, net.commits),
    }  # fmt: skip


def agreed(found: list[Fate], members: tuple[int, ...]) -> None:
    """All these went on together, to the end and to the right numbers."""
    done = {d: fate for d, fate in enumerate(found) if fate.kind == "done"}
    assert tuple(done) == members, found
    right = expected()
    for fate in done.values():
        assert fate.what["members"] == members
        found_state = {name: torch.as_tensor(t) for name, t in fate.what["state"].items()}
        assert_close(found_state, right)
    assert len({fate.what["bits"] for fate in done.values()}) == 1
    assert len({fate.what["calls"] for fate in done.values()}) == 1


def training(device: int, method: str, at: int, number: int = signal.SIGKILL) -> Found:
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if net.links.device == device:
        strike(net.links, method, lambda: die(number), at=at)
    return told(net, train(net, optimizer, DATA))


PLACES = {
    "first-forward": ("exchange", 1),
    "forward": ("exchange", 7),
    "backward": ("sum_later", 3),
    "statistics": ("gather", 20),
    "notes": ("gather", 31),
}


@pytest.mark.parametrize("device", [0, 2])
@pytest.mark.parametrize("place", list(PLACES))
def test_a_killed_device_does_not_change_the_numbers(device: int, place: str) -> None:
    found = fates(3, training, device, *PLACES[place])
    assert found[device].kind == "gone"
    agreed(found, tuple(d for d in range(3) if d != device))
