"""Plans that promise about as much are tried in the first steps, and the fastest goes on."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from devices import run_on
from expendable import die, fates, strike
from plain import assert_close, batches, state, train, twin
from quick_links import SHAPE, model, profile

import terrazzo as tz
from terrazzo.planner import plan_graph, wishes
from terrazzo.planner.search import Found, Tried
from terrazzo.records import Graph
from terrazzo.runtime import change, contest, trial
from terrazzo.runtime.trial import Trial
from terrazzo.runtime.turn import Turn

STEPS = 40
SLOW_S = 0.25


CUT, WHOLE = ("channels", "samples", "tiles"), ("samples", "tiles")
"""Kinds of rivals: if a device is lost, parts of weights are too."""


@contextlib.contextmanager
def short_turns(kinds: tuple[str, ...] = CUT) -> Iterator[None]:
    """Few steps for each plan, and rivals of these kinds."""

    def rivals(graph: Graph, found: Found, *_: Any, **__: Any) -> tuple[Tried, ...]:
        count = found.best.plan.devices
        plans = [plan_graph(graph, count, layout=kind, groups="each") for kind in kinds]
        return tuple(Tried(str(plan), plan, found.best.prediction) for plan in plans)

    with (
        mock.patch.object(wishes, "rivals", rivals),
        mock.patch.object(contest, "TURN_S", 0.0),
        mock.patch.object(contest, "SKIPPED", 1),
        mock.patch.object(contest, "LEAST", 2),
    ):
        yield


@contextlib.contextmanager
def slow_by(plan: tz.Plan) -> Iterator[None]:
    """Forward calls by one plan take long on device 0."""
    usual = Turn.run

    def run(self: Turn) -> Any:
        if torch.distributed.get_rank() == 0 and self.net.plan == plan:
            time.sleep(SLOW_S)
        return usual(self)

    with mock.patch.object(Turn, "run", run):
        yield


def tried(kind: type[torch.optim.Optimizer], options: dict[str, float]) -> dict[str, Any]:
    """Trains beside plain PyTorch while the first plan is the slowest of those tried."""
    plain, data = model(), batches(STEPS, SHAPE)
    with short_turns():
        net = tz.parallelize(twin(plain), (data[0][0],), profile=profile(3))
    first, cut = net.plan, set[str]()
    changed: list[int] = []
    plans: list[str] = []
    optimizers = [kind(each.parameters(), **options) for each in (plain, net)]

    def after(step: int) -> None:
        if net.keep_pace(optimizers[1]):
            changed.append(step)
        plans.append(net.plan.to_json())
        cut.update(net.homes)

    said = io.StringIO()
    with contextlib.redirect_stderr(said), short_turns(), slow_by(first):
        losses = [train(plain, optimizers[0], data), train(net, optimizers[1], data, after=after)]
    assert max(abs(a / b - 1) for a, b in zip(*losses, strict=True)) < 1e-10
    assert_close(state(net), state(plain))
    return {
        "first": first.to_json(),
        "plans": plans,
        "changed": changed,
        "said": said.getvalue(),
        "settled": net.is_settled,
        "cut": sorted(cut),
    }


def test_a_faster_plan_takes_the_place_of_the_first() -> None:
    one, *others = run_on(3, tried, torch.optim.Adam, {"lr": 1e-3}, timeout_s=240)
    assert all(other["plans"] == one["plans"] for other in others)
    assert all(other["changed"] == one["changed"] for other in others)
    assert one["plans"][-1] != one["first"]
    assert len(set(one["plans"])) > 2 and one["cut"], "several others, and weights were moved"
    assert "tried in" in one["said"] and "goes on" in one["said"]
    assert all(not other["said"] for other in others)  # one device speaks for all
    over = max(one["changed"])
    assert over < STEPS - 3 and one["settled"]
    assert len(set(one["plans"][over:])) == 1, "the trial is over, and is not begun again"


def refused() -> tuple[bool, str]:
    """An optimiser whose state cannot move: no other plan is tried, and training goes on."""
    data, said = batches(8, SHAPE), io.StringIO()
    with contextlib.redirect_stderr(said), short_turns():
        net = tz.parallelize(model(), (data[0][0],), profile=profile(3))
        optimizer = torch.optim.Adafactor(net.parameters())
        first = net.plan
        train(net, optimizer, data, after=lambda step: net.keep_pace(optimizer))
    return net.plan == first, said.getvalue()


def test_what_cannot_move_stays_where_it_is() -> None:
    one, *others = run_on(3, refused)
    assert one[0] and "no other plans are tried" in one[1]
    assert others == [(True, "")] * 2


def unlike(how: str) -> tuple[bool, str, int]:
    """Scripts whose steps are not what the example was: smaller inputs, an evaluation now and then,
    a result that is kept."""
    data, said = batches(45, SHAPE), io.StringIO()
    example = data[0][0]
    with contextlib.redirect_stderr(said), short_turns(), mock.patch.object(trial, "PATIENCE", 12):
        net = tz.parallelize(model(), (example,), profile=profile(3))
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        for step, (x, y) in enumerate(data):
            if how == "evaluates" and step % 15 == 0:
                with torch.no_grad():
                    net(x)
            x, y = (x[:3], y[:3]) if how == "smaller" else (x, y)
            out = net(x)
            torch.nn.functional.cross_entropy(out, y).backward()
            kept = net(x) if how == "keeps" else None  # an open call whenever plans could change
            optimizer.step()
            optimizer.zero_grad()
            net.keep_pace(optimizer)
            del kept
    return net.is_settled, said.getvalue(), len(net._plans.contenders)


@pytest.mark.parametrize("how", ["smaller", "evaluates"])
def test_steps_that_are_not_like_the_example_count(how: str) -> None:
    one, *others = run_on(3, unlike, how, timeout_s=240)
    assert one[0] and " plans tried in " in one[1], one
    assert all(other[:2] == (True, "") for other in others)


def test_a_trial_that_leads_nowhere_ends() -> None:
    one, *others = run_on(3, unlike, "keeps", timeout_s=240)
    assert one[0] and "no other plans are tried any more" in one[1]
    assert all(other[:2] == (True, "") for other in others)


def two_nets() -> list[tuple[int, bool]]:
    """Which net tries plans at every step, and whether both have come to an end."""
    data = batches(70, SHAPE)
    with short_turns(("samples",)):
        nets = [tz.parallelize(model(), (data[0][0],), profile=profile(3)) for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in nets]
        seen: list[tuple[int, bool]] = []
        for x, y in data:
            for net, optimizer in zip(nets, optimizers, strict=True):
                torch.nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            for net, optimizer in zip(nets, optimizers, strict=True):
                net.keep_pace(optimizer)
            seen.append((nets[0].links.trying or 0, all(net.is_settled for net in nets)))
    return seen


def test_two_nets_try_one_after_the_other() -> None:
    one, *others = run_on(3, two_nets, timeout_s=240)
    assert all(other == one for other in others)
    order = [number for number, _ in one if number]
    first, second = order[0], order[-1]
    assert first != second and order == sorted(order, key=[first, second].index)
    assert one[-1] == (0, True)


def anew() -> bool:
    """Connections that are made anew between a step and its end lose nothing but a lap."""
    data = batches(30, SHAPE)
    with short_turns(WHOLE):
        net = tz.parallelize(model(), (data[0][0],), profile=profile(3))
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)

        def after(step: int) -> None:
            if step == 4:
                net.follow([0, 1, 2])
            net.keep_pace(optimizer)

        train(net, optimizer, data, after=after)
    return net.is_settled


def test_connections_are_made_anew_in_a_trial() -> None:
    assert run_on(3, anew) == [True] * 3


def alone() -> tuple[int, bool]:
    """One device has nothing to try."""
    data = batches(3, SHAPE)
    net = tz.parallelize(model(), (data[0][0],), profile=profile(1))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    changed: list[bool] = []
    train(net, optimizer, data, after=lambda step: changed.append(net.keep_pace(optimizer)))
    return len(net._plans.contenders), any(changed)


def test_one_device_tries_nothing() -> None:
    assert run_on(1, alone) == [(0, False)]


def own_choice() -> tuple[bool, bool]:
    """Who changes the plan himself in the middle of a trial has chosen."""
    data = batches(14, SHAPE)
    with short_turns():
        net = tz.parallelize(model(), (data[0][0],), profile=profile(3))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    mine = tz.plan(net, (data[0][0],), layout="samples:3")
    changed: list[bool] = []

    def after(step: int) -> None:
        if step == 4:
            net.change_plan(mine, optimizer)
        changed.append(net.keep_pace(optimizer))

    with short_turns():
        train(net, optimizer, data, after=after)
    return net.plan == mine, any(changed[4:])


def test_a_plan_of_ones_own_ends_the_trial() -> None:
    assert run_on(3, own_choice) == [(True, False)] * 3


def losing(device: int, method: str, at: int) -> dict[str, Any]:
    """A device dies while plans are tried; the others plan anew, and try what that gives."""
    tz.init(recover=True)
    data, said = batches(STEPS, SHAPE), io.StringIO()
    with contextlib.redirect_stderr(said), short_turns(WHOLE):
        net = tz.parallelize(model(), (data[0][0],), profile=profile(3))
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        if net.links.device == device:
            strike(change if method == "_change" else Trial, method, die, at=at)
        train(net, optimizer, data, after=lambda step: net.keep_pace(optimizer))
    found = {name: tensor.numpy() for name, tensor in state(net).items()}
    return {
        "state": found,
        "members": net.links.members,
        "settled": net.is_settled,
        "said": said.getvalue(),
    }


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("device", "method", "at"),
    [(1, "begin", 5), (0, "lap", 4), (2, "heard", 7), (0, "words", 1), (0, "_change", 3)],
)
def test_a_device_is_lost_while_plans_are_tried(device: int, method: str, at: int) -> None:
    """Before it has told what is next, before it has begun with that, and behind."""
    found = fates(3, losing, device, method, at)
    assert [fate.kind for fate in found].count("done") == 2 and found[device].kind == "gone", found
    plain, data = model(), batches(STEPS, SHAPE)
    train(plain, torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9), data)
    left = [fate.what for fate in found if fate.kind == "done"]
    for one in left:
        assert len(one["members"]) == 2 and one["settled"]
        assert_close({n: torch.as_tensor(t) for n, t in one["state"].items()}, state(plain))
    assert sum("tried in" in one["said"] for one in left) == 1, "the two have tried theirs"
