"""What is lost, moved, drawn or changed around an operation: right numbers, or words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expendable import die, fates, strike
from plain import assert_close, cnn, state
from test_recovery import Found, told
from test_spares import SHAPE, loader, parts, step, validate, wait_until
from torch import nn
from torch.utils import _pytree as pytree

import terrazzo as tz
from terrazzo.errors import PeerLost
from terrazzo.runtime.relocation import Relocation
from terrazzo.runtime.turn import Turn

pytestmark = pytest.mark.timeout(240)

STEPS = 6
X = torch.zeros(SHAPE, dtype=torch.float64)


def quiet() -> dict[str, torch.Tensor]:
    model = cnn(bias=False)
    used = parts(model)
    for x, y in loader():
        step(model, x, y, used)
    return state(model)


def right(found: list[Any], count: int) -> None:
    done = [fate.what for fate in found if fate.kind == "done"]
    assert len(done) == count, found
    for one in done:
        assert_close({name: torch.as_tensor(t) for name, t in one["state"].items()}, quiet())


def left_over() -> None:
    """The usual last step of gradients that were added up comes after the loop."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(bias=False), (X,), layout="channels")
    used = parts(net)
    run = tz.Run(net, *used, loader=loader())
    for _ in run.epochs(1):
        for x, y in run.feed():
            step(net, x, y, used)
        used[0].step()
        if net.links.device == 1:
            die()
        validate(net)


def test_a_step_after_the_last_batch_is_not_undone_in_silence() -> None:
    for fate in fates(3, left_over)[::2]:
        assert (fate.kind, fate.what) == ("raised", "PeerLost")
        assert "changed after the last batch of run.feed()" in fate.message


def down_and_up(call: str) -> Found:
    """Of two devices with cut weights one is lost; alone nothing is cut; then another joins."""
    net = tz.parallelize(cnn(bias=False), (X,), layout="channels")
    used = parts(net)
    run = tz.Run(net, *used, loader=loader(), spare_every=2)
    links = net.links
    is_new = links.later is not None
    if is_new:
        wait_until(Path(call).exists)
    for _ in run.epochs(1):
        for x, y in run.feed():
            if run.steps == 2 and links.members[links.device] == 1:
                die()
            if run.steps == 3 and not is_new:
                Path(call).touch()
                wait_until(lambda: links.control.guests)
            step(net, x, y, used)
    assert links.devices == 2
    return told(net, [])


def test_a_device_joins_one_that_was_left_alone(tmp_path: Path) -> None:
    call, members = str(tmp_path / "call"), tmp_path / "members"
    right(fates(2, down_and_up, call, joining=members, timeout_s=60), 2)


def moving() -> Found:
    """A connection breaks when one device has moved its weights and another has not."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(bias=False), (X,), layout="channels")
    used = parts(net)
    run = tz.Run(net, *used, loader=loader(), spare_every=2)
    links, usual, left = net.links, Relocation.run, 1

    def broken(self: Relocation) -> None:
        nonlocal left
        usual(self)
        if left:
            left -= 1
            with links._guard():
                raise RuntimeError("the connection broke")

    for _ in run.epochs(1):
        for x, y in run.feed():
            step(net, x, y, used)
            if run.steps == 3 and not links.epoch:
                if links.device == 1:
                    Relocation.run = broken  # type: ignore[method-assign]
                net.change_plan(tz.plan(net, (X,), layout="channels:1,3"), used[0])
    assert links.epoch
    return told(net, [])


def test_half_made_moves_are_taken_back_everywhere() -> None:
    right(fates(2, moving), 2)


CUTTING = {
    "moving": ("links", "exchange", 2),
    "moved": ("net", "_make_ready", 1),
    "copying": ("spares", "_copied", 1),
}


def cutting(place: str) -> Found:
    """A change of plans cuts whole weights; one dies before there are copies, or just then."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(bias=False), (X,), layout="samples")
    used = parts(net)
    run = tz.Run(net, *used, loader=loader(), spare_every=2)
    for _ in run.epochs(1):
        for x, y in run.feed():
            step(net, x, y, used)
            if run.steps == 3:
                plan = tz.plan(net, (X,), layout="channels")
                if net.links.device == 1:
                    whose, method, at = CUTTING[place]
                    targets = {"links": net.links, "net": net, "spares": run.spares}
                    strike(targets[whose], method, die, at=at)
                net.change_plan(plan, used[0])
    return told(net, [])


@pytest.mark.parametrize("place", list(CUTTING))
def test_a_device_is_lost_before_new_parts_have_copies(place: str) -> None:
    found = fates(3, cutting, place)
    assert found[1].kind == "gone"
    right(found, 2)


def reading_state() -> Found:
    """One dies when the optimiser's state is brought together, after the weights were."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(bias=False), (X,), layout="channels")
    used = parts(net)
    run = tz.Run(net, *used, loader=loader(), spare_every=2)
    for _ in run.epochs(1):
        for x, y in run.feed():
            step(net, x, y, used)
            if run.steps == 3 and not net.links.epoch:
                if net.links.device == 1:
                    used[0].state_dict = die  # type: ignore[method-assign]
                run.state_dict()
    return told(net, [])


def test_a_device_is_lost_while_the_state_is_read() -> None:
    right(fates(3, reading_state), 2)


def drawing(call: str) -> dict[str, Any]:
    """The loop draws; a head is outside of net; one joins, then the one that reads is lost."""
    torch.manual_seed(7)
    random.seed(7)
    net = tz.parallelize(cnn(bias=False), (X,))
    head = nn.Linear(5, 5).double()
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], 0.05, momentum=0.9)
    run = tz.Run(net, optimizer, loader=loader())
    links, drawn = net.links, []
    is_new = links.later is not None
    if is_new:
        torch.manual_seed(99)
        nn.init.zeros_(head.weight)
        wait_until(Path(call).exists)
    for _ in run.epochs(2):
        for x, y in run.feed():
            if run.steps == 7 and not is_new:
                Path(call).touch()
                wait_until(lambda: links.control.guests)
            if run.steps == 10 and links.members[links.device] == 0:
                die()
            drawn.append((torch.rand(()).item(), random.random()))
            loss = F.cross_entropy(head(net(x.double() / 255)), y) * drawn[-1][0]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"drawn": drawn, "feeds": run._feeds, "head": head.weight.tolist()}


def test_what_the_loop_draws_goes_on_where_devices_come_and_go(tmp_path: Path) -> None:
    call, members = str(tmp_path / "call"), tmp_path / "members"
    found = fates(2, drawing, call, joining=members, timeout_s=60)
    assert [fate.kind for fate in found] == ["gone", "done", "done"], found
    old, new = found[1].what, found[2].what
    torch.manual_seed(7)
    random.seed(7)
    cnn(bias=False), nn.Linear(5, 5).double()
    wanted = [(torch.rand(()).item(), random.random()) for _ in range(12)]
    assert old["drawn"] == wanted and new["drawn"] == wanted[-len(new["drawn"]) :]
    assert old["head"] == new["head"] and old["feeds"] == new["feeds"] == 2


def ending(when: str) -> dict[str, Any]:
    """The one that reads is lost where an epoch ends: at its last batch, or before the next one."""
    tz.init(recover=True)
    random.seed(7)
    net = tz.parallelize(cnn(bias=False), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    run = tz.Run(net, optimizer, loader=loader())
    links, drawn, known = net.links, [], []
    for epoch in run.epochs(2):
        for x, y in run.feed():
            drawn.append(random.random())
            known.append(run._feed.where()["chance"] is not None)
            loss = F.cross_entropy(net(x.double() / 255), y) * drawn[-1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if when == "last" and run.steps == 5 and links.members[links.device] == 0:
                die()
        if when == "between" and epoch == 0 and links.members[links.device] == 0:
            die()
    return {"drawn": drawn, "known": known}


@pytest.mark.parametrize("when", ["last", "between"])
def test_the_reader_is_lost_where_an_epoch_ends(when: str) -> None:
    found = fates(3, ending, when)
    assert [fate.kind for fate in found] == ["gone", "done", "done"], found
    random.seed(7)
    wanted = [random.random() for _ in range(12)]
    for fate in found[1:]:
        assert fate.what["drawn"] == wanted
        assert all(fate.what["known"]), "a checkpoint would not know the order of the data"


@pytest.mark.parametrize("size", [4, 64], ids=["small", "large"])
def test_an_output_that_was_changed_is_not_given_to_others(size: int) -> None:
    net = tz.parallelize(nn.Conv2d(3, 4, 1).double(), (torch.zeros(2, 3, size, size).double(),))
    leaves, tree = pytree.tree_flatten(((torch.ones(2, 3, size, size).double(),), {}))
    turn = Turn(net, leaves, tree)
    with torch.no_grad():
        made = turn._attempt()
        give = turn._give(made)
        made.outputs[0].clamp_(min=0)
        if size == 4:
            give(0)  # it has a copy
        else:
            with pytest.raises(PeerLost, match="changed in place"):
                give(0)
