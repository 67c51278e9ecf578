"""Devices that die or fall silent while others go on: the numbers are those of a quiet run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expendable import Fate, die, fates, strike
from plain import assert_close, batches, bits, cnn, state, train
from torch import Tensor, nn

import terrazzo as tz
from terrazzo.members import health
from terrazzo.runtime.links import connect

pytestmark = pytest.mark.timeout(240)

STEPS = 6
SILENT_S = 5.0
DATA = batches(STEPS)
X, Y = DATA[0]
Found = dict[str, Any]


def expected() -> dict[str, Tensor]:
    plain = cnn()
    train(plain, torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9), DATA)
    return state(plain)


def told(net: nn.Module, losses: list[float]) -> Found:
    links = net.links
    return {
        "state": {name: tensor.numpy() for name, tensor in state(net).items()},
        "bits": bits(net),
        "losses": losses,
        "members": links.members,
        "reasons": dict(links.control.reasons),
        "calls": (net.calls, net.commits),
    }


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


def training(device: int, method: str, at: int) -> Found:
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if net.links.device == device:
        strike(net.links, method, die, at=at)
    return told(net, train(net, optimizer, DATA))


PLACES = {
    "first-forward": ("depart", 1),
    "forward": ("depart", 7),
    "backward": ("sum_later", 3),
    "statistics": ("gather combine", 20),
    "notes": ("gather combine", 31),
}


@pytest.mark.parametrize("device", [0, 2])
@pytest.mark.parametrize("place", list(PLACES))
def test_a_killed_device_does_not_change_the_numbers(device: int, place: str) -> None:
    found = fates(3, training, device, *PLACES[place])
    assert found[device].kind == "gone"
    agreed(found, tuple(d for d in range(3) if d != device))


def finishing(device: int, number: int) -> Found:
    """Dies when the others may or may not have its last note."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if net.links.device == device:
        strike(net.links.control, "finish", die, at=number)
    return told(net, train(net, optimizer, DATA))


def alarmed_behind_the_last_operator(device: int, number: int) -> Found:
    """All have computed everything when one dies: what they have written must not count twice."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    control = net.links.control

    def wait_for_the_alarm() -> None:
        deadline = time.monotonic() + 20
        while control.view.epoch == 0 and not control._council.seat.alarmed:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    act = die if net.links.device == device else wait_for_the_alarm
    strike(control, "finish", act, at=number)
    return told(net, train(net, optimizer, DATA))


@pytest.mark.parametrize("number", [3, 4], ids=["forward", "backward"])
def test_buffers_and_numbers_count_a_batch_once(number: int) -> None:
    found = fates(3, alarmed_behind_the_last_operator, 1, number)
    agreed(found, (0, 2))
    assert found[0].what["calls"] == (STEPS, STEPS)


@pytest.mark.parametrize("number", [3, 4], ids=["after-forward", "after-backward"])
def test_a_device_killed_when_it_has_finished_before_others(number: int) -> None:
    agreed(fates(3, finishing, 1, number), (0, 2))


def stepping(device: int) -> Found:
    """Dies between its optimiser's step and that of the others, and between two steps."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    me = net.links.device
    if me == device:
        strike(optimizer, "step", die, at=3)
    else:
        strike(optimizer, "step", lambda: time.sleep(0.3 * me), at=3)
    return told(net, train(net, optimizer, DATA))


def test_a_device_killed_between_the_steps_of_optimisers() -> None:
    agreed(fates(3, stepping, 0), (1, 2))


def validating(device: int) -> Found:
    """A validation after every second step; one dies in the middle of the second."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    seen: list[float] = []

    def validate(step: int) -> None:
        if step % 2:
            if step == 3 and net.links.device == device:
                strike(net.links, "depart", die, at=2)
            net.eval()
            with torch.no_grad():
                seen.append(float(F.cross_entropy(net(X), Y)))
            net.train()

    losses = train(net, optimizer, DATA, after=validate)
    return told(net, [*losses, *seen])


def test_a_device_killed_in_validation() -> None:
    found = fates(3, validating, 0)
    agreed(found, (1, 2))
    assert found[1].what["losses"] == found[2].what["losses"]


def test_a_silent_device_is_left_behind_and_named() -> None:
    found = fates(3, falling_silent, 1, ignoring=[1])
    assert found.pop(1).kind == "silent"
    for fate in found:
        assert fate.what["members"] == (0, 2)
        assert "was silent for" in fate.what["reasons"][1]


def falling_silent(device: int, until: str = "") -> Found:
    """Stands still for ever, or until the others have gone on, who make that file: then it goes on
    as if nothing had happened. How silent others may be counts when all are at work."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    health.MOST_SILENT_S = SILENT_S

    def stop() -> None:
        me = os.getpid()
        if until and os.fork() == 0:  # somebody must wake it up
            while not Path(until).exists():
                time.sleep(0.05)
            os.kill(me, signal.SIGCONT)
            os._exit(0)
        die(signal.SIGSTOP)

    if net.links.device == device:
        strike(net.links, "depart", stop, at=7)
    losses = train(net, optimizer, DATA)
    if until:
        Path(until).touch()
    return told(net, losses)


def test_a_device_that_comes_back_too_late_does_not_go_on(tmp_path: Path) -> None:
    found = fates(3, falling_silent, 2, str(tmp_path / "gone on"))
    agreed(found[:2], (0, 1))
    assert (found[2].kind, found[2].what) == ("raised", "PeerLost")


def test_the_last_one_left_does_not_wait_for_a_silent_one() -> None:
    """It decides alone, at once, and must be told so where it waits for the other's data."""
    found = fates(2, falling_silent, 1, timeout_s=190, ignoring=(1,))
    agreed(found[:1], (0,))


def two_of_four(first: int, second: int) -> Found:
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if net.links.device == first:
        strike(net.links, "depart", die, at=7)
    if net.links.device == second:
        strike(net.links.control, "next_view", die, at=1)
    return told(net, train(net, optimizer, DATA))


def test_a_second_device_is_lost_in_the_recovery_from_the_first() -> None:
    agreed(fates(4, two_of_four, 3, 2), (0, 1))


def test_half_goes_on_with_the_tie_breaker_only() -> None:
    agreed(fates(2, training, 1, "depart", 7), (0,))
    lost = fates(2, training, 0, "depart", 7)[1]
    assert (lost.kind, lost.what) == ("raised", "PeerLost")
    assert "1 of 2 devices are gone (device 0: lost its connection" in lost.message
    assert "half with device 0" in lost.message


def reading(device: int) -> Found:
    tz.init(recover=True, reader=1)
    return training(device, "depart", 7)


def test_the_device_that_reads_breaks_ties() -> None:
    agreed(fates(2, reading, 0), (1,))


def raising(device: int) -> None:
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    if net.links.device == device:
        strike(net.links, "depart", out_of_memory, at=7)
    train(net, torch.optim.SGD(net.parameters(), 0.1), DATA)


def out_of_memory() -> None:
    raise MemoryError("nothing left for 64 MiB")


def test_a_script_that_raises_ends_the_run() -> None:
    """What fails by itself would fail again: nobody goes on without it."""
    found = fates(3, raising, 1)
    assert found.pop(1).what == "MemoryError"
    for fate in found:
        assert (fate.kind, fate.what) == ("raised", "PeerLost")
        assert "device 1 failed: MemoryError: nothing left for 64 MiB" in fate.message


def breaking(times: int) -> Found:
    """On one device the same operation fails again and again, as where memory is short."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    links, left = net.links, times
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    usual = links.depart

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left and net.calls == 3:
            left -= 1
            with links._guard():
                raise RuntimeError("can't allocate memory: 64 MiB")
        return usual(*args, **kwargs)

    if links.device == 1:
        links.depart = failing
    return told(net, train(net, optimizer, DATA))


def test_an_operation_is_not_begun_again_for_ever() -> None:
    found = fates(2, breaking, 1000)
    assert [(fate.kind, fate.what) for fate in found] == [("raised", "PeerLost")] * 2
    assert "though none of them was lost (can't allocate memory" in found[1].message


def cut() -> None:
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,), layout="channels")
    assert net.homes
    if net.links.device == 1:
        strike(net.links, "depart", die, at=7)
    train(net, torch.optim.SGD(net.parameters(), 0.1), DATA)


def test_a_lost_part_of_a_weight_is_said() -> None:
    for fate in fates(3, cut)[::2]:
        assert (fate.kind, fate.what) == ("raised", "PeerLost")
        assert "is cut over the devices" in fate.message


def planning(device: int, method: str, at: int, plan: bool) -> Found:
    """Dies while the model is exported, planned for or shared."""
    tz.init(recover=True)
    links = connect()
    if links.device == device:
        strike(links, method, die, at=at)
    model = cnn()
    given = tz.plan(model, (X,), layout="tiles:3x1") if plan else None
    net = tz.parallelize(model, (X,), given)
    return told(net, train(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), DATA))


@pytest.mark.parametrize(
    ("device", "method", "at", "plan"),
    [(0, "broadcast", 5, False), (1, "broadcast_bytes", 2, True), (2, "gather", 4, False)],
    ids=["sharing", "exporting", "agreeing"],
)
def test_a_device_killed_in_parallelize(device: int, method: str, at: int, plan: bool) -> None:
    found = fates(3, planning, device, method, at, plan)
    assert found[device].kind == "gone"
    agreed(found, tuple(d for d in range(3) if d != device))


def together(device: int) -> Found:
    """Dies while all agree on a number, compare weights, make a plan, and change plans."""
    tz.init(recover=True)
    net = tz.parallelize(cnn(), (X,))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    links, seen = net.links, []
    if links.device == 3:
        strike(links, "broadcast", die, at=1)
    seen.append(tz.agree(7.5 + links.device))
    if links.members[links.device] == 4:
        strike(links, "gather", die, at=2)
    net.align()
    if links.members[links.device] == 5:
        strike(links, "gather", die, at=1)
    tz.plan(net, (X,), layout="whole")

    def change(step: int) -> None:
        if step == 2:
            plan = tz.plan(net, (X,), layout=f"samples:{links.devices}")
            if links.members[links.device] == device:
                strike(links, "gather", die, at=2)
            net.change_plan(plan, optimizer)

    return told(net, train(net, optimizer, DATA, after=change)) | {"seen": seen}


def test_devices_killed_while_all_agree_align_and_change_plans() -> None:
    found = fates(6, together, 1)
    agreed(found, (0, 2))
    assert [fate.what["seen"] for fate in found if fate.kind == "done"] == [[7.5], [7.5]]
