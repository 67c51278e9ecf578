"""Devices that die, stop or never come: the others are told who, and none waits for ever."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from expendable import Fate, die, fates, strike
from plain import batches, twin
from torch import nn

import terrazzo as tz
from terrazzo.errors import LaunchError, RunError
from terrazzo.runtime.start import join

pytestmark = pytest.mark.timeout(240)

X, Y = batches(1)[0]


def model() -> nn.Module:
    """Halos, statistics, and a weight gradient to sum: all the ways devices talk."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(nn.Conv2d(3, 3, 3, 2), *layers, nn.Flatten()).double()


def loop(net: nn.Module, steps: int = 4) -> None:
    for _ in range(steps):
        F.cross_entropy(net(X), Y).backward()


def killed(
    device: int, method: str, number: int = signal.SIGKILL, limit_s: float | None = None
) -> None:
    """``limit_s`` is that of all waits after the start, which may take longer."""
    net = tz.parallelize(model(), (X,))
    loop(net, 1)
    if limit_s is not None:
        net.links.timeout_s = net.links._wire.timeout_s = limit_s
        net.links.store.set_timeout(timedelta(seconds=limit_s))
    if net.links.device == device:
        strike(net.links, method, lambda: die(number), at=2)
    loop(net)


def told(found: list[Fate], *words: str) -> None:
    """Every survivor raised PeerLost with these words."""
    for fate in found:
        if fate.kind in ("gone", "silent"):
            continue
        assert (fate.kind, fate.what) == ("raised", "PeerLost"), fate
        for word in words:
            assert word in fate.message, fate


@pytest.mark.parametrize(
    ("device", "method"), [(1, "depart"), (0, "sum_later")], ids=["forward", "backward"]
)
def test_a_killed_device_is_named(device: int, method: str) -> None:
    found = fates(3, killed, device, method)
    assert [fate.kind for fate in found].count("gone") == 1
    assert found[device].kind == "gone"
    told(found, f"device {device}")


def test_nobody_else_is_named() -> None:
    """Those who only wait for one who noticed are woken, and answer the roll call."""
    found = fates(4, killed, 0, "depart")
    for fate in found[1:]:
        assert fate.message.startswith("device 0 stopped answering,"), fate


def test_a_stopped_device_is_named_after_the_timeout() -> None:
    found = fates(3, killed, 1, "depart", signal.SIGSTOP, 10.0, timeout_s=60, ignoring=[1])
    assert [fate.kind for fate in found] == ["raised", "silent", "raised"]
    told(found, "device 1")


def test_a_stopped_device_0_is_named_too() -> None:
    """Also where it is the one that everybody meets at."""
    found = fates(2, killed, 0, "depart", signal.SIGSTOP, 10.0, timeout_s=60, ignoring=[0])
    assert [fate.kind for fate in found] == ["silent", "raised"]
    told(found, "device 0")


def raises_between_calls() -> None:
    net = tz.parallelize(model(), (X,))
    loop(net, 1)
    if net.links.device == 1:
        raise ValueError("no more disk")
    loop(net)


def test_a_device_that_raises_and_ends_is_named() -> None:
    found = fates(3, raises_between_calls)
    assert found[1] == Fate("raised", "ValueError", "no more disk")
    told([found[0], found[2]], "device 1")


def raises_inside_a_call(device: int = 1) -> None:
    net = tz.parallelize(model(), (X,))
    if net.links.device == device:
        strike(net.links, "depart", out_of_memory, at=2)
    loop(net)


def out_of_memory() -> None:
    raise MemoryError("nothing left for 64 MiB")


@pytest.mark.parametrize("device", [0, 1])
def test_an_error_inside_a_call_reaches_the_others(device: int) -> None:
    found = fates(3, raises_inside_a_call, device)
    assert found.pop(device).what == "MemoryError"
    told(found, f"device {device} failed: MemoryError", "64 MiB")


def test_the_sentence_quotes_the_failed_device_and_says_where() -> None:
    """What failed, on whom, where this device was, and what to do; no place in torch's sources."""
    first, _, last = fates(3, raises_inside_a_call)
    for fate, me in ((first, 0), (last, 2)):
        sentence = (
            r"device 1 failed: MemoryError: nothing left for 64 MiB, in .+ on device "
            rf"{me} \(([^()]+)\)\. Start again without it, or look at its own output\."
        )
        match = re.fullmatch(sentence, fate.message)
        assert match, fate
        assert not re.search(r"\.(cc|cpp|h|py)\b", match[1]), match[1]


def fails_and_stays() -> None:
    """A script that catches the error, or a notebook: the process lives on."""
    try:
        raises_inside_a_call()
    except MemoryError:
        time.sleep(60)


def test_others_need_not_wait_until_a_failed_device_ends() -> None:
    found = fates(3, fails_and_stays, timeout_s=50, ignoring=[1])
    assert [fate.kind for fate in found] == ["raised", "silent", "raised"]
    told(found, "device 1 failed: MemoryError")


def ends_early() -> None:
    net = tz.parallelize(model(), (X,))
    loop(net, 1 if net.links.device == 1 else 3)
    if net.links.device == 1:
        sys.exit(0)


def test_a_device_that_ends_early_is_named() -> None:
    found = fates(2, ends_early)
    told(found[:1], "device 1")


def broken_for_good() -> str:
    """After a loss, every further call says so at once instead of waiting."""
    net = tz.parallelize(model(), (X,))
    if net.links.device == 1:
        die()
    messages = []
    for act in (lambda: net(X), lambda: net(X), net.align):
        with pytest.raises(RunError) as lost:
            act()
        messages.append(str(lost.value))
    assert all("device 1" in message for message in messages), messages
    return str(torch.distributed.is_initialized())


def test_calls_after_a_loss_fail_at_once() -> None:
    found = fates(2, broken_for_good)
    assert found[0] == Fate("done", "False")


def joined() -> int:
    return torch.distributed.get_world_size()


def test_a_device_that_never_comes_is_named() -> None:
    found = fates(3, joined, timeout_s=10, without=[1])
    for fate in found:
        assert (fate.kind, fate.what) == ("raised", "LaunchError")
        assert "device 1 of 3 did not join within 10 s" in fate.message


def twice() -> str:
    """Device 1 tries to join once more, as a second copy of it would."""
    if torch.distributed.get_rank() == 0:
        time.sleep(30)  # keeps the meeting point open
    torch.distributed.destroy_process_group()
    with pytest.raises(LaunchError) as refused:
        join(os.environ, timeout_s=20)
    return str(refused.value)


def test_two_processes_cannot_be_the_same_device() -> None:
    fate = fates(2, twice, ignoring=[0])[1]
    assert "another process has joined as device 1" in str(fate.what)


def test_without_device_0_there_is_no_meeting_point() -> None:
    (fate,) = fates(2, joined, timeout_s=2, without=[0])
    assert (fate.kind, fate.what) == ("raised", "LaunchError")
    assert "127.0.0.1" in fate.message
    assert "device 0" in fate.message


def changed_in_between(what: str, passes: int) -> float:
    """The relative error of a gradient when something changes between forward and backward."""
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).double()
    plain, net = twin(layers), tz.parallelize(layers, (X,), passes=passes)
    x = X.clone()
    plain(X).square().sum().backward()
    loss = net(x).square().sum()
    with torch.no_grad():
        (x if what == "input" else net.get_parameter(what)).mul_(0.5)
    loss.backward()
    right, found = plain[0].weight.grad, layers[0].weight.grad
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("what", ["input", "2.weight"])
def test_a_change_between_forward_and_backward_is_noticed(what: str, passes: int) -> None:
    """As in PyTorch, unless a copy was kept and the gradient is right."""
    for fate in fates(2, changed_in_between, what, passes):
        assert fate.kind == "raised" or fate.what < 1e-10, fate
