"""A device that comes later receives everything, and the numbers stay those of a quiet run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expendable import die, fates
from plain import assert_close, cnn, state
from test_recovery import Found, told
from test_recovery_feed import loader
from torch import nn

import terrazzo as tz
from terrazzo.errors import UsageError
from terrazzo.members.control import Interrupted

pytestmark = pytest.mark.timeout(240)

EPOCHS = 3


def parts(model: nn.Module) -> tuple[Any, Any, nn.Module]:
    """An optimiser with a memory, a schedule, and an average of the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=4 * EPOCHS)
    return optimizer, scheduler, torch.optim.swa_utils.AveragedModel(model)


def step(model: nn.Module, x: Any, y: torch.Tensor, used: tuple[Any, Any, Any]) -> float:
    optimizer, scheduler, average = used
    loss = F.cross_entropy(model(x.double() / 255 - 0.5), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    average.update_parameters(model)
    return loss.item()


def quiet() -> tuple[nn.Module, nn.Module]:
    model = cnn(bias=False)
    used = parts(model)
    torch.manual_seed(3)
    for _ in range(EPOCHS):
        for x, y in loader():
            step(model, x, y, used)
    return model, used[2]


def joined(lost: int | None, call: str, trouble: str = "") -> Found:
    """The others call the newcomer in the second epoch; one may die later."""
    net = tz.parallelize(cnn(bias=False), (torch.zeros(3, 3, 23, 17, dtype=torch.float64),))
    used = parts(net)
    run = tz.Run(net, used[0], used[1], ema=used[2], loader=loader())
    torch.manual_seed(3)
    links, losses = net.links, []
    is_new = links.later is not None
    if is_new:
        wait_until(Path(call).exists)
    if is_new and trouble.startswith("differs"):
        next(net.parameters()).requires_grad_(False)
    if is_new and trouble == "differs-and-is-hung-up-on":
        links.gather_text = cut_off(links, links.gather_text)
    if links.device == 1 and trouble == "differs-and-one-is-late":
        links.recovery._turn_away = late(links, links.recovery._turn_away)
    for epoch in run.epochs(EPOCHS):
        for number, (x, y) in enumerate(run.feed()):
            if is_new and trouble == "fails":
                links.abort("ValueError: no room")
                raise ValueError("no room")
            if (epoch, number) == (1, 1) and not is_new:
                Path(call).touch()
                wait_until(lambda: links.control.guests)
            if (epoch, number) == (2, 0) and links.members[links.device] == lost:
                die()
            losses.append(step(net, x, y, used))
    average = {f"average {name}": t.numpy() for name, t in used[2].state_dict().items()}
    return told(net, losses) | {"average": average}


def late(links: Any, turn_away: Callable[..., None]) -> Callable[..., None]:
    """Hears of a device that differs when the others have turned it away already."""

    def attempt(*given: Any) -> None:
        wait_until(lambda: links.control.view.epoch != links.epoch)
        turn_away(*given)

    return attempt


def cut_off(links: Any, gather_text: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """The others have heard why it differs, and go on before it has heard them."""

    def attempt(text: str) -> list[str]:
        stories = gather_text(text)
        if text.startswith("call "):
            wait_until(lambda: links.control.is_left_behind)
            raise Interrupted("the others have hung up")
        return stories

    return attempt


def wait_until(there: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 40
    while not there() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("lost", [None, 0], ids=["all-stay", "the-first-dies-afterwards"])
def test_a_device_joins_between_two_batches(lost: int | None, tmp_path: Path) -> None:
    found = fates(
        2, joined, lost, str(tmp_path / "call"), joining=tmp_path / "members", timeout_s=60
    )
    done = [fate for fate in found if fate.kind == "done"]
    assert len(done) == (3 if lost is None else 2), [(f.kind, f.message) for f in found]
    model, average = quiet()
    for fate in done:
        assert len(fate.what["members"]) == len(done)
        got = {name: torch.as_tensor(tensor) for name, tensor in fate.what["state"].items()}
        assert_close(got, state(model))
        averaged = {f"average {name}": t for name, t in state(average).items()}
        told_average = {n: torch.as_tensor(t) for n, t in fate.what["average"].items()}
        assert_close(told_average, averaged)
    assert len({fate.what["bits"] for fate in done}) == 1
    assert len(found[2].what["losses"]) == 4 * EPOCHS - 6, "it began with the seventh batch"


@pytest.mark.parametrize(
    "trouble", ["differs", "differs-and-one-is-late", "differs-and-is-hung-up-on", "fails"]
)
def test_who_comes_and_fails_is_lost_and_the_others_go_on(trouble: str, tmp_path: Path) -> None:
    found = fates(
        2, joined, None, str(tmp_path / "call"), trouble, joining=tmp_path / "members", timeout_s=60
    )
    assert found[2].kind == "raised", found
    assert found[2].what == ("ValueError" if trouble == "fails" else "Disagreement")
    model, _ = quiet()
    for fate in found[:2]:
        assert fate.kind == "done", found
        assert fate.what["members"] == (0, 1)
        got = {name: torch.as_tensor(tensor) for name, tensor in fate.what["state"].items()}
        assert_close(got, state(model))


def resumed() -> None:
    """Stopped in the middle of an epoch and loaded elsewhere, the data goes on too."""
    model, average = quiet()
    net = tz.parallelize(cnn(bias=False), (torch.zeros(3, 3, 23, 17, dtype=torch.float64),))
    torch.manual_seed(3)
    used = parts(net)
    run = tz.Run(net, *used, loader=loader())
    for x, y in run.feed():
        step(net, x, y, used)
    run.epoch = 1
    for number, (x, y) in enumerate(run.feed()):
        step(net, x, y, used)
        if number == 1:
            break
    saved = run.state_dict()
    other = tz.parallelize(cnn(bias=False), (torch.zeros(3, 3, 23, 17, dtype=torch.float64),))
    torch.manual_seed(99)
    used = parts(other)
    again = tz.Run(other, *used, loader=loader())
    again.load_state_dict(saved)
    for _ in again.epochs(EPOCHS):
        for x, y in again.feed():
            step(other, x, y, used)
    assert_close(state(other), state(model))
    assert_close(state(used[2]), state(average))


def test_a_run_goes_on_from_its_state() -> None:
    for fate in fates(2, resumed_with_recovery):
        assert fate.kind == "done", fate


def resumed_with_recovery() -> None:
    tz.init(recover=True)
    resumed()


def test_only_what_has_a_state_is_registered() -> None:
    net = tz.parallelize(cnn(), (torch.zeros(1, 3, 23, 17, dtype=torch.float64),))
    with pytest.raises(UsageError, match="no state_dict"):
        tz.Run(net, [1, 2, 3])
