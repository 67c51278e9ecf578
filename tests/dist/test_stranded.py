"""Half of the devices are gone, with the tie-breaker: the others stop, and save what they have."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from expendable import die, fates, strike
from plain import assert_close, cnn, state
from test_spares import SHAPE, loader, parts, step, validate

import terrazzo as tz

pytestmark = pytest.mark.timeout(240)

X = torch.zeros(SHAPE, dtype=torch.float64)
BEHIND, SEED = -1, 5
PLACES = {"forward": "depart", "backward": "sum_later"}


def trained(folder: str, layout: str, place: str = "", at: int = 0) -> Any:
    """Device 0 dies in a step and takes device 1 along, if a place is told; else it goes on."""
    tz.init(recover=True)
    random.seed(SEED)
    drawn = []
    net = tz.parallelize(cnn(bias=False), (X,), layout=layout)
    used, links = parts(net), net.links
    own = Path(folder) / str(links.device)
    run = tz.Run(net, *used, loader=loader(), checkpoints=own, every=99)
    begun = 0 if place else run.resume()
    processes = [int(text) for text in links.gather_text(str(os.getpid()))]

    def die_together() -> None:
        os.kill(processes[1], signal.SIGKILL)
        die()

    for _ in run.epochs(1):
        for x, y in run.feed():
            drawn.append(random.random())  # as a script does that changes its pictures by chance
            if place and run.steps == at and links.device == 0:
                strike(links, PLACES[place], die_together, at=1)
            step(net, x, y, used)
        if at == BEHIND and links.device == 0:
            strike(links, PLACES[place], die_together, at=1)
        if at == BEHIND:
            validate(net)
    return begun, drawn, {name: tensor.numpy() for name, tensor in state(net).items()}


def stopped(folder: Path, *given: Any) -> list[str]:
    """What devices 2 and 3 say, of four."""
    found = fates(4, trained, str(folder), *given)
    assert [(fate.kind, fate.what) for fate in found[2:]] == [("raised", "PeerLost")] * 2, found
    for fate in found[2:]:
        assert "of 4 devices are gone" in fate.message
    return [fate.message for fate in found[2:]]


@pytest.mark.parametrize("place", list(PLACES))
def test_each_saves_the_last_step_for_itself(place: str, tmp_path: Path) -> None:
    for message in stopped(tmp_path, "tiles", place, 3):
        assert "The last checkpoint here is of step 3 in" in message
    assert sorted(path.parent.name for path in tmp_path.glob("*/step-00000003")) == ["2", "3"]
    model = cnn(bias=False)
    used, expected = parts(model), random.Random(SEED)
    draws = []
    for x, y in loader():
        draws.append(expected.random())
        step(model, x, y, used)
    for mine, theirs in (("0", "2"), ("1", "3")):  # two other devices go on
        (tmp_path / theirs).rename(tmp_path / mine)
    for fate in fates(2, trained, str(tmp_path), "tiles"):
        begun, drawn, found = fate.what
        assert begun == 3 and drawn == draws[3:], "random numbers go on where the step began"
        assert_close({n: torch.as_tensor(t) for n, t in found.items()}, state(model))


def test_nothing_is_saved_behind_the_last_batch(tmp_path: Path) -> None:
    """A validation, say: going on from there would make all that follows the loop once more."""
    for message in stopped(tmp_path, "tiles", "forward", BEHIND):
        assert "There is no checkpoint in" in message
    assert not list(tmp_path.glob("*/step-*"))


def test_nothing_is_saved_before_the_first_step(tmp_path: Path) -> None:
    for message in stopped(tmp_path, "tiles", "forward", 0):
        assert "There is no checkpoint in" in message
    assert not list(tmp_path.glob("*/step-*")), "there would be nothing to go on from"


def test_parts_of_weights_are_not_saved_as_whole_ones(tmp_path: Path) -> None:
    for message in stopped(tmp_path, "channels", "forward", 3):
        assert "There is no checkpoint in" in message
    assert not list(tmp_path.glob("*/step-*"))
