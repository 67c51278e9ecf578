"""Plans made by hand: saved, loaded, obeyed, checked, and refused where they do not fit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import run_on
from plain import assert_close, batches, twin
from torch import nn

import terrazzo as tz
from terrazzo.errors import PlanError, TerrazzoError, UsageError

X = batches(1)[0][0]


def small(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Four operators with windows; fewer cost less to export again and again."""
    torch.manual_seed(0)
    layers = OrderedDict(
        conv1=nn.Conv2d(3, 4, 3, 2, 1),
        norm1=nn.BatchNorm2d(4),
        pool=nn.MaxPool2d(3, 2, 1),
        conv2=nn.Conv2d(4, 4, 3, padding=1),
        conv3=nn.Conv2d(4, 4, 3),
    )
    return nn.Sequential(layers).to(dtype)


def obeyed(layout: str | tz.Layout, groups: Any, folder: str) -> int:
    """A plan goes to disk and back, is obeyed, and keeps the promise; gives its groups."""
    model = small()
    plan = tz.plan(model, (X,), devices=2, layout=layout, groups=groups)
    path = Path(folder) / f"plan-{torch.distributed.get_rank()}.json"
    plan.save(path)
    loaded = tz.Plan.load(path)
    assert loaded == plan
    net = tz.parallelize(twin(model), (X,), plan=loaded)
    assert net.plan == plan
    report = tz.check(model, (X,), plan=loaded)
    assert report.ok, report
    assert (report.split_flops == 0) == (layout == "whole")
    return len(plan.groups)


@pytest.mark.parametrize(
    ("layout", "groups", "count"),
    [
        (tz.Layout.tiles((5, 2), 1), 2, 2),
        ("tiles:1x2", ["pool", "conv2"], 3),
        ("whole", "one", 1),
    ],
)
def test_plans_are_saved_loaded_and_obeyed(
    layout: str | tz.Layout, groups: Any, count: int, tmp_path: Path
) -> None:
    assert run_on(2, obeyed, layout, groups, str(tmp_path)) == [count, count]


def planned_in_float32() -> None:
    """A check computes in float64, whatever the plan was made for."""
    model = small(torch.float32)
    plan = tz.plan(model, (X.float(),), devices=2, groups=2)
    report = tz.check(model, (X.float(),), plan=plan)
    assert report.ok, report


def test_a_plan_for_float32_is_checked_in_float64() -> None:
    run_on(2, planned_in_float32)


def other_mode_with_a_plan() -> None:
    """A plan made in train mode serves evaluation and other sizes too."""
    model = small()
    plain = twin(model)
    net = tz.parallelize(model, (X,), plan=tz.plan(model, (X,), groups=["pool"]))
    assert len(net.plan.groups) == 2
    for one in (plain, net):
        one.eval()
    other = batches(1, (1, 3, 14, 12))[0][0]
    for x in (X, other):
        assert_close({"y": net(x).detach()}, {"y": plain(x).detach()})
        assert len(net.plan.groups) == 2


def test_a_plan_serves_other_modes_and_sizes() -> None:
    run_on(2, other_mode_with_a_plan)


def refusal(kind: type[TerrazzoError], act: Callable[[], Any]) -> str:
    with pytest.raises(kind) as refused:
        act()
    return str(refused.value)


def wrong_plans() -> list[str]:
    model = small()
    plan = tz.plan(model, (X,), devices=2)
    other = nn.Sequential(nn.Conv2d(3, 4, 3)).double()
    return [
        refusal(PlanError, lambda: tz.parallelize(other, (X,), plan=plan)),
        refusal(
            PlanError, lambda: tz.parallelize(model, (X,), plan=tz.plan(model, (X,), devices=3))
        ),
        refusal(PlanError, lambda: tz.parallelize(model, (X,), layout="tiles:3x1")),
        refusal(PlanError, lambda: tz.parallelize(model, (X,), groups="pool,nowhere")),
        refusal(PlanError, lambda: tz.parallelize(model, (X,), groups=99)),
        refusal(UsageError, lambda: tz.parallelize(model, (X,), layout="tiles:2")),
        refusal(PlanError, lambda: tz.check(other, (X,), plan=plan)),
    ]


def test_wrong_plans_are_refused() -> None:
    words = ("tz.plan", "3 devices", "3 devices", "nowhere", "99", "tiles:2", "tz.plan")
    for messages in run_on(2, wrong_plans):
        for message, word in zip(messages, words, strict=True):
            assert word in message
